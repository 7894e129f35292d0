"""Peers that restart with the same command, or by themselves: where they resume, and with which peers."""

import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.kit.commands import LOOPBACK, left_by, wait_until
from tests.kit.recipes import write_tiny
from tests.kit.verdicts import furthest_of
from tests.swarm.conftest import above, id_of, recorded, suspended, told
from trahiv_cli.progress.ledger import SHARD
from trahiv_cli.swarm.known_peers import FILE, KnownPeers

pytestmark = pytest.mark.timeout(240)

STARTS_WITHIN_S = 60.0
FOUND_WITHIN_S = 10.0
RESTARTED_WITHIN_S = 45.0

SAVING = {"training__save_steps": 2}
"""A checkpoint every other step."""

SOON_ALONE = {"swarm__solo": "after 2 seconds"}
"""The survivor of a pair goes on alone."""

saving_pair = pytest.mark.parametrize("pair", [SAVING | SOON_ALONE], indirect=True, ids=["saving"])


def require_saved_and_met(pair):
    """Wait until both have saved a checkpoint and each other's addresses."""
    for peer, folder in zip(pair[:2], ("first", "second"), strict=True):
        peer.wait_for("checkpoint", 60)
        wait_until(lambda peer=peer, folder=folder: KnownPeers(Path(peer.cwd, folder, FILE)).addresses)


def saved(*peers):
    return max(one["step"] for peer in peers for one in told(peer.events, "checkpoint"))


@saving_pair
def test_restarted_peer_rejoins_or_continues_alone(start_paced, pair):
    first, second, init, join = pair
    require_saved_and_met(pair)
    first.kill()
    left_at = first.steps[-1]["step"]
    went_on = second.wait_for("step", 60, step=above(left_at + 2))
    again = start_paced(*init)
    joined = again.wait_for("joined", STARTS_WITHIN_S)
    assert joined["source"] == "swarm"
    assert joined["step"] >= went_on["step"]
    assert "further than this run's checkpoint" in joined["why"]
    assert (again.maddr, id_of(again)) == (first.maddr, id_of(first)), "its line is good again"
    again.wait_for_group()

    again.kill()
    second.kill()
    alone = start_paced(*join)
    joined = alone.wait_for("joined", STARTS_WITHIN_S)
    assert (joined["source"], joined["step"]) == ("checkpoint", saved(second))
    assert "no other peer is there" in joined["why"]
    assert alone.wait_for("warning", 1)["code"] == "unreachable"
    alone.wait_for("step", 60, step=joined["step"] + 1)


@saving_pair
def test_killed_swarm_resumes_from_furthest_checkpoint(start_paced, pair):
    first, second, init, join = pair
    require_saved_and_met(pair)
    for peer in (first, second):
        peer.send_signal(signal.SIGKILL)
    furthest = max(map(saved, (first, second)))
    peers = [start_paced(*init), start_paced(*join)]
    joined = [peer.wait_for("joined", STARTS_WITHIN_S) for peer in peers]
    assert [one["step"] for one in joined] == [furthest, furthest]
    assert "checkpoint" in [one["source"] for one in joined]
    assert list(map(id_of, peers)) == [id_of(first), id_of(second)]
    for peer in peers:
        peer.wait_for_group()
        assert peer.steps[0]["step"] > furthest


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 100 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_full_disk_warns_and_training_continues(start_paced, endless, small_disk):
    peer = start_paced("init", endless(**SAVING), "--output-dir", small_disk / "run", *LOOPBACK)
    peer.wait_for("checkpoint", 60)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass
    warning = peer.wait_for("warning", 60, code="checkpoint")
    assert "No space left" in warning["message"]
    assert "Training goes on" in warning["message"]
    at = peer.steps[-1]["step"]
    peer.wait_for("step", 30, step=at + 2)
    filler.unlink()
    peer.wait_for("checkpoint", 30, step=above(at))
    peer.send_signal(signal.SIGTERM)
    done = peer.wait_for("done", 20)
    assert peer.exit_code(15) == 143
    assert recorded(small_disk / "run")[-1].items() >= {"event": "done", "step": done["step"]}.items()


