"""How gradients get into the accumulators and out again, without the processes of an averager."""

import asyncio
import threading

import pytest
import torch
from hivemind import compression
from hivemind.compression import CompressionInfo, deserialize_torch_tensor, serialize_torch_tensor

from trahiv_cli.optim.assemble import CODECS
from trahiv_cli.optim.rounds import ExactAllReduce, ExactGradientAverager


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


# -- what is stepped with -------------------------------------------------------------------------


def test_averages_are_the_gradients_in_the_accumulators_memory(averager, parameter):
    with averager.use_averaged_gradients():
        assert parameter.grad is averager._local_accumulators[0]
        assert parameter.grad.tolist() == [9.0, 9.0]
        parameter.grad.mul_(0.5)  # as clipping does
        assert averager._averaged_tensors[0].tolist() == [9.0, 9.0]
    assert parameter.grad is None


@pytest.mark.parametrize("lend", [False, True])
def test_the_next_batches_start_from_nothing_after_a_step(averager, parameter, lend):
    assert train(averager, parameter, [1.0, 5.0], lend) == [3.0, 3.0]
    with averager.use_averaged_gradients():
        assert parameter.grad.tolist() == [3.0, 3.0]
    averager.reset_accumulated_grads_()
    assert train(averager, parameter, [2.0], lend) == [2.0, 2.0]


def test_a_step_that_fails_leaves_no_gradient_for_the_next_backward_pass(averager, parameter):
    def fail():
        with averager.use_averaged_gradients():
            raise MemoryError

    pytest.raises(MemoryError, fail)
    assert parameter.grad is None


def test_averages_come_to_where_the_parameter_is(averager):
    averager.parameters = (torch.nn.Parameter(torch.ones(2, device="meta")),)
    with averager.use_averaged_gradients():
        assert averager.parameters[0].grad.device.type == "meta"


# -- what an average is sent as -------------------------------------------------------------------


def encoded(codec, average):
    """The bytes that a group gets of an average, as the peer that reduced it makes them."""
    runner = object.__new__(ExactAllReduce)  # its constructor needs a node
    runner.__dict__.update(_compression=codec, _infos=[CompressionInfo.from_tensor(average)], _encoded={})
    return asyncio.run(runner._encode(0, average))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", CODECS)
def test_an_average_is_encoded_by_the_codec(name):
    average, codec = torch.linspace(-3, 5, 4100), CODECS[name]()
    assert encoded(codec, average) == serialize_torch_tensor(average, codec.compression_type)


def test_a_codec_that_chooses_by_tensor_chooses_for_averages_too():
    half, full = compression.Float16Compression(), compression.NoCompression()
    by_size = compression.SizeAdaptiveCompression(threshold=10, less=full, greater_equal=half)
    small, large = torch.full((5,), 1.0 / 3), torch.full((50,), 1.0 / 3)
    assert torch.equal(deserialize_torch_tensor(encoded(by_size, small)), small)
    assert torch.equal(deserialize_torch_tensor(encoded(by_size, large)), large.half().float())
