"""Events as lines of text, and as the live view, which is compared with a picture; no terminal, no clock."""

import io
import os
from importlib import metadata
from pathlib import Path
from typing import get_args

import pytest
from packaging.version import Version
from rich.console import Console

from trahiv_cli.net.addresses import Reach
from trahiv_cli.telemetry import board
from trahiv_cli.telemetry.board import Board
from trahiv_cli.telemetry.lines import REACH, line

PICTURE = Path(__file__).with_name("board.txt")
ROUND = {"group": ["A", "B"], "seconds": 0.31, "bytes_sent": 3 * 2**20, "bytes_received": 5 * 2**19}


def peer(name, samples=0, rate=10.0, step=7, me=False):
    return {"peer_id": name, "samples": samples, "samples_per_second": rate, "step": step, "me": me}


def progress(*peers, samples=0):
    return {"event": "progress", "step": 7, "samples": samples, "target": 64, "peers": peers}


def step(number, **fields):
    counts = {"samples": 64, "my_samples": 24, "peers": 2, "samples_per_second": 11.3}
    loss = {"loss": 4.0 - number / 4, "learning_rate": 0.0003, "round": ROUND}
    return {"event": "step", "step": number, **loss, **counts, **fields}


READY = {
    "event": "ready",
    "run_id": "quickstart-0123abcd",
    "peer_id": "QmPeer",
    "maddrs": ["/ip4/8.8.8.8/tcp/1/p2p/QmPeer", "/ip4/192.168.1.7/tcp/1/p2p/QmPeer"],
    "reach": ["internet", "local network"],
    "reached": "direct",
    "reached_why": "A member has dialled this peer.",
    "join": "trahiv join --peer /ip4/8.8.8.8/tcp/1/p2p/QmPeer",
    "invitation": None,
    "fingerprint": "0123456789abcdef",
    "max_steps": 40,
}
WAITING = {"event": "waiting", "what": "a round", "seconds": 5.0, "until_seconds": 30.0, "t": 1000.0}
MESSAGE = "The round for step 7 failed (late)."
WARNING = {"event": "warning", "code": "round", "hint": "do nothing", "message": MESSAGE}
JOINED = {"event": "joined", "step": 3, "why": "It began."}
LOG = [
    READY,
    {"event": "joined", "step": 0},
    *(step(number) for number in range(1, 8)),
    {"event": "eval", "step": 5, "eval_loss": 2.875},
    {"event": "checkpoint", "step": 5},
    WARNING,
    progress(
        peer("QmAlice00000001", samples=24, rate=11.3, me=True),
        peer("QmBob0000000002", samples=8, rate=4.7),
        peer("QmCarol00000003", rate=0.0, step=6),
        samples=32,
    ),
    WAITING | {"what": "a round for step 8"},
]


NO_STEP = {"loss": None, "learning_rate": None, "samples": None, "my_samples": 0, "round": None}
PACE = {"event": "pace", "message": "From step 2 on."}
REACHED = {"event": "reach", "reached": "relayed", "reached_why": "Through a member."}

REST = "samples 64 (24 mine), peers 2, 11.3 samples/s"
ENDED = {"event": "done", "step": 40, "reason": "signal", "path": "runs/run-1/final", "had_ended": True}
LOST = ENDED | {"path": None, "resume": None, "had_ended": False}
EVAL = {"event": "eval", "step": 20, "epoch": 0.5, "eval_loss": 2.0, "eval_runtime": 1.23456, "eval_a/b": 1}
SAMPLE = {"event": "sample", "step": 40, "prompt": "def f", "text": "(x):\n\x1b[2J"}

SAID = [
    (JOINED | {"peers": 2}, "joined at step 3, peers 2. It began."),
    (step(7), f"step 7, loss 2.2500, lr 0.0003, {REST}, round of 2 in 0.31 s"),
    (step(7, reward=0.5), f"step 7, reward 0.5000, loss 2.2500, lr 0.0003, {REST}, round of 2 in 0.31 s"),
    (step(7, **NO_STEP), "step 7, loss -, lr -, samples - (0 mine), peers 2, 11.3 samples/s"),
    (EVAL, "eval at step 20: eval_loss=2 eval_runtime=1.235"),
    (WAITING, "waiting for a round: 5 s so far, at most 30 s"),
    (SAMPLE | {"is_reply": True}, "at step 40 the model answers: def f\n(x):\n\x1b[2J"),
    (SAMPLE, r"at step 40 the model continues 'def f' with '(x):\n\x1b[2J'"),
    (PACE, "pace: From step 2 on."),
    (REACHED, "reach relayed: Through a member."),
    ({"event": "folder", "message": "It goes on."}, "It goes on."),
    (WARNING, "warning [round]: The round for step 7 failed (late). (do nothing)"),
    (ENDED, "nothing to do: step 40 of 40, the model is in runs/run-1/final"),
    (LOST, "done at step 40 (signal): the checkpoint could not be written"),
    (LOST | {"step": 0}, "stopped before the first step (signal): there is nothing to save"),
    *(({"event": name}, None) for name in ("progress", "an event of a later version")),
]


@pytest.mark.parametrize(("event", "said"), SAID)
def test_event_becomes_log_line(event, said):
    assert line(event) == said


