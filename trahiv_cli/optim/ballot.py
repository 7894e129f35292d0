"""How a group decides whether its round happened: every member says what it holds, most must say the same.

A member votes once, after the exchange, with a digest of the average that it is about to apply. It commits
if more than half of its group hold what it holds; so two halves of a group can't commit two different
averages. A member that did not see enough votes undoes the round, and if the others committed it finds
itself behind and takes over their state.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import PeerID

LONGEST_REASON = 200


@dataclass(frozen=True)
class Vote:
    """What one member says after the exchange."""

    digest: bytes = b""
    """Of the average that it holds; empty if it holds none."""

    reason: str = ""
    """Why it holds none."""

    notes: Mapping[str, str] = field(default_factory=dict)
    """Peers whose parts it left out of the share that it averaged, and why."""

    blames: str = ""
    """Id of a member that the round failed of, as this one sees it; empty if it was none."""

    is_sure: bool = False
    """Whether that one can't be reached, or sent what nobody can use; if not, it may just have broken off
    because of another one."""

    def to_wire(self) -> list[Any]:
        """As a list that MessagePack carries."""
        return [self.digest, self.reason[:LONGEST_REASON], dict(self.notes), self.blames, self.is_sure]

    @classmethod
    def from_wire(cls, data: object) -> Vote:
        """Read what `to_wire` gave.

        Raises:
            ValueError: it is not that.
        """
        match data:
            case [bytes(digest), str(reason), dict(notes), str(blames), bool(is_sure)] if all(
                isinstance(text, str) for item in notes.items() for text in item
            ):
                clipped = {peer: why[:LONGEST_REASON] for peer, why in notes.items()}
                return cls(digest, reason[:LONGEST_REASON], clipped, blames, is_sure)
        raise ValueError("not a vote")


class Ballot:
    """The votes of one round, as they come in."""

    def __init__(self) -> None:
        self.votes: dict[PeerID, Vote] = {}
        self.silent: set[PeerID] = set()
        """Members that can't be asked."""

        self.is_settled = asyncio.Event()
        self.has_changed = asyncio.Event()

    def cast(self, peer: PeerID, vote: Vote, *, is_direct: bool = True) -> None:
        """Note one member's vote; what others say of it counts only until it is heard itself."""
        if is_direct or peer not in self.votes:
            self.votes[peer] = vote
        self.has_changed.set()


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
