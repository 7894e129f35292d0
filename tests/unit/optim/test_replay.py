"""Rounds that others had without this peer: what is kept of them, and what is made of what comes."""

import pytest
import torch
from hivemind.compression import CompressionInfo, serialize_torch_tensor
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer

from trahiv_cli.optim.codecs import CODECS
from trahiv_cli.optim.replay import Header, Log, Record, decode

pytestmark = pytest.mark.usefixtures("our_codecs")

TENSORS = [torch.randn(40, 30, generator=torch.Generator().manual_seed(0)), torch.ones(()), torch.zeros(7)]


def encoded(tensors=TENSORS, codec="uniform8", part_values=500):
    """Cut tensors into parts as a round does, none of two tensors; return them and what they decode to."""
    parts, values = [], []
    for tensor in tensors:
        for piece in tensor.reshape(-1).split(part_values):
            part = CODECS[codec]().compress(piece, CompressionInfo.from_tensor(piece))
            parts.append(part)
            values.append(CODECS[codec]().extract(part).view(-1))
    return parts, torch.cat(values)


def record(after, size):
    part = runtime_pb2.Tensor(buffer=bytes(size))
    return Record(after, (b"A",), (b"said",), b"proof", (part,))


# -- what is kept ---------------------------------------------------------------------------------


def kept(log):
    return [name for name in (b"1", b"2", b"3", b"4") if log.find(name) is not None]


def test_only_the_last_round_is_kept_if_nobody_may_ask():
    log = Log(limit_bytes=100)
    for after in (b"1", b"2", b"3"):
        log.add(record(after, 10), is_wanted=False)
    assert kept(log) == [b"3"] and log.find(b"3").num_bytes == 10


def test_while_somebody_fetches_all_are_kept_from_the_one_before():
    log = Log(limit_bytes=100)
    log.add(record(b"1", 10), is_wanted=False)
    for after in (b"2", b"3"):
        log.add(record(after, 10), is_wanted=True)
    assert kept(log) == [b"1", b"2", b"3"]
    log.add(record(b"4", 10), is_wanted=False)
    assert kept(log) == [b"4"]


@pytest.mark.parametrize(("size", "names"), [(10, [b"2", b"3", b"4"]), (31, [b"4"])])
def test_the_oldest_go_where_there_is_no_room_but_never_the_last(size, names):
    log = Log(limit_bytes=30)
    for after in (b"1", b"2", b"3", b"4"):
        log.add(record(after, size), is_wanted=True)
    assert kept(log) == names


# -- what comes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "float16", "uniform8", "blockwise4"])
def test_an_average_is_put_together_to_the_bit(codec):
    parts, values = encoded(codec=codec)
    averages = decode(parts, TENSORS)
    assert [average.shape for average in averages] == [tensor.shape for tensor in TENSORS]
    assert torch.equal(torch.cat([average.view(-1) for average in averages]), values)


def test_a_record_says_what_comes():
    parts, _ = encoded()
    one = Record(b"after", (b"A", b"B"), (b"a said", b"b said"), b"proof", tuple(parts))
    header = Header.from_wire(MSGPackSerializer.dumps(one.header()))
    assert (header.members, header.gathered, header.proof) == (one.members, one.gathered, b"proof")
    assert (header.num_parts, header.num_bytes) == (len(parts), one.num_bytes)


@pytest.mark.parametrize(
    "content",
    [
        [],
        [[], [], b"", 0, 0],
        [[b"A"], [], b"", 0, 0],
        [[b"A"], ["said"], b"", 0, 0],
        [[b"A"], [b"said"], "proof", 0, 0],
        [[b"A"], [b"said"], b"", -1, 0],
        [[b"A"], [b"said"], b"", 1, -5],
    ],
)
def test_a_header_that_is_none_is_refused(content):
    with pytest.raises(ValueError, match="not the record"):
        Header.from_wire(MSGPackSerializer.dumps(content))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda parts: parts[:-1], "7 values are missing"),
        (lambda parts: [], "1208 values are missing"),
        (lambda parts: [*parts, parts[-1]], "belongs to no tensor"),
        (lambda parts: parts[::-1], "belongs to no tensor|can't be read|missing"),
        (lambda parts: [runtime_pb2.Tensor(buffer=b"?", dtype="float32", size=[3]), *parts], "1 bytes where"),
        (lambda parts: [serialize_torch_tensor(torch.full((500,), torch.nan)), *parts[1:]], "not finite"),
    ],
)
def test_parts_of_another_average_are_refused(change, why):
    parts, _ = encoded()
    with pytest.raises(ValueError, match=why):
        decode(change(parts), TENSORS)
