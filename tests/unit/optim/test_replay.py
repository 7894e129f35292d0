"""Rounds that others had without this peer: what is kept of them, and what is made of what comes."""

import weakref

import pytest
import torch
from hivemind.compression import CompressionInfo, serialize_torch_tensor
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer

from trahiv_cli.optim import replay
from trahiv_cli.optim.replay import Header, Log, Record, decoded
from trahiv_cli.swarm.codecs import CODECS

TENSORS = [torch.randn(40, 30, generator=torch.Generator().manual_seed(0)), torch.ones(()), torch.zeros(7)]


def encoded(codec="uniform8"):
    """Cut tensors into parts as a round does, none of two tensors; return them and what they decode to."""
    pieces = [piece for tensor in TENSORS for piece in tensor.reshape(-1).split(500)]
    parts = [CODECS[codec]().compress(piece, CompressionInfo.from_tensor(piece)) for piece in pieces]
    return parts, torch.cat([CODECS[codec]().extract(part) for part in parts])


@pytest.mark.parametrize(
    ("size", "is_wanted", "kept"),
    [
        (10, [False, False, False, False], [4]),
        (10, [False, True, True, True], [2, 3, 4]),  # the oldest goes where there is no room
        (10, [False, False, True, True], [2, 3, 4]),
        (31, [True, True, True, True], [4]),  # the last never
    ],
)
def test_all_rounds_are_kept_while_somebody_fetches_and_the_last_in_any_case(size, is_wanted, kept):
    log = Log(limit_bytes=30)
    for number, is_it in enumerate(is_wanted, start=1):
        header = Header((b"A",), (b"said",), b"proof", num_parts=1, num_bytes=size)
        log.add(Record(b"%d" % number, header, parts=()), is_wanted=is_it)
    assert [number for number in range(1, 5) if log.find(b"%d" % number) is not None] == kept


@pytest.mark.parametrize("codec", CODECS)
def test_an_average_is_put_together_to_the_bit(codec):
    parts, values = encoded(codec)
    averages = list(decoded(parts, TENSORS))
    assert [average.shape for average in averages] == [tensor.shape for tensor in TENSORS]
    assert torch.equal(torch.cat([average.view(-1) for average in averages]), values)


def test_no_more_than_one_part_of_an_average_is_decoded_at_a_time(monkeypatch):
    (parts, _), values_of, decoded_before = encoded(), replay._values_of, []

    def noted(part):
        assert not any(values() is not None for values in decoded_before)
        decoded_before.append(weakref.ref(values := values_of(part)))
        return values

    monkeypatch.setattr(replay, "_values_of", noted)
    assert len(list(decoded(parts, TENSORS))) == len(TENSORS) and len(decoded_before) == len(parts)


@pytest.mark.parametrize(
    "content", [[[], [], b"", 0, 0], [[b"A"], [], b"", 0, 0], [[b"A"], [b"said"], b"", 1, -5]]
)
def test_a_record_says_what_comes_and_what_is_none_is_refused(content):
    header = Header((b"A", b"B"), (b"a said", b"b said"), b"proof", num_parts=7, num_bytes=1300)
    assert Header.from_wire(header.to_wire()) == header
    with pytest.raises(ValueError, match="not the record"):
        Header.from_wire(MSGPackSerializer.dumps(content))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda parts: parts[:-1], "7 values of a tensor are missing"),
        (lambda parts: [], "are missing"),
        (lambda parts: [*parts, parts[-1]], "belongs to no tensor"),
        (lambda parts: [parts[0], *parts], "more than one tensor"),
        (lambda parts: [runtime_pb2.Tensor(buffer=b"?", dtype="float32", size=[3]), *parts], "1 bytes where"),
        (lambda parts: [serialize_torch_tensor(torch.full((500,), torch.nan)), *parts[1:]], "not finite"),
    ],
)
def test_parts_of_another_average_are_refused(change, why):
    with pytest.raises(ValueError, match=why):
        list(decoded(change(encoded()[0]), TENSORS))
