"""Which peers are believed when samples or states are reported, offered or downloaded."""

from dataclasses import replace

import pytest

from tests.kit.stepping import reported
from trahiv_cli.members.records import ignore_peer
from trahiv_cli.progress import trust as majority
from trahiv_cli.progress.history import History
from trahiv_cli.progress.reports import ROUNDS_TOLD, STATES_TOLD, CommitPath
from trahiv_cli.progress.trust import CREDIT_MARGIN, FORK_S, MinorityWatch, Plausibility, SwarmView

START = History()
APART_S = majority.APART_S
FAILING_S = majority.FAILING_S
PASSED_OVER_S = majority.PASSED_OVER_S


def line(length, proof=b"", after=(START,), samples=10):
    """Return `after` and the histories of `length` further rounds."""
    histories = list(after)
    for _ in range(length):
        histories.append(histories[-1].extend(samples=samples, proof=proof))
    return histories


def past_of(*histories, states=()):
    past = CommitPath()
    past.begin(histories[0])
    for history in histories[1:]:
        past.go_on(history)
    for history, common in states:
        past.attest(history, common)
    return past


def peer(*histories, states=(), vouched=None):
    """Return a peer that passed these histories, attested `states`, and voted for `vouched`."""
    return reported("Qm", histories[-1], **past_of(*histories, states=states).to_wire(vouched))


def view_of(own, *witnesses, **more):
    mates = [witness for witness in witnesses if witness.history == own]
    return SwarmView(**{"own": own, "witnesses": witnesses, "mates": mates} | more)


MAIN = line(6)
OTHER = line(3, b"?", MAIN[:3], samples=11)  # forked after two rounds: fewer rounds, with more samples
LIE = line(3, b"!", MAIN)[-1]
LIAR = peer(*MAIN, LIE)


def at(length, count=1):
    """Return `count` peers that passed the first `length` histories of the main branch."""
    return [peer(*MAIN[:length])] * count


def test_went_by_follows_reported_past():
    [told] = at(7)
    assert all(told.passed_through(history) is True for history in MAIN)
    assert all(told.passed_through(history) is False for history in OTHER[3:])
    assert told.passed_through(LIE) is None, "it may come there"
    assert peer(*MAIN[4:]).passed_through(MAIN[2]) is None, "it came later"
    silent = reported("Qm", MAIN[3])
    assert [silent.passed_through(one) for one in (MAIN[3], OTHER[3], MAIN[2])] == [True, False, None]


@pytest.mark.parametrize("nonsense", [{"rounds": b"1"}, {"states": b"12345"}, {"leases": [1, 0]}])
def test_nonsense_of_past_is_ignored(nonsense):
    assert reported("Qm", MAIN[3], **nonsense) == reported("Qm", MAIN[3])


def test_reported_past_is_bounded():
    far = line(ROUNDS_TOLD + 9)
    told = peer(*far, states=[(far[1], b"before.."), (far[1], b"after...")])
    assert len(told.rounds) == ROUNDS_TOLD
    assert {state[2] for state in told.states} == {b"after..."}
    assert told.passed_through(far[-ROUNDS_TOLD]) is True
    assert told.passed_through(far[3]) is None
    assert told.passed_through(far[1]) is True, "it gave that state, though it is long ago"


def test_given_states_are_reported_longer():
    far = line(3 * STATES_TOLD)
    past = CommitPath()
    past.attest(far[0], b"held at 0", is_given=True)
    for history in far[1:]:
        past.attest(history, b"digest of this one")
    told = reported("Qm", far[-1], **past.to_wire()).states
    assert {step for step, *_ in told} == {0, *range(2 * STATES_TOLD + 2, 3 * STATES_TOLD + 1)}
    for history in far:  # older given states make room for later ones
        past.attest(history, b"12345678", is_given=True)
    told = reported("Qm", far[-1], **past.to_wire()).states
    assert len(told) == STATES_TOLD
    assert max(step for step, *_ in told) == 3 * STATES_TOLD


TWO_HERE = at(4, 2)
ONE_AHEAD = [*at(5), *at(4)]
HOLDS = {"holds_on": True}
VOUCHED = HOLDS | {"vouched": MAIN[4]}
WITH_MATES = HOLDS | {"mates": TWO_HERE}
RESTARTED = [peer(MAIN[2]), peer(MAIN[2]), peer(MAIN[5])]
FIVE = [*at(5), peer(*MAIN[:4], vouched=MAIN[4]), *TWO_HERE]

