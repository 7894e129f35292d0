"""A peer that trains a tiny model, says what happens to it, and goes wrong as told.

In `tests/swarm/test_faults.py` it is a command with real services and sockets, and says it in JSON lines; in
`tests.simulation` it lives in memory. `tests.kit.verdicts` judges what it says.

Faults of the command are data: `drop_peer("before-vote")` says what shall happen, and to nobody yet. The peer
calls `install` of its faults before it builds its optimizer, so that processes which that forks inherit them.
They wrap methods at the edges: where a peer looks for a group, sends, votes, is called. What lies between is
under test and does not know of them. What needs neither processes nor sockets is in `tests.simulation`.
"""

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
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from trahiv_cli.errors import RoundFailed
from trahiv_cli.progress.history import History
from trahiv_cli.progress.pace import Pace, RoundRules
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.rounds.allreduce import ExactAllReduce
from trahiv_cli.rounds.claims import Round
from trahiv_cli.rounds.matchmaking import GroupFinder
from trahiv_cli.rounds.replay_log import Log
from trahiv_cli.rounds.round_service import RoundService
from trahiv_cli.rounds.vote import digest_of
from trahiv_cli.state.state_service import StateService
from trahiv_cli.step.auto import Adaptation
from trahiv_cli.step.build import TRACKER_OPTIONS, OptKeywords, build_optimizer
from trahiv_cli.step.run_settings import RunSettings
from trahiv_cli.swarm.corrections.processes import die_with_parent
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.entry import enter_swarm

WIDTH = 40
HIDDEN = 256
"""20,776 parameters: five parts of 8 KiB or less for each of two members, four for each of three."""
BATCH = 8
HELD_OUT = 512
AVERAGING_TIMEOUT_S = 20.0
CHUNK_TIMEOUT_S = 4.0
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
    metadata_expiration: float = TRACKER_OPTIONS["metadata_expiration"]
    """Seconds that a peer which died without a goodbye is waited for. It reports twice as often."""

    has_buffers: bool = False
    """Whether the model has buffers that training moves: BatchNorm's."""

    auto_share: float | None = None
    """Of mode `auto`: the share of its time that a peer may wait."""

    num_samples: int = 0
    """In a pass over the data, which peers divide by leases; 0: nothing is divided."""

    def options(self):
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


def draw(seed, count):
    """Draw inputs and targets, each of shape (count, WIDTH), float32: targets are the inputs in reverse."""
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.flip(-1)


class Peer:
    """One peer's life, as it tells it."""

    newest = None
    """What it goes on from."""

    def __init__(self, number, settings, reached):
        self._number = number
        self._settings = settings
        self._reached = reached
        """Says how far the swarm has come that it joins."""
        self._leases = None
        torch.manual_seed(0)
        layers = torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, WIDTH)
        norms = [torch.nn.BatchNorm1d(WIDTH)] if settings.has_buffers else []
        self._model = torch.nn.Sequential(*layers, *norms)
        self._held_out = draw(2**31, HELD_OUT)
        self._has_stepped = False
        self._parent = History()
        self._held = 0
        """Samples that were trained and are in no step yet."""
        self._began = 0.0
        self._blocked_s = 0.0

    def say(self, event, **fields):
        print(json.dumps({"v": 1, "event": event, "time": time.monotonic()} | fields), flush=True)

    def _hear(self, event):
        """Tell of downloads, and of what a person should know."""
        if event["event"] == "download":
            self.say("download", **{name: event[name] for name in ("step", "bytes", "total", "donors")})
        elif "message" in event:
            self.say("notice", code=event.get("code", event["event"]), message=event["message"])

    def live(self, node):
        """Train until the process is ended."""
        settings = self._settings
        address = node.own_addresses()[0]
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

    def _enter(self, optimizer):
        while True:
            try:
                enter_swarm(optimizer, self.newest, self._reached())
                return
            except RoundFailed:  # a person would type the command again
                time.sleep(1.0)

    def _listen(self, optimizer):
        catch_up = optimizer.catch_up
        attempt = optimizer.runner.attempt
        commit = optimizer.position.commit
        come = catch_up.come
        load = catch_up.load

        def noted(history, *outcome):
            # One call may take several steps, and go through rounds of others before.
            self._parent = optimizer.history
            commit(history, *outcome)
            self._has_stepped = True
            self._say_step(optimizer)
            self._count_anew(optimizer)

        def told(deadline):
            try:
                return attempt(deadline)
            except RoundFailed as error:
                self.say("failed", step=optimizer.local_epoch, reason=error.message)
                raise

        def came():
            if is_dropped := come():
                self._count_anew(optimizer)
            return is_dropped

        def loaded(*args, holders=None):
            taken = load(*args, holders=holders)
            if holders and taken:
                self.say("made-equal", **self._where(optimizer))
            return taken

        optimizer.runner.attempt = told
        optimizer.position.commit = noted
        catch_up.come = came
        catch_up.load = loaded

    def _count_anew(self, optimizer):
        # What training did during the round is for the next one.
        self._held = optimizer.position.method.samples_held
        self._blocked_s = 0.0
        self._began = time.monotonic()

    def _train(self, optimizer):
        settings = self._settings
        index = 0
        while True:
            size = int(max(settings.smallest_batch, min(BATCH, optimizer.samples_in_time)))
            inputs, targets = draw(1_000_003 * (self._number + 1) + index, size)
            index += 1
            taken = [self._leases.take() for _ in range(size)] if self._leases else []
            positions = [position for position in taken if position is not None]
            optimizer.work.announce(positions)
            optimizer.expect_batch(size, size, lend=True)
            loss = torch.nn.functional.mse_loss(self._model(inputs), targets)
            loss.backward()
            self._compute(size)
            before = optimizer.history
            self._began = time.monotonic()
            self._has_stepped = False
            self._held += size
            with contextlib.suppress(RoundFailed):  # nobody gave it the newer state: it tries again
                optimizer.step()
            self._blocked_s += time.monotonic() - self._began
            for param in self._model.parameters():
                param.grad = None
            if optimizer.history != before and not self._has_stepped:
                self.say("loaded", blocked=self._blocked_s, **self._where(optimizer))
                self._count_anew(optimizer)

    def _compute(self, samples):
        time.sleep(self._settings.seconds_per_batch * samples / BATCH)

    def _say_step(self, optimizer):
        last = optimizer.last_round or Round({}, 0.0, 0, 0, False)
        self.say(
            "step",
            parent=self._parent.digest.hex(),
            step_samples=optimizer.step_samples,
            my_samples=optimizer.my_step_samples,
            held=self._held - optimizer.position.method.samples_held,
            blocked=self._blocked_s + time.monotonic() - self._began,
            group=list(last.group),
            duplicates=optimizer.ledger.duplicates,
            lost=self._leases.lost if self._leases else 0,
            contributed=last.samples,
            left_out=last.left_out,
            reason=last.reason,
            **self._where(optimizer),
        )

    @torch.no_grad()
    def _where(self, optimizer):
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


