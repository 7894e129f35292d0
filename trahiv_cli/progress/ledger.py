"""The ledger of a run records the trained samples: each pass covers every sample once.

The samples of all passes have **positions** 0, 1, 2 and so on: with n samples in the data, position v is
index v % n in the order of pass v // n. The run's seed determines this order, the same for all peers. Each
peer's claim lists the positions that it brings to a round. When the round is committed, all members enter
them here. So a position whose round failed, or whose peer died before the round, was not trained.

A **stream** has shards, and the number of samples in a shard is not known until its end was read. So each
shard has 2^32 positions, and its samples have the first of them: with n shards in the stream, sample i of
shard v % n in the order of pass v // n has position v * 2^32 + i. A peer that has brought all samples of a
shard also brings the shard's last position, and then all positions beyond the samples count as covered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

MAX_SPANS = 4096
"""Limit for a ledger or a claim. The spans of honest peers are adjacent, except where a peer died."""

MAX_POSITION = 2**62
SHARD = 2**32
"""The number of positions of one shard of a stream. No data that is not streamed has as many samples."""

USELESS_AT_MOST = 1024  # positions claimed beyond the samples: their gradients were not finite

MOST_LEASES = 32
"""The most spans of positions in a report, which stays below a page with them."""


@dataclass(frozen=True)
class Spans:
    """A set of positions, as ascending half-open spans that neither overlap nor touch."""

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int]]) -> Spans:
        """Merge spans in any order; empty ones are left out."""
        united: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if start >= stop:
                continue
            if united and start <= united[-1][1]:
                united[-1] = united[-1][0], max(united[-1][1], stop)
            else:
                united.append((start, stop))
        return cls(tuple(united))

    @classmethod
    def of_positions(cls, positions: Iterable[int]) -> Spans:
        """Make spans of single positions, in any order."""
        return cls.of((position, position + 1) for position in positions)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.spans:
            yield from range(start, stop)

    def __contains__(self, position: int) -> bool:
        after = bisect_right(self.spans, (position, MAX_POSITION))
        return after > 0 and position < self.spans[after - 1][1]

    def __or__(self, other: Spans) -> Spans:
        return Spans.of((*self.spans, *other.spans))

    def __sub__(self, other: Spans) -> Spans:
        left: list[tuple[int, int]] = []
        taken = iter((*other.spans, (MAX_POSITION, MAX_POSITION)))
        low, high = next(taken)
        for start, stop in self.spans:
            while start < stop:
                while high <= start:
                    low, high = next(taken)
                if start < low:
                    left.append((start, min(stop, low)))
                start = max(start, min(stop, high))
        return Spans(tuple(left))

    def __and__(self, other: Spans) -> Spans:
        return self - (self - other)

    @property
    def end(self) -> int:
        """The position after the last one; 0 if the set is empty."""
        return self.spans[-1][1] if self.spans else 0

    def lowest(self, count: int) -> Spans:
        """Return the `count` lowest positions."""
        kept = []
        for start, stop in self.spans:
            kept.append((start, min(stop, start + count)))
            count -= min(count, stop - start)
        return Spans.of(kept)

    def longest(self, count: int) -> Spans:
        """Return the `count` longest spans."""
        return Spans.of(sorted(self.spans, key=lambda span: span[0] - span[1])[:count])

    def widened(self, unit: int) -> Spans:
        """Return all positions of the units, `unit` positions each, that have at least one of these."""
        return Spans.of((start // unit * unit, -(-stop // unit) * unit) for start, stop in self.spans)

    @property
    def first_gap(self) -> int:
        """The lowest position that is not in the set."""
        return self.spans[0][1] if 0 in self else 0

    def to_wire(self) -> list[int]:
        """Return the spans as a flat list that MessagePack and JSON carry: start, stop, start, stop..."""
        return [bound for span in self.spans for bound in span]

    @classmethod
    def from_wire(cls, data: object) -> Spans:
        """Read the list that `to_wire` returned, or raise `ValueError`."""
        if not isinstance(data, (list, tuple)) or len(data) % 2 or len(data) > 2 * MAX_SPANS:
            raise ValueError("not spans of positions")
        if not all(type(bound) is int and 0 <= bound <= MAX_POSITION for bound in data):
            raise ValueError("not spans of positions")
        if any(before >= after for before, after in pairwise(data)):
            raise ValueError("spans of positions that overlap, touch or descend")
        return cls(tuple(zip(data[::2], data[1::2], strict=True)))


@dataclass(frozen=True)
class Ledger:
    """The positions that the rounds of a history have trained."""

    covered: Spans = Spans()
    duplicates: int = 0
    """The number of trained positions that were covered already, by another peer or in another round."""

    def extend(self, trained: Sequence[Spans], most_ahead: int = MAX_POSITION) -> Ledger:
        """Enter the positions that each member of a committed round brought; their order has no effect.

        Some are left out, and are trained again: positions beyond the last covered one by more than
        `most_ahead` for each member, and claims with which the ledger would have more than `MAX_SPANS` spans.
        Claims with few spans are entered first.
        """
        covered = self.covered
        duplicates = self.duplicates
        near = Spans(((0, min(MAX_POSITION, covered.end + most_ahead * len(trained))),))
        for claimed in sorted(trained, key=lambda claimed: (len(claimed.spans), claimed.spans)):
            spans = claimed & near
            united = covered | spans
            if len(_without_tails(united).spans) <= MAX_SPANS:
                duplicates += len(covered) + len(spans) - len(united)
                covered = united
        return Ledger(_without_tails(covered), duplicates)

    def passes(self, num_samples: int) -> tuple[int, int]:
        """Return the number of complete passes over `num_samples`, and of positions covered beyond them."""
        whole = self.covered.first_gap // num_samples
        return whole, len(self.covered) - whole * num_samples

    def free_block(
        self,
        leased: Spans,
        size: int,
        skip: int = 0,
        least: int = 1,
        unit: int = 1,
        in_a_row: int = MAX_POSITION,
    ) -> tuple[int, int]:
        """Return start and stop of the lowest free block of positions; `MAX_POSITION` twice if there is none.

        It has `size` units of `unit` positions, or at least `least` if the gap ends earlier. `skip` blocks
        are left to other peers, which look at the same time. A unit is free if it is not completely covered
        and no peer has leased any of it, so some positions of the block may be covered. A block stays within
        one stretch of `in_a_row` positions, and comes from the next one only if this one has none.
        """
        covered = [(-(-start // unit) * unit, stop // unit * unit) for start, stop in self.covered.spans]
        taken = Spans.of(covered) | leased.widened(unit)
        size = size * unit
        least = min(least * unit, in_a_row)
        low = taken.first_gap
        while low < MAX_POSITION:
            end = min((low // in_a_row + 1) * in_a_row, MAX_POSITION)
            gaps = (Spans(((low, end),)) - taken).spans
            starts = ((start, stop) for first, stop in gaps for start in range(first, stop - least + 1, size))
            if found := list(islice(starts, skip + 1)):
                start, stop = found[skip % len(found)]
                return start, min(start + size, stop)
            low = end
        return MAX_POSITION, MAX_POSITION

    def to_wire(self) -> list[Any]:
        """Return the ledger as a list that MessagePack and JSON carry."""
        return [self.covered.to_wire(), self.duplicates]

    @classmethod
    def from_wire(cls, data: object) -> Ledger:
        """Read the list that `to_wire` returned, or raise `ValueError`."""
        match data:
            case [spans, int(duplicates)] if 0 <= duplicates <= MAX_POSITION:
                return cls(Spans.from_wire(spans), duplicates)
        raise ValueError("not a ledger")


def _without_tails(covered: Spans) -> Spans:
    """Cover the positions between the samples of a shard and its last position, if that one is covered."""
    tails = []
    end = 0
    for start, stop in covered.spans:
        if (start + 1) % SHARD == 0:
            tails.append((max(end, start + 1 - SHARD), start))
        end = stop
    return covered | Spans.of(tails) if tails else covered
