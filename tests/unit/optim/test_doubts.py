"""What is believed of other peers' reports."""

import pytest

from trahiv_cli.optim import doubts as doubting
from trahiv_cli.optim.doubts import APART_ROUNDS, APART_S, CREDIT_MARGIN, FAILING_S, PASSED_OVER_S, Doubts
from trahiv_cli.swarm.records import disbelieve

TARGET, ANY = 100, 10**9


@pytest.fixture
def newcomer(clock):
    clock.now = 1000.0
    return Doubts(clock)


@pytest.fixture
def established(clock, newcomer):
    """One that has committed ten rounds with B, one in ten seconds, and stands at step 10."""
    return commit(newcomer, clock, *range(1, 11))


def commit(doubts, clock, *steps, interval_s=10.0):
    for step in steps:
        clock.now += interval_s
        doubts.commit(step, {"A": 60, "B": 40}, TARGET)
    return doubts


def is_far(doubts, step, *others, own=10, steps_a_round=1):
    steps = {"M": step} | {f"peer {number}": other for number, other in enumerate(others)}
    return "M" in doubts.unbelieved(steps, own, steps_a_round)


def test_a_step_further_than_the_swarm_can_be_is_not_believed(established, clock):
    for others in ((), (10,), (10, 10, 11)):
        assert not any(is_far(established, step, *others) for step in (0, 9, 10, 11, 12))
        assert all(is_far(established, step, *others) for step in (50, 1000, 10**6, 2**31))
    assert is_far(established, ANY, ANY, 10, 10) and not is_far(established, ANY, ANY), "most are believed"
    assert is_far(established, 100) and not is_far(established, 100, steps_a_round=50), "rounds may be longer"
    assert is_far(established, 3000)
    clock.now += 8 * 3600.0
    assert not is_far(established, 3000), "the others were away for long"


def test_who_was_in_no_round_with_others_yet_believes_those_who_are_there(newcomer, clock):
    newcomer.commit(1, {"A": 100}, TARGET)
    newcomer.commit(2, {"A": 100, "M": 0}, TARGET)
    assert not is_far(newcomer, ANY, own=2) and not is_far(newcomer, ANY, 500, own=2)
    assert not is_far(newcomer, 500 + doubting.NEWCOMERS_STEPS, 500, 500, own=2)
    assert is_far(newcomer, ANY, 500, 500, own=2)
    assert newcomer.believed_samples("B", ANY, TARGET) == ANY and not newcomer.is_together
    assert not is_far(commit(newcomer, clock, 3), 100, own=3), "one round says nothing of the pace"


def test_samples_count_as_far_as_a_peer_has_brought_as_many(established, monkeypatch):
    def believed(peer, *reported, target=TARGET):
        return [established.believed_samples(peer, one, target) for one in reported]

    assert believed("B", 0, 40, 160, 161, ANY) == [0, 40, 160, CREDIT_MARGIN * 40, CREDIT_MARGIN * 40]
    assert believed("M", 7, ANY) == [7, TARGET - 1], "it can't reach a step alone"
    established.commit(11, {"A": 60, "B": 0, "C": 40, "M": 0}, TARGET)
    assert believed("B", ANY) == [CREDIT_MARGIN * 20] and believed("M", 50) == [0]
    established.commit(12, {"A": 60, "B": 40, "M": 30}, TARGET)
    assert believed("M", 50) == [50]
    for steps in (50, 1, 250, 1):  # rounds of other lengths gain a liar nothing
        assert believed("B", ANY, target=steps * TARGET) == [CREDIT_MARGIN * 40 * steps]
        established.commit(13, {"A": 60 * steps, "B": 40 * steps}, steps * TARGET)
    monkeypatch.setattr(doubting, "MOST_REMEMBERED", 5)
    established.commit(14, dict.fromkeys("abcdefgh", 1), TARGET)
    assert believed("c", 9) == [9] and believed("d", 9) == [CREDIT_MARGIN], "what is remembered is bounded"


@pytest.mark.parametrize("num_peers", [2, 16])
def test_an_honest_swarm_s_first_round_of_more_steps_is_hardly_late(newcomer, num_peers):
    peers = [f"peer {number}" for number in range(num_peers)]
    for step in range(1, 4):
        newcomer.commit(step, dict.fromkeys(peers, TARGET // num_peers), TARGET)
    target = 50 * TARGET
    reported = round(1.2 * target / num_peers)  # by each, a fifth of the round after it should be due
    others = [newcomer.believed_samples(peer, reported, target) for peer in peers[1:]]
    assert reported + sum(others) >= target


def fail_for(doubts, clock, seconds, peer, others):
    """Have a peer give no state for so long; say whether it is passed over then."""
    for _ in range(int(seconds) + 1):
        doubts.gave_nothing([peer], others)
        clock.now += 1.0
    return peer in doubts.unbelieved({peer: 0, "B": 0}, 0, 1)


def test_who_gives_no_state_is_passed_over_for_a_while_if_the_others_are_more(established, clock, caplog):
    disbelieve.cache_clear()
    assert not fail_for(established, clock, FAILING_S - 2, "M", "MBC"), "it may have been started anew"
    assert fail_for(established, clock, 3, "M", "MBC")
    clock.now += PASSED_OVER_S
    assert established.unbelieved({"M": 0}, 0, 1) == []
    fail_for(established, clock, 2 * FAILING_S, "M", "MBC")
    assert not fail_for(established, clock, 10 * FAILING_S, "C", "C"), "the only other"
    assert not fail_for(Doubts(clock), clock, 2 * FAILING_S, "M", "MB"), "the others are not more"
    assert fail_for(established, clock, 2 * FAILING_S, "M", "MB"), "it was in rounds with B"
    assert caplog.messages == ["Peer M is not believed: it gives nobody the state that it reports."], "once"


@pytest.mark.parametrize(("interval_s", "holds_s"), [(10.0, APART_S), (APART_S, APART_ROUNDS * APART_S)])
def test_a_peer_holds_to_its_state_for_a_while(newcomer, clock, interval_s, holds_s):
    commit(newcomer, clock, 1, 2, interval_s=interval_s)
    clock.now += holds_s - 1
    assert newcomer.is_together
    clock.now += 1
    assert not newcomer.is_together
    newcomer.join()
    assert newcomer.is_together, "what it took over"
