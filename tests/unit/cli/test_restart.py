"""A command starts itself again after a failure, but not for ever."""

import atexit
import os
import sys
import time

import psutil
import pytest

from trahiv_cli.cli.restart import VARIABLE, restart, restarts, seconds_spent
from trahiv_cli.errors import PeerBroken

FAILURE = PeerBroken("The DHT's process has ended.", hint="look into the log")


class Started(Exception):
    """The process was replaced."""


@pytest.fixture(autouse=True)
def started(monkeypatch):
    commands = []

    def execv(program, words):
        commands.append((program, words))
        raise Started

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setenv(VARIABLE, "300 600 700")  # so that it is taken back, whatever is written there
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    return commands


def test_the_same_command_line_runs_again_and_restarts_of_long_ago_do_not_count(started):
    with pytest.raises(Started):
        restart("trahiv join --peer '@runs/a b/invited-by' --yes", FAILURE)
    words = ["-m", "trahiv_cli", "join", "--peer", "@runs/a b/invited-by", "--yes"]
    assert started == [(sys.executable, [sys.executable, *words])]
    assert restarts() == [600.0, 700.0, 1000.0]


def test_a_peer_that_fails_again_and_again_ends(started, monkeypatch):
    monkeypatch.setenv(VARIABLE, "500 600 700")
    with pytest.raises(PeerBroken, match="The DHT's process has ended. This peer had started again 3 times"):
        restart("trahiv init", FAILURE)
    assert not started


def test_the_time_before_a_restart_counts_towards_a_budget(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: psutil.Process().create_time() + 60.0)
    assert seconds_spent() == pytest.approx(60.0)
    monkeypatch.setenv(VARIABLE, "")
    assert seconds_spent() == 0.0
