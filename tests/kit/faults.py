"""Failures as data: `drop_peer(at_step=2, phase="half-way")` says what shall happen, and to nobody yet.

A peer's process installs its faults before it builds its optimizer, so that the processes which that forks
inherit them. They wrap methods at the edges: where a peer looks for a group, encodes, sends, votes, calls
and is called. What lies between the edges is under test and does not know of them.

`at_step` is the swarm step that a peer has reached when the fault strikes: in the first round that it
tries from there on. A fault strikes once, and says so in the peer's log.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import itertools
import json
import math
import multiprocessing as mp
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import torch
from hivemind import DHT
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from trahiv_cli.optim.allreduce import ExactAllReduce
from trahiv_cli.optim.averager import ExactAverager
from trahiv_cli.optim.codecs import Codec
from trahiv_cli.optim.group_finder import Follower, GroupFinder
from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.optim.rounds import Exchange
from trahiv_cli.optim.seeker import GroupSeeker
from trahiv_cli.optim.soundness import Claim
from trahiv_cli.optim.state import ExactStateAverager
from trahiv_cli.swarm.snapshot import digest_of_bytes
from trahiv_cli.swarm.statements import sign

Phase = Literal["matchmaking", "first-part", "half-way", "before-vote", "after-vote"]
"""Moments of a round: it begins; the group stands and nothing was sent; half of the parts for one member
were sent; this peer holds the average and has told nobody; it has voted and not applied anything."""

PHASES: tuple[Phase, ...] = get_args(Phase)

FORK = mp.get_context("fork")  # what it makes is not left over when a peer is killed

CLAIMED = [field.name for field in fields(Claim)]
"""What a claim says, in the order in which it travels."""

FAR_AHEAD = 4096
"""Of the positions that honest peers have trained after some steps."""

SIGNAL_S = 0.2
"""For so long a process that is about to be stopped waits for the signal."""


class Scene:
    """What the faults of one peer share across its processes; make it in the peer's first process.

    Args:
        log: file that gets a JSON line whenever a fault strikes.
    """

    def __init__(self, log: Path) -> None:
        assert os.getpgrp() == os.getpid(), "faults end whole process groups: a peer needs one of its own"
        self._log = log
        self._step = FORK.Value(ctypes.c_int64, -1)
        self._averages_here = False
        self._at: dict[Phase, list[Callable[[], None]]] = {phase: [] for phase in PHASES}
        self._watch()

    def at(self, phase: Phase, act: Callable[[], None]) -> None:
        """Have `act` called at this moment of each round of gradients, in the DHT's process."""
        self._at[phase].append(act)

    def has_reached(self, step: int) -> bool:
        """Whether this is the process that averages gradients, and its peer is at `step` or beyond."""
        return self._averages_here and self._step.value >= step

    def once(self, fault: Fault, at_step: int) -> Callable[[], bool]:
        """Make a function that is true once: when it is time for `fault`. The strike is logged then."""
        has_struck = FORK.Value(ctypes.c_bool, False)

        def is_time() -> bool:
            if has_struck.value or not self.has_reached(at_step):
                return False
            has_struck.value = True
            self.tell(fault, self._step.value)
            return True

        return is_time

    def telling(self, fault: Fault) -> Callable[[], None]:
        """Make a function that logs, when it is called first, that a fault strikes; in any process."""
        has_struck = FORK.Value(ctypes.c_bool, False)

        def tell() -> None:
            if not has_struck.value:
                has_struck.value = True
                self.tell(fault, self._step.value)

        return tell

    def tell(self, fault: Fault, step: int) -> None:
        """Log that a fault strikes."""
        said = {"event": "fault", "time": time.monotonic(), "step": step} | fault.to_json()
        with self._log.open("a") as log:
            log.write(json.dumps(said) + "\n")

    def _reach(self, phase: Phase) -> None:
        if self._averages_here:
            for act in self._at[phase]:
                act()

    def _watch(self) -> None:
        try_once, serve = GroupSeeker.try_once, ExactAverager.serve
        look_for_group, hold_vote = GroupFinder.look_for_group, ExactAverager._hold_vote
        generate = ExactAllReduce._generate_input_for_peer

        def noted_try(seeker: GroupSeeker, deadline: float) -> Any:
            self._step.value = seeker.position.history.step
            return try_once(seeker, deadline)

        def noted_serve(averager: ExactAverager, *where: Any) -> None:
            self._averages_here = True
            serve(averager, *where)

        async def noted_look(finder: GroupFinder, step: Any) -> Any:
            self._reach("matchmaking")
            return await look_for_group(finder, step)

        async def noted_parts(runner: ExactAllReduce, index: int) -> AsyncIterator[Any]:
            self._reach("first-part")
            half = max(1, runner.tensor_part_container.num_parts_by_peer[index] // 2)
            async with aclosing(generate(runner, index)) as messages:
                num_sent = 0
                async for message in messages:
                    yield message
                    num_sent += 1
                    if num_sent == half:
                        self._reach("half-way")

        async def noted_vote(averager: ExactAverager, *args: Any, **kwargs: Any) -> Any:
            self._reach("before-vote")
            result = await hold_vote(averager, *args, **kwargs)
            self._reach("after-vote")
            return result

        GroupSeeker.try_once = noted_try  # type: ignore[method-assign]
        ExactAverager.serve = noted_serve  # type: ignore[method-assign]
        GroupFinder.look_for_group = noted_look  # type: ignore[method-assign]
        ExactAllReduce._generate_input_for_peer = noted_parts  # type: ignore[method-assign]
        ExactAverager._hold_vote = noted_vote  # type: ignore[method-assign]


class Fault(ABC):
    """Something that goes wrong in one peer."""

    @abstractmethod
    def install(self, scene: Scene) -> None:
        """Have it happen in this process and those that it forks."""

    def to_json(self) -> dict[str, Any]:
        """As JSON says it: the fault's name and its fields; numbers that are not finite as strings."""
        fields = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()  # type: ignore[call-overload]
        }
        return {"fault": type(self).__name__} | fields


