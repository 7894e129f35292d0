"""With whom a process of a peer speaks: strangers, members, and members that have forgotten each other."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from hivemind.p2p import P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2

from trahiv_cli.swarm import door as door_module
from trahiv_cli.swarm.door import (
    CALL_BYTES,
    CALLS_A_SECOND,
    CALLS_AT_ONCE,
    GIVEN_AT_ONCE,
    INTRODUCE,
    REFUSAL,
    STREAMS_AT_ONCE,
    Door,
    GuardedP2P,
    NotAMember,
    Refused,
)
from trahiv_cli.swarm.membership import CERTIFICATE_BYTES, KEY_BYTES, Owner, Role
from trahiv_cli.swarm.policy import Policy, PolicyBook, mark_of

PEERS = {name: PeerID(b"\x12\x20" + name.encode() * 32) for name in "ABM"}
OWNER, OTHER_OWNER = Owner(bytes(KEY_BYTES)), Owner(b"\1" * KEY_BYTES)
SWARM, OTHER_SWARM = OWNER.invite(), OTHER_OWNER.invite()


class LocalP2P(GuardedP2P):
    """Without a p2pd, there is none to end."""

    def __del__(self):
        pass


class Wire:
    """Carries unary calls between peers by id, as p2pd does: what a handler raises comes back as text."""

    def __init__(self):
        self.handlers, self.calls = {}, []

    def client_of(self, peer):
        return Client(self, peer)


class Client:
    def __init__(self, wire, peer):
        self._wire, self._peer = wire, peer

    async def add_unary_handler(self, proto, handler, balanced=False):
        self._wire.handlers[self._peer, proto] = handler

    async def call_unary_handler(self, peer, proto, data):
        self._wire.calls.append((self._peer, peer, proto))
        await asyncio.sleep(0)
        if (peer, proto) not in self._wire.handlers:
            raise P2PDaemonError("protocols not supported")
        try:
            return await self._wire.handlers[peer, proto](data, self._peer)
        except Exception as error:
            raise P2PHandlerError(repr(error)) from error

    def close(self):
        pass


@pytest.fixture
def wire():
    return Wire()


def join(wire, name, membership):
    """Stand at the wire as a peer; one that was there before is gone with all that it knew."""
    p2p = LocalP2P.behind(Door(membership, membership and PolicyBook(membership.owner)))()
    p2p.peer_id, p2p._client = PEERS[name], wire.client_of(PEERS[name])
    return p2p


SERVICE = "run::Protocol"
PART = f"{SERVICE}.rpc_aggregate_part"
PING, STORE = f"{SERVICE}.rpc_ping", f"{SERVICE}.rpc_store"


async def serve(p2p, asked):
    async def ping(request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        asked.append(context.remote_id)
        return dht_pb2.PingResponse(available=True)

    await p2p.add_protobuf_handler(PING, ping, dht_pb2.PingRequest)


async def ping(p2p, name):
    answer = await p2p.call_protobuf_handler(
        PEERS[name], PING, dht_pb2.PingRequest(validate=True), dht_pb2.PingResponse
    )
    return answer.available


def test_a_caller_has_each_peer_introduce_itself_once(wire):
    async def meet():
        asked = []
        a, b = join(wire, "A", SWARM), join(wire, "B", SWARM)
        await serve(a, asked)
        await serve(b, asked)
        assert await ping(a, "B")
        assert await ping(a, "B")
        assert await ping(b, "A"), "B knows A by its calls"
        assert asked == [PEERS["A"], PEERS["A"], PEERS["B"]]
        assert [proto for *_, proto in wire.calls] == [f"{SERVICE}.{INTRODUCE}", PING, PING, PING]

    asyncio.run(meet())


def test_calls_that_begin_together_need_one_introduction(wire):
    async def meet():
        a, b = join(wire, "A", SWARM), join(wire, "B", SWARM)
        await serve(b, [])
        calls = [asyncio.create_task(ping(a, "B")) for _ in range(5)]
        await asyncio.sleep(0)
        calls[0].cancel()  # it hangs up; the others go on
        assert await asyncio.gather(*calls[1:]) == [True] * 4
        assert sum(proto.endswith(INTRODUCE) for *_, proto in wire.calls) == 1

    asyncio.run(meet())


def test_a_member_whose_process_was_started_anew_answers_at_once(wire):
    async def meet():
        asked = []
        a, b = join(wire, "A", SWARM), join(wire, "B", SWARM)
        await serve(b, asked)
        assert await ping(a, "B")
        await serve(join(wire, "B", SWARM), asked)  # has met nobody
        assert await ping(a, "B")
        assert len(asked) == 2

    asyncio.run(meet())


@pytest.fixture
def warnings(monkeypatch):
    """What is logged."""
    said = []
    monkeypatch.setattr(door_module.logger, "warning", said.append)
    return said


@pytest.mark.parametrize("membership", [None, OTHER_SWARM], ids=["no secret", "another secret"])
def test_a_stranger_is_refused_before_its_request_is_parsed_and_named_once(wire, membership, warnings):
    async def knock():
        asked = []
        a, stranger = join(wire, "A", SWARM), join(wire, "M", membership)
        await serve(a, asked)
        for _ in range(3):
            with pytest.raises(P2PHandlerError, match=REFUSAL):
                await ping(stranger, "A")
        assert stranger.door.was_refused
        with pytest.raises(P2PHandlerError, match=REFUSAL):
            await stranger.call_unary(PEERS["A"], PING, b"\xff no protobuf at all")
        assert asked == []

    asyncio.run(knock())
    assert warnings == [f"Peer {PEERS['M']} was refused: it is not a member of this swarm."]


def test_a_crowd_of_strangers_does_not_fill_the_log(monkeypatch, warnings):
    monkeypatch.setattr(door_module, "STRANGERS_NAMED", 3)
    door = Door(SWARM)
    for number in range(9):
        with pytest.raises(NotAMember):
            door.admit(PeerID(b"\x12\x20" + bytes([number]) * 32), b"", PING)
    assert len(warnings) == 4 and warnings[-1].startswith("Further strangers")


@pytest.mark.parametrize("size", [0, 1, CERTIFICATE_BYTES - 1, CERTIFICATE_BYTES + 1, 2**16])
def test_a_certificate_of_another_peer_or_size_opens_nothing(wire, size):
    async def knock():
        a, mallory = join(wire, "A", SWARM), join(wire, "M", None)
        await serve(a, [])
        stolen = SWARM.certify(PEERS["B"].to_bytes())
        for certificate in (stolen, stolen[:size].ljust(size, b"\0")):
            for handler in (f"{SERVICE}.{INTRODUCE}", PING):
                with pytest.raises(P2PHandlerError, match=REFUSAL):
                    await mallory.call_unary(PEERS["A"], handler, certificate)

    asyncio.run(knock())


def test_a_member_calls_nobody_who_can_t_show_a_certificate(wire):
    async def meet():
        a, m = join(wire, "A", SWARM), join(wire, "M", None)
        asked = []

        async def listen(request, remote_id):
            asked.append(request)
            return b""

        await m._client.add_unary_handler(PING, listen)
        with pytest.raises(P2PDaemonError):
            await ping(a, "M")  # it has nothing to introduce itself by

        async def reflect(certificate, remote_id):
            return certificate

        await m._client.add_unary_handler(f"{SERVICE}.{INTRODUCE}", reflect)
        with pytest.raises(P2PHandlerError, match="did not introduce itself"):
            await ping(a, "M")
        assert asked == []

    asyncio.run(meet())


def test_one_that_does_not_answer_is_given_up(wire, monkeypatch):
    monkeypatch.setattr(door_module, "INTRODUCTION_S", 0.05)

    async def meet():
        a, m = join(wire, "A", SWARM), join(wire, "M", None)

        async def hang(certificate, remote_id):
            await asyncio.Event().wait()

        await m._client.add_unary_handler(f"{SERVICE}.{INTRODUCE}", hang)
        with pytest.raises(P2PHandlerError, match="did not introduce itself"):
            await ping(a, "M")

    asyncio.run(meet())


def test_in_an_open_swarm_nobody_is_asked(wire):
    async def meet():
        asked = []
        a, b = join(wire, "A", None), join(wire, "B", None)
        await serve(b, asked)
        assert await ping(a, "B")
        assert wire.calls == [(PEERS["A"], PEERS["B"], PING)]

    asyncio.run(meet())


def test_a_member_learns_that_another_swarm_is_open(wire):
    async def meet():
        a, b = join(wire, "A", SWARM), join(wire, "B", None)
        await serve(b, [])
        with pytest.raises(P2PHandlerError, match="did not introduce itself"):
            await ping(a, "B")
        assert a.door.was_open and not a.door.was_refused

    asyncio.run(meet())


def test_what_is_remembered_of_members_is_bounded(monkeypatch):
    monkeypatch.setattr(door_module, "PEERS_REMEMBERED", 3)
    door = Door(SWARM)
    for number in range(9):
        peer = PeerID(b"\x12\x20" + bytes([number]) * 32)
        door.admit(peer, SWARM.certify(peer.to_bytes()), PING)
    assert len(door._known) == 3


def test_names_by_one_invitation_push_nobody_out_who_came_by_another(monkeypatch):
    monkeypatch.setattr(door_module, "PEERS_REMEMBERED", 4)
    door, other = Door(SWARM), OWNER.invite()
    for peer in (PEERS["A"], PEERS["B"]):
        door.admit(peer, other.certify(peer.to_bytes()), PING)
    for number in range(9):
        peer = PeerID(b"\x12\x20" + bytes([number]) * 32)
        door.admit(peer, SWARM.certify(peer.to_bytes()), PING)
    assert {PEERS["A"], PEERS["B"]} < door._known.keys() and len(door._known) == 4


def introduce(door, *names):
    """Have members that the door knows."""
    for name in names:
        door.admit(PEERS[name], SWARM.certify(PEERS[name].to_bytes()), PING)


# -- what the owner decides -----------------------------------------------------------------------


@pytest.mark.parametrize("membership", [SWARM, None], ids=["closed", "open"])
def test_who_calls_too_often_is_refused_for_a_while_and_named_once(monkeypatch, warnings, membership):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(door_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    door = Door(membership)
    certificate = membership.certify(PEERS["A"].to_bytes()) if membership else b""
    if membership:
        introduce(door, "A")

    def answered(peer="A"):
        try:
            return door.admit_request(PEERS[peer], certificate + b"ping", PING) == b"ping"
        except Refused as refused:
            assert "too many calls" in str(refused)
            return False

    assert sum(answered() for _ in range(2 * CALLS_AT_ONCE)) == CALLS_AT_ONCE
    clock.now += 1.0
    assert sum(answered() for _ in range(2 * CALLS_AT_ONCE)) == CALLS_A_SECOND
    if not membership:
        assert answered("B"), "another one has calls of its own"
    assert [warning for warning in warnings if "too often" in warning] == [
        f"Peer {PEERS['A']} was refused: it calls too often."
    ]


def test_a_long_request_counts_as_many_calls_as_it_may_hold_records(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(door_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    door = Door()
    half = bytes(CALL_BYTES * CALLS_AT_ONCE // 2)  # and the call itself
    assert door.admit_request(PEERS["A"], half, PING) == half
    with pytest.raises(Refused, match="too many calls"):
        door.admit_request(PEERS["A"], half, PING)
    clock.now += len(half) / CALL_BYTES / CALLS_A_SECOND + 1.0
    assert door.admit_request(PEERS["A"], half, PING) == half


def test_who_came_by_the_invitation_of_this_peer_is_no_stranger_when_it_has_met_nobody(monkeypatch, warnings):
    monkeypatch.setattr(door_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    door = Door(SWARM)
    for number in range(CALLS_AT_ONCE + 1):
        with pytest.raises(Refused):
            door.admit_request(PeerID(b"\x12\x20" + number.to_bytes(32)), bytes(CERTIFICATE_BYTES), PING)
    assert not [warning for warning in warnings if "too often" in warning]
    assert door.admit_request(PEERS["A"], SWARM.certify(PEERS["A"].to_bytes()) + b"ping", PING) == b"ping"


def test_all_strangers_together_call_no_more_often_than_one_member(monkeypatch, warnings):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(door_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    judged, real = [], door_module.certified

    def certified(owner, peer_id, certificate):
        judged.append(peer_id)
        return real(owner, peer_id, certificate)

    monkeypatch.setattr(door_module, "certified", certified)
    door = Door(SWARM)
    introduce(door, "A")
    for number in range(CALLS_AT_ONCE + 500):
        with pytest.raises(Refused):
            door.admit_request(PeerID(b"\x12\x20" + number.to_bytes(32)), bytes(CERTIFICATE_BYTES), PING)
    assert len(judged) == 1 + CALLS_AT_ONCE
    for name in "AB":  # a member that is known, and one that came by the same invitation
        certificate = SWARM.certify(PEERS[name].to_bytes())
        assert door.admit_request(PEERS[name], certificate + b"ping", PING) == b"ping"


def decided(**marks):
    return Policy(1, **{name: frozenset(some) for name, some in marks.items()}).to_bytes(OWNER)


def test_who_is_taken_out_is_answered_and_called_by_nobody_and_learns_why(wire, warnings):
    async def meet():
        asked = []
        a, m = join(wire, "A", SWARM), join(wire, "M", SWARM)
        for p2p in (a, m):
            await serve(p2p, asked)
        assert await ping(a, "M") and await ping(m, "A")
        a.door._book.offer(decided(out=[mark_of(PEERS["M"].to_bytes())]))
        for _ in range(2):
            with pytest.raises(P2PHandlerError, match=REFUSAL):
                await ping(m, "A")
            with pytest.raises(P2PHandlerError, match=f"is not called|{REFUSAL}"):
                await ping(a, "M")
        assert len(asked) == 2
        assert m.door.objection == "the owner has taken it out"

    asyncio.run(meet())
    assert warnings == [f"Peer {PEERS['M']} was refused: the owner has taken it out."]


def test_words_that_the_owner_did_not_sign_take_nobody_out(wire):
    async def meet():
        a, m = join(wire, "A", SWARM), join(wire, "M", SWARM)
        forged = Policy(9, out=frozenset({mark_of(PEERS["A"].to_bytes())})).to_bytes(OTHER_OWNER)

        async def refuse(certificate, remote_id):
            raise NotAMember("out", forged)

        await m._client.add_unary_handler(f"{SERVICE}.{INTRODUCE}", refuse)
        with pytest.raises(P2PHandlerError):
            await ping(a, "M")
        assert a.door.was_refused and a.door.objection == ""

    asyncio.run(meet())


def test_an_invitation_for_one_lets_the_first_in_until_the_owner_says_who_stays():
    once = OWNER.invite(is_once=True)
    door = Door(SWARM, PolicyBook(OWNER.public))
    first, second = (PEERS[name] for name in "BM")
    door.admit(second, once.certify(second.to_bytes()), f"{SERVICE}.rpc_find")  # it only looks
    for _ in range(2):
        door.admit(first, once.certify(first.to_bytes()), STORE)
        with pytest.raises(NotAMember):
            door.admit(second, once.certify(second.to_bytes()), STORE)
    door._book.offer(
        decided(closed=[mark_of(once.grant.key)], stay=[mark_of(second.to_bytes(), once.grant.key)])
    )
    door.admit(second, once.certify(second.to_bytes()), STORE)
    with pytest.raises(NotAMember):
        door.admit(first, once.certify(first.to_bytes()), STORE)


def test_whom_a_door_has_let_in_in_time_it_lets_in_later(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(door_module, "swarm_time", lambda: now[0])
    short, door = OWNER.invite(expires=100), Door(SWARM, PolicyBook(OWNER.public))
    early, late = (PEERS[name] for name in "BM")
    door.admit(early, short.certify(early.to_bytes()), PING)
    now[0] = 100.0
    door.admit(early, short.certify(early.to_bytes()), PING)
    with pytest.raises(NotAMember):
        door.admit(late, short.certify(late.to_bytes()), PING)


def test_a_door_that_is_made_anew_lets_in_whom_another_one_of_its_peer_let_in_in_time(monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(door_module, "swarm_time", lambda: now[0])
    short, (early, visitor) = OWNER.invite(expires=100), (PEERS[name] for name in "BM")

    def door():
        return Door(SWARM, PolicyBook(OWNER.public, tmp_path / "policy"))

    first = door()
    first.admit(early, short.certify(early.to_bytes()), STORE)
    first.admit(visitor, short.certify(visitor.to_bytes()), f"{SERVICE}.rpc_find")  # it only looks
    now[0] = 100.0
    door().admit(early, short.certify(early.to_bytes()), PING)
    with pytest.raises(NotAMember, match="over"):
        door().admit(visitor, short.certify(visitor.to_bytes()), PING)
    with pytest.raises(NotAMember):
        door().admit(visitor, short.certify(early.to_bytes()), PING)
    again = OWNER.invite(expires=100)
    with pytest.raises(NotAMember, match="over"):
        door().admit(early, again.certify(early.to_bytes()), PING)


def test_a_watcher_is_called_by_nobody(wire):
    async def meet():
        asked = []
        a, w = join(wire, "A", SWARM), join(wire, "M", OWNER.invite(Role.watcher))
        await serve(w, asked)
        for _ in range(2):
            with pytest.raises(P2PHandlerError, match="only watches"):
                await ping(a, "M")
        assert asked == []

    asyncio.run(meet())


def test_a_watcher_reads_records_and_does_nothing_else(warnings):
    watcher, door = OWNER.invite(Role.watcher), Door(SWARM, PolicyBook(OWNER.public))
    certificate = watcher.certify(PEERS["M"].to_bytes())
    for handler in (INTRODUCE, "rpc_ping", "rpc_find"):
        door.admit(PEERS["M"], certificate, f"{SERVICE}.{handler}")
    for handler in ("rpc_store", "rpc_join_group", "rpc_aggregate_part", "rpc_send_state", "rpc_findx"):
        with pytest.raises(NotAMember):
            door.admit(PEERS["M"], certificate, f"{SERVICE}.{handler}")
    assert warnings == [f"Peer {PEERS['M']} was refused: it may only watch."]


# -- streams --------------------------------------------------------------------------------------


class Writer(bytearray):
    """The end of a stream that is written to."""

    is_closed = False

    def write(self, data):
        self.extend(data)

    async def drain(self):
        pass

    def close(self):
        self.is_closed = True


async def listen(door, handler):
    """Have a handler of streams behind a door; return what p2pd calls in its place."""
    p2p = LocalP2P.behind(door)()
    p2p.peer_id, p2p._client = PEERS["A"], Wire().client_of(PEERS["A"])
    handlers = {}

    async def stream_handler(name, handler, balanced):
        handlers[name] = handler

    p2p._client.stream_handler = stream_handler
    p2p._listen_task = True  # it listens already
    await p2p.add_binary_stream_handler(PING, handler)
    p2p._listen_task = None
    return handlers[PING]


def opened(door, content, ends=True):
    """Have a member's handler called with a stream of M; say whether it got in, and what was written."""

    async def open_stream():
        entered = []

        async def handler(info, reader, writer):
            entered.append(await reader.read())

        guarded = await listen(door, handler)
        reader, writer = asyncio.StreamReader(), Writer()
        reader.feed_data(content)
        if ends:
            reader.feed_eof()
        await guarded(SimpleNamespace(peer_id=PEERS["M"]), reader, writer)
        return entered, writer

    return asyncio.run(open_stream())


