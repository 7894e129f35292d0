"""A peer leases positions of the data before it trains them, and knows of which it holds the gradients.

1. A lease is a block of positions in this peer's report. It is this peer's once the report is stored and a
   look at all others' reports *after that* shows none with the same positions. Of two that store at the same
   time each sees the other, and both look for another block; of two that store one after the other the later
   one does.
2. Blocks are leased ahead of training, in a thread of their own. They grow with what a peer holds, so that
   all that it trains in a round, however long that is, is few spans: a report has room for `MOST_LEASES`.
3. `Work` knows whose gradients this peer holds. What was dropped is trained again.
4. A lease ends with the commit of the round that its positions were brought to, and returns to all when its
   owner's report is gone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from trahiv_cli.errors import SwarmError
from trahiv_cli.optim.background import in_background
from trahiv_cli.optim.ledger import SHARD, Ledger, Spans
from trahiv_cli.optim.rounds import USELESS_AT_MOST

if TYPE_CHECKING:
    from trahiv_cli.optim.progress import SwarmTracker

MOST_LEASES = 32
"""Spans of positions in a report: it stays below a page."""

FREE_LEASES = MOST_LEASES // 2
"""A peer that holds so many spans adds only whole blocks, each of which doubles what it holds."""

MOST_ROUNDS = 32
"""A peer may lease no more than what all peers together train in so many rounds. An honest one needs 24: it
holds samples of at most 4 rounds while those of 4 others are averaged (`seeker.ACCUMULATE_AT_MOST`); it
leases up to twice as many, and a block."""

AHEAD_S, AHEAD_ROUNDS = 20.0, 8
"""A block is what this peer trains in that time, at most what all peers together train in so many rounds, and
no less than what it holds already. Leasing one costs two requests to the DHT."""

FIRST_BLOCK = 64  # positions, until it is known how fast this peer trains
TRIES, PAUSE_S = 8, 0.5  # blocks that are looked for before this peer pauses
PATIENCE_S, POLL_S = 120.0, 0.05


class Leases:
    """Gives this peer positions to train, one after the other, of passes of `num_samples`. Thread-safe.

    `ledger` gives what is trained already, `samples_per_second` how fast this peer trains, 0 if that is not
    known yet. `while_waiting` is called again and again by whoever waits for a position; it may raise.
    """

    unit, counted = 1, "samples"
    """Positions that are leased as one, and what there is one of for each such unit."""

    def __init__(
        self,
        reports: SwarmTracker,
        ledger: Callable[[], Ledger],
        num_samples: int,
        samples_per_second: Callable[[], float] = lambda: 0.0,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._reports, self._ledger, self.num_samples = reports, ledger, num_samples
        self._samples_per_second, self._while_waiting = samples_per_second, while_waiting
        self._lock = threading.Lock()
        self._ready: deque[int] = deque()
        self._held = Spans()
        self._running: Future[None] | None = None
        self._failure: BaseException | None = None
        self._longest_round = 0  # in samples: what was leased for it may be held in shorter ones
        self.lost = 0  # positions that others took over while this peer had leased them

    @property
    def held(self) -> Spans:
        """All that this peer has leased."""
        with self._lock:
            return self._held

    def take(self, should_leave: Callable[[], bool] = lambda: False) -> int | None:
        """Return the next position; waits for a lease if there is none. None if this peer leaves meanwhile.

        Raises:
            SwarmError: there was none for two minutes.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self._lock:
                if len(self._ready) <= self._ahead() // 2 and (self._running is None or self._running.done()):
                    # Whatever the last attempt failed by, another one may succeed.
                    self._failure = self._running.exception() if self._running else None
                    self._running = in_background(self._lease)
                if self._ready:
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
            units = {position // self.unit * self.unit for position in positions if position in left}
            self._ready.extendleft(sorted(units - set(self._ready), reverse=True))

    def settle(self, done: Iterable[int]) -> None:
        """Take note of a committed round, to which this peer brought what is `done`.

        What others trained meanwhile is left to them, and so are units of which they leased anything, and
        pieces too many for a report.
        """
        with self._lock:
            theirs = (self._held & self._leased_by_others()).units(self.unit)
            left = self._held - theirs.of_units(self.unit) - self._ledger().covered
            self._held = (left - Spans.of_positions(done)).longest(FREE_LEASES)
            mine, num_ready = self._held.units(self.unit), len(self._ready)
            self._ready = deque(position for position in self._ready if position // self.unit in mine)
            self.lost += num_ready - len(self._ready)

    # -- leasing, with the lock --------------------------------------------------------------------

    def _find(self, leased: Spans, size: int, skip: int, least: int) -> tuple[int, int]:
        """Find a block of units that nobody has leased: its first position, and that after its last."""
        return self._ledger().free_block(leased, size, skip, least)

    def _ahead(self) -> int:
        """How many units to hold ahead of training."""
        most = min(self.num_samples, AHEAD_ROUNDS * self._reports.target_batch_size)
        speed = self._samples_per_second()
        return min(most, max(1, round(AHEAD_S * speed)) if speed else FIRST_BLOCK)

    def _leased_by_others(self) -> Spans:
        """Return what others have leased, as far as they can have."""
        self._longest_round = max(self._longest_round, self._reports.target_batch_size)
        most = MOST_ROUNDS * self._longest_round * self.unit
        return self._reports.leased_by_others(self._ledger().covered, most)

    def _lease(self) -> None:
        """Lease another block, in a thread of its own, which takes the lock for moments."""
        skip = self._reports.rank_among_peers
        for skipped in range(skip, skip + TRIES):
            with self._lock:
                size = max(self._ahead(), len(self._held) // self.unit)
                least = size if len(self._held.spans) >= FREE_LEASES else 1
                start, stop = self._find(self._held | self._leased_by_others(), size, skipped, least)
                block = Spans.of([(start, stop)]) - self._ledger().covered
                wanted = self._held | block
            if not block or len(wanted.spans) > MOST_LEASES:
                break
            is_told = self._reports.lease(wanted)
            with self._lock:
                if is_told and not block & self._leased_by_others():
                    self._held = self._held | block
                    self._ready.extend(range(start, stop, self.unit))
                    return
        time.sleep(PAUSE_S)


class ShardLeases(Leases):
    """Leases of whole shards of a stream, whose samples are read one after the other. Thread-safe.

    `take` gives the first position of a shard to read, of `num_shards` in a pass. Of its samples, those are
    to be trained that `hand_out` says; a shard of which some have to be trained again is given once more.
    """

    unit, counted = SHARD, "shards"

    def __init__(
        self, reports: SwarmTracker, ledger: Callable[[], Ledger], num_shards: int, **more: Any
    ) -> None:
        super().__init__(reports, ledger, num_shards * SHARD, **more)
        self._handed_out: set[int] = set()
        self._ends: dict[int, int] = {}
        """Maps the first position of each shard read to its end to the position after its last sample."""

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
        super().give_back(positions)

    def settle(self, done: Iterable[int]) -> None:
        """Take note of a committed round; see `Leases.settle`."""
        super().settle(done)
        with self._lock:
            mine = self._held.units(SHARD)
            self._handed_out = {position for position in self._handed_out if position in self._held}
            self._ends = {start: stop for start, stop in self._ends.items() if start // SHARD in mine}

    def last_positions(self, brought: Spans) -> list[int]:
        """List the last positions of those shards of this peer's that are trained with what it brings."""
        with self._lock:
            done = self._ledger().covered | brought
            read = {start: Spans.of([(start, stop)]) for start, stop in self._ends.items()}
            return [start + SHARD - 1 for start, samples in read.items() if not samples - done]

    def _find(self, leased: Spans, size: int, skip: int, least: int) -> tuple[int, int]:
        return self._ledger().free_shards(leased, size, self.num_samples // SHARD, skip, least)

    def _ahead(self) -> int:
        return 1


class Work:
    """The positions whose gradients, or own steps, this peer holds; without leases it knows of none."""

    def __init__(self) -> None:
        self.leases: Leases | None = None
        self._announced: list[int] = []
        self._held: list[int] = []  # in the order in which their gradients came
        self._useless: list[int] = []  # their gradients were not finite, and would not be another time

    @property
    def unit(self) -> int:
        """Positions that are leased as one."""
        return self.leases.unit if self.leases is not None else 1

    def announce(self, positions: Sequence[int]) -> None:
        """Expect the gradients of these."""
        self._announced += positions

    def count_announced(self) -> None:
        """The gradients of what was announced are there."""
        self._held, self._announced = [*self._held, *self._announced], []

    def forget_announced(self, but: Sequence[int] = ()) -> None:
        """Have what was announced trained again, but for these: they are announced anew."""
        kept = set(but)
        gone, self._announced = [position for position in self._announced if position not in kept], []
        if self.leases is not None:
            self.leases.give_back(gone)

    def drop(self, num_held: int, *, are_useless: bool = False) -> None:
        """Forget all but the first positions; have the others trained again, unless they are useless."""
        if self.leases is None:
            return
        gone = self._held[num_held:]
        del self._held[num_held:]
        if are_useless:
            self._useless = [*self._useless, *gone][-USELESS_AT_MOST:]
        else:
            self.leases.give_back(gone)

    def aside(self, num_samples: int) -> Spans:
        """Return the positions of the first samples, which a round is about, and of the useless ones."""
        mine = Spans.of_positions([*self._held[:num_samples], *self._useless])
        if not isinstance(self.leases, ShardLeases):
            return mine
        return mine | Spans.of_positions(self.leases.last_positions(mine))

    def settle(self, num_samples: int, brought: Spans) -> None:
        """A round of this peer's was committed, about its first samples, so many, with these positions."""
        if self.leases is not None:
            del self._held[:num_samples]
            self._useless = []
            self.leases.settle(brought)

    def leave_to_others(self, num_held: int) -> None:
        """Others' rounds were gone through; see `drop` for `num_held`."""
        self.drop(num_held)
        if self.leases is not None:
            self.leases.settle(())

    def figures(self, ledger: Ledger) -> dict[str, int] | None:
        """Return how much of the data was trained; None where it is not divided.

        `covered` counts samples or shards after complete `passes`; `duplicates` were trained twice in a pass.
        """
        if self.leases is None:
            return None
        passes, covered = ledger.passes(self.leases.num_samples)
        return {
            "passes": passes,
            "covered": covered // self.unit,
            self.leases.counted: self.leases.num_samples // self.unit,
            "duplicates": ledger.duplicates,
            "lost": self.leases.lost,
        }
