"""Why a peer leaves: Ctrl-C or SIGTERM once, in good order; twice, at once; a wish; or a budget is spent."""

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
"""A peer whose time is over leaves at the end of the round; if none ends for so long, all the same."""


@dataclass(frozen=True)
class Budget:
    """What a peer gives to a run: time, samples that it trains, steps of the swarm that it takes part in."""

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

    def is_spent(self, *, seconds: float, samples: int, steps: int, is_border: bool) -> bool:
        """Whether it is time to leave, by what was given so far; `is_border`: a round has just ended."""
        if seconds >= self.seconds + OVERTIME_S:
            return True
        return is_border and (seconds >= self.seconds or samples >= self.samples or steps >= self.steps)


ENDLESS_BUDGET = Budget()
NOTHING_SPENT = Budget(0.0, 0, 0)


class Left(BaseException):
    """The user left while nothing worth saving was under way; unwinds to whoever cleans up."""


class Leaving:
    """Remembers why to leave: the first signal, or a wish. Obeys the second signal.

    Call it to ask whether to leave. Within `interruptible()` the first signal raises `Left` at once: for
    phases in which there is nothing to finish. Before a second one ends the process, `at_once` is called.
    """

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        self.signal: signal.Signals | None = None
        self.reason: Reason | None = None
        self.resume = ""
        """The command that resumes the run."""
        self.spent = NOTHING_SPENT
        """The samples and steps of its budget that this process has given, also if it fails."""
        self._at_once = at_once
        self._interruptible = False

    def __call__(self) -> bool:
        """Whether to leave."""
        return self.reason is not None

    def leave(self, reason: Literal["finish", "pause", "budget"]) -> None:
        """Leave in good order, unless that is under way. Within `interruptible()` only at its end."""
        self.reason = self.reason or reason

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells report it: 130 for Ctrl-C, 143 for SIGTERM; 0 for none."""
        return 0 if self.signal is None else 128 + self.signal

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Take over SIGINT and SIGTERM; give them back at the end."""
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within this block a signal raises `Left` where it arrives; one that came before, at its start."""
        self._interruptible = True  # before the question, or a signal in between would be heard by nobody
        try:
            if self():
                raise Left
            yield
        finally:
            self._interruptible = False

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            # Our children die with us: see `die_with_parent`.
            with contextlib.suppress(RuntimeError):  # a stream is being written to where the signal came
                self._at_once()
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        self.reason = "signal"
        if self._interruptible:
            raise Left