@dataclass(frozen=True)
class drop_peer(Fault):
    """All processes of the peer die by SIGKILL at one moment of a round."""

    at_step: int = 2
    phase: Phase = "matchmaking"

    def install(self, scene: Scene) -> None:
        is_time = scene.once(self, self.at_step)

        def die() -> None:
            if is_time():
                os.killpg(os.getpgrp(), signal.SIGKILL)

        scene.at(self.phase, die)


@dataclass(frozen=True)
class stall(Fault):
    """The peer, or its averager alone, stands still at one moment of a round."""

    seconds: float = 20.0
    at_step: int = 2
    phase: Phase = "half-way"
    whole_peer: bool = True

    def install(self, scene: Scene) -> None:
        is_time = scene.once(self, self.at_step)

        def stand_still() -> None:
            if not is_time():
                return
            pids = [os.getpid()]
            if self.whole_peer:
                first = psutil.Process(os.getpgrp())
                pids = [process.pid for process in (first, *first.children(recursive=True))]
            ids = " ".join(map(str, pids))
            # One that stands still can't wake itself.
            alarm = f"kill -STOP {ids}; sleep {self.seconds}; kill -CONT {ids}"
            subprocess.Popen(["sh", "-c", alarm], start_new_session=True, stderr=subprocess.DEVNULL)
            time.sleep(SIGNAL_S)

        scene.at(self.phase, stand_still)


