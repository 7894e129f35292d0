"""Requests and answers of DHT nodes, and which answers of others they accept.

That no field of a message harms its reader, also in an answer to a ping, is tested in
`tests/simulation/test_records_of_a_liar.py`.
"""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import hivemind.dht.node
import pytest
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from hivemind.proto.dht_pb2 import NodeInfo
from hivemind.utils import MSGPackSerializer, get_dht_time

from tests.simulation.network import Network
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

LONG = bytes(3600)


def stored(num_records, num_keys=1):
    """Return the protocol of a node that stores long records under some keys, and these keys."""

    async def take_no_note(request, context): ...

    protocol = CorrectedProtocol(_initialized_with_create=True)
    protocol.node_id, protocol.node_info, protocol.bucket_size = DHTID.generate(), NodeInfo(), 20
    protocol.record_validator, protocol.rpc_ping = None, take_no_note
    protocol.rpc_semaphore, protocol.wait_timeout = asyncio.Semaphore(), 3.0
    protocol.storage, protocol.cache = DHTLocalStorage(), DHTLocalStorage()
    protocol.routing_table = RoutingTable(protocol.node_id, bucket_size=20, depth_modulo=5)
    keys, expires = [DHTID.generate() for _ in range(num_keys)], get_dht_time() + 60
    for key in keys:
        for number in range(num_records):
            protocol.storage.store_subkey(key, f"{number}".encode(), LONG, expires)
    return protocol, keys


def looked_up(protocol, keys):
    request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys], peer=NodeInfo(node_id=bytes(20)))
    return asyncio.run(protocol.rpc_find(request, None))


