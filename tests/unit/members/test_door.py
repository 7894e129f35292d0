"""Whose calls a process of a peer admits: strangers, members, and members that forgot each other."""

import asyncio
import contextlib
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from hivemind.p2p import P2PHandlerError
from hivemind.proto import dht_pb2

from tests.simulation.network import Network
from tests.unit.async_tests import peer as made_up
from trahiv_cli.members import door as doors
from trahiv_cli.members.door import INTRODUCE, REFUSAL, CallLimits, Door, NotAMember, Refused
from trahiv_cli.members.membership import CERTIFICATE_BYTES, KEY_BYTES, Owner, Policy, Role, mark_of
from trahiv_cli.members.policy_book import PolicyBook

LIMITS = CallLimits()
OWNER = Owner(bytes(KEY_BYTES))
OTHER_OWNER = Owner(b"\1" * KEY_BYTES)
SWARM = OWNER.invite()
OTHER_SWARM = OTHER_OWNER.invite()
PART, STATE, PING, STORE, FIND, INTRODUCTION = (
    f"Protocol.{name}"
    for name in ("rpc_aggregate_part", "rpc_send_state", "rpc_ping", "rpc_store", "rpc_find", INTRODUCE)
)
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
    """A network of peers that answer pings; it records each call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    async def find(self, caller, peer, name):
        self.calls.append(name.rpartition(".")[2])
        return await super().find(caller, peer, name)

    async def serve(self, peer, membership=SWARM):
        """Have a peer answer pings, in place of its earlier process."""
        self.remove(peer)
        book = PolicyBook(membership.owner) if membership else None
        p2p = self.p2p_of(peer, Door(membership, book, peer.to_bytes()).another())  # like an averager's
        p2p.book = book
        p2p.asked = []

        async def answer(request, context):
            p2p.asked.append(context.remote_id)
            return dht_pb2.PingResponse(available=True)

        await p2p.add_protobuf_handler(PING, answer, dht_pb2.PingRequest)
        return p2p

    async def serve_both(self, first=SWARM, second=SWARM):
        return await self.serve(A, first), await self.serve(M, second)


async def ping(p2p, peer):
    answer = await p2p.call_protobuf_handler(peer, PING, dht_pb2.PingRequest(), dht_pb2.PingResponse)
    return answer.available


async def refused(call, words=REFUSAL):
    """Make a call that must be refused."""
    with pytest.raises(P2PHandlerError, match=words):
        await call


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def pair(wire, loop):
    """A and M, which serve with memberships of the same swarm."""
    return loop.run(wire.serve_both())


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


async def test_peers_introduce_themselves_once(pair, wire):
    a, m = pair
    for _ in range(2):
        assert await ping(a, M)
        assert await ping(m, A)  # M knows A by its calls
    assert wire.calls == [INTRODUCE, *["rpc_ping"] * 4]


async def test_cancelled_call_still_introduces_peer(pair, wire):
    a, _ = pair
    first = asyncio.create_task(ping(a, M))
    await asyncio.sleep(0)
    first.cancel()
    assert all(await asyncio.gather(ping(a, M), ping(a, M)))
    assert wire.calls.count(INTRODUCE) == 1


async def test_member_of_closed_swarm_calls_no_open_one(wire):
    _, m = await wire.serve_both(None)
    await refused(ping(m, A), "did not introduce itself")
    assert m.door.was_refused
    assert "it is open" in m.door.why_refused().message


async def test_stranger_is_refused_and_named_once(wire, warnings):
    a, stranger = await wire.serve_both(second=OTHER_SWARM)
    for handler in (INTRODUCTION, PING):
        await refused(stranger.call_unary(A, handler, b"\xff no protobuf at all"))
    assert a.asked == []
    assert warnings == [f"Peer {M} was refused: it is not a member of this swarm."]


def test_log_names_few_strangers(warnings):
    door = Door(SWARM)
    for number in range(LIMITS.strangers_named + 9):
        assert admit(door, made_up(number), OTHER_SWARM)
    assert len(warnings) == LIMITS.strangers_named


def decided(owner=OWNER, **marks):
    return Policy(1, **{name: frozenset(some) for name, some in marks.items()}).to_bytes(owner)


async def test_member_calls_no_peer_without_certificate(pair, wire):
    async def reflect(certificate, remote_id):
        return certificate

    a, m = pair
    wire.daemons[M][0].handlers[INTRODUCTION] = reflect
    await refused(ping(a, M), "did not introduce itself")
    assert m.asked == []
    await wire.serve(M)
    assert await ping(a, M)  # the next call asks for a certificate again


async def test_refusal_with_forged_policy_is_not_believed(pair, wire):
    a, m = pair
    forged = NotAMember("out", decided(OTHER_OWNER, out=[mark_of(A.to_bytes())]))
    wire.daemons[M][0].handlers[INTRODUCTION] = AsyncMock(side_effect=forged)
    await refused(ping(a, M), "out")
    assert a.door.was_refused
    assert "taken" not in a.door.why_refused().message
    assert m.asked == []


async def test_silent_peer_is_not_called(pair, wire):
    a, m = pair
    wire.tamper = lambda message: []  # the message never arrives
    await refused(ping(m, A), "did not introduce itself")
    assert a.asked == []


def spend(door, peer, membership=SWARM):
    """Return how many calls of a peer are answered at once."""
    certificate = shown(peer, membership) if membership else b""
    answered = 0
    with pytest.raises(Refused, match="too many calls"):
        while answered < 2 * LIMITS.calls_at_once:
            door.count(peer, certificate)
            answered += 1
    return answered


def test_one_invitation_crowds_out_no_other(now):
    """A remembered peer has its own call limit; all others with the same invitation share one."""
    door, other, crowd = (
        Door(SWARM, limits=CallLimits(peers_remembered=4)),
        OWNER.invite(),
        [made_up(number) for number in range(9)],
    )
    assert not any(admit(door, peer, other) for peer in (A, B))
    assert not any(admit(door, peer) for peer in crowd)
    assert [spend(door, peer) for peer in crowd].count(LIMITS.calls_at_once) == 3
    assert [spend(door, peer, other) for peer in (A, B)] == [LIMITS.calls_at_once] * 2


@pytest.mark.parametrize("membership", [SWARM, None], ids=["closed", "open"])
def test_calls_are_rate_limited_per_peer(now, warnings, membership):
    door = Door(membership)
    admit(door, A)
    assert spend(door, A, membership) == LIMITS.calls_at_once
    now.now += 1.0
    assert spend(door, A, membership) == LIMITS.calls_a_second
    assert spend(door, B, membership) == LIMITS.calls_at_once  # each peer has its own limit
    assert warnings.count(f"Peer {A} was refused: it calls too often.") == 1


def test_long_request_counts_as_many_calls(now):
    door = Door()
    half = LIMITS.call_bytes * LIMITS.calls_at_once // 2  # of the bytes it may send, besides the call
    door.count(A, num_bytes=half)
    with pytest.raises(Refused):
        door.count(A, num_bytes=half)


def test_strangers_share_one_call_limit(now, warnings):
    door = Door(SWARM)
    num_judged = 0
    for number in range(LIMITS.calls_at_once + 500):
        with pytest.raises(Refused) as refused:
            door.admit_request(made_up(number), bytes(CERTIFICATE_BYTES), PING)
        num_judged += refused.type is NotAMember
    assert num_judged == LIMITS.calls_at_once
    assert not any("too often" in said for said in warnings)
    for peer in (A, B):  # have the same invitation as this peer
        assert door.admit_request(peer, shown(peer) + b"ping", PING) == b"ping"


async def test_kicked_peer_neither_calls_nor_is_called(pair, warnings):
    a, m = pair
    assert await ping(a, M)
    assert await ping(m, A)
    a.book.offer(decided(out=[mark_of(M.to_bytes())]))
    for _ in range(2):
        await refused(ping(m, A))
        await refused(ping(a, M), f"is not called|{REFUSAL}")
    assert a.asked == [M]
    assert m.asked == [A]
    m.door.learn_from(f"{REFUSAL}: its invitation is over")  # this is not signed
    assert "has taken this peer out" in m.door.why_refused().message
    assert warnings == [f"Peer {M} was refused: the owner has taken it out."]


def test_single_use_invitation_admits_first_peer():
    once, book = OWNER.invite(is_once=True), PolicyBook(OWNER.public)
    door, key = Door(SWARM, book), once.grant.key
    for handler in (FIND, *MEETING):  # it only looks
        assert not admit(door, M, once, handler)
    for _ in range(2):
        assert not admit(door, B, once)
        assert admit(door, M, once)
    book.offer(decided(closed=[mark_of(key)], stay=[mark_of(M.to_bytes(), key)]))
    assert not admit(door, M, once)
    assert admit(door, B, once)


async def test_watcher_is_not_called(wire):
    a, w = await wire.serve_both(second=OWNER.invite(Role.watcher))
    for _ in range(2):
        await refused(ping(a, M), "only watches")
    assert w.asked == []


def test_watcher_only_reads_records(warnings):
    door = Door(SWARM)
    handlers = {INTRODUCTION, PING, FIND, STORE, PART, STATE, f"{FIND}x", *MEETING}
    admitted = {one for one in handlers if not admit(door, M, OWNER.invite(Role.watcher), one)}
    assert admitted == {INTRODUCTION, PING, FIND}
    assert warnings == [f"Peer {M} was refused: it may only watch."]


class Writer(bytearray):
    """The writing end of a stream; `read` is the content that a handler read, with `handed` to write to."""

    write = bytearray.extend
    read = handed = closed_at = None
    is_full = False

    async def drain(self):
        if self.is_full:
            await asyncio.Event().wait()

    def close(self):
        self.closed_at = asyncio.get_running_loop().time()


async def read_all(info, reader, writer):
    info.end.handed = writer
    info.end.read = await reader.read()


async def open_stream(door, peer, content=b"", ends_after_s=0.0, handler=read_all):
    """Open a stream of a peer to a handler behind a door; return the handler's end once it has ended."""
    network = Network()
    await network.p2p_of(A, door).add_binary_stream_handler(PING, handler)
    reader, writer = asyncio.StreamReader(), Writer()
    reader.feed_data(content)
    asyncio.get_running_loop().call_later(ends_after_s, reader.feed_eof)
    served = network.daemons[A][0].handlers[PING](SimpleNamespace(peer_id=peer, end=writer), reader, writer)
    await asyncio.create_task(served)
    return writer


