"""What a reducer takes from its group."""

import asyncio
import math

import pytest
import torch
from hivemind.averaging.partition import AllreduceException

from trahiv_cli.optim.ledger import Spans
from trahiv_cli.optim.soundness import (
    USELESS_AT_MOST,
    Claim,
    SoundReducer,
    centered_clipping,
    outliers,
    state_to_adopt,
    weighted_mean,
)

INF, NAN = math.inf, math.nan


def claims(*norms, weight=1.0):
    return {f"p{number}": Claim(weight=weight, norm=norm) for number, norm in enumerate(norms)}


@pytest.mark.parametrize(
    ("norms", "limit", "found"),
    [
        ([1.0, 1.0, 10.0], 10, {}),
        ([1.0, 1.0, 10.1], 10, {"p2": "the norm of its gradient is 10.1, the group's median 1"}),
        ([1.0, 100.0], 10, {"p1": "is 100, the group's median 1"}),  # of two, the smaller norm judges
        ([1.0, 2.0, 1e6, 1e6], 10, {"p2": "median 2", "p3": "median 2"}),
        ([1.0, 1e6, 1e6], 10, {}),  # most are large: the small one has no say
        ([0.0, 0.0, 1.0], 10, {}),  # zeros have no say
        ([0.0, 1.0, 100.0], 10, {"p2": "median 1"}),
        ([0.0, 0.0], 10, {}),
        ([1.0, INF, -INF], 10, {"p1": "not finite", "p2": "not finite"}),
        ([1.0, NAN, 1e9], 0, {"p1": "its gradient is not finite"}),  # no limit: all that is finite
        ([NAN, NAN], 10, {"p0": "not finite", "p1": "not finite"}),
    ],
)
def test_far_and_not_finite_norms_are_left_out(norms, limit, found):
    left_out = outliers(claims(*norms), limit)
    assert left_out.keys() == found.keys() and all(words in left_out[peer] for peer, words in found.items())


def test_the_state_that_most_hold_is_adopted_and_between_equals_a_lot_decides_the_same_for_all():
    for states in ("xxy", "xxxyz", "xxx", "xxyz"):
        held = dict(zip("ABCDE", map(str.encode, states), strict=False))
        assert {state_to_adopt(held, bytes([lot])) for lot in range(20)} == {b"x"}
    held = {"A": b"x", "B": b"y", "C": b"z"}
    drawn = [state_to_adopt(held, bytes([lot])) for lot in range(200)]
    assert drawn == [state_to_adopt(dict(reversed(held.items())), bytes([lot])) for lot in range(200)]
    assert all(40 < drawn.count(state) < 100 for state in held.values())


def test_samples_beyond_what_a_peer_can_hold_do_not_count_nor_do_their_weight_and_positions():
    assert Claim(80, 640.0, 1.0).counted(most_samples=20) == Claim(20, 160.0, 1.0)
    assert Claim(20, 640.0, 1.0).counted(most_samples=20) == Claim(20, 640.0, 1.0)
    claim = Claim(2**40, 1.0, 1.0, trained=Spans(((0, 8), (10, 2**40))))
    assert claim.counted(most_samples=20).trained == Spans(((0, 8), (10, 2 + 20 + USELESS_AT_MOST)))


def reduce(parts, claimed, left_out=(), robust=False):
    """Give a reducer `parts[sender][index]`; return its averages (or errors) and its notes."""

    async def scene():
        shapes = [torch.Size([1])] * len(parts[0])
        reducer = SoundReducer(shapes, list(claimed), claimed, left_out, robust=robust)
        averages = []
        for index in range(len(parts[0])):
            given = (
                reducer.accumulate_part(sender, index, part[index] and torch.tensor(part[index]))
                for sender, part in enumerate(parts)
            )
            first, *rest = await asyncio.gather(*given, return_exceptions=True)
            assert all(str(one) == str(first) for one in rest)
            averages.append(first if isinstance(first, Exception) else first.tolist())
        return averages, reducer.notes

    return asyncio.run(scene())


SHAPELESS, TOO_LARGE = "no tensors of the right shape", "larger than the norm {} that it claimed"
WEIGHTS = {f"p{index}": Claim(weight=weight, norm=9.0) for index, weight in enumerate((1.0, 3.0, 0.0))}


