"""Whose calls a process of a peer admits: strangers, members, and members that forgot each other."""

import asyncio
import contextlib
import functools
from types import SimpleNamespace

import pytest
from hivemind.p2p import P2PContext, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2

from tests.simulation.network import Network, VirtualLoop
from trahiv_cli.swarm import door as doors
from trahiv_cli.swarm.corrections.streams import LINGER_S
from trahiv_cli.swarm.door import INTRODUCE, REFUSAL, Door, NotAMember, Refused
from trahiv_cli.swarm.membership import CERTIFICATE_BYTES, KEY_BYTES, Owner, Policy, Role, mark_of
from trahiv_cli.swarm.roll import PolicyBook

OWNER, OTHER_OWNER = Owner(bytes(KEY_BYTES)), Owner(b"\1" * KEY_BYTES)
SWARM, OTHER_SWARM = OWNER.invite(), OTHER_OWNER.invite()
SERVICE = "run::Protocol"
HANDLERS = (f"{SERVICE}.rpc_{name}" for name in ("aggregate_part", "send_state", "ping", "store", "find"))
PART, STATE, PING, STORE, FIND = HANDLERS


def made_up(number):
    return PeerID(b"\x12\x20" + number.to_bytes(32))


MEETING = [f"Meeting.rpc_{name}" for name in ("look", "measure", "seek", "answer")]


A, B, M = map(made_up, (2**200, 2**201, 2**202))


def shown(peer, membership=SWARM):
    return membership.certify(peer.to_bytes())


def admit(door, peer, membership=SWARM, handler=STORE):
    """Return why a door refuses a member; empty if it admits it."""
    try:
        door.admit(peer, shown(peer, membership), handler)
        return ""
    except NotAMember as refused:
        return str(refused)


