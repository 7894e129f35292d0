"""Requests and answers of DHT nodes, and which answers of others they accept.

That no field of a message harms its reader, also in an answer to a ping, is tested in
`tests/simulation/test_records_of_a_liar.py`.
"""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import hivemind.dht.node
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import P2P
from hivemind.proto import dht_pb2
from hivemind.proto.dht_pb2 import NodeInfo
from hivemind.utils import MSGPackSerializer, get_dht_time

from tests.simulation.network import Network
from tests.unit.async_tests import peer
from trahiv_cli.net.byte_streams import DOWNLOAD, UPLOAD
from trahiv_cli.net.streams import (
    MAX_MESSAGE_BYTES,
    URGENT_BYTES,
    receive_protobuf,
    receive_raw_data,
    send_raw_data,
)
from trahiv_cli.swarm.corrections import nodes
from trahiv_cli.swarm.corrections.nodes import (
    CorrectedNode,
    CorrectedProtocol,
    RememberingValidator,
    node_id_of,
)

A, B = peer(1), peer(2)
LONG = bytes(3600)


@pytest.fixture
def enter(monkeypatch):
    """`await enter(A, *others)` makes the protocol of a node, which enters a swarm by others."""

    async def enter(one, *others):
        maddrs = [f"/ip4/127.0.0.1/tcp/1/p2p/{other}" for other in others]
        node = await CorrectedNode.create(p2p=network.p2p_of(one), initial_peers=maddrs)
        return node.protocol

    network = Network()
    monkeypatch.setattr(hivemind.dht.node, "DHTProtocol", CorrectedProtocol)
    return enter


async def find(protocol, num_records, num_keys=1):
    """Have a node store long records under some keys; return its answer to a request for all of them."""
    keys = [DHTID.generate() for _ in range(num_keys)]
    for key in keys:
        for number in range(num_records):
            protocol.storage.store_subkey(key, b"%d" % number, LONG, get_dht_time() + 60)
    request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys])
    return await protocol.rpc_find(request, SimpleNamespace(remote_id=B))


