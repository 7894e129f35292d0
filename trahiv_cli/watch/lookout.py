"""What the swarm's peers say of themselves, looked at every few seconds.

The peer of a run's folder looks by itself, and writes down what it sees (`Seen`). Where this machine has no
peer, `trahiv status --follow` looks (`Follower`), in a process of its own: it loads libraries for seconds and
runs a node, and the page need not wait for either.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trahiv_cli.errors import TrahivError
from trahiv_cli.telemetry.events import PEERS_FILE, VERSION, Event, to_json

LOOK_EVERY_S = 5.0
AGAIN_S = 25.0
"""Seconds for which a swarm that could not be entered is left alone."""

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
            except (OSError, ValueError) as error:  # the child can't be started, or writes something else
                seen = {"event": "peers", "peers": [], "trouble": f"{error}", "hint": "try again"}
            if seen is not None:
                self.newest = to_json({"v": VERSION, "t": round(time.time(), 3), **seen}).encode()
            time.sleep(LOOK_EVERY_S)


class Seen:
    """Reads what the peer of a run's folder has seen last."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PEERS_FILE

    def __call__(self) -> Event | None:
        """Return it; None if there is nothing that can be read."""
        try:
            event: Event = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        return event


class Follower:
    """Looks into a swarm by invitations and addresses, through a child that runs `trahiv status`.

    The child finds them in an environment variable, which only its owner can read.
    """

    def __init__(self, peers: Sequence[str], variable: str) -> None:
        self._command = [sys.executable, "-m", "trahiv_cli", "status", "--follow", "--format", "json"]
        self._environment = {variable: " ".join(peers)}
        self._free_at = 0.0
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
            self._child.terminate()
