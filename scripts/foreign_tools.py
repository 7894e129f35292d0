"""Train with other tools and libraries through `trahiv launch`, and compare the peers' weights.

    scripts/foreign_tools.py [axolotl] [llamafactory] [swift] [sentence-transformers] --folder DIR

Without names, it tries all. For each tool it makes an environment in DIR, unless it is there, with
this tree's trahiv, and a tiny model. Two peers on this machine then train LoRA adapters for 20 steps, on the
CPU. It prints one line per tool: the versions and `equal`, or the reason why not. It fails unless all are
equal.

Some versions exceed the limits that a tool or trahiv declares; pip complains about them, but they work:

- LLaMA-Factory 0.9.5 wants transformers<=5.6, accelerate<=1.11, datasets<=4.0. It also wants trl<=0.24, and
  imports a class that later versions lack; `trahiv launch` itself needs no trl.
- ms-swift 4.6.0 wants trl<1, but trains with later versions.

It needs a package index, 10 GB of disk, and 10 minutes on two cores. DIR keeps the logs of pip and the peers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
LIMIT_S = 600.0
"""Of two peers' whole life."""

STOP_S = 30.0
NAMED = ("transformers", "trl", "peft", "accelerate", "datasets", "torch")
"""Packages whose versions are printed."""

PREPARE = """
import sys
from tests.kit.stand_ins import write_llama
write_llama(sys.argv[1], hidden_size=32)
"""
VERSIONS = (
    "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
)
AXOLOTL = """
base_model: model
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_modules: [q_proj, v_proj]
datasets: [{path: data/train.jsonl, ds_type: json, type: chat_template}]
sequence_len: 128
micro_batch_size: 4
max_steps: 20
learning_rate: 0.001
optimizer: adamw_torch
lr_scheduler: constant
bf16: false
tf32: false
seed: 42
"""
"""Without a seed, each peer would shuffle the data in another order."""

TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
EMBED = """
import json, sys
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from sentence_transformers import (
    SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss

out = sys.argv[1]
model = SentenceTransformer("model", device="cpu")
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="FEATURE_EXTRACTION")
model[0].model = get_peft_model(model[0].model, lora)
talks = [json.loads(line)["messages"] for line in open("data/train.jsonl")]
pairs = [{"question": talk[0]["content"], "answer": talk[1]["content"]} for talk in talks]
args = SentenceTransformerTrainingArguments(
    output_dir=out, max_steps=20, per_device_train_batch_size=4, learning_rate=1e-3, use_cpu=True,
    lr_scheduler_type="constant", report_to=[], dataloader_pin_memory=False,
)
SentenceTransformerTrainer(
    model, args, Dataset.from_list(pairs), loss=MultipleNegativesRankingLoss(model)
).train()
model[0].model.save_pretrained(out)
"""
FACTORY_DATA = {
    "tiny": {
        "file_name": "train.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": TAGS,
    }
}
USUAL = "--max_steps 20 --per_device_train_batch_size 4 --learning_rate 1e-3 --lr_scheduler_type constant"


@dataclass(frozen=True)
class Tool:
    """A training tool: what to install in which order, and how to train with it."""

    package: str
    installs: tuple[str, ...]
    """Arguments of pip, one call after the other; `TRAHIV` stands for this tree."""

    command: str
    environment: dict[str, str] = field(default_factory=dict)
    drops: tuple[str, ...] = ()
    """Packages or parts of them that need CUDA and that a text model does not need."""


