"""Byte streams between two peers: untrusted messages, relaying, rate limits, and dialling."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

from hivemind.p2p import P2P
from hivemind.utils import MSGPackSerializer

from trahiv_cli.net.addresses import reach_of, socket_of
from trahiv_cli.wire import unpacked

MESSAGE_S = 15.0  # for a message to arrive
PIECE_BYTES = 2**16  # of a stream, which are read and sent at once
MAX_PLACES = 8  # that a stranger may name
HELLO = b"\x13/multistream/1.0.0\n"  # the first bytes of either side of a libp2p connection

# An address for TCP: host and port.
Place = tuple[str, int]


class NotMet(ConnectionError):
    """Two peers did not meet; the message has the reason."""


class Listens(NotMet):
    """A peer's libp2p listens at the place of a knock, so p2pd can dial it."""


class End(NamedTuple):
    """One end of a stream of bytes."""

    reader: asyncio.StreamReader
    writer: Any  # an `asyncio.StreamWriter`, or p2pd's

    async def send(self, *content: Any) -> None:
        """Send a message that `receive` reads."""
        await P2P.send_raw_data(MSGPackSerializer.dumps(content), self.writer)

    async def receive(self) -> list[Any]:
        """Receive a message; NotMet if it has only the reason of a failure, or can't be read."""
        async with asyncio.timeout(MESSAGE_S):
            packed = await P2P.receive_raw_data(self.reader)
        with contextlib.suppress(ValueError):
            match unpacked(packed):
                case [str(why)]:
                    raise NotMet(why)
                case [*content]:
                    return content
        raise NotMet("a message that can't be read")

    async def hear(self, word: bytes) -> None:
        """Wait for a word; NotMet if another one comes."""
        async with asyncio.timeout(MESSAGE_S):
            if await self.reader.readexactly(len(word)) != word:
                raise NotMet("a word that was not expected")

    async def first(self) -> tuple[End, bytes]:
        """Wait for the first bytes; return this end and the bytes. NotMet if the stream is closed."""
        if not (chunk := await self.reader.read(PIECE_BYTES)):
            raise NotMet("it was closed")
        return self, chunk


class Pace:
    """Limits the rate and the total of all streams that share it, of any event loop.

    Args:
        rate: bytes a second; None: no limit.
        most: bytes altogether; None: no limit.
    """

    def __init__(self, rate: float | None = None, most: int | None = None) -> None:
        self.rate = rate
        self._left = most
        self._free_at = 0.0
        self._lock = threading.Lock()

    def set_rate(self, rate: float | None) -> None:
        """Limit the bytes a second from now on; None: no limit."""
        self.rate = rate

    async def take(self, num_bytes: int, *, is_urgent: bool = False) -> None:
        """Wait until `num_bytes` more may pass; NotMet if they exceed the total.

        Urgent bytes do not wait, but later bytes wait for them as well.
        """
        if self._left is not None:
            self._left -= num_bytes
            if self._left < 0:
                raise NotMet("more than is passed on here")
        if self.rate:
            now = asyncio.get_running_loop().time()  # the same in all event loops
            with self._lock:
                self._free_at = free_at = max(self._free_at, now) + num_bytes / self.rate
            if not is_urgent:
                await asyncio.sleep(free_at - now)


# For all bytes that this process sends to other peers, and receives from them.
UPLOAD = Pace()
DOWNLOAD = Pace()


async def join(one: End, other: End, *paces: Pace, idle_s: float = 60.0) -> None:
    """Pass bytes on between two streams, no faster than each pace, until one ends or both are idle.

    Then both are closed. libp2p sends something every 30 s, so a stream that is silent for `idle_s` is idle.
    """
    now = asyncio.get_running_loop().time

    async def carry(source: End, target: End) -> None:
        while chunk := await source.reader.read(PIECE_BYTES):
            idle.reschedule(now() + idle_s)
            await asyncio.gather(*(pace.take(len(chunk)) for pace in paces))
            target.writer.write(chunk)
            await target.writer.drain()

    both: list[asyncio.Task[None]] = []
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(idle_s) as idle:
                both += map(asyncio.create_task, (carry(one, other), carry(other, one)))
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        close([one, other])


def close(ends: Iterable[End]) -> None:
    """Close streams, after all bytes that were written to them are sent."""
    for end in ends:
        end.writer.close()


