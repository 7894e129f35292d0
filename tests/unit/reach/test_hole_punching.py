"""How two peers behind routers meet through a member, and what strangers can make such a member do.

`Daemon` stands in for p2pd, and `World.dial_from` for routers when a peer dials from p2pd's port. Each peer
listens on a port of 127.0.0.1, and others see it at a public address.
"""

import asyncio
import contextlib
import socket
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils.multiaddr import Multiaddr

from tests.simulation.network import Network
from tests.unit.async_tests import peer, with_sockets
from trahiv_cli.members.door import CallLimits, Door
from trahiv_cli.net import byte_streams as pipes
from trahiv_cli.net.byte_streams import HELLO, End, NotMet
from trahiv_cli.reach import hole_punching as meetings
from trahiv_cli.reach.hole_punching import (
    ANSWER,
    LOOK,
    MEASURE,
    MEASURED_BYTES,
    SEEK,
    Meeting,
    MeetingLimits,
    Seen,
)

pytestmark = with_sockets

LIMITS = MeetingLimits(punch_s=0.1, punch_again_s=0.0, again_s=0.005)
TALK_BYTES = LIMITS.talk_bytes

HERE = "127.0.0.1"
HOME = "192.168.1.20"
TOKEN = bytes(16)
A, B, M, C, *MIDDLES = map(peer, range(1, 10))
"""Two at home, a member connected with both, and other members."""


async def pair():
    return [End(*await asyncio.open_connection(sock=one)) for one in socket.socketpair()]


def tcp(host, port):
    return Multiaddr(f"/ip4/{host}/tcp/{port}")


async def until(holds):
    async with asyncio.timeout(2.0):
        while not holds():
            await asyncio.sleep(0.001)


class Daemon:
    """A peer's p2pd, as hivemind's client shows it. A dial sends ids, which libp2p would prove."""

    def __init__(self, world, peer):
        self.world = world
        self.peer = peer
        self.handlers = {}
        self.connections = {}  # by peer: its address, and the stream if there is one
        self.served = set()
        self.opened = []

    async def listen(self):
        self.server = await asyncio.start_server(self._dialled, HERE, 0)
        self.place = self.server.sockets[0].getsockname()
        self.public = f"5.5.5.{self.peer.to_bytes()[-1]}", self.place[1]  # its router keeps the port

    async def _dialled(self, *stream):
        with contextlib.suppress(OSError, EOFError):
            await self._greet(End(*stream))

    async def _greet(self, end):
        self.opened.append(end)
        end.writer.write(HELLO + self.peer.to_bytes())
        if await end.reader.readexactly(16) != HELLO[:16]:
            return end.writer.close()
        peer = PeerID((await end.reader.readexactly(4 + 34))[4:])
        self.connections[peer] = tcp(*end.writer.get_extra_info("peername")), end
        return peer

    async def connect(self, peer, maddrs):
        if peer not in self.connections:
            place = maddrs[0]["ip4"], int(maddrs[0]["tcp"])
            place = self.world.listening.get(place, place)
            assert await self._greet(End(*await asyncio.open_connection(*place))) == peer

    async def list_peers(self):
        return [SimpleNamespace(peer_id=peer, addrs=[at]) for peer, (at, _) in self.connections.items()]

    async def identify(self):
        return self.peer, [tcp(host, self.place[1]) for host in (HOME, HERE)]

    async def stream_handler(self, name, handler, balanced=False):
        self.handlers[name] = handler

    async def stream_open(self, peer, names):
        if peer not in self.connections:
            raise P2PDaemonError("no route")
        ours, theirs = opened = await pair()
        self.opened += opened
        there = self.world[peer].daemon
        serving = there.handlers[names[0]](SimpleNamespace(peer_id=self.peer), *theirs)
        there.served.add(asyncio.create_task(serving))
        return SimpleNamespace(peer_id=peer), *ours

    def answer(self, handler, *content):
        """Answer a message with this content; return a list of the message and all later bytes."""
        heard = []

        async def serve(info, reader, writer):
            heard.append(await End(reader, writer).receive())
            await End(reader, writer).send(*content)
            while chunk := await reader.read(TALK_BYTES):
                heard.append(chunk)
            writer.close()

        self.handlers[handler] = serve
        return heard

    def close(self):
        self.server.close()
        pipes.close(self.opened)
        for task in self.served:
            task.cancel()

    add_unary_handler = stream_handler


