"""Modes sync and overlap: peers average gradients, and all take the same step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.utils import get_total_norm

from trahiv_cli.optim.method import Method

GUESS_BYTES, GUESS_BATCHES = 2**22, 32
"""A guess is made for so many bytes of weights at a time, or in so many batches if there are more: so long, a
batch's gradients and optimizer state are there twice. Small batches are in the processor's cache, and in
memory that the process has already: one of 32 MB took three times as long."""

CLIP_EPSILON = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to a norm before it divides by it."""

NORM_VALUES = 2**14
"""Values whose squares are added at a time: in float64 128 kB, which a processor's cache holds."""


class SharedGradients(Method):
    """Averages gradients; every peer takes the same step with the average.

    If training goes on during a round, the weights meanwhile are a guess: moved as this peer's own gradient
    would move them. With the average they go back to those that are agreed on, and take the step. So
    gradients are not taken where the last step is missing altogether, which costs most of what lateness
    costs: steps of AdamW that come one step late left a loss 16 % higher, with the guess 2.6 % (1M parameters
    from scratch, 300 steps, two peers). With an offloaded optimizer there is no guess: the CPU would take
    two steps for each.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._agreed: list[torch.Tensor] = []

    def begin(self, step: int, num_peers: int) -> None:
        """See `Method.begin`; nothing depends on either."""

    def account(self, samples: int) -> None:
        """Add the gradients to those that were accumulated."""
        self._gradients.accumulate_grads_(samples)

    @property
    def samples_held(self) -> int:
        """See `Method.samples_held`."""
        return self._gradients.samples_aside + self._gradients.local_samples_accumulated

    def reset(self) -> None:
        """Drop all gradients."""
        self._gradients.reset_accumulated_grads_()

    @property
    def samples_aside(self) -> int:  # type: ignore[override]
        """See `Method.samples_aside`."""
        return self._gradients.samples_aside

    @property
    def weight_aside(self) -> float:  # type: ignore[override]
        """See `Method.weight_aside`."""
        return self._gradients.weight_aside

    def set_aside(self, *, goes_on: bool) -> bool:
        """Set the gradients aside, or drop them if one is not finite: it would spoil every peer's weights."""
        norm = get_total_norm(list(self._gradients._grad_accumulators()))
        if not bool(norm.isfinite()):
            self.dropped_samples += self._gradients.local_samples_accumulated
            self._gradients.reset_accumulated_grads_()
            return False
        self._gradients.set_aside()
        if goes_on and not self._state.offload_optimizer:
            with self._state.lock_state:
                self._guess(float(norm))
        return True

    @torch.no_grad()
    def _guess(self, norm: float) -> None:
        """Move the weights by a step with this peer's own gradient; the optimizer's state stays as it was.

        Args:
            norm: of the gradients' sum that was set aside.
        """
        optimizer, weights = self._state.optimizer, self._state.weights
        if not self._agreed:
            self._agreed = [torch.empty_like(weight) for weight in weights]
        for kept, weight in zip(self._agreed, weights, strict=True):
            kept.copy_(weight)
            weight.grad = None  # that of the last batch was accumulated
        self._state.agreed = self._agreed
        mean = self._gradients.scale_aside
        scale = mean * min(1.0, self._max_norm / (norm * mean + CLIP_EPSILON))
        for batch in _batches(weights):
            before = {place: _copies_in(optimizer.state[weights[place]]) for place in batch}
            groups = [_values_in(group) for group in optimizer.param_groups]
            for place in batch:
                weights[place].grad = self._gradients.aside[place].mul(scale).to(weights[place].device)
            optimizer.step()
            for place in batch:
                weights[place].grad = None
                _put_back(optimizer.state[weights[place]], before[place])
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                _put_back(group, values)

    @torch.no_grad()
    def _end_guess(self) -> None:
        with self._state.lock_state:
            for kept, weight in zip(self._state.agreed or (), self._state.weights, strict=False):
                weight.copy_(kept)
            self._state.agreed = None

    def load(self) -> None:
        """Write the mean gradient of what was set aside."""
        self._gradients.load_aside()

    def held_in_common(self) -> Sequence[torch.Tensor]:
        """The weights without a guess; copies in host memory where the optimizer is offloaded."""
        return self._state.weights if self._state.agreed is None else self._state.agreed

    def take_back(self) -> None:
        """Have the gradients go into the next round, with those that came meanwhile."""
        self._end_guess()
        self._gradients.take_back()

    def apply(self) -> None:
        """Take a step with the averaged gradient."""
        self._end_guess()
        with self._gradients.get_tensors() as averages:
            norm = torch.tensor(norm_of(averages), dtype=torch.float32)
        with self._averages_as_gradients():
            self._step_inner(norm)
        if self._state.offload_optimizer:
            self._state._apply_optimizer_parameters_()
        self._gradients.use_up()

    def follow(self) -> None:
        """Take a step with the averaged gradient; what was accumulated was taken at other weights."""
        self.reset()
        self._gradients.set_aside()
        self.apply()

    @contextmanager
    def _averages_as_gradients(self) -> Iterator[None]:
        """Have the averages as `.grad` of the inner optimizer's parameters within the block.

        Upstream (optim/optimizer.py:626) makes gradients in host memory if there are none, which a parameter
        on a GPU can't have.
        """
        if self._state.offload_optimizer:  # its parameters have the averager's tensors, from the start
            self._gradients.notify_used_averaged_gradients()
            yield
        else:
            with self._gradients.use_averaged_gradients():
                yield


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return the Euclidean norm of tensors together, with the same bits on every machine.

    The order in which torch adds depends on the device and on the number of threads: peers with unlike ones
    would scale one average down to different gradients. Here squares are exact in float64, numpy adds them
    element by element in one order, and `math.fsum` adds up these sums and rounds once.

    Args:
        tensors: float32, in host memory.
    """
    sums = np.zeros(NORM_VALUES)
    for tensor in tensors:
        values = tensor.detach().flatten().numpy()
        for start in range(0, len(values), NORM_VALUES):
            squares = np.square(values[start : start + NORM_VALUES], dtype=np.float64)
            sums[: len(squares)] += squares
    return math.sqrt(math.fsum(sums))


def _batches(weights: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Divide the places of weights into batches."""
    limit = max(GUESS_BYTES, sum(weight.nbytes for weight in weights) // GUESS_BATCHES)
    batch: list[int] = []
    size = 0
    for place, weight in enumerate(weights):
        batch.append(place)
        size += weight.nbytes
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _values_in(group: dict[str, Any]) -> dict[str, Any]:
    return _copies_in({name: value for name, value in group.items() if name != "params"})


def _copies_in(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()
    }


def _put_back(state: dict[str, Any], before: dict[str, Any]) -> None:
    """Give tensors their values back, in the memory that they have."""
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            state[name].copy_(value)
        else:
            state[name] = value
