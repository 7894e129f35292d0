"""How often weights are exchanged, and in which fragments."""

import itertools

import pytest

from trahiv_cli.optim.pace import Pace, divide

SIZES = {
    "equal": [10] * 8,
    "like a small transformer": [512, *([64, 64, 4096, 256, 16384, 256] * 6), 512],
    "growing": list(range(1, 40)),
    "one large tensor in front": [1000, 1, 1, 1, 1],
    "one large tensor in the middle": [1, 1, 1000, 1, 1],
    "one large tensor at the end": [1, 1, 1, 1, 1000],
    "scalars of no size": [0, 0, 0, 0],
    "one tensor": [7],
}


@pytest.mark.parametrize("num_fragments", range(1, 8))
@pytest.mark.parametrize("name", SIZES)
def test_every_tensor_is_in_one_fragment_and_no_fragment_is_empty(name, num_fragments):
    sizes = SIZES[name]
    fragments = divide(sizes, num_fragments)
    assert len(fragments) == min(num_fragments, len(sizes))
    assert all(fragments)
    assert list(itertools.chain(*fragments)) == list(range(len(sizes))), "in order, each once"


@pytest.mark.parametrize("num_fragments", range(1, 8))
@pytest.mark.parametrize("name", SIZES)
def test_no_fragment_is_more_than_one_tensor_larger_than_its_share(name, num_fragments):
    sizes = SIZES[name]
    for fragment in divide(sizes, num_fragments):
        share = sum(sizes) / min(num_fragments, len(sizes))
        assert sum(sizes[place] for place in fragment) <= share + max(sizes)


def test_equal_tensors_make_equal_fragments():
    assert divide([10] * 8, 4) == (range(2), range(2, 4), range(4, 6), range(6, 8))


@pytest.mark.parametrize(
    ("pace", "steps", "fragments"),
    [
        (Pace(), 1, 1),
        (Pace(mode="overlap", local_steps=8, fragments=4), 1, 1),
        (Pace(mode="diloco", local_steps=8, fragments=4), 8, 1),
        (Pace(mode="streaming", local_steps=8, fragments=4), 2, 4),
        (Pace(mode="streaming", local_steps=10, fragments=4), 3, 4),
        (Pace(mode="streaming", local_steps=8, fragments=1), 8, 1),
        (Pace(mode="streaming", local_steps=2, fragments=4), 1, 2),
    ],
)
def test_steps_of_a_round(pace, steps, fragments):
    assert (pace.steps_per_round, pace.num_fragments) == (steps, fragments)


@pytest.mark.parametrize("local_steps", range(1, 20))
@pytest.mark.parametrize("fragments", range(1, 6))
def test_a_weight_is_exchanged_as_often_as_was_asked_for_but_for_rounding(local_steps, fragments):
    pace = Pace(mode="streaming", local_steps=local_steps, fragments=fragments)
    between = pace.steps_per_round * pace.num_fragments
    assert local_steps <= between < local_steps + pace.num_fragments
