"""One exact round: all peers of a group end with the same bits and know it, or the round did not happen.

hivemind's all-reduce sends each peer the *difference* between the average and that peer's own part,
so every peer adds a number that was rounded, or quantized, for it alone: replicas drift by 4e-8 a round
without a codec and by 2.5 % of the gradient with an 8-bit one. Here the peer that reduces a part sends
everybody the average itself, in the same bytes, and adopts what those bytes decode to: that is the canonical
value of a lossy codec. Every part travels with a checksum; whatever fails, fails the round for this peer.

Before an average is applied its group votes on it (`ballot`), so that it is applied by most of the group or
by nobody, and every peer can name those that did not hold it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import hashlib
import logging
import multiprocessing as mp
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from hivemind.averaging import averager as hivemind_averager
from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.partition import AllreduceException, TensorPartContainer
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    RoleAdaptiveCompression,
    deserialize_torch_tensor,
)
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_dht_time
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor, as_aiter, enter_asynchronously

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.assembly import UNREACHABLE, Assembly
from trahiv_cli.optim.auto import Measured
from trahiv_cli.optim.ballot import Ballot, Decision, Vote, decide, digest_of
from trahiv_cli.optim.codecs import CODECS, Codec, encode_with_residual, register
from trahiv_cli.optim.history import History
from trahiv_cli.optim.host_copies import HostCopies
from trahiv_cli.optim.outer import OuterState
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.optim.soundness import UNREADABLE, Claim, SoundReducer, outliers
from trahiv_cli.swarm.corrections import CorrectedAverager, CorrectedGradientAverager, CorrectedStateAverager
from trahiv_cli.swarm.snapshot import Rank, digest_of_bytes

ANSWER_S = 10.0
"""Within this time an averager's process says that it knows of a round."""

VOTE_GRACE_S = 2.0
"""How long the last votes are waited for once the round is decided: only their names are missing."""


@dataclass(frozen=True)
class Exchange:
    """What a round exchanges; the same for all its members."""

    places: range
    """Which of the averager's tensors."""

    codec: str | None = None
    """In which codec of `CODECS`; None: the averager's own."""

    is_of_steps: bool = False
    """Whether it is what local steps changed, rather than a gradient: a codec's losses are not mixed."""


_EXCHANGE: ContextVar[Exchange] = ContextVar("exchange")
"""In the task of a round: what it is about."""

PATIENCE = 4.0
"""A part may take so many times as long as the slowest member's link made it take last time."""

BALLOTS_KEPT = 8
"""Rounds whose votes are still told to members that ask late."""


@dataclass(frozen=True)
class Outcome:
    """What the averager says of a round that was committed."""

    samples: dict[str, int]
    """By peer id (base58) the samples behind each contribution, without outliers; alike for all members."""

    group: tuple[str, ...]
    left_out: dict[str, str]
    """Members whose contribution was not used, or not all of it, and why: as far as this member knows."""

    states: dict[str, bytes]
    """By peer id the digest of the weights that it held before the round."""

    proof: bytes
    """Digest of the average; the same for all that committed."""

    reason: str
    """Members that did not commit; empty if all did."""

    exchange_s: float = 0.0
    """What the exchange took this member, without finding the group and without the vote."""

    parts_sent: int = 0
    """Bytes of encoded parts in that exchange."""

    parts_received: int = 0

    measured: dict[str, Measured] = field(default_factory=dict)
    """What each member claimed to know of its pace and link."""


@dataclass(frozen=True)
class Round:
    """What came of one attempt to average with the others."""

    samples: dict[str, int]
    """By peer id (base58, this peer's included) the samples behind each gradient that was used."""

    seconds: float
    """From the first request to the result."""

    bytes_sent: int
    """By this peer during the round, as `counted_at` says."""

    bytes_received: int
    committed: bool
    """Whether the step was taken with this round's average."""

    reason: str = ""
    """Why it was not committed; of a committed round, who did not average, and why earlier tries failed."""

    left_out: dict[str, str] = field(default_factory=dict)
    """Members whose gradient was not used, and why."""

    blocked_seconds: float = 0.0
    """How long training stood still for it: for all of it in modes sync and diloco."""

    counted_at: Literal["sockets", "parts"] = "sockets"
    """`sockets`: by the kernel, with all that the peer sends besides (`swarm.sockets`). `parts`: encoded
    tensor parts alone, where the kernel does not tell."""

    @property
    def group(self) -> tuple[str, ...]:
        """Ids of all members; empty if no group averaged."""
        return tuple(dict.fromkeys((*self.samples, *self.left_out)))


def _count(counter: Any, part: Any) -> None:
    with counter.get_lock():
        counter.value += len(part.buffer)


