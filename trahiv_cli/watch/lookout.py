"""Polling of the peers' statuses for the page, every few seconds.

A running peer polls by itself, and writes the result into its run's folder, where `Seen` reads it. Where this
machine has no peer, `Follower` runs `trahiv status --follow` in a process of its own: that loads libraries
for seconds and runs a node, and the page need not wait for either.
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
from trahiv_cli.telemetry.events import PEERS_FILE, Event, new_event, to_json

Look = Callable[[], Event | None]
"""Returns an event `peers`, or None if there is none. May raise `TrahivError`."""


class Lookout:
    """Calls `look` every `every_s` seconds, in a thread of its own that ends with the process.

    `trahiv watch` makes one for its page.
    """

    def __init__(self, look: Look, every_s: float = 5.0) -> None:
        self.newest = b""
        """The last event, as JSON; empty before the first one."""
        self._look = look
        self._every_s = every_s
        threading.Thread(target=self._run, name="lookout", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                seen = self._look()
            except TrahivError as error:
                seen = new_event("peers", peers=[], trouble=error.message, hint=error.hint)
            except (OSError, ValueError) as error:  # the child can't be started, or its output is not JSON
                seen = new_event("peers", peers=[], trouble=str(error), hint="try again")
            if seen is not None:
                self.newest = to_json(seen).encode()
            time.sleep(self._every_s)


class Seen:
    """Reads the statuses that the peer of a run's folder has last polled."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PEERS_FILE

    def __call__(self) -> Event | None:
        """Return an event `peers`; None if there is no readable one."""
        try:
            event: Event = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        return event


class Follower:
    """Polls a swarm, given by invitations and addresses, through a child that runs `trahiv status`.

    The child gets them in an environment variable, which only its user can read. If it ends, another one
    starts after `again_s` seconds.
    """

    def __init__(self, peers: Sequence[str], variable: str, again_s: float = 25.0) -> None:
        self._command = [sys.executable, "-m", "trahiv_cli", "status", "--follow", "--format", "json"]
        self._environment = {variable: " ".join(peers)}
        self._again_s = again_s
        self._free_at = 0.0
        self._child: subprocess.Popen[str] | None = None

    def __call__(self) -> Event | None:
        """Wait for the child's next event; return it if it is `peers`, None if not or if the child ended.

        Raises TrahivError if the swarm can't be visited.
        """
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
            self._child = None
            self._free_at = time.monotonic() + self._again_s
            return None
        event: Event = json.loads(line)
        if event["event"] == "error":
            raise TrahivError(event["message"], event["hint"])
        return event if event["event"] == "peers" else None

    def close(self) -> None:
        """Terminate the child."""
        if self._child is not None:
            self._child.terminate()
