"""What a reducer takes from its group."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.utils import MSGPackSerializer

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
from trahiv_cli.swarm.snapshot import unpacked

INF, NAN = math.inf, math.nan


def claims(*norms, weight=1.0):
    return {f"p{number}": Claim(weight=weight, norm=norm) for number, norm in enumerate(norms)}


# -- before the round -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norms", "limit", "found"),
    [
        ([1.0, 1.0, 1.0], 10, []),
        ([1.0, 1.0, 10.0], 10, []),
        ([1.0, 1.0, 10.1], 10, [2]),
        ([1.0, 100.0], 10, [1]),  # of two, the smaller norm judges
        ([1.0, 2.0, 1e6, 1e6], 10, [2, 3]),
        ([1.0, 1e6, 1e6], 10, []),  # most are large: the small one has no say
        ([0.0, 0.0, 1.0], 10, []),  # zeros have no say
        ([0.0, 1.0, 100.0], 10, [2]),
        ([0.0, 0.0], 10, []),
        ([1.0, NAN, 1.0], 10, [1]),
        ([1.0, INF, 1.0], 10, [1]),
        ([1.0, -INF, 1.0], 10, [1]),
        ([1.0, NAN, 1e9], 0, [1]),  # no limit: all that is finite
        ([NAN, NAN], 10, [0, 1]),
        ([1.0], 10, []),
    ],
)
def test_far_and_not_finite_norms_are_left_out(norms, limit, found):
    left_out = outliers(claims(*norms), limit)
    assert sorted(left_out) == [f"p{number}" for number in found]


def test_it_is_said_why_somebody_is_left_out():
    left_out = outliers(claims(1.0, 1.0, 1e6, NAN), 10)
    assert left_out == {
        "p2": "the norm of its gradient is 1e+06, the group's median 1",
        "p3": "its gradient is not finite",
    }


@pytest.mark.parametrize(("states", "adopted"), [("xxy", "x"), ("xxxyz", "x"), ("xxx", "x"), ("xxyz", "x")])
def test_the_state_that_most_hold_is_adopted(states, adopted):
    held = {peer: state.encode() for peer, state in zip("ABCDE", states, strict=False)}
    assert {state_to_adopt(held, bytes([lot])) for lot in range(20)} == {adopted.encode()}


def test_between_equals_a_lot_decides_the_same_for_all():
    held = {"A": b"x", "B": b"y", "C": b"z"}
    drawn = [state_to_adopt(held, bytes([lot])) for lot in range(200)]
    assert drawn == [state_to_adopt(dict(reversed(held.items())), bytes([lot])) for lot in range(200)]
    assert all(40 < drawn.count(state) < 100 for state in held.values())


def test_a_claim_of_a_negative_norm_is_none():
    with pytest.raises(ValueError, match="not a claim"):
        Claim.parse(Claim(norm=-1.0).to_bytes())


@pytest.mark.parametrize("claim", [Claim(), Claim(8, 512.0, 0.25, b"state", 3, True)])
def test_a_claim_arrives_as_it_was_sent(claim):
    assert Claim.parse(claim.to_bytes()) == claim


def test_a_claim_of_a_norm_that_is_not_a_number_arrives_and_is_left_out():
    claim = Claim.parse(Claim(norm=NAN).to_bytes())
    assert outliers({"p0": claim}, 10) == {"p0": "its gradient is not finite"}


FIELDS = unpacked(Claim(8, 8.0, 1.0, b"state").to_bytes())


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *((0, wrong) for wrong in (-1, 2**40 + 1, 2**62, 2**64 - 1, 8.0, None)),
        *((1, wrong) for wrong in (-1.0, NAN, INF, 1.1e12, 8, "8")),
        *((2, wrong) for wrong in (1, None)),
        *((3, wrong) for wrong in ("state", bytes(33), None)),
        *((4, wrong) for wrong in (0, -1, 2**16 + 1, 2.5, None)),
        *((5, wrong) for wrong in (0, None)),
        *((6, wrong) for wrong in (None, [], [0.0] * 4, [INF] * 5)),
        *((7, wrong) for wrong in (None, [0], [0, 2**63], [0, 8 + 1024 + 1])),
    ],
)
def test_a_claim_with_a_field_out_of_bounds_is_refused(field, wrong):
    with pytest.raises(ValueError):
        Claim.parse(MSGPackSerializer.dumps([*FIELDS[:field], wrong, *FIELDS[field + 1 :]]))


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", *map(MSGPackSerializer.dumps, (None, FIELDS[:-1], [*FIELDS, 0]))]
)
def test_what_is_not_a_claim_is_refused(content):
    with pytest.raises(ValueError):
        Claim.parse(content)


def test_samples_beyond_what_a_peer_can_hold_do_not_count_nor_do_their_weight():
    assert Claim(80, 640.0, 1.0).counted(most_samples=20) == Claim(20, 160.0, 1.0)
    assert Claim(20, 640.0, 1.0).counted(most_samples=20) == Claim(20, 640.0, 1.0)


def test_of_positions_as_many_count_as_of_samples():
    claim = Claim(2**40, 1.0, 1.0, trained=Spans(((0, 8), (10, 2**40))))
    assert claim.counted(most_samples=20).trained == Spans(((0, 8), (10, 2 + 20 + USELESS_AT_MOST)))
    assert len(replace(claim, trained=Spans(((5, 9),))).counted(most_samples=20).trained) == 4


# -- while parts arrive ---------------------------------------------------------------------------


def reduce(parts, claimed, *, left_out=None, robust=False, weight=1.0):
    """Give a reducer `parts[sender][index]`; return its averages (or errors) and its notes."""

    async def scene():
        shapes = [torch.Size([len(part)]) for part in parts[0]]
        reducer = SoundReducer(shapes, list(claimed), claimed, left_out or {}, robust=robust)
        averages = [None] * len(shapes)
        for index in range(len(shapes)):
            results = await asyncio.gather(
                *(
                    reducer.accumulate_part(sender, index, torch.tensor(share[index]), weight)
                    for sender, share in enumerate(parts)
                ),
                return_exceptions=True,
            )
            assert all(
                str(one) == str(results[0]) if isinstance(one, Exception) else one.equal(results[0])
                for one in results
            )
            averages[index] = results[0] if isinstance(results[0], Exception) else results[0].tolist()
        async with asyncio.timeout(5):
            await reducer.finished.wait()
        return averages, reducer.notes

    return asyncio.run(scene())


def test_senders_count_by_the_weight_that_they_claimed():
    claimed = {"p0": Claim(weight=1.0, norm=4.0), "p1": Claim(weight=3.0, norm=4.0)}
    averages, notes = reduce([[[0.0], [4.0]], [[4.0], [0.0]]], claimed, weight=1e9)
    assert averages == [[3.0], [1.0]]
    assert not notes


def test_those_who_are_left_out_do_not_count():
    parts = [[[1.0]], [[3.0]], [[1e6]]]
    averages, _ = reduce(parts, claims(1.0, 3.0, 1e6), left_out={"p2": "why"})
    assert averages == [[2.0]]


def test_a_sender_without_weight_does_not_count():
    averages, _ = reduce([[[1.0]], [[9.0]]], {"p0": Claim(weight=2.0, norm=1.0), "p1": Claim(weight=0.0)})
    assert averages == [[1.0]]


@pytest.mark.parametrize("robust", [False, True])
def test_a_part_that_is_not_finite_is_not_used_nor_what_follows(robust):
    parts = [[[1.0], [1.0]], [[NAN], [5.0]], [[3.0], [3.0]], [[2.0], [2.0]]]
    averages, notes = reduce(parts, claims(9.0, 9.0, 9.0, 9.0), robust=robust)
    assert averages == [pytest.approx([2.0]), pytest.approx([2.0])]
    assert notes == {"p1": "its parts are not finite"}


def test_parts_larger_than_their_claim_are_not_used():
    parts = [[[1.0], [1.0]], [[1.0], [100.0]], [[4.0], [4.0]]]
    averages, notes = reduce(parts, claims(2.0, 2.0, 6.0))
    assert averages == [[2.0], [2.5]]
    assert list(notes) == ["p1"] and "larger than the norm 2 that it claimed" in notes["p1"]


@pytest.mark.parametrize(("sent", "noted"), [(1.2, False), (1.3, True)])
def test_what_a_codec_adds_to_a_norm_is_forgiven(sent, noted):
    _, notes = reduce([[[1.0]], [[sent]]], claims(1.0, 1.0))
    assert bool(notes) is noted


def test_who_claims_no_norm_is_not_held_to_one():
    averages, notes = reduce([[[1e3]], [[3e3]]], claims(-1.0, -1.0))
    assert averages == [[2e3]] and not notes


def test_a_gradient_of_zeros_is_a_contribution():
    averages, notes = reduce([[[0.0]], [[4.0]]], claims(0.0, 4.0))
    assert averages == [[2.0]] and not notes


@pytest.mark.parametrize(
    ("parts", "left_out"),
    [([[[1.0]], [[1.0]]], {"p0": "why", "p1": "why"}), ([[[NAN]], [[NAN]]], {})],
    ids=["left out", "not finite"],
)
def test_a_round_without_a_usable_contribution_fails(parts, left_out):
    [error], _ = reduce(parts, claims(1.0, 1.0), left_out=left_out)
    assert isinstance(error, AllreduceException) and "nobody's contribution" in str(error)


def reducer_of_two(parts=2):
    return SoundReducer([torch.Size([1])] * parts, ["p0", "p1"], claims(1.0, 1.0), {}, robust=False)


@pytest.mark.parametrize(
    "part", [None, torch.zeros(2), torch.zeros(1, dtype=torch.int32)], ids=["unreadable", "shape", "dtype"]
)
def test_parts_that_are_none_are_not_used_nor_what_follows_and_their_sender_is_named(part):
    async def scene():
        reducer = reducer_of_two()
        averages = [
            await asyncio.gather(
                reducer.accumulate_part(0, index, torch.full((1,), 0.5)),
                reducer.accumulate_part(1, index, theirs),
            )
            for index, theirs in enumerate([part, torch.full((1,), 7.0)])
        ]
        assert all(average.tolist() == [0.5] for pair in averages for average in pair)
        assert reducer.notes == {"p1": "its parts are no tensors of the right shape"}

    asyncio.run(scene())


def test_more_parts_than_there_are_fail_their_sender():
    async def scene():
        await reducer_of_two().accumulate_part(1, 2, torch.zeros(1))

    with pytest.raises(AllreduceException, match="p1 sent more parts than there are"):
        asyncio.run(scene())


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda reducer: reducer.on_sender_failed(1), "peer p1 did not send"),
        (SoundReducer.finalize, "is over"),
    ],
    ids=["failed", "finalized"],
)
def test_a_sender_that_fails_half_way_fails_what_is_not_averaged_yet(end, words):
    async def scene():
        reducer = reducer_of_two()
        first = await asyncio.gather(*(reducer.accumulate_part(s, 0, torch.ones(1)) for s in (0, 1)))
        waiting = asyncio.create_task(reducer.accumulate_part(0, 1, torch.ones(1)))
        await asyncio.sleep(0)
        end(reducer)
        with pytest.raises(AllreduceException, match=words):
            await waiting
        reducer.finalize()
        reducer.finalize()
        assert reducer.finished.is_set()
        return first

    assert all(average.tolist() == [1.0] for average in asyncio.run(scene()))


# -- averages -------------------------------------------------------------------------------------


def honest(count, size=400, noise=0.5):
    """Gradients of one direction with noise of their own, and the direction."""
    chance = torch.Generator().manual_seed(0)
    true = torch.randn(size, generator=chance)
    return [true + noise * torch.randn(size, generator=chance) for _ in range(count)], true


def distance(one, other):
    return float((one - other).norm() / other.norm())


def test_a_mean_is_weighted_and_float32_and_leaves_the_parts_alone():
    parts = [torch.ones(2, 2, dtype=torch.bfloat16), torch.full((2, 2), 4.0, dtype=torch.bfloat16)]
    robust = centered_clipping([parts[0], parts[1], parts[0]])
    assert robust.dtype == torch.float32 and robust.shape == (2, 2)
    assert weighted_mean([(parts[0], 2.0), (parts[1], 1.0)]).tolist() == [[2.0, 2.0]] * 2
    assert parts[0].unique().tolist() == [1.0]


def test_equal_parts_are_their_own_robust_mean():
    part = torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert centered_clipping([part] * 5).equal(part)


@pytest.mark.parametrize("count", [3, 5, 8])
def test_honest_gradients_have_a_robust_mean_close_to_their_mean(count):
    gradients, _ = honest(count)
    mean = weighted_mean([(one, 1.0) for one in gradients])
    assert distance(centered_clipping(gradients), mean) < 0.05


@pytest.mark.parametrize(
    "lie", [lambda true: -10 * true, lambda true: 1e6 * torch.ones_like(true), lambda true: 0 * true]
)
@pytest.mark.parametrize(("count", "liars"), [(5, 1), (5, 2), (9, 4)])
def test_a_minority_of_liars_moves_the_robust_mean_little(lie, count, liars):
    gradients, true = honest(count)
    for number in range(liars):
        gradients[number] = lie(true)
    robust = centered_clipping(gradients)
    # Not farther than one honest gradient may be, whatever the size of the lie.
    assert distance(robust, true) < 1.0


def test_one_sign_flipper_of_five_turns_the_mean_around_and_not_the_robust_mean():
    gradients, true = honest(5)
    gradients[2] = -10 * gradients[2]
    assert float(weighted_mean([(one, 1.0) for one in gradients]) @ true) < 0
    assert distance(centered_clipping(gradients), true) < 0.5
