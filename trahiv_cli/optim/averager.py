"""One exact round in the DHT's process: a group averages, votes on its average, and applies it or does not.

1. A peer's claim says what it brings; a group is found (`group_finder`) whose claims all members judge alike.
2. The group exchanges parts and averages (`allreduce`).
3. It votes on the average (`ballot`), so that it is applied by most of the group or by nobody, and every
   peer can name those that did not hold it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar  # noqa: UP035 - hivemind knows a stream by typing's

import torch
from hivemind.averaging import averager as hivemind_averager
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_logger
from hivemind.utils.asyncio import enter_asynchronously

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.allreduce import ExactAllReduce
from trahiv_cli.optim.auto import usual_rate
from trahiv_cli.optim.ballot import (
    TWO_VOTES,
    Ballot,
    Ballots,
    Decision,
    NotCommitted,
    Vote,
    decide,
    digest_of,
)
from trahiv_cli.optim.codecs import CODECS, Codec, register
from trahiv_cli.optim.group_finder import GroupFinder
from trahiv_cli.optim.replay import Record
from trahiv_cli.optim.rounds import Exchange, Outcome
from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.optim.soundness import (
    Claim,
    outliers,
)
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.corrections.dht import CorrectedAverager, CorrectedControl, CorrectedDHT
from trahiv_cli.swarm.corrections.streams import UNREACHABLE
from trahiv_cli.swarm.records import peer_from
from trahiv_cli.swarm.snapshot import SharedNumber
from trahiv_cli.swarm.statements import content_of

logger = get_logger(__name__)

ANSWER_S = 10.0
"""Within this time the DHT's process says that it knows of a round."""

VOTE_GRACE_S = 2.0
"""How long the last votes are waited for once the round is decided: only their names are missing."""


EXCHANGE: ContextVar[Exchange] = ContextVar("exchange")
"""In the task of a round: what it is about."""

PATIENCE, MOST_PATIENCE_S, SLOWEST_PATIENCE_S = 4.0, 60.0, 30.0
"""A part may take so many times as long as it took last time: by most members' figures no longer than the
first of these, by the slowest one's no longer than the second. After two such rounds a member that only says
that it is slow is set aside; a slow one is not shut out by many that are quick."""


def patience_s(claims: Mapping[str, Claim], part_bytes: int, all_bytes: int) -> float:
    """How long a member may wait for a part: each of them sends all others one at a time, by its own link.

    Args:
        claims: of the members.
        part_bytes: of the largest part that may be.
        all_bytes: of all that a member has to send.
    """
    measured = [claim.measured for claim in claims.values() if claim.measured.is_of_link]
    if not measured:
        return 0.0
    needed = PATIENCE * min(len(claims) * part_bytes, all_bytes)
    slowest = min(said.rate for said in measured)
    return max(min(MOST_PATIENCE_S, needed / usual_rate(measured)), min(SLOWEST_PATIENCE_S, needed / slowest))


def _is_not_about_a_round(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], AllreduceException))


