"""Who is waited for, decided from reports that are always a little old; and what a step steps with."""

import contextlib
import threading
from types import SimpleNamespace

import bitsandbytes
import pytest
import torch

from trahiv_cli.optim.assemble import initialize_state
from trahiv_cli.optim.progress import PacedEvent, PeerProgress
from trahiv_cli.optim.rounds import ExactGradientAverager, ExactStateAverager
from trahiv_cli.optim.sync import SyncOptimizer

torch.set_num_threads(1)


def groupmates(step, reported, companions=()):
    # Without its constructor, which starts processes: the decision needs the reports alone.
    optimizer = object.__new__(SyncOptimizer)
    other = PeerProgress("QmOther", reported, samples=8, samples_per_second=1.0, is_client=False)
    optimizer.tracker = SimpleNamespace(others=(other,))
    optimizer.state_averager = SimpleNamespace(local_epoch=step)
    optimizer._companions = frozenset(companions)
    return optimizer._groupmates()


def test_a_peer_at_the_same_step_is_waited_for():
    assert groupmates(5, reported=5) == ["QmOther"]


@pytest.mark.parametrize("reported", [4, 3, 0])
def test_a_companion_of_the_last_round_is_waited_for_however_old_its_report(reported):
    assert groupmates(5, reported, companions=["QmOther"]) == ["QmOther"]


def test_a_peer_that_missed_the_last_round_is_not_waited_for():
    assert groupmates(5, reported=4) == []


def test_a_peer_that_is_ahead_is_no_groupmate():
    assert groupmates(5, reported=6, companions=["QmOther"]) == []


def test_a_hurried_event_does_not_wait_for_its_pace():
    event = PacedEvent(interval_s=lambda: 1000.0)
    event.set()
    assert event.wait(0)
    event.hurry()
    assert event.wait(0)


# -- a step ---------------------------------------------------------------------------------------

INNER = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_8bit": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=0.01, weight_decay=0.1),
    "lion_32bit": lambda p: bitsandbytes.optim.Lion(p, lr=0.01, weight_decay=0.1),
}


def without_processes(cls, **attributes):
    instance = object.__new__(cls)
    instance.__dict__.update(_parent_pid=-1, _closed=False, _popen=None, **attributes)
    return instance


def optimizer_of(weights, make, offload):
    """A peer's optimizer around its parts, as the constructor puts them together, but for the network."""
    averages = [torch.zeros_like(weight) for weight in weights]
    stepped = [torch.nn.Parameter(weight.detach().clone()) for weight in weights] if offload else weights
    inner = make(stepped)
    initialize_state(inner)
    if offload:
        for copy, average in zip(stepped, averages, strict=True):
            copy.grad = average
    optimizer = object.__new__(SyncOptimizer)
    optimizer.offload_optimizer, optimizer.client_mode, optimizer.max_grad_norm = offload, True, 1.0
    optimizer.tracker = SimpleNamespace(pause_updates=contextlib.nullcontext, update_epoch=lambda step: None)
    optimizer.state_averager = without_processes(
        ExactStateAverager,
        optimizer=inner,
        scheduler=None,
        main_parameters=weights,
        offload_optimizer=offload,
        local_epoch=0,
        lock_state=threading.RLock(),
        lock_averaged_tensors=threading.Lock(),
    )
    optimizer.grad_averager = without_processes(
        ExactGradientAverager,
        parameters=tuple(weights),
        reuse_grad_buffers=False,
        lock_averaged_tensors=threading.Lock(),
        _averaged_tensors=averages,
        _local_accumulators=tuple(torch.zeros_like(weight) for weight in weights),
        _anchor_batch_size=None,
        local_samples_accumulated=0,
        local_times_accumulated=0,
    )
    return optimizer


def trained(make, offload, steps=3):
    """Take steps of two batches each; return the weights and the norms of the averaged gradients."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((96, 96), (7,))]
    optimizer, norms = optimizer_of(weights, make, offload), []
    for _ in range(steps):
        for _ in range(2):
            optimizer.lend_accumulators()
            sum((weight * torch.randn(weight.shape)).sum() for weight in weights).backward()
            optimizer.grad_averager.accumulate_grads_(batch_size=4)
        optimizer.grad_averager.load_accumulators_into_averager_()
        optimizer._take_step()
        norms.append(optimizer.last_grad_norm)
        assert all(weight.grad is None for weight in weights)
        assert not any(accumulator.any() for accumulator in optimizer.grad_averager._local_accumulators)
    assert optimizer.local_epoch == steps
    return weights, norms


@pytest.mark.parametrize("name", INNER)
def test_a_step_where_the_weights_are_is_the_step_of_an_offloaded_copy(name):
    (here, norms), (offloaded, same_norms) = (trained(INNER[name], offload) for offload in (False, True))
    assert norms == same_norms and min(norms) > 1.0, "clipping must have something to do"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(here, offloaded, strict=True))


def test_the_averaged_gradient_is_clipped_before_the_step():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = optimizer_of([weight], lambda p: torch.optim.SGD(p, lr=1.0), offload=False)
    optimizer.grad_averager._averaged_tensors[0].fill_(10.0)
    optimizer._take_step()
    assert optimizer.last_grad_norm == 20.0
    assert weight.detach().norm().item() == pytest.approx(1.0, rel=1e-4)
