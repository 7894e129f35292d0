"""Chores that are done again and again."""

import threading

import pytest

from trahiv_cli.errors import SwarmError
from trahiv_cli.swarm import turns
from trahiv_cli.swarm.turns import Turns


def test_they_end_when_they_are_closed_which_may_be_twice_or_before_they_began():
    Turns(()).close(wait_s=5)
    done = threading.Event()
    running = Turns([done.set])
    running.start()
    assert done.wait(5)
    for _ in range(2):
        running.close(wait_s=5)
    assert "chores" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("error", [SwarmError("The DHT did not answer."), OSError("the disk is full")])
def test_what_goes_wrong_is_told_once_and_keeps_no_other_chore_from_being_done(monkeypatch, error):
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    told, times, enough = [], [], threading.Event()
    monkeypatch.setattr(turns.logger, "warning", told.append)

    def fail():
        raise error

    def count():
        times.append(1)
        if len(times) == 3:
            enough.set()

    running = Turns([fail, count])
    running.start()
    assert enough.wait(5)
    running.close(wait_s=5)
    assert len(told) == 1 and str(error) in told[0]
