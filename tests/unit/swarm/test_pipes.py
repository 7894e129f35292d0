"""Messages over a stream of bytes, the pace at which others relay them, and which places are dialled."""

import asyncio
import contextlib
import functools
import socket
from types import SimpleNamespace

import pytest
from hivemind.p2p import P2P

from tests.simulation.network import VirtualLoop
from trahiv_cli.swarm import pipes
from trahiv_cli.swarm.pipes import HEARD, HELLO, MAX_PLACES, End, Listens, NotMet, Pace, first_of, join

TOKEN, OTHER = b"t" * 16, b"o" * 16
HERE = "127.0.0.1"


def played(story, loop_factory=None):
    """Play a test in an event loop."""

    @functools.wraps(story)
    def test(**given):
        with asyncio.Runner(loop_factory=loop_factory) as loop:
            loop.run(story(**given))

    return test


virtual = functools.partial(played, loop_factory=VirtualLoop)  # on a clock that jumps, without sockets


@pytest.fixture(autouse=True)
def _tries_follow_each_other_soon(monkeypatch):
    monkeypatch.setattr(pipes, "AGAIN_S", 0.005)


@contextlib.asynccontextmanager
async def pair():
    """Both ends of a stream."""
    ends = [End(*await asyncio.open_connection(sock=one)) for one in socket.socketpair()]
    try:
        yield ends
    finally:
        pipes.close(ends)


def packed(content):
    return len(content).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + content


@played
async def test_messages_arrive_unchanged_one_by_one():
    async with pair() as (one, other):
        await one.send("name", [("1.2.3.4", 5)], b"bytes", True)
        await one.send()
        assert await other.receive() == ["name", [("1.2.3.4", 5)], b"bytes", True]
        assert await other.receive() == []


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"\xa3why", b"\x05", b"\xd9\xff"])
@played
async def test_error_text_and_garbage_raise(content):
    async with pair() as (one, other):
        await one.send("nobody is there")
        with pytest.raises(NotMet, match=r"^nobody is there$"):
            await other.receive()
        one.writer.write(packed(content))
        with pytest.raises(NotMet, match="can't be read"):
            await other.receive()
        one.writer.close()
        with pytest.raises(EOFError):
            await other.receive()


@played
async def test_unexpected_or_missing_word_raises(monkeypatch):
    async with pair() as (one, other):
        one.writer.write(b"gogo")
        for _ in range(2):
            await other.hear(b"go")
        one.writer.write(b"no")
        with pytest.raises(NotMet, match="not expected"):
            await other.hear(b"go")
        one.writer.write(b"first")
        assert await other.first() == (other, b"first")
        monkeypatch.setattr(pipes, "ANSWER_S", 0.01)
        for wait in (other.hear(b"go"), other.receive()):
            with pytest.raises(TimeoutError):
                await wait
        one.writer.close()
        with pytest.raises(NotMet, match="closed"):
            await other.first()


@virtual
async def test_shared_pace_limits_all_users():
    pace, now = Pace(1000.0), asyncio.get_running_loop().time
    await asyncio.gather(*(pace.take(500) for _ in range(4)))
    assert now() == pytest.approx(2.0)
    await asyncio.sleep(8.0)
    await pace.take(1000)  # an unused rate is not saved up
    assert now() == pytest.approx(11.0)
    await pace.take(500, is_urgent=True)
    assert now() == pytest.approx(11.0)
    await pace.take(500)
    assert now() == pytest.approx(12.0), "what is urgent counts all the same"
    limited = Pace(most=10)
    for num_bytes in (6, 4):
        await limited.take(num_bytes)
        await Pace().take(2**40)
    assert now() == pytest.approx(12.0)
    with pytest.raises(NotMet, match="more than is passed on"):
        await limited.take(1)


@pytest.mark.parametrize("ends_first", [0, 1])
@played
async def test_joined_streams_end_together(ends_first):
    async with pair() as (a, near_a), pair() as (b, near_b):
        joined = asyncio.create_task(join(near_a, near_b))
        for one, other, said in ((a, b, b"to b"), (b, a, b"to a")):
            one.writer.write(said)
            await other.hear(said)
        (a, b)[ends_first].writer.write(b"the last word")
        (a, b)[ends_first].writer.close()
        await (b, a)[ends_first].hear(b"the last word")
        await asyncio.wait_for(joined, 1.0)
        for end in (a, b)[1 - ends_first : 2 - ends_first]:
            assert await end.reader.read() == b"", "it is closed, too"


