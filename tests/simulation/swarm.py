"""Runs of whole peers in memory in which things go wrong.

`Run` looks at every event of every peer, and ends where something is not as it was promised.
"""

import asyncio
import contextvars
import copy
import gc
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hivemind.proto import averaging_pb2

from tests.kit import faulty_peer
from tests.kit.faulty_peer import BATCH, Settings
from tests.kit.verdicts import Promises, find_lost_steps
from tests.simulation.faults import Fault, claim, vote_twice
from tests.simulation.network import run_virtually
from tests.simulation.world import DELAY_S, OWNER, Dht, World
from trahiv_cli.train.checkpoint import CheckpointData, Checkpoints
from trahiv_cli.wire import digest_of_bytes

SETTLE_S = 600.0
SAVE_EVERY = 5  # steps between two checkpoints of a peer
COLLECT_EVERY = 10  # steps between two collections of garbage: a hundred peers leave 100 MB in a round


class Wrong(AssertionError):
    """Something that no fault excuses."""


class Peer(faulty_peer.Peer):
    """One peer's life in memory, from its start to its death, without processes.

    Its name is that of its identity, its number that of its data; others can dial it if it `can_be_called`.
    """

    def __init__(
        self,
        world,
        name,
        number,
        settings,
        can_be_called=True,
        lies=(),
    ):
        super().__init__(number, settings, lambda: world.furthest)
        self.name = name
        self.number = number
        self.world = world
        self._lies = lies
        self.tasks = {}
        self.strands = []
        self.dht = Dht(world, name)
        self.dht.client_mode = not can_be_called
        self.peer_id = self.dht.peer_id.to_base58()
        self.is_running = True
        self.is_ready = False
        self.slowness = 1.0  # times which a batch takes longer
        self.trained = 0  # samples in all its batches
        self.spoils = None  # what the next batch's gradients are multiplied by
        self.tamper = None
        """What a liar makes of the messages that it sends."""
        self.batches_left = math.inf  # until it saves a checkpoint and ends
        self.optimizer = None
        self._checkpoints = Checkpoints(world.folder / name, keep=1)

    def say(self, event, **fields):
        self.is_ready = self.is_ready or event == "ready"
        self.world.hear(self, {"event": event, "time": time.monotonic()} | fields)

    def own_addresses(self):
        return [""]

    def start(self):
        context = contextvars.copy_context()
        context.run(OWNER.set, self)
        context.run(self.world.strands.spawn, self._run)

    def _run(self):
        self.newest = self._checkpoints.newest()
        if self.newest is not None:
            self.newest.load_weights(self._model)  # before the optimizer is built, as the Trainer does
        self.live(self)

    def kill(self):
        """End at once, without a goodbye."""
        self.is_running = False
        self.dht.is_dead = True
        self.world.network.remove(self.dht.peer_id)
        for strand in self.strands:
            strand.kill()
        for task in tuple(self.tasks):
            task.cancel()

    def forget(self):
        shutil.rmtree(self.world.folder / self.name, ignore_errors=True)

    def save(self):
        self._checkpoints.save(CheckpointData.of(self._model, self.optimizer))

    def _enter(self, optimizer):
        self.optimizer = optimizer
        for lie in self._lies:
            lie(self)
        super()._enter(optimizer)

    def _compute(self, samples):
        time.sleep(self.slowness * self._settings.seconds_per_batch * samples / BATCH)
        self.trained += samples
        self.batches_left -= 1
        if self.batches_left == 0:
            self.save()
            time.sleep(math.inf)  # the run sees that and ends it
        if self.spoils is not None:
            for param in self._model.parameters():
                param.grad.mul_(self.spoils)
            self.spoils = None


@dataclass(frozen=True)
class Plan:
    """A run, but for its seed."""

    num_peers: int
    rounds: int
    faults: Sequence[Fault] = ()
    num_clients: int = 0
    """So many of the peers can't be called: the last ones."""

    slowness: Mapping[int, float] = field(default_factory=dict)
    """How many times longer a batch takes, by a peer's number."""

    stops: Mapping[int, int] = field(default_factory=dict)
    """After how many batches of each of its lives a peer ends with a checkpoint, by a peer's number."""

    lies: Mapping = field(default_factory=dict)
    """Lists of lies of peers that lie all along, by number. To them nobody promises anything."""

    settings: Settings = field(default_factory=Settings)
    patience_s: float = 15.0
    """A swarm in which nobody has taken a step for so long, though no link is cut and nobody stands still any
    more, waits for what does not come. It is less than an averaging timeout, which ends each wait at last."""


