"""Messages over a stream of bytes, the pace at which others relay them, and which places are dialled."""

import asyncio
import contextlib
import socket
from itertools import chain, repeat
from unittest.mock import AsyncMock, Mock

import pytest
from hivemind.p2p import P2P

from tests.unit.async_tests import with_sockets
from trahiv_cli.net import byte_streams as pipes
from trahiv_cli.net.byte_streams import HELLO, MAX_PLACES, End, Listens, NotMet, Pace, first_of, join

TOKEN = b"t" * 16
OTHER = b"o" * 16
HERE = "127.0.0.1"


def end_of(content, is_closed=True):
    """Return the end of a stream that has brought some bytes."""
    reader = asyncio.StreamReader()
    reader.feed_data(content)
    if is_closed:
        reader.feed_eof()
    return End(reader, Mock())


@pytest.fixture
def now(loop):
    return loop.get_loop().time


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"\xa3why", b"\x05", b"\xd9\xff"])
async def test_garbage_is_no_message(content):
    end = end_of(len(content).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + content)
    with pytest.raises(NotMet, match="can't be read"):
        await end.receive()
    with pytest.raises(EOFError):
        await end.receive()


async def test_unexpected_word_raises():
    end = end_of(b"gogono")
    for _ in range(2):
        await end.hear(b"go")
    with pytest.raises(NotMet, match="not expected"):
        await end.hear(b"go")


@pytest.mark.parametrize("wait", [lambda end: end.hear(b"go"), End.receive])
async def test_missing_answer_times_out(wait):
    with pytest.raises(TimeoutError):
        await wait(end_of(b"", is_closed=False))


async def test_first_bytes_come_with_their_stream():
    end = end_of(b"first")
    assert await end.first() == (end, b"first")
    with pytest.raises(NotMet, match="closed"):
        await end.first()


async def test_shared_pace_limits_all_users(now):
    pace = Pace(1000.0)
    await asyncio.gather(*(pace.take(500) for _ in range(4)))
    assert now() == pytest.approx(2.0)
    await asyncio.sleep(8.0)
    await pace.take(1000)  # an unused rate is not saved up
    assert now() == pytest.approx(11.0)
    await pace.take(500, is_urgent=True)
    assert now() == pytest.approx(11.0)
    await pace.take(500)
    assert now() == pytest.approx(12.0)  # urgent bytes count, too


async def test_pace_without_rate_takes_no_time(now):
    await Pace().take(2**40)
    assert now() == pytest.approx(0.0, abs=1e-6)


async def test_pace_limits_total():
    limited = Pace(most=10)
    for num_bytes in (6, 4):
        await limited.take(num_bytes)
    with pytest.raises(NotMet, match="more than is passed on"):
        await limited.take(1)


async def test_idle_joined_streams_are_closed(now):
    closed = []
    readers = [asyncio.StreamReader() for _ in range(2)]
    writer = Mock(drain=AsyncMock(), close=lambda: closed.append(now()))
    joined = asyncio.create_task(join(*(End(reader, writer) for reader in readers)))
    for reader in (*readers, *readers):
        await asyncio.sleep(54.0)
        reader.feed_data(b"word")
    assert not closed
    await joined
    assert closed == [pytest.approx(276.0)] * 2


@pytest.mark.parametrize(
    "tries, result, seconds, num_ended",
    [
        ({1.0: NotMet(), 2.0: "good", 3.0: "late"}, "good", 2.0, 2),
        ({1.0: NotMet(), 2.0: OSError()}, None, 2.0, 2),
        ({1.0: NotMet(), 9.0: "too late"}, None, 5.0, 1),
        ({}, None, 0.0, 0),
    ],
)
async def test_first_good_result_cancels_other_tries(now, tries, result, seconds, num_ended):
    ended = []

    async def trying(after_s, result):
        await asyncio.sleep(after_s)
        ended.append(after_s)
        if isinstance(result, Exception):
            raise result
        return result

    assert await first_of([trying(*one) for one in tries.items()], 5.0) == result
    assert now() == pytest.approx(seconds, abs=1e-6)
    await asyncio.sleep(10.0)
    assert len(ended) == num_ended  # the others were cancelled


@pytest.mark.parametrize(
    "maddrs, is_near, places",
    [
        ("/ip4/5.5.5.1/tcp/1 /ip6/2606:4700::1/tcp/2", False, [("5.5.5.1", 1), ("2606:4700::1", 2)]),
        ("/ip4/5.5.5.1/tcp/1/p2p-circuit /ip4/5.5.5.1/tcp/1", False, [("5.5.5.1", 1)]),
        ("/ip4/5.5.5.1/udp/1/quic-v1 /dns4/example.org/tcp/1 /unix/a.sock", True, []),
        ("/ip4/127.0.0.1/tcp/1 /ip6/::1/tcp/1 /ip4/10.0.0.1/tcp/1", False, [("10.0.0.1", 1)]),
        ("/ip4/127.0.0.1/tcp/1", True, [(HERE, 1)]),
    ],
)
def test_places_are_unique_tcp_addresses(maddrs, is_near, places):
    assert pipes.places_of(maddrs.split(), is_near=is_near) == tuple(places)