def _checked(message: averaging_pb2.AveragingData, peer: PeerID) -> torch.Tensor:
    """Decode a part that came with its checksum, which travels in a field that hivemind leaves empty."""
    if message.peer_id != digest_of_bytes(message.tensor_part.buffer):
        raise AllreduceException(f"a part from peer {peer} was damaged on its way")
    return deserialize_torch_tensor(message.tensor_part)


class ExactAllReduce(AllReduceRunner):
    """Butterfly all-reduce that yields averages, the same bits for every peer of the group, or raises.

    Args:
        traffic: two counters of bytes, sent and received, that outlive this object.
        claims: what each member said of its contribution.
        left_out: members whose contribution is not used.
        robust: average by centered clipping.
        lost: where to note what the codec loses of this peer's contribution, tensors like those that are
            averaged; None if nobody wants to know.
        kwargs: see `AllReduceRunner`.
    """

    def __init__(
        self,
        *,
        traffic: tuple[Any, Any],
        claims: dict[str, Claim],
        left_out: dict[str, str],
        robust: bool,
        lost: Sequence[torch.Tensor] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tensor_part_reducer.finished.set()  # upstream's is not used
        self.tensor_part_reducer: Any = SoundReducer(
            [part.shape for part in self.parts_for_local_averaging],
            [peer.to_base58() for peer in self.sender_peer_ids],
            claims,
            left_out,
            robust=robust,
        )
        self.unreachable = ""
        """Id of the member that the round failed of because it can't be reached; empty if it was not that."""
        self._sent, self._received = traffic
        container = self.tensor_part_container
        self._compression = container.compression
        own = self.ordered_peer_ids.index(self.peer_id)
        self._infos = [info for _, info in container._input_parts_by_peer[own]]
        self._encoded: dict[int, asyncio.Task[Any]] = {}
        self._lost: Sequence[Sequence[torch.Tensor]] | None = None
        if lost is not None:
            split = TensorPartContainer(
                lost,
                self.peer_fractions,
                container.compression,
                container.part_size_bytes,
                container.tensor_infos,
            )
            self._lost = [[part for part, _ in parts] for parts in split._input_parts_by_peer]
        total = sum(claim.weight for peer, claim in claims.items() if peer not in left_out)
        mine = claims[self.peer_id.to_base58()].weight
        self._own_share = mine / total if total and self.peer_id.to_base58() not in left_out else 0.0

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        index = self.ordered_peer_ids.index(peer_id)
        try:
            parts = (
                self._reduce_own_parts() if peer_id == self.peer_id else self._exchange_parts(peer_id, index)
            )
            part_index = -1
            async for part_index, average in parts:
                self.tensor_part_container.register_processed_part(index, part_index, average)
            if part_index + 1 != self.tensor_part_container.num_parts_by_peer[index]:
                raise AllreduceException(f"peer {peer_id} sent {part_index + 1} parts of its share")
        except Exception as error:
            self._fail(error, peer_id)
            raise

    def _fail(self, error: Exception, peer_id: PeerID) -> None:
        """End the round, and let the others learn of it: nothing that could still arrive would save it."""
        if not self._future.done() and isinstance(error, UNREACHABLE):
            self.unreachable = peer_id.to_base58()
        self.finalize(exception=_in_words(error, peer_id))

    @property
    def failure(self) -> BaseException | None:
        """What the round failed of first, if it did."""
        return self._future.exception() if self._future.done() and not self._future.cancelled() else None

    async def _reduce_own_parts(self) -> AsyncIterator[tuple[int, torch.Tensor]]:
        sender = self.sender_peer_ids.index(self.peer_id)
        for part_index, part in enumerate(self.parts_for_local_averaging):
            average = await self.tensor_part_reducer.accumulate_part(sender, part_index, part)
            decoded = _checked(await self._encode(part_index, average), self.peer_id)
            if self._lost is not None and self._own_share:
                # This peer alone knows what the average lost: it brings that along next time.
                lost = self._lost[self.ordered_peer_ids.index(self.peer_id)][part_index]
                lost.copy_(average.sub(decoded).div_(self._own_share))
            yield part_index, decoded

    async def _exchange_parts(self, peer_id: PeerID, index: int) -> AsyncIterator[tuple[int, torch.Tensor]]:
        done_sending = asyncio.Event()
        async with asyncio.timeout(self.reducer_timeout):  # dialling a peer that is gone may take minutes
            stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(
                self._counted_input(index, done_sending)
            )
        if self.should_delay_results(self.peer_id):
            await done_sending.wait()

        def decode(message: averaging_pb2.AveragingData) -> torch.Tensor:
            if message.code != averaging_pb2.AVERAGED_PART:
                raise AllreduceException(f"peer {peer_id} broke the round off")
            _count(self._received, message.tensor_part)
            average = _checked(message, peer_id)
            if not bool(average.isfinite().all()):
                raise AllreduceException(f"peer {peer_id} returned an average that is not finite")
            return average

        part_index = 0
        async for average in amap_in_executor(
            decode,
            aiter_with_timeout(stream, self.reducer_timeout),
            max_prefetch=self.tensor_part_container.prefetch,
        ):
            yield part_index, average
            part_index += 1

    async def _counted_input(
        self, index: int, done: asyncio.Event
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        try:
            async for message in self._generate_input_for_peer(index):
                _count(self._sent, message.tensor_part)
                yield message
        except Exception as error:  # hivemind's writing task, which runs this, is asked by nobody
            self._fail(error, self.ordered_peer_ids[index])
            raise
        finally:
            done.set()

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        parts = enumerate(self.tensor_part_container._input_parts_by_peer[peer_index])

        def encode(item: tuple[int, tuple[torch.Tensor, CompressionInfo]]) -> averaging_pb2.AveragingData:
            part_index, (part, info) = item
            if self._lost is None:
                encoded = self._compression.compress(part, info)
            else:
                encoded, lost = encode_with_residual(self._compression, part, info)
                self._lost[peer_index][part_index].copy_(lost)
            return averaging_pb2.AveragingData(
                code=averaging_pb2.PART_FOR_AVERAGING,
                group_id=self.group_id,
                peer_id=digest_of_bytes(encoded.buffer),
                tensor_part=encoded,
                weight=self.weight,
            )

        async for message in amap_in_executor(
            encode, as_aiter(*parts), max_prefetch=self.tensor_part_container.prefetch
        ):
            yield message

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        sender = self.sender_peer_ids[sender_index]

        def decode(message: averaging_pb2.AveragingData) -> torch.Tensor:
            _count(self._received, message.tensor_part)
            return _checked(message, sender)

        part_index = 0
        try:
            async for part in amap_in_executor(
                decode, stream, max_prefetch=self.tensor_part_container.prefetch
            ):
                average = await self.tensor_part_reducer.accumulate_part(sender_index, part_index, part)
                message = await self._encode(part_index, average)
                part_index += 1
                _count(self._sent, message.tensor_part)
                yield message
        except AllreduceException as error:
            self.finalize(exception=error)
            raise
        finally:
            if part_index != self.tensor_part_reducer.num_parts:
                await self._ban_sender(sender)

    async def _encode(self, part_index: int, average: torch.Tensor) -> averaging_pb2.AveragingData:
        """Encode the average of one of our parts, once for the whole group."""
        if part_index not in self._encoded:
            loop = asyncio.get_running_loop()

            def encode() -> averaging_pb2.AveragingData:
                part = self._compression.compress(average, self._infos[part_index])
                return averaging_pb2.AveragingData(
                    code=averaging_pb2.AVERAGED_PART, peer_id=digest_of_bytes(part.buffer), tensor_part=part
                )

            async def encode_beside() -> averaging_pb2.AveragingData:
                return await loop.run_in_executor(None, encode)

            self._encoded[part_index] = asyncio.create_task(encode_beside())
        return await self._encoded[part_index]


def _patience_s(claims: Mapping[str, Claim], part_bytes: int) -> float:
    """How long a member may wait for a part: each of them sends all others one at a time, by its own link."""
    rates = [claim.measured.rate for claim in claims.values() if claim.measured.is_known]
    return PATIENCE * len(claims) * part_bytes / min(rates) if rates else 0.0


def _in_words(error: Exception, peer: PeerID) -> AllreduceException:
    if isinstance(error, AllreduceException):
        return error
    if isinstance(error, TimeoutError):
        return AllreduceException(f"peer {peer} sent nothing for too long")
    if isinstance(error, UNREACHABLE):
        return AllreduceException(f"peer {peer} can't be reached")
    return AllreduceException(f"{type(error).__name__}: {error}")


def _is_not_about_a_round(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], AllreduceException))


