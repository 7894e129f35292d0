"""The outer step: torch's SGD with Nesterov momentum, in float32, for the tensors of one fragment."""

import torch

from trahiv_cli.optim.outer import OuterState

SHAPES = ((31, 7), (13,), (1,), ())
LEARNING_RATE, MOMENTUM = 0.7, 0.9


def random_tensors(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_an_outer_step_is_that_of_torch_but_for_rounding_and_the_same_for_two_peers():
    peers = [OuterState(random_tensors(0), LEARNING_RATE, MOMENTUM) for _ in "AB"]
    weights = [torch.nn.Parameter(weight) for weight in random_tensors(0)]
    theirs = torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)
    for step in range(1, 9):
        for weight, gradient in zip(weights, random_tensors(step, scale=1e-2), strict=True):
            weight.grad = gradient
        theirs.step()
        for peer in peers:
            peer.step(range(len(SHAPES)), random_tensors(step, scale=1e-2))
        expected = [weight.detach() for weight in weights]
        torch.testing.assert_close(peers[0].anchor, expected, rtol=1e-6, atol=1e-6)
        momenta = [theirs.state[weight]["momentum_buffer"] for weight in weights]
        torch.testing.assert_close(peers[0].momentum, momenta, rtol=1e-6, atol=1e-7)
        assert equal(peers[0].anchor, peers[1].anchor) and equal(peers[0].momentum, peers[1].momentum)


def test_only_the_given_places_move_and_states_are_copied():
    weights, gradients, momentum = random_tensors(0), random_tensors(1), random_tensors(2)
    outer = OuterState(weights, LEARNING_RATE, MOMENTUM)
    outer.step(range(1, 2), gradients)
    assert equal(outer.anchor[::2], weights[::2]) and not any(one.any() for one in outer.momentum[::2])
    assert not torch.equal(outer.anchor[1], weights[1]) and torch.equal(outer.momentum[1], gradients[1])
    assert equal(weights, random_tensors(0)) and equal(gradients, random_tensors(1)), (
        "they are not written to"
    )
    outer.load(gradients, momentum, rounds=5)
    momentum[0].fill_(9.0)
    assert equal(outer.anchor, gradients) and equal(outer.momentum, random_tensors(2)) and outer.rounds == 5
    outer.step(range(4), gradients)
    assert outer.rounds == 6 and equal(gradients, random_tensors(1))
