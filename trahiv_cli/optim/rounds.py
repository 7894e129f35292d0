"""What a round is about and what came of it, as values. Peers are named by their ids, base58."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trahiv_cli.optim.auto import Measured
from trahiv_cli.optim.ledger import Spans
from trahiv_cli.optim.soundness import MOST_SAMPLES, Claim


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
    proof: bytes  # digest of the average; the same for all that committed
    reason: str = ""  # members that did not commit; empty if all did
    exchange_s: float = 0.0  # of this member, without finding the group and without the vote
    parts_sent: int = 0  # bytes of encoded parts in that exchange
    parts_received: int = 0
    measured: dict[str, Measured] = field(default_factory=dict)  # claimed by each of its pace and link
    trained: tuple[Spans, ...] = ()  # claimed positions of the data, without outliers; alike for all members

    @classmethod
    def of_claims(cls, claims: Mapping[str, Claim], left_out: dict[str, str], proof: bytes) -> Outcome:
        """Return what follows from the members' claims alone."""
        return cls(
            samples={peer: claim.samples for peer, claim in claims.items() if peer not in left_out},
            group=tuple(claims),
            left_out=left_out,
            states={peer: claim.state for peer, claim in claims.items()},
            proof=proof,
            measured={peer: claim.measured for peer, claim in claims.items()},
            trained=tuple(claim.trained for peer, claim in claims.items() if peer not in left_out),
        )


@dataclass(frozen=True)
class Round:
    """What came of one attempt to average with the others."""

    samples: dict[str, int]  # behind each gradient that was used, this peer's included
    seconds: float  # from the first request to the result
    bytes_sent: int  # of encoded tensor parts; what the protocol adds is not counted
    bytes_received: int
    committed: bool  # whether the step was taken with this round's average
    reason: str = ""  # why it was not; of a committed one, who did not average, and why earlier tries failed
    left_out: dict[str, str] = field(default_factory=dict)  # members whose gradient was not used, and why
    blocked_seconds: float = 0.0  # how long training stood still for it

    @property
    def group(self) -> tuple[str, ...]:
        """All members; empty if no group averaged."""
        return tuple(dict.fromkeys((*self.samples, *self.left_out)))
