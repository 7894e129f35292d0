"""Two methods of averaging: each defines a peer's contribution to a round, and how its average moves weights.

`SharedGradients` (modes sync and overlap) averages gradients and takes one step of the inner optimizer with
the average, so all peers hold the same weights and the same optimizer state. With `LocalSteps` (diloco and
streaming) each peer takes steps of its own, and the peers average how far these moved the weights.

1. `begin` prepares for the next round, and `account` adds a batch to it.
2. `set_aside` reserves the work for a round. `load` writes it to the averaged tensors, in any thread, and
   again for each try. Training may go on meanwhile.
3. The round ends with `apply`, which moves the weights by the average in these tensors, or with `take_back`,
   which keeps the work for the next round. `follow` applies a round that others had without this peer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trahiv_cli.progress.ledger import Spans
from trahiv_cli.progress.pace import divide
from trahiv_cli.state.peer_state import PeerState
from trahiv_cli.step.gradients import GradientBuffer, set_gradients
from trahiv_cli.step.run_settings import RunSettings

GUESS_BYTES = 2**22
"""A guess moves the weights in batches of this size, or in 32 larger ones: a batch's gradients and optimizer
state exist twice meanwhile. A batch of 32 MB took three times as long."""

NORM_VALUES = 2**14  # squares added at a time: 128 kB in float64, within a processor's cache


@dataclass(frozen=True)
class OwnSteps:
    """The local steps of one peer since the last round, which only this peer knows."""

    weights: tuple[float, ...] = ()
    """Trained tokens, or samples, since the last round of each fragment."""

    samples: int = 0  # since the last round
    positions: Spans = Spans()  # of these samples, where peers divide the data

    def __bool__(self) -> bool:
        return any(self.weights)

    def to_wire(self) -> list[Any]:
        """Return it as a list that JSON carries."""
        return [list(self.weights), self.samples, self.positions.to_wire()]

    @classmethod
    def from_wire(cls, data: object) -> OwnSteps:
        """Decode the result of `to_wire`, or raise `ValueError`."""
        match data:
            case [list(weights), int(samples), positions]:
                return cls(tuple(float(weight) for weight in weights), samples, Spans.from_wire(positions))
        raise ValueError("not own steps")


class Method:
    """The base of both methods. `Position` creates one, and another when local steps begin or end.

    Gradients are scaled down to `max_grad_norm` before an inner step; 0 leaves them.
    """

    def __init__(self, gradients: GradientBuffer, state: PeerState, settings: RunSettings) -> None:
        self._gradients = gradients
        self._state = state
        self._max_norm = settings.max_grad_norm or float("inf")
        self.last_grad_norm: float | None = None
        """The norm of the gradient of the inner optimizer's last step, before it was scaled down."""
        self.dropped_samples = 0
        """Samples whose gradients were not finite, since the start."""
        self.steps = 1
        """Steps of the swarm that the next round commits."""
        self.places = range(len(gradients.parameters))
        """Indices of the tensors that the present or next round averages."""

    def continue_from(self, before: Method) -> None:
        """Take over the figures of the method that this one replaces."""
        self.last_grad_norm = before.last_grad_norm
        self.dropped_samples = before.dropped_samples

    @property
    def own_steps(self) -> OwnSteps:
        """Return this peer's own steps; in modes without local steps there are none."""
        return OwnSteps()

    def _step_inner(self, norm: torch.Tensor) -> None:
        """Scale the weights' gradients, of this norm, down to the limit; take a step of the inner optimizer.

        It runs in this thread: `TrainingStateAverager.step` would run the optimizer in a thread of its own,
        whose OpenMP threads stay. libgomp then manages more threads than there are cores and does not spin at
        barriers, so the next forward and backward passes take half as long again (2 cores).
        """
        clip_grads_with_norm_(self._state.weights, self._max_norm, norm)
        self.last_grad_norm = float(norm)
        self._state.optimizer.step()


