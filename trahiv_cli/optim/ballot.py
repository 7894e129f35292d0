"""How a group decides whether its round happened: every member says what it holds, most must say the same.

1. A member votes once, after the exchange, with a digest of the average that it is about to apply. It commits
   if more than half of its group hold the same; so two halves can't commit two averages. A member that did
   not see enough votes undoes the round; if the others committed, it finds itself behind.
2. A member waits for the others' votes for a limited time. After that it may commit another round that begins
   where this one did: nobody counts older votes, and who has undone the round passes none on.
3. Votes are signed, and members pass on what they heard: so those that do not reach each other know each
   other's, and a member that tells some this and others that has voted for nothing. Members compare digests
   of the votes, and ask for the votes that they lack.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.swarm.corrections.streams import UNREACHABLE
from trahiv_cli.swarm.records import sign, verified
from trahiv_cli.swarm.snapshot import unpacked

LONGEST_REASON = 200
LONGEST_ID = 100
DIGEST_BYTES = 32
MOST_BYTES_A_MEMBER = 4 * LONGEST_REASON + LONGEST_ID  # of a vote's note on each, in UTF-8
BALLOTS_KEPT = 8  # this peer's rounds whose votes are still told to members that ask late
VOTE_GRACE_S = 2.0  # for the last votes once the round is decided: only their names are missing


@dataclass(frozen=True)
class Vote:
    """What one member says after the exchange."""

    digest: bytes = b""  # of the average that the member holds; empty if it holds none
    reason: str = ""  # why it holds none
    notes: Mapping[str, str] = field(default_factory=dict)  # whose parts it left out of its share, and why
    blames: str = ""  # id of a member that the round failed of, as this one sees it; empty if it was none
    is_sure: bool = False  # whether that one is to blame; if not, it may have broken off because of another
    is_late: bool = False  # whether it sent something, too slowly for the limit of the exchange

    def to_bytes(self) -> bytes:
        """Write it as MessagePack."""
        said = [self.digest, self.reason[:LONGEST_REASON], dict(self.notes)]
        return bytes(MSGPackSerializer.dumps([*said, self.blames, self.is_sure, self.is_late]))

    @classmethod
    def parse(cls, content: bytes) -> Vote:
        """Read what `to_bytes` gave, or raise `ValueError`."""
        match unpacked(content):
            case [bytes(digest), str(reason), dict(notes), str(blames), bool(is_sure), bool(is_late)] if (
                len(digest) in (0, DIGEST_BYTES)
                and len(blames) <= LONGEST_ID
                and all(isinstance(text, str) for item in notes.items() for text in item)
            ):
                clipped = {peer: why[:LONGEST_REASON] for peer, why in notes.items()}
                return cls(digest, reason[:LONGEST_REASON], clipped, blames, is_sure, is_late)
        raise ValueError("not a vote")


TWO_VOTES = Vote(reason="it told some members this and others that")


@dataclass(frozen=True)
class Call:
    """A member's vote, and its question for the votes that another member has heard."""

    vote: bytes  # as the caller signed it
    wanted: tuple[bytes, ...] = ()  # digests of votes that it lacks; none: it asks for the digests of all

    def to_bytes(self) -> bytes:
        """Write it as MessagePack."""
        return bytes(MSGPackSerializer.dumps([self.vote, *self.wanted]))

    @classmethod
    def parse(cls, content: bytes) -> Call:
        """Read what `to_bytes` gave, or raise `ValueError`."""
        match unpacked(content):
            case [bytes(vote), *wanted]:
                digests = tuple(one for one in wanted if isinstance(one, bytes))
                if len(digests) == len(wanted):
                    return cls(vote, digests)
        raise ValueError("not a call with a vote")


def digest_of_statement(statement: bytes) -> bytes:
    """Stands for a vote where members compare what they heard; 8 bytes."""
    return hashlib.sha256(statement).digest()[:8]


class NotCommitted(AllreduceException):
    """A round that this peer undoes; the others may have committed the average that it voted for, if any."""

    def __init__(self, reason: str, proof: bytes = b"", samples: int = 0) -> None:
        super().__init__(reason, proof, samples)  # all of them, so that it can be pickled
        self.reason = reason
        self.proof = proof
        self.samples = samples

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Decision:
    """What came of a vote, as one member sees it."""

    is_committed: bool
    reason: str  # why not; or, of a committed round, who did not average. Empty if all did.
    votes: Mapping[PeerID, Vote]  # that it was decided by


