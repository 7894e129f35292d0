"""How a peer is called where its whole id has no room."""

from __future__ import annotations

ENOUGH = 6
"""Characters at the end of an id. They tell any two of 10,000 peers apart with a probability of 99.9 %."""


def short_name(peer_id: str) -> str:
    """Return the short form of a peer's id (base58), which `trahiv kick` takes as well: `...x7Kp2q`."""
    return f"...{peer_id[-ENOUGH:]}"
