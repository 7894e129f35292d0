"""How two peers behind routers meet through a member, and what strangers can make such a member do.

`Daemon` stands in for p2pd, and `World.dial_from` for routers when a peer dials from p2pd's port. Each peer
listens on a port of 127.0.0.1, and others see it at a public address.
"""

import asyncio
import contextlib
import functools
import socket
from types import SimpleNamespace

import pytest
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr

from tests.simulation.network import Network
from trahiv_cli.swarm import meeting as meetings
from trahiv_cli.swarm import pipes
from trahiv_cli.swarm.addresses import socket_of
from trahiv_cli.swarm.corrections import streams
from trahiv_cli.swarm.meeting import ANSWER, LOOK, MEASURE, MEASURED_BYTES, SEEK, TALK_BYTES, Meeting, Seen
from trahiv_cli.swarm.pipes import HELLO, End, NotMet

HERE, HOME, TOKEN = "127.0.0.1", "192.168.1.20", bytes(16)


def made_up(number):
    return PeerID(b"\x12\x20" + bytes(31) + bytes([number]))


A, B, M, C = map(made_up, range(1, 5))  # two at home, a member connected with both, and another member


async def pair():
    return [End(*await asyncio.open_connection(sock=one)) for one in socket.socketpair()]


class Daemon:
    """A peer's p2pd, as hivemind's client shows it. A dial sends ids, which libp2p would prove."""

    def __init__(self, world, peer):
        self.world, self.peer = world, peer
        self.handlers, self.connections = {}, {}  # by peer: its address, and the stream if there is one
        self.served, self.opened = set(), []

    async def listen(self):
        self.server = await asyncio.start_server(self._dialled, HERE, 0)
        self.place = self.server.sockets[0].getsockname()
        self.public = f"5.5.5.{self.peer.to_bytes()[-1]}", self.place[1]  # its router keeps the port

    async def _dialled(self, reader, writer):
        with contextlib.suppress(OSError, EOFError):
            if await self._greet(End(reader, writer)) is None:
                writer.close()

    async def _greet(self, end):
        self.opened.append(end)
        end.writer.write(HELLO + self.peer.to_bytes())
        if await end.reader.readexactly(16) != HELLO[:16]:
            return None
        peer = PeerID((await end.reader.readexactly(4 + 34))[4:])
        host, port = end.writer.get_extra_info("peername")
        self.connections[peer] = Multiaddr(f"/ip4/{host}/tcp/{port}"), end
        return peer

    async def connect(self, peer, maddrs):
        if peer not in self.connections:
            named = socket_of(maddrs[0])
            place = self.world.listening.get((named.host, named.port), (named.host, named.port))
            end = End(*await asyncio.open_connection(*place))
            assert await self._greet(end) == peer

    async def list_peers(self):
        return [SimpleNamespace(peer_id=peer, addrs=[at]) for peer, (at, _) in self.connections.items()]

    async def identify(self):
        return self.peer, [Multiaddr(f"/ip4/{host}/tcp/{self.place[1]}") for host in (HOME, HERE)]

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

    async def hear_of(self, peer):
        """Wait until that peer has dialled this one."""
        async with asyncio.timeout(2.0):
            while peer not in self.connections:
                await asyncio.sleep(0.001)
        return self.connections[peer][1]

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

    async def add(self, peer, relay_rate=None, may_be_relayed=True, **options):
        daemon = Daemon(self, peer)
        await daemon.listen()
        p2p = Network().p2p_of(peer)
        p2p._client = daemon
        one = self[peer] = Meeting(p2p, [daemon.place], relay_rate, **options)
        one.daemon, one.may_be_relayed = daemon, may_be_relayed
        await one.open()

    def connect(self, *peers):
        """Have two peers see each other at their public addresses."""
        for one, other in (peers, peers[::-1]):
            host, port = self[other].daemon.public
            self[one].daemon.connections[other] = Multiaddr(f"/ip4/{host}/tcp/{port}"), None

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

    async def close(self):
        for one in self.values():
            await one.close()
            one.daemon.close()
        await asyncio.sleep(0.001)  # so that handlers end


@pytest.fixture(autouse=True)
def world(monkeypatch):
    made = World()
    monkeypatch.setattr(pipes, "dial_from", made.dial_from)
    monkeypatch.setattr(pipes, "AGAIN_S", 0.005)
    monkeypatch.setattr(meetings, "PUNCH_S", 0.1)
    monkeypatch.setattr(meetings, "PUNCH_AGAIN_S", 0.0)
    monkeypatch.setattr(streams, "LINGER_S", 0.1)
    return made