@virtual
async def test_idle_joined_streams_are_closed():
    async def drain(): ...

    closed, now = [], asyncio.get_running_loop().time
    readers = [asyncio.StreamReader() for _ in range(2)]
    writer = SimpleNamespace(write=lambda chunk: None, drain=drain, close=lambda: closed.append(now()))
    joined = asyncio.create_task(join(*(End(reader, writer) for reader in readers)))
    for reader in (*readers, *readers):
        await asyncio.sleep(0.9 * pipes.IDLE_S)
        reader.feed_data(b"word")
    assert not closed
    await joined
    assert closed == [pytest.approx(4.6 * pipes.IDLE_S)] * 2


@played
async def test_join_ends_at_limit_or_cancellation():
    for paces in ((Pace(most=5), Pace()), ()):
        async with pair() as (a, near_a), pair() as (b, near_b):
            joined = asyncio.create_task(join(near_a, near_b, *paces))
            a.writer.write(b"12345")
            await b.hear(b"12345")
            a.writer.write(b"6") if paces else joined.cancel()
            assert await b.reader.read() == await a.reader.read() == b""
            await asyncio.wait([joined])
            assert joined.cancelled() is (not paces)


@virtual
async def test_first_good_result_cancels_other_tries():
    ended, now = [], asyncio.get_running_loop().time

    async def trying(after_s, result):
        try:
            await asyncio.sleep(after_s)
            if isinstance(result, Exception):
                raise result
            return result
        except asyncio.CancelledError:
            ended.append(result)
            raise

    assert await first_of([trying(1.0, NotMet()), trying(2.0, "good"), trying(3.0, "late")], 5.0) == "good"
    assert await first_of([trying(1.0, NotMet()), trying(2.0, OSError())], 5.0) is None, "all failed"
    assert await first_of([], 5.0) is None
    assert now() == pytest.approx(4.0)
    assert await first_of([trying(1.0, NotMet()), trying(9.0, "too late")], 5.0) is None
    await asyncio.sleep(0)
    assert now() == pytest.approx(9.0) and ended == ["late", "too late"]


@pytest.mark.parametrize(
    ("maddrs", "is_near", "places"),
    [
        (["ip4/5.5.5.1/tcp/1", "ip6/2606:4700::1/tcp/2"], False, [("5.5.5.1", 1), ("2606:4700::1", 2)]),
        (["ip4/5.5.5.1/tcp/1/p2p-circuit", "ip4/5.5.5.1/tcp/1"], False, [("5.5.5.1", 1)]),
        (["ip4/5.5.5.1/udp/1/quic-v1", "dns4/example.org/tcp/1", "unix/a.sock"], True, []),
        (["ip4/127.0.0.1/tcp/1", "ip6/::1/tcp/1", "ip4/10.0.0.1/tcp/1"], False, [("10.0.0.1", 1)]),
        (["ip4/127.0.0.1/tcp/1"], True, [(HERE, 1)]),
    ],
)
def test_places_are_unique_tcp_addresses(maddrs, is_near, places):
    assert pipes.places_of([f"/{maddr}" for maddr in maddrs], is_near=is_near) == tuple(places)


def test_candidate_places_include_own_ports():
    seen, own = [("5.5.5.1", 9), ("2606:4700::1", 9)], [("10.0.0.1", 1), ("fd00::1", 2), ("5.5.5.1", 9)]
    at_own_ports = [("5.5.5.1", 1), ("2606:4700::1", 2)]
    assert pipes.places_at(seen, own, [("5.5.5.1", 8)]) == [*seen, *at_own_ports, *own[:2]]
    assert pipes.places_at(seen, own, [("5.5.5.2", 8)]) == [*seen, *at_own_ports], "not within its home"
    many = [(f"5.5.5.{number}", 1) for number in range(2 * MAX_PLACES)]
    assert pipes.places_at(many, own, seen) == many[:MAX_PLACES]


@pytest.mark.parametrize(
    "place",
    [
        *(("example.org", 1), ("", 1), ("1.2.3.4", 0), ("1.2.3.4", 2**16), ("1.2.3.4", -1), ("1.2.3.4", "1")),
        *(("1.2.3.4", 1.5), ("fe80::1%eth0", 1), ("1.2.3.4", 1, 1), ("1.2.3.4",), (b"1.2.3.4", 1)),
        *(("1.2.3", 1), (16909060, 1), "1.2.3.4", None),
    ],
)
def test_places_from_strangers_are_validated(place):
    good = [("1.2.3.4", 1), ["::1", 2**16 - 1]]
    assert pipes.read_places(iter(good)) == (("1.2.3.4", 1), ("::1", 2**16 - 1))
    with pytest.raises(ValueError):
        pipes.read_places([*good, place])
    assert len(pipes.read_places(good * MAX_PLACES)) == MAX_PLACES
    assert len(pipes.read_places([good[0]] * MAX_PLACES + [place])) == MAX_PLACES, "the others are not read"


