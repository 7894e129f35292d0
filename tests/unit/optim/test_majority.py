"""Whose word counts when a state is reported, offered, or was downloaded."""

from dataclasses import dataclass, replace

import pytest

from trahiv_cli.optim.history import History
from trahiv_cli.optim.majority import (
    FORK_S,
    ROUNDS_TOLD,
    STATES_TOLD,
    Fork,
    Past,
    Standing,
    Way,
    went_by,
)

START = History()


def line(length, branch=b"", after=(START,), samples=10):
    """All histories of a way of so many rounds, the first of them included."""
    histories = list(after)
    for number in range(length):
        proof = b"%d" % number + branch
        histories.append(histories[-1].extend(samples=samples, proof=proof))
    return histories


@dataclass(frozen=True)
class Peer:
    history: History
    way: Way


def peer(*histories, states=()):
    """One that came through these, and said what was held at some of them."""
    past = Past()
    past.begin(histories[0])
    for history in histories[1:]:
        past.go_on(history)
    for history, common in states:
        past.attest(history, common)
    return Peer(histories[-1], Way.from_wire(**past.to_wire()))


def standing(own, *witnesses, **more):
    there = [witness.history for witness in witnesses]
    mates = [witness for witness in witnesses if witness.history == own]
    return Standing(own=own, witnesses=witnesses, there=there, mates=mates, **more)


MAIN = line(6)
OTHER = line(3, b"?", MAIN[:3], samples=11)
"""Left the other way after two rounds, and has more samples than that had after as many."""

LIE = line(3, b"!", MAIN)[-1]


# -- what a peer tells ----------------------------------------------------------------------------


def test_a_way_is_told_as_far_as_it_fits():
    far = line(ROUNDS_TOLD + 5)
    told = peer(*far)
    assert len(told.way.rounds) == ROUNDS_TOLD
    assert went_by(told, far[-ROUNDS_TOLD]) is True and went_by(told, far[3]) is None


@pytest.mark.parametrize(("rounds", "states"), [(b"1", b""), (b"", b"12345"), (b"x" * 13, b"")])
def test_what_is_no_way_is_refused(rounds, states):
    with pytest.raises(ValueError, match="way"):
        Way.from_wire(rounds, states)


def test_what_a_joiner_fetches_is_told_for_longer_than_what_rounds_hold():
    past, far = Past(), line(3 * STATES_TOLD)
    past.attest(far[0], b"held at 0", is_given=True)
    for history in far[1:]:
        past.attest(history, b"digest of this one")
    told = Way.from_wire(**past.to_wire()).states
    assert len(told) == STATES_TOLD
    assert {step for step, *_ in told} == {0, *range(2 * STATES_TOLD + 2, 3 * STATES_TOLD + 1)}


def test_states_that_were_given_make_room_for_later_ones():
    past, far = Past(), line(2 * STATES_TOLD)
    for history in far:
        past.attest(history, b"12345678", is_given=True)
    assert max(step for step, *_ in Way.from_wire(**past.to_wire()).states) == 2 * STATES_TOLD


def test_the_latest_word_on_a_state_counts():
    told = peer(*MAIN, states=[(MAIN[-1], b"before.."), (MAIN[-1], b"after...")])
    assert {state[2] for state in told.way.states} == {b"after..."}


# -- who went by what -----------------------------------------------------------------------------


def test_a_peer_went_by_the_states_of_its_way_and_by_no_others():
    told = peer(*MAIN)
    assert all(went_by(told, history) is True for history in MAIN)
    assert all(went_by(told, history) is False for history in OTHER[3:])
    assert went_by(told, LIE) is None, "it may come there"


def test_who_came_later_can_not_say():
    told = peer(*MAIN[4:])
    assert went_by(told, MAIN[2]) is None


def test_who_gave_a_state_went_by_it_though_it_is_long_ago():
    far = line(ROUNDS_TOLD + 9)
    assert went_by(peer(*far, states=[(far[1], b"12345678")]), far[1]) is True


def test_who_tells_no_way_went_by_where_it_stands():
    told = Peer(MAIN[3], Way())
    assert went_by(told, MAIN[3]) is True and went_by(told, OTHER[3]) is False
    assert went_by(told, MAIN[2]) is None


# -- where to go ----------------------------------------------------------------------------------


def test_alone_a_peer_stays():
    assert standing(MAIN[3]).target == MAIN[3]


def test_a_newcomer_goes_where_most_went_and_not_where_one_says_to_be():
    honest = [peer(*MAIN[:5]), peer(*MAIN[:6])]
    liar = peer(*MAIN, LIE)
    assert standing(START, *honest, liar).target in MAIN
    assert not standing(START, *honest, liar).believes(LIE)
    assert standing(START, peer(*MAIN), peer(*MAIN), liar).target == MAIN[-1]