def played(story):
    """Play a test in an event loop, and close its `world`."""

    @functools.wraps(story)
    def test(world, **given):
        async def play():
            try:
                await story(world, **given)
            finally:
                await world.close()

        asyncio.run(play())

    return test


async def settle(world, a=None, b=None, m=None):
    """Add A, B and M, each with options of its own; A and B are connected only with M."""
    for peer, options in ((A, a), (B, b), (M, m)):
        await world.add(peer, **(options or {}))
    world.connect(A, M)
    world.connect(B, M)


async def talk(world):
    """Send bytes both ways between the connected p2pd of A and of B; return their ends."""
    a, b = await world[A].daemon.hear_of(B), await world[B].daemon.hear_of(A)
    for one, other in ((a, b), (b, a)):
        one.writer.write(bytes(4 * TALK_BYTES) + b"end")
        await other.hear(bytes(4 * TALK_BYTES) + b"end")
    return a, b


@played
async def test_peers_behind_closed_routers_are_relayed(world):
    for ends in (A, B, M):
        world.clear()
        await settle(world)
        assert await world[A].meet(B, [M]) == "relayed"
        a, b = await talk(world)
        assert await world[A].ways() == {B: "relayed"} and await world[B].ways() == {A: "relayed"}
        assert await world[M].ways() == {}
        await world[ends].close()
        assert await a.reader.read() == await b.reader.read() == b"" and await world[A].ways() == {}
        await world.close()


@played
async def test_punched_peers_need_no_middle(world):
    world.lets_in = True
    await settle(world, m={"relay_rate": 0})
    assert await world[A].meet(B, [M]) == "punched"
    await world[M].close()
    await talk(world)
    assert await world[A].ways() == {B: "punched"} and await world[B].ways() == {A: "punched"}


@pytest.mark.parametrize("who", ["a", "b"])
@played
async def test_punching_can_be_switched_off(world, who):
    world.lets_in = True
    await settle(world, **{who: {"punches": False}})
    assert await world[A].meet(B, [M]) == "relayed"
    await talk(world)


CARRIES_NOTHING, NOT_YET = {"relay_rate": 0}, {"may_be_relayed": False}


@pytest.mark.parametrize("options", [{"m": CARRIES_NOTHING}, {"a": NOT_YET}, {"b": NOT_YET}])
@played
async def test_relay_needs_willing_middle_and_known_reach(world, options):
    await settle(world, **options)
    with pytest.raises(NotMet, match=f"through {M}: the routers let neither .* nothing is relayed, or not"):
        await world[A].meet(B, [M])
    assert B not in world[A].daemon.connections and A not in world[B].daemon.connections
    world[A].may_be_relayed = world[B].may_be_relayed = world.lets_in = True
    if "m" in options:
        with pytest.raises(NotMet):  # after a failed punch the next is shorter: here, none at all
            await world[A].meet(B, [M])
    else:
        assert await world[A].meet(B, [M]) == "relayed"


@played
async def test_listening_peer_is_dialled_directly(world):
    await settle(world)
    world.listening[world[B].daemon.public] = world[B].daemon.place
    assert await world[A].meet(B, [M]) is None
    await talk(world)
    assert await world[A].ways() == await world[B].ways() == {}


@played
async def test_failed_meeting_names_each_middle(world):
    await settle(world)
    others = [made_up(number) for number in range(5, 9)]
    for middle in others[:2]:
        await world.add(middle)
        world.connect(A, middle)
    with pytest.raises(NotMet) as refused:
        await world[A].meet(B, [*others, M])
    told = [f"through {middle}: that peer is not connected here" for middle in others[:2]]
    assert str(refused.value) == "; ".join([*told, f"through {others[2]}: no route"])
    assert await world[A].meet(B, [others[0], M]) == "relayed"
    with pytest.raises(NotMet, match="no member can introduce"):
        await world[B].meet(M, [])


@played
async def test_relays_are_not_chained(world):
    await settle(world)
    await world.add(C)
    world.connect(C, A)
    await world[A].meet(B, [M])
    await world[A].daemon.hear_of(B)
    with pytest.raises(NotMet, match="not connected here"):
        await world[C].meet(B, [A])


@played
async def test_concurrent_meeting_is_refused(world):
    await settle(world)
    both = await asyncio.gather(*(world[A].meet(B, [M]) for _ in range(2)), return_exceptions=True)
    assert both[0] == "relayed" and str(both[1]) == "it is being met"