TARGETS = {
    "alone": (MAIN[3], [], {}, MAIN[3]),
    "a newcomer goes where most went": (START, [*at(7, 2), LIAR], {}, MAIN[6]),
    "those that start again go on from the furthest": (MAIN[2], RESTARTED, {}, MAIN[5]),
    "of two ways with as many, the one with more samples": (START, [*at(6), peer(*OTHER)], {}, OTHER[5]),
    "who trained with others leaves them for no fewer": (MAIN[3], [*TWO_HERE, LIAR], HOLDS, MAIN[3]),
    "nor does who holds on no more, where others train": (MAIN[3], [*TWO_HERE, LIAR], {}, MAIN[3]),
    "who was left behind by more follows them": (MAIN[3], [*at(4), *at(5, 2)], HOLDS, MAIN[4]),
    "of two, who is behind follows": (MAIN[3], at(5), HOLDS, MAIN[4]),
    "one ahead is no more than one here": (MAIN[3], ONE_AHEAD, HOLDS, MAIN[3]),
    "but is, for who voted for its round": (MAIN[3], ONE_AHEAD, VOUCHED, MAIN[4]),
    "those about to commit count": (MAIN[4], [*TWO_HERE, peer(*MAIN[:5], LIE)], WITH_MATES, MAIN[4]),
    "of five, three voted, and one alone knows that it was committed": (MAIN[3], FIVE, VOUCHED, MAIN[4]),
}


@pytest.mark.parametrize("is_quiet", [False, True])
def test_silent_mate_does_not_hold_back(is_quiet):
    """It may have died after a step that it did not report."""
    mate = replace(peer(*MAIN[:5]), is_quiet=is_quiet)
    view = view_of(MAIN[4], mate, peer(*MAIN[:6]), holds_on=True)
    assert view.target == MAIN[5 if is_quiet else 4]


@pytest.mark.parametrize("which", TARGETS)
def test_target_follows_most_witnesses(which):
    own, witnesses, more, target = TARGETS[which]
    view = view_of(own, *witnesses, **more)
    assert view.target == target
    assert view.believes(target)
    assert not view.believes(LIE)


NEWCOMERS = [peer(*MAIN[5:])] * 2
INVENTED = History(2, 10**6, b"invented by one!")


@pytest.mark.parametrize(
    ("witnesses", "history", "is_believed"),
    [
        ([*at(7, 2), *NEWCOMERS], MAIN[4], True),
        (NEWCOMERS, MAIN[2], False),  # nobody went by it
        ([*NEWCOMERS, peer(*MAIN, states=[(INVENTED, b"x" * 8)])], INVENTED, False),
        ([*at(4), *at(7, 3)], MAIN[-1], True),
        ([*at(4), *at(7, 3)], MAIN[3], True),
        ([*at(4), *at(7, 3), LIAR], LIE, False),
    ],
)
def test_late_witnesses_abstain(witnesses, history, is_believed):
    assert view_of(START, *witnesses).believes(history) is is_believed


# Of witnesses, r: right, w: wrong, x: different again, -: nothing yet, q: nothing, and it no longer reports
HELD = {  # by whether the digest is held now and in the end
    (True, True): ["", "-", "w", "rr-", "rrw", "rw", "xwr", "rq"],
    (None, True): ["rr--", "rw-"],
    (None, None): ["r-", "--", "w-", "rqq-"],
    (False, False): ["wwr", "ww-", "wwrq"],
}
DIGESTS = {one: peer(*MAIN, states=[(MAIN[-1], 8 * one.encode())]) for one in "rwx"}
DIGESTS |= {"-": peer(*MAIN), "q": replace(peer(*MAIN), is_quiet=True)}


@pytest.mark.parametrize("held", HELD)
def test_majority_digest_is_believed(held):
    for said in HELD[held]:
        view = view_of(START, *(DIGESTS[one] for one in said))
        common = b"rrrrrrrr and the rest of a longer digest"
        assert (view.holds(MAIN[-1], common), view.holds(MAIN[-1], common, is_final=True)) == held, said


CUT_OFF = past_of(*OTHER)  # of a peer that took the branch with more samples, alone
US = [peer(*OTHER)] * 2
FOLLOWING = [peer(*MAIN)] * 2
SOON = (0.0, FORK_S - 1, FORK_S)
LONG = (0.0, 2 * FORK_S, 3 * FORK_S)  # when it looks

FORKS = {
    "to others that went on": (SOON, [at(4, 3), at(5, 3), at(5, 3)], OTHER[-1], CUT_OFF, MAIN[4]),
    "not to others that stand still": (LONG, [at(4, 3)] * 3, OTHER[-1], CUT_OFF, None),
    "not to who is fewer": (LONG, [[*US, *at(length, 3)] for length in (3, 4, 5)], OTHER[-1], CUT_OFF, None),
    "not to its own past": (LONG, [at(3, 3), at(4, 3), at(5, 3)], LIE, past_of(*MAIN, LIE), None),
    "time begins anew when most are here again": (
        SOON,
        [at(4, 3), US[:1], at(5, 3)],
        OTHER[-1],
        CUT_OFF,
        None,
    ),
    "not to where newcomers are on their way": (
        LONG,
        [[*at(length, 2), *FOLLOWING] for length in (3, 4, 5)],
        MAIN[6],
        past_of(MAIN[6]),
        None,
    ),
}


@pytest.mark.parametrize("which", FORKS)
def test_minority_returns_to_majority(clock, which):
    times, looks, own, past, goes_to = FORKS[which]
    fork = MinorityWatch(clock)
    seen = []
    for clock.now, others in zip(times, looks, strict=True):
        seen.append(fork.look(view_of(own, *others), past))
    assert seen == [None, None, goes_to]


TARGET = 100
ANY = 10**9