async def first_of(tries: Iterable[Coroutine[Any, Any, Any]], within_s: float) -> Any:
    """Return the first result of several tries, and cancel the others; None if all fail or take too long."""
    pending = {asyncio.create_task(one) for one in tries}
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    try:
        while pending and (left := until - loop.time()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if good := [task for task in done if task.exception() is None]:
                return good[0].result()
        return None
    finally:
        for task in pending:
            task.cancel()


def maddr_of(place: Place) -> str:
    """Write a place as a multiaddr, without a peer id."""
    return f"/ip{6 if is_ipv6(place) else 4}/{place[0]}/tcp/{place[1]}"


def is_ipv6(place: Place) -> bool:
    """Return whether a place has an IPv6 address."""
    return ":" in place[0]


def places_of(maddrs: Iterable[str], *, is_near: bool) -> tuple[Place, ...]:
    """Return the TCP places of several multiaddrs, without this machine's unless `is_near`."""
    places = []
    for maddr in maddrs:
        named = socket_of(maddr)
        if named is None or named.kind is not socket.SOCK_STREAM or not is_ip(named.host):
            continue
        if is_near or reach_of(maddr) != "this machine":
            places.append((named.host, named.port))
    return tuple(dict.fromkeys(places))


def places_at(seen: Sequence[Place], own: Sequence[Place], others: Sequence[Place]) -> list[Place]:
    """List where to dial a peer: the places where it is `seen`, its own ports there, and its `own` places.

    Its own ports are added because libp2p does not open every connection from its listening port. Own places
    in a local network count only if the peer that is to dial them is seen (`others`) at the same address:
    otherwise they would lead into the network of that peer.
    """
    ports = [(at[0], place[1]) for at in seen for place in own if is_ipv6(at) == is_ipv6(place)]
    are_near = not {host for host, _ in seen}.isdisjoint(host for host, _ in others)
    told = [place for place in own if are_near or is_global(place)]
    return list(dict.fromkeys([*seen, *ports, *told]))[:MAX_PLACES]


def read_places(sent: Iterable[Any]) -> tuple[Place, ...]:
    """Read the first `MAX_PLACES` places that a stranger sent; ValueError if one is invalid, as a name is."""
    places = []
    for one in list(sent)[:MAX_PLACES]:
        match one:
            case [str(host), int(port)] if 0 < port < 2**16 and is_ip(host) and "%" not in host:
                places.append((host, port))
            case _:
                raise ValueError("not places")
    return tuple(places)


def is_ip(host: str) -> bool:
    """Return whether a host is an IP address, and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_elsewhere(place: Place) -> bool:
    """Return whether a place is on another machine, and on one machine only."""
    address = ipaddress.ip_address(place[0])
    return not (
        address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast
    )


def is_global(place: Place) -> bool:
    """Return whether a place can be dialled over the internet, judging by its address."""
    return ipaddress.ip_address(place[0]).is_global


async def dial_from(port: int, place: Place) -> End:
    """Open a TCP connection from a port on which p2pd listens; OSError if it is refused.

    libp2p listens with SO_REUSEPORT, so other processes of the same user may use the port as well.
    """
    family = socket.AF_INET6 if is_ipv6(place) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as dialling:
        dialling.setblocking(False)
        dialling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dialling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: ends a dead connection
            dialling.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)
        dialling.bind(("", port))
        await asyncio.get_running_loop().sock_connect(dialling, place)
        return End(*await asyncio.open_connection(sock=dialling.dup()))


async def knock(port: int, place: Place, token: bytes, opened: list[End], again_s: float) -> End:
    """Dial a place from a port until the other side sends the token, too; list each connection in `opened`.

    A place that refuses is dialled again after `again_s` seconds. libp2p, which dials from the same ports,
    may answer instead; raises `Listens` if it does so three times: fewer answers may be to its own dials.
    """
    heard = 0
    while heard < 3:
        with contextlib.suppress(OSError, EOFError):
            end = await dial_from(port, place)
            opened.append(end)
            end.writer.write(token)
            if (answer := await end.reader.readexactly(len(token))) == token:
                return end
            end.writer.close()
            heard += HELLO.startswith(answer)
        await asyncio.sleep(again_s)
    raise Listens("it can be dialled")


async def first_said(knocking: Coroutine[Any, Any, End]) -> tuple[End, bytes]:
    """Wait for the first bytes after a successful knock; see `End.first`."""
    return await (await knocking).first()


async def dial_back(place: Place) -> Place:
    """Dial a place from a new port, to which no peer has sent anything; return the place.

    OSError or EOFError unless libp2p answers there.
    """
    end = End(*await asyncio.open_connection(*place))
    with contextlib.closing(end.writer):
        end.writer.write(HELLO)
        if await end.reader.readexactly(len(HELLO)) != HELLO:
            raise NotMet("something else listens there")
        return place
