"""Whatever a node of the DHT asks, or answers, in any field, others go on with their own records.

Each message is one between two real protocols, with one field changed. A handler may refuse a request, which
only whoever asked hears of; an answer that can't be read counts as none.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from tests.kit.lies import message_edits
from tests.simulation.board import Board, Dht, id_of, key_of
from tests.simulation.network import Message, Network, Tamper, VirtualLoop
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.corrections.nodes import CorrectedProtocol

RECORDS = "run_addresses"
KEY = DHTID.generate(source=RECORDS)
SETTINGS = {"bucket_size": 20, "depth_modulo": 5, "num_replicas": 5, "wait_timeout": 3.0}
ABSENT = {DHTID.generate(): PeerID.from_base58(id_of(name)) for name in "BC"}
"""Nodes of which both know, and which are not there."""


class Node:
    """A peer with a record; each message finds its node as new."""

    def __init__(self, board: Board, name: str) -> None:
        self.dht, self.node_id = Dht(board, key_of(name)), DHTID.generate()
        self.id, self.place = self.dht.peer_id, self.dht.place
        self.dht.store(RECORDS, [f"of {name}"], swarm_time() + 300, subkey=self.place, return_future=True)
        self.record, self.until = board.records[RECORDS][self.place]

    async def enter(self, network: Network, other: Node) -> None:
        p2p, validator = network.p2p_of(self.id), self.dht.validator
        self.protocol: Any = await CorrectedProtocol.create(
            p2p, self.node_id, record_validator=validator, **SETTINGS
        )
        self.protocol.storage.store_subkey(KEY, self.place, self.record, self.until)
        for node_id, peer in {other.node_id: other.id, **ABSENT}.items():
            self.protocol.routing_table.add_or_update_node(node_id, peer)

    async def ask(self, what: str, other: Node) -> Any:
        if what == "ping":
            return await self.protocol.call_ping(other.id)
        if what == "find":
            return await self.protocol.call_find(other.id, [KEY])
        return await self.protocol.call_store(other.id, [KEY], [self.record], [self.until], [self.place])


def play(caller: Node, other: Node, what: str, tamper: Tamper) -> Any:
    """Have one node ask another, and return what it makes of the answer."""

    async def scene() -> Any:
        network = Network()
        network.tamper = tamper
        await caller.enter(network, other)
        await other.enter(network, caller)
        found = await caller.ask(what, other)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*left, return_exceptions=True)
        return found

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scene())


@pytest.mark.parametrize("is_answer", [False, True], ids=["asked", "answered"])
@pytest.mark.parametrize("what", ["ping", "find", "store"])
def test_no_field_of_a_message_does_harm(what, is_answer):
    board = Board()
    honest, liar = Node(board, "A"), Node(board, "D")
    kind = getattr(dht_pb2, f"{what.title()}{'Response' if is_answer else 'Request'}")
    roles = (honest, liar) if is_answer else (liar, honest)
    said: dict[PeerID, Any] = {}

    def is_meant(message: Message) -> bool:
        return (message.call, message.is_answer) == (f"rpc_{what}", is_answer)

    def note(message: Message) -> list[bytes]:
        if is_meant(message):
            said[message.sender] = kind.FromString(message.content)
        return [message.content]

    for one, other in (roles, roles[::-1]):
        assert play(one, other, what, note)
    edits = list(message_edits(said[liar.id], said[honest.id]))
    for field, change in edits:

        def lie(message: Message, change: Any = change) -> list[bytes]:
            if message.sender != liar.id or not is_meant(message):
                return [message.content]
            return [change(kind.FromString(message.content)).SerializeToString()]

        found = play(*roles, what, lie)
        held = honest.protocol.storage
        assert held.get(KEY).value.get(honest.place).value == honest.record, field
        assert {place for place, _ in held.get(KEY).value.items()} <= {honest.place, liar.place}, field
        assert len(held) == 1, field
        if is_answer and what == "find" and found:
            [(value, nearest)] = found.values()
            assert len(nearest) <= 20 and all(len(id_.to_bytes()) <= 64 for id_ in nearest.values()), field
            places = [place for place, _ in value.value.items()] if value is not None else []
            assert set(places) <= {honest.place, liar.place}, field
    assert len(edits) > 10
