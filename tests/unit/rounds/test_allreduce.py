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
from tests.simulation.network import Network, VirtualLoop
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


MEANS = [sum(WEIGHTS[name] * tensors_of(name)[index] for name in "ABC") / 4 for index in range(2)]


def exchange(
    there="ABC",
    codec="none",
    tamper=None,
    group="ABC",
    buffers=None,
    weights=WEIGHTS,
    robust=False,
    pause_s=0.0,
    **options,
):
    """Run one exchange of a group in which only `there` take part; `tamper` changes the averages of C.

    `buffers` maps each name to a tensor. C waits `pause_s` before each part.

    Returns:
        For each member in `there`, its averages or the exception that ended its exchange, and its runner.
    """
    norms = {name: float(torch.cat([one.flatten() for one in tensors_of(name)]).norm()) for name in group}
    options = {"part_size_bytes": 400, "sender_timeout": LIMIT_S} | options
    network, returned = Network(), itertools.count()

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
            claims={PEERS[one].to_base58(): Claim(4, weights[one], norms[one]) for one in group},
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
    with asyncio.Runner(loop_factory=VirtualLoop) as loop:
        return dict(zip(there, loop.run(scene()), strict=True))


@pytest.mark.parametrize("name", CODECS)
def test_members_hold_identical_averages(name):
    ends = exchange(codec=name)
    for averages, runner in ends.values():
        assert all(map(torch.equal, averages, ends["A"][0]))
        assert runner.failure is None and not runner.complaint.blames
        whole = torch.cat([CODECS[name]().extract(part) for part in runner.encoded_averages])
        assert torch.equal(whole, torch.cat([one.flatten() for one in averages])), "as it travelled"
    sent, received = (sum(getattr(end[1], way) for end in ends.values()) for way in ("sent", "received"))
    assert sent == received > 0, "parts and averages, each way"
    for index, (average, mean) in enumerate(zip(ends["A"][0], MEANS, strict=True)):
        assert (average - mean).norm() <= (0.2 if name == "blockwise4" else 0.03) * mean.norm()
        if name == "none":
            assert ends["A"][1].lost is None
            continue
        lost = sum(WEIGHTS[one] * runner.lost[index] for one, (_, runner) in ends.items()) / 4
        torch.testing.assert_close(average + lost, mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["none", "float16", "blockwise4"])
def test_buffers_travel_uncompressed(name):
    buffers = {one: torch.tensor([ord(one) * 1e6, 0.1, 1 / 3]) for one in "ABC"}
    for averages, _ in (ends := exchange(codec=name, buffers=buffers)).values():
        assert len(averages) == 3 and all(map(torch.equal, averages, ends["A"][0]))
        assert averages[2].tolist() == [66e6, *buffers["A"][1:].tolist()], "equal values keep their bits"
    torch.testing.assert_close(ends["A"][0][0], exchange(codec=name)["A"][0][0])


@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("name", CODECS)
def test_average_without_trained_tokens_is_zero(name, robust):
    for averages, runner in exchange(codec=name, weights=dict.fromkeys("ABC", 0.0), robust=robust).values():
        assert runner.failure is None and not any(average.any() for average in averages)


def test_only_trained_member_decides_average():
    for averages, _ in exchange(weights={"A": 0.0, "B": 1.0, "C": 0.0}).values():
        assert all(map(torch.equal, averages, tensors_of("B")))


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
    failure, runner = exchange("AC", group="AC", tamper=tamper, part_size_bytes=200)["A"]
    assert str(PEERS["C"]) in str(failure) and words in str(failure)
    assert (runner.complaint.blames, runner.complaint.is_sure) == (PEERS["C"].to_base58(), is_sure)


def test_oversized_buffer_average_fails_round():
    def lie(number, message):
        is_of_buffers = tuple(message.tensor_part.size) == (3,)
        return filled(1e30)(number, message) if is_of_buffers else [message]

    buffers = dict.fromkeys("AC", torch.ones(3))
    failure, runner = exchange("AC", group="AC", tamper=lie, buffers=buffers)["A"]
    assert "buffers that are too large" in str(failure) and runner.complaint.blames == PEERS["C"].to_base58()


def test_absent_member_is_blamed_by_all():
    for failure, runner in exchange("AB", sender_timeout=0.2).values():
        assert str(failure) == f"peer {PEERS['C']} can't be reached"
        assert (runner.complaint.blames, runner.complaint.is_sure) == (PEERS["C"].to_base58(), True)


def test_slow_sender_is_blamed_at_limit():
    ends = exchange(pause_s=0.9 * LIMIT_S, part_size_bytes=100)
    for name in "AB":
        failure, runner = ends[name]
        assert "did not send its parts within the limit of 10 s" in str(failure)
        assert (runner.complaint.blames, runner.complaint.is_sure) == (PEERS["C"].to_base58(), True)


