"""A peer replays missed rounds, or else loads the state from others and checks it with them."""

import concurrent.futures
import itertools
import threading
from types import SimpleNamespace

import pytest

from tests.kit.commands import wait_until
from tests.kit.stepping import Positions, Tracker, after, commits, of_one_weight, report, with_b
from trahiv_cli.errors import RoundFailed
from trahiv_cli.progress.history import History
from trahiv_cli.progress.reports import PeerProgress
from trahiv_cli.step import catch_up as catching_up
from trahiv_cli.step.catch_up import BELIEVED_S, MAX_DONORS, SAID_S


class Behind(Tracker):
    is_behind = property(lambda self: self.target != self.history)


def behind(*averages, donor="QmB"):
    """Return a peer whose donor kept rounds with these averages, its weight, and the resulting histories."""
    peer, weight = of_one_weight(Behind())
    kept = peer.rounds.kept.setdefault(donor, {})
    histories = [History()]
    for number, average in enumerate(averages):
        kept[histories[-1].digest] = commits(average, proof=b"proof %d" % number)
        histories.append(histories[-1].extend(samples=13, proof=b"proof %d" % number))
    peer.tracker.others = (report(donor, histories[-1], histories),)
    return peer, weight, histories


def test_missed_rounds_are_replayed_or_state_loaded(monkeypatch):
    peer, weight, histories = behind(0.25, 0.5)
    loaded = []
    monkeypatch.setattr(peer.catch_up, "load", lambda: loaded.append(peer.history) or True)
    leases = Positions(peer)
    peer.train(positions=range(8))
    assert peer.history == histories[-1]
    assert loaded == peer.rounds.claims == []
    assert peer.position.step_taken == -1, "it did not take them itself"
    assert peer.position.method.samples_held == 0
    assert peer.tracker.companions == {"QmMe", "QmB"}
    assert leases.returned == list(range(8)), "its gradient was of older weights"
    peer.tracker.others = (report("QmB", after(3)),)
    peer.train()
    assert loaded == [histories[-1]]
    assert weight.tolist() == [-0.75, -0.75]


@pytest.mark.parametrize("is_kept", [True, False])
def test_replay_asks_few_donors(is_kept, monkeypatch):
    peer, _, way = behind(0.25, donor="QmZ")
    many = [f"Qm{number}" for number in range(20)]
    peer.tracker.others = tuple(report(name, way[-1], way) for name in many)
    peer.rounds.kept = dict.fromkeys(many, peer.rounds.kept["QmZ"] if is_kept else {})
    assert peer.catch_up.follow() is is_kept
    assert len(peer.rounds.asked) == (1 if is_kept else 8)
    endless = concurrent.futures.Future()
    monkeypatch.setattr(peer.gradients, "start_replay", lambda *_: endless, raising=False)
    peer.leaves = True
    assert not peer.catch_up.follow(), "who wants to leave waits for none"


def test_return_to_majority_reports_fork(monkeypatch):
    peer, _ = of_one_weight(Reports())
    peer.position.enter(after(5))
    peer.tracker.is_behind = True
    monkeypatch.setattr(peer.catch_up, "load", lambda: True)
    peer.train()
    assert peer.codes == ["fork"]


def test_gather_waits_for_peers_or_timeout():
    peer, _ = of_one_weight(with_b())
    waits = peer.catch_up
    waits.refresh_s = 0.01
    assert waits.gather(2, 10.0)
    assert not waits.gather(3, 0.05)
    assert [event["what"] for event in peer.told] == ["3 peers to be there (peers here: 2)"]
    waits.wait_for(["QmB"], 60.0)
    waits.wait_for_stragglers(60.0, 60.0)
    peer.leaves = True
    waits.wait_for(["QmC"], 60.0)


