"""An exchange among members in one event loop: all end with identical averages, or with none."""

import asyncio
import itertools
import math
from functools import partial

import pytest
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import CompressionInfo
from hivemind.proto import averaging_pb2

from tests.kit.identities import id_of
from tests.simulation.network import Network, run_virtually
from trahiv_cli.rounds.allreduce import (
    ExactAllReduce,
    SoundReducer,
    centered_clipping,
    message_of,
    weighted_mean,
)
from trahiv_cli.rounds.claims import Claim
from trahiv_cli.rounds.codecs import CODECS

PEERS = {name: id_of(name) for name in "ABC"}
WEIGHTS = {"A": 1.0, "B": 2.0, "C": 1.0}
LIMIT_S = 5.0


def tensors_of(name):
    """Return a member's contribution: two tensors."""
    generator = torch.Generator().manual_seed(ord(name))
    return [torch.randn(300, generator=generator), torch.randn(5, 3, generator=generator)]


def flat(tensors):
    return torch.cat([one.flatten() for one in tensors])


def exchange(
    group="ABC",
    codec="none",
    tamper=None,
    absent="",
    buffers=None,
    weights=WEIGHTS,
    robust=False,
    pause_s=0.0,
    **options,
):
    """Run one exchange of a group, of which one may be `absent`; `tamper` changes the averages of C.

    `buffers` maps each name to a tensor. C waits `pause_s` before each part.

    Returns:
        For each member that is there, its averages or the exception that ended its exchange, and its runner.
    """
    there = [name for name in group if name != absent]
    options = {"part_size_bytes": 400, "sender_timeout": LIMIT_S} | options
    network = Network()
    returned = itertools.count()

    def carry(message):
        if tamper is None or (message.sender, message.is_answer) != (PEERS["C"], True):
            return [message.content]
        average = averaging_pb2.AveragingData.FromString(message.content)
        return [one.SerializeToString() for one in tamper(next(returned), average)]

    async def slowly(generate, index):
        async for part in generate(index):
            await asyncio.sleep(pause_s)
            yield part

    async def average(name):
        p2p = network.p2p_of(PEERS[name])
        runner = ExactAllReduce(
            claims={
                PEERS[one].to_base58(): Claim(4, weights[one], float(flat(tensors_of(one)).norm()))
                for one in group
            },
            left_out={},
            robust=robust,
            p2p=p2p,
            servicer_type=ExactAllReduce,
            prefix="run",
            group_id=b"group",
            tensors=[*tensors_of(name), *([buffers[name]] if buffers else [])],
            first_buffer=2,
            ordered_peer_ids=tuple(PEERS[one] for one in group),
            compression=CODECS[codec](),
            reducer_timeout=2 * LIMIT_S,
            limit_s=2 * LIMIT_S,
            peer_fractions=(1.0,) * len(group),
            **options,
        )
        if name == "C":
            runner._generate_input_for_peer = partial(slowly, runner._generate_input_for_peer)
        await runner.add_p2p_handlers(p2p, namespace="run")
        await asyncio.sleep(0.1)  # until all have registered
        try:
            return [average async for average in runner], runner
        except AllreduceException as error:
            return runner.failure or error, runner

    async def scene():
        return await asyncio.gather(*map(average, there))

    network.tamper = carry
    return dict(zip(there, run_virtually(scene()), strict=True))


@pytest.mark.parametrize("name", CODECS)
def test_members_hold_identical_averages(name):
    ends = exchange(codec=name)
    average = flat(ends["A"][0])
    for averages, runner in ends.values():
        assert flat(averages).equal(average)
        assert runner.failure is None
        assert not runner.complaint.blames
        whole = torch.cat([CODECS[name]().extract(part) for part in runner.encoded_averages])
        assert whole.equal(average), "as it travelled"
    runners = {one: runner for one, (_, runner) in ends.items()}
    sent = sum(runner.sent for runner in runners.values())
    assert sent == sum(runner.received for runner in runners.values()) > 0, "parts and averages, each way"
    mean = sum(WEIGHTS[one] * flat(tensors_of(one)) for one in "ABC") / 4
    assert (average - mean).norm() <= (0.2 if name == "blockwise4" else 0.03) * mean.norm()
    if name == "none":
        assert runners["A"].lost is None
    else:
        lost = (
            sum(
                WEIGHTS[one] * flat(runner.lost[index] for index in range(2))
                for one, runner in runners.items()
            )
            / 4
        )
        torch.testing.assert_close(average + lost, mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["none", "float16", "blockwise4"])
def test_buffers_travel_uncompressed(name):
    buffers = {one: torch.tensor([ord(one) * 1e6, 0.1, 1 / 3]) for one in "ABC"}
    without, _ = exchange(codec=name)["A"]
    for (*averages, average), _ in exchange(codec=name, buffers=buffers).values():
        assert all(map(torch.equal, averages, without))
        assert average.tolist() == [66e6, *buffers["A"][1:].tolist()], "equal values keep their bits"


