"""Rounds that a peer can go through after the others: what a joiner missed while it downloaded.

On a home link a state takes longer to download than a step takes to train. What has come is then old, and
the next one would be, too. So a peer that gives its state keeps the averages of the rounds that it commits,
encoded as they travelled, for as long as somebody fetches something. Whoever holds the state before such a
round takes the same step with its average as its members did, and holds the same bits. A peer that missed
just one round need not download a state at all: the last record is always kept.

A record proves itself: its members have signed what they said, and from that and the average follows the
proof that is in their history.

Not covered: two peers that forge a round between them; a state's donor could lie as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.compression import deserialize_torch_tensor
from hivemind.proto import runtime_pb2

from trahiv_cli.swarm.snapshot import unpacked

MOST_BYTES = 2**48
"""Of an average, in a header that can be read; what is downloaded is bounded by the tensors."""

STATES_KEPT = 3
"""Records of together so many times the bytes of the averaged tensors are kept: as much as a joiner downloads
where Adam trains them. An exchange fits between two steps, so more can't come while it does."""


@dataclass(frozen=True)
class Record:
    """One committed round."""

    after: bytes
    """Digest of the history that it continued."""

    members: tuple[bytes, ...]
    """Ids of the group, in its order."""

    gathered: tuple[bytes, ...]
    """What each of them said before it, as it travelled."""

    proof: bytes
    """Of the average: see `Outcome`."""

    parts: tuple[runtime_pb2.Tensor, ...]
    """The average, encoded: consecutive pieces of the tensors, one tensor after the other."""

    @property
    def num_bytes(self) -> int:
        """Of the encoded average."""
        return sum(len(part.buffer) for part in self.parts)

    def header(self) -> list[Any]:
        """All but the parts, as a list that MessagePack carries."""
        return [list(self.members), list(self.gathered), self.proof, len(self.parts), self.num_bytes]


@dataclass(frozen=True)
class Header:
    """What a record says before its parts come."""

    members: tuple[bytes, ...]
    gathered: tuple[bytes, ...]
    proof: bytes
    num_parts: int
    num_bytes: int

    @classmethod
    def from_wire(cls, content: bytes) -> Header:
        """Read what `Record.header` gave, as MessagePack.

        Raises:
            ValueError: it is not that.
        """
        match unpacked(content):
            case [list(members), list(gathered), bytes(proof), int(num_parts), int(num_bytes)] if (
                all(isinstance(one, bytes) for one in (*members, *gathered))
                and len(set(members)) == len(members) == len(gathered) > 0
                and 0 <= num_parts <= MOST_BYTES
                and 0 <= num_bytes <= MOST_BYTES
            ):
                return cls(tuple(members), tuple(gathered), proof, num_parts, num_bytes)
        raise ValueError("not the record of a round")


class Log:
    """The records of the last rounds, in their order.

    Args:
        limit_bytes: of encoded averages; the last record is kept whatever its size.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._records: list[Record] = []

    def add(self, record: Record, *, is_wanted: bool) -> None:
        """Keep a record, and those before it if somebody may still want them and there is room."""
        kept = [*self._records, record] if is_wanted else [record]
        while len(kept) > 1 and sum(one.num_bytes for one in kept) > self._limit_bytes:
            kept.pop(0)
        self._records = kept

    def find(self, after: bytes) -> Record | None:
        """The round that continued the history of this digest."""
        return next((one for one in self._records if one.after == after), None)


def decode(parts: Sequence[runtime_pb2.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Put the parts of an average together.

    Args:
        parts: see `Record`.
        like: tensors of the shapes and dtypes that it must have.

    Returns:
        Tensors in memory of their own, on the CPU.

    Raises:
        ValueError: they are not an average of such tensors, or not finite.
    """
    averages = [torch.empty_like(tensor) for tensor in like]
    place = filled = 0
    for part in parts:
        try:
            values = deserialize_torch_tensor(part).detach().view(-1)  # see `rounds._checked`
        except (RuntimeError, AssertionError, LookupError, TypeError) as error:
            raise ValueError(f"a part that can't be read: {error!r}") from error
        while place < len(averages) and filled == averages[place].numel():
            place, filled = place + 1, 0
        if place == len(averages) or filled + values.numel() > averages[place].numel():
            raise ValueError("a part that belongs to no tensor")
        if not bool(values.isfinite().all()):
            raise ValueError("an average that is not finite")
        averages[place].view(-1)[filled : filled + values.numel()] = values
        filled += values.numel()
    rest = sum(tensor.numel() for tensor in averages[place:]) - filled
    if rest:
        raise ValueError(f"{rest} values are missing")
    return averages
