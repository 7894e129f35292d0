"""Mode auto: the mode, the interval between rounds and the codec, computed from measurements of the rounds.

1. Each peer measures its batches and exchanges (`Adaptation`), and puts the figures into its claims.
2. All members of a round see the same claims. From these and the present pace they `choose` the same next
   pace. Each figure is the median of the members' claims: no slow, new or lying peer counts for more.
3. The rule prefers the pace that changes training least: `sync` if training would wait for no more than the
   configured share of its time, else `overlap` in the least lossy codec whose exchange fits into one step,
   else `streaming` with the fewest local steps that an exchange fits into. It goes to a lighter pace when the
   present one does not fit any more, and to a heavier one only if that would fit easily.
4. There is no way back from local steps, because each peer's inner optimizer then has a state of its own. So
   they come only if a third of the members are too slow for common steps, or if the lightest pace
   without local steps was measured and does not fit either.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import replace

import torch

from trahiv_cli.progress.pace import Pace
from trahiv_cli.rounds.claims import Measured, Outcome, usual_rate
from trahiv_cli.rounds.codecs import CODECS
from trahiv_cli.shared_memory import JoinerActivity

LADDER = (10, 20, 50, 100, 200, 500, 1000)  # local steps to choose from; no study has measured more
CODECS_BY_LOSS = ("float16", "uniform8", "blockwise4")
START_CODEC = "uniform8"  # in mode overlap, before anything was measured: it does little harm on any link

RECENT = 3
"""Last exchanges, of which even the slowest must leave room for a heavier pace. With one alone a swarm would
go back and forth: one link gave 33, 10 and 34 Mbit/s in three rounds beside other work. A lighter pace needs
one."""

DISTURBED_AT_MOST = 50  # rounds in a row that are not measured, because of another peer's download


class Adaptation:
    """Measures this peer, and chooses the pace after each committed round.

    `SwarmOptimizer` creates one. Training may wait for rounds for `share` of its time; None: the
    pace stays. `num_values` values are trained, with `target_batch_size` samples of all peers for a step.
    """

    def __init__(
        self, share: float | None, activity: JoinerActivity, num_values: int, target_batch_size: int
    ) -> None:
        self.measured = Measured()  # of this peer's own speed and link
        self._share = share
        self._activity = activity
        self._num_values = num_values
        self._target = target_batch_size
        # The speed is the median of 20 batches: an evaluation between two of them does not count.
        self._seconds_per_sample: deque[float] = deque(maxlen=20)
        self._left_step_at: float | None = None
        self._rates: deque[float] = deque(maxlen=RECENT)
        self._num_disturbed = 0
        self._has_told_pace = False

    def end_batch(self, num_samples: int) -> float:
        """Record a batch, and return the seconds since `begin_batch`; 0 if it was the first."""
        if self._left_step_at is None:
            return 0.0
        seconds = time.monotonic() - self._left_step_at
        self._seconds_per_sample.append(seconds / num_samples)
        return seconds

    def begin_batch(self) -> None:
        """Note that the next batch begins."""
        self._left_step_at = time.monotonic()

    @property
    def seconds_per_sample(self) -> float:
        """The median of the last batches, without waits; 0 before the first."""
        return statistics.median(self._seconds_per_sample or [0.0])

    def measure_speed(self) -> None:
        """Record this peer's training speed."""
        per_sample = self.seconds_per_sample
        speed = 1 / per_sample if per_sample else 0.0
        self.measured = replace(self.measured, samples_per_second=speed)

    def measure(self, outcome: Outcome) -> None:
        """Record this peer's training speed and a round's exchange."""
        self.measure_speed()
        speed = self.measured.samples_per_second
        if len(outcome.group) < 2:
            return
        # An exchange beside a joiner's download takes longer than the next will, unless downloads never end.
        is_disturbed = self._activity.was_there_since(time.monotonic() - outcome.exchange_s)
        self._num_disturbed = (self._num_disturbed + 1) % (DISTURBED_AT_MOST + 1) if is_disturbed else 0
        if not self._num_disturbed:
            # One member alone does not decide the pace: without it the exchange would have been shorter.
            is_for_one = 2 * outcome.longest_wait_s > outcome.exchange_s
            took_s = outcome.exchange_s - (outcome.longest_wait_s if is_for_one else 0.0)
            latest = Measured(speed, took_s, outcome.parts_sent, outcome.parts_received)
            if latest.is_known:
                self._rates.append(latest.rate)
            lowest = min(self._rates) if len(self._rates) == RECENT else 0.0
            self.measured = replace(latest, lowest_rate=lowest)

    def choose(self, present: Pace, outcome: Outcome) -> tuple[Pace, str]:
        """Choose the pace after a round of the `present` one, which stays if too few members have figures.

        Returns the next pace, the same for all members, and a paragraph with the figures, or "".
        """
        said = outcome.measured
        samples = outcome.samples
        known = {peer: one for peer, one in said.items() if one.is_known and samples.get(peer)}
        idle = set() if present.has_local_steps else idle_members(outcome)
        num_training = len(said) - len(idle)
        # Three members must have figures, if there are as many: of two, one may be a lie.
        is_founded = len(known) >= max(2, min(3, num_training)) and 2 * len(known) > num_training
        if self._share is None or not is_founded:
            return present, ""
        trained_s = statistics.median(samples[peer] / one.samples_per_second for peer, one in known.items())
        due = present.steps_per_round * self._target
        # Samples beyond twice the due number do not make steps look shorter: they were trained while there
        # was no group, or only claimed.
        step_s = trained_s * self._target / min(max(sum(samples.values()), due), 2 * due)
        waits_s = self._share * step_s
        slow_s = 0.0  # of one sample of the members that can't keep up, if they are enough
        if idle and 3 * len(idle) >= len(said):
            slow_s = statistics.median_low(1 / said[peer].samples_per_second for peer in idle)
        rate = usual_rate(known.values())
        lowest = min(rate, statistics.median_low(one.lowest_rate for one in known.values()))
        round_trips_s = statistics.median(one.round_trips_s for one in known.values())
        values_each_way = 2 * (len(said) - 1) / len(said) * self._num_values

        def size(pace: Pace) -> float:
            """Return the bytes each way of one exchange."""
            codec = CODECS[pace.codec or START_CODEC]()
            bytes_per_value = codec.encoded_bytes(2**20, torch.float32) / 2**20
            return values_each_way / pace.num_fragments * bytes_per_value

        def fits(pace: Pace, rate: float = rate, share: float = 0.9) -> bool:
            """Return whether an exchange takes at most this share of the available time."""
            room_s = waits_s if pace.mode == "sync" else pace.steps_per_round * step_s
            # Slow members miss one round at most, which is kept for them.
            if pace.steps_per_round * step_s < 2 * slow_s:
                return False
            return rate > 0 and round_trips_s + size(pace) / rate <= share * room_s

        sent = statistics.median(one.bytes_each_way for one in known.values())
        # Peers' shares differ by less than half, and the lossier of two codecs sends half as much.
        is_measured = sent <= 1.5 * size(present)
        candidates = _candidates(present, is_measured=is_measured, has_slow=slow_s > 0)
        if fits(present):
            # A heavier pace must fit easily, at the lowest recent rate: one exchange's figures are accurate
            # to a third, and the latest may not repeat.
            heavier = candidates[: candidates.index(present)] if present in candidates else candidates
            best = next((pace for pace in heavier if fits(pace, lowest, 0.6)), present)
        else:
            best = next(filter(fits, candidates), candidates[-1])
        if best == present and self._has_told_pace:
            return best, ""
        self._has_told_pace = True
        figures = f"A step of {self._target} samples takes {step_s:.1f} s; "
        return best, figures + _describe(best, rate, round_trips_s + size(best) / rate)


