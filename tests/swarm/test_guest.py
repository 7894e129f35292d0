"""A peer that pauses when its user wants the machine, resumes, and leaves after a round."""

import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.kit.commands import LOOPBACK, left_by
from tests.swarm.conftest import above, id_of, recorded, told

pytestmark = pytest.mark.timeout(240)


def test_paused_peer_unloads_and_resumes_without_loss(pair, trahiv, start_paced):
    first, second, *_ = pair
    [paused] = trahiv("pause", "second", "--format", "json").events
    assert (paused["event"], paused["why"]) == ("paused", "its user paused it")
    assert paused["step"] >= 2
    assert second.is_running, "it is the same process, begun anew"
    assert not any("model.safetensors" in one.path for one in psutil.Process(second.pid).memory_maps())
    alone = first.wait_for("step", 60, peers=1, step=above(paused["step"]))

    _, *peers = trahiv("status", "--peer", second.address, "--format", "json").events
    [other] = (one for one in peers if one["state"] == "paused")
    assert (other["peer_id"], other["step"]) == (id_of(second), paused["step"])
    assert {one["state"] for one in peers} == {"training", "paused"}
    third = start_paced("join", "--peer", second.address, "--output-dir", "third", "--yes", *LOOPBACK)
    third.wait_for_group(step=above(alone["step"]))

    [resumed] = trahiv("resume", "second", "--format", "json").events
    assert resumed["event"] == "resumed"
    joined = second.wait_for("joined", 60, step=above(paused["step"]))
    assert joined["source"] == "swarm"
    second.wait_for_group(3, step=above(joined["step"]))

    [done] = trahiv("finish", "second", "--format", "json").events
    assert (done["event"], done["reason"], second.exit_code(20)) == ("done", "finish", 0)
    assert left_by(second.pid) == []
    assert Path(done["path"]).name == f"step-{done['step']}"
    last = first.wait_for("step", 60, step=above(done["step"]))
    assert (last["data"]["duplicates"], last["data"]["lost"]) == (0, 0)
    steps = told(recorded(second.cwd / "second"), "step")  # before the pause and after it
    assert steps[-1]["given"]["samples"] == sum(one["my_samples"] for one in steps)
    assert not told(first.events, "warning", code="broken")


def test_peer_trains_only_while_condition_holds(start_paced, endless, tmp_path):
    game = shutil.copy("/bin/sleep", tmp_path / "agame")

    def play():
        return subprocess.Popen([game, "600"])

    playing = play()
    try:
        peer = start_paced("init", endless(), "--output-dir", "run", "--only-when", "not agame")
        assert peer.wait_for("paused", 60)["why"] == "agame runs"
        names = [event["event"] for event in peer.events if event["event"] not in ("waiting", "peers")]
        assert names == ["ready", "paused"]
        assert peer.wait_for("ready", 1)["join"], "others can join it"
        playing.kill()
        playing.wait()
        peer.wait_for("resumed", 60)
        step = peer.wait_for("step", 60, step=2)
        playing = play()
        paused = peer.wait_for("paused", 60, t=above(step["t"]))
        assert paused["step"] >= 2
        for child in psutil.Process(peer.pid).children():
            child.kill()
        paused = peer.wait_for("paused", 60, t=above(paused["t"]))
        peer.send_signal(signal.SIGINT)
        assert peer.exit_code(20) == 130
        done = peer.wait_for("done", 1)
        assert (done["reason"], Path(done["path"]).name) == ("signal", f"step-{paused['step']}")
        assert "--only-when 'not agame'" in done["resume"]
        assert left_by(peer.pid) == []
    finally:
        playing.kill()
        playing.wait()
