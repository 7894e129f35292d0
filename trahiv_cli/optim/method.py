"""What peers bring to a round, and what its average does to their weights: two methods, one interface.

`SharedGradients` (modes sync and overlap) averages gradients and takes one step of the inner optimizer with
the average, so all peers hold the same weights and the same optimizer state. `LocalSteps` (diloco and
streaming) has each peer take steps of its own, and averages by how much these moved the weights.

A round takes what was `set_aside`; training may go on meanwhile. It ends with `apply` or with `take_back`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch.nn.utils import clip_grads_with_norm_

from trahiv_cli.optim.gradients import ExactGradientAverager
from trahiv_cli.optim.state import ExactStateAverager


class Method(ABC):
    """What one peer brings to rounds.

    Args:
        gradients: accumulates gradients; its averaged tensors are what a round averages.
        state: holds the inner optimizer.
        max_grad_norm: of the gradients in the inner optimizer's step; 0: any.
    """

    samples_aside: int
    """Samples that the present round is about."""

    weight_aside: float
    """What they count for in the average: trained tokens, or samples."""

    def __init__(
        self, gradients: ExactGradientAverager, state: ExactStateAverager, max_grad_norm: float
    ) -> None:
        self._gradients, self._state = gradients, state
        self._max_norm = max_grad_norm or float("inf")
        self.last_grad_norm: float | None = None
        """The norm of the gradient of the inner optimizer's last step, before it was scaled down."""
        self.dropped_samples = 0
        """Samples whose gradients were not finite, since the start."""
        self.steps = 1
        """Steps of the swarm that the next round commits."""
        self.places = range(len(gradients.parameters))
        """Tensors that the next round averages, or the present one."""

    @abstractmethod
    def begin(self, step: int, num_peers: int) -> None:
        """Work towards the round after `step`, among so many peers."""

    @abstractmethod
    def account(self, samples: int) -> None:
        """Take one local batch of so many samples, whose gradients are in `.grad`."""

    @property
    @abstractmethod
    def samples_held(self) -> int:
        """Samples towards the next round, with those that were set aside or made no step yet."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all samples and gradients: the weights were replaced."""

    @abstractmethod
    def set_aside(self, *, goes_on: bool) -> bool:
        """Set aside what was worked for, for a round during which training goes on, or does not.

        Returns:
            False if there is nothing finite; then it was dropped: it would spoil every peer's weights.
        """

    @abstractmethod
    def load(self) -> None:
        """Write what was set aside to the averager's tensors, in any thread, any number of times."""

    @abstractmethod
    def held_in_common(self) -> Sequence[torch.Tensor]:
        """Tensors that should have the same values on every peer of this history."""

    @abstractmethod
    def take_back(self) -> None:
        """Keep what was set aside for the next round, with what came meanwhile: this one failed."""

    @abstractmethod
    def apply(self) -> None:
        """Move the weights by what the averager's tensors hold. The caller holds the state's lock."""

    @abstractmethod
    def follow(self) -> None:
        """Do as `apply`, after a round that this peer had no part in; nothing is set aside."""

    def _step_inner(self, norm: torch.Tensor) -> None:
        """Scale the weights' gradients, of this norm, down to the limit; take a step of the inner optimizer.

        In this thread: `TrainingStateAverager.step` would run the optimizer in a thread of its own, whose
        OpenMP threads stay; libgomp then manages more threads than there are cores, no longer spins at
        barriers, and the next forward and backward passes take half as long again (2 cores).
        """
        clip_grads_with_norm_(self._state.weights, self._max_norm, norm)
        self.last_grad_norm = float(norm)
        self._state.optimizer.step()