@pytest.mark.parametrize(
    ("missing", "gone", "have_been_there", "returns", "waits_s"),
    [
        ("B", "", False, True, 25),
        ("B", "C", True, True, 25),
        ("", "", True, True, 25),  # the break began before its first look at reports
        ("B", "", False, False, 60),
        ("", "B", True, False, 0),  # all said goodbye
        ("", "", False, False, 0),  # no peer was there
    ],
)
def test_joiner_waits_for_peers_behind_broken_link(passing, missing, gone, have_been_there, returns, waits_s):
    tracker = Tracker(gone=gone)
    tracker.missing = frozenset(missing)
    peer, _ = of_one_weight(tracker, load_state_s=60.0)

    def refresh():
        if returns and passing.now >= 25.0:
            tracker.others = with_b().others

    tracker.refresh = refresh
    assert peer.catch_up.wait_for_return(have_others_been_there=have_been_there) is returns
    assert passing.now == pytest.approx(waits_s, abs=1.5)


@pytest.mark.parametrize(("fetches_until_s", "stays_s"), [(0, 60), (400, 480), (10**6, 3600)])
def test_finished_peer_stays_for_download(passing, fetches_until_s, stays_s):
    peer, _ = of_one_weight(with_b())
    peer.position.enter(after(3))

    def was_there_since(when):
        return when <= min(passing.now, fetches_until_s or -1000.0)

    peer.catch_up.activity = SimpleNamespace(was_there_since=was_there_since)
    peer.catch_up.wait_for_stragglers(60.0, 3600.0)
    assert passing.now == pytest.approx(stays_s, abs=61.0)


AHEAD, FURTHER, OLD = (History(step, 10 * step, bytes([step]) * 16) for step in (3, 4, 1))


def peers(ids, history, is_client=False):
    return [PeerProgress(peer_id, history, 0, 1.0, is_client) for peer_id in ids]


