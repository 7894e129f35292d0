"""Checks and preparation of the trainer's own optimizer and schedule, which the swarm's optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers.optimization import GreedyLR

from trahiv_cli.errors import RecipeError
from trahiv_cli.state.inner_optimizer import initialize_state
from trahiv_cli.step.build import require_usable

SCORED = ReduceLROnPlateau | GreedyLR
"""Schedules that look at evaluations: see `ScoredSchedule`."""


def change_to_float32(model: torch.nn.Module) -> None:
    """Change trained weights, and the buffers in their modules, to float32, in which peers average and step.

    If some trained and some frozen weights had the same half precision, the forward pass uses autocast with
    it from now on.
    """
    trained = {param.dtype for param in model.parameters() if param.requires_grad}
    frozen = {param.dtype for param in model.parameters() if not param.requires_grad}
    for module in model.modules():
        if own := [param for param in module.parameters(recurse=False) if param.requires_grad]:
            for tensor in (*own, *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.float()
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in trained & frozen:
            device = next(model.parameters()).device.type
            model.forward = torch.autocast(device, dtype)(model.forward)


def require_steppable(optimizer: Any, model: torch.nn.Module) -> None:
    """Raise `RecipeError` if the swarm can't step this optimizer in place of the Trainer.

    Frozen weights are removed from its groups, and the weights of each group are sorted in the model's order,
    because peers average them by index. The optimizer takes its first step with small placeholders for the
    weights; its errors are raised as they are.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RecipeError(
            f"{type(optimizer).__name__} can't be used in a swarm: it is no torch.optim.Optimizer.",
            hint="adamw_torch, adafactor, sgd and others that step once can",
        )
    order = {id(param): number for number, param in enumerate(model.parameters())}
    for group in optimizer.param_groups:
        own = [param for param in group["params"] if param.requires_grad]
        group["params"] = sorted(own, key=lambda param: order.get(id(param), -1))
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    trained = {id(param): name for name, param in model.named_parameters() if param.requires_grad}
    if missing := [name for key, name in trained.items() if key not in stepped]:
        raise RecipeError(
            f"The optimizer steps {len(trained) - len(missing)} of {len(trained)} trained weights; "
            f"{missing[0]} is not in it.",
            hint="give it all of them, or freeze the others: weight.requires_grad_(False)",
        )
    if stepped - trained.keys():
        raise RecipeError(
            "The optimizer steps weights that are not the model's; a checkpoint would lack them.",
            hint="make them part of the model: model.head = head",
        )
    weights = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        devices = {param.device for param in group["params"]}
        group["params"] = [torch.nn.Parameter(torch.zeros(2, 2, device=device)) for device in devices]
    try:
        initialize_state(optimizer)
        require_usable(optimizer)
    finally:
        optimizer.state.clear()
        for group, params in zip(optimizer.param_groups, weights, strict=True):
            group["params"] = params


def require_schedule(schedule: Any, optimizer: torch.optim.Optimizer, max_steps: int) -> None:
    """Raise `RecipeError` unless the schedule belongs to this optimizer, and peers can enter it at any step.

    A `LambdaLR` computes its factors for five steps of the run; its errors are raised as they are.
    """
    if not isinstance(schedule, LambdaLR | SCORED):
        raise RecipeError(
            f"{type(schedule).__name__} can't be used in a swarm: its learning rate does not follow from the "
            "step or from evaluations alone, and a peer that joins begins in the middle of a run.",
            hint="torch.optim.lr_scheduler.LambdaLR, as transformers.get_scheduler makes them",
        )
    if schedule.optimizer is not optimizer:
        raise RecipeError(
            "The schedule is made for another optimizer than the one that trains.",
            hint="optimizers=(optimizer, schedule), and the schedule made for that optimizer",
        )
    factors_of(schedule, max_steps)


def factors_of(schedule: Any, max_steps: int) -> list[list[str]]:
    """Return the factors of each group's learning rate at five steps of the run.

    Of a schedule that looks at scores, return its name and its numbers instead.
    """
    if not isinstance(schedule, LambdaLR):
        numbers = {name: value for name, value in vars(schedule).items() if type(value) in (int, float, str)}
        return [[type(schedule).__name__, *(f"{name}={value}" for name, value in sorted(numbers.items()))]]
    steps = [max_steps * quarter // 4 for quarter in range(5)]
    return [[f"{factor(step):.4g}" for step in steps] for factor in schedule.lr_lambdas]


def described(
    optimizer: torch.optim.Optimizer, schedule: Any, model: torch.nn.Module, max_steps: int
) -> dict[str, Any]:
    """Return an optimizer's class, numbers and weights, and the schedule's factors at five steps of the run.

    Flags are left out, because with them each device may compute in its own way.
    """
    numbers = [
        {key: value for key, value in group.items() if type(value) in (int, float, tuple) and key != "lr"}
        for group in optimizer.param_groups
    ]
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        "optimizer": [type(optimizer), numbers],
        "weights of the optimizer": [
            [names[id(param)] for param in group["params"]] for group in optimizer.param_groups
        ],
        "schedule": factors_of(schedule, max_steps),
    }


def move(optimizer: torch.optim.Optimizer, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make an optimizer step the tensors of `groups`, which match its own groups; return it."""
    for own, given in zip(optimizer.param_groups, groups, strict=True):
        own["params"] = list(given["params"])
    return optimizer


class GivenOptimizer:
    """The optimizer and the schedule that a user passed to a trainer; None for one that the trainer makes."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, schedule: Any) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._groups = [] if optimizer is None else copied(optimizer.param_groups)

    def __bool__(self) -> bool:
        """Whether the user passed one of them."""
        return self._optimizer is not None or self._schedule is not None

    def as_given(self) -> tuple[torch.optim.Optimizer | None, Any]:
        """Return both; an optimizer has its original groups, and no state from an earlier run."""
        if self._optimizer is not None:
            self._optimizer.param_groups[:] = copied(self._groups)
            self._optimizer.state.clear()
        return self._optimizer, self._schedule


def copied(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copy an optimizer's groups, but not the weights in them."""
    return [group | {"params": list(group["params"])} for group in groups]