TOOLS = {
    "axolotl": Tool(
        "axolotl",
        ("TRAHIV axolotl==0.19.0",),  # 0.21.0 needs Python 3.12
        "axolotl train axolotl.yml --output-dir OUT --dataset-prepared-path OUT-prepared",
        {"AXOLOTL_DO_NOT_TRACK": "1"},  # else it waits for its telemetry, offline without an end
    ),
    "llamafactory": Tool(
        "llamafactory",
        (
            "llamafactory==0.9.5 peft==0.18.1",
            "TRAHIV transformers==5.16.1 accelerate==1.13.0 datasets==4.8.4",
            "trl==0.24.0",
        ),
        "llamafactory-cli train --stage sft --do_train true --model_name_or_path model --template chatml "
        "--dataset_dir data --dataset tiny --finetuning_type lora --lora_rank 4 --lora_target q_proj,v_proj "
        f"--use_cpu true --bf16 false --report_to none --output_dir OUT {USUAL}",
        {"DISABLE_VERSION_CHECK": "1"},
        ("torchvision", "torchaudio/lib"),
    ),
    "swift": Tool(
        "ms-swift",
        ("ms-swift==4.6.0 peft==0.20.0 datasets==4.8.4", "TRAHIV transformers==5.19.0 trl==1.16.0"),
        "swift sft --model model --model_type llama --template chatml --dataset data/train.jsonl "
        "--tuner_type lora --lora_rank 4 --target_modules q_proj v_proj --torch_dtype float32 "
        "--gradient_accumulation_steps 1 --report_to none "
        "--add_version false "  # else each start has a folder of its own
        f"--output_dir OUT {USUAL}",
        {"USE_HF": "1"},
    ),
    "sentence-transformers": Tool(
        "sentence-transformers", ("TRAHIV sentence-transformers==6.2.0",), "embed.py OUT"
    ),
}


class Failed(Exception):
    """A tool did not get to equal weights; the message says why."""


def run(*command: str | Path, log: Path, **more: str) -> str:
    """Run a command that must succeed; return its output, which `log` keeps together with its errors."""
    with log.open("a") as errors:
        done = subprocess.run(
            list(map(str, command)), env=os.environ | more, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        errors.write(done.stdout)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command[1:6]))} failed; see {log}")
    return done.stdout


def install(tool: Tool, folder: Path) -> Path:
    """Make the tool's environment, unless it is there; return the path of its Python."""
    python = folder / "venv/bin/python"
    stamp = folder / "venv/installed"
    key = repr((TORCH, tool.installs, tool.drops, str(ROOT)))
    if stamp.exists() and stamp.read_text() == key:
        return python
    log = folder / "install.log"
    run(sys.executable, "-m", "venv", "--clear", folder / "venv", log=log)
    pip = (python, "-m", "pip", "install", "--quiet")
    run(*pip, "pip>=25", TORCH, log=log)  # first and alone: what follows keeps this build of it
    (folder / "constraints.txt").write_text(TORCH + "\n")
    for words in tool.installs:
        packages = words.replace("TRAHIV", f"--editable {ROOT}").split()
        run(*pip, "--constraint", folder / "constraints.txt", *packages, log=log)
    [packages_folder] = (folder / "venv/lib").glob("python*/site-packages")
    for name in tool.drops:
        shutil.rmtree(packages_folder / name, ignore_errors=True)
    stamp.write_text(key)
    return python


def prepare(python: Path, folder: Path) -> None:
    """Write the tiny model, the data and the tools' own files."""
    for name in ("first", "second", "first-prepared", "second-prepared", "model", "data"):
        shutil.rmtree(folder / name, ignore_errors=True)
    run(python, "-c", PREPARE, folder / "model", log=folder / "install.log", PYTHONPATH=str(ROOT))
    rows = []
    for n in range(200):
        said = {"user": f"What is {n} + {n}?", "assistant": f"It is {2 * n}."}
        rows.append({"messages": [{"role": role, "content": text} for role, text in said.items()]})
    (folder / "data").mkdir()
    (folder / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "data/dataset_info.json").write_text(json.dumps(FACTORY_DATA))
    (folder / "axolotl.yml").write_text(AXOLOTL)
    (folder / "embed.py").write_text(EMBED)


