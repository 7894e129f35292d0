"""What a round is about, what its members claim before it, what came of it, and what is kept of it.

1. Before a round each peer claims how much it brings, and of which norm; the claims reach every member in the
   same message, so all come to the same verdict on them (`judge`).
2. After it a peer keeps the average, encoded as it travelled, as long as somebody fetches its state (`Log`):
   on a home link a state takes longer to download than a step takes to train. Whoever holds the state before
   such a round takes its step with the same bits as its members did. The last one is always kept: who missed
   one round needs no download.
3. Such a record proves itself: its members have signed what they said, and from that and the average follows
   the proof that is in their history. Not covered: two peers that forge a round between them.

Peers are named by their ids, base58.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer

from trahiv_cli.optim.auto import Measured
from trahiv_cli.optim.ledger import Spans
from trahiv_cli.swarm.codecs import read_tensor
from trahiv_cli.swarm.snapshot import unpacked

# Of a claim that can be read; how many samples count is for `Claim.counted` to say. A weight is of trained
# tokens: far above any step, far below float32's limit.
MOST_SAMPLES = 2**40
MOST_QUORUM = 2**16
MOST_DIGEST_BYTES = 32
GREATEST_WEIGHT = 1e12

USELESS_AT_MOST = 1024  # positions claimed beyond the samples: those whose gradients were not finite

MOST_BYTES = 2**48  # of an average, in a header that can be read; a download is bounded by the tensors

# Records of so many times the bytes of the averaged tensors are kept: as much as a joiner downloads where
# Adam trains them. An exchange fits between two steps, so more can't come while it does.
STATES_KEPT = 3


@dataclass(frozen=True)
class Claim:
    """What a peer says of its contribution before the round."""

    samples: int = 0
    weight: float = 1.0
    norm: float = 0.0  # euclidean norm of its tensors together
    state: bytes = b""  # digest of the weights that it holds
    quorum: int = 2  # the smallest group that it would commit with
    is_client: bool = False  # whether others can't call it, so that it averages no share
    measured: Measured = Measured()  # what it knows of its own pace and link
    trained: Spans = Spans()  # positions of the data that it brings, and those whose gradients were of no use
    moves_buffers: bool = False  # whether its buffers differ from those that its history agrees on

    def counted(self, most_samples: int) -> Claim:
        """Return what counts of it, if a peer can hold so many samples: these, their positions and weight."""
        if self.samples <= most_samples:
            return self
        weight = self.weight * most_samples / self.samples
        trained = self.trained.lowest(most_samples + USELESS_AT_MOST)
        return replace(self, samples=most_samples, weight=weight, trained=trained)

    def to_bytes(self) -> bytes:
        """Write it as MessagePack."""
        numbers = [self.samples, float(self.weight), float(self.norm), self.state, self.quorum]
        lists = [self.measured.to_wire(), self.trained.to_wire()]
        moves = [True] if self.moves_buffers else []  # most models have no such buffers
        return bytes(MSGPackSerializer.dumps([*numbers, self.is_client, *lists, *moves]))

    @classmethod
    def parse(cls, content: bytes) -> Claim:
        """Read what `to_bytes` gave; raise `ValueError` if it is not that, or more than anybody can claim."""
        match unpacked(content):
            case [
                int(samples), float(weight), float(norm), bytes(state), int(quorum), bool(is_client),
                measured, trained, *moves,
            ] if (
                0 <= samples <= MOST_SAMPLES
                and 0.0 <= weight <= GREATEST_WEIGHT
                and not norm < 0.0  # one that is not finite is read, and left out
                and len(state) <= MOST_DIGEST_BYTES
                and 1 <= quorum <= MOST_QUORUM
                and moves in ([], [True])
            ):  # fmt: skip
                known = Measured.from_wire(measured)
                spans = Spans.from_wire(trained)
                if len(spans) <= samples + USELESS_AT_MOST:
                    return cls(samples, weight, norm, state, quorum, is_client, known, spans, bool(moves))
        raise ValueError("not a claim")


@dataclass(frozen=True)
class Exchange:
    """What a round exchanges; the same for all its members."""

    places: range  # indices of the averager's tensors that are exchanged
    codec: str | None = None  # a name of `CODECS`; None: the averager's own codec
    is_of_steps: bool = False  # what local steps changed, not a gradient: their codecs' losses don't mix
    after: bytes = b""  # digest of the history that it continues
    most_samples: int = MOST_SAMPLES  # of a member's claim no more samples count


@dataclass(frozen=True)
class Outcome:
    """What the averager says of a round that was committed."""

    samples: dict[str, int]  # behind each contribution, without outliers; alike for all members
    group: tuple[str, ...]
    left_out: dict[str, str]  # members of whom not all was used, and why, as far as this member knows
    states: dict[str, bytes]  # digest of the weights that each member held before the round
    proof: bytes = b""  # digest of the average; the same for all that committed
    reason: str = ""  # members that did not commit; empty if all did
    exchange_s: float = 0.0  # of this member, without finding the group and without the vote
    longest_wait_s: float = 0.0  # of that, for a single member
    parts_sent: int = 0  # bytes of encoded parts in that exchange
    parts_received: int = 0
    measured: dict[str, Measured] = field(default_factory=dict)  # claimed by each of its pace and link
    trained: tuple[Spans, ...] = ()  # claimed positions of the data, without outliers; alike for all members
    moves_buffers: bool = False  # whether a member claimed so: buffers were averaged, too
    is_empty: bool = False  # no sample had a trained token: the step changes nothing; alike for all members


@dataclass(frozen=True)
class Round:
    """What came of one attempt to average with the others."""

    samples: dict[str, int]  # behind each gradient that was used, this peer's included
    seconds: float  # from the first request to the result
    bytes_sent: int  # of encoded tensor parts, in the exchange that was committed, without what frames them
    bytes_received: int
    committed: bool  # whether the step was taken with this round's average
    reason: str = ""  # why it was not; of a committed one, who did not average, and why earlier tries failed
    left_out: dict[str, str] = field(default_factory=dict)  # members whose gradient was not used, and why
    blocked_seconds: float = 0.0  # how long training stood still for it

    @property
    def group(self) -> tuple[str, ...]:
        """All members; empty if no group averaged."""
        return tuple(dict.fromkeys((*self.samples, *self.left_out)))


def outliers(claims: Mapping[str, Claim], norm_limit: float) -> dict[str, str]:
    """Find the members whose contribution is to be left out, with the reason.

    A norm may be `norm_limit` times the median; 0 accepts every finite norm. The median is the lower one of
    two: a group of two is judged by the smaller norm. Contributions of norm 0 have no say in it. The norm of
    a mean over fewer tokens may be larger, as its noise is, but never by more than makes up for its weight.
    """
    judges = [claim for claim in claims.values() if 0 < claim.norm < math.inf]
    found = {}
    median = 0.0
    usual = 0.0
    if judges:
        median = statistics.median_low(claim.norm for claim in judges)
        usual = statistics.median_low(claim.weight for claim in judges)
    most = norm_limit * median or math.inf
    for peer, claim in claims.items():
        noise = math.sqrt(max(1.0, usual / claim.weight)) if claim.weight else 1.0
        if not math.isfinite(claim.norm):
            found[peer] = "its gradient is not finite"
        elif claim.norm > most * noise:
            found[peer] = f"the norm of its gradient is {claim.norm:.3g}, the group's median {median:.3g}"
    return found


def judge(
    peers: Iterable[PeerID], said: Iterable[Claim], most_samples: int, norm_limit: float
) -> tuple[dict[str, Claim], Outcome]:
    """Return what counts of peers' claims, in their order, and what follows from these alone for a round."""
    counted = (claim.counted(most_samples) for claim in said)
    claims = dict(zip((peer.to_base58() for peer in peers), counted, strict=True))
    left_out = outliers(claims, norm_limit)
    used = {peer: claim for peer, claim in claims.items() if peer not in left_out}
    return claims, Outcome(
        samples={peer: claim.samples for peer, claim in used.items()},
        group=tuple(claims),
        left_out=left_out,
        states={peer: claim.state for peer, claim in claims.items()},
        measured={peer: claim.measured for peer, claim in claims.items()},
        trained=tuple(claim.trained for claim in used.values()),
        moves_buffers=any(claim.moves_buffers for claim in claims.values()),
        is_empty=not any(claim.weight for claim in used.values()),
    )


