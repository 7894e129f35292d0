"""The schedule of a swarm's rounds, and the rules that judge them: plain values, the same for all peers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Literal, Self

from trahiv_cli.progress.history import MOST_STEPS
from trahiv_cli.recipe.schema import SwarmSection

Mode = Literal["sync", "overlap", "diloco", "streaming"]

MOST_RATE = 1e6
"""Limit of the outer learning rate in a pace that can be read; useful rates are below 10."""


@dataclass(frozen=True)
class Pace:
    """When peers exchange which tensors. All peers of a run need the same pace."""

    mode: Mode = "sync"
    """`sync`: gradients, while training waits. `overlap`: gradients, while training goes on. `diloco`: how
    far `local_steps` steps of each peer's own have moved the weights, while training waits. `streaming`: the
    same, one fragment of the weights after the other, while training goes on."""

    codec: str | None = None  # a name in `codecs.CODECS`; None: the codec of `RoundOptions`
    local_steps: int = 50  # steps of the swarm between two exchanges of a weight, in modes with local steps
    fragments: int = 4  # number of fragments of the weights in mode streaming
    outer_learning_rate: float = 0.7  # source: arXiv 2311.08105, section 3
    outer_momentum: float = 0.5
    """Nesterov momentum of the outer step. The source has 0.9, for some hundred rounds; in the 6 rounds of a
    short run 0.9 left a loss 8 % higher than 0.5 (1M parameters from scratch, 50 local steps, two peers)."""

    keeps_codec: bool = False  # whether mode auto keeps the codec, because the recipe names it

    @classmethod
    def of(cls, swarm: SwarmSection) -> Self:
        """Return the pace that a recipe asks for; for mode auto, a placeholder in mode sync."""
        mode: Mode = "sync" if swarm.mode == "auto" else swarm.mode
        outer = swarm.outer_learning_rate, swarm.outer_momentum
        return cls(mode, None, swarm.local_steps, swarm.fragments, *outer)

    @property
    def has_local_steps(self) -> bool:
        """Whether each peer moves its weights by itself between two rounds."""
        return self.mode in ("diloco", "streaming")

    @property
    def is_background(self) -> bool:
        """Whether training goes on during a round."""
        return self.mode in ("overlap", "streaming")

    @property
    def num_fragments(self) -> int:
        """Number of fragments of the weights, which are exchanged in turn."""
        return min(self.fragments, self.local_steps) if self.mode == "streaming" else 1

    @property
    def steps_per_round(self) -> int:
        """Steps of the swarm that one round commits, except the last round of a run."""
        return -(-self.local_steps // self.num_fragments) if self.has_local_steps else 1

    def to_wire(self) -> dict[str, str | float | None]:
        """Return it as a map that MessagePack and JSON carry."""
        return asdict(self)

    @classmethod
    def from_wire(cls, data: object) -> Self:
        """Decode the result of `to_wire`, or raise `ValueError`."""
        match data:
            case {
                "mode": "sync" | "overlap" | "diloco" | "streaming" as mode,
                "codec": str() | None as codec,
                "local_steps": int(steps),
                "fragments": int(fragments),
                "outer_learning_rate": float(rate),
                "outer_momentum": float(momentum),
                "keeps_codec": bool(keeps),
            } if all(1 <= count <= MOST_STEPS for count in (steps, fragments)) and all(
                abs(value) <= MOST_RATE for value in (rate, momentum)
            ):
                return cls(mode, codec, steps, fragments, rate, momentum, keeps)
        raise ValueError(f"not a pace: {data!r}")


DEFAULT_PACE = Pace()


@dataclass(frozen=True)
class RoundRules:
    """When a peer may step alone, and which contributions it accepts; the same for all peers of a run."""

    solo_after_s: float = 300.0
    """Seconds without a group, while other peers of the run are alive, until a peer takes a step with its
    own gradients. `math.inf`: never; 0: after the first try that finds no group."""

    norm_limit: float = 10.0
    """A contribution of more than this many times the median norm of its group is left out (see
    `claims.outliers`). Above 1, or 0: only contributions that are not finite are left out."""

    robust_mean: bool = False  # average by centered clipping (arXiv 2012.10333) instead of the weighted mean


def divide(sizes: Sequence[int], num_fragments: int) -> tuple[range, ...]:
    """Divide consecutive tensors of these sizes into fragments of about equal size.

    Returns:
        The indices of each fragment's tensors, at least one; with few tensors, fewer fragments.
    """
    count = min(num_fragments, len(sizes))
    ends = list(accumulate(sizes))
    borders = [0]
    for number in range(1, count):
        filling = bisect_left(ends, -(-ends[-1] * number // count))  # the tensor that completes them
        last = len(sizes) - count + number - 1  # each fragment after this one needs a tensor, too
        borders.append(min(max(filling, borders[-1]), last) + 1)
    return tuple(range(start, end) for start, end in pairwise([*borders, len(sizes)]))
