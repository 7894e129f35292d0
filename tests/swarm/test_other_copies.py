"""Newcomers that hold something else than the swarm are sent away, and those who train do not notice.

Each gets one clear error: what differs, and what to bring; a hint; the contract's exit code. What is refused
before anything is loaded is in `tests/unit/cli/test_joining.py`, too, with more kinds of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.kit.stand_ins import CHATML_MARKED, write_llama

pytestmark = pytest.mark.timeout(120)

JSON = ("--format", "json")
RUN = ("--output-dir", "run", *JSON)


def require_refused(result: Any, code: int, message: str, hint: str) -> dict[str, Any]:
    """Check that a command with `--format json` ended with one error and left nothing; return the error."""
    __tracebackhide__ = True
    story = f"{result.args}\nstdout:\n{result.out}\nstderr:\n{result.err}"
    assert result.code == code, story
    assert "Traceback" not in result.out + result.err, story
    assert result.left == (), f"{story}\nleft: {result.left}"
    assert [event["event"] for event in result.events][-1] == "error", story
    (error,) = result.errors
    assert re.search(message, error["message"]), f"{message!r} not in:\n{story}"
    assert re.search(hint, error["hint"]), f"{hint!r} not in:\n{story}"
    return error


def require_nothing_trained(result: Any, run: Path) -> None:
    """Check that a newcomer that ended said no step, and wrote only what tells why."""
    assert {event["event"] for event in result.events} <= {"waiting", "ready", "error"}
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert told[-1]["event"] == "error", "the run's own record says why there is no run"
    assert {path.name for path in run.iterdir()} <= {
        *("recipe.yaml", "recipe.json", "events.jsonl", "trahiv.log", "peers.json", "members.json"),
        *("identity.key", "owner.key", "secret.key", "invited-by", "invitation", "lock"),
    }


TEXTS = "".join(
    json.dumps({"text": f"the {word} fox is a fox and no {word} dog"}) + "\n"
    for word in ("red", "old", "big") * 50
)
OTHER_TEXTS = TEXTS.replace("red", "tan")


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_peer(folder: Path, tiny_recipe: Callable[..., Path], **changes: Any) -> Path:
    """Write a recipe that does not end, and this peer's own copies of its model and its data beside it."""
    write_llama(folder / "model")
    (folder / "rows.jsonl").write_text(TEXTS)
    return tiny_recipe(
        folder,
        **{
            "model": {"model_name_or_path": "./model"},
            "data": {"datasets": [{"path": "rows.jsonl"}]},
            "peft": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
            "training__max_steps": 100_000,
            "hivemind_config__opt__target_batch_size": 64,
            **changes,
        },
    )


@pytest.fixture(scope="class")
def begun(request: pytest.FixtureRequest, open_workplace: Any, tiny_recipe: Any) -> Iterator[Any]:
    """A peer that trains the recipe of the class, alone."""
    with open_workplace("begun") as place:
        peer = place.start("init", write_peer(place.folder, tiny_recipe, **request.cls.sections))
        peer.wait_for("step", 60)
        yield peer
        assert peer.is_running, peer.err
        assert not peer.noise


@pytest.fixture
def undisturbed(begun: Any) -> Iterator[Any]:
    """The peer that has begun; it must not notice this test, and train on, alone and without a warning."""
    before = len(begun.events)
    yield begun
    reached = begun.events[-1].get("step", 0)
    begun.wait_for("step", 30, step=lambda step: step > reached)
    since = begun.events[before:]
    assert {event["event"] for event in since} == {"step"}, since
    assert all(event["peers"] == 1 and event["round"] is None for event in since), since


class TestAnotherCopy:
    """What a recipe names and cannot know: the folder of the same name holds something else."""

    sections: dict[str, Any] = {}

    def test_other_weights_and_tokens_are_refused(self, trahiv, tmp_path, tiny_recipe, undisturbed):
        recipe = write_peer(tmp_path, tiny_recipe)
        write_llama(tmp_path / "model", seed=1, chat_template=CHATML_MARKED)
        result = trahiv("join", recipe, *RUN, "--peer", undisturbed.address)
        error = require_refused(result, 5, "its frozen weights and tokenizer differ", "same `model.revision`")
        assert error["code"] == "mismatch"
        assert [part for part, _, _ in error["differences"]] == ["frozen weights", "tokenizer"]
        assert all(ours != theirs for _, ours, theirs in error["differences"])
        require_nothing_trained(result, tmp_path / "run")


class TestAnotherPeer:
    """Newcomers to a run with a base in 4 bits: with another recipe, another weight, and good copies."""

    sections = {"quantization": {"load_in_4bit": True}}

    def test_another_recipe_is_refused_field_by_field(self, trahiv, tmp_path, tiny_recipe, undisturbed):
        changes = {
            "model__revision": "step-1000",
            "model__tokenizer_name_or_path": "builtin/bytes",
            "peft": {"r": 8, "target_modules": ["q_proj", "k_proj"]},
        }
        recipe = write_peer(tmp_path, tiny_recipe, **self.sections, **changes)
        (tmp_path / "rows.jsonl").write_text(OTHER_TEXTS)
        result = trahiv("join", recipe, *JSON, "--peer", undisturbed.address)
        error = require_refused(result, 5, "trains another recipe: it differs in 5", "join without RECIPE")
        assert error["differences"] == [
            ["data.datasets.0.content.sha256", sha256(OTHER_TEXTS), sha256(TEXTS)],
            ["model.revision", "step-1000", "main"],
            ["model.tokenizer_name_or_path", "builtin/bytes", None],
            ["peft.r", 8, 4],
            ["peft.target_modules", ["q_proj", "k_proj"], ["q_proj", "v_proj"]],
        ]

    def test_one_other_number_in_4_bits_is_refused(self, trahiv, tmp_path, tiny_recipe, undisturbed):
        recipe = write_peer(tmp_path, tiny_recipe, **self.sections)
        weights = load_file(tmp_path / "model" / "model.safetensors")
        weights["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
        save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
        result = trahiv("join", recipe, *RUN, "--peer", undisturbed.address)
        error = require_refused(result, 5, "its frozen weights differ. Nothing was averaged", "a fresh copy")
        assert [part for part, _, _ in error["differences"]] == ["frozen weights"]
        require_nothing_trained(result, tmp_path / "run")

    def test_good_copies_elsewhere_and_under_another_name_are_welcome(self, start, tmp_path, begun):
        write_llama(tmp_path / "models" / "model")
        (tmp_path / "mine.jsonl").write_text(TEXTS)
        peer = start(
            *("join", "--peer", begun.address, "--host-maddr", "/ip4/127.0.0.1/tcp/0", "--yes"),
            *("--set", "model.model_name_or_path=models/model", "--set", "data.datasets.0.path=mine.jsonl"),
        )
        assert peer.wait_for("joined", 60)["source"] == "swarm"
        for each in (peer, begun):
            together = each.wait_for("step", 60, peers=2, round=lambda it: it and len(it["group"]) == 2)
            assert together["round"]["committed"]
        assert not peer.noise
