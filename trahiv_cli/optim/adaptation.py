"""How a peer measures its batches and exchanges, and how the pace of mode auto follows from that."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import replace

from trahiv_cli.optim.auto import RECENT, Choice, Measured, choose
from trahiv_cli.optim.pace import Pace
from trahiv_cli.optim.rounds import Outcome
from trahiv_cli.swarm.snapshot import JoinerActivity

BATCHES_MEASURED = 20
"""Batches whose median is this peer's pace: one that comes after an evaluation does not count."""

DISTURBED_AT_MOST = 50
"""Rounds on end whose exchanges are not measured, because somebody was sent a state meanwhile."""


class Adaptation:
    """Measures this peer, and chooses the pace after each committed round.

    Args:
        share: of its time, that training may wait for rounds; None: the pace stays.
        interest: of joiners in this peer's state.
        num_values: trained values.
        target_batch_size: samples of a step, of all peers.
    """

    def __init__(
        self, share: float | None, interest: JoinerActivity, num_values: int, target_batch_size: int
    ) -> None:
        self.share = share
        self.measured = Measured()
        """What this peer knows of its own speed and link."""
        self._interest, self._num_values, self._target = interest, num_values, target_batch_size
        self._seconds_per_sample: deque[float] = deque(maxlen=BATCHES_MEASURED)
        self._left_step_at: float | None = None
        self._rates: deque[float] = deque(maxlen=RECENT)
        self._num_disturbed = 0
        self._has_told_pace = False

    def end_batch(self, num_samples: int) -> None:
        """A batch has been trained since `begin_batch`."""
        if self._left_step_at is not None:
            self._seconds_per_sample.append((time.monotonic() - self._left_step_at) / num_samples)

    def begin_batch(self) -> None:
        """The next batch begins."""
        self._left_step_at = time.monotonic()

    def measure(self, outcome: Outcome) -> None:
        """Note how fast this peer trains, and what a round took."""
        per_sample = statistics.median(self._seconds_per_sample) if self._seconds_per_sample else 0.0
        speed = 1 / per_sample if per_sample else 0.0
        self.measured = replace(self.measured, samples_per_second=speed)
        if len(outcome.group) < 2:
            return
        # Beside a joiner's download an exchange takes longer than it will take again, unless it never ends.
        is_disturbed = self._interest.was_sent_since(time.monotonic() - outcome.exchange_s)
        self._num_disturbed = (self._num_disturbed + 1) % (DISTURBED_AT_MOST + 1) if is_disturbed else 0
        if not self._num_disturbed:
            latest = Measured(speed, outcome.exchange_s, outcome.parts_sent, outcome.parts_received)
            if latest.is_known:
                self._rates.append(latest.rate)
            lowest = min(self._rates) if len(self._rates) == RECENT else 0.0
            self.measured = replace(latest, lowest_rate=lowest)

    def choose(self, present: Pace, outcome: Outcome) -> tuple[Pace, str]:
        """Choose the pace after a round from what its members had measured before it.

        Args:
            present: the pace of that round.
            outcome: of that round.

        Returns:
            The next pace, and a paragraph with its reasons; empty if it is not worth saying.
        """
        if self.share is None:
            return present, ""
        choice: Choice = choose(
            present,
            outcome.measured,
            outcome.samples,
            num_values=self._num_values,
            target_batch_size=self._target,
            share=self.share,
        )
        is_news = choice.is_founded and (choice.pace != present or not self._has_told_pace)
        self._has_told_pace = self._has_told_pace or is_news
        return choice.pace, choice.reason if is_news else ""
