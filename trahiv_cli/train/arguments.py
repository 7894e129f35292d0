"""From the recipe's `training` section and its task's to the arguments that the trainer takes.

Every field keeps its name; what the recipe does not say is upstream's default.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from trahiv_cli.assets.model import compute_dtype
from trahiv_cli.errors import SetupError
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.recipe.upstream import without_tracker


def training_arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    """Translate a resolved recipe for the trainer of its task; checkpoints go into `folder`.

    Returns:
        `SFTConfig` and `DPOConfig` for the tasks of TRL, `TrainingArguments` for the others.

    Raises:
        SetupError: this machine can't compute in the precision that is asked for, or lacks a tracker.
    """
    training, dtype, has_gpu = recipe.training, compute_dtype(recipe.training), torch.cuda.is_available()
    has_eval = recipe.data.eval.test_split_size > 0 and training.eval_steps
    if dtype == torch.float16 and not has_gpu:
        raise SetupError(
            "The recipe computes in float16 (`training.fp16`), which needs a GPU, and this machine has none.",
            hint="--set training.fp16=false",
        )
    available = {"all", "none", *get_available_reporting_integrations()}
    for tracker in training.report_to:
        if tracker not in available:
            raise SetupError(*without_tracker(tracker))
    common = training.model_dump() | {
        "output_dir": str(folder),
        "warmup_steps": recipe.warmup_steps,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu": not has_gpu,  # averages are copied from CUDA, from no other accelerator
        "train_sampling_strategy": "random" if recipe.data.shuffle else "sequential",
        "logging_strategy": "steps",
        "eval_strategy": "steps" if has_eval else "no",
        "eval_steps": training.eval_steps or None,
        "save_strategy": "steps" if training.save_steps else "no",
        "save_steps": training.save_steps or 1,
        "dataloader_pin_memory": has_gpu,
        "disable_tqdm": True,
    }
    num_proc = None if recipe.data.streaming else recipe.data.num_proc
    if recipe.sft is not None:
        from trl import SFTConfig

        fields = recipe.sft.model_dump()
        if fields["completion_only_loss"] == "auto":
            fields["completion_only_loss"] = None
        return SFTConfig(**common, **fields, dataset_num_proc=num_proc)
    if recipe.dpo is not None:
        from trl import DPOConfig

        return DPOConfig(**common, **recipe.dpo.model_dump(), dataset_num_proc=num_proc)
    return TrainingArguments(**common, remove_unused_columns=False)
