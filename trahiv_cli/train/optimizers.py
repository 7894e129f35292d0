"""The inner optimizer that the arguments name, from the Trainer's own registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler

from trahiv_cli.errors import RecipeError, SetupError
from trahiv_cli.optim.optimizer import SwarmOptimizer

REFUSED_OPTIMIZERS = ("galore", "apollo", "lomo", "schedule_free", "layerwise")


class ReportingScheduler:
    """Stands where the Trainer expects a scheduler, and only reports.

    The real schedule counts swarm steps, inside the swarm's optimizer. That is no optimizer that torch's
    schedulers take, and a learning rate that is written into it is lost.
    """

    def __init__(self, optimizer: SwarmOptimizer) -> None:
        self._optimizer = optimizer

    def step(self, *_: object) -> None:
        """Do nothing: a local step moves no schedule."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the last swarm step, one per param group."""
        return self._optimizer.last_learning_rates

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the step is the state, and the checkpoint has it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def upcast_trainable(model: torch.nn.Module) -> None:
    """Hold trainable weights in float32: hivemind averages and steps them in float32."""
    for param in model.parameters():
        if param.requires_grad and param.dtype != torch.float32:
            param.data = param.data.float()


def training_keywords(
    trainer: Trainer, args: TrainingArguments, model: torch.nn.Module, max_steps: int
) -> dict[str, Any]:
    """Return what the arguments say of the optimizer and its schedule, as `build_optimizer` takes it.

    Raises:
        RecipeError, SetupError: see `inner_optimizer`.
    """

    def schedule(inner: torch.optim.Optimizer) -> Any:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=inner,
            num_warmup_steps=args.get_warmup_steps(max_steps),
            num_training_steps=max_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )

    return {
        "params": param_groups(trainer, model, args.weight_decay),
        "optimizer": inner_optimizer(trainer, args, model),
        "scheduler": schedule,
        "max_grad_norm": args.max_grad_norm or 0.0,
        "max_steps": max_steps,
    }


def param_groups(trainer: Trainer, model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters, those that decay apart from the others, as the Trainer groups them."""
    decaying = set(trainer.get_decay_parameter_names(model))
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, param in model.named_parameters():
        if param.requires_grad:
            groups[name not in decaying]["params"].append(param)
    return [group for group in groups if group["params"]]


def inner_optimizer(
    trainer: Trainer, args: TrainingArguments, model: torch.nn.Module
) -> Callable[[Any], torch.optim.Optimizer]:
    """Return what makes the optimizer that `args.optim` names from param groups.

    Raises:
        RecipeError: it can't be used in a swarm.
        SetupError: its package is not installed.
    """
    name, (cls, keywords) = _name(args), _registered(trainer, args, model)
    if (
        any(word in name for word in REFUSED_OPTIMIZERS)
        or {"params", "model", "optimizer_dict"} & keywords.keys()
        or not issubclass(cls, torch.optim.Optimizer)
    ):
        raise RecipeError(
            f"optim={name} can't be used in a swarm: it updates weights outside of `optimizer.step()`.",
            hint="adamw_torch, adafactor, sgd and others that step once can",
        )
    if keywords.get("optim_bits") == 8:  # as in the Trainer's own `create_optimizer`
        from bitsandbytes.optim import GlobalOptimManager

        manager = GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    return lambda groups: cls(groups, **keywords)


def require_optimizer(args: TrainingArguments) -> None:
    """Make sure that the package of the optimizer is installed here.

    Raises:
        SetupError: it is not.
    """
    _registered(Trainer, args)


def _registered(trainer: Any, args: TrainingArguments, *model: torch.nn.Module) -> tuple[Any, dict[str, Any]]:
    try:
        found: tuple[Any, dict[str, Any]] = trainer.get_optimizer_cls_and_kwargs(args, *model)
    except ImportError as error:
        name = _name(args)
        raise SetupError(
            f"optim={name} needs a package that is not installed here; nothing was trained.",
            hint="pip install torch-optimi" if name == "stable_adamw" else str(error),
        ) from error
    return found


def _name(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))