def test_first_step_waits_for_min_peers(start_paced, endless):
    """That two begin together is in `test_recipes.py`."""
    alone = start_paced(
        "init", endless(swarm__min_peers=2), "--output-dir", "alone", "--wait", "3s", *LOOPBACK
    )
    waits = alone.wait_for("waiting", 60, what="2 peers to be there (peers here: 1)")
    assert waits["until_seconds"] <= 3600
    assert alone.wait_for("warning", 60, code="min-peers")["message"].startswith("1 of 2 peers came in 3 s")
    alone.wait_for("step", 30, step=2)


def parts(peer):
    """The child processes of a peer, torch's manager of shared memory first."""
    children = filter(lives, psutil.Process(peer.pid).children())
    memory, dht = sorted(children, key=lambda child: "python" in child.name())
    [p2pd] = (child for child in dht.children() if child.name() == "p2pd")
    return {"memory": memory, "dht": dht, "p2pd": p2pd}


def lives(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "broken, how", [(0, signal.SIGSTOP), (1, signal.SIGKILL)], ids=["dht-stopped", "dht-killed"]
)
def test_peer_restarts_after_dht_failure(pair, broken, how):
    broken, other = pair[broken], pair[1 - broken]
    address, before = broken.maddr, parts(broken)
    before["dht"].send_signal(how)
    at = broken.wait_for("warning", FOUND_WITHIN_S, code="broken")["t"]
    saved = broken.wait_for("checkpoint", RESTARTED_WITHIN_S, t=above(at))
    entered = broken.wait_for("joined", RESTARTED_WITHIN_S, t=above(at))
    assert entered["step"] >= saved["step"], "nothing that was committed is lost"
    broken.wait_for_group(timeout=RESTARTED_WITHIN_S, t=above(at))
    wait_until(lambda: not any(map(lives, before.values())), FOUND_WITHIN_S)
    assert all(lives(process) for process in parts(broken).values())
    assert broken.maddr == address
    steps = [one["step"] for one in broken.steps]
    assert steps == sorted(steps)
    for peer in (other, broken):
        peer.send_signal(signal.SIGTERM)
        assert peer.exit_code(20) == 143
        assert left_by(peer.pid) == []


def test_peer_restarts_after_killed_worker(start_paced, endless):
    recipe = endless(training__dataloader_num_workers=2)
    peer = start_paced("init", recipe, "--output-dir", "run", "--budget", "10000 steps", *LOOPBACK)
    peer.wait_for("step", 60)
    children = psutil.Process(peer.pid).children(recursive=True)
    next(child for child in children if child.name() == "pt_data_worker").kill()
    lost = peer.wait_for("warning", 30, code="worker")
    assert "A worker process of the data loader was killed" in lost["message"]
    saved = peer.wait_for("checkpoint", RESTARTED_WITHIN_S)
    entered = peer.wait_for("joined", RESTARTED_WITHIN_S, t=above(lost["t"]))
    assert entered["source"] == "checkpoint"
    assert entered["step"] == saved["step"]
    peer.wait_for("step", 60, step=saved["step"] + 1)
    wait_until(lambda: not any(map(lives, children)), FOUND_WITHIN_S)


def test_peer_waits_for_suspended_friend(pair):
    first, second, *_ = pair
    with suspended(second) as since:
        for waited_s in (0.0, 8.0):  # by the second warning its record has expired
            first.wait_for("warning", 30, code="no-group", t=above(since + waited_s))
    back_at = time.time()
    for peer in (first, second):
        peer.wait_for_group(timeout=15, t=above(back_at))
        assert not [one for one in peer.steps if one["t"] > since and one["peers"] == 1]


@pytest.mark.parametrize("pair", [SOON_ALONE], indirect=True, ids=["alone"])
def test_long_suspended_peer_rejoins(pair):
    first, second, *_ = pair
    with suspended(second) as since:
        # By then the others have forgotten it.
        alone = first.wait_for("step", 90, t=above(since), peers=1)
        went_on = first.wait_for("step", 60, step=above(alone["step"] + 3))
    step = second.wait_for_group(timeout=60, t=above(went_on["t"]))
    assert step["step"] > went_on["step"]
    assert not told(second.events, "warning", code="broken")
    steps = [one["step"] for one in second.steps]
    assert steps == sorted(set(steps))


