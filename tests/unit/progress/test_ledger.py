"""A run's history and its ledger of trained positions; spans are compared with Python's own sets."""

import random

import pytest

from tests.kit.stepping import spans
from trahiv_cli.progress.history import DIGEST_BYTES, History
from trahiv_cli.progress.ledger import MAX_POSITION, MAX_SPANS, SHARD, Ledger, Spans

ALL = spans(0, MAX_POSITION)
START = History()
DIGEST = bytes(DIGEST_BYTES)


def past(*proofs, samples=8, steps=1):
    history = START
    for proof in proofs:
        history = history.extend(samples=samples, proof=proof, steps=steps)
    return history


def test_history_counts_steps_and_samples():
    history = past(b"p").extend(samples=5, proof=b"q", steps=3)
    assert (history.step, history.samples, len(history.digest)) == (4, 13, DIGEST_BYTES)
    assert History.from_wire(history.to_wire()) == history


def test_different_pasts_have_different_digests():
    pasts = [past(*proofs) for proofs in ([b"p", b"q"], [b"q", b"p"], [b"p", b"r"], [b"r", b"q"], [b"pq"])]
    pasts += [past(b"p"), past(b"p", samples=9), past(b"p", steps=2)]
    for _ in range(20):
        assert len({one.digest for one in pasts}) == len({one.rank for one in pasts}) == len(pasts)
        pasts = [one.extend(samples=8, proof=b"same") for one in pasts]


def some(seed):
    """Return random spans, and the same positions as a set."""
    draw = random.Random(seed)
    pieces = [sorted((draw.randrange(40), draw.randrange(40))) for _ in range(draw.randrange(6))]
    return Spans.of(map(tuple, pieces)), {one for start, stop in pieces for one in range(start, stop)}


@pytest.mark.parametrize("seed", range(100))
def test_spans_behave_like_sets(seed):
    (ours, mine), (theirs, others) = some(seed), some(seed + 1000)
    assert set(ours) == mine
    assert list(ours) == sorted(mine)
    assert len(ours) == len(mine)
    assert bool(ours) == bool(mine)
    assert ours.end == max(mine, default=-1) + 1
    assert set(ours | theirs) == mine | others
    assert set(ours - theirs) == mine - others
    assert set(ours & theirs) == mine & others
    assert {position for position in range(50) if position in ours} == mine
    assert Spans.of_positions(mine) == ours
    assert list(ours.lowest(7)) == sorted(mine)[:7]
    for one in (ours, ours | theirs, ours - theirs, ours & theirs):
        assert Spans.from_wire(one.to_wire()) == one  # ascending, disjoint, not empty
    assert ours.first_gap == min({*range(50)} - mine)


NO_SPANS = [None, 3, "0 1", {}, [0], [1, 1], [2, 1], [0, 2, 1, 3], [0, 1, 1, 2], [-1, 1]]
NO_SPANS += [[0, MAX_POSITION + 1], [0.0, 1.0], [True, 2], [None, 1], list(range(2 * MAX_SPANS + 2))]
NO_LEDGERS = None, [], [[0, 1]], [[0, 1], -1], [[0, 1], "0"], [[0, 1], 0, 0], *([no, 0] for no in NO_SPANS)
NO_HISTORIES = [1, 8], [-1, 8, DIGEST], [1, -8, DIGEST], [1.0, 8, DIGEST], [1, 8, DIGEST + b"x"]
NO_HISTORIES += [1, 8, "0" * DIGEST_BYTES], [1, 8, DIGEST, 0]


@pytest.mark.parametrize(("kind", "lies"), [(Spans, NO_SPANS), (Ledger, NO_LEDGERS), (History, NO_HISTORIES)])
def test_malformed_wire_data_is_refused(kind, lies):
    for data in lies:
        with pytest.raises(ValueError, match="not|overlap"):
            kind.from_wire(data)


def test_committed_positions_are_covered_once():
    members = [spans(0, 4, 8, 12), spans(3, 9), spans(11, 13)]
    for order in (members, members[::-1]):
        assert Ledger().extend(order) == Ledger(spans(0, 13), duplicates=3)
    ledger = Ledger(spans(0, 20), duplicates=1)
    ledger = ledger.extend([spans(15, 25), spans(24, 26), Spans()])
    assert ledger == Ledger(spans(0, 26), duplicates=7) == Ledger.from_wire(ledger.to_wire())
    assert ledger.passes(10) == (2, 6)
    assert ledger.extend([spans(28, 30)]).passes(10) == (2, 8)


