"""What two nodes send each other is counted at the sockets of both, and is little more than what was sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hivemind.p2p import PeerID

from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.sockets import SocketTraffic, Traffic

pytestmark = pytest.mark.timeout(90)

PAYLOAD = 8 * 2**20
"""Bytes: far more than nodes that meet tell each other."""

DEADLINE_S = 20.0

TCP, QUIC = "/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"


def settings(*listen: str) -> DhtSection:
    return DhtSection(host_maddrs=list(listen), nat_port_map=False, auto_nat=False)


def transfer(sender: Node, receiver: Node) -> None:
    """Send `PAYLOAD` bytes from one node's daemon to the other's, until the last is acknowledged."""

    is_taken = asyncio.Event()

    async def take(_: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert len(await reader.readexactly(PAYLOAD)) == PAYLOAD
        writer.write(b".")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        is_taken.set()

    async def run() -> None:
        theirs, ours = await receiver.dht.replicate_p2p(), await sender.dht.replicate_p2p()
        await theirs.add_binary_stream_handler("payload", take)
        _, reader, writer = await ours.call_binary_stream_handler(
            PeerID.from_base58(receiver.peer_id), "payload"
        )
        writer.write(bytes(PAYLOAD))
        await asyncio.wait_for(reader.readexactly(1), DEADLINE_S)
        writer.close()
        await writer.wait_closed()
        await asyncio.wait_for(is_taken.wait(), DEADLINE_S)
        for node, replica in ((receiver, theirs), (sender, ours)):
            await replica.shutdown()
            node.dht._p2p_replica = None  # which would be used again, in a loop that has ended

    asyncio.run(run())


def read_until(traffic: SocketTraffic, is_enough: Callable[[Traffic], bool]) -> Traffic:
    deadline = time.monotonic() + DEADLINE_S
    while (found := traffic.read()) is None or not is_enough(found):
        assert time.monotonic() < deadline, found
    return found


def test_both_ends_count_what_was_sent_and_little_more(tmp_path: Path) -> None:
    with Node(settings(TCP), tmp_path / "first.key") as first:
        [address] = first.addresses()
        with Node(settings(TCP), tmp_path / "second.key", (address.maddr,)) as second:
            sender, receiver = SocketTraffic.of(first.dht), SocketTraffic.of(second.dht)
            transfer(first, second)
            got = read_until(receiver, lambda now: now.received >= PAYLOAD)
            sent = read_until(sender, lambda now: now.sent >= got.received)
            assert PAYLOAD <= got.received < 1.01 * PAYLOAD
            assert got.received <= sent.sent < 1.1 * PAYLOAD, "more, by what was sent again on a busy machine"
            assert sent.received < 0.01 * PAYLOAD
            assert got.sent < 0.01 * PAYLOAD
            transfer(second, first)
            both = read_until(sender, lambda now: now.received >= PAYLOAD + sent.received)
            assert both.sent - sent.sent < 0.1 * PAYLOAD


def test_a_connection_that_nobody_looked_at_is_counted_after_it_has_gone(tmp_path: Path) -> None:
    with Node(settings(TCP), tmp_path / "first.key") as first:
        traffic = SocketTraffic.of(first.dht)
        [address] = first.addresses()
        with Node(settings(TCP), tmp_path / "second.key", (address.maddr,)) as second:
            transfer(first, second)
            # Without a goodbye, at which our side would close and clear the counters.
            [daemon] = psutil.Process(second.dht.pid).children()
            daemon.kill()
        found = read_until(traffic, lambda now: now.sent >= PAYLOAD)
        assert found.sent < 1.1 * PAYLOAD


def test_a_daemon_that_has_ended_keeps_what_was_seen_of_it(tmp_path: Path) -> None:
    with Node(settings(TCP), tmp_path / "first.key") as first:
        [address] = first.addresses()
        with Node(settings(TCP), tmp_path / "second.key", (address.maddr,)) as second:
            traffic = SocketTraffic.of(second.dht)
            transfer(first, second)
            seen = read_until(traffic, lambda now: now.received >= PAYLOAD)
        assert PAYLOAD <= seen.received <= read_until(traffic, lambda _: True).received < 1.1 * PAYLOAD


def test_with_quic_nothing_is_known(tmp_path: Path) -> None:
    with Node(settings(TCP, QUIC), tmp_path / "identity.key") as node:
        assert SocketTraffic.of(node.dht).read() is None
