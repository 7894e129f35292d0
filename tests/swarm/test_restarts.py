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

from trahiv_cli.swarm.acquaintances import FILE, Acquaintances

pytestmark = pytest.mark.timeout(240)

LOOPBACK = ("--host-maddr", "/ip4/127.0.0.1/tcp/0")
STARTS_WITHIN_S = 60.0


@pytest.fixture
def long(tiny_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    """A recipe that nobody will see the end of, with a checkpoint every other step."""
    return tiny_recipe(
        tmp_path,
        data={"datasets": [{"path": "builtin/trahiv"}]},
        training__max_steps=100_000,
        training__save_steps=2,
        hivemind_config__opt__target_batch_size=24,
        hivemind_config__opt__tracker_opts={"metadata_expiration": 8.0},
    )


def has_met(peer: Any, folder: str) -> bool:
    return bool(Acquaintances(Path(peer.cwd, folder, FILE)).addresses)


@pytest.fixture
def pair(
    start_paced: Callable[..., Any], long: Path, wait_until: Callable[..., None]
) -> tuple[Any, Any, list[Any]]:
    """Two peers that have met, have taken steps together and saved them; and the second one's command."""
    first = start_paced("init", long, "--output-dir", "first", *LOOPBACK)
    command = ["join", "--peer", first.address, "--output-dir", "second", "--yes", *LOOPBACK]
    second = start_paced(*command)
    for peer, folder in ((first, "first"), (second, "second")):
        peer.wait_for("step", 60, round=lambda one: bool(one) and len(one["group"]) == 2)
        peer.wait_for("checkpoint", 60)
        wait_until(lambda peer=peer, folder=folder: has_met(peer, folder))
    return first, second, command


def kill(*peers: Any) -> None:
    for peer in peers:
        peer.send_signal(signal.SIGKILL)
    for peer in peers:
        assert peer.exit_code(10) == -signal.SIGKILL


def last_step(*peers: Any) -> int:
    return max(one["step"] for peer in peers for one in peer.events if one["event"] == "step")


def saved(*peers: Any) -> int:
    return max(one["step"] for peer in peers for one in peer.events if one["event"] == "checkpoint")


def test_the_first_peer_finds_the_swarm_that_went_on_without_it_and_its_line_is_good_again(
    start_paced: Callable[..., Any], pair: tuple[Any, Any, list[Any]], long: Path
) -> None:
    first, second, _ = pair
    kill(first)
    left_at = last_step(first, second)
    went_on = second.wait_for("step", 60, step=lambda step: step > left_at + 1)
    again = start_paced("init", long, "--output-dir", "first", *LOOPBACK)
    joined = again.wait_for("joined", STARTS_WITHIN_S)
    assert joined["source"] == "swarm" and joined["step"] >= went_on["step"]
    assert "further than this run's checkpoint" in joined["why"]
    assert again.maddr == first.maddr
    again.wait_for("step", 60, round=lambda one: bool(one) and len(one["group"]) == 2)


def test_all_that_were_killed_at_once_go_on_from_what_the_furthest_had_saved(
    start_paced: Callable[..., Any], pair: tuple[Any, Any, list[Any]], long: Path
) -> None:
    first, second, command = pair
    kill(first, second)
    furthest = saved(first, second)
    peers = [start_paced("init", long, "--output-dir", "first", *LOOPBACK), start_paced(*command)]
    joined = [peer.wait_for("joined", STARTS_WITHIN_S) for peer in peers]
    assert [one["step"] for one in joined] == [furthest, furthest]
    assert "checkpoint" in [one["source"] for one in joined]
    for peer in peers:
        peer.wait_for("step", 60, round=lambda one: bool(one) and len(one["group"]) == 2)
        assert min(one["step"] for one in peer.events if one["event"] == "step") > furthest


def test_a_joiner_goes_on_with_the_same_line_when_nobody_of_the_swarm_is_left(
    start_paced: Callable[..., Any], pair: tuple[Any, Any, list[Any]]
) -> None:
    first, second, command = pair
    kill(first, second)
    again = start_paced(*command)
    joined = again.wait_for("joined", STARTS_WITHIN_S)
    assert (joined["source"], joined["step"]) == ("checkpoint", saved(second))
    assert "no other peer is there" in joined["why"]
    assert again.wait_for("warning", 1)["code"] == "unreachable"
    again.wait_for("step", 60, step=joined["step"] + 1)


def test_a_finished_run_goes_on_when_it_is_given_more_steps(
    trahiv: Callable[..., Any], tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    command = ("init", tiny_recipe(tmp_path, training__max_steps=3), "--output-dir", "run", *LOOPBACK)
    assert trahiv(*command).code == 0
    more = trahiv(*command, "--set", "training.max_steps=5")
    assert more.code == 0
    assert "Goes on from this run's checkpoint of step 3: no other peer is there." in more.out
    assert "done at step 5 (max_steps)" in more.out


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
    start_paced: Callable[..., Any], long: Path, small_disk: Path
) -> None:
    peer = start_paced("init", long, "--output-dir", small_disk / "run", *LOOPBACK)
    peer.wait_for("checkpoint", 60)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass
    warning = peer.wait_for("warning", 60, code="checkpoint")
    assert "No space left" in warning["message"] and "Training goes on" in warning["message"]
    at = last_step(peer)
    peer.wait_for("step", 30, step=at + 2)
    filler.unlink()
    peer.wait_for("checkpoint", 30, step=lambda step: step > at)
    peer.send_signal(signal.SIGTERM)
    done = peer.wait_for("done", 20)
    assert peer.exit_code(15) == 143
    recorded = [json.loads(line) for line in (small_disk / "run" / "events.jsonl").read_text().splitlines()]
    assert recorded[-1]["event"] == "done" and recorded[-1]["step"] == done["step"]


def test_a_checkpoint_that_was_damaged_is_passed_over_for_the_one_before(
    start_paced: Callable[..., Any], long: Path, tmp_path: Path
) -> None:
    peer = start_paced("init", long, "--output-dir", "run", *LOOPBACK)
    peer.wait_for("checkpoint", 60, step=lambda step: step >= 6)
    kill(peer)
    *_, before, newest = sorted(
        (tmp_path / "run" / "checkpoints").glob("step-*"),
        key=lambda path: int(path.name.removeprefix("step-")),
    )
    weights = newest / "weights.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    again = start_paced("init", long, "--output-dir", "run", *LOOPBACK)
    warning = again.wait_for("warning", 60, code="checkpoint")
    assert newest.name in warning["message"] and "weights.safetensors" in warning["message"]
    joined = again.wait_for("joined", 60)
    assert (joined["source"], f"step-{joined['step']}") == ("checkpoint", before.name)


def test_with_every_checkpoint_damaged_no_fresh_model_takes_the_trained_one_s_place(
    start_paced: Callable[..., Any], trahiv: Callable[..., Any], long: Path, tmp_path: Path
) -> None:
    peer = start_paced("init", long, "--output-dir", "run", *LOOPBACK)
    peer.wait_for("checkpoint", 60, step=4)
    kill(peer)
    for state in (tmp_path / "run" / "checkpoints").glob("step-*/state.json"):
        state.write_text("{}")
    again = trahiv("init", long, "--output-dir", "run", *LOOPBACK)
    assert again.code == 3
    assert "All checkpoints in run are damaged" in again.err


# -- when to begin, when to leave ------------------------------------------------------------------


def test_the_first_step_waits_for_as_many_peers_as_the_recipe_wants(
    start_paced: Callable[..., Any], long: Path
) -> None:
    together = ("--set", "swarm.min_peers=2", *LOOPBACK)
    first = start_paced("init", long, "--output-dir", "first", *together)
    waits = first.wait_for(
        "waiting", 60, what=lambda what: what.startswith("1 more peer(s): 1 of 2 are here")
    )
    second = start_paced("join", "--peer", first.address, "--output-dir", "second", "--yes", *LOOPBACK)
    for peer in (first, second):
        step = peer.wait_for("step", 60)
        assert (step["step"], len(step["round"]["group"])) == (1, 2)
    assert waits["until_seconds"] <= 3600


def test_who_waits_in_vain_says_so_and_begins(start_paced: Callable[..., Any], long: Path) -> None:
    peer = start_paced("init", long, "--set", "swarm.min_peers=3", "--wait", "3s", *LOOPBACK)
    warning = peer.wait_for("warning", 60, code="min-peers")
    assert warning["message"] == "1 of 3 peers came in 3 s; training begins."
    peer.wait_for("step", 30, step=2)


def test_a_peer_whose_budget_is_spent_leaves_in_good_order_and_the_others_go_on(
    start_paced: Callable[..., Any],
    pair: tuple[Any, Any, list[Any]],
    assert_nothing_left: Callable[..., None],
) -> None:
    first, _, _ = pair
    guest = start_paced(
        "join", "--peer", first.address, "--output-dir", "guest", "--budget", "2 steps", "--yes", *LOOPBACK
    )
    done = guest.wait_for("done", 90)
    assert done["reason"] == "budget" and "--budget" in done["resume"]
    assert guest.exit_code(15) == 0
    assert_nothing_left(guest.pid)
    assert sum(one["event"] == "step" and one["my_samples"] > 0 for one in guest.events) == 2
    assert Path(guest.cwd, done["path"]).name == f"step-{done['step']}"
    left_at = last_step(first)
    first.wait_for("step", 30, step=lambda step: step > left_at + 1)
    assert not [one for one in first.events if one["event"] == "warning" and one["code"] == "no-group"]
