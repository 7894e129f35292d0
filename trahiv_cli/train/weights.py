"""What a batch counts for: its samples towards the swarm's next step, its trained tokens in the average.

A batch's loss is a mean. Weighted by what it is a mean over, batches of any peer and any length add up to
the mean over all of the swarm's trained tokens, each token counting once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trahiv_cli.assets.collators import IGNORED_LABEL


@dataclass(frozen=True)
class BatchWeight:
    """What one batch counts for."""

    samples: int
    """Towards `target_batch_size`."""

    weight: float
    """What the batch's mean loss is a mean over: trained tokens, or samples; 0 if it trains nothing."""

    labels: torch.Tensor | None
    """How many labels are not ignored: a scalar, int64, where the labels are; None without labels."""


def weigh(batch: Mapping[str, Any], *, batch_size: int, is_shifted: bool) -> BatchWeight:
    """Count a batch: tokens where each has a label (clm, sft, mlm), else samples (seq-cls, dpo).

    Tokens are counted as `Trainer._get_num_items_in_batch` counts them. With labels on a GPU this waits for
    it; the Trainer's `logging_nan_inf_filter` does so after each batch anyway.

    Args:
        batch: as the collator made it; `labels` are of shape (samples, length) or (samples,).
        batch_size: samples in a batch whose rows are something else: a pair of texts takes two rows, and
            `padding_free` puts all samples into one.
        is_shifted: whether the model's loss compares each position with the label after it, so that the
            first label of a row is never trained.
    """
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() == 0:
        return BatchWeight(batch_size, float(batch_size), None)
    is_flattened = len(labels) == 1 and "position_ids" in batch
    samples = batch_size if is_flattened else len(labels)
    compared = batch.get("shift_labels", labels[..., 1:] if is_shifted else labels)
    count = compared.ne(IGNORED_LABEL).sum()
    return BatchWeight(samples, float(count) if labels.dim() > 1 else float(samples), count)


def zero_loss(model: torch.nn.Module, device: torch.device) -> torch.Tensor:
    """Make a loss that trains nothing: every trainable parameter's gradient is 0, whatever its value.

    A mean over no tokens is 0/0, and its gradient stays NaN however it is multiplied.

    Returns:
        A scalar on `device`.
    """
    sums = [param.sum().to(device) for param in model.parameters() if param.requires_grad]
    return torch.stack(sums).sum() * 0.0
