"""Reinforcement learning together: completions a second of several peers, and rewards beside TRL alone.

    .venv/bin/python benchmarks/grpo.py [--peers 1 4] [--rate 5] [--seeds 3]

All train the built-in recipe `arithmetic-grpo`: a model of 0.3M weights that learns sums from rewards.

**Completions a second**: peers on hosts of a simulated network (`tests/kit/wan.py`), 5 Mbit/s up and down and
50 ms round trip by default. A completion takes 0.1 s, most of which is slept: that stands for a GPU. A step
has 128 completions; its average travels in mode `overlap` with codec `uniform8`, while the next completions
are written. Counted are the completions of committed steps after the fifth, over the time in between, beside
those of one peer alone. Four peers send 0.4 MB each in a step of 3.2 s, which takes 0.6 s at 5 Mbit/s;
adapters of 8M weights and steps of 100 s have the same ratio.

**Rewards**: the mean reward of the last 10,000 of 60,000 completions, by TRL's trainer alone, and by two
peers that divide the prompts, for each seed. Seeds differ, so compare the ranges. Steps of two peers have
more completions than the 128 that were asked for, so they take fewer steps.

The first part needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder and `tests` are not installed

from benchmarks.kit.paced_peers import spawn_here
from benchmarks.kit.tables import table
from tests.kit.commands import wait_until
from tests.kit.wan import Wan, address_of
from trahiv_cli.assets.data import build_datasets
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.recipe.agreement import AgreedRun, resolve
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Event, Events
from trahiv_cli.train.tasks import build_trainer, task_trainer, training_arguments

PACE_S = 0.1
"""For a completion."""

REWARD_PACE_S = 0.01
"""For a completion where rewards are compared: with steps of milliseconds, peers overshoot their target."""

STEP, FIRST_STEPS, STEPS = 128, 5, 20
COMPLETIONS, LAST = 60_000, 10_000
LIMIT_S = 1_200.0
COMMON = (
    "training.lr_scheduler_type=constant",
    "training.per_device_train_batch_size=16",
    "training.save_steps=0",
    "swarm.save_minutes=0",
    f"hivemind_config.opt.target_batch_size={STEP}",
    "hivemind_config.opt.matchmaking_time=2",
)


def run_of(*changes: str) -> AgreedRun:
    """Return the run of the recipe with changes."""
    return resolve(load_recipe("arithmetic-grpo", (*COMMON, *changes)).recipe)


def train(run: AgreedRun, folder: Path, address: str, friend: str, pace_s: float) -> None:
    """Train as one peer, in a process of its own; its steps are written into `folder`.

    `friend` is the folder of the peer to join, or "".
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True)

    def hear(event: Event) -> None:
        if event["event"] == "step":
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(event) + "\n")

    initial: tuple[str, ...] = ()
    if friend:
        wait_until(lambda: Path(friend, "address").exists(), LIMIT_S)
        initial = (Path(friend, "address").read_text(),)
    recipe = run.recipe
    tokenizer = build_tokenizer(recipe)
    splits = build_datasets(recipe, tokenizer, peer_seed=0)
    settings = DhtSection(host_maddrs=[f"/ip4/{address}/tcp/0"])
    with Node(settings, folder / "identity.key", initial) as node:
        arguments = training_arguments(run, folder)
        trainer: Any = build_trainer(run, arguments, splits, node=node, events=Events(hear))
        trainer.remove_callback(PrinterCallback)
        generate = trainer._generate_and_score_completions

        def paced(inputs: Any) -> Any:
            began = time.monotonic()
            completions = generate(inputs)
            time.sleep(max(0.0, pace_s * len(inputs) - (time.monotonic() - began)))
            return completions

        trainer._generate_and_score_completions = paced
        (folder / "new").write_text(node.own_addresses()[0])
        (folder / "new").rename(folder / "address")
        trainer.train()