@pytest.mark.parametrize(
    ("host", "elsewhere", "is_global"),
    [
        *((host, True, True) for host in ("5.5.5.1", "2606:4700::1")),
        *((host, True, False) for host in ("192.168.1.7", "10.0.0.1", "100.64.0.9", "fd00::1")),
        *((host, False, False) for host in (HERE, "127.9.9.9", "::1", "0.0.0.0", "::", "169.254.1.1")),
        *(("fe80::1", False, False), ("239.255.255.250", False, None), ("ff05::1", False, None)),
    ],
)
def test_local_and_multicast_places_are_excluded(host, elsewhere, is_global):
    assert pipes.is_elsewhere((host, 1)) is elsewhere
    assert is_global is None or pipes.is_global((host, 1)) is is_global


@contextlib.asynccontextmanager
async def serving(*answers):
    """Answer each connection to a port of 127.0.0.1 with the next answer, and repeat the last; None: hang up.

    The port comes with a list of the bytes that were received, and the port from which each caller dialled.
    """
    heard, left, served = [], list(answers), []

    async def serve(reader, writer):
        served.append(asyncio.current_task())
        with contextlib.closing(writer):
            answer = left.pop(0) if len(left) > 1 else left[0]
            if answer is not None:
                writer.write(answer)
                with contextlib.suppress(EOFError):
                    said = await reader.readexactly(len(TOKEN))
                    heard.append((said, writer.get_extra_info("peername")[1]))
                await reader.read()

    async with await asyncio.start_server(serve, HERE, 0) as server:
        yield server.sockets[0].getsockname()[1], heard
        if served:
            await asyncio.wait(served, timeout=1.0)


@contextlib.contextmanager
def listening():
    """Listen as libp2p does; return the port."""
    with socket.socket() as listens:
        listens.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listens.bind((HERE, 0))
        listens.listen()
        yield listens.getsockname()[1]


async def knocked(answers):
    """Knock at a server with these answers; return the end, the bytes received there, and all opened ends."""
    opened = []
    with listening() as own:
        async with serving(*answers) as (port, heard):
            try:
                end = await pipes.knock(own, (HERE, port), TOKEN, opened)
            finally:
                pipes.close(opened)
    assert {from_port for _, from_port in heard} == {own}, "it was dialled from the port that is listened at"
    return end, [said for said, _ in heard], opened


@played
async def test_knock_is_answered_by_token():
    end, heard, opened = await knocked([TOKEN])
    assert opened == [end] and heard == [TOKEN]


@pytest.mark.parametrize("other", [OTHER, None, HELLO], ids=["another token", "nothing", "libp2p"])
@played
async def test_unexpected_knock_answer_is_retried(other):
    end, heard, opened = await knocked([other, TOKEN])
    assert opened[-1] is end and len(opened) == 2 and heard[-1] == TOKEN


@played
async def test_repeated_libp2p_answers_mean_listening():
    with pytest.raises(Listens, match="can be dialled"):
        await knocked([HELLO])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(knocked([OTHER]), 0.1)
    with pytest.raises(Listens):
        await knocked([*[HELLO, OTHER] * (HEARD - 1), HELLO])
    with listening() as own, socket.socket() as closed:
        closed.bind((HERE, 0))  # no process listens there
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pipes.knock(own, closed.getsockname(), TOKEN, []), 0.05)
        with pytest.raises(ConnectionRefusedError):
            await pipes.dial_from(own, closed.getsockname())


@played
async def test_dial_back_requires_libp2p():
    async with serving(HELLO) as (port, heard), serving(b"HTTP/1.1 400 Bad Request\r\n") as (other, _):
        place = (HERE, port)
        assert await pipes.dial_back(place) == place
        with pytest.raises(NotMet, match="something else"):
            await pipes.dial_back((HERE, other))
    assert heard[0][0] == HELLO[: len(TOKEN)]
    async with serving(None) as (silent, _):
        with pytest.raises((EOFError, ConnectionError)):
            await pipes.dial_back((HERE, silent))
    with pytest.raises(ConnectionRefusedError):
        await pipes.dial_back(place)
