"""One local batch of training: its weight, and the parts in which it is computed.

A batch's loss is a mean over tokens or samples. Weighted by their number, the losses of batches of any peer
and any length add up to the mean over all of the swarm's trained tokens, in which each token counts once.

A batch that does not fit into memory is divided. Each part is announced and weighted as a batch of its own,
and together the parts count as much as the batch. A batch that takes longer than the swarm's steps is divided
as well; the peer then takes part in rounds between two parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache

from trahiv_cli.assets.collators import IGNORED_LABEL
from trahiv_cli.assets.memory import is_out_of_memory
from trahiv_cli.errors import RecipeError
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.settings import temporarily

Batch = Any
"""The collator's output, mostly a mapping of tensors; of TRL's GRPO, the completions that it generated."""

MEANS_OF_TOKENS = ("dapo", "cispo", "vespo")
"""GRPO's losses that are means over the tokens of all completions generated at once."""
TrainOne = Callable[[Batch, Any], torch.Tensor]
"""Runs a part of a batch forward and backward. Takes the part and the divisor of its loss; returns the part's
mean loss, a scalar."""


@dataclass(frozen=True)
class BatchWeight:
    """The weight of one batch in a step."""

    samples: int  # towards `target_batch_size`
    weight: float  # number of trained tokens, or samples, in its mean loss; 0 if it trains nothing
    labels: torch.Tensor | None  # number of labels not ignored: an int64 on their device; None without labels
    tokens: int = 0  # the trained tokens, if each token has a label


