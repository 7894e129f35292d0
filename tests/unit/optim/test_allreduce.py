"""One exchange among members in one event loop: all end with the same bits, or with none."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import CompressionInfo
from hivemind.proto import averaging_pb2

from tests.kit.identities import id_of
from tests.simulation.network import Network, VirtualLoop
from trahiv_cli.optim.allreduce import ExactAllReduce, message_of
from trahiv_cli.optim.soundness import Claim
from trahiv_cli.swarm.codecs import CODECS

PEERS = {name: id_of(name) for name in "ABC"}
WEIGHTS = {"A": 1.0, "B": 2.0, "C": 1.0}
LIMIT_S = 5.0


def tensors_of(name):
    """What a member brings: two tensors."""
    generator = torch.Generator().manual_seed(ord(name))
    return [torch.randn(300, generator=generator), torch.randn(5, 3, generator=generator)]


MEANS = [sum(WEIGHTS[name] * tensors_of(name)[index] for name in "ABC") / 4 for index in range(2)]


def exchange(there="ABC", codec="none", tamper=None, group="ABC", **options):
    """Hold one exchange of a group, of which some are there; `tamper` changes what C returns.

    Returns:
        Of each that is there its averages, or the exception that ended it; its runner; the bytes sent and
        received.
    """
    norms = {name: float(torch.cat([one.flatten() for one in tensors_of(name)]).norm()) for name in group}
    options = {"part_size_bytes": 400, "sender_timeout": LIMIT_S} | options
    network, returned = Network(), itertools.count()

    def carry(message):
        if tamper is None or (message.sender, message.is_answer) != (PEERS["C"], True):
            return [message.content]
        average = averaging_pb2.AveragingData.FromString(message.content)
        return [one.SerializeToString() for one in tamper(next(returned), average)]

    async def average(name):
        p2p, traffic = network.p2p_of(PEERS[name]), (SimpleNamespace(value=0), SimpleNamespace(value=0))
        runner = ExactAllReduce(
            traffic=traffic,
            claims={PEERS[one].to_base58(): Claim(weight=WEIGHTS[one], norm=norms[one]) for one in group},
            left_out={},
            robust=False,
            p2p=p2p,
            servicer_type=ExactAllReduce,
            prefix="run",
            group_id=b"group",
            tensors=tensors_of(name),
            ordered_peer_ids=tuple(PEERS[one] for one in group),
            compression=CODECS[codec](),
            reducer_timeout=2 * LIMIT_S,
            peer_fractions=(1.0,) * len(group),
            **options,
        )
        await runner.add_p2p_handlers(p2p, namespace="run")
        await asyncio.sleep(0.1)  # until all are there
        try:
            return [average async for average in runner], runner, traffic
        except AllreduceException as error:
            return runner.failure or error, runner, traffic

    async def scene():
        return await asyncio.gather(*map(average, there))

    network.tamper = carry
    with asyncio.Runner(loop_factory=VirtualLoop) as loop:
        return dict(zip(there, loop.run(scene()), strict=True))


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


def damaged(number, message):
    message.tensor_part.buffer = bytes(len(message.tensor_part.buffer))
    return [message]


def filled(value, shape=None, cut=None):
    """Put such values in place of an average, with their checksum."""

    def tamper(number, message):
        tensor = torch.full(shape or tuple(message.tensor_part.size), value)
        part = CODECS["none"]().compress(tensor, CompressionInfo.from_tensor(tensor))
        part.buffer = part.buffer[:cut]
        return [message_of(averaging_pb2.AVERAGED_PART, part)]

    return tamper


@pytest.mark.parametrize(
    ("tamper", "words", "is_sure"),
    [
        (damaged, "was damaged on its way", True),
        (filled(0.0, cut=-1), "returned no average", True),
        (filled(torch.nan), "not finite", True),
        (filled(0.0, (7,)), "another shape, or one too many", True),
        (filled(1e6), "longer than all that it is of", True),
        (lambda number, message: [message, message], "another shape, or one too many", True),
        (lambda *_: [averaging_pb2.AveragingData()], "broke the round off", False),
        (lambda number, message: [] if number else [message], "sent 1 parts of its share", False),
    ],
)
def test_an_average_that_nobody_can_use_fails_the_round_and_its_reducer_is_named(tamper, words, is_sure):
    failure, runner, _ = exchange("AC", group="AC", tamper=tamper, part_size_bytes=200)["A"]
    assert str(PEERS["C"]) in str(failure) and words in str(failure)
    assert (runner.blamed, runner.is_sure) == (PEERS["C"].to_base58(), is_sure)


def test_a_member_that_is_not_there_fails_the_round_for_all_and_is_named():
    for failure, runner, _ in exchange("AB", sender_timeout=0.2).values():
        assert str(failure) == f"peer {PEERS['C']} can't be reached"
        assert (runner.blamed, runner.is_sure) == (PEERS["C"].to_base58(), True)