@pytest.mark.parametrize("relay_rate", [0, 20_000, None])
@played
async def test_relay_rate_limits_traffic(world, relay_rate):
    heard, now = bytearray(), asyncio.get_running_loop().time

    async def answer(info, reader, writer):
        end = End(reader, writer)
        assert await end.receive() == [A.to_bytes(), [world[A].daemon.public, ("5.5.5.1", 7)], TOKEN]
        await end.send([("5.5.5.2", 8)], True, TOKEN)
        while chunk := await reader.read(TALK_BYTES):
            heard.extend(chunk)
        writer.close()

    await settle(world, m={"relay_rate": relay_rate})
    world[B].daemon.handlers[ANSWER] = answer
    (places, carries, more), end = await world.ask(A, M, SEEK, B.to_bytes(), [("5.5.5.1", 7)], TOKEN)
    assert (
        more == TOKEN and places == [world[B].daemon.public, ("5.5.5.2", 8)] and carries is (relay_rate != 0)
    )
    began = now()
    for _ in range(2):
        end.writer.write(bytes(TALK_BYTES))
        await asyncio.sleep(0.01)
    end.writer.close() if carries else await end.reader.read()
    await asyncio.wait(world[B].daemon.served)
    assert len(heard) == TALK_BYTES * (1 + carries)
    assert not relay_rate or now() - began >= len(heard) / relay_rate, "no faster than its user lets it"


@played
async def test_relayed_circuits_are_limited(world, monkeypatch):
    async def relay(caller, peer):
        (_, carries, _), end = await world.ask(caller, M, SEEK, peer.to_bytes(), [], TOKEN)
        ends.append(end)
        return carries

    async def answer(info, reader, writer):
        await End(reader, writer).send([], True, TOKEN)
        await reader.read()
        writer.close()

    ends = []
    await settle(world)
    for peer in (A, B):
        world[peer].daemon.handlers[ANSWER] = answer
    assert [await relay(A, B) for _ in range(meetings.RELAYED_FOR_ONE + 1)] == [True] * 8 + [False]
    assert await relay(B, A), "another one has circuits of its own"
    monkeypatch.setattr(meetings, "RELAYED_AT_ONCE", 9)
    assert not await relay(B, A) and not (await world[B].look(M)).carries
    pipes.close(ends)
    async with asyncio.timeout(2.0):
        while not (await world[B].look(M)).carries:
            await asyncio.sleep(0.001)
    assert await relay(A, B), "those that were closed count no more"


@played
async def test_answered_meetings_per_middle_are_limited(world):
    async def told(middle, number):
        try:
            (places, may, more), end = await world.ask(
                middle, B, ANSWER, made_up(number).to_bytes(), [], TOKEN
            )
            ends.append(end)
            words.append(more)
            return may and places == ((HOME, world[B].daemon.place[1]),)
        except NotMet as refused:
            return str(refused)

    ends, words = [], []
    await settle(world)
    middles = [M, *map(made_up, range(30, 34))]
    for middle in middles[1:]:
        await world.add(middle)
        world.connect(middle, B)
    for middle in middles[:4]:
        answers = [await told(middle, number) for number in range(10, 15)]
        assert answers == [True] * meetings.ANSWERED_FOR_ONE + ["too many other meetings"]
    assert await told(middles[4], 9) == "too many other meetings", "of all together"
    assert len(set(words)) == len(words), "the peer chooses its part of the word anew"
    pipes.close(ends)
    async with asyncio.timeout(2.0):
        while await told(middles[4], 9) is not True:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("are_near", [True, False])
@played
async def test_private_places_reach_only_neighbours(world, are_near):
    async def answer(info, reader, writer):
        asked.append(await End(reader, writer).receive())
        await End(reader, writer).send([(HOME, 8)], True, TOKEN)
        await reader.read()
        writer.close()

    asked = []
    await settle(world)
    world[B].daemon.handlers[ANSWER] = answer
    if are_near:
        host, port = world[A].daemon.public[0], world[B].daemon.public[1]
        world[M].daemon.connections[B] = Multiaddr(f"/ip4/{host}/tcp/{port}"), None
    (places, _, _), end = await world.ask(A, M, SEEK, B.to_bytes(), [("10.0.0.1", 7)], TOKEN)
    assert (("10.0.0.1", 7) in asked[0][1]) is ((HOME, 8) in places) is are_near
    pipes.close([end])