def test_join_line_stands_alone_at_end():
    assert line(READY).splitlines() == [
        "run quickstart-0123abcd, fingerprint 0123456789ab, peer QmPeer",
        "  from the internet  /ip4/8.8.8.8/tcp/1/p2p/QmPeer",
        "  from this network  /ip4/192.168.1.7/tcp/1/p2p/QmPeer",
        "  direct: A member has dialled this peer.",
        "",
        "To join, type on another machine:",
        "trahiv join --peer /ip4/8.8.8.8/tcp/1/p2p/QmPeer",
    ]


TO_FILE = """\


To join elsewhere, copy this private file there, chmod 600, and type with its place:
trahiv join --peer @/a/file
"""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"join": "trahiv join --peer @/a/file", "invitation": "/a/file"}, TO_FILE),
        ({"maddrs": [], "reach": [], "join": ""}, "\n\nThis peer only dials out.\n"),
        ({"join": ""}, "\n\nThe swarm's owner can invite others.\n"),
    ],
)
def test_way_to_invite_depends_on_swarm(changes, said):
    assert line(READY | changes).endswith(said)


def test_bootstrap_node_has_no_run():
    assert line(READY | {"run_id": None, "fingerprint": None}).startswith("bootstrap only, peer QmPeer\n")


def test_every_reach_has_words():
    assert set(REACH) == set(get_args(Reach))


@pytest.fixture(autouse=True)
def _clock_stands_still(monkeypatch):
    monkeypatch.setattr(board.time, "time", lambda: 1002.0)


def drawn(*log, width=100, height=60):
    """The board after these events."""
    board = Board()
    for event in log:
        board({"t": 1000.0, **event})
    screen = io.StringIO()
    options = {"color_system": None, "force_terminal": False, "legacy_windows": False, "_environ": {}}
    Console(file=screen, width=width, height=height, **options).print(board)
    return screen.getvalue()


@pytest.mark.skipif(
    Version(metadata.version("rich")) < Version("14.3"),
    reason="an older rich pads the first column otherwise",
)
def test_rewards_stand_in_for_loss():
    held_out = {"event": "eval", "step": 2, "eval_loss": 0.0, "eval_reward": 0.75}
    picture = drawn(READY, step(1, reward=0.25), step(2, reward=0.5), held_out)
    assert "0.5000" in picture
    assert "held-out reward" in picture
    assert "loss" not in picture


def test_board_matches_picture():
    """To take a new picture: TRAHIV_REWRITE=1 pytest tests/unit/telemetry/test_board.py, then look at it."""
    picture = drawn(*LOG)
    if os.environ.get("TRAHIV_REWRITE"):
        PICTURE.write_text(picture, encoding="utf-8")
    assert picture == PICTURE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("width", "limit"), [(20, 20), (60, 56), (100, 96)])
def test_board_fits_width_at_any_time(width, limit):
    for length in range(len(LOG) + 1):
        assert max(map(len, drawn(*LOG[:length], width=width).splitlines())) <= limit


INVITE = {"invite": "trahiv invite", "invitation": "/a/file"}


@pytest.mark.parametrize(
    ("log", "shown", "hidden"),
    [
        ([], "loading the model", "invite"),
        ([JOINED], "training from step 3", "loading"),
        ([WAITING | {"event": "download"}], "waiting for a round (at most 23 s more)", "download"),
        ([WAITING, step(7)], "7", "waiting"),
        ([WAITING, JOINED], "It began.", "waiting"),
        ([WAITING | {"seconds": 70.0}], "at most 0 s more", "at most -"),
        ([step(1, **NO_STEP)], "none needed: no other peer gave samples", "my share"),
        ([step(1, loss=float("inf"))], "inf", "▁"),
        ([step(1), step(2, loss=float("nan")), step(3)], "3.2500  █▁", "nan"),
        ([{"event": "something new"}], "loading", "something"),
        ([READY | INVITE], "to invite others: trahiv invite", "/a/file"),
        ([READY | INVITE | {"invite": None}], "to invite others, send them the line in /a/file", "trahiv"),
        ([WARNING | {"message": "[bold]not bold[/] [/]"}], "[round] [bold]not bold[/] [/]", "?"),
        ([PACE, REACHED], "From step 2 on.", "?"),
        ([PACE, REACHED], "reach relayed: Through a member.", "?"),
        ([progress(peer("QmA"))], "0 of 64 samples", "█"),
        ([progress(*(peer("QmA", samples=96),) * 2, samples=192)], "64 of 64 samples", "░"),
    ],
)
def test_board_shows_current_state(log, shown, hidden):
    picture = drawn(READY, *log)
    assert shown in picture
    assert hidden not in picture


@pytest.mark.parametrize(("height", "num_shown"), [(21, 1), (24, 4), (30, 10), (60, 12)])
def test_crowd_and_longest_notes_fit_height(height, num_shown):
    notes = [WARNING | {"message": "word " * 200}] * 9
    crowd = progress(*(peer(f"QmPeer{number:09}") for number in range(15)), samples=120)
    picture = drawn(READY, EVAL, step(1), *notes, crowd, WAITING, width=80, height=height)
    assert picture.count("●") == num_shown
    assert len(picture.splitlines()) <= height
    assert f"and {15 - num_shown} more" in picture
