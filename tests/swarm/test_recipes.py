"""Every built-in recipe, by the real commands: two peers, one model and an artefact of it.

The models are as small as can be, and a few rows stand for the data; everything else is as a user has it.
Other tests run `quickstart`.
"""

import json
import statistics

import pytest
import torch
import trl
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
)
from trl.data_utils import prepare_multimodal_messages

from tests.kit.stand_ins import CHATML_MARKED, write_bert, write_llama
from trahiv_cli.assets.collators import build_collator, class_metrics
from trahiv_cli.assets.data import build_datasets
from trahiv_cli.assets.model import kind_of
from trahiv_cli.recipe.builtin import builtin_recipes, shapes
from trahiv_cli.recipe.load import load_recipe

pytestmark = pytest.mark.timeout(300)

EVAL_BATCH = 4
ANSWERS = ("yes", "no", "maybe", "never") * 40
CHATS = [
    [{"role": "user", "content": f"Say {it}."}, {"role": "assistant", "content": f"{it}, {it}!"}]
    for it in ANSWERS
]
REFUSAL = {"role": "assistant", "content": "I would rather not."}
SENTENCES = [{"text": f"the {it} fox is a fox and no {it} dog"} for it in ("red", "old", "big") * 50]

PAIRS = [{"chosen": chat, "rejected": [chat[0], REFUSAL]} for chat in CHATS]

ROWS = {
    "answers-reward": PAIRS,
    "bert-mlm": SENTENCES,
    "chat-sft": [{"messages": chat} for chat in CHATS],
    "feedback-kto": [
        {"prompt": [question], "completion": [REFUSAL if i % 2 else answer], "label": i % 2 == 0}
        for i, (question, answer) in enumerate(CHATS)
    ],
    "mistral-7b-lora": [{"text": f"### Human: say {it} ### Assistant: {it}!"} for it in ANSWERS],
    "preference-dpo": PAIRS,
    "qwen3-0.6b-full": SENTENCES,
    "review-classes": [
        {"text": f"{('bad', 'good')[i % 2]} film, number {i}", "label": i % 2} for i in range(160)
    ],
    "spanish-qlora": [{"instruction": f"Di {it}.", "output": f"{it}, {it}!", "input": ""} for it in ANSWERS],
}
"""Rows as the dataset of each recipe has them on the hub."""

SETTINGS = [
    "data.datasets.0.path=rows.jsonl",
    "data.datasets.0.name=",
    "model.model_name_or_path=./model",
    "training.max_steps=8",
    "training.warmup_steps=0",
    "training.learning_rate=1e-2",
    "training.per_device_train_batch_size=2",
    f"training.per_device_eval_batch_size={EVAL_BATCH}",
    "training.fp16=false",  # needs a GPU
    "hivemind_config.opt.target_batch_size=64",
    "hivemind_config.opt.matchmaking_time=4",
    "hivemind_config.opt.averaging_timeout=30",
    "hivemind_config.dht={host_maddrs: [/ip4/127.0.0.1/tcp/0], nat_port_map: false, auto_nat: false}",
    "swarm.min_peers=2",
]
HELD_OUT = ["data.eval.test_split_size=0.1", "swarm.mode=sync"]
FULL = ["training.learning_rate=3e-3"]
OF_ONE = {
    "answers-reward": [*HELD_OUT, "reward.max_length=96", "model.dtype=float32"],
    "bert-mlm": [*HELD_OUT, *FULL, "mlm.max_length=48"],
    "chat-sft": [*HELD_OUT, "sft.max_length=96"],
    "feedback-kto": [*HELD_OUT, "kto.max_length=96", "model.dtype=float32"],
    "mistral-7b-lora": [*HELD_OUT, "clm.max_length=32"],
    "preference-dpo": [*HELD_OUT, "dpo.max_length=96", "model.dtype=float32"],  # bfloat16 rounds 1e-4
    "qwen3-0.6b-full": [*FULL, "clm.max_length=32"],
    # In one process, with any of eight seeds, all held-out rows are right after 12 steps, not after 8.
    "review-classes": [
        *HELD_OUT,
        *FULL,
        "seq_cls.max_length=32",
        "training.max_steps=16",
        "training.lr_scheduler_type=constant",
    ],
    "spanish-qlora": [*HELD_OUT, "sft.max_length=96"],
}
"""Changes of each recipe, of which later ones win."""

