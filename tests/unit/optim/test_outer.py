"""The outer step: torch's SGD with Nesterov momentum, in float32, for the tensors of one fragment."""

import pytest
import torch

from trahiv_cli.optim.outer import OuterState

SHAPES = ((31, 7), (13,), (1,))
LEARNING_RATE, MOMENTUM = 0.7, 0.9


def random_tensors(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.fixture
def outer():
    return OuterState(random_tensors(0), LEARNING_RATE, MOMENTUM)


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def copies(tensors):
    return [tensor.clone() for tensor in tensors]


def test_an_outer_step_is_that_of_torch_but_for_rounding(outer):
    weights = [torch.nn.Parameter(weight) for weight in random_tensors(0)]
    theirs = torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)
    for step in range(8):
        gradients = random_tensors(step + 1, scale=1e-2)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        theirs.step()
        outer.step(range(len(SHAPES)), gradients)
        torch.testing.assert_close(
            outer.anchor, [weight.detach() for weight in weights], rtol=1e-6, atol=1e-6
        )
        momenta = [theirs.state[weight]["momentum_buffer"] for weight in weights]
        torch.testing.assert_close(outer.momentum, momenta, rtol=1e-6, atol=1e-7)


def test_two_peers_that_take_the_same_steps_hold_the_same_bits(outer):
    other = OuterState(random_tensors(0), LEARNING_RATE, MOMENTUM)
    for step in range(4):
        for peer in (outer, other):
            peer.step(range(len(SHAPES)), random_tensors(step + 1))
    assert equal(outer.anchor, other.anchor) and equal(outer.momentum, other.momentum)


def test_only_the_given_places_move(outer):
    before, gradients = copies(outer.anchor), random_tensors(1)
    given = copies(gradients)
    outer.step(range(1, 2), gradients)
    assert equal(outer.anchor[::2], before[::2]) and not any(
        momentum.any() for momentum in outer.momentum[::2]
    )
    assert not torch.equal(outer.anchor[1], before[1]) and torch.equal(outer.momentum[1], gradients[1])
    assert equal(gradients, given), "what was averaged is not written to"


def test_rounds_are_counted_whatever_they_move(outer):
    for count, places in enumerate([range(1), range(1, 3), range(3)], start=1):
        outer.step(places, random_tensors(count))
        assert outer.rounds == count


def test_a_weight_without_dimensions_moves_too():
    outer = OuterState([torch.tensor(1.0)], learning_rate=0.5, momentum=0.5)
    outer.step(range(1), [torch.tensor(4.0)])
    assert (outer.anchor[0].item(), outer.momentum[0].item()) == (1.0 - 0.5 * (4.0 + 2.0), 4.0)


def test_the_first_weights_are_copied():
    weights = random_tensors(0)
    outer = OuterState(weights, LEARNING_RATE, MOMENTUM)
    weights[0].fill_(9.0)
    assert equal(outer.anchor, random_tensors(0)) and outer.rounds == 0
    outer.step(range(len(SHAPES)), random_tensors(1))
    assert weights[0].unique().tolist() == [9.0]


def test_another_state_is_copied(outer):
    weights, momentum = random_tensors(1), random_tensors(2)
    outer.load(weights, momentum, rounds=5)
    assert equal(outer.anchor, weights) and equal(outer.momentum, momentum) and outer.rounds == 5
    weights[0].fill_(9.0)
    momentum[0].fill_(9.0)
    assert equal(outer.anchor, random_tensors(1)) and equal(outer.momentum, random_tensors(2))