@pytest.mark.parametrize(
    ("parts", "claimed", "averages", "notes"),
    [
        ([[[0.0], [4.0]], [[4.0], [0.0]], [[9.0], [0.0]]], WEIGHTS, [[3.0], [1.0]], {}),
        ([[[0.0]], [[4.0]]], claims(0.0, 4.0), [[2.0]], {}),  # a gradient of zeros is a contribution
        ([[[1.0]], [[1.2]]], claims(1.0, 1.0), [[1.1]], {}),  # what a codec adds to a norm is forgiven
        ([[[1.0]], [[1.3]]], claims(1.0, 1.0), [[1.0]], {"p1": TOO_LARGE.format(1)}),
        (
            [[[1.0], [1.0]], [[1.0], [100.0]], [[4.0], [4.0]]],  # from then on
            claims(2.0, 2.0, 6.0),
            [[2.0], [2.5]],
            {"p1": TOO_LARGE.format(2)},
        ),
        ([[[0.5], [0.5]], [[NAN], [7.0]]], claims(9.0, 9.0), [[0.5]] * 2, {"p1": "its parts are not finite"}),
        *(
            ([[[0.5], [0.5]], [bad, [7.0]]], claims(1.0, 9.0), [[0.5]] * 2, {"p1": SHAPELESS})
            for bad in (None, [0.0, 0.0], [1])
        ),
    ],
)
def test_senders_count_by_their_weight_as_long_as_they_keep_their_word(parts, claimed, averages, notes):
    found, noted = reduce(parts, claimed)
    assert found == [pytest.approx(average) for average in averages]
    assert noted.keys() == notes.keys() and all(words in noted[peer] for peer, words in notes.items())


def test_those_who_are_left_out_do_not_count_and_somebody_must():
    parts, claimed = [[[1.0]], [[3.0]], [[1e6]]], claims(1.0, 3.0, 1e6)
    for robust in (False, True):  # a robust mean is of more than two
        assert reduce(parts, claimed, left_out=["p2"], robust=robust)[0] == [[2.0]]
    assert reduce(parts, claimed, robust=True)[0][0][0] < 100.0
    for parts, left_out in ([[[1.0]], [[1.0]]], ["p0", "p1"]), ([[[NAN]], [[NAN]]], []):
        [error], _ = reduce(parts, claims(1.0, 1.0), left_out=left_out, robust=True)
        assert isinstance(error, AllreduceException) and "nobody's contribution" in str(error)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda reducer: reducer.on_sender_failed(1), "peer p1 did not send"),
        (SoundReducer.finalize, "is over"),
    ],
    ids=["failed", "finalized"],
)
def test_a_sender_that_fails_half_way_or_sends_too_much_fails_what_is_not_averaged_yet(end, words):
    async def scene():
        reducer = SoundReducer([torch.Size([1])] * 2, ["p0", "p1"], claims(2.0, 2.0), {}, robust=False)
        first = await asyncio.gather(*(reducer.accumulate_part(one, 0, torch.ones(1)) for one in (0, 1)))
        waiting = asyncio.create_task(reducer.accumulate_part(0, 1, torch.ones(1)))
        await asyncio.sleep(0)
        with pytest.raises(AllreduceException, match="p1 sent more parts than there are"):
            await reducer.accumulate_part(1, 2, torch.zeros(1))
        end(reducer)
        with pytest.raises(AllreduceException, match=words):
            await waiting
        reducer.finalize()
        return first

    assert all(average.tolist() == [1.0] for average in asyncio.run(scene()))


def honest(count, size=400, noise=0.5):
    """Gradients of one direction with noise of their own, and the direction."""
    chance = torch.Generator().manual_seed(0)
    true = torch.randn(size, generator=chance)
    return [true + noise * torch.randn(size, generator=chance) for _ in range(count)], true


def distance(one, other):
    return float((one - other).norm() / other.norm())


def test_a_mean_is_weighted_and_float32_and_leaves_the_parts_alone():
    part, other = (torch.full((2, 2), value, dtype=torch.bfloat16) for value in (1.0, 4.0))
    assert weighted_mean([(part, 2.0), (other, 1.0)]).tolist() == [[2.0, 2.0]] * 2
    centered_clipping([part, other, part])
    assert part.unique().tolist() == [1.0]
    assert centered_clipping([part] * 5).equal(torch.ones(2, 2)), "equal parts are their own robust mean"


@pytest.mark.parametrize(("count", "liars"), [(5, 1), (5, 2), (9, 4)])
def test_a_minority_of_liars_moves_the_robust_mean_little_and_the_mean_far(count, liars):
    gradients, true = honest(count)
    assert distance(centered_clipping(gradients), weighted_mean([(one, 1.0) for one in gradients])) < 0.05
    for lie in (-10 * true, 1e6 * torch.ones_like(true), 0 * true):
        # Not farther than one honest gradient may be, whatever the size of the lie.
        assert distance(centered_clipping([*[lie] * liars, *gradients[liars:]]), true) < 1.0
    lies = [-10 * gradients[0], *gradients[1:]]
    if liars == 1:  # one sign flipper of five turns the mean around
        assert float(weighted_mean([(one, 1.0) for one in lies]) @ true) < 0
        assert distance(centered_clipping(lies), true) < 0.5
