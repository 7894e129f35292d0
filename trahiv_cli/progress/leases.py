"""A peer leases positions of the data before it trains them, and records whose gradients it holds.

1. A lease is a block of positions in this peer's report. It is valid once the report is stored and all other
   peers' reports, fetched *after that*, have none of its positions. If two peers store at the same time, each
   sees the other's report and both look for another block; otherwise only the later one does.
2. Blocks are leased ahead of training, in a background thread. They grow with the number of positions that a
   peer holds, so that its samples of a round, however long, are few spans: a report has room for
   `MOST_LEASES`.
3. `Work` records the positions whose gradients this peer holds. If gradients are dropped, their positions are
   trained again.
4. A lease ends when a round with its positions is committed. It is free for all peers when its owner's report
   is gone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from trahiv_cli.background import in_background
from trahiv_cli.errors import SwarmError
from trahiv_cli.members.records import ignore_peer
from trahiv_cli.progress.ledger import MAX_POSITION, MOST_LEASES, SHARD, USELESS_AT_MOST, Ledger, Spans
from trahiv_cli.progress.tracker import SwarmTracker

T = TypeVar("T")


FREE_LEASES = MOST_LEASES // 2
"""A peer with this number of spans adds only whole blocks, each of which doubles its positions."""

MOST_ROUNDS = 32
"""A peer may lease at most the samples that all peers together train in this number of rounds. An honest peer
needs 24: it holds samples of at most 4 rounds (`round_runner.HELD_AT_MOST`) while samples of 4 others are
averaged; it leases up to twice as many, and a block."""

AHEAD_S = 20.0
"""A block has the samples that this peer trains in this time. It has at most the samples that all peers
together train in eight rounds, and at least as many as this peer holds already. Leasing one costs two
requests to the DHT."""

FIRST_BLOCK = 64  # positions, until the speed of this peer is known


class Leases:
    """Hands out units of the data to train, one after the other, `number` in a pass. Thread-safe.

    A unit has `unit` positions, one for each sample that training counts. It is a sample; with `SHARD`
    positions a shard, whose samples `read` yields; else a prompt, whose completions are samples. If some of a
    unit must be trained again, it is handed out once more. `SwarmOptimizer.divide_data` creates the object.

    `ledger` returns the ledger of trained positions, and `samples_per_second` the speed of this peer, 0 if it
    is not known yet. A thread that waits for a position calls `while_waiting` repeatedly; it may raise.
    Attempts to lease are `pause_s` apart, and `take` fails after `patience_s`.
    """

    def __init__(
        self,
        reports: SwarmTracker,
        ledger: Callable[[], Ledger],
        number: int,
        *,
        unit: int = 1,
        samples_per_second: Callable[[], float] = lambda: 0.0,
        while_waiting: Callable[[], None] = lambda: None,
        pause_s: float = 0.5,
        patience_s: float = 120.0,
    ) -> None:
        self._reports = reports
        self._ledger = ledger
        self.number = number
        self.unit = unit  # positions that are leased together
        self._samples_per_second = samples_per_second
        self._while_waiting = while_waiting
        self._pause_s = pause_s
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._ready: deque[int] = deque()
        self.held = Spans()  # all positions that this peer has leased
        self._handed_out: set[int] = set()
        self._ends: dict[int, int] = {}  # by a read shard's start: the end of its samples
        self._running: Future[None] | None = None
        self._longest_round = 0  # in samples: leases for it stay valid in shorter ones
        self.lost = 0  # units that this peer gave up before it trained them

    def take(self, should_leave: Callable[[], bool] = lambda: False) -> int | None:
        """Return the first position of the next unit; wait for a lease if there is none.

        Returns None if this peer leaves meanwhile.

        Raises:
            SwarmError: there was no lease for `patience_s`.
        """
        deadline = time.monotonic() + self._patience_s
        failure = None
        while True:
            with self._lock:
                if len(self._ready) <= self._ahead() // 2 and (self._running is None or self._running.done()):
                    # Another attempt may succeed, whatever the error of the last one.
                    failure = self._running.exception() if self._running else None
                    self._running = in_background(self._lease)
                if self._ready:
                    return self._ready.popleft()
            if should_leave():
                return None
            if time.monotonic() >= deadline:
                why = getattr(failure, "message", failure) or "the DHT does not answer"
                raise SwarmError(
                    f"No samples could be leased for {self._patience_s:.0f} s: {why}.",
                    hint="start again with the same command",
                ) from failure
            self._while_waiting()
            time.sleep(self._pause_s / 10)

    def give_back(self, positions: Sequence[int]) -> None:
        """Hand out these positions again if they are still this peer's: their gradients were dropped."""
        with self._lock:
            self._handed_out.difference_update(positions)
            left = self.held - self._ledger().covered
            units = {position // self.unit * self.unit for position in positions if position in left}
            self._ready.extendleft(sorted(units - set(self._ready), reverse=True))

    def settle(self, done: Iterable[int]) -> None:
        """Record a committed round, to which this peer brought the positions `done`.

        This peer gives up positions that others trained meanwhile, units of which others leased a part, and
        the shortest spans beyond `FREE_LEASES`.
        """
        with self._lock:
            theirs = (self.held & self._leased_by_others()).widened(self.unit)
            left = self.held - theirs - self._ledger().covered - Spans.of_positions(done)
            self.held = left.longest(FREE_LEASES)
            mine = self.held.widened(self.unit)
            num_ready = len(self._ready)
            self._ready = deque(start for start in self._ready if start in mine)
            self.lost += num_ready - len(self._ready)
            self._handed_out = {position for position in self._handed_out if position in self.held}
            self._ends = {start: stop for start, stop in self._ends.items() if start in mine}

    def resume(self, trained: Spans) -> None:
        """Hold the positions that this peer trained before it restarted; the next block leases them again."""
        with self._lock:
            self.held = trained.longest(FREE_LEASES)
            self._handed_out.update(trained)

    # -- the samples of a shard --------------------------------------------------------------------

    def read(self, start: int, shard: Iterable[T]) -> Iterator[tuple[int, T]]:
        """Yield the samples of the shard at `start` that this peer should train, with their positions.

        Samples that this peer trains already, or that any peer has trained, are left out. The iteration ends
        when no sample is left.
        """
        position = start
        for sample in shard:
            with self._lock:
                if not self.held & Spans(((start, start + SHARD),)):
                    return
                is_due = position in self.held and position not in self._handed_out
                if is_due:
                    self._handed_out.add(position)
            if is_due:
                yield position, sample
            position += 1
        with self._lock:
            self._ends[start] = position

    def last_positions(self, brought: Spans) -> Spans:
        """Return the last positions of the shards that this peer has read and that `brought` completes."""
        with self._lock:
            done = self._ledger().covered | brought
            ended = [start for start, stop in self._ends.items() if not Spans.of([(start, stop)]) - done]
            return Spans.of_positions(start + SHARD - 1 for start in ended)

    # -- leasing; the caller holds the lock, except for `_lease` ------------------------------------

    def _ahead(self) -> int:
        """Return the number of units to hold ahead of training."""
        if self.unit == SHARD:
            return 1
        most = min(self.number * self.unit, 8 * self._reports.target_batch_size)
        speed = self._samples_per_second()
        return max(1, min(most, round(AHEAD_S * speed) if speed else FIRST_BLOCK) // self.unit)

    def _leased_by_others(self) -> Spans:
        """Return the positions of the data that other peers have leased.

        A peer's leases don't count if they have uncovered positions of more than `MOST_ROUNDS`, or positions
        that all peers together can't reach. The log names the peer if it has this peer's history: otherwise
        it may know of more covered positions.
        """
        others = self._reports.others
        covered = self._ledger().covered
        self._longest_round = max(self._longest_round, self._reports.target_batch_size)
        most = MOST_ROUNDS * self._longest_round * self.unit
        end = covered.end + (1 + len(others)) * most
        believed: list[tuple[int, int]] = []
        for peer in others:
            if peer.leases.end <= end and len(peer.leases - covered) <= most:
                believed += peer.leases.spans
            elif peer.history == self._reports.history:
                ignore_peer(peer.peer_id, "it leases more samples, or later ones, than it can train")
        return Spans.of(believed)

    def _lease(self) -> None:
        """Lease another block; runs in a background thread, which takes the lock for moments."""
        in_a_row = self.number * SHARD if self.unit == SHARD else MAX_POSITION
        skip = sum(peer.peer_id < self._reports.own_id for peer in self._reports.others)
        for skipped in range(skip, skip + 8):
            with self._lock:
                size = max(self._ahead(), len(self.held) // self.unit)
                least = size if len(self.held.spans) >= FREE_LEASES else 1
                leased = self.held | self._leased_by_others()
                start, stop = self._ledger().free_block(leased, size, skipped, least, self.unit, in_a_row)
                block = Spans.of([(start, stop)]) - self._ledger().covered
                wanted = self.held | block
            if not block or len(wanted.spans) > MOST_LEASES:
                break
            is_told = self._reports.lease(wanted)
            with self._lock:
                if is_told and not block & self._leased_by_others():
                    self.held = self.held | block
                    self._ready.extend(range(start, stop, self.unit))
                    return
        time.sleep(self._pause_s)


class Work:
    """The positions whose gradients or local steps this peer holds. Without leases there are none."""

    def __init__(self) -> None:
        self.leases: Leases | None = None
        self._announced: list[int] = []  # positions whose gradients come next, in this order
        self._held: list[int] = []  # in the order in which their gradients came
        self._useless: list[int] = []  # their gradients were not finite, and would not be if repeated

    def divide(self, leases: Leases) -> None:
        """Take positions from `leases` from now on."""
        self.leases = leases

    @property
    def unit(self) -> int:
        """The number of positions that are leased together."""
        return self.leases.unit if self.leases is not None else 1

    def announce(self, positions: Sequence[int]) -> None:
        """Expect the gradients of the batch at these positions."""
        self._announced += positions

    def first(self, num_samples: int) -> Spans:
        """Return the positions of the first `num_samples` samples; empty if the data is not divided."""
        return Spans.of_positions(self._held[:num_samples])

    def resume(self, positions: Spans) -> None:
        """Hold the positions of the local steps in a checkpoint."""
        if self.leases is not None:
            self._held = [*positions]
            self.leases.resume(positions)

    def count_announced(self, num_samples: int) -> None:
        """Hold the first `num_samples` announced positions: their gradients are there."""
        self._held = [*self._held, *self._announced[:num_samples]]
        del self._announced[:num_samples]

    def forget_announced(self, end: int | None = None) -> None:
        """Give back the announced positions, up to `end` as in a slice: they are trained again."""
        gone = self._announced[:end]
        del self._announced[:end]
        if self.leases is not None:
            self.leases.give_back(gone)

    def drop(self, num_held: int, *, are_useless: bool = False) -> None:
        """Forget all but the first `num_held` positions; the rest is trained again, unless it is useless."""
        gone = self._held[num_held:]
        del self._held[num_held:]
        if are_useless:
            self._useless = [*self._useless, *gone][-USELESS_AT_MOST:]
        elif self.leases is not None:
            self.leases.give_back(gone)

    def aside(self, num_samples: int) -> Spans:
        """Return the positions that a round is about: of the first `num_samples`, and the useless ones.

        In a stream, the last positions of the shards that these complete come with them. They are at most as
        many as a claim may have.
        """
        leases = self.leases
        mine = Spans.of_positions([*self._held[:num_samples], *self._useless])
        if leases is not None and leases.unit > 1:
            mine |= leases.last_positions(mine)
        return mine.lowest(num_samples + USELESS_AT_MOST)

    def settle(self, num_samples: int, brought: Spans) -> None:
        """Record the commit of a round with this peer's first `num_samples`, and the positions `brought`."""
        if self.leases is not None:
            del self._held[:num_samples]
            self._useless = []
            self.leases.settle(brought)

    def leave_to_others(self, num_held: int) -> None:
        """Record that rounds of others were replayed or downloaded; see `drop` for `num_held`."""
        self.drop(num_held)
        if self.leases is not None:
            self.leases.settle(())

    def figures(self, ledger: Ledger) -> dict[str, int] | None:
        """Return how much of the data was trained; None if it is not divided.

        `covered` counts units after the complete `passes`: samples, shards or prompts. `duplicates` counts
        samples that were trained twice in a pass, and `lost` units that this peer gave up.
        """
        if (leases := self.leases) is None:
            return None
        passes, covered = ledger.passes(leases.number * leases.unit)
        return {
            "passes": passes,
            "covered": covered // leases.unit,
            {1: "samples", SHARD: "shards"}.get(leases.unit, "prompts"): leases.number,
            "duplicates": ledger.duplicates,
            "lost": leases.lost,
        }
