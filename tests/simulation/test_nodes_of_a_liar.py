"""Whatever a node of the DHT asks, or answers, in any field, others go on with their own records.

Each message is one between two real protocols, with one field changed. A handler may refuse a request, which
only whoever asked hears of; an answer that can't be read counts as none.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto.dht_pb2 import (
    FindRequest,
    FindResponse,
    NodeInfo,
    PingRequest,
    PingResponse,
    StoreRequest,
    StoreResponse,
)
from hivemind.utils import MSGPackSerializer

from tests.simulation.board import Board, Dht, id_of
from tests.simulation.messages import changes
from trahiv_cli.swarm.clock import swarm_time

HONEST, LIAR = "A", "D"
KEY = DHTID.generate(source="run_addresses")


class Node:
    """One node's protocol with its record of the key; what it calls, another's handlers answer."""

    def __init__(self, board: Board, name: str) -> None:
        dht = Dht(board, name)
        self.id, self.place, self.protocol = PeerID.from_base58(id_of(name)), dht.place, dht.protocol
        dht.store("run_addresses", [f"of {name}"], swarm_time() + 60, subkey=dht.place, return_future=True)
        self.record, self.until = board.records["run_addresses"][dht.place]
        protocol = self.protocol
        protocol.client_mode, protocol.bucket_size, protocol.num_replicas = False, 20, 5
        protocol.wait_timeout, protocol.authorizer = 3.0, None
        protocol.node_id = DHTID.generate()
        protocol.node_info = NodeInfo(node_id=protocol.node_id.to_bytes())
        protocol.storage, protocol.cache = DHTLocalStorage(), DHTLocalStorage()
        protocol.routing_table = RoutingTable(protocol.node_id, bucket_size=20, depth_modulo=5)
        protocol.p2p = SimpleNamespace(peer_id=self.id)
        protocol.storage.store_subkey(KEY, self.place, self.record, self.until)

    def holds_its_record(self) -> bool:
        """Whether it still has what it stored."""
        return self.protocol.storage.get(KEY).value.get(self.place).value == self.record


@pytest.fixture
def nodes() -> tuple[Node, Node]:
    board = Board()
    honest, liar = Node(board, HONEST), Node(board, LIAR)
    for one, other in ((honest, liar), (liar, honest)):
        one.protocol.routing_table.add_or_update_node(other.protocol.node_id, other.id)
        for name in "BC":
            one.protocol.routing_table.add_or_update_node(DHTID.generate(), PeerID.from_base58(id_of(name)))
    return honest, liar


async def settle() -> None:
    """Let the tasks end that a handler has left."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*left, return_exceptions=True)


def request_of(liar: Node, kind: type) -> Any:
    """What an honest node asks."""
    keys, about = [KEY.to_bytes()], NodeInfo(node_id=liar.protocol.node_id.to_bytes())
    if kind is PingRequest:
        return PingRequest(peer=about)
    if kind is FindRequest:
        return FindRequest(keys=keys, peer=about)
    record = StoreRequest(keys=keys, values=[liar.record], expiration_time=[liar.until], peer=about)
    record.subkeys.append(MSGPackSerializer.dumps(liar.place))
    record.in_cache.append(False)
    return record


async def refuse(request: Any, **_: Any) -> Any:
    """Answer nothing."""
    raise P2PHandlerError("not there")


UNREACHABLE = SimpleNamespace(rpc_ping=refuse, rpc_find=refuse, rpc_store=refuse)
HANDLERS = {PingRequest: "rpc_ping", FindRequest: "rpc_find", StoreRequest: "rpc_store"}


@pytest.mark.parametrize("kind", HANDLERS, ids=lambda kind: kind.__name__)
def test_requests(monkeypatch, nodes, kind):
    honest, liar = nodes
    monkeypatch.setattr(DHTProtocol, "get_stub", lambda self, peer: UNREACHABLE)
    whole, played = request_of(liar, kind), 0

    async def ask(request: Any) -> Any:
        honest.protocol.rpc_semaphore = asyncio.Semaphore(4)
        try:
            return await getattr(honest.protocol, HANDLERS[kind])(request, SimpleNamespace(remote_id=liar.id))
        except Exception as error:  # noqa: BLE001 - as the daemon does: the caller is told
            return error
        finally:
            await settle()

    assert not isinstance(asyncio.run(ask(whole)), Exception)
    for what, change in changes(whole, request_of(honest, kind)):
        request = kind()
        request.CopyFrom(whole)
        change(request)
        asyncio.run(ask(request))
        played += 1
        assert honest.holds_its_record(), what
        held = honest.protocol.storage.get(KEY).value
        assert {place for place, _ in held.items()} <= {honest.place, liar.place}, what
        assert len(honest.protocol.storage) == 1, what
    assert played > 10


@pytest.mark.parametrize("kind", [PingResponse, FindResponse, StoreResponse], ids=lambda kind: kind.__name__)
def test_answers(monkeypatch, nodes, kind):
    honest, liar = nodes
    asked = {PingResponse: PingRequest, FindResponse: FindRequest, StoreResponse: StoreRequest}[kind]
    context = SimpleNamespace(remote_id=honest.id)

    async def answered(by: Node) -> Any:
        by.protocol.rpc_semaphore = asyncio.Semaphore(4)
        answer = await getattr(by.protocol, HANDLERS[asked])(request_of(honest, asked), context)
        await settle()
        return answer

    async def call(answer: Any) -> Any:
        async def give(request: Any, **_: Any) -> Any:
            return answer

        plain = SimpleNamespace(rpc_ping=give, rpc_find=give, rpc_store=give)
        monkeypatch.setattr(DHTProtocol, "get_stub", lambda self, peer: plain)
        honest.protocol.rpc_semaphore = asyncio.Semaphore(4)
        if kind is PingResponse:
            found = await honest.protocol.call_ping(liar.id)
        elif kind is FindResponse:
            found = await honest.protocol.call_find(liar.id, [KEY])
        else:
            record = [honest.record], [honest.until], [honest.place]
            found = await honest.protocol.call_store(liar.id, [KEY], *record)
        await settle()
        return found

    monkeypatch.setattr(DHTProtocol, "get_stub", lambda self, peer: UNREACHABLE)
    whole, other, played = asyncio.run(answered(liar)), asyncio.run(answered(honest)), 0
    assert asyncio.run(call(whole)) is not None
    for what, change in changes(whole, other):
        answer = kind()
        answer.CopyFrom(whole)
        change(answer)
        found = asyncio.run(call(answer))
        played += 1
        assert honest.holds_its_record(), what
        if kind is FindResponse and found:
            [(value, nearest)] = found.values()
            assert len(nearest) <= 20 and all(len(id_.to_bytes()) <= 64 for id_ in nearest.values()), what
            places = [place for place, _ in value.value.items()] if value is not None else []
            assert set(places) <= {honest.place, liar.place}, what
    assert played > 10
