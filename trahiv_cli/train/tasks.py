"""What each task trains with: model, data, collator and trainer, put together as the recipe says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trahiv_cli.assets.collators import build_collator, class_metrics
from trahiv_cli.assets.data import Splits
from trahiv_cli.assets.model import adapter_config, build_model
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.train.preparing import preparing, training_arguments
from trahiv_cli.train.trainer import SwarmTrainer, SwarmTrainerMixin


def build_trainer(
    recipe: Recipe, folder: Path, tokenizer: PreTrainedTokenizerBase, splits: Splits, **keywords: Any
) -> SwarmTrainerMixin:
    """Load the model and make the trainer of the recipe's task; `keywords` are more of `SwarmTrainerMixin`'s.

    Raises `AssetError` if the model can't be had, or the data does not fit the task.
    """
    common: dict[str, Any] = {
        "args": training_arguments(recipe, folder),
        "train_dataset": splits.train,
        "eval_dataset": splits.eval,
        "processing_class": tokenizer,
        "hivemind_config": recipe.hivemind_config.model_dump(),
        "swarm": recipe.swarm,
        **keywords,
    }
    model = build_model(recipe, tokenizer, adapters=recipe.dpo is None)
    if recipe.sft is not None:
        from trahiv_cli.train.trl import SwarmSFTTrainer

        with preparing():
            return SwarmSFTTrainer(model=model, **common)
    if recipe.dpo is not None:
        from trahiv_cli.train.trl import SwarmDPOTrainer

        adapters = adapter_config(recipe, model)
        # Without adapters the model that is trained can't be its own reference.
        reference = None if adapters is not None else copy.deepcopy(model).eval()
        with preparing():
            return SwarmDPOTrainer(model=model, ref_model=reference, peft_config=adapters, **common)
    return SwarmTrainer(
        model=model,
        data_collator=build_collator(recipe, tokenizer),
        compute_metrics=class_metrics if recipe.seq_cls is not None else None,
        **common,
    )
