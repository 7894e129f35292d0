"""Exit codes of real processes that end before there is a swarm: what they say, and that nothing is left.

One row for each code and each place that it comes from; the many other mistakes and their words are in
`tests/unit/cli`. The codes of what happens in a swarm are where that is: 0 in `test_two_peers.py`, 1 in
`test_restart.py`, 5 in `test_other_copies.py` and `test_owner.py`, 130 and 143 in `test_leaving.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.recipes import HUGE

pytestmark = pytest.mark.timeout(90)

STRANGER = "QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"
"""A well-formed peer id that nobody has."""

CLOSED = f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"
FAR = f"/ip4/203.0.113.7/tcp/31337/p2p/{STRANGER}"

BEFORE_AN_INVITATION = {
    *("lock", "recipe.yaml", "recipe.json", "events.jsonl", "trahiv.log", "peers.json"),
    *("identity.key", "owner.key", "secret.key", "members.json"),
}
"""All that a run's folder may hold when nobody was invited."""


INIT = ("init", "tiny.yaml", "--output-dir", "run")
JSON = ("--format", "json")


@dataclass(frozen=True)
class Ending:
    """A command that ends."""

    code: int
    message: str
    hint: str
    words: tuple[str, ...] = INIT
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the tiny recipe."""

    has_begun: bool = False
    """Whether its node had started: its folder and its record are there. It speaks JSON then."""


ENDINGS = {
    "a recipe that is wrong": Ending(
        2, "base_model: unknown key", "`model.model_name_or_path`", changes={"base_model": "owner/model"}
    ),
    "a tokenizer that is none": Ending(
        3,
        "tokens' could not be loaded",
        "",
        changes={"model__tokenizer_name_or_path": "./tokens"},
        has_begun=True,
    ),
    "a closed port": Ending(
        4,
        "127.0.0.1 is there, but nothing listens on port 9",
        "fresh `trahiv join`",
        ("join", "--peer", CLOSED),
    ),
    "too large a model": Ending(
        6,
        r"needs [\d.]+ GiB of RAM .* [\d.]+ GiB are free",
        "peft",
        changes={"model__config": HUGE},
        has_begun=True,
    ),
}


def require_refused(result: Any, ending: Ending) -> None:
    """Check that a command said one error with one hint, to whom it speaks, and left nothing running."""
    story = f"{result.args}\nstdout:\n{result.out}\nstderr:\n{result.err}"
    assert (result.code, result.left) == (ending.code, ()), story
    assert "Traceback" not in result.out + result.err, story
    if ending.has_begun:
        (error,) = result.errors
        said, hint = error["message"], error["hint"]
        assert error == result.events[-1]
        assert {event["event"] for event in result.events} <= {"waiting", "error"}, "nobody was invited"
    else:
        said = result.err
        (hint,) = re.findall(r"^ *hint: .*", said, re.MULTILINE)
        assert len(re.findall(r"^error: ", said, re.MULTILINE)) == 1, story
        assert result.out == ""
    assert re.search(ending.message, said), story
    assert re.search(ending.hint, hint), story


def test_a_usage_error_ends_with_2_and_names_the_help(trahiv: Callable[..., Any], tmp_path: Path) -> None:
    result = trahiv("init", "--bogus")
    assert (result.code, result.out, result.left) == (2, "", ())
    assert "No such option: --bogus" in result.err
    assert "trahiv init --help" in result.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ENDINGS)
def test_what_ends_before_a_swarm_says_why_and_leaves_nothing(
    name: str, trahiv: Callable[..., Any], tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    ending = ENDINGS[name]
    tiny_recipe(tmp_path, **ending.changes)
    (tmp_path / "tokens").mkdir()
    result = trahiv(*ending.words, *JSON * ending.has_begun)
    require_refused(result, ending)
    assert ending.words == INIT or result.seconds < 15
    run = tmp_path / "run"
    assert not (tmp_path / "runs").exists()
    assert run.exists() == ending.has_begun
    if ending.has_begun:
        assert {path.name for path in run.iterdir()} <= BEFORE_AN_INVITATION
        assert '"event": "error"' in (run / "events.jsonl").read_text().splitlines()[-1]


@pytest.fixture
def without_routes() -> Iterator[tuple[str, ...]]:
    """A network namespace that knows only itself: this prefix runs a command in it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and iproute2's `ip`")
    name = f"trahiv-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=10)
    if made.returncode != 0:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        inside = ("ip", "netns", "exec", name)
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True, timeout=10)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True, timeout=10)


def test_an_unroutable_host_is_said_to_be_one(workplace: Any, without_routes: tuple[str, ...]) -> None:
    result = workplace.run("join", "--peer", FAR, prefix=without_routes)
    require_refused(result, Ending(4, "203.0.113.7 can't be reached", "fresh `trahiv join`"))
    assert result.seconds < 15
    assert not (workplace.folder / "runs").exists()
