"""The positions of the data that this peer may train: leased before they are, so that no two peers train one.

A lease is a block of positions in this peer's report. It is this peer's once the report is stored and a
look at all others' reports *after that* shows none with the same positions. Of two that store at the same
time each sees the other, and both look for another block; of two that store one after the other the later one
does. A lease ends with the commit of the round that its positions were brought to, and returns to all when
its owner's report is gone.

Blocks are leased ahead of training, in a thread of their own. They grow with what a peer holds, so that all
that it trains in a round, however long that is, is few spans: a report has room for `MOST_LEASES`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from trahiv_cli.errors import SwarmError
from trahiv_cli.optim.background import Background
from trahiv_cli.optim.ledger import SHARD, Ledger, Spans, shards_in

MOST_LEASES = 32
"""Spans of positions in a report: it stays below a page."""

FREE_LEASES = MOST_LEASES // 2
"""A peer that holds so many spans adds only whole blocks, each of which doubles what it holds: the other half
of its report is enough for any round then."""

MOST_ROUNDS = 32
"""A peer may lease no more than what all peers together train in so many rounds. An honest one needs 24: it
holds samples of at most 4 rounds while those of 4 others are averaged (`optimizer.ACCUMULATE_AT_MOST`); it
leases up to twice as many, and a block."""

AHEAD_S, AHEAD_ROUNDS = 20.0, 8
"""A block is what this peer trains in that time, at most what all peers together train in so many rounds, and
no less than what it holds already. Leasing one costs two requests to the DHT."""

FIRST_BLOCK = 64
"""Positions that a peer leases at first, until it is known how fast it trains."""

NOTED_EVERY_S, NOTED = 0.5, 32
"""A loader takes a batch's positions at once: how fast they are taken shows over seconds."""

TRIES = 8
"""Blocks that are looked for before this peer pauses."""

PAUSE_S = 0.5
PATIENCE_S = 120.0
POLL_S = 0.05


class Reports(Protocol):
    """What is needed of a `SwarmTracker`."""

    own_id: str
    target_batch_size: int
    """Samples of a round, of all peers."""

    def leased_by_others(self, covered: Spans, most: int) -> Spans:
        """See `SwarmTracker`."""

    @property
    def rank_among_peers(self) -> int:
        """This peer's place among all that are there."""

    def lease(self, leases: Spans) -> bool:
        """See `SwarmTracker`."""


