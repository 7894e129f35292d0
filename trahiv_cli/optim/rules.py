"""How a swarm judges its rounds: numbers alone, the same on every peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundRules:
    """When a peer may step without others, and what it takes from them.

    All peers of a run need the same: what one leaves out of a round, another must not count.
    """

    solo_after_s: float = 300.0
    """Seconds without a group, while other peers of the run are alive, until a peer takes a step with its
    own gradients. `math.inf`: never; 0: at once."""

    norm_limit: float = 10.0
    """A contribution whose gradient has more than so many times the median norm of its group's is left out
    of the round. Above 1, or 0: only what is not finite is left out."""

    robust_mean: bool = False
    """Average by centered clipping instead of the weighted mean.

    Source: arXiv 2012.10333.
    """


DEFAULT_RULES = RoundRules()
