"""Mode auto: what a swarm averages, how often and in which codec, reckoned from what its rounds measured.

Each peer says in its claim how fast it trains and what its last exchange took. All members of a round see
the same claims, and from these and the present pace all reckon the same next one: it takes effect when the
round is committed. A peer that was not in it takes over the state, and with it the pace.

All members of a round train for as long before it, and as an exchange ends for nobody before the slowest
link has carried its share, it takes all of them about as long, too. So each figure is the median of what the
members claim, and that of one peer, slow, new or lying, is as good as any other's.

The rule prefers what changes training least: `sync` if training would wait for no more than the stated share
of its time, else `overlap` in the least lossy codec whose exchange fits into one step, else `streaming` with
the fewest local steps that an exchange fits into. It goes to a lighter pace when the present one does not fit
any more, and to a heavier one only if that would fit easily. From local steps it does not go back to common
ones: by then each peer's inner optimizer has a state of its own. So it goes over to them only from the
lightest pace without, once that was measured and does not fit either. A codec that the recipe names stays.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from trahiv_cli.optim.codecs import CODECS
from trahiv_cli.optim.pace import Pace

FITS = 0.9
"""An exchange fits beside training if it takes no more than this share of the time between two."""

FITS_EASILY = 0.6
"""The share of the room that a heavier pace may take: figures of one exchange are good to a third."""

RECENT = 3
"""Exchanges of which the slowest must leave room for a heavier pace. One alone would have a swarm go there
and back: one link gave 33, 10 and 34 Mbit/s in three rounds beside other work. A lighter pace needs one."""

LADDER = (10, 20, 50, 100, 200, 500, 1000)
"""Local steps to choose from. More than 1,000 let peers drift apart for more than any study has measured."""

CODECS_BY_LOSS = ("float16", "uniform8", "blockwise4")

START_CODEC = "uniform8"
"""In mode overlap, before anything was measured: it does little harm, on any link."""

ROUND_TRIPS_S = 0.5
"""Seconds of an exchange that do not depend on how much is sent, on a distant link; half of a quicker one."""

WINDOW_BYTES = 14_600
"""TCP sends this much before it waits for an answer (RFC 6928): less takes as long on any link."""

OVERSHOOT = 2
"""What a round brought beyond so many times what was due does not make its steps look shorter: it was trained
while there was no group, or only claimed, and the next round is measured again."""

SENT_ALIKE = 1.5
"""An exchange was one of a codec if no more was sent than so many times what that codec makes of the values.
Shares of peers differ by less, and of two codecs the lossier one sends half as much."""

KNOWN_AT_LEAST = 3
"""Members whose figures are asked for, where there are so many: of two, one may be what a liar says."""

SAMPLE_VALUES = 2**20
"""Values that codecs are compared by."""


@dataclass(frozen=True)
class Measured:
    """What a peer knows of its own pace and link."""

    samples_per_second: float = 0.0
    """Samples that it trains in a second, waits left out; 0 if it does not know yet."""

    exchange_s: float = 0.0
    """What its last exchange took, without finding the group; 0 if it does not know yet."""

    bytes_sent: int = 0
    """Encoded parts that it sent in that."""

    bytes_received: int = 0

    lowest_rate: float = 0.0
    """The lowest `rate` of its last `RECENT` exchanges; 0 if there were fewer."""

    @property
    def is_known(self) -> bool:
        """Whether it says anything."""
        return self.samples_per_second > 0 and self.exchange_s > 0 and self.bytes_each_way > 0

    @property
    def bytes_each_way(self) -> int:
        """Bytes in the direction with more of them."""
        return max(self.bytes_sent, self.bytes_received)

    @property
    def is_of_link(self) -> bool:
        """Whether its last exchange was large enough to say how fast the link is."""
        return self.is_known and self.bytes_each_way > WINDOW_BYTES

    @property
    def round_trips_s(self) -> float:
        """What its last exchange would have taken without anything to send, about."""
        return min(ROUND_TRIPS_S, self.exchange_s / 2)

    @property
    def rate(self) -> float:
        """Bytes a second, each way, that its last exchange came to, round trips left out."""
        return self.bytes_each_way / (self.exchange_s - self.round_trips_s)

    def to_wire(self) -> list[float]:
        """Return it as a list that MessagePack carries."""
        return [
            float(self.samples_per_second),
            float(self.exchange_s),
            float(self.bytes_sent),
            float(self.bytes_received),
            float(self.lowest_rate),
        ]

    @classmethod
    def from_wire(cls, data: object) -> Measured:
        """Read what `to_wire` gave.

        Raises:
            ValueError: it is not that.
        """
        match data:
            case [float(), float(), float(), float(), float()] if all(
                math.isfinite(value) and 0 <= value < 1e15 for value in data
            ):
                speed, seconds, sent, received, lowest = data
                return cls(speed, seconds, int(sent), int(received), lowest)
        raise ValueError("not a measurement")


@dataclass(frozen=True)
class Choice:
    """A pace and what speaks for it."""

    pace: Pace
    reason: str = ""
    """One paragraph with the figures."""

    is_founded: bool = True
    """Whether most members had figures."""


def start(pace: Pace, codec: str | None) -> Pace:
    """Return the pace that a swarm in mode auto begins with.

    Args:
        pace: what the recipe says of local steps, should it come to them.
        codec: that the recipe names, which stays; None: auto chooses.
    """
    return replace(pace, mode="overlap", codec=codec or START_CODEC, keeps_codec=codec is not None)


def usual_rate(measured: Iterable[Measured]) -> float:
    """The median rate of those that know theirs, the lower one of two, in bytes a second; 0 if none does."""
    return statistics.median_low([said.rate for said in measured if said.is_known] or [0.0])


def choose(
    present: Pace,
    measured: Mapping[str, Measured],
    samples: Mapping[str, int],
    *,
    num_values: int,
    target_batch_size: int,
    share: float,
) -> Choice:
    """Choose the pace after a committed round; the same for all that were in it.

    Args:
        present: of that round.
        measured: what its members claimed, by peer id.
        samples: that they brought.
        num_values: trained values.
        target_batch_size: samples of a step.
        share: of its time, that training may wait for rounds.

    Returns:
        The next pace, `present` itself if nothing speaks for another.
    """
    known = {peer: said for peer, said in measured.items() if said.is_known and samples.get(peer)}
    if len(known) < max(2, min(KNOWN_AT_LEAST, len(measured))) or 2 * len(known) <= len(measured):
        return Choice(present, is_founded=False)
    trained_s = statistics.median(samples[peer] / said.samples_per_second for peer, said in known.items())
    due = present.steps_per_round * target_batch_size
    brought = min(max(sum(samples.values()), due), OVERSHOOT * due)
    step_s = trained_s * target_batch_size / brought
    rate = usual_rate(known.values())
    round_trips_s = statistics.median(said.round_trips_s for said in known.values())
    each_way = 2 * (len(measured) - 1) / len(measured) * num_values

    def takes(pace: Pace, rate: float = rate) -> float:
        """Seconds of one exchange."""
        return round_trips_s + each_way / pace.num_fragments * _bytes_per_value(pace.codec) / rate

    def fits(pace: Pace) -> bool:
        return takes(pace) <= FITS * room(pace)

    def fits_easily(pace: Pace) -> bool:
        lowest = min(rate, statistics.median_low(said.lowest_rate for said in known.values()))
        return lowest > 0 and takes(pace, lowest) <= FITS_EASILY * room(pace)

    def room(pace: Pace) -> float:
        """Seconds that an exchange may take."""
        return share * step_s if pace.mode == "sync" else pace.steps_per_round * step_s

    sent = statistics.median(said.bytes_each_way for said in known.values())
    expected = each_way / present.num_fragments * _bytes_per_value(present.codec)
    candidates = _candidates(present, is_measured=sent <= SENT_ALIKE * expected)
    if fits(present):
        # A heavier one not for a figure that will be another next time.
        heavier = candidates[: candidates.index(present)] if present in candidates else candidates
        best = next(filter(fits_easily, heavier), present)
    else:
        best = next(filter(fits, candidates), candidates[-1])
    figures = (
        f"A step of {target_batch_size} samples takes {step_s:.1f} s; an exchange went at "
        f"{8 * rate / 1e6:.1f} Mbit/s each way. "
    )
    return Choice(best, figures + _told(best, takes(best), step_s))


def _bytes_per_value(codec: str | None) -> float:
    assert codec is not None
    return CODECS[codec]().encoded_bytes(SAMPLE_VALUES, torch.float32) / SAMPLE_VALUES


def _candidates(present: Pace, *, is_measured: bool) -> list[Pace]:
    """All that may come next, from what changes training least to what sends least.

    Args:
        present: of the last round.
        is_measured: whether the members' figures are of its codec, rather than of the one before.
    """
    codecs = (present.codec,) if present.keeps_codec else CODECS_BY_LOSS
    streaming = [
        replace(present, mode="streaming", local_steps=steps, codec=codec)
        for steps in LADDER
        for codec in codecs[-2:]  # of what local steps changed, the first of all is more than is needed
    ]
    if present.has_local_steps:
        return streaming
    overlap = [replace(present, mode="overlap", codec=codec) for codec in codecs]
    common = [replace(present, mode="sync", codec=codecs[0]), *overlap]
    return [*common, *streaming] if present == common[-1] and is_measured else common


def _told(pace: Pace, exchange_s: float, step_s: float) -> str:
    if pace.mode == "sync":
        return f"Mode sync, codec {pace.codec}: training waits {exchange_s:.1f} s a step for an exact step."
    if pace.mode == "overlap":
        return (
            f"Mode overlap, codec {pace.codec}: an exchange of {exchange_s:.1f} s passes beside the "
            f"{step_s:.1f} s of the next step."
        )
    return (
        f"Mode streaming, {pace.local_steps} local steps, codec {pace.codec}: each of {pace.num_fragments} "
        f"fragments takes {exchange_s:.1f} s beside the {pace.steps_per_round * step_s:.1f} s of "
        f"{pace.steps_per_round} steps."
    )
