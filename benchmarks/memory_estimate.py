"""Is what `check --deep` promises what a run takes? Memory, estimated and measured, of each kind of run.

    .venv/bin/python benchmarks/memory_estimate.py [--only clm lora ...] [--modes sync auto ...] [--keep DIR]

Every run is one peer of a swarm, through the real command, with a model of about 100M weights that is drawn
and saved first, in mode sync unless others are named. A lone peer exchanges nothing: what a lossy codec keeps
is not measured, and of `auto`, whose estimate is for the most that it may come to, only how it begins.
Measured: the sum over the peer's processes of the memory that is theirs alone and their part of what they
share (PSS), 20 times a second; and on a GPU what torch had allocated there at most. Libraries that other
programs have in memory too count less, by up to 0.1 GiB: run nothing else that loads torch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tests` is beside this folder, not installed

from tests.kit.processes import memory_bytes, tree_of

MIB = 2**20
EVERY_S = 0.05
WORDS = 32000
ROWS = 64
ROW_WORDS = 400
PEER = "--as-peer"
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


def write_models(folder: Path) -> None:
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
        kind.from_config(config).to(dtype).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


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
    """Write a recipe of two steps, with a checkpoint after each; return what a command calls it by."""
    swarm = {"mode": mode, **MODES[mode]}
    if not run:
        training = ("max_steps=2", "warmup_steps=1", "eval_steps=1", "save_steps=1")
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
            "max_steps": 2, "save_steps": 1, "save_total_limit": 1,
            "per_device_train_batch_size": batch, **own,
        },
        "hivemind_config": {"opt": {"target_batch_size": 2 * batch, "matchmaking_time": 2}},
        "swarm": swarm,
        **sections,
    }  # fmt: skip
    file = folder / f"{recipe['name']}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return [str(file)]


# -- one run --------------------------------------------------------------------------------------


def as_peer(result: Path, words: list[str]) -> None:
    """Be the peer: run the command in this process, and write down what torch allocated on a GPU."""
    from trahiv_cli.cli.app import run

    try:
        run(words)
    finally:
        import torch

        if torch.cuda.is_available():
            result.write_text(json.dumps(torch.cuda.max_memory_allocated()))


def estimate(recipe: list[str]) -> dict[str, Any]:
    """Ask `init --dry-run`, in a process of its own, for its `estimate` event."""
    said = subprocess.run(
        [sys.executable, "-m", "trahiv_cli", "init", *recipe, "--dry-run", "--format", "json"],
        capture_output=True, text=True,
    )  # fmt: skip
    events = map(json.loads, said.stdout.splitlines())
    found = next((event for event in events if event["event"] == "estimate"), None)
    if found is None:
        raise SystemExit(f"no estimate of {recipe}:\n{said.stdout}{said.stderr}")
    return found


def measure(recipe: list[str], folder: Path) -> tuple[int, int]:
    """Train, and return the peak of RAM over all processes and of the GPU, in bytes."""
    result = folder / "gpu.json"
    words = ["init", *recipe, "--output-dir", str(folder / "run"), "--host-maddr", "/ip4/127.0.0.1/tcp/0"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, PEER, str(result), *words],
            stdout=log, stderr=log, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
        )  # fmt: skip
        peak = 0
        while process.poll() is None:
            peak = max(peak, memory_bytes(tree_of(process.pid)))
            time.sleep(EVERY_S)
    if process.returncode != 0:
        raise SystemExit(f"{recipe} failed:\n{(folder / 'log').read_text()[-2000:]}")
    return peak, json.loads(result.read_text()) if result.exists() else 0


def main() -> None:
    if sys.argv[1:2] == [PEER]:
        as_peer(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["sync"], metavar="MODE")
    parser.add_argument("--keep", type=Path, help="work here, and leave it")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        # In a process of its own: what torch leaves in memory here would make its libraries cheaper there.
        subprocess.run(
            [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import memory_estimate; "
             "memory_estimate.write_models(memory_estimate.Path(sys.argv[2]))",
             str(Path(__file__).parent), str(folder)],
            check=True, capture_output=True,
        )  # fmt: skip
        print(f"{'run':<22}{'mode':<11}{'memory':<8}{'estimate':>12}{'measured':>12}{'ratio':>8}")
        for name, mode in itertools.product(options.only, options.modes):
            recipe = write_recipe(folder, name, RUNS[name], mode)
            needed = estimate(recipe)
            with tempfile.TemporaryDirectory(dir=folder) as run:
                ram, gpu = measure(recipe, Path(run))
            if gpu:
                report(name, mode, "GPU", needed["device_bytes"], gpu)
                report(name, mode, "RAM", needed["host_bytes"], ram)
            else:
                report(name, mode, "RAM", needed["total_bytes"], ram)


def report(name: str, mode: str, place: str, promised: int, measured: int) -> None:
    """Print one line of the table."""
    figures = f"{promised / MIB:>8.0f} MiB{measured / MIB:>8.0f} MiB{promised / measured:>8.2f}"
    print(f"{name:<22}{mode:<11}{place:<8}{figures}", flush=True)


if __name__ == "__main__":
    main()
