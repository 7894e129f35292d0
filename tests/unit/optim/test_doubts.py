"""What is believed of other peers' reports."""

import pytest

from trahiv_cli.optim import doubts as doubts_module
from trahiv_cli.optim.doubts import (
    APART_ROUNDS,
    APART_S,
    CREDIT_MARGIN,
    FAILING_S,
    NEWCOMERS_STEPS,
    PASSED_OVER_S,
    Doubts,
)

TARGET = 100


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def established(clock):
    """One that has committed ten rounds with B, one in ten seconds, and stands at step 10."""
    doubts = Doubts(lambda: clock[0])
    for step in range(1, 11):
        clock[0] += 10.0
        doubts.commit(step, {"A": 60, "B": 40}, TARGET)
    return doubts


def is_far(doubts, step, *others, own=10):
    return step > doubts.furthest(own, (step, *others), 1)


@pytest.mark.parametrize("step", [0, 9, 10, 11, 12])
@pytest.mark.parametrize("others", [(), (10,), (10, 10, 11)])
def test_a_step_that_the_swarm_may_have_come_to_is_believed(established, step, others):
    assert not is_far(established, step, *others)


@pytest.mark.parametrize("step", [50, 1000, 10**6, 2**31])
@pytest.mark.parametrize("others", [(), (10,), (10, 10, 11)])
def test_one_further_than_it_can_have_come_is_not(established, step, others):
    assert is_far(established, step, *others)


def test_two_that_lie_alike_are_not_believed_by_three(established):
    assert is_far(established, 10**6, 10**6, 10, 10)


def test_most_are_believed_wherever_they_are(established):
    assert not is_far(established, 10**6, 10**6)


def test_the_longer_the_others_were_away_the_further_they_may_be(established, clock):
    assert is_far(established, 3000)
    clock[0] += 8 * 3600.0
    assert not is_far(established, 3000)


def test_a_round_of_many_steps_goes_far(established):
    assert established.furthest(10, (100,), 1) < 100 <= established.furthest(10, (100,), 50)


def test_who_was_in_no_round_yet_believes_those_who_are_there(clock):
    newcomer = Doubts(lambda: clock[0])
    assert not is_far(newcomer, 10**6, own=0)
    assert not is_far(newcomer, 10**6, 500, own=0)
    assert not is_far(newcomer, 500 + NEWCOMERS_STEPS, 500, 500, own=0)
    assert is_far(newcomer, 10**6, 500, 500, own=0)
    assert newcomer.believed_samples("B", 10**9, TARGET) == 10**9


def test_a_round_of_one_alone_makes_nobody_wiser(clock):
    lone = Doubts(lambda: clock[0])
    lone.commit(1, {"A": 100}, TARGET)
    lone.commit(2, {"A": 100, "M": 0}, TARGET)
    assert not is_far(lone, 10**6, own=2)


def test_samples_count_as_far_as_a_peer_has_brought_as_many(established):
    believed = [established.believed_samples("B", reported, TARGET) for reported in (0, 40, 160, 161, 10**9)]
    assert believed == [0, 40, 160, CREDIT_MARGIN * 40, CREDIT_MARGIN * 40]


def test_one_that_never_brought_any_can_t_reach_a_step_alone(established):
    assert established.believed_samples("M", 10**9, TARGET) == TARGET - 1
    assert established.believed_samples("M", 7, TARGET) == 7


def test_one_that_reports_samples_and_brings_none_is_not_counted_until_it_does(established):
    established.commit(11, {"A": 60, "B": 40, "M": 0}, TARGET)
    assert established.believed_samples("M", 50, TARGET) == 0
    established.commit(12, {"A": 60, "B": 40, "M": 30}, TARGET)
    assert established.believed_samples("M", 50, TARGET) == 50


def test_a_round_that_a_peer_missed_halves_its_credit(established):
    established.commit(11, {"A": 60, "C": 40, "B": 0}, TARGET)
    assert established.believed_samples("B", 10**9, TARGET) == CREDIT_MARGIN * 20