@dataclass(frozen=True)
class corrupt_part(Fault):
    """A byte of one encoded part changes in flight, after its checksum was taken.

    `averaged=False`: a part that this peer contributes to another's share. `averaged=True`: the average of
    one of its own parts, on its way back to one member.
    """

    at_step: int = 3
    averaged: bool = False

    def install(self, scene: Scene) -> None:
        is_time = scene.once(self, self.at_step)
        name = "_accumulate_parts_streaming" if self.averaged else "_generate_input_for_peer"
        original = getattr(ExactAllReduce, name)

        async def damaged(runner: ExactAllReduce, *args: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
            async with aclosing(original(runner, *args)) as messages:
                async for message in messages:
                    yield damage(message) if is_time() else message

        setattr(ExactAllReduce, name, damaged)


def damage(message: averaging_pb2.AveragingData) -> averaging_pb2.AveragingData:
    """Copy a message and flip one bit of its part."""
    changed = averaging_pb2.AveragingData.FromString(message.SerializeToString())
    content = bytearray(changed.tensor_part.buffer)
    content[len(content) // 2] ^= 0x10
    changed.tensor_part.buffer = bytes(content)
    return changed


Nonsense = Literal["truncated", "none", "inflated"]
"""Parts that a peer sends have half of their bytes; it sends a first one and no more; or the average of its
own share is a million times what it should be."""


@dataclass(frozen=True)
class send_nonsense(Fault):
    """What a peer contributes, in every round from `from_step` on, is of no use to anybody."""

    how: Nonsense
    from_step: int = 0

    def install(self, scene: Scene) -> None:
        generate, is_first = ExactAllReduce._generate_input_for_peer, scene.once(self, self.from_step)
        encode = ExactAllReduce._encode

        async def inflated(runner: ExactAllReduce, part_index: int, average: torch.Tensor) -> Any:
            factor = 1e6 if is_first() or scene.has_reached(self.from_step) else 1.0
            return await encode(runner, part_index, average * factor)

        if self.how == "inflated":
            ExactAllReduce._encode = inflated  # type: ignore[method-assign]
            return

        async def nonsense(runner: ExactAllReduce, index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
            is_first()
            async with aclosing(generate(runner, index)) as messages:
                async for message in messages:
                    if not scene.has_reached(self.from_step):
                        yield message
                        continue
                    yield truncate(message) if self.how == "truncated" else message
                    if self.how == "none":
                        await asyncio.sleep(3600)

        ExactAllReduce._generate_input_for_peer = nonsense  # type: ignore[method-assign]


def truncate(message: averaging_pb2.AveragingData) -> averaging_pb2.AveragingData:
    """Copy a message with half of its part, and the checksum of that."""
    changed = averaging_pb2.AveragingData.FromString(message.SerializeToString())
    half = message.tensor_part.buffer[: len(message.tensor_part.buffer) // 2]
    changed.tensor_part.buffer, changed.peer_id = half, digest_of_bytes(half)
    return changed


@dataclass(frozen=True)
class poison(Fault):
    """The peer brings another gradient than it has, in every round from `from_step` on.

    It is put in after the peer's own checks, so that it gets onto the wire. With a `factor` it is the true
    one times that; else one of norm |`norm`|, against the true one's direction if that is negative.
    `claimed`: the norm that the peer says it brings; None: that which it brings.
    """

    norm: float = 1e6
    from_step: int = 0
    factor: float | None = None
    claimed: float | None = None

    def install(self, scene: Scene) -> None:
        prepare = ExactAverager._prepare_contribution
        is_first = scene.once(self, self.from_step)

        def poisoned(averager: ExactAverager, exchange: Exchange) -> float:
            honest = prepare(averager, exchange)
            is_first()
            if not scene.has_reached(self.from_step):
                return honest
            factor = self.norm / max(honest, 1e-30) if self.factor is None else self.factor
            with averager.get_tensors() as tensors, torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(factor)
            return abs(factor) * honest if self.claimed is None else self.claimed

        ExactAverager._prepare_contribution = poisoned  # type: ignore[method-assign]


@dataclass(frozen=True)
class rewrite_claims(Fault):
    """The peer brings poison, and says in rounds that it leads that no other gradient is finite."""

    factor: float = -1000.0

    def install(self, scene: Scene) -> None:
        poison(factor=self.factor).install(scene)
        form_group, is_first = GroupFinder._form_group, scene.once(self, 0)

        def lying(finder: GroupFinder, search: Any, members: Mapping[PeerID, Follower]) -> Any:
            is_first()
            not_finite = Claim(samples=8, norm=math.inf).to_bytes()
            forged = sign(finder._key, finder._about(search.schema), not_finite)
            changed = {peer: replace(member, statement=forged) for peer, member in members.items()}
            return form_group(finder, search, changed if scene.has_reached(0) else members)

        GroupFinder._form_group = lying  # type: ignore[method-assign]


@dataclass(frozen=True)
class lie_in_claim(Fault):
    """The peer claims something else in every round.

    `said` by the fields of `Claim`, as they travel. `num_isolated`: it claims to have trained so many
    positions, far ahead, none of which touches another; others in each round.
    """

    said: Mapping[str, Any] = field(default_factory=dict)
    num_isolated: int = 0

    def install(self, scene: Scene) -> None:
        look_for_group, is_first = GroupFinder.look_for_group, scene.once(self, 0)
        first = itertools.count(FAR_AHEAD, 2 * self.num_isolated)

        async def lying(finder: GroupFinder, step: Any) -> Any:
            if scene.has_reached(0):
                is_first()
                said = dict(zip(CLAIMED, MSGPackSerializer.loads(step.data_for_gather), strict=True))
                said |= self.said
                if self.num_isolated:
                    at = next(first)
                    said["trained"] = list(range(at, at + 2 * self.num_isolated))
                step._data_for_gather = MSGPackSerializer.dumps(list(said.values()))
            return await look_for_group(finder, step)

        GroupFinder.look_for_group = lying  # type: ignore[method-assign]


@dataclass(frozen=True)
class lie_in_report(Fault):
    """All reports of the peer say something else; `said` by the fields of `Report`."""

    said: Mapping[str, Any]

    def install(self, scene: Scene) -> None:
        store, tell = DHT.store, scene.telling(self)

        def lying(dht: DHT, key: Any, value: Any, *args: Any, **options: Any) -> Any:
            if isinstance(value, dict) and value.keys() >= self.said.keys():
                tell()
                value = value | self.said
            return store(dht, key, value, *args, **options)

        DHT.store = lying  # type: ignore[method-assign]


@dataclass(frozen=True)
class lie_about_time(Fault):
    """Who asks the peer for the time is told another one, in seconds since 1970."""

    seconds: float

    def install(self, scene: Scene) -> None:
        rpc_ping, tell = DHTProtocol.rpc_ping, scene.telling(self)

        @functools.wraps(rpc_ping)
        async def lying(protocol: DHTProtocol, request: Any, context: Any) -> Any:
            answer = await rpc_ping(protocol, request, context)
            answer.dht_time = self.seconds
            tell()
            return answer

        DHTProtocol.rpc_ping = lying


@dataclass(frozen=True)
class ask_too_much(Fault):
    """In each round the peer asks all others, many times at once and whatever they answer.

    `votes`: it votes in rounds that do not exist, and answers to no vote itself. `states`: it asks for a
    state that is further than any.
    """

    what: Literal["votes", "states"]
    times: int = 160

    def install(self, scene: Scene) -> None:
        hold_vote, is_first = ExactAverager._hold_vote, scene.once(self, 0)
        rpc_vote, asking = ExactAverager.rpc_vote, set()

        async def ask(averager: ExactAverager, peer: PeerID) -> None:
            if self.what == "votes":
                stub = averager.get_stub(averager._p2p, peer, namespace=averager.prefix)
                request = averaging_pb2.JoinRequest(schema_hash=os.urandom(20), gather=b"a vote")
                await stub.rpc_vote(request)
            else:
                namespace = averager.prefix.replace("grad", "state")
                stub = ExactStateAverager.get_stub(averager._p2p, peer, namespace=namespace)
                wish = MSGPackSerializer.dumps([b"", [2**61, b""], 0])
                await stub.rpc_offer_state(averaging_pb2.DownloadData(metadata=wish))

        async def asking_vote(averager: ExactAverager, group_info: Any, *args: Any, **kwargs: Any) -> Any:
            if scene.has_reached(0):
                is_first()
                others = [peer for peer in group_info.peer_ids if peer != averager.peer_id]
                calls = (ask(averager, peer) for peer in others for _ in range(self.times))
                running = asyncio.gather(*calls, return_exceptions=True)
                asking.add(running)
                running.add_done_callback(asking.discard)
            return await hold_vote(averager, group_info, *args, **kwargs)

        @functools.wraps(rpc_vote)
        async def deaf(averager: ExactAverager, request: Any, context: Any) -> Any:
            await asyncio.sleep(3600)

        ExactAverager._hold_vote = asking_vote  # type: ignore[method-assign]
        if self.what == "votes":
            ExactAverager.rpc_vote = deaf  # type: ignore[method-assign]


@dataclass(frozen=True)
class lie_about_state(Fault):
    """A peer makes weights up, says to be a round ahead of all others with them, and gives them away."""

    at_step: int = 0

    def install(self, scene: Scene) -> None:
        step, has_lied = SwarmOptimizer.step, False

        def lie(optimizer: SwarmOptimizer) -> None:
            others = max(
                (peer.history for peer in optimizer.tracker.others), key=lambda history: history.rank
            )
            if optimizer.history.rank > others.rank:
                return
            history = replace(others.extend(samples=64, proof=os.urandom(8)), step=others.step + 1)
            averager = optimizer.state_averager
            with torch.no_grad(), averager.lock_state, optimizer.tracker.pause_updates():
                for weight in averager.main_parameters:
                    weight.add_(1.0)
                averager.history, averager.local_epoch = history, history.step
                optimizer.parts.equality.begin_step()
                optimizer.tracker.update_history(history)

        def lying(optimizer: SwarmOptimizer, *args: Any, **kwargs: Any) -> Any:
            nonlocal has_lied
            if optimizer.local_epoch < self.at_step:
                return step(optimizer, *args, **kwargs)
            if not has_lied:
                has_lied = True
                scene.tell(self, optimizer.local_epoch)
            optimizer.grad_averager.reset_accumulated_grads_()
            lie(optimizer)
            return None

        SwarmOptimizer.step = lying  # type: ignore[method-assign]


@dataclass(frozen=True)
class codec_raises(Fault):
    """Encoding one part of a gradient raises."""

    at_step: int = 2

    def install(self, scene: Scene) -> None:
        is_time = scene.once(self, self.at_step)
        compress = Codec.compress

        def failing(codec: Codec, *args: Any, **kwargs: Any) -> Any:
            if is_time():
                raise RuntimeError("the codec failed")
            return compress(codec, *args, **kwargs)

        Codec.compress = failing  # type: ignore[method-assign]


@dataclass(frozen=True)
class cut_links(Fault):
    """While a file of their name is in a folder, two peers can't talk, in the DHT or in averagers.

    Install it in both. Calls raise as those to a peer that is not there; a stream breaks off at its next
    message.
    """

    folder: str

    @staticmethod
    def name_of(*ids: str) -> str:
        """Name the file that cuts the link between two peers (base58)."""
        return "cut-" + "-".join(sorted(ids))

    def install(self, scene: Scene) -> None:
        folder = Path(self.folder)
        call_unary, call_stream = P2P._call_unary_protobuf_handler, P2P._iterate_protobuf_stream_handler
        add_unary, add_stream = P2P._add_protobuf_unary_handler, P2P._add_protobuf_stream_handler

        def require_link(p2p: P2P, other: PeerID) -> None:
            if (folder / self.name_of(p2p.peer_id.to_base58(), other.to_base58())).exists():
                raise P2PDaemonError("the link is cut")

        async def linked(p2p: P2P, other: PeerID, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for message in messages:
                require_link(p2p, other)
                yield message

        async def call_one(p2p: P2P, peer_id: PeerID, *args: Any) -> Any:
            require_link(p2p, peer_id)
            answer = await call_unary(p2p, peer_id, *args)
            require_link(p2p, peer_id)
            return answer

        async def call_many(p2p: P2P, peer_id: PeerID, name: str, requests: Any, *args: Any) -> Any:
            require_link(p2p, peer_id)
            answers = await call_stream(p2p, peer_id, name, linked(p2p, peer_id, requests), *args)
            return linked(p2p, peer_id, answers)

        async def serve_one(p2p: P2P, name: str, handler: Any, *args: Any, **kwargs: Any) -> None:
            async def serve(request: Any, context: Any) -> Any:
                require_link(p2p, context.remote_id)
                return await handler(request, context)

            await add_unary(p2p, name, serve, *args, **kwargs)

        async def serve_many(p2p: P2P, name: str, handler: Any, *args: Any, **kwargs: Any) -> None:
            async def serve(requests: Any, context: Any) -> AsyncIterator[Any]:
                require_link(p2p, context.remote_id)
                answers = handler(linked(p2p, context.remote_id, requests), context)
                async for answer in linked(p2p, context.remote_id, answers):
                    yield answer

            await add_stream(p2p, name, serve, *args, **kwargs)

        P2P._call_unary_protobuf_handler, P2P._iterate_protobuf_stream_handler = call_one, call_many
        P2P._add_protobuf_unary_handler, P2P._add_protobuf_stream_handler = serve_one, serve_many