def test_repeated_failures_end_peer_without_fresh_start(start, trahiv, tmp_path):
    """That damaged checkpoints are passed over is in `tests/unit/train/test_checkpoint.py`."""
    recipe = write_tiny(tmp_path, training__max_steps=100_000, hivemind_config__opt__target_batch_size=8)
    now = time.time()
    recent = " ".join(str(now - seconds) for seconds in (700.0, 300.0, 200.0, 100.0))
    command = ("init", recipe, "--output-dir", "run", *LOOPBACK)
    peer = start(*command, env={"TRAHIV_RESTARTS": recent})
    peer.wait_for("step", 60, step=2)
    parts(peer)["dht"].kill()
    error = peer.wait_for("error", 30)
    assert error["code"] == "broken"
    assert "started again 3 times within 10 minutes" in error["message"]
    assert peer.exit_code(20) == 1
    assert told(peer.events, "checkpoint")
    for state in (tmp_path / "run/checkpoints").glob("step-*/state.json"):
        state.write_text("{}")
    refused = trahiv(*command)
    assert refused.code == 3
    assert "All checkpoints in run are damaged" in refused.err


def test_interrupted_run_equals_uninterrupted(start, trahiv, tmp_path):
    """It stops between two rounds; what a checkpoint keeps is in `tests/unit/train/test_own_steps.py`."""
    steps = 20
    recipe = write_tiny(
        tmp_path,
        hivemind_config__opt__target_batch_size=2,  # one batch: no part of a local step is lost
        swarm={"mode": "streaming", "local_steps": 20, "fragments": 2},
        model__config__attention_dropout=0.2,
        training__max_steps=steps,
        training__lr_scheduler_type="cosine",
        training__warmup_steps=4,
    )
    identity = ("--identity", tmp_path / "key", *LOOPBACK)  # which seeds the peer's own randomness
    assert trahiv("init", recipe, "--output-dir", "straight", *identity).code == 0
    half = start("init", recipe, "--output-dir", "halves", *identity, pace_s=0.3)
    stepped = half.wait_for("step", 60)
    wait_until(lambda: time.time() > stepped["t"] + 0.15, 1)  # in the midst of the next batch, of 0.3 s
    half.send_signal(signal.SIGTERM)
    assert half.exit_code(30) == 143
    [written] = (tmp_path / "halves/checkpoints").glob("step-*/state.json")
    state = json.loads(written.read_text())
    _, samples, positions = state["own"]
    assert samples
    assert positions == [state["samples"], state["samples"] + samples]
    assert trahiv("init", recipe, "--output-dir", "halves", *identity).code == 0
    straight, halves = (
        load_file(tmp_path / run / "final/model.safetensors") for run in ("straight", "halves")
    )
    assert straight.keys() == halves.keys()
    assert max(float((straight[name] - halves[name]).abs().max()) for name in straight) <= 1e-6
    _, disagreements = furthest_of([tmp_path / run for run in ("straight", "halves")])
    assert disagreements == [], "they have trained the same samples"


def test_killed_peers_repeat_no_shard(start_paced, endless, tmp_path):
    """All tests of `tests/simulation` check the samples of data that is not streamed."""
    shards, num_lines = 6, 60
    for number in range(shards):
        lines = (json.dumps({"text": f"file {number}, line {line} " * 4}) for line in range(num_lines))
        (tmp_path / f"part-{number}.jsonl").write_text("\n".join(lines))
    data = {"datasets": [{"path": str(tmp_path / "part-*.jsonl")}], "streaming": True}
    recipe = endless(training__save_steps=5, data=data)
    first = start_paced("init", recipe, "--output-dir", "first", *LOOPBACK)
    join = ("join", recipe, "--peer", first.address, "--output-dir", "second", "--yes", *LOOPBACK)
    for is_last in (False, False, True):
        second = start_paced(*join)
        second.wait_for_group()
        if not is_last:
            second.kill()
    first.wait_for("step", 120, data=lambda data: data["passes"] >= 1 and data["shards"] == shards)
    for peer in (second, first):
        peer.send_signal(signal.SIGTERM)
        peer.wait_for("done", 30)
        assert peer.exit_code(20) == 143
    ledger, _ = furthest_of([tmp_path / "first"])
    assert ledger.duplicates == 0
    whole, *_ = ledger.covered.spans
    assert whole[0] == 0
    assert whole[1] >= shards * SHARD, "the first pass"
    assert sum(one["samples"] or 0 for one in first.steps) > shards * num_lines
