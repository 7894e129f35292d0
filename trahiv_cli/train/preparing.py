"""Before a trainer is made: its arguments, what TRL says of the data, and data that would train nothing.

TRL tokenizes `sft` and `dpo` when a trainer is made: its errors end a run in good order, and its warnings are
passed on.
"""

from __future__ import annotations

import itertools
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from trahiv_cli.assets.collators import IGNORED_LABEL
from trahiv_cli.assets.memory import is_out_of_memory
from trahiv_cli.assets.model import compute_dtype
from trahiv_cli.errors import AssetError, SetupError
from trahiv_cli.recipe.schema import Recipe, section_of
from trahiv_cli.recipe.upstream import without_tracker

LOOKED_AT = 100
"""Samples that are looked at before training begins, whether they train anything."""

LOOK = "`trahiv preview RECIPE` shows samples"

Tell = Callable[[str, str], None]
"""Takes a message and a hint."""


def training_arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    """Translate a resolved recipe for the trainer of its task; checkpoints go into `folder`.

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
    section = recipe.sft or recipe.dpo
    if section is None:
        return TrainingArguments(**common, remove_unused_columns=False)
    from trl import DPOConfig, SFTConfig

    common |= section.model_dump()
    common["dataset_num_proc"] = None if recipe.data.streaming else recipe.data.num_proc
    if common.get("completion_only_loss") == "auto":
        common["completion_only_loss"] = None
    return (DPOConfig if recipe.sft is None else SFTConfig)(**common)


@contextmanager
def preparing() -> Iterator[None]:
    """Turn what TRL raises while it tokenizes a dataset into an `AssetError`."""
    try:
        yield
    except (TemplateError, TypeError, LookupError, AttributeError) as failure:
        # A template's mistake, or the data's, and not one of ours: Jinja names the file so.
        files = {frame.filename for frame in traceback.extract_tb(failure.__traceback__)}
        if not isinstance(failure, TemplateError) and "<template>" not in files:
            raise
        raise AssetError(
            f"The chat template can't write a conversation of the data: {failure}",
            "Fix that conversation, or give another template (`data.chat_template: FILE.jinja`).",
        ) from failure
    except (ValueError, RuntimeError, DatasetsError) as failure:
        if is_out_of_memory(failure):
            raise
        root = failure.__cause__ or failure
        reason = " ".join(str(root).split()) or type(root).__name__
        hint = f"Change the data, `data.chat_template` or `sft.assistant_only_loss`; {LOOK}."
        raise AssetError(f"The data could not be prepared: {reason}", hint) from failure


@contextmanager
def heeding(tell: Tell) -> Iterator[None]:
    """While the block runs, pass on what TRL warns of, each message once and with a hint."""
    told: set[str] = set()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = re.sub(r"^\[RANK \d+\] ", "", record.getMessage())
            if text not in told:
                told.add(text)
                tell(text, LOOK)

    handler, logger = Handler(logging.WARNING), logging.getLogger("trl")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def require_trained_tokens(recipe: Recipe, samples: Any) -> None:
    """Raise `AssetError` if none of the first hundred tokenized samples trains a token, or one is broken."""
    with preparing():
        first = list(itertools.islice(samples, LOOKED_AT))
    if any(map(_trains, first)):
        return
    section = section_of(recipe.task) or ""
    max_length = getattr(recipe, section).max_length
    why = f"There is nothing to learn: none of the first {len(first)} samples trains a token. "
    why += f"All in them is prompt, or was cut off at {max_length} tokens."
    if not first:
        why = f"No sample is left to train on: at {max_length} tokens, each was cut off before its answer."
    hint = f"Raise `{section}.max_length` (it is {max_length}), or shorten the prompts; {LOOK}."
    raise AssetError(why, hint)


def _trains(sample: dict[str, Any]) -> bool:
    """Whether the loss is computed on anything of a sample.

    `labels` are one class, or one for each token; the first token of each sequence in a row is nobody's next.
    Without labels (`clm`, `mlm`) every token may be asked for.
    """
    if "chosen_ids" in sample:
        return bool(sample["chosen_ids"] and sample["rejected_ids"])
    labels = sample.get("labels")
    if labels is None or isinstance(labels, int):
        return True
    starts = {0, *itertools.accumulate(sample.get("seq_lengths") or ())}
    return any(label != IGNORED_LABEL and index not in starts for index, label in enumerate(labels))
