"""Whole peers in memory, and runs of them in which things go wrong.

A peer trains a tiny model as `tests.kit.faulty_peer` has it, which also says by which events a run is judged.
`Run` looks at every event of every peer, and raises where something is not as it was promised.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import math
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from tests.kit import faulty_peer
from tests.kit.faulty_peer import Event, Promises, Settings, find_lost_steps
from tests.simulation.faults import Fault
from tests.simulation.network import Message, VirtualLoop
from tests.simulation.strands import Strand
from tests.simulation.world import DELAY_S, OWNER, Dht, World
from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.ballot import Vote
from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.swarm.snapshot import digest_of_bytes
from trahiv_cli.swarm.statements import sign
from trahiv_cli.train.checkpoint import CheckpointData, Checkpoints
from trahiv_cli.train.entry import enter_swarm

# -- peers ----------------------------------------------------------------------------------------


class Peer(faulty_peer.Peer):
    """One peer's life in memory, from its start to its death.

    Args:
        world: that it lives in.
        name: of its identity.
        number: of its data.
        settings: of its run.
        can_be_called: whether others can dial it.
    """

    def __init__(
        self, world: World, name: str, number: int, settings: Settings, *, can_be_called: bool = True
    ) -> None:
        super().__init__(world.folder / name, number, settings)
        self.name, self.number, self.world = name, number, world
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.strands: list[Strand] = []
        self.dht = Dht(world, name)
        self.dht.client_mode = not can_be_called
        self.peer_id = self.dht.peer_id.to_base58()
        self.is_running, self.is_ready = True, False
        self.slowness = 1.0
        """Times which a batch takes longer."""
        self.spoils: float | None = None
        """What the next batch's gradients are multiplied by."""
        self.optimizer: SwarmOptimizer | None = None
        self._checkpoints = Checkpoints(world.folder / name, keep=1)

    def say(self, event: str, **fields: Any) -> None:
        """Tell the world what happens."""
        self.is_ready = self.is_ready or event == "ready"
        self.world.hear(self, {"event": event, "time": time.monotonic()} | fields)

    def addresses(self) -> list[Any]:
        """See `Node`."""
        return [SimpleNamespace(maddr="")]

    def start(self) -> None:
        """Begin to live."""
        context = contextvars.copy_context()
        context.run(OWNER.set, self)
        context.run(self.world.strands.spawn, self._run)

    def _run(self) -> None:
        self._newest = self._checkpoints.newest()
        if self._newest is not None:
            self._newest.load_weights(self._model)  # before the optimizer is built, as the Trainer does
        self.live(self, is_first=False)

    def kill(self) -> None:
        """End at once, without a goodbye."""
        self.is_running, self.dht.is_dead = False, True
        self.world.network.remove(self.dht.peer_id)
        for strand in self.strands:
            strand.kill()
        for task in tuple(self.tasks):
            task.cancel()

    def forget(self) -> None:
        """Lose the checkpoint."""
        shutil.rmtree(self.world.folder / self.name, ignore_errors=True)

    def save(self) -> None:
        """Write a checkpoint, as the Trainer does."""
        optimizer = self.optimizer
        assert optimizer is not None
        self._checkpoints.save(CheckpointData.of(self._model, optimizer))

    def _enter(self, optimizer: SwarmOptimizer, is_first: bool) -> None:
        del is_first
        self.optimizer = optimizer
        while True:
            try:
                enter_swarm(optimizer, self._newest, self.world.furthest)
                return
            except RoundFailed:  # a person would type the command again
                time.sleep(1.0)

    def _wait_for_go(self) -> None:
        pass

    def _compute(self) -> None:
        time.sleep(self.slowness * self._settings.seconds_per_batch)
        if self.spoils is not None:
            for param in self._model.parameters():
                param.grad.mul_(self.spoils)
            self.spoils = None


# -- a run ----------------------------------------------------------------------------------------

SETTLE_S = 600.0
SAVE_EVERY = 5
"""Steps between two checkpoints of a peer."""

COLLECT_EVERY = 10
"""Steps between two collections of garbage: a hundred peers leave 100 MB in a round."""


class Wrong(AssertionError):
    """Something that no fault excuses."""


@dataclass(frozen=True)
class Plan:
    """A run, but for its seed."""

    num_peers: int
    rounds: int
    faults: Sequence[Fault] = ()
    num_samples: int = 4096
    num_clients: int = 0
    """So many of the peers can't be called: the last ones."""

    slowness: Mapping[int, float] = field(default_factory=dict)
    """How many times longer a batch takes, by a peer's number."""

    settings: Settings = field(default_factory=Settings)
    patience_s: float = 15.0
    """A swarm in which nobody has taken a step for so long, though no link is cut and nobody stands still any
    more, waits for what does not come. It is less than an averaging timeout, which ends each wait at last."""


