"""What the swarm's peers say of themselves, looked at every few seconds.

`Follower` has `trahiv status --follow` look, in a process of its own: it loads libraries for seconds, and it
runs a node. The page need not wait for either.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from trahiv_cli.errors import TrahivError
from trahiv_cli.telemetry.events import VERSION, Event, to_json

LOOK_EVERY_S = 5.0
AGAIN_S = 25.0
"""So long a swarm that could not be entered is left alone."""

Look = Callable[[], Event | None]
"""Returns an event `peers`, or None if there is nothing to say. May raise `TrahivError`."""


class Lookout:
    """Calls `look` again and again, in a thread of its own that ends with the process."""

    def __init__(self, look: Look) -> None:
        self.newest = b""
        """What was seen last, an event as JSON; empty before that."""
        self._look = look
        threading.Thread(target=self._run, name="lookout", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                seen = self._look()
            except TrahivError as error:
                seen = {"event": "peers", "peers": [], "trouble": error.message, "hint": error.hint}
            if seen is not None:
                self.newest = to_json({"v": VERSION, "t": round(time.time(), 3), **seen}).encode()
            time.sleep(LOOK_EVERY_S)


class Follower:
    """Looks into a swarm, through a child that runs `trahiv status` with these words and this environment."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "trahiv_cli", "status", "--follow", "--format", "json", *words]
        self._environment, self._free_at = dict(environment), 0.0
        self._child: subprocess.Popen[str] | None = None

    def __call__(self) -> Event | None:
        """Wait for what is seen next; TrahivError if the swarm can't be looked into."""
        if self._child is None:
            time.sleep(max(0.0, self._free_at - time.monotonic()))
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | self._environment,
            )
        assert self._child.stdout is not None
        if not (line := self._child.stdout.readline()):  # it has ended
            self._child.wait()
            self._child, self._free_at = None, time.monotonic() + AGAIN_S
            return None
        event: Event = json.loads(line)
        if event["event"] == "error":
            raise TrahivError(event["message"], event["hint"])
        return event if event["event"] == "peers" else None

    def close(self) -> None:
        """Have the child leave."""
        if self._child is not None:
            self._child.send_signal(signal.SIGINT)