@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("name", CODECS)
def test_average_without_trained_tokens_is_zero(name, robust):
    for averages, runner in exchange(codec=name, weights=dict.fromkeys("ABC", 0.0), robust=robust).values():
        assert runner.failure is None
        assert not flat(averages).any()


def damaged(number, message):
    message.tensor_part.buffer = bytes(len(message.tensor_part.buffer))
    return [message]


def filled(value, shape=None, cut=None):
    """Replace an average by a constant `value`, with a valid checksum."""

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
        (filled(0.0, cut=-1), "returned no average, or one that", True),
        (filled(torch.nan), "or one that is not finite", True),
        (filled(0.0, (7,)), "another shape, or one too many", True),
        (filled(1e6), "longer than all that it is of", True),
        (lambda number, message: [message, message], "another shape, or one too many", True),
        (lambda *_: [averaging_pb2.AveragingData()], "broke the round off", False),
        (lambda number, message: [] if number else [message], "sent 1 parts of its share", False),
    ],
)
def test_unusable_average_blames_its_reducer(tamper, words, is_sure):
    failure, runner = exchange("AC", tamper=tamper, part_size_bytes=200)["A"]
    assert str(PEERS["C"]) in str(failure)
    assert words in str(failure)
    assert (runner.complaint.blames, runner.complaint.is_sure) == (PEERS["C"].to_base58(), is_sure)


def test_oversized_buffer_average_fails_round():
    def lie(number, message):
        is_of_buffers = tuple(message.tensor_part.size) == (3,)
        return filled(1e30)(number, message) if is_of_buffers else [message]

    failure, runner = exchange("AC", tamper=lie, buffers=dict.fromkeys("AC", torch.ones(3)))["A"]
    assert "buffers that are too large" in str(failure)
    assert runner.complaint.blames == PEERS["C"].to_base58()


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ({"absent": "C", "sender_timeout": 0.2}, "can't be reached"),
        (
            {"pause_s": 0.9 * LIMIT_S, "part_size_bytes": 100},
            "did not send its parts within the limit of 10 s",
        ),
    ],
)
def test_absent_or_slow_member_is_blamed(scene, words):
    ends = exchange(**scene)
    for name in "AB":
        failure, runner = ends[name]
        assert str(failure).startswith(f"peer {PEERS['C']} {words}")
        assert (runner.complaint.blames, runner.complaint.is_sure) == (PEERS["C"].to_base58(), True)


def test_longest_wait_measures_slow_sender():
    ends = exchange(pause_s=0.5, part_size_bytes=200)
    for name in "AB":
        _, runner = ends[name]
        assert 0.9 < runner.tensor_part_reducer.longest_wait_s <= 2.0


def claims(*norms):
    return {f"p{number}": Claim(norm=norm) for number, norm in enumerate(norms)}


def reducer_of(num_parts, claimed, left_out=(), robust=False, num_buffers=0):
    """Return a reducer of numbers, of which the last `num_buffers` belong to buffers."""
    shapes = [torch.Size()] * num_parts
    num_gradients = num_parts - num_buffers
    return SoundReducer(shapes, list(claimed), claimed, left_out, robust=robust, num_gradients=num_gradients)


def reduce(parts, claimed, left_out=(), robust=False, num_buffers=0):
    """Feed a reducer the numbers `parts[sender][index]`; return its averages (or errors) and its notes.

    The last `num_buffers` parts belong to buffers.
    """

    async def scene():
        reducer = reducer_of(len(parts[0]), claimed, left_out, robust, num_buffers)
        averages = []
        for index, given in enumerate(zip(*parts, strict=True)):
            tensors = (None if part is None else torch.tensor(part) for part in given)
            waiting = (reducer.accumulate_part(number, index, one) for number, one in enumerate(tensors))
            first, *rest = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(str(one) == str(first) for one in rest)
            averages.append(first if isinstance(first, Exception) else first.item())
        return averages, reducer.notes

    return asyncio.run(scene())


NAN = math.nan
SHAPELESS = "no tensors of the right shape"
TOO_LARGE = "larger than the norm {} that it claimed"
CLAIMS = {f"p{index}": Claim(weight=weight, norm=9.0) for index, weight in enumerate((1.0, 3.0, 0.0))}


@pytest.mark.parametrize(
    ("parts", "claimed", "averages", "notes"),
    [
        ([[0.0, 4.0], [4.0, 0.0], [9.0, 0.0]], CLAIMS, [3.0, 1.0], {}),
        ([[0.0], [4.0]], claims(0.0, 4.0), [2.0], {}),  # a zero gradient is a contribution
        ([[1.0], [1.2]], claims(1.0, 1.0), [1.1], {}),  # a small excess, as a codec may add, is tolerated
        ([[1.0], [1.3]], claims(1.0, 1.0), [1.0], {"p1": TOO_LARGE.format(1)}),
        # Left out from the part that exceeds the claim on:
        ([[1.0, 1.0], [1.0, 99.0], [4.0, 4.0]], claims(2, 2, 6), [2.0, 2.5], {"p1": TOO_LARGE.format(2)}),
        ([[0.5, 0.5], [NAN, 7.0]], claims(9.0, 9.0), [0.5, 0.5], {"p1": "its parts are not finite"}),
        *(
            ([[0.5, 0.5], [bad, 7.0]], claims(1.0, 9.0), [0.5, 0.5], {"p1": SHAPELESS})
            for bad in (None, [0.0, 0.0], 1)
        ),
    ],
)
def test_senders_breaking_claims_are_left_out(parts, claimed, averages, notes):
    found, noted = reduce(parts, claimed)
    assert found == pytest.approx(averages)
    assert noted.keys() == notes.keys()
    assert all(words in noted[peer] for peer, words in notes.items())


