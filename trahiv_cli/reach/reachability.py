"""The reachability of this peer: it is found out at the start, and again whenever something changes.

1. The peer asks members how they see it, and to dial it from a port to which it has never sent anything.
2. If they can't, it asks the router to forward the port (`upnp`), and asks the members again.
3. A peer that members can dial is listed as a node of the DHT, which others ask for records. A peer that they
   can't dial connects to these nodes, and meets the peers that it can't dial (`hole_punching`). While no
   member answers, a peer is listed as well.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import hivemind
import psutil
from hivemind.dht import DHTNode
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.net.addresses import reach_of
from trahiv_cli.net.byte_streams import (
    DOWNLOAD,
    UPLOAD,
    Place,
    is_elsewhere,
    is_global,
    is_ipv6,
    maddr_of,
    places_of,
)
from trahiv_cli.reach.hole_punching import Meeting, Seen
from trahiv_cli.reach.upnp import LEASE_S, Forwarded, Router

Kind = Literal["direct", "punched", "relayed", "dials-out", "alone"]
Wanted = Literal["auto", "direct", "relay", "dial-out"]


class Reach(NamedTuple):
    """A peer's reachability, and the reasons for the result."""

    kind: Kind
    why: str  # a sentence for a person
    places: tuple[Place, ...] = ()  # where it can be dialled from outside its own network
    looks: tuple[Seen, ...] = ()  # the answers of members

    @property
    def only_dials(self) -> bool:
        """Whether some peers may never get a connection with this one, because no member relays for it."""
        return self.kind == "dials-out" and not any(look.carries for look in self.looks)


@dataclass(frozen=True)
class ReachRules:
    """A user's settings for the link to other peers. Rates are upper limits in Mbit/s; None: no limit."""

    wanted: Wanted = "auto"
    relay_mbit: float | None = None  # of the traffic that it passes on for others
    upload_mbit: float | None = None  # of all that it sends
    download_mbit: float | None = None  # of all that it receives


