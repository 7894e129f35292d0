"""The inner optimizer that the arguments name, from the Trainer's own registry."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler

from trahiv_cli.errors import RecipeError, SetupError

REFUSED_OPTIMIZERS = ("galore", "apollo", "lomo", "schedule_free", "layerwise")


def training_keywords(
    trainer: Trainer, args: TrainingArguments, model: torch.nn.Module, max_steps: int
) -> dict[str, Any]:
    """Return what the arguments say of the optimizer and its schedule, as `build_optimizer` takes it.

    Trainable parameters are grouped as the Trainer does: those that decay apart from the others. Raises
    `RecipeError` for an optimizer that can't be used in a swarm, and what `registered` does.
    """
    name, (cls, keywords) = str(getattr(args.optim, "value", args.optim)), registered(args, model, trainer)
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

    def schedule(inner: torch.optim.Optimizer) -> Any:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=inner,
            num_warmup_steps=args.get_warmup_steps(max_steps),
            num_training_steps=max_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )

    decaying = set(trainer.get_decay_parameter_names(model))
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in trained if name in decaying], "weight_decay": args.weight_decay},
        {"params": [param for name, param in trained if name not in decaying], "weight_decay": 0.0},
    ]
    return {
        "params": [group for group in groups if group["params"]],
        "optimizer": lambda groups: cls(groups, **keywords),
        "scheduler": schedule,
        "max_grad_norm": args.max_grad_norm or 0.0,
        "max_steps": max_steps,
    }


def registered(
    args: TrainingArguments, model: Any = None, trainer: type[Trainer] | Trainer = Trainer
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and keywords of `args.optim`; raises `SetupError` if its package is not installed."""
    try:
        return trainer.get_optimizer_cls_and_kwargs(args, model)
    except ImportError as error:
        name = str(getattr(args.optim, "value", args.optim))
        raise SetupError(
            f"optim={name} needs a package that is not installed here; nothing was trained.",
            hint="pip install torch-optimi" if name == "stable_adamw" else str(error),
        ) from error
