"""Rounds that a peer can go through after the others: what a joiner missed while it downloaded.

On a home link a state takes longer to download than a step takes to train, and is old when it has come. So a
peer that gives its state keeps the averages of the rounds that it commits, encoded as they travelled, for as
long as somebody fetches something. Whoever holds the state before such a round takes its step with the same
bits as its members did. The last record is always kept: who missed one round needs no download.

A record proves itself: its members have signed what they said, and from that and the average follows the
proof that is in their history. Not covered: two peers that forge a round between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer

from trahiv_cli.swarm.codecs import read_tensor
from trahiv_cli.swarm.snapshot import unpacked

MOST_BYTES = 2**48  # of an average, in a header that can be read; a download is bounded by the tensors

# Records of so many times the bytes of the averaged tensors are kept: as much as a joiner downloads where
# Adam trains them. An exchange fits between two steps, so more can't come while it does.
STATES_KEPT = 3


@dataclass(frozen=True)
class Header:
    """What is said of a round before the parts of its average come."""

    members: tuple[bytes, ...]  # ids of the group, in its order
    gathered: tuple[bytes, ...]  # what each of them said before it, as it travelled
    proof: bytes  # see `Outcome`
    num_parts: int
    num_bytes: int  # of the encoded average

    def to_wire(self) -> bytes:
        """Write it as MessagePack."""
        said = [list(self.members), list(self.gathered), self.proof, self.num_parts, self.num_bytes]
        return bytes(MSGPackSerializer.dumps(said))

    @classmethod
    def from_wire(cls, content: bytes) -> Header:
        """Read what `to_wire` gave, or raise `ValueError`."""
        match unpacked(content):
            case [list(members), list(gathered), bytes(proof), int(num_parts), int(num_bytes)] if (
                all(isinstance(one, bytes) for one in (*members, *gathered))
                and len(set(members)) == len(members) == len(gathered) > 0
                and 0 <= num_parts <= MOST_BYTES
                and 0 <= num_bytes <= MOST_BYTES
            ):
                return cls(tuple(members), tuple(gathered), proof, num_parts, num_bytes)
        raise ValueError("not the record of a round")


@dataclass(frozen=True)
class Record:
    """One committed round."""

    after: bytes  # digest of the history that it continued
    header: Header
    parts: tuple[runtime_pb2.Tensor, ...]  # the encoded average: pieces of one tensor after the other


class Log:
    """The records of the last rounds, of so many bytes; the last one is kept whatever its size."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._records: list[Record] = []

    def add(self, record: Record, *, is_wanted: bool) -> None:
        """Keep a record, and those before it if somebody may still want them and there is room."""
        kept = [*self._records, record] if is_wanted else [record]
        while len(kept) > 1 and sum(one.header.num_bytes for one in kept) > self._limit_bytes:
            kept.pop(0)
        self._records = kept

    def find(self, after: bytes) -> Record | None:
        """The round that continued the history of this digest."""
        return next((one for one in self._records if one.after == after), None)


def decoded(parts: Sequence[runtime_pb2.Tensor], like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Decode an average, one tensor at a time: new float32 tensors on the CPU, of these shapes.

    Raises:
        ValueError: the parts are not an average of such tensors, or not finite.
    """
    waiting = map(_values_of, parts)
    for tensor in like:
        whole = missing = torch.empty(tensor.numel())
        while len(missing):
            if (values := next(waiting, None)) is None:
                raise ValueError(f"{len(missing)} values of a tensor are missing")
            if len(values) > len(missing):
                raise ValueError("a part of more than one tensor")
            missing[: len(values)] = values
            missing = missing[len(values) :]
            del values  # before the next one is decoded
        yield whole.view(tensor.shape)
    if any(map(len, waiting)):
        raise ValueError("a part that belongs to no tensor")


def _values_of(part: runtime_pb2.Tensor) -> torch.Tensor:
    values = read_tensor(part).view(-1).float()
    if not bool(values.isfinite().all()):
        raise ValueError("an average that is not finite")
    return values
