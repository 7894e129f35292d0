"""Each trainer of docs/trainers.md in a swarm: one peer equals the trainer alone, two equal a larger batch, a
peer that comes late, is interrupted and comes back ends equal, and so do two that `trahiv launch` starts.

Two processes train the rows one after the other, each time in a swarm of their own over 127.0.0.1.
"""

import multiprocessing as mp
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

from tests.kit.commands import LOOPBACK
from tests.kit.lone import lone_node, train_alone
from tests.kit.trainers import BATCH, NUM_SAMPLES, ROWS, STEPS, parts_of
from tests.swarm.conftest import LOCAL
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.trainer import in_swarm

torch.set_num_threads(1)

OF_WHOLE_BATCHES = {"TRL, KTO", "TRL, ORPO", "TRL, CPO"}
"""Rows whose loss is no mean over samples: docs/trainers.md says why."""

KINDS = {"causal language model", "Seq2SeqTrainer, T5", "peft, LoRA", "TRL, DPO"}
IN_PAIRS = (ROWS.keys() if os.environ.get("TRAHIV_ALL_ROWS") else KINDS) - OF_WHOLE_BATCHES
"""Rows that two peers train: one of each kind, or all of them for `scripts/trainers.py`."""

LATE = ROWS.keys() if os.environ.get("TRAHIV_ALL_ROWS") else {"causal language model"}
LAUNCHED = ROWS.keys() if os.environ.get("TRAHIV_ALL_ROWS") else ()
"""Rows that a late peer trains, and a launched program; `test_launch.py` launches other programs."""

LATE_STEPS = 40

PROGRAM = """
import sys
import torch
from tests.kit.trainers import parts_of

torch.set_num_threads(1)
cls, positional, keywords = parts_of(sys.argv[1], sys.argv[2])
trainer = cls(*positional, **keywords)
trainer.train()
weights = [weight.detach() for weight in trainer.model.parameters() if weight.requires_grad]
torch.save(weights, sys.argv[2] + "/weights.pt")
"""


def weights(trainer):
    return torch.cat([p.detach().double().flatten() for p in trainer.model.parameters() if p.requires_grad])


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", ROWS)
def test_one_peer_equals_trainer_alone(name, tmp_path, monkeypatch):
    cls, positional, keywords = parts_of(name, tmp_path / "alone")
    alone = cls(*positional, **keywords)
    before = weights(alone)
    alone.train()
    cls, positional, keywords = parts_of(name, tmp_path / "swarm")
    config = {"opt": {"run_id": "row", "target_batch_size": BATCH}}
    own = {"hivemind_config": config, "node": lone_node()}
    ours = train_alone(monkeypatch, in_swarm(cls)(*positional, **keywords, **own))
    assert ours.swarm_optimizer.local_epoch == STEPS
    assert (weights(alone) - before).abs().max() > 1e-4, "the comparison would prove nothing"
    assert (weights(ours) - weights(alone)).abs().max() <= 1e-6
    assert losses(ours) == pytest.approx(losses(alone), abs=2e-4)


class WaitingForBoth(TrainerCallback):
    """Begins to train once both peers are in the swarm."""

    def __init__(self, both_in):
        self._both_in = both_in

    def on_train_begin(self, *_, **__):
        self._both_in.wait(60)


