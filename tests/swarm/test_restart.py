"""When a process of a peer ends or stands still, the peer saves a checkpoint and starts again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kit.commands import LOOPBACK, Peer, left_by
from tests.kit.recipes import write_tiny

pytestmark = pytest.mark.timeout(240)

FOUND_WITHIN_S = 10.0
RESTARTED_WITHIN_S = 45.0
SUSPENDED_S = 90.0
"""By then the others have forgotten a peer that stands still."""


def parts(peer: Peer) -> dict[str, psutil.Process]:
    """The processes under a peer's."""
    [dht] = [child for child in psutil.Process(peer.pid).children() if "python" in child.name()]
    [p2pd] = [child for child in dht.children() if child.name() == "p2pd"]
    return {"dht": dht, "p2pd": p2pd}


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("broken", "how"),
    [pytest.param(0, signal.SIGSTOP, id="dht-stopped"), pytest.param(1, signal.SIGKILL, id="dht-killed")],
)
def test_a_peer_whose_process_fails_starts_again_and_trains_along(
    pair: Any, broken: int, how: signal.Signals
) -> None:
    broken, other = pair[broken], pair[1 - broken]
    address, before = broken.maddr, parts(broken)
    before["dht"].send_signal(how)
    at = broken.wait_for("warning", FOUND_WITHIN_S, code="broken")["t"]
    saved = broken.wait_for("checkpoint", RESTARTED_WITHIN_S, t=lambda t: t > at)
    entered = broken.wait_for("joined", RESTARTED_WITHIN_S, t=lambda t: t > at)
    assert entered["step"] >= saved["step"], "nothing that was committed is lost"
    broken.wait_for_group(timeout=RESTARTED_WITHIN_S, t=lambda t: t > at)
    assert not [child for child in before.values() if lives(child)]
    assert all(lives(process) for process in parts(broken).values())
    assert broken.maddr == address
    steps = [one["step"] for one in broken.steps]
    assert steps == sorted(steps)
    for peer in (other, broken):
        peer.send_signal(signal.SIGTERM)
        assert peer.exit_code(20) == 143
        assert left_by(peer.pid) == []


def test_a_machine_that_was_suspended_for_longer_than_its_record_lives_trains_along_again(pair: Any) -> None:
    first, second, *_ = pair
    sleeper = [psutil.Process(second.pid), *psutil.Process(second.pid).children(recursive=True)]
    for process in sleeper:
        process.suspend()
    since = time.time()
    alone = first.wait_for("step", SUSPENDED_S, t=lambda t: t > since, peers=1)
    went_on = first.wait_for("step", 60, step=lambda step: step > alone["step"] + 3)
    for process in sleeper:
        process.resume()
    step = second.wait_for_group(timeout=60, t=lambda t: t > went_on["t"])
    assert step["step"] > went_on["step"]
    broken = [one for one in second.events if one["event"] == "warning" and one["code"] == "broken"]
    assert not broken, "nothing was broken"
    steps = [one["step"] for one in second.steps]
    assert steps == sorted(set(steps))


def test_a_peer_that_fails_again_and_again_ends_with_a_checkpoint(
    start: Callable[..., Peer], tmp_path: Path
) -> None:
    recipe = write_tiny(tmp_path, training__max_steps=100_000, hivemind_config__opt__target_batch_size=8)
    now = time.time()
    recent = " ".join(str(now - seconds) for seconds in (700.0, 300.0, 200.0, 100.0))
    peer = start("init", recipe, "--output-dir", "run", *LOOPBACK, env={"TRAHIV_RESTARTS": recent})
    peer.wait_for("step", 60, step=2)
    parts(peer)["dht"].kill()
    error = peer.wait_for("error", 30)
    assert error["code"] == "broken" and "started again 3 times within 10 minutes" in error["message"]
    assert peer.exit_code(20) == 1
    assert [one for one in peer.events if one["event"] == "checkpoint"]
