"""The outer step: torch's SGD with Nesterov momentum, in float32, for the tensors of one fragment."""

import pytest
import torch

from trahiv_cli.optim.outer import OuterState

SHAPES = ((31, 7), (13,), (1,), ())
LEARNING_RATE, MOMENTUM = 0.7, 0.9


def random_tensors(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.fixture
def outer():
    return OuterState(random_tensors(0), LEARNING_RATE, MOMENTUM)


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_an_outer_step_is_that_of_torch_but_for_rounding_and_the_same_for_two_peers(outer):
    other = OuterState(random_tensors(0), LEARNING_RATE, MOMENTUM)
    weights = [torch.nn.Parameter(weight) for weight in random_tensors(0)]
    theirs = torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)
    for step in range(8):
        for weight, gradient in zip(weights, random_tensors(step + 1, scale=1e-2), strict=True):
            weight.grad = gradient
        theirs.step()
        for peer in (outer, other):
            peer.step(range(len(SHAPES)), random_tensors(step + 1, scale=1e-2))
        expected = [weight.detach() for weight in weights]
        torch.testing.assert_close(outer.anchor, expected, rtol=1e-6, atol=1e-6)
        momenta = [theirs.state[weight]["momentum_buffer"] for weight in weights]
        torch.testing.assert_close(outer.momentum, momenta, rtol=1e-6, atol=1e-7)
        assert equal(outer.anchor, other.anchor) and equal(outer.momentum, other.momentum)


def test_only_the_given_places_move_and_each_round_is_counted(outer):
    before, gradients = random_tensors(0), random_tensors(1)
    outer.step(range(1, 2), gradients)
    assert equal(outer.anchor[::2], before[::2]) and not any(one.any() for one in outer.momentum[::2])
    assert not torch.equal(outer.anchor[1], before[1]) and torch.equal(outer.momentum[1], gradients[1])
    assert equal(gradients, random_tensors(1)), "what was averaged is not written to"
    outer.step(range(4), gradients)
    assert outer.rounds == 2


def test_states_are_copied():
    weights, momentum = random_tensors(0), random_tensors(2)
    outer = OuterState(weights, LEARNING_RATE, MOMENTUM)
    weights[0].fill_(9.0)
    assert equal(outer.anchor, random_tensors(0)) and outer.rounds == 0
    outer.step(range(len(SHAPES)), random_tensors(1))
    assert weights[0].unique().tolist() == [9.0]
    outer.load(random_tensors(1), momentum, rounds=5)
    momentum[0].fill_(9.0)
    held = equal(outer.anchor, random_tensors(1)) and equal(outer.momentum, random_tensors(2))
    assert held and outer.rounds == 5
