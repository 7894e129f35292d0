"""Keys of the DHT, and the length of our records."""

from __future__ import annotations

# The longest value of a record. With its signature it fits into a signed one (`records.OwnersOnly`).
MAX_RECORD_BYTES = 3200

RUNS_KEY = "trahiv_runs"  # under it each peer of a DHT publishes a `status.Status` of its run
ADDRESSES_KEY = "trahiv_addresses"  # under it each node publishes its multiaddrs


def recipe_key(run_id: str, number: int = 0) -> str:
    """Return the DHT key of part `number` of a run's packed recipe; each peer can have a record there."""
    return f"{run_id}_recipe_{number}" if number else f"{run_id}_recipe"


def likeness_key(run_id: str) -> str:
    """Return the DHT key of each peer's digests, by name, of the parts that it loaded for a run."""
    return f"{run_id}_likeness"
