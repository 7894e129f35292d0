"""Control requests of the user to a running peer: pause, or finish at the next round.

A request is a file in the run's folder, which the peer reads every second. So it can come from another
terminal or from the page, and it outlasts a restart of the peer. A condition of `--only-when` that does not
hold counts as a request to pause.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from trahiv_cli.background import every
from trahiv_cli.run.conditions import Condition
from trahiv_cli.run.control import BY_ITS_USER, requested
from trahiv_cli.run.leaving import OVERTIME_S, Leaving
from trahiv_cli.telemetry.events import Event

logger = logging.getLogger(__name__)


class ControlRequests:
    """Polls the requests to the peer of a folder, and passes them on to `leaving`.

    `peer.Peer` creates one per run. It listens to the peer's events: `finish` takes effect when the swarm's
    present step is taken, or after `OVERTIME_S` without one. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        folder: Path,
        leaving: Leaving,
        conditions: Sequence[Condition] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._leaving = leaving
        self._conditions = conditions
        self._clock = clock
        self._unmet = ""
        self._unmet_at = -math.inf
        self._check_at = -math.inf
        self._late_at = math.inf

    def __call__(self, event: Event) -> None:
        """Leave after the step that was just taken, if the user requested `finish`."""
        if event["event"] == "step" and self.is_to_finish:
            self._leaving.leave("finish")

    @property
    def is_to_finish(self) -> bool:
        """Whether this peer should leave at the next round."""
        return requested(self._folder) == "finish"

    def pause_reason(self) -> str:
        """Return why this peer should not train now, or an empty text.

        The conditions are checked every 5 s. A paused peer resumes when all have held for 15 s.
        """
        if requested(self._folder) == "pause":
            return BY_ITS_USER
        now = self._clock()
        if now >= self._check_at:
            self._check_at = now + 5.0
            if unmet := self._check_conditions():
                self._unmet = unmet
                self._unmet_at = now
        return self._unmet if now < self._unmet_at + 15.0 else ""

    def _check_conditions(self) -> str:
        """Return why a condition does not hold; log a check that fails, and ignore its condition."""
        for condition in self._conditions:
            try:
                if unmet := condition.unmet():
                    return unmet
            except (OSError, ValueError, psutil.Error) as error:
                logger.warning(f"Whether `--only-when {condition.text}` holds can't be told: {error!r}")
        return ""

    def poll(self) -> None:
        """Leave if this peer should not train now, or if `finish` has been due for `OVERTIME_S`."""
        now = self._clock()
        self._late_at = min(self._late_at, now + OVERTIME_S) if self.is_to_finish else math.inf
        if now >= self._late_at:
            self._leaving.leave("finish")
        elif self.pause_reason():
            self._leaving.leave("pause")

    def polled(self) -> AbstractContextManager[None]:
        """Call `poll` every second while the block runs."""
        return every(1.0, self.poll, "control requests")
