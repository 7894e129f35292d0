"""Every recipe that comes with trahiv runs, on a stand-in for its model and a few rows of its kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.stand_ins import CHATML_MARKED, write_bert, write_llama
from trahiv_cli.recipe.builtin import builtin_recipes

pytestmark = pytest.mark.timeout(240)

WORDS = ("red", "old", "big", "new")
CHAT = [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes, yes!"}]

ROWS: dict[str, dict[str, Any]] = {
    "bert-mlm": {"text": "the {} fox is a fox"},
    "chat-sft": {"messages": CHAT},
    "mistral-7b-lora": {"text": "### Human: say {} ### Assistant: {} " * 4},
    "preference-dpo": {
        "chosen": CHAT,
        "rejected": [CHAT[0], {"role": "assistant", "content": "I would rather not."}],
    },
    "qwen3-0.6b-full": {"text": "the {} fox is a fox"},
    "review-classes": {"text": "a {} film", "label": 1},
    "spanish-qlora": {"instruction": "Di {}.", "output": "{}", "input": ""},
}
"""A row of each recipe's dataset, as the hub has it."""


def write_rows(name: str, folder: Path) -> Path:
    rows = [json.loads(json.dumps(ROWS[name]).replace("{}", word)) for word in WORDS * 300]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_there_are_rows_for_every_recipe_that_is_not_its_own_test() -> None:
    assert set(ROWS) == set(builtin_recipes()) - {"quickstart"}  # `quickstart` is what other tests run


@pytest.mark.parametrize("name", ROWS)
def test_a_shipped_recipe_runs(name: str, trahiv: Callable[..., Any], tmp_path: Path) -> None:
    if name in ("bert-mlm", "review-classes"):
        model = write_bert(tmp_path / "model")
    else:
        model = write_llama(tmp_path / "model", chat_template=CHATML_MARKED)
    changes = {
        "model.model_name_or_path": model,
        "data.datasets.0.path": write_rows(name, tmp_path),
        "data.datasets.0.name": "",
        "training.max_steps": 1,
        "training.warmup_steps": 0,  # one step leaves no room for it
        "training.per_device_train_batch_size": 2,
        "training.per_device_eval_batch_size": 2,
        "training.bf16": "auto",
        "training.fp16": "false",  # needs a GPU
        "hivemind_config.opt.target_batch_size": 4,
        "hivemind_config.opt.matchmaking_time": 2,
        "hivemind_config.dht.host_maddrs": "[/ip4/127.0.0.1/tcp/0]",
    }
    if name in ("bert-mlm", "review-classes"):
        changes[f"{'mlm' if name == 'bert-mlm' else 'seq_cls'}.max_length"] = 64
    overrides = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    result = trahiv("init", name, *overrides, "--output-dir", "run", "--format", "json", timeout=200)
    assert result.code == 0, result.errors or result.err
    done = result.events[-1]
    assert (done["event"], done["step"], done["reason"]) == ("done", 1, "max_steps")
    steps = [event for event in result.events if event["event"] == "step"]
    assert steps[0]["loss"] > 0
    assert result.left == ()