def test_unreachable_positions_are_left_out():
    honest = spans(10, 20)
    far = spans(20, 30, 29 + 2 * 100, MAX_POSITION)
    ledger = Ledger(spans(0, 10))
    for order in ([far, honest], [honest, far]):
        assert ledger.extend(order, most_ahead=100) == Ledger(spans(0, 30))
    assert ledger.extend([honest, spans(200, 220)], most_ahead=100).covered.end == 210


def test_overly_fragmented_claims_are_left_out():
    first, second = (Spans.of_positions(range(odd, 4 * MAX_SPANS, 4)) for odd in (1, 3))
    honest = [spans(start, start + 100) for start in (5 * MAX_SPANS, 6 * MAX_SPANS)]
    ledger = Ledger().extend([first, *honest])
    assert ledger == Ledger(honest[0] | honest[1])
    ledger = ledger.extend([second, spans(0, 8)])
    assert ledger.covered == honest[0] | honest[1] | spans(0, 8)
    few = Spans(first.spans[: MAX_SPANS - 2])
    ledger = Ledger().extend([few, *honest])
    assert len(ledger.covered.spans) == MAX_SPANS
    assert Ledger.from_wire(ledger.to_wire()) == ledger
    for order in ([second, first], [first, second]):
        assert ledger.extend(order) == ledger
    assert len(ledger.extend([spans(0, 4 * MAX_SPANS)]).covered.spans) == 3, "gaps can be closed"


def test_lowest_free_positions_are_leased_first():
    ledger = Ledger(spans(0, 10, 14, 20))
    between = spans(11, 13)
    assert ledger.free_block(Spans(), size=8) == (10, 14)
    assert ledger.free_block(between, size=8) == (10, 11)
    assert ledger.free_block(between, size=8, least=8) == (20, 28)
    ledger = Ledger(spans(0, 5))
    blocks = [ledger.free_block(spans(11, 12), size=4, skip=rank) for rank in range(4)]
    assert blocks == [(5, 9), (9, 11), (12, 16), (16, 20)]
    for ledger, leased in ((Ledger(ALL), Spans()), (Ledger(), ALL)):
        for how in ({}, {"unit": SHARD, "in_a_row": 10 * SHARD}, {"unit": 6}):
            assert ledger.free_block(leased, 8, **how) == (MAX_POSITION, MAX_POSITION)


def test_last_position_covers_its_shard():
    ledger = Ledger().extend([spans(0, 30)])
    assert ledger.passes(2 * SHARD) == (0, 30)
    ledger = ledger.extend([spans(30, 50, SHARD - 1, SHARD)])
    assert ledger == Ledger(spans(0, SHARD))
    ledger = ledger.extend([spans(SHARD, SHARD + 7, 2 * SHARD - 1, 2 * SHARD)])
    assert ledger == Ledger(spans(0, 2 * SHARD))
    assert ledger.passes(2 * SHARD) == (1, 0)
    ledger = Ledger().extend([spans(5, 30, 2 * SHARD - 1, 2 * SHARD)])
    assert ledger.covered == spans(5, 30, SHARD, 2 * SHARD)
    odd = Spans.of_positions(range(1, 2 * MAX_SPANS - 2, 2))
    even = Spans.of_positions([*range(0, 2 * MAX_SPANS - 2, 2), SHARD - 1])
    assert Ledger(odd).extend([even]) == Ledger(spans(0, SHARD)), "one span whatever its claims have"


def test_lowest_free_shards_are_leased_first():
    def free(leased=(), *, covered, **how):
        start, stop = Ledger().extend([Spans.of(covered)]).free_block(Spans.of(leased), **how)
        return start // SHARD, stop // SHARD

    def a_pass(num_shards):
        return {"unit": SHARD, "in_a_row": num_shards * SHARD}

    begun = {"covered": [(0, SHARD), (SHARD, SHARD + 30)], "size": 1, **a_pass(3)}
    assert free(**begun) == (1, 2)
    assert free(skip=1, **begun) == (2, 3)
    assert free(skip=2, **begun) == (1, 2), "not of the next pass while this has one"
    assert free([(SHARD + 30, 2 * SHARD)], **begun) == (2, 3)
    assert free([(SHARD + 30, 3 * SHARD)], **begun) == (3, 4)
    second = [(2 * SHARD, 2 * SHARD + 1)]
    many = {"covered": [(0, SHARD)], "size": 4, **a_pass(4)}
    assert free(**many) == (1, 4)
    assert free(second, **many) == (1, 2)
    assert free(second, skip=1, **many) == (3, 4)
    assert free(second, least=4, **many) == (4, 8)
