"""The peers that this one knows, and the ports on which it listened, in a file of its folder.

So peers find each other again when no address on a join line is valid (`reconnector`), and a join line with
this peer's address stays valid after its restart.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from trahiv_cli.files import write_whole
from trahiv_cli.net.addresses import is_address_of

FILE = "peers.json"  # in a run's folder
# A new peer replaces only the peer that has been absent for longest, and only if that is `LATELY_S` or more:
# ids that a member makes up can't displace peers that are present.
MAX_PEERS = 64
# Peers seen within this time of each other were present together. Times are precise to a tenth of it.
LATELY_S = 600.0


class Acquaintance(NamedTuple):
    """A known peer."""

    maddrs: tuple[str, ...]  # its last known addresses; each ends in `/p2p/<its id>`
    seen: float  # when it was last present, in Unix seconds


def read_addresses(peer_id: str, record: object) -> tuple[str, ...]:
    """Return the multiaddrs in a peer's record (untrusted) that end in `/p2p/<peer_id>`."""
    # At most twelve: records of others must not fill a disk.
    addresses = record[:12] if isinstance(record, (list, tuple)) else ()
    return tuple(one for one in addresses if is_address_of(peer_id, one))


class KnownPeers:
    """The peers that this one knows, and its own ports, in a file (None: only in memory).

    A file that is missing, damaged or of another version counts as empty. `clock` returns Unix seconds.
    `peers` are known from elsewhere.
    """

    def __init__(
        self,
        path: Path | None,
        clock: Callable[[], float] = time.time,
        peers: dict[str, Acquaintance] | None = None,
    ) -> None:
        self._path = path
        self._clock = clock
        self._peers = peers or {}
        self.ports: dict[str, int] = {}  # on which this peer last listened, by the multiaddr in its settings
        if path is not None:
            self._load(path)
        self._saved = self._text()

    @classmethod
    def remembered(cls, path: Path | None) -> Self:
        """Read a file for a visitor, which writes neither new peers nor its own ports there."""
        return cls(None, peers=cls(path)._peers)

    @property
    def addresses(self) -> dict[str, tuple[str, ...]]:
        """The known addresses by peer id, the most recently seen peers first."""
        return {peer: one.maddrs for peer, one in self._sorted()}

    @property
    def lately(self) -> frozenset[str]:
        """The ids of the peers seen at most `LATELY_S` before the most recently seen one."""
        known = self._sorted()
        return frozenset(peer for peer, one in known if one.seen >= known[0][1].seen - LATELY_S)

    def meet(self, peer_id: str, record: object) -> None:
        """Note that a peer is present, and the multiaddrs in its record (untrusted); see `read_addresses`."""
        if not (maddrs := read_addresses(peer_id, record)):
            return
        before = self._peers.get(peer_id)
        now = Acquaintance(maddrs, self._clock())
        if before is None and len(self._peers) >= MAX_PEERS:
            longest_away = min(self._peers, key=lambda peer: self._peers[peer].seen)
            if self._peers[longest_away].seen > now.seen - LATELY_S:
                return
            del self._peers[longest_away]
        if before is None or before.maddrs != maddrs or now.seen >= before.seen + LATELY_S / 10:
            self._peers[peer_id] = now

    def note_ports(self, ports: Mapping[str, int | None]) -> None:
        """Note the ports on which this peer listens, as far as they are known; see `ports`."""
        self.ports = {maddr: port for maddr, port in ports.items() if port is not None}

    def save(self) -> None:
        """Write the file if its content has changed; OSError if that fails, and the old file stays."""
        if self._path is not None and (text := self._text()) != self._saved:
            write_whole(self._path, text.encode())
            self._saved = text

    def _text(self) -> str:
        peers = {peer: {"maddrs": one.maddrs, "seen": int(one.seen)} for peer, one in self._sorted()}
        return json.dumps({"version": 1, "ports": self.ports, "peers": peers}, indent=1) + "\n"

    def _sorted(self) -> list[tuple[str, Acquaintance]]:
        return sorted(self._peers.items(), key=lambda entry: entry[1].seen, reverse=True)[:MAX_PEERS]

    def _load(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != 1:
                return
            for maddr, port in content["ports"].items():
                if type(port) is int and 0 < port < 2**16:
                    self.ports[maddr] = port
            for peer_id, entry in content["peers"].items():
                if maddrs := read_addresses(peer_id, entry["maddrs"]):
                    self._peers[peer_id] = Acquaintance(maddrs, float(entry["seen"]))
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            self._peers = {}
            self.ports = {}
