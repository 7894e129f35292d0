"""Who is waited for: decided from reports that are always a little old."""

from types import SimpleNamespace

import pytest

from trahiv_cli.optim.progress import PacedEvent, PeerProgress
from trahiv_cli.optim.sync import SyncOptimizer


def groupmates(step, reported, companions=()):
    # Without its constructor, which starts processes: the decision needs the reports alone.
    optimizer = object.__new__(SyncOptimizer)
    other = PeerProgress("QmOther", reported, samples=8, samples_per_second=1.0, is_client=False)
    optimizer.tracker = SimpleNamespace(others=(other,))
    optimizer.state_averager = SimpleNamespace(local_epoch=step)
    optimizer._companions = frozenset(companions)
    return optimizer._groupmates()


def test_a_peer_at_the_same_step_is_waited_for():
    assert groupmates(5, reported=5) == ["QmOther"]


@pytest.mark.parametrize("reported", [4, 3, 0])
def test_a_companion_of_the_last_round_is_waited_for_however_old_its_report(reported):
    assert groupmates(5, reported, companions=["QmOther"]) == ["QmOther"]


def test_a_peer_that_missed_the_last_round_is_not_waited_for():
    assert groupmates(5, reported=4) == []


def test_a_peer_that_is_ahead_is_no_groupmate():
    assert groupmates(5, reported=6, companions=["QmOther"]) == []


def test_a_hurried_event_does_not_wait_for_its_pace():
    event = PacedEvent(interval_s=lambda: 1000.0)
    event.set()
    assert event.wait(0)
    event.hurry()
    assert event.wait(0)
