"""Gradients that a peer accumulates for a round: hivemind's gradient averager, made exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from hivemind.optim.grad_averager import GradientAverager

from trahiv_cli.optim.averager import ExactAverager
from trahiv_cli.swarm.host_copies import HostCopies


class ExactGradientAverager(ExactAverager, GradientAverager):
    """Averages accumulated gradients, weighted by the trained tokens of a language model, else by samples.

    `SwarmOptimizer` creates one. The accumulators hold the sum over batches of `weight / anchor` times the
    gradient of the batch's mean loss, where the anchor is the first batch's weight: with equal batches that
    is the plain sum.
    """

    _local_accumulators: tuple[torch.Tensor, ...]
    local_samples_accumulated: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._anchor_weight = self.local_weight = 0.0
        self._copies: HostCopies | None = None
        self.aside: tuple[torch.Tensor, ...] = ()  # sums set aside; not to be written to
        self.samples_aside = 0
        self.weight_aside = 0.0
        self._announced: list[tuple[int, float]] = []  # samples and weights of batches not counted yet
        super().__init__(*args, **(kwargs | {"allow_state_sharing": False, "warn": False}))

    def _grad_accumulators(self) -> Iterator[torch.Tensor]:
        if not self._local_accumulators:  # they were set aside, and no batch came since
            self._local_accumulators = tuple(map(torch.zeros_like, self.aside))
        yield from self._local_accumulators

    def expect_batch(self, samples: int, weight: float, *, lend: bool) -> float:
        """Announce a batch of `samples` rows whose gradients come next; `accumulate_grads_` counts them.

        `weight` is the number of values in its mean loss: trained tokens, or rows; 0 if nothing is trained.
        `lend`: an accumulator on its parameter's device becomes its `.grad`, so the backward pass adds to it,
        which saves a second gradient. Not for gradients that are scaled afterwards.

        Returns the factor for the batch's mean loss before its backward pass; exactly 1 for equal batches.
        """
        self._anchor_weight = self._anchor_weight or float(weight)
        self._announced.append((samples, weight))
        if lend:
            for param, accumulator in zip(self.parameters, self._grad_accumulators(), strict=True):
                if param.device == accumulator.device:
                    param.grad = accumulator
        return weight / self._anchor_weight if self._anchor_weight else 1.0

    @property
    def announced_samples(self) -> int:
        """Samples that were announced and are not counted yet."""
        return sum(samples for samples, _ in self._announced)

    def forget_announced(self) -> None:
        """Withdraw the batches that were announced and not counted."""
        self._announced.clear()

    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int) -> None:
        """Count the announced batches, else `batch_size` samples; add gradients that are not accumulated yet.

        Lent accumulators are detached from `.grad`, so that clearing the gradients does not clear them.
        """
        factor = 1.0 if self._announced else self.expect_batch(batch_size, batch_size, lend=False)
        for samples, weight in self._announced:
            self.local_samples_accumulated += samples
            self.local_weight += weight
        self.forget_announced()
        for param, accumulator in zip(self.parameters, self._grad_accumulators(), strict=True):
            if param.grad is accumulator:
                param.grad = None
            elif param.grad is not None:
                accumulator.add_(param.grad.to(accumulator.device), alpha=factor)

    def reset_accumulated_grads_(self) -> None:
        """Forget accumulated gradients, and batches that were announced and not counted."""
        self.local_weight = 0.0
        self.forget_announced()
        super().reset_accumulated_grads_()

    def set_aside(self) -> None:
        """Set the accumulated gradients aside for a round; newer ones will go into other memory."""
        self.aside = tuple(self._grad_accumulators())
        self._local_accumulators = ()
        self.samples_aside, self.weight_aside = self.local_samples_accumulated, self.local_weight
        self.local_samples_accumulated = 0
        self.local_weight = 0.0
        if any(accumulator.is_cuda for accumulator in self.aside):
            self._copies = self._copies or HostCopies(self.aside)
            self._copies.begin(self.aside)

    @property
    def scale_aside(self) -> float:
        """Factor that turns the sums set aside into the mean gradient; 0 if their weight is 0."""
        return self._anchor_weight / self.weight_aside if self.weight_aside else 0.0

    def load_aside(self) -> None:
        """Write the mean of the gradients set aside into the averager's buffers.

        Upstream (optim/grad_averager.py:203) divides by the *number* of batches, as if all were equal. Uses
        numpy, because it may run beside training: torch would start OpenMP threads for this thread, too.
        """
        sums = self.aside if self._copies is None else self._copies.wait()
        with self.get_tensors() as buffers:
            for accumulated, buffer in zip(sums, buffers, strict=True):
                np.multiply(accumulated.numpy(), np.float32(self.scale_aside), out=buffer.detach().numpy())

    @torch.no_grad()
    def take_back(self) -> None:
        """Add the gradients set aside to newer ones, for the next round."""
        for aside, came in zip(self.aside, self._local_accumulators, strict=False):
            aside.add_(came)
        self._local_accumulators = self.aside
        self.local_samples_accumulated += self.samples_aside
        self.local_weight += self.weight_aside
        self.aside = ()
        self.samples_aside = 0
        self.weight_aside = 0.0

    @torch.no_grad()
    def use_up(self) -> None:
        """Forget the gradients set aside: a step was taken with them."""
        if not self._local_accumulators:
            for accumulator in self.aside:
                accumulator.zero_()
            self._local_accumulators = self.aside
        self.aside = ()
        self.samples_aside = 0
        self.weight_aside = 0.0

    def use_averaged_gradients(self) -> AbstractContextManager[None]:
        """Set the averages as the parameters' `.grad` within the block; call `use_up` next.

        They use the memory of the gradients set aside, on the parameters' device: upstream
        (optim/grad_averager.py:223) hands out the averager's buffers in host memory.
        """
        with torch.no_grad(), self.get_tensors() as averages:
            filled = [aside.copy_(average) for aside, average in zip(self.aside, averages, strict=True)]
        return self._as_gradients(filled)

    def use_accumulated_gradients(self) -> AbstractContextManager[None]:
        """Set this peer's mean gradient as `.grad` within the block; call `reset_accumulated_grads_` next."""
        scale = self._anchor_weight / self.local_weight if self.local_weight else 0.0
        with torch.no_grad():
            means = [accumulator.mul_(scale) for accumulator in self._grad_accumulators()]
        return self._as_gradients(means)

    @contextmanager
    def _as_gradients(self, gradients: list[torch.Tensor]) -> Iterator[None]:
        try:
            for param, gradient in zip(self.parameters, gradients, strict=True):
                param.grad = gradient.to(param.device)
            yield
        finally:
            for param in self.parameters:
                param.grad = None
