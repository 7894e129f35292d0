"""The vote of a group on its round: a member commits the round if most members hold the same average.

1. A member votes once, after the exchange, with a digest of the average that it is about to apply. It commits
   if more than half of its group hold the same average, so two halves can't commit two averages. A member
   that did not receive enough votes undoes the round. If the others committed it, that member is then behind.
2. A member waits for the others' votes for a limited time. After that it may commit another round that begins
   at the same state: members do not count older votes, and a member that has undone the round does not pass
   votes on.
3. Votes are signed, and members pass on the votes that they received. So members that can't reach each other
   still know each other's votes, and a member that sends different votes to different members has voted for
   nothing. Members compare digests of the votes, and request the votes that they lack.
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
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.members.records import sign, verified
from trahiv_cli.net.streams import UNREACHABLE
from trahiv_cli.wire import packed, unpacked

LONGEST_REASON = 200
LONGEST_ID = 100


@dataclass(frozen=True)
class Vote:
    """The vote of one member after the exchange."""

    digest: bytes = b""  # of the average that the member holds; empty if it holds none
    reason: str = ""  # why it holds none
    notes: Mapping[str, str] = field(default_factory=dict)  # members that it left out of its share, and why
    blames: str = ""  # id of the member that it blames for a failed round; empty if none
    is_sure: bool = False  # whether that member is at fault; else it may have broken off because of another
    is_late: bool = False  # whether it sent parts, but too slowly for the limit of the exchange

    def to_bytes(self) -> bytes:
        """Encode it as MessagePack."""
        said = [self.digest, self.reason[:LONGEST_REASON], dict(self.notes)]
        return packed([*said, self.blames, self.is_sure, self.is_late])

    @classmethod
    def parse(cls, content: bytes) -> Vote:
        """Decode the result of `to_bytes`, or raise `ValueError`."""
        match unpacked(content):
            case [bytes(digest), str(reason), dict(notes), str(blames), bool(is_sure), bool(is_late)] if (
                len(digest) in (0, 32)  # of SHA-256
                and len(blames) <= LONGEST_ID
                and all(isinstance(text, str) for item in notes.items() for text in item)
            ):
                clipped = {peer: why[:LONGEST_REASON] for peer, why in notes.items()}
                return cls(digest, reason[:LONGEST_REASON], clipped, blames, is_sure, is_late)
        raise ValueError("not a vote")


TWO_VOTES = Vote(reason="it told some members this and others that")


@dataclass(frozen=True)
class Call:
    """A member's vote, with a request for the votes that the called member has received."""

    vote: bytes  # signed by the caller
    wanted: tuple[bytes, ...] = ()  # digests of the votes that it lacks; empty: request all digests

    def to_bytes(self) -> bytes:
        """Encode it as MessagePack."""
        return packed([self.vote, *self.wanted])

    @classmethod
    def parse(cls, content: bytes) -> Call:
        """Decode the result of `to_bytes`, or raise `ValueError`."""
        match unpacked(content):
            case [bytes(vote), *wanted]:
                digests = tuple(one for one in wanted if isinstance(one, bytes))
                if len(digests) == len(wanted):
                    return cls(vote, digests)
        raise ValueError("not a call with a vote")


def digest_of_statement(statement: bytes) -> bytes:
    """Return a digest of a signed vote, by which members compare the votes that they received; 8 bytes."""
    return hashlib.sha256(statement).digest()[:8]


class NotCommitted(AllreduceException):
    """A round that this peer undoes; the others may have committed the average that it voted for, if any."""

    def __init__(self, reason: str, proof: bytes = b"", samples: int = 0) -> None:
        super().__init__(reason, proof, samples)  # all arguments, so that it can be pickled
        self.reason = reason
        self.proof = proof
        self.samples = samples

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Decision:
    """The result of a vote, as one member sees it."""

    is_committed: bool
    reason: str  # why not; if committed, the members that did not average, or empty if all did
    votes: Mapping[PeerID, Vote]  # that decided it


