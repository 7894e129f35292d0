"""Whose word counts when a state is reported, offered, or was downloaded."""

from dataclasses import dataclass, replace

import pytest

from trahiv_cli.optim.history import History
from trahiv_cli.optim.majority import FORK_S, ROUNDS_TOLD, STATES_TOLD, Fork, Past, Standing, Way, went_by

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


def past_of(*histories):
    past = Past()
    past.begin(histories[0])
    for history in histories[1:]:
        past.go_on(history)
    return past


def peer(*histories, states=(), vouched=None):
    """One that came through these, said what was held at some of them, and voted for one more round."""
    past = past_of(*histories)
    for history, common in states:
        past.attest(history, common)
    return Peer(histories[-1], Way.from_wire(**past.to_wire(vouched)))


def standing(own, *witnesses, **more):
    there = [witness.history for witness in witnesses]
    mates = [witness for witness in witnesses if witness.history == own]
    return Standing(**{"own": own, "witnesses": witnesses, "there": there, "mates": mates} | more)


MAIN = line(6)
OTHER = line(3, b"?", MAIN[:3], samples=11)
"""Left the other way after two rounds, and has more samples than that had after as many."""

LIE = line(3, b"!", MAIN)[-1]
LIAR = peer(*MAIN, LIE)


def at(length, count=1):
    """Peers that came through so many histories of the main way."""
    return [peer(*MAIN[:length]) for _ in range(count)]


# -- what a peer tells ----------------------------------------------------------------------------


def test_a_way_is_told_as_far_as_it_fits():
    far = line(ROUNDS_TOLD + 9)
    told = peer(*far, states=[(far[1], b"before.."), (far[1], b"after...")])
    assert len(told.way.rounds) == ROUNDS_TOLD and {state[2] for state in told.way.states} == {b"after..."}
    assert went_by(told, far[-ROUNDS_TOLD]) is True and went_by(told, far[3]) is None
    assert went_by(told, far[1]) is True, "it gave that state, though it is long ago"


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
    assert {step for step, *_ in told} == {0, *range(2 * STATES_TOLD + 2, 3 * STATES_TOLD + 1)}
    for history in far:  # those that were given make room for later ones
        past.attest(history, b"12345678", is_given=True)
    told = Way.from_wire(**past.to_wire()).states
    assert len(told) == STATES_TOLD and max(step for step, *_ in told) == 3 * STATES_TOLD


def test_a_peer_went_by_the_states_of_its_way_and_by_no_others():
    [told] = at(7)
    assert all(went_by(told, history) is True for history in MAIN)
    assert all(went_by(told, history) is False for history in OTHER[3:])
    assert went_by(told, LIE) is None, "it may come there"
    assert went_by(peer(*MAIN[4:]), MAIN[2]) is None, "it came later"
    silent = Peer(MAIN[3], Way())
    assert [went_by(silent, one) for one in (MAIN[3], OTHER[3], MAIN[2])] == [True, False, None]


# -- where to go, and what is believed ------------------------------------------------------------

TWO_HERE, ONE_AHEAD = at(4, 2), [*at(5), *at(4)]


@pytest.mark.parametrize(
    ("own", "witnesses", "more", "target"),
    [
        (MAIN[3], [], {}, MAIN[3]),
        (START, [*at(7, 2), LIAR], {}, MAIN[6]),
        (MAIN[2], [peer(MAIN[2]), peer(MAIN[2]), peer(MAIN[5])], {}, MAIN[5]),
        (START, [*at(6), peer(*OTHER)], {}, OTHER[5]),
        (MAIN[3], [*TWO_HERE, LIAR], {"holds_on": True}, MAIN[3]),
        (MAIN[3], [*TWO_HERE, LIAR], {}, MAIN[3]),
        (MAIN[3], [*at(4), *at(5, 2)], {"holds_on": True}, MAIN[4]),
        (MAIN[3], at(5), {"holds_on": True}, MAIN[4]),
        (MAIN[3], ONE_AHEAD, {"holds_on": True}, MAIN[3]),
        (MAIN[3], ONE_AHEAD, {"holds_on": True, "vouched": MAIN[4]}, MAIN[4]),
        (
            MAIN[4],
            [*TWO_HERE, peer(*MAIN[:5], LIE)],
            {"mates": TWO_HERE, "holds_on": True},
            MAIN[4],
        ),
        (
            MAIN[3],
            [*at(5), peer(*MAIN[:4], vouched=MAIN[4]), *TWO_HERE],
            {"holds_on": True, "vouched": MAIN[4]},
            MAIN[4],
        ),
    ],
    ids=[
        "alone",
        "a newcomer goes where most went",
        "those that start again go on from the furthest",
        "of two ways with as many, the one with more samples",
        "who trained with others leaves them for no fewer",
        "nor does who holds on no more, where others train",
        "who was left behind by more follows them",
        "of two, who is behind follows",
        "one ahead is no more than one here",
        "but is, for who voted for its round",
        "who has just committed counts those that are about to",
        "of five, three voted, and one of them alone knows that it was committed",
    ],
)
def test_a_peer_goes_where_most_witnesses_went(own, witnesses, more, target):
    view = standing(own, *witnesses, **more)
    assert view.target == target and view.believes(target) and not view.believes(LIE)


