"""A watchdog over this peer's processes: one that ended, or that stands still, is found within seconds.

Each is asked for a sign of life again and again. One that does not answer may only be slow: a process that
stands still uses no processor time, or the kernel calls it stopped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

LOOK_EVERY_S = 0.5
PULSE_EVERY_S = 1.5  # a sign of life is asked for so often
# So many looks in a row find no answer and no use of processor time. Nobody looks while the machine sleeps.
STILL_AFTER_LOOKS = 8
STANDING = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)
SLOW_AFTER_S = 60.0  # one that does not answer for so long is of no use, however busy it is


class Organ(Protocol):
    """A process that this peer can't do without, or several that belong together."""

    @property
    def name(self) -> str:
        """What it is called in a sentence: "the DHT's process"."""

    def is_alive(self) -> bool:
        """Say whether the process runs."""

    def pulse(self) -> Any:
        """Ask for a sign of life; return a future of it, whose exception says what is wrong."""

    def pids(self) -> list[int]:
        """Return the ids of its processes."""


@dataclass
class _State:
    asked_at: float = 0.0
    answer: Any = None
    used_s: float = -1.0
    still_looks: int = 0


def effort_of(pids: Iterable[int]) -> tuple[float, bool]:
    """Sum up the processor time of processes, in seconds, and say whether one is stopped or a zombie.

    Those that are gone have used none. One that waits for a disk counts as busy.
    """
    used, is_stopped = 0.0, False
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            times, status = process.cpu_times(), process.status()
            used += times.user + times.system
            is_stopped = is_stopped or status in STANDING
            used += time.monotonic() if status == psutil.STATUS_DISK_SLEEP else 0.0
    return used, is_stopped


class Vitals:
    """Watches organs in a thread of its own; `ailment` says what is wrong with the first that fails.

    `report` is told of it, in that thread. `clock` is monotonic seconds, `effort` is as `effort_of`.
    """

    def __init__(
        self,
        organs: Sequence[Organ],
        report: Callable[[str], None] = lambda ailment: None,
        clock: Callable[[], float] = time.monotonic,
        effort: Callable[[Iterable[int]], tuple[float, bool]] = effort_of,
    ) -> None:
        self._organs, self._report, self._clock, self._effort = organs, report, clock, effort
        self._states = {organ.name: _State() for organ in organs}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitals", daemon=True)
        self.ailment = ""  # what is wrong; empty if nothing is. It stays

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End. Safe to call twice, and before `start`."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S) and not self.ailment:
            self.look()

    def look(self) -> None:
        """Look at each organ once."""
        for organ in self._organs:
            if self._is_over.is_set():
                return
            if ailment := self._ailment_of(organ):
                self.ailment = ailment
                self._report(ailment)
                return

    def _ailment_of(self, organ: Organ) -> str:
        if not organ.is_alive():
            return f"{organ.name} has ended"
        state, now = self._states[organ.name], self._clock()
        if state.answer is None and now >= state.asked_at + PULSE_EVERY_S:
            state.asked_at, state.still_looks = now, 0
            try:
                state.answer = organ.pulse()
            except OSError as error:
                return f"{organ.name} can't be asked any more: {error}"
        if state.answer is None:
            return ""
        if state.answer.done():
            answer, state.answer = state.answer, None
            failure = None if answer.cancelled() else answer.exception()
            return f"{organ.name} fails: {failure!r}" if failure is not None else ""
        used_s, is_stopped = self._effort(organ.pids())
        state.still_looks = state.still_looks + 1 if is_stopped or used_s == state.used_s else 0
        state.used_s = used_s
        if state.still_looks >= STILL_AFTER_LOOKS:
            return f"{organ.name} stands still"
        if now >= state.asked_at + SLOW_AFTER_S:
            return f"{organ.name} did not answer for {SLOW_AFTER_S:.0f} s"
        return ""
