"""From the recipe's `training` section to the arguments that the trainer takes, the drop-in's very own."""

from __future__ import annotations

from pathlib import Path

import torch

from trahiv_cli.recipe.schema import Recipe, TrainingSection
from trahiv_cli.train.trainer import SwarmTrainingArguments


def training_arguments(recipe: Recipe, folder: Path) -> SwarmTrainingArguments:
    """Translate a recipe for `SwarmTrainer`; every field keeps its name.

    Args:
        recipe: resolved.
        folder: the run's folder; checkpoints go into it.
    """
    training = recipe.training
    has_eval = recipe.data.eval.test_split_size > 0
    return SwarmTrainingArguments(
        output_dir=str(folder),
        max_steps=training.max_steps,
        per_device_train_batch_size=training.per_device_train_batch_size,
        per_device_eval_batch_size=training.per_device_eval_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.lr_scheduler_type,
        lr_scheduler_kwargs=training.lr_scheduler_kwargs,
        warmup_steps=recipe.warmup_steps,
        optim=training.optim,
        optim_args=training.optim_args,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_epsilon=training.adam_epsilon,
        max_grad_norm=training.max_grad_norm,
        bf16=_bf16(training),
        fp16=training.fp16,
        activation_checkpointing=training.activation_checkpointing,
        torch_compile=training.torch_compile,
        seed=training.seed,
        logging_strategy="steps",
        logging_steps=training.logging_steps,
        eval_strategy="steps" if has_eval and training.eval_steps else "no",
        eval_steps=training.eval_steps or None,
        save_strategy="steps" if training.save_steps else "no",
        save_steps=training.save_steps or 1,
        save_total_limit=training.save_total_limit,
        dataloader_pin_memory=torch.cuda.is_available(),
        dataloader_num_workers=training.dataloader_num_workers,
        report_to=training.report_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        hivemind_config=recipe.hivemind_config.model_dump(),
    )


def _bf16(training: TrainingSection) -> bool:
    """bfloat16 where asked, and by default where a GPU has it; a CPU would only be slower with it."""
    if training.bf16 != "auto":
        return training.bf16
    return not training.fp16 and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