BESIDE_BYTES = 25_000
"""Bytes that a peer sends in a round beside the averages: progress, claims, votes, encryption. Far fewer than
those of the untrained weights."""


def test_every_builtin_recipe_has_rows():
    assert set(ROWS) == set(builtin_recipes()) - {"quickstart", "arithmetic-grpo", "shapes-sft"}


def trained(run):
    final = run / "final"
    adapters = final / "adapter_model.safetensors"
    return load_file(adapters if adapters.exists() else final / "model.safetensors")


def evaluate_plainly(recipe, run):
    """Load the artefact as any user would, and measure it with upstream's own trainer."""
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    held_out = build_datasets(recipe, tokenizer, peer_seed=0).eval
    model = load_plainly(recipe, run / "final")
    common = {
        "output_dir": str(run / "again"), "bf16": recipe.training.bf16 is True, "seed": recipe.training.seed,
        "per_device_eval_batch_size": EVAL_BATCH, "report_to": [], "disable_tqdm": True,
        "dataloader_pin_memory": False, "use_cpu": True,
    }  # fmt: skip
    both = {"train_dataset": held_out, "eval_dataset": held_out, "processing_class": tokenizer}
    if recipe.sft is not None:
        is_auto = recipe.sft.completion_only_loss == "auto"  # which is None in TRL
        fields = recipe.sft.model_dump(exclude={"completion_only_loss"} if is_auto else None)
        trainer = trl.SFTTrainer(model, trl.SFTConfig(**common, **fields), **both)
    elif recipe.reward is not None:
        trainer = trl.RewardTrainer(model, trl.RewardConfig(**common, **recipe.reward.model_dump()), **both)
    elif recipe.kto is not None:
        base = AutoModelForCausalLM.from_pretrained("./model", dtype=recipe.model.dtype)
        size = {"per_device_train_batch_size": recipe.training.per_device_train_batch_size}  # of its KL pairs
        trainer = trl.KTOTrainer(
            model, base, trl.KTOConfig(**common, **size, **recipe.kto.model_dump()), **both
        )
    elif recipe.dpo is not None:
        base = AutoModelForCausalLM.from_pretrained("./model", dtype=recipe.model.dtype)
        trainer = trl.DPOTrainer(model, base, trl.DPOConfig(**common, **recipe.dpo.model_dump()), **both)
    else:
        trainer = Trainer(
            model,
            TrainingArguments(**common, remove_unused_columns=False),
            data_collator=build_collator(recipe, tokenizer),
            eval_dataset=held_out,
            compute_metrics=class_metrics if recipe.seq_cls is not None else None,
        )
    return dict(trainer.evaluate())


def load_plainly(recipe, final):
    """The trained model; adapters are put on the model that they were trained with."""
    loader, options = kind_of(recipe.task, AutoConfig.from_pretrained("./model")).loader, {}
    if recipe.peft is None:
        return loader.from_pretrained(final)
    if recipe.quantization is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )  # fmt: skip
    if recipe.reward is not None:
        options["num_labels"] = 1
    base = loader.from_pretrained("./model", dtype=recipe.model.dtype, **options)
    return PeftModel.from_pretrained(base, final)


