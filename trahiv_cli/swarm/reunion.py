"""Peers of a DHT find each other again: after cuts, restarts, and when no address on a join line is good.

Each publishes where it can be reached, and writes down where others can (`acquaintances`). Whoever is written
down and not in this node's routing table is called on, at first often, then rarely.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import hivemind
from hivemind.dht import DHTNode
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.swarm.acquaintances import MAX_PEERS, Acquaintances

if TYPE_CHECKING:
    from trahiv_cli.swarm.node import Node

PUBLISH_EVERY_S = 60.0  # records go with the peers that hold them
ADDRESSES_TTL_S = 600.0
READ_EVERY_S = 60.0  # others' addresses; and at once when there is somebody whose address is not known
READ_AT_MOST_EVERY_S = 4.0
CALL_S = (
    5.0  # a peer may take so long to answer; libp2p itself would dial an address that is gone for minutes
)
CALLS_AT_ONCE = 8
# Each pause between two calls on the same peer is twice the one before, up to five minutes, or up to ten
# seconds where this node knows nobody else.
PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_ALONE_S = 2.0, 300.0, 10.0


class Reunion:
    """Keeps a node and those whom it has `met` in touch, through a key of the DHT.

    `also` has addresses to call on besides, by peer id. `clock` is monotonic seconds.
    """

    def __init__(
        self,
        node: Node,
        key: str,
        met: Acquaintances,
        *,
        also: Mapping[str, Sequence[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._key, self._met, self._clock = node, key, met, clock
        self._also = dict(also or {})
        self._published: list[str] = []
        self._publish_at = self._read_at = self._read_not_before = 0.0
        self._calls: dict[str, tuple[float, float]] = {}  # when each was called on, and the pause after that

    def turn(self) -> None:
        """Publish, read, call, and write down, as far as it is time for that."""
        now = self._clock()
        own = self._node.own_addresses()
        if own and (own != self._published or now >= self._publish_at):
            self._node.publish(self._key, own, ADDRESSES_TTL_S)
            self._published, self._publish_at = own, now + PUBLISH_EVERY_S
        there: set[str] = set(self._node.run(known_peers))
        self._read(there, now)
        self._call(there, now)
        self._met.save()

    def _read(self, there: set[str], now: float) -> None:
        written = self._met.addresses  # no more than `MAX_PEERS`: in a larger swarm some never are
        is_news = len(written) < MAX_PEERS and not there <= written.keys()
        if not there or now < self._read_not_before or (now < self._read_at and not is_news):
            return
        self._read_at, self._read_not_before = now + READ_EVERY_S, now + READ_AT_MOST_EVERY_S
        found = self._node.fetch(self._key)
        for peer_id, record in sorted(found.items(), key=lambda entry: entry[0] not in written):
            if peer_id in there:  # of those that were met before it is seen first that they are there
                self._met.meet(peer_id, record)

    def _call(self, there: set[str], now: float) -> None:
        for peer in there & self._calls.keys():
            del self._calls[peer]
        longest = LONGEST_PAUSE_S if there else LONGEST_PAUSE_ALONE_S
        due: dict[str, Sequence[str]] = {}
        for peer, maddrs in (self._also | self._met.addresses).items():
            called_at, pause = self._calls.get(peer, (-LONGEST_PAUSE_S, PAUSE_S / 2))
            is_missing = peer not in there and peer != self._node.peer_id
            if is_missing and now - called_at >= min(pause, longest) and len(due) < CALLS_AT_ONCE:
                due[peer] = maddrs
                self._calls[peer] = now, min(2 * pause, LONGEST_PAUSE_S)
        if due:
            self._node.run(partial(greet, due))


# -- in the DHT's process --------------------------------------------------------------------------


async def known_peers(dht: hivemind.DHT, node: DHTNode) -> list[str]:
    """Return the ids, base58, of the peers in the routing table; for `DHT.run_coroutine`."""
    del dht
    return [peer.to_base58() for peer in node.protocol.routing_table.peer_id_to_uid if peer != node.peer_id]


async def greet(peers: Mapping[str, Sequence[str]], dht: hivemind.DHT, node: DHTNode) -> None:
    """Call on peers (multiaddrs by id, base58), and have them in the routing table if they answer.

    dht/node.py drops a node that did not answer from its routing table and blacklists it for longer each
    time, and never asks it again by itself: a peer whose links were all cut stays outside for ever.
    """
    del dht

    async def call_on(peer: PeerID, maddrs: Sequence[str]) -> None:
        dialed = [Multiaddr(maddr.rpartition("/p2p/")[0]) for maddr in maddrs]  # libp2p is told the id beside
        try:
            async with asyncio.timeout(CALL_S):
                await node.protocol.p2p._client.connect(peer, dialed)
                if await node.protocol.call_ping(peer, strict=False) is not None:
                    node.blacklist.register_success(peer)
        except (TimeoutError, OSError, P2PDaemonError):
            return

    await asyncio.gather(*(call_on(PeerID.from_base58(peer), maddrs) for peer, maddrs in peers.items()))
