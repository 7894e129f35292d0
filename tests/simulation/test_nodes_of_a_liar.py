"""Whatever a node of the DHT asks, or answers, in any field, others go on with their own records.

Each message is one between two real protocols, with one field changed. A handler may refuse a request, which
only whoever asked hears of; an answer that can't be read counts as none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from tests.kit.lies import message_edits
from tests.simulation.board import Board, Dht, id_of, key_of
from trahiv_cli.swarm.clock import swarm_time

KEY = DHTID.generate(source="run_addresses")


class Node:
    """One node's protocol with its record of the key."""

    def __init__(self, board: Board, name: str) -> None:
        dht = Dht(board, key_of(name))
        self.id, self.place, self.protocol = PeerID.from_base58(id_of(name)), dht.place, dht.protocol
        dht.store("run_addresses", [f"of {name}"], swarm_time() + 60, subkey=dht.place, return_future=True)
        self.record, self.until = board.records["run_addresses"][dht.place]
        protocol = self.protocol
        protocol.client_mode, protocol.bucket_size, protocol.num_replicas = False, 20, 5
        protocol.wait_timeout, protocol.authorizer = 3.0, None
        protocol.node_id = DHTID.generate()
        protocol.node_info = dht_pb2.NodeInfo(node_id=protocol.node_id.to_bytes())
        protocol.storage, protocol.cache = DHTLocalStorage(), DHTLocalStorage()
        protocol.routing_table = RoutingTable(protocol.node_id, bucket_size=20, depth_modulo=5)
        protocol.p2p = SimpleNamespace(peer_id=self.id)
        protocol.storage.store_subkey(KEY, self.place, self.record, self.until)

    def request(self, what: str) -> Any:
        """What it asks."""
        keys, about = [KEY.to_bytes()], dht_pb2.NodeInfo(node_id=self.protocol.node_id.to_bytes())
        if what == "ping":
            return dht_pb2.PingRequest(peer=about)
        if what == "find":
            return dht_pb2.FindRequest(keys=keys, peer=about)
        record = {"subkeys": [MSGPackSerializer.dumps(self.place)], "values": [self.record]}
        until = {"expiration_time": [self.until], "in_cache": [False]}
        return dht_pb2.StoreRequest(keys=keys, **record, **until, peer=about)

    def ask(self, what: str, request: Any, other: Node) -> Any:
        """Answer another's request; an error is an answer, as the daemon tells the caller."""
        context = SimpleNamespace(remote_id=other.id)
        try:
            return self.run(lambda: getattr(self.protocol, f"rpc_{what}")(request, context))
        except Exception as error:  # noqa: BLE001 - as the daemon does
            return error

    def run(self, call: Callable[[], Any]) -> Any:
        """Make a call in a loop of its own, and let the tasks end that it has left."""

        async def settled() -> Any:
            self.protocol.rpc_semaphore = asyncio.Semaphore(4)
            try:
                return await call()
            finally:
                left = asyncio.all_tasks() - {asyncio.current_task()}
                await asyncio.gather(*left, return_exceptions=True)

        return asyncio.run(settled())


async def refuse(request: Any, **_: Any) -> Any:
    raise P2PHandlerError("not there")


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> tuple[Node, Node]:
    """An honest node and a liar; whom they ask meanwhile is not there."""
    unreachable = SimpleNamespace(rpc_ping=refuse, rpc_find=refuse, rpc_store=refuse)
    monkeypatch.setattr(DHTProtocol, "get_stub", lambda self, peer: unreachable)
    board = Board()
    honest, liar = Node(board, "A"), Node(board, "D")
    for one, other in ((honest, liar), (liar, honest)):
        one.protocol.routing_table.add_or_update_node(other.protocol.node_id, other.id)
        for name in "BC":
            one.protocol.routing_table.add_or_update_node(DHTID.generate(), PeerID.from_base58(id_of(name)))
    return honest, liar


WHAT = ("ping", "find", "store")


@pytest.mark.parametrize("what", WHAT)
def test_requests(nodes, what):
    honest, liar = nodes
    assert not isinstance(honest.ask(what, liar.request(what), liar), Exception)
    played = 0
    own = liar.request(what)
    for field, change in message_edits(own, honest.request(what)):
        honest.ask(what, change(own), liar)
        played += 1
        held = honest.protocol.storage.get(KEY).value
        assert held.get(honest.place).value == honest.record, field
        assert {place for place, _ in held.items()} <= {honest.place, liar.place}, field
        assert len(honest.protocol.storage) == 1, field
    assert played > 10


@pytest.mark.parametrize("what", WHAT)
def test_answers(monkeypatch, nodes, what):
    honest, liar = nodes
    protocol = honest.protocol
    whole, other = (one.ask(what, honest.request(what), honest) for one in (liar, honest))

    own = [honest.record], [honest.until], [honest.place]
    calls = {
        "ping": lambda: protocol.call_ping(liar.id),
        "find": lambda: protocol.call_find(liar.id, [KEY]),
        "store": lambda: protocol.call_store(liar.id, [KEY], *own),
    }

    def call(answer: Any) -> Any:
        async def give(request: Any, **_: Any) -> Any:
            return answer

        plain = SimpleNamespace(rpc_ping=give, rpc_find=give, rpc_store=give)
        monkeypatch.setattr(DHTProtocol, "get_stub", lambda self, peer: plain)
        return honest.run(calls[what])

    assert call(whole) is not None
    played = 0
    for field, change in message_edits(whole, other):
        found = call(change(whole))
        played += 1
        assert protocol.storage.get(KEY).value.get(honest.place).value == honest.record, field
        if what == "find" and found:
            [(value, nearest)] = found.values()
            assert len(nearest) <= 20 and all(len(id_.to_bytes()) <= 64 for id_ in nearest.values()), field
            places = [place for place, _ in value.value.items()] if value is not None else []
            assert set(places) <= {honest.place, liar.place}, field
    assert played > 10
