"""Data of a round: the claims before it, its exchange, its outcome, and the records kept for replays.

1. Before a round each peer claims the size and the norm of its contribution. The claims reach every member in
   the same message, so all members reach the same verdict on them (`judge`).
2. After it a peer keeps the average, encoded as it travelled, while another peer fetches its state (`Log`):
   on a home link a state takes longer to download than a step takes to train. A peer that holds the state
   before such a round takes its step with the same bits as the members did. The last record is always kept: a
   peer that missed one round needs no download.
3. Such a record proves itself: the members have signed their claims, and the claims and the average together
   yield the proof in their history. Not covered: two peers that forge a round between them.

Peer ids are in base58.
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
from trahiv_cli.wire import unpacked

# Limits of a claim that can be read; `Claim.counted` limits the samples that count. A weight is in trained
# tokens: its limit is far above any step, and far below float32's.
MOST_SAMPLES = 2**40
MOST_QUORUM = 2**16
MOST_DIGEST_BYTES = 32
GREATEST_WEIGHT = 1e12

USELESS_AT_MOST = 1024  # positions claimed beyond the samples: their gradients were not finite

MOST_BYTES = 2**48  # of an average, in a header that can be read; the tensors bound a download

# The log keeps records of up to this many times the bytes of the averaged tensors: as much as a joiner
# downloads if Adam trains them. An exchange fits between two steps, so no more arrives during the download.
STATES_KEPT = 3


@dataclass(frozen=True)
class Claim:
    """A peer's claim about its contribution, made before the round."""

    samples: int = 0
    weight: float = 1.0
    norm: float = 0.0  # Euclidean norm of all its tensors together
    state: bytes = b""  # digest of the weights that it holds
    quorum: int = 2  # the smallest group that it would commit with
    is_client: bool = False  # whether others can't call it, so that it averages no share
    measured: Measured = Measured()  # its measurements of its own pace and link
    trained: Spans = Spans()  # positions of the data that it brings, or whose gradients were useless
    moves_buffers: bool = False  # whether its buffers differ from the agreed ones of its history

    def counted(self, most_samples: int) -> Claim:
        """Return the claim, cut to `most_samples` with their positions and weight if it has more."""
        if self.samples <= most_samples:
            return self
        weight = self.weight * most_samples / self.samples
        trained = self.trained.lowest(most_samples + USELESS_AT_MOST)
        return replace(self, samples=most_samples, weight=weight, trained=trained)

    def to_bytes(self) -> bytes:
        """Encode it as MessagePack."""
        numbers = [self.samples, float(self.weight), float(self.norm), self.state, self.quorum]
        lists = [self.measured.to_wire(), self.trained.to_wire()]
        moves = [True] if self.moves_buffers else []  # most models have no such buffers
        return bytes(MSGPackSerializer.dumps([*numbers, self.is_client, *lists, *moves]))

    @classmethod
    def parse(cls, content: bytes) -> Claim:
        """Decode the result of `to_bytes`; raise `ValueError` if it is malformed or exceeds the limits."""
        match unpacked(content):
            case [
                int(samples), float(weight), float(norm), bytes(state), int(quorum), bool(is_client),
                measured, trained, *moves,
            ] if (
                0 <= samples <= MOST_SAMPLES
                and 0.0 <= weight <= GREATEST_WEIGHT
                and not norm < 0.0  # a norm that is not finite is read, and left out later
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
    """The contents of a round's exchange; the same for all its members."""

    places: range  # indices of the averaged tensors that are exchanged
    codec: str | None = None  # a name of `CODECS`; None: the codec of `RoundOptions`
    is_of_steps: bool = False  # changes by local steps, not gradients: codec losses of the two don't mix
    after: bytes = b""  # digest of the history that the round continues
    most_samples: int = MOST_SAMPLES  # no more samples of a member's claim count


@dataclass(frozen=True)
class Outcome:
    """The result of a committed round."""

    samples: dict[str, int]  # behind each contribution, without outliers; the same for all members
    group: tuple[str, ...]
    left_out: dict[str, str]  # members not or not fully used, and why, as far as this member knows
    states: dict[str, bytes]  # digest of the weights that each member held before the round
    proof: bytes = b""  # digest of average and claims; the same for all that committed
    reason: str = ""  # members that did not commit; empty if all did
    exchange_s: float = 0.0  # of this member, without matchmaking and vote
    longest_wait_s: float = 0.0  # longest wait in it for a single member
    parts_sent: int = 0  # bytes of encoded parts in that exchange
    parts_received: int = 0
    measured: dict[str, Measured] = field(default_factory=dict)  # each member's claim of its pace and link
    trained: tuple[Spans, ...] = ()  # claimed positions of the data, without outliers; the same for all
    moves_buffers: bool = False  # whether a member claimed moved buffers; if so, buffers were averaged
    is_empty: bool = False  # no sample had a trained token: the step changes nothing; same for all


@dataclass(frozen=True)
class Round:
    """The result of one attempt to average with the others."""

    samples: dict[str, int]  # behind each gradient that was used, this peer's included
    seconds: float  # from the first request to the result
    bytes_sent: int  # of encoded tensor parts in the committed exchange, without framing
    bytes_received: int
    committed: bool  # whether the step was taken with this round's average
    reason: str = ""  # why not; if committed, the members that did not average, and why earlier tries failed
    left_out: dict[str, str] = field(default_factory=dict)  # members whose gradient was not used, and why
    blocked_seconds: float = 0.0  # time for which training waited

    @property
    def group(self) -> tuple[str, ...]:
        """All members; empty if no group averaged."""
        return tuple(dict.fromkeys((*self.samples, *self.left_out)))


def outliers(claims: Mapping[str, Claim], norm_limit: float) -> dict[str, str]:
    """Return the members whose contribution must be left out, with the reasons.

    A norm may be up to `norm_limit` times the median; 0 accepts every finite norm. The median is the lower
    one of two, so the smaller norm decides in a group of two. Norms of 0 do not count in it. A mean over
    fewer tokens is noisier, so its norm may be larger, but never by more than its lower weight makes up for.
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
    """Return the claims as they count, by peer and in order, and the outcome as far as they determine it."""
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

    `lot` breaks ties, the same way for all members. No member knew it before the claims, so none could
    construct a state that wins.
    """
    counts = Counter(states.values())
    return max(counts, key=lambda state: (counts[state], hashlib.sha256(lot + state).digest()))


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all values are finite.

    Uses numpy where possible: torch would start OpenMP threads even for a thread beside the training one.
    """
    return all(
        bool(tensor.isfinite().all() if tensor.is_cuda else np.isfinite(tensor.detach().numpy()).all())
        for tensor in tensors
    )


# -- records for peers that missed a round ---------------------------------------------------------


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
        said = [list(self.members), list(self.gathered), self.proof, self.num_parts, self.num_bytes]
        return bytes(MSGPackSerializer.dumps(said))

    @classmethod
    def from_wire(cls, content: bytes) -> Header:
        """Decode the result of `to_wire`, or raise `ValueError`."""
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


def decoded(parts: Sequence[runtime_pb2.Tensor], like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
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


def _values_of(part: runtime_pb2.Tensor) -> torch.Tensor:
    values = read_tensor(part).view(-1).float()
    if not bool(values.isfinite().all()):
        raise ValueError("an average that is not finite")
    return values