class SharedGradients(Method):
    """Averages gradients; every peer takes the same step with the average.

    If training goes on during a round, the weights meanwhile are a guess: moved as this peer's own gradient
    would move them. When the average arrives, they return to the agreed weights and take the step. Steps of
    AdamW that come one step late left a loss 16 % higher, with the guess 2.6 % (1M parameters from scratch,
    300 steps, two peers). An offloaded optimizer makes no guess: the CPU would take two steps for each.
    """

    _agreed: Sequence[torch.Tensor] = ()

    def begin(self, step: int, num_peers: int) -> None:
        """Do nothing: each round is one step, of all weights."""

    def account(self, samples: int) -> None:
        """Add a batch's gradients to the accumulated ones."""
        self._gradients.accumulate(samples)

    @property
    def samples_held(self) -> int:
        """Samples towards the next round, including samples set aside."""
        return self._gradients.samples_aside + self._gradients.samples

    def reset(self) -> None:
        """Forget all gradients: the weights were replaced."""
        self._gradients.reset()

    samples_aside = property(attrgetter("_gradients.samples_aside"))
    weight_aside = property(attrgetter("_gradients.weight_aside"))
    """Samples in the present round, and their weight: trained tokens, or samples."""

    def set_aside(self, *, goes_on: bool) -> bool:
        """Set the gradients aside for a round. If one is not finite, drop them and return False.

        A single such value would spoil all weights.
        """
        norm = get_total_norm(list(self._gradients.accumulators))
        if not bool(norm.isfinite()):
            self.dropped_samples += self._gradients.samples
            self._gradients.reset()
            return False
        self._gradients.set_aside()
        if goes_on and not self._state.offload_optimizer:
            with self._state.lock_state:
                self._guess(float(norm))
        return True

    @torch.no_grad()
    def _guess(self, norm: float) -> None:
        """Move only the weights, by a step with the gradients set aside, whose sums have this total norm."""
        optimizer = self._state.optimizer
        weights = self._state.weights
        if not self._agreed:
            self._agreed = [torch.empty_like(weight) for weight in weights]
        for kept, weight in zip(self._agreed, weights, strict=True):
            kept.copy_(weight)
        set_gradients(weights, [None] * len(weights))  # the last batch's gradients were accumulated
        self._state.set_agreed(self._agreed)
        mean = self._gradients.scale_aside
        scale = mean * min(1.0, self._max_norm / (norm * mean + 1e-6))  # as `clip_grad_norm_` computes it
        sizes = [weight.nbytes for weight in weights]
        for batch in divide(sizes, min(32, 1 + sum(sizes) // GUESS_BYTES)):
            moved = [weights[place] for place in batch]
            holders = [*(optimizer.state[weight] for weight in moved), *optimizer.param_groups]
            before = [_copied(holder) for holder in holders]
            try:
                set_gradients(moved, (self._gradients.aside[place].mul(scale) for place in batch))
                optimizer.step()
            finally:  # even if memory runs out: a checkpoint contains this state
                set_gradients(moved, [None] * len(moved))
                for holder, values in zip(holders, before, strict=True):
                    for name, value in values.items():
                        if isinstance(value, torch.Tensor):
                            holder[name].copy_(value)  # into its own memory, which may be paged
                        else:
                            holder[name] = value

    @torch.no_grad()
    def _end_guess(self) -> None:
        with self._state.lock_state:
            for kept, weight in zip(self._state.agreed or (), self._state.weights, strict=False):
                weight.copy_(kept)
            self._state.set_agreed(None)

    def load(self) -> None:
        """Write the mean of the gradients set aside to the averaged tensors."""
        self._gradients.load_aside()

    def held_in_common(self) -> Sequence[torch.Tensor]:
        """Return the tensors that all peers of this history hold: weights without a guess, and buffers.

        The weights are in host memory if the optimizer is offloaded.
        """
        weights = self._state.weights if self._state.agreed is None else self._state.agreed
        return [*weights, *self._state.buffers.common]

    def take_back(self) -> None:
        """Add the gradients set aside to newer ones, for the next round."""
        self._end_guess()
        self._gradients.take_back()

    def apply(self, *, is_empty: bool = False) -> None:
        """Take a step with the averaged gradient, or none after an empty round.

        The caller holds the state's lock, as in `follow`.
        """
        self._end_guess()
        if is_empty:  # a step would decay the weights, and move them by the remaining momentum
            self.last_grad_norm = None
            self._gradients.use_up()
            return
        with self._gradients.averages.locked() as averages:
            norm = torch.tensor(norm_of(averages), dtype=torch.float32)
        if self._state.offload_optimizer:
            # The averaged tensors are the `.grad` of the optimizer's own copies of the weights.
            self._step_inner(norm)
            self._state.write_back()
        else:
            with self._gradients.use_averaged_gradients():
                self._step_inner(norm)
        self._gradients.use_up()

    def follow(self, *, is_empty: bool = False) -> None:
        """Take a step as `apply` does; drop the accumulated gradients, which were taken at other weights."""
        self.reset()
        self._gradients.set_aside()
        self.apply(is_empty=is_empty)


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return the Euclidean norm of float32 tensors in host memory, with the same bits on every machine.

    The order in which torch adds depends on the device and on the number of threads, so unlike peers would
    scale the same average down to different gradients. Here squares are exact in float64, numpy adds them
    element by element in one order, and `math.fsum` adds up these sums and rounds once.
    """
    sums = np.zeros(NORM_VALUES)
    for tensor in tensors:
        values = tensor.detach().flatten().numpy()
        for start in range(0, len(values), NORM_VALUES):
            squares = np.square(values[start : start + NORM_VALUES], dtype=np.float64)
            sums[: len(squares)] += squares
    return math.sqrt(math.fsum(sums))


def _copied(holder: dict[str, Any]) -> dict[str, Any]:
    """Copy an optimizer's values for a parameter or for a group, except the parameters themselves."""
    kept = {name: value for name, value in holder.items() if name != "params"}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in kept.items()}
