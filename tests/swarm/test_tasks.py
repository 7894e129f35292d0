"""Every task by the real commands: two peers, a falling loss, one model, and an artefact that says the same.

The models are as small as can be and local; everything else is as a user has it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.kit.recipes import write_tiny
from tests.kit.stand_ins import CHATML_MARKED, write_bert, write_llama
from trahiv_cli.assets.collators import build_collator, class_metrics
from trahiv_cli.assets.data import build_datasets
from trahiv_cli.recipe.load import load_recipe

pytestmark = pytest.mark.timeout(300)

EVAL_BATCH = 4


Rows = list[dict[str, Any]]
ANSWERS = ("yes", "no", "maybe", "never") * 40


def chat(word: str) -> Rows:
    said = {"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"{word}, {word}!"}
    return list(said)


CHATS: Rows = [{"messages": chat(word)} for word in ANSWERS]
PREFERENCES: Rows = [
    {"prompt": f"Say {word}. ", "chosen": f"{word}!", "rejected": "I would rather not."} for word in ANSWERS
]
KINDS = ("bad", "negative"), ("good", "positive")
REVIEWS: Rows = [
    {"text": f"{KINDS[i % 2][0]} film, number {i}", "label": KINDS[i % 2][1]} for i in range(160)
]
SENTENCES: Rows = [{"text": f"the {it} fox is a fox and no {it} dog"} for it in ("red", "old", "big") * 50]


@dataclass(frozen=True)
class Story:
    """One recipe and what it trains on."""

    task: str
    rows: Rows
    model: Callable[[Path], Path]
    section: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 3e-3
    optim: str = "adamw_torch"
    training: dict[str, Any] = field(default_factory=dict)
    max_steps: int = 8


def marked_llama(folder: Path) -> Path:
    return write_llama(folder, chat_template=CHATML_MARKED)


LORA = {"peft": {"r": 4, "target_modules": "all-linear"}}
BF16 = {"bf16": True, "activation_checkpointing": True}
QLORA = LORA | {"quantization": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}}

STORIES = {
    "clm": Story("clm", SENTENCES, write_llama, {"max_length": 32}),
    "sft": Story("sft", CHATS, marked_llama, {"max_length": 96, "assistant_only_loss": True}),
    "sft-packed-qlora": Story(
        "sft", CHATS, write_llama, {"max_length": 96, "packing": True}, QLORA, 1e-2, "paged_adamw_8bit"
    ),
    "sft-bf16": Story("sft", CHATS, write_llama, {"max_length": 96}, training=BF16),
    "dpo": Story("dpo", PREFERENCES, write_llama, {"max_length": 64}, learning_rate=1e-3),
    "dpo-lora": Story("dpo", PREFERENCES, write_llama, {"max_length": 64}, LORA, 1e-2),
    "mlm": Story("mlm", SENTENCES, write_bert, {"max_length": 48}),
    "seq-cls": Story(
        "seq-cls", REVIEWS, write_bert, {"max_length": 32, "labels": ["negative", "positive"]},
        # In one process, with any of eight seeds, all held-out rows are right after 12 steps, not after 8.
        max_steps=16, training={"lr_scheduler_type": "constant"},
    ),
}  # fmt: skip


def write_story(folder: Path, story: Story) -> Path:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in story.rows))
    overrides: dict[str, Any] = {"clm": None, story.task.replace("-", "_"): story.section, **story.sections}
    overrides |= {f"training__{key}": value for key, value in story.training.items()}
    return write_tiny(
        folder,
        task=story.task,
        model={"model_name_or_path": str(story.model(folder / "model"))},
        data={"datasets": [{"path": str(rows)}], "eval": {"test_split_size": 0.1}},
        **overrides,
        swarm__mode="sync",
        swarm__min_peers=2,
        training__max_steps=story.max_steps,
        training__learning_rate=story.learning_rate,
        training__optim=story.optim,
        training__per_device_eval_batch_size=EVAL_BATCH,
        hivemind_config__opt__target_batch_size=96,
        hivemind_config__opt__matchmaking_time=4,
        hivemind_config__opt__averaging_timeout=30,
    )


def trained(run: Path) -> dict[str, torch.Tensor]:
    final = run / "final"
    adapters = final / "adapter_model.safetensors"
    return load_file(adapters if adapters.exists() else final / "model.safetensors")


def evaluate_plainly(recipe_file: Path, run: Path) -> dict[str, float]:
    """Load the artefact as anybody would, and measure it with upstream's own trainer."""
    recipe = load_recipe(recipe_file).recipe
    final = run / "final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    held_out = build_datasets(recipe, tokenizer, seed=recipe.training.seed, peer_seed=0).eval
    model, reference = load_plainly(recipe, final)
    common = {
        "output_dir": str(run / "again"), "bf16": recipe.training.bf16 is True,
        "per_device_eval_batch_size": EVAL_BATCH, "report_to": [], "disable_tqdm": True,
        "dataloader_pin_memory": False, "use_cpu": True,
    }  # fmt: skip
    if recipe.sft is not None:
        fields = recipe.sft.model_dump(exclude={"completion_only_loss"})
        trainer: Any = SFTTrainer(
            model, SFTConfig(**common, **fields), train_dataset=held_out, eval_dataset=held_out,
            processing_class=tokenizer,
        )  # fmt: skip
    elif recipe.dpo is not None:
        trainer = DPOTrainer(
            model, reference, DPOConfig(**common, **recipe.dpo.model_dump()), train_dataset=held_out,
            eval_dataset=held_out, processing_class=tokenizer,
        )  # fmt: skip
    else:
        args = TrainingArguments(**common, remove_unused_columns=False)
        trainer = Trainer(
            model,
            args,
            data_collator=build_collator(recipe, tokenizer),
            eval_dataset=held_out,
            compute_metrics=class_metrics if recipe.seq_cls is not None else None,
        )
    return dict(trainer.evaluate())


