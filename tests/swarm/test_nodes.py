"""Two nodes connect by an address of any transport, and read each other's records."""

import asyncio
import ctypes
import json
import multiprocessing as mp
import os
import re
import signal
import socket
import threading
import time
from functools import partial
from multiprocessing.sharedctypes import RawValue

import psutil
import pytest
from hivemind.proto.runtime_pb2 import Tensor
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import as_aiter
from hivemind.utils.multiaddr import Multiaddr

from tests.kit.commands import wait_until
from tests.swarm.conftest import LOCAL
from trahiv_cli import clock
from trahiv_cli.errors import SetupError, SwarmError, Unreachable
from trahiv_cli.members.door import Door
from trahiv_cli.net.addresses import socket_of
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.corrections import dht
from trahiv_cli.swarm.corrections.processes import require_start
from trahiv_cli.swarm.known_peers import KnownPeers
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.reconnector import known_peers
from trahiv_cli.swarm.service import Service, ServiceHandle

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def node(tmp_path):
    """`node("first", *peers)` starts a node with a file of acquaintances, which outlives it."""

    def start(name, *peers, settings=LOCAL):
        met = KnownPeers(tmp_path / f"{name}.json")
        return Node(settings, tmp_path / f"{name}.key", peers, met=met)

    return start


@pytest.mark.parametrize(
    "listen", ["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"], ids=["tcp", "quic"]
)
def test_node_reads_published_record(node, listen):
    settings = LOCAL.model_copy(update={"host_maddrs": [listen]})
    with node("first", settings=settings) as first:
        assert first.publish("key", b"value", ttl_s=60)
        with node("second", *first.own_addresses(), settings=settings) as second:
            assert second.fetch("key") == {first.peer_id: b"value"}
            assert second.fetch("another") == {}


def test_node_listens_on_all_given_addresses(node):
    named = ["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic", "/ip4/127.0.0.1/tcp/0/ws"]
    with node("first", settings=DhtSection(host_maddrs=named)) as first:
        listens = " ".join(maddr.partition("/p2p/")[0] for maddr in first.own_addresses())
        shapes = re.sub("/(tcp|udp)/[0-9]+", r"/\1/0", listens).split()
        assert set(shapes) == {named[0], named[1] + "-v1", named[2]}
        assert [note.split()[0] for note in first.notes()] == [named[1]]


def test_router_address_is_announced(node):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outside = f"/ip4/203.0.113.7/tcp/{port}"
    with node("first", settings=DhtSection(host_maddrs=[outside])) as first:
        assert first.publish("key", b"value", ttl_s=60)
        assert len(first.notes()) == 1
        assert first.own_addresses() == [f"{outside}/p2p/{first.peer_id}"]
        inside = f"/ip4/127.0.0.1/tcp/{port}/p2p/{first.peer_id}"
        with node("second", inside) as second:
            assert second.fetch("key") == {first.peer_id: b"value"}


async def drop_all(_, node):
    """Forget the other nodes, as a node does when they do not answer."""
    for peer in list(node.protocol.routing_table.uid_to_peer_id):
        del node.protocol.routing_table[peer]


def test_dropped_connected_peers_find_each_other(node):
    """As after one stalled for a while: neither asks the other any more, and connections outlast that."""
    with node("first") as first:
        with node("second", *first.own_addresses()) as second:
            both = first, second
            wait_until(lambda: all(one.run(known_peers) for one in both))
            for one in both:
                one.run(drop_all)
            wait_until(lambda: all(one.run(known_peers) for one in both))
            assert first.publish("key", b"value", ttl_s=60)
            assert second.fetch("key")


def test_bursty_connection_loses_no_reply():
    """As through a relay; plain hivemind loses about one reply in 1,000 this way."""
    replies = asyncio.run(ask_in_bursts(rounds=100, at_once=16))
    assert replies == [[[[2**16]]] * 16] * 100


async def ask_in_bursts(rounds, at_once):
    """Return the replies to many calls whose bytes are held back for a while in both directions."""

    async def serve(requests, context):
        sizes = [len(request.buffer) async for request in requests]
        yield Tensor(size=sizes)

    async def forward(reader, writer):
        while chunk := await reader.read(2**16):
            await asyncio.sleep(0.005)
            writer.write(chunk)
        writer.close()

    async def relay(reader, writer):
        near, far = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(forward(reader, far), forward(near, writer))

    async def call():
        part = Tensor(buffer=bytes(2**16))
        answers = await caller.iterate_protobuf_handler(served.peer_id, "serve", as_aiter(part), Tensor)
        return [list(answer.size) async for answer in answers]

    kind, settings = Door().guarded(), {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "auto_nat": False}
    served, caller = [await kind.create(**settings, nat_port_map=False) for _ in range(2)]
    await served.add_protobuf_handler("serve", serve, Tensor, stream_input=True, stream_output=True)
    [maddr] = await served.get_visible_maddrs()
    port = socket_of(maddr).port
    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        burst = server.sockets[0].getsockname()[1]
        await caller._client.connect(served.peer_id, [Multiaddr(f"/ip4/127.0.0.1/tcp/{burst}")])
        replies = [await asyncio.gather(*(call() for _ in range(at_once))) for _ in range(rounds)]
        await caller.shutdown()
        await served.shutdown()
    return replies


