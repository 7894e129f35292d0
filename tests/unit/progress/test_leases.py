"""Leases of peers that share a list of reports: no two hold the same position, and lost ones return."""

import random
import time
from types import SimpleNamespace

import pytest

from tests.kit.stepping import spans
from trahiv_cli.members.records import ignore_peer
from trahiv_cli.progress import leases
from trahiv_cli.progress.history import History
from trahiv_cli.progress.leases import AHEAD_S, FREE_LEASES, Leases, Work
from trahiv_cli.progress.ledger import MAX_POSITION, MOST_LEASES, SHARD, USELESS_AT_MOST, Ledger, Spans
from trahiv_cli.progress.reports import PeerProgress
from trahiv_cli.rounds.claims import Claim

SAMPLES = 1000
MOST = leases.MOST_ROUNDS * SAMPLES


class Board:
    """The peers' shared reports: a peer sees whatever was stored before it looks."""

    def __init__(self):
        self.reports = {}
        self.ledger = Ledger()
        self.answer = lambda: True


class Tracker:
    """One peer's view of the board."""

    target_batch_size = SAMPLES
    history = History()

    def __init__(self, board, name):
        self.board = board
        self.own_id = name
        self.others = ()

    def look(self):
        self.others = [
            PeerProgress(name, History(), 0, 1.0, False, leases=held)
            for name, held in self.board.reports.items()
            if name != self.own_id
        ]

    def lease(self, held):
        self.board.reports[self.own_id] = held
        self.look()
        return self.board.answer()


class Peer:
    """A peer's leases and tracker; a pass has `count` samples, or units of `unit` positions."""

    def __init__(self, board, name="A", count=SAMPLES, **more):
        self.board = board
        self.tracker = Tracker(board, name)
        self.leases = Leases(self.tracker, lambda: board.ledger, count, pause_s=0.01, **more)

    def take(self, count):
        return [self.leases.take() for _ in range(count)]

    def commit(self, positions):
        self.board.ledger = self.board.ledger.extend([Spans.of_positions(positions)])
        self.leases.settle(positions)

    def read(self, count):
        """Read `count` shards of two samples each to their ends; return the trained positions."""
        return [one for start in self.take(count) for one, _ in self.leases.read(start, "ab")]

    def sees(self, name, held):
        """Let another peer report leases, as after a time in which this peer's report was not seen."""
        self.board.reports[name] = held
        self.tracker.look()
        self.leases.settle(())


@pytest.fixture
def board():
    return Board()


def test_returned_positions_are_leased_first(board):
    one = Peer(board)
    positions = one.take(10)
    one.leases.give_back(positions[4:])
    assert positions == list(range(10))
    assert one.take(8) == list(range(4, 12))
    board.ledger = board.ledger.extend([spans(4, 30)])
    one.leases.give_back(positions)
    one.leases.settle([])
    assert one.take(5) == [0, 1, 2, 3, 30]
    assert one.leases.lost == 18, "those that were leased and not yet taken"
    one.commit(range(4))
    del board.reports["A"]
    assert Peer(board).take(2) == [30, 31], "started again"


@pytest.mark.parametrize("taken_over", [[(20, 40)], [(odd, odd + 1) for odd in range(1, 60, 2)]])
def test_lease_taken_over_is_yielded(board, taken_over):
    one = Peer(board, count=10**6)
    theirs = Spans.of(taken_over)
    one.take(1)
    one.sees("B", theirs)
    assert len(one.leases.held.spans) == min(FREE_LEASES, len(taken_over) + 1)
    assert one.leases.held.end == leases.FIRST_BLOCK, "the longest piece is kept"
    assert not set(one.take(100)) & set(theirs)
    assert one.leases.lost >= len(theirs)


@pytest.mark.parametrize("lease", [(0, MAX_POSITION), (15, 16 + MOST), (10**9, 10**9 + 1)], ids=str)
@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "at another history"])
def test_impossible_leases_are_ignored(board, caplog, lease, is_elsewhere):
    ignore_peer.cache_clear()
    board.ledger = Ledger(spans(0, 10, 12, 15))
    one = Peer(board, count=10 * MOST)
    one.tracker.history = History(1) if is_elsewhere else History()
    board.reports |= {"B": Spans.of([lease]), "C": spans(10, 10 + MOST)}
    one.tracker.look()
    assert one.take(1) == [10 + MOST]
    named = "Peer B is not believed: it leases more samples, or later ones, than it can train."
    # hivemind warns of averagers of other tests when they are collected.
    told = [record.getMessage() for record in caplog.records if record.name.startswith("trahiv_cli")]
    assert told == ([] if is_elsewhere else [named])


def broken():
    raise OSError("broken pipe")


@pytest.mark.parametrize(
    ("answer", "why"), [(lambda: False, "the DHT does not answer"), (broken, "broken pipe")]
)
def test_unpublished_lease_fails_with_reason(board, answer, why):
    board.answer = answer
    began = time.monotonic()
    assert Peer(board).leases.take(lambda: time.monotonic() > began + 0.1) is None
    mending = Peer(board, while_waiting=lambda: setattr(board, "answer", lambda: True))
    assert mending.take(1) == [0], "who waits may mend the DHT"
    board.answer = answer
    with pytest.raises(leases.SwarmError, match=f"No samples could be leased for 0 s: {why}"):
        Peer(board, patience_s=0.2).take(1)


