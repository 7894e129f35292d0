"""How a run's events reach a person: on a live view, or as plain lines where there is no room for one."""

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from trahiv_cli.cli.output import Format, Output
from trahiv_cli.telemetry.events import Events

INVITATION = "trahiv1:0123456789abcdef"
READY = {
    "run_id": "run-1",
    "peer_id": "QmPeer",
    "maddrs": ["/ip4/192.168.1.7/tcp/1/p2p/QmPeer"],
    "reach": ["local network"],
    "reached": "alone",
    "reached_why": "Nobody is there.",
    "fingerprint": "0123456789abcdef",
    "max_steps": 2,
    "target_batch_size": 8,
}
DONE = {"step": 2, "path": "run-1/final", "reason": "signal", "resume": "trahiv init r", "had_ended": False}
ROOM = {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}


def shown(monkeypatch, tmp_path, last_sample=2, **environment):
    """The contents of a terminal with this environment after a run, with control sequences."""
    file = tmp_path / "invitation"
    file.write_text(INVITATION + "\n")
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr(Console, "_environ", environment)
    output, events = Output(), Events()
    output.format = Format.human
    with output.listening(events):
        waiting = {"what": "the libraries to load", "seconds": 5.0, "until_seconds": 120}
        events.emit("waiting", **waiting)
        events.emit("ready", join=f"trahiv join --peer @{file}", invitation=str(file), **READY)
        events.emit("waiting", **waiting)
        events.emit("joined", step=0, peers=1, source="fresh", why="Begins.")
        events.emit("sample", step=0, prompt="d", text="nonsense")
        events.emit("checkpoint", step=2, path="run-1/checkpoints/step-2")
        events.emit("sample", step=last_sample, prompt="d", text="ef")
        events.emit("done", **DONE)
    return screen.getvalue()


@pytest.mark.parametrize("last_sample", [1, 2])
def test_live_view_leaves_join_line_and_result(monkeypatch, tmp_path, last_sample):
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(monkeypatch, tmp_path, last_sample, **ROOM))
    above, *_, last = plain.split("╭─ run-1")
    assert "waiting for the libraries to load: 5 s so far" in above and plain.count("5 s so far") == 1
    assert f"\ntrahiv join --peer {INVITATION}\n" in above
    board, below = last.rsplit("╯", 1)
    assert "checkpoint at step 2" in board and "nonsense" in plain.rpartition("╭─ run-1")[0]
    assert below.strip().splitlines() == [
        *["at step 2 the model continues 'd' with 'ef'"] * (last_sample == 2),
        "done at step 2 (signal): run-1/final",
        "to go on: trahiv init r",
    ]


@pytest.mark.parametrize("lacking", [{"TERM": "dumb"}, {"COLUMNS": "59"}, {"LINES": "19"}])
def test_limited_terminal_gets_plain_lines(monkeypatch, tmp_path, lacking):
    screen = shown(monkeypatch, tmp_path, **(ROOM | lacking))
    assert "\x1b" not in screen and "╭" not in screen
    lines = screen.splitlines()
    assert f"trahiv join --peer {INVITATION}" in lines
    assert "checkpoint: run-1/checkpoints/step-2" in lines
    assert lines[-2:] == ["done at step 2 (signal): run-1/final", "to go on: trahiv init r"]


def test_hub_kernels_cannot_be_imported(tmp_path):
    (tmp_path / "kernels.py").touch()
    code = "from trahiv_cli.cli.output import quiet_libraries; quiet_libraries(); import kernels"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "ModuleNotFoundError: import of kernels halted" in ran.stderr
