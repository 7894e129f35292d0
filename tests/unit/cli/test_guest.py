"""Output of `pause`, `resume` and `finish` by a peer's events; real peers: `tests/swarm/test_guest.py`."""

import pytest

from trahiv_cli.cli import guest
from trahiv_cli.run.control import BY_ITS_USER, requested
from trahiv_cli.run.lock import RESOLVED, owned
from trahiv_cli.telemetry.events import EventFile, Events
from trahiv_cli.train import folder as folders


@pytest.fixture
def run(here, monkeypatch):
    """The folder of a run whose peer trains, and its events."""
    monkeypatch.setattr(guest, "ANSWER_S", 0.3)
    folder = here / "runs" / "run-1"
    folder.mkdir(parents=True)
    (folder / RESOLVED).write_text("{}")
    record = EventFile(folder / "events.jsonl")
    with owned(folder):
        yield folder, Events(record)
    record.close()


def test_commands_show_peer_answer_and_keep_wish(trahiv, run):
    folder, events = run
    events.emit("step", step=4)
    assert trahiv("pause") == (0, "", "runs/run-1: it pauses when its present local step is over.\n")
    assert requested(folder) == "pause"
    events.emit("paused", step=4, why=BY_ITS_USER)
    code, out, err = trahiv("pause", "runs/run-1")
    assert (code, err) == (0, "") and out.startswith("runs/run-1: paused at step 4: its user paused it.")
    code, out, err = trahiv("resume")
    assert (code, out, requested(folder)) == (0, "", None) and "it goes on soon" in err
    events.emit("paused", step=4, why="it trains from 22:00 to 07:00")
    code, out, err = trahiv("resume")
    assert "it trains from 22:00 to 07:00" in out and "start it again without --only-when" in err
    events.emit("resumed", step=4, seconds=9.0)
    assert trahiv("resume")[1] == "runs/run-1: goes on after a pause of 9 s\n"
    code, out, err = trahiv("finish")
    assert (code, out, requested(folder)) == (
        0,
        "",
        "finish",
    ) and "when the swarm has taken its present step" in err
    ended = {"step": 5, "reason": "finish", "path": "step-5", "had_ended": False, "resume": "trahiv init x"}
    events.emit("done", **ended)
    assert "done at step 5 (finish): step-5" in trahiv("finish")[1]


def test_json_output_is_peer_event(events, run):
    run[1].emit("paused", step=4, why=BY_ITS_USER)
    code, [told] = events("pause")
    assert code == 0 and (told["event"], told["step"], told["why"]) == ("paused", 4, BY_ITS_USER)


@pytest.mark.parametrize("command", ["pause", "resume", "finish"])
def test_wish_without_running_peer_is_refused(trahiv, here, command):
    code, out, err = trahiv(command)
    assert (code, out) == (3, "") and "No peer trains in runs/ here." in err
    (here / "old").mkdir()
    code, out, err = trahiv(command, "old")
    assert (code, out) == (3, "") and "No peer trains in old; nothing was changed." in err


def test_newest_running_peer_is_chosen(trahiv, run, monkeypatch):
    newer = run[0].with_name("run-2")
    newer.mkdir()
    (newer / RESOLVED).write_text("{}")
    assert "runs/run-1: " in trahiv("pause")[2] and not folders.holder_of(newer)
