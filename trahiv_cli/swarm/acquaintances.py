"""The peers that this one has met, in a file: they are asked when every address on the join line is gone.

Each node publishes where it can be reached and writes down what others published (`reunion`). Written down is
also on which port it listened, so that a join line with its address is good after its restart.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.swarm.identity import write_whole

FILE = "peers.json"  # in a run's folder
VERSION = 1
# The most that are kept: those that were there last, and of those that are there, those that were met first.
# So names that a member makes up push nobody out who is there.
MAX_PEERS = 64
MAX_ADDRESSES, MAX_ADDRESS_CHARS = 12, 256  # of one peer: what others publish must not fill a disk
# Peers seen within so long of each other were there together. Times are kept to a tenth of it.
LATELY_S = 600.0
FORGOTTEN_AFTER_S = 30 * 86400.0


class Acquaintance(NamedTuple):
    """A peer that was met."""

    maddrs: tuple[str, ...]  # where it could be reached; each ends in `/p2p/<its id>`
    seen: float  # the last time that it was there, in Unix seconds


class Acquaintances:
    """The peers that this one has met, and its own ports, in a file. Thread-safe.

    A file that is missing, torn or of another version is taken for an empty one: it is worth a second's
    search, not an error.

    Args:
        path: of the file; None: only in memory.
        clock: Unix seconds.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock, self._lock = path, clock, threading.Lock()
        self._peers: dict[str, Acquaintance] = {}
        # On which port this peer listens, or did the last time, where the recipe left the choice open.
        self.ports: dict[str, int] = {}
        if path is not None:
            self._load(path)
        self._saved = self._text()

    @classmethod
    def remembered(cls, path: Path | None) -> Self:
        """Read a file for a visitor: neither what he learns nor his ports are written there."""
        met = cls(None)
        met._peers = cls(path)._peers
        return met

    @property
    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Where each could be reached, by peer id, those that were there last first."""
        with self._lock:
            return {peer: one.maddrs for peer, one in self._sorted()}

    @property
    def lately(self) -> frozenset[str]:
        """The ids of those that were there within ten minutes before the last one was."""
        with self._lock:
            known = self._sorted()
        return frozenset(peer for peer, one in known if one.seen >= known[0][1].seen - LATELY_S)

    def meet(self, peer_id: str, record: object) -> None:
        """Write down what of a peer's record (untrusted) are multiaddrs that end in `/p2p/<peer_id>`."""
        if not isinstance(record, (list, tuple)):
            return
        maddrs = tuple(one for one in record[:MAX_ADDRESSES] if is_address_of(peer_id, one))
        if not maddrs:
            return
        with self._lock:
            before, now = self._peers.get(peer_id), Acquaintance(maddrs, self._clock())
            if before is None and len(self._peers) >= MAX_PEERS:
                longest_away = min(self._peers, key=lambda peer: self._peers[peer].seen)
                if self._peers[longest_away].seen > now.seen - LATELY_S:
                    return
                del self._peers[longest_away]
            if before is None or before.maddrs != maddrs or now.seen >= before.seen + LATELY_S / 10:
                self._peers[peer_id] = now

    def save(self) -> None:
        """Write the file if there is something new; OSError if that fails, and the old one stays."""
        with self._lock:
            text = self._text()
            if self._path is None or text == self._saved:
                return
            write_whole(self._path, text.encode())
            self._saved = text

    def _text(self) -> str:
        peers = {peer: {"maddrs": one.maddrs, "seen": int(one.seen)} for peer, one in self._sorted()}
        return json.dumps({"version": VERSION, "ports": self.ports, "peers": peers}, indent=1) + "\n"

    def _sorted(self) -> list[tuple[str, Acquaintance]]:
        oldest = self._clock() - FORGOTTEN_AFTER_S
        known = [(peer, one) for peer, one in self._peers.items() if one.seen >= oldest]
        return sorted(known, key=lambda entry: entry[1].seen, reverse=True)[:MAX_PEERS]

    def _load(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                return
            ports = {str(host): port for host, port in content["ports"].items() if type(port) is int}
            self.ports = {host: port for host, port in ports.items() if 0 < port < 2**16}
            for peer_id, entry in content["peers"].items():
                maddrs = tuple(one for one in entry["maddrs"] if is_address_of(peer_id, one))
                if maddrs:
                    self._peers[peer_id] = Acquaintance(maddrs, float(entry["seen"]))
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            self._peers, self.ports = {}, {}


def is_address_of(peer_id: str, text: object) -> bool:
    """Say whether this is a multiaddr that ends with that peer's id."""
    if not isinstance(text, str) or len(text) > MAX_ADDRESS_CHARS or not text.endswith(f"/p2p/{peer_id}"):
        return False
    try:
        Multiaddr(text)
    except (ValueError, TypeError, LookupError):
        return False
    return True
