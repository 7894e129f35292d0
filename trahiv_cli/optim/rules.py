"""How a swarm judges its rounds: numbers alone, the same on every peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundRules:
    """When a peer may step without others, and what it takes from them; the same for all peers of a run."""

    solo_after_s: float = 300.0
    """Seconds without a group, while other peers of the run are alive, until a peer takes a step with its
    own gradients. `math.inf`: never; 0: at once."""

    norm_limit: float = 10.0
    """A contribution of more than so many times the median norm of its group is left out. Above 1, or 0:
    only what is not finite is left out."""

    robust_mean: bool = False  # average by centered clipping (arXiv 2012.10333) instead of the weighted mean


DEFAULT_RULES = RoundRules()