LATER_S = 100.0


@pytest.mark.parametrize("ends_after_s", [0, LATER_S])
async def test_stream_without_valid_certificate_is_closed(ends_after_s):
    door = Door(SWARM)
    assert (await open_stream(door, M, shown(M) + b"content")).read == b"content"
    for content in (b"", shown(B)):
        end = await open_stream(door, M, content, ends_after_s)
        assert end.read is None, content
        assert REFUSAL.encode() in end
        assert end.closed_at < LATER_S


async def test_stream_that_is_not_read_times_out():
    end = await open_stream(Door(), M, b"content")
    assert end.read == b"content"
    end.is_full = True
    with pytest.raises(TimeoutError):
        await end.handed.drain()


@pytest.mark.parametrize(
    "what, ends_after_s, waited_s",
    [
        ("hangs up", LIMITS.linger_s / 2, LIMITS.linger_s / 2),
        ("waits", LATER_S, LIMITS.linger_s),
        ("cancelled", LATER_S, 0),
    ],
)
async def test_stream_closes_after_caller_or_timeout(what, ends_after_s, waited_s):
    async def handler(info, reader, writer):
        writer.close()
        if what == "cancelled":  # as when the process ends
            asyncio.current_task().cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(LIMITS.linger_s)

    end = await open_stream(Door(), M, ends_after_s=ends_after_s, handler=handler)
    assert end.closed_at == pytest.approx(waited_s, abs=1e-6)