def test_those_that_start_again_go_on_from_the_furthest():
    assert standing(MAIN[2], peer(MAIN[2]), peer(MAIN[2]), peer(MAIN[5])).target == MAIN[5]


def test_of_two_ways_with_as_many_the_one_with_more_samples_counts():
    assert OTHER[5].rank > MAIN[5].rank
    assert standing(START, peer(*MAIN[:6]), peer(*OTHER)).target == OTHER[5]


def test_who_trained_with_others_leaves_them_for_no_fewer():
    others = [peer(*MAIN[:4]), peer(*MAIN[:4])]
    liar = peer(*MAIN, LIE)
    assert standing(MAIN[3], *others, liar, holds_on=True).target == MAIN[3]
    assert not standing(MAIN[3], *others, liar, holds_on=True).believes(LIE)


def test_who_was_left_behind_by_more_follows_them():
    ahead = [peer(*MAIN[:5]), peer(*MAIN[:5])]
    both = standing(MAIN[3], peer(*MAIN[:4]), *ahead, holds_on=True)
    assert both.target == MAIN[4] and both.believes(MAIN[4])


def test_of_two_who_is_behind_follows():
    assert standing(MAIN[3], peer(*MAIN[:5]), holds_on=True).target == MAIN[4]


def test_whose_vote_may_have_counted_believes_what_it_voted_for():
    one_ahead = [peer(*MAIN[:5]), peer(*MAIN[:4])]
    assert standing(MAIN[3], *one_ahead, holds_on=True).target == MAIN[3]
    assert standing(MAIN[3], *one_ahead, holds_on=True, vouched=MAIN[4]).target == MAIN[4]


def test_who_came_after_a_state_does_not_count_against_it():
    trained = [peer(*MAIN), peer(*MAIN)]
    newcomers = [peer(*MAIN[5:]), peer(*MAIN[5:])]
    assert standing(START, *trained, *newcomers).believes(MAIN[4])


def test_a_state_that_nobody_went_by_is_not_believed_though_all_came_later():
    newcomers = [peer(*MAIN[5:]), peer(*MAIN[5:])]
    assert not standing(START, *newcomers).believes(MAIN[2])


def test_one_that_stays_behind_keeps_newcomers_from_nothing():
    went_on, stays = [peer(*MAIN) for _ in range(3)], peer(*MAIN[:4])
    assert standing(START, *went_on, stays).believes(MAIN[-1])
    assert standing(START, stays, *went_on).believes(MAIN[3])
    assert not standing(START, *went_on, stays, peer(*MAIN, LIE)).believes(LIE)


def test_nobody_went_by_a_history_of_other_samples():
    """The digest of a history says how many are behind it, and nobody can tell by looking at it."""
    honest, made_up = [peer(*MAIN) for _ in range(3)], replace(MAIN[-1], samples=2**31)
    liar = Peer(made_up, honest[0].way)
    assert went_by(honest[0], made_up) is False
    for own in (START, MAIN[-1]):
        assert standing(own, *honest, liar, holds_on=own is not START).target == MAIN[-1]
        assert not standing(own, *honest, liar).believes(made_up)


# -- what is held there ---------------------------------------------------------------------------

HERE, THERE = b"right...", b"wrong..."


def at_the_end(*said):
    """Where peers stand that all came the whole way, and said this of its last state."""
    return standing(START, *(peer(*MAIN, states=[(MAIN[-1], one)] if one else []) for one in said))


@pytest.mark.parametrize(
    ("said", "is_held"),
    [
        ([], True),
        ([None], True),
        ([THERE], True),
        ([HERE, None], None),
        ([HERE, HERE, None], True),
        ([None, None], None),
        ([THERE, None], None),
        ([HERE, HERE, THERE], True),
        ([THERE, THERE, HERE], False),
        ([HERE, THERE], True),
        ([HERE, THERE, None], None),
        ([THERE, THERE, None], False),
        ([b"another.", THERE, HERE], True),
    ],
)
def test_what_most_hold_is_believed(said, is_held):
    assert at_the_end(*said).holds(MAIN[-1], HERE + b"the rest of a longer digest") is is_held


@pytest.mark.parametrize(
    ("said", "is_held"),
    [
        ([HERE, None], None),
        ([HERE, HERE, None, None], True),
        ([HERE, THERE, None], True),
        ([THERE, None], None),
    ],
)
def test_those_that_are_silent_for_long_decide_nothing_once_two_have_spoken(said, is_held):
    assert at_the_end(*said).holds(MAIN[-1], HERE, is_final=True) is is_held


