"""What a round is about and what came of it, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hivemind.proto import runtime_pb2

from trahiv_cli.optim.auto import Measured
from trahiv_cli.optim.ledger import Spans
from trahiv_cli.optim.soundness import (
    MOST_SAMPLES,
    Claim,
)
from trahiv_cli.swarm.snapshot import SharedNumber


@dataclass(frozen=True)
class Exchange:
    """What a round exchanges; the same for all its members."""

    places: range
    """The averager's tensors that are exchanged, by their places among all."""

    codec: str | None = None
    """The name of the codec, one of `CODECS`; None: the averager's own."""

    is_of_steps: bool = False
    """Whether it is what local steps changed, rather than a gradient: a codec's losses are not mixed."""

    after: bytes = b""
    """Digest of the history that it continues."""

    most_samples: int = MOST_SAMPLES
    """The most samples that a member can hold: no more of its claim count."""


@dataclass(frozen=True)
class Outcome:
    """What the averager says of a round that was committed."""

    samples: dict[str, int]
    """By peer id (base58) the samples behind each contribution, without outliers; alike for all members."""

    group: tuple[str, ...]
    left_out: dict[str, str]
    """Members whose contribution was not used, or not all of it, and why: as far as this member knows."""

    states: dict[str, bytes]
    """By peer id the digest of the weights that it held before the round."""

    proof: bytes
    """Digest of the average; the same for all that committed."""

    reason: str
    """Members that did not commit; empty if all did."""

    exchange_s: float = 0.0
    """What the exchange took this member, without finding the group and without the vote."""

    parts_sent: int = 0
    """Bytes of encoded parts in that exchange."""

    parts_received: int = 0

    measured: dict[str, Measured] = field(default_factory=dict)
    """What each member claimed to know of its pace and link."""

    trained: tuple[Spans, ...] = ()
    """Positions of the data that members claimed to bring, without outliers; alike for all members."""

    @classmethod
    def of_claims(cls, claims: Mapping[str, Claim], left_out: dict[str, str], proof: bytes) -> Outcome:
        """What follows from its members' claims alone."""
        return cls(
            samples={peer: claim.samples for peer, claim in claims.items() if peer not in left_out},
            group=tuple(claims),
            left_out=left_out,
            states={peer: claim.state for peer, claim in claims.items()},
            proof=proof,
            reason="",
            measured={peer: claim.measured for peer, claim in claims.items()},
            trained=tuple(claim.trained for peer, claim in claims.items() if peer not in left_out),
        )


@dataclass(frozen=True)
class Round:
    """What came of one attempt to average with the others."""

    samples: dict[str, int]
    """By peer id (base58, this peer's included) the samples behind each gradient that was used."""

    seconds: float
    """From the first request to the result."""

    bytes_sent: int
    """Bytes of encoded tensor parts that this peer sent; what the protocol adds is not counted."""

    bytes_received: int
    committed: bool
    """Whether the step was taken with this round's average."""

    reason: str = ""
    """Why it was not committed; of a committed round, who did not average, and why earlier tries failed."""

    left_out: dict[str, str] = field(default_factory=dict)
    """Members whose gradient was not used, and why."""

    blocked_seconds: float = 0.0
    """How long training stood still for it: for all of it in modes sync and diloco."""

    @property
    def group(self) -> tuple[str, ...]:
        """Ids of all members; empty if no group averaged."""
        return tuple(dict.fromkeys((*self.samples, *self.left_out)))


def count(counter: SharedNumber, part: runtime_pb2.Tensor) -> None:
    """Add the bytes of an encoded part to a counter, in the averager's event loop."""
    counter.value += len(part.buffer)
