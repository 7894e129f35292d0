"""Data of a round: its members' claims, its exchange and its outcome.

Before a round each peer claims the size and the norm of its contribution. The claims reach every member in
the same message, so all members reach the same verdict on them (`judge`). Peer ids are in base58.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, astuple, dataclass, field, replace

import numpy as np
import torch
from hivemind.p2p import PeerID

from trahiv_cli.progress.ledger import USELESS_AT_MOST, Spans
from trahiv_cli.progress.scores import MOST_SCORE
from trahiv_cli.wire import packed, unpacked


@dataclass(frozen=True)
class Measured:
    """A peer's measurements of its own pace and link; 0 means not known yet."""

    samples_per_second: float = 0.0  # that it trains, without waits
    exchange_s: float = 0.0  # of its last exchange, without matchmaking
    bytes_sent: int = 0  # of encoded parts, in that exchange
    bytes_received: int = 0
    lowest_rate: float = 0.0  # the lowest `rate` of its last exchanges: see `auto.RECENT`

    @property
    def is_known(self) -> bool:
        """Whether both the speed and an exchange were measured."""
        return self.samples_per_second > 0 and self.exchange_s > 0 and self.bytes_each_way > 0

    @property
    def bytes_each_way(self) -> int:
        """Bytes of the last exchange in the direction that had more."""
        return max(self.bytes_sent, self.bytes_received)

    @property
    def is_of_link(self) -> bool:
        """Whether the last exchange was large enough to measure the speed of the link."""
        initial_window = 14_600  # of TCP, in bytes (RFC 6928): up to this size any link takes as long
        return self.is_known and self.bytes_each_way > initial_window

    @property
    def round_trips_s(self) -> float:
        """Approximate seconds that the last exchange would have taken with nothing to send.

        On a distant link the round trips of an exchange of any size take 0.5 s; they are at most half of it.
        """
        return min(0.5, self.exchange_s / 2)

    @property
    def rate(self) -> float:
        """Bytes a second, each way, of the last exchange without its round trips."""
        return self.bytes_each_way / (self.exchange_s - self.round_trips_s)

    def to_wire(self) -> list[float]:
        """Return it as a list that MessagePack carries."""
        return [float(value) for value in astuple(self)]

    @classmethod
    def from_wire(cls, data: object) -> Measured:
        """Decode the result of `to_wire`, or raise `ValueError`."""
        match data:
            case [float(speed), float(seconds), float(sent), float(received), float(lowest)] if all(
                math.isfinite(value) and 0 <= value < 1e15 for value in data
            ):
                return cls(speed, seconds, int(sent), int(received), lowest)
        raise ValueError("not a measurement")


def usual_rate(measured: Iterable[Measured]) -> float:
    """Return the median of the known rates, the lower one of two, in bytes a second; 0 if none is known."""
    return statistics.median_low([said.rate for said in measured if said.is_known] or [0.0])


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
    score: float | None = None  # the result of its evaluation of the weights before the round

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
        # Most models have no such buffers, and most steps are not evaluated.
        moves = [self.moves_buffers] if self.moves_buffers or self.score is not None else []
        score = [] if self.score is None else [self.score]
        return packed([*numbers, self.is_client, *lists, *moves, *score])

    @classmethod
    def parse(cls, content: bytes) -> Claim:
        """Decode the result of `to_bytes`; raise `ValueError` if it is malformed or exceeds the limits.

        `counted` limits the samples that count.
        """
        match unpacked(content):
            case [
                int(samples), float(weight), float(norm), bytes(state), int(quorum), bool(is_client),
                measured, trained, *more,
            ] if (
                0 <= samples <= 2**40
                and 0.0 <= weight <= 1e12  # in trained tokens: far above any step, far below float32's limit
                and not norm < 0.0  # a norm that is not finite is read, and left out later
                and len(state) <= 32
                and 1 <= quorum <= 2**16
            ):  # fmt: skip
                known = Measured.from_wire(measured)
                spans = Spans.from_wire(trained)
                if len(spans) <= samples + USELESS_AT_MOST:
                    numbers = samples, weight, norm, state, quorum
                    return cls(*numbers, is_client, known, spans, *_optional(more))
        raise ValueError("not a claim")


def _optional(items: list[object]) -> tuple[bool, float | None]:
    """Read a claim's optional items: whether it moves buffers, and the score."""
    match items:
        case []:
            return False, None
        case [True]:
            return True, None
        case [bool(moves), float(score)] if abs(score) <= MOST_SCORE:
            return moves, score
    raise ValueError("not a claim")


@dataclass(frozen=True)
class Exchange:
    """The contents of a round's exchange; the same for all its members."""

    places: range  # indices of the averaged tensors that are exchanged
    codec: str | None = None  # a name of `CODECS`; None: the codec of `RoundOptions`
    _: KW_ONLY
    is_of_steps: bool = False  # changes by local steps, not gradients: codec losses of the two don't mix
    after: bytes  # digest of the history that the round continues
    most_samples: int  # no more samples of a member's claim count


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
    score: float | None = (
        None  # of the weights before the round; None: no member evaluated them; same for all
    )


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
    median = statistics.median_low([claim.norm for claim in judges] or [0.0])
    usual = statistics.median_low([claim.weight for claim in judges] or [0.0])
    found = {}
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
    scores = [claim.score for claim in used.values() if claim.score is not None]
    return claims, Outcome(
        samples={peer: claim.samples for peer, claim in used.items()},
        group=tuple(claims),
        left_out=left_out,
        states={peer: claim.state for peer, claim in claims.items()},
        measured={peer: claim.measured for peer, claim in claims.items()},
        trained=tuple(claim.trained for claim in used.values()),
        moves_buffers=any(claim.moves_buffers for claim in claims.values()),
        is_empty=not any(claim.weight for claim in used.values()),
        score=statistics.median_low(scores) if scores else None,
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