def test_restart_leases_previous_positions_again(board):
    before = Peer(board)
    trained = Spans.of_positions(before.take(40))
    del board.reports["A"]
    again = Peer(board)
    other = Peer(board, "B")
    work = Work()
    work.resume(trained)
    assert not work.first(40), "the data is not divided"
    work.leases = again.leases
    work.resume(trained)
    assert work.first(40) == trained
    taken = Spans.of_positions(again.take(FREE_LEASES))
    assert not trained - board.reports["A"]
    assert not taken & trained
    assert not Spans.of_positions(other.take(40)) & (trained | taken)
    board.ledger = board.ledger.extend([trained])
    work.settle(40, trained)
    assert not work.first(40)
    assert not again.leases.held & trained


def test_fragmented_positions_leave_room_for_leases(board):
    again = Peer(board)
    pieces = Spans.of_positions(range(0, 200, 2))
    again.leases.resume(pieces)
    assert not Spans.of_positions(again.take(40)) & pieces.lowest(FREE_LEASES)
    assert len(board.reports["A"].spans) <= MOST_LEASES


@pytest.mark.parametrize(("per_second", "size"), [(0.001, 1), (1.0, AHEAD_S), (16.0, 16 * AHEAD_S)])
def test_block_size_follows_training_speed(board, per_second, size):
    one = Peer(board, count=10**6, samples_per_second=lambda: per_second)
    one.take(1)
    assert len(one.leases.held) == size


@pytest.mark.parametrize(("num_peers", "num_samples"), [(2, 100), (4, 10**6), (16, 100), (16, 10**6)])
def test_leases_of_long_round_fit_report(board, num_peers, num_samples):
    draw = random.Random(num_peers)
    taken = []
    peers = [
        Peer(board, number, num_samples, samples_per_second=lambda: 1 / 40.0) for number in range(num_peers)
    ]
    for _ in range(12 * 3600 // 40):
        taken += [one.leases.take() for one in draw.sample(peers, num_peers)]
    assert len(set(taken)) == len(taken)
    for one in peers:
        assert len(one.leases.held.spans) <= MOST_LEASES
        assert len(one.leases.held) <= 2 * len(taken) // num_peers + leases.FIRST_BLOCK


def test_gaps_of_dead_peers_are_filled(board):
    board.ledger = Ledger(Spans.of_positions(range(1, 1000, 2)))
    peers = [Peer(board, name) for name in "AB"]
    Peer(board, "C").take(20)
    del board.reports["C"]
    for _ in range(30):
        taken = [one.take(100) for one in peers]
        for one, positions in zip(peers, taken, strict=True):
            assert len(one.leases.held.spans) <= MOST_LEASES
            one.commit(positions)
    assert board.ledger.duplicates == 0
    assert board.ledger.passes(SAMPLES)[0] >= 1


@pytest.mark.parametrize("num_peers", [1, 4, 16])
def test_each_shard_is_read_once(board, num_peers):
    peers = [Peer(board, number, 256, unit=SHARD) for number in range(num_peers)]
    for number in range(1, 7):
        trained = {one: [] for one in peers}
        for one in (128 // num_peers) * peers:
            trained[one] += one.read(1)
        for one, positions in trained.items():
            assert len(positions) == 2 * 128 // num_peers
            assert len(one.leases.held.spans) <= MOST_LEASES
            one.commit([*positions, *one.leases.last_positions(Spans.of_positions(positions))])
        assert len(board.ledger.covered) == number * 128 * SHARD
        assert board.ledger.duplicates == 0


def test_only_shards_taken_over_are_yielded(board):
    one = Peer(board, count=256, unit=SHARD)
    begun = one.read(3)
    assert one.leases.held == spans(0, 4 * SHARD)
    one.sees("B", spans(0, SHARD, 3 * SHARD, 3 * SHARD + 1))
    assert one.leases.lost == 1, "the one that it had not begun"
    assert list(one.leases.read(0, "a")) == []
    assert one.take(1) == [4 * SHARD]
    assert list(one.leases.read(4 * SHARD, "")) == [], "a shard may be empty"
    last = [number * SHARD - 1 for number in (2, 3, 5)]
    assert list(one.leases.last_positions(Spans.of_positions(begun))) == last
    one.leases.give_back([SHARD + 1])
    assert one.read(1) == [SHARD + 1], "once more what was given back, and nothing else"


def test_contribution_includes_last_shard_positions(board):
    work = Work()
    one = Peer(board, count=4, unit=SHARD)
    assert work.figures(board.ledger) is None
    assert work.unit == 1
    work.leases = one.leases
    work.announce(one.read(2))
    work.count_announced(4)
    brought = work.aside(4)
    assert brought == Spans.of_positions([0, 1, SHARD - 1, SHARD, SHARD + 1, 2 * SHARD - 1])
    board.ledger = board.ledger.extend([brought])
    work.settle(4, brought)
    figures = {"passes": 0, "covered": 2, "shards": 4, "duplicates": 0, "lost": 0}
    assert work.figures(board.ledger) == figures
    assert not work.aside(4)


def test_claimed_positions_fit_into_claim():
    work = Work()
    work.leases = SimpleNamespace(unit=SHARD, last_positions=lambda mine: spans(10**6, 10**6 + 9))
    work.announce(range(USELESS_AT_MOST))
    work.count_announced(USELESS_AT_MOST)
    work.drop(0, are_useless=True)
    claim = Claim(samples=4, trained=work.aside(4))
    assert Claim.parse(claim.to_bytes()) == claim
