"""Averagers without a process and without a network: what they hold, not whom they know."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from hivemind.compression import NoCompression
from torch.optim.lr_scheduler import LambdaLR

from trahiv_cli.optim.gradients import ExactGradientAverager
from trahiv_cli.optim.history import History
from trahiv_cli.optim.ledger import Ledger, Spans
from trahiv_cli.optim.state import ExactStateAverager
from trahiv_cli.swarm.host_copies import StateLock
from trahiv_cli.swarm.snapshot import JoinerActivity

Averager = TypeVar("Averager")


def without_processes(cls: type[Averager], **attributes: Any) -> Averager:
    """Make an averager around its constructor, which forks."""
    instance = object.__new__(cls)
    instance.__dict__.update(_parent_pid=-1, _closed=True, _popen=None, **attributes)
    return instance


def gradient_averager(
    weights: Sequence[torch.Tensor], cls: type[ExactGradientAverager] = ExactGradientAverager, **more: Any
) -> ExactGradientAverager:
    """Make one for float32 weights on the CPU that has accumulated nothing."""
    averages = {"_averaged_tensors": [torch.zeros_like(weight) for weight in weights]}
    return without_processes(
        cls,
        parameters=tuple(weights),
        reuse_grad_buffers=False,
        lock_averaged_tensors=threading.Lock(),
        _local_accumulators=tuple(torch.zeros_like(weight) for weight in weights),
        _anchor_batch_size=None,
        _anchor_weight=0.0,
        _aside=(),
        _spare=(),
        _copies=None,
        samples_aside=0,
        weight_aside=0.0,
        _announced_samples=0,
        _announced_weight=0.0,
        _is_announced=False,
        local_weight=0.0,
        local_samples_accumulated=0,
        local_times_accumulated=0,
        **averages | more,
    )


def state_averager(inner: torch.optim.Optimizer, weights: Sequence[torch.Tensor], **more: Any) -> Any:
    """Make one that holds an inner optimizer, at the beginning of a run."""
    plain = {
        "scheduler": None,
        "offload_optimizer": False,
        "local_epoch": 0,
        "client_mode": True,
        "history": History(),
        "ledger": Ledger(),
    }
    return without_processes(
        ExactStateAverager,
        _interest=JoinerActivity(),
        optimizer=inner,
        main_parameters=weights,
        extra_tensors=(),
        lock_state=StateLock(),
        **plain | more,
    )


def giving_averager(inner: torch.optim.Optimizer, history: History, peer: Any, **more: Any) -> Any:
    """Make one that can give its state, and take one over: of a peer that trained all samples of a history.

    The inner optimizer has one weight.
    """
    [group] = inner.param_groups
    return state_averager(
        inner,
        tuple(group["params"]),
        scheduler=LambdaLR(inner, lambda step: 1 / (1 + step)),
        parameter_names=("weight",),
        state_compression=NoCompression(),
        history=history,
        ledger=Ledger(Spans.of([(0, history.samples)])),
        local_epoch=history.step,
        reuse_tensors=True,
        get_group_bits=lambda: "0",
        dht=SimpleNamespace(peer_id=peer),
        **more,
    )
