"""Leases of peers that share a list of reports: no position is two peers' own, and what is lost returns."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import pytest

from trahiv_cli.optim import leases
from trahiv_cli.optim.leases import AHEAD_S, Leases
from trahiv_cli.optim.ledger import Ledger, Spans

SAMPLES = 1000


class Board:
    """Where the peers of a swarm report: what was stored is seen by whoever looks after that."""

    def __init__(self):
        self.reports, self.ledger, self.answers, self.before_look = {}, Ledger(), True, lambda: None


class Tracker:
    """One peer's view of the board."""

    def __init__(self, board, name, rank=0):
        self.board, self.own_id, self.rank_among_peers, self._seen = board, name, rank, Spans()

    @property
    def leased_by_others(self):
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
    assert max(len(one.held.spans) for one in peers) <= 32
