"""First-time stories, each from the words that a user types."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from trahiv_cli.swarm.invitation import read_owner
from trahiv_cli.swarm.policy import POLICY_FILE, PolicyBook
from trahiv_cli.swarm.roll import closing, read_roll

pytestmark = pytest.mark.timeout(240)

Command = Callable[..., Any]


# -- the run's folder, and the line to join by ----------------------------------------------------

ON_LOOPBACK = ("--host-maddr", "/ip4/127.0.0.1/tcp/0")


def printed_line(peer: Any) -> str:
    """What `init` prints for a person: the line to join by."""
    ready = peer.wait_for("ready", timeout=60)
    return f"trahiv join --peer {Path(ready['invitation']).read_text(encoding='ascii').strip()}"


EVERYBODYS = {"datasets": [{"path": "builtin/trahiv"}]}
"""Data that a joiner need not bring."""


def of_two(round_: Any) -> bool:
    return bool(round_) and len(round_["group"]) == 2


@pytest.fixture
def long_recipe(tiny_recipe: Command, tmp_path: Path) -> Path:
    """A recipe whose run nobody will see the end of, in rounds."""
    path: Path = tiny_recipe(tmp_path, data=EVERYBODYS, training__max_steps=100_000, swarm__mode="sync")
    return path


def test_two_terminals_in_one_folder_just_work(
    start_paced: Command, tiny_recipe: Command, tmp_path: Path
) -> None:
    swarm = {"mode": "sync", "min_peers": 2}
    recipe = tiny_recipe(tmp_path, data=EVERYBODYS, training__max_steps=30, swarm=swarm)
    first = start_paced("init", recipe.name)
    second = start_paced(*printed_line(first).split()[1:], "--yes", *ON_LOOPBACK)
    folder = second.wait_for("folder", timeout=60)
    for peer in (first, second):
        assert peer.wait_for("done", timeout=120)["reason"] == "max_steps"
        assert peer.exit_code(timeout=20) == 0
    run = first.wait_for("ready", timeout=1)["run_id"]
    assert folder["path"] == f"runs/{run}-2"
    assert folder["message"] == f"This peer's folder is runs/{run}-2: runs/{run} is that of another peer."
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {run, f"{run}-2"}
    assert all((path / "final").is_dir() for path in (tmp_path / "runs").iterdir())
    assert first.wait_for("ready", timeout=1)["peer_id"] != second.wait_for("ready", timeout=1)["peer_id"]


def test_a_second_init_is_refused_and_the_first_is_unharmed(
    start_paced: Command, trahiv: Command, long_recipe: Path, tmp_path: Path
) -> None:
    first = start_paced("init", long_recipe.name)
    line = printed_line(first)
    first.wait_for("step", timeout=60, step=2)
    run = first.wait_for("ready", timeout=1)["run_id"]
    kept = {name: (tmp_path / "runs" / run / name).read_bytes() for name in ("identity.key", "invitation")}
    again = trahiv("init", long_recipe.name)
    assert again.code == 3 and not again.left
    assert f"A peer runs in runs/{run} already (process {first.pid}); nothing was changed." in again.err
    assert f"trahiv join --peer @runs/{run}/invitation" in again.err and "--output-dir DIR" in again.err
    assert again.out == ""
    assert kept == {name: (tmp_path / "runs" / run / name).read_bytes() for name in kept}
    friend = start_paced(*line.split()[1:], "--yes", *ON_LOOPBACK, "--output-dir", "friend")
    for peer in (first, friend):
        peer.wait_for("step", timeout=90, round=of_two)


def test_the_same_command_goes_on_after_a_peer_was_killed(start_paced: Command, long_recipe: Path) -> None:
    killed = start_paced("init", long_recipe.name, "--set", "training.save_steps=1")
    killed.wait_for("checkpoint", timeout=60)
    os.kill(killed.pid, signal.SIGKILL)
    killed.exit_code(timeout=10)
    again = start_paced("init", long_recipe.name, "--set", "training.save_steps=1")
    assert again.wait_for("joined", timeout=60)["source"] == "checkpoint"
    assert again.wait_for("ready", timeout=1)["peer_id"] == killed.wait_for("ready", timeout=1)["peer_id"]


def test_who_joins_again_after_a_stop_finds_its_own_folder(
    start_paced: Command, long_recipe: Path, tmp_path: Path
) -> None:
    """Even if the peer that started the swarm, whose folder is beside it, was stopped meanwhile."""
    first = start_paced("init", long_recipe.name)
    line = (*printed_line(first).split()[1:], "--yes", *ON_LOOPBACK)
    second = start_paced(*line)
    third = start_paced(*line, "--output-dir", "elsewhere")
    for peer in (second, third):
        peer.wait_for("step", timeout=120, round=lambda round_: bool(round_))
    for peer in (first, second):
        peer.stop()
    done = second.wait_for("done", timeout=1)
    run = first.wait_for("ready", timeout=1)["run_id"]
    own = f"--output-dir runs/{run}-2 --peer @runs/{run}-2/invited-by"
    assert done["resume"] == f"trahiv join --yes {' '.join(ON_LOOPBACK)} --format json {own}"
    again = start_paced(*line)  # only the third peer is there
    assert again.wait_for("folder", timeout=60)["path"] == f"runs/{run}-2"
    assert again.wait_for("ready", timeout=60)["peer_id"] == second.wait_for("ready", timeout=1)["peer_id"]
    back = start_paced("init", long_recipe.name)
    assert back.wait_for("ready", timeout=60)["peer_id"] == first.wait_for("ready", timeout=1)["peer_id"]
    again.wait_for("step", timeout=60, peers=3)


def test_a_line_that_a_mail_has_wrapped_and_quoted_is_understood(
    start_paced: Command, long_recipe: Path, children_of: Command
) -> None:
    first = start_paced("init", long_recipe.name)
    line = printed_line(first)
    mailed = f"“{line[:70]}\n> {line[70:140]}\n> {line[140:]}”"
    friend = start_paced("join", mailed, "--yes", *ON_LOOPBACK)
    for peer in (first, friend):
        peer.wait_for("step", timeout=90, round=of_two)
    processes = [psutil.Process(friend.pid), *children_of(friend.pid)]
    words = [word for process in processes for word in process.cmdline()]
    assert "join" in words
    assert not any(line[at : at + 20] in word for at in range(60, 160, 20) for word in words)
    friend.stop()
    assert "trahiv1:" not in str(friend.events) + friend.err


@pytest.mark.timeout(400)
def test_a_joiner_that_the_owner_refuses_meanwhile_is_told_why(
    start_paced: Command, trahiv: Command, long_recipe: Path, tmp_path: Path
) -> None:
    """While it loads its libraries: others that do not speak with it look as if they had left."""
    first = start_paced("init", long_recipe.name, "--output-dir", "first")
    first.wait_for("step", timeout=60, step=2)
    joining = ("join", "--yes", *ON_LOOPBACK, "--output-dir")

    kicked = start_paced(*joining, "kicked", first.address)
    peer_id = kicked.wait_for("ready", timeout=60)["peer_id"]
    assert trahiv("kick", peer_id, "--output-dir", "first").code == 0
    assert kicked.exit_code(timeout=90) == 5
    assert "taken this peer out" in refusal_of(kicked)

    fresh = trahiv("invite", "--output-dir", "first", "--format", "json").events[0]
    late = start_paced(*joining, "late", f"@{fresh['path']}")
    peer_id = late.wait_for("ready", timeout=60)["peer_id"]
    owner = read_owner(tmp_path / "first")
    assert owner is not None
    # As `trahiv invite --close all` does that has not seen this one yet.
    seen = {peer: member for peer, member in read_roll(tmp_path / "first").items() if peer != peer_id}
    book = PolicyBook(owner.public, tmp_path / "first" / POLICY_FILE)
    book.decide(owner, lambda policy: closing(None, seen, policy))
    assert late.exit_code(timeout=90) == 5
    assert "its invitation was closed" in refusal_of(late)


def refusal_of(peer: Any) -> str:
    [error] = [event for event in peer.events if event["event"] == "error"]
    assert error["code"] == "not-admitted"
    return str(error["message"])
