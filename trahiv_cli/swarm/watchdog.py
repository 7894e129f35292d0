"""Whether this peer can go on: its processes run, it is a member, and its user does not want it to leave.

A thread asks the processes for a sign of life again and again, so it notices within seconds if one has ended
or stalled. A process that does not answer may only be slow: a stalled one uses no processor time, or the
kernel reports it as stopped.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from trahiv_cli.errors import PeerBroken
from trahiv_cli.swarm.corrections.processes import effort_of
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events


class Watchdog:
    """Watches a peer's processes, its membership, and its user's wish to leave.

    `SwarmOptimizer` creates and closes it. `home` is the peer's node, whose processes a thread watches;
    without one nothing fails.
    """

    def __init__(self, home: Node | None, events: Events, should_leave: Callable[[], bool]) -> None:
        self._home = home
        self._events = events
        self.should_leave = should_leave
        self._answer: Any = None  # the future of a requested sign of life
        self._asked_at = -math.inf
        self._used_s = -1.0
        self._still_looks = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alive", daemon=True)
        self.failure = ""  # the failure of a process, empty if none has failed; it is never reset

    def watch(self) -> None:
        """Watch the processes from now on."""
        if self._home is not None:
            self._thread.start()

    @property
    def must_stop(self) -> bool:
        """Whether to abandon pending waits."""
        return self.should_leave() or self._is_closed.is_set() or bool(self.failure)

    def is_out(self, peer_id: str) -> bool:
        """Return whether the swarm's owner has removed a peer (its id, base58)."""
        return self._home is not None and self._home.is_out(peer_id)

    def require(self) -> None:
        """Raise `PeerBroken` if a process has failed, `NotAdmitted` if the owner has excluded this peer."""
        if self._home is not None:
            self._home.require_membership()
        if self.failure and not self.should_leave():
            raise PeerBroken(
                f"{self.failure}.",
                hint="the same command resumes from the checkpoint; trahiv.log in the run's folder says more",
            )

    def close(self) -> bool:
        """Stop watching. Return whether this is the first call."""
        is_first = not self._is_closed.is_set()
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        return is_first

    def _run(self) -> None:
        while not self._is_closed.wait(0.5) and not self.failure:
            self.look()

    def look(self) -> None:
        """Check the processes once, and report a failure."""
        if self._home is not None and (wrong := self._what_is_wrong(self._home)):
            self.failure = f"This peer's DHT process, or its daemon p2pd, {wrong}"
            self._events.warn(
                "broken",
                f"{self.failure}; this peer saves a checkpoint and ends.",
                "nothing to do where a command trains: it starts again by itself, three times in ten minutes",
            )

    def _what_is_wrong(self, node: Node) -> str:
        if not node.is_alive():
            return "has ended"
        now = time.monotonic()
        if self._answer is None and now >= self._asked_at + 1.5:  # ask for the next sign of life
            self._asked_at = now
            self._still_looks = 0
            try:
                self._answer = node.pulse()
            except OSError as error:
                return f"can't be asked any more: {error}"
        if self._answer is None:
            return ""
        if self._answer.done():
            answer = self._answer
            self._answer = None
            failure = None if answer.cancelled() else answer.exception()
            return f"fails: {failure!r}" if failure is not None else ""
        used_s, is_stopped = effort_of(node.pids())
        self._still_looks = self._still_looks + 1 if is_stopped or used_s == self._used_s else 0
        self._used_s = used_s
        if self._still_looks >= 8:  # a sleeping machine takes no looks
            return "stands still"
        # Then it has failed, however busy it is.
        return "did not answer for 60 s" if now >= self._asked_at + 60.0 else ""
