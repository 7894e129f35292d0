"""One local batch of training: what it counts for, and in how many parts it is computed.

A batch's loss is a mean. Weighted by what it is a mean over, batches of any peer and any length add up to
the mean over all of the swarm's trained tokens, each token counting once. A batch that does not fit into
memory is divided, and each part is announced and weighed as a batch of its own: together they count the same.
So is one that takes longer than the swarm's steps; it then takes part in rounds between two parts.
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

Batch = Any
"""A batch as the collator made it: a mapping of tensors, or a list, as in TRL's GRPO."""
TrainOne = Callable[[Batch, Any], torch.Tensor]
"""Runs a part of a batch forward and backward. Takes the part and the divisor of its loss; returns the part's
mean loss, a scalar."""


@dataclass(frozen=True)
class BatchWeight:
    """What one batch counts for."""

    samples: int  # towards `target_batch_size`
    weight: float  # what its mean loss is a mean over: trained tokens, or samples; 0 if it trains nothing
    labels: torch.Tensor | None  # number of those not ignored: an int64 where they are; None without any
    tokens: int = 0  # that are trained, where labels are of tokens


class Batches:
    """Computes local batches of `size` samples for the swarm's optimizer, in a `SwarmTrainerMixin`.

    The gradient of a batch is that of its own mean loss times its factor (`SwarmOptimizer.expect_batch`),
    also within a window of gradient accumulation: the swarm accumulates.
    """

    def __init__(self, trainer: Any, size: int, events: Events) -> None:
        self._trainer = trainer
        self._size = size
        self._events = events
        self._num_parts = 1  # of a batch, so that it fits into memory
        self._num_stepped = 0  # parts of the batch in training that the optimizer has counted
        self._counted: list[tuple[torch.Tensor, BatchWeight]] = []  # losses of the batch's parts
        self._factor: float | None = None  # of the batch in training; None between batches
        self._is_weighed = False  # whether the factor of the last batch is in its gradient

    def train(self, inputs: Batch, num_items: torch.Tensor | int | None, train_one: TrainOne) -> torch.Tensor:
        """Run one batch forward and backward, in smaller parts where memory runs out.

        `num_items` is the number of trained tokens in the window of gradient accumulation, as the Trainer
        counts them. Returns the batch's loss as the Trainer logs it: a scalar on the model's device.
        """
        optimizer = self._trainer.swarm_optimizer
        num_parts = self._num_parts
        self._num_stepped = 0
        self._counted = []
        # Not with a scaler: gradients are scaled until the end of the window.
        if self._trainer.accelerator.scaler is None:
            num_parts = max(num_parts, math.ceil(self._size / optimizer.samples_in_time))
        while True:
            try:
                return self._train_parts(inputs, num_items, train_one, num_parts)
            except (RuntimeError, MemoryError) as failure:
                if not is_out_of_memory(failure) or split(inputs, self._size, 2 * num_parts) is None:
                    raise
            optimizer.start_batch_over(self._size - self._size * self._num_stepped // num_parts)
            self._num_parts = num_parts = 2 * num_parts
            self._num_stepped *= 2
            self._go_on("training", max(1, self._size // num_parts), "per_device_train_batch_size")

    def evaluate(self, evaluate: Callable[[], Any]) -> Any:
        """Evaluate; where memory runs out, begin again with half as many samples at a time."""
        args = self._trainer.args
        while True:
            try:
                return evaluate()
            except (RuntimeError, MemoryError) as failure:
                if not is_out_of_memory(failure) or args.per_device_eval_batch_size == 1:
                    raise
            args.per_device_eval_batch_size //= 2
            self._trainer._eval_dataloaders = {}  # the Trainer keeps those with persistent workers
            self._go_on("an evaluation", args.per_device_eval_batch_size, "per_device_eval_batch_size")

    def _go_on(self, what: str, size: int, setting: str) -> None:
        """Free memory, and say that from now on `what` takes so many samples at a time.

        Not called within `except`: the failure holds what was computed until then.
        """
        clear_device_cache(garbage_collection=True)
        self._events.warn(
            "memory",
            f"Memory ran out in {what}, which goes on with {size} samples at a time. They count as before.",
            hint=f"nothing to do; a next run begins so with training.{setting}: {size}",
        )

    def backward(self, backward: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
        """Run `Accelerator.backward`: in a batch of the swarm's, with the loss times the batch's factor."""
        if self._factor == 0.0:  # a mean over no tokens is 0/0, and its gradient NaN times whatever
            params = self._trainer.model.parameters()
            sums = [param.sum().to(loss.device) for param in params if param.requires_grad]
            loss = torch.stack(sums).sum() * 0.0
        elif self._factor not in (None, 1.0):  # equal batches stay as they are, to the bit
            loss = loss * self._factor
        self._is_weighed = True
        backward(loss, **kwargs)

    def _train_parts(
        self, inputs: Batch, num_items: Any, train_one: TrainOne, num_parts: int
    ) -> torch.Tensor:
        trainer = self._trainer
        # Not public, but what the Trainer itself counts by; where it is gone, so is the difference.
        is_shifted = getattr(trainer, "_loss_shifts_labels", False)
        counting = {"is_shifted": is_shifted, "counts_rows": not trainer.divides_data}
        whole = weigh(inputs, batch_size=self._size, **counting)
        window = trainer.current_gradient_accumulation_steps
        parts = split(inputs, self._size, num_parts) or split(inputs, self._size, 1) or []
        done: list[tuple[torch.Tensor, BatchWeight]] = []
        is_too_large = trainer.swarm_optimizer.samples_in_time < self._size * window
        for number, (size, part) in enumerate(parts[self._num_stepped :], self._num_stepped + 1):
            own = weigh(part, batch_size=size, **counting) if len(parts) > 1 else whole
            factor = trainer.swarm_optimizer.expect_batch(
                own.samples,
                own.weight,
                lend=trainer.accelerator.scaler is None,  # it would scale the accumulators as well
            )
            # Divided by its own count: some models (BERT) do so whatever they are told of the window.
            is_whole_window = window == len(parts) == 1 or num_items is None
            self._factor = factor if own.weight else 0.0
            self._is_weighed = False
            trainer.current_gradient_accumulation_steps = 1
            try:
                loss = train_one(part, num_items if is_whole_window else own.labels)
            finally:
                self._factor = None
                trainer.current_gradient_accumulation_steps = window
            if not self._is_weighed:
                raise RecipeError(
                    "`training_step` did not call `self.accelerator.backward(loss)`, which weights each "
                    "batch in a swarm; this batch was not used.",
                    hint="call it instead of `loss.backward()`",
                )
            done.append((loss, own))
            is_last = number == len(parts) and trainer.accelerator.sync_gradients  # the Trainer steps
            if is_too_large and not is_last and trainer.accelerator.scaler is None:
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
        """Have the optimizer count the last parts of a batch, and take part in a round if one is due."""
        trainer = self._trainer
        trainer.swarm_optimizer.step()
        trainer.model.zero_grad()
        trainer.end_part()


def weigh(batch: Batch, *, batch_size: int, is_shifted: bool, counts_rows: bool = False) -> BatchWeight:
    """Count a batch: tokens where each has a label (clm, sft, mlm), else samples (seq-cls, dpo).

    Its `labels` are of shape (samples, length) or (samples,). This waits for a GPU, as the Trainer does after
    each batch anyway. There are `batch_size` samples, whatever its rows are: two for a pair of texts, or one
    for all. If the size of a batch is not known, `counts_rows` takes each row of labels for a sample. If
    `is_shifted`, the loss compares each position with the label after it.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
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


def split(batch: Batch, batch_size: int, num_parts: int) -> list[tuple[int, Batch]] | None:
    """Divide a batch by its samples: return how many each part has, and the part, a view where possible.

    What has two rows for each sample (TRL's pairs) has all first ones before the second ones. Returns None if
    the batch has fewer samples, or anything has other rows: packed samples, images of several pieces.
    """
    if num_parts == 1:
        return [(batch_size, dict(batch) if isinstance(batch, Mapping) else batch)]
    if not isinstance(batch, Mapping):
        return None
    rows = {
        name: len(value)
        for name, value in batch.items()
        if isinstance(value, list) or (isinstance(value, torch.Tensor) and value.dim() > 0)
    }
    if batch_size < num_parts or not rows or set(rows.values()) - {batch_size, 2 * batch_size}:
        return None
    borders = [batch_size * part // num_parts for part in range(num_parts + 1)]
    parts = []
    for start, stop in itertools.pairwise(borders):
        part = dict(batch)
        for name, num_rows in rows.items():
            value = part[name] = batch[name][start:stop]
            if num_rows == 2 * batch_size:
                second = batch[name][batch_size + start : batch_size + stop]
                part[name] = [*value, *second] if isinstance(value, list) else torch.cat([value, second])
        parts.append((stop - start, part))
    return parts
