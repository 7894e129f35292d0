"""What memory a run takes: what `check --deep` says, what two peers hold, and what plain Trainer holds.

    .venv/bin/python benchmarks/memory.py [--only quickstart mlm lora "sft, qlora" ...] [--modes sync auto]

Every run has a model of about 100M weights that is drawn and saved first (`quickstart` has its own of 0.6M).
Two peers train it together for a few steps through the real command, then two processes of plain Trainer,
for `sft` of TRL's, train it side by side: libraries are then shared by as many in both cases. Measured 20
times a second is the sum over a peer's processes of the memory that is theirs alone and their part of what
they share (PSS), and on a GPU what torch had allocated at most. Printed of each run, of the peer that took
more: the estimate for when a peer joins and its ratio, and what it held beyond plain Trainer. Run nothing
else that loads torch.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder and `tests` are not installed

from benchmarks.kit.processes import memory_bytes, tree_of
from tests.kit.commands import VANISH_S, Peer, Workplace

MIB = 2**20
EVERY_S = 0.05
WORDS = 32000
ROWS = 64
ROW_WORDS = 400
STEPS = 3
PEER, PLAIN, MODELS = "peer", "plain Trainer", "write models"
LIMIT_S = 1800.0
"""For anything that a process does at once."""

CONFIGS = Path(__file__).parents[1] / "configs"
WITHOUT_PLAIN = ("dpo",)
"""Tasks that plain Trainer does not have."""

LORA = {"peft": {"r": 16}}
NF4 = {"quantization": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}}
INT8 = {"quantization": {"load_in_8bit": True}}

RUNS: dict[str, dict[str, Any]] = {
    "quickstart": {},
    "clm": {"task": "clm", "model": "llama", "length": 128, "batch": 2},
    "clm, long": {"task": "clm", "model": "llama", "length": 512, "batch": 4},
    "clm, adamw_8bit": {"task": "clm", "model": "llama", "length": 128, "batch": 2, "optim": "adamw_8bit"},
    "clm, checkpointing": {
        "task": "clm", "model": "llama", "length": 512, "batch": 4, "activation_checkpointing": True,
    },
    "lora": {"task": "clm", "model": "llama-bf16", "length": 256, "batch": 4, **LORA},
    "sft, lora": {"task": "sft", "model": "llama-bf16", "length": 256, "batch": 2, **LORA},
    "sft, qlora": {
        "task": "sft", "model": "llama-bf16", "length": 256, "batch": 2, **LORA, **NF4,
        "optim": "paged_adamw_8bit", "activation_checkpointing": True,
    },
    "sft, int8": {
        "task": "sft", "model": "llama-bf16", "length": 256, "batch": 2, **LORA, **INT8,
        "optim": "adamw_8bit",
    },
    "dpo, lora": {"task": "dpo", "model": "llama-bf16", "length": 256, "batch": 2, **LORA},
    "dpo": {"task": "dpo", "model": "llama", "length": 128, "batch": 1},
    "mlm": {"task": "mlm", "model": "bert", "length": 128, "batch": 4},
    "seq-cls": {"task": "seq-cls", "model": "bert", "length": 128, "batch": 4},
}  # fmt: skip
"""Name -> what the run is; further words go into the recipe's `training`. `quickstart` is shipped."""

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "overlap": {},
    "diloco": {"local_steps": 1},
    "streaming": {"local_steps": 2, "fragments": 2},
    "auto": {},
}
"""Mode -> what else the recipe's section `swarm` says: of two steps, one round is the last and one is not."""


# -- models, data, recipes ------------------------------------------------------------------------