class Leases:
    """Gives this peer positions to train, one after the other. Thread-safe.

    Args:
        reports: where leases are told and seen.
        ledger: gives what is trained already.
        num_samples: in a pass.
        while_waiting: called again and again by who waits for a position; may raise.
    """

    unit = 1
    """Positions that are leased as one."""

    def __init__(
        self,
        reports: Reports,
        ledger: Callable[[], Ledger],
        num_samples: int,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._reports, self._ledger, self.num_samples = reports, ledger, num_samples
        self._while_waiting = while_waiting
        self._lock = threading.Lock()
        self._ready: deque[int] = deque()
        self._held = Spans()
        self._running: Background[None] | None = None
        self._failure: BaseException | None = None
        """Why the last attempt to lease a block failed, if it did."""
        self._longest_round = 0
        """Samples of the longest round so far: what was leased for it may be held in shorter ones."""
        self._num_taken = 0
        self._taken: deque[tuple[float, int]] = deque(maxlen=NOTED)
        """Moments of the monotonic clock, and how many positions had been taken by then."""
        self.lost = 0
        """Positions that this peer had leased, and that others trained or leased meanwhile."""

    def take(self, should_leave: Callable[[], bool] = lambda: False) -> int | None:
        """Return the next position; waits for a lease if there is none. None if this peer leaves meanwhile.

        Raises:
            SwarmError: there was none for two minutes.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self._lock:
                if self._is_low():
                    self._extend()
                if self._ready:
                    self._note_take()
                    return self._ready.popleft()
            if should_leave():
                return None
            if time.monotonic() >= deadline:
                raise SwarmError(
                    f"No samples could be leased for {PATIENCE_S:.0f} s: "
                    f"{self._failure or 'the DHT does not answer'}.",
                    hint="start again with the same command",
                ) from self._failure
            self._while_waiting()
            time.sleep(POLL_S)

    def give_back(self, positions: Sequence[int]) -> None:
        """Have positions that are still this peer's trained again: their gradients were dropped."""
        with self._lock:
            left = self._held - self._ledger().covered
            self._ready.extendleft(position for position in reversed(positions) if position in left)

    def settle(self, done: Iterable[int]) -> None:
        """Take note of a committed round: positions that this peer brought, and what others did since.

        What others trained or leased meanwhile of what is left, this peer leaves to them, and what is in so
        many pieces then that its report would soon be full.
        """
        with self._lock:
            left = self._held - self._ledger().covered - self._leased_by_others() - Spans.of_positions(done)
            self._held = left.longest(FREE_LEASES)
            ready = [position for position in self._ready if position in self._held]
            self.lost += len(self._ready) - len(ready)
            self._ready = deque(ready)

    @property
    def held(self) -> Spans:
        """All that this peer has leased."""
        with self._lock:
            return self._held

    # -- leasing -------------------------------------------------------------------------------------

    def _is_low(self) -> bool:
        """Whether it is time to lease another block."""
        return len(self._ready) <= self._ahead() // 2

    def _find(self, leased: Spans, skip: int) -> tuple[int, int]:
        """Find a block that nobody has leased: its start and stop."""
        size = max(self._ahead(), len(self._held))
        return self._ledger().free_block(leased, size, skip, self._least(size))

    def _gain(self, start: int, stop: int) -> None:
        """Have a block trained that is this peer's now."""
        self._ready.extend(range(start, stop))

    def _least(self, size: int) -> int:
        """How much of a block of that size must be free where it is to be leased."""
        return size if len(self._held.spans) >= FREE_LEASES else 1

    def _ahead(self) -> int:
        """How many positions to hold ahead of training."""
        most = min(self.num_samples, AHEAD_ROUNDS * self._reports.target_batch_size)
        if len(self._taken) < 2:
            return min(FIRST_BLOCK, most)
        (first_at, first), (last_at, last) = self._taken[0], self._taken[-1]
        per_second = (last - first) / (last_at - first_at)
        return max(1, min(most, round(AHEAD_S * per_second)))

    def _leased_by_others(self) -> Spans:
        """Return what others have leased, as far as they can have. The caller holds the lock."""
        self._longest_round = max(self._longest_round, self._reports.target_batch_size)
        most = MOST_ROUNDS * self._longest_round * self.unit
        return self._reports.leased_by_others(self._ledger().covered, most)

    def _note_take(self) -> None:
        """Take note that a position is taken now."""
        now = time.monotonic()
        if not self._taken or now >= self._taken[-1][0] + NOTED_EVERY_S:
            self._taken.append((now, self._num_taken))
        self._num_taken += 1

    def _extend(self) -> None:
        """Begin to lease another block, unless that is under way. The caller holds the lock."""
        if self._running is not None:
            if not self._running.is_over:
                return
            self._failure = self._running.error  # whatever it is, another try may succeed
        self._running = Background(self._lease)

    def _lease(self) -> None:
        skip = self._reports.rank_among_peers
        for _ in range(TRIES):
            with self._lock:
                start, stop = self._find(self._held | self._leased_by_others(), skip)
                block = Spans.of([(start, stop)]) - self._ledger().covered
                wanted = self._held | block
            if not block or len(wanted.spans) > MOST_LEASES:
                break
            is_told = self._reports.lease(wanted)
            with self._lock:
                if is_told and not block & self._leased_by_others():
                    self._held = self._held | block
                    self._gain(start, stop)
                    return
            skip += 1
        time.sleep(PAUSE_S)


class ShardLeases(Leases):
    """Leases of whole shards of a stream, whose samples are read one after the other. Thread-safe.

    `take` gives the first position of a shard to read. Of its samples, those are to be trained that
    `hand_out` says; a shard of which some have to be trained again is given once more.

    Args:
        reports: where leases are told and seen.
        ledger: gives what is trained already.
        num_shards: in a pass.
        while_waiting: called again and again by who waits for a shard; may raise.
    """

    unit = SHARD

    def __init__(
        self,
        reports: Reports,
        ledger: Callable[[], Ledger],
        num_shards: int,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(reports, ledger, num_shards * SHARD, while_waiting)
        self._handed_out: set[int] = set()
        self._ends: dict[int, int] = {}
        """By first position of a shard that this peer read to its end: the one after its last sample."""

    def has(self, start: int) -> bool:
        """Whether something is left of the shard that begins there, and it is this peer's."""
        with self._lock:
            return bool(self._held & Spans(((start, start + SHARD),)))

    def hand_out(self, position: int) -> bool:
        """Whether this peer is to train a sample, now; False if it does already, or anybody did."""
        with self._lock:
            if position in self._handed_out or position not in self._held:
                return False
            self._handed_out.add(position)
            return True

    def note_end(self, start: int, stop: int) -> None:
        """Take note that the samples of the shard that begins at `start` end before `stop`."""
        with self._lock:
            self._ends[start] = stop

    def give_back(self, positions: Sequence[int]) -> None:
        """Have samples that are still this peer's trained again: their gradients were dropped."""
        with self._lock:
            self._handed_out.difference_update(positions)
            shards = {position // SHARD * SHARD for position in positions if position in self._held}
            self._ready.extendleft(sorted(shards - set(self._ready), reverse=True))

    def settle(self, done: Iterable[int]) -> None:
        """Take note of a committed round: positions that this peer brought, and what others did since.

        A shard that another peer has leased meanwhile, this one leaves to it.
        """
        with self._lock:
            to_others = shards_in(self._held & self._leased_by_others())
            self.lost += len(to_others)
            theirs = Spans.of((start * SHARD, stop * SHARD) for start, stop in to_others.spans)
            left = self._held - theirs - self._ledger().covered - Spans.of_positions(done)
            self._held = left.longest(FREE_LEASES)
            mine = shards_in(self._held)
            self._ready = deque(start for start in self._ready if start // SHARD in mine)
            self._handed_out = {position for position in self._handed_out if position in self._held}
            self._ends = {start: stop for start, stop in self._ends.items() if start // SHARD in mine}

    def last_positions(self, brought: Spans) -> list[int]:
        """List the last positions of those shards of this peer's that are trained with what it brings."""
        with self._lock:
            done = self._ledger().covered | brought
            return [
                start + SHARD - 1
                for start, stop in self._ends.items()
                if not Spans.of([(start, stop)]) - done
            ]

    def _is_low(self) -> bool:
        return not self._ready

    def _find(self, leased: Spans, skip: int) -> tuple[int, int]:
        num_shards = self.num_samples // SHARD
        size = min(max(1, len(self._held) // SHARD), num_shards)
        return self._ledger().free_shards(leased, size, num_shards, skip, self._least(size))

    def _gain(self, start: int, stop: int) -> None:
        self._ready.extend(range(start, stop, SHARD))
