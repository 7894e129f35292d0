"""How a group decides whether its round happened: every member says what it holds, most must say the same.

A member votes once, after the exchange, with a digest of the average that it is about to apply. It commits
if more than half of its group hold what it holds; so two halves of a group can't commit two different
averages. A member that did not see enough votes undoes the round, and if the others committed it finds
itself behind and takes over their state.

A vote does not bind for ever. A member waits for the others for a limited time; then it undoes the round, and
may commit another one that begins where this one did. So nobody counts a vote that was heard longer ago than
that, and a member that has undone the round passes no votes for its average on.

Votes are signed, and members pass on to one another what they heard: so those that do not reach each other
know each other's, and a member that tells some this and others that has voted for nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.swarm.snapshot import unpacked
from trahiv_cli.swarm.statements import sign, verified

LONGEST_REASON, LONGEST_ID, DIGEST_BYTES = 200, 100, 32
MOST_BYTES_A_MEMBER = 4 * LONGEST_REASON + LONGEST_ID
"""A vote may have a note on each member, of so many bytes in UTF-8."""

BALLOTS_KEPT = 8
"""This peer's rounds whose votes are still told to members that ask late."""


@dataclass(frozen=True)
class Vote:
    """What one member says after the exchange."""

    digest: bytes = b""
    """Digest of the average that the member holds; empty if it holds none."""

    reason: str = ""
    """Why it holds none."""

    notes: Mapping[str, str] = field(default_factory=dict)
    """Peers whose parts it left out of the share that it averaged, and why."""

    blames: str = ""
    """Id of a member that the round failed of, as this one sees it; empty if it was none."""

    is_sure: bool = False
    """Whether that one can't be reached, or sent what nobody can use; if not, it may just have broken off
    because of another one."""

    def to_bytes(self) -> bytes:
        """Write it as MessagePack."""
        said = [self.digest, self.reason[:LONGEST_REASON], dict(self.notes), self.blames, self.is_sure]
        packed: bytes = MSGPackSerializer.dumps(said)
        return packed

    @classmethod
    def parse(cls, content: bytes) -> Vote:
        """Read what `to_bytes` gave.

        Raises:
            ValueError: it is not that.
        """
        match unpacked(content):
            case [bytes(digest), str(reason), dict(notes), str(blames), bool(is_sure)] if (
                len(digest) in (0, DIGEST_BYTES)
                and len(blames) <= LONGEST_ID
                and all(isinstance(text, str) for item in notes.items() for text in item)
            ):
                clipped = {peer: why[:LONGEST_REASON] for peer, why in notes.items()}
                return cls(digest, reason[:LONGEST_REASON], clipped, blames, is_sure)
        raise ValueError("not a vote")


TWO_VOTES = Vote(reason="it told some members this and others that")


class Ballot:
    """The votes of one round, as they come in.

    Args:
        group: the members and what each said before the round. A vote in this round is about all of that.
        clients: those of the members that nobody can call.
    """

    def __init__(self, group: GroupInfo, clients: Iterable[PeerID] = ()) -> None:
        self.members = frozenset(group.peer_ids)
        said = b"".join(hashlib.sha256(one).digest() for one in group.gathered)
        self._about = b"trahiv: a vote in " + hashlib.sha256(said).digest()
        self.votes: dict[PeerID, Vote] = {}
        self.statements: dict[PeerID, bytes] = {}
        """Each vote as its member signed it."""

        self._heard_at: dict[PeerID, float] = {}
        self.is_undone = False
        """Whether this peer has undone the round."""

        self.silent = set(clients)
        """Members that can't be asked."""

        self.is_settled = asyncio.Event()
        self.has_changed = asyncio.Event()

    def cast_own(self, key: RSAPrivateKey, peer: PeerID, vote: Vote) -> bytes:
        """Vote; return that as a statement for the others."""
        statement = sign(key, self._about, vote.to_bytes())
        self.cast(peer, statement)
        return statement

    def cast(self, peer: PeerID, statement: bytes) -> None:
        """Note what a member voted, whoever brings it. Who votes for this and for that votes for nothing.

        Raises:
            ValueError: that peer is no member, or has stated no such vote in this round.
        """
        if self.statements.get(peer) == statement:  # each member passes it on: it is checked once
            return
        if peer not in self.members or len(statement) > MOST_BYTES_A_MEMBER * (len(self.members) + 3):
            raise ValueError(f"peer {peer} is not in this round, or says more than a vote")
        vote = Vote.parse(verified(statement, peer, self._about))
        if vote != self.votes.setdefault(peer, vote):
            self.votes[peer] = TWO_VOTES
        self.statements.setdefault(peer, statement)
        self._heard_at.setdefault(peer, time.monotonic())
        self.has_changed.set()

    def standing(self, good_for_s: float) -> dict[PeerID, Vote]:
        """Return the votes that still count: those of members that may yet commit, and those for no average.

        Args:
            good_for_s: from when a vote is heard first.
        """
        heard_after = time.monotonic() - good_for_s
        return {
            peer: vote
            for peer, vote in self.votes.items()
            if not vote.digest or (self._heard_at[peer] >= heard_after and not self.is_undone)
        }

    @property
    def is_disputed(self) -> bool:
        """Whether members say that they hold different averages, which no honest two ever do."""
        return len({vote.digest for vote in self.votes.values() if vote.digest}) > 1


