"""A command starts itself again after a failure, but not for ever."""

import atexit
import os
import sys
import time

import psutil
import pytest

from trahiv_cli.cli.swarm import RESTARTS_VARIABLE, restart, restarts, seconds_spent
from trahiv_cli.errors import PeerBroken

FAILURE = PeerBroken("The DHT's process has ended.", hint="look into the log")


def test_the_same_command_line_runs_again_at_most_three_times_within_ten_minutes(monkeypatch):
    begun = []
    monkeypatch.setattr(os, "execv", lambda *command: begun.append(command))
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setenv(RESTARTS_VARIABLE, "300 600 700")
    restart("trahiv join --peer '@runs/a b/invited-by' --yes", FAILURE)
    words = ["-m", "trahiv_cli", "join", "--peer", "@runs/a b/invited-by", "--yes"]
    assert begun == [(sys.executable, [sys.executable, *words])]
    assert restarts() == [600.0, 700.0, 1000.0], "what was long ago does not count"
    with pytest.raises(PeerBroken, match="The DHT's process has ended. This peer had started again 3 times"):
        restart("trahiv init", FAILURE)
    assert len(begun) == 1


def test_the_time_before_a_restart_counts_towards_a_budget(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: psutil.Process().create_time() + 60.0)
    for before, seconds in (("300", 60.0), ("", 0.0)):
        monkeypatch.setenv(RESTARTS_VARIABLE, before)
        assert seconds_spent() == pytest.approx(seconds)