class Batches:
    """Computes local batches of `size` samples for the swarm's optimizer.

    A `SwarmTrainerMixin` creates it once and keeps it. The gradient of a batch is the gradient of its own
    mean loss, times its factor (`SwarmOptimizer.expect_batch`), also within a window of gradient
    accumulation: the swarm accumulates.
    """

    def __init__(self, trainer: Any, size: int, events: Events) -> None:
        self._trainer = trainer
        self._size = size
        self._events = events
        self._num_parts = 1  # parts of a batch that fit into memory
        self._num_stepped = 0  # parts of the batch in training that the optimizer has counted
        self._counted: list[tuple[torch.Tensor, BatchWeight]] = []  # losses of the batch's parts
        self._factor: float | None = None  # of the batch in training; None between batches
        self._is_weighed = False  # whether the factor of the last batch is in its gradient

    def train(self, inputs: Batch, num_items: torch.Tensor | int | None, train_one: TrainOne) -> torch.Tensor:
        """Run one batch forward and backward, in smaller parts if memory runs out.

        `num_items` is the Trainer's count of trained tokens in the window of gradient accumulation. Returns
        the batch's loss as the Trainer logs it: a scalar on the model's device.
        """
        optimizer = self._trainer.swarm_optimizer
        num_parts = self._num_parts
        self._num_stepped = 0
        self._counted = []
        # A scaler excludes this: gradients stay scaled until the end of the window.
        if self._trainer.accelerator.scaler is None:
            num_parts = max(num_parts, math.ceil(self._size / optimizer.samples_in_time))
        while True:
            try:
                return self._train_parts(inputs, num_items, train_one, num_parts)
            except (RuntimeError, MemoryError) as failure:
                if not is_out_of_memory(failure) or not split(inputs, self._size, 2 * num_parts):
                    raise
            optimizer.start_batch_over(self._size - self._size * self._num_stepped // num_parts)
            num_parts *= 2
            self._num_parts = num_parts
            self._num_stepped *= 2
            self._go_on("training", max(1, self._size // num_parts), "per_device_train_batch_size")

    def evaluate(self, evaluate: Callable[[], Any]) -> Any:
        """Evaluate; if memory runs out, start over with half the batch size."""
        args = self._trainer.args
        while True:
            try:
                return evaluate()
            except (RuntimeError, MemoryError) as failure:
                if not is_out_of_memory(failure) or args.per_device_eval_batch_size == 1:
                    raise
            args.per_device_eval_batch_size //= 2
            self._trainer._eval_dataloaders = {}  # the Trainer keeps loaders with persistent workers
            self._go_on("an evaluation", args.per_device_eval_batch_size, "per_device_eval_batch_size")

    def _go_on(self, what: str, size: int, setting: str) -> None:
        """Free memory, and warn that `what` continues with `size` samples at a time.

        It must not be called within `except`: the exception keeps the tensors that were computed alive.
        """
        clear_device_cache(garbage_collection=True)
        self._events.warn(
            "memory",
            f"Memory ran out in {what}, which goes on with {size} samples at a time. They count as before.",
            hint=f"nothing to do; a next run begins so with training.{setting}: {size}",
        )

    def backward(self, backward: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
        """Run `Accelerator.backward`; within `train`, the loss is multiplied by the batch's factor."""
        if self._factor == 0.0:  # a mean over no tokens is 0/0, and its gradient is NaN with any factor
            params = self._trainer.model.parameters()
            sums = [param.sum().to(loss.device) for param in params if param.requires_grad]
            loss = torch.stack(sums).sum() * 0.0
        elif self._factor not in (None, 1.0):  # batches of equal weight stay bit-equal
            loss = loss * self._factor
        self._is_weighed = True
        backward(loss, **kwargs)

    def _train_parts(
        self, inputs: Batch, num_items: Any, train_one: TrainOne, num_parts: int
    ) -> torch.Tensor:
        trainer = self._trainer
        # Private, but the Trainer counts tokens by it; a version without it makes no such distinction.
        is_shifted = getattr(trainer, "_loss_shifts_labels", False)
        counting = {"is_shifted": is_shifted, "counts_rows": not trainer.divides_data}
        if getattr(trainer, "loss_type", None) in MEANS_OF_TOKENS:
            counting["num_batches"] = trainer.args.steps_per_generation
        whole = weigh(inputs, batch_size=self._size, **counting)
        window = trainer.current_gradient_accumulation_steps
        parts = split(inputs, self._size, num_parts) or split(inputs, self._size, 1)
        done: list[tuple[torch.Tensor, BatchWeight]] = []
        is_unscaled = trainer.accelerator.scaler is None
        steps_between = is_unscaled and trainer.swarm_optimizer.samples_in_time < self._size * window
        for number, (size, part) in enumerate(parts[self._num_stepped :], self._num_stepped + 1):
            own = weigh(part, batch_size=size, **counting) if len(parts) > 1 else whole
            factor = trainer.swarm_optimizer.expect_batch(
                own.samples,
                own.weight,
                lend=is_unscaled,  # a scaler would scale the accumulators as well
            )
            # The loss is divided by the part's own count: some models (BERT) ignore the window's count.
            is_whole_window = window == len(parts) == 1 or num_items is None
            self._factor = factor if own.weight else 0.0
            self._is_weighed = False
            try:
                with temporarily(trainer, current_gradient_accumulation_steps=1):
                    loss = train_one(part, num_items if is_whole_window else own.labels)
            finally:
                self._factor = None
            if not self._is_weighed:
                raise RecipeError(
                    "`training_step` did not call `self.accelerator.backward(loss)`, which weights each "
                    "batch in a swarm; this batch was not used.",
                    hint="call it instead of `loss.backward()`",
                )
            done.append((loss, own))
            is_last = number == len(parts) and trainer.accelerator.sync_gradients  # the Trainer steps
            if steps_between and not is_last:
                self._count(done)
                self._step_between()
                self._num_stepped = number
                done = []
        self._count(done)
        shares = [loss * (own.weight / whole.weight) for loss, own in self._counted if own.weight]
        loss = torch.stack(shares or [torch.zeros_like(loss)]).sum()
        if window == 1:
            return loss
        # transformers before 5.19 does not know the attribute.
        is_mean_of_batch = getattr(trainer, "loss_is_scaled_for_ga", None) is False
        if num_items is None or whole.labels is None or is_mean_of_batch:
            return loss / window
        return loss * (whole.labels / num_items) if whole.weight else loss

    def _count(self, done: list[tuple[torch.Tensor, BatchWeight]]) -> None:
        """Report the losses of parts that will not be computed again."""
        for loss, own in done:
            self._trainer.swarm_callback.add_loss(loss, own)
        self._counted += done

    def _step_between(self) -> None:
        """Step the optimizer: it counts the parts computed last, and takes part in a round if one is due."""
        trainer = self._trainer
        trainer.swarm_optimizer.step()
        trainer.model.zero_grad()
        trainer.end_part()


def weigh(
    batch: Batch, *, batch_size: int, is_shifted: bool, counts_rows: bool, num_batches: int = 0
) -> BatchWeight:
    """Count a batch: its tokens if each has a label (clm, sft, mlm), else its samples (seq-cls, dpo).

    A loss that is a mean over the tokens of completions which were generated as `num_batches` batches counts
    its share of these tokens, as TRL does, and each batch the same.

    Its `labels` have the shape (samples, length) or (samples,). This waits for a GPU, as the Trainer does
    after each batch anyway. The batch counts as `batch_size` samples, because rows are not samples: a pair of
    texts has two rows, and a flattened batch has one. If the size of a batch is not known, `counts_rows`
    takes each row of labels for a sample. If `is_shifted`, the loss compares each position with the label
    after it.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, Mapping) and "completion_mask" in batch and "advantages" in batch:
        tokens = int(batch["completion_mask"].sum())
        weight = float(batch["num_items_in_batch"]) / num_batches if num_batches else float(batch_size)
        return BatchWeight(batch_size, weight, None, tokens)
    if not isinstance(labels, torch.Tensor) or labels.dim() == 0:
        return BatchWeight(batch_size, float(batch_size), None)
    is_flattened = len(labels) == 1 and "position_ids" in batch
    samples = len(labels) if counts_rows and not is_flattened else batch_size
    compared = batch.get("shift_labels", labels[..., 1:] if is_shifted else labels)
    count = compared.ne(IGNORED_LABEL).sum()
    if labels.dim() == 1:
        return BatchWeight(samples, float(len(labels)), count)
    tokens = int(count)
    return BatchWeight(samples, float(tokens), count, tokens)


def split(batch: Batch, batch_size: int, num_parts: int) -> list[tuple[int, Batch]]:
    """Divide a batch by its samples: return the number of samples and the data of each part.

    Parts are views of the batch where possible. A field with two rows for each sample (TRL's pairs) has all
    first rows before the second rows. Returns no parts if the batch has fewer samples than `num_parts`, or
    a field with another number of rows: packed samples, images of several pieces.
    """
    if num_parts == 1:
        return [(batch_size, dict(batch) if isinstance(batch, Mapping) else batch)]
    if not isinstance(batch, Mapping):
        return []
    rows = {
        name: len(value)
        for name, value in batch.items()
        if isinstance(value, list) or (isinstance(value, torch.Tensor) and value.dim() > 0)
    }
    if batch_size < num_parts or not rows or set(rows.values()) - {batch_size, 2 * batch_size}:
        return []
    borders = [batch_size * part // num_parts for part in range(num_parts + 1)]
    parts = []
    for start, stop in itertools.pairwise(borders):
        part = dict(batch)
        if "num_items_in_batch" in part:  # the divisor of GRPO's loss
            part["num_items_in_batch"] = batch["num_items_in_batch"] * ((stop - start) / batch_size)
        for name, num_rows in rows.items():
            value = part[name] = batch[name][start:stop]
            if num_rows == 2 * batch_size:
                second = batch[name][batch_size + start : batch_size + stop]
                part[name] = [*value, *second] if isinstance(value, list) else torch.cat([value, second])
        parts.append((stop - start, part))
    return parts
