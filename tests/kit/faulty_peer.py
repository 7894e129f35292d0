"""A peer that trains a tiny model, says what happens to it, and goes wrong as told.

In `tests/swarm/test_faults.py` it is a command with real services and sockets, and says it in JSON lines; in
`tests.simulation` it lives in memory. `tests.kit.verdicts` judges what it says.

Faults of the command are data: `drop_peer("before-vote")` says what shall happen, and to nobody yet. The peer
calls `install` of its faults before it builds its optimizer, so that processes which that forks inherit them.
They wrap methods at the edges: where a peer looks for a group, sends, votes, is called. What lies between is
under test and does not know of them. What needs neither processes nor sockets is in `tests.simulation`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from trahiv_cli.errors import RoundFailed
from trahiv_cli.progress.history import History
from trahiv_cli.progress.leases import Leases
from trahiv_cli.progress.pace import Pace, RoundRules
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.rounds.allreduce import ExactAllReduce
from trahiv_cli.rounds.claims import Outcome, Round
from trahiv_cli.rounds.matchmaking import GroupFinder
from trahiv_cli.rounds.replay_log import Log
from trahiv_cli.rounds.round_service import RoundService
from trahiv_cli.rounds.vote import digest_of
from trahiv_cli.state.state_service import StateService
from trahiv_cli.step.auto import Adaptation
from trahiv_cli.step.build import METADATA_EXPIRATION_S, OptKeywords, build_optimizer
from trahiv_cli.step.optimizer import SwarmOptimizer
from trahiv_cli.step.run_settings import RunSettings
from trahiv_cli.swarm.corrections.processes import die_with_parent
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.checkpoint import Checkpoint
from trahiv_cli.train.entry import enter_swarm

WIDTH, HIDDEN = 40, 256
"""20,776 parameters: five parts of 8 KiB or less for each of two members, four for each of three."""
BATCH = 8
HELD_OUT = 512
AVERAGING_TIMEOUT_S, CHUNK_TIMEOUT_S = 20.0, 4.0
DHT = DhtSection(host_maddrs=["/ip4/127.0.0.1/tcp/0"], nat_port_map=False, auto_nat=False)

Event = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a peer does, apart from its faults."""

    num_peers: int = 3
    batches: int = 2
    """Of each peer of the swarm in a step."""

    seconds_per_batch: float = 0.1
    """So long that peers mostly sleep: the machine carries several."""

    smallest_batch: int = BATCH
    """Samples that a peer which is too slow trains at a time, if need be."""

    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    learning_rate: float = 3e-3
    codec: str | None = None
    part_bytes: int = 8192
    """Of a tensor, that travel in one message."""

    averaging_timeout: float = AVERAGING_TIMEOUT_S
    rules: RoundRules = field(default_factory=RoundRules)
    pace: Pace = field(default_factory=Pace)
    metadata_expiration: float = METADATA_EXPIRATION_S
    """Seconds that a peer which died without a goodbye is waited for. It reports twice as often."""

    has_buffers: bool = False
    """Whether the model has buffers that training moves: BatchNorm's."""

    auto_share: float | None = None
    """Of mode `auto`: the share of its time that a peer may wait."""

    num_samples: int = 0
    """In a pass over the data, which peers divide by leases; 0: nothing is divided."""

    def options(self) -> dict[str, Any]:
        """The words of `hivemind_config.opt`."""
        return {
            "run_id": "faults",
            "target_batch_size": self.batches * self.num_peers * BATCH,
            "matchmaking_time": 2.0,
            "average_state_every": 1,
            "averaging_timeout": self.averaging_timeout,
            "next_chunk_timeout": CHUNK_TIMEOUT_S,
            "load_state_timeout": 10.0,
            "grad_compression": self.codec,
            "averager_opts": {"part_size_bytes": self.part_bytes, "request_timeout": 1.0},
            "tracker_opts": {"metadata_expiration": self.metadata_expiration},
        }


QUICK_S = 0.05  # of a batch in `MODES_BESIDE_TRAINING`
MODES_BESIDE_TRAINING = {
    "overlap": Settings(pace=Pace(mode="overlap"), seconds_per_batch=QUICK_S, codec="float16"),
    "streaming": Settings(
        pace=Pace(mode="streaming", local_steps=8, fragments=4), seconds_per_batch=QUICK_S, codec="blockwise4"
    ),
}
"""Peers in the modes in which training goes on during a round."""