class Run:
    """Plays a plan in a new world, and looks at each event."""

    def __init__(self, world, plan):
        self.world = world
        self.plan = plan
        self.settings = replace(plan.settings, num_peers=plan.num_peers, num_samples=4096)
        self.events = {}
        self.struck = Counter()
        self.failed = 0
        self._names = {number: str(number) for number in range(plan.num_peers)}
        self._ids = {}
        self._due = sorted(plan.faults, key=lambda fault: fault.at_step)
        self._waiting = []
        self._liars = {str(number) for number in plan.lies}
        self._promises = Promises()
        self._lost = {}
        self._held_by_dead = 0
        self._moved_at = 0.0
        self._breaks = []
        """Whether nothing gets through between two peers: each is a break of links that has not healed."""
        self._groups = {}
        world.hear = self.hear
        world.network.tamper = self._tamper
        world.network.is_cut = self._is_cut
        world.network.delay_s = self._delay_s

    # -- what is seen ----------------------------------------------------------------------------

    def hear(self, peer, said):
        """Look at an event; what is not as it was promised ends the run."""
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
            self.world.furthest = said["step"]
            self._moved_at = self.world.loop.now
            if said["step"] % COLLECT_EVERY == 0:
                gc.collect()
        if said["event"] == "step" and said["step"] % SAVE_EVERY == 0:
            peer.save()

    def _judge_step(self, peer, said):
        self._lost[peer.name] = max(self._lost.get(peer.name, 0), said["lost"])
        if said["duplicates"] > sum(self._lost.values()) + self._held_by_dead:
            yield f"{said['duplicates']} samples were trained twice in a pass; leases lost: {self._lost}"
        children = self._groups.setdefault(said["parent"], {})
        children[said["digest"]] = group = frozenset(said["group"])
        for digest, other in children.items():
            if digest != said["digest"] and not self._may_step_alone:
                yield f"after {said['parent'][:8]} {len(group)} and {len(other)} peers went two ways"

    def thrown_away(self):
        """Samples that peers have trained, and that are neither in the last history nor held."""
        peers = self.world.peers.values()
        held = sum(peer.optimizer.position.method.samples_held for peer in peers)
        committed = max(said[-1]["samples"] for said in self.events.values())
        return sum(peer.trained for peer in peers) - held - committed

    @property
    def _may_step_alone(self):
        """Whether a peer may step alone within the run though others are there, so that histories differ."""
        return self.settings.rules.solo_after_s < SETTLE_S

    def steps(self, name):
        """The steps that a peer took itself, by its name."""
        return self.said("step", name)

    def said(self, event, *names):
        """All events of this name, of all peers or of some."""
        return [one for name in names or self.events for one in self.events[name] if one["event"] == event]

    # -- what goes wrong -------------------------------------------------------------------------

    def _peer_of(self, peer):
        if peer not in self._ids:
            self._ids |= {one.dht.peer_id: name for name, one in self.world.peers.items()}
        return self.world.peers[self._ids[peer]]

    def _is_cut(self, one, other):
        if not self._breaks:
            return False
        a = self._peer_of(one)
        b = self._peer_of(other)
        return any(is_between(a, b) for is_between in self._breaks)

    def _delay_s(self, sender, receiver):
        if not self.struck["slow"]:
            return DELAY_S
        return DELAY_S * max(self._peer_of(one).slowness for one in (sender, receiver))

    def _tamper(self, message):
        if self.plan.lies and (tamper := self._peer_of(message.sender).tamper):
            return tamper(message)
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
                return [self._spoiled(message.content, has_its_shape=fault.kind == "corrupt")]
            self.world.loop.call_soon(self._strike, fault, peer)
            break
        return [message.content]

    def _spoiled(self, content, has_its_shape):
        """A part with one bit flipped; or cut, with the checksum of that."""
        part = averaging_pb2.AveragingData.FromString(content)
        dice = self.world.dice
        values = bytearray(part.tensor_part.buffer)
        if not values:
            return content
        if has_its_shape:
            values[dice.randrange(len(values))] ^= 1 << dice.randrange(8)
        else:
            part.peer_id = digest_of_bytes(values := values[:-1])
        part.tensor_part.buffer = bytes(values)
        return bytes(part.SerializeToString())

    def _look(self):
        """Strike what is due."""
        for peer in [one for one in self.world.peers.values() if one.is_running and not one.batches_left]:
            self._strike(Fault("kill", 0, peer.number, seconds=3.0, homecoming="from-checkpoint"), peer)
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

    def _strike(self, fault, peer):
        if not peer.is_running:
            return
        later = partial(self.world.loop.call_later, fault.seconds)
        self.struck[fault.kind] += 1
        some = frozenset((peer.number, *fault.others))
        match fault.kind:
            case "kill":
                self._held_by_dead += len(peer.optimizer.work.leases.held) if peer.optimizer else 0
                peer.kill()
                later(self._bring_home, fault, peer)
            case "cut":
                self._break(lambda a, b: {a.number, b.number} == some, later)
            case "halve":  # who comes meanwhile is on the other side, or on that which it left
                self._break(lambda a, b: (a.number in some) != (b.number in some), later)
            case "stall":
                self._break(lambda a, b: peer.name in (a.name, b.name), later)
            case "slow":
                peer.slowness = 20.0
                later(setattr, peer, "slowness", 1.0)
            case "codec":
                _break_codec(peer)
            case "nan" | "enormous":
                self._promises.excuse(peer.name)  # what it drops it has trained
                peer.spoils = math.nan if fault.kind == "nan" else 1e6
            case "two-votes" | "boast":
                self._liars.add(peer.name)
                boast = claim({"samples": 10**6, "weight": 1e6}, rounds=1)
                (vote_twice if fault.kind == "two-votes" else boast)(peer)

    def _break(self, is_between, later):
        self._breaks.append(is_between)
        later(self._breaks.remove, is_between)

    def _bring_home(self, fault, peer):
        name = peer.name
        if fault.homecoming == "as-new":
            name = f"{name}'"
            self._names[fault.peer] = name
        elif fault.homecoming == "empty-handed":
            peer.forget()
        self._start(name, peer.number)

    def _start(self, name, number):
        can_be_called = number < self.plan.num_peers - self.plan.num_clients
        batch_s = self.settings.seconds_per_batch * self.plan.slowness.get(number, 1.0)
        settings = replace(self.settings, seconds_per_batch=batch_s)
        peer = Peer(self.world, name, number, settings, can_be_called, self.plan.lies.get(number, ()))
        peer.batches_left = self.plan.stops.get(number, math.inf)
        self.world.peers[name] = peer
        peer.start()
        return peer

    # -- from the beginning to the end -----------------------------------------------------------

    async def play(self):
        """Play the plan, and let all peers meet; else raise `Wrong`."""
        first = self._start("0", 0)
        await self._until(lambda: first.is_ready, "the first peer is ready")
        for number in range(1, self.plan.num_peers):
            self._start(str(number), number)
        await self._until(lambda: self.world.furthest >= self.plan.rounds, "all rounds are committed")
        self._waiting.clear()
        peers = self.world.peers
        names = self._names
        await self._until(
            lambda: not self._breaks and all(peers[name].is_running for name in names.values()),
            "all are home",
        )
        beyond = self.world.furthest
        await self._until(lambda: self._are_equal(beyond), "all peers have one history")
        taken = find_lost_steps(self.events)  # by those that lie, too: they may have died with a step
        lost = {} if self._may_step_alone else find_lost_steps(self._of_honest())
        for digest, names in lost.items():
            left = [name for name in names if not _died_with(self.events[name], digest)]
            if 2 * len(left) > len(
                taken.get(digest, names)
            ):  # a peer back without it is a witness against it
                raise Wrong(f"step {digest[:8]} of {', '.join(names)} is in nobody's history")

    def _of_honest(self):
        return {name: said for name, said in self.events.items() if name not in self._liars}

    def _are_equal(self, beyond):
        held = [
            {one["digest"] for one in said if "digest" in one and one["step"] > beyond}
            for name, said in self._of_honest().items()
            if self.world.peers[name].is_running
        ]
        return bool(held and set.intersection(*held))

    async def _until(self, is_so, what):
        self._moved_at = began = self.world.loop.now
        while not is_so():
            await asyncio.sleep(0.1)
            if self.world.strands.errors:
                raise self.world.strands.errors[0]
            self._look()
            now = self.world.loop.now
            if self._breaks:
                self._moved_at = now
            never_settles = what.startswith("all peers") and now - began > SETTLE_S
            if never_settles or now - self._moved_at > self.plan.patience_s:
                reached = {name: said[-1] for name, said in self.events.items()}
                raise Wrong(f"{what}: not for {now - began:.0f} s; said last: {reached}")


def _died_with(events, digest):
    """Whether a peer died with this step as the last that it had taken."""
    at = next(index for index, said in enumerate(events) if said.get("digest") == digest)
    following = next((said for said in events[at + 1 :] if "digest" in said), None)
    return following is None or following["event"] == "ready"


def _break_codec(peer):
    service = peer.dht.services["ExactGradientAverager"]
    sound = service.options
    broken = copy.copy(sound.compression)

    def raise_once(*_, **__):
        service.options = sound
        raise RuntimeError("the codec failed")

    broken.compress = raise_once
    service.options = replace(sound, compression=broken)


def simulate(plan, seed):
    """Play a plan in a new world; raise `Wrong` if something was not as it was promised."""

    async def begin(folder):
        world = World(asyncio.get_running_loop(), seed, folder)
        with world.in_place():
            run = Run(world, plan)
            try:
                await run.play()
            finally:
                for peer in world.peers.values():
                    peer.kill()
                await asyncio.sleep(0)
        return run

    with tempfile.TemporaryDirectory() as folder:
        return run_virtually(begin(Path(folder)))
