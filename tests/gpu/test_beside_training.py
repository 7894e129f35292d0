"""Copies from a GPU run beside the batches that training has queued, and take no device memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kit.states import peer_state
from trahiv_cli.background import in_background
from trahiv_cli.progress.history import History
from trahiv_cli.rounds.vote import digest_of
from trahiv_cli.state.host_copies import host_values
from trahiv_cli.state.snapshot import views_of
from trahiv_cli.step.optimizer import SwarmOptimizer
from trahiv_cli.step.weight_digests import WeightDigests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and this machine has none"),
    pytest.mark.timeout(120),
]

WORK_CYCLES = 5 * 10**9
"""Some seconds; the copies of these tests take milliseconds."""

SHORT_CYCLES = 10**8


@pytest.fixture
def state() -> Any:
    """Holds two weights and Adam's statistics on a GPU."""
    weights = [torch.nn.Parameter(torch.randn(128, 64, device="cuda")) for _ in range(2)]
    inner = torch.optim.AdamW(weights, lr=1e-3)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    state = peer_state(inner, weights)
    state.lock_state.devices = frozenset(weight.device for weight in weights)
    state.committed.change(history=History(1, 10, bytes(16)))
    with state.lock_state:
        inner.step()
    return state


def beside_work(copy: Callable[[], Any]) -> Any:
    """Copy in a separate thread while the training stream is busy, which it must still be afterwards."""
    torch.cuda.synchronize()
    torch.cuda._sleep(WORK_CYCLES)
    work = torch.cuda.current_stream().record_event()
    result = in_background(copy).result()
    assert not work.query(), "the copy waited for what came after the weights"
    torch.cuda.synchronize()
    return result


def digests(state: Any, **room: int) -> list[bytes]:
    values = host_values(state.common_tensors(), state.lock_state.changes, **room)
    return [digest_of([value]) for value in values]


@pytest.mark.parametrize("room", [{}, {"room": 1}], ids=["at once", "one by one"])
def test_weights_are_digested_beside_training(state, room):
    list(host_values(state.common_tensors(), state.lock_state.changes, **room))  # pinned memory is there then
    expected = [digest_of([weight]) for weight in state.weights]
    assert beside_work(lambda: digests(state, **room)) == expected


def test_claim_digest_waits_for_no_batch(state):
    equality = WeightDigests(state, SimpleNamespace(attest=lambda history, common: None))
    digests(state)
    assert beside_work(lambda: equality.digest(state.common_tensors()))


def test_state_copy_runs_beside_training(state):
    state.copy()
    _, flat, infos, _ = beside_work(state.copy)
    _, tensors, _ = state._live_state()
    for given, held in zip(views_of(flat, infos), tensors, strict=True):
        assert torch.equal(given, held.cpu())


def test_copy_includes_work_queued_under_lock(state):
    with state.lock_state, torch.no_grad():
        torch.cuda._sleep(SHORT_CYCLES)
        for weight in state.weights:
            weight.fill_(7.0)
    values = in_background(
        lambda: [value.clone() for value in host_values(state.common_tensors(), state.lock_state.changes)]
    ).result()
    assert all(bool((value == 7.0).all()) for value in values)


def test_own_weights_wait_in_host_memory(state):
    weights = state.weights
    agreed = [torch.zeros_like(weight) for weight in weights]
    own = [weight.detach().clone() for weight in weights]
    peer = SimpleNamespace(agreed_values=dict(zip(weights, agreed, strict=True)))
    held = torch.cuda.memory_allocated()
    with SwarmOptimizer.agreed_weights(peer):
        assert torch.cuda.memory_allocated() == held
        assert not any(bool(weight.any()) for weight in weights)
    assert all(map(torch.equal, weights, own))
