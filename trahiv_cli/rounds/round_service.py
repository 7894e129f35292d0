"""One exact round, in the DHT's process: a group averages, votes on its average, and applies it or does not.

1. A peer claims its contribution. `matchmaking` finds a group, whose members all judge the claims alike.
2. The group exchanges parts and averages (`allreduce`).
3. The group votes on the average (`vote`). A member applies it only if it knows that more than half of the
   group hold the same average. A member whose vote did not arrive counts as one that holds another.
4. Each member keeps the round for peers that missed it, and replays the rounds that it missed itself.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, AsyncIterator, ClassVar  # noqa: UP035 - hivemind knows a stream by typing's

import torch
from hivemind.averaging.averager import compute_schema_hash
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.partition import DEFAULT_PART_SIZE_BYTES, AllreduceException
from hivemind.compression import CompressionBase
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import runtime_pb2
from hivemind.proto.averaging_pb2 import (
    BAD_GROUP_ID,
    AveragingData,
    DownloadData,
    JoinRequest,
    MessageFromLeader,
)
from hivemind.utils import MPFuture, get_logger
from hivemind.utils.asyncio import achain, aiter_with_timeout, as_aiter, enter_asynchronously

from trahiv_cli.clock import swarm_time
from trahiv_cli.members.records import content_of, peer_from
from trahiv_cli.net.streams import UNREACHABLE
from trahiv_cli.progress.pace import RoundRules
from trahiv_cli.rounds.allreduce import ExactAllReduce
from trahiv_cli.rounds.averages import Averages
from trahiv_cli.rounds.claims import Claim, Exchange, Outcome, judge
from trahiv_cli.rounds.codecs import CODECS
from trahiv_cli.rounds.matchmaking import GroupFinder
from trahiv_cli.rounds.replay_log import Header, Log, Parts, copy_average, decoded
from trahiv_cli.rounds.vote import TWO_VOTES, Ballots, Call, Decision, NotCommitted, Vote, proof_of
from trahiv_cli.shared_memory import JoinerActivity
from trahiv_cli.swarm.corrections.dht import CorrectedDHT
from trahiv_cli.swarm.service import Service, ServiceHandle
from trahiv_cli.wire import FEW_BYTES

logger = get_logger(__name__)


def patience_s(claims: Mapping[str, Claim], part_bytes: int, all_bytes: int) -> float:
    """Return how many seconds a member may wait for a part of `part_bytes`; 0 if no member knows its rate.

    Each member sends `all_bytes` in total, part by part to one member after another.
    """
    rates = _link_rates(claims)
    return _limit_s(min(len(claims) * part_bytes, all_bytes), rates, most_s=60.0) if rates else 0.0


def exchange_limit_s(claims: Mapping[str, Claim], all_bytes: int, least_s: float, timeout_s: float) -> float:
    """Return the limit of an exchange of `all_bytes` of parts, and as many of averages, in seconds.

    It is at least `least_s`. By the usual rate it is at most half of `timeout_s`: the vote needs the rest.
    """
    lowest = 125_000.0  # bytes a second, of the usual rate
    rates = _link_rates(claims) or [lowest]
    return max(least_s, _limit_s(2 * all_bytes, rates, most_s=timeout_s / 2, lowest_rate=lowest))


def _limit_s(num_bytes: float, rates: Sequence[float], *, most_s: float, lowest_rate: float = 0.0) -> float:
    """Return four times the expected time of `num_bytes`, within limits; rates are in bytes a second.

    It is at most `most_s` at the members' usual rate, or at most 30 s at the slowest member's, whichever is
    longer. Thus many fast members do not exclude a slow one, and a member that only claims to be slow is
    excluded after two such rounds.
    """
    needed = 4.0 * num_bytes
    usual_s = needed / max(lowest_rate, statistics.median_low(rates))
    return max(min(most_s, usual_s), min(30.0, needed / min(rates)))


def _link_rates(claims: Mapping[str, Claim]) -> list[float]:
    return [claim.measured.rate for claim in claims.values() if claim.measured.is_of_link]


@dataclass(frozen=True)
class RoundOptions:
    """Codec, cut and time limits (in seconds) of a peer's rounds: options of hivemind's averagers."""

    compression: CompressionBase
    min_matchmaking_time: float  # a leader waits this long for missing members
    request_timeout: float  # within it a leader answers
    sender_timeout: float  # the longest silence of a member that sends its parts
    reducer_timeout: float  # the longest silence of a member that averages them; longer than the former
    allreduce_timeout: float  # of an exchange with its vote
    part_size_bytes: int = DEFAULT_PART_SIZE_BYTES
    min_vector_size: int = 0  # a member with fewer values to average averages none


@dataclass(eq=False)
class RoundService(Service):
    """Finds a group, averages with it, and applies only averages that most of the group voted for.

    `Rounds` makes one; it works in the DHT's process. The tensors hold this peer's contribution before a
    round and the average after it. `buffers`: see `Buffers.exchanged`.
    """

    WIRE_NAME: ClassVar[str] = "ExactGradientAverager"

    averages: Averages
    buffers: Sequence[torch.Tensor]
    rules: RoundRules
    options: RoundOptions
    activity: JoinerActivity

    async def start(self, dht: CorrectedDHT, p2p: P2P, pipe: Any) -> None:
        """Begin to work; see `Service.start`."""
        await super().start(dht, p2p, pipe)
        self._key = dht.signing_key
        self.averages.set_lock(dht.tensors_lock)
        tensors = self.averages.tensors
        self.ballots = Ballots()
        # As much as a joiner downloads if Adam trains the tensors. An exchange fits between two steps, so no
        # more arrives during the download.
        self._log = Log(3 * sum(tensor.nbytes for tensor in tensors))
        self._residual: dict[int, torch.Tensor] = {}  # losses of codecs, by index of the tensor
        self._is_of_steps = False  # whether they are losses of local steps
        self._running: dict[bytes, asyncio.Future[ExactAllReduce]] = {}  # exchanges, by group id
        self._is_settled = asyncio.Event()  # cleared while this peer may be in a group that it does not know
        self._is_settled.set()
        self._preparing = asyncio.Lock()
        self._looking: asyncio.Task[GroupInfo | None] | None = None
        self.finder = GroupFinder(
            self.stub,
            p2p.peer_id,
            dht.signing_key,
            prefix=self.prefix,
            tensors_schema=compute_schema_hash(tensors),
            is_client=self.is_client,
            patience_s=self.options.min_matchmaking_time,
            request_timeout=self.options.request_timeout,
        )

    # -- commands of the training process --------------------------------------------------------

    async def expect(
        self, peers: Sequence[str], clients: Sequence[str], quorum: int, schema_suffix: bytes
    ) -> None:
        """Set the peers that are at this peer's step, by base58 ids; see `GroupFinder.expect`."""
        expected, dialing = (list(map(PeerID.from_base58, ids)) for ids in (peers, clients))
        self.finder.expect(expected, dialing, quorum, schema_suffix)

    async def average(
        self, claim: Claim, exchange: Exchange, deadline: float, has_group: MPFuture[None]
    ) -> Outcome:
        """Look for a group until `deadline`, in the swarm's time, and average with it.

        If it raises, nothing was averaged, and the tensors hold this peer's contribution, perhaps with the
        codecs' losses of earlier rounds added.
        """
        async with self._preparing:
            loop = asyncio.get_running_loop()
            norm = await asyncio.to_thread(self._prepare_contribution, exchange)
            claim = replace(claim, is_client=self.is_client, norm=norm)
            self._is_settled.clear()
            self._looking = loop.create_task(self.finder.look_for_group(claim.to_bytes(), deadline))
        try:
            if (group := await self._looking) is None:
                raise AllreduceException("Averaging step failed: could not find a group")
            has_group.set_result(None)
            self._running[group.group_id] = loop.create_future()
            self._is_settled.set()
            try:
                async with asyncio.timeout(self.options.allreduce_timeout):
                    return await self._average_with(group, exchange)
            finally:
                self._running.pop(group.group_id).cancel()
        finally:
            self._is_settled.set()

    async def cancel(self) -> None:
        """End the search for a group, if there is one; an exchange goes on."""
        async with self._preparing:
            if self._looking is not None:
                self._looking.cancel()

    # -- a round -----------------------------------------------------------------------------------

    def _prepare_contribution(self, exchange: Exchange) -> float:
        """Add the losses of earlier rounds to the tensors, which each try fills anew; return their norm."""
        if self._is_of_steps != exchange.is_of_steps:
            self._residual = {}
            self._is_of_steps = exchange.is_of_steps
        with self.averages.locked() as tensors, torch.no_grad():
            for place in exchange.places:
                if place in self._residual:
                    tensors[place].add_(self._residual[place])
            norms = [torch.linalg.vector_norm(tensors[place]) for place in exchange.places]
            return float(torch.linalg.vector_norm(torch.stack(norms)))

    async def _average_with(self, group_info: GroupInfo, exchange: Exchange) -> Outcome:
        """Average with the group, vote, and apply the average at once, or raise `NotCommitted`.

        If it raises, the tensors are unchanged.
        """
        loop = asyncio.get_running_loop()
        gathered = group_info.gathered
        said = [Claim.parse(content_of(statement)) for statement in gathered]  # matchmaking verified them
        claims, outcome = judge(group_info.peer_ids, said, exchange.most_samples, self.rules.norm_limit)
        clients = [peer for peer, claim in zip(group_info.peer_ids, said, strict=True) if claim.is_client]
        self.ballots.open(group_info, self.options.sender_timeout, clients)
        started = loop.time()
        async with enter_asynchronously(self.averages.locked()) as all_tensors:
            tensors = self._exchanged(all_tensors, exchange, outcome)
            runner: ExactAllReduce | None = None
            try:
                runner = await self._make_runner(group_info, exchange, tensors, claims, outcome.left_out)
                async for _ in runner:
                    pass  # until the vote it keeps the parts encoded: less memory than a second copy
                took_s = loop.time() - started
                parts = runner.encoded_averages
                proof = await self._proof(parts, tensors, gathered)
                vote = Vote(proof, notes=runner.tensor_part_reducer.notes)
            except Exception as error:  # noqa: BLE001 - whatever it was, the others are told
                failure = (runner and runner.failure) or error
                complaint = runner.complaint if runner else Vote()
                vote = replace(complaint, reason=str(failure) or type(failure).__name__)
                self._running[group_info.group_id].cancel()  # else callers would wait for a runner
            quorum = claims[self._p2p.peer_id.to_base58()].quorum
            decision = await self._hold_vote(group_info, vote, quorum)
            if not decision.is_committed:
                raise NotCommitted(decision.reason, vote.digest, sum(outcome.samples.values()))
            assert runner is not None  # else there would be no digest to commit
            copy_average(parts, tensors)
            for place in exchange.places:
                self._residual.pop(place, None)
            self._residual |= dict(zip(exchange.places, runner.lost or (), strict=False))
            ids = tuple(peer.to_bytes() for peer in group_info.peer_ids)
            num_bytes = sum(len(part.buffer) for part in parts)
            header = Header(ids, gathered, vote.digest, len(parts), num_bytes)
            self._log.add(exchange.after, header, parts, is_wanted=self.activity.is_there)
        notes = [note for other in decision.votes.values() for note in other.notes.items()]
        return replace(
            outcome,
            proof=vote.digest,
            left_out=outcome.left_out | {peer: why for peer, why in notes if peer in claims},
            reason=decision.reason,
            exchange_s=took_s,
            longest_wait_s=runner.tensor_part_reducer.longest_wait_s,
            parts_sent=runner.sent,
            parts_received=runner.received,
        )

    async def _proof(self, parts: Parts, tensors: Sequence[torch.Tensor], gathered: Sequence[bytes]) -> bytes:
        """Return the proof of an average of such tensors, which the group of these claims would vote for."""
        return await asyncio.to_thread(proof_of, decoded(parts, tensors), gathered, self.finder.schema)

    def _exchanged(
        self, all_tensors: Sequence[torch.Tensor], exchange: Exchange, outcome: Outcome
    ) -> list[torch.Tensor]:
        """Return the tensors that a round with this outcome averages; a vector of buffers is the last."""
        buffers = self.buffers if outcome.moves_buffers else ()
        return [*all_tensors[exchange.places.start : exchange.places.stop], *buffers]

    async def _make_runner(
        self,
        group_info: GroupInfo,
        exchange: Exchange,
        tensors: Sequence[torch.Tensor],
        claims: Mapping[str, Claim],
        left_out: Mapping[str, str],
    ) -> ExactAllReduce:
        options = self.options
        all_bytes = sum(tensor.nbytes for tensor in tensors)
        # Reducers wait for senders, so the wait for a reducer must be longer.
        needed_s = patience_s(claims, options.part_size_bytes, all_bytes)
        sender_timeout = max(options.sender_timeout, needed_s)
        reducer_timeout = max(options.reducer_timeout, 2 * needed_s)
        bandwidths = [0.0 if claim.is_client else None for claim in claims.values()]
        size = sum(tensor.numel() for tensor in tensors)
        fractions = await asyncio.to_thread(load_balance_peers, size, bandwidths, options.min_vector_size)
        runner = ExactAllReduce(
            claims=claims,
            left_out=left_out,
            robust=self.rules.robust_mean,
            first_buffer=len(exchange.places),
            limit_s=exchange_limit_s(claims, all_bytes, reducer_timeout, options.allreduce_timeout),
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=group_info.group_id,
            ordered_peer_ids=group_info.peer_ids,
            peer_fractions=fractions,
            compression=options.compression if exchange.codec is None else CODECS[exchange.codec](),
            part_size_bytes=options.part_size_bytes,
            weight=claims[self._p2p.peer_id.to_base58()].weight,
            sender_timeout=sender_timeout,
            reducer_timeout=reducer_timeout,
        )
        self._running[group_info.group_id].set_result(runner)
        return runner

    async def rpc_join_group(
        self, request: JoinRequest, context: P2PContext
    ) -> AsyncIterator[MessageFromLeader]:
        """Let a peer into the group that this one leads, or refuse it; see `GroupFinder.admit`."""
        async for message in self.finder.admit(request, context.remote_id):
            yield message

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[AveragingData], context: P2PContext
    ) -> AsyncIterator[AveragingData]:
        """Reduce a member's parts; answer BAD_GROUP_ID to a peer of another group.

        A member may know the group before this peer does: it waits as long as this peer looks for one.
        """
        async for first in stream:  # none if the member has hung up
            if first.group_id not in self._running:
                await self._is_settled.wait()
            if (running := self._running.get(first.group_id)) is None:
                yield AveragingData(code=BAD_GROUP_ID)
                return
            runner = await running
            async for message in runner.rpc_aggregate_part(achain(as_aiter(first), stream), context):
                yield message
            return

    # -- the vote ------------------------------------------------------------------------------------

    async def _hold_vote(self, group_info: GroupInfo, vote: Vote, quorum: int) -> Decision:
        """Vote, and record the blame that follows from the result."""
        ballot = self.ballots[group_info.group_id]
        ask = partial(self._exchange_votes, group_info.group_id)
        decision = await ballot.hold(self._p2p.peer_id, self._key, vote, quorum, ask)
        blame = self.finder.blame
        for peer in ballot.unheard:
            blame.suspect(peer, "it did not answer in a vote")
        for peer, said in ballot.votes.items():
            if said is TWO_VOTES:
                blame.exclude(peer, "it voted for two averages in one round")
        blame.note_votes(group_info.peer_ids, decision.votes, decision.is_committed)
        return decision

    async def _exchange_votes(self, group_id: bytes, peer: PeerID, call: Call) -> Sequence[bytes]:
        request = JoinRequest(schema_hash=group_id, gather=call.to_bytes())
        answer = await self.stub(peer).rpc_vote(request, timeout=2 * self.options.sender_timeout)
        return tuple(answer.gathered)

    async def rpc_vote(self, request: JoinRequest, context: P2PContext) -> MessageFromLeader:
        """Receive a member's vote; answer when this peer knows all votes of the round (see `Ballot.answer`).

        A caller whose group this peer does not know yet waits for it, in one call at a time.
        """
        peer = context.remote_id
        ballot = await self.ballots.find(request.schema_hash, peer, self.options.sender_timeout)
        answer = await ballot.answer(peer, Call.parse(request.gather)) if ballot is not None else []
        self.finder.blame.note_call(peer)  # it is alive, even if its slow link made it late
        return MessageFromLeader(group_id=request.schema_hash, gathered=answer)

    # -- replay of a round that this peer missed -----------------------------------------------------

    async def replay(self, donor: str, exchange: Exchange, silence_s: float) -> Outcome | None:
        """Fetch the round that continued this peer's history from a donor; see `Rounds.start_replay`."""
        try:
            return await self._replayed(PeerID.from_base58(donor), exchange, silence_s)
        except (*UNREACHABLE, StopAsyncIteration, ValueError) as error:
            logger.debug(f"no round from {donor}: {error!r}")
            return None

    async def _replayed(self, donor: PeerID, exchange: Exchange, silence_s: float) -> Outcome | None:
        async with asyncio.timeout(silence_s):
            stream = await self.stub(donor).rpc_replay(DownloadData(metadata=exchange.after))
        async with aclosing(stream), aclosing(aiter_with_timeout(stream, silence_s)) as messages:
            if not (first := await anext(messages)).metadata:
                return None
            header = Header.from_wire(first.metadata)
            peers = [peer_from(member) for member in header.members]
            said = map(self.finder.claim_of, peers, header.gathered)
            _, outcome = judge(peers, said, exchange.most_samples, self.rules.norm_limit)
            tensors = self._exchanged(self.averages.tensors, exchange, outcome)
            limit = FEW_BYTES + 2 * sum(tensor.nbytes for tensor in tensors)
            if header.num_bytes > limit or header.num_parts > header.num_bytes + len(tensors):
                raise ValueError("an average of larger tensors")
            parts: list[runtime_pb2.Tensor] = []
            missing = header.num_bytes
            while len(parts) < header.num_parts and missing >= 0:
                parts.append((await anext(messages)).tensor_part)
                missing -= len(parts[-1].buffer)
            if missing:
                raise ValueError("parts of another size than announced")
        if header.proof != await self._proof(parts, tensors, header.gathered):
            raise ValueError("another average than its proof says, or a round of other rules")
        async with enter_asynchronously(self.averages.locked()):
            copy_average(parts, tensors)
        return replace(outcome, proof=header.proof)

    async def rpc_replay(self, request: DownloadData, context: P2PContext) -> AsyncIterator[DownloadData]:
        """Send the round that continued a history; send nothing if this peer does not keep it."""
        self.finder.blame.note_call(context.remote_id)
        if (kept := self._log.find(request.metadata)) is not None:
            header, parts = kept
            yield DownloadData(metadata=header.to_wire())
            for part in parts:
                self.activity.note()
                yield DownloadData(tensor_part=part)


