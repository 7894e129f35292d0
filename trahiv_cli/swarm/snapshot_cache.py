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
# After a snapshot none is made for so many times what that took, whatever is asked. A small state is copied
# in milliseconds, and who chases a quick swarm must not wait for it.
RESTS = 10


@dataclass
class _Kept:
    snapshot: Snapshot
    rank: Rank
    made_at: float = 0.0  # when the peer last had this state, for all that is known
    begun_at: float = 0.0  # when it was last begun to be copied
    used_at: float = 0.0
    num_streams: int = 0


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
        self._kept: dict[bytes, _Kept] = {}  # by digest
        self._is_making = asyncio.Lock()
        self._rests_until = -math.inf

    async def find(self, digest: bytes, rank: Rank) -> Snapshot:
        """Find the snapshot with this digest (empty: any), else one of this rank or further.

        The latter is a young one that is far enough, or as far as this peer was when it was asked; else a new
        one. While each of two is being fetched, it is the further of these. RoundFailed, ValueError: see
        `build_snapshot`.
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
        young = [kept for kept in self._kept.values() if self._now() - kept.made_at <= SHARE_S]
        enough = [kept for kept in young if kept.rank >= rank or kept.begun_at > asked_at]
        return self._kept.get(digest) or max(enough, key=lambda kept: kept.rank, default=None)

    async def _newest(self) -> _Kept:
        """Make a snapshot if there is room for it, and return the furthest."""
        await asyncio.sleep(self._rests_until - self._now())
        idle = [digest for digest, kept in self._kept.items() if not kept.num_streams]
        if len(self._kept) >= MAX_SNAPSHOTS and idle:
            del self._kept[min(idle, key=lambda digest: self._kept[digest].used_at)]
        if len(self._kept) < MAX_SNAPSHOTS:
            begun_at = self._now()
            try:
                made = await self._make()
            finally:
                self._rests_until = self._now() + RESTS * (self._now() - begun_at)
            kept = self._kept.setdefault(made.digest, _Kept(made, made.manifest.rank))
            kept.made_at, kept.begun_at = self._now(), begun_at
        return max(self._kept.values(), key=lambda kept: kept.rank)

    @contextlib.contextmanager
    def opened(self, digest: bytes) -> Iterator[Snapshot]:
        """Keep a snapshot while it is being sent; KeyError if it is not kept any more."""
        found = self._kept[digest]
        found.num_streams += 1
        try:
            yield found.snapshot
        finally:
            found.num_streams -= 1
            self._touch(found)

    def forget_unused(self) -> None:
        """Drop what no peer has fetched from for `KEEP_S`."""
        limit = self._now() - KEEP_S
        kept = self._kept.items()
        self._kept = {digest: one for digest, one in kept if one.num_streams or one.used_at > limit}

    def _touch(self, kept: _Kept) -> None:
        kept.used_at = self._now()
        asyncio.get_running_loop().call_later(KEEP_S + 1, self.forget_unused)
