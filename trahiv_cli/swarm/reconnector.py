"""Calls to missing peers, at addresses that they published or that this peer has in its file.

A peer that is not in the routing table is called, at first often, then rarely. So peers find each other after
network failures, when no address on a join line is valid, and when p2pd does not know an address: a router
forwards it, or it belongs to a peer that must be met (`hole_punching`). A connected peer is called as well:
if two peers have dropped each other while one of them was stalled, neither would ask the other again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import hivemind
from hivemind.dht import DHTNode
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.net.addresses import NOT_A_MULTIADDR, reach_of
from trahiv_cli.net.keys import ADDRESSES_KEY
from trahiv_cli.reach.reachability import servers_of
from trahiv_cli.swarm.dht import Dht
from trahiv_cli.swarm.known_peers import KnownPeers, read_addresses

logger = get_logger(__name__)


class Reconnector:
    """Keeps a node, which creates it, in touch with the peers that it knows.

    `also` has more multiaddrs to call. A visitor publishes nothing, so no peer calls it. `clock` returns
    monotonic seconds.
    """

    def __init__(
        self,
        dht: Dht,
        own_addresses: Callable[[], list[str]],
        met: KnownPeers,
        *,
        also: Sequence[str] = (),
        is_visitor: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dht = dht
        self._own_addresses = own_addresses
        self._met = met
        self._clock = clock
        self._also: dict[str, list[str]] = {}  # by peer id
        for address in also:
            self._also.setdefault(address.rpartition("/p2p/")[2], []).append(address)
        self._is_visitor = is_visitor
        self._published: list[str] = []
        self._publish_at = 0.0
        self._calls: dict[str, tuple[float, float]] = {}  # the time of the last call, and the pause after it
        self._told: dict[str, tuple[str, ...]] = {}  # addresses that other peers publish

    def turn(self) -> None:
        """Publish this node's addresses if that is due, read others', call peers, and save."""
        now = self._clock()
        own = self._own_addresses()
        if own and not self._is_visitor and (own != self._published or now >= self._publish_at):
            self._dht.publish(ADDRESSES_KEY, own, ttl_s=600.0)
            self._published = own
            self._publish_at = now + 120.0
        nodes, connected = self._dht.run(peers_there)
        self._read({*nodes, *connected})
        self._call(set(nodes), now)
        self._met.save()

    def _read(self, there: set[str]) -> None:
        written = self._met.addresses  # at most `MAX_PEERS`: in a larger swarm some peers are never stored
        found = self._dht.fetch(ADDRESSES_KEY)
        self._told = {peer: read_addresses(peer, record) for peer, record in found.items()}
        for peer_id, record in sorted(found.items(), key=lambda entry: entry[0] not in written):
            if peer_id in there:  # known peers come first, so that no new peer replaces a present one
                self._met.meet(peer_id, record)

    def _call(self, nodes: set[str], now: float) -> None:
        known: dict[str, Sequence[str]] = {**self._also, **self._told, **self._met.addresses}
        # The missing peers; the first call to a new one is due at once.
        self._calls = {
            peer: self._calls.get(peer, (-math.inf, 0.0))
            for peer in known
            if peer not in nodes and peer != self._dht.peer_id
        }
        soon = self._met.lately if nodes else known.keys()
        due: dict[str, Sequence[str]] = {}
        # The peer that was called longest ago comes first, so made-up ids delay no real peer.
        for peer, (called_at, pause) in sorted(self._calls.items(), key=lambda call: call[1][0]):
            longest = 10.0 if peer in soon else 300.0
            if now - called_at >= min(pause, longest) and len(due) < 8:
                due[peer] = known[peer]
                self._calls[peer] = now, max(2.0, 1.25 * pause)
        if due:
            self._dht.run(partial(greet, due, self._is_visitor))


async def known_peers(_: hivemind.DHT, node: DHTNode) -> list[str]:
    """Return the ids, base58, of the peers in the routing table; for `DHT.run_coroutine`."""
    return [peer.to_base58() for peer in servers_of(node)]


async def peers_there(dht: hivemind.DHT, node: DHTNode) -> tuple[list[str], list[str]]:
    """Return the ids, base58, of the peers in the routing table, and of the connected peers."""
    connected = [one.peer_id.to_base58() for one in await node.protocol.p2p.list_peers()]
    return await known_peers(dht, node), connected


async def greet(peers: Mapping[str, Sequence[str]], is_visitor: bool, _: hivemind.DHT, node: DHTNode) -> None:
    """Call peers (multiaddrs by id, base58) in tasks; the listed nodes that answer enter the routing table.

    dht/node.py drops a node that did not answer, and never asks it again by itself. If two peers can't dial
    each other, the one with the lower id asks for a meeting, or the one that visits.
    """
    for id_, maddrs in peers.items():
        peer = PeerID.from_base58(id_)
        asks = is_visitor or node.peer_id.to_bytes() < peer.to_bytes()
        asyncio.create_task(call_on(node, peer, maddrs, asks=asks))  # kept by `processes.keep_tasks`


async def call_on(node: DHTNode, peer: PeerID, maddrs: Sequence[str], *, asks: bool) -> None:
    """Dial a peer, or meet it if that fails and this peer `asks` for a meeting; then ping it."""
    p2p = node.protocol.p2p
    is_far = any(reach_of(maddr) == "internet" for maddr in maddrs)
    try:
        dialed = [Multiaddr(maddr.rpartition("/p2p/")[0]) for maddr in maddrs]  # the id is passed separately
        try:
            # libp2p would spend minutes on dialling an address that is gone.
            async with asyncio.timeout(3.0 if is_far else 1.0):
                await p2p._client.connect(peer, dialed)
        except (TimeoutError, OSError, P2PDaemonError):
            if node.meeting is None or not asks:
                return
            way = await node.meeting.meet(peer, servers_of(node))
            logger.info(f"Peer {peer} was met: {way or 'dialled'}.")
        async with asyncio.timeout(5.0):
            if await node.protocol.call_ping(peer, strict=False) is not None:
                node.blacklist.register_success(peer)
    except (*NOT_A_MULTIADDR, OSError, EOFError, P2PDaemonError) as error:
        logger.info(f"Peer {peer} does not answer: {error!r}")