class Run:
    """Plays a plan, and looks at each event.

    Args:
        world: a new one.
        plan: of the run.
    """

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        self.settings = replace(plan.settings, num_peers=plan.num_peers, num_samples=plan.num_samples)
        self.events: dict[str, list[Event]] = {}
        self.struck: Counter[str] = Counter()
        self.failed = 0
        self._names = {number: str(number) for number in range(plan.num_peers)}
        self._due = sorted(plan.faults, key=lambda fault: fault.at_step)
        self._waiting: list[list[Any]] = []
        self._liars: set[str] = set()
        self._promises = Promises()
        self._lost: dict[str, int] = {}
        self._held_by_dead = 0
        self._moved_at = 0.0
        self._cuts: Counter[frozenset[int]] = Counter()
        self._sides: Counter[frozenset[int]] = Counter()
        self._stalled: Counter[str] = Counter()
        self._groups: dict[str, dict[str, frozenset[str]]] = {}
        self._branches_of_few: set[str] = set()
        """Steps that half of a group took, or fewer, when nothing was heard of the rest, and those after."""
        world.hear = self.hear
        world.network.tamper = self._tamper
        world.network.is_cut = self._is_cut
        world.network.delay_s = self._delay_s
        self._ids: dict[PeerID, str] = {}

    # -- what is seen ----------------------------------------------------------------------------

    def hear(self, peer: Peer, said: Event) -> None:
        """Look at an event.

        Raises:
            Wrong: it is not as it was promised.
        """
        self.events.setdefault(peer.name, []).append(said)
        self.failed += said["event"] == "failed"
        if "digest" not in said or peer.name in self._liars:
            return
        self._promises.hear(peer.name, said)
        broken = list(self._promises.broken)
        if said["event"] == "step":
            broken += self._judge_step(peer, said)
        if broken:
            self.world.strands.errors.append(Wrong("; ".join(broken)))
        if said["step"] > self.world.furthest:
            self.world.furthest, self._moved_at = said["step"], self.world.loop.now
            if said["step"] % COLLECT_EVERY == 0:
                gc.collect()
        if said["event"] == "step" and said["step"] % SAVE_EVERY == 0:
            peer.save()

    def _judge_step(self, peer: Peer, said: Event) -> Iterator[str]:
        self._lost[peer.name] = max(self._lost.get(peer.name, 0), said["lost"])
        if said["duplicates"] > sum(self._lost.values()) + self._held_by_dead:
            yield f"{said['duplicates']} samples were trained twice in a pass; leases lost: {self._lost}"
        children = self._groups.setdefault(said["parent"], {})
        children[said["digest"]] = group = frozenset(said["group"])
        is_of_most = self._is_of_most(said["parent"], group)
        if not is_of_most or said["parent"] in self._branches_of_few:
            self._branches_of_few.add(said["digest"])
        for digest, other in children.items():
            if digest != said["digest"] and is_of_most and self._is_of_most(said["parent"], other):
                yield f"after {said['parent'][:8]} {len(group)} and {len(other)} peers went two ways"

    def _is_of_most(self, parent: str, group: frozenset[str]) -> bool:
        """Whether a group has more than half of the group before it; half may go on, by the rules."""
        before = [children[parent] for children in self._groups.values() if parent in children]
        return not before or 2 * len(group & before[0]) > len(before[0])

    def steps(self, name: str) -> list[Event]:
        """The steps that a peer took itself, by its name."""
        return [said for said in self.events[name] if said["event"] == "step"]

    def reached(self) -> dict[str, int]:
        """The step of each peer that runs."""
        return {
            name: next((said["step"] for said in reversed(self.events.get(name, ())) if "step" in said), -1)
            for name, peer in self.world.peers.items()
            if peer.is_running
        }

    # -- what goes wrong -------------------------------------------------------------------------

    def _name_of(self, peer: PeerID) -> str:
        if peer not in self._ids:
            self._ids |= {one.dht.peer_id: name for name, one in self.world.peers.items()}
        return self._ids[peer]

    def _is_cut(self, one: PeerID, other: PeerID) -> bool:
        if not self._is_held_up:
            return False
        a, b = (self.world.peers[self._name_of(peer)] for peer in (one, other))
        return (
            not self._stalled.keys().isdisjoint((a.name, b.name))
            or frozenset((a.number, b.number)) in self._cuts
            or any((a.number in side) != (b.number in side) for side in self._sides)
        )

    @property
    def _is_held_up(self) -> bool:
        return bool(self._cuts or self._sides or self._stalled)

    def _delay_s(self, sender: PeerID, receiver: PeerID) -> float:
        if not self.struck["slow"]:
            return DELAY_S
        peers = self.world.peers
        return DELAY_S * max(peers[self._name_of(one)].slowness for one in (sender, receiver))

    def _tamper(self, message: Message) -> list[bytes]:
        for waiting in self._waiting:
            fault, left, peer = waiting
            is_it = (message.call, message.is_answer) == (fault.moment, fault.is_answer)
            if not is_it or message.sender != peer.dht.peer_id or not peer.is_running:
                continue
            waiting[1] -= 1
            if left > 0:
                continue
            self._waiting.remove(waiting)
            if fault.kind in ("corrupt", "misshapen"):
                self.struck[fault.kind] += 1
                spoil = _flipped if fault.kind == "corrupt" else _misshapen
                return [spoil(message.content, self.world.dice)]
            self.world.loop.call_soon(self._strike, fault, peer)
            break
        return [message.content]

    def _look(self) -> None:
        """Strike what is due."""
        while self._due and self._due[0].at_step <= self.world.furthest:
            fault = self._due.pop(0)
            peer = self.world.peers[self._names[fault.peer]]
            if fault.kind == "late":
                number = len(self._names)
                self._names[number] = f"{number} late"
                self._start(self._names[number], number)
                self.struck["late"] += 1
            elif fault.moment:
                self._waiting.append([fault, fault.skip, peer])
            elif peer.is_ready and peer.is_running:
                self._strike(fault, peer)

    def _strike(self, fault: Fault, peer: Peer) -> None:
        if not peer.is_running:
            return
        later = partial(self.world.loop.call_later, fault.seconds)
        self.struck[fault.kind] += 1
        match fault.kind:
            case "kill":
                self._held_by_dead += len(peer.optimizer.parts.work.leases.held) if peer.optimizer else 0
                peer.kill()
                later(self._bring_home, fault, peer)
            case "cut":
                pair = frozenset((peer.number, *fault.others))
                self._cuts[pair] += 1
                later(self._heal, self._cuts, pair)
            case "halve":  # who comes meanwhile is on the other side, or on that which it left
                side = frozenset((peer.number, *fault.others))
                if 2 * len(side) == len(self._names):  # exactly half of a group may go on, by the rules
                    side -= {peer.number}
                self._sides[side] += 1
                later(self._heal, self._sides, side)
            case "stall":
                self._stalled[peer.name] += 1
                later(self._heal, self._stalled, peer.name)
            case "slow":
                peer.slowness = 20.0
                later(setattr, peer, "slowness", 1.0)
            case "codec":
                _break_codec(peer)
            case "nan" | "enormous":
                self._promises.excuse(peer.name)  # what it drops it has trained
                peer.spoils = math.nan if fault.kind == "nan" else 1e6
            case "two-votes":
                self._liars.add(peer.name)
                _vote_twice(peer)
            case "boast":
                self._liars.add(peer.name)
                _boast(peer)

    @staticmethod
    def _heal(broken: Counter[Any], which: Any) -> None:
        broken[which] -= 1
        if not broken[which]:
            del broken[which]

    def _bring_home(self, fault: Fault, peer: Peer) -> None:
        name = peer.name
        if fault.homecoming == "as-new":
            name = f"{name}'"
            self._names[fault.peer] = name
        elif fault.homecoming == "empty-handed":
            peer.forget()
        self._start(name, peer.number)

    def _start(self, name: str, number: int) -> Peer:
        can_be_called = number < self.plan.num_peers - self.plan.num_clients
        batch_s = self.settings.seconds_per_batch * self.plan.slowness.get(number, 1.0)
        settings = replace(self.settings, seconds_per_batch=batch_s)
        peer = Peer(self.world, name, number, settings, can_be_called=can_be_called)
        self.world.peers[name] = peer
        peer.start()
        return peer

    # -- from the beginning to the end -----------------------------------------------------------

    async def play(self) -> None:
        """Play the plan, and let all peers meet.

        Raises:
            Wrong: something was not as it was promised.
        """
        first = self._start("0", 0)
        await self._until(lambda: first.is_ready, "the first peer is ready")
        for number in range(1, self.plan.num_peers):
            self._start(str(number), number)
        await self._until(lambda: self.world.furthest >= self.plan.rounds, "all rounds are committed")
        self._waiting.clear()
        await self._until(lambda: not self._is_held_up and self._all_there(), "all are home")
        beyond = self.world.furthest
        await self._until(lambda: self._are_equal(beyond), "all peers have one history")
        for digest, names in find_lost_steps(self.events).items():
            if digest in self._branches_of_few:
                continue
            left = [n for n in names if n not in self._liars and not _died_with(self.events[n], digest)]
            if 2 * len(left) > len(names):  # who comes back without it is a witness for the step before
                raise Wrong(f"step {digest[:8]} of {', '.join(names)} is in nobody's history")

    def _all_there(self) -> bool:
        return all(self.world.peers[name].is_running for name in self._names.values())

    def _are_equal(self, beyond: int) -> bool:
        held = [
            {
                said["digest"]
                for said in self.events.get(peer.name, ())
                if "digest" in said and said["step"] > beyond
            }
            for peer in self.world.peers.values()
            if peer.is_running and peer.name not in self._liars
        ]
        return bool(set.intersection(*held))

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        self._moved_at = began = self.world.loop.now
        while not is_so():
            await asyncio.sleep(0.1)
            if self.world.strands.errors:
                raise self.world.strands.errors[0]
            self._look()
            now = self.world.loop.now
            if self._is_held_up:
                self._moved_at = now
            never_settles = what.startswith("all peers") and now - began > SETTLE_S
            if never_settles or now - self._moved_at > self.plan.patience_s:
                raise Wrong(f"{what}: not for {now - began:.0f} s; steps reached: {self.reached()}")


