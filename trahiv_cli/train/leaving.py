"""The wish to leave: Ctrl-C or SIGTERM once, in good order; twice, at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Left(BaseException):
    """The user left while nothing worth saving was under way; unwinds to whoever cleans up."""


class Leaving:
    """Remembers the first signal, obeys the second.

    Call it to ask whether to leave. Within `interruptible()` the first signal raises `Left` at once:
    for phases in which there is nothing to finish, such as loading a model.

    Args:
        at_once: called before a second signal ends the process (to give a terminal back).
    """

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        self.signal: signal.Signals | None = None
        self._at_once = at_once
        self._interruptible = False

    def __call__(self) -> bool:
        """Whether a signal asked to leave."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells report it: 130 for Ctrl-C, 143 for SIGTERM; 0 for none."""
        return 0 if self.signal is None else 128 + self.signal

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Take over SIGINT and SIGTERM; give them back at the end."""
        before: dict[signal.Signals, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within this block a signal raises `Left` where it arrives.

        Raises:
            Left: a signal came, now or before.
        """
        self._interruptible = True  # before the question, or a signal in between would be heard by nobody
        try:
            if self():
                raise Left
            yield
        finally:
            self._interruptible = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self():
            # Our children die with us: see swarm.corrections.die_with_parent.
            self._at_once()
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        if self._interruptible:
            raise Left