def write_models(folder: str) -> None:
    """Save the models of about 100M weights, each with a tokenizer of one token a word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        BertConfig,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]", "mask_token": "[MASK]"}
    words = [*special.values(), *(f"w{number}" for number in range(WORDS - len(special)))]
    level = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=level, **special)
    size = {
        "vocab_size": WORDS, "hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12,
        "max_position_embeddings": 1024, "pad_token_id": 0,
    }  # fmt: skip
    llama = LlamaConfig(**size, intermediate_size=2048, bos_token_id=None, eos_token_id=2)
    bert = BertConfig(**size, intermediate_size=3072)
    for name, kind, config, dtype in (
        ("llama", AutoModelForCausalLM, llama, torch.float32),
        ("llama-bf16", AutoModelForCausalLM, llama, torch.bfloat16),
        ("bert", AutoModelForMaskedLM, bert, torch.float32),
    ):
        kind.from_config(config).to(dtype).save_pretrained(f"{folder}/{name}")
        tokenizer.save_pretrained(f"{folder}/{name}")


def write_rows(folder: Path, task: str) -> Path:
    """Write rows that are longer than any sample, so that every sample is cut to its full length."""
    draw = random.Random(0)

    def text(num_words: int) -> str:
        return " ".join(f"w{draw.randrange(1000)}" for _ in range(num_words))

    def row(number: int) -> dict[str, Any]:
        if task == "sft":
            return {"prompt": text(20), "completion": text(ROW_WORDS)}
        if task == "dpo":
            return {"prompt": text(20), "chosen": text(ROW_WORDS), "rejected": text(ROW_WORDS)}
        return {"text": text(ROW_WORDS), **({"label": number % 2} if task == "seq-cls" else {})}

    file = folder / f"{task}.jsonl"
    file.write_text("".join(json.dumps(row(number)) + "\n" for number in range(ROWS)))
    return file


def write_recipe(folder: Path, name: str, run: dict[str, Any], mode: str) -> list[str]:
    """Write a recipe of a few steps, with a checkpoint after each; return what a command calls it by."""
    swarm = {"mode": mode, "min_peers": 2, **MODES[mode]}
    if not run:
        training = (f"max_steps={STEPS}", "warmup_steps=1", "eval_steps=1", "save_steps=1")
        changes = [f"training.{change}" for change in training]
        changes += [f"swarm.{key}={value}" for key, value in swarm.items()]
        return [name, *(word for change in changes for word in ("--set", change))]
    own = dict(run)
    task, model, length, batch = (own.pop(key) for key in ("task", "model", "length", "batch"))
    sections = {key: own.pop(key) for key in ("peft", "quantization") if key in own}
    labels = {"labels": ["no", "yes"]} if task == "seq-cls" else {}
    recipe = {
        "name": "".join(char if char.isalnum() else "-" for char in name),
        "task": task,
        "model": {"model_name_or_path": str(folder / model)},
        "data": {"datasets": [{"path": str(write_rows(folder, task))}]},
        task.replace("-", "_"): {"max_length": length, **labels},
        "training": {
            "max_steps": STEPS, "save_steps": 1, "save_total_limit": 1,
            "per_device_train_batch_size": batch, **own,
        },
        "hivemind_config": {"opt": {"target_batch_size": 4 * batch, "matchmaking_time": 2}},
        "swarm": swarm,
        **sections,
    }  # fmt: skip
    file = folder / f"{recipe['name']}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return [str(file)]


# -- one run --------------------------------------------------------------------------------------


CHILD = "import sys; from benchmarks import memory; memory.as_child(*sys.argv[1:])"
GPU = {"CUDA_VISIBLE_DEVICES": "0"}


def as_child(what: str, *words: str) -> None:
    """Be a peer, or do one of `DEEDS`, in this process; say what torch allocated on a GPU."""
    try:
        if what == PEER:
            from trahiv_cli.cli.app import run

            run(list(words))
        else:
            DEEDS[what](*words)
    finally:
        import torch

        gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        print(json.dumps({"v": 1, "event": "gpu", "bytes": gpu}), flush=True)


def train_plainly(folder: str, name: str, output: str) -> None:
    """Train the model of a run on random tokens, in samples of the same length, without a swarm."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    own = RUNS[name] or {"task": "clm", "model": None, "length": 64, "batch": 8}
    kinds = {
        "mlm": transformers.AutoModelForMaskedLM,
        "seq-cls": transformers.AutoModelForSequenceClassification,
    }
    kind = kinds.get(own["task"], transformers.AutoModelForCausalLM)
    if own["model"] is None:
        config = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())["model"]["config"]
        model = kind.from_config(transformers.AutoConfig.for_model(**config))
    else:
        quantized = own.get("quantization")
        config = transformers.BitsAndBytesConfig(**quantized) if quantized else None
        dtype = torch.bfloat16 if own["model"].endswith("bf16") else torch.float32
        model = kind.from_pretrained(Path(folder) / own["model"], quantization_config=config, dtype=dtype)
        if quantized:
            model = prepare_model_for_kbit_training(model, bool(own.get("activation_checkpointing")))
    if "peft" in own:
        model = get_peft_model(model, LoraConfig(**own["peft"], target_modules="all-linear"))
    tokens = torch.randint(4, 1000, (2 * STEPS * own["batch"], own["length"]))
    labels = torch.zeros(len(tokens), dtype=torch.long) if own["task"] == "seq-cls" else tokens
    rows: Any = [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]
    trainer, arguments = transformers.Trainer, transformers.TrainingArguments
    if own["task"] == "sft":  # what TRL takes is no cost of a swarm
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        rows = Dataset.from_dict({"input_ids": tokens.tolist()})
        trainer, arguments = SFTTrainer, partial(SFTConfig, max_length=own["length"], bf16=False)
    args = arguments(
        output_dir=output, max_steps=STEPS, save_steps=1, save_total_limit=1, report_to=[],
        disable_tqdm=True, per_device_train_batch_size=own["batch"], gradient_accumulation_steps=2,
        optim=own.get("optim", "adamw_torch_fused"), logging_strategy="no", dataloader_pin_memory=False,
        gradient_checkpointing=bool(own.get("activation_checkpointing")),
    )  # fmt: skip
    trainer(model=model, args=args, train_dataset=rows).train()


