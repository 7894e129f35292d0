"""Whom the optimizer asks for the swarm's state, and when it gives up."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim import optimizer as optimizing
from trahiv_cli.optim.doubts import Doubts
from trahiv_cli.optim.history import History
from trahiv_cli.optim.optimizer import BELIEVED_S, SAID_S, SwarmOptimizer
from trahiv_cli.optim.progress import PeerProgress
from trahiv_cli.swarm.vitals import Vitals

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
    monkeypatch.setattr(optimizing, "time", clock)
    return clock


def ignore(event, what, until_s, **fields):
    """Hear that something was downloaded."""


def joiner(tries, *others, told=None):
    """An optimizer whose averager does what `tries` say, one after the other, the last again and again."""
    optimizer = object.__new__(SwarmOptimizer)
    asked = []

    def load(*, donors, rank, lowest, silence_s, report):
        asked.append(donors)
        return tries[min(len(asked), len(tries)) - 1](report)

    optimizer.__dict__.update(
        _closed=True,
        _leases=None,
        _vitals=Vitals(()),
        _home=None,
        asked=asked,
        load_state_timeout=60.0,
        events=SimpleNamespace(waiting=lambda what, until_s: nullcontext(told or ignore)),
        should_leave=lambda: False,
        state_averager=SimpleNamespace(
            history=History(2, 20, bytes(16)), donor="A", load_state_from_peers=load, local_epoch=4
        ),
        tracker=SimpleNamespace(
            others=others,
            target=FURTHER,
            is_behind=False,
            refresh=lambda: None,
            doubts=Doubts(),
            fetch_every_s=0.3,
        ),
        _donors_asked=[],
        _method=SimpleNamespace(reset=lambda: None),
        enter_step=lambda history: None,
    )
    return optimizer


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
        optimizer = joiner([there], *others)
        assert optimizer.load_state_from_peers() is True
        [donors] = optimizer.asked
        assert set(donors[:3]) == set("BCD") and donors[3:] == ["A"]
        firsts.add(donors[0])
    assert firsts == set("BCD"), "not all joiners ask the same one"


def map_peers(ids, history):
    return [peer(peer_id, history) for peer_id in ids]


@pytest.mark.parametrize("fails", [nobody, broken], ids=["nobody gives it", "it is of no use"])
def test_it_gives_up_when_nothing_of_use_came_for_too_long(clock, fails):
    optimizer = joiner([fails], peer("A", AHEAD))
    with pytest.raises(RoundFailed, match="came for 60 s") as failed:
        optimizer.load_state_from_peers()
    assert 50 <= clock.now <= 61 and "load_state_timeout" in failed.value.hint


def test_a_download_that_goes_on_is_not_given_up(clock):
    def a_part(report):
        clock.now += 50
        report(1, 10, 1)
        return False

    optimizer = joiner([a_part] * 5 + [there], peer("A", AHEAD))
    assert optimizer.load_state_from_peers() is True and clock.now > 250


def test_how_far_it_is_is_told(clock):
    news = []

    def a_part(report):
        report(12_300_000, 48_000_000, 2)
        return True

    def tell(event, what, until_s, **fields):
        news.append((event, what, until_s, fields))

    assert joiner([a_part], peer("A", AHEAD), told=tell).load_state_from_peers() is True
    [(event, what, until_s, fields)] = news
    assert event == "download" and until_s == 60.0
    assert what == "the swarm's state at step 4, 12 of 48 MB from 2 peer(s)"
    assert fields == {"step": 4, "bytes": 12_300_000, "total": 48_000_000, "donors": 2}


# -- whether what came is believed ----------------------------------------------------------------


def asked(clock, *standings):
    """A peer that asks others of a state that it has downloaded; each time they stand otherwise."""
    optimizer = joiner([there])
    optimizer._disbelieved, optimizer._closed, optimizer._wished = set(), False, AHEAD
    left = list(standings)

    def refresh():
        if len(left) > 1:
            left.pop(0)
        optimizer.tracker.standing = left[0]

    optimizer.tracker.refresh = refresh
    left.insert(0, left[0])
    return optimizer


def stands(believes, holds):
    def held(history, common, *, is_final):
        return holds or (True if is_final else None)

    return SimpleNamespace(believes=lambda history: believes, holds=held)


def test_what_others_hold_is_believed_at_once(clock):
    optimizer = asked(clock, stands(True, True))
    assert optimizer._is_believed(FURTHER, b"digest", "D") and clock.now == 0


def test_others_are_waited_for(clock):
    optimizer = asked(clock, *[stands(False, None)] * 5, *[stands(True, None)] * 5, stands(True, True))
    assert optimizer._is_believed(FURTHER, b"digest", "D")
    assert 0 < clock.now < BELIEVED_S


def test_where_others_hold_something_else_who_gave_it_is_asked_last(clock):
    elsewhere = SimpleNamespace(believes=lambda history: True, holds=lambda *_, is_final: False)
    optimizer = asked(clock, elsewhere)
    assert not optimizer._is_believed(FURTHER, b"digest", "D") and optimizer._disbelieved == {"D"}
    optimizer.tracker.others = [peer("D", FURTHER), peer("A", AHEAD)]
    assert optimizer._donors() == ["A", "D"]


def test_where_others_went_another_way_it_is_not_taken_over(clock):
    optimizer = asked(clock, stands(False, True))
    assert not optimizer._is_believed(FURTHER, b"digest", "D")
    assert BELIEVED_S <= clock.now < 2 * BELIEVED_S, "they may have come there"


def test_those_who_say_nothing_decide_nothing(clock):
    optimizer = asked(clock, stands(True, None))
    assert optimizer._is_believed(FURTHER, b"digest", "D") and clock.now >= BELIEVED_S


def test_an_older_state_than_was_wished_is_not_taken_over(clock):
    assert not asked(clock, stands(True, True))._is_believed(OLD, b"digest", "D")


def test_where_nobody_says_anything_it_is_not_taken_over_in_the_end(clock):
    silent = SimpleNamespace(believes=lambda history: True, holds=lambda *_, is_final: None)
    assert not asked(clock, silent)._is_believed(FURTHER, b"digest", "D") and clock.now >= SAID_S


def test_a_state_of_rounded_weights_is_judged_by_its_way_alone(clock):
    assert asked(clock, stands(True, None))._is_believed(FURTHER, b"", "D") and clock.now == 0
    assert not asked(clock, stands(False, True))._is_believed(FURTHER, b"", "D")