@pytest.fixture
def newcomer(clock):
    clock.now = 1000.0
    return Plausibility(clock)


@pytest.fixture
def established(clock, newcomer):
    """A peer at step 10 that has committed ten rounds with B, one every ten seconds."""
    return commit(newcomer, clock, *range(1, 11))


def commit(plausibility, clock, *steps, interval_s=10.0):
    for step in steps:
        clock.now += interval_s
        plausibility.commit(step, {"A": 60, "B": 40}, TARGET)
    return plausibility


def is_far(plausibility, step, *others, own=10, steps_a_round=1):
    steps = {"M": step} | dict(enumerate(others))
    return "M" in plausibility.implausible(steps, own, steps_a_round)


def test_impossibly_far_step_is_not_believed(established, clock):
    for others in ((), (10,), (10, 10, 11)):
        assert not any(is_far(established, step, *others) for step in (0, 9, 10, 11, 12))
        assert all(is_far(established, step, *others) for step in (50, 1000, 10**6, 2**31))
    assert is_far(established, ANY, ANY, 10, 10)
    assert not is_far(established, ANY, ANY), "most are believed"
    assert is_far(established, 100)
    assert not is_far(established, 100, steps_a_round=50), "rounds may be longer"
    assert is_far(established, 3000)
    clock.now += 8 * 3600.0
    assert not is_far(established, 3000), "the others were away for long"


def test_joiner_believes_present_peers(newcomer, clock):
    newcomer.commit(1, {"A": 100}, TARGET)
    newcomer.commit(2, {"A": 100, "M": 0}, TARGET)
    assert not is_far(newcomer, ANY, own=2)
    assert not is_far(newcomer, ANY, 500, own=2)
    assert not is_far(newcomer, 500 + majority.NEWCOMERS_STEPS, 500, 500, own=2)
    assert is_far(newcomer, ANY, 500, 500, own=2)
    assert newcomer.believed_samples("B", ANY, TARGET) == ANY
    assert not newcomer.is_together
    assert not is_far(commit(newcomer, clock, 3), 100, own=3), "one round says nothing of the pace"


def test_reported_samples_are_capped_by_credit(established):
    def believed(peer, *reported, target=TARGET):
        return [established.believed_samples(peer, one, target) for one in reported]

    assert believed("B", 0, 40, 160, 161, ANY) == [0, 40, 160, CREDIT_MARGIN * 40, CREDIT_MARGIN * 40]
    assert believed("M", 7, ANY) == [7, TARGET - 1], "it can't reach a step alone"
    established.commit(11, {"A": 60, "B": 0, "C": 40, "M": 0}, TARGET)
    assert believed("B", ANY) == [CREDIT_MARGIN * 20]
    assert believed("M", 50) == [0]
    established.commit(12, {"A": 60, "B": 40, "M": 30}, TARGET)
    assert believed("M", 50) == [50]
    for steps in (50, 1, 250, 1):  # changing the length of rounds gains a liar nothing
        assert believed("B", ANY, target=steps * TARGET) == [CREDIT_MARGIN * 40 * steps]
        established.commit(13, {"A": 60 * steps, "B": 40 * steps}, steps * TARGET)
    established.commit(14, dict.fromkeys(map(str, range(4099)), 1), TARGET)
    assert believed("2", 9) == [9]
    assert believed("3", 9) == [CREDIT_MARGIN], "what is remembered is bounded"


def fail_for(plausibility, clock, seconds, peer, others):
    """Have a peer give no state for `seconds`; return whether it is passed over afterwards."""
    for _ in range(int(seconds) + 1):
        plausibility.gave_nothing([peer], others)
        clock.now += 1.0
    return peer in plausibility.implausible({peer: 0, "B": 0}, 0, 1)


def test_failing_donor_is_passed_over(established, clock, caplog):
    ignore_peer.cache_clear()
    assert not fail_for(established, clock, FAILING_S - 2, "M", "MBC"), "it may have been started anew"
    assert fail_for(established, clock, 3, "M", "MBC")
    clock.now += PASSED_OVER_S
    assert established.implausible({"M": 0}, 0, 1) == []
    fail_for(established, clock, 2 * FAILING_S, "M", "MBC")
    assert not fail_for(established, clock, 10 * FAILING_S, "C", "C"), "the only other"
    assert not fail_for(Plausibility(clock), clock, 2 * FAILING_S, "M", "MB"), "the others are not more"
    assert fail_for(established, clock, 2 * FAILING_S, "M", "MB"), "it was in rounds with B"
    told = [one.getMessage() for one in caplog.records if one.name.startswith("trahiv_cli")]
    assert told == ["Peer M is not believed: it does not give the state that it reports."], "once"


@pytest.mark.parametrize(("interval_s", "holds_s"), [(10.0, APART_S), (APART_S, 8 * APART_S)])
def test_trust_in_own_state_expires(newcomer, clock, interval_s, holds_s):
    commit(newcomer, clock, 1, 2, interval_s=interval_s)
    clock.now += holds_s - 1
    assert newcomer.is_together
    clock.now += 1
    assert not newcomer.is_together
    newcomer.join()
    assert newcomer.is_together, "what it took over"
