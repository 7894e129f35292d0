"""Dead TCP connections, for example after a router has forgotten them: they are closed and dialled again.

libp2p keeps such a connection for 30 to 40 s, and opens no other one to that peer meanwhile. The kernel
notices earlier: it sends the same bytes again and again, or this machine has lost the address of its end.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils import get_logger

from trahiv_cli.net.addresses import is_of_this_machine
from trahiv_cli.net.byte_streams import Place, places_of

logger = get_logger(__name__)


def dead_places(folder: Path = Path("/proc/self/net")) -> set[Place]:
    """Return the remote ends of dead TCP connections; none if there is no such folder.

    Linux lists the connections of a network namespace there (Documentation/networking/proc_net_tcp.rst).
    """
    tables = folder / "tcp", folder / "tcp6"
    return {place for table in tables for place, is_dead in _connections(table) if is_dead}


def _connections(table: Path) -> Iterator[tuple[Place, bool]]:
    """Yield the remote end of each connection, and whether it is dead."""
    with contextlib.suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            _, local, remote, state, queues, _, retransmissions, *_ = line.split()
            if state != "01":  # TCP_ESTABLISHED; otherwise it is being closed, and its last bytes are sent
                continue
            is_sending = int(queues.partition(":")[0], 16) > 0
            # The wait doubles with each retransmission: together at least 3 s (RFC 6298).
            is_repeating = int(retransmissions, 16) >= 4
            is_lost = is_sending and not is_of_this_machine(_place(local)[0])
            yield _place(remote), is_repeating or is_lost


def _place(text: str) -> Place:
    """Parse an end of a connection: an address in words of the machine's byte order, and a port."""
    address, port = text.split(":")
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)), int(port, 16)


async def close_dead(p2p: Any, connections: Iterable[Any]) -> set[PeerID]:
    """Close all connections (of `list_peers`) with each peer that has a dead one; return these peers.

    libp2p opens a stream on the connection with the most streams, which may be the dead one.
    """
    dead = dead_places()
    closed = {
        one.peer_id
        for one in (connections if dead else ())
        if dead.intersection(places_of(map(str, one.addrs), is_near=True))
    }
    for peer in closed:
        logger.info(f"The connection with peer {peer} died without a word; it is dialled anew.")
        with contextlib.suppress(P2PDaemonError, OSError):
            await p2p._client.disconnect(peer)
    return closed