class Peer:
    """One `trahiv launch` in the tool's folder."""

    def __init__(self, tool: Tool, folder: Path, name: str, *options: str) -> None:
        self.out, self.log = folder / f"{name}.out", folder / f"{name}.log"
        self.folder = folder / name
        command = [folder / "venv/bin/trahiv", "launch", "--format", "json"]
        command += ["--host-maddr", "/ip4/127.0.0.1/tcp/0", *options, "--"]
        command += tool.command.replace("OUT", name).split()
        own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with self.out.open("w") as out, self.log.open("w") as log:
            self.process = subprocess.Popen(
                list(map(str, command)),
                cwd=folder,
                env=os.environ | own | tool.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
            )

    @property
    def events(self) -> list[dict[str, Any]]:
        """Its events, from among the tool's own output."""
        lines = self.out.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"v": ') and line.endswith("}")]

    def require_well(self, deadline: float) -> bool:
        """Return whether it has ended well; raise `Failed` if it ended otherwise or the deadline is over."""
        code = self.process.poll()
        if code:
            errors = [event for event in self.events if event["event"] == "error"]
            said = [" ".join(map(str, [e["message"], *e.get("differences", ())])) for e in errors]
            said += self.log.read_text(errors="replace").split("\n")[-2:-1]
            raise Failed(f"{self.folder.name} peer, exit code {code}: {(said or ['it said nothing'])[0]}")
        if time.monotonic() > deadline:
            raise Failed(f"the {self.folder.name} peer was not done in time; see {self.log}")
        return code == 0

    def stop(self) -> None:
        """End it and all processes of its session, if any is left."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def tensors(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Read the newest adapters below a folder: type, shape and bytes of each tensor, by its name."""
    files = sorted(folder.rglob("adapter_model.safetensors"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise Failed(f"the {folder.name} peer trained, but the tool saved no adapters")
    content = files[-1].read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        found[name] = (about["dtype"], about["shape"], content[start + begin : start + end])
    return found


def train(tool: Tool, folder: Path) -> str:
    """Train with two peers and compare what they saved; return how it went."""
    began = time.monotonic()
    deadline = began + LIMIT_S
    with contextlib.ExitStack() as end:
        options = ("--target-batch-size", "16", "--swarm", "min_peers=2", "--swarm", "mode=sync")
        peers = [Peer(tool, folder, "first", *options)]
        end.callback(peers[0].stop)
        while not any(event["event"] == "ready" for event in peers[0].events):
            if peers[0].require_well(deadline):
                raise Failed("the first peer ended without a swarm")
            time.sleep(0.5)
        peers.append(Peer(tool, folder, "second", "--peer", f"@{peers[0].folder / 'invitation'}"))
        end.callback(peers[1].stop)
        while sum(peer.require_well(deadline) for peer in peers) < len(peers):
            time.sleep(0.5)
    first, second = (tensors(peer.folder) for peer in peers)
    unlike = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    if unlike:
        raise Failed(f"{len(unlike)} of {len(first)} tensors differ, such as {unlike[0]}")
    if not any(any(value) for name, (_, _, value) in first.items() if "lora_B" in name):
        raise Failed("nothing was trained: the adapters are as they began")  # with zeros
    steps = [event for event in peers[0].events if event["event"] == "step"]
    common = sum(len((event["round"] or {"group": ()})["group"]) == 2 for event in steps)
    warned = {event["code"] for peer in peers for event in peer.events if event["event"] == "warning"}
    words = [f"equal after {steps[-1]['step']} steps, {common} of both, in {time.monotonic() - began:.0f} s"]
    return "; ".join(words + [f"warning {code}" for code in sorted(warned)])


def main() -> int:
    """Try each named tool; return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--folder", type=Path, required=True, help="for environments, models and logs")
    options = parser.parse_args()
    if unknown := set(options.tools) - set(TOOLS):
        parser.error(f"unknown: {', '.join(unknown)}")
    failed = False
    for name in options.tools or TOOLS:
        tool = TOOLS[name]
        folder = options.folder.resolve() / name
        folder.mkdir(parents=True, exist_ok=True)
        versions = tool.package
        try:
            python = install(tool, folder)
            log = folder / "install.log"
            versions = run(python, "-c", VERSIONS, tool.package, *NAMED, log=log).strip()
            prepare(python, folder)
            outcome = train(tool, folder)
        except Failed as error:
            outcome = str(error)
            failed = True
        print(f"{versions}: {outcome}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
