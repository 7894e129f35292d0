"""Newcomers that hold something else than the swarm are sent away, and those who train do not notice.

Each gets one clear error: what differs, and what to bring; a hint; the contract's exit code. What is refused
before anything is loaded is in `tests/unit/cli/test_joining.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import LOOPBACK, Peer
from tests.kit.recipes import write_tiny
from tests.kit.stand_ins import CHATML_MARKED, write_llama

pytestmark = pytest.mark.timeout(120)

TEXTS = "".join(
    json.dumps({"text": f"the {word} fox is a fox and no {word} dog"}) + "\n"
    for word in ("red", "old", "big") * 50
)


def write_peer(folder: Path) -> Path:
    """Write a recipe that does not end, and this peer's own copies of its model and its data beside it."""
    write_llama(folder / "model")
    (folder / "rows.jsonl").write_text(TEXTS)
    return write_tiny(
        folder,
        model={"model_name_or_path": "./model"},
        quantization={"load_in_4bit": True},
        data={"datasets": [{"path": "rows.jsonl"}]},
        peft={"r": 4, "target_modules": ["q_proj", "v_proj"]},
        training__max_steps=100_000,
        hivemind_config__opt__target_batch_size=64,
    )


@pytest.fixture(scope="module")
def begun(open_workplace: Any) -> Iterator[Peer]:
    """A peer that trains, alone."""
    with open_workplace("begun") as place:
        peer = place.start("init", write_peer(place.folder))
        peer.wait_for("step", 60)
        yield peer
        assert peer.is_running, peer.err
        assert not peer.noise


def test_another_copy_is_refused(trahiv: Callable[..., Any], begun: Peer, tmp_path: Path) -> None:
    """That one other number is enough is in `tests/unit/assets/test_likeness.py`."""
    before, run = len(begun.events), tmp_path / "run"
    recipe = write_peer(tmp_path)
    write_llama(tmp_path / "model", seed=1, chat_template=CHATML_MARKED)
    address = ("--peer", begun.address)
    result = trahiv("join", recipe, "--output-dir", "run", "--format", "json", *address)
    assert (result.code, result.left) == (5, ()), result.out + result.err
    assert "Traceback" not in result.out + result.err
    (error,) = result.errors
    assert error == result.events[-1] and error["code"] == "mismatch"
    assert "its frozen weights and tokenizer differ" in error["message"]
    assert "same `model.revision`" in error["hint"]
    assert [part for part, _, _ in error["differences"]] == ["frozen weights", "tokenizer"]
    assert all(ours != theirs for _, ours, theirs in error["differences"])

    assert {event["event"] for event in result.events} <= {"waiting", "ready", "error"}, "nothing was trained"
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert told[-1]["event"] == "error", "the run's own record says why there is no run"
    assert not (run / "checkpoints").exists()
    reached = begun.steps[-1]["step"]
    begun.wait_for("step", 30, step=lambda step: step > reached)
    since = begun.events[before:]
    assert {event["event"] for event in since} == {"step"}, "it did not notice"
    assert all(event["peers"] == 1 and event["round"] is None for event in since), since


def test_good_copies_elsewhere_and_under_another_name_are_welcome(
    start: Callable[..., Peer], tmp_path: Path, begun: Peer
) -> None:
    write_llama(tmp_path / "models" / "model")
    (tmp_path / "mine.jsonl").write_text(TEXTS)
    peer = start(
        *("join", "--peer", begun.address, *LOOPBACK, "--yes"),
        *("--set", "model.model_name_or_path=models/model", "--set", "data.datasets.0.path=mine.jsonl"),
    )
    assert peer.wait_for("joined", 60)["source"] == "swarm"
    for each in (peer, begun):
        assert each.wait_for_group(peers=2)["round"]["committed"]
    assert not peer.noise
