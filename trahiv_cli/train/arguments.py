"""From the recipe's `training` section and its task's to the arguments that the trainer takes.

Every field keeps its name; what the recipe does not say is upstream's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from trahiv_cli.assets.model import compute_dtype
from trahiv_cli.errors import SetupError
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.recipe.upstream import without_tracker


def training_arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    """Translate a recipe for the trainer of its task.

    Args:
        recipe: resolved.
        folder: the run's folder; checkpoints go into it.

    Returns:
        `SFTConfig` and `DPOConfig` for the tasks of TRL, `TrainingArguments` for the others.

    Raises:
        SetupError: this machine can't compute in the precision that is asked for, or lacks a tracker.
    """
    common = _common(recipe, folder)
    _require_trackers(recipe.training.report_to)
    if recipe.sft is not None:
        from trl import SFTConfig

        fields = recipe.sft.model_dump()
        if fields["completion_only_loss"] == "auto":
            fields["completion_only_loss"] = None
        return SFTConfig(**common, **fields, dataset_num_proc=_num_proc(recipe))
    if recipe.dpo is not None:
        from trl import DPOConfig

        return DPOConfig(**common, **recipe.dpo.model_dump(), dataset_num_proc=_num_proc(recipe))
    return TrainingArguments(**common, remove_unused_columns=False)


def _common(recipe: Recipe, folder: Path) -> dict[str, Any]:
    training = recipe.training
    has_eval = recipe.data.eval.test_split_size > 0
    dtype = compute_dtype(training)
    if dtype == torch.float16 and not torch.cuda.is_available():
        raise SetupError(
            "The recipe computes in float16 (`training.fp16`), which needs a GPU, and this machine has none.",
            hint="--set training.fp16=false",
        )
    return {
        "output_dir": str(folder),
        "max_steps": training.max_steps,
        "per_device_train_batch_size": training.per_device_train_batch_size,
        "per_device_eval_batch_size": training.per_device_eval_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler_type,
        "lr_scheduler_kwargs": training.lr_scheduler_kwargs,
        "warmup_steps": recipe.warmup_steps,
        "optim": training.optim,
        "optim_args": training.optim_args,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "adam_epsilon": training.adam_epsilon,
        "max_grad_norm": training.max_grad_norm,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu": not torch.cuda.is_available(),  # averages are copied from CUDA, from no other accelerator
        "activation_checkpointing": training.activation_checkpointing,
        "torch_compile": training.torch_compile,
        "seed": training.seed,
        "train_sampling_strategy": "random" if recipe.data.shuffle else "sequential",
        "logging_strategy": "steps",
        "logging_steps": training.logging_steps,
        "eval_strategy": "steps" if has_eval and training.eval_steps else "no",
        "eval_steps": training.eval_steps or None,
        "save_strategy": "steps" if training.save_steps else "no",
        "save_steps": training.save_steps or 1,
        "save_total_limit": training.save_total_limit,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "dataloader_num_workers": training.dataloader_num_workers,
        "report_to": training.report_to,
        "disable_tqdm": True,
    }


def _num_proc(recipe: Recipe) -> int | None:
    return None if recipe.data.streaming else recipe.data.num_proc


def _require_trackers(names: Sequence[str]) -> None:
    if {"all", "none"}.intersection(names):  # transformers' words for all that are installed, and for none
        return
    available = get_available_reporting_integrations()
    for name in names:
        if name not in available:
            raise SetupError(*without_tracker(name))