class ExactAverager(CorrectedAverager):
    """Averages with `ExactAllReduce` and applies only what its group has voted for.

    Args:
        rules: how contributions are judged.
        kwargs: see `DecentralizedAverager`.
    """

    def __init__(self, *args: Any, rules: RoundRules, **kwargs: Any) -> None:
        self._bytes_sent, self._bytes_received = mp.Value(ctypes.c_int64, 0), mp.Value(ctypes.c_int64, 0)
        self._rules = rules
        self._ballots: OrderedDict[bytes, Ballot] = OrderedDict()
        self._residual: dict[int, torch.Tensor] = {}
        self._residual_is_of_steps = False
        register()
        super().__init__(*args, **kwargs)

    def run(self) -> None:
        """Serve this averager in its own process until it is shut down."""
        hivemind_averager.Matchmaking = Assembly
        # It prints a traceback for each round that is not committed, which `Outcome` and the error say.
        hivemind_averager.logger.addFilter(_is_not_about_a_round)
        self.matchmaking_kwargs["read_quorum"] = self._read_quorum
        super().run()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of encoded tensor parts that were sent and received so far."""
        return self._bytes_sent.value, self._bytes_received.value

    def expect_group(
        self, peers: Sequence[str], clients: Sequence[str], quorum: int, schema_suffix: bytes
    ) -> None:
        """Say who is at this peer's step; see `Assembly.expect`. Ids are base58."""
        self._outer_pipe.send(("_expect", [list(peers), list(clients), quorum, schema_suffix], {}))

    def start_round(self, claim: Claim, timeout_s: float, exchange: Exchange | None = None) -> StepControl:
        """Look for a group and average with it, in the background; `result()` is an `Outcome`.

        The control's exception, if there is one, says why nothing was averaged; the averaged tensors are
        then as they were.

        Args:
            claim: what this peer says of its contribution; the averager adds the norm if it is 0 or more.
            timeout_s: for finding the group.
            exchange: what is averaged; default: all tensors.

        Raises:
            RoundFailed: the averager's process does not answer.
        """
        # Made before the control: mpfuture.py:152 sets up the class that the first future is of.
        is_known: MPFuture[Any] = MPFuture()
        now = get_dht_time()
        control = StepControl(
            scheduled_time=now,
            deadline=now + timeout_s,
            allow_retries=False,
            weight=claim.weight,
            data_for_gather=self.serializer.dumps([self.bandwidth, self.mode.value, claim.to_wire()]),
        )
        exchange = exchange or Exchange(range(len(self._averaged_tensors)))
        self._outer_pipe.send(("_step", [exchange], {"step": control, "future_for_init": is_known}))
        try:
            control.attach(*is_known.result(timeout=ANSWER_S))
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            # averaging/averager.py:421 waits for ever. The message was lost, or the process is stuck.
            raise RoundFailed(f"the averager's process did not answer within {ANSWER_S:.0f} s") from error
        control.allow_allreduce()
        return control

    # -- in the averager's process -------------------------------------------------------------------

    async def _expect(self, peers: list[str], clients: list[str], quorum: int, schema_suffix: bytes) -> None:
        ids = {peer: PeerID.from_base58(peer) for peer in (*peers, *clients)}
        self._matchmaking.expect(
            [ids[peer] for peer in peers], [ids[peer] for peer in clients], quorum, schema_suffix
        )

    def _read_claim(self, gathered: bytes) -> Claim:
        try:
            return Claim.from_wire(self.serializer.loads(gathered)[2])
        except (ValueError, TypeError, LookupError):
            return UNREADABLE

    def _read_quorum(self, gathered: bytes) -> int:
        return self._read_claim(gathered).quorum

    async def _step(self, exchange: Exchange, *, step: StepControl, future_for_init: Any) -> None:
        _EXCHANGE.set(exchange)
        try:
            bandwidth, mode, content = self.serializer.loads(step.data_for_gather)
            claim = Claim.from_wire(content)
            if claim.norm >= 0:
                loop = asyncio.get_running_loop()
                norm = await loop.run_in_executor(None, self._prepare_contribution, exchange)
                claim = replace(claim, norm=norm)
            step._data_for_gather = self.serializer.dumps([bandwidth, mode, claim.to_wire()])
        except BaseException as error:
            future_for_init.set_exception(error)  # else `step` would wait for ever
            raise
        await super()._step(step=step, future_for_init=future_for_init)

    def _prepare_contribution(self, exchange: Exchange) -> float:
        """Add what earlier rounds lost to this peer's tensors; return their norm together."""
        if self._residual_is_of_steps != exchange.is_of_steps:
            self._residual, self._residual_is_of_steps = {}, exchange.is_of_steps
        with self.get_tensors() as tensors, torch.no_grad():
            for place in exchange.places:
                if place in self._residual:
                    tensors[place].add_(self._residual[place])
            norms = [torch.linalg.vector_norm(tensors[place]) for place in exchange.places]
            return float(torch.linalg.vector_norm(torch.stack(norms)))

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> Outcome:
        """Average with the group, vote, and apply the average at once or not at all.

        Upstream (averaging/averager.py:529) adds each tensor's difference as it comes, which leaves a
        mixture when the round dies half-way, and declares the new state in the DHT once per tensor:
        800 tensors cost 2.75 s a round, not 0.62 s.

        Raises:
            AllreduceException: the round is undone; the tensors are as they were.
        """
        members = [peer.to_base58() for peer in group_info.peer_ids]
        claims = dict(zip(members, map(self._read_claim, group_info.gathered), strict=True))
        own = claims[self.peer_id.to_base58()]
        left_out = outliers(claims, self._rules.norm_limit)
        loop = asyncio.get_running_loop()
        exchange = _EXCHANGE.get()
        places = exchange.places
        if (infos := kwargs["tensor_infos"]) is not None:
            kwargs["tensor_infos"] = infos[places.start : places.stop]
        if exchange.codec is not None:
            kwargs["compression"] = CODECS[exchange.codec]()
        needed_s = _patience_s(claims, kwargs["part_size_bytes"])
        if kwargs["sender_timeout"] and needed_s > kwargs["sender_timeout"]:
            # Reducers wait for senders, so whoever waits for a reducer waits longer.
            kwargs |= {"sender_timeout": needed_s, "reducer_timeout": 2 * needed_s}
        started, parts = loop.time(), self.traffic
        async with enter_asynchronously(self.get_tensors()) as all_tensors:
            tensors = all_tensors[places.start : places.stop]
            codec = kwargs["compression"]
            is_lossy = isinstance(codec, Codec) and not codec.is_lossless
            keeps_track = is_lossy and own.norm >= 0 and self.peer_id.to_base58() not in left_out
            lost = [torch.zeros_like(tensor) for tensor in tensors] if keeps_track else None
            runner: ExactAllReduce | None = None
            try:
                runner = await self._make_runner(
                    group_info,
                    tensors,
                    min_vector_size,
                    claims=claims,
                    left_out=left_out,
                    lost=lost,
                    **kwargs,
                )
                averages = [average async for average in runner]
                took_s = loop.time() - started
                digest = await loop.run_in_executor(None, self._digest, group_info, averages)
                vote = Vote(digest, notes=runner.tensor_part_reducer.notes)
            except Exception as error:  # noqa: BLE001 - whatever it was, the others are told
                failure = (runner and runner.failure) or error
                blames = runner.unreachable if runner else ""
                vote = Vote(reason=str(failure) or type(failure).__name__, blames=blames)
                self._running_groups[group_info.group_id].cancel()  # if nothing runs, nobody waits for it
            decision, votes = await self._hold_vote(group_info, vote, own.quorum)
            if not decision.is_committed:
                raise AllreduceException(decision.reason)
            for tensor, average in zip(tensors, averages, strict=True):
                tensor.copy_(average)
            for index, place in enumerate(places):
                self._residual.pop(place, None)
                if lost is not None:
                    self._residual[place] = lost[index]
        notes = {peer: why for other in votes.values() for peer, why in other.notes.items()}
        return Outcome(
            samples={peer: claims[peer].samples for peer in members if peer not in left_out},
            group=tuple(members),
            left_out=left_out | {peer: why for peer, why in notes.items() if peer in claims},
            states={peer: claim.state for peer, claim in claims.items()},
            proof=vote.digest,
            reason=decision.reason,
            exchange_s=took_s,
            parts_sent=self.traffic[0] - parts[0],
            parts_received=self.traffic[1] - parts[1],
            measured={peer: claim.measured for peer, claim in claims.items()},
        )

    async def _make_runner(
        self,
        group_info: GroupInfo,
        tensors: Sequence[torch.Tensor],
        min_vector_size: int,
        **kwargs: Any,
    ) -> ExactAllReduce:
        loads = [self.serializer.loads(gathered) for gathered in group_info.gathered]
        bandwidths = [load[0] if AveragingMode(load[1]) != AveragingMode.CLIENT else 0.0 for load in loads]
        size = sum(tensor.numel() for tensor in tensors)
        fractions = await asyncio.get_running_loop().run_in_executor(
            None, load_balance_peers, size, bandwidths, min_vector_size
        )
        runner = ExactAllReduce(
            traffic=(self._bytes_sent, self._bytes_received),
            robust=self._rules.robust_mean,
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=group_info.group_id,
            ordered_peer_ids=group_info.peer_ids,
            peer_fractions=fractions,
            **kwargs,
        )
        self._running_groups[group_info.group_id].set_result(runner)
        return runner

    def _digest(self, group_info: GroupInfo, averages: Sequence[torch.Tensor]) -> bytes:
        """Of what this peer is about to hold, of the group's claims, and of what the group agrees on."""
        context = hashlib.sha256(self._matchmaking.schema)
        for gathered in group_info.gathered:
            context.update(hashlib.sha256(gathered).digest())
        return hashlib.sha256(context.digest() + digest_of(averages)).digest()

    # -- the vote ------------------------------------------------------------------------------------

    def _ballot(self, group_id: bytes) -> Ballot:
        ballot = self._ballots.get(group_id)
        if ballot is None:
            ballot = self._ballots[group_id] = Ballot()
            while len(self._ballots) > BALLOTS_KEPT:
                self._ballots.popitem(last=False)
        return ballot

    async def _hold_vote(
        self, group_info: GroupInfo, vote: Vote, quorum: int
    ) -> tuple[Decision, dict[str, Vote]]:
        """Tell the others this peer's vote, hear theirs, decide. Takes at most the chunk timeout."""
        ballot, own = self._ballot(group_info.group_id), self.peer_id.to_base58()
        members = [peer.to_base58() for peer in group_info.peer_ids]
        ballot.cast(self.peer_id, vote)
        # Those that can't be asked ask; their votes are known to all that they asked.
        calls = [
            asyncio.create_task(self._exchange_votes(peer, group_info.group_id, ballot, vote))
            for peer in group_info.peer_ids
            if peer != self.peer_id
        ]
        started, limit_s = asyncio.get_running_loop().time(), self.allreduce_kwargs["sender_timeout"]
        while True:
            ballot.has_changed.clear()
            votes = {peer.to_base58(): vote for peer, vote in ballot.votes.items()}
            decision = decide(own, members, votes, quorum)
            unheard = {peer for peer in group_info.peer_ids if peer not in ballot.votes}
            waited_s = asyncio.get_running_loop().time() - started
            # Those that can't be asked may still ask, or be known to one that was asked.
            is_short = decision.is_committed or not vote.digest or unheard <= ballot.silent
            left_s = (VOTE_GRACE_S if is_short else limit_s) - waited_s
            if not unheard or left_s <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await ballot.has_changed.wait()
        ballot.is_settled.set()
        for call in calls:  # they end by themselves; their answers are not needed any more
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
        for peer in group_info.peer_ids:
            if peer not in ballot.votes:
                self._matchmaking.suspect(peer)
        votes = {peer: vote for peer, vote in votes.items() if peer in members}
        blamed = [(peer, vote.blames) for peer, vote in votes.items() if vote.blames in votes]
        self._matchmaking.note_links(blamed, decision.is_committed)
        return decision, votes

    async def _exchange_votes(self, peer: PeerID, group_id: bytes, ballot: Ballot, vote: Vote) -> None:
        stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
        request = averaging_pb2.JoinRequest(
            schema_hash=group_id, gather=self.serializer.dumps(vote.to_wire())
        )
        try:
            answer = await stub.rpc_vote(request, timeout=2 * self.allreduce_kwargs["sender_timeout"])
            for member, content in zip(answer.ordered_peer_ids, answer.gathered, strict=True):
                said = Vote.from_wire(self.serializer.loads(content))
                ballot.cast(PeerID(member), said, is_direct=PeerID(member) == peer)
        except (*UNREACHABLE, ValueError):
            ballot.silent.add(peer)
            ballot.has_changed.set()

    async def rpc_vote(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> averaging_pb2.MessageFromLeader:
        """Hear a member's vote; answer with all votes of the round when this peer knows them."""
        ballot = self._ballot(request.schema_hash)
        ballot.cast(context.remote_id, Vote.from_wire(self.serializer.loads(request.gather)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.allreduce_kwargs["sender_timeout"]):
                await ballot.is_settled.wait()
        votes = list(ballot.votes.items())
        return averaging_pb2.MessageFromLeader(
            group_id=request.schema_hash,
            ordered_peer_ids=[peer.to_bytes() for peer, _ in votes],
            gathered=[self.serializer.dumps(vote.to_wire()) for _, vote in votes],
        )


class ExactGradientAverager(ExactAverager, CorrectedGradientAverager):
    """Averages accumulated gradients, weighted by what is trained: tokens of a language model, else samples.

    The accumulators hold the sum over batches of `weight / anchor` times the gradient of the batch's mean
    loss, where the anchor is the first batch's weight: with equal batches that is the plain sum.
    """

    _local_accumulators: tuple[torch.Tensor, ...]
    local_samples_accumulated: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._anchor_weight = self.local_weight = 0.0
        self._aside: tuple[torch.Tensor, ...] = ()
        self._spare: tuple[torch.Tensor, ...] = ()
        self._copies: HostCopies | None = None
        self.samples_aside, self.weight_aside = 0, 0.0
        self.forget_announced()
        super().__init__(*args, **kwargs)

    def _grad_accumulators(self) -> Iterator[torch.Tensor]:
        if not self._local_accumulators:  # they were set aside, and nothing came since
            self._local_accumulators = self._spare or tuple(map(torch.zeros_like, self._aside))
            self._spare = ()
        yield from self._local_accumulators

    def expect_batch(self, samples: int, weight: float, *, lend: bool) -> float:
        """Announce a batch whose gradients come next; `accumulate_grads_` counts all that were announced.

        Args:
            samples: rows of the batch, which count towards the swarm's next step.
            weight: what its mean loss is a mean over: trained tokens, or rows; 0 if nothing is trained.
            lend: make the accumulators the parameters' `.grad`, so that the next backward pass adds to them.
                Saves a second gradient in memory and, for each batch, allocating, adding and freeing it.
                Not for gradients that somebody scales afterwards. Accumulators on another device than
                their parameter are not lent.

        Returns:
            The factor for the batch's mean loss before its backward pass; exactly 1 for equal batches.
        """
        self._anchor_weight = self._anchor_weight or float(weight)
        self._announced_samples += samples
        self._announced_weight += weight
        self._is_announced = True
        if lend:
            for param, accumulator in zip(self.parameters, self._grad_accumulators(), strict=True):
                if param.device == accumulator.device:
                    param.grad = accumulator
        return weight / self._anchor_weight if self._anchor_weight else 1.0

    def forget_announced(self) -> None:
        """Take back what was announced and not counted."""
        self._announced_samples, self._announced_weight, self._is_announced = 0, 0.0, False

    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int) -> None:
        """Count what was announced, and add those of its gradients that are not in the accumulators yet.

        Lent accumulators are taken back: clearing the gradients must not clear them.

        Args:
            batch_size: samples of a batch that nobody announced, and the weight of its mean gradient.
        """
        factor = 1.0 if self._is_announced else self.expect_batch(batch_size, batch_size, lend=False)
        self.local_samples_accumulated += self._announced_samples
        self.local_weight += self._announced_weight
        self.forget_announced()
        for param, accumulator in zip(self.parameters, self._grad_accumulators(), strict=True):
            if param.grad is accumulator:
                param.grad = None
            elif param.grad is not None:
                accumulator.add_(param.grad.to(accumulator.device), alpha=factor)

    # -- a round -----------------------------------------------------------------------------------

    def set_aside(self) -> None:
        """Set what was accumulated aside, for a round; what comes from now on goes into other memory.

        That memory is taken when the first batch comes: a round that training waits for needs none.
        """
        self._aside, self._local_accumulators = tuple(self._grad_accumulators()), ()
        self.samples_aside, self.weight_aside = self.local_samples_accumulated, self.local_weight
        self.local_samples_accumulated, self.local_weight = 0, 0.0
        if any(accumulator.is_cuda for accumulator in self._aside):
            self._copies = self._copies or HostCopies(self._aside)
            self._copies.begin(self._aside)

    @property
    def aside(self) -> tuple[torch.Tensor, ...]:
        """What was set aside: sums, where they were accumulated. Not to be written to."""
        return self._aside

    @property
    def scale_aside(self) -> float:
        """Times which the sums that were set aside are the mean gradient."""
        return self._scale_of(self.weight_aside)

    def _scale_of(self, weight: float) -> float:
        return self._anchor_weight / weight if weight else 0.0

    def load_aside(self) -> None:
        """Write the mean gradient of what was set aside into the averager's buffers.

        optim/grad_averager.py:203 divides the sum of (b_i / b_0) g_i by the *number* of batches, which is
        the mean only if all b_i are equal; here it is divided by the sum of the weights. By numpy, because
        it may run beside training: torch would start OpenMP threads for this thread, too.
        """
        sums = self._aside if self._copies is None else self._copies.wait()
        with self.get_tensors() as buffers:
            for accumulated, buffer in zip(sums, buffers, strict=True):
                np.multiply(accumulated.numpy(), np.float32(self.scale_aside), out=buffer.detach().numpy())

    @torch.no_grad()
    def take_back(self) -> None:
        """Add what was set aside to what came meanwhile."""
        for aside, came in zip(self._aside, self._local_accumulators, strict=False):
            aside.add_(came)
            came.zero_()
        self._spare = self._local_accumulators or self._spare
        self._local_accumulators, self._aside = self._aside, ()
        self.local_samples_accumulated += self.samples_aside
        self.local_weight += self.weight_aside
        self.samples_aside, self.weight_aside = 0, 0.0

    @torch.no_grad()
    def use_up(self) -> None:
        """Forget what was set aside: a step was taken with it."""
        for accumulator in self._aside:
            accumulator.zero_()
        if self._local_accumulators:
            self._spare = self._aside
        else:
            self._local_accumulators = self._aside
        self._aside = ()
        self.samples_aside, self.weight_aside = 0, 0.0

    def reset_accumulated_grads_(self) -> None:
        """Forget what was accumulated, and batches that were announced and not counted."""
        self.local_weight = 0.0
        self.forget_announced()
        super().reset_accumulated_grads_()

    @contextlib.contextmanager
    def use_averaged_gradients(self) -> Iterator[None]:
        """Have the averages as the parameters' `.grad` within the block; afterwards they have none.

        They lie in the memory of what was set aside, so that a step where the parameters are needs no
        gradients besides. Upstream's (optim/grad_averager.py:223) hands out the averager's buffers, which are
        in host memory wherever a parameter is. `use_up` comes next.
        """
        try:
            with torch.no_grad(), self.get_tensors() as averages:
                for param, aside, average in zip(self.parameters, self._aside, averages, strict=True):
                    param.grad = aside.copy_(average).to(param.device)
            self.notify_used_averaged_gradients()
            yield
        finally:
            self._clear_gradients()

    @contextlib.contextmanager
    def use_accumulated_gradients(self) -> Iterator[None]:
        """Have this peer's mean gradient as the parameters' `.grad` within the block; afterwards none.

        It lies in the accumulators' memory; `reset_accumulated_grads_` comes next.
        """
        scale = self._scale_of(self.local_weight)
        try:
            with torch.no_grad():
                for param, accumulator in zip(self.parameters, self._grad_accumulators(), strict=True):
                    param.grad = accumulator.mul_(scale).to(param.device)
            yield
        finally:
            self._clear_gradients()

    def _clear_gradients(self) -> None:
        for param in self.parameters:
            param.grad = None


class ExactStateAverager(ExactAverager, CorrectedStateAverager):
    """Holds weights and optimizer state, averages the weights, gives the state to joiners.

    Args:
        statistics_codec: encodes the inner optimizer's state for joiners, in place of what
            `state_compression` chooses for it. A lossy one only where peers need not hold the same.
        args, kwargs: see `ExactAverager` and `TrainingStateAverager`.
    """

    history: History
    """What was committed on the way to these weights; kept by the optimizer, under `lock_state`."""

    donor: str = ""
    """Id of the peer that these weights were last downloaded from."""

    outer: OuterState | None = None
    """What the swarm agrees on, in modes with local steps."""

    agreed: Sequence[torch.Tensor] | None = None
    """The weights that all peers of this history agree on, where the model's are others at the moment."""

    pace: Pace = DEFAULT_PACE
    """Of the round after this state."""

    set_pace: Callable[[Pace], None] = staticmethod(lambda pace: None)
    """Has the peer go over to another pace; called when a state that was adopted has another one."""

    def __init__(self, *args: Any, statistics_codec: CompressionBase | None = None, **kwargs: Any) -> None:
        self.history = History()
        if statistics_codec is not None:
            rest = kwargs.get("state_compression", NoCompression())
            codec = RoleAdaptiveCompression(parameter=rest, optimizer=statistics_codec, default=rest)
            kwargs["state_compression"] = codec
        super().__init__(*args, **kwargs)

    @property
    def rank(self) -> Rank:
        """That of the history."""
        return self.history.rank

    def common_tensors(self) -> list[torch.Tensor]:
        """The weights that are agreed on; in modes with local steps, the outer momentum too."""
        common = super().common_tensors()
        common[: len(self.agreed or ())] = self.agreed or ()
        return common if self.outer is None else [*common, *self.outer.momentum]

    def _live_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[Any]]:
        metadata, tensors, roles = super()._live_state()
        own: dict[str, Any] = {"history": self.history.to_wire(), "pace": self.pace.to_wire()}
        if self.outer is not None:
            own["outer_rounds"] = self.outer.rounds
        return metadata | own, tensors, roles

    def adopt_state(self, metadata: dict[str, Any], tensors: Sequence[torch.Tensor]) -> bool:
        """Adopt a state and the pace that goes with it, whole or not at all; see the base class."""
        before = self.pace
        try:
            self.set_pace(Pace.from_wire(metadata.get("pace")))
        except ValueError as error:
            raise RoundFailed("A peer sent a state without a pace.") from error
        is_adopted = False
        try:
            is_adopted = super().adopt_state(metadata, tensors)
        finally:
            if not is_adopted:
                self.set_pace(before)
        return is_adopted

    def is_welcome(self, metadata: dict[str, Any]) -> bool:
        """Whether a state with this metadata is of a history as long as this peer's, or longer."""
        try:
            theirs = History.from_wire(metadata.get("history"))
        except ValueError as error:
            raise RoundFailed("A peer sent a state without a history.") from error
        rounds = metadata.get("outer_rounds")
        if self.outer is not None and (not isinstance(rounds, int) or rounds < 0):
            raise RoundFailed("A peer sent a state that does not say which fragment is next.")
        return theirs.step == metadata.get("epoch") and theirs.rank >= self.history.rank

    def take_note(self, metadata: dict[str, Any]) -> None:
        """Go on with the history of the state that was adopted; with local steps, from the agreed weights."""
        self.history, self.donor = History.from_wire(metadata["history"]), str(metadata.get("donor", ""))
        if self.outer is not None:
            self.outer.rounds = metadata["outer_rounds"]
            for weight, agreed in zip(self.weights, self.outer.anchor, strict=True):
                weight.copy_(agreed)
