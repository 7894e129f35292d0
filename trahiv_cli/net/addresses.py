"""Multiaddrs: which peers can dial one, whether a process listens there, and whether this peer may."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Literal, NamedTuple

import psutil

from trahiv_cli.errors import SetupError, Unreachable
from trahiv_cli.net.borrowed.multiaddr import Multiaddr

Reach = Literal["internet", "local network", "this machine"]  # the farthest first
NOT_A_MULTIADDR = (ValueError, TypeError, LookupError)  # errors of `Multiaddr` for an invalid text


class Socket(NamedTuple):
    """The socket of a multiaddr over TCP or UDP."""

    host: str
    port: int
    kind: socket.SocketKind

    @property
    def is_everywhere(self) -> bool:
        """Whether it stands for all addresses of this machine."""
        return self.host in ("0.0.0.0", "::")


def reach_of(maddr: str) -> Reach:
    """Return which peers can dial a multiaddr. A router in front of the local network is not considered."""
    read = Multiaddr(maddr)
    found = next((read[protocol] for protocol in ("ip4", "ip6") if protocol in read), None)
    if found is None or (address := ipaddress.ip_address(found)).is_global:  # None: a DNS name
        return "internet"
    return "this machine" if address.is_loopback else "local network"


def socket_of(maddr: object) -> Socket | None:
    """Return the socket of a multiaddr, or of its text; None if it is neither TCP nor UDP on a host."""
    read = Multiaddr(str(maddr))
    host = next((read[p] for p in ("ip4", "ip6", "dns4", "dns6", "dns") if p in read), None)
    for protocol, kind in (("tcp", socket.SOCK_STREAM), ("udp", socket.SOCK_DGRAM)):
        if host is not None and protocol in read:
            return Socket(host, int(read[protocol]), kind)
    return None


def _names_a_peer(text: str) -> bool:
    with contextlib.suppress(*NOT_A_MULTIADDR):
        return "p2p" in Multiaddr(text)
    return False


def require_peer_address(address: str) -> None:
    """Raise Unreachable unless an address is a multiaddr with the id of a peer."""
    if not _names_a_peer(address):
        raise Unreachable(
            f"{address!r} is not the multiaddr of a peer: that ends with `/p2p/<peer id>`.",
            hint="paste the whole line that `trahiv init` printed, or an address like "
            "/ip4/203.0.113.7/tcp/31337/p2p/Qm...",
        )


def is_address_of(peer_id: str, text: object) -> bool:
    """Return whether a text is a multiaddr of at most 256 characters that ends with this peer's id."""
    if not isinstance(text, str) or len(text) > 256:
        return False
    return text.endswith(f"/p2p/{peer_id}") and _names_a_peer(text)


class Listening(NamedTuple):
    """The addresses on which p2pd listens and that it announces, and notes on changes to the user's input."""

    hosts: list[str]  # multiaddrs on which it listens
    announced: list[str]  # multiaddrs that it gives to others; empty: the ones in `hosts`
    notes: list[str]

    @property
    def is_everywhere(self) -> bool:
        """Whether p2pd listens on all addresses of this machine, and its user announces no others."""
        places = map(socket_of, self.hosts)
        return not self.announced and any(place and place.is_everywhere for place in places)


def read_listening(host_maddrs: Sequence[str], announce_maddrs: Sequence[str]) -> Listening:
    """Read the multiaddrs on which a user wants to listen, and the ones to announce to others.

    An address that this machine does not have belongs to its router, or to its cloud: others get
    it, and this machine listens on the same port of all its own addresses.

    Raises:
        SetupError: p2pd can't listen on one of them, or an announced one has no host or port, or a transport
            on which this peer does not listen.
    """
    notes: list[str] = []
    hosts = []
    announced = [_read(text, "to announce", notes) for text in announce_maddrs]
    for text in host_maddrs:
        maddr = _read(text, "to listen on", notes)
        protocol, host, transport = maddr[1:].split("/", 2)
        if not is_of_this_machine(host):
            announced.append(maddr)
            everywhere = "/ip6/::" if protocol in ("ip6", "dns6") else "/ip4/0.0.0.0"
            maddr = f"{everywhere}/{transport}"
            notes.append(
                f"{announced[-1]} is not an address of this machine: this peer listens on {maddr}, and "
                "announces that one to others."
            )
        hosts.append(maddr)
    kinds = {place.kind for text in hosts if (place := socket_of(text))}
    for text in announced:
        place = socket_of(text)
        assert place is not None
        if place.port == 0 or place.is_everywhere:
            raise SetupError(
                f"{text} can't be announced: others need the address and the port that lead to this machine.",
                hint="name the port that the router forwards, as in /ip4/203.0.113.7/tcp/31337",
            )
        if place.kind not in kinds:
            raise SetupError(
                f"{text} can't be announced: this peer does not listen on that transport.",
                hint=f"add --host-maddr /ip4/0.0.0.0/{text[1:].split('/', 2)[2]}",
            )
    return Listening(list(dict.fromkeys(hosts)), list(dict.fromkeys(announced)), notes)


