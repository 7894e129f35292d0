"""Which peers are waited for and when a peer may step alone, given reports that are slightly old."""

import math
import time

import pytest

from tests.kit.stepping import Tracker, after, report
from trahiv_cli.progress.pace import RoundRules
from trahiv_cli.step.quorum import Quorum

HERE, BEHIND, FAR_BEHIND, AHEAD = (after(step) for step in (5, 4, 0, 6))
ANOTHER_HISTORY = after(5, branch=b"!")


def quorum_of(*others, last_group=(), gone=(), solo_after_s=300.0, missed_s=None, tries=0):
    """Return the quorum of a peer at `HERE` that has sought a group for `missed_s` (None: it does not).

    `others` are names of peers that reported `HERE`, or reports.
    """
    tracker = Tracker([report(it, HERE) if isinstance(it, str) else it for it in others], gone)
    tracker.committed.change(history=HERE, group=frozenset({*last_group, "QmMe"}))
    made = Quorum(tracker, RoundRules(solo_after_s=solo_after_s))
    made.tries = tries
    made.missed_since = math.inf if missed_s is None else time.monotonic() - missed_s
    return made


@pytest.mark.parametrize("history", [BEHIND, FAR_BEHIND, AHEAD, ANOTHER_HISTORY])
def test_expected_peers_share_history_or_last_round(history):
    assert quorum_of("B", report("C", history)).expected == ["B"]
    is_late = history.rank < HERE.rank  # however old its report is
    assert quorum_of("B", report("C", history), last_group="C").expected == ["B", "C"][: 1 + is_late]
    assert not quorum_of(report("B", history)).may_step_alone, "it is company wherever it is"


@pytest.mark.parametrize(
    ("others", "vanished", "quorum"),
    [
        ("BC", "", 2),
        ("BCD", "", 3),
        ("BC", "DE", 3),
        ("B", "CD", 3),  # half of four is present
        ("B", "CDE", 4),  # two of five are too few
        ("", "B", 2),
        ("BC", "DEFGH", 6),
    ],
)
def test_quorum_exceeds_vanished_members(others, vanished, quorum):
    group = others + vanished
    there = quorum_of(*others, last_group=group)
    assert there.size == quorum
    assert there.vanished == set(vanished)
    assert quorum_of(*others, *(report(name, after(2)) for name in "VWXYZ"), last_group=group).size == quorum
    without_them = quorum_of(*others, last_group=others).size
    assert quorum_of(*others, last_group=group, gone=vanished).size == without_them, "they said goodbye"


def test_peers_ahead_raise_quorum():
    """Otherwise peers whose reports show a round last could take a different path."""
    gone_on = [report(name, AHEAD, [HERE, AHEAD]) for name in "DE"]
    assert quorum_of("B", "C", *gone_on).size == 3
    assert quorum_of("B", "C").size == 2


@pytest.mark.parametrize("solo_after_s", [0.0, 300.0, math.inf])
@pytest.mark.parametrize(
    ("last_group", "gone", "may"),
    [
        ("", "", True),
        ("B", "", False),
        ("B", "B", True),
        ("BC", "", False),
        ("BC", "B", False),
        ("BC", "BC", True),
    ],
)
def test_peer_steps_alone_after_all_goodbyes(solo_after_s, last_group, gone, may):
    there = quorum_of(last_group=last_group, gone=gone, solo_after_s=solo_after_s)
    assert there.may_step_alone is may


@pytest.mark.parametrize("others", ["B", ""], ids=["others there", "two vanished"])
@pytest.mark.parametrize(
    ("solo_after_s", "missed_s", "tries", "may"),
    [
        (300.0, 299.0, 9, False),
        (300.0, 301.0, 9, True),
        (300.0, None, 0, False),  # it is not looking for a group
        (0.0, 0.0, 0, False),  # it must try once with the others
        (0.0, 0.0, 1, True),
        (math.inf, 1e6, 9, False),
    ],
)
def test_solo_steps_follow_configured_limit(others, solo_after_s, missed_s, tries, may):
    kept = {"solo_after_s": solo_after_s, "missed_s": missed_s, "tries": tries}
    assert quorum_of(*others, last_group="BCD", gone="" if others else "B", **kept).may_step_alone is may
    is_over = missed_s is not None and missed_s >= solo_after_s
    assert quorum_of(*"BCDE", last_group="BCDEFGH", **kept).size == (2 if is_over else 4)
