"""A peer goes through rounds that it missed; else it asks others for the state, and whether to believe it."""

import concurrent.futures
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.kit.stepping import Positions, Tracker, after, commits, of_one_weight, report
from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim import catch_up as catching_up
from trahiv_cli.optim.catch_up import BELIEVED_S, SAID_S, CatchUp, Gathering
from trahiv_cli.optim.doubts import Doubts
from trahiv_cli.optim.history import History
from trahiv_cli.optim.reports import PeerProgress


class Behind(Tracker):
    """The reports of one other peer, which is `ahead` rounds further."""

    ahead = 0
    is_behind = property(lambda self: self.history.step < self.ahead)


def behind(*averages, donor="QmB"):
    """A peer whose companion kept rounds that ended with these averages, and the histories they led to."""
    peer, weight = of_one_weight(Behind())
    kept, histories = peer.gradients.kept.setdefault(donor, {}), [History()]
    for number, average in enumerate(averages):
        kept[histories[-1].digest] = commits(average, proof=b"proof %d" % number)
        histories.append(histories[-1].extend(samples=13, proof=b"proof %d" % number))
    peer.tracker.others, peer.tracker.ahead = (report(donor, histories[-1], histories),), len(averages)
    return peer, weight, histories


def test_a_peer_goes_through_rounds_that_it_missed_and_loads_the_state_where_they_are_not_kept(monkeypatch):
    peer, weight, histories = behind(0.25, 0.5)
    loaded = []
    monkeypatch.setattr(peer.catch_up, "load", lambda: loaded.append(peer.history) or True)
    leases = Positions(peer)
    peer.parts.work.announce(range(8))
    peer.train()
    assert weight.tolist() == [-0.75, -0.75] and peer.history == histories[-1] and loaded == []
    assert peer.position.step_taken == -1, "it did not take them itself"
    assert peer.position.method.samples_held == 0 and peer.gradients.claims == []
    assert peer.tracker.companions == {"QmMe", "QmB"}
    assert leases.returned == list(range(8)), "its gradient was of older weights"
    peer.tracker.ahead = 3
    peer.train()
    assert loaded == [histories[-1]] and weight.tolist() == [-0.75, -0.75]


@pytest.mark.parametrize("is_kept", [True, False])
def test_not_everybody_is_asked_for_a_round(is_kept, monkeypatch):
    peer, _, way = behind(0.25, donor="QmZ")
    many = [f"Qm{number}" for number in range(20)]
    peer.tracker.others = tuple(report(name, way[-1], way) for name in many)
    if is_kept:
        peer.gradients.kept = dict.fromkeys(many, peer.gradients.kept["QmZ"])
    assert peer.catch_up.follow() is is_kept
    assert len(peer.gradients.asked) == (1 if is_kept else catching_up.FOLLOWED_AT_MOST)
    endless = concurrent.futures.Future()
    monkeypatch.setattr(peer.gradients, "start_replay", lambda *_: endless, raising=False)
    peer.leaves = True
    assert not peer.catch_up.follow(), "who wants to leave waits for none"


def test_a_peer_that_goes_back_to_most_others_says_so(monkeypatch):
    class Fewer(Tracker):
        target, is_behind = after(2), True

    peer, _ = of_one_weight(Fewer())
    peer.position.enter(after(5))
    monkeypatch.setattr(peer.catch_up, "load", lambda: True)
    peer.train()
    assert peer.codes == ["fork"]


def test_others_are_waited_for_until_they_are_there_or_time_is_over(monkeypatch):
    monkeypatch.setattr(catching_up, "REFRESH_S", 0.01)
    peer, _ = of_one_weight(Tracker([report("QmB", History())]))
    gathering = Gathering(peer.parts)
    assert gathering.gather(2, 10.0) and not gathering.gather(3, 0.05)
    [said] = [event for event in peer.told if "1 more peer(s)" in event.get("what", "")]
    assert said["what"] == "1 more peer(s): 2 of 3 are here (this one, ...QmB)"
    gathering.wait_for(["QmB"], 60.0)
    gathering.wait_for_stragglers(60.0)
    peer.leaves = True
    gathering.wait_for(["QmC"], 60.0)


# -- the state ------------------------------------------------------------------------------------

AHEAD, FURTHER, OLD = (History(step, 10 * step, bytes([step]) * 16) for step in (3, 4, 1))


def peers(ids, history, is_client=False):
    return [PeerProgress(peer_id, history, 0, 1.0, is_client) for peer_id in ids]


