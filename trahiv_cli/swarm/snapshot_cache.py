"""The snapshots that a peer gives away: few, shared among those who ask, and kept while they fetch.

Each copy of the state holds up the step that is trained meanwhile. So those who ask at about the same time
get the same snapshot, and after each copy the peer rests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from trahiv_cli.swarm.snapshot import KEEP_S, Rank, Snapshot

MAX_SNAPSHOTS = 2  # that one peer keeps at a time; each is as large as its encoded state
SHARE_S = 5.0  # a snapshot so young is given to all: they may not know how far this peer is
RESTS = 10
"""After a snapshot none is made for so many times what that took, whatever is asked. A small state is copied
in milliseconds, and who chases a quick swarm must not wait for it."""


@dataclass
class _Kept:
    snapshot: Snapshot
    made_at: float = 0.0  # when the peer last had this state, for all that is known
    begun_at: float = 0.0  # when it was last begun to be copied
    used_at: float = 0.0
    num_streams: int = 0

    @property
    def rank(self) -> Rank:
        return self.snapshot.manifest.rank


class SnapshotCache:
    """The snapshots that a peer gives away: at most two, each as long as another peer fetches from it.

    Args:
        make: copies and encodes the state that the peer has now; never called twice at a time.
        now: the clock, in seconds.
    """

    def __init__(
        self, make: Callable[[], Awaitable[Snapshot]], now: Callable[[], float] = lambda: time.monotonic()
    ) -> None:
        self._make, self._now = make, now
        self._kept: list[_Kept] = []
        self._is_making = asyncio.Lock()
        self._rests_until = -math.inf

    async def find(self, digest: bytes, rank: Rank) -> Snapshot:
        """Find what another peer asks for, or the nearest to it.

        Args:
            digest: of the snapshot that is wanted; empty if any will do.
            rank: that it shall have at least.

        Returns:
            The snapshot itself; else a young one that is far enough, or as far as this peer was when it was
            asked; else a new one. While each of two is being fetched, the further of these, whatever is
            wanted.

        Raises:
            RoundFailed, ValueError: see `build_snapshot`.
        """
        asked_at = self._now()
        kept = self._fitting(digest, rank, asked_at)
        if kept is None:
            async with self._is_making:
                kept = self._fitting(digest, rank, asked_at) or await self._newest()
        self._touch(kept)
        return kept.snapshot

    def _fitting(self, digest: bytes, rank: Rank, asked_at: float) -> _Kept | None:
        self.forget_unused()
        wanted = next((kept for kept in self._kept if kept.snapshot.digest == digest), None)
        young = [kept for kept in self._kept if self._now() - kept.made_at <= SHARE_S]
        enough = [kept for kept in young if kept.rank >= rank or kept.begun_at > asked_at]
        return wanted or max(enough, key=lambda kept: kept.rank, default=None)

    async def _newest(self) -> _Kept:
        """Make a snapshot if there is room for it, and return the furthest."""
        await asyncio.sleep(self._rests_until - self._now())
        idle = [kept for kept in self._kept if not kept.num_streams]
        if len(self._kept) >= MAX_SNAPSHOTS and idle:
            self._kept.remove(min(idle, key=lambda kept: kept.used_at))
        if len(self._kept) < MAX_SNAPSHOTS:
            begun_at = self._now()
            try:
                made = await self._make()
            finally:
                self._rests_until = self._now() + RESTS * (self._now() - begun_at)
            same = [kept for kept in self._kept if kept.snapshot.digest == made.digest]
            kept = same[0] if same else _Kept(made)
            kept.made_at, kept.begun_at = self._now(), begun_at
            self._kept = [other for other in self._kept if other is not kept] + [kept]
        return max(self._kept, key=lambda kept: kept.rank)

    @contextlib.contextmanager
    def opened(self, digest: bytes) -> Iterator[Snapshot]:
        """Keep a snapshot while it is being sent.

        Raises:
            KeyError: it is not kept any more.
        """
        found = next((kept for kept in self._kept if kept.snapshot.digest == digest), None)
        if found is None:
            raise KeyError(digest)
        found.num_streams += 1
        try:
            yield found.snapshot
        finally:
            found.num_streams -= 1
            self._touch(found)

    def forget_unused(self) -> None:
        """Drop what no peer has fetched from for `KEEP_S`."""
        limit = self._now() - KEEP_S
        self._kept = [kept for kept in self._kept if kept.num_streams or kept.used_at > limit]

    def _touch(self, kept: _Kept) -> None:
        kept.used_at = self._now()
        asyncio.get_running_loop().call_later(KEEP_S + 1, self.forget_unused)