def _read(text: str, purpose: str, notes: list[str]) -> str:
    """Return a multiaddr in the form that p2pd knows, and note a change; SetupError if it is invalid."""
    modern = re.sub("/quic(?=/|$)", "/quic-v1", text)
    try:
        host, *transport = (protocol.name for protocol in Multiaddr(modern).protocols())
        # p2pd listens on these transports alone.
        is_known = transport in (["tcp"], ["tcp", "ws"], ["udp", "quic-v1"])
        if host not in ("ip4", "ip6", "dns", "dns4", "dns6") or not is_known:
            raise ValueError
    except NOT_A_MULTIADDR as error:
        raise SetupError(
            f"{text!r} is not a multiaddr {purpose}.",
            hint="write /ip4/0.0.0.0/tcp/31337; instead of /tcp/PORT p2pd also knows /udp/PORT/quic-v1 and "
            "/tcp/PORT/ws, and no other transport",
        ) from error
    if modern != text:
        notes.append(f"{text} means {modern} here: p2pd does not know the QUIC before version 1.")
    return modern


def of_all_interfaces(maddrs: Iterable[str]) -> set[str]:
    """Return the loopback multiaddrs, rewritten for each address of this machine that others may reach.

    p2pd listens on all of them, and reports only the address of the default route.
    """
    stats = psutil.net_if_stats()
    found = set()
    for name, entries in psutil.net_if_addrs().items():
        if not (name in stats and stats[name].isup):
            continue
        for entry in entries:
            loopback = {socket.AF_INET: "/ip4/127.0.0.1/", socket.AF_INET6: "/ip6/::1/"}.get(entry.family)
            if loopback is None or "%" in entry.address:  # a link-local address
                continue
            address = ipaddress.ip_address(entry.address)
            if not (address.is_loopback or address.is_link_local):
                start = f"/ip{address.version}/{address}/"
                found |= {maddr.replace(loopback, start, 1) for maddr in maddrs if maddr.startswith(loopback)}
    return found


def is_of_this_machine(host: str) -> bool:
    """Return whether this machine can listen on an IP address, or on `localhost`; False for other names."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    if address.is_unspecified or address.is_loopback:
        return True
    try:
        with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL  # `require_free_ports` explains other errors
    return True


def require_free_ports(host_maddrs: Iterable[str]) -> None:
    """Raise SetupError if another process listens on one of the ports, or if the system forbids listening.

    libp2p listens with SO_REUSEPORT, so a second peer on the same port starts without an error, and the
    kernel distributes the connections of both among them.
    """
    for text in host_maddrs:
        named = socket_of(text)
        if named is None or named.port == 0:
            continue
        try:
            with socket.socket(_family(named.host), named.kind) as probe:
                if named.kind is socket.SOCK_STREAM:  # connections that are closing don't keep a port
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((named.host, named.port))
                if named.kind is socket.SOCK_STREAM:
                    probe.listen(1)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            reason = f"port {named.port} is already in use" if is_taken else error.strerror or str(error)
            raise SetupError(
                f"Can't listen on {text}: {reason}.",
                hint="choose another port with --host-maddr: one from 1024 on, or 0 for any free one",
            ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def knock_at_all(addresses: Iterable[str]) -> dict[str, OSError | None]:
    """Knock at all addresses at once; return the result of `knock` for each."""
    tried = list(dict.fromkeys(addresses))
    with ThreadPoolExecutor(max_workers=len(tried) or 1) as pool:
        return dict(zip(tried, pool.map(knock, tried), strict=True))


def answering_of(addresses: Iterable[str]) -> list[str]:
    """Knock at all addresses; return the addresses where `knock` finds no error."""
    return [address for address, trouble in knock_at_all(addresses).items() if trouble is None]


def are_refused(addresses: Iterable[str]) -> bool:
    """Knock at all addresses at once; return whether all refuse connections, as soon as that is known."""
    tried = dict.fromkeys(addresses)
    pool = ThreadPoolExecutor(max_workers=len(tried) or 1)
    knocks = [pool.submit(knock, address) for address in tried]
    try:
        return all(isinstance(done.result(), ConnectionRefusedError) for done in as_completed(knocks))
    finally:
        pool.shutdown(wait=False)


def unreachable(troubles: Mapping[str, OSError | None]) -> Unreachable:
    """Return the error that no peer answers; `troubles` has the result of `knock` for each address."""
    knocks = "\n".join(f"  {what_answers(*one)}" for one in troubles.items())
    return Unreachable(
        f"No peer could be reached; nothing was changed.\n{knocks}",
        hint="ask for a fresh `trahiv join` line of any peer that is training",
    )


def what_answers(address: str, trouble: OSError | None) -> str:
    """Explain why p2pd could not reach an address, from the result of `knock`."""
    named = socket_of(address)
    if named is None or named.kind is not socket.SOCK_STREAM:
        return f"{address}: no answer"
    match trouble:
        case None:
            found = "something else listens there, or this peer does not answer"
        case ConnectionRefusedError():
            found = f"nothing listens on port {named.port} (has that peer stopped?)"
        case _:
            why = trouble.strerror or "no answer"
            found = f"{named.host} can't be reached ({why}): is the address public, the port forwarded?"
    return f"{address}: {found}"


def knock(address: str) -> OSError | None:
    """Connect to an address over TCP; return the error, if any. Return None for an address without TCP."""
    named = socket_of(address)
    if named is not None and named.kind is socket.SOCK_STREAM:
        try:
            socket.create_connection((named.host, named.port), timeout=3.0).close()
        except OSError as error:
            return error
    return None
