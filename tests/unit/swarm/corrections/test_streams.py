"""A message between peers has a largest size."""

import asyncio

import pytest
from hivemind.p2p import P2P
from hivemind.proto.dht_pb2 import PingRequest

from trahiv_cli.swarm.corrections.streams import MAX_MESSAGE_BYTES, receive_protobuf, receive_raw_data


def received(receive, content):
    """Return what is made of the bytes of a stream."""

    async def run():
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        return await receive(reader)

    return asyncio.run(run())


def with_header(length, content):
    return length.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + content


@pytest.mark.parametrize("length", [0, 1, MAX_MESSAGE_BYTES])
def test_a_message_of_a_stream_is_received(length):
    assert received(receive_raw_data, with_header(length, b"x" * length)) == b"x" * length


def test_a_message_that_claims_to_be_endless_is_refused_before_it_is_read():
    with pytest.raises(ConnectionError, match="10000000000000 bytes"):
        received(receive_raw_data, with_header(10**13, b"x" * 100))


@pytest.mark.parametrize("sent", [b"\x02", P2P.MESSAGE_MARKER + with_header(3, b"\xff\xff\xff")])
def test_what_can_t_be_read_ends_the_stream(sent):
    with pytest.raises(ConnectionError, match="can't be read"):
        received(lambda reader: receive_protobuf(PingRequest, reader), sent)
