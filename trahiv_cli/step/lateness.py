"""A peer notices when its batches take longer than the swarm's steps, so that their gradients come too late.

1. A batch is late if it began with the swarm's newest state, and others had left that state when it ended.
2. If two of the last four batches were late, `samples_in_time` asks for smaller batches, which count as
   before. One is not enough: the machine may have slept. After many batches in time it doubles: the machine
   may have been busy only for a while.
3. If batches can't be smaller, the others learn the speed of this peer, and may wait for it. If the next
   batch is late all the same, a warning gives the figures, and this peer fetches the swarm's state ever less
   often.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from trahiv_cli.telemetry.events import Events

ENOUGH_IN_TIME = 64
"""Batches in time before larger ones are tried: if these are late, one batch in thirty is lost."""

FIRST_PAUSE_S = 60.0


class Moment(NamedTuple):
    """A time in monotonic seconds, and the swarm's step at that time."""

    at: float
    step: int


class Lateness:
    """Counts the late batches of one peer, and limits the size of its batches."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.samples_in_time = math.inf
        """The largest number of samples that this peer trains in time for a step, as far as is known."""
        self.batch_s = 0.0
        """The usual duration of a batch, in seconds, when batches were last found to be too late."""
        self._last: deque[tuple[Moment, bool]] = deque(maxlen=4)  # (start, is_late) of each batch
        self._num_in_time = self._num_pauses = 0
        self._told_samples = math.inf
        self._figures = ""
        self._has_warned = False

    @property
    def is_hopeless(self) -> bool:
        """Whether even this peer's smallest batches come too late."""
        return self._num_pauses > 0

    def note_in_time(self, began: Moment) -> None:
        """Record a batch that came in time."""
        self._last.append((began, False))
        if not any(is_late for _, is_late in self._last) and len(self._last) == 4:
            self._num_pauses = 0
        self._num_in_time += 1
        if self._num_in_time == ENOUGH_IN_TIME:
            self._num_in_time = 0
            self.samples_in_time *= 2

    def note_late(self, samples: int, usual_s: float, began: Moment, ended: Moment) -> bool:
        """Record a late batch of `samples`, which usually takes `usual_s`.

        The swarm took steps during this batch, but it also does so during a short batch that began shortly
        before a step. So the duration of a step is the mean since the first of the last batches began.

        Returns:
            Whether the others should now learn the speed of this peer.
        """
        if self.is_hopeless:
            self._warn_once()
            return False
        self._num_in_time = 0
        self._last.append((began, True))
        first = self._last[0][0]
        step_s = (ended.at - first.at) / max(1, ended.step - first.step)
        if sum(is_late for _, is_late in self._last) < 2 or usual_s < step_s:
            return False
        self._last.clear()
        self.batch_s = usual_s
        self._figures = (
            f"A batch of {samples} sample(s) takes {usual_s:.1f} s here, a step of the swarm {step_s:.1f} s"
        )
        if samples == 1 or samples > self.samples_in_time:  # a smaller limit had no effect
            self._num_pauses = 1
            return True
        # So that several are done within a step.
        self.samples_in_time = max(1, int(samples * step_s / (2 * usual_s)))
        if self.samples_in_time < self._told_samples:
            self._told_samples = self.samples_in_time
            self._events.warn(
                "slow",
                f"{self._figures}: its gradients came too late to count. Where this peer's batches can be "
                f"divided, it tries {self.samples_in_time} sample(s) at a time.",
                hint=f"nothing to do; begin so with per_device_train_batch_size: {self.samples_in_time}",
            )
        return False

    def _warn_once(self) -> None:
        """Warn, once, that this peer is too slow although the others know its speed."""
        if not self._has_warned:
            self._has_warned = True
            self._events.warn(
                "too-slow",
                f"{self._figures}: this peer's gradients come too late to count. It tries again at times.",
                hint="per_device_train_batch_size: 1, a faster device, or swarm.mode: diloco for all",
            )

    def next_pause_s(self) -> float:
        """Return the seconds to wait before the state is fetched again: twice as many each time."""
        self._num_pauses += 1
        return FIRST_PAUSE_S * 2 ** (self._num_pauses - 2)