def steps_of(
    run: AgreedRun, folder: Path, spawn: Any, addresses: Sequence[str], pace_s: float
) -> list[Event]:
    """Train with a peer on each address; return the steps that the first one reported."""
    first = folder / "0"
    processes = [
        spawn(number, train, (run, folder / f"{number}", address, str(first) if number else "", pace_s))
        for number, address in enumerate(addresses)
    ]
    try:
        wait_until(lambda: not any(process.is_alive() for process in processes), LIMIT_S)
        if any(process.exitcode for process in processes):
            raise RuntimeError("a peer failed")
    finally:
        for process in processes:
            process.kill()  # no effect if it has ended by itself
            process.join()
    return [json.loads(line) for line in (first / "steps.jsonl").read_text().splitlines()]


def completions_per_second(peers: int, rate_mbit: float) -> tuple[float, float]:
    """Train with paced peers; return completions a second, and the share of steps of all peers."""
    changes = ("swarm.mode=overlap", "hivemind_config.opt.grad_compression=uniform8")
    run = run_of(*changes, f"training.max_steps={STEPS}", f"swarm.min_peers={peers}")
    with tempfile.TemporaryDirectory() as folder, Wan(hosts=peers, rate_mbit=rate_mbit, delay_ms=25) as wan:
        addresses = [address_of(number) for number in range(peers)]
        steps = steps_of(run, Path(folder), wan.spawn, addresses, PACE_S)
    first, *counted = steps[FIRST_STEPS - 1 :]
    seconds = counted[-1]["t"] - first["t"]
    together = [len((step["round"] or {"group": ["me"]})["group"]) == peers for step in counted]
    return sum(step["samples"] or 0 for step in counted) / seconds, statistics.mean(together)


def reward_alone(seed: int) -> float:
    """Train with TRL's trainer alone; return the mean reward of the last completions."""
    steps = COMPLETIONS // STEP
    run = run_of(f"training.seed={seed}", f"training.max_steps={steps}", "training.logging_steps=1")
    recipe = run.recipe.changed("training", gradient_accumulation_steps=STEP // 16)
    run = AgreedRun.of(recipe)
    rewards = []

    class Rewards(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            rewards.extend([logs["reward"]] if "reward" in logs else [])

    with tempfile.TemporaryDirectory() as folder:
        splits = build_datasets(recipe, build_tokenizer(recipe), peer_seed=seed)
        trainer: Any = task_trainer(recipe, training_arguments(run, Path(folder)), splits)
        trainer.add_callback(Rewards())
        with contextlib.redirect_stdout(None):
            trainer.train()
    return statistics.mean(rewards[-LAST // STEP :])


def reward_of_two(seed: int) -> tuple[float, float]:
    """Train with two peers on loopback; return the mean reward of the last completions, and a step's size."""
    run = run_of("swarm.mode=sync", f"training.seed={seed}", "training.max_steps=100000", "swarm.min_peers=2")
    with tempfile.TemporaryDirectory() as folder:
        limited = AgreedRun.of(run.recipe.changed("training", max_steps=COMPLETIONS // STEP))
        steps = steps_of(limited, Path(folder), spawn_here, ["127.0.0.1"] * 2, REWARD_PACE_S)
    counted = 0
    last = []
    for step in steps:
        counted += step["samples"] or 0
        if COMPLETIONS - LAST < counted <= COMPLETIONS and "reward" in step:
            last.append(step["reward"])
    return statistics.mean(last), statistics.mean(step["samples"] for step in steps if step["samples"])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--rate", type=float, default=5.0, help="Mbit/s up and down")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    alone = 0.0
    for peers in options.peers:
        speed, together = completions_per_second(peers, options.rate)
        alone = alone or speed
        rows.append([str(peers), f"{speed:.2f}", f"{speed / alone:.2f}", f"{100 * together:.0f} %"])
    print(table(["peers", "completions a second", "times one", "steps of all"], rows), flush=True)
    rows = []
    for seed in range(1, options.seeds + 1):
        alone = reward_alone(seed)
        together, in_step = reward_of_two(seed)
        rows.append([str(seed), f"{alone:.3f}", f"{together:.3f}", f"{in_step:.0f}"])
    if rows:
        print(table(["seed", "TRL alone", "two peers", "completions in a step"], rows), flush=True)


if __name__ == "__main__":
    main()