def test_who_came_later_abstains():
    trained, newcomers = at(7, 2), [peer(*MAIN[5:]), peer(*MAIN[5:])]
    assert standing(START, *trained, *newcomers).believes(MAIN[4])
    assert not standing(START, *newcomers).believes(MAIN[2]), "nobody went by it"
    invented = History(2, 10**6, b"invented by one!")
    assert not standing(START, *newcomers, peer(*MAIN, states=[(invented, b"x" * 8)])).believes(invented)


def test_one_that_stays_behind_keeps_newcomers_from_nothing():
    went_on, [stays] = at(7, 3), at(4)
    assert standing(START, *went_on, stays).believes(MAIN[-1])
    assert standing(START, stays, *went_on).believes(MAIN[3])
    assert not standing(START, *went_on, stays, LIAR).believes(LIE)


def test_nobody_went_by_a_history_of_other_samples():
    """The digest of a history says how many are behind it, and nobody can tell by looking at it."""
    honest, made_up = at(7, 3), replace(MAIN[-1], samples=2**31)
    liar = Peer(made_up, honest[0].way)
    assert went_by(honest[0], made_up) is False
    for own in (START, MAIN[-1]):
        assert standing(own, *honest, liar, holds_on=own is not START).target == MAIN[-1]
        assert not standing(own, *honest, liar).believes(made_up)


HERE, THERE = b"right...", b"wrong..."


@pytest.mark.parametrize(
    ("said", "is_held", "in_the_end"),
    [
        ([], True, True),
        ([None], True, True),
        ([THERE], True, True),
        ([HERE, None], None, None),
        ([HERE, HERE, None], True, True),
        ([HERE, HERE, None, None], None, True),
        ([None, None], None, None),
        ([THERE, None], None, None),
        ([HERE, HERE, THERE], True, True),
        ([THERE, THERE, HERE], False, False),
        ([HERE, THERE], True, True),
        ([HERE, THERE, None], None, True),
        ([THERE, THERE, None], False, False),
        ([b"another.", THERE, HERE], True, True),
    ],
)
def test_what_most_hold_is_believed_and_silence_decides_nothing_once_two_have_spoken(
    said, is_held, in_the_end
):
    peers = [peer(*MAIN, states=[(MAIN[-1], one)] if one else []) for one in said]
    view, common = standing(START, *peers), HERE + b"the rest of a longer digest"
    assert view.holds(MAIN[-1], common) is is_held
    assert view.holds(MAIN[-1], common, is_final=True) is in_the_end


# -- the way back ---------------------------------------------------------------------------------

CUT_OFF = past_of(*OTHER)
"""Of a peer that went the way with more samples, by itself."""

US, NEWCOMERS = [peer(*OTHER), peer(*OTHER)], [peer(*MAIN), peer(*MAIN)]
LONG = (0.0, 2 * FORK_S, 3 * FORK_S)


@pytest.mark.parametrize(
    ("looks", "past", "goes_to"),
    [
        ([(0.0, at(4, 3)), (FORK_S - 1, at(5, 3)), (FORK_S, at(5, 3))], CUT_OFF, MAIN[4]),
        ([(when, at(4, 3)) for when in LONG], CUT_OFF, None),
        ([(when, [*US, *at(length, 3)]) for length, when in enumerate(LONG, 3)], CUT_OFF, None),
        ([(when, at(length, 3)) for length, when in enumerate(LONG, 3)], past_of(*MAIN, LIE), None),
        ([(0.0, at(4, 3)), (FORK_S - 1, US[:1]), (FORK_S, at(5, 3))], CUT_OFF, None),
        (
            [(when, [*at(length, 2), *NEWCOMERS]) for length, when in enumerate(LONG, 3)],
            past_of(MAIN[6]),
            None,
        ),
    ],
    ids=[
        "who is fewer comes back to most others once they went on",
        "not to others that stand still",
        "not to who is fewer",
        "not to its own past",
        "time begins anew when most are here again",
        "not to where newcomers are on their way",
    ],
)
def test_who_is_fewer_comes_back(clock, looks, past, goes_to):
    own = MAIN[6] if looks[0][1][-1] in NEWCOMERS else LIE if past.went_by(LIE) else OTHER[-1]
    fork, seen = Fork(clock), []
    for clock.now, others in looks:
        seen.append(fork.look(standing(own, *others), past))
    assert seen == [None] * (len(looks) - 1) + [goes_to]
