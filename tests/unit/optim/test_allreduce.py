"""One exchange among members in one event loop: all end with the same bits, or with none."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import CompressionInfo
from hivemind.p2p import P2PDaemonError, ServicerBase
from hivemind.proto import averaging_pb2

from tests.kit.identities import id_of
from trahiv_cli.optim.allreduce import ExactAllReduce, message_of
from trahiv_cli.optim.codecs import CODECS
from trahiv_cli.optim.soundness import Claim

pytestmark = pytest.mark.usefixtures("our_codecs")

PEERS = {name: id_of(name) for name in "ABC"}
VALUES = 300
LIMIT_S = 5.0


def tensors_of(name):
    """What a member brings: two tensors."""
    generator = torch.Generator().manual_seed(ord(name))
    return [torch.randn(VALUES, generator=generator), torch.randn(5, 3, generator=generator)]


class Wire(ServicerBase):
    """Carries streams between members, in place of a network; `tamper` changes what C returns."""

    def __init__(self, tamper=lambda answers: answers):
        self.members, self.tamper, self.serving = {}, tamper, []

    @classmethod
    def get_stub(cls, p2p, peer, *, namespace):
        return SimpleNamespace(rpc_aggregate_part=lambda parts: p2p.wire.call(p2p.peer_id, peer, parts))

    async def call(self, own, peer, parts):
        if peer not in self.members:
            raise P2PDaemonError("no route")
        arrived = asyncio.Queue()

        async def serve():
            async for message in self.members[peer].rpc_aggregate_part(parts, SimpleNamespace(remote_id=own)):
                arrived.put_nowait(message)
            arrived.put_nowait(None)

        async def read():
            while (message := await arrived.get()) is not None:
                yield message

        self.serving.append(asyncio.create_task(serve()))
        return self.tamper(read()) if peer == PEERS["C"] else read()


def exchange(names="ABC", codec="none", wire=None, absent="", left_out="", **options):
    """Hold one exchange.

    Returns:
        Of each member its averages, or the exception that ended it; its runner; the bytes sent and received.
    """
    claims = {name: Claim(weight=1.0 + (name == "B"), norm=norm_of(name)) for name in names}

    async def average(name):
        runner = wire.members[PEERS[name]]
        try:
            return [average async for average in runner], runner, traffic[name]
        except AllreduceException as error:
            return runner.failure or error, runner, traffic[name]

    async def scene():
        for name in names:
            if name not in absent:
                wire.members[PEERS[name]] = ExactAllReduce(
                    traffic=traffic[name],
                    claims={PEERS[one].to_base58(): claim for one, claim in claims.items()},
                    left_out={PEERS[one].to_base58(): "why" for one in left_out},
                    robust=False,
                    p2p=SimpleNamespace(peer_id=PEERS[name], wire=wire),
                    servicer_type=Wire,
                    prefix="run",
                    group_id=b"group",
                    tensors=tensors_of(name),
                    ordered_peer_ids=tuple(PEERS[one] for one in claims),
                    compression=CODECS[codec](),
                    reducer_timeout=2 * LIMIT_S,
                    **{"peer_fractions": (1.0,) * len(claims), "part_size_bytes": 400, **options},
                )
        there = [name for name in names if name not in absent]
        async with asyncio.timeout(4 * LIMIT_S):
            return dict(zip(there, await asyncio.gather(*map(average, there)), strict=True))

    wire = wire or Wire()
    options.setdefault("sender_timeout", LIMIT_S)
    traffic = {name: (SimpleNamespace(value=0), SimpleNamespace(value=0)) for name in names}
    return asyncio.run(scene())


def norm_of(name):
    return float(torch.cat([tensor.flatten() for tensor in tensors_of(name)]).norm())


def mean(names="ABC"):
    """By the weights that are claimed."""
    weights = {name: 1.0 + (name == "B") for name in names}
    return [
        sum(weights[name] * tensors_of(name)[index] for name in names) / sum(weights.values())
        for index in range(2)
    ]


@pytest.mark.parametrize("name", CODECS)
def test_all_members_hold_the_same_bits_which_are_the_mean(name):
    ends = exchange(codec=name)
    for averages, runner, (sent, received) in ends.values():
        assert all(map(torch.equal, averages, ends["A"][0]))
        assert runner.failure is None and not runner.blamed
        assert sent.value > 0 < received.value
        whole = torch.cat([CODECS[name]().extract(part) for part in runner.encoded_averages])
        assert torch.equal(whole, torch.cat([one.flatten() for one in averages])), "as it travelled"
    for average, expected in zip(ends["A"][0], mean(), strict=True):
        assert (average - expected).norm() <= (0.2 if name == "blockwise4" else 0.03) * expected.norm()


def test_what_a_codec_lost_of_each_member_and_of_the_average_makes_up_for_it():
    """With what was lost added to what was brought, the mean is what the average was encoded from."""
    ends = exchange(codec="blockwise4")
    lost = {name: runner.lost for name, (_, runner, _) in ends.items()}
    for index, expected in enumerate(mean()):
        made_up = (lost["A"][index] + 2 * lost["B"][index] + lost["C"][index]) / 4
        torch.testing.assert_close(ends["A"][0][index] + made_up, expected, rtol=0, atol=1e-5)
    assert exchange(codec="none")["A"][1].lost is None


# -- what fails it --------------------------------------------------------------------------------


def changed(change):
    """Have the first of C's averages changed."""

    async def tamper(answers):
        is_first = True
        async for message in answers:
            yield change(message) if is_first else message
            is_first = False

    return tamper


def filled(value, shape=None):
    """Put such values in place of those of a message."""

    def change(message):
        tensor = torch.full(shape or tuple(message.tensor_part.size), value)
        part = CODECS["none"]().compress(tensor, CompressionInfo.from_tensor(tensor))
        return message_of(averaging_pb2.AVERAGED_PART, part)

    return changed(change)


def damaged(message):
    message.tensor_part.buffer = bytes([message.tensor_part.buffer[0] ^ 1]) + message.tensor_part.buffer[1:]
    return message


def unreadable(message):
    message.tensor_part.buffer = message.tensor_part.buffer[:-1]
    return message_of(averaging_pb2.AVERAGED_PART, message.tensor_part)


async def twice(answers):
    async for message in answers:
        yield message
        yield message


async def first_alone(answers):
    yield await anext(answers)


@pytest.mark.parametrize(
    ("tamper", "words", "is_sure"),
    [
        (changed(damaged), "was damaged on its way", True),
        (changed(unreadable), "returned no average", True),
        (filled(torch.nan), "not finite", True),
        (filled(0.0, (7,)), "another shape, or one too many", True),
        (filled(1e6), "longer than all that it is of", True),
        (twice, "another shape, or one too many", True),
        (changed(lambda message: averaging_pb2.AveragingData()), "broke the round off", False),
        (first_alone, "sent 1 parts of its share", False),
    ],
)
def test_an_average_that_nobody_can_use_fails_the_round_and_its_reducer_is_named(tamper, words, is_sure):
    failure, runner, _ = exchange("AC", wire=Wire(tamper), part_size_bytes=200)["A"]
    assert str(PEERS["C"]) in str(failure) and words in str(failure)
    assert (runner.blamed, runner.is_sure) == (PEERS["C"].to_base58(), is_sure)


def test_a_member_that_is_not_there_fails_the_round_for_all_and_is_named():
    ends = exchange(absent="C", sender_timeout=0.2)
    for failure, runner, _ in ends.values():
        assert str(failure) == f"peer {PEERS['C']} can't be reached"
        assert (runner.blamed, runner.is_sure) == (PEERS["C"].to_base58(), True)