@pytest.mark.parametrize("bad", [NAN, math.inf, 1e30])
def test_sender_of_unusable_buffers_is_ignored(bad):
    found = reduce([[1.0, 4.0], [3.0, bad]], claims(2.0, 4.0), num_buffers=1)
    assert found == ([2.0, 4.0], {"p1": "its parts are not finite"})


def test_buffers_use_weighted_mean_or_median():
    parts = [[0.0, 1e9], [4.0, 1.0], [9.0, 3.0]]
    claimed = CLAIMS | {"p2": Claim(weight=4.0, norm=9.0)}
    averages, notes = reduce(parts, claimed, num_buffers=1)
    assert averages == pytest.approx([6.0, (1e9 + 3 * 1 + 4 * 3) / 8])
    assert notes == {}
    assert reduce(parts, claimed, robust=True, num_buffers=1)[0][1] == 3.0


def test_buffer_mean_stays_above_minimum():
    chance = torch.Generator().manual_seed(0)
    values = torch.rand(3, 1000, generator=chance) * torch.tensor([[1e-9], [1e9], [1.0]])
    averages, _ = reduce(values.tolist(), claims(0.0, 0.0, 0.0), num_buffers=1000)
    assert (torch.tensor(averages) >= values.amin(dim=0)).all()


def test_left_out_senders_are_ignored():
    parts = [[1.0], [3.0], [1e6]]
    claimed = claims(1.0, 3.0, 1e6)
    for robust in (False, True):  # a robust mean needs more than two
        assert reduce(parts, claimed, left_out=["p2"], robust=robust)[0] == [2.0]
    assert reduce(parts, claimed, robust=True)[0][0] < 100.0


@pytest.mark.parametrize(
    ("parts", "claimed", "left_out"),
    [
        ([1.0, 1.0], claims(1.0, 1.0), ["p0", "p1"]),
        ([NAN, NAN], claims(1.0, 1.0), []),
        ([0.0, 0.0], dict.fromkeys(("p0", "p1"), Claim(weight=0.0)), []),
        ([0.0, NAN], {"p0": Claim(4, weight=0.0), "p1": Claim(4, weight=2.0, norm=1.0)}, []),
    ],
)
def test_round_without_contribution_fails(parts, claimed, left_out):
    [error], notes = reduce([[part] for part in parts], claimed, left_out)
    assert isinstance(error, AllreduceException)
    assert "no contribution" in str(error)
    assert notes.keys() >= {f"p{number}" for number, part in enumerate(parts) if math.isnan(part)}


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda reducer: reducer.on_sender_failed(1), "peer p1 did not send"),
        (SoundReducer.finalize, "is over"),
    ],
)
def test_failed_sender_fails_remaining_parts(end, words):
    async def scene():
        reducer = reducer_of(2, claims(2.0, 2.0))
        one = torch.ones(())
        first = await asyncio.gather(*(reducer.accumulate_part(sender, 0, one) for sender in (0, 1)))
        assert first == [1.0, 1.0]
        waiting = asyncio.create_task(reducer.accumulate_part(0, 1, one))
        await asyncio.sleep(0)
        with pytest.raises(AllreduceException, match="p1 sent more parts than there are"):
            await reducer.accumulate_part(1, 2, one)
        end(reducer)
        with pytest.raises(AllreduceException, match=words):
            await waiting
        reducer.finalize()

    asyncio.run(scene())


def test_weighted_mean_is_float32():
    part, other = (torch.full((2, 2), value, dtype=torch.bfloat16) for value in (1.0, 4.0))
    assert weighted_mean([(part, 2.0), (other, 1.0)]).tolist() == [[2.0, 2.0]] * 2
    centered_clipping([part, other, part])
    assert part.unique().tolist() == [1.0]
    assert centered_clipping([part] * 5).equal(torch.ones(2, 2)), "equal parts are their own robust mean"


def distance(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(("count", "liars"), [(5, 1), (5, 2), (9, 4)])
def test_robust_mean_resists_minority_of_liars(count, liars):
    chance = torch.Generator().manual_seed(0)
    true = torch.randn(400, generator=chance)
    gradients = [true + 0.5 * torch.randn(400, generator=chance) for _ in range(count)]
    assert distance(centered_clipping(gradients), weighted_mean([(one, 1.0) for one in gradients])) < 0.05
    for lie in (-10 * true, 1e6 * torch.ones_like(true), 0 * true):
        # No farther away than an honest gradient may be, whatever the size of the lie.
        assert distance(centered_clipping([*[lie] * liars, *gradients[liars:]]), true) < 1.0
