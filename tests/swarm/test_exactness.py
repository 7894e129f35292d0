"""A swarm equals plain training: one peer equals transformers' Trainer, two equal one with all the data.

Every trained token counts once, in whichever peer's batch it is, and however long that batch is. Each peer
here is real: a DHT process, two averagers, sockets on 127.0.0.1. Texts are drawn by number, so that a
reference can be given exactly those that a peer used.
"""

import json
import multiprocessing as mp
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)

from tests.swarm.conftest import LOCAL, told
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.trainer import SwarmTrainer

pytestmark = pytest.mark.timeout(240)

BATCH, WINDOW, STEPS = 2, 4, 5


def draw(numbers, shortest=1, longest=40, empty=()):
    """Draw a random text for each number, always the same ones; the first token of each is not trained."""
    texts = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        tokens = torch.randint(3, 60, (length,), generator=generator).tolist()
        labels = [-100] * length if number in empty else tokens
        texts.append({"number": number, "input_ids": tokens, "labels": labels})
    return texts


def collate(samples):
    def padded(key, filler):
        rows = [torch.tensor(sample[key]) for sample in samples]
        return pad_sequence(rows, batch_first=True, padding_value=filler)

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


def build_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))


def arguments(folder, optim="sgd", **more):
    return TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, optim=optim,
        learning_rate=0.5 if optim == "sgd" else 1e-2, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5,
        lr_scheduler_type="cosine", train_sampling_strategy="sequential", remove_unused_columns=False,
        save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        **{"logging_strategy": "no"} | more,
    )  # fmt: skip


def weights(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters() if p.requires_grad])


class Clearing(TrainerCallback):
    """Clears the optimizer's gradients before training, as sentence-transformers does."""

    def on_train_begin(self, *_, optimizer, **__):
        optimizer.zero_grad(set_to_none=False)
        optimizer.zero_grad()


def train_alone(folder, data, model, target, optim="sgd", **more):
    """Train a swarm of one peer; return its weights and its events."""
    events = []
    with Node(LOCAL, folder / "identity.key") as node:
        trainer = SwarmTrainer(
            model=model,
            args=arguments(folder, optim, **more),
            train_dataset=data,
            data_collator=collate,
            node=node,
            events=Events(events.append),
            hivemind_config={"opt": {"run_id": "exact", "target_batch_size": target}},
            callbacks=[Clearing()],
        )
        trainer.train()
    assert trainer.swarm_optimizer.local_epoch == STEPS
    return weights(trainer.model), events


@pytest.mark.parametrize("optim, window", [("sgd", WINDOW), ("adamw_torch_fused", 1)])
def test_one_peer_equals_plain_trainer(tmp_path, optim, window):
    """With windows of accumulation as in Trainer, and with a step once the target is reached.

    Adapters are in `test_trl.py`.
    """
    torch.set_num_threads(1)
    third = range(2 * BATCH, 3 * BATCH)  # a batch without a trained token
    data = draw(range((STEPS + 1) * WINDOW * BATCH), empty=third)
    logs = {"logging_strategy": "steps", "logging_steps": 1}
    args = arguments(tmp_path, optim, gradient_accumulation_steps=WINDOW, **logs)
    plain = Trainer(model=build_model(), args=args, train_dataset=data, data_collator=collate)
    plain.train()
    target, folder = WINDOW * BATCH, tmp_path / "swarm"
    ours, events = train_alone(folder, data, build_model(), target, optim, gradient_accumulation_steps=window)
    expected = weights(plain.model)
    assert (expected - weights(build_model())).abs().max() > 1e-3, "the comparison would prove nothing"
    assert (ours - expected).abs().max() <= 1e-6
    losses = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    steps = told(events, "step")
    assert [event["loss"] for event in steps] == pytest.approx(losses, abs=1e-4)  # the log's digits
    assert [event["my_samples"] for event in steps] == [target] * STEPS


def test_partial_window_counts_its_samples(tmp_path):
    torch.set_num_threads(1)
    one_pass = (WINDOW + 2) * BATCH + 1  # a window, half a window, and less than a batch, which is left out
    whole, rest = WINDOW * BATCH, 2 * BATCH
    data = draw(range(one_pass))
    _, events = train_alone(tmp_path, data, build_model(), whole, gradient_accumulation_steps=WINDOW)
    counts = [whole, *[rest + whole] * (STEPS - 1)]
    for name in ("my_samples", "samples"):
        assert [step[name] for step in told(events, "step")] == counts


