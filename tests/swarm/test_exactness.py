"""A swarm is plain training: one peer equals transformers' Trainer, two peers equal one that saw it all.

Every peer here is a real one: a DHT process, two averagers, sockets on 127.0.0.1. Batches are drawn by
index, so that a reference can be given exactly those that a peer used.
"""

from __future__ import annotations

import json
import multiprocessing as mp
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, get_scheduler
from transformers.trainer_callback import PrinterCallback

from tests.kit.pairs import CONTEXT, hold_until_both_are_in, run_pair
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.trainer import SwarmTrainer

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

BATCH, LENGTH, STEPS = 2, 16, 6
DHT = DhtSection(host_maddrs=["/ip4/127.0.0.1/tcp/0"], nat_port_map=False, auto_nat=False)


class Blocks(Dataset):
    """Random blocks; an index outside of the range wraps, so that any peer may ask for any block."""

    def __init__(self, order: list[int]) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._order[index])
        tokens = torch.randint(3, 60, (LENGTH,), generator=generator)
        return {"input_ids": tokens, "labels": tokens, "index": torch.tensor(self._order[index])}


def collate(
    samples: list[dict[str, torch.Tensor]], seen: list[list[int]] | None = None
) -> dict[str, torch.Tensor]:
    if seen is not None:
        seen.append([int(sample["index"]) for sample in samples])
    return {key: torch.stack([sample[key] for sample in samples]) for key in ("input_ids", "labels")}


def build_model(lora: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    if lora:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0))
        with torch.no_grad():  # B starts at zero, which would hide what happens to A
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.normal_(0, 0.02)
    return model


def arguments(folder: Path, optim: str, **more: object) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, optim=optim,
        learning_rate=0.5 if optim == "sgd" else 1e-2, weight_decay=0.1, warmup_steps=3, max_grad_norm=0.05,
        lr_scheduler_type="cosine", train_sampling_strategy="sequential", remove_unused_columns=False,
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, **more,
    )  # fmt: skip


def trainable(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters() if p.requires_grad])


