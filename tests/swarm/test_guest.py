"""A peer that pauses when its user wants the machine, resumes, and leaves after a round."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.kit.commands import LOOPBACK, left_by

pytestmark = pytest.mark.timeout(240)


def test_paused_peer_unloads_and_resumes_without_loss(pair, trahiv, start_paced):
    first, second, *_ = pair
    [paused] = trahiv("pause", "second", "--format", "json").events
    assert (paused["event"], paused["why"]) == ("paused", "its user paused it")
    assert second.is_running and paused["step"] >= 2, "it is the same process, begun anew"
    loaded = {Path(one.path).name for one in psutil.Process(second.pid).memory_maps()}
    assert not [name for name in loaded if name.startswith("model.safetensors")]
    alone = first.wait_for("step", 60, peers=1, step=lambda step: step > paused["step"])

    told = {
        one["peer_id"]: one
        for one in trahiv("status", "--peer", second.address, "--format", "json").events[1:]
    }
    assert {one["state"] for one in told.values()} == {"training", "paused"}
    assert told[second.wait_for("ready", 1)["peer_id"]]["step"] == paused["step"]
    third = start_paced("join", "--peer", second.address, "--output-dir", "third", "--yes", *LOOPBACK)
    third.wait_for_group(step=lambda step: step > alone["step"])

    [resumed] = trahiv("resume", "second", "--format", "json").events
    assert resumed["event"] == "resumed"
    joined = second.wait_for("joined", 60, step=lambda step: step > paused["step"])
    assert joined["source"] == "swarm"
    second.wait_for_group(3, step=lambda step: step > joined["step"])

    [done] = trahiv("finish", "second", "--format", "json").events
    assert (done["event"], done["reason"], second.exit_code(20), left_by(second.pid)) == (
        "done",
        "finish",
        0,
        [],
    )
    assert Path(second.cwd, done["path"]).name == f"step-{done['step']}"
    last = first.wait_for("step", 60, step=lambda step: step > done["step"])
    assert (last["data"]["duplicates"], last["data"]["lost"]) == (0, 0)
    given = [json.loads(line) for line in Path(second.cwd, "second", "events.jsonl").read_text().splitlines()]
    steps = [one for one in given if one["event"] == "step"]
    assert steps[-1]["given"]["samples"] == sum(one["my_samples"] for one in steps), (
        "before the pause and after it"
    )
    assert not any(event["event"] == "warning" and event["code"] == "broken" for event in first.events)


def test_peer_trains_only_while_condition_holds(start_paced, endless, tmp_path):
    game = shutil.copy("/bin/sleep", tmp_path / "agame")

    def play():
        return subprocess.Popen([game, "600"])

    playing = play()
    try:
        peer = start_paced("init", endless(), "--output-dir", "run", "--only-when", "not agame")
        assert peer.wait_for("paused", 60)["why"] == "agame runs"
        told = [event["event"] for event in peer.events if event["event"] not in ("waiting", "peers")]
        assert told == ["ready", "paused"] and peer.wait_for("ready", 1)["join"], "others can join it"
        playing.kill()
        playing.wait()
        peer.wait_for("resumed", 60)
        step = peer.wait_for("step", 60, step=2)
        playing = play()
        paused = peer.wait_for("paused", 60, t=lambda t: t > step["t"])
        assert paused["step"] >= 2
        for child in psutil.Process(peer.pid).children():
            child.kill()
        paused = peer.wait_for("paused", 60, t=lambda t: t > paused["t"])
        peer.send_signal(signal.SIGINT)
        assert peer.exit_code(20) == 130
        done = peer.wait_for("done", 1)
        assert done["reason"] == "signal" and Path(peer.cwd, done["path"]).name == f"step-{paused['step']}"
        assert "--only-when 'not agame'" in done["resume"] and left_by(peer.pid) == []
    finally:
        playing.kill()
        playing.wait()