def decide(own: PeerID, group: Collection[PeerID], votes: Mapping[PeerID, Vote], quorum: int) -> Decision:
    """Decide whether this member commits the round, from the votes that it knows, its own included.

    At least `quorum` members, and more than half of the group, must hold the same average as this one.
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
        # This member's failure may be the consequence of another member's.
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


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event for a limited time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):  # `wait_for` may swallow a cancellation
            await event.wait()


class Ballot:
    """The votes of one round. Their signatures cover the claims that its members made before it.

    `Ballots` creates one for each round. A member waits `limit_s` seconds for the others' votes, but only
    `grace_s` for the last votes of a decided round: they only show which members did not average. Other
    members can't call `clients`; these make the calls themselves.
    """

    def __init__(
        self, group: GroupInfo, limit_s: float, clients: Iterable[PeerID] = (), *, grace_s: float = 2.0
    ) -> None:
        self.members = group.peer_ids
        self._claims = dict(zip(group.peer_ids, group.gathered, strict=True))  # they contain the public keys
        claims = joint_digest(hashlib.sha256(one).digest() for one in group.gathered)
        self.about = b"trahiv: a vote in " + claims
        self._limit_s = limit_s
        self._grace_s = grace_s
        self.votes: dict[PeerID, Vote] = {}
        self._statements: dict[PeerID, bytes] = {}  # each vote as its member signed it
        self._heard_at: dict[PeerID, float] = {}
        self._is_undone = False
        self._silent = set(clients)  # members that can't be called
        self._is_settled = asyncio.Event()
        self._has_changed = asyncio.Event()

    @property
    def unheard(self) -> set[PeerID]:
        """Members whose vote this peer does not know."""
        return set(self.members) - self.votes.keys()

    def cast(self, peer: PeerID, statement: bytes) -> None:
        """Record a member's vote, from any caller. A member that casts two different votes votes for nothing.

        Raises:
            ValueError: the peer is no member, or did not sign this vote in this round.
        """
        if self._statements.get(peer) == statement:  # each member passes it on: check it once
            return
        most_bytes_a_member = 4 * LONGEST_REASON + LONGEST_ID  # of a vote's note on one member, in UTF-8
        if peer not in self.members or len(statement) > most_bytes_a_member * (len(self.members) + 3):
            raise ValueError(f"peer {peer} is not in this round, or says more than a vote")
        vote = Vote.parse(verified(statement, peer, self.about, self._claims[peer]))
        if vote != self.votes.setdefault(peer, vote):
            self.votes[peer] = TWO_VOTES
        self._statements.setdefault(peer, statement)
        self._heard_at.setdefault(peer, time.monotonic())
        self._has_changed.set()

    def standing_votes(self) -> dict[PeerID, Vote]:
        """Return the votes that count: of members that may still commit, and all votes for no average."""
        # A vote counts while its member waits, less the time that an answer takes.
        heard_after = time.monotonic() - self._limit_s + min(self._grace_s, self._limit_s / 2)
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
        """Send this peer's vote, signed with `key`, to the others, receive their votes, and decide.

        It takes at most `limit_s`, or `grace_s` if that is longer. `ask` sends a call to a member and
        returns its `answer`, or raises ValueError or `UNREACHABLE`.
        """
        statement = sign(key, self.about, vote.to_bytes(), has_key=False)
        self.cast(peer, statement)

        async def exchange(member: PeerID) -> None:
            try:
                lacking = self._lacking(await ask(member, Call(statement)))
                if lacking:
                    found = await ask(member, Call(statement, tuple(lacking)))
                    for voter, said in zip(lacking.values(), found, strict=True):
                        if said:  # else it does not count any more
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
            votes = (self.votes if is_decided else self.standing_votes()) | {peer: vote}
            decision = decide(peer, self.members, votes, quorum)
            is_decided = decision.is_committed
            if not self.unheard:
                self._is_settled.set()
            # The votes that others received reveal a member that votes for two averages.
            is_disputed = len({said.digest for said in self.votes.values() if said.digest}) > 1
            is_over = not self.unheard and not (is_disputed and not all(call.done() for call in calls))
            # A member that can't be called may still call, or a called member may know its vote.
            is_short = is_decided or not vote.digest or self.unheard <= self._silent
            left_s = (self._grace_s if is_short else self._limit_s) - (loop.time() - began)
            if is_over or left_s <= 0:
                break
            await wait_at_most(self._has_changed, left_s)
        self._is_undone = not is_decided
        self._is_settled.set()
        for call in calls:  # they end by themselves; nothing needs their answers any more
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return decision

    def _lacking(self, digests: Sequence[bytes]) -> dict[bytes, PeerID]:
        """Return the voters of the votes that another member has received and this one has not, by digest."""
        known = {b"", *map(digest_of_statement, self._statements.values())}
        heard = zip(digests, self.members, strict=True)
        return {digest: member for digest, member in heard if digest not in known}

    async def answer(self, caller: PeerID, call: Call) -> list[bytes]:
        """Record the caller's vote (see `cast`), wait, and return the votes that count.

        It waits until all votes are known or this peer has decided, but at most `limit_s`.

        Returns:
            The digest of each member's vote, in the group's order, or the wanted votes, as signed; empty
            bytes for a vote that is unknown or does not count.
        """
        self.cast(caller, call.vote)
        await wait_at_most(self._is_settled, self._limit_s)
        heard = {peer: self._statements[peer] for peer in self.standing_votes()}
        digests = {peer: digest_of_statement(statement) for peer, statement in heard.items()}
        if not call.wanted:
            return [digests.get(member, b"") for member in self.members]
        found = {digest: heard[peer] for peer, digest in digests.items()}
        return [found.get(digest, b"") for digest in call.wanted[: len(self.members)]]


class Ballots(dict[bytes, Ballot]):
    """The ballots of this peer's last `num_kept` rounds, by group id: it still answers late callers."""

    def __init__(self, num_kept: int = 8) -> None:
        super().__init__()
        self._num_kept = num_kept
        self._has_opened = asyncio.Event()
        self._early: set[PeerID] = set()

    def open(self, group: GroupInfo, limit_s: float, clients: Iterable[PeerID] = ()) -> Ballot:
        """Begin to receive the votes of a round; see `Ballot`."""
        ballot = self[group.group_id] = Ballot(group, limit_s, clients)
        while len(self) > self._num_kept:
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
    """Return the SHA-256 of tensors' values, dtypes and shapes, in order; 32 bytes. Any device."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().contiguous().cpu()
        digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def joint_digest(digests: Iterable[bytes]) -> bytes:
    """Return the SHA-256 of the digests of single tensors, in order; 32 bytes."""
    return hashlib.sha256(b"".join(digests)).digest()


def proof_of(average: Iterable[torch.Tensor], gathered: Iterable[bytes], schema: bytes) -> bytes:
    """Return a digest of an average, the members' signed claims and the schema of their group; 32 bytes."""
    context = hashlib.sha256(schema)
    for said in gathered:
        context.update(hashlib.sha256(said).digest())
    return joint_digest((context.digest(), digest_of(average)))
