"""How gradients enter and leave the accumulators, without a process or a network."""

import pytest
import torch

from tests.kit.states import gradient_buffer


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.ones(2))


@pytest.fixture
def buffer(parameter):
    return gradient_buffer([parameter])


each_way = pytest.mark.parametrize("lend", [False, True], ids=["added", "lent"])


def run(buffer, parameter, *batches, lend=True):
    """Run batches of (gradient, samples, weight), clearing gradients after each as the Trainer does."""
    for gradient, samples, weight in batches:
        factor = buffer.expect_batch(samples, weight, lend=lend)
        (parameter * gradient * factor).sum().backward()
        buffer.accumulate(99)  # the announced size counts
        assert parameter.grad is None or not lend
        torch.optim.SGD([parameter], lr=0.1).zero_grad(set_to_none=not lend)


def averages(buffer):
    return buffer.averages.tensors[0].tolist()


def mean_of(buffer):
    buffer.set_aside()
    buffer.load_aside()
    buffer.take_back()
    return averages(buffer)


def counts(buffer):
    return buffer.samples, buffer.weight


@each_way
@pytest.mark.parametrize(
    ("batches", "mean", "counted"),
    [
        ([], 0.0, (0, 0.0)),
        ([(1.0, 4, 4), (5.0, 4, 4)], 3.0, (8, 8.0)),
        ([(1.0, 4, 30), (5.0, 4, 10), (8.0, 2, 20)], 4.0, (10, 60.0)),
        ([(2.0, 4, 5.0), (7.0, 4, 0.0)], 2.0, (8, 5.0)),  # the second has no trained tokens
        ([(0.0, 4, 0.0), (2.0, 4, 5.0)], 2.0, (8, 5.0)),
    ],
)
def test_batches_are_weighted_by_trained_tokens(buffer, parameter, lend, batches, mean, counted):
    run(buffer, parameter, *batches, lend=lend)
    assert mean_of(buffer) == pytest.approx([mean] * 2)
    assert counts(buffer) == counted


@each_way
def test_announced_batches_accumulate(buffer, parameter, lend):
    buffer.expect_batch(4, 30.0, lend=False)
    buffer.forget_announced()  # its gradients were discarded
    buffer.expect_batch(4, 30.0, lend=False)
    buffer.reset()
    for gradient, weight in ((1.0, 30), (5.0, 10)):
        factor = buffer.expect_batch(4, weight, lend=lend)
        (parameter * gradient * factor).sum().backward()  # a window of gradient accumulation
    buffer.accumulate(99)
    assert mean_of(buffer) == pytest.approx([2.0, 2.0])
    assert counts(buffer) == (8, 40.0)


def test_unannounced_batch_is_weighted_by_samples(buffer, parameter):
    for samples, gradient in ((1, 1.0), (3, 5.0)):
        parameter.grad = torch.full((2,), gradient)
        buffer.accumulate(samples)
    parameter.grad = None  # a parameter that the batch did not use
    buffer.accumulate(4)
    assert mean_of(buffer) == [2.0, 2.0]
    assert counts(buffer) == (8, 8.0)


def test_backward_adds_to_lent_accumulators(buffer, parameter):
    buffer.expect_batch(4, 4, lend=True)
    lent = parameter.grad
    (parameter * 2.0).sum().backward()
    assert parameter.grad is lent
    assert lent.tolist() == [2.0, 2.0]
    buffer.accumulate(4)
    buffer.set_aside()
    assert buffer.aside[0] is lent
    buffer.take_back()
    [elsewhere] = buffer.parameters = [torch.nn.Parameter(torch.ones(2, device="meta"))]
    buffer.expect_batch(4, 4, lend=True)
    assert elsewhere.grad is None
    buffer.set_aside()
    with buffer.use_averaged_gradients():
        assert elsewhere.grad.device.type == "meta", "averages come to where it is"


def test_averages_reuse_set_aside_memory(buffer, parameter):
    run(buffer, parameter, (1.0, 4, 4))
    buffer.set_aside()
    buffer.load_aside()
    with buffer.use_averaged_gradients():
        assert parameter.grad is buffer.aside[0]
        parameter.grad.mul_(0.5)  # as clipping does
    assert parameter.grad is None
    assert averages(buffer) == [1.0, 1.0]
    with pytest.raises(MemoryError), buffer.use_averaged_gradients():
        raise MemoryError
    assert parameter.grad is None, "for the next backward pass"
    memory = buffer.aside[0]
    buffer.use_up()
    assert mean_of(buffer) == [0.0, 0.0]
    run(buffer, parameter, (4.0, 2, 2), (1.0, 4, 4))
    buffer.set_aside()
    assert buffer.aside[0] is memory, "a round that training waits for takes none of its own"
    buffer.take_back()
    with buffer.use_accumulated_gradients():  # as local steps do
        assert parameter.grad.tolist() == [2.0, 2.0]
    buffer.reset()
    assert (parameter.grad, counts(buffer), mean_of(buffer)) == (None, (0, 0.0), [0.0, 0.0])
