"""Stand-ins for what a test must not start. They behave; they do not record calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

Records = dict[str, dict[Any, tuple[Any, float]]]


class FakeNode:
    """A `swarm.node.Node` without a network: a dict with expiry, shared by the nodes of one swarm.

    Args:
        peer_id: this node's id.
        records: what the swarm holds; take another node's to be its neighbour.
        now: the clock, in seconds.
    """

    def __init__(
        self, peer_id: str = "QmA", records: Records | None = None, now: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.peer_id = peer_id
        self.records: Records = {} if records is None else records
        self._now = now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the records: others of the swarm hold them."""

    def neighbour(self, peer_id: str) -> FakeNode:
        """Another node of the same swarm."""
        return FakeNode(peer_id, self.records, self._now)

    def only_dials(self) -> bool:
        return False

    def notes(self) -> list[str]:
        return []

    def publish(self, key: str, value: Any, ttl_s: float) -> bool:
        self.records.setdefault(key, {})[self.peer_id] = value, self._now() + ttl_s
        return True

    def fetch(self, key: str) -> dict[Any, Any]:
        held = self.records.get(key, {})
        return {peer: value for peer, (value, expires) in held.items() if expires > self._now()}
