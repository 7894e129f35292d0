"""An optimizer with 8-bit state, stepped where the weights are: replicas stay equal to the last bit.

Three real peers, each a process with a DHT and two averagers on 127.0.0.1. The third comes late, downloads
the state, and offloads its optimizer, which is each peer's own choice.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing as mp
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.optim.state_averager import dump_optimizer_state

from trahiv_cli.optim.assemble import build_optimizer
from trahiv_cli.optim.history import History
from trahiv_cli.recipe.schema import DhtSection, OptSection
from trahiv_cli.swarm.node import Node

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(180)]

DHT = DhtSection(host_maddrs=["/ip4/127.0.0.1/tcp/0"], nat_port_map=False, auto_nat=False)
BATCH = 4
LATE = 2
"""The number of the peer that comes late."""

STEPS = 3
"""How many are taken together, by the first two before the third comes, and by all three."""

PACE_S = 0.2
"""After each batch: a step of a few milliseconds is over before a latecomer has heard of it."""

UNKNOWN = -1
"""The last step, while the third peer may come and has not said when it has had enough."""


def paged_adamw_8bit(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW

    return AdamW(groups, lr=1e-2, weight_decay=0.1, optim_bits=8, is_paged=True)


def build_model() -> torch.nn.Module:
    """One matrix large enough for 8-bit state, and biases and a head that are not."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 1))


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """One number for all bits of the weights and of the optimizer's state."""
    layout, tensors = dump_optimizer_state(optimizer)
    numbers = [element["value"] for element in layout if element["type"] == "value"]
    content = hashlib.sha256(repr(numbers).encode())
    for tensor in (*(param.detach() for param in model.parameters()), *tensors):
        content.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


class Peer:
    """One peer: it trains on data of its own and notes what it is after each step."""

    def __init__(self, number: int, node: Node, offload: bool) -> None:
        self.model = build_model()
        options = OptSection(
            run_id="run",
            target_batch_size=4 * BATCH,
            matchmaking_time=2.0,
            offload_optimizer=True if offload else "auto",
        )
        self.optimizer = build_optimizer(
            options.model_dump(),
            dht=node.dht,
            params=[{"params": list(self.model.parameters())}],
            optimizer=paged_adamw_8bit,
            scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step)),
            samples_per_step=BATCH,
            max_grad_norm=0.5,
        )
        self._generator = torch.Generator().manual_seed(number)
        self.digests: dict[int, str] = {}
        """By step, of all bits of weights and optimizer state."""
        self.groups: dict[int, int] = {}
        """By step that was taken here, how many took it."""

    def train_batch(self) -> None:
        samples = torch.randn(BATCH, 64, generator=self._generator)
        assert self.optimizer.expect_batch(BATCH, BATCH, lend=True) == 1.0
        (self.model(samples) - samples.sum(1, keepdim=True)).square().mean().backward()
        self.optimizer.step()
        self.note()
        time.sleep(PACE_S)

    def note(self) -> None:
        step, round_ = self.optimizer.local_epoch, self.optimizer.last_round
        if step not in self.digests:
            self.digests[step] = digest(self.model, self.optimizer.opt)
            if self.optimizer.step_taken == step:
                self.groups[step] = len(round_.samples) if round_ else 1

    def has_stepped_with(self, others: int) -> bool:
        return list(self.groups.values()).count(1 + others) >= STEPS


def _run(
    number: int, folder: Path, address: mp.Queue, built: mp.Barrier, last_step: mp.Value, done: mp.Barrier
) -> None:
    torch.set_num_threads(1)
    first = () if number == 0 else (address.get(timeout=60),)
    with Node(DHT, folder / f"{number}.key", first) as node:
        if number == 0:
            address.put(node.addresses()[0].maddr)
            address.put(node.addresses()[0].maddr)
        if number == LATE:
            while last_step.value != UNKNOWN:
                time.sleep(0.1)
        peer = Peer(number, node, offload=number == LATE)
        try:
            peer.optimizer.tracker.refresh()
            if number == LATE:
                assert peer.optimizer.load_state_from_peers()
                peer.note()
            else:
                peer.optimizer.enter_step(History())
                built.wait(timeout=60)
            while last_step.value <= 0 or peer.optimizer.local_epoch < last_step.value:
                peer.train_batch()
                if number == LATE and last_step.value == UNKNOWN and peer.has_stepped_with(others=2):
                    last_step.value = peer.optimizer.local_epoch + 1  # nobody gets there without this peer
                elif last_step.value == 0 and peer.has_stepped_with(others=1):
                    last_step.value = UNKNOWN
            (folder / f"{number}.json").write_text(json.dumps([peer.digests, peer.groups]))
            done.wait(timeout=60)  # nobody leaves while another needs it
        finally:
            peer.optimizer.shutdown()


def test_replicas_with_8_bit_state_are_equal_and_a_latecomer_becomes_one(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    shared = context.Queue(), context.Barrier(2), context.Value("i", 0), context.Barrier(3)
    peers = [context.Process(target=_run, args=(number, tmp_path, *shared)) for number in range(3)]
    for peer in peers:
        peer.start()
    try:
        deadline = time.monotonic() + 150
        for peer in peers:
            peer.join(timeout=deadline - time.monotonic())
    finally:
        for peer in peers:
            peer.kill()  # nothing to end if it has left by itself, as it must
            peer.join()
    assert [peer.exitcode for peer in peers] == [0, 0, 0]
    notes = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3)]
    digests, groups = [of_peer for of_peer, _ in notes], [of_peer for _, of_peer in notes]
    for step in digests[0]:
        assert len({of_peer[step] for of_peer in digests if step in of_peer}) == 1, f"they differ at {step}"
    assert list(groups[0].values()).count(2) >= STEPS and list(groups[1].values()).count(2) >= STEPS
    together = [step for step, size in groups[LATE].items() if size == 3]
    assert len(together) >= STEPS and all(step in digests[0] and step in digests[1] for step in together)
    joined = min(digests[LATE], key=int)
    assert joined not in groups[LATE] and joined in digests[0], "its first state was another's"
