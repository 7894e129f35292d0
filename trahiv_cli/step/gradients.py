"""Gradients that a peer accumulates for a round, and their averages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from trahiv_cli.rounds.averages import Averages
from trahiv_cli.state.host_copies import HostCopies


def set_gradients(tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Set the `.grad` of tensors, each on its tensor's device; None clears it.

    A gradient that is there already is set itself, not a copy.
    """
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = None if gradient is None else gradient.to(tensor.device)


class GradientBuffer:
    """Accumulates gradients, weighted by the trained tokens of a language model, else by samples.

    `SwarmOptimizer` creates one, for its `parameters`. The accumulators, on the parameters' devices, hold the
    sum over batches of `weight / anchor` times the gradient of the batch's mean loss, where the anchor is the
    first batch's weight: with equal batches that is the plain sum. A round averages `averages`.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], averages: Averages) -> None:
        self.parameters = tuple(parameters)
        self.averages = averages
        self._accumulators = tuple(torch.zeros_like(param).detach() for param in parameters)
        self.samples = 0  # that were accumulated
        self.weight = 0.0  # of these
        self._anchor_weight = 0.0
        self._copies: HostCopies | None = None
        self.aside: tuple[torch.Tensor, ...] = ()  # sums set aside; not to be written to
        self.samples_aside = 0
        self.weight_aside = 0.0
        self._announced: list[tuple[int, float]] = []  # samples and weights of batches not counted yet

    @property
    def accumulators(self) -> tuple[torch.Tensor, ...]:
        """The sums of this peer's gradients, by parameter; not to be written to."""
        if not self._accumulators:  # they were set aside, and no batch came since
            self._accumulators = tuple(map(torch.zeros_like, self.aside))
        return self._accumulators

    def expect_batch(self, samples: int, weight: float, *, lend: bool) -> float:
        """Announce a batch of `samples` rows whose gradients come next; `accumulate` counts them.

        `weight` is the number of values in its mean loss: trained tokens, or rows; 0 if nothing is trained.
        `lend`: an accumulator on its parameter's device becomes its `.grad`, so the backward pass adds to it,
        which saves a second gradient. Not for gradients that are scaled afterwards.

        Returns the factor for the batch's mean loss before its backward pass; exactly 1 for equal batches.
        """
        self._anchor_weight = self._anchor_weight or float(weight)
        self._announced.append((samples, weight))
        if lend:
            for param, accumulator in zip(self.parameters, self.accumulators, strict=True):
                if param.device == accumulator.device:
                    set_gradients([param], [accumulator])
        return weight / self._anchor_weight if self._anchor_weight else 1.0

    @property
    def announced_samples(self) -> int:
        """Samples that were announced and are not counted yet."""
        return sum(samples for samples, _ in self._announced)

    def forget_announced(self) -> None:
        """Withdraw the batches that were announced and not counted."""
        self._announced.clear()

    @torch.no_grad()
    def accumulate(self, batch_size: int) -> None:
        """Count the announced batches, else `batch_size` samples; add gradients that are not accumulated yet.

        Lent accumulators are detached from `.grad`, so that clearing the gradients does not clear them.
        """
        factor = 1.0 if self._announced else self.expect_batch(batch_size, batch_size, lend=False)
        for samples, weight in self._announced:
            self.samples += samples
            self.weight += weight
        self.forget_announced()
        for param, accumulator in zip(self.parameters, self.accumulators, strict=True):
            if param.grad is accumulator:
                set_gradients([param], [None])
            elif param.grad is not None:
                accumulator.add_(param.grad.to(accumulator.device), alpha=factor)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget accumulated gradients, and batches that were announced and not counted."""
        self.samples = 0
        self.weight = 0.0
        self.forget_announced()
        for accumulator in self.accumulators:
            accumulator.zero_()

    def clear(self) -> None:
        """Clear the parameters' own gradients."""
        set_gradients(self.parameters, [None] * len(self.parameters))

    def set_aside(self) -> None:
        """Set the accumulated gradients aside for a round; newer ones will go into other memory."""
        self.aside = self.accumulators
        self._accumulators = ()
        self.samples_aside = self.samples
        self.weight_aside = self.weight
        self.samples = 0
        self.weight = 0.0
        if any(accumulator.is_cuda for accumulator in self.aside):
            self._copies = self._copies or HostCopies(self.aside)
            self._copies.begin(self.aside)

    @property
    def scale_aside(self) -> float:
        """Factor that turns the sums set aside into the mean gradient; 0 if their weight is 0."""
        return self._anchor_weight / self.weight_aside if self.weight_aside else 0.0

    def load_aside(self) -> None:
        """Write the mean of the gradients set aside to `averages`.

        Uses numpy, because it may run beside training: torch would start OpenMP threads for this thread, too.
        """
        sums = self.aside if self._copies is None else self._copies.wait()
        with self.averages.locked() as means:
            for accumulated, mean in zip(sums, means, strict=True):
                np.multiply(accumulated.numpy(), np.float32(self.scale_aside), out=mean.numpy())

    @torch.no_grad()
    def take_back(self) -> None:
        """Add the gradients set aside to newer ones, for the next round."""
        for aside, came in zip(self.aside, self._accumulators, strict=False):
            aside.add_(came)
        self._accumulators = self.aside
        self.samples += self.samples_aside
        self.weight += self.weight_aside
        self.aside = ()
        self.samples_aside = 0
        self.weight_aside = 0.0

    @torch.no_grad()
    def use_up(self) -> None:
        """Forget the gradients set aside: a step was taken with them."""
        if not self._accumulators:
            for accumulator in self.aside:
                accumulator.zero_()
            self._accumulators = self.aside
        self.aside = ()
        self.samples_aside = 0
        self.weight_aside = 0.0

    def use_averaged_gradients(self) -> AbstractContextManager[None]:
        """Set the averages as the parameters' `.grad` within the block; call `use_up` next.

        They use the memory of the gradients set aside, on the parameters' devices.
        """
        with torch.no_grad(), self.averages.locked() as averages:
            filled = [aside.copy_(average) for aside, average in zip(self.aside, averages, strict=True)]
        return self._as_gradients(filled)

    def use_accumulated_gradients(self) -> AbstractContextManager[None]:
        """Set this peer's mean gradient as `.grad` within the block; call `reset` next."""
        scale = self._anchor_weight / self.weight if self.weight else 0.0
        with torch.no_grad():
            means = [accumulator.mul_(scale) for accumulator in self.accumulators]
        return self._as_gradients(means)

    @contextmanager
    def _as_gradients(self, gradients: list[torch.Tensor]) -> Iterator[None]:
        try:
            set_gradients(self.parameters, gradients)
            yield
        finally:
            self.clear()