DEEDS = {PLAIN: train_plainly, MODELS: write_models}


def start(place: Workplace, what: str, *words: str) -> Peer:
    """Start a process that does what `as_child` says. None is forked: a fork would share another's memory."""
    return place.start_script(CHILD, what, *words, env=GPU)


def peak(peers: Sequence[Peer], is_over: Callable[[], bool] = lambda: False) -> int:
    """Wait until it is over, or all have ended well; return the most RAM that all processes of one held."""
    ram = 0
    while not is_over() and (running := [peer for peer in peers if peer.is_running]):
        ram = max(ram, *(memory_bytes(tree_of(peer.pid)) for peer in running), 0)
        time.sleep(EVERY_S)
        for peer in peers:
            if not peer.is_running and peer.exit_code(VANISH_S):
                raise SystemExit(f"a process failed:\n{peer.err[-2000:]}")
    return ram


def gpu_of(peers: Sequence[Peer]) -> int:
    """Return the most that torch had allocated on a GPU for one, in bytes."""
    return max(peer.wait_for("gpu", VANISH_S)["bytes"] for peer in peers)


def measure_peers(place: Workplace, recipe: list[str]) -> tuple[int, int]:
    """Train with two peers; return the larger peak of RAM of all processes of one, and of a GPU, in bytes."""
    options = ["--host-maddr", "/ip4/127.0.0.1/tcp/0", "--yes", "--format", "json", "--output-dir"]
    first = start(place, PEER, "init", *recipe, *options, "first")
    ram = peak([first], lambda: any(event["event"] == "ready" for event in first.events))
    second = start(place, PEER, "join", *recipe, "--peer", first.address, *options, "second")
    return max(ram, peak([first, second])), gpu_of([first, second])


def measure_plain(place: Workplace, folder: Path, name: str) -> tuple[int, int]:
    """Train twice with plain Trainer, side by side; return the same."""
    sides = [start(place, PLAIN, str(folder), name, output) for output in ("plain", "plain too")]
    return peak(sides), gpu_of(sides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["sync"], metavar="MODE")
    options = parser.parse_args()
    columns = "".join(f"{name:>12}" for name in ("estimate", "measured", "plain", "beyond"))
    print(f"{'run':<22}{'mode':<11}{'memory':<8}{columns}  ratio")
    with tempfile.TemporaryDirectory() as name, Workplace(Path(name)) as place:
        folder = Path(name)
        # In a process of its own: what torch leaves in memory here would make its libraries cheaper there.
        peak([start(place, MODELS, name)])
        for run in options.only:
            plain = (0, 0)
            if RUNS[run].get("task") not in WITHOUT_PLAIN:
                with tempfile.TemporaryDirectory() as own, Workplace(Path(own)) as runs:
                    plain = measure_plain(runs, folder, run)
            for mode in options.modes:
                recipe = write_recipe(folder, run, RUNS[run], mode)
                asked = start(place, PEER, "init", *recipe, "--dry-run", "--format", "json")
                needed = asked.wait_for("estimate", LIMIT_S)
                asked.exit_code(LIMIT_S)
                with tempfile.TemporaryDirectory() as own, Workplace(Path(own)) as runs:
                    ram, gpu = measure_peers(runs, recipe)
                if gpu:
                    report(run, mode, "GPU", needed["device_bytes"], gpu, plain[1])
                ram_needed = needed["host_bytes" if gpu else "total_bytes"] + needed["joiner_bytes"]
                report(run, mode, "RAM", ram_needed, ram, plain[0])


def report(name: str, mode: str, place: str, promised: int, measured: int, plain: int) -> None:
    """Print one line of the table."""
    sizes = (promised, measured, plain, measured - plain) if plain else (promised, measured)
    figures = "".join(f"{size / MIB:>8.0f} MiB" for size in sizes)
    print(f"{name:<22}{mode:<11}{place:<8}{figures:<48}{promised / measured:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
