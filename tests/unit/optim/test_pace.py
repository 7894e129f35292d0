"""How often weights are exchanged, and in which fragments."""

import itertools

import pytest

from trahiv_cli.optim.pace import Pace, divide


@pytest.mark.parametrize("num_fragments", range(1, 8))
@pytest.mark.parametrize(
    "sizes",
    [
        [10] * 8,
        [512, *([64, 64, 4096, 256, 16384, 256] * 6), 512],  # like a small transformer
        [1000, 1, 1, 1, 1],
        [1, 1, 1, 1, 1000],
        [0, 0, 0, 0],
        [7],
    ],
)
def test_every_tensor_is_in_one_fragment_and_none_is_much_larger_than_its_share(sizes, num_fragments):
    fragments = divide(sizes, num_fragments)
    assert len(fragments) == min(num_fragments, len(sizes)) and all(fragments)
    assert list(itertools.chain(*fragments)) == list(range(len(sizes))), "in order, each once"
    most = sum(sizes) / len(fragments) + max(sizes)
    assert all(sum(sizes[place] for place in fragment) <= most for fragment in fragments)
    if sizes == [10] * 8 and num_fragments == 4:
        assert fragments == (range(2), range(2, 4), range(4, 6), range(6, 8))


@pytest.mark.parametrize(
    ("mode", "local_steps", "fragments", "steps"),
    [
        ("sync", 50, 4, 1),
        ("overlap", 8, 4, 1),
        ("diloco", 8, 4, 8),
        ("streaming", 8, 4, 2),
        ("streaming", 10, 4, 3),
        ("streaming", 2, 4, 1),
    ],
)
def test_steps_of_a_round(mode, local_steps, fragments, steps):
    pace = Pace(mode, local_steps=local_steps, fragments=fragments)
    assert pace.steps_per_round == steps
    assert pace.num_fragments == (min(local_steps, fragments) if mode == "streaming" else 1)
    if pace.has_local_steps:  # a weight is exchanged as often as was asked for, but for rounding
        assert local_steps <= steps * pace.num_fragments < local_steps + pace.num_fragments


@pytest.mark.parametrize(
    "change",
    [{"mode": "fast"}, {"local_steps": 0}, {"fragments": 2.5}, {"keeps_codec": 1}, {"outer_momentum": 1e7}],
)
def test_what_is_not_a_pace_is_refused(change):
    pace = Pace("streaming", "none", 100, 3, 0.5, 0.25, True)
    assert Pace.from_wire(pace.to_wire()) == pace
    with pytest.raises(ValueError, match="not a pace"):
        Pace.from_wire(Pace().to_wire() | change)
