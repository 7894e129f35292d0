"""Records of rounds, which peers that missed a round fetch and replay.

1. After a round a peer keeps the average, encoded as it travelled, while another peer fetches its state
   (`Log`): on a home link a state takes longer to download than a step takes to train. A peer that holds the
   state before such a round takes its step with the same bits as the members did. The last record is always
   kept: a peer that missed one round needs no download.
2. Such a record proves itself: the members have signed their claims, and the claims and the average together
   yield the proof in their history. Not covered: two peers that forge a round between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from hivemind.proto import runtime_pb2

from trahiv_cli.rounds.codecs import read_tensor
from trahiv_cli.wire import packed, unpacked


@dataclass(frozen=True)
class Header:
    """The description of a round, sent before the parts of its average."""

    members: tuple[bytes, ...]  # ids of the group, in its order
    gathered: tuple[bytes, ...]  # the signed claim of each member, as it travelled
    proof: bytes  # see `Outcome`
    num_parts: int
    num_bytes: int  # of the encoded average

    def to_wire(self) -> bytes:
        """Encode it as MessagePack."""
        lists = [list(self.members), list(self.gathered)]
        return packed([*lists, self.proof, self.num_parts, self.num_bytes])

    @classmethod
    def from_wire(cls, content: bytes) -> Header:
        """Decode the result of `to_wire`, or raise `ValueError`. The tensors bound a download further."""
        match unpacked(content):
            case [list(members), list(gathered), bytes(proof), int(num_parts), int(num_bytes)] if (
                all(isinstance(one, bytes) for one in (*members, *gathered))
                and len(set(members)) == len(members) == len(gathered) > 0
                and all(0 <= number <= 2**48 for number in (num_parts, num_bytes))
            ):
                return cls(tuple(members), tuple(gathered), proof, num_parts, num_bytes)
        raise ValueError("not the record of a round")


Parts = Sequence[runtime_pb2.Tensor]  # an encoded average: pieces of one tensor after the other


class Log:
    """The records of the last rounds, up to `limit_bytes`; the last one is kept whatever its size."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._records: dict[bytes, tuple[Header, Parts]] = {}

    def add(self, after: bytes, header: Header, parts: Parts, *, is_wanted: bool) -> None:
        """Keep a round, and earlier ones if a peer may still want them (`is_wanted`) and there is room."""
        kept = {one: record for one, record in self._records.items() if is_wanted and one != after}
        kept[after] = header, parts
        while len(kept) > 1 and sum(one.num_bytes for one, _ in kept.values()) > self._limit_bytes:
            del kept[next(iter(kept))]
        self._records = kept

    def find(self, after: bytes) -> tuple[Header, Parts] | None:
        """Return the round that continued the history of this digest; None if it is not kept."""
        return self._records.get(after)


def decoded(parts: Parts, like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Decode an average, one tensor at a time, to new float32 tensors on the CPU with the shapes of `like`.

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
            del values  # free it before the next part is decoded
        yield whole.view(tensor.shape)
    if any(map(len, waiting)):
        raise ValueError("a part that belongs to no tensor")


def copy_average(parts: Parts, tensors: Sequence[torch.Tensor]) -> None:
    """Decode an average into tensors; see `decoded`."""
    for tensor, value in zip(tensors, decoded(parts, tensors), strict=True):
        tensor.copy_(value)


def _values_of(part: runtime_pb2.Tensor) -> torch.Tensor:
    values = read_tensor(part).view(-1).float()
    if not bool(values.isfinite().all()):
        raise ValueError("an average that is not finite")
    return values
