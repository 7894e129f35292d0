"""The ledger of a run tells which samples it has trained: each pass covers every sample once.

The samples of all passes have **positions**, 0, 1, 2 and so on: with n samples in the data, position v is
place v % n in the order of pass v // n, which is drawn from the run's seed and so the same for all peers.
Each peer's claim says which positions it brings to a round; when that is committed, all members enter them
here. So a position whose round failed, or whose peer died before it, was not trained.

A **stream** has shards, and nobody knows how many samples one holds until its end was read. So each shard
has 2^32 positions, its samples the first of them: with n shards in the stream, sample i of shard v % n in
the order of pass v // n has position v * 2^32 + i. A peer that has brought all samples of a shard brings
its last position, too, by which all others beyond the samples count as covered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

MAX_SPANS = 4096
"""Limit for a ledger or a claim: spans of honest peers are adjacent, except where a peer died."""

MAX_POSITION = 2**62
SHARD = 2**32
"""Positions of one shard of a stream; no data that is not streamed has so many samples."""


@dataclass(frozen=True)
class Spans:
    """A set of positions, as ascending half-open spans that neither overlap nor touch."""

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int]]) -> Spans:
        """Unite spans in any order; empty ones are left out."""
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
        """The position after the last one; 0 if there is none."""
        return self.spans[-1][1] if self.spans else 0

    def lowest(self, count: int) -> Spans:
        """The `count` lowest positions."""
        kept = []
        for start, stop in self.spans:
            kept.append((start, min(stop, start + count)))
            count -= min(count, stop - start)
        return Spans.of(kept)

    def longest(self, count: int) -> Spans:
        """Return the `count` longest spans."""
        return Spans.of(sorted(self.spans, key=lambda span: span[0] - span[1])[:count])

    def widened(self, unit: int) -> Spans:
        """All positions of the units, of so many each, that have one of these at least."""
        return Spans.of((start // unit * unit, -(-stop // unit) * unit) for start, stop in self.spans)

    @property
    def first_gap(self) -> int:
        """The lowest position that is not in the set."""
        return self.spans[0][1] if 0 in self else 0

    def to_wire(self) -> list[int]:
        """Return them as a flat list that MessagePack and JSON carry: start, stop, start, stop..."""
        return [bound for span in self.spans for bound in span]

    @classmethod
    def from_wire(cls, data: object) -> Spans:
        """Read what `to_wire` gave, or raise `ValueError`."""
        if not isinstance(data, (list, tuple)) or len(data) % 2 or len(data) > 2 * MAX_SPANS:
            raise ValueError("not spans of positions")
        if not all(type(bound) is int and 0 <= bound <= MAX_POSITION for bound in data):
            raise ValueError("not spans of positions")
        if any(before >= after for before, after in pairwise(data)):
            raise ValueError("spans of positions that overlap, touch or descend")
        return cls(tuple(zip(data[::2], data[1::2], strict=True)))


@dataclass(frozen=True)
class Ledger:
    """What the rounds of a history have trained."""

    covered: Spans = Spans()
    duplicates: int = 0
    """Times that a position was trained which was covered already, by two peers or in two rounds."""

    def extend(self, trained: Sequence[Spans], most_ahead: int = MAX_POSITION) -> Ledger:
        """Enter what each member of a committed round brought, whatever their order.

        Left out, and to be trained again, are positions more than `most_ahead` for each member beyond the
        last covered one, and claims that would leave more spans than `MAX_SPANS`: those in the most pieces.
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
        """Return how many passes over so many samples are complete, and what is covered beyond them."""
        whole = self.covered.first_gap // num_samples
        return whole, len(self.covered) - whole * num_samples

    def free_block(
        self, leased: Spans, size: int, skip: int = 0, least: int = 1, num_shards: int | None = None
    ) -> tuple[int, int]:
        """Return start and stop of the lowest free positions without a gap; `MAX_POSITION` if there are none.

        They are `size`, or fewer, but `least`, before a gap ends. `skip` blocks are left to others, which
        look at the same time. Of a stream, `num_shards` are a pass, and all is in shards that are not covered
        and of which nobody has leased anything: a pass's end ends a gap, and as long as it has more, none of
        the next one is found. Some positions of the block may be covered.
        """
        unit, in_a_row = (1, MAX_POSITION) if num_shards is None else (SHARD, num_shards * SHARD)
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
        """Return it as a list that MessagePack and JSON carry."""
        return [self.covered.to_wire(), self.duplicates]

    @classmethod
    def from_wire(cls, data: object) -> Ledger:
        """Read what `to_wire` gave, or raise `ValueError`."""
        match data:
            case [spans, int(duplicates)] if 0 <= duplicates <= MAX_POSITION:
                return cls(Spans.from_wire(spans), duplicates)
        raise ValueError("not a ledger")


def _without_tails(covered: Spans) -> Spans:
    """Cover what lies between the samples of each shard and its last position, where that is covered."""
    tails = []
    end = 0
    for start, stop in covered.spans:
        if (start + 1) % SHARD == 0:
            tails.append((max(end, start + 1 - SHARD), start))
        end = stop
    return covered | Spans.of(tails) if tails else covered
