"""Output of `pause`, `resume` and `finish` by a peer's events; real peers: `tests/swarm/test_guest.py`."""

import itertools
from types import SimpleNamespace

import pytest

from trahiv_cli.cli import guest
from trahiv_cli.run.control import BY_ITS_USER, requested
from trahiv_cli.run.lock import RESOLVED, owned
from trahiv_cli.telemetry.events import EventFile, Events


@pytest.fixture
def folder(here, monkeypatch):
    """The folder of a run whose peer trains."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _: None)
    monkeypatch.setattr(guest, "time", clock)
    folder = here / "runs" / "run-1"
    folder.mkdir(parents=True)
    (folder / RESOLVED).write_text("{}")
    with owned(folder):
        yield folder


@pytest.fixture
def emit(folder):
    """`emit("step", step=4)`: the peer says this."""
    record = EventFile(folder / "events.jsonl")
    yield Events(record).emit
    record.close()


@pytest.mark.parametrize(
    ("command", "words", "wish"),
    [
        ("pause", "it pauses when its present local step is over.", "pause"),
        ("resume", "it goes on soon", None),
        ("finish", "when the swarm has taken its present step", "finish"),
    ],
)
def test_wish_without_answer_stands(trahiv, folder, command, words, wish):
    out, err = trahiv(command)
    assert out == ""
    assert requested(folder) == wish
    assert err.startswith("runs/run-1: ")
    assert words in err


PAUSED = {"step": 4, "why": BY_ITS_USER}
DONE = {"step": 5, "reason": "finish", "path": "step-5", "had_ended": False, "resume": "trahiv init x"}


@pytest.mark.parametrize(
    ("command", "event", "fields", "answer"),
    [
        ("pause", "paused", PAUSED, "runs/run-1: paused at step 4: its user paused it."),
        ("resume", "resumed", {"step": 4, "seconds": 9.0}, "runs/run-1: goes on after a pause of 9 s\n"),
        ("finish", "done", DONE, "runs/run-1: done at step 5 (finish): step-5"),
    ],
)
def test_peers_answer_is_shown(trahiv, emit, command, event, fields, answer):
    emit("step", step=4)
    emit(event, **fields)
    assert trahiv(f"{command} runs/run-1").out.startswith(answer)


def test_condition_outweighs_resume(trahiv, emit):
    emit("paused", step=4, why="it trains from 22:00 to 07:00")
    out, err = trahiv("resume")
    assert "it trains from 22:00 to 07:00" in out
    assert "start it again without --only-when" in err


def test_json_output_is_peer_event(events, emit):
    emit("paused", **PAUSED)
    [told] = events("pause")
    assert told == told | PAUSED | {"event": "paused"}


@pytest.mark.parametrize("command", ["pause", "resume", "finish"])
def test_wish_without_running_peer_is_refused(trahiv, here, command):
    (here / "old").mkdir()
    for line, where in ((command, "runs/ here."), (f"{command} old", "old; nothing was changed.")):
        out, err = trahiv(line, code=3)
        assert out == ""
        assert f"No peer trains in {where}" in err


def test_newest_running_peer_is_chosen(trahiv, folder):
    newer = folder.with_name("run-2")
    newer.mkdir()
    (newer / RESOLVED).write_text("{}")
    assert "runs/run-1: " in trahiv("pause").err
