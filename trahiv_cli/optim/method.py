"""What peers bring to a round, and what its average does to their weights: two methods, one interface.

`SharedGradients` (modes sync and overlap) averages gradients and takes one step of the inner optimizer with
the average, so all peers hold the same weights and the same optimizer state. `LocalSteps` (diloco and
streaming) has each peer take steps of its own, and averages by how much these moved the weights.

A round takes what was `set_aside`; training may go on meanwhile. It ends with `apply` or with `take_back`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trahiv_cli.optim.averagers import ExactGradientAverager, ExactStateAverager
from trahiv_cli.optim.outer import OuterState
from trahiv_cli.optim.pace import Pace, divide
from trahiv_cli.optim.soundness import are_finite
from trahiv_cli.swarm.host_copies import HostCopies

GUESS_BYTES, GUESS_BATCHES = 2**22, 32
"""A guess is made for so many bytes of weights at a time, or in so many batches if there are more: so long, a
batch's gradients and optimizer state are there twice. Small batches are in the processor's cache, and in
memory that the process has already: one of 32 MB took three times as long."""

CLIP_EPSILON = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to a norm before it divides by it."""

NORM_VALUES = 2**14
"""Values whose squares are added at a time: in float64 128 kB, which a processor's cache holds."""


class Method(ABC):
    """What one peer brings to rounds.

    Args:
        gradients: accumulates gradients; its averaged tensors are what a round averages.
        state: holds the inner optimizer.
        max_grad_norm: gradients are scaled down to this norm before the inner optimizer's step; 0 leaves
            them alone.
    """

    def __init__(
        self,
        gradients: ExactGradientAverager,
        state: ExactStateAverager,
        max_grad_norm: float,
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

    # -- between rounds ----------------------------------------------------------------------------

    @abstractmethod
    def begin(self, step: int, num_peers: int) -> None:
        """Work towards the round after `step`, among so many peers."""

    @abstractmethod
    def account(self, samples: int) -> None:
        """Take one local batch of so many samples, whose gradients are in `.grad`."""

    @property
    @abstractmethod
    def samples_held(self) -> int:
        """Samples towards the next round, those that were set aside included."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all samples: the weights were replaced."""

    # -- a round -----------------------------------------------------------------------------------

    samples_aside: int
    """Samples that the present round is about."""

    weight_aside: float
    """What they count for in the average: trained tokens, or samples."""

    @abstractmethod
    def set_aside(self, *, goes_on: bool) -> bool:
        """Set aside what was worked for, for a round.

        Args:
            goes_on: whether training goes on during the round.

        Returns:
            False if there is nothing sound.
        """

    @abstractmethod
    def load(self) -> None:
        """Write what was set aside to the averager's tensors, in any thread, any number of times."""

    @abstractmethod
    def held_in_common(self) -> Sequence[torch.Tensor]:
        """Tensors that should have the same values on every peer of this history."""

    @abstractmethod
    def take_back(self) -> None:
        """Keep what was set aside for the next round: this one failed."""

    @abstractmethod
    def apply(self) -> None:
        """Move the weights by what the averager's tensors hold. The caller holds the state's lock."""

    @abstractmethod
    def follow(self) -> None:
        """Move the weights by the average of a round that this peer had no part in, as its members did.

        The caller holds the state's lock; nothing is set aside.
        """

    def _step_inner(self, norm: torch.Tensor) -> None:
        """Scale the weights' gradients, of this norm, down to the limit; take a step of the inner optimizer.

        In this thread: `TrainingStateAverager.step` would run the optimizer in a thread of its own, whose
        OpenMP threads stay; libgomp then manages more threads than there are cores, no longer spins at
        barriers, and the next forward and backward passes take half as long again (2 cores).
        """
        clip_grads_with_norm_(self._state.weights, self._max_norm, norm)
        self.last_grad_norm = float(norm)
        self._state.optimizer.step()


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


class LocalSteps(Method):
    """Takes steps of this peer's own, and averages how far they moved the weights (pseudo-gradients).

    One round exchanges one fragment of the weights; the last round of a run exchanges all.

    Args:
        pace: how many local steps, in how many fragments.
        max_steps: where the run ends.
        target_batch_size: samples of all peers together behind one step of the swarm.
        samples_of_swarm: tells how many samples the swarm holds towards the next round.
        parts: see `Method`.

    Source: DiLoCo, arXiv 2311.08105; in fragments: Streaming DiLoCo, arXiv 2501.18512.
    """

    def __init__(
        self,
        *parts: Any,
        pace: Pace,
        max_steps: int,
        target_batch_size: int,
        samples_of_swarm: Callable[[], int],
    ) -> None:
        super().__init__(*parts)
        self._max_steps, self._target = max_steps, target_batch_size
        self._samples_of_swarm = samples_of_swarm
        self._copies: dict[range, HostCopies] = {}
        self.outer = self._state.outer = OuterState(
            self._state.weights, pace.outer_learning_rate, pace.outer_momentum
        )
        self._state.agreed = self.outer.anchor
        self.samples_aside, self.weight_aside = 0, 0.0
        self._samples_stepped = 0
        self._goes_on = False
        self._weights_stepped = [0.0]
        self.set_pace(pace)

    def set_pace(self, pace: Pace) -> None:
        """Go over to another number of local steps, or of fragments, between two rounds."""
        self._steps_per_round = pace.steps_per_round
        self._fragments = divide([param.numel() for param in self._state.weights], pace.num_fragments)
        if len(self._weights_stepped) != len(self._fragments):
            self._weights_stepped = [max(self._weights_stepped)] * len(self._fragments)
        self._weights_aside = [0.0] * len(self._fragments)

    def begin(self, step: int, num_peers: int) -> None:
        """Divide the swarm's batch by its peers: one of average speed takes a step for each of the swarm's.

        A slow peer takes fewer until the round is due, a fast one more; each counts by what it trained.
        """
        left = max(1, self._max_steps - step)
        self.steps = min(self._steps_per_round, left)
        self._is_last = self.steps == left
        which = self.outer.rounds % len(self._fragments)
        self.places = range(len(self._state.weights)) if self._is_last else self._fragments[which]
        self._inner_batch = -(-self._target // num_peers)
        self._first_step = step

    def account(self, samples: int) -> None:
        """Accumulate gradients; with this peer's share of the swarm's batch, take a step."""
        self._gradients.accumulate_grads_(samples)
        if self._gradients.local_samples_accumulated < self._inner_batch:
            return
        held, weight = self._gradients.local_samples_accumulated, self._gradients.local_weight
        done = min(self.steps - 1, self._samples_of_swarm() // self._target)
        self._state.move_schedule(self._first_step + done)
        with self._gradients.use_accumulated_gradients():
            norm = get_total_norm([weight.grad for weight in self._state.weights if weight.grad is not None])
            if bool(norm.isfinite()):
                with self._state.lock_state:  # of whoever copies the optimizer's statistics
                    self._step_inner(norm)
                self._samples_stepped += held
                self._weights_stepped = [done + weight for done in self._weights_stepped]
            else:
                self.dropped_samples += held
        self._gradients.reset_accumulated_grads_()

    @property
    def samples_held(self) -> int:
        """See `Method.samples_held`; gradients without a step are in it."""
        return self.samples_aside + self._samples_stepped + self._gradients.local_samples_accumulated

    @property
    def own_steps(self) -> list[float]:
        """What the steps since the last round of each fragment count for, in trained tokens or samples.

        New values say that the weights are as such steps left them; those of other fragments are ignored.
        """
        return list(self._weights_stepped)

    @own_steps.setter
    def own_steps(self, weights: Sequence[float]) -> None:
        if len(weights) == len(self._fragments):
            self._weights_stepped = list(weights)

    def reset(self) -> None:
        """Forget all samples, and gradients without a step."""
        self._gradients.reset_accumulated_grads_()
        self.samples_aside, self.weight_aside, self._samples_stepped = 0, 0.0, 0
        self._weights_stepped = [0.0] * len(self._fragments)

    def set_aside(self, *, goes_on: bool) -> bool:
        """Copy the weights as they are; go back to those that are agreed on if one is not finite."""
        self._goes_on = goes_on
        weights = self._state.weights[self.places.start : self.places.stop]
        if not are_finite(weights):  # a finite gradient may be too large a step
            self._return_to_agreed()
            return False
        copies = self._copies.get(self.places)
        if copies is None:
            # The last round exchanges all fragments; copies of each are not kept beside those of all.
            own = set(self.places)
            self._copies = {places: kept for places, kept in self._copies.items() if own.isdisjoint(places)}
            copies = self._copies[self.places] = HostCopies(weights)
        copies.begin(weights)
        self.samples_aside, self._samples_stepped = self._samples_stepped, 0
        exchanged = [which for which, places in enumerate(self._fragments) if places.start in self.places]
        self._weights_aside = [
            weight if which in exchanged else 0.0 for which, weight in enumerate(self._weights_stepped)
        ]
        self.weight_aside = sum(self._weights_aside)
        return True

    @torch.no_grad()
    def _return_to_agreed(self) -> None:
        self.dropped_samples += self.samples_held
        for weight, agreed in zip(self._state.weights, self.outer.anchor, strict=True):
            weight.copy_(agreed)
        self.reset()

    def load(self) -> None:
        """Write the pseudo-gradient: the agreed weights minus those that were set aside."""
        with self._gradients.get_tensors() as tensors:
            for place, weight in zip(self.places, self._copies[self.places].wait(), strict=True):
                flat = (self.outer.anchor[place], weight, tensors[place].detach())
                anchor, own, out = (tensor.view(-1).numpy() for tensor in flat)
                np.subtract(anchor, own, out=out)

    def held_in_common(self) -> Sequence[torch.Tensor]:
        """The agreed weights of the fragment that is exchanged, and their momenta."""
        return [held[place] for held in (self.outer.anchor, self.outer.momentum) for place in self.places]

    def take_back(self) -> None:
        """Leave the weights as they are; the next round brings these steps and those that came meanwhile."""
        self._samples_stepped += self.samples_aside
        self.samples_aside, self.weight_aside = 0, 0.0

    @torch.no_grad()
    def apply(self) -> None:
        """Take the outer step, and have this peer's weights follow the agreed ones.

        What this peer's own steps did to the weights during the round is kept, on top of the agreed weights.
        """
        self._step_outer(self._copies[self.places].wait(), keeps_own=self._goes_on)
        self._weights_stepped = [
            done - aside for done, aside in zip(self._weights_stepped, self._weights_aside, strict=True)
        ]
        self.samples_aside, self.weight_aside = 0, 0.0

    @torch.no_grad()
    def follow(self) -> None:
        """Take the outer step; this peer's own steps stay on top of it, for the next round."""
        self._step_outer([self.outer.anchor[place].clone() for place in self.places], keeps_own=True)

    def _step_outer(self, before: Sequence[torch.Tensor], *, keeps_own: bool) -> None:
        """Take the outer step.

        Args:
            before: of each weight what the agreed one replaces.
            keeps_own: what this peer has done to the weight since then stays, unless the run is over.
        """
        with self._gradients.get_tensors() as averages:
            self.outer.step(self.places, averages)
        for place, replaced in zip(self.places, before, strict=True):
            agreed, weight = self.outer.anchor[place], self._state.weights[place]
            if keeps_own and not self._is_last:
                weight.add_(agreed.sub(replaced).to(weight.device))
            else:
                weight.copy_(agreed)
        self._gradients.notify_used_averaged_gradients()


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