class World(dict):
    """Peers by their ids; each is a `Meeting` with its `daemon`."""

    def __init__(self):
        self.listening = {}  # where p2pd listens, by the place that others can dial from outside
        self.lets_in = False  # whether routers let in a peer that is dialled at the same time
        self.dialled = {}  # dials that wait for the other side, by the ports on both sides
        self.knocked = set()

    async def open(self, options):
        """Add A, B and M, and connect A and B with M alone."""
        for one in (A, B, M):
            await self.add(one, **options.get(one, {}))
        self.connect(A, M)
        self.connect(B, M)

    async def add(self, peer, relay_rate=None, **options):
        daemon = Daemon(self, peer)
        await daemon.listen()
        p2p = Network().p2p_of(peer, Door(limits=CallLimits(linger_s=0.1)))
        p2p._client = daemon
        one = self[peer] = Meeting(p2p, [daemon.place], relay_rate, **{"limits": LIMITS, **options})
        one.daemon = daemon
        one.may_be_relayed = True
        await one.open()

    def connect(self, *peers):
        """Have two peers see each other at their public addresses."""
        for one, other in (peers, peers[::-1]):
            self[one].daemon.connections[other] = tcp(*self[other].daemon.public), None

    async def dial_from(self, port, place):
        """Dial as through routers: a connection is made if the other side dials, too."""
        self.knocked.add(place)
        if (there := self.listening.get(place)) is not None:
            return End(*await asyncio.open_connection(*there))
        if not self.lets_in:
            raise ConnectionRefusedError
        if (waiting := self.dialled.pop((place[1], port), None)) is None:
            waiting = self.dialled[port, place[1]] = asyncio.get_running_loop().create_future()
            return await waiting
        one, other = await pair()
        waiting.set_result(one)
        return other

    async def ask(self, caller, peer, handler, *content):
        """Call a handler of a peer as any peer may; return the answer and the stream."""
        _, *stream = await self[caller].daemon.stream_open(peer, [handler])
        end = End(*stream)
        await end.send(*content)
        return await end.receive(), end

    async def seek(self, caller=A, peer=B, places=()):
        """Have a peer ask M for another one; return M's answer and the stream."""
        return await self.ask(caller, M, SEEK, peer.to_bytes(), places, TOKEN)

    async def request(self, middle=M, places=()):
        """Have a middle ask B to meet C; return B's answer and the stream."""
        return await self.ask(middle, B, ANSWER, C.to_bytes(), places, TOKEN)

    async def meet(self):
        """Have A meet B through M."""
        return await self[A].meet(B, [M])

    async def ways(self):
        return [await one.ways() for one in self.values()]

    async def close(self):
        for one in self.values():
            await one.close()
            one.daemon.close()
        await asyncio.sleep(0.001)  # so that handlers end


@pytest.fixture
def options():
    """Options of some of A, B and M, by peer."""
    return {}


@pytest.fixture
def world(loop, options, monkeypatch):
    made = World()
    monkeypatch.setattr(pipes, "dial_from", made.dial_from)
    loop.run(made.open(options))
    yield made
    loop.run(made.close())


async def connected(world, one, other):
    """Wait until a peer's p2pd has a connection with another; return its end."""
    connections = world[one].daemon.connections
    await until(lambda: other in connections)
    return connections[other][1]


async def talk(world):
    """Send bytes both ways between the connected p2pd of A and of B; return their ends."""
    ends = await connected(world, A, B), await connected(world, B, A)
    for one, other in (ends, ends[::-1]):
        one.writer.write(bytes(4 * TALK_BYTES) + b"end")
        await other.hear(bytes(4 * TALK_BYTES) + b"end")
    return ends


@pytest.mark.parametrize("ends", [A, B, M])
async def test_peers_behind_closed_routers_are_relayed(world, ends):
    assert await world.meet() == "relayed"
    a, b = await talk(world)
    assert await world.ways() == [{B: "relayed"}, {A: "relayed"}, {}]
    await world[ends].close()
    assert await a.reader.read() == await b.reader.read() == b""
    assert await world[A].ways() == {}


CARRIES_NOTHING = {M: {"relay_rate": 0}}


@pytest.mark.parametrize("options", [CARRIES_NOTHING])
async def test_punched_peers_need_no_middle(world):
    world.lets_in = True
    assert await world.meet() == "punched"
    await world[M].close()
    await talk(world)
    assert await world.ways() == [{B: "punched"}, {A: "punched"}, {}]


@pytest.mark.parametrize("options", [{one: {"punches": False}} for one in (A, B)])
async def test_punching_can_be_switched_off(world):
    world.lets_in = True
    assert await world.meet() == "relayed"
    await talk(world)


