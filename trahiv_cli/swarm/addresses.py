"""Multiaddrs: who can dial one, whether somebody listens there, and whether this peer may."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.errors import SetupError, Unreachable

Reach = Literal["internet", "local network", "this machine"]  # the farthest first
NOT_A_MULTIADDR = (ValueError, TypeError, LookupError)  # what `Multiaddr` raises of a text that is none
PROBE_TIMEOUT_S = 3.0
MAX_ADDRESS_CHARS = 256


class Socket(NamedTuple):
    """What a multiaddr over TCP or UDP names."""

    host: str
    port: int
    kind: socket.SocketKind


def reach_of(maddr: str) -> Reach:
    """Say which peers can dial a multiaddr. Of a router in front of the local network nothing is known."""
    read = Multiaddr(maddr)
    found = next((read[protocol] for protocol in ("ip4", "ip6") if protocol in read), None)
    if found is None or (address := ipaddress.ip_address(found)).is_global:  # None: a DNS name
        return "internet"
    return "this machine" if address.is_loopback else "local network"


def socket_of(maddr: Multiaddr) -> Socket | None:
    """Return what a multiaddr names; None: neither TCP nor UDP on a host."""
    host = next((maddr[p] for p in ("ip4", "ip6", "dns4", "dns6", "dns") if p in maddr), None)
    for protocol, kind in (("tcp", socket.SOCK_STREAM), ("udp", socket.SOCK_DGRAM)):
        if host is not None and protocol in maddr:
            return Socket(host, int(maddr[protocol]), kind)
    return None


def _names_a_peer(text: str) -> bool:
    with contextlib.suppress(*NOT_A_MULTIADDR):
        return "p2p" in Multiaddr(text)
    return False


def require_peer_address(address: str) -> None:
    """Refuse, as Unreachable, what is not a multiaddr, or does not say whose address it is."""
    if not _names_a_peer(address):
        raise Unreachable(
            f"{address!r} is not the multiaddr of a peer: that ends with `/p2p/<peer id>`.",
            hint="paste the whole line that `trahiv init` printed, or an address like "
            "/ip4/203.0.113.7/tcp/31337/p2p/Qm...",
        )


def is_address_of(peer_id: str, text: object) -> bool:
    """Say whether this is a multiaddr of at most `MAX_ADDRESS_CHARS` that ends with that peer's id."""
    if not isinstance(text, str) or len(text) > MAX_ADDRESS_CHARS:
        return False
    return text.endswith(f"/p2p/{peer_id}") and _names_a_peer(text)


def own_address(text: str, purpose: str) -> Multiaddr:
    """Read an address that this peer is told to use, say "to listen on"; SetupError if it is none."""
    try:
        return Multiaddr(text)
    except NOT_A_MULTIADDR as error:
        raise SetupError(
            f"{text!r} is not a multiaddr {purpose}.", hint="a multiaddr looks like /ip4/0.0.0.0/tcp/31337"
        ) from error


def require_free_ports(host_maddrs: Iterable[str]) -> None:
    """Refuse, as SetupError, to listen where another process does, or at an address of another machine.

    libp2p listens with SO_REUSEPORT, so a second peer on the same port starts without a word, and the
    kernel deals the connections of both to either.
    """
    for text in host_maddrs:
        named = socket_of(own_address(text, "to listen on"))
        if named is None or named.port == 0:
            continue
        family = socket.AF_INET6 if ":" in named.host else socket.AF_INET
        with socket.socket(family, named.kind) as probe:
            try:
                if named.kind is socket.SOCK_STREAM:  # connections that are closing don't keep a port
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((named.host, named.port))
                if named.kind is socket.SOCK_STREAM:
                    probe.listen(1)
            except OSError as error:
                is_taken = error.errno == errno.EADDRINUSE
                reason = f"port {named.port} is already in use" if is_taken else error.strerror
                raise SetupError(
                    f"Can't listen on {text}: {reason}.",
                    hint="choose another port with --host-maddr, or 0 for any free one",
                ) from error


def answering_of(addresses: Iterable[str]) -> list[str]:
    """Knock at all addresses at once; return those where somebody listens, or where that can't be told."""
    addresses = list(dict.fromkeys(addresses))
    with ThreadPoolExecutor(max_workers=len(addresses) or 1) as pool:
        found = pool.map(knock, addresses)
        return [address for address, trouble in zip(addresses, found, strict=True) if trouble is None]


def what_answers(address: str, found_before: OSError | None = None) -> str:
    """Knock at an address that p2pd could not reach, unless that was done, and say what is wrong there."""
    named = socket_of(Multiaddr(address))
    if named is None or named.kind is not socket.SOCK_STREAM:
        return f"{address}: no answer"
    match found_before or knock(address):
        case None:
            found = "something listens there, but not this peer, or it hangs"
        case ConnectionRefusedError():
            found = f"nothing listens on port {named.port} (has that peer stopped?)"
        case trouble:
            why = trouble.strerror or "no answer"
            found = f"{named.host} can't be reached ({why}): is the address public, the port forwarded?"
    return f"{address}: {found}"


def knock(address: str) -> OSError | None:
    """Connect to an address over TCP; return what went wrong. Of another address nothing can be told."""
    named = socket_of(Multiaddr(address))
    if named is not None and named.kind is socket.SOCK_STREAM:
        try:
            socket.create_connection((named.host, named.port), timeout=PROBE_TIMEOUT_S).close()
        except OSError as error:
            return error
    return None