def test_candidate_places_include_own_ports():
    seen, own = [("5.5.5.1", 9), ("2606:4700::1", 9)], [("10.0.0.1", 1), ("fd00::1", 2), ("5.5.5.1", 9)]
    at_own_ports = [("5.5.5.1", 1), ("2606:4700::1", 2)]
    assert pipes.places_at(seen, own, [("5.5.5.1", 8)]) == [*seen, *at_own_ports, *own[:2]]
    assert pipes.places_at(seen, own, [("5.5.5.2", 8)]) == [*seen, *at_own_ports]  # not within its home
    many = [(f"5.5.5.{number}", 1) for number in range(2 * MAX_PLACES)]
    assert pipes.places_at(many, own, seen) == many[:MAX_PLACES]


@pytest.mark.parametrize(
    "place",
    [
        *(("1.2.3.4", port) for port in (0, 2**16, -1, "1", 1.5)),
        *((host, 1) for host in ("example.org", "", "fe80::1%eth0", b"1.2.3.4", "1.2.3", 16909060)),
        *(("1.2.3.4", 1, 1), ("1.2.3.4",), "1.2.3.4", None),
    ],
)
def test_invalid_place_from_stranger_is_refused(place):
    with pytest.raises(ValueError):
        pipes.read_places([place])


def test_first_places_from_stranger_are_read():
    good = [("1.2.3.4", 1), ["::1", 2**16 - 1]]
    assert pipes.read_places(iter(good)) == (("1.2.3.4", 1), ("::1", 2**16 - 1))
    assert len(pipes.read_places([good[0]] * MAX_PLACES + [None])) == MAX_PLACES


@pytest.mark.parametrize(
    "hosts, elsewhere, is_global",
    [
        ("5.5.5.1 2606:4700::1", True, True),
        ("192.168.1.7 10.0.0.1 100.64.0.9 fd00::1", True, False),
        ("127.0.0.1 127.9.9.9 ::1 0.0.0.0 :: 169.254.1.1 fe80::1", False, False),
    ],
)
def test_place_is_classified_by_address(hosts, elsewhere, is_global):
    for host in hosts.split():
        assert (pipes.is_elsewhere((host, 1)), pipes.is_global((host, 1))) == (elsewhere, is_global), host


@pytest.mark.parametrize("host", ["239.255.255.250", "ff05::1"])
def test_multicast_place_is_on_no_other_machine(host):
    assert not pipes.is_elsewhere((host, 1))


@contextlib.contextmanager
def listening():
    """Listen as libp2p does; return the port."""
    with socket.socket() as listens:
        listens.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listens.bind((HERE, 0))
        listens.listen()
        yield listens.getsockname()[1]


@with_sockets
async def test_dial_leaves_from_listening_port():
    with listening() as own, listening() as other:
        end = await pipes.dial_from(own, (HERE, other))
        assert end.writer.get_extra_info("sockname") == (HERE, own)
        end.writer.close()


@with_sockets
async def test_refused_dial_raises():
    with listening() as own, socket.socket() as closed:
        closed.bind((HERE, 0))  # no process listens there
        with pytest.raises(ConnectionRefusedError):
            await pipes.dial_from(own, closed.getsockname())


@pytest.fixture
def knocked(monkeypatch):
    """Knock at a place with these answers, the last for ever (None: refused); return the end and all ends."""

    async def knock(*answers):
        left, opened = chain(answers, repeat(answers[-1])), []
        ends = (ConnectionRefusedError if answer is None else end_of(answer) for answer in left)
        monkeypatch.setattr(pipes, "dial_from", AsyncMock(side_effect=ends))
        return await asyncio.wait_for(pipes.knock(1, (HERE, 2), TOKEN, opened, 0.1), 60.0), opened

    return knock


@pytest.mark.parametrize("others", [[OTHER], [b""], [HELLO], []])
async def test_unexpected_knock_answer_is_retried(knocked, others):
    end, opened = await knocked(None, *others, TOKEN)
    assert opened[len(others) :] == [end]
    end.writer.write.assert_called_once_with(TOKEN)


async def test_knock_closes_connection_with_other_answer(knocked):
    _, [other, _] = await knocked(OTHER, TOKEN)
    other.writer.close.assert_called_once()


async def test_repeated_libp2p_answers_mean_listening(knocked):
    with pytest.raises(Listens, match="can be dialled"):
        await knocked(*[HELLO, OTHER] * 3)


async def test_few_libp2p_answers_do_not_mean_listening(knocked):
    with pytest.raises(TimeoutError):
        await knocked(*[HELLO] * 2, OTHER)


@pytest.mark.parametrize(
    "answer, error", [(b"HTTP/1.1 400 Bad Request\r\n", NotMet), (b"", (EOFError, ConnectionError))]
)
@with_sockets
async def test_dial_back_requires_libp2p(answer, error):
    async def serve(reader, writer):
        writer.write(answer)
        writer.write_eof()
        heard.set_result(await reader.read())
        writer.close()

    heard = asyncio.get_running_loop().create_future()
    async with await asyncio.start_server(serve, HERE, 0) as server:
        with pytest.raises(error):
            await pipes.dial_back(server.sockets[0].getsockname())
        assert await heard == HELLO