# -- the way back ---------------------------------------------------------------------------------


def cut_off():
    """A peer that went the way with more samples, by itself."""
    past = Past()
    for history in OTHER[1:]:
        past.go_on(history)
    return past


def many(length):
    return [peer(*MAIN[:length]) for _ in range(3)]


def test_who_is_fewer_comes_back_to_most_others_once_they_went_on(clock):
    fork, past = Fork(clock), cut_off()
    assert fork.look(standing(OTHER[-1], *many(4)), past) is None
    clock.now = FORK_S - 1
    assert fork.look(standing(OTHER[-1], *many(5)), past) is None
    clock.now = FORK_S
    assert fork.look(standing(OTHER[-1], *many(5)), past) == MAIN[4]


def test_nobody_goes_back_to_others_that_stand_still(clock):
    fork, past = Fork(clock), cut_off()
    for clock.now in (0.0, FORK_S, 100 * FORK_S):
        assert fork.look(standing(OTHER[-1], *many(4)), past) is None


def test_nobody_goes_back_to_who_is_fewer(clock):
    fork, past = Fork(clock), cut_off()
    for clock.now, length in ((0.0, 3), (FORK_S, 4), (2 * FORK_S, 5)):
        us = [peer(*OTHER), peer(*OTHER)]
        assert fork.look(standing(OTHER[-1], *us, *many(length)), past) is None


def test_nobody_goes_back_to_its_own_past(clock):
    fork, past = Fork(clock), Past()
    for history in MAIN[1:]:
        past.go_on(history)
    for clock.now, length in ((0.0, 3), (FORK_S, 4), (2 * FORK_S, 5)):
        assert fork.look(standing(MAIN[-1], *many(length)), past) is None


def test_time_begins_anew_when_most_are_here_again(clock):
    fork, past = Fork(clock), cut_off()
    fork.look(standing(OTHER[-1], *many(4)), past)
    clock.now = FORK_S - 1
    fork.look(standing(OTHER[-1], peer(*OTHER)), past)
    clock.now = FORK_S
    assert fork.look(standing(OTHER[-1], *many(5)), past) is None


# -- what a review found --------------------------------------------------------------------------


def test_who_has_just_committed_counts_those_that_are_about_to_for_its_state():
    """One that lies to be ahead at that moment would else be as many as who came first."""
    late = [peer(*MAIN[:4]), peer(*MAIN[:4])]
    liar = peer(*MAIN[:5], LIE)
    there = [witness.history for witness in (*late, liar)]
    first = Standing(own=MAIN[4], witnesses=[*late, liar], there=there, mates=late, holds_on=True)
    assert first.target == MAIN[4] and not first.believes(LIE)


def test_who_holds_on_no_more_stays_where_others_train():
    trained = [peer(*MAIN[:4]), peer(*MAIN[:4])]
    assert standing(MAIN[3], *trained, peer(*MAIN, LIE)).target == MAIN[3]


def test_votes_of_others_count_for_what_they_voted_for():
    """Of five, three voted for a round, and one of them alone knows that it was committed."""
    committed = peer(*MAIN[:5])
    voted = Past()
    for history in MAIN[1:4]:
        voted.go_on(history)
    voter = Peer(MAIN[3], Way.from_wire(**voted.to_wire(MAIN[4])))
    elsewhere = [peer(*MAIN[:4]), peer(*MAIN[:4])]
    own = standing(MAIN[3], committed, voter, *elsewhere, holds_on=True, vouched=MAIN[4])
    assert own.target == MAIN[4] and own.believes(MAIN[4])


def test_an_old_state_that_one_alone_tells_of_is_not_believed_because_others_came_later():
    invented = History(2, 10**6, b"invented by one!")
    honest = [peer(*MAIN[5:]), peer(*MAIN[5:]), peer(*MAIN[4:])]
    liar = peer(*MAIN, states=[(invented, HERE)])
    assert not standing(START, *honest, liar).believes(invented)


def test_nobody_goes_back_to_where_newcomers_are_on_their_way(clock):
    fork, past = Fork(clock), Past()
    past.begin(MAIN[6])
    for clock.now, at in ((0.0, 2), (FORK_S, 3), (2 * FORK_S, 4)):
        behind = [peer(*MAIN[1 : at + 1]) for _ in range(2)]
        rest = [peer(*MAIN), peer(*MAIN)]
        assert fork.look(standing(MAIN[6], *behind, *rest), past) is None