@pytest.mark.parametrize("options, unknown", [(CARRIES_NOTHING, M), ({}, A), ({}, B)])
async def test_relay_needs_willing_middle_and_known_reach(world, unknown):
    world[unknown].may_be_relayed = False
    with pytest.raises(NotMet, match=f"through {M}: the routers let neither .* nothing is relayed, or not"):
        await world.meet()
    assert B not in world[A].daemon.connections
    assert A not in world[B].daemon.connections


async def test_punch_after_failed_one_is_shorter(world):
    world[A].may_be_relayed = False
    with pytest.raises(NotMet):
        await world.meet()
    world[A].may_be_relayed = world.lets_in = True
    assert await world.meet() == "relayed"


async def test_listening_peer_is_dialled_directly(world):
    b = world[B].daemon
    world.listening[b.public] = b.place
    assert await world.meet() is None
    await talk(world)
    assert await world.ways() == [{}] * 3


async def test_failed_meeting_names_each_middle(world):
    await world.add(C)
    world.connect(A, C)
    absent = MIDDLES[0]
    unknown = f"through {absent}: no route"
    said = f"through {C}: that peer is not connected here; {unknown}; {unknown}"
    with pytest.raises(NotMet, match=f"^{said}$"):
        await world[A].meet(B, [C, absent, absent, M])
    assert await world[A].meet(B, [C, M]) == "relayed"


async def test_meeting_needs_middle(world):
    with pytest.raises(NotMet, match="no member can introduce"):
        await world[A].meet(B, [])


async def test_relays_are_not_chained(world):
    await world.add(C)
    world.connect(C, A)
    await world.meet()
    await connected(world, A, B)
    with pytest.raises(NotMet, match="not connected here"):
        await world[C].meet(B, [A])


async def test_concurrent_meeting_is_refused(world):
    both = await asyncio.gather(*(world.meet() for _ in range(2)), return_exceptions=True)
    assert list(map(str, both)) == ["relayed", "it is being met"]


async def test_middle_tells_places_and_tokens(world):
    told = world[B].daemon.answer(ANSWER, [("5.5.5.2", 8)], True, b"more")
    answer, _ = await world.seek(places=[("5.5.5.1", 7)])
    assert answer == [[world[B].daemon.public, ("5.5.5.2", 8)], True, b"more"]
    assert told == [[A.to_bytes(), [world[A].daemon.public, ("5.5.5.1", 7)], TOKEN]]


@pytest.mark.parametrize("options", [{M: {"relay_rate": rate}} for rate in (0, 20_000)])
async def test_relay_rate_limits_traffic(world, options):
    rate = options[M]["relay_rate"]
    now = asyncio.get_running_loop().time
    heard = world[B].daemon.answer(ANSWER, [], True, TOKEN)
    _, end = await world.seek()
    began = now()
    for _ in range(2):
        end.writer.write(bytes(TALK_BYTES))
        await asyncio.sleep(0.01)
    end.writer.close() if rate else await end.reader.read()
    await asyncio.wait(world[B].daemon.served)
    num_bytes = len(b"".join(heard[1:]))
    assert num_bytes == TALK_BYTES * (1 + bool(rate))
    assert not rate or now() - began >= num_bytes / rate


@pytest.mark.parametrize("options", [{M: {"limits": replace(LIMITS, relayed_at_once=9)}}])
async def test_relayed_circuits_are_limited(world):
    async def relay(caller, peer):
        (_, carries, _), end = await world.seek(caller, peer)
        ends.append(end)
        return carries

    ends = []
    for one in (A, B):
        world[one].daemon.answer(ANSWER, [], True, TOKEN)
    assert [await relay(A, B) for _ in range(9)] == [True] * 8 + [False]
    assert await relay(B, A)  # each caller has its own limit
    assert not await relay(B, A)
    assert not (await world[B].look(M)).carries
    pipes.close(ends)
    await asyncio.wait(world[M].daemon.served)
    assert (await world[B].look(M)).carries
    assert await relay(A, B)  # closed circuits do not count


async def test_answered_meetings_per_middle_are_limited(world):
    async def is_answered(middle):
        try:
            (_, _, word), end = await world.request(middle)
        except NotMet as refused:
            assert str(refused) == "too many other meetings"
            return False
        ends.append(end)
        words.add(word)
        return True

    ends = []
    words = set()
    for middle in MIDDLES:
        await world.add(middle)
        world.connect(middle, B)
    answered = [sum([await is_answered(middle) for _ in range(5)]) for middle in MIDDLES]
    assert answered == [4] * 4 + [0]
    assert len(words) == len(ends)  # each answer has a new word
    pipes.close(ends)
    await asyncio.wait(world[B].daemon.served)
    assert await is_answered(MIDDLES[4])