def _describe(pace: Pace, rate: float, exchange_s: float) -> str:
    local = f", {pace.local_steps} local steps" if pace.has_local_steps else ""
    return (
        f"an exchange went at {8 * rate / 1e6:.1f} Mbit/s each way. Mode {pace.mode}, codec {pace.codec}"
        f"{local}: an exchange of {exchange_s:.1f} s every {pace.steps_per_round} step(s)."
    )


def idle_members(outcome: Outcome) -> set[str]:
    """Return the ids of members that took part without samples, to report their speed (`Stepper`).

    A member that is not far slower than most is left out: it has only downloaded the state.
    """
    rates = {peer: one.samples_per_second for peer, one in outcome.measured.items() if one.samples_per_second}
    slow = statistics.median(rates.values() or [0.0]) / 2
    return {peer for peer, rate in rates.items() if rate <= slow and outcome.samples.get(peer) == 0}


def _candidates(present: Pace, *, is_measured: bool, has_slow: bool) -> list[Pace]:
    """Return the possible next paces, from the one that changes training least to the one that sends least.

    `is_measured` says whether the members' figures are of the present codec, rather than of the one before;
    `has_slow`, whether local steps are needed whatever the codec.
    """
    codecs = (present.codec,) if present.keeps_codec else CODECS_BY_LOSS
    streaming = [
        replace(present, mode="streaming", local_steps=steps, codec=codec)
        for steps in LADDER
        for codec in codecs[-2:]  # local steps do not need the most exact codec
    ]
    if present.has_local_steps:
        return streaming
    overlap = [replace(present, mode="overlap", codec=codec) for codec in codecs]
    common = [replace(present, mode="sync", codec=codecs[0]), *overlap]
    return [*common, *streaming] if has_slow or (present == common[-1] and is_measured) else common
