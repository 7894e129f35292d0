"""Collate samples into one batch of tensors for each task's model, and compute a classifier's metrics.

TRL's trainers have collators of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
)

from trahiv_cli.recipe.schema import Recipe

Batch: TypeAlias = dict[str, torch.Tensor]
"""Tensors of shape (samples, longest), int64, on the CPU; `labels` of `seq-cls` are of shape (samples,)."""

IGNORED_LABEL = -100
"""The label that torch's cross-entropy ignores."""


def build_collator(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Callable[[list[dict[str, Any]]], Any] | None:
    """Make the function that turns samples of `build_datasets` into a `Batch`; None for the tasks of TRL.

    A batch has `input_ids`, `labels` and, where samples may differ in length, `attention_mask`.
    """
    if recipe.clm is not None:
        return partial(collate, pad_token_id=tokenizer.pad_token_id, is_padded=not recipe.clm.packing)
    if recipe.mlm is not None:
        mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=recipe.mlm.mlm_probability)
        return partial(hide, mask=mask)
    return DataCollatorWithPadding(tokenizer) if recipe.seq_cls is not None else None


def collate(samples: list[dict[str, Any]], *, pad_token_id: int, is_padded: bool) -> Batch:
    """Collate and pad samples. In `clm` a sample is its own labels, which the model shifts.

    Padding is masked by position. `DataCollatorForLanguageModeling` masks every pad token instead; if that is
    also the end-of-text token (most models have no other), no document would ever end.
    """
    rows = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    labels = [torch.as_tensor(sample.get("labels", row)) for sample, row in zip(samples, rows, strict=True)]
    batch = {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=pad_token_id),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL),
    }
    if is_padded:
        batch["attention_mask"] = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return batch


def hide(samples: list[dict[str, list[int]]], *, mask: DataCollatorForLanguageModeling) -> Batch:
    """Mask tokens of `mlm` samples; each sample has at least one token that is not special.

    The masked tokens of a sample depend on one number of torch's generator, however samples are batched.
    """
    seeds = torch.randint(2**62, (len(samples),)).tolist()
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    while True:
        rows = []
        for sample, generator in zip(samples, generators, strict=True):
            mask.generator = generator
            # Not the collator itself: it would pad one sample, which takes longer than masking it.
            inputs, labels = mask.torch_mask_tokens(torch.tensor([sample["input_ids"]]))
            rows.append({"input_ids": inputs[0], "labels": labels[0]})
        batch = collate(rows, pad_token_id=mask.tokenizer.pad_token_id, is_padded=True)
        # A short batch may by chance have no masked token. Its loss would be the mean of no values: NaN.
        if (batch["labels"] != IGNORED_LABEL).any():
            return batch


def class_metrics(evaluated: EvalPrediction) -> dict[str, float]:
    """Compute a classifier's metrics on the held-out share; the `compute_metrics` of transformers' Trainer.

    Its `predictions` are logits of shape (rows, classes), or a tuple that begins with them. `f1` is the mean
    over classes of 2 TP / (2 TP + FP + FN). A class that is neither the prediction nor the label of any row
    is left out of the mean, as in `sklearn.metrics.f1_score(average="macro")`.
    """
    logits = evaluated.predictions[0] if isinstance(evaluated.predictions, tuple) else evaluated.predictions
    labels = np.asarray(evaluated.label_ids)
    predicted = np.asarray(logits).argmax(axis=-1)
    scores = []
    for number in np.union1d(labels, predicted):
        hits = np.sum((predicted == number) & (labels == number))
        scores.append(2 * hits / (np.sum(predicted == number) + np.sum(labels == number)))
    return {"accuracy": float(np.mean(predicted == labels)), "f1": float(np.mean(scores))}
