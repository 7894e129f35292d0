"""A run's events, as one stream; files and screens render it.

Names and fields of events are a public interface, and are never renamed. Nothing here may stop training: a
listener that fails is dropped, with one warning, and events that a disk can't store are lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], None]

SAY_AFTER_S = 5.0
"""A wait is reported when it has lasted this long, and again at this interval."""

FILE_BYTES = 32 * 2**20
"""The size at which a file is full. A step of two peers takes 0.7 kB, so that a file has 45,000 steps."""

OLDER_FILES = 3
"""Full files that are kept beside the current one, from `<name>.1`, the newest, to `<name>.3`."""

TRANSIENT = frozenset({"progress", "download", "peers"})
"""Events for live views only: frequent or long ones, each of which the next one replaces."""

EVENT_FILE = "events.jsonl"
"""The file of a run's events, in its folder."""

PEERS_FILE = "peers-now.json"
"""The file of the newest event `peers`, in a run's folder."""


def new_event(event: str, /, **fields: Any) -> Event:
    """Return an event that happens now."""
    return {"v": 1, "t": round(time.time(), 3), "event": event, **fields}


class Events:
    """The event stream of one peer. Thread-safe.

    Args:
        listeners: called with each event in turn, in the thread that emits it.
    """

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)
        self._lock = threading.RLock()

    def add(self, listener: Listener) -> None:
        """Call `listener` with every event from now on."""
        with self._lock:
            self._listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling `listener`; do nothing if it was dropped already."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def emit(self, event: str, **fields: Any) -> None:
        """Call every listener with an event; drop a listener that raises."""
        record = new_event(event, **fields)
        failed: list[str] = []
        with self._lock:
            for listener in list(self._listeners):
                try:
                    listener(record)
                except Exception as error:  # noqa: BLE001 - a broken screen or a full disk must not stop training
                    self.remove(listener)
                    failed.append(f"{type(listener).__name__} failed ({error}); it gets no more events.")
        for message in failed:
            self.warn("telemetry", message, "training goes on; free disk space, or reopen the terminal")

    def warn(self, code: str, message: str, hint: str) -> None:
        """Emit a warning: a problem that a person should know about while training goes on, and a hint."""
        self.emit("warning", code=code, message=message, hint=hint)

    @contextlib.contextmanager
    def waiting(
        self, what: str, until_s: float, *, every_s: float = SAY_AFTER_S
    ) -> Iterator[Callable[..., None]]:
        """While the block runs, report every `every_s` that it waits for `what`, for `until_s` at most.

        Yields:
            A function that emits an event at once. It takes the event's name, the subject of the wait from
            now on, the seconds from now until the wait ends, and fields of the event.
        """
        started = time.monotonic()
        over = threading.Event()
        said: tuple[str, float] = (what, until_s)

        def say(event: str, **fields: Any) -> None:
            times = {"seconds": round(time.monotonic() - started, 1), "until_seconds": round(said[1], 1)}
            self.emit(event, what=said[0], **times, **fields)

        def tell(event: str, what: str, until_s: float, **fields: Any) -> None:
            nonlocal said
            said = what, time.monotonic() - started + until_s
            say(event, **fields)

        def talk() -> None:
            while not over.wait(every_s):
                say("waiting")

        if not self._listeners:
            yield tell
            return
        thread = threading.Thread(target=talk, name=f"waiting for {what}", daemon=True)
        thread.start()
        try:
            yield tell
        finally:
            over.set()
            thread.join()


class RotatingFile(RotatingFileHandler):
    """`RotatingFileHandler` for a file that all processes of a peer write, each with its own handler.

    The newest records are in that file, and `OLDER_FILES` full files are kept beside it. A process that finds
    the file renamed by another continues in the new one. If two processes rename it at the same moment, one
    file is short. Records that a full disk rejects are lost, except the first of them.

    Args:
        path: its folder must exist; existing content is kept.
        max_bytes: the size at which the file is full.
    """

    def __init__(self, path: Path, max_bytes: int = FILE_BYTES) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=OLDER_FILES, encoding="utf-8", delay=True)

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802 - its name is logging's
        """Return whether the record does not fit into the current file; reopen a file that was renamed."""
        if self.stream is not None:
            is_renamed = True
            with contextlib.suppress(FileNotFoundError):
                is_renamed = not os.path.samestat(os.fstat(self.stream.fileno()), os.stat(self.baseFilename))
            if is_renamed:
                full = self.stream
                self.stream = None
                full.close()
        return bool(super().shouldRollover(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - its name is logging's
        """Print an error about a record, unless the disk rejects it: that record is lost."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file. Safe to call twice, and on a full disk."""
        with contextlib.suppress(OSError):
            super().close()


class EventFile:
    """Appends each event as a line of JSON to a `RotatingFile`, at once, except the transient ones."""

    def __init__(self, path: Path, max_bytes: int = FILE_BYTES) -> None:
        with contextlib.suppress(OSError), path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # half a line, of a process that was killed while the disk was full
                file.write(b"\n")
        self._file = RotatingFile(path, max_bytes)

    def __call__(self, event: Event) -> None:
        """Write one line and flush it to the system, so that a crash loses nothing."""
        if event["event"] not in TRANSIENT:
            self._file.emit(logging.makeLogRecord({"msg": to_json(event)}))

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._file.close()


def newest_events(path: Path) -> Iterator[Event]:
    """Yield the last events of an `EventFile`'s file, and of the full one before it, newest first.

    It reads the last MiB of each file, which is more than a thousand steps, and skips lines that are not
    events, such as half a line.
    """
    for file in (path, path.with_name(f"{path.name}.1")):
        try:
            with file.open("rb") as lines:
                lines.seek(max(0, os.fstat(lines.fileno()).st_size - 2**20))
                tail = lines.read().splitlines()
        except OSError:
            continue
        for line in reversed(tail):
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event:
                    yield event


def to_json(event: Event) -> str:
    """Return an event as one line of JSON; NaN and infinity become null."""
    return json.dumps(_json_safe(event), ensure_ascii=False, allow_nan=False)


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def short_name(peer_id: str) -> str:
    """Return the short form of a peer's id (base58), which `trahiv kick` takes as well: `...x7Kp2q`.

    Six characters tell any two of 10,000 peers apart with a probability of 99.9 %.
    """
    return f"...{peer_id[-6:]}"
