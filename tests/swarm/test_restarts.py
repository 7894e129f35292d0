"""Peers that end in any way and start again with the same command: where they go on, and with whom."""

from __future__ import annotations

import signal
from collections.abc import Callable
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
        data={"datasets": [{"path": "builtin/python-stdlib"}]},
        training__max_steps=100_000,
        training__save_steps=2,
        hivemind_config__opt__target_batch_size=400,
    )


def has_met(peer: Any, folder: str) -> bool:
    return bool(Acquaintances(Path(peer.cwd, folder, FILE)).addresses)


@pytest.fixture
def pair(
    start: Callable[..., Any], long: Path, wait_until: Callable[..., None]
) -> tuple[Any, Any, list[Any]]:
    """Two peers that have met, have taken steps together and saved them; and the second one's command."""
    first = start("init", long, "--output-dir", "first", *LOOPBACK)
    command = ["join", "--peer", first.address, "--output-dir", "second", "--yes", *LOOPBACK]
    second = start(*command)
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
    start: Callable[..., Any], pair: tuple[Any, Any, list[Any]], long: Path
) -> None:
    first, second, _ = pair
    kill(first)
    left_at = last_step(first, second)
    went_on = second.wait_for("step", 60, step=lambda step: step > left_at + 1)
    again = start("init", long, "--output-dir", "first", *LOOPBACK)
    joined = again.wait_for("joined", STARTS_WITHIN_S)
    assert joined["source"] == "swarm" and joined["step"] >= went_on["step"]
    assert "further than this run's checkpoint" in joined["why"]
    assert again.address == first.address
    again.wait_for("step", 60, round=lambda one: bool(one) and len(one["group"]) == 2)


def test_all_that_were_killed_at_once_go_on_from_what_the_furthest_had_saved(
    start: Callable[..., Any], pair: tuple[Any, Any, list[Any]], long: Path
) -> None:
    first, second, command = pair
    kill(first, second)
    furthest = saved(first, second)
    peers = [start("init", long, "--output-dir", "first", *LOOPBACK), start(*command)]
    joined = [peer.wait_for("joined", STARTS_WITHIN_S) for peer in peers]
    assert [one["step"] for one in joined] == [furthest, furthest]
    assert "checkpoint" in [one["source"] for one in joined]
    for peer in peers:
        peer.wait_for("step", 60, round=lambda one: bool(one) and len(one["group"]) == 2)
        assert min(one["step"] for one in peer.events if one["event"] == "step") > furthest


def test_a_joiner_goes_on_with_the_same_line_when_nobody_of_the_swarm_is_left(
    start: Callable[..., Any], pair: tuple[Any, Any, list[Any]]
) -> None:
    first, second, command = pair
    kill(first, second)
    again = start(*command)
    joined = again.wait_for("joined", STARTS_WITHIN_S)
    assert (joined["source"], joined["step"]) == ("checkpoint", saved(second))
    assert "no other peer is there" in joined["why"]
    assert again.wait_for("warning", 1)["code"] == "unreachable"
    again.wait_for("step", 60, step=joined["step"] + 1)
