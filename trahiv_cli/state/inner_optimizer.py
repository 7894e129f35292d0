"""The inner optimizer's state: created before the first step, and adopted in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hivemind.utils import nested_flatten, nested_pack


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state tensors, which a state download needs, without taking a step.

    hivemind steps with zero gradients (optim/state_averager.py:707): AdamW then decays the weights once
    and counts one step too many. Here that step has learning rate 0 and no decay, and is not counted.
    """
    groups = optimizer.param_groups
    params = [param for group in groups for param in group["params"]]
    for group in groups:
        # If Triton is installed, optimi chooses it for weights on a CPU, too: it checks before it has listed
        # them (torch-optimi 0.3.3, stableadamw.py:150), and the kernel then finds no driver.
        if group.get("triton", False) is None and not all(param.is_cuda for param in group["params"]):
            group["triton"] = False
    kept = [{str(key): group[key] for key in ("lr", "weight_decay") if key in group} for group in groups]
    grads = [param.grad for param in params]
    for group, values in zip(groups, kept, strict=True):
        group.update(dict.fromkeys(values, 0.0))
    for param in params:
        param.grad = torch.zeros_like(param)
    try:
        optimizer.step()
    finally:
        for group, values in zip(groups, kept, strict=True):
            group.update(values)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
    for holder in (*optimizer.state.values(), *groups):  # optimi counts steps in each group
        step = holder.get("step")
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif step is not None:
            holder["step"] = 0


@torch.no_grad()
def adopt_optimizer_state(
    optimizer: torch.optim.Optimizer, layout: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> None:
    """Copy a state in the layout of hivemind's `dump_optimizer_state` into the optimizer's own tensors.

    optim/state_averager.py:732 replaces the state's tensors: bitsandbytes' paged tensors by tensors that stay
    on the GPU, bytes by floats. Here `tensors`, on the CPU, are copied into the tensors that the optimizer
    has (`initialize_state`), which keep dtype, device and memory.

    Raises:
        ValueError: this is not the state of such an optimizer over such parameters; nothing was changed.
    """
    try:
        given = [tensors[e["index"]] if e["type"] == "tensor" else e["value"] for e in layout]
    except (LookupError, TypeError) as error:
        raise ValueError("parts of the optimizer's state are missing") from error
    own = list(nested_flatten(optimizer.state_dict()))
    num_tensors = sum(isinstance(value, torch.Tensor) for value in own)
    if [*map(_kind, given)] != [*map(_kind, own)] or len(tensors) != num_tensors:
        raise ValueError("the optimizer's state has another layout, or tensors of other shapes or types")
    values = [
        mine.copy_(theirs) if isinstance(mine, torch.Tensor) else theirs
        for mine, theirs in zip(own, given, strict=True)
    ]
    packed = nested_pack(values, structure=optimizer.state_dict())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for place, state in packed["state"].items():
        held = optimizer.state[params[place]]  # in bitsandbytes' `state_dict` tensors have a second name, too
        held.update({name: value for name, value in state.items() if name in held})
    for group, settings in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})


def _kind(value: Any) -> object:
    """Return the properties of a value that must be equal in two states of one optimizer."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Any other value is a setting, which is the same for all peers.
    return ("a number", math.isfinite(value)) if is_number else (type(value), value)