def train_plain(folder: Path, optim: str, lora: bool, order: list[int], batches: int) -> torch.Tensor:
    """Plain Trainer, `batches` local batches an optimizer step, in the given order."""
    model = build_model(lora)
    trainer = Trainer(
        model=model,
        args=arguments(folder, optim, gradient_accumulation_steps=batches),
        train_dataset=Blocks(order),
        data_collator=collate,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainable(model)


def train_swarm(
    folder: Path, node: Node, optim: str, model: torch.nn.Module, data: Blocks, target: int, **more: object
) -> SwarmTrainer:
    trainer = SwarmTrainer(
        model=model,
        args=arguments(folder, optim),
        train_dataset=data,
        data_collator=collate,
        node=node,
        hivemind_config={"opt": {"run_id": "exact", "target_batch_size": target, "matchmaking_time": 2.0}},
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("optim", "tolerance"), [("sgd", 1e-7), ("adamw_torch_fused", 1e-6)])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_one_peer_equals_plain_trainer(tmp_path: Path, optim: str, tolerance: float, lora: bool) -> None:
    torch.set_num_threads(1)
    order = list(range(BATCH * 3 * STEPS + BATCH))
    expected = train_plain(tmp_path / "plain", optim, lora, order, batches=3)
    with Node(DHT, tmp_path / "identity.key") as node:
        model = build_model(lora)
        trainer = train_swarm(tmp_path / "swarm", node, optim, model, Blocks(order), target=3 * BATCH)
    assert trainer.swarm_optimizer is not None
    assert trainer.swarm_optimizer.local_epoch == STEPS
    moved = (expected - trainable(build_model(lora))).abs().max()
    assert moved > 1e-3, "the comparison would prove nothing"
    assert (trainable(trainer.model) - expected).abs().max() <= tolerance


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_peer_that_runs_out_of_memory_goes_on_in_parts_as_exactly(tmp_path: Path, where: str) -> None:
    torch.set_num_threads(1)
    order = list(range(BATCH * 3 * STEPS + BATCH))
    expected = train_plain(tmp_path / "plain", "sgd", False, order, batches=3)
    model, rows, warnings = build_model(lora=False), [0], []

    def run_out(*_: object) -> None:
        if rows[0] > 1:
            raise torch.OutOfMemoryError("out of memory")

    def look(_: object, args: tuple[object, ...], inputs: dict[str, torch.Tensor]) -> None:
        rows[0] = len(inputs["input_ids"])
        if where == "forward":
            run_out()

    model.register_forward_pre_hook(look, with_kwargs=True)
    if where == "backward":  # the last layer's gradients are in the accumulators then
        model.model.layers[0].self_attn.q_proj.weight.register_hook(run_out)

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            warnings.append(event)

    with Node(DHT, tmp_path / "identity.key") as node:
        folder, target = tmp_path / "swarm", 3 * BATCH
        trainer = train_swarm(folder, node, "sgd", model, Blocks(order), target, events=Events(hear))
    assert [warning["code"] for warning in warnings] == ["memory"]
    assert (trainable(trainer.model) - expected).abs().max() <= 1e-7


def _peer(number: int, folder: Path, address: mp.Queue, both_in: mp.Barrier, optim: str, target: int) -> None:
    """One of two peers, in a process of its own: trains, and writes what went into which step."""
    torch.set_num_threads(1)
    initial: tuple[str, ...] = ()
    if number == 1:
        initial = (address.get(timeout=60),)
    with Node(DHT, folder / f"{number}.key", initial) as node:
        if number == 0:
            address.put(node.addresses()[0].maddr)
        recorder = Recorder(folder, number)
        trainer = SwarmTrainer(
            model=build_model(lora=False),
            args=arguments(folder / str(number), optim),
            train_dataset=Blocks([1000 * (number + 1) + i for i in range(4000)]),
            data_collator=recorder.collate,
            node=node,
            events=Events(recorder.hear),
            hivemind_config={"opt": {"run_id": "exact", "target_batch_size": target, "matchmaking_time": 2}},
            swarm={"mode": "sync"},
        )
        trainer.remove_callback(PrinterCallback)
        hold_until_both_are_in(trainer, both_in)
        trainer.train()
        torch.save(trainable(trainer.model), folder / f"{number}.pt")
        recorder.write()


class Recorder:
    """Notes which samples went into which swarm step, as the peer's own events say."""

    def __init__(self, folder: Path, number: int) -> None:
        self._path = folder / f"{number}.json"
        self._batches: list[list[int]] = []
        self._steps: dict[int, list[list[int]]] = {}

    def collate(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return collate(samples, self._batches)

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            used = event["my_samples"] // BATCH
            assert event["samples"] is not None, "this peer missed a step: there is nothing to compare"
            # accelerate reads one batch ahead: what is left over belongs to the next step.
            self._steps[event["step"]] = self._batches[:used]
            del self._batches[:used]

    def write(self) -> None:
        self._path.write_text(json.dumps(self._steps))


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch_fused"])
def test_two_peers_equal_one_process_that_sees_both_their_batches(tmp_path: Path, optim: str) -> None:
    address, barrier = CONTEXT.Queue(), CONTEXT.Barrier(2)
    run_pair(_peer, *((number, tmp_path, address, barrier, optim, 8 * BATCH) for number in (0, 1)))
    torch.set_num_threads(1)
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in (0, 1))
    batches = [first[str(step)] + second[str(step)] for step in range(1, STEPS + 1)]
    assert all(first.values()) and all(second.values()), "both took part in each step"
    one, two = (torch.load(tmp_path / f"{number}.pt") for number in (0, 1))
    assert torch.equal(one, two), "replicas are bit-equal"
    assert (one - train_reference(optim, batches)).abs().max() <= 1e-5


def train_reference(optim: str, steps: list[list[list[int]]]) -> torch.Tensor:
    """One process, no Trainer: the mean gradient over all samples of a step, clipped, then one step."""
    model = build_model(lora=False)
    args = arguments(Path("unused"), optim)
    decay = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n in decay) is decays], "weight_decay": weight}
        for decays, weight in ((True, args.weight_decay), (False, 0.0))
    ]
    cls, keywords = Trainer.get_optimizer_cls_and_kwargs(args, model)
    optimizer = cls(groups, **keywords)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=3, num_training_steps=STEPS)
    for batches in steps:
        samples = [Blocks([index])[0] for batch in batches for index in batch]
        model(**collate(samples)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return trainable(model)