def test_a_member_s_stream_begins_with_its_certificate():
    certificate = SWARM.certify(PEERS["M"].to_bytes())
    assert opened(Door(SWARM), certificate + b"content")[0] == [b"content"]
    assert opened(Door(), b"content")[0] == [b"content"], "in an open swarm, without"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"short", bytes(CERTIFICATE_BYTES)),
        OTHER_SWARM.certify(PEERS["M"].to_bytes()),
        SWARM.certify(PEERS["B"].to_bytes()),
    ],
    ids=["nothing", "short", "zeros", "another swarm's", "another peer's"],
)
def test_a_stranger_s_stream_is_closed_with_a_word(content):
    entered, writer = opened(Door(SWARM), content)
    assert entered == []
    assert REFUSAL.encode() in writer and writer.is_closed


def test_a_stream_of_one_who_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(door_module, "INTRODUCTION_S", 0.05)
    entered, writer = opened(Door(SWARM), b"", ends=False)
    assert entered == [] and writer.is_closed


def test_one_peer_has_only_so_many_streams_open(warnings):
    door = Door(SWARM)
    introduce(door, "A", "M")
    with contextlib.ExitStack() as stack:
        for _ in range(STREAMS_AT_ONCE):
            stack.enter_context(door.stream(PEERS["M"], PART))
        entered, writer = opened(door, SWARM.certify(PEERS["M"].to_bytes()))
        assert entered == [] and b"too many streams" in writer and writer.is_closed
        with door.stream(PEERS["A"], PART):
            pass
    assert opened(door, SWARM.certify(PEERS["M"].to_bytes()))[0] == [b""], "they are closed"
    assert warnings == [f"Peer {PEERS['M']} was refused: it has too many streams open."]