def draw(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw inputs and targets, each of shape (count, WIDTH), float32: targets are the inputs in reverse."""
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.flip(-1)


class Peer:
    """One peer's life, as it tells it."""

    newest: Checkpoint | None = None
    """What it goes on from."""

    def __init__(self, number: int, settings: Settings, reached: Callable[[], int]) -> None:
        self._number, self._settings = number, settings
        self._reached = reached
        """Says how far the swarm has come that it joins."""
        self._leases: Leases | None = None
        torch.manual_seed(0)
        layers = torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, WIDTH)
        norms = [torch.nn.BatchNorm1d(WIDTH)] if settings.has_buffers else []
        self._model = torch.nn.Sequential(*layers, *norms)
        self._held_out = draw(2**31, HELD_OUT)
        self._has_stepped = False
        self._parent = History()
        self._held = 0
        """Samples that were trained and are in no step yet."""
        self._began, self._blocked_s = 0.0, 0.0

    def say(self, event: str, **fields: Any) -> None:
        print(json.dumps({"v": 1, "event": event, "time": time.monotonic()} | fields), flush=True)

    def _hear(self, event: Event) -> None:
        """Tell of downloads, and of what a person should know."""
        if event["event"] == "download":
            self.say("download", **{name: event[name] for name in ("step", "bytes", "total", "donors")})
        elif "message" in event:
            self.say("notice", code=event.get("code", event["event"]), message=event["message"])

    def live(self, node: Node) -> None:
        """Train until the process is ended."""
        settings, address = self._settings, node.own_addresses()[0]
        optimizer = build_optimizer(
            OptKeywords.model_validate(settings.options()),
            RunSettings(pace=settings.pace, auto_share=settings.auto_share, rules=settings.rules),
            dht=node.dht,
            params=[{"params": list(self._model.parameters())}],
            model=self._model,
            optimizer=functools.partial(settings.optimizer, lr=settings.learning_rate),
            scheduler=lambda inner: torch.optim.lr_scheduler.ConstantLR(inner, factor=1.0),
            samples_per_step=BATCH,
            events=Events(self._hear),
        )
        self._listen(optimizer)
        if settings.num_samples:
            self._leases = optimizer.divide_data(settings.num_samples)
        self._enter(optimizer)
        self._count_anew(optimizer)  # a checkpoint may have own steps
        self.say("ready", peer=node.peer_id, maddrs=[address], **self._where(optimizer))
        self._train(optimizer)

    def _enter(self, optimizer: SwarmOptimizer) -> None:
        while True:
            try:
                enter_swarm(optimizer, self.newest, self._reached())
                return
            except RoundFailed:  # a person would type the command again
                time.sleep(1.0)

    def _listen(self, optimizer: SwarmOptimizer) -> None:
        position, runner = optimizer.position, optimizer.runner
        attempt, commit, come = runner.attempt, position.commit, optimizer.catch_up.come
        load = optimizer.catch_up.load

        def noted(history: History, *outcome: Any) -> None:
            # One call may take several steps, and go through rounds of others before.
            self._parent = optimizer.history
            commit(history, *outcome)
            self._has_stepped = True
            blocked_s = self._blocked_s + time.monotonic() - self._began
            self._say_step(optimizer, self._held, blocked_s)
            self._count_anew(optimizer)

        def told(deadline: float) -> Any:
            try:
                return attempt(deadline)
            except RoundFailed as error:
                self.say("failed", step=optimizer.local_epoch, reason=error.message)
                raise

        def came() -> bool:
            if is_dropped := come():
                self._count_anew(optimizer)
            return is_dropped

        def loaded(*args: Any, holders: Any = None) -> Any:
            taken = load(*args, holders=holders)
            if holders and taken:
                self.say("made-equal", **self._where(optimizer))
            return taken

        optimizer.catch_up.load = loaded  # type: ignore[method-assign]
        runner.attempt, position.commit = told, noted  # type: ignore[method-assign]
        optimizer.catch_up.come = came  # type: ignore[method-assign]

    def _count_anew(self, optimizer: SwarmOptimizer) -> None:
        # What training did during the round is for the next one.
        self._held, self._blocked_s = optimizer.position.method.samples_held, 0.0
        self._began = time.monotonic()

    def _train(self, optimizer: SwarmOptimizer) -> None:
        settings, index = self._settings, 0
        while True:
            size = int(max(settings.smallest_batch, min(BATCH, optimizer.samples_in_time)))
            inputs, targets = draw(1_000_003 * (self._number + 1) + index, size)
            index += 1
            taken = [self._leases.take() for _ in range(size)] if self._leases else []
            positions = [position for position in taken if position is not None]
            optimizer.work.announce(positions)
            optimizer.expect_batch(size, size, lend=True)
            loss = torch.nn.functional.mse_loss(self._model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self._compute(size)
            before, self._began, self._has_stepped = optimizer.history, time.monotonic(), False
            self._held += size
            with contextlib.suppress(RoundFailed):  # nobody gave it the newer state: it tries again
                optimizer.step()
            self._blocked_s += time.monotonic() - self._began
            for param in self._model.parameters():
                param.grad = None
            if optimizer.history != before and not self._has_stepped:
                self.say("loaded", blocked=self._blocked_s, **self._where(optimizer))
                self._count_anew(optimizer)

    def _compute(self, samples: int) -> None:
        time.sleep(self._settings.seconds_per_batch * samples / BATCH)

    def _say_step(self, optimizer: SwarmOptimizer, held: int, blocked_s: float) -> None:
        last: Round | None = optimizer.last_round
        self.say(
            "step",
            parent=self._parent.digest.hex(),
            step_samples=optimizer.step_samples,
            my_samples=optimizer.my_step_samples,
            held=held - optimizer.position.method.samples_held,
            blocked=blocked_s,
            group=list(last.group) if last else [],
            duplicates=optimizer.ledger.duplicates,
            lost=self._leases.lost if self._leases else 0,
            contributed=last.samples if last else {},
            left_out=last.left_out if last else {},
            reason=last.reason if last else "",
            **self._where(optimizer),
        )

    @torch.no_grad()
    def _where(self, optimizer: SwarmOptimizer) -> Event:
        history = optimizer.history
        inputs, targets = self._held_out
        self._model.eval()
        with optimizer.agreed_weights():
            told = {
                "step": history.step,
                "samples": history.samples,
                "digest": history.digest.hex(),
                "weights": digest_of([*self._model.parameters(), *self._model.buffers()]).hex()[:16],
                "loss": float(torch.nn.functional.mse_loss(self._model(inputs), targets)),
            }
        self._model.train()
        return told


def say_struck(fault: Any) -> None:
    """Have the peer say that a fault strikes; from any of its processes."""
    said = {"v": 1, "event": "fault", "time": time.monotonic(), "fault": type(fault).__name__}
    os.write(1, (json.dumps(said | asdict(fault)) + "\n").encode())


PHASES: dict[str, tuple[Any, str, int]] = {
    "matchmaking": (GroupFinder, "look_for_group", 1),
    "first-part": (ExactAllReduce, "_generate_input_for_peer", 1),
    "half-way": (ExactAllReduce, "_encode", 4),
    "before-vote": (RoundService, "_hold_vote", 1),
    "after-vote": (Log, "add", 1),
}
"""Moments of a round: it begins; the group stands and nothing was sent; some parts were averaged; this peer
holds the average and has told nobody; it has voted and not applied anything. Each is a method's n-th call."""


@dataclass(frozen=True)
class drop_peer:
    """All processes die by SIGKILL at one moment of the round for which the peer looks for the n-th group."""

    phase: str
    searches: int = 2

    def install(self) -> None:
        owner, name, calls = PHASES[self.phase]
        method, searches = getattr(owner, name), 0

        def dies(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls -= searches >= self.searches
            if calls == 0:
                say_struck(self)
                os.killpg(os.getpgrp(), signal.SIGKILL)
            return method(*args, **kwargs)

        setattr(owner, name, dies)
        look_for_group = GroupFinder.look_for_group

        def looks(*args: Any) -> Any:
            nonlocal searches
            searches += 1
            return look_for_group(*args)

        GroupFinder.look_for_group = looks  # type: ignore[method-assign]


@dataclass(frozen=True)
class change_pace:
    """Mode `auto` changes to a pace after the first round of a group of this size."""

    pace: Pace
    group_size: int

    def install(self) -> None:
        def choose(adaptation: Adaptation, present: Pace, outcome: Outcome) -> tuple[Pace, str]:
            return (self.pace if len(outcome.group) == self.group_size else present), ""

        Adaptation.choose = choose  # type: ignore[method-assign]


@dataclass(frozen=True)
class send_just_in_time:
    """The peer sends each part of its contribution just before the others would give it up."""

    pause_s: float = CHUNK_TIMEOUT_S - 0.5

    def install(self) -> None:
        generate = ExactAllReduce._generate_input_for_peer

        async def slowly(runner: ExactAllReduce, index: int, *more: Any) -> Any:
            say_struck(self)
            async for part in generate(runner, index, *more):
                await asyncio.sleep(self.pause_s)
                yield part

        ExactAllReduce._generate_input_for_peer = slowly  # type: ignore[method-assign]


@dataclass(frozen=True)
class stay_away:
    """The peer reports its samples and comes to no group; those that ask it to lead may be accepted."""

    accepts: bool

    def install(self) -> None:
        async def nobody(finder: GroupFinder, claim: bytes, deadline: float) -> None:
            say_struck(self)
            await asyncio.sleep(AVERAGING_TIMEOUT_S)

        async def silent(finder: GroupFinder, request: Any, peer: Any) -> Any:
            if self.accepts:
                yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
            await asyncio.sleep(3600.0)

        GroupFinder.look_for_group = nobody  # type: ignore[method-assign,assignment]
        GroupFinder.admit = silent  # type: ignore[method-assign]


CALLS = 160  # of each kind, to each peer, in one round of `ask_too_much`


@dataclass(frozen=True)
class ask_too_much:
    """In each round the peer asks all others, many times at once and whatever they answer.

    It votes in rounds that do not exist, asks for a state that is further than any, and answers no vote.
    """

    def install(self) -> None:
        hold_vote = RoundService._hold_vote
        asking: set[Any] = set()

        async def ask(service: RoundService, peer: PeerID) -> None:
            request = averaging_pb2.JoinRequest(schema_hash=os.urandom(20), gather=b"a vote")
            states = service.prefix.replace("grad", "state")
            stub = StateService.get_stub(service._p2p, peer, namespace=states)
            wish = MSGPackSerializer.dumps([b"", [2**61, b""], 0])
            offer = stub.rpc_offer_state(averaging_pb2.DownloadData(metadata=wish))
            await asyncio.gather(service.stub(peer).rpc_vote(request), offer, return_exceptions=True)

        async def asking_vote(service: RoundService, group_info: Any, *args: Any, **kwargs: Any) -> Any:
            say_struck(self)
            others = [peer for peer in group_info.peer_ids if peer != service._p2p.peer_id]
            running = asyncio.gather(*(ask(service, peer) for peer in others for _ in range(CALLS)))
            asking.add(running)
            running.add_done_callback(asking.discard)
            return await hold_vote(service, group_info, *args, **kwargs)

        @functools.wraps(RoundService.rpc_vote)
        async def deaf(service: RoundService, request: Any, context: Any) -> Any:
            await asyncio.sleep(3600)

        RoundService._hold_vote = asking_vote  # type: ignore[method-assign]
        RoundService.rpc_vote = deaf  # type: ignore[method-assign]


def main() -> None:
    """Be a peer: its number, what it does with what goes wrong, and addresses of others are the arguments."""
    die_with_parent()
    torch.set_num_threads(1)
    number, plan, *initial_peers = sys.argv[1:]
    settings, faults = pickle.loads(bytes.fromhex(plan))
    for fault in faults:
        fault.install()
    try:
        node = Node(DHT, Path(f"{number}.key"), tuple(initial_peers))
        Peer(int(number), settings, lambda: bool(initial_peers)).live(node)  # those train already
    finally:  # an error: threads would keep the process, and who waits for it would not hear of it
        traceback.print_exc()
        os.killpg(os.getpgrp(), signal.SIGKILL)
