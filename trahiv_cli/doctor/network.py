"""Checks of the network: this peer's ports, its connections to members, and how others reach it.

For some seconds, a node acts like the node of a joining peer. It leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import hivemind
from hivemind.dht import DHTNode
from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.clock import ahead_s
from trahiv_cli.doctor.checks import Check
from trahiv_cli.errors import NotAdmitted, SetupError, SwarmError
from trahiv_cli.members.invitation import Invitation, visitor_credentials
from trahiv_cli.net import addresses
from trahiv_cli.net.keys import ADDRESSES_KEY
from trahiv_cli.reach.hole_punching import FAILED
from trahiv_cli.reach.reachability import Reach, servers_of
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.known_peers import KnownPeers
from trahiv_cli.swarm.node import REACH_KNOWN_S, Node
from trahiv_cli.telemetry.events import short_name

Way = Literal["dialled", "punched", "relayed"]


class Network(NamedTuple):
    """The connections that this peer would train with."""

    ways: dict[str, Way]  # the kind of each connection, by the peers' ids (base58)
    missed: tuple[str, ...]  # the ids of peers that it could not connect with

    @property
    def sentence(self) -> str:
        """The same in one sentence."""
        words_of_ways = {
            "dialled": "directly with",
            "punched": "through both routers with",
            "relayed": "through a member with",
        }
        said = []
        for way, words in words_of_ways.items():
            if peers := [short_name(peer) for peer, how in self.ways.items() if how == way]:
                said.append(f"{words} {', '.join(peers)}")
        how = f"You can train: {'; '.join(said)}." if said else "You are connected with no peer."
        missed = ", ".join(map(short_name, self.missed))
        return f"{how} Not connected in time: {missed}." if missed else how


def examine_ports(section: DhtSection) -> Check:
    """Check that this peer can listen on, and announce, the addresses that its user has chosen."""
    try:
        hosts, _, notes = addresses.read_listening(section.host_maddrs, section.announce_maddrs)
        addresses.require_free_ports(hosts)
    except SetupError as error:
        return Check("ports", "bad", error.message, "a port of its own", error.hint or "")
    return Check("ports", "fine", " ".join([f"{', '.join(hosts)} can be listened on.", *notes]))


def examine_members(invitation: Invitation) -> Check:
    """Check which addresses in an invitation answer."""
    tried = invitation.addresses
    knocks = addresses.knock_at_all(tried)
    answering = [address for address, trouble in knocks.items() if trouble is None]
    found = f"{len(answering)} of {len(tried)} addresses answer"
    if answering:
        return Check("members", "fine", found)
    said = "; ".join(addresses.what_answers(address, trouble) for address, trouble in knocks.items())
    fix = "ask for a fresh `trahiv join` line of any peer that is training"
    hosts = _hosts_of(tried)
    are_refused = any(isinstance(trouble, ConnectionRefusedError) for trouble in knocks.values())
    if not _has_route(hosts):
        said = "This machine has no route to any of them."
        fix = "connect it to a network"
    elif not are_refused:
        with ThreadPoolExecutor() as pool:
            # Office and hotel networks let the port of HTTPS through.
            if any(pool.map(_lets_https_out, hosts)):
                said += ". Their port 443 answers, so a firewall on the way lets nothing else out"
                fix = "have a member listen at --host-maddr /ip4/0.0.0.0/tcp/443, or use another network"
    return Check("members", "bad", f"{found}: {said}.", "one that answers", fix)


def _hosts_of(maddrs: Sequence[str]) -> set[str]:
    """Return the hosts of the multiaddrs that name a socket."""
    sockets = (addresses.socket_of(Multiaddr(maddr)) for maddr in maddrs)
    return {named.host for named in sockets if named}


def _has_route(hosts: set[str]) -> bool:
    for host in hosts:
        try:
            found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[0][4])  # sends nothing
                return True
        except OSError:
            continue
    return False


def _lets_https_out(host: str) -> bool:
    """Whether a host's HTTPS port answers, if only with a refusal."""
    try:
        socket.create_connection((host, 443), timeout=3.0).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True


