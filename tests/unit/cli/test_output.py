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
    "maddrs": [],
    "reach": [],
    "reached": "alone",
    "reached_why": "Nobody is there.",
    "fingerprint": None,
    "max_steps": 2,
}
WAITING = {"what": "the libraries to load", "seconds": 5.0, "until_seconds": 120}


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """The contents of a terminal after a run, with control sequences."""

    def shown(last_sample=2, **environment):
        file = tmp_path / "invitation"
        file.write_text(INVITATION + "\n")
        screen = io.StringIO()
        screen.isatty = lambda: True
        monkeypatch.setattr("sys.stdout", screen)
        room = {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        monkeypatch.setattr(Console, "_environ", room | environment)
        output = Output()
        output.format = Format.human
        events = Events()
        with output.listening(events):
            events.emit("waiting", **WAITING)
            events.emit("ready", join=f"trahiv join --peer @{file}", invitation=str(file), **READY)
            events.emit("waiting", **WAITING)
            events.emit("joined", step=0, peers=1, why="Begins.")
            events.emit("sample", step=0, prompt="d", text="nonsense")
            events.emit("checkpoint", step=2, path="run-1/checkpoints/step-2")
            events.emit("sample", step=last_sample, prompt="d", text="ef")
            done = {"step": 2, "path": "run-1/final", "reason": "signal", "resume": "trahiv init r"}
            events.emit("done", had_ended=False, **done)
        return screen.getvalue()

    return shown


@pytest.mark.parametrize("last_sample", [1, 2])
def test_live_view_leaves_join_line_and_result(shown, last_sample):
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(last_sample))
    above, *_, last = plain.split("╭─ run-1")
    assert "waiting for the libraries to load: 5 s so far" in above
    assert plain.count("5 s so far") == 1
    assert f"\ntrahiv join --peer {INVITATION}\n" in above
    assert "nonsense" in plain.removesuffix(last)
    board, below = last.rsplit("╯", 1)
    assert "checkpoint at step 2" in board
    assert below.strip().splitlines() == [
        *["at step 2 the model continues 'd' with 'ef'"] * (last_sample == 2),
        "done at step 2 (signal): run-1/final",
        "to go on: trahiv init r",
    ]


@pytest.mark.parametrize("lacking", [{"TERM": "dumb"}, {"COLUMNS": "59"}, {"LINES": "19"}])
def test_limited_terminal_gets_plain_lines(shown, lacking):
    lines = shown(**lacking).splitlines()
    assert not re.search("[\x1b╭]", "".join(lines))
    assert f"trahiv join --peer {INVITATION}" in lines
    assert lines[-4:] == [
        "checkpoint: run-1/checkpoints/step-2",
        "at step 2 the model continues 'd' with 'ef'",
        "done at step 2 (signal): run-1/final",
        "to go on: trahiv init r",
    ]


def test_hub_kernels_cannot_be_imported(tmp_path):
    (tmp_path / "kernels.py").touch()
    code = "from trahiv_cli.cli.output import quiet_libraries; quiet_libraries(); import kernels"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "ModuleNotFoundError: import of kernels halted" in ran.stderr
