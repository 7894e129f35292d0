"""Wishes to a running peer, and when it follows them; real commands: `tests/swarm/test_guest.py`."""

import pytest

from trahiv_cli.run.conditions import Condition
from trahiv_cli.run.control import BY_ITS_USER, request
from trahiv_cli.run.leaving import OVERTIME_S, Leaving
from trahiv_cli.run.lock import RESOLVED, owned
from trahiv_cli.run.requests import CONDITIONS_EVERY_S, SETTLED_S, Wishes


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
def wishes(folder, leaving, clock):
    return Wishes(folder, leaving, clock=clock)


def test_unknown_condition_counts_as_met(folder, clock, caplog):
    def fail():
        raise ValueError("nvidia-smi does not answer")

    wishes = Wishes(folder, Leaving(), [Condition("gpu-free 8", fail)], clock)
    assert wishes.why_paused() == ""
    assert "nvidia-smi does not answer" in caplog.text


def test_finish_takes_effect_after_step(folder, leaving, wishes):
    wishes({"event": "step"})
    request(folder, "finish")
    wishes.look()
    wishes({"event": "checkpoint"})
    assert not leaving()
    wishes({"event": "step"})
    assert leaving.reason == "finish"


def test_pause_takes_effect_at_once(folder, leaving, wishes):
    request(folder, "pause")
    wishes({"event": "step"})
    assert not leaving()
    wishes.look()
    assert leaving.reason == "pause"
    assert wishes.why_paused() == BY_ITS_USER


def test_finish_wait_is_bounded(folder, leaving, wishes, clock):
    for what, seconds, reason in (
        ("finish", OVERTIME_S - 1, None),
        (None, 2, None),  # it was taken back
        ("finish", OVERTIME_S - 1, None),
        ("finish", 1, "finish"),
    ):
        request(folder, what)
        wishes.look()
        clock.now += seconds
        wishes.look()
        assert leaving.reason == reason, what


def test_unmet_condition_pauses_until_settled(folder, clock):
    unmet = {"a": "", "b": ""}
    conditions = [Condition(name, lambda name=name: unmet[name]) for name in unmet]
    wishes = Wishes(folder, Leaving(), conditions, clock)
    assert wishes.why_paused() == ""
    unmet["b"] = "a game runs"
    assert wishes.why_paused() == "", "it is looked at every few seconds"
    clock.now += CONDITIONS_EVERY_S
    assert wishes.why_paused() == "a game runs"
    unmet["b"] = ""
    for _ in range(int(SETTLED_S / CONDITIONS_EVERY_S) - 1):
        clock.now += CONDITIONS_EVERY_S
        assert wishes.why_paused() == "a game runs"
    clock.now += CONDITIONS_EVERY_S
    assert wishes.why_paused() == ""
