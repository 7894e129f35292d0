"""What is wished of a peer that runs, and when that is heard; real commands: `tests/swarm/test_guest.py`."""

import pytest

from trahiv_cli.errors import SetupError
from trahiv_cli.train import wishes as module
from trahiv_cli.train.conditions import Condition
from trahiv_cli.train.folder import RESOLVED, owned
from trahiv_cli.train.leaving import OVERTIME_S, Leaving
from trahiv_cli.train.wishes import (
    BY_ITS_USER,
    CONDITIONS_EVERY_S,
    SETTLED_S,
    WISH_FILE,
    Wishes,
    forget_wish,
    wish,
    wished,
)


@pytest.fixture
def folder(tmp_path):
    """The folder of a run whose peer trains."""
    (tmp_path / RESOLVED).write_text("{}")
    with owned(tmp_path):
        yield tmp_path


def test_a_wish_stands_until_another_one_or_until_it_is_forgotten(folder):
    assert wished(folder) is None
    for what in ("pause", "finish", None, None, "pause"):
        wish(folder, what)
        assert wished(folder) == what
    forget_wish(folder)
    assert wished(folder) is None
    for noise in (b"", b"dance", b"\xff"):
        (folder / WISH_FILE).write_bytes(noise)
        assert wished(folder) is None


def test_a_peer_that_starts_again_for_a_wish_can_be_wished_something_else_meanwhile(tmp_path):
    (tmp_path / RESOLVED).write_text("{}")
    with owned(tmp_path):
        wish(tmp_path, "pause")
    wish(tmp_path, None)
    with pytest.raises(SetupError, match="No peer trains in"):
        wish(tmp_path, "finish")


def test_a_condition_that_can_t_be_told_counts_as_one_that_holds(folder, clock, caplog):
    def fail():
        raise ValueError("nvidia-smi does not answer")

    wishes = Wishes(folder, Leaving(), [Condition("gpu-free 8", fail)], clock)
    assert wishes.why_paused() == "" and "nvidia-smi does not answer" in caplog.text


def test_nothing_is_wished_where_nobody_trains(tmp_path):
    with pytest.raises(SetupError, match="No peer trains in"):
        wish(tmp_path, "pause")
    with owned(tmp_path), pytest.raises(SetupError, match="No peer trains in"):  # a bootstrap node
        wish(tmp_path, "pause")
    assert not (tmp_path / WISH_FILE).exists()


def test_a_disk_that_is_full_is_said(folder, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_whole", fail)
    with pytest.raises(SetupError, match="No space left on device; nothing was changed"):
        wish(folder, "pause")


def test_a_pause_is_heard_at_a_look_and_the_wish_to_finish_when_a_step_was_taken(folder, clock):
    leaving = Leaving()
    wishes = Wishes(folder, leaving, clock=clock)
    for what, event, reason in (
        (None, "step", None),
        ("finish", "checkpoint", None),
        ("finish", "step", "finish"),
    ):
        wish(folder, what)
        wishes.look()
        wishes({"event": event})
        assert leaving.reason == reason
    leaving.reason = None
    wish(folder, "pause")
    wishes({"event": "step"})
    assert not leaving()
    wishes.look()
    assert leaving.reason == "pause" and wishes.why_paused() == BY_ITS_USER


def test_who_should_finish_does_not_wait_for_a_step_for_ever(folder, clock):
    leaving = Leaving()
    wishes = Wishes(folder, leaving, clock=clock)
    for what, seconds, reason in (
        ("finish", OVERTIME_S - 1, None),
        (None, 2, None),  # it was taken back
        ("finish", OVERTIME_S - 1, None),
        ("finish", 1, "finish"),
    ):
        wish(folder, what)
        wishes.look()
        clock.now += seconds
        wishes.look()
        assert leaving.reason == reason, what


def test_a_condition_that_does_not_hold_pauses_until_all_have_held_for_a_while(folder, clock):
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
    wish(folder, "pause")
    assert wishes.why_paused() == BY_ITS_USER


def test_a_running_peer_is_looked_at_while_the_block_runs(folder, monkeypatch):
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    leaving = Leaving()
    wishes = Wishes(folder, leaving)
    with wishes.heard():
        wish(folder, "pause")
        deadline = module.time.monotonic() + 10
        while not leaving():
            assert module.time.monotonic() < deadline
    assert leaving.reason == "pause"
