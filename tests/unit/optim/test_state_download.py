"""Whom a peer asks for the swarm's state, and when it gives up."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim import catch_up as catching_up
from trahiv_cli.optim.catch_up import BELIEVED_S, SAID_S, CatchUp
from trahiv_cli.optim.doubts import Doubts
from trahiv_cli.optim.history import History
from trahiv_cli.optim.reports import PeerProgress

AHEAD, FURTHER, OLD = (History(step, 10 * step, bytes([step]) * 16) for step in (3, 4, 1))


def peer(peer_id, history, is_client=False):
    return PeerProgress(peer_id, history, 0, 1.0, is_client)


class Clock:
    """Time passes while somebody sleeps or a try lasts."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(catching_up, "time", clock)
    return clock


def ignore(event, what, until_s, **fields):
    """Hear that something was downloaded."""


class Joiner:
    """A peer at step 2 that seeks a state; its averager does what `tries` say, one after the other."""

    def __init__(self, tries, *others, told=ignore):
        self.asked, self._tries = [], tries
        self.state = SimpleNamespace(load_state_from_peers=self._load)
        self.tracker = SimpleNamespace(
            others=others,
            target=FURTHER,
            is_behind=False,
            refresh=lambda: None,
            doubts=Doubts(),
            fetch_every_s=0.3,
        )
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


def nobody(report):
    return False


def broken(report):
    report(1, 10, 1)
    raise RoundFailed("it has other shapes")


def there(report):
    return True


def test_the_furthest_are_asked_first_and_none_who_can_not_help(clock):
    others = [peer("old", OLD), peer("A", AHEAD), peer("client", FURTHER, True), *map_peers("BCD", FURTHER)]
    firsts = set()
    for _ in range(60):
        joiner = Joiner([there], *others)
        assert joiner.load() is True
        [donors] = joiner.asked
        assert set(donors[:3]) == set("BCD") and donors[3:] == ["A"]
        firsts.add(donors[0])
    assert firsts == set("BCD"), "not all joiners ask the same one"


def map_peers(ids, history):
    return [peer(peer_id, history) for peer_id in ids]


@pytest.mark.parametrize("fails", [nobody, broken], ids=["nobody gives it", "it is of no use"])
def test_it_gives_up_when_nothing_of_use_came_for_too_long(clock, fails):
    with pytest.raises(RoundFailed, match="came for 60 s") as failed:
        Joiner([fails], peer("A", AHEAD)).load()
    assert 50 <= clock.now <= 61 and "load_state_timeout" in failed.value.hint


def test_a_download_that_goes_on_is_not_given_up(clock):
    def a_part(report):
        clock.now += 50
        report(1, 10, 1)
        return False

    assert Joiner([a_part] * 5 + [there], peer("A", AHEAD)).load() is True and clock.now > 250


def test_how_far_it_is_is_told(clock):
    news = []

    def a_part(report):
        report(12_300_000, 48_000_000, 2)
        return True

    def tell(event, what, until_s, **fields):
        news.append((event, what, until_s, fields))

    assert Joiner([a_part], peer("A", AHEAD), told=tell).load() is True
    [(event, what, until_s, fields)] = news
    assert event == "download" and until_s == 60.0
    assert what == "the swarm's state at step 4, 12 of 48 MB from 2 peer(s)"
    assert fields == {"step": 4, "bytes": 12_300_000, "total": 48_000_000, "donors": 2}


# -- whether what came is believed ----------------------------------------------------------------


def believes(*standings, state=FURTHER, common=b"digest"):
    """Whether a state from D is believed; each time that others are asked, they stand otherwise."""

    def give(report):
        said.append(joiner.state.is_believed(state, common, "D"))
        return True

    said, left = [], [standings[0], *standings]
    joiner = Joiner([give], peer("D", FURTHER))
    joiner.tracker.target = AHEAD

    def refresh():
        if len(left) > 1:
            left.pop(0)
        joiner.tracker.standing = left[0]

    joiner.tracker.refresh = refresh
    joiner.load()
    return said[0]


def stands(believes, holds):
    def held(history, common, *, is_final):
        return holds or (True if is_final else None)

    return SimpleNamespace(believes=lambda history: believes, holds=held)


def test_what_others_hold_is_believed_at_once(clock):
    assert believes(stands(True, True)) and clock.now == 0


def test_others_are_waited_for(clock):
    assert believes(*[stands(False, None)] * 5, *[stands(True, None)] * 5, stands(True, True))
    assert 0 < clock.now < BELIEVED_S


def test_where_others_hold_something_else_who_gave_it_is_asked_last(clock):
    def not_theirs(report):
        joiner.tracker.standing = SimpleNamespace(
            believes=lambda history: True, holds=lambda *_, is_final: False
        )
        return joiner.state.is_believed(FURTHER, b"digest", "D")

    joiner = Joiner([not_theirs, there], peer("D", FURTHER), peer("A", AHEAD))
    assert joiner.load() and joiner.asked == [["D", "A"], ["A", "D"]]


def test_where_others_went_another_way_it_is_not_taken_over(clock):
    assert not believes(stands(False, True))
    assert BELIEVED_S <= clock.now < 2 * BELIEVED_S, "they may have come there"


def test_those_who_say_nothing_decide_nothing(clock):
    assert believes(stands(True, None)) and clock.now >= BELIEVED_S


def test_an_older_state_than_was_wished_is_not_taken_over(clock):
    assert not believes(stands(True, True), state=OLD)


def test_where_nobody_says_anything_it_is_not_taken_over_in_the_end(clock):
    silent = SimpleNamespace(believes=lambda history: True, holds=lambda *_, is_final: None)
    assert not believes(silent) and clock.now >= SAID_S


def test_a_state_of_rounded_weights_is_judged_by_its_way_alone(clock):
    assert believes(stands(True, None), common=b"") and clock.now == 0
    assert not believes(stands(False, True), common=b"")