class NotCommitted(AllreduceException):
    """A round that this peer undoes; the others may have committed it.

    Args:
        reason: why.
        proof: digest of the average that this peer voted for; empty if it held none.
        samples: that are behind it.
    """

    def __init__(self, reason: str, proof: bytes = b"", samples: int = 0) -> None:
        super().__init__(reason, proof, samples)  # all of them, so that it can be pickled
        self.reason, self.proof, self.samples = reason, proof, samples

    def __str__(self) -> str:
        """Return the reason."""
        return self.reason


@dataclass(frozen=True)
class Decision:
    """What came of a vote, as one member sees it."""

    is_committed: bool
    reason: str
    """Why not; or, of a committed round, who did not average. Empty if all did."""

    dissenters: tuple[str, ...] = ()
    """Members that did not say what this one says."""


def decide(own: str, group: Collection[str], votes: Mapping[str, Vote], quorum: int) -> Decision:
    """Decide whether this member commits the round.

    Args:
        own: this member's id.
        group: all members' ids.
        votes: those that this member knows, its own included.
        quorum: how many must hold what this member holds, if that is more than half of the group.
    """
    mine = votes[own]
    if not mine.digest:
        # What this member saw first may be the consequence of what another one saw.
        without = [peer for peer in group if peer != own and not (peer in votes and votes[peer].digest)]
        others = [_dissent(peer, votes.get(peer)) for peer in without]
        reasons = [mine.reason, *(said for said in others if mine.reason not in said)]
        return Decision(False, "; ".join(reasons), ())
    needed = max(len(group) // 2 + 1, quorum)
    agree = [peer for peer in group if peer in votes and votes[peer].digest == mine.digest]
    dissenters = tuple(peer for peer in group if peer not in agree)
    told = "; ".join(_dissent(peer, votes.get(peer)) for peer in dissenters)
    if len(agree) >= needed:
        return Decision(True, told, dissenters)
    return Decision(
        False, f"{len(agree)} of {len(group)} peers hold this average, {needed} must: {told}", dissenters
    )


def _dissent(peer: str, vote: Vote | None) -> str:
    if vote is None:
        return f"peer {peer} did not vote"
    return f"peer {peer} did not average: " + (vote.reason or "it holds other values")


def joint_digest(digests: Iterable[bytes]) -> bytes:
    """SHA-256 of the digests of single tensors, in their order; 32 bytes."""
    return hashlib.sha256(b"".join(digests)).digest()


def digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """SHA-256 of what tensors hold, in their order, with dtypes and shapes; 32 bytes. Any device."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().contiguous().cpu()
        digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


class Ballots:
    """The ballots of the last rounds that a peer was in."""

    def __init__(self) -> None:
        self._opened: dict[bytes, Ballot] = {}
        self._has_opened = asyncio.Event()
        self._early: set[PeerID] = set()

    def __getitem__(self, group_id: bytes) -> Ballot:
        return self._opened[group_id]

    def __len__(self) -> int:
        return len(self._opened)

    def open(self, group: GroupInfo, clients: Iterable[PeerID] = ()) -> Ballot:
        """Begin to hear the votes of a round; nobody can call those of `clients`."""
        ballot = self._opened[group.group_id] = Ballot(group, clients)
        while len(self._opened) > BALLOTS_KEPT:
            del self._opened[next(iter(self._opened))]
        self._has_opened.set()
        self._has_opened = asyncio.Event()
        return ballot

    async def find(self, group_id: bytes, caller: PeerID, limit_s: float) -> Ballot | None:
        """Wait for the ballot of a round; None after `limit_s`, or if the caller waits for one already."""
        if group_id in self._opened or caller in self._early:
            return self._opened.get(group_id)
        self._early.add(caller)
        try:
            async with asyncio.timeout(limit_s):
                while group_id not in self._opened:
                    await self._has_opened.wait()
        except TimeoutError:
            pass
        finally:
            self._early.discard(caller)
        return self._opened.get(group_id)
