"""The trainer of each task, made from the recipe: its arguments, model, data and collator.

TRL tokenizes the data of its tasks when a trainer is made. Its errors end a run in good order, and its
warnings are forwarded.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.utils import is_liger_kernel_available

from trahiv_cli.assets.collators import build_collator, class_metrics
from trahiv_cli.assets.data import Splits
from trahiv_cli.assets.memory import is_out_of_memory
from trahiv_cli.assets.model import adapter_config, build_model, compute_dtype
from trahiv_cli.errors import AssetError, SetupError
from trahiv_cli.recipe.agreement import AgreedRun
from trahiv_cli.recipe.builtin import how_to_install
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.recipe.task_sections import TASKS_OF_TRL, Task
from trahiv_cli.recipe.upstream import without_tracker
from trahiv_cli.train.rewards import build_rewards

if TYPE_CHECKING:
    from trahiv_cli.train.trainer import SwarmTrainerMixin

NAMES_IN_TRL: dict[Task, str] = {
    "sft": "SFT",
    "dpo": "DPO",
    "kto": "KTO",
    "reward": "Reward",
    "grpo": "GRPO",
}
"""A task of TRL -> the beginning of the names of its trainer and its config."""

PREVIEW_HINT = "`trahiv preview RECIPE` shows samples"

CHECKPOINTING = "activation_checkpointing"
"""Name of this field in `TrainingArguments`."""
if CHECKPOINTING not in TrainingArguments.__dataclass_fields__:  # before transformers 5.23
    CHECKPOINTING = "gradient_checkpointing"


def training_arguments(run: AgreedRun, folder: Path, name: str = "") -> TrainingArguments:
    """Return the arguments for the trainer of the run's task; checkpoints go into `folder`.

    Trackers show the run under the peer's `name`, unless the recipe has another name.

    Raises:
        SetupError: this machine can't compute in the recipe's precision, or lacks a tracker.
    """
    recipe = run.recipe
    training = recipe.training
    dtype = compute_dtype(training)
    has_gpu = torch.cuda.is_available()
    has_eval = recipe.data.eval.test_split_size > 0 and training.eval_steps
    if dtype == torch.float16 and not has_gpu:
        raise SetupError(
            "The recipe computes in float16 (`training.fp16`), which needs a GPU, and this machine has none.",
            hint="--set training.fp16=false",
        )
    if training.use_liger_kernel and not (has_gpu and is_liger_kernel_available()):
        raise SetupError(
            "The recipe uses Liger kernels (`training.use_liger_kernel`), which need a GPU and a package.",
            hint=f"{how_to_install('liger-kernel')}, or --set training.use_liger_kernel=false",
        )
    available = {"all", "none", *get_available_reporting_integrations()}
    for tracker in training.report_to:
        if tracker not in available:
            raise SetupError(*without_tracker(tracker))
    fields = training.model_dump() | {
        "run_name": training.run_name or name or None,
        "project": run.run_id,  # for trackio; others read the environment
        "warmup_steps": recipe.warmup_steps,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "train_sampling_strategy": "random" if recipe.shuffles_passes else "sequential",
        "logging_strategy": "steps",
        "eval_strategy": "steps" if has_eval else "no",
        "eval_steps": training.eval_steps or None,
        "save_strategy": "steps" if training.save_steps else "no",
        "save_steps": training.save_steps or 1,
        "dataloader_pin_memory": has_gpu,
    }
    fields[CHECKPOINTING] = fields.pop("activation_checkpointing")
    num_proc = None if recipe.data.streaming else recipe.data.num_proc
    return task_arguments(recipe, folder, num_proc, **fields)


def task_arguments(recipe: Recipe, folder: Path, num_proc: int | None, **fields: Any) -> TrainingArguments:
    """Return arguments for the trainer of the recipe's task: the task's own, and the `fields`.

    TRL tokenizes with `num_proc` processes; None: in this one.
    """
    # CUDA is the only accelerator from which averages are copied.
    fields |= {"output_dir": str(folder), "use_cpu": not torch.cuda.is_available(), "disable_tqdm": True}
    if recipe.task not in TASKS_OF_TRL:
        return TrainingArguments(**fields, remove_unused_columns=False)
    import trl

    fields |= recipe.section.model_dump(exclude={"rewards"})
    if recipe.grpo is not None:
        del fields["max_length"]  # longer prompts have been left out
        fields["reward_weights"] = [reward.weight for reward in recipe.grpo.rewards]
        fields["num_generations_eval"] = recipe.grpo.num_generations
    else:
        fields["dataset_num_proc"] = num_proc
    if fields.get("completion_only_loss") == "auto":
        fields["completion_only_loss"] = None
    config: type[TrainingArguments] = getattr(trl, f"{NAMES_IN_TRL[recipe.task]}Config")
    return config(**fields)


def trainer_of_trl(task: Task) -> Any:
    """Return the class of TRL's trainers of a task, which train with a swarm if given `hivemind_config`."""
    import trl

    from trahiv_cli.train.trainer import in_swarm

    return in_swarm(getattr(trl, f"{NAMES_IN_TRL[task]}Trainer"))


