"""How gradients enter and leave the accumulators, without a process or a network."""

import pytest
import torch

from tests.kit.averagers import gradient_averager


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.ones(2))


@pytest.fixture
def averager(parameter):
    return gradient_averager([parameter])


each_way = pytest.mark.parametrize("lend", [False, True], ids=["added", "lent"])


def run(averager, parameter, *batches, lend=True):
    """Run batches of (gradient, samples, weight), clearing gradients after each as the Trainer does."""
    for gradient, samples, weight in batches:
        factor = averager.expect_batch(samples, weight, lend=lend)
        (parameter * gradient * factor).sum().backward()
        averager.accumulate_grads_(batch_size=99)  # the announced size counts
        assert parameter.grad is None or not lend
        torch.optim.SGD([parameter], lr=0.1).zero_grad(set_to_none=not lend)


def averages(averager):
    with averager.get_tensors() as [tensor]:
        return tensor.tolist()


def mean_of(averager):
    averager.set_aside()
    averager.load_aside()
    averager.take_back()
    return averages(averager)


def counts(averager):
    return averager.local_samples_accumulated, averager.local_weight


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
def test_batches_are_weighted_by_trained_tokens(averager, parameter, lend, batches, mean, counted):
    run(averager, parameter, *batches, lend=lend)
    assert mean_of(averager) == pytest.approx([mean] * 2) and counts(averager) == counted


@each_way
def test_announced_batches_accumulate(averager, parameter, lend):
    averager.expect_batch(4, 30.0, lend=False)
    averager.forget_announced()  # its gradients were discarded
    averager.expect_batch(4, 30.0, lend=False)
    averager.reset_accumulated_grads_()
    for gradient, weight in ((1.0, 30), (5.0, 10)):
        factor = averager.expect_batch(4, weight, lend=lend)
        (parameter * gradient * factor).sum().backward()  # a window of gradient accumulation
    averager.accumulate_grads_(batch_size=99)
    assert mean_of(averager) == pytest.approx([2.0, 2.0]) and counts(averager) == (8, 40.0)


def test_unannounced_batch_is_weighted_by_samples(averager, parameter):
    for samples, gradient in ((1, 1.0), (3, 5.0)):
        parameter.grad = torch.full((2,), gradient)
        averager.accumulate_grads_(batch_size=samples)
    parameter.grad = None  # a parameter that the batch did not use
    averager.accumulate_grads_(batch_size=4)
    assert mean_of(averager) == [2.0, 2.0] and counts(averager) == (8, 8.0)


def test_backward_adds_to_lent_accumulators(averager, parameter):
    averager.expect_batch(4, 4, lend=True)
    lent = parameter.grad
    (parameter * 2.0).sum().backward()
    assert parameter.grad is lent and lent.tolist() == [2.0, 2.0]
    averager.accumulate_grads_(batch_size=4)
    averager.set_aside()
    assert averager.aside[0] is lent
    averager.take_back()
    [elsewhere] = averager.parameters = [torch.nn.Parameter(torch.ones(2, device="meta"))]
    averager.expect_batch(4, 4, lend=True)
    assert elsewhere.grad is None
    averager.set_aside()
    with averager.use_averaged_gradients():
        assert elsewhere.grad.device.type == "meta", "averages come to where it is"


def test_averages_reuse_set_aside_memory(averager, parameter):
    run(averager, parameter, (1.0, 4, 4))
    averager.set_aside()
    averager.load_aside()
    with averager.use_averaged_gradients():
        assert parameter.grad is averager.aside[0]
        parameter.grad.mul_(0.5)  # as clipping does
    assert parameter.grad is None and averages(averager) == [1.0, 1.0]
    with pytest.raises(MemoryError), averager.use_averaged_gradients():
        raise MemoryError
    assert parameter.grad is None, "for the next backward pass"
    memory = averager.aside[0]
    averager.use_up()
    assert mean_of(averager) == [0.0, 0.0]
    run(averager, parameter, (4.0, 2, 2), (1.0, 4, 4))
    averager.set_aside()
    assert averager.aside[0] is memory, "a round that training waits for takes none of its own"
    averager.take_back()
    with averager.use_accumulated_gradients():  # as local steps do
        assert parameter.grad.tolist() == [2.0, 2.0]
    averager.reset_accumulated_grads_()
    assert (parameter.grad, counts(averager), mean_of(averager)) == (None, (0, 0.0), [0.0, 0.0])