# -- in the training process -----------------------------------------------------------------------


@dataclass(frozen=True)
class RoundInProgress:
    """A round that the DHT's process looks for, or averages."""

    has_group: MPFuture[None]
    """Done when a group was found: then the round ends by itself, and can't be cancelled."""

    outcome: MPFuture[Outcome]


class Rounds(ServiceHandle):
    """A peer's rounds, as its training process sees them: the handle of its `RoundService`.

    `SwarmOptimizer` makes and ends one.
    """

    def expect_group(
        self, peers: Sequence[str], clients: Sequence[str], quorum: int, schema_suffix: bytes
    ) -> None:
        """Set the peers that are at this peer's step, by base58 ids; see `GroupFinder.expect`."""
        self.send("expect", peers, clients, quorum, schema_suffix)

    def start(self, claim: Claim, timeout_s: float, exchange: Exchange) -> RoundInProgress:
        """Look for a group for `timeout_s`, and average with it, in the background.

        The exception of `outcome`, if there is one, says why nothing was averaged. The averaged tensors then
        still hold this peer's contribution, perhaps with the codecs' losses of earlier rounds added. The
        service adds the norm to the claim.
        """
        has_group: MPFuture[None] = MPFuture()
        deadline = swarm_time() + timeout_s
        return RoundInProgress(has_group, self.request("average", claim, exchange, deadline, has_group))

    def cancel(self, round_: RoundInProgress) -> None:
        """Stop looking for a group; the outcome of the round is ignored."""
        if round_.outcome.cancel():
            self.send("cancel")

    def start_replay(self, donor: str, exchange: Exchange, silence_s: float) -> MPFuture[Outcome | None]:
        """Fetch the round that continued this peer's history from a donor (base58 id), in the background.

        Call `expect_group` before it: the round must have the schema that this peer would average with.

        Returns:
            A future of the outcome that follows from the round's claims; the averaged tensors then hold the
            round's average. None, with unchanged tensors, if the donor did not keep the round, sent something
            else, or sent nothing for `silence_s` seconds.
        """
        return self.request("replay", donor, exchange, silence_s)
