"""The owner's hand over a swarm that trains: who is invited, who is taken out; no round is lost by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import LOOPBACK, Peer

pytestmark = pytest.mark.timeout(400)

KICK_S = 30.0
"""So soon a peer that is taken out is out everywhere."""

Command = Callable[..., Any]


def together(*peers: Peer, more: int = 3) -> None:
    """Wait until all have taken a few more steps in one group."""
    before = max(peer.steps[-1]["step"] if peer.steps else 0 for peer in peers)
    for peer in peers:
        peer.wait_for_group(len(peers), 120, step=lambda step: step >= before + more)


def test_invitations_are_closed_and_who_is_taken_out_stays_out(pair, start_paced, trahiv):
    first, second, _, join = pair
    joins = ("join", "--yes", *LOOPBACK, "--output-dir")
    made = trahiv("invite", "--once", "--output-dir", "first", "--format", "json")
    [once] = [event for event in made.events if event["event"] == "invitation"]
    assert once["once"] is True and "trahiv1:" not in made.out + made.err
    third = start_paced(*joins, "third", "--peer", f"@{once['path']}")
    together(first, second, third)

    old = Path(first.address[1:]).read_text(encoding="ascii").strip()
    made = trahiv("invite", "--close", "all", "--expires", "1h", "--output-dir", "first", "--format", "json")
    [fresh] = [event for event in made.events if event["event"] == "invitation"]
    together(first, second, third)
    late = trahiv(*joins, "late", "--peer", old)
    assert late.code == 5 and "closed" in late.err
    second.stop()
    second = start_paced(*joins, "second", "--peer", "@second/invited-by")
    together(first, second, third)
    listed = trahiv("members", "--peer", f"@{fresh['path']}", "--format", "json").events
    there = {event["peer_id"] for event in listed if event["event"] == "member" and event["is_there"]}
    assert there == {peer.wait_for("ready", 60)["peer_id"] for peer in (first, second, third)}

    id_ = third.wait_for("ready", 60)["peer_id"]
    kicked, at = trahiv("kick", id_[-6:], "--output-dir", "first"), time.monotonic()
    assert kicked.code == 0 and id_ in kicked.out
    assert third.exit_code(KICK_S + 30) == 5
    assert time.monotonic() - at < KICK_S
    [error] = [event for event in third.events if event["event"] == "error"]
    assert error["code"] == "not-admitted" and "taken this peer out" in error["message"]
    together(first, second)
    after = first.steps[-1]["step"]
    again, other = (trahiv(*joins, name, "--peer", "@third/invited-by") for name in ("third", "other"))
    assert again.code == 5 and "taken this peer out" in again.err
    assert other.code == 5 and "used before" in other.err, "under another name"
    together(first, second)
    for peer in (first, second):
        assert all(id_ not in step["round"]["group"] for step in peer.steps if step["step"] > after)
    for peer in (first, second, third):
        assert all(step["round"]["committed"] for step in peer.steps if step["round"])
    assert [event for event in first.events if event["event"] == "error"] == []