def decide(own: PeerID, group: Collection[PeerID], votes: Mapping[PeerID, Vote], quorum: int) -> Decision:
    """Decide whether this member commits the round, by the votes that it knows, its own included.

    So many as `quorum`, and more than half of the group, must hold what it holds.
    """
    mine = votes[own]
    needed = max(len(group) // 2 + 1, quorum)
    unlike = {
        peer: f"peer {peer} did not average: {votes[peer].reason or 'it holds other values'}"
        if peer in votes
        else f"peer {peer} did not vote"
        for peer in group
        if peer not in votes or votes[peer].digest != mine.digest or not mine.digest
    }
    if not mine.digest:
        # What this member saw first may be the consequence of what another one saw.
        others = [
            unlike[peer] for peer in group if peer != own and not (peer in votes and votes[peer].digest)
        ]
        reasons = [mine.reason, *(said for said in others if mine.reason not in said)]
        return Decision(False, "; ".join(reasons), votes)
    agree = [peer for peer in group if peer not in unlike]
    reason = "; ".join(unlike.values())
    if len(agree) < needed:
        reason = f"{len(agree)} of {len(group)} peers hold this average, {needed} must: {reason}"
    return Decision(len(agree) >= needed, reason, votes)


class Ballot:
    """The votes of one round, which are about what each member of the group said before it.

    A member waits `limit_s` for the others' votes. Nobody can call `clients`; they ask.
    """

    def __init__(self, group: GroupInfo, limit_s: float, clients: Iterable[PeerID] = ()) -> None:
        self.members = group.peer_ids
        self._claims = dict(zip(group.peer_ids, group.gathered, strict=True))  # with the public keys
        said = b"".join(hashlib.sha256(one).digest() for one in group.gathered)
        self.about = b"trahiv: a vote in " + hashlib.sha256(said).digest()
        self._limit_s = limit_s
        self.votes: dict[PeerID, Vote] = {}
        self._statements: dict[PeerID, bytes] = {}  # each vote as its member signed it
        self._heard_at: dict[PeerID, float] = {}
        self._is_undone = False
        self._silent = set(clients)  # those that can't be asked
        self._is_settled = asyncio.Event()
        self._has_changed = asyncio.Event()

    @property
    def unheard(self) -> set[PeerID]:
        """Members whose vote is not known."""
        return set(self.members) - self.votes.keys()

    def cast(self, peer: PeerID, statement: bytes) -> None:
        """Note what a member voted, whoever brings it. Who votes for this and for that votes for nothing.

        Raises:
            ValueError: that peer is no member, or has stated no such vote in this round.
        """
        if self._statements.get(peer) == statement:  # each member passes it on: it is checked once
            return
        if peer not in self.members or len(statement) > MOST_BYTES_A_MEMBER * (len(self.members) + 3):
            raise ValueError(f"peer {peer} is not in this round, or says more than a vote")
        vote = Vote.parse(verified(statement, peer, self.about, self._claims[peer]))
        if vote != self.votes.setdefault(peer, vote):
            self.votes[peer] = TWO_VOTES
        self._statements.setdefault(peer, statement)
        self._heard_at.setdefault(peer, time.monotonic())
        self._has_changed.set()

    def standing(self) -> dict[PeerID, Vote]:
        """Return the votes that count: those of members that may yet commit, and those for no average."""
        # A vote counts as long as its member waits, but for the time that an answer takes.
        heard_after = time.monotonic() - self._limit_s + min(VOTE_GRACE_S, self._limit_s / 2)
        return {
            peer: vote
            for peer, vote in self.votes.items()
            if not vote.digest or (self._heard_at[peer] >= heard_after and not self._is_undone)
        }

    async def hold(
        self,
        peer: PeerID,
        key: RSAPrivateKey,
        vote: Vote,
        quorum: int,
        ask: Callable[[PeerID, Call], Awaitable[Sequence[bytes]]],
    ) -> Decision:
        """Tell the others the vote of this peer, who signs by `key`; hear theirs, decide; within `limit_s`.

        `ask` takes a call to a member and returns its `answer`, or raises ValueError or `UNREACHABLE`.
        """
        statement = sign(key, self.about, vote.to_bytes(), has_key=False)
        self.cast(peer, statement)

        async def exchange(member: PeerID) -> None:
            try:
                lacking = self._lacking(await ask(member, Call(statement)))
                if lacking:
                    found = await ask(member, Call(statement, tuple(lacking)))
                    for voter, said in zip(lacking.values(), found, strict=True):
                        if said:  # it may count no more
                            self.cast(voter, said)
            except (*UNREACHABLE, ValueError):
                self._silent.add(member)
            finally:
                self._has_changed.set()

        asked = [member for member in self.members if member != peer and member not in self._silent]
        calls = [asyncio.create_task(exchange(member)) for member in asked]
        loop = asyncio.get_running_loop()
        is_decided = False
        began = loop.time()
        while True:
            self._has_changed.clear()
            votes = (self.votes if is_decided else self.standing()) | {peer: vote}
            decision = decide(peer, self.members, votes, quorum)
            is_decided = decision.is_committed
            if not self.unheard:
                self._is_settled.set()
            # Who votes for two averages is found out by what the others heard of it.
            is_disputed = len({said.digest for said in self.votes.values() if said.digest}) > 1
            is_over = not self.unheard and not (is_disputed and not all(call.done() for call in calls))
            # Those that can't be asked may still ask, or be known to one that was asked.
            is_short = is_decided or not vote.digest or self.unheard <= self._silent
            left_s = (VOTE_GRACE_S if is_short else self._limit_s) - (loop.time() - began)
            if is_over or left_s <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._has_changed.wait()
        self._is_undone = not is_decided
        self._is_settled.set()
        for call in calls:  # they end by themselves; their answers are not needed any more
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return decision

    def _lacking(self, digests: Sequence[bytes]) -> dict[bytes, PeerID]:
        """Return the voters of all votes that another member has heard and this one has not, by digest."""
        known = {b"", *map(digest_of_statement, self._statements.values())}
        heard = zip(digests, self.members, strict=True)
        return {digest: member for digest, member in heard if digest not in known}

    async def answer(self, caller: PeerID, call: Call) -> list[bytes]:
        """Hear a member's vote (see `cast`), wait until all votes are known, and answer with the valid ones.

        Returns:
            The digest of each member's vote, in the group's order, or the wanted votes, as signed; empty
            bytes for a vote that is unknown or does not count.
        """
        self.cast(caller, call.vote)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limit_s):
                await self._is_settled.wait()
        heard = {peer: self._statements[peer] for peer in self.standing()}
        digests = {peer: digest_of_statement(statement) for peer, statement in heard.items()}
        if not call.wanted:
            return [digests.get(member, b"") for member in self.members]
        found = {digest: heard[peer] for peer, digest in digests.items()}
        return [found.get(digest, b"") for digest in call.wanted[: len(self.members)]]


