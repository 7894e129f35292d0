"""Wishes to a running peer, and when it follows them; real commands: `tests/swarm/test_guest.py`."""

import pytest

from trahiv_cli.run.control import BY_ITS_USER, request
from trahiv_cli.run.lock import RESOLVED, owned
from trahiv_cli.train import wishes as module
from trahiv_cli.train.conditions import Condition
from trahiv_cli.train.leaving import OVERTIME_S, Leaving
from trahiv_cli.train.wishes import CONDITIONS_EVERY_S, SETTLED_S, Wishes


@pytest.fixture
def folder(tmp_path):
    """The folder of a run whose peer trains."""
    (tmp_path / RESOLVED).write_text("{}")
    with owned(tmp_path):
        yield tmp_path


def test_unknown_condition_counts_as_met(folder, clock, caplog):
    def fail():
        raise ValueError("nvidia-smi does not answer")

    wishes = Wishes(folder, Leaving(), [Condition("gpu-free 8", fail)], clock)
    assert wishes.why_paused() == "" and "nvidia-smi does not answer" in caplog.text


def test_pause_is_immediate_finish_after_step(folder, clock):
    leaving = Leaving()
    wishes = Wishes(folder, leaving, clock=clock)
    for what, event, reason in (
        (None, "step", None),
        ("finish", "checkpoint", None),
        ("finish", "step", "finish"),
    ):
        request(folder, what)
        wishes.look()
        wishes({"event": event})
        assert leaving.reason == reason
    leaving.reason = None
    request(folder, "pause")
    wishes({"event": "step"})
    assert not leaving()
    wishes.look()
    assert leaving.reason == "pause" and wishes.why_paused() == BY_ITS_USER


def test_finish_wait_is_bounded(folder, clock):
    leaving = Leaving()
    wishes = Wishes(folder, leaving, clock=clock)
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
    asked, unmet = [], {"a": "", "b": ""}
    conditions = [Condition(name, lambda name=name: asked.append(name) or unmet[name]) for name in unmet]
    wishes = Wishes(folder, Leaving(), conditions, clock)
    assert wishes.why_paused() == "" and asked == ["a", "b"]
    unmet["b"] = "a game runs"
    assert wishes.why_paused() == "" and asked == ["a", "b"], "it is looked at every few seconds"
    clock.now += CONDITIONS_EVERY_S
    assert wishes.why_paused() == "a game runs"
    unmet["b"] = ""
    for _ in range(int(SETTLED_S / CONDITIONS_EVERY_S) - 1):
        clock.now += CONDITIONS_EVERY_S
        assert wishes.why_paused() == "a game runs"
    clock.now += CONDITIONS_EVERY_S
    assert wishes.why_paused() == ""
    request(folder, "pause")
    assert wishes.why_paused() == BY_ITS_USER


def test_wishes_are_polled_in_background(folder, monkeypatch):
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    leaving = Leaving()
    wishes = Wishes(folder, leaving)
    with wishes.heard():
        request(folder, "pause")
        deadline = module.time.monotonic() + 10
        while not leaving():
            assert module.time.monotonic() < deadline
    assert leaving.reason == "pause"
