"""Peers that end in any way and start again with the same command: where they go on, and with whom."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import LOOPBACK, Peer, wait_until
from trahiv_cli.swarm.acquaintances import FILE, Acquaintances

pytestmark = pytest.mark.timeout(240)

STARTS_WITHIN_S = 60.0
SAVING = {"training__save_steps": 2}
"""A checkpoint every other step."""

saving_pair = pytest.mark.parametrize("pair", [SAVING], indirect=True, ids=["saving"])


def require_saved_and_met(pair: Any) -> None:
    """Wait until both have written down a checkpoint and each other."""
    for peer, folder in zip(pair[:2], ("first", "second"), strict=True):
        peer.wait_for("checkpoint", 60)
        wait_until(lambda peer=peer, folder=folder: Acquaintances(Path(peer.cwd, folder, FILE)).addresses)


def saved(*peers: Peer) -> int:
    return max(one["step"] for peer in peers for one in peer.events if one["event"] == "checkpoint")


def id_of(peer: Peer) -> str:
    return str(peer.wait_for("ready", 60)["peer_id"])


@saving_pair
def test_the_first_peer_finds_the_swarm_that_went_on_without_it_and_its_line_is_good_again(
    start_paced: Callable[..., Peer], pair: Any
) -> None:
    first, second, init, _ = pair
    require_saved_and_met(pair)
    first.kill()
    left_at = first.steps[-1]["step"]
    went_on = second.wait_for("step", 60, step=lambda step: step > left_at + 2)
    again = start_paced(*init)
    joined = again.wait_for("joined", STARTS_WITHIN_S)
    assert joined["source"] == "swarm" and joined["step"] >= went_on["step"]
    assert "further than this run's checkpoint" in joined["why"]
    assert (again.maddr, id_of(again)) == (first.maddr, id_of(first))
    again.wait_for_group()


@saving_pair
def test_all_that_were_killed_at_once_go_on_from_what_the_furthest_had_saved(
    start_paced: Callable[..., Peer], pair: Any
) -> None:
    first, second, init, join = pair
    require_saved_and_met(pair)
    for peer in (first, second):
        peer.send_signal(signal.SIGKILL)
    furthest = max(map(saved, (first, second)))
    peers = [start_paced(*init), start_paced(*join)]
    joined = [peer.wait_for("joined", STARTS_WITHIN_S) for peer in peers]
    assert [one["step"] for one in joined] == [furthest, furthest]
    assert "checkpoint" in [one["source"] for one in joined]
    for peer, before in zip(peers, (first, second), strict=True):
        assert id_of(peer) == id_of(before)
        peer.wait_for_group()
        assert peer.steps[0]["step"] > furthest


@saving_pair
def test_a_joiner_goes_on_with_the_same_line_when_nobody_of_the_swarm_is_left(
    start_paced: Callable[..., Peer], pair: Any
) -> None:
    first, second, _, join = pair
    require_saved_and_met(pair)
    first.kill()
    second.kill()
    again = start_paced(*join)
    joined = again.wait_for("joined", STARTS_WITHIN_S)
    assert (joined["source"], joined["step"]) == ("checkpoint", saved(second))
    assert "no other peer is there" in joined["why"]
    assert again.wait_for("warning", 1)["code"] == "unreachable"
    again.wait_for("step", 60, step=joined["step"] + 1)


# -- disks and files that fail ---------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 100 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_fills_up_is_said_and_training_goes_on_until_there_is_room(
    start_paced: Callable[..., Peer], endless: Callable[..., Path], small_disk: Path
) -> None:
    peer = start_paced("init", endless(**SAVING), "--output-dir", small_disk / "run", *LOOPBACK)
    peer.wait_for("checkpoint", 60)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass
    warning = peer.wait_for("warning", 60, code="checkpoint")
    assert "No space left" in warning["message"] and "Training goes on" in warning["message"]
    at = peer.steps[-1]["step"]
    peer.wait_for("step", 30, step=at + 2)
    filler.unlink()
    peer.wait_for("checkpoint", 30, step=lambda step: step > at)
    peer.send_signal(signal.SIGTERM)
    done = peer.wait_for("done", 20)
    assert peer.exit_code(15) == 143
    recorded = [json.loads(line) for line in (small_disk / "run" / "events.jsonl").read_text().splitlines()]
    assert recorded[-1]["event"] == "done" and recorded[-1]["step"] == done["step"]


def test_damaged_checkpoints_are_passed_over_and_no_fresh_model_takes_the_place_of_a_trained_one(
    start_paced: Callable[..., Peer], trahiv: Callable[..., Any], endless: Callable[..., Path], tmp_path: Path
) -> None:
    command = ("init", endless(**SAVING), "--output-dir", "run", *LOOPBACK)
    peer = start_paced(*command)
    peer.wait_for("checkpoint", 60, step=lambda step: step >= 4)
    peer.kill()
    checkpoints = (tmp_path / "run" / "checkpoints").glob("step-*")
    *_, before, newest = sorted(checkpoints, key=lambda path: int(path.name.removeprefix("step-")))
    content = bytearray((newest / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "weights.safetensors").write_bytes(content)
    again = start_paced(*command)
    warning = again.wait_for("warning", 60, code="checkpoint")
    assert newest.name in warning["message"] and "weights.safetensors" in warning["message"]
    joined = again.wait_for("joined", 60)
    assert (joined["source"], f"step-{joined['step']}") == ("checkpoint", before.name)
    again.kill()

    for state in (tmp_path / "run" / "checkpoints").glob("step-*/state.json"):
        state.write_text("{}")
    refused = trahiv(*command)
    assert refused.code == 3
    assert "All checkpoints in run are damaged" in refused.err


# -- when to begin, when to leave ------------------------------------------------------------------


def test_the_first_step_waits_for_as_many_peers_as_the_recipe_wants_and_says_if_they_do_not_come(
    start_paced: Callable[..., Peer], endless: Callable[..., Path]
) -> None:
    wanted = endless(swarm__min_peers=2)
    first = start_paced("init", wanted, "--output-dir", "first", *LOOPBACK)
    alone = start_paced("init", wanted, "--output-dir", "alone", "--wait", "3s", *LOOPBACK)
    waits = first.wait_for("waiting", 60, what="2 peers to be there (there are 1)")
    assert waits["until_seconds"] <= 3600
    second = start_paced("join", "--peer", first.address, "--output-dir", "second", "--yes", *LOOPBACK)
    for peer in (first, second):
        step = peer.wait_for("step", 60)
        assert (step["step"], len(step["round"]["group"])) == (1, 2)
    assert alone.wait_for("warning", 60, code="min-peers")["message"].startswith("1 of 2 peers came in 3 s")
    alone.wait_for("step", 30, step=2)