def test_all_strangers_together_have_only_so_many_streams_open():
    door = Door(SWARM)
    introduce(door, "A")

    async def knock():
        entered = []

        async def handler(info, reader, writer):
            entered.append(info.peer_id)

        guarded = await listen(door, handler)

        def open_stream(peer, content=b""):
            reader, writer = asyncio.StreamReader(), Writer()
            reader.feed_data(content)
            return asyncio.create_task(guarded(SimpleNamespace(peer_id=peer), reader, writer)), writer

        silent = [open_stream(PeerID(b"\x12\x20" + n.to_bytes(32))) for n in range(STREAMS_AT_ONCE + 9)]
        await open_stream(PEERS["A"], SWARM.certify(PEERS["A"].to_bytes()))[0]
        await asyncio.gather(*(task for task, _ in silent[STREAMS_AT_ONCE:]))
        assert entered == [PEERS["A"]] and sum(writer.is_closed for _, writer in silent) == 9
        for task, _ in silent:
            task.cancel()
        await asyncio.gather(*(task for task, _ in silent), return_exceptions=True)

    asyncio.run(knock())
    assert not door._streams


@pytest.mark.parametrize("handler", ["rpc_send_state", "rpc_replay"])
def test_one_peer_is_given_only_so_much_at_once(warnings, handler):
    door, called = Door(SWARM), f"{SERVICE}.{handler}"
    introduce(door, "A", "M")
    with contextlib.ExitStack() as stack:
        for _ in range(GIVEN_AT_ONCE):
            stack.enter_context(door.stream(PEERS["M"], called))
        with pytest.raises(Refused, match="too many streams"):
            stack.enter_context(door.stream(PEERS["M"], called))
        with door.stream(PEERS["A"], called), door.stream(PEERS["M"], PART):
            pass
    with door.stream(PEERS["M"], called):
        assert len(warnings) == 1
    assert not door._streams


def test_who_takes_nothing_of_what_it_is_sent_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(door_module, "TAKE_S", 0.05)

    class Full(Writer):
        async def drain(self):
            await asyncio.Event().wait()

    monkeypatch.setitem(globals(), "Writer", Full)
    _, writer = opened(Door(), b"")
    with pytest.raises(TimeoutError):
        asyncio.run(writer.drain())
