"""Leaving a run: by a signal, by a control request (`requests.py`), or because a budget is spent.

The first Ctrl-C or SIGTERM ends training in good order, and the second ends the process at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Literal, Self

Reason = Literal["signal", "finish", "pause", "budget"]

OVERTIME_S = 600.0
"""A peer whose time is over leaves at the end of a round, or after these seconds if no round ends."""


@dataclass(frozen=True)
class Budget:
    """Limits of a peer's contribution: time, trained samples, and steps of the swarm with its samples."""

    seconds: float = math.inf
    samples: float = math.inf
    steps: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `2h`, `1h30m`, `2d`, `500 samples` or `20 steps`; raises `ValueError` for anything else."""
        if found := re.fullmatch(r"(\d+) ?(samples|steps)", text):
            spent = {found[2]: int(found[1])}
        else:
            found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
            numbers = [int(number or 0) for number in found.groups()] if found else [0]
            spent = {"seconds": sum(n * unit for n, unit in zip(numbers, (86400, 3600, 60, 1), strict=False))}
        if not all(spent.values()):
            raise ValueError(f"{text!r} is neither a time (2h, 1h30m, 2d) nor a number of samples or steps")
        return cls(**spent)

    def is_exhausted_by(self, spent: Budget, *, is_border: bool) -> bool:
        """Return whether to leave after spending this; `is_border` says that a round has just ended."""
        if spent.seconds >= self.seconds + OVERTIME_S:
            return True
        return is_border and (
            spent.seconds >= self.seconds or spent.samples >= self.samples or spent.steps >= self.steps
        )


ENDLESS_BUDGET = Budget()


class Left(BaseException):
    """Raised when the user leaves while there is nothing to save; it unwinds the stack for cleanup."""


class Leaving:
    """Remembers the reason to leave, a signal or a request, and ends the process at a second signal.

    The command line creates one per process, a `SwarmTrainerMixin` one per call of `train`. Call it to ask
    whether to leave. Within `interruptible()`, for phases without anything to finish, the first signal raises
    `Left` at once. `at_once` is called before the second signal ends the process.
    """

    def __init__(self, at_once: Callable[[], None] = lambda: None, resume: str = "") -> None:
        self.signal: signal.Signals | None = None
        self.reason: Reason | None = None
        self.resume = resume
        """The command that resumes the run."""
        self.spent = Budget(0.0, 0, 0)
        """The part of the budget that this process has spent, also if it fails."""
        self._at_once = at_once
        self._interruptible = False

    def __call__(self) -> bool:
        """Whether to leave."""
        return self.reason is not None

    def leave(self, reason: Literal["finish", "pause", "budget"]) -> None:
        """Leave in good order, unless there is a reason already; does not end an `interruptible()` block."""
        self.reason = self.reason or reason

    def note_spent(self, spent: Budget) -> None:
        """Note the part of the budget that this process has spent."""
        self.spent = spent

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells report it: 130 for Ctrl-C, 143 for SIGTERM; 0 without one."""
        return 0 if self.signal is None else 128 + self.signal

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM within the block; restore the former handlers at its end."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise `Left` when a signal arrives within the block, or at once if there is a reason to leave."""
        self._interruptible = True  # before the check, or a signal in between would have no effect here
        try:
            if self():
                raise Left
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            # Child processes end with this one: see `die_with_parent`.
            with contextlib.suppress(RuntimeError):  # the signal may have interrupted a write
                self._at_once()
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        self.reason = "signal"
        if self._interruptible:
            raise Left
