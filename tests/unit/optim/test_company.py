"""Who is waited for, how many are needed, and who may step alone, by reports that are always a little old."""

import math
import time

import pytest

from tests.kit.stepping import Tracker, after, report
from trahiv_cli.optim.parts import Company
from trahiv_cli.optim.rules import RoundRules

HERE = after(5)
ELSEWHERE = {
    "a step behind": after(4),
    "far behind": after(0),
    "ahead": after(6),
    "at this step of another history": after(5, branch=b"!"),
}


def company(*others, last_group=(), gone=(), solo_after_s=300.0, missed_s=None, tries=0):
    """The company of a peer at `HERE`.

    Args:
        others: names of those that reported this peer's history, or reports.
        last_group: the others of the last group.
        missed_s: how long it has been looking for a group; None if it is not.
    """
    tracker = Tracker([report(it, HERE) if isinstance(it, str) else it for it in others], gone)
    tracker.history, tracker.companions = HERE, frozenset({*last_group, "QmMe"})
    made = Company(tracker, RoundRules(solo_after_s=solo_after_s))
    made.tries = tries
    made.missed_since = math.inf if missed_s is None else time.monotonic() - missed_s
    return made


def test_peers_of_the_same_history_are_waited_for_and_no_others():
    others = [report(f"Qm{number}", history) for number, history in enumerate(ELSEWHERE.values())]
    assert company("QmB", "QmC", *others).groupmates == ["QmB", "QmC"]


@pytest.mark.parametrize(("step", "is_waited_for"), [(4, True), (3, True), (0, True), (6, False)])
def test_a_member_of_the_last_round_is_waited_for_however_old_its_report(step, is_waited_for):
    assert company(report("QmB", after(step)), last_group=["QmB"]).groupmates == ["QmB"] * is_waited_for


def test_members_of_the_last_group_vanish_without_a_goodbye():
    assert company("QmB", last_group=["QmB", "QmC", "QmD"]).vanished == {"QmC", "QmD"}
    assert company("QmB", last_group=["QmB", "QmC", "QmD"], gone=["QmC"]).vanished == {"QmD"}
    assert company(last_group=[], gone=["QmB"]).vanished == set()


@pytest.mark.parametrize(("others", "quorum"), [("", 2), ("B", 2), ("BC", 2), ("BCD", 3), ("BCDE", 3)])
def test_a_group_needs_most_of_those_that_hold_the_state(others, quorum):
    assert company(*others, last_group=others).quorum == quorum
    assert company(*others, *(report(name, after(2)) for name in "VWXYZ"), last_group=others).quorum == quorum


@pytest.mark.parametrize(
    ("others", "vanished", "quorum"),
    [
        ("BCD", "E", 3),
        ("BC", "DE", 2),
        ("B", "CD", 2),  # of four, half is there
        ("B", "CDE", 3),  # two of five are too few
        ("", "B", 2),
        ("BC", "DEFGH", 5),
    ],
)
def test_a_group_needs_as_many_as_have_vanished_from_the_last_one(others, vanished, quorum):
    assert company(*others, last_group=others + vanished).quorum == quorum
    assert company("B", last_group="BCDE", gone="CDE").quorum == 2, "who said goodbye is not needed"


def test_of_two_parts_that_were_cut_apart_the_smaller_never_has_a_quorum():
    for size in range(2, 10):
        names = "ABCDEFGHI"[: size - 1]
        for there in range(size // 2 + 1):
            members, quorum = 1 + there, company(*names[:there], last_group=names).quorum
            assert (members >= quorum) == (2 * members >= size and members >= 2)


def test_those_that_have_gone_on_from_this_state_are_needed():
    """Else those whose reports are the last to tell of a round could go another way."""
    gone_on = [report(name, after(6), [after(5), after(6)]) for name in ("QmD", "QmE")]
    assert company("QmB", "QmC", *gone_on).quorum == 3
    assert company("QmB", "QmC").quorum == 2


def test_whoever_may_go_on_alone_may_go_on_with_anybody():
    many = {"last_group": "BCDEFGH", "solo_after_s": 60.0}
    assert company(*"BCDE", **many, missed_s=59.0).quorum == 3
    assert company(*"BCDE", **many, missed_s=61.0).quorum == 2
    assert company(*"BCDE", **many).quorum == 3


@pytest.mark.parametrize(
    ("last_group", "gone", "may"),
    [
        ("", "", True),
        ("B", "", True),
        ("B", "B", True),
        ("BC", "", False),
        ("BC", "B", True),
        ("BC", "BC", True),
    ],
)
def test_who_lost_more_than_one_without_a_goodbye_may_be_the_one_that_is_cut_off(last_group, gone, may):
    assert company(last_group=last_group, gone=gone).may_step_alone is may


@pytest.mark.parametrize("where", ["a step behind", "far behind", "at this step of another history"])
def test_a_peer_that_is_seen_is_company_wherever_it_is(where):
    assert not company(report("QmB", ELSEWHERE[where])).may_step_alone


@pytest.mark.parametrize("others", ["B", ""], ids=["others there", "two vanished"])
@pytest.mark.parametrize(
    ("solo_after_s", "missed_s", "tries", "may"),
    [
        (300.0, 299.0, 9, False),
        (300.0, 301.0, 9, True),
        (300.0, None, 0, False),  # it is not looking for a group
        (0.0, 0.0, 0, False),  # one try it owes to the others
        (0.0, 0.0, 1, True),
        (math.inf, 1e6, 9, False),
    ],
)
def test_company_is_waited_for_as_long_as_the_rules_say(others, solo_after_s, missed_s, tries, may):
    kept = {"solo_after_s": solo_after_s, "missed_s": missed_s, "tries": tries}
    assert company(*others, last_group="BCD", gone="" if others else "B", **kept).may_step_alone is may