def load_plainly(recipe: Any, final: Path) -> tuple[Any, Any]:
    """The trained model, and for preferences the one that it started from."""
    if recipe.task == "mlm":
        return AutoModelForMaskedLM.from_pretrained(final), None
    if recipe.task == "seq-cls":
        return AutoModelForSequenceClassification.from_pretrained(final), None
    base = recipe.model.model_name_or_path
    if recipe.peft is None:
        return AutoModelForCausalLM.from_pretrained(final), AutoModelForCausalLM.from_pretrained(base)
    from peft import PeftModel

    options: dict[str, Any] = {}
    if recipe.quantization is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )  # fmt: skip
    frozen = AutoModelForCausalLM.from_pretrained(base, **options)
    reference = AutoModelForCausalLM.from_pretrained(base) if recipe.task == "dpo" else None
    return PeftModel.from_pretrained(frozen, final), reference


BESIDE_BYTES = 25_000
"""That a peer sends in a round beside what is averaged: progress, claims, votes, encryption. Far less than
the weights that are not trained."""


@pytest.mark.parametrize("name", STORIES)
def test_two_peers_train_one_model(name: str, start: Callable[..., Any], tmp_path: Path) -> None:
    story = STORIES[name]
    recipe = write_story(tmp_path, story)
    first = start("init", recipe, "--output-dir", "first")
    second = start("join", recipe, "--peer", first.address, "--output-dir", "second", "--yes")
    for peer in (first, second):
        assert peer.wait_for("done", timeout=150)["reason"] == "max_steps"
        assert peer.exit_code(timeout=30) == 0
    together = [step["round"] for step in first.steps if step["round"]]
    assert together
    assert all(round_["committed"] for round_ in together)

    one, two = trained(tmp_path / "first"), trained(tmp_path / "second")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one), "replicas are equal to the bit"
    sent = [round_["bytes_sent"] for round_ in together if len(round_["group"]) == 2]
    size = sum(weight.numel() * 4 for weight in one.values())
    if story.task not in ("mlm", "seq-cls"):  # tied or unused weights are saved once more, or not at all
        # The median: in one of them the second peer may have fetched what it had missed.
        usual = statistics.median(sent)
        assert size <= usual < 1.02 * size + BESIDE_BYTES, "what is trained travels, and little else"

    losses = [step["loss"] for step in first.steps if step["loss"] is not None]
    assert losses[-1] < losses[0]
    told = first.wait_for("eval", timeout=1)
    again = evaluate_plainly(recipe, tmp_path / "first")
    assert again["eval_loss"] == pytest.approx(told["eval_loss"], abs=1e-4)
    if story.task == "seq-cls":
        assert told["eval_accuracy"] == pytest.approx(again["eval_accuracy"])
        assert told["eval_f1"] == pytest.approx(again["eval_f1"])
        assert told["eval_accuracy"] > 0.9, "far better than guessing"
