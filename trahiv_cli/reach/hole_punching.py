"""Two peers that can't dial each other meet through a member that both are connected with.

1. The caller asks this member, the middle, for the other peer. The middle calls that peer, and tells each of
   the two at which places it sees the other one. From then on it only passes their bytes on.
2. Both dial these places at the same moment, each from the port on which it listens. A router takes a packet
   from there for an answer to the packet that it has just let out, and the two SYNs make one connection
   (simultaneous open: RFC 9293 section 3.5, RFC 5128 section 3.4). The peers are then `punched`.
3. If the routers do not let that happen within 4 s, the streams through the middle stay, provided that
   the middle relays for others. The peers are then `relayed`.
4. The caller's p2pd dials a local port of this process, which passes the bytes on to the other peer's process
   and p2pd. So libp2p proves to each peer the identity of the other, and encrypts their traffic; the middle
   can't read it.

Measured over the internet, hole punching succeeds as often with TCP as with QUIC, in 70 % (arXiv:2510.27500).
This module does not use QUIC: p2pd's QUIC connections stall forever after some hundred broken streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from hivemind.p2p import PeerID
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.members.door import GuardedP2P
from trahiv_cli.members.records import peer_from
from trahiv_cli.net.addresses import socket_of
from trahiv_cli.net.byte_streams import (
    DOWNLOAD,
    MAX_PLACES,
    MESSAGE_S,
    UPLOAD,
    End,
    Listens,
    NotMet,
    Pace,
    Place,
    close,
    dial_back,
    first_of,
    first_said,
    is_elsewhere,
    is_ipv6,
    join,
    knock,
    maddr_of,
    places_at,
    places_of,
    read_places,
)
from trahiv_cli.net.streams import UNREACHABLE

logger = get_logger(__name__)

Way = Literal["punched", "relayed"]

# Handlers of streams.
LOOK, MEASURE, SEEK, ANSWER = (f"Meeting.rpc_{name}" for name in ("look", "measure", "seek", "answer"))
FAILED = (*UNREACHABLE, OSError, ValueError, EOFError)  # the errors of a failed conversation

# Of the random part that each peer contributes to the token by which they recognize each other.
TOKEN_BYTES = 16
MEASURED_BYTES = 2**20
PING = b"p"
GO = b"g"


@dataclass(frozen=True)
class MeetingLimits:
    """The times and limits of a `Meeting`."""

    punch_s: float = 4.0  # both peers dial for this time: the kernel sends a SYN again after 1 s and 3 s
    punch_again_s: float = 2.0  # the same after a failure
    again_s: float = 0.1  # between two tries to dial a place that refuses
    # Circuits through this member: of all callers, and of one.
    relayed_at_once: int = 64
    relayed_for_one: int = 8
    # Callers that this peer dials at the same time, at `MAX_PLACES` each: from all middles, and from one.
    answered_at_once: int = 16
    answered_for_one: int = 4
    # Bytes that a pair may exchange through a member that does not relay, to agree on when it dials.
    talk_bytes: int = 1024


class Seen(NamedTuple):
    """A member's answer to a peer that asked it for a look."""

    places: tuple[Place, ...]  # the sources of the peer's connections
    dialled: tuple[Place, ...]  # where the member could dial it: at its own port there
    carries: bool  # whether the member has room to relay between this peer and another one