class Wire(Network):
    """A network of peers that answer pings; it records each call with its caller."""

    def __init__(self):
        super().__init__()
        self.calls = []

    async def find(self, caller, peer, name):
        self.calls.append((caller, name.rpartition(".")[2]))
        return await super().find(caller, peer, name)

    async def serve(self, peer, membership):
        """Have a peer answer pings, in place of its earlier process."""
        self.remove(peer)
        book = PolicyBook(membership.owner) if membership else None
        p2p = self.p2p_of(peer, Door(membership, book, peer.to_bytes()).another())  # like an averager's
        p2p.book, p2p.asked = book, []

        async def answer(request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
            p2p.asked.append(context.remote_id)
            return dht_pb2.PingResponse(available=True)

        await p2p.add_protobuf_handler(PING, answer, dht_pb2.PingRequest)
        return p2p


async def ping(p2p, peer):
    answer = await p2p.call_protobuf_handler(peer, PING, dht_pb2.PingRequest(), dht_pb2.PingResponse)
    return answer.available


async def refused(call, words=REFUSAL):
    """Make a call that must be refused."""
    with pytest.raises(P2PHandlerError, match=words):
        await call


def played(story):
    """Play a test on a virtual clock."""

    @functools.wraps(story)
    def test(**given):
        with asyncio.Runner(loop_factory=VirtualLoop) as loop:
            loop.run(story(**given))

    return test


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def warnings(monkeypatch):
    """The logged warnings."""
    said = []
    monkeypatch.setattr(doors.logger, "warning", said.append)
    return said


@pytest.fixture
def now(monkeypatch, clock):
    """The clock by which calls are counted."""
    monkeypatch.setattr(doors, "time", SimpleNamespace(monotonic=clock))
    return clock


@played
async def test_peers_introduce_themselves_once(wire):
    a, b = await wire.serve(A, SWARM), await wire.serve(B, SWARM)
    for _ in range(2):
        assert await ping(a, B) and await ping(b, A), "B knows A by its calls"
    assert b.asked == [A, A] and a.asked == [B, B]
    assert [call for _, call in wire.calls] == [INTRODUCE, *["rpc_ping"] * 4]
    b = await wire.serve(B, SWARM)  # a restarted process, which knows no peer
    assert await ping(a, B) and b.asked == [A]
    a = await wire.serve(A, SWARM)  # also restarted; its first call is cancelled at once
    first = asyncio.create_task(ping(a, B))
    await asyncio.sleep(0)
    first.cancel()
    assert all(await asyncio.gather(ping(a, B), ping(a, B)))
    assert [call for _, call in wire.calls].count(INTRODUCE) == 2


@played
async def test_open_swarm_needs_no_introduction(wire):
    a, b = await wire.serve(A, None), await wire.serve(B, None)
    assert await ping(a, B) and wire.calls == [(A, "rpc_ping")] and b.asked == [A]
    m = await wire.serve(M, SWARM)
    await refused(ping(m, B), "did not introduce itself")
    assert m.door.was_refused and "it is open" in m.door.why_refused().message


@pytest.mark.parametrize(
    ("membership", "words"), [(None, "is closed"), (OTHER_SWARM, "not take this peer for a member")]
)
@played
async def test_stranger_is_refused_and_named_once(wire, membership, words, warnings):
    a, stranger = await wire.serve(A, SWARM), await wire.serve(M, membership)
    for _ in range(3):
        await refused(ping(stranger, A))
    await refused(stranger.call_unary(A, PING, b"\xff no protobuf at all"))
    assert stranger.door.was_refused and a.asked == []
    assert words in stranger.door.why_refused().message
    assert warnings == [f"Peer {M} was refused: it is not a member of this swarm."]
    for number in range(doors.STRANGERS_NAMED + 9):
        assert admit(a.door, made_up(number), OTHER_SWARM)
    assert len(warnings) == doors.STRANGERS_NAMED


@played
async def test_member_calls_no_peer_without_certificate(wire):
    async def reflect(certificate, remote_id):
        return certificate

    async def refuse(certificate, remote_id):
        raise NotAMember("out", decided(OTHER_OWNER, out=[mark_of(A.to_bytes())]))

    a, m = await wire.serve(A, SWARM), await wire.serve(M, SWARM)
    [daemon] = wire.daemons[M]
    for answer, words in ((reflect, "did not introduce itself"), (refuse, "out")):
        daemon.handlers[f"{SERVICE}.{INTRODUCE}"] = answer
        await refused(ping(a, M), words)
    assert a.door.was_refused
    assert "taken" not in a.door.why_refused().message, "the owner did not sign these words"
    wire.tamper = lambda message: []  # the message never arrives
    await refused(ping(m, A), "did not introduce itself")
    assert m.asked == a.asked == []


def spend(door, peer, membership=SWARM):
    """How many calls of a peer are answered at once."""
    certificate = shown(peer, membership) if membership else b""
    answered = 0
    with pytest.raises(Refused, match="too many calls"):
        while answered < 2 * doors.CALLS_AT_ONCE:
            door.count(peer, certificate)
            answered += 1
    return answered


def test_one_invitation_crowds_out_no_other(monkeypatch, now):
    """A remembered peer has its own call limit; all others with the same invitation share one."""
    monkeypatch.setattr(doors, "PEERS_REMEMBERED", 4)
    door, other = Door(SWARM), OWNER.invite()
    assert not any(admit(door, peer, other) for peer in (A, B))
    assert not any(admit(door, made_up(number)) for number in range(9))
    assert [spend(door, made_up(number)) for number in range(9)].count(doors.CALLS_AT_ONCE) == 3
    assert [spend(door, peer, other) for peer in (A, B)] == [doors.CALLS_AT_ONCE] * 2


@pytest.mark.parametrize("membership", [SWARM, None], ids=["closed", "open"])
def test_calls_are_rate_limited_per_peer(now, warnings, membership):
    door = Door(membership)
    admit(door, A)
    assert spend(door, A, membership) == doors.CALLS_AT_ONCE
    now.now += 1.0
    assert spend(door, A, membership) == doors.CALLS_A_SECOND
    assert spend(door, B, membership) == doors.CALLS_AT_ONCE, "another one has calls of its own"
    assert warnings[0] == f"Peer {A} was refused: it calls too often." and warnings.count(warnings[0]) == 1
    now.now += 1e6
    half = doors.CALL_BYTES * doors.CALLS_AT_ONCE // 2  # of the bytes it may send, besides the call
    door.count(A, num_bytes=half)  # a long request counts as one call for each record that fits in it
    with pytest.raises(Refused):
        door.count(A, num_bytes=half)


def test_strangers_share_one_call_limit(monkeypatch, now, warnings):
    judged, real = [], doors.certified
    monkeypatch.setattr(doors, "certified", lambda *shown: judged.append(shown) or real(*shown))
    door = Door(SWARM)
    for number in range(doors.CALLS_AT_ONCE + 500):
        with pytest.raises(Refused):
            door.admit_request(made_up(number), bytes(CERTIFICATE_BYTES), PING)
    assert len(judged) == doors.CALLS_AT_ONCE and not any("too often" in said for said in warnings)
    for peer in (A, B):  # have the same invitation as this peer
        assert door.admit_request(peer, shown(peer) + b"ping", PING) == b"ping"


def decided(owner=OWNER, **marks):
    return Policy(1, **{name: frozenset(some) for name, some in marks.items()}).to_bytes(owner)


@played
async def test_kicked_peer_neither_calls_nor_is_called(wire, warnings):
    a, m = await wire.serve(A, SWARM), await wire.serve(M, SWARM)
    assert await ping(a, M) and await ping(m, A)
    a.book.offer(decided(out=[mark_of(M.to_bytes())]))
    for _ in range(2):
        await refused(ping(m, A))
        await refused(ping(a, M), f"is not called|{REFUSAL}")
    assert a.asked == [M] and m.asked == [A]
    m.door.learn_from(f"{REFUSAL}: its invitation is over")  # this is not signed
    assert "has taken this peer out" in m.door.why_refused().message
    assert warnings == [f"Peer {M} was refused: the owner has taken it out."]


def test_single_use_invitation_admits_first_peer():
    once, book = OWNER.invite(is_once=True), PolicyBook(OWNER.public)
    door, key = Door(SWARM, book), once.grant.key
    for handler in (FIND, *MEETING):
        assert not admit(door, M, once, handler), "it only looks"
    for _ in range(2):
        assert not admit(door, B, once) and admit(door, M, once)
    book.offer(decided(closed=[mark_of(key)], stay=[mark_of(M.to_bytes(), key)]))
    assert not admit(door, M, once) and admit(door, B, once)


@played
async def test_watcher_only_reads_records(wire, warnings):
    watcher = OWNER.invite(Role.watcher)
    a, w = await wire.serve(A, SWARM), await wire.serve(M, watcher)
    for _ in range(2):
        await refused(ping(a, M), "only watches")
    assert w.asked == []
    for handler in (INTRODUCE, PING, FIND, STORE, PART, STATE, f"{FIND}x", *MEETING):
        assert bool(admit(a.door, M, watcher, handler)) == (handler not in (INTRODUCE, PING, FIND))
    assert warnings == [f"Peer {M} was refused: it may only watch."]


class Writer(bytearray):
    """The writing end of a stream; `read` is the content that a handler read at the other end."""

    write, read, is_closed, is_full = bytearray.extend, None, False, False

    async def drain(self):
        if self.is_full:
            await asyncio.Event().wait()

    def close(self):
        self.is_closed = True


async def opener(wire, door):
    """Return a function that opens a stream of a peer to a handler behind a door."""

    async def handler(info, reader, writer):
        writer.read = await reader.read()

    async def open_stream(peer, content, ends=True):
        reader, writer = asyncio.StreamReader(), Writer()
        reader.feed_data(content)
        if ends:
            reader.feed_eof()
        await wire.daemons[A][0].handlers[PING](SimpleNamespace(peer_id=peer), reader, writer)
        return writer

    wire.remove(A)
    await wire.p2p_of(A, door).add_binary_stream_handler(PING, handler)
    return open_stream


@played
async def test_stream_without_valid_certificate_is_closed(wire):
    open_stream = await opener(wire, Door(SWARM))
    assert (await open_stream(M, shown(M) + b"content")).read == b"content"
    for content in (b"", bytes(CERTIFICATE_BYTES), shown(M, OTHER_SWARM), shown(B)):
        for ends in (True, False):
            end = await open_stream(M, content, ends)
            assert end.read is None and REFUSAL.encode() in end and end.is_closed, content
    end = await (await opener(wire, Door()))(M, b"content")
    assert end.read == b"content"
    end.is_full = True
    with pytest.raises(TimeoutError):  # a peer that reads nothing is not waited for
        await end.drain()


@played
@pytest.mark.parametrize(("what", "waited_s"), [("hangs up", LINGER_S / 2), ("waits", LINGER_S), ("ends", 0)])
async def test_stream_closes_after_caller_or_timeout(wire, what, waited_s):
    async def handler(info, reader, writer):
        writer.close()
        if what == "ends":  # the process ends, and cancels its handlers
            asyncio.current_task().cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(LINGER_S)

    await wire.p2p_of(B, Door()).add_binary_stream_handler(PING, handler)
    loop, reader, writer = asyncio.get_running_loop(), asyncio.StreamReader(), Writer()
    if what == "hangs up":
        loop.call_later(waited_s, reader.feed_eof)
    began, serve = loop.time(), wire.daemons[B][0].handlers[PING]
    await asyncio.create_task(serve(SimpleNamespace(peer_id=M), reader, writer))
    assert writer.is_closed and loop.time() - began == pytest.approx(waited_s, abs=1e-6)


@played
@pytest.mark.parametrize("fails", [False, True])
async def test_response_stream_distinguishes_end_from_failure(wire, fails):
    async def serve(requests, context):
        async for request in requests:
            yield request
        if fails:
            raise TimeoutError

    p2p = wire.p2p_of(B, Door())
    await p2p.add_protobuf_handler(PING, serve, dht_pb2.PingRequest, stream_input=True, stream_output=True)
    taken = []
    asked = await wire.p2p_of(A, Door()).iterate_protobuf_handler(
        B, PING, dht_pb2.PingRequest(validate=True), dht_pb2.PingRequest
    )
    with pytest.raises(P2PHandlerError) if fails else contextlib.nullcontext():
        async for response in asked:
            taken.append(response.validate)
    assert taken == [True]


def test_open_streams_per_peer_are_limited(warnings):
    door = Door(SWARM)
    assert not any(admit(door, peer) for peer in (A, M))
    giving = (STATE, MEETING[1])
    limits = {PART: doors.STREAMS_AT_ONCE} | dict.fromkeys(giving, doors.GIVEN_AT_ONCE)
    for handler, most in [*limits.items()] * 2:
        with contextlib.ExitStack() as stack:
            for _ in range(most):
                stack.enter_context(door.stream(M, handler))
            with pytest.raises(Refused, match="too many streams"):
                stack.enter_context(door.stream(M, handler))
            stack.enter_context(door.stream(A, handler))
            if handler in giving:
                stack.enter_context(door.stream(M, PART))
    assert warnings == [f"Peer {M} was refused: it has too many streams open."]


@played
async def test_strangers_share_one_stream_limit(wire):
    door = Door(SWARM)
    open_stream = await opener(wire, door)
    assert not admit(door, A)
    for _ in range(2):  # closed streams no longer count
        numbers = range(doors.STREAMS_AT_ONCE + 9)
        silent = [asyncio.create_task(open_stream(made_up(n), b"", ends=False)) for n in numbers]
        assert (await open_stream(A, shown(A) + b"of a member")).read == b"of a member"
        closed, waiting = await asyncio.wait(silent, timeout=doors.INTRODUCTION_S / 2)
        assert len(closed) == 9
        for end in (task.result() for task in closed):
            assert end.read is None and end.is_closed and b"too many streams" in end
        await asyncio.wait(waiting)
