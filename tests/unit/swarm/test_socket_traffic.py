"""What the kernel's counters say of sockets that stay, close, or come and go between two looks."""

import contextlib
import os
import socket
import struct
import time

import pytest

from trahiv_cli.swarm import sockets
from trahiv_cli.swarm.sockets import SocketTraffic, Traffic

DEADLINE_S = 10.0

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "AF_NETLINK"), reason="only Linux counts: comes back there"
)


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request):
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        found = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip("no loopback of IPv6 here: comes back where there is one")
    with found:
        yield found


@pytest.fixture
def traffic():
    counter = SocketTraffic(os.getpid())
    yield counter
    counter.close()


@contextlib.contextmanager
def connected(listener):
    with socket.create_connection(listener.getsockname()[:2]) as one, listener.accept()[0] as other:
        yield one, other


def send(one, other, num_bytes):
    one.sendall(bytes(num_bytes))
    while num_bytes:
        num_bytes -= len(other.recv(num_bytes))


def read_until(traffic, is_enough):
    """The kernel tells of sockets that went a little after they went."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_enough(traffic.read()) and time.monotonic() < deadline:
        pass
    return traffic.read()


def test_what_passes_is_counted_at_both_ends_and_once(listener, traffic):
    with connected(listener) as pair:
        assert traffic.read() == Traffic(0, 0)
        send(*pair, 1000)
        send(*reversed(pair), 10)
        assert traffic.read() == traffic.read() == Traffic(1010, 1010)
        send(*pair, 234)
        assert traffic.read() == Traffic(1244, 1244)


def test_what_had_passed_before_is_not_counted(listener):
    with connected(listener) as pair:
        send(*pair, 1000)
        traffic = SocketTraffic(os.getpid())
        send(*pair, 5)
        assert traffic.read() == Traffic(5, 5)
        traffic.close()


def test_a_socket_that_closes_between_two_looks_is_counted_to_its_end(listener, traffic):
    with connected(listener) as pair:
        send(*pair, 1000)
        assert traffic.read() == Traffic(1000, 1000)
        send(*pair, 5000)
    found = read_until(traffic, lambda now: now.sent >= 6000 and now.received >= 6001)
    assert found.sent == 6000
    assert 6000 <= found.received <= 6002  # the kernel counts an end as a byte


def test_a_socket_that_is_closed_by_a_reset_keeps_what_was_seen_of_it(listener, traffic):
    with connected(listener) as pair:
        send(*pair, 1000)
        assert traffic.read() == Traffic(1000, 1000)
        # As libp2p closes: the kernel clears the counters then.
        pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with connected(listener) as pair:
        send(*pair, 10)
        assert read_until(traffic, lambda now: now.received >= 1010) == Traffic(1010, 1010)


def test_a_connection_that_comes_and_goes_between_two_looks_is_counted(listener, traffic):
    assert traffic.read() == Traffic(0, 0)
    with connected(listener) as pair:
        send(*pair, 4000)
    assert 4000 <= read_until(traffic, lambda now: now.received >= 4000).received <= 4001


def test_of_many_that_went_only_the_last_are_remembered_and_of_one_that_stays_all_is(
    listener, traffic, monkeypatch
):
    monkeypatch.setattr(sockets, "REMEMBERED", 16)
    with connected(listener) as lasting:
        sent = 0
        for _ in range(20):
            with connected(listener) as pair:
                send(*pair, 7)
                send(*lasting, 1000)
                sent += 1007
                assert traffic.read().sent == sent
        assert 4 <= len(traffic._counted) <= 16


def test_a_socket_that_the_kernel_s_list_lacks_for_a_while_is_not_counted_anew(
    listener, traffic, monkeypatch
):
    listed = sockets._sockets
    monkeypatch.setattr(sockets, "REMEMBERED", 4)
    with connected(listener) as lasting:
        send(*lasting, 1000)
        assert traffic.read().sent == 1000
        hidden = {os.fstat(one.fileno()).st_ino for one in lasting}
        monkeypatch.setattr(
            sockets, "_sockets", lambda *asked: (one for one in listed(*asked) if one.inode not in hidden)
        )
        for _ in range(4):
            with connected(listener) as pair:
                send(*pair, 7)
                traffic.read()
        monkeypatch.setattr(sockets, "_sockets", listed)
        assert traffic.read().sent == 1000 + 4 * 7


def test_sockets_of_others_are_not_counted(listener):
    traffic = SocketTraffic(os.getppid())
    before = traffic.read()
    with connected(listener) as pair:
        send(*pair, 1_000_000)
        after = traffic.read()
    assert before is None or after.received - before.received < 1_000_000
    traffic.close()


def test_beside_a_udp_socket_nothing_is_known_while_it_is_open(traffic):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        assert traffic.read() == Traffic(0, 0), (
            "as one that looks for a router, it may be gone at the next look"
        )
        assert traffic.read() is None
    assert traffic.read() == Traffic(0, 0)


def test_a_udp_socket_that_talks_to_one_address_alone_is_not_quic_s(traffic):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.connect(("127.0.0.1", 5351))  # sends nothing
        assert [traffic.read() for _ in range(3)] == [Traffic(0, 0)] * 3
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as another:
            another.bind(("127.0.0.1", 0))
            assert traffic.read() == Traffic(0, 0)
            assert traffic.read() is None
        assert traffic.read() == Traffic(0, 0)


def test_without_a_process_nothing_is_known():
    assert SocketTraffic(None).read() is None
    assert SocketTraffic(2**30).read() is None


def test_where_the_kernel_does_not_count_nothing_is_known(monkeypatch):
    monkeypatch.setattr(sockets.sys, "platform", "darwin")
    assert SocketTraffic(os.getpid()).read() is None


def test_closed_it_knows_nothing_and_may_be_closed_again(traffic):
    traffic.close()
    traffic.close()
    assert traffic.read() is None


def test_a_kernel_that_counts_no_sent_bytes_is_refused():
    old = sockets._ATTRIBUTE.pack(4 + 192, sockets.INET_DIAG_INFO) + bytes(192)
    with pytest.raises(OSError, match="does not count"):
        sockets._traffic(old)
    assert sockets._traffic(b"") is None