@pytest.mark.parametrize("is_open", [True, False])
@played
async def test_look_reports_seen_and_dialled_places(world, is_open):
    await settle(world)
    a = world[A]
    world[M].daemon.connections[A] = Multiaddr(f"/ip4/{HERE}/tcp/7"), None
    if not is_open:
        a.daemon.server.close()
    assert await a.look(M) == Seen(((HERE, 7),), (a.daemon.place,) if is_open else (), carries=True)


@played
async def test_look_dials_only_asking_machine(world, monkeypatch):
    async def dial_back(place):
        dialled.append(place)
        raise ConnectionRefusedError

    dialled = []
    monkeypatch.setattr(meetings, "dial_back", dial_back)
    await settle(world)
    others = [("8.8.8.8", 22), ("10.0.0.1", 23), (HERE, 24)]
    answer, _ = await world.ask(A, M, LOOK, others)
    assert answer == [(world[A].daemon.public,), [], True] and dialled == [(world[A].daemon.public[0], 22)]


@played
async def test_look_ignores_foreign_places(world):
    async def lie(info, reader, writer):
        await End(reader, writer).send([(host, 7)], dialled, True)
        writer.close()

    await settle(world)
    own = host, port = world[A].daemon.public
    dialled = [("8.8.8.8", port), own, (host, 22)]
    world[M].daemon.handlers[LOOK] = lie
    assert await world[A].look(M) == Seen(((host, 7),), (own,), carries=True)
    dialled[:] = [("example.org", 1)]
    with pytest.raises(ValueError, match="not places"):
        await world[A].look(M)


@pytest.mark.parametrize("handler", [LOOK, SEEK, ANSWER])
@pytest.mark.parametrize("content", [b"\xff", MSGPackSerializer.dumps([[("example.org", 1)]])])
@played
async def test_malformed_message_is_refused(world, handler, content):
    await settle(world)
    _, reader, writer = await world[A].daemon.stream_open(M, [handler])
    writer.write(len(content).to_bytes(8) + content)
    with pytest.raises(NotMet, match="can't be read|not places"):
        await End(reader, writer).receive()


@pytest.mark.parametrize(
    ("handler", "content", "words"),
    [
        (SEEK, [A.to_bytes(), [], TOKEN], "not connected"),  # the caller itself
        (SEEK, [made_up(9).to_bytes(), [], TOKEN], "not connected"),
        (SEEK, [bytes(999), [], TOKEN], "no id of a peer"),
        (SEEK, [B.to_bytes(), [("example.org", 1)], TOKEN], "not places"),
        (SEEK, [B.to_bytes(), [], TOKEN[1:]], "can't be read"),
        (ANSWER, [bytes(999), [], TOKEN], "no id of a peer"),
        (ANSWER, [B.to_bytes(), [], TOKEN[1:]], "can't be read"),
        (ANSWER, [B.to_bytes(), [(HERE, 2**16)], TOKEN], "not places"),
    ],
)
@played
async def test_impossible_request_is_refused_with_reason(world, handler, content, words):
    await settle(world)
    with pytest.raises(NotMet, match=words):
        await world.ask(A, M, handler, *content)


@played
async def test_link_speed_is_measured_both_ways(world):
    async def slow(info, reader, writer):
        end, now = End(reader, writer), asyncio.get_running_loop().time
        for wait_s, content in ((0.1, []), (0.02, [bytes(MEASURED_BYTES)])):
            asked.append(len((await end.receive() or [b""])[0]))
            told.append(now())
            await asyncio.sleep(wait_s)
            await end.send(*content)
        writer.close()

    asked, told = [], []
    await settle(world)
    assert min(await world[A].measure(M)) > 0
    answer, end = await world.ask(A, M, MEASURE, b"load")
    await end.send()
    assert answer == [] and await end.receive() == [bytes(MEASURED_BYTES)]
    world[M].daemon.handlers[MEASURE] = slow
    there, back = await world[A].measure(M)
    assert there <= MEASURED_BYTES / 0.1 < back <= MEASURED_BYTES / 0.02 and asked == [MEASURED_BYTES, 0]


@played
async def test_local_and_multicast_places_are_not_dialled(world):
    await settle(world)
    far = ("5.5.5.9", 1)
    places = [(HERE, 1), ("169.254.1.1", 1), ("224.0.0.1", 1), ("2606:4700::1", 1), far]
    _, end = await world.ask(M, B, ANSWER, C.to_bytes(), places, TOKEN)
    end.writer.write(meetings.PING)
    await end.hear(meetings.PING)
    end.writer.write(meetings.GO)
    async with asyncio.timeout(2.0):
        while not world.knocked:
            await asyncio.sleep(0.001)
    assert world.knocked == {far}
