"""A recipe, its folder and its data, from the words that people type to what they are told."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from tests.kit.commands import LOOPBACK
from tests.kit.recipes import write_tiny

BUDGET = ("--budget", "1 steps", "--format", "json")


def written(folder: Path, **changes: Any) -> Path:
    """Write a recipe whose data is named relative to it."""
    return Path(write_tiny(folder, data__datasets=[{"path": "text.txt"}], **changes))


def event_of(result: Any, name: str) -> dict[str, Any]:
    """The only event of that name, of a command that ended well and warned of no file."""
    assert (result.code, result.left) == (0, ()), result.out + result.err
    assert not [one for one in result.events if one["event"] == "warning" and one["code"] in ("path", "data")]
    (event,) = [event for event in result.events if event["event"] == name]
    return event


def test_a_recipe_is_started_from_anywhere_and_moved_with_its_data(trahiv, tmp_path):
    written(tmp_path / "project")
    first = trahiv("init", "project/tiny.yaml", *BUDGET)
    assert event_of(first, "joined")["source"] == "fresh"
    (tmp_path / "project").rename(tmp_path / "moved")
    second = trahiv("init", "moved/tiny.yaml", *BUDGET)
    assert event_of(second, "ready")["run_id"] == event_of(first, "ready")["run_id"]
    assert (event_of(second, "joined")["source"], event_of(second, "joined")["step"]) == ("checkpoint", 1)


def test_a_joiner_names_the_folder_in_which_its_copy_is(start_paced, tmp_path):
    written(tmp_path / "alice", training__max_steps=100_000)
    alice = start_paced("init", "tiny.yaml", cwd=tmp_path / "alice")
    text = (tmp_path / "alice" / "text.txt").read_text()
    bob, own = tmp_path / "bob", tmp_path / "bob" / "downloads" / "new" / "any name.txt"
    own.parent.mkdir(parents=True)
    own.write_text(text)
    (bob / "downloads" / "decoy.txt").write_text(text.swapcase())
    join = ("join", "--peer", alice.address, "--yes", *LOOPBACK)
    peer = start_paced(*join, "--files", "downloads", cwd=bob)
    assert peer.wait_for("joined", 90)["peers"] == 2
    resolved = json.loads((bob / "runs" / peer.wait_for("ready", 1)["run_id"] / "recipe.json").read_text())
    assert resolved["data"]["datasets"][0]["path"] == str(own)


def test_a_recipe_from_a_pipe_goes_on_by_the_line_that_is_said(trahiv, tmp_path):
    recipe = written(tmp_path, name=None)
    given = recipe.read_text()
    recipe.rename(tmp_path / "template.txt")
    first = trahiv("init", "-", *BUDGET, prefix=("sh", "-c", 'exec "$@" < template.txt', "sh"))
    run_id = event_of(first, "ready")["run_id"]
    assert run_id.startswith("recipe-")
    line = event_of(first, "done")["resume"]
    assert line.startswith(f"trahiv init runs/{run_id}/recipe.json ")

    second = trahiv(*shlex.split(line)[1:])
    assert (event_of(second, "ready")["run_id"], event_of(second, "joined")["step"]) == (run_id, 1)
    assert (tmp_path / "runs" / run_id / "recipe.yaml").read_text() == given

    substituted = ("bash", "-c", 'exec "$@" <(cat template.txt)', "bash")
    checked = trahiv("check", "--format", "json", prefix=substituted)
    assert event_of(checked, "checked")["run_id"] == run_id
