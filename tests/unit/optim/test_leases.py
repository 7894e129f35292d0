"""Leases of peers that share a list of reports: no position is two peers' own, and what is lost returns."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import pytest

from trahiv_cli.optim import leases
from trahiv_cli.optim.leases import AHEAD_S, FREE_LEASES, MOST_LEASES, Leases, ShardLeases
from trahiv_cli.optim.ledger import SHARD, Ledger, Spans

SAMPLES = 1000


class Board:
    """Where the peers of a swarm report: what was stored is seen by whoever looks after that."""

    def __init__(self):
        self.reports, self.ledger, self.answers, self.before_look = {}, Ledger(), True, lambda: None


class Tracker:
    """One peer's view of the board."""

    def __init__(self, board, name, rank=0):
        self.board, self.own_id, self.rank_among_peers, self._seen = board, name, rank, Spans()
        self.target_batch_size = SAMPLES

    def leased_by_others(self, covered, most):
        return self._seen

    def look(self):
        others = [spans for name, spans in self.board.reports.items() if name != self.own_id]
        self._seen = Spans.of(span for spans in others for span in spans.spans)

    def lease(self, spans):
        self.board.reports[self.own_id] = spans
        self.board.before_look()
        if self.board.answers:
            self.look()
        return self.board.answers


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(leases, "POLL_S", 0.0005)


@pytest.fixture
def board():
    return Board()


def peer(board, name="A", rank=0, num_samples=SAMPLES):
    return Leases(Tracker(board, name, rank), lambda: board.ledger, num_samples)


def take(one, count):
    return [one.take() for _ in range(count)]


def commit(board, one, positions):
    board.ledger = board.ledger.extend([Spans.of_positions(positions)])
    one.settle(positions)


def test_a_lone_peer_reads_the_data_in_order_and_begins_the_next_pass_after_it(board):
    one = peer(board, num_samples=150)
    for start in range(0, 600, 100):
        positions = take(one, 100)
        assert positions == list(range(start, start + 100))
        commit(board, one, positions)
    assert board.ledger == Ledger(Spans.of([(0, 600)]))


def test_a_peer_that_starts_again_goes_on_after_what_was_committed(board):
    one = peer(board)
    positions = take(one, 90)
    commit(board, one, positions[:70])
    del board.reports["A"]
    assert take(peer(board), 50) == list(range(70, 120))


def test_peers_train_different_samples(board):
    peers = [peer(board, name, rank) for rank, name in enumerate("ABC")]
    positions = [take(one, 300) for one in peers]
    assert len({position for of_peer in positions for position in of_peer}) == 900


def test_peers_that_lease_at_the_same_moment_train_different_samples(board):
    """Both have stored before either looks."""
    barrier = threading.Barrier(2, timeout=10)
    first = [True, True]

    def meet():
        if first and first.pop():
            barrier.wait()

    board.before_look = meet
    peers = [peer(board, name, rank=0) for name in "AB"]
    taken = {}
    threads = [
        threading.Thread(target=lambda number=number: taken.update({number: take(peers[number], 100)}))
        for number in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(taken) == 2 and not set(taken[0]) & set(taken[1])


def test_positions_of_a_dead_peer_are_trained_by_others(board):
    one, other = peer(board, "A"), peer(board, "B", rank=1)
    commit(board, one, take(one, 30))
    take(one, 20)
    rest = take(other, 200)
    commit(board, other, rest)
    assert not set(rest) & set(range(50))
    del board.reports["A"]
    third = peer(board, "C")
    third._reports.look()
    assert set(range(30, 50)) <= set(take(third, 100))


def test_what_was_dropped_is_trained_again_first(board):
    one = peer(board)
    positions = take(one, 10)
    one.give_back(positions[4:])
    assert take(one, 8) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_what_others_have_trained_meanwhile_is_not_trained_again(board):
    one = peer(board)
    positions = take(one, 10)
    board.ledger = board.ledger.extend([Spans.of([(4, 30)])])
    one.give_back(positions)
    one.settle([])
    assert take(one, 5) == [0, 1, 2, 3, 30]
    assert one.lost == 20  # those that were leased and not yet taken


def test_a_lease_that_another_took_over_is_left_to_it(board):
    """As after a time in which nobody saw this peer's report."""
    one = peer(board)
    take(one, 10)
    board.reports["B"] = Spans.of([(20, 40)])
    one._reports.look()
    one.settle([])
    assert not set(take(one, 50)) & set(range(20, 40))
    assert one.lost == 20


def test_nothing_is_trained_that_nobody_knows_of(board, monkeypatch):
    monkeypatch.setattr(leases, "PAUSE_S", 0.01)
    board.answers = False
    one = peer(board)
    began, leaves = time.monotonic(), lambda: time.monotonic() > began + 0.3
    assert one.take(leaves) is None
    board.answers = True
    assert one.take() == 0


def test_who_waits_for_a_lease_may_mend_the_dht_meanwhile(board, monkeypatch):
    monkeypatch.setattr(leases, "PAUSE_S", 0.01)
    board.answers = False

    def mend():
        board.answers = True

    one = Leases(Tracker(board, "A"), lambda: board.ledger, SAMPLES, while_waiting=mend)
    assert one.take() == 0


def test_a_dht_that_does_not_answer_is_said(board, monkeypatch):
    monkeypatch.setattr(leases, "PAUSE_S", 0.01)
    monkeypatch.setattr(leases, "PATIENCE_S", 0.2)
    board.answers = False
    with pytest.raises(leases.SwarmError, match="No samples could be leased"):
        peer(board).take()


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_blocks_follow_the_pace_however_many_positions_are_taken_at_once(board, monkeypatch, batch):
    now = [100.0]
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    one, per_second = peer(board, num_samples=10**6), 16
    most = 0
    for _ in range(60 * per_second // batch):
        commit(board, one, take(one, batch))
        now[0] += batch / per_second
        most = max(most, len(one.held))
    assert AHEAD_S * per_second / 2 < most < 2 * AHEAD_S * per_second


@pytest.mark.parametrize("seed", range(3))
def test_a_long_round_s_leases_fit_into_a_report(board, seed):
    draw = random.Random(seed)
    peers = [peer(board, name, rank, num_samples=10**6) for rank, name in enumerate("ABC")]
    for one in peers:
        one._taken.extend([(0.0, 0), (1.0, 2000)])
    for _ in range(3000):
        take(draw.choice(peers), draw.randrange(1, 30))
    assert max(len(one.held.spans) for one in peers) <= MOST_LEASES


@pytest.mark.parametrize("num_samples", [100, 10**6])
@pytest.mark.parametrize("num_peers", [2, 4, 16])
def test_leases_of_a_round_of_many_hours_fit_into_a_report(board, monkeypatch, num_peers, num_samples):
    now, every_s = [100.0], 40.0
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    peers = [peer(board, str(rank), rank, num_samples) for rank in range(num_peers)]
    taken = []
    for _ in range(round(12 * 3600 / every_s)):
        now[0] += every_s
        taken += [one.take() for one in peers]
    assert len(set(taken)) == len(taken)
    assert max(len(one.held.spans) for one in peers) <= MOST_LEASES
    assert max(len(one.held) for one in peers) <= 2 * len(taken) // num_peers + leases.FIRST_BLOCK


def test_small_gaps_that_dead_peers_left_are_filled_over_some_rounds(board, monkeypatch):
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=time.sleep))
    board.ledger = Ledger(Spans.of_positions(range(1, 1000, 2)))
    peers = [peer(board, name, rank) for rank, name in enumerate("AB")]
    for _ in range(30):
        taken = {one: take(one, 100) for one in peers}
        assert max(len(one.held.spans) for one in peers) <= MOST_LEASES
        for one, positions in taken.items():
            commit(board, one, positions)
    assert board.ledger.duplicates == 0
    assert board.ledger.passes(SAMPLES)[0] >= 1


