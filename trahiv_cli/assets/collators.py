"""From samples to one batch of tensors, as each task's model takes it; TRL's trainers have their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
)

from trahiv_cli.recipe.schema import Recipe

Batch: TypeAlias = dict[str, torch.Tensor]
"""Tensors of shape (samples, longest), int64, on the CPU; `labels` of `seq-cls` are of shape (samples,)."""

IGNORED_LABEL = -100
"""The label that torch's cross-entropy leaves out."""


def build_collator(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Callable[[list[dict[str, Any]]], Any] | None:
    """Make the function that turns samples of `build_datasets` into a `Batch`; None for the tasks of TRL.

    A batch has `input_ids`, `labels` and, where samples may differ in length, `attention_mask`: nothing that
    a model does not take.
    """
    if recipe.clm is not None:
        return Collator(pad_token_id=tokenizer.pad_token_id, is_padded=not recipe.clm.packing)
    if recipe.mlm is not None:
        return MaskingCollator(tokenizer, recipe.mlm.mlm_probability)
    if recipe.seq_cls is not None:
        return DataCollatorWithPadding(tokenizer)
    return None


@dataclass(frozen=True)
class Collator:
    """Pads samples of `clm` by position.

    `DataCollatorForLanguageModeling` masks every pad token instead, and where that is also the end-of-text
    token (most models have no other) no document would ever end.
    """

    pad_token_id: int
    is_padded: bool

    def __call__(self, samples: list[dict[str, list[int]]]) -> Batch:
        """Collate `samples`; the model shifts the labels."""
        rows = [sample["input_ids"] for sample in samples]
        longest = max(map(len, rows))

        def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
            return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])

        batch = {"input_ids": padded(rows, self.pad_token_id), "labels": padded(rows, IGNORED_LABEL)}
        if self.is_padded:
            batch["attention_mask"] = padded([[1] * len(row) for row in rows], 0)
        return batch


class MaskingCollator:
    """Hides some tokens of samples of `mlm`; the hidden ones are the labels, all other labels are ignored.

    It hides anew at each call, by torch's global generator or by `seed`. Samples that have `labels` were
    masked before (the held-out share) and are only padded.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, probability: float, *, seed: int | None = None
    ) -> None:
        self._mask = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=probability)
        self._pad = DataCollatorForTokenClassification(tokenizer, label_pad_token_id=IGNORED_LABEL)
        if seed is not None:
            self._mask.generator = torch.Generator().manual_seed(seed)

    def __call__(self, samples: list[dict[str, list[int]]]) -> Batch:
        """Collate `samples`, each with at least one token that is not special."""
        if "labels" in samples[0]:
            return dict(self._pad(samples))
        while True:
            batch = dict(self._mask(samples))
            # A short batch may by chance have nothing hidden. Its loss would be the mean of nothing: NaN.
            if (batch["labels"] != IGNORED_LABEL).any():
                return batch
