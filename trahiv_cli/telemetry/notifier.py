"""`--on-event`: a command of the user, run for events that a person should know about."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType

from trahiv_cli.errors import TrahivError
from trahiv_cli.telemetry.events import Event, new_event, to_json


class Notifier:
    """Runs a command for each of a peer's events that a person should know about, one at a time.

    The command gets the event as JSON on its stdin, and the event's name in `TRAHIV_EVENT`. It may take 30 s.
    While 100 events wait, further ones are dropped. As a context manager, it emits a `TrahivError` that ends
    the block as an event `error`, and waits 5 s for the last command.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._waiting: queue.Queue[Event | None] = queue.Queue(100)
        self._thread = threading.Thread(target=self._run, name="on-event", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Queue an event for the command, if a person should know about it."""
        is_notable = event["event"] in ("joined", "paused", "resumed", "warning", "error", "done")
        # These warnings may come every few seconds.
        if is_notable and event.get("code") not in ("no-group", "round", "overflow"):
            self._put(event)

    def __enter__(self) -> Notifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TrahivError):
            self(new_event("error", code=error.code, message=error.message, hint=error.hint))
        self._put(None)
        self._thread.join(5.0)

    def _put(self, event: Event | None) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(event)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    self._command,
                    input=to_json(event) + "\n",
                    encoding="utf-8",
                    env=os.environ | {"TRAHIV_EVENT": event["event"]},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=30.0,
                    check=False,
                )
