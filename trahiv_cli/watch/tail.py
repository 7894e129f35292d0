"""Readers of the events in a run's folder: the past ones first, then each new one as it is written."""

from __future__ import annotations

import heapq
import itertools
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from trahiv_cli.telemetry.events import EVENT_FILE, OLDER_FILES, to_json


class Source(Protocol):
    """A source of events; each open page has its own."""

    def read(self) -> list[bytes]:
        """Return the next events, each as JSON; none if there are none yet."""

    def close(self) -> None:
        """Release its resources."""


class Nothing:
    """A source without events, for a page that shows only the peers' statuses."""

    def read(self) -> list[bytes]:
        """Return no events."""
        return []

    def close(self) -> None:
        """Do nothing."""


class Tail:
    """Follows a `RotatingFile` of events: returns each valid line once, in order, also across rotations.

    Memory stays small, however slowly it is read: unread events stay in the files.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENT_FILE
        self._files: deque[BinaryIO] = deque()  # the first is being read

    def read(self) -> list[bytes]:
        """Return the next lines that are events, at most some 256 kB."""
        if not self._files:
            self._files.extend(self._newer_than(None))
        while self._files:
            file = self._files[0]
            lines = file.readlines(2**18)
            if lines and not lines[-1].endswith(b"\n"):
                file.seek(-len(lines.pop()), os.SEEK_CUR)  # half a line: it is being written
            if events := [line.strip() for line in lines if is_event(line)]:
                return events
            if lines:
                continue
            if len(self._files) == 1:
                # A process that has not noticed the rotation has until the next call to finish its line.
                self._files.extend(self._newer_than(file))
                break
            self._files.popleft().close()
        return []

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popleft().close()

    def _newer_than(self, known: BinaryIO | None) -> list[BinaryIO]:
        """Open the files that were begun after a known one; return them oldest first.

        It opens the newest file first: a file that is renamed meanwhile is found twice rather than missed.
        """
        found: list[BinaryIO] = []
        for suffix in ("", *(f".{number}" for number in range(1, OLDER_FILES + 1))):
            try:
                file = open(f"{self._path}{suffix}", "rb")  # noqa: SIM115 - `close` closes it
            except FileNotFoundError:
                continue
            if known is not None and _are_same(file, known):
                file.close()
                break
            if found and _are_same(file, found[0]):
                file.close()
                continue
            found.insert(0, file)
        return found


class Recording:
    """The events of several folders in order of time, each with its folder's label as `of`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        stories = map(_timed, folders, labels(folders))
        self._events: Iterator[tuple[float, bytes]] = heapq.merge(*stories)

    def read(self) -> list[bytes]:
        """Return the next events; none after the last."""
        return [line for _, line in itertools.islice(self._events, 500)]

    def close(self) -> None:
        """Drop the remaining events."""
        self._events = iter(())


def labels(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, or their whole paths if two have the same name."""
    names = [folder.name for folder in folders]
    return names if len({*names}) == len(names) else [str(folder) for folder in folders]


def _timed(folder: Path, label: str) -> Iterator[tuple[float, bytes]]:
    tail = Tail(folder)
    while lines := tail.read():
        for event in map(json.loads, lines):
            yield event["t"], to_json(event | {"of": label}).encode()
    tail.close()


def is_event(line: bytes) -> bool:
    """Return whether a line is an event that a browser can parse; a crash may have left half a line."""
    try:
        event = json.loads(line, parse_constant=_refuse)
        return isinstance(event["event"], str) and isinstance(event["t"], int | float)
    except (ValueError, KeyError, TypeError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _are_same(one: BinaryIO, other: BinaryIO) -> bool:
    return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
