"""Which chunks of a snapshot are there, and which donor is asked for which.

Each donor is asked for its share of what is missing. Who is done takes over half of what another owes, and
all of what one owes that has been silent for `QUIET_S`. Every chunk is checked against the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trahiv_cli.swarm.snapshot import Manifest, Snapshot, digest_of_bytes, shared_bytes

QUIET_S = 5.0  # a donor that sends no chunk for so long loses what it was asked for to one that has time
WORTH_HALVING = 4  # chunks: of fewer nothing is taken from a donor that is not quiet


class Damaged(Exception):
    """A donor sent something else than it offered."""


@dataclass(eq=False)
class ChunkRequest:
    """Chunks [next, stop) that one donor was asked for; `stop` may fall while they come."""

    next: int
    stop: int
    heard_at: float


class ChunkBoard:
    """The chunks of the snapshot with this digest. `now` is the clock, in seconds."""

    def __init__(
        self, digest: bytes, manifest: Manifest, now: Callable[[], float] = lambda: time.monotonic()
    ) -> None:
        self.digest, self.manifest, self._now = digest, manifest, now
        self.content = shared_bytes(manifest.num_bytes)  # encoded, uint8; other processes can map it
        self._view: Any = self.content.numpy().data
        self._is_there = [False] * len(manifest.checksums)
        self._requests: list[ChunkRequest] = []
        self.bytes_there = 0
        self.heard_at = now()  # when the last new chunk came

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are there."""
        return all(self._is_there)

    def take_over(self, own: Snapshot) -> None:
        """Copy the chunks that this peer's own snapshot has in the same place."""
        pairs = zip(self.manifest.checksums, own.manifest.checksums, strict=False)
        for chunk, (theirs, mine) in enumerate(pairs):
            if theirs == mine:
                self._store(chunk, own.chunk(chunk))

    def request(self, num_donors: int) -> ChunkRequest | None:
        """Decide what one of several donors is asked for next: its share of what nobody was asked for.

        If there is nothing, then of what others owe: half of the most, or all of one that is quiet.
        """
        if run := self._longest_free_run():
            share = -(-self._is_there.count(False) // num_donors)
            return self._note(run.start, min(run.stop, run.start + share))
        debtors = [request for request in self._requests if request.next < request.stop]
        quiet = [request for request in debtors if self._now() - request.heard_at > QUIET_S]
        debtor = max(quiet or debtors, key=lambda request: request.stop - request.next, default=None)
        if debtor is None or (not quiet and debtor.stop - debtor.next < WORTH_HALVING):
            return None
        stop = debtor.stop
        debtor.stop = debtor.next if quiet else (debtor.next + debtor.stop) // 2
        return self._note(debtor.stop, stop)

    def put(self, request: ChunkRequest, chunk: bytes) -> None:
        """Take the next chunk of a request; Damaged if it is not what the manifest says."""
        is_it = digest_of_bytes(chunk) == self.manifest.checksums[request.next]
        if not is_it or not self._store(request.next, chunk):
            raise Damaged(f"chunk {request.next} was damaged")
        request.next += 1
        request.heard_at = self._now()

    def release(self, request: ChunkRequest) -> None:
        """Let others have what is left of a request."""
        self._requests.remove(request)

    def _note(self, start: int, stop: int) -> ChunkRequest:
        request = ChunkRequest(start, stop, self._now())
        self._requests.append(request)
        return request

    def _store(self, chunk: int, content: bytes) -> bool:
        """Store a chunk; not if the manifest contradicts itself, and it has another length than its span."""
        span = self.manifest.span(chunk)
        if len(content) != span.stop - span.start:
            return False
        if not self._is_there[chunk]:
            self._view[span] = content
            self._is_there[chunk] = True
            self.bytes_there += len(content)
            self.heard_at = self._now()
        return True

    def _longest_free_run(self) -> range:
        """Return the longest run of chunks that are missing and that nobody was asked for."""
        is_free = [not there for there in self._is_there]
        for request in self._requests:
            is_free[request.next : request.stop] = [False] * (request.stop - request.next)
        longest, start = range(0), 0
        for end, is_longer in enumerate([*is_free, False]):
            if not is_longer:
                longest = max(longest, range(start, end), key=len)
                start = end + 1
        return longest