@pytest.mark.parametrize("name", ROWS)
def test_two_peers_train_one_model(name, start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    changes = SETTINGS + OF_ONE[name]
    recipe = load_recipe(name, changes).recipe
    if recipe.task in ("mlm", "seq-cls"):
        write_bert(tmp_path / "model")
    else:
        write_llama(tmp_path / "model", chat_template=CHATML_MARKED)
    words = [word for change in changes for word in ("--set", change)]
    first = start("init", name, *words, "--output-dir", "first")
    second = start("join", name, *words, "--peer", first.address, "--output-dir", "second", "--yes")
    for peer in (first, second):
        done = peer.wait_for("done", 150)
        assert (done["step"], done["reason"]) == (recipe.training.max_steps, "max_steps")
        assert peer.exit_code(30) == 0
    together = [step["round"] for step in first.steps if step["round"]]
    assert together
    assert all(round_["committed"] for round_ in together)

    one, two = trained(tmp_path / "first"), trained(tmp_path / "second")
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    if recipe.peft is not None:
        size = sum(weight.numel() * 4 for weight in one.values())
        # The median: in one of them the second peer may have fetched what it had missed.
        usual = statistics.median(one["bytes_sent"] for one in together if len(one["group"]) == 2)
        assert size <= usual < 1.02 * size + BESIDE_BYTES, "what is trained travels, and little else"

    losses = [step["loss"] for step in first.steps if step["loss"] is not None]
    assert losses[-1] < losses[0]
    if recipe.data.streaming:  # nothing can be held out
        return
    told, again = first.wait_for("eval", 1), evaluate_plainly(recipe, tmp_path / "first")
    assert again["eval_loss"] == pytest.approx(told["eval_loss"], abs=1e-4)
    if recipe.task == "seq-cls":
        for name in ("eval_accuracy", "eval_f1"):
            assert told[name] == pytest.approx(again[name])
        assert told["eval_accuracy"] > 0.9, "far better than guessing"


def two_of_builtin(start, folder, name, *changes):
    """Train two peers with a built-in recipe that needs no files; the second one has it from the first."""
    changes = [one for one in SETTINGS if one.startswith(("hivemind_config.dht", "swarm"))] + list(changes)
    changes += ["hivemind_config.opt.matchmaking_time=4"]
    words = [word for change in changes for word in ("--set", change)]
    first = start("init", name, *words, "--output-dir", str(folder / "first"))
    second = start(
        "join", "--peer", first.address, "--output-dir", str(folder / "second"), "--yes", *words[:2]
    )
    for peer in (first, second):
        assert peer.wait_for("done", 200)["reason"] == "max_steps"
        assert peer.exit_code(30) == 0
        assert peer.steps[-1]["data"]["duplicates"] == 0
    one, two = trained(folder / "first"), trained(folder / "second")
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    return first, second


def test_two_peers_learn_arithmetic_from_rewards(start, tmp_path):
    for peer in two_of_builtin(start, tmp_path, "arithmetic-grpo", "training.max_steps=100"):
        rewards = [step["reward"] for step in peer.steps if "reward" in step]
        assert statistics.mean(rewards[:5]) < 0.05, "guesses at first"
        assert statistics.mean(rewards[-5:]) > 0.2
        data = peer.steps[-1]["data"]
        assert (data["lost"], data["prompts"]) == (0, 55)


def test_two_peers_learn_to_see(start, tmp_path):
    first, _ = two_of_builtin(start, tmp_path, "shapes-sft", "training.max_steps=150")
    assert first.wait_for("sample", 1, step=150)["prompt"] in ("Which colour?", "Which form?")
    final = tmp_path / "second/final"
    processor = AutoProcessor.from_pretrained(final)
    model = AutoModelForImageTextToText.from_pretrained(final).eval()
    rows = shapes()[::9]
    right = 0
    for row in rows:
        read = processor.apply_chat_template(
            prepare_multimodal_messages(row["prompt"], row["images"]),
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        written = model.generate(**read, max_new_tokens=8, do_sample=False)[0, read["input_ids"].shape[1] :]
        answer = processor.tokenizer.decode(written, skip_special_tokens=True)
        right += answer == row["completion"][0]["content"]
    assert right > 0.6 * len(rows), "without the picture, it can guess one of three to five answers"