@pytest.mark.parametrize("num_records", [3, 426])
async def test_answer_keeps_oldest_records_that_fit(monkeypatch, enter, num_records):
    monkeypatch.setattr(DictionaryDHTValue, "packb", nodes.pack_dictionary)
    response = await find(await enter(A), num_records)
    [result] = response.results
    held = [subkey for subkey, _ in MSGPackSerializer.loads(result.value).items()]
    assert held == [b"%d" % number for number in range(len(held))]
    assert len(held) == min(num_records, (nodes.MAX_ANSWER_BYTES - 64) // (len(LONG) + 18))
    assert response.ByteSize() < nodes.MAX_ANSWER_BYTES + 1000


async def test_many_keys_keep_answer_short(enter):
    response = await find(await enter(A), 200, num_keys=17)
    assert response.ByteSize() < nodes.MAX_ANSWER_BYTES + 16_000
    types = [result.type for result in response.results]
    assert types == [dht_pb2.FOUND_DICTIONARY] * 2 + [dht_pb2.NOT_FOUND] * 14


def stream_of(content):
    """Return a stream that has brought some bytes, and its end."""
    reader = asyncio.StreamReader()
    reader.feed_data(content)
    reader.feed_eof()
    return reader


def with_header(content, length=None):
    length = len(content) if length is None else length
    return length.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + content


@pytest.mark.parametrize(
    "upload, download, num_bytes, seconds",
    [
        (None, None, 2**18, 0.0),
        (2**20, None, 2**18, 0.25),
        (None, 2**20, 2**18, 0.25),
        (1.0, 1.0, URGENT_BYTES, 0.0),
    ],
)
async def test_messages_keep_to_rate_limits(monkeypatch, upload, download, num_bytes, seconds):
    for pace, rate in ((UPLOAD, upload), (DOWNLOAD, download)):
        monkeypatch.setattr(pace, "rate", rate)
        monkeypatch.setattr(pace, "_free_at", 0.0)
    sent, content = bytearray(), b"x" * num_bytes
    await send_raw_data(content, Mock(write=sent.extend, drain=AsyncMock()))
    assert bytes(sent) == with_header(content)
    assert await receive_raw_data(stream_of(sent)) == content
    assert asyncio.get_running_loop().time() == pytest.approx(seconds, abs=1e-3)


@pytest.mark.parametrize("content", [b"", b"x", b"x" * MAX_MESSAGE_BYTES], ids=len)
async def test_message_is_received_whole(content):
    assert await receive_raw_data(stream_of(with_header(content))) == content


async def test_oversized_message_ends_stream():
    with pytest.raises(ConnectionError, match="10000000000000 bytes"):
        await receive_raw_data(stream_of(with_header(b"x" * 100, length=10**13)))


@pytest.mark.parametrize("sent", [b"\x02", P2P.MESSAGE_MARKER + with_header(b"\xff\xff\xff")])
async def test_invalid_message_ends_stream(sent):
    with pytest.raises(ConnectionError, match="can't be read"):
        await receive_protobuf(dht_pb2.PingRequest, stream_of(sent))


KEY = DHTID.generate()


@pytest.fixture
def judging(enter):
    """`await judging()` makes a protocol that takes the value `good`, and has no room for `no room`."""

    async def judging():
        made = await enter(A)
        made.record_validator = Mock(**{"validate.side_effect": lambda record: record.value == b"good"})
        made.quota = Mock(**{"has_room.side_effect": lambda record: record.value != b"no room"})
        return made

    return judging


async def test_validation_stops_after_few_forged_records(judging):
    protocol, answer = await judging(), DictionaryDHTValue()
    for number, value in enumerate([b"no room"] * 100 + [b"good"] * 3 + [b"forged"] * 100):
        answer.store(b"%d" % number, value, get_dht_time() + 60)
    assert protocol._validate_dictionary(KEY.to_bytes(), answer)
    assert [value for _, (value, _) in answer.items()] == [b"good"] * 3
    assert protocol.record_validator.validate.call_count == 3 + nodes.MOST_FORGED
    assert protocol.quota.count.call_count == 3


@pytest.mark.parametrize("value", [b"good", b"forged", b"no room"])
async def test_stored_record_is_judged_alike(judging, value):
    protocol, is_good = await judging(), value == b"good"
    assert protocol._validate_record(KEY.to_bytes(), b"subkey", value, get_dht_time() + 60) is is_good
    assert protocol.quota.count.call_count == is_good


async def test_records_over_quota_are_not_forged(judging):
    protocol = await judging()
    values = [b"no room"] * 100 + [b"good"] * 3 + [b"forged"] * nodes.MOST_FORGED + [b"good"]
    count = len(values)
    answer = dht_pb2.StoreRequest(
        values=values,
        keys=[KEY.to_bytes()] * count,
        subkeys=[MSGPackSerializer.dumps(b"%d" % number) for number in range(count)],
        expiration_time=[get_dht_time() + 60] * count,
    )
    protocol.get_stub = Mock(return_value=Mock(rpc_compare=AsyncMock(return_value=answer)))
    assert await protocol.call_compare(B, [])
    assert [value for _, (value, _) in protocol.storage.get(KEY).value.items()] == [b"good"] * 3


@pytest.mark.parametrize(
    "cls, num_judged", [(RememberingValidator, 2), (CompositeValidator, 3)], ids=["ours", "upstream"]
)
@pytest.mark.parametrize("is_true", [True, False])
def test_repeated_record_is_judged_once(cls, num_judged, is_true):
    judge, validator = Mock(priority=0, **{"validate.return_value": is_true}), cls()
    record = DHTRecord(b"key", b"subkey", b"value", 1.0)
    assert validator.validate(record), "nobody has looked at it"
    validator.extend([judge])
    for one in (record, replace(record), replace(record, expiration_time=2.0)):
        assert validator.validate(one) is is_true
    assert judge.validate.call_count == num_judged


async def test_claimed_node_ids_are_ignored(enter):
    first, second = await enter(A), await enter(B)
    for _ in range(5):
        second.node_info = NodeInfo(node_id=DHTID.generate().to_bytes())
        await second.call_ping(A)
        await asyncio.sleep(0)
    assert first.routing_table.uid_to_peer_id == {node_id_of(B.to_bytes()): B}
    found = await second.call_find(A, [DHTID.generate()])
    assert [*found.values()] == [(None, {node_id_of(B.to_bytes()): B})]


async def test_only_listed_node_enters_routing_tables(enter):
    first, second = await enter(A), await enter(B, A)
    assert first.is_listed
    assert not second.is_listed
    for is_listed in (False, True):
        second.list_node(is_listed=is_listed)
        assert second.is_listed is is_listed
        assert await second.call_ping(A, strict=False) == first.node_id
        assert list(second.routing_table.peer_id_to_uid) == [A]
        assert list(first.routing_table.peer_id_to_uid) == [B] * is_listed
