"""The live view, drawn from a fixed log and compared with a picture; no terminal, no clock."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from trahiv_cli.telemetry import board
from trahiv_cli.telemetry.board import ECHO_COLUMNS, MAX_PEERS_SHOWN, NOTES_SHOWN, OTHER_ROWS, Board

PICTURE = Path(__file__).with_name("board.txt")
ROUND = {"group": ["A", "B"], "seconds": 0.31, "bytes_sent": 3 * 2**20, "bytes_received": 5 * 2**19}


def peer(name, samples=0, rate=10.0, step=7, me=False):
    return {"peer_id": name, "samples": samples, "samples_per_second": rate, "step": step, "me": me}


def progress(*peers, samples):
    return {"event": "progress", "step": 7, "samples": samples, "target": 64, "peers": list(peers)}


def step(number, **fields):
    return {
        "event": "step",
        "step": number,
        "loss": 4.0 - number / 4,
        "learning_rate": 0.0003,
        "samples": 64,
        "my_samples": 24,
        "peers": 2,
        "samples_per_second": 11.3,
        "round": ROUND,
    } | fields


READY = {"event": "ready", "run_id": "quickstart-0123abcd", "max_steps": 40}
WAITING = {"event": "waiting", "what": "a round", "seconds": 5.0, "until_seconds": 30.0, "t": 1000.0}
WARNING = {"event": "warning", "code": "round", "hint": ""}
LOG = [
    READY,
    {"event": "joined", "step": 0, "peers": 2, "source": "fresh"},
    *(step(number) for number in range(1, 8)),
    {"event": "eval", "step": 5, "eval_loss": 2.875},
    {"event": "checkpoint", "step": 5, "path": "runs/quickstart-0123abcd/checkpoints/step-5"},
    WARNING | {"message": "The round for step 7 failed (late)."},
    progress(
        peer("QmAlice00000001", samples=24, rate=11.3, me=True),
        peer("QmBob0000000002", samples=8, rate=4.7),
        peer("QmCarol00000003", rate=0.0, step=6),
        samples=32,
    ),
    WAITING | {"what": "a round for step 8"},
]


@pytest.fixture(autouse=True)
def _clock_stands_still(monkeypatch):
    monkeypatch.setattr(board.time, "time", lambda: 1002.0)


def told(*log):
    it = Board()
    for event in log:
        it({"v": 1, "t": 1000.0} | event)
    return it


def drawn(it, width=100, height=60):
    screen = io.StringIO()
    options = {"color_system": None, "force_terminal": False, "legacy_windows": False, "_environ": {}}
    console = Console(file=screen, width=width, height=height, **options)
    console.print(it)
    return screen.getvalue()


def test_the_board_looks_as_it_did():
    """To take a new picture: TRAHIV_REWRITE=1 pytest tests/unit/telemetry/test_board.py, then look at it."""
    picture = drawn(told(*LOG))
    if os.environ.get("TRAHIV_REWRITE"):
        PICTURE.write_text(picture, encoding="utf-8")
    assert picture == PICTURE.read_text(encoding="utf-8")


def test_the_board_can_be_drawn_at_any_time_and_leaves_room_for_what_a_terminal_echoes():
    for length in range(len(LOG) + 1):
        for width in (20, 60, 100):
            lines = drawn(told(*LOG[:length]), width).splitlines()
            assert max(map(len, lines)) <= (width - ECHO_COLUMNS if width > 20 else width)


JOINED = {"event": "joined", "step": 3, "peers": 1}
NO_STEP = {"loss": None, "samples": None, "my_samples": 0, "round": None, "learning_rate": None}
WAIT = "waiting for a round (at most 23 s more)"
INVITE = {"invite": "trahiv invite", "invitation": "/a/file"}


@pytest.mark.parametrize(
    ("log", "shown", "hidden"),
    [
        ((), "starting", "events"),
        ((READY,), "loading the model", "invite"),
        ((READY, JOINED | {"source": "swarm"}), "training from step 3", "loading"),
        ((READY, WAITING | {"event": "download"}, {"event": "checkpoint", "step": 7}), WAIT, "download"),
        ((READY, WAITING, step(7)), "7", "waiting"),
        ((READY, WAITING, JOINED | {"source": "fresh", "why": "It began."}), "It began.", "waiting"),
        ((WAITING | {"seconds": 70.0},), "at most 0 s more", "-"),
        ((READY, step(1, **NO_STEP)), "none needed: no other peer gave samples", "my share"),
        ((READY, step(1, loss=float("inf"))), "inf", "▁"),
        ((READY, step(1), step(2, loss=float("nan")), step(3)), "3.2500  █▁", "nan"),
        (({"event": "something new"},), "starting", "something"),
        ((READY | INVITE,), "to invite others: trahiv invite", "/a/file"),
        ((READY | INVITE | {"invite": None},), "to invite others, send them what is in /a/file", "trahiv"),
        ((READY, WARNING | {"message": "[bold]not bold[/] [/]"}), "[round] [bold]not bold[/] [/]", "?"),
        ((READY, {"event": "pace", "message": "From step 2 on."}), "From step 2 on.", "?"),
    ],
)
def test_the_board_shows_what_there_is(log, shown, hidden):
    picture = drawn(told(*log))
    assert shown in picture and hidden not in picture


def test_a_crowd_is_counted_and_leaves_room_for_the_rest_of_the_board():
    crowd = [peer(f"QmPeer{number:09}") for number in range(MAX_PEERS_SHOWN + 3)]
    picture = drawn(told(READY, progress(*crowd, samples=0)))
    assert picture.count("●") == MAX_PEERS_SHOWN and "and 3 more" in picture
    notes = [WARNING | {"message": "word " * 200}] * NOTES_SHOWN
    log = [READY, LOG[-4], step(1), *notes, progress(*crowd[:MAX_PEERS_SHOWN], samples=120), WAITING]
    for height in (OTHER_ROWS + 1, 24, 30):
        picture = drawn(told(*log), 80, height)
        assert picture.count("●") == height - OTHER_ROWS and len(picture.splitlines()) <= height
        assert f"and {MAX_PEERS_SHOWN - height + OTHER_ROWS} more" in picture


@pytest.mark.parametrize("width", [60, 120])
def test_samples_beyond_the_next_step_are_told_apart(width):
    for samples, held in ((0, 0), (64, 64), (192, 64)):
        ours, theirs = (peer(name, samples=samples // 2) for name in ("QmA", "QmB"))
        picture = drawn(told(READY, progress(ours, theirs, samples=samples)), width)
        assert f"{held} of 64 samples" in picture and "…" not in picture
        assert ("128 more already trained" in picture) == (samples == 192)
        assert (picture.count("░") == 0) == (picture.count("█") > 0) == (samples > 0)
