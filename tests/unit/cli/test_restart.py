"""A command starts itself again after a failure, but not for ever."""

import os
import sys

import psutil
import pytest

from trahiv_cli.cli import restart as restarting
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
    monkeypatch.setattr(restarting.atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setenv(restarting.VARIABLE, "")  # so that it is taken back, whatever is written there
    monkeypatch.setattr(restarting.time, "time", lambda: 1000.0)
    return commands


def test_the_same_command_line_runs_again(started):
    with pytest.raises(Started):
        restarting.restart("trahiv join --peer '@runs/a b/invited-by' --yes", FAILURE)
    words = ["-m", "trahiv_cli", "join", "--peer", "@runs/a b/invited-by", "--yes"]
    assert started == [(sys.executable, [sys.executable, *words])]
    assert restarting.restarts() == [1000.0]


def test_a_peer_that_fails_again_and_again_ends(started, monkeypatch):
    monkeypatch.setenv(restarting.VARIABLE, "500 600 700")
    with pytest.raises(PeerBroken, match="The DHT's process has ended. This peer had started again 3 times"):
        restarting.restart("trahiv init", FAILURE)
    assert not started


def test_restarts_of_long_ago_do_not_count(started, monkeypatch):
    monkeypatch.setenv(restarting.VARIABLE, "300 600 700")
    with pytest.raises(Started):
        restarting.restart("trahiv init", FAILURE)
    assert restarting.restarts() == [600.0, 700.0, 1000.0]


def test_the_time_before_a_restart_counts_towards_a_budget(monkeypatch):
    assert restarting.seconds_spent() == 0.0
    monkeypatch.setenv(restarting.VARIABLE, "990")
    monkeypatch.setattr(restarting.time, "time", lambda: psutil.Process().create_time() + 60.0)
    assert restarting.seconds_spent() == pytest.approx(60.0)
