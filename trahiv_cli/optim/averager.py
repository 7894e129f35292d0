"""One exact round in the DHT's process: a group averages, votes on its average, and applies it or does not.

1. A peer claims its contribution. `group_finder` finds a group, whose members all judge the claims alike.
2. The group exchanges parts and averages (`allreduce`).
3. The group votes on the average (`ballot`). A member applies it only if most of the group hold the same
   average, and it can name the members that do not.
4. Each member keeps the round for peers that missed it, and replays the rounds that it missed itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import statistics
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, AsyncIterator, ClassVar  # noqa: UP035 - hivemind knows a stream by typing's

import torch
from hivemind.averaging import averager as hivemind_averager
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import aiter_with_timeout, enter_asynchronously

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.allreduce import ExactAllReduce
from trahiv_cli.optim.ballot import TWO_VOTES, Ballots, Call, Decision, NotCommitted, Vote, proof_of
from trahiv_cli.optim.group_finder import GroupFinder
from trahiv_cli.optim.pace import RoundRules
from trahiv_cli.optim.rounds import STATES_KEPT, Claim, Exchange, Header, Log, Outcome, decoded, judge
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.codecs import CODECS
from trahiv_cli.swarm.corrections.dht import CorrectedAverager, CorrectedControl, CorrectedDHT
from trahiv_cli.swarm.corrections.streams import UNREACHABLE
from trahiv_cli.swarm.records import content_of, peer_from
from trahiv_cli.swarm.snapshot import FEW_BYTES, JoinerActivity

ANSWER_S = 10.0  # within this time the DHT's process acknowledges a round

EXCHANGE: ContextVar[Exchange] = ContextVar("exchange")  # set in the task of a round

# A part may take PATIENCE times its expected time: at most MOST_PATIENCE_S at the members' usual rate, or at
# most SLOWEST_PATIENCE_S at the slowest member's, whichever is longer. Thus many fast members do not exclude
# a slow one, and a member that only claims to be slow is excluded after two such rounds. The whole exchange
# has the same limits, without MOST_PATIENCE_S. Its usual rate is at least LOWEST_RATE, in bytes a second.
PATIENCE = 4.0
MOST_PATIENCE_S = 60.0
SLOWEST_PATIENCE_S = 30.0
LOWEST_RATE = 125_000.0


def patience_s(claims: Mapping[str, Claim], part_bytes: int, all_bytes: int) -> float:
    """Return how many seconds a member may wait for a part of `part_bytes`; 0 if no member knows its rate.

    Each member sends `all_bytes` in total, part by part to one member after another.
    """
    needed = PATIENCE * min(len(claims) * part_bytes, all_bytes)
    rates = _link_rates(claims)
    return _limit_s(needed, rates, MOST_PATIENCE_S) if rates else 0.0


def exchange_limit_s(claims: Mapping[str, Claim], all_bytes: int, least_s: float, timeout_s: float) -> float:
    """Return the limit of an exchange of `all_bytes` of parts, and as many of averages, in seconds.

    It is at least `least_s`. By the usual rate it is at most half of `timeout_s`: the vote needs the rest.
    """
    needed = PATIENCE * 2 * all_bytes
    rates = _link_rates(claims) or [LOWEST_RATE]
    return max(least_s, _limit_s(needed, rates, min(timeout_s / 2, needed / LOWEST_RATE)))


def _limit_s(num_bytes: float, rates: Sequence[float], most_s: float) -> float:
    usual_s = num_bytes / statistics.median_low(rates)
    return max(min(most_s, usual_s), min(SLOWEST_PATIENCE_S, num_bytes / min(rates)))


def _link_rates(claims: Mapping[str, Claim]) -> list[float]:
    return [claim.measured.rate for claim in claims.values() if claim.measured.is_of_link]


def _is_not_about_a_round(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], AllreduceException))


class ExactAverager(CorrectedAverager):
    """Averages with `ExactAllReduce`, and applies only averages that most of the group voted for.

    `SwarmOptimizer` creates one as an `ExactGradientAverager`; the DHT's process serves it until shutdown.
    """

    SERVED: ClassVar[tuple[str, ...]] = (
        "_rules",
        "_interest",
        "_buffers",
        "_ballots",
        "_residual",
        "_is_of_steps",
    )

    def __init__(
        self,
        *args: Any,
        rules: RoundRules,
        interest: JoinerActivity,
        buffers: Sequence[torch.Tensor] = (),
        **kwargs: Any,
    ) -> None:
        self._rules = rules
        self._interest = interest
        self._ballots = Ballots()
        self._buffers = buffers  # see `Buffers.exchanged`
        self._residual: dict[int, torch.Tensor] = {}  # losses of codecs, by index of the tensor
        self._is_of_steps = False  # whether they are losses of local steps
        super().__init__(*args, **kwargs)

    def start(self) -> None:
        """Start to serve this averager in the DHT's process."""
        self.lock_averaged_tensors = self.dht.tensors_lock
        super().start()

    def serve(self, dht: CorrectedDHT, pipe: Any) -> None:
        """Serve this averager; see the base class."""
        self.lock_averaged_tensors = dht.tensors_lock
        hivemind_averager.Matchmaking = GroupFinder
        # hivemind logs a traceback for each round that is not committed; the round's error has the reason.
        hivemind_averager.logger.addFilter(_is_not_about_a_round)
        super().serve(dht, pipe)

    def expect_group(
        self, peers: Sequence[str], clients: Sequence[str], quorum: int, schema_suffix: bytes
    ) -> None:
        """Set the peers that are at this peer's step, by base58 ids; see `GroupFinder.expect`."""
        ids = [[PeerID.from_base58(peer) for peer in some] for some in (peers, clients)]
        self._outer_pipe.send(("_expect", [*ids, quorum, schema_suffix], {}))

    def start_round(self, claim: Claim, timeout_s: float, exchange: Exchange) -> StepControl:
        """Look for a group for `timeout_s`, and average with it, in the background.

        The control's `result()` is an `Outcome`. Its exception, if there is one, says why nothing was
        averaged. The averaged tensors then still hold this peer's contribution, perhaps with the codecs'
        losses of earlier rounds added. The averager adds the norm to the claim. Raises `RoundFailed` if the
        DHT's process does not answer.
        """
        # Created before the control, whose class is a subclass: mpfuture.py:152 sets up its pipe on the class
        # of the first future.
        is_known: MPFuture[Any] = MPFuture()
        now = swarm_time()
        control = CorrectedControl(
            scheduled_time=now,
            deadline=now + timeout_s,
            allow_retries=False,
            weight=claim.weight,
            data_for_gather=replace(claim, is_client=self.mode == AveragingMode.CLIENT).to_bytes(),
        )
        self._outer_pipe.send(("_step", [exchange], {"step": control, "future_for_init": is_known}))
        try:
            control.attach(*is_known.result(timeout=ANSWER_S))
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            # The message was lost, or the process is stuck; averaging/averager.py:421 would wait forever.
            raise RoundFailed(f"the DHT's process did not answer within {ANSWER_S:.0f} s") from error
        control.allow_allreduce()
        return control

    # -- in the DHT's process -------------------------------------------------------------------

    async def _expect(self, *told: Any) -> None:
        self._matchmaking.expect(*told)

    async def _step(self, exchange: Exchange, *, step: StepControl, future_for_init: Any) -> None:
        EXCHANGE.set(exchange)
        try:
            claim = Claim.parse(step.data_for_gather)
            loop = asyncio.get_running_loop()
            norm = await loop.run_in_executor(None, self._prepare_contribution, exchange)
            step._data_for_gather = replace(claim, norm=norm).to_bytes()
        except BaseException as error:
            future_for_init.set_exception(error)  # else `start_round` would wait for `ANSWER_S`
            raise
        await super()._step(step=step, future_for_init=future_for_init)

    def _prepare_contribution(self, exchange: Exchange) -> float:
        """Add the losses of earlier rounds to the tensors, which each try fills anew; return their norm."""
        if self._is_of_steps != exchange.is_of_steps:
            self._residual = {}
            self._is_of_steps = exchange.is_of_steps
        with self.get_tensors() as tensors, torch.no_grad():
            for place in exchange.places:
                if place in self._residual:
                    tensors[place].add_(self._residual[place])
            norms = [torch.linalg.vector_norm(tensors[place]) for place in exchange.places]
            return float(torch.linalg.vector_norm(torch.stack(norms)))

    async def _aggregate_with_group(self, group_info: GroupInfo, **options: Any) -> Outcome:
        """Average with the group, vote, and apply the average at once, or raise `NotCommitted`.

        If it raises, the tensors are unchanged. Upstream (averaging/averager.py:529) adds each tensor's
        difference as it arrives, which leaves a mixture when the round fails half-way. It also declares the
        new state in the DHT once per tensor: 800 tensors cost 2.75 s a round, not 0.62 s.
        """
        exchange = EXCHANGE.get()
        loop = asyncio.get_running_loop()
        gathered = group_info.gathered
        said = [Claim.parse(content_of(statement)) for statement in gathered]  # matchmaking verified them
        claims, outcome = judge(group_info.peer_ids, said, exchange.most_samples, self._rules.norm_limit)
        clients = [peer for peer, claim in zip(group_info.peer_ids, said, strict=True) if claim.is_client]
        self._ballots.open(group_info, self.allreduce_kwargs["sender_timeout"], clients)
        started = loop.time()
        async with enter_asynchronously(self.get_tensors()) as all_tensors:
            tensors = self._exchanged(all_tensors, exchange, outcome)
            runner: ExactAllReduce | None = None
            try:
                runner = await self._make_runner(group_info, tensors, claims, outcome.left_out, **options)
                async for _ in runner:
                    pass  # until the vote it keeps the parts encoded: less memory than a second copy
                took_s = loop.time() - started
                parts = runner.encoded_averages
                average = decoded(parts, tensors)
                schema = self._matchmaking.schema
                proof = await loop.run_in_executor(None, proof_of, average, gathered, schema)
                vote = Vote(proof, notes=runner.tensor_part_reducer.notes)
            except Exception as error:  # noqa: BLE001 - whatever it was, the others are told
                failure = (runner and runner.failure) or error
                vote = Vote(reason=str(failure) or type(failure).__name__)
                if runner:
                    is_sure, is_late = runner.is_sure, runner.is_late
                    vote = replace(vote, blames=runner.blamed, is_sure=is_sure, is_late=is_late)
                self._running_groups[group_info.group_id].cancel()  # else callers would wait for a runner
            quorum = claims[self.peer_id.to_base58()].quorum
            decision = await self._hold_vote(group_info, vote, quorum)
            if not decision.is_committed:
                raise NotCommitted(decision.reason, vote.digest, sum(outcome.samples.values()))
            assert runner is not None  # else there would be no digest to commit
            for tensor, value in zip(tensors, decoded(parts, tensors), strict=True):
                tensor.copy_(value)
            for place in exchange.places:
                self._residual.pop(place, None)
            self._residual |= dict(zip(exchange.places, runner.lost or (), strict=False))
            ids = tuple(peer.to_bytes() for peer in group_info.peer_ids)
            num_bytes = sum(len(part.buffer) for part in parts)
            header = Header(ids, tuple(gathered), vote.digest, len(parts), num_bytes)
            self._log.add(exchange.after, header, parts, is_wanted=self._interest.is_there)
        notes = {peer: why for other in decision.votes.values() for peer, why in other.notes.items()}
        return replace(
            outcome,
            proof=vote.digest,
            left_out=outcome.left_out | {peer: why for peer, why in notes.items() if peer in claims},
            reason=decision.reason,
            exchange_s=took_s,
            longest_wait_s=runner.tensor_part_reducer.longest_wait_s,
            parts_sent=runner.sent,
            parts_received=runner.received,
        )

    def _exchanged(
        self, all_tensors: Sequence[torch.Tensor], exchange: Exchange, outcome: Outcome
    ) -> list[torch.Tensor]:
        """Return the tensors that a round with this outcome averages; a vector of buffers is the last."""
        buffers = self._buffers if outcome.moves_buffers else ()
        return [*all_tensors[exchange.places.start : exchange.places.stop], *buffers]

    async def _make_runner(
        self,
        group_info: GroupInfo,
        tensors: Sequence[torch.Tensor],
        claims: Mapping[str, Claim],
        left_out: Mapping[str, str],
        *,
        min_vector_size: int,
        **options: Any,
    ) -> ExactAllReduce:
        if (codec := EXCHANGE.get().codec) is not None:
            options["compression"] = CODECS[codec]()
        all_bytes = sum(tensor.nbytes for tensor in tensors)
        needed_s = patience_s(claims, options["part_size_bytes"], all_bytes)
        if needed_s > options["sender_timeout"]:
            # Reducers wait for senders, so the wait for a reducer must be longer.
            options |= {"sender_timeout": needed_s, "reducer_timeout": 2 * needed_s}
        bandwidths = [0.0 if claim.is_client else None for claim in claims.values()]
        size = sum(tensor.numel() for tensor in tensors)
        fractions = await asyncio.get_running_loop().run_in_executor(
            None, load_balance_peers, size, bandwidths, min_vector_size
        )
        runner = ExactAllReduce(
            claims=claims,
            left_out=left_out,
            robust=self._rules.robust_mean,
            first_buffer=len(EXCHANGE.get().places),
            limit_s=exchange_limit_s(claims, all_bytes, options["reducer_timeout"], self._allreduce_timeout),
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=group_info.group_id,
            ordered_peer_ids=group_info.peer_ids,
            peer_fractions=fractions,
            **options,
        )
        self._running_groups[group_info.group_id].set_result(runner)
        return runner

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Reduce a member's parts. If it hangs up before the first part, the call ends without a traceback.

        Upstream (averaging/averager.py:585) raises `StopAsyncIteration` inside a generator then.
        """
        try:
            async for message in super().rpc_aggregate_part(stream, context):
                yield message
        except RuntimeError as error:
            if not isinstance(error.__cause__, StopAsyncIteration):
                raise

    # -- the vote ------------------------------------------------------------------------------------

    async def _hold_vote(self, group_info: GroupInfo, vote: Vote, quorum: int) -> Decision:
        """Vote, and record the blame that follows from the result."""
        ballot = self._ballots[group_info.group_id]
        ask = partial(self._exchange_votes, group_info.group_id)
        decision = await ballot.hold(self.peer_id, self.dht.signing_key, vote, quorum, ask)
        blame = self._matchmaking.blame
        for peer in ballot.unheard:
            blame.suspect(peer, "it did not answer in a vote")
        for peer, said in ballot.votes.items():
            if said is TWO_VOTES:
                blame.exclude(peer, "it voted for two averages in one round")
        blame.note_votes(group_info.peer_ids, decision.votes, decision.is_committed)
        return decision

    async def _exchange_votes(self, group_id: bytes, peer: PeerID, call: Call) -> Sequence[bytes]:
        stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
        request = averaging_pb2.JoinRequest(schema_hash=group_id, gather=call.to_bytes())
        answer = await stub.rpc_vote(request, timeout=2 * self.allreduce_kwargs["sender_timeout"])
        return tuple(answer.gathered)

    async def rpc_vote(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> averaging_pb2.MessageFromLeader:
        """Receive a member's vote; answer when this peer knows all votes of the round (see `Ballot.answer`).

        A caller whose group this peer does not know yet waits for it, in one call at a time.
        """
        limit_s = self.allreduce_kwargs["sender_timeout"]
        peer = context.remote_id
        ballot = await self._ballots.find(request.schema_hash, peer, limit_s)
        answer = await ballot.answer(peer, Call.parse(request.gather)) if ballot is not None else []
        self._matchmaking.blame.clear(peer)  # the caller is alive, even if its slow link made it late
        return averaging_pb2.MessageFromLeader(group_id=request.schema_hash, gathered=answer)

    # -- replay of a round that this peer missed -----------------------------------------------------

    def start_replay(self, donor: str, exchange: Exchange, silence_s: float) -> MPFuture[Outcome | None]:
        """Fetch the round that continued this peer's history from a donor (base58 id), in the background.

        Call `expect_group` before it: the round must have the schema that this peer would average with.

        Returns:
            A future of the outcome that follows from the round's claims; the averager's tensors then hold the
            round's average. None, with unchanged tensors, if the donor did not keep the round, sent something
            else, or sent nothing for `silence_s` seconds.
        """
        future: MPFuture[Outcome | None] = MPFuture()
        self._outer_pipe.send(("_replay", [donor, exchange, silence_s], {"future": future}))
        return future

    @cached_property
    def _log(self) -> Log:
        return Log(STATES_KEPT * sum(tensor.nbytes for tensor in self._averaged_tensors))

    async def _replay(self, donor: str, exchange: Exchange, silence_s: float, *, future: Any) -> None:
        nothing = (*UNREACHABLE, StopAsyncIteration, ValueError)
        await self.fulfil(future, self._replayed(PeerID.from_base58(donor), exchange, silence_s), nothing)

    async def _replayed(self, donor: PeerID, exchange: Exchange, silence_s: float) -> Outcome | None:
        stub = self.get_stub(self._p2p, donor, namespace=self.prefix)
        async with asyncio.timeout(silence_s):
            stream = await stub.rpc_replay(averaging_pb2.DownloadData(metadata=exchange.after))
        async with aclosing(stream), aclosing(aiter_with_timeout(stream, silence_s)) as messages:
            if not (first := await anext(messages)).metadata:
                return None
            header = Header.from_wire(first.metadata)
            peers = [peer_from(member) for member in header.members]
            said = map(self._matchmaking.claim_of, peers, header.gathered)
            _, outcome = judge(peers, said, exchange.most_samples, self._rules.norm_limit)
            tensors = self._exchanged(self._averaged_tensors, exchange, outcome)
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
        loop = asyncio.get_running_loop()
        schema = self._matchmaking.schema
        average = decoded(parts, tensors)
        if header.proof != await loop.run_in_executor(None, proof_of, average, header.gathered, schema):
            raise ValueError("another average than its proof says, or a round of other rules")
        async with enter_asynchronously(self.get_tensors()):
            for tensor, value in zip(tensors, decoded(parts, tensors), strict=True):
                tensor.copy_(value)
        return replace(outcome, proof=header.proof)

    async def rpc_replay(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Send the round that continued a history; send nothing if this peer does not keep it."""
        del context
        if (kept := self._log.find(request.metadata)) is not None:
            header, parts = kept
            yield averaging_pb2.DownloadData(metadata=header.to_wire())
            for part in parts:
                self._interest.note()
                yield averaging_pb2.DownloadData(tensor_part=part)
