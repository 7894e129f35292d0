"""Records in the DHT, and work in the DHT's process, for the training process."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import hivemind
import psutil
from hivemind.dht import DHTNode
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import ValueWithExpiration

from trahiv_cli.clock import swarm_time
from trahiv_cli.errors import SwarmError
from trahiv_cli.members.identity import id_bytes
from trahiv_cli.members.policy_book import Credentials
from trahiv_cli.members.records import owner_of
from trahiv_cli.swarm.corrections.dht import CorrectedDHT


class Dht:
    """Publishes and fetches records as one peer. Each `Node` is one, and owns the process.

    `publish`, `fetch` and `run` raise SwarmError if the DHT's process does not answer in time, or if p2pd
    has ended; nothing was changed then.
    """

    answer_s = 10.0  # for the DHT's process to answer

    def __init__(self, peer_id: str, dht: CorrectedDHT, credentials: Credentials | None) -> None:
        self.peer_id = peer_id  # base58
        self.dht = dht
        self.credentials = credentials  # None: the swarm is open

    def is_out(self, peer_id: str) -> bool:
        """Return whether the swarm's owner has removed a peer (its id, base58)."""
        return self.credentials is not None and self.credentials.book.policy.is_out(id_bytes(peer_id))

    def publish(self, key: str, value: Any, ttl_s: float) -> bool:
        """Store a value (MessagePack) under a key, signed by this peer, for `ttl_s` seconds.

        Return whether this node keeps it. Nodes refuse records that live longer than two hours
        (`records.OwnersOnly`).
        """
        options = {"expiration_time": swarm_time() + ttl_s, "subkey": self.dht.place, "return_future": True}
        return bool(self._wait(self.dht.store(key, value, **options)))

    def fetch(self, key: str) -> dict[str, Any]:
        """Return the values under a key by the ids (base58) of their owners, without removed peers."""
        found = self._wait(self.dht.get(key, latest=True, return_future=True))
        if found is None or not isinstance(found.value, dict):
            return {}
        records = {
            owner_of(place): entry.value
            for place, entry in found.value.items()
            if isinstance(entry, ValueWithExpiration)
        }
        return {owner: value for owner, value in records.items() if owner and not self.is_out(owner)}

    def run(self, coroutine: Callable[[hivemind.DHT, DHTNode], Awaitable[Any]]) -> Any:
        """Run a coroutine in the DHT's process, and return its result."""
        return self._wait(self.dht.run_coroutine(coroutine, return_future=True))

    def _wait(self, future: Any) -> Any:
        try:
            return future.result(timeout=self.answer_s)
        except (OSError, EOFError, P2PDaemonError) as error:  # from p2pd's socket, or a `TimeoutError`
            raise SwarmError(
                f"This peer's DHT process, or p2pd, does not answer ({error!r}); nothing was changed.",
                hint="start again with the same command",
            ) from error

    def is_alive(self) -> bool:
        """Return whether the DHT's process runs."""
        return bool(self.dht.is_alive())

    def pids(self) -> list[int]:
        """Return the ids of the DHT's process and of p2pd."""
        with contextlib.suppress(psutil.Error):
            return [self.dht.pid, *(child.pid for child in psutil.Process(self.dht.pid).children())]
        return []
