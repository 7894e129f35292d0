"""The owner's hand over a swarm that trains: who is invited, who is taken out; no round is lost by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)

LOOPBACK = ("--host-maddr", "/ip4/127.0.0.1/tcp/0")
KICK_S = 30.0
"""So soon a peer that is taken out is out everywhere."""

Command = Callable[..., Any]


def steps_of(peer: Any) -> list[dict[str, Any]]:
    return [event for event in peer.events if event["event"] == "step"]


def require_no_round_lost(*peers: Any) -> None:
    for peer in peers:
        assert [event for event in peer.events if event["event"] in ("warning", "error")] == []
        assert all(step["round"]["committed"] for step in steps_of(peer) if step["round"])


def together(*peers: Any, more: int = 3) -> None:
    """Wait until all have taken a few more steps in one group."""
    before = max(steps_of(peer)[-1]["step"] if steps_of(peer) else 0 for peer in peers)

    def is_of_all(round_: Any) -> bool:
        return round_ and len(round_["group"]) == len(peers)

    for peer in peers:
        peer.wait_for("step", 120, step=lambda step: step >= before + more, round=is_of_all)


@pytest.fixture
def recipe(tiny_recipe: Command, tmp_path: Path) -> Path:
    path: Path = tiny_recipe(
        tmp_path, training__max_steps=10_000, swarm__mode="sync", hivemind_config__opt__target_batch_size=24
    )
    return path


@pytest.fixture
def swarm(start_paced: Command, trahiv: Command, recipe: Path) -> tuple[Any, Any, Any]:
    """Three peers that train together; the third came by an invitation for one."""
    first = start_paced("init", recipe, "--output-dir", "first")
    joins = ("join", recipe, "--yes", *LOOPBACK, "--output-dir")
    second = start_paced(*joins, "second", "--peer", first.address)
    made = trahiv("invite", "--once", "--output-dir", "first", "--format", "json")
    [once] = [event for event in made.events if event["event"] == "invitation"]
    assert once["once"] is True and "trahiv1:" not in made.out + made.err
    third = start_paced(*joins, "third", "--peer", f"@{once['path']}")
    together(first, second, third)
    return first, second, third


def test_who_is_taken_out_is_out_of_the_next_round_everywhere_and_after_restarts(
    swarm: tuple[Any, Any, Any], start_paced: Command, trahiv: Command, recipe: Path
) -> None:
    first, second, third = swarm
    id_ = third.wait_for("ready", 60)["peer_id"]
    listed = trahiv("members", "--output-dir", "first", "--format", "json").events
    there = {event["peer_id"] for event in listed if event["event"] == "member" and event["is_there"]}
    assert there == {peer.wait_for("ready", 60)["peer_id"] for peer in swarm}
    kicked = trahiv("kick", id_[-6:], "--output-dir", "first")
    at = time.monotonic()
    assert kicked.code == 0 and id_ in kicked.out
    assert third.exit_code(KICK_S + 30) == 5
    assert time.monotonic() - at < KICK_S
    [error] = [event for event in third.events if event["event"] == "error"]
    assert error["code"] == "not-admitted" and "taken this peer out" in error["message"]
    together(first, second)
    after = steps_of(first)[-1]["step"]
    line = ("join", recipe, "--peer", "@third/invited-by", "--yes", *LOOPBACK, "--output-dir")
    again, other = trahiv(*line, "third"), trahiv(*line, "other")
    assert again.code == 5 and "taken this peer out" in again.err
    assert other.code == 5 and "used before" in other.err, "under another name"
    together(first, second)
    assert steps_of(first)[-1]["step"] > after
    for peer in (first, second):
        groups = [step["round"]["group"] for step in steps_of(peer) if step["round"] and step["step"] > after]
        assert all(id_ not in group for group in groups)


def test_all_invitations_are_closed_under_training_and_no_round_is_lost(
    swarm: tuple[Any, Any, Any], start_paced: Command, trahiv: Command, recipe: Path
) -> None:
    first, second, third = swarm
    old = Path(first.address[1:]).read_text(encoding="ascii")
    made = trahiv("invite", "--close", "all", "--expires", "1h", "--output-dir", "first", "--format", "json")
    assert made.code == 0
    [fresh] = [event for event in made.events if event["event"] == "invitation"]
    together(first, second, third, more=5)
    late = trahiv("join", recipe, "--peer", old.strip(), "--output-dir", "late", "--yes", *LOOPBACK)
    assert late.code == 5 and "closed" in late.err
    second.stop()
    line = ("join", recipe, "--peer", "@second/invited-by", "--output-dir", "second", "--yes", *LOOPBACK)
    second = start_paced(*line)
    together(first, second, third)
    assert [event for event in first.events if event["event"] == "error"] == []
    scout = trahiv("members", "--peer", f"@{fresh['path']}", "--format", "json")
    assert scout.code == 0 and len([e for e in scout.events if e["event"] == "member" and e["is_there"]]) == 3
    assert all(step["round"]["committed"] for step in steps_of(third) if step["round"])