async def test_asked_peer_tells_own_places(world):
    (places, _, _), _ = await world.request()
    assert places == ((HOME, world[B].daemon.place[1]),)


@pytest.mark.parametrize("are_near", [True, False])
async def test_private_places_reach_only_neighbours(world, are_near):
    asked = world[B].daemon.answer(ANSWER, [(HOME, 8)], True, TOKEN)
    if are_near:
        world[M].daemon.connections[B] = tcp(world[A].daemon.public[0], 9), None
    (places, _, _), _ = await world.seek(places=[("10.0.0.1", 7)])
    assert (("10.0.0.1", 7) in asked[0][1]) is ((HOME, 8) in places) is are_near


@pytest.mark.parametrize("is_open", [True, False])
async def test_look_reports_seen_and_dialled_places(world, is_open):
    a = world[A].daemon
    world[M].daemon.connections[A] = tcp(HERE, 7), None
    if not is_open:
        a.server.close()
    assert await world[A].look(M) == Seen(((HERE, 7),), (a.place,) * is_open, carries=True)


async def test_look_dials_only_asking_machine(world, monkeypatch):
    dial_back = AsyncMock(side_effect=ConnectionRefusedError)
    monkeypatch.setattr(meetings, "dial_back", dial_back)
    host, _ = place = world[A].daemon.public
    answer, _ = await world.ask(A, M, LOOK, [("8.8.8.8", 22), ("10.0.0.1", 23), (HERE, 24)])
    assert answer == [(place,), [], True]
    dial_back.assert_awaited_once_with((host, 22))


async def test_look_ignores_foreign_places(world):
    host, port = own = world[A].daemon.public
    world[M].daemon.answer(LOOK, [(host, 7)], [("8.8.8.8", port), own, (host, 22)], True)
    assert await world[A].look(M) == Seen(((host, 7),), (own,), carries=True)


async def test_look_refuses_host_names(world):
    world[M].daemon.answer(LOOK, [], [("example.org", 1)], True)
    with pytest.raises(ValueError, match="not places"):
        await world[A].look(M)


@pytest.mark.parametrize(
    "handler, content, words",
    [
        *((handler, [TOKEN], "can't be read") for handler in (LOOK, SEEK, ANSWER)),
        (LOOK, [[("example.org", 1)]], "not places"),
        (SEEK, [A.to_bytes(), [], TOKEN], "not connected"),  # the caller itself
        (SEEK, [C.to_bytes(), [], TOKEN], "not connected"),
        (SEEK, [bytes(65), [], TOKEN], "no id of a peer"),
        (SEEK, [B.to_bytes(), [("example.org", 1)], TOKEN], "not places"),
        (SEEK, [B.to_bytes(), [], TOKEN[1:]], "can't be read"),
        (ANSWER, [bytes(65), [], TOKEN], "no id of a peer"),
        (ANSWER, [B.to_bytes(), [], TOKEN[1:]], "can't be read"),
        (ANSWER, [B.to_bytes(), [(HERE, 2**16)], TOKEN], "not places"),
    ],
)
async def test_impossible_request_is_refused_with_reason(world, handler, content, words):
    with pytest.raises(NotMet, match=words):
        await world.ask(A, M, handler, *content)


async def test_link_speed_is_measured_both_ways(world):
    async def slow(info, *stream):
        end = End(*stream)
        for wait_s, content in ((0.1, []), (0.02, [bytes(MEASURED_BYTES)])):
            asked.append(await end.receive())
            await asyncio.sleep(wait_s)
            await end.send(*content)

    asked = []
    world[M].daemon.handlers[MEASURE] = slow
    there, back = await world[A].measure(M)
    assert there <= MEASURED_BYTES / 0.1 < back <= MEASURED_BYTES / 0.02
    assert asked == [[bytes(MEASURED_BYTES)], []]


async def test_measuring_peer_receives_load(world):
    answer, end = await world.ask(A, M, MEASURE, b"load")
    assert answer == []
    await end.send()
    assert await end.receive() == [bytes(MEASURED_BYTES)]


async def test_local_and_multicast_places_are_not_dialled(world):
    far = ("5.5.5.9", 1)
    places = [(HERE, 1), ("169.254.1.1", 1), ("224.0.0.1", 1), ("2606:4700::1", 1), far]
    _, end = await world.request(places=places)
    end.writer.write(meetings.PING)
    await end.hear(meetings.PING)
    end.writer.write(meetings.GO)
    await until(lambda: world.knocked)
    assert world.knocked == {far}