class ExactAverager(CorrectedAverager):
    """Averages with `ExactAllReduce` and applies only what its group has voted for.

    Args:
        rules: how contributions are judged.
        kwargs: see `DecentralizedAverager`.
    """

    SERVED: ClassVar[tuple[str, ...]] = (
        *("_rules", "_ballots", "_residual", "_residual_is_of_steps"),
        *("_bytes_sent", "_bytes_received"),
    )

    def __init__(self, *args: Any, rules: RoundRules, **kwargs: Any) -> None:
        self._bytes_sent, self._bytes_received = SharedNumber(0), SharedNumber(0)
        self._rules = rules
        self._ballots = Ballots()
        self._residual: dict[int, torch.Tensor] = {}
        self._residual_is_of_steps = False
        register()
        super().__init__(*args, **kwargs)

    def start(self) -> None:
        """Have the DHT's process serve this averager."""
        self.lock_averaged_tensors = self.dht.tensors_lock
        super().start()

    def serve(self, dht: CorrectedDHT, pipe: Any) -> None:
        """Serve this averager; see the base class."""
        register()
        self.lock_averaged_tensors = dht.tensors_lock
        hivemind_averager.Matchmaking = GroupFinder
        # It prints a traceback for each round that is not committed, which `Outcome` and the error say.
        hivemind_averager.logger.addFilter(_is_not_about_a_round)
        super().serve(dht, pipe)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of encoded tensor parts that were sent and received so far."""
        return self._bytes_sent.value, self._bytes_received.value

    def expect_group(
        self, peers: Sequence[str], clients: Sequence[str], quorum: int, schema_suffix: bytes
    ) -> None:
        """Say who is at this peer's step; see `GroupFinder.expect`. Ids are base58."""
        self._outer_pipe.send(("_expect", [list(peers), list(clients), quorum, schema_suffix], {}))

    def start_round(self, claim: Claim, timeout_s: float, exchange: Exchange) -> StepControl:
        """Look for a group and average with it, in the background; `result()` is an `Outcome`.

        The control's exception, if there is one, says why nothing was averaged; the averaged tensors are
        then as they were.

        Args:
            claim: what this peer says of its contribution; the averager adds the norm.
            timeout_s: for finding the group.
            exchange: what is averaged.

        Raises:
            RoundFailed: the DHT's process does not answer.
        """
        # Made before the control: mpfuture.py:152 sets up the class that the first future is of.
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
            # averaging/averager.py:421 waits for ever. The message was lost, or the process is stuck.
            raise RoundFailed(f"the DHT's process did not answer within {ANSWER_S:.0f} s") from error
        control.allow_allreduce()
        return control

    # -- in the DHT's process -------------------------------------------------------------------

    async def _expect(self, peers: list[str], clients: list[str], quorum: int, schema_suffix: bytes) -> None:
        ids = {peer: PeerID.from_base58(peer) for peer in (*peers, *clients)}
        self._matchmaking.expect(
            [ids[peer] for peer in peers], [ids[peer] for peer in clients], quorum, schema_suffix
        )

    async def _step(self, exchange: Exchange, *, step: StepControl, future_for_init: Any) -> None:
        EXCHANGE.set(exchange)
        try:
            claim, loop = Claim.parse(step.data_for_gather), asyncio.get_running_loop()
            norm = await loop.run_in_executor(None, self._prepare_contribution, exchange)
            step._data_for_gather = replace(claim, norm=norm).to_bytes()
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
        exchange = EXCHANGE.get()
        members = [peer.to_base58() for peer in group_info.peer_ids]
        read = [Claim.parse(content_of(statement)) for statement in group_info.gathered]  # they are verified
        claims, left_out = self._judge(dict(zip(members, read, strict=True)), exchange)
        own = claims[self.peer_id.to_base58()]
        clients = [PeerID.from_base58(peer) for peer, claim in claims.items() if claim.is_client]
        self._ballots.open(group_info, clients)
        loop = asyncio.get_running_loop()
        places = exchange.places
        if (infos := kwargs["tensor_infos"]) is not None:
            kwargs["tensor_infos"] = infos[places.start : places.stop]
        if exchange.codec is not None:
            kwargs["compression"] = CODECS[exchange.codec]()
        all_bytes = sum(tensor.nbytes for tensor in self._averaged_tensors[places.start : places.stop])
        needed_s = patience_s(claims, kwargs["part_size_bytes"], all_bytes)
        if kwargs["sender_timeout"] and needed_s > kwargs["sender_timeout"]:
            # Reducers wait for senders, so whoever waits for a reducer waits longer.
            kwargs |= {"sender_timeout": needed_s, "reducer_timeout": 2 * needed_s}
        started, parts = loop.time(), self.traffic
        async with enter_asynchronously(self.get_tensors()) as all_tensors:
            tensors = all_tensors[places.start : places.stop]
            codec = kwargs["compression"]
            is_lossy = isinstance(codec, Codec) and not codec.is_lossless
            keeps_track = is_lossy and self.peer_id.to_base58() not in left_out
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
                blames, is_sure = (runner.blamed, runner.is_sure) if runner else ("", False)
                reason = str(failure) or type(failure).__name__
                vote = Vote(reason=reason, blames=blames, is_sure=is_sure)
                self._running_groups[group_info.group_id].cancel()  # if nothing runs, nobody waits for it
            decision, votes = await self._hold_vote(group_info, vote, own.quorum)
            if not decision.is_committed:
                samples = sum(Outcome.of_claims(claims, left_out, vote.digest).samples.values())
                raise NotCommitted(decision.reason, vote.digest, samples)
            for tensor, average in zip(tensors, averages, strict=True):
                tensor.copy_(average)
            for index, place in enumerate(places):
                self._residual.pop(place, None)
                if lost is not None:
                    self._residual[place] = lost[index]
            assert runner is not None  # or there would be no digest to commit
            ids, said = tuple(peer.to_bytes() for peer in group_info.peer_ids), tuple(group_info.gathered)
            self._keep(Record(exchange.after, ids, said, vote.digest, runner.encoded_averages))
        notes = {peer: why for other in votes.values() for peer, why in other.notes.items()}
        return replace(
            Outcome.of_claims(claims, left_out, vote.digest),
            left_out=left_out | {peer: why for peer, why in notes.items() if peer in claims},
            reason=decision.reason,
            exchange_s=took_s,
            parts_sent=self.traffic[0] - parts[0],
            parts_received=self.traffic[1] - parts[1],
        )

    def _keep(self, record: Record) -> None:
        """Take note of a round that was committed."""

    def _judge(
        self, claims: Mapping[str, Claim], exchange: Exchange
    ) -> tuple[dict[str, Claim], dict[str, str]]:
        """Say what counts of the members' claims, in their order; whose contribution is left out, and why."""
        claims = {peer: claim.counted(exchange.most_samples) for peer, claim in claims.items()}
        return claims, outliers(claims, self._rules.norm_limit)

    async def _make_runner(
        self,
        group_info: GroupInfo,
        tensors: Sequence[torch.Tensor],
        min_vector_size: int,
        **kwargs: Any,
    ) -> ExactAllReduce:
        claims: Mapping[str, Claim] = kwargs["claims"]
        bandwidths = [0.0 if claim.is_client else None for claim in claims.values()]
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
        """Return a digest of the average, of the group's claims, and of what the group agrees on."""
        context = hashlib.sha256(self._matchmaking.schema)
        for gathered in group_info.gathered:
            context.update(hashlib.sha256(gathered).digest())
        return hashlib.sha256(context.digest() + digest_of(averages)).digest()

    # -- the vote ------------------------------------------------------------------------------------

    async def _hold_vote(
        self, group_info: GroupInfo, vote: Vote, quorum: int
    ) -> tuple[Decision, dict[str, Vote]]:
        """Tell the others this peer's vote, hear theirs, decide. Takes at most the chunk timeout."""
        ballot, own = self._ballots[group_info.group_id], self.peer_id.to_base58()
        members = [peer.to_base58() for peer in group_info.peer_ids]
        statement = ballot.cast_own(self.dht.signing_key, self.peer_id, vote)
        # Those that can't be asked ask; their votes are known to all that they asked.
        calls = [
            asyncio.create_task(self._exchange_votes(peer, group_info.group_id, ballot, statement))
            for peer in group_info.peer_ids
            if peer != self.peer_id and peer not in ballot.silent
        ]
        started, limit_s = asyncio.get_running_loop().time(), self.allreduce_kwargs["sender_timeout"]
        is_decided = False
        while True:
            ballot.has_changed.clear()
            standing = ballot.votes if is_decided else ballot.standing(self._vote_good_for_s)
            votes = {peer.to_base58(): said for peer, said in standing.items()} | {own: vote}
            decision = decide(own, members, votes, quorum)
            is_decided = decision.is_committed
            unheard = ballot.members - ballot.votes.keys()
            if not unheard:
                ballot.is_settled.set()
            # Who votes for two averages is found out by what the others heard of it.
            is_over = not unheard and not (ballot.is_disputed and not all(call.done() for call in calls))
            waited_s = asyncio.get_running_loop().time() - started
            # Those that can't be asked may still ask, or be known to one that was asked.
            is_short = decision.is_committed or not vote.digest or unheard <= ballot.silent
            left_s = (VOTE_GRACE_S if is_short else limit_s) - waited_s
            if is_over or left_s <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await ballot.has_changed.wait()
        ballot.is_undone = not decision.is_committed
        ballot.is_settled.set()
        for call in calls:  # they end by themselves; their answers are not needed any more
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
        for peer in unheard:
            self._matchmaking.blame.suspect(peer)
        for peer, said in ballot.votes.items():
            if said is TWO_VOTES:
                self._matchmaking.blame.exclude(peer, "it voted for two averages in one round")
        self._matchmaking.blame.note_votes(group_info.peer_ids, votes, decision.is_committed)
        return decision, votes

    async def _exchange_votes(self, peer: PeerID, group_id: bytes, ballot: Ballot, statement: bytes) -> None:
        stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
        request = averaging_pb2.JoinRequest(schema_hash=group_id, gather=statement)
        try:
            answer = await stub.rpc_vote(request, timeout=2 * self.allreduce_kwargs["sender_timeout"])
            known = set(ballot.statements.values())  # all members bring the same votes
            for member, said in zip(answer.ordered_peer_ids, answer.gathered, strict=True):
                if said not in known:
                    ballot.cast(peer_from(member), said)
        except (*UNREACHABLE, ValueError):
            ballot.silent.add(peer)
        finally:
            ballot.has_changed.set()

    async def rpc_vote(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> averaging_pb2.MessageFromLeader:
        """Hear a member's vote; answer with all votes of the round when this peer knows them.

        Only in rounds that this peer is in, and of their members. Who comes before this peer has heard of its
        group waits, with one vote at a time.
        """
        answer = averaging_pb2.MessageFromLeader(group_id=request.schema_hash)
        limit_s = self.allreduce_kwargs["sender_timeout"]
        ballot = await self._ballots.find(request.schema_hash, context.remote_id, limit_s)
        if ballot is None:
            return answer
        ballot.cast(context.remote_id, request.gather)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await ballot.is_settled.wait()
        standing = ballot.standing(self._vote_good_for_s)
        answer.ordered_peer_ids.extend(peer.to_bytes() for peer in standing)
        answer.gathered.extend(ballot.statements[peer] for peer in standing)
        return answer

    @property
    def _vote_good_for_s(self) -> float:
        """How long a vote counts: as long as its member waits, but for the time that an answer takes."""
        limit_s = float(self.allreduce_kwargs["sender_timeout"])
        return limit_s - min(VOTE_GRACE_S, limit_s / 2)