class Ballots(dict[bytes, Ballot]):
    """The ballots of the last rounds that a peer was in, by the ids of their groups."""

    def __init__(self) -> None:
        super().__init__()
        self._has_opened = asyncio.Event()
        self._early: set[PeerID] = set()

    def open(self, group: GroupInfo, limit_s: float, clients: Iterable[PeerID] = ()) -> Ballot:
        """Begin to hear the votes of a round; see `Ballot`."""
        ballot = self[group.group_id] = Ballot(group, limit_s, clients)
        while len(self) > BALLOTS_KEPT:
            del self[next(iter(self))]
        self._has_opened.set()
        self._has_opened = asyncio.Event()
        return ballot

    async def find(self, group_id: bytes, caller: PeerID, limit_s: float) -> Ballot | None:
        """Wait for the ballot of a round; None after `limit_s`, or if the caller waits for one already."""
        if group_id not in self and caller not in self._early:
            self._early.add(caller)
            try:
                async with asyncio.timeout(limit_s):
                    while group_id not in self:
                        await self._has_opened.wait()
            except TimeoutError:
                pass
            finally:
                self._early.discard(caller)
        return self.get(group_id)


def digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """SHA-256 of what tensors hold, in their order, with dtypes and shapes; 32 bytes. Any device."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().contiguous().cpu()
        digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def joint_digest(digests: Iterable[bytes]) -> bytes:
    """SHA-256 of the digests of single tensors, in their order; 32 bytes."""
    return hashlib.sha256(b"".join(digests)).digest()


def proof_of(average: Iterable[torch.Tensor], gathered: Iterable[bytes], schema: bytes) -> bytes:
    """Return a digest of an average, of what each member of the group said, and of what all agree on."""
    context = hashlib.sha256(schema)
    for said in gathered:
        context.update(hashlib.sha256(said).digest())
    return joint_digest((context.digest(), digest_of(average)))
