"""How gradients get into the accumulators, without the processes of an averager."""

import threading

import pytest
import torch

from trahiv_cli.optim.rounds import ExactGradientAverager


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.ones(2))


@pytest.fixture
def averager(parameter):
    instance = object.__new__(ExactGradientAverager)  # its constructor forks
    instance.__dict__.update(
        _parent_pid=-1,
        _closed=False,
        _popen=None,
        parameters=(parameter,),
        reuse_grad_buffers=False,
        lock_averaged_tensors=threading.Lock(),
        _averaged_tensors=(torch.full((2,), 9.0),),
        _local_accumulators=(torch.zeros(2),),
        _accumulators_used_in_step=False,
        _anchor_batch_size=None,
        local_samples_accumulated=0,
        local_times_accumulated=0,
    )
    return instance


def train(averager, parameter, gradients, lend):
    """Run a batch of 4 samples for each gradient, clearing gradients after it as the Trainer does."""
    for gradient in gradients:
        if lend:
            averager.lend_accumulators_()
        (parameter * gradient).sum().backward()
        averager.accumulate_grads_(batch_size=4)
        parameter.grad = None
    averager.load_accumulators_into_averager_()
    return averager._averaged_tensors[0].tolist()


@pytest.mark.parametrize("lend", [False, True])
def test_the_mean_of_all_batches_is_averaged(averager, parameter, lend):
    assert train(averager, parameter, [1.0, 5.0], lend) == [3.0, 3.0]
    assert averager.local_samples_accumulated == 8


def test_a_backward_pass_adds_to_lent_accumulators_without_a_gradient_of_its_own(averager, parameter):
    averager.lend_accumulators_()
    (parameter * 2.0).sum().backward()
    assert parameter.grad is averager._local_accumulators[0]
    assert parameter.grad.tolist() == [2.0, 2.0]


def test_clearing_gradients_after_a_batch_does_not_clear_what_was_accumulated(averager, parameter):
    averager.lend_accumulators_()
    (parameter * 2.0).sum().backward()
    averager.accumulate_grads_(batch_size=4)
    assert parameter.grad is None
    torch.optim.SGD([parameter], lr=0.1).zero_grad(set_to_none=False)
    assert averager._local_accumulators[0].tolist() == [2.0, 2.0]


def test_an_accumulator_on_another_device_is_not_lent(averager, parameter):
    averager._local_accumulators = (torch.zeros(2, device="meta"),)
    averager.lend_accumulators_()
    assert parameter.grad is None


def test_a_parameter_that_a_batch_did_not_use_adds_nothing(averager):
    averager.accumulate_grads_(batch_size=4)
    assert averager._local_accumulators[0].tolist() == [0.0, 0.0]