def state_to_adopt(states: Mapping[str, bytes], lot: bytes) -> bytes:
    """Return the digest of the state that all members of a group adopt: the one that most of them hold.

    Between equals `lot` decides, the same for all; none knew it before the claims, to make a state that wins.
    """
    counts = Counter(states.values())
    return max(counts, key=lambda state: (counts[state], hashlib.sha256(lot + state).digest()))


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all values are finite.

    By numpy where it can: torch would start OpenMP threads for a thread beside the one that trains, too.
    """
    return all(
        bool(tensor.isfinite().all() if tensor.is_cuda else np.isfinite(tensor.detach().numpy()).all())
        for tensor in tensors
    )


# -- for those that missed it ----------------------------------------------------------------------


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


Parts = tuple[runtime_pb2.Tensor, ...]  # an encoded average: pieces of one tensor after the other


class Log:
    """The records of the last rounds, of so many bytes; the last one is kept whatever its size."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._records: dict[bytes, tuple[Header, Parts]] = {}

    def add(self, after: bytes, header: Header, parts: Parts, *, is_wanted: bool) -> None:
        """Keep a round, and those before it if somebody may still want them and there is room."""
        kept = {one: record for one, record in self._records.items() if is_wanted and one != after}
        kept[after] = header, parts
        while len(kept) > 1 and sum(one.num_bytes for one, _ in kept.values()) > self._limit_bytes:
            del kept[next(iter(kept))]
        self._records = kept

    def find(self, after: bytes) -> tuple[Header, Parts] | None:
        """The round that continued the history of this digest."""
        return self._records.get(after)


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
