"""What happens to a run, as one stream of events; files and screens are renderings of it.

Names and fields are those of the contract and are never renamed. Nothing here may stop training: a
listener that fails is dropped, once, with a warning, and what a disk does not take is lost.
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

VERSION = 1
SAY_AFTER_S = 5.0
"""A wait is talked about when it has lasted this long, and again as often."""

MAX_BYTES = 32 * 2**20
"""The size at which a file is full. Events of two peers' steps take 0.7 kB each: 45,000 of them."""

OLDER_FILES = 3
"""Full files that are kept beside the present one, as `<name>.1`, the newest, to `<name>.3`."""

TAIL_BYTES = 2**20
"""The bytes that are read of a file's end: those of more than a thousand steps."""

TRANSIENT = frozenset({"progress", "download", "peers"})
"""Events for live views only: many a minute, or long; each out of date with the next."""

EVENT_FILE = "events.jsonl"
"""In a run's folder: its events."""

PEERS_FILE = "peers-now.json"
"""In a run's folder: the newest event `peers`."""


class Events:
    """The event stream of one peer. Thread-safe.

    Args:
        listeners: called with each event in turn, in the thread that emits it.
    """

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)
        self._lock = threading.RLock()

    def add(self, listener: Listener) -> None:
        """Have `listener` called with every event from now on."""
        with self._lock:
            self._listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        """Tell `listener` nothing more; nothing happens if it was dropped already."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def emit(self, event: str, **fields: Any) -> None:
        """Tell every listener; one that raises is not asked again."""
        record: Event = {"v": VERSION, "t": round(time.time(), 3), "event": event, **fields}
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
        """Emit a warning: what a person should know while training goes on, and what to do about it."""
        self.emit("warning", code=code, message=message, hint=hint)

    @contextlib.contextmanager
    def waiting(self, what: str, until_s: float) -> Iterator[Callable[..., None]]:
        """Say from 5 s on, every 5 s, what the block waits for, and that it ends by itself after `until_s`.

        Yields:
            A function that tells news at once: an event's name, what is awaited from now on, after how many
            seconds from now that ends, and fields of the event.
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
            while not over.wait(SAY_AFTER_S):
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
    """`RotatingFileHandler` of a file in which all processes of a peer write, each with its own copy of this.

    The newest records are in that file; of older ones `OLDER_FILES` files are kept beside it. A process that
    finds the file renamed by another goes on in the new one. Two that rename it in the same moment leave one
    that is short. Records that a full disk does not take are lost, but for the first of them.

    Args:
        path: its folder must exist; what it holds already is kept.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=OLDER_FILES, encoding="utf-8", delay=True)

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802 - its name is logging's
        """Tell whether the record does not fit into the file that is there now."""
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
        """Say what went wrong with a record, unless the disk does not take it: that record is lost."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file. Safe to call twice, and on a full disk."""
        with contextlib.suppress(OSError):
            super().close()


class EventFile:
    """Appends each event as a line of JSON to a `RotatingFile`, at once, except the transient ones."""

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(OSError), path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # half a line, of a process that was killed while the disk was full
                file.write(b"\n")
        self._file = RotatingFile(path)

    def __call__(self, event: Event) -> None:
        """Write one line and hand it to the system, so that a crash loses nothing."""
        if event["event"] not in TRANSIENT:
            self._file.emit(logging.makeLogRecord({"msg": to_json(event)}))

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._file.close()


def newest_events(path: Path) -> Iterator[Event]:
    """Read the last events of a file that an `EventFile` writes, and of the full one before it, newest first.

    Of each file the last `TAIL_BYTES` are read. What is no event, such as half a line, is passed over.
    """
    for file in (path, path.with_name(f"{path.name}.1")):
        try:
            with file.open("rb") as lines:
                lines.seek(max(0, os.fstat(lines.fileno()).st_size - TAIL_BYTES))
                tail = lines.read().splitlines()
        except OSError:
            continue
        for line in reversed(tail):
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event:
                    yield event


def to_json(event: Event) -> str:
    """Write an event as one line; numbers that JSON has no word for (NaN, infinity) become null."""
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
