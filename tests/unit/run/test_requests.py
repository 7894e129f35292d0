"""ControlRequests to a running peer, and when it follows them; real commands: `tests/swarm/test_guest.py`."""

from types import SimpleNamespace

import pytest

from trahiv_cli.run.conditions import Condition
from trahiv_cli.run.control import BY_ITS_USER, request
from trahiv_cli.run.leaving import OVERTIME_S, Leaving
from trahiv_cli.run.lock import RESOLVED, owned
from trahiv_cli.run.requests import ControlRequests


@pytest.fixture
def folder(tmp_path):
    """The folder of a run whose peer trains."""
    (tmp_path / RESOLVED).write_text("{}")
    with owned(tmp_path):
        yield tmp_path


@pytest.fixture
def leaving():
    return Leaving()


@pytest.fixture
def requests(folder, leaving, clock):
    return ControlRequests(folder, leaving, clock=clock)


def test_unknown_condition_counts_as_met(folder, clock, caplog):
    def fail():
        raise ValueError("nvidia-smi does not answer")

    requests = ControlRequests(folder, Leaving(), [Condition("gpu-free 8", fail)], clock)
    assert requests.pause_reason() == ""
    assert "nvidia-smi does not answer" in caplog.text


def test_finish_takes_effect_after_step(folder, leaving, requests):
    requests({"event": "step"})
    request(folder, "finish")
    requests.poll()
    requests({"event": "checkpoint"})
    assert not leaving()
    requests({"event": "step"})
    assert leaving.reason == "finish"


def test_pause_takes_effect_at_once(folder, leaving, requests):
    request(folder, "pause")
    requests({"event": "step"})
    assert not leaving()
    requests.poll()
    assert leaving.reason == "pause"
    assert requests.pause_reason() == BY_ITS_USER


def test_finish_wait_is_bounded(folder, leaving, requests, clock):
    for what, seconds, reason in (
        ("finish", OVERTIME_S - 1, None),
        (None, 2, None),  # it was taken back
        ("finish", OVERTIME_S - 1, None),
        ("finish", 1, "finish"),
    ):
        request(folder, what)
        requests.poll()
        clock.now += seconds
        requests.poll()
        assert leaving.reason == reason, what


def test_unmet_condition_pauses_until_settled(folder, clock):
    """Conditions are checked every 5 s, and must hold for 15 s."""
    machine = SimpleNamespace(unmet="")
    conditions = [Condition("idle", str), Condition("mains", lambda: machine.unmet)]
    requests = ControlRequests(folder, Leaving(), conditions, clock)
    for clock.now, machine.unmet, reason in (
        (0, "", ""),
        (4, "a game runs", ""),
        (5, "a game runs", "a game runs"),
        (10, "", "a game runs"),
        (19, "", "a game runs"),
        (20, "", ""),
    ):
        assert requests.pause_reason() == reason