def test_what_others_left_of_a_lease_in_many_pieces_is_left_to_them_but_for_the_longest(board):
    one = peer(board)
    held = Spans.of([(0, 64)])
    take(one, 1)
    assert one.held == held
    board.reports["B"] = Spans.of_positions(range(1, 60, 2))
    one._reports.look()
    one.settle([])
    assert len(one.held.spans) == FREE_LEASES and one.held.longest(1) == Spans.of([(60, 64)])
    assert set(one._ready) <= set(one.held) and one.lost == 63 - len(one._ready)
    assert not set(take(one, 100)) & set(board.reports["B"])


def test_an_attempt_that_breaks_off_is_repeated(board):
    failures = [OSError("broken pipe"), EOFError()]

    def fail():
        if failures:
            raise failures.pop()

    board.before_look = fail
    assert take(peer(board), 3) == [0, 1, 2]


def test_why_there_is_no_lease_is_said(board, monkeypatch):
    monkeypatch.setattr(leases, "PATIENCE_S", 0.2)

    def fail():
        raise OSError("broken pipe")

    board.before_look = fail
    with pytest.raises(leases.SwarmError, match="No samples could be leased for 0 s: broken pipe"):
        peer(board).take()


# -- shards of a stream ----------------------------------------------------------------------------


def shards(board, name="A", rank=0, num_shards=256):
    return ShardLeases(Tracker(board, name, rank), lambda: board.ledger, num_shards)


def read(one, count):
    """Read so many shards of two samples each to their ends; return what is trained of them."""
    positions = []
    for start in take(one, count):
        positions += [position for position in (start, start + 1) if one.hand_out(position)]
        one.note_end(start, start + 2)
    return positions


@pytest.mark.parametrize("num_peers", [1, 2, 4, 16])
def test_many_shards_are_read_in_a_round_and_each_once(board, num_peers):
    peers = [shards(board, str(rank), rank) for rank in range(num_peers)]
    for number in range(1, 7):
        trained = {one: Spans() for one in peers}
        for _ in range(128 // num_peers):
            for one in peers:
                trained[one] |= Spans.of_positions(read(one, 1))
        assert all(len(spans) == 2 * 128 // num_peers for spans in trained.values())
        assert max(len(one.held.spans) for one in peers) <= MOST_LEASES
        claims = {
            one: spans | Spans.of_positions(one.last_positions(spans)) for one, spans in trained.items()
        }
        board.ledger = board.ledger.extend(claims.values())
        for one, spans in claims.items():
            one.settle(spans)
        assert len(board.ledger.covered) == number * 128 * SHARD
    assert board.ledger.duplicates == 0


def test_neighbouring_shards_of_which_another_peer_took_over_one_are_kept_but_for_that(board):
    one = shards(board)
    begun = read(one, 3)
    assert one.held == Spans.of([(0, 4 * SHARD)])
    board.reports["B"] = Spans.of([(0, SHARD)])
    one._reports.look()
    one.settle(())
    assert one.lost == 1 and take(one, 1) == [3 * SHARD]
    assert one.last_positions(Spans.of_positions(begun)) == [2 * SHARD - 1, 3 * SHARD - 1]