@pytest.fixture
def passing(monkeypatch, clock):
    """Let time pass while somebody sleeps or a try lasts."""

    def sleep(seconds):
        clock.now += seconds

    monkeypatch.setattr(catching_up, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    return clock


class Joiner:
    """A peer at step 2 that seeks a state; its averager does what `tries` say, one after the other."""

    def __init__(self, tries, *others, told=lambda *what, **fields: None):
        self.asked, self._tries = [], tries
        self.state = SimpleNamespace(load_state_from_peers=self._load)
        self.tracker = SimpleNamespace(others=others, target=FURTHER, is_behind=False, fetch_every_s=0.3)
        self.tracker.doubts, self.tracker.refresh = Doubts(), lambda: None
        parts = SimpleNamespace(
            tracker=self.tracker,
            state=self.state,
            alive=SimpleNamespace(require=lambda: None, should_leave=lambda: False, must_stop=False),
            limits=SimpleNamespace(load_state_s=60.0),
            events=SimpleNamespace(waiting=lambda what, until_s: nullcontext(told)),
        )
        position = SimpleNamespace(history=History(2, 20, bytes(16)), adopt=lambda: None)
        self.load = CatchUp(parts, position, None).load

    def _load(self, *, donors, rank, lowest, silence_s, report):
        self.asked.append(donors)
        return self._tries[min(len(self.asked), len(self._tries)) - 1](report)


def broken(report):
    report(1, 10, 1)
    raise RoundFailed("it has other shapes")


def there(report):
    report(12_300_000, 48_000_000, 2)
    return True


def test_the_furthest_are_asked_first_and_none_who_can_not_help():
    others = *peers(["old"], OLD), *peers("A", AHEAD), *peers(["QmN"], FURTHER, True), *peers("BCD", FURTHER)
    firsts = set()
    for _ in range(60):
        joiner = Joiner([there], *others)
        assert joiner.load() is True
        [donors] = joiner.asked
        assert set(donors[:3]) == set("BCD") and donors[3:] == ["A"]
        firsts.add(donors[0])
    assert firsts == set("BCD"), "not all joiners ask the same one"


@pytest.mark.parametrize("fails", [lambda report: False, broken], ids=["nobody gives it", "it is of no use"])
def test_it_gives_up_when_nothing_of_use_came_for_too_long(passing, fails):
    with pytest.raises(RoundFailed, match="came for 60 s") as failed:
        Joiner([fails], *peers("A", AHEAD)).load()
    assert 50 <= passing.now <= 61 and "load_state_timeout" in failed.value.hint


def test_a_download_that_goes_on_is_not_given_up_and_how_far_it_is_is_told(passing):
    news = []

    def a_part(report):
        passing.now += 50
        report(1, 10, 1)
        return False

    def tell(*what, **fields):
        news.append((*what, fields))

    assert Joiner([a_part] * 5 + [there], *peers("A", AHEAD), told=tell).load() is True and passing.now > 250
    what = "the swarm's state at step 4, 12 of 48 MB from 2 peer(s)"
    fields = {"step": 4, "bytes": 12_300_000, "total": 48_000_000, "donors": 2}
    assert news[-1] == ("download", what, 60.0, fields)


# -- whether what came is believed ----------------------------------------------------------------


def stands(believes, holds):
    """How the others stand: whether they went by a state, and hold what it is; None: they do not say yet."""

    def held(history, common, *, is_final):
        return holds or (True if is_final and holds is None else None)

    return SimpleNamespace(believes=lambda history: believes, holds=held)


WAITS = [stands(False, None)] * 5 + [stands(True, None)] * 5 + [stands(True, True)]
SILENT = SimpleNamespace(believes=lambda history: True, holds=lambda *_, is_final: None)
DIFFERENT = SimpleNamespace(believes=lambda history: True, holds=lambda *_, is_final: False)


@pytest.mark.parametrize(
    ("standings", "state", "common", "is_believed", "low", "high"),
    [
        ([stands(True, True)], FURTHER, b"digest", True, 0, 0),
        (WAITS, FURTHER, b"digest", True, 0.1, BELIEVED_S),
        ([stands(False, True)], FURTHER, b"digest", False, BELIEVED_S, 2 * BELIEVED_S),  # they may come there
        ([stands(True, None)], FURTHER, b"digest", True, BELIEVED_S, 2 * BELIEVED_S),  # they say nothing
        ([stands(True, True)], OLD, b"digest", False, 0, SAID_S),  # older than was wished
        ([SILENT], FURTHER, b"digest", False, SAID_S, 2 * SAID_S),
        ([stands(True, None)], FURTHER, b"", True, 0, 0),  # of rounded weights: by its way alone
        ([stands(False, True)], FURTHER, b"", False, 0, SAID_S),
    ],
)
def test_a_state_is_believed_when_others_say_that_it_is_theirs(
    passing, standings, state, common, is_believed, low, high
):
    said, left = [], [standings[0], *standings]

    def give(report):
        said.append(joiner.state.is_believed(state, common, "D"))
        return True

    def refresh():  # each time that others are asked, they may stand otherwise
        if len(left) > 1:
            left.pop(0)
        joiner.tracker.standing = left[0]

    joiner = Joiner([give], *peers("D", FURTHER))
    joiner.tracker.target, joiner.tracker.refresh = AHEAD, refresh
    joiner.load()
    assert said == [is_believed] and low <= passing.now <= high


def test_where_others_hold_something_else_who_gave_it_is_asked_last(passing):
    def not_theirs(report):
        joiner.tracker.standing = DIFFERENT
        return joiner.state.is_believed(FURTHER, b"digest", "D")

    joiner = Joiner([not_theirs, there], *peers("D", FURTHER), *peers("A", AHEAD))
    assert joiner.load() and joiner.asked == [["D", "A"], ["A", "D"]]