@pytest.mark.parametrize("num_peers", [2, 4, 8, 16])
def test_an_honest_swarm_s_first_round_of_more_steps_is_hardly_late(clock, num_peers):
    doubts, peers = Doubts(lambda: clock[0]), [f"peer {number}" for number in range(num_peers)]
    for step in range(1, 4):
        doubts.commit(step, dict.fromkeys(peers, TARGET // num_peers), TARGET)
    target = 50 * TARGET
    reported = round(1.2 * target / num_peers)  # by each, a fifth of the round after it should be due
    others = [doubts.believed_samples(peer, reported, target) for peer in peers[1:]]
    assert reported + sum(others) >= target


def test_a_liar_gains_no_more_by_rounds_of_other_lengths(established):
    for steps in (50, 1, 250):
        believed = established.believed_samples("B", 10**9, steps * TARGET)
        assert believed == CREDIT_MARGIN * 40 * steps
        established.commit(11, {"A": 60 * steps, "B": 40 * steps}, steps * TARGET)
    assert established.believed_samples("B", 10**9, TARGET) == CREDIT_MARGIN * 40


def test_what_is_remembered_is_bounded(established, monkeypatch):
    monkeypatch.setattr(doubts_module, "MOST_REMEMBERED", 5)
    established.commit(11, {f"peer {number}": number + 1 for number in range(20)}, TARGET)
    assert len(established._credit) == 5


def fail_for(doubts, clock, seconds, peers, others):
    for _ in range(int(seconds) + 1):
        doubts.gave_nothing(peers, others)
        clock[0] += 1.0


def is_passed_over(doubts, peer):
    return peer in doubts.unbelieved({peer: 0}, 0, 1)


def test_who_gives_no_state_is_passed_over_for_a_while_if_the_others_are_more(established, clock):
    fail_for(established, clock, FAILING_S - 2, ["M"], ["M", "B", "C"])
    assert not is_passed_over(established, "M"), "it may have been started anew"
    fail_for(established, clock, 3, ["M"], ["M", "B", "C"])
    assert is_passed_over(established, "M") and not is_passed_over(established, "B")
    clock[0] += PASSED_OVER_S
    assert not is_passed_over(established, "M")


def test_of_two_others_one_is_passed_over_by_who_was_in_rounds_with_the_other(established, clock):
    newcomer = Doubts(lambda: clock[0])
    for one in (established, newcomer):
        fail_for(one, clock, 2 * FAILING_S, ["M"], ["M", "B"])
    assert is_passed_over(established, "M") and not is_passed_over(newcomer, "M")


def test_the_only_other_is_not_passed_over(established, clock):
    fail_for(established, clock, 10 * FAILING_S, ["M"], ["M"])
    assert not is_passed_over(established, "M")


def test_after_one_round_there_is_no_pace_to_go_by(clock):
    doubts = Doubts(lambda: clock[0])
    doubts.commit(1, {"A": 50, "B": 50}, TARGET)
    assert not is_far(doubts, 100, own=1)


def test_what_failed_long_ago_is_forgotten(established, clock):
    established.gave_nothing(["M"], ["M", "B", "C"])
    clock[0] += PASSED_OVER_S
    fail_for(established, clock, 5, ["M"], ["M", "B", "C"])
    assert not is_passed_over(established, "M")


def test_who_is_not_believed_is_named_once(established, monkeypatch):
    said = []
    monkeypatch.setattr(doubts_module.logger, "warning", said.append)
    for _ in range(3):
        established.name("M", "it lies")
    assert said == ["Peer M is not believed: it lies."]


# -- how long a peer holds to its state -----------------------------------------------------------


def test_who_was_in_rounds_lately_holds_to_its_state_for_a_while(established, clock):
    assert established.is_together
    clock[0] += APART_S - 1
    assert established.is_together
    clock[0] += 1
    assert not established.is_together


def test_where_rounds_are_slow_for_longer(clock):
    doubts = Doubts(lambda: clock[0])
    for step in (1, 2):
        clock[0] += APART_S
        doubts.commit(step, {"A": 60, "B": 40}, TARGET)
    clock[0] += APART_ROUNDS * APART_S - 1
    assert doubts.is_together


def test_who_was_in_no_round_holds_to_nothing_but_what_it_took_over(clock):
    doubts = Doubts(lambda: clock[0])
    doubts.commit(1, {"A": 60}, TARGET)
    assert not doubts.is_together
    doubts.join()
    assert doubts.is_together