def _died_with(events: Sequence[Event], digest: str) -> bool:
    """Whether a peer died with this step as the last that it had taken."""
    at = next(index for index, said in enumerate(events) if said.get("digest") == digest)
    following = next((said for said in events[at + 1 :] if "digest" in said), None)
    return following is None or following["event"] == "ready"


def _flipped(content: bytes, dice: random.Random) -> bytes:
    message = averaging_pb2.AveragingData.FromString(content)
    values = bytearray(message.tensor_part.buffer)
    if not values:
        return content
    values[dice.randrange(len(values))] ^= 1 << dice.randrange(8)
    message.tensor_part.buffer = bytes(values)
    return bytes(message.SerializeToString())


def _misshapen(content: bytes, dice: random.Random) -> bytes:
    del dice
    message = averaging_pb2.AveragingData.FromString(content)
    message.tensor_part.buffer = message.tensor_part.buffer[:-1]
    message.peer_id = digest_of_bytes(message.tensor_part.buffer)
    return bytes(message.SerializeToString())


def _break_codec(peer: Peer) -> None:
    """Have a peer's codec raise when it is used next."""
    options = peer.optimizer.grad_averager.allreduce_kwargs
    sound = options["compression"]
    broken = options["compression"] = copy.copy(sound)

    def raise_once(*_: Any, **__: Any) -> Any:
        options["compression"], broken.compress = sound, sound.compress
        raise RuntimeError("the codec failed")

    broken.compress = raise_once


