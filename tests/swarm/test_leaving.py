"""Leaving: in order at one signal, at once at two, and children of a killed process end with it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.commands import children_of, left_by, wait_until
from tests.swarm.conftest import suspended, told

LEAVES_WITHIN_S = 15.0


def test_signal_leaves_checkpoint_and_no_children(start_paced, endless):
    command = ("init", endless(), "--output-dir", "run")
    peer = start_paced(*command)
    peer.wait_for("step", 60, step=2)
    peer.press_ctrl_c()
    assert peer.exit_code(LEAVES_WITHIN_S) == 130
    assert "Traceback" not in peer.err
    done = peer.wait_for("done", 1)
    assert done["reason"] == "signal"
    assert done["step"] >= 2
    assert Path(done["path"]).name == f"step-{done['step']}"
    assert done["resume"].startswith("trahiv init ")
    assert left_by(peer.pid) == []

    early = start_paced(*command[:-1], "early")
    early.wait_for("ready", 60)
    early.send_signal(signal.SIGINT)  # while the libraries load
    assert early.exit_code(LEAVES_WITHIN_S) == 130
    assert early.wait_for("done", 1)["path"] is None
    assert left_by(early.pid) == []
    assert "Traceback" not in early.err

    again = start_paced(*command)
    joined = again.wait_for("joined", 60)
    assert (joined["source"], joined["step"]) == ("checkpoint", done["step"])
    again.wait_for("step", 30, step=done["step"] + 1)
    assert len(children_of(again.pid)) >= 2, "the DHT's process and p2pd"
    again.kill()
    assert_children_die(again.pid)


def test_signal_ends_wait_for_hung_peer(pair):
    first, second, *_ = pair
    with suspended(second):
        first.wait_for("waiting", 60, what=lambda what: "round" in what or "average" in what)
        first.send_signal(signal.SIGINT)
        assert first.exit_code(LEAVES_WITHIN_S) == 130
        assert first.wait_for("done", 1)["path"]


def test_second_signal_leaves_at_once(start_paced, endless):
    recipe = endless()
    peer = start_paced("init", recipe, "--output-dir", "run")
    peer.wait_for("step", 60, step=1)
    peer.send_signal(signal.SIGINT)
    peer.send_signal(signal.SIGTERM)  # two equal ones would count once before the first is handled
    assert peer.exit_code(5) in (130, 143), "which is heard first is the system's choice"
    assert not told(peer.events, "done")
    assert f"to go on: trahiv init {recipe}" in peer.err
    assert_children_die(peer.pid)


MANAGER = """
import json, psutil, sys
from trahiv_cli.swarm.corrections import processes
from trahiv_cli.shared_memory import shared_bytes

processes.start_memory_manager() if sys.argv[1] == "corrected" else shared_bytes(1)
[manager] = psutil.Process().children()
status = open(f"/proc/{manager.pid}/status").read()
blocked = int(status.split("SigBlk:")[1].split()[0], 16)
print(json.dumps({"v": 1, "event": "started", "name": manager.name(), "blocked": bool(blocked & 2)}))
"""


@pytest.mark.parametrize("how, is_blocked", [("corrected", True), ("by torch", False)])
def test_only_corrected_memory_manager_blocks_sigint(workplace, how, is_blocked):
    """Once torch blocks SIGINT by itself, `start_memory_manager` can be removed."""
    started = workplace.start_script(MANAGER, how).wait_for("started", 60)
    assert started["name"].startswith("torch_shm")
    assert started["blocked"] == is_blocked


def assert_children_die(pid):
    """Children of a process that could not clean up end with it; its sockets go at the next start."""
    wait_until(lambda: not children_of(pid), 5)


FORK = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch
from trahiv_cli.swarm.corrections.processes import renew_thread_pool

def add(start):
    start.wait()
    torch.zeros(200_000).add_(1.0)

torch.set_num_threads(torch.get_num_threads())
for _ in range(40):  # of those with the pool that they inherited, each second one fails
    child = os.fork()
    if not child:
        if sys.argv[1] == "renewed":
            renew_thread_pool()
        start = threading.Barrier(8)
        with ThreadPoolExecutor(8) as threads:
            done = [threads.submit(add, start) for _ in range(8)]
        os._exit(any(isinstance(one.exception(), RuntimeError) for one in done))
    if failed := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        break
print(failed)
"""


@pytest.mark.parametrize("pool", ["renewed", "inherited"])
def test_forked_threads_need_renewed_pool(pool):
    """Once no child fails with an inherited pool, `renew_thread_pool` can be removed."""
    command = [sys.executable, "-c", FORK, pool]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) == (pool == "inherited"), "1: it failed, negative: it crashed"