def test_closing_node_releases_mpfuture_lock(node, monkeypatch):
    """A process preempted while it reports its end is waited for; another node can start after that."""

    def send_slowly(future, *update):
        with MPFuture._update_lock:
            future._sender_pipe.send((future._uid, *update))
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.5)

    monkeypatch.setattr(MPFuture, "_send_update", send_slowly)
    with node("closing") as closing:
        ServiceHandle(closing.dht, Service("a", is_client=False)).shutdown(timeout_s=5)
    assert MPFuture._update_lock.acquire(timeout=5), "the lock went with the process"
    MPFuture._update_lock.release()


def sees(one, other):
    return other.peer_id in one.run(known_peers)


def test_node_moves_from_taken_port(node, tmp_path):
    """That it listens there again if the port is free is in `test_restarts.py`."""
    with node("first") as first:
        before = first.own_addresses()
        wait_until((tmp_path / "first.json").exists)
    with socket.create_server(("127.0.0.1", int(Multiaddr(before[0])["tcp"]))):
        with node("first") as first:
            assert first.own_addresses() != before


def test_restarted_peers_find_each_other(node, tmp_path):
    with node("first") as first, node("second", *first.own_addresses()) as second:
        wait_until(lambda: second.peer_id in KnownPeers(tmp_path / "first.json").addresses)
    with node("first") as first:  # the second is not there
        assert first.run(known_peers) == []
        book = json.loads((tmp_path / "second.json").read_text())
        (tmp_path / "second.json").write_text(json.dumps(book | {"peers": {}}))
        with node("second") as second:  # and does not know the first
            wait_until(lambda: sees(first, second) and sees(second, first))


def test_wrong_peer_and_duplicate_identity_are_refused(node, tmp_path):
    nobody = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
    with node("first") as first:
        address = first.own_addresses()[0].replace(first.peer_id, nobody)
        with pytest.raises(Unreachable, match=f"{nobody}: something else listens there") as no:
            node("second", address)
        assert "fresh `trahiv join`" in no.value.hint
        assert no.value.exit_code == 4
        key = (tmp_path / "first.key").read_bytes()
        with pytest.raises(SetupError, match="this identity is already in the swarm") as there:
            Node(LOCAL, tmp_path / "first.key", tuple(first.own_addresses()))
    assert "--identity FILE" in there.value.hint
    assert there.value.exit_code == 3
    assert (tmp_path / "first.key").read_bytes() == key


@pytest.mark.parametrize("which", [0, 1], ids=["its DHT", "its p2pd"])
def test_stalled_member_still_admits_joiner(node, which):
    with node("first") as first:
        line, process = first.own_addresses(), psutil.Process(first.pids()[which])
        process.suspend()
        timer = threading.Timer(7.0, process.resume)
        timer.start()
        try:
            with node("second", *line) as second:
                assert second.publish("key", b"value", ttl_s=100)
        finally:
            timer.join()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_dht_failure_at_start_is_reported(node, monkeypatch, how):
    monkeypatch.setattr(dht, "require_start", partial(require_start, timeout_s=2.0))
    monkeypatch.setattr(dht, "become_child", lambda parent: os.kill(os.getpid(), how))
    with pytest.raises(SwarmError, match="while it started"):
        node("first")
    assert not mp.active_children()


@pytest.mark.parametrize("ahead_s", [-5000.0, 5000.0], ids=["slow", "fast"])
def test_wrong_clock_adopts_swarm_time(node, monkeypatch, ahead_s):
    """Peers that report a wrong time are tested in `tests/simulation` and `tests/unit/swarm`."""
    with node("first") as first:
        assert first.publish("key", b"value", ttl_s=100)
        line = first.own_addresses()
        # This process, and those that are forked from now on, are a machine with another clock.
        monkeypatch.setattr(clock, "_ahead", RawValue(ctypes.c_double, ahead_s))
        with node("other", *line) as other:
            assert abs(clock._ahead.value) < 10.0, "nearly, on a busy machine"
            assert other.publish("key", b"another", ttl_s=100)
            for one in (first, other):
                assert one.fetch("key") == {first.peer_id: b"value", other.peer_id: b"another"}