def _boast(peer: Peer) -> None:
    """Have a peer's next claim say that it brings a million samples."""
    averager = peer.optimizer.grad_averager
    start_round = averager.start_round

    def start(claim: Any, *rest: Any) -> Any:
        averager.start_round = start_round
        return start_round(replace(claim, samples=10**6, weight=1e6), *rest)

    averager.start_round = start


def _vote_twice(peer: Peer) -> None:
    """Have a peer tell half of the others, in its next round, of another average than it holds."""
    averager = peer.optimizer.grad_averager
    exchange_votes, told = averager._exchange_votes, []

    async def exchange(other: PeerID, group_id: bytes, ballot: Any, statement: bytes) -> Any:
        told.append(other)
        if len(told) % 2:
            statement = sign(peer.dht.signing_key, ballot._about, Vote(b"x" * 32).to_bytes())
        if len(told) >= len(ballot.members) - 1:
            averager._exchange_votes = exchange_votes
        return await exchange_votes(other, group_id, ballot, statement)

    averager._exchange_votes = exchange


def simulate(plan: Plan, seed: int) -> Run:
    """Play a plan in a new world.

    Raises:
        Wrong: something was not as it was promised.
    """

    async def begin(folder: Path) -> Run:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = World(loop, seed, folder)
        with world.in_place():
            run = Run(world, plan)
            try:
                await run.play()
            finally:
                for peer in world.peers.values():
                    peer.kill()
                await asyncio.sleep(0)
        return run

    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(begin(Path(folder)))