class Meeting:
    """Serves and asks for meetings; a node has one in the DHT's process (`reachability.open_meetings`).

    Args:
        p2p: calls peers and serves them, behind the door.
        listens: the places at which this machine can dial this peer's p2pd, IPv4 first.
        relay_rate: bytes a second that this peer relays for others; 0: it relays nothing, None: no limit.
        punches: whether to try hole punching; if not, all meetings are relayed.
        limits: times and limits.
    """

    def __init__(
        self,
        p2p: GuardedP2P,
        listens: Sequence[Place],
        relay_rate: float | None,
        *,
        punches: bool = True,
        limits: MeetingLimits = MeetingLimits(),  # noqa: B008
    ) -> None:
        self._p2p = p2p
        self._limits = limits
        self._listens = listens
        self._punches = punches
        self._ports = {is_ipv6(place): place[1] for place in reversed(listens)}
        self._carries = relay_rate != 0
        self._pace = Pace(relay_rate)
        self.may_be_relayed = False  # not before it is known whether others can dial this peer
        self._circuits: Counter[PeerID] = Counter()  # that this peer relays, by caller
        self._met: dict[int, Way] = {}  # meetings, by the port of 127.0.0.1 to which p2pd is connected
        self._sought: set[PeerID] = set()
        self._tried_in_vain: set[PeerID] = set()  # peers whose next punch is shorter
        self._answered: Counter[PeerID] = Counter()  # callers, by the middle, which may make them up
        self._tasks: set[asyncio.Task[Any]] = set()  # that serve, or pass bytes on
        self._is_closed = False

    async def open(self) -> None:
        """Add the handlers of this class to the P2P instance."""
        served = {LOOK: self._look, MEASURE: self._measured, SEEK: self._pass_on, ANSWER: self._answer}
        for name, handler in served.items():
            await self._p2p.add_binary_stream_handler(name, partial(self._serve, handler))

    def let_relay(self) -> None:
        """Allow relayed meetings with this peer from now on."""
        self.may_be_relayed = True

    async def close(self) -> None:
        """Cancel all tasks that serve or relay, before the event loop is closed."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Cancel the current task in the block when `close` is called."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_closed:  # otherwise asyncio/streams.py:249 would print it (Python 3.11)
                raise
        finally:
            self._tasks.discard(task)

    async def ways(self) -> dict[PeerID, Way]:
        """Return the peers, as libp2p has proven, that are connected by a meeting, and how they are."""
        connections = await self._p2p.list_peers()
        return {one.peer_id: way for one in connections if (way := self._way_of(one)) is not None}

    def _way_of(self, connection: Any) -> Way | None:
        named = map(socket_of, connection.addrs)
        ports = [one.port for one in named if one and one.host == "127.0.0.1"]
        return next((self._met[port] for port in ports if port in self._met), None)

    async def _serve(self, handler: Any, info: Any, reader: asyncio.StreamReader, writer: Any) -> None:
        """Serve a stream; send the caller the reason if that fails."""
        end = End(reader, writer)
        with contextlib.closing(writer), self._until_closed():
            try:
                await handler(info.peer_id, end)
            except FAILED as error:
                logger.debug("a meeting failed: %r", error)
                with contextlib.suppress(OSError):
                    await end.send(str(error) or repr(error))

    @contextlib.asynccontextmanager
    async def _calling(self, member: PeerID, handler: str) -> AsyncIterator[list[End]]:
        """Open a stream; when the block ends, close all streams that are then in the list."""
        async with asyncio.timeout(5.0):  # libp2p would spend minutes on dialling a machine that is gone
            _, reader, writer = await self._p2p.call_binary_stream_handler(member, handler)
        opened = [End(reader, writer)]
        try:
            yield opened
        finally:
            close(opened)

    # -- looks from outside -------------------------------------------------------------------------

    async def look(self, member: PeerID) -> Seen:
        """Ask a member how it sees this peer, and whether it can dial it; one of `FAILED` if that fails."""
        async with asyncio.timeout(5.0), self._calling(member, LOOK) as [end]:
            await end.send(self._listens)
            match await end.receive():
                case [[*places], [*dialled], bool(carries)]:
                    seen = read_places(places)
                    own = {(host, self._ports.get(is_ipv6((host, 0)))) for host, _ in seen}
                    return Seen(seen, tuple(one for one in read_places(dialled) if one in own), carries)
        raise NotMet("an answer that can't be read")

    async def _look(self, caller: PeerID, end: End) -> None:
        """Answer a look. Dial only the machine that asks: it must not direct this one at other machines."""
        match await end.receive():
            case [[*listens]]:
                ports = {is_ipv6(place): place[1] for place in reversed(read_places(listens))}
                places = (await self._seen(is_near=True)).get(caller, ())
                own = [(place[0], ports[is_ipv6(place)]) for place in places if is_ipv6(place) in ports]
                dialled = await first_of(map(dial_back, dict.fromkeys(own)), within_s=2.0)
                await end.send(places, [dialled] if dialled else [], self._has_room)
            case _:
                raise NotMet("a request that can't be read")

    async def _seen(self, *, is_near: bool = False) -> dict[PeerID, tuple[Place, ...]]:
        """Return the sources of peers' connections, as p2pd reports them; a meeting's connection has none.

        With `is_near`, places on this machine count, too: only peers on it can dial them.
        """
        seen: dict[PeerID, tuple[Place, ...]] = {}
        for one in await self._p2p.list_peers():
            places = places_of(map(str, one.addrs), is_near=is_near and self._way_of(one) is None)
            seen[one.peer_id] = tuple(dict.fromkeys((*seen.get(one.peer_id, ()), *places)))[:MAX_PLACES]
        return seen

    async def _own_places(self) -> tuple[Place, ...]:
        own = await self._p2p.get_visible_maddrs(latest=True)
        return places_of(map(str, own), is_near=False)[:MAX_PLACES]

    # -- the speed of the link to a member ----------------------------------------------------------

    async def measure(self, member: PeerID) -> tuple[float, float]:
        """Measure the bytes a second to a member and back, with `MEASURED_BYTES`; raises one of `FAILED`."""
        clock = asyncio.get_running_loop().time
        async with self._calling(member, MEASURE) as [end]:
            began = clock()
            await end.send(bytes(MEASURED_BYTES))
            await end.receive()
            turned = clock()
            await end.send()
            await end.receive()
            return MEASURED_BYTES / (turned - began), MEASURED_BYTES / (clock() - turned)

    async def _measured(self, _: PeerID, end: End) -> None:
        await end.receive()
        await end.send()
        await end.receive()
        await end.send(bytes(MEASURED_BYTES))

    # -- the middle ---------------------------------------------------------------------------------

    @property
    def _has_room(self) -> bool:
        return self._carries and self._circuits.total() < self._limits.relayed_at_once

    async def _pass_on(self, caller: PeerID, end: End) -> None:
        match await end.receive():
            case [bytes(sought), [*own], bytes(token)] if len(token) == TOKEN_BYTES:
                peer, seen = peer_from(sought), await self._seen()
            case _:
                raise NotMet("a request that can't be read")
        if peer not in seen or peer in await self.ways() or peer == caller:
            raise NotMet("that peer is not connected here")
        here = seen.get(caller, ())
        there = seen[peer]
        has_room = self._has_room and self._circuits[caller] < self._limits.relayed_for_one
        self._circuits[caller] += has_room  # reserved before the other peer answers
        try:
            async with self._calling(peer, ANSWER) as [other]:
                await other.send(caller.to_bytes(), places_at(here, read_places(own), there), token)
                match await other.receive():
                    case [[*theirs], bool(may_be_relayed), bytes(more)]:
                        carries = has_room and may_be_relayed
                        await end.send(places_at(there, read_places(theirs), here), carries, more)
                    case _:
                        raise NotMet("that peer's answer can't be read")
                limits = (self._pace, DOWNLOAD, UPLOAD) if carries else (Pace(most=self._limits.talk_bytes),)
                await join(end, other, *limits)
        finally:
            self._circuits -= Counter({caller: has_room})  # removes a caller that has none left

    # -- the two ------------------------------------------------------------------------------------

    async def meet(self, peer: PeerID, middles: Sequence[PeerID]) -> Way | None:
        """Connect with a peer through one of several members; NotMet says why this failed with each.

        Return None if one of the two has dialled the other meanwhile.
        """
        if peer in self._sought:
            raise NotMet("it is being met")
        self._sought.add(peer)
        reasons = []
        try:
            for middle in middles[:3]:
                try:
                    return await self._meet_through(peer, middle)
                except FAILED as error:
                    reasons.append(f"through {middle}: {error}")
        finally:
            self._sought.discard(peer)
        raise NotMet("; ".join(reasons) or "no member can introduce the two")

    async def _meet_through(self, peer: PeerID, middle: PeerID) -> Way | None:
        token = secrets.token_bytes(TOKEN_BYTES)
        loop = asyncio.get_running_loop()
        async with self._calling(middle, SEEK) as opened:
            [through] = opened
            await through.send(peer.to_bytes(), await self._own_places(), token)
            match await through.receive():
                case [[*theirs], bool(carries), bytes(more)] if len(more) == TOKEN_BYTES:
                    places = read_places(theirs)
                    is_relayed = carries and self.may_be_relayed
                case _:
                    raise NotMet("an answer that can't be read")
            # The other peer begins when it receives `GO`, half a round trip later; so this one waits as long.
            asked_at = loop.time()
            through.writer.write(PING)
            await through.hear(PING)
            half_s = (loop.time() - asked_at) / 2
            through.writer.write(GO)
            await through.writer.drain()
            await asyncio.sleep(half_s)
            limits = self._limits
            punch_s = limits.punch_again_s if peer in self._tried_in_vain else limits.punch_s
            end = await first_of(self._knocks(peer, places, token + more, opened), punch_s)
            way: Way = "punched"
            if end is None:
                if peer in await self._seen():
                    return None
                if not is_relayed:
                    self._tried_in_vain ^= {peer}
                    raise NotMet("the routers let neither of the two in, and nothing is relayed, or not yet")
                end = through
                way = "relayed"
            self._tried_in_vain.discard(peer)
            if await self._dial(peer, end, way):
                opened.remove(end)
            return way

    async def _dial(self, peer: PeerID, end: End, way: Way) -> bool:
        """Ask p2pd to dial a port of this process that leads to the other peer; return whether it did.

        It does not if the two are connected already.
        """
        is_dialled = False

        async def carry(reader: asyncio.StreamReader, writer: Any) -> None:
            nonlocal is_dialled
            is_dialled = True
            server.close()
            with self._until_closed():
                await self._carry(End(reader, writer), port, end, way)

        server = await asyncio.start_server(carry, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            async with asyncio.timeout(MESSAGE_S):
                await self._p2p._client.connect(peer, [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")])
        finally:
            server.close()
        return is_dialled

    async def _answer(self, middle: PeerID, through: End) -> None:
        match await through.receive():
            case [bytes(caller), [*theirs], bytes(token)] if len(token) == TOKEN_BYTES:
                peer = peer_from(caller)
                places = read_places(theirs)
            case _:
                raise NotMet("a request that can't be read")
        is_full = self._answered.total() >= self._limits.answered_at_once
        if is_full or self._answered[middle] >= self._limits.answered_for_one:
            raise NotMet("too many other meetings")
        opened: list[End] = []
        try:
            self._answered[middle] += 1
            try:
                first = await self._met_by(peer, places, token, through, opened)
            finally:
                self._answered -= Counter([middle])  # removes a middle that has none left
            if first is not None:
                end, chunk = first
                near = End(*await asyncio.open_connection(*self._listens[0]))
                near.writer.write(chunk)
                port = near.writer.get_extra_info("sockname")[1]
                await self._carry(near, port, end, "relayed" if end is through else "punched")
        finally:
            close(opened)

    async def _met_by(
        self, peer: PeerID, places: Sequence[Place], token: bytes, through: End, opened: list[End]
    ) -> tuple[End, bytes] | None:
        """Wait for the caller's first bytes on its chosen connection; list each connection in `opened`."""
        more = secrets.token_bytes(TOKEN_BYTES)
        await through.send(await self._own_places(), self.may_be_relayed, more)
        await through.hear(PING)
        through.writer.write(PING)
        await through.hear(GO)
        tries = [first_said(one) for one in self._knocks(peer, places, token + more, opened)]
        first: tuple[End, bytes] | None = await first_of(
            [*tries, through.first()], self._limits.punch_s + MESSAGE_S
        )
        return first

    def _knocks(self, peer: PeerID, places: Sequence[Place], token: bytes, opened: list[End]) -> list[Any]:
        """Dial places that others named, and send a word there that neither of the two can choose alone."""
        word = hashlib.sha256(b"trahiv meeting " + token).digest()[:TOKEN_BYTES]
        return [
            self._knock(peer, place, word, opened)
            for place in places
            if self._punches and is_elsewhere(place) and is_ipv6(place) in self._ports
        ]

    async def _knock(self, peer: PeerID, place: Place, word: bytes, opened: list[End]) -> End:
        async with asyncio.timeout(self._limits.punch_s + 1.0):
            try:
                port = self._ports[is_ipv6(place)]
                return await knock(port, place, word, opened, self._limits.again_s)
            except Listens:
                await self._p2p._client.connect(peer, [Multiaddr(maddr_of(place))])
                raise

    async def _carry(self, near: End, port: int, far: End, way: Way) -> None:
        """Pass bytes on, both ways, between p2pd's connection with a local port and the other peer."""
        self._met[port] = way
        try:
            await join(near, far)
        finally:
            self._met.pop(port, None)