class ReachFinder:
    """Finds out how others can reach a node, which creates and closes it.

    `run` runs a coroutine in the DHT's process (`Dht.run`); `clock` returns monotonic seconds. `is_known` is
    set once `reach` is found out for the first time.
    """

    def __init__(
        self,
        run: Callable[[Callable[..., Awaitable[Any]]], Any],
        rules: ReachRules,
        router: Router,
        *,
        is_visitor: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._wanted = rules.wanted
        self._look = partial(find_reach, rules.wanted, is_visitor)
        self._router = router
        self._clock = clock
        self.reach = Reach("alone", "This peer has just started.")
        self.is_known = threading.Event()
        self._own: list[Multiaddr] = []
        self._forwarded = Forwarded("", "")
        self._look_at = self._ask_at = -math.inf
        run(partial(open_meetings, rules))

    def turn(self) -> None:
        """Look if that is due, and at once when own addresses have changed."""
        now = self._clock()
        own = self._run(visible_maddrs)
        if own != self._own:
            self._own = own
            self._look_at = now
            self._ask_at = now
        if now < self._look_at:
            return
        reach: Reach = self._run(self._look)
        port = self._port_behind_router() if self._wanted == "auto" else None
        is_lost = self.reach.kind == "direct" != reach.kind  # the router may have been restarted
        if port and (now >= self._ask_at or is_lost) and (reach.kind != "direct" or self._forwarded.host):
            self._ask_at = now + LEASE_S / 2
            self._forwarded = self._router.forward(port)
            if self._forwarded.host:
                reach = self._run(self._look)
        if reach.kind != "direct":
            said = self._forwarded.why
            if self._forwarded.host and reach.looks:
                said += " But no member could connect through it."
            reach = reach._replace(why=f"{reach.why} {said}".rstrip())
        if port and reach.kind == "alone" and self._forwarded.host:  # no member can test the address
            reach = reach._replace(places=((self._forwarded.host, port),))
        self.reach = reach
        self._look_at = now + (4.0 if reach.kind == "alone" else 30.0)
        if not self.is_known.is_set():
            self._run(let_relay)
            self.is_known.set()

    def _port_behind_router(self) -> int | None:
        near = [one for one in map(str, self._own) if reach_of(one) == "local network"]
        return next((place[1] for place in places_of(near, is_near=True) if not is_ipv6(place)), None)

    def addresses(self) -> list[str]:
        """Return the multiaddrs at which others can dial this peer, without its id."""
        return list(map(maddr_of, self.reach.places))

    def close(self) -> None:
        """End the forwarding by the router."""
        self._router.close()


async def visible_maddrs(_: hivemind.DHT, node: DHTNode) -> list[Multiaddr]:
    """Return the addresses that p2pd reports, none in client mode; in the DHT's process."""
    return [] if node.protocol.client_mode else list(await node.get_visible_maddrs(latest=True))


def bytes_per_second(mbit: float | None) -> float | None:
    """Convert Mbit/s into bytes per second; None: no limit."""
    return None if mbit is None else mbit * 1e6 / 8


async def open_meetings(rules: ReachRules, _: hivemind.DHT, node: DHTNode) -> None:
    """Set the rate limits, and serve meetings if p2pd listens on TCP; in the DHT's process."""
    listens = listening_places(node.protocol.p2p._child.pid)
    # IPv4 first, and of each kind loopback first: other addresses may be gone after a change of network.
    near = sorted(listens, key=lambda one: (is_ipv6(one), is_elsewhere(one)))
    UPLOAD.set_rate(bytes_per_second(rules.upload_mbit))
    DOWNLOAD.set_rate(bytes_per_second(rules.download_mbit))
    meeting = None
    if near:
        rate = bytes_per_second(rules.relay_mbit)
        meeting = Meeting(node.protocol.p2p, near, rate, punches=rules.wanted != "relay")
        await meeting.open()
    node.meeting = meeting


def listening_places(p2pd: int) -> list[Place]:
    """List the places at which this machine can dial p2pd, given its process id; none if it is gone.

    p2pd itself reports only the announced addresses, if there are any.
    """
    try:
        found = psutil.Process(p2pd).net_connections("tcp")
    except psutil.Error:
        return []
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return [
        (near.get(one.laddr.ip, one.laddr.ip), one.laddr.port)
        for one in found
        if one.status == psutil.CONN_LISTEN
    ]


async def let_relay(_: hivemind.DHT, node: DHTNode) -> None:
    """Allow relayed meetings, once it is known whether others can dial this peer; in the DHT's process."""
    if node.meeting is not None:
        node.meeting.let_relay()


def servers_of(node: DHTNode) -> list[PeerID]:
    """List the nodes in the routing table, in random order; other peers can dial all of them."""
    known = [peer for peer in node.protocol.routing_table.peer_id_to_uid if peer != node.peer_id]
    return random.sample(known, len(known))


async def find_reach(wanted: Wanted, is_visitor: bool, dht: hivemind.DHT, node: DHTNode) -> Reach:
    """Ask members to look, and list this node if one dials it, or if none answers; in the DHT's process.

    A visitor is never listed: others would miss it when it is gone.
    """
    meeting = node.meeting
    servers = servers_of(node)
    connected = [one.peer_id for one in await node.protocol.p2p.list_peers()]
    if node.protocol.client_mode:
        return Reach("dials-out", "It only dials out, as its user wants.")
    if wanted == "direct":
        await list_node(node, servers, is_listed=True)
        return Reach("direct", "It was started with --reach direct.")
    # One answer is enough. Without a listed node, any connected peers are asked.
    asks = map(meeting.look, (servers or connected)[:3]) if meeting else ()
    looks = await asyncio.gather(*asks, return_exceptions=True)
    seen = tuple(look for look in looks if isinstance(look, Seen))
    dialled = believed(seen, await visible_maddrs(dht, node)) if wanted == "auto" else ()
    await list_node(node, servers, is_listed=(bool(dialled) or not seen) and not is_visitor)
    if dialled:
        return Reach("direct", "A member has dialled this peer.", dialled, seen)
    if not seen:
        return Reach("alone", "No other peer is there to dial this one.")
    ways = (await meeting.ways()).values()
    if "relayed" in ways:
        return Reach("relayed", "Some peers reach this one through a relaying member.", looks=seen)
    if ways:
        return Reach("punched", "Hole punching through the routers works.", looks=seen)
    why = f"Of the members, {len(seen)} tried to dial this peer, and could not."
    reach = Reach("dials-out", why, looks=seen)
    if reach.only_dials:
        more = "No member relays for it, so it averages only with peers that it can dial."
        reach = reach._replace(why=f"{why} {more}")
    return reach


def believed(looks: Sequence[Seen], own: Sequence[Multiaddr]) -> tuple[Place, ...]:
    """Choose the places at which this peer can be dialled, from the places that members report as dialled.

    If several members answer, at least two must have seen the address, unless this machine has it: one may
    lie. If one sees this peer at a public address, a dial from its own network proves nothing for others.
    """
    seen = Counter(host for look in looks for host in {host for host, _ in look.places})
    here = {host for host, _ in places_of(map(str, own), is_near=True)}
    dialled = dict.fromkeys(place for look in looks for place in look.dialled)
    told = [one for one in dialled if len(looks) == 1 or seen[one[0]] > 1 or one[0] in here]
    if any(is_global(place) for look in looks for place in look.places):
        told = [one for one in told if is_global(one)]
    return tuple(told)


async def list_node(node: DHTNode, servers: Sequence[PeerID], *, is_listed: bool) -> None:
    """List or unlist this node as one that others ask for records; tell connected peers if it is listed."""
    protocol = node.protocol
    if is_listed == protocol.is_listed:
        return
    protocol.list_node(is_listed=is_listed)
    if is_listed:
        connected = {one.peer_id for one in await protocol.p2p.list_peers()}
        await asyncio.gather(*(protocol.call_ping(one, strict=False) for one in connected.union(servers)))