def build_trainer(
    run: AgreedRun,
    arguments: TrainingArguments,
    splits: Splits,
    **keywords: Any,
) -> SwarmTrainerMixin:
    """Load the model and make the trainer of the run's task for the run's swarm; see `task_trainer`."""
    recipe = run.recipe
    swarm = {"hivemind_config": recipe.hivemind_config, "swarm": recipe.swarm, "has_recipe": True}
    return task_trainer(recipe, arguments, splits, **swarm, **keywords)


def task_trainer(
    recipe: Recipe, arguments: TrainingArguments, splits: Splits, **keywords: Any
) -> SwarmTrainerMixin:
    """Load the model and make the trainer of the recipe's task; `keywords` go to `SwarmTrainerMixin`.

    `arguments` are those of `task_arguments`. Without `hivemind_config` the trainer has no swarm. Raises
    `AssetError` if the model can't be loaded, or the data does not fit the task.
    """
    tokenizer = splits.tokenizer
    common: dict[str, Any] = {
        "args": arguments,
        "train_dataset": splits.train,
        "eval_dataset": splits.eval,
        "processing_class": splits.processing_class,
        **keywords,
    }
    # With a ready model with adapters, TRL would copy them for the reference.
    compares = recipe.task in ("dpo", "kto", "grpo")
    model = build_model(recipe, tokenizer, adapters=not compares)
    if (collator := build_collator(recipe, tokenizer)) is not None:
        from trahiv_cli.train.trainer import SwarmTrainer

        metrics = class_metrics if recipe.seq_cls is not None else None
        return SwarmTrainer(model=model, data_collator=collator, compute_metrics=metrics, **common)
    if compares:
        common["peft_config"] = adapter_config(recipe, model)
    if recipe.has_reference:
        common["ref_model"] = copy.deepcopy(model).eval()
    if recipe.grpo is not None:
        common["reward_funcs"] = build_rewards(recipe.grpo)
        # A padded vocabulary: the model has scores for tokens that the tokenizer can't decode.
        padding = range(len(tokenizer), model.config.get_text_config().vocab_size)
        vars(arguments).update(generation_kwargs={"suppress_tokens": [*padding]} if padding else None)
    with preparing():
        trainer: SwarmTrainerMixin = trainer_of_trl(recipe.task)(model=model, **common)
        return trainer


def group_in_trackers(run_id: str, name: str) -> None:
    """Group the runs of all peers of a swarm in trackers, unless the user has set another group.

    W&B and MLflow read the group from the environment.
    """
    os.environ.setdefault("WANDB_RUN_GROUP", run_id)
    os.environ.setdefault("MLFLOW_TAGS", json.dumps({"trahiv.run_id": run_id, "trahiv.peer": name}))


@contextmanager
def preparing() -> Iterator[None]:
    """Turn exceptions about the data, which TRL raises while it tokenizes them, into an `AssetError`."""
    # Exceptions of faulty code: ours, or a chat template that does not fit a conversation.
    mistakes = (TypeError, LookupError, AttributeError)
    try:
        yield
    except (TemplateError, DatasetsError, ValueError, RuntimeError, *mistakes) as failure:
        files = {frame.filename for frame in traceback.extract_tb(failure.__traceback__)}
        is_ours = isinstance(failure, mistakes) and "<template>" not in files  # Jinja's name of any template
        if is_ours or is_out_of_memory(failure):
            raise
        root = (isinstance(failure, DatasetsError) and failure.__cause__) or failure
        reason = " ".join(str(root).split()) or type(root).__name__
        hint = f"Change the data, `data.chat_template` or `sft.assistant_only_loss`; {PREVIEW_HINT}."
        raise AssetError(f"The data could not be prepared: {reason}", hint) from failure


@contextmanager
def forwarding_trl_warnings(forward: Callable[[str, str], object]) -> Iterator[None]:
    """While the block runs, call `forward` with each warning of TRL or about assets once, and with a hint."""
    forwarded: set[str] = set()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = re.sub(r"^\[RANK \d+\] ", "", record.getMessage())
            if text not in forwarded:
                forwarded.add(text)
                forward(text, PREVIEW_HINT)

    handler = Handler(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("trl", "trahiv_cli.assets", "trahiv_cli.train.preview")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