async def test_failed_response_stream_raises_after_responses(wire):
    async def serve(requests, context):
        async for request in requests:
            yield request
        raise TimeoutError

    kind = dht_pb2.PingRequest
    await wire.p2p_of(B).add_protobuf_handler(PING, serve, kind, stream_input=True, stream_output=True)
    responses = await wire.p2p_of(A).iterate_protobuf_handler(B, PING, kind(validate=True), kind)
    assert (await anext(responses)).validate
    with pytest.raises(P2PHandlerError):
        await anext(responses)


GIVING = dict.fromkeys((STATE, MEETING[1]), LIMITS.given_at_once)


@pytest.mark.parametrize("handler, most", [(PART, LIMITS.streams_at_once), *GIVING.items()])
def test_open_streams_per_peer_are_limited(warnings, handler, most):
    door = Door(SWARM)
    assert not any(admit(door, peer) for peer in (A, M))
    for _ in range(2):  # closed streams do not count
        with contextlib.ExitStack() as stack:
            for _ in range(most):
                stack.enter_context(door.stream(M, handler))
            with pytest.raises(Refused, match="too many streams"):
                stack.enter_context(door.stream(M, handler))
            stack.enter_context(door.stream(A, handler))
            if handler in GIVING:
                stack.enter_context(door.stream(M, PART))
    assert warnings == [f"Peer {M} was refused: it has too many streams open."]


async def test_strangers_share_one_stream_limit():
    door = Door(SWARM)
    assert not admit(door, A)
    for _ in range(2):  # closed streams do not count
        silent = [
            asyncio.create_task(open_stream(door, made_up(number), ends_after_s=LATER_S))
            for number in range(LIMITS.streams_at_once + 9)
        ]
        assert (await open_stream(door, A, shown(A) + b"of a member")).read == b"of a member"
        closed, waiting = await asyncio.wait(silent, timeout=LIMITS.introduction_s / 2)
        assert len(closed) == 9
        for end in (task.result() for task in closed):
            assert end.read is None
            assert b"too many streams" in end
        await asyncio.wait(waiting)
