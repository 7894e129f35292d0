"""Events in words."""

from typing import get_args

import pytest

from trahiv_cli.swarm.addresses import Reach
from trahiv_cli.telemetry.lines import REACH, line

PEER = "QmPeer"
READY = {
    "event": "ready",
    "run_id": "run-1",
    "peer_id": PEER,
    "maddrs": ["/ip4/8.8.8.8/tcp/1/p2p/QmPeer", "/ip4/192.168.1.7/tcp/1/p2p/QmPeer"],
    "reach": ["internet", "local network"],
    "join": "trahiv join --peer /ip4/8.8.8.8/tcp/1/p2p/QmPeer",
    "invitation": None,
    "fingerprint": "0123456789abcdef",
}
STEP = {
    "event": "step",
    "step": 7,
    "loss": 2.34567,
    "learning_rate": 0.00029876,
    "samples": 64,
    "my_samples": 24,
    "peers": 2,
    "samples_per_second": 11.26,
    "round": {"group": ["QmA", "QmB"], "seconds": 0.314},
}
REST = "samples 64 (24 mine), peers 2, 11.3 samples/s"
NO_STEP = {"loss": None, "learning_rate": None, "samples": None, "my_samples": 0, "round": None}
WAITING = {"event": "waiting", "what": "a round", "seconds": 5.04, "until_seconds": 60.0}
STOPPED = {"event": "done", "step": 40, "reason": "signal", "path": "runs/run-1/final", "had_ended": False}
STOPPED["resume"] = "trahiv init quickstart"
LOST = STOPPED | {"path": None, "resume": None}
EVAL = {"event": "eval", "step": 20, "epoch": 0.5, "eval_loss": 2.0, "eval_runtime": 1.23456}
SAMPLE = {"event": "sample", "step": 40, "prompt": "def f", "text": "(x):\n\x1b[2J"}
WARNING = {"event": "warning", "code": "round", "message": "It failed.", "hint": "do nothing"}

SAID = [
    ({"event": "joined", "step": 7, "peers": 2, "why": "It began."}, "joined at step 7, peers 2. It began."),
    (STEP, f"step 7, loss 2.3457, lr 0.000299, {REST}, round of 2 in 0.31 s"),
    (STEP | NO_STEP, "step 7, loss -, lr -, samples - (0 mine), peers 2, 11.3 samples/s"),
    (EVAL, "eval at step 20: eval_loss=2 eval_runtime=1.235"),
    ({"event": "checkpoint", "step": 20, "path": "a/step-20"}, "checkpoint: a/step-20"),
    (WAITING, "waiting for a round: 5 s so far, at most 60 s"),
    (SAMPLE, r"at step 40 the model continues 'def f' with '(x):\n\x1b[2J'"),
    ({"event": "pace", "message": "mode overlap."}, "pace: mode overlap."),
    ({"event": "folder", "message": "It goes on."}, "It goes on."),
    (WARNING, "warning [round]: It failed. (do nothing)"),
    (STOPPED | {"had_ended": True}, "nothing to do: step 40 of 40, the model is in runs/run-1/final"),
    (STOPPED, "done at step 40 (signal): runs/run-1/final\nto go on: trahiv init quickstart"),
    (LOST, "done at step 40 (signal): the checkpoint could not be written"),
    (LOST | {"step": 0}, "stopped before the first step (signal): there is nothing to save"),
    *(({"event": name}, None) for name in ("progress", "an event of a later version")),
]


@pytest.mark.parametrize(("event", "said"), SAID, ids=[event["event"] for event, _ in SAID])
def test_an_event_is_said_in_words_unless_a_log_does_not_need_it(event, said):
    assert line(event) == said


def test_the_join_line_is_last_and_alone_and_who_can_not_be_joined_by_one_says_how_else():
    said = line(READY)
    assert said.splitlines() == [
        "run run-1, fingerprint 0123456789ab, peer QmPeer",
        "  from the internet  /ip4/8.8.8.8/tcp/1/p2p/QmPeer",
        "  from this network  /ip4/192.168.1.7/tcp/1/p2p/QmPeer",
        "",
        "To join, type on another machine:",
        "trahiv join --peer /ip4/8.8.8.8/tcp/1/p2p/QmPeer",
    ]
    file = "/runs/run-1/invitation"
    *_, how, join = line(READY | {"join": f"trahiv join --peer @{file}", "invitation": file}).splitlines()
    assert how == "To join elsewhere, copy this private file there, chmod 600, and type with its place:"
    assert join == f"trahiv join --peer @{file}"
    said = line(READY | {"maddrs": [], "reach": [], "join": ""})
    assert "This peer only dials out." in said and "trahiv join" not in said
    assert "can invite others" in line(READY | {"join": ""})
    assert line(READY | {"run_id": None, "fingerprint": None}).startswith("bootstrap only, peer QmPeer\n")
    assert set(REACH) == set(get_args(Reach))