@pytest.mark.parametrize("num_records", [3, 426])
def test_answer_keeps_oldest_records_that_fit(monkeypatch, num_records):
    monkeypatch.setattr(DictionaryDHTValue, "packb", nodes.pack_dictionary)
    protocol, keys = stored(num_records)
    [result] = (response := looked_up(protocol, keys)).results
    held = [subkey for subkey, _ in MSGPackSerializer.loads(result.value).items()]
    assert held == [f"{number}".encode() for number in range(len(held))]
    assert len(held) == min(num_records, (nodes.MAX_ANSWER_BYTES - 64) // (len(LONG) + 18))
    assert response.ByteSize() < nodes.MAX_ANSWER_BYTES + 1000


def test_many_keys_keep_answer_short():
    protocol, keys = stored(200, num_keys=17)
    response = looked_up(protocol, keys)
    assert response.ByteSize() < nodes.MAX_ANSWER_BYTES + 16_000
    types = [result.type for result in response.results]
    assert types == [dht_pb2.FOUND_DICTIONARY] * 2 + [dht_pb2.NOT_FOUND] * 14


def received(receive, content):
    """Return the result of a receiver for the bytes of a stream."""

    async def run():
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        return await receive(reader)

    return asyncio.run(run())


def with_header(length, content):
    return length.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + content


def test_messages_keep_to_rate_limits(monkeypatch):
    async def seconds(rates, send, receive):
        for pace, rate in zip((UPLOAD, DOWNLOAD), rates, strict=True):
            monkeypatch.setattr(pace, "rate", rate)
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        sent = bytearray()
        writer = SimpleNamespace(write=sent.extend, drain=lambda: asyncio.sleep(0))
        began = loop.time()
        await send_raw_data(send, writer)
        assert bytes(sent) == with_header(len(send), send)
        reader.feed_data(with_header(len(receive), receive))
        assert await receive_raw_data(reader) == receive
        return loop.time() - began

    much, little = b"x" * 2**18, b"x" * URGENT_BYTES
    for rates, send, receive, expected in (
        ((None, None), much, much, 0.0),
        ((2**20, None), much, much, 0.25),
        ((None, 2**20), much, much, 0.25),
        ((1.0, 1.0), little, little, 0.0),
    ):
        assert expected <= asyncio.run(seconds(rates, send, receive)) < 10.0, rates


def test_oversized_or_invalid_message_ends_stream():
    for content in (b"", b"x", b"x" * MAX_MESSAGE_BYTES):
        assert received(receive_raw_data, with_header(len(content), content)) == content
    with pytest.raises(ConnectionError, match="10000000000000 bytes"):
        received(receive_raw_data, with_header(10**13, b"x" * 100))
    for sent in (b"\x02", P2P.MESSAGE_MARKER + with_header(3, b"\xff\xff\xff")):
        with pytest.raises(ConnectionError, match="can't be read"):
            received(lambda reader: receive_protobuf(dht_pb2.PingRequest, reader), sent)


def test_validation_stops_after_few_forged_records():
    protocol, [key] = stored(0)
    judged, counted = [], []
    protocol.record_validator = SimpleNamespace(
        validate=lambda record: judged.append(record) or record.value == b"good"
    )
    protocol.quota = SimpleNamespace(has_room=lambda record: record.value != b"no room", count=counted.append)
    answer = DictionaryDHTValue()
    for number, value in enumerate([b"no room"] * 100 + [b"good"] * 3 + [b"forged"] * 100):
        answer.store(b"%d" % number, value, get_dht_time() + 60)
    assert protocol._validate_dictionary(key.to_bytes(), answer)
    assert [value for _, (value, _) in answer.items()] == [b"good"] * 3
    assert len(judged) == 3 + nodes.MOST_FORGED
    for value in (b"good", b"forged", b"no room"):  # records that are stored here are judged alike
        is_kept = protocol._validate_record(key.to_bytes(), b"subkey", value, get_dht_time() + 60)
        assert is_kept is (value == b"good")
    assert [record.value for record in counted] == [b"good"] * 4


def test_records_over_quota_are_not_forged():
    protocol, [key] = stored(0)
    protocol.record_validator = SimpleNamespace(validate=lambda record: record.value == b"good")
    protocol.quota = SimpleNamespace(has_room=lambda record: record.value != b"no room", count=print)
    values = [b"no room"] * 100 + [b"good"] * 3 + [b"forged"] * nodes.MOST_FORGED + [b"good"]
    answer = dht_pb2.StoreRequest(values=values, keys=[key.to_bytes()] * len(values))
    answer.subkeys.extend(MSGPackSerializer.dumps(b"%d" % number) for number in range(len(values)))
    answer.expiration_time.extend([get_dht_time() + 60] * len(values))

    async def rpc_compare(request):
        return answer

    protocol.get_stub = lambda peer: SimpleNamespace(rpc_compare=rpc_compare)
    assert asyncio.run(protocol.call_compare(None, []))
    assert [value for _, (value, _) in protocol.storage.get(key).value.items()] == [b"good"] * 3


class Judge(RecordValidatorBase):
    """Accepts all records except lies, and counts its calls."""

    judged = 0

    def validate(self, record):
        self.judged += 1
        return record.value != b"lie"


@pytest.mark.parametrize(
    ("cls", "num_judged"), [(RememberingValidator, 2), (CompositeValidator, 3)], ids=["ours", "upstream"]
)
@pytest.mark.parametrize("value", [b"truth", b"lie"])
def test_repeated_record_is_judged_once(cls, num_judged, value):
    judge, validator, record = Judge(), cls(), DHTRecord(b"key", b"subkey", value, 1.0)
    assert validator.validate(record), "nobody has looked at it"
    validator.extend([judge])
    for one in (record, replace(record), replace(record, expiration_time=2.0)):
        assert validator.validate(one) == (value == b"truth")
    assert judge.judged == num_judged


def test_claimed_node_ids_are_ignored(monkeypatch):
    async def scene():
        nodes = [await CorrectedNode.create(p2p=network.p2p_of(peer)) for peer in (a, b)]
        for _ in range(5):
            nodes[1].protocol.node_info = NodeInfo(node_id=DHTID.generate().to_bytes())
            await nodes[1].protocol.call_ping(a)
            await asyncio.sleep(0)
        table = nodes[0].protocol.routing_table
        assert table.uid_to_peer_id == {node_id_of(b.to_bytes()): b}
        found = await nodes[1].protocol.call_find(a, [DHTID.generate()])
        assert [*found.values()] == [(None, {node_id_of(b.to_bytes()): b})]

    monkeypatch.setattr(hivemind.dht.node, "DHTProtocol", CorrectedProtocol)
    network, a, b = Network(), *(PeerID(b"\x12\x20" + bytes([number] * 32)) for number in (1, 2))
    asyncio.run(scene())


def test_only_listed_node_enters_routing_tables(monkeypatch):
    async def made(peer, *initial):
        maddrs = [f"/ip4/127.0.0.1/tcp/1/p2p/{one}" for one in initial]
        return await CorrectedNode.create(p2p=network.p2p_of(peer), initial_peers=maddrs)

    async def scene():
        first, second = await made(a), await made(b, a)
        assert first.protocol.is_listed and not second.protocol.is_listed
        for is_listed in (False, True):
            second.protocol.list_node(is_listed=is_listed)
            assert second.protocol.is_listed is is_listed
            assert await second.protocol.call_ping(a, strict=False) == first.node_id
            assert list(second.protocol.routing_table.peer_id_to_uid) == [a]
            assert list(first.protocol.routing_table.peer_id_to_uid) == [b] * is_listed

    monkeypatch.setattr(hivemind.dht.node, "DHTProtocol", CorrectedProtocol)
    network, a, b = Network(), *(PeerID(b"\x12\x20" + bytes([number] * 32)) for number in (1, 2))
    asyncio.run(scene())