def test_longest_wait_measures_slow_sender():
    ends = exchange(pause_s=0.5, part_size_bytes=200)
    for name in "AB":
        _, runner = ends[name]
        assert 0.9 < runner.tensor_part_reducer.longest_wait_s <= 2.0


def claims(*norms):
    return {f"p{number}": Claim(norm=norm) for number, norm in enumerate(norms)}


def reduce(parts, claimed, left_out=(), robust=False, num_buffers=0):
    """Feed a reducer the numbers `parts[sender][index]`; return its averages (or errors) and its notes.

    The last `num_buffers` parts belong to buffers.
    """

    async def scene():
        shapes = [torch.Size()] * len(parts[0])
        gradients = len(shapes) - num_buffers
        reducer = SoundReducer(
            shapes, list(claimed), claimed, left_out, robust=robust, num_gradients=gradients
        )
        averages = []
        for index, given in enumerate(zip(*parts, strict=True)):
            tensors = (None if part is None else torch.tensor(part) for part in given)
            waiting = (reducer.accumulate_part(number, index, one) for number, one in enumerate(tensors))
            first, *rest = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(str(one) == str(first) for one in rest)
            averages.append(first if isinstance(first, Exception) else first.item())
        return averages, reducer.notes

    return asyncio.run(scene())


NAN, SHAPELESS = math.nan, "no tensors of the right shape"
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
    assert noted.keys() == notes.keys() and all(words in noted[peer] for peer, words in notes.items())


def test_sender_of_unusable_buffers_is_ignored():
    for bad in (NAN, math.inf, 1e30):
        averages, notes = reduce([[1.0, 4.0], [3.0, bad]], claims(2.0, 4.0), num_buffers=1)
        assert averages == [2.0, 4.0] and notes == {"p1": "its parts are not finite"}


def test_buffers_use_weighted_mean_or_median():
    parts, claimed = [[0.0, 1e9], [4.0, 1.0], [9.0, 3.0]], CLAIMS | {"p2": Claim(weight=4.0, norm=9.0)}
    averages, notes = reduce(parts, claimed, num_buffers=1)
    assert averages == pytest.approx([6.0, (1e9 + 3 * 1 + 4 * 3) / 8]) and notes == {}
    assert reduce(parts, claimed, robust=True, num_buffers=1)[0][1] == 3.0


def test_buffer_mean_stays_above_minimum():
    chance = torch.Generator().manual_seed(0)
    values = torch.rand(3, 1000, generator=chance) * torch.tensor([[1e-9], [1e9], [1.0]])
    parts = [one.tolist() for one in values]
    averages, _ = reduce(parts, claims(0.0, 0.0, 0.0), num_buffers=1000)
    assert (torch.tensor(averages) >= values.amin(dim=0)).all()


def test_left_out_senders_are_ignored():
    parts, claimed = [[1.0], [3.0], [1e6]], claims(1.0, 3.0, 1e6)
    for robust in (False, True):  # a robust mean needs more than two
        assert reduce(parts, claimed, left_out=["p2"], robust=robust)[0] == [2.0]
    assert reduce(parts, claimed, robust=True)[0][0] < 100.0
    for parts, left_out in ([[1.0], [1.0]], ["p0", "p1"]), ([[NAN], [NAN]], []):
        [error], _ = reduce(parts, claims(1.0, 1.0), left_out=left_out, robust=True)
        assert isinstance(error, AllreduceException) and "no contribution" in str(error)


def test_round_without_samples_fails():
    [error], _ = reduce([[0.0], [0.0]], {name: Claim(samples=0, weight=0.0) for name in ("p0", "p1")})
    assert isinstance(error, AllreduceException)


def test_damaged_only_contribution_fails_round():
    claimed = {"p0": Claim(samples=4, weight=0.0), "p1": Claim(samples=4, weight=2.0, norm=1.0)}
    [error], notes = reduce([[0.0], [NAN]], claimed)
    assert isinstance(error, AllreduceException) and "p1" in notes


def test_failed_sender_fails_remaining_parts():
    async def scene(end, words):
        reducer = SoundReducer(
            [torch.Size()] * 2, ["p0", "p1"], claims(2.0, 2.0), {}, robust=False, num_gradients=2
        )
        first = await asyncio.gather(*(reducer.accumulate_part(one, 0, torch.ones(())) for one in (0, 1)))
        waiting = asyncio.create_task(reducer.accumulate_part(0, 1, torch.ones(())))
        await asyncio.sleep(0)
        with pytest.raises(AllreduceException, match="p1 sent more parts than there are"):
            await reducer.accumulate_part(1, 2, torch.zeros(()))
        end(reducer)
        with pytest.raises(AllreduceException, match=words):
            await waiting
        reducer.finalize()
        assert first == [1.0, 1.0]

    asyncio.run(scene(lambda reducer: reducer.on_sender_failed(1), "peer p1 did not send"))
    asyncio.run(scene(SoundReducer.finalize, "is over"))


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