def test_splitting_after_out_of_memory_is_exact(tmp_path):
    """A forward pass that runs out of memory is in `tests/unit/train/test_batches.py`."""
    torch.set_num_threads(1)
    data, target = draw(range((STEPS + 1) * 3 * BATCH)), 3 * BATCH
    expected, _ = train_alone(tmp_path / "enough", data, build_model(), target)
    model, rows = build_model(), [0]

    def run_out(*_):
        if rows[0] > 1:
            raise torch.OutOfMemoryError("out of memory")

    def look(_, args, inputs):
        rows[0] = len(inputs["input_ids"])

    model.register_forward_pre_hook(look, with_kwargs=True)
    # The last layer's gradients are in the accumulators then.
    model.model.layers[0].self_attn.q_proj.weight.register_hook(run_out)
    ours, events = train_alone(tmp_path / "short", data, model, target)
    assert [event["code"] for event in told(events, "warning")] == ["memory"]
    assert (ours - expected).abs().max() <= 1e-7


PEER = 10_000
"""A peer's texts are numbered from this times the peer's number on."""


def texts_of(number):
    """Draw the short texts of peer 0, or the long ones of peer 1."""
    lengths = (24, 40) if number else (2, 6)
    return draw(range(PEER * number, PEER * number + 4000), *lengths)


class WaitingForBoth(TrainerCallback):
    """Begins to train once both peers are in the swarm."""

    def __init__(self, both_in):
        self._both_in = both_in

    def on_train_begin(self, *_, **__):
        self._both_in.wait(120)


def _peer(number, folder, address, both_in):
    """Train with the other peer, and write which texts went into which step."""
    torch.set_num_threads(1)
    initial = () if number == 0 else (address.get(timeout=60),)
    read = []
    steps = []

    def note(samples):
        read.append([sample["number"] for sample in samples])
        return collate(samples)

    def hear(event):
        if event["event"] == "step":
            used = event["my_samples"] // BATCH
            steps.append(read[:used])  # one batch is read ahead: it belongs to the next step
            del read[:used]

    with Node(LOCAL, folder / f"{number}.key", initial) as node:
        if number == 0:
            address.put(node.own_addresses()[0])
        opt = {"run_id": "exact", "target_batch_size": 8 * BATCH, "matchmaking_time": 2}
        trainer = SwarmTrainer(
            model=build_model(),
            args=arguments(folder / str(number)),
            train_dataset=texts_of(number),
            data_collator=note,
            node=node,
            events=Events(hear),
            hivemind_config={"opt": opt},
            swarm={"mode": "sync", "divide_data": False},  # each has texts of its own
        )
        trainer.add_callback(WaitingForBoth(both_in))
        trainer.train()
        torch.save(weights(trainer.model), folder / f"{number}.pt")
    (folder / f"{number}.json").write_text(json.dumps(steps))


def test_two_peers_equal_one_process(tmp_path):
    """One has short texts, the other one long texts."""
    context = mp.get_context("spawn")
    shared = context.Queue(), context.Barrier(2)
    peers = [context.Process(target=_peer, args=(n, tmp_path, *shared)) for n in (0, 1)]
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join(timeout=150.0)
        peer.kill()  # no effect if it has ended by itself, as it must
        peer.join()
    assert [peer.exitcode for peer in peers] == [0, 0]
    short, long = (json.loads((tmp_path / f"{number}.json").read_text()) for number in (0, 1))
    assert len(short) == len(long) == STEPS
    assert all(short + long), "both took part in each step"
    one, two = (torch.load(tmp_path / f"{number}.pt") for number in (0, 1))
    assert torch.equal(one, two), "replicas are bit-equal"
    torch.set_num_threads(1)
    by_tokens, by_samples = (train_reference(short, long, by) for by in (True, False))
    assert (by_tokens - by_samples).abs().max() > 1e-3, "the comparison would prove nothing"
    assert (one - by_tokens).abs().max() <= 1e-5


def train_reference(short, long, by_tokens):
    """One process over both peers' batches, each step one window of transformers' own accumulation.

    `short` and `long` are, by step, each peer's batches as numbers of texts. Unless `by_tokens`, each batch's
    own mean counts by its samples.
    """
    trainer = Trainer(model=build_model(), args=arguments(Path("unused")))
    trainer.model_accepts_loss_kwargs = by_tokens
    model, optimizer = trainer.model, trainer.create_optimizer()
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    texts = texts_of(0), texts_of(1)
    for first, second in zip(short, long, strict=True):
        batches = [collate([texts[n // PEER][n % PEER] for n in batch]) for batch in first + second]
        window, items = trainer.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
        trainer.current_gradient_accumulation_steps = len(window)
        for batch in window:
            trainer.training_step(model, batch, items)
        torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return weights(model)