def examine_reach(
    invitation: Invitation, section: DhtSection, folder: Path | None
) -> Iterator[Check | Network]:
    """Enter the swarm for some seconds; yield checks, and the `Network` that this peer would train in.

    `folder` is of an earlier run here with this swarm. Failures are yielded as checks, not raised.
    """
    with tempfile.TemporaryDirectory(prefix="trahiv-doctor-", ignore_cleanup_errors=True) as passing:
        credentials = visitor_credentials(folder, invitation)
        met = KnownPeers(None)
        own = Path(passing, "identity.key")
        peers = invitation.addresses
        try:
            with Node(section, own, peers, met=met, credentials=credentials, is_visitor=True) as node:
                if peers:
                    yield _clock()
                reach = node.known_reach(REACH_KNOWN_S)
                yield from _reach_of(reach, section.announce_maddrs)
                yield _connected(node)
                yield from _speeds(node)
        except NotAdmitted as error:
            yield Check("membership", "bad", error.message, "an invitation that is good", error.hint or "")
        except (SetupError, SwarmError) as error:
            yield Check("swarm", "bad", error.message, "to enter it", error.hint or "")


def _clock() -> Check:
    off = ahead_s()
    if abs(off) < 60.0:  # a clock that is further off also fails the hub's certificates
        return Check("clock", "fine", "as the swarm's")
    said = f"This machine's clock is {abs(off):.0f} s {'behind' if off > 0 else 'ahead of'} the swarm's."
    fix = "set it (on Linux: timedatectl set-ntp true); peers go by the swarm's, but downloads may fail"
    return Check("clock", "poor", said, "the same time", fix)


def _reach_of(reach: Reach, announced: Sequence[str]) -> Iterator[Check]:
    if reach.kind == "direct":
        at = ", ".join(f"{host}:{port}" for host, port in reach.places)
        yield Check("inbound", "fine", f"Members can dial this peer at {at}.")
    else:
        fix = "forward a TCP port of the router to this machine, and add --host-maddr /ip4/0.0.0.0/tcp/PORT"
        yield Check("inbound", "poor", reach.why, "to be dialled", fix)
    seen = [place for look in reach.looks for place in look.places]
    hosts = {host for host, _ in seen}
    told = _hosts_of(announced)
    if told and hosts and not told & hosts:
        said = f"{', '.join(sorted(told))} is announced, and members see {', '.join(sorted(hosts))}."
        yield Check("announced", "bad", said, "the same address", "correct --announce-maddr, or leave it out")
    if reach.kind == "direct":
        return
    if len(reach.looks) > 1 and len({port for _, port in seen}) > 1:
        said = "The router takes another port for each destination: it can't be punched through."
        fix = "nothing, as long as a member relays"
        yield Check("router", "poor", said, "the same port for all", fix)
    if reach.looks and not any(look.carries for look in reach.looks):
        said = "No member has room to relay to this peer."
        fix = "ask a member that can be dialled to raise swarm.relay"
        yield Check("relay", "poor", said, "one that has", fix)


async def connections(dht: hivemind.DHT, node: DHTNode) -> dict[str, Way]:
    """Return the kind of a node's connection with each peer, by id (base58); for `DHT.run_coroutine`."""
    del dht
    ways = await node.meeting.ways() if node.meeting else {}
    met = {peer.to_base58(): way for peer, way in ways.items()}
    connected = {one.peer_id.to_base58() for one in await node.protocol.p2p.list_peers()}
    return {peer: met.get(peer, "dialled") for peer in sorted(connected)}


def _connected(node: Node) -> Network:
    """Wait until all peers that publish an address are connected, or 8 s have passed."""
    until = time.monotonic() + 8.0
    while True:
        wanted = node.fetch(ADDRESSES_KEY).keys() - {node.peer_id}
        ways = {peer: way for peer, way in node.run(connections).items() if peer in wanted}
        if wanted <= ways.keys() or time.monotonic() > until:
            return Network(ways, tuple(sorted(wanted - ways.keys())))
        time.sleep(0.5)


async def _measured(dht: hivemind.DHT, node: DHTNode) -> tuple[str, float, float] | None:
    """Measure the link to one dialable member; return its id, and the bytes per second up and down."""
    del dht
    for peer in servers_of(node) if node.meeting else ():
        try:
            async with asyncio.timeout(8.0):  # at 2 Mbit/s a measurement takes this long
                return peer.to_base58(), *await node.meeting.measure(peer)
        except FAILED:
            break
    return None


def _speeds(node: Node) -> Iterator[Check]:
    if (found := node.run(_measured)) is not None:
        peer, up, down = found
        said = f"{up * 8e-6:.1f} Mbit/s to {short_name(peer)}, {down * 8e-6:.1f} Mbit/s back"
        yield Check("speed", "fine", said)