def say_struck(fault):
    """Have the peer say that a fault strikes; from any of its processes."""
    said = {"v": 1, "event": "fault", "time": time.monotonic(), "fault": type(fault).__name__}
    os.write(1, (json.dumps(said | asdict(fault)) + "\n").encode())


PHASES = {
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

    def install(self):
        owner, name, calls = PHASES[self.phase]
        method = getattr(owner, name)
        searches = 0

        def dies(*args, **kwargs):
            nonlocal calls
            calls -= searches >= self.searches
            if calls == 0:
                say_struck(self)
                os.killpg(os.getpgrp(), signal.SIGKILL)
            return method(*args, **kwargs)

        setattr(owner, name, dies)
        look_for_group = GroupFinder.look_for_group

        def looks(*args):
            nonlocal searches
            searches += 1
            return look_for_group(*args)

        GroupFinder.look_for_group = looks


@dataclass(frozen=True)
class change_pace:
    """Mode `auto` changes to a pace after the first round of a group of this size."""

    pace: Pace
    group_size: int

    def install(self):
        def choose(adaptation, present, outcome):
            return (self.pace if len(outcome.group) == self.group_size else present), ""

        Adaptation.choose = choose


@dataclass(frozen=True)
class send_just_in_time:
    """The peer sends each part of its contribution just before the others would give it up."""

    def install(self):
        generate = ExactAllReduce._generate_input_for_peer

        async def slowly(runner, index, *more):
            say_struck(self)
            async for part in generate(runner, index, *more):
                await asyncio.sleep(CHUNK_TIMEOUT_S - 0.5)
                yield part

        ExactAllReduce._generate_input_for_peer = slowly


@dataclass(frozen=True)
class stay_away:
    """The peer reports its samples and comes to no group; those that ask it to lead may be accepted."""

    accepts: bool

    def install(self):
        async def nobody(finder, claim, deadline):
            say_struck(self)
            await asyncio.sleep(AVERAGING_TIMEOUT_S)

        async def silent(finder, request, peer):
            if self.accepts:
                yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
            await asyncio.sleep(3600.0)

        GroupFinder.look_for_group = nobody
        GroupFinder.admit = silent


CALLS = 160  # of each kind, to each peer, in one round of `ask_too_much`


@dataclass(frozen=True)
class ask_too_much:
    """In each round the peer asks all others, many times at once and whatever they answer.

    It votes in rounds that do not exist, asks for a state that is further than any, and answers no vote.
    """

    def install(self):
        hold_vote = RoundService._hold_vote
        asking = set()

        async def ask(service, peer):
            request = averaging_pb2.JoinRequest(schema_hash=os.urandom(20), gather=b"a vote")
            states = service.prefix.replace("grad", "state")
            stub = StateService.get_stub(service._p2p, peer, namespace=states)
            wish = MSGPackSerializer.dumps([b"", [2**61, b""], 0])
            offer = stub.rpc_offer_state(averaging_pb2.DownloadData(metadata=wish))
            await asyncio.gather(service.stub(peer).rpc_vote(request), offer, return_exceptions=True)

        async def asking_vote(service, group_info, *args, **kwargs):
            say_struck(self)
            others = [peer for peer in group_info.peer_ids if peer != service._p2p.peer_id]
            running = asyncio.gather(*(ask(service, peer) for peer in others for _ in range(CALLS)))
            asking.add(running)
            running.add_done_callback(asking.discard)
            return await hold_vote(service, group_info, *args, **kwargs)

        @functools.wraps(RoundService.rpc_vote)
        async def deaf(service, request, context):
            await asyncio.sleep(3600)

        RoundService._hold_vote = asking_vote
        RoundService.rpc_vote = deaf


def main():
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
