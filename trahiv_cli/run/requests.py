"""Control requests ("wishes") of the user to a running peer: pause, or finish at the next round.

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

LOOK_EVERY_S = 1.0
CONDITIONS_EVERY_S = 5.0
SETTLED_S = 15.0
"""Seconds for which all conditions must have held before a paused peer resumes."""


def _unmet(condition: Condition) -> str:
    """Check a condition; if the check fails, log the error and treat the condition as one that holds."""
    try:
        return condition.unmet()
    except (OSError, ValueError, psutil.Error) as error:
        logger.warning(f"Whether `--only-when {condition.text}` holds can't be told: {error!r}")
        return ""


class Wishes:
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
        self._look_at = -math.inf
        self._late_at = math.inf

    def __call__(self, event: Event) -> None:
        """Leave after the step that was just taken, if the user requested `finish`."""
        if event["event"] == "step" and self.is_to_finish:
            self._leaving.leave("finish")

    @property
    def is_to_finish(self) -> bool:
        """Whether this peer should leave at the next round."""
        return requested(self._folder) == "finish"

    def why_paused(self) -> str:
        """Return why this peer should not train now, or an empty text."""
        if requested(self._folder) == "pause":
            return BY_ITS_USER
        if (now := self._clock()) >= self._look_at:
            self._look_at = now + CONDITIONS_EVERY_S
            if unmet := next(filter(None, map(_unmet, self._conditions)), ""):
                self._unmet = unmet
                self._unmet_at = now
        return self._unmet if now < self._unmet_at + SETTLED_S else ""

    def look(self) -> None:
        """Leave if this peer should not train now, or if `finish` has been due for `OVERTIME_S`."""
        now = self._clock()
        self._late_at = min(self._late_at, now + OVERTIME_S) if self.is_to_finish else math.inf
        if now >= self._late_at:
            self._leaving.leave("finish")
        elif self.why_paused():
            self._leaving.leave("pause")

    def heard(self) -> AbstractContextManager[None]:
        """Call `look` every second while the block runs."""
        return every(LOOK_EVERY_S, self.look, "wishes")