@pytest.fixture
def passing(monkeypatch, clock):
    """Advance the clock during sleeps and attempts."""

    def sleep(seconds):
        clock.now += seconds

    monkeypatch.setattr(catching_up, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    return clock


class Reports(Tracker):
    """A tracker of peers, most of which moved on to `FURTHER`."""

    target = FURTHER
    view = None
    fetch_every_s = 0.3


def joiner(*tries, others):
    """Return a peer at step 2 that seeks a state; its downloads run `tries` in turn, then the last one on."""
    peer, _ = of_one_weight(Reports(others))
    peer.position.enter(History(2, 20, bytes(16)))
    left = itertools.chain(tries, itertools.repeat(tries[-1]))
    peer.donors = []

    def load(*, donors, report, is_believed, **_):
        peer.donors.append(donors)
        peer.is_believed = is_believed
        return next(left)(report)

    peer.exchange.load = load
    return peer


def broken(report):
    report(1, 10, 1)
    raise RoundFailed("it has other shapes")


def there(report):
    report(12_300_000, 48_000_000, 2)
    return True


def test_furthest_donors_are_asked_first():
    others = *peers(["old"], OLD), *peers("A", AHEAD), *peers(["QmN"], FURTHER, True), *peers("BCD", FURTHER)
    peer = joiner(there, others=others)
    for _ in range(60):
        peer.position.enter(History(2, 20, bytes(16)))
        assert peer.catch_up.load()
    assert all(set(donors[:3]) == set("BCD") and donors[3:] == ["A"] for donors in peer.donors)
    assert {donors[0] for donors in peer.donors} == set("BCD"), "not all joiners ask the same one"
    assert peer.catch_up.load(holders={"old", "QmN", "gone"})
    assert peer.donors[-1] == ["old"], "it has not reported its last step yet"


def test_leaving_peer_rejects_late_state():
    came = threading.Event()
    answers = []
    peer, _ = of_one_weight(Reports(peers("A", AHEAD)))

    def load(*, is_wanted, **_):
        peer.leaves = True
        came.wait(10)
        answers.append(is_wanted())
        return False

    peer.exchange.load = load
    peer.catch_up.load()
    assert answers == [], "it does not wait for the state"
    came.set()
    wait_until(lambda: answers == [False], 10)


@pytest.mark.parametrize("fails", [lambda report: False, broken], ids=["nobody gives it", "it is of no use"])
def test_load_gives_up_without_progress(passing, fails):
    with pytest.raises(RoundFailed, match="came for 60 s") as failed:
        joiner(fails, others=peers("A", AHEAD)).catch_up.load()
    assert 50 <= passing.now <= 61
    assert "load_state_timeout" in failed.value.hint


def test_progressing_download_outlasts_timeout(passing):
    def a_part(report):
        passing.now += 50
        report(1, 10, 1)
        return False

    peer = joiner(*[a_part] * 5, there, others=peers("A", AHEAD))
    assert peer.catch_up.load()
    assert passing.now > 250
    told = peer.said("download")[-1]
    expected = {"step": 4, "bytes": 12_300_000, "total": 48_000_000, "donors": 2}
    expected["what"] = "the swarm's state at step 4, 12 of 48 MB from 2 peer(s)"
    assert expected.items() <= told.items()


def stands(believes, *holds):
    """Return what others report: whether they passed a state and hold it, now and finally; None: unknown."""
    return SimpleNamespace(believes=lambda history: believes, holds=lambda *_, is_final: holds[is_final])


THERE = stands(True, True, True)
NOT_THERE = stands(False, True, True)
UNSAID = stands(True, None, True)
WAITS = [stands(False, None, True)] * 5 + [UNSAID] * 5 + [THERE]
SILENT = stands(True, None, None)
DIFFERENT = stands(True, False, False)


@pytest.mark.parametrize(
    ("standings", "state", "common", "is_believed", "low", "high"),
    [
        ([THERE], FURTHER, b"digest", True, 0, 0),
        (WAITS, FURTHER, b"digest", True, 0.1, BELIEVED_S),
        ([NOT_THERE], FURTHER, b"digest", False, BELIEVED_S, 2 * BELIEVED_S),  # they may still get there
        ([UNSAID], FURTHER, b"digest", True, BELIEVED_S, 2 * BELIEVED_S),
        ([THERE], OLD, b"digest", False, 0, SAID_S),  # older than requested
        ([SILENT], FURTHER, b"digest", False, SAID_S, 2 * SAID_S),
        ([UNSAID], FURTHER, b"", True, 0, 0),  # rounded weights: checked by history alone
        ([NOT_THERE], FURTHER, b"", False, 0, SAID_S),
    ],
)
def test_state_held_by_others_is_believed(passing, standings, state, common, is_believed, low, high):
    said = []
    left = itertools.chain(standings[:1], standings, itertools.repeat(standings[-1]))

    def give(report):
        said.append(peer.is_believed(state, common, "D"))
        return True

    def refresh():  # the others' answer may differ each time
        peer.tracker.view = next(left)

    peer = joiner(give, others=peers("D", FURTHER))
    peer.tracker.target = AHEAD
    peer.tracker.refresh = refresh
    peer.catch_up.load()
    assert said == [is_believed]
    assert low <= passing.now <= high


def test_donor_of_disputed_state_is_asked_last(passing):
    def not_theirs(report):
        return peer.is_believed(FURTHER, b"digest", peer.donors[-1][0])

    peer = joiner(not_theirs, there, others=[*peers("D", FURTHER), *peers("A", AHEAD)])
    peer.tracker.view = DIFFERENT
    assert peer.catch_up.load()
    assert peer.donors == [["D", "A"], ["A", "D"]]
    peer = joiner(not_theirs, others=peers("ABCDEF", FURTHER))
    peer.tracker.view = DIFFERENT
    with pytest.raises(RoundFailed, match="4 peers gave states that others do not hold"):
        peer.catch_up.load()
    assert len({donors[0] for donors in peer.donors}) == len(peer.donors) == MAX_DONORS
