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
WEIGHTS = {"A": 1.0, "B": 2.0, "C": 1.0}
LIMIT_S = 5.0


def tensors_of(name):
    """What a member brings: two tensors."""
    generator = torch.Generator().manual_seed(ord(name))
    return [torch.randn(300, generator=generator), torch.randn(5, 3, generator=generator)]


MEANS = [sum(WEIGHTS[name] * tensors_of(name)[index] for name in "ABC") / 4 for index in range(2)]


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


def exchange(there="ABC", codec="none", wire=None, group="ABC", **options):
    """Hold one exchange of a group, of which some are there.

    Returns:
        Of each that is there its averages, or the exception that ended it; its runner; the bytes sent and
        received.
    """
    norms = {name: float(torch.cat([one.flatten() for one in tensors_of(name)]).norm()) for name in group}
    wire = wire or Wire()
    options = {"part_size_bytes": 400, "sender_timeout": LIMIT_S} | options

    async def average(name):
        traffic = SimpleNamespace(value=0), SimpleNamespace(value=0)
        runner = wire.members[PEERS[name]] = ExactAllReduce(
            traffic=traffic,
            claims={PEERS[one].to_base58(): Claim(weight=WEIGHTS[one], norm=norms[one]) for one in group},
            left_out={},
            robust=False,
            p2p=SimpleNamespace(peer_id=PEERS[name], wire=wire),
            servicer_type=Wire,
            prefix="run",
            group_id=b"group",
            tensors=tensors_of(name),
            ordered_peer_ids=tuple(PEERS[one] for one in group),
            compression=CODECS[codec](),
            reducer_timeout=2 * LIMIT_S,
            peer_fractions=(1.0,) * len(group),
            **options,
        )
        await asyncio.sleep(0)  # until all are there
        try:
            return [average async for average in runner], runner, traffic
        except AllreduceException as error:
            return runner.failure or error, runner, traffic

    async def scene():
        async with asyncio.timeout(4 * LIMIT_S):
            return dict(zip(there, await asyncio.gather(*map(average, there)), strict=True))

    return asyncio.run(scene())


@pytest.mark.parametrize("name", CODECS)
def test_all_members_hold_the_same_bits_which_are_the_mean_and_what_was_lost_makes_up_for_the_rest(name):
    ends = exchange(codec=name)
    for averages, runner, (sent, received) in ends.values():
        assert all(map(torch.equal, averages, ends["A"][0]))
        assert runner.failure is None and not runner.blamed
        assert sent.value > 0 < received.value
        whole = torch.cat([CODECS[name]().extract(part) for part in runner.encoded_averages])
        assert torch.equal(whole, torch.cat([one.flatten() for one in averages])), "as it travelled"
    for index, (average, mean) in enumerate(zip(ends["A"][0], MEANS, strict=True)):
        assert (average - mean).norm() <= (0.2 if name == "blockwise4" else 0.03) * mean.norm()
        if name == "none":
            assert ends["A"][1].lost is None
            continue
        lost = sum(WEIGHTS[one] * runner.lost[index] for one, (_, runner, _) in ends.items()) / 4
        torch.testing.assert_close(average + lost, mean, rtol=0, atol=1e-5)


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
    failure, runner, _ = exchange("AC", group="AC", wire=Wire(tamper), part_size_bytes=200)["A"]
    assert str(PEERS["C"]) in str(failure) and words in str(failure)
    assert (runner.blamed, runner.is_sure) == (PEERS["C"].to_base58(), is_sure)


def test_a_member_that_is_not_there_fails_the_round_for_all_and_is_named():
    for failure, runner, _ in exchange("AB", sender_timeout=0.2).values():
        assert str(failure) == f"peer {PEERS['C']} can't be reached"
        assert (runner.blamed, runner.is_sure) == (PEERS["C"].to_base58(), True)
