"""What memory a run takes: what `check --deep` says, what two peers hold, and what plain Trainer holds.

    .venv/bin/python benchmarks/memory.py [--only quickstart mlm lora "sft, qlora" ...] [--modes sync auto]

Every run has a model of about 100M weights that is drawn and saved first (`quickstart` has its own of 0.6M).
Two peers train it together for a few steps through the real command, then two processes of plain Trainer
train it side by side: libraries are then shared by as many in both cases. Measured 20 times a second is the
sum over a peer's processes of the memory that is theirs alone and their part of what they share (PSS), and
on a GPU what torch had allocated at most. Printed of each run, of the peer that took more: the estimate and
its ratio, and what the peer held beyond plain Trainer. Run nothing else that loads torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder and `tests` are not installed

from tests.kit.processes import memory_bytes, tree_of

MIB = 2**20
EVERY_S = 0.05
WORDS = 32000
ROWS = 64
ROW_WORDS = 400
STEPS = 3
PEER, PLAIN = "--as-peer", "--as-plain-trainer"
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


def as_child(side: str, result: Path, words: list[str]) -> None:
    """Be a peer, or plain Trainer, in this process; write down what torch allocated on a GPU."""
    try:
        if side == PEER:
            from trahiv_cli.cli.app import run

            run(words)
        else:
            train_plainly(Path(words[0]), words[1], Path(words[2]))
    finally:
        import torch

        if torch.cuda.is_available():
            result.write_text(json.dumps(torch.cuda.max_memory_allocated()))


def train_plainly(folder: Path, name: str, output: Path) -> None:
    """Train the model of a run with plain Trainer, on random tokens in samples of the same length."""
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
        model = kind.from_pretrained(folder / own["model"], quantization_config=config, dtype=dtype)
        if quantized:
            model = prepare_model_for_kbit_training(model, bool(own.get("activation_checkpointing")))
    if "peft" in own:
        model = get_peft_model(model, LoraConfig(**own["peft"], target_modules="all-linear"))
    args = transformers.TrainingArguments(
        output_dir=str(output), max_steps=STEPS, save_steps=1, save_total_limit=1, report_to=[],
        disable_tqdm=True, per_device_train_batch_size=own["batch"], gradient_accumulation_steps=2,
        optim=own.get("optim", "adamw_torch_fused"), logging_strategy="no", dataloader_pin_memory=False,
        gradient_checkpointing=bool(own.get("activation_checkpointing")),
    )  # fmt: skip
    tokens = torch.randint(4, 1000, (2 * STEPS * own["batch"], own["length"]))
    labels = torch.zeros(len(tokens), dtype=torch.long) if own["task"] == "seq-cls" else tokens
    rows = [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]
    transformers.Trainer(model=model, args=args, train_dataset=rows).train()


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


class Child:
    """A process of this script, and the most that it and those that it started have held."""

    def __init__(self, folder: Path, side: str, *words: str) -> None:
        self._log, self._result = folder / "log", folder / "gpu.json"
        folder.mkdir()
        self.ram = 0
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, side, str(self._result), *words],
                stdout=log, stderr=log, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
            )  # fmt: skip

    def is_running(self) -> bool:
        """Look at its memory once; tell whether it runs."""
        self.ram = max(self.ram, memory_bytes(tree_of(self._process.pid)))
        return self._process.poll() is None

    def has_failed(self) -> bool:
        """Tell whether it has ended with an error."""
        return bool(self._process.poll())

    def end(self) -> None:
        """End it, if it still runs."""
        self._process.terminate()

    def gpu(self) -> int:
        """Return what torch had allocated there at most, in bytes, once it has ended well."""
        if self._process.returncode != 0:
            raise SystemExit(f"a process failed:\n{self._log.read_text()[-2000:]}")
        return json.loads(self._result.read_text()) if self._result.exists() else 0

    def join_line(self) -> list[str] | None:
        """Find the words by which others join this peer, if it has said them."""
        events = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        ready = next((event for event in events if event["event"] == "ready"), None)
        return shlex.split(ready["join"])[1:] if ready else None


def measure_peers(folder: Path, recipe: list[str]) -> tuple[int, int]:
    """Train with two peers; return the larger peak of RAM of all processes of one, and of a GPU, in bytes."""
    options = ["--host-maddr", "/ip4/127.0.0.1/tcp/0", "--yes", "--format", "json", "--output-dir"]
    first = Child(folder / "first", PEER, "init", *recipe, *options, str(folder / "first/run"))
    while (line := first.join_line()) is None and first.is_running():
        time.sleep(EVERY_S)
    words = ["join", *recipe, *(line or [])[1:], *options, str(folder / "second/run")]
    second = Child(folder / "second", PEER, *words)
    return _peaks(first, second)


def measure_plain(folder: Path, name: str) -> tuple[int, int]:
    """Train twice with plain Trainer, side by side; return the same."""
    sides = [folder / "plain", folder / "plain too"]
    return _peaks(*(Child(side, PLAIN, str(folder.parent), name, str(side / "run")) for side in sides))


def _peaks(*children: Child) -> tuple[int, int]:
    while sum(child.is_running() for child in children):  # looks at each of them
        if any(child.has_failed() for child in children):
            for child in children:
                child.end()
        time.sleep(EVERY_S)
    return max(child.ram for child in children), max(child.gpu() for child in children)


def main() -> None:
    if sys.argv[1:2] in ([PEER], [PLAIN]):
        as_child(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
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
            [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import memory; "
             "memory.write_models(memory.Path(sys.argv[2]))",
             str(Path(__file__).parent), str(folder)],
            check=True, capture_output=True,
        )  # fmt: skip
        columns = ("estimate", "measured", "plain", "beyond")
        print(
            f"{'run':<22}{'mode':<11}{'memory':<8}" + "".join(f"{name:>12}" for name in columns) + "  ratio"
        )
        for name in options.only:
            with tempfile.TemporaryDirectory(dir=folder) as runs:
                plain = (
                    measure_plain(Path(runs), name) if RUNS[name].get("task") not in WITHOUT_PLAIN else (0, 0)
                )
            for mode in options.modes:
                recipe = write_recipe(folder, name, RUNS[name], mode)
                needed = estimate(recipe)
                with tempfile.TemporaryDirectory(dir=folder) as runs:
                    ram, gpu = measure_peers(Path(runs), recipe)
                if gpu:
                    report(name, mode, "GPU", needed["device_bytes"], gpu, plain[1])
                ram_needed = needed["host_bytes"] if gpu else needed["total_bytes"]
                report(name, mode, "RAM", ram_needed, ram, plain[0])


def report(name: str, mode: str, place: str, promised: int, measured: int, plain: int) -> None:
    """Print one line of the table."""
    sizes = (promised, measured, plain, measured - plain) if plain else (promised, measured)
    figures = "".join(f"{size / MIB:>8.0f} MiB" for size in sizes)
    print(f"{name:<22}{mode:<11}{place:<8}{figures:<48}{promised / measured:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
