"""What the swarm costs a peer that is alone in it, and what checkpoints cost that: samples per second.

    .venv/bin/python benchmarks/lone_peer.py [--turns 5] [--steps 6]
    .venv/bin/python benchmarks/lone_peer.py --millions 50 [--seconds 0.3] [--mode sync]

Both train the model of `llama.yaml` on the same blocks with the same batches, clipping, schedule and number
of optimizer steps, in turns within one process, so that whatever else the machine does hits both. The
swarm's side pays for everything: DHT, rounds' process, progress reports, gradient accumulation, the step. A
third side is the swarm's with a checkpoint every other step, far more often than anybody needs. Printed: each
turn, the median of swarm over plain, and what a checkpoint costs in seconds and as a share of the time
between two of that recipe's.

With `--millions`, the model is a table of this number of values in millions, all of which are trained, and a
step waits `--seconds` as for a GPU: what then differs is the time that the swarm takes from each step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from trahiv_cli.assets.model import build_model, build_tokenizer
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.node import Node
from trahiv_cli.train.trainer import SwarmTrainer

BATCH = 8
RECIPE = load_recipe(Path(__file__).with_name("llama.yaml")).recipe
STEPS_A_CHECKPOINT = 2


class Case(NamedTuple):
    """What both sides train."""

    make: Callable[[], torch.nn.Module]
    local_steps: int  # in a step
    mode: str

    @property
    def samples_per_step(self) -> int:
        return BATCH * self.local_steps


class Table(torch.nn.Module):
    """A classifier whose weights are mostly an embedding; a batch waits as for a GPU."""

    def __init__(self, millions: float, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(int(millions * 1e6) // 256, 256)
        self.head = torch.nn.Linear(256, 2)
        self._seconds = seconds

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(self._seconds)
        means = self.table(input_ids).mean(1)
        return {"loss": torch.nn.functional.cross_entropy(self.head(means), labels[:, 0] % 2)}


def samples(count: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Draw tokens in the shape of the recipe's blocks: speed does not depend on what they say."""
    tokens = torch.randint(3, 259, (count, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one, "labels": one} for one in tokens]


class Clock(TrainerCallback):
    """Seconds from the first swarm step on, start-up left out."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.began = self.ended = 0.0
        self.local_steps = 0

    def on_step_end(self, args, state, control, **_):
        self.local_steps += 1
        if self.local_steps == self._case.local_steps:  # the first swarm step warms everything up
            self.began = time.perf_counter()
        self.ended = time.perf_counter()

    on_substep_end = on_step_end  # of a Trainer that accumulates by itself

    @property
    def samples_per_second(self) -> float:
        return (self.local_steps - self._case.local_steps) * BATCH / (self.ended - self.began)


def arguments(folder: Path, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=BATCH,
        learning_rate=RECIPE.training.learning_rate, weight_decay=RECIPE.training.weight_decay,
        warmup_steps=2, max_grad_norm=1.0, optim="adamw_torch_fused", lr_scheduler_type="cosine",
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, seed=42,
    )  # fmt: skip


def plain(case: Case, folder: Path, data: list[Any], steps: int) -> float:
    args = arguments(folder, steps)
    args.gradient_accumulation_steps = case.local_steps
    clock = Clock(case)
    trainer = Trainer(model=case.make(), args=args, train_dataset=data, callbacks=[clock])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock.samples_per_second


def swarm(case: Case, folder: Path, data: list[Any], steps: int, *, saves: bool = False) -> float:
    clock, args = Clock(case), arguments(folder, steps)
    if saves:
        args.save_strategy, args.save_steps = "steps", STEPS_A_CHECKPOINT
    settings = DhtSection(host_maddrs=["/ip4/127.0.0.1/tcp/0"], nat_port_map=False)
    with Node(settings, folder / "identity.key") as node:
        trainer = SwarmTrainer(
            model=case.make(), args=args, train_dataset=data, callbacks=[clock], node=node,
            hivemind_config={"opt": {"run_id": "bench", "target_batch_size": case.samples_per_step}},
            swarm={"mode": case.mode},
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.samples_per_second


def model() -> torch.nn.Module:
    return build_model(RECIPE, build_tokenizer(RECIPE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps a turn")
    parser.add_argument("--millions", type=float, default=0, help="trained values; 0: the llama's 0.9")
    parser.add_argument("--seconds", type=float, default=0.3, help="that a batch of the table waits")
    parser.add_argument("--mode", default="sync", help="swarm.mode")
    options = parser.parse_args()
    case = Case(model, 8, options.mode)
    if options.millions:
        case = Case(partial(Table, options.millions, options.seconds), 1, options.mode)
    logging.set_verbosity_error()
    data = samples(case.samples_per_step * (options.steps + 1), RECIPE.clm.max_length)
    sides = [("plain", plain), ("swarm", swarm), ("saving", partial(swarm, saves=True))]
    ratios, costs = [], []
    for turn in range(1, options.turns + 1):
        speeds = {}
        for name, side in sides if turn % 2 else reversed(sides):
            with tempfile.TemporaryDirectory() as folder:
                speeds[name] = side(case, Path(folder), data, options.steps)
        ratios.append(speeds["swarm"] / speeds["plain"])
        costs.append(
            case.samples_per_step * STEPS_A_CHECKPOINT * (1 / speeds["saving"] - 1 / speeds["swarm"])
        )
        said = ", ".join(f"{name} {speeds[name]:.1f}" for name, _ in sides)
        print(f"turn {turn}: {said} samples/s", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f})")
    cost = statistics.median(costs)
    apart = RECIPE.training.save_steps * case.samples_per_step / speeds["swarm"]
    print(f"a checkpoint costs {cost:.3f} s, {100 * cost / apart:.2f} % of the {apart:.0f} s between two")


if __name__ == "__main__":
    main()