def train_half(name, number, folder, initial, both_in, ready):
    """Train every second sample of a row's data, together with the other peer.

    Returns the weights at the end, and for each step the indices of the samples that this peer used.
    """
    cls, positional, keywords = parts_of(name, folder / f"{number}")
    read = []
    used = []

    class Noted(Sampler):
        """100 passes over this half of the samples; notes each index in the whole data."""

        def __len__(self):
            return 100 * NUM_SAMPLES // 2

        def __iter__(self):
            for position in range(len(self)):
                index = position % (NUM_SAMPLES // 2)
                read.append(2 * index + number)
                yield index

    class Sequential(cls):
        def _get_train_sampler(self, *_):
            return Noted()

    def hear(event):
        if event["event"] == "step":
            count = event["my_samples"]
            used.append(read[:count])
            del read[:count]

    keywords["train_dataset"] = keywords["train_dataset"].select(range(number, NUM_SAMPLES, 2))
    with Node(LOCAL, folder / f"{number}.key", initial) as node:
        ready(node.own_addresses()[0])
        opt = {"run_id": "row", "target_batch_size": 2 * BATCH, "matchmaking_time": 2}
        swarm = {"mode": "sync", "divide_data": False}
        own = {"node": node, "events": Events(hear), "hivemind_config": {"opt": opt}, "swarm": swarm}
        trainer = in_swarm(Sequential)(*positional, **keywords, **own)
        trainer.add_callback(WaitingForBoth(both_in))
        trainer.train()
    return weights(trainer), used


def train_late(name, number, folder, initial, begun, back, ready):
    """Train a row; the second peer comes late, is interrupted and comes back. Returns a step and weights.

    `begun` is set once the first peer has taken some steps, `back` once the second one trains again.
    """

    def paced(cls):
        class Paced(cls):
            def training_step(self, *args, **kwargs):
                time.sleep(0.05 if back.is_set() else 0.5)
                return super().training_step(*args, **kwargs)

        return Paced

    def train(node, interrupt_after):
        cls, positional, keywords = parts_of(name, folder / f"{number}")
        keywords["args"].max_steps = LATE_STEPS
        own_steps = []

        def hear(event):
            if event["event"] == "step":
                own_steps.append(event["step"])
                if number == 0 and len(own_steps) == 3:
                    begun.set()
                if number and interrupt_after is None:
                    back.set()
                if len(own_steps) == interrupt_after:
                    os.kill(os.getpid(), signal.SIGINT)

        opt = {"run_id": "row", "target_batch_size": 2 * BATCH, "matchmaking_time": 2}
        own = {
            "node": node,
            "events": Events(hear),
            "hivemind_config": {"opt": opt},
            "swarm": {"mode": "sync"},
        }
        trainer = in_swarm(paced(cls))(*positional, **keywords, **own)
        try:
            trainer.train()
        except KeyboardInterrupt:
            assert interrupt_after, "only one interrupt was sent"
        return trainer

    if number == 0:
        begun.clear()
        back.clear()
    with Node(LOCAL, folder / f"{number}.key", initial) as node:
        ready(node.own_addresses()[0])
        if number:
            assert begun.wait(60)
            first = train(node, 3)
            assert first.swarm_optimizer.local_epoch < LATE_STEPS, "it came too late, or was not interrupted"
        trainer = train(node, None)
    return trainer.swarm_optimizer.local_epoch, weights(trainer)


def work(number, folder, tasks, answers, addresses, both_in, begun, back):
    """Train rows until None comes; a task is a function's name and a row's."""
    torch.set_num_threads(1)
    for how, name in iter(tasks.get, None):
        place = Path(folder, re.sub(r"\W+", "-", f"{how} {name}"))
        place.mkdir(exist_ok=True)
        initial = (addresses.get(timeout=60),) if number else ()
        try:
            ready = (lambda _: None) if number else addresses.put
            if how == "late":
                answers.put(train_late(name, number, place, initial, begun, back, ready))
            else:
                answers.put(train_half(name, number, place, initial, both_in, ready))
        except Exception as error:  # noqa: BLE001 - the test tells it
            answers.put(f"{type(error).__name__}: {error}")


@pytest.fixture(scope="module")
def train_by_two(tmp_path_factory):
    """Train a row by two peers; returns the result of `train_half` or `train_late` (`how`) of each."""
    context = mp.get_context("spawn")
    folder = str(tmp_path_factory.mktemp("pair"))
    both_in = context.Barrier(2)
    begun, back = context.Event(), context.Event()
    addresses = context.Queue()
    queues = [(context.Queue(), context.Queue()) for _ in range(2)]
    peers = [
        context.Process(target=work, args=(number, folder, *queues[number], addresses, both_in, begun, back))
        for number in range(2)
    ]
    for peer in peers:
        peer.start()

    def train(name, how="half"):
        for tasks, _ in queues:
            tasks.put((how, name))
        return [answers.get(timeout=120) for _, answers in queues]

    yield train
    for tasks, _ in queues:
        tasks.put(None)
    for peer in peers:
        peer.join(timeout=30)
        peer.kill()  # no effect if it has ended by itself
        peer.join()


def train_reference(name, folder, steps):
    """Train one process, in each step with all these samples as one batch.

    They are not a window of accumulation. There the Trainer adds the mean losses of the batches up, if the
    model's `forward` takes `**kwargs` and ignores `num_items_in_batch` (BERT, T5).
    """
    cls, positional, keywords = parts_of(name, folder)
    trainer = cls(*positional, **keywords)
    loader = trainer.get_train_dataloader()
    trainer.create_optimizer()
    trainer.create_scheduler(num_training_steps=STEPS)
    trainer.current_gradient_accumulation_steps = 1
    for indices in steps:
        whole = loader.collate_fn([loader.dataset[index] for index in indices])
        [batch], num_items = trainer.get_batch_samples(iter([whole]), 1, torch.device("cpu"))
        trainer.training_step(trainer.model, batch, num_items)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad()
    return weights(trainer)


@pytest.mark.parametrize("name", sorted(IN_PAIRS))
def test_two_peers_equal_a_larger_batch(name, tmp_path, train_by_two):
    (one, first), (two, second) = train_by_two(name)
    assert torch.equal(one, two), "replicas are bit-equal"
    assert len(first) == len(second) == STEPS
    steps = [[*mine, *theirs] for mine, theirs in zip(first, second, strict=True)]
    assert (one - train_reference(name, tmp_path, steps)).abs().max() <= 1e-5


@pytest.mark.parametrize("name", sorted(LATE))
def test_late_and_interrupted_peer_ends_equal(name, train_by_two):
    (step, one), (other_step, two) = train_by_two(name, "late")
    assert step == other_step == LATE_STEPS
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", sorted(LAUNCHED))
def test_launched_row_ends_equal(name, start, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def launch(folder, *options):
        words = ("--format", "json", *LOOPBACK, *options)
        return start("launch", *words, "--", program, name, folder, is_cold=True)

    usual = ("--target-batch-size", 2 * BATCH, "--swarm", "min_peers=2", "--swarm", "mode=sync")
    first = launch("first", *usual)
    first.wait_for("ready", 90)
    second = launch("second", "--peer", f"@{tmp_path}/first/invitation")
    assert [peer.exit_code(120) for peer in (first, second)] == [0, 0]
    one, two = (torch.load(tmp_path / folder / "weights.pt") for folder in ("first", "second"))
    assert all(map(torch.equal, one, two))
