"""Modes diloco and streaming: peers take steps of their own, and average how far these moved the weights.

The swarm agrees on an `OuterState` between two rounds; `LocalSteps` holds the steps of one peer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.utils import get_total_norm

from trahiv_cli.progress.leases import Work
from trahiv_cli.progress.pace import Pace, divide
from trahiv_cli.progress.tracker import SwarmTracker
from trahiv_cli.rounds.claims import are_finite
from trahiv_cli.state.host_copies import HostCopies
from trahiv_cli.state.outer import OuterState
from trahiv_cli.state.peer_state import PeerState
from trahiv_cli.step.gradients import GradientBuffer
from trahiv_cli.step.method import Method, OwnSteps
from trahiv_cli.step.run_settings import RunSettings


class LocalSteps(Method):
    """Takes local steps of this peer, and averages how far they moved the weights (pseudo-gradients).

    One round exchanges one fragment of the weights; the last round of a run, at `max_steps`, exchanges all.
    A step of the swarm is `target_batch_size` samples of all peers.

    Source: DiLoCo, arXiv 2311.08105; in fragments: Streaming DiLoCo, arXiv 2501.18512.
    """

    def __init__(
        self,
        gradients: GradientBuffer,
        state: PeerState,
        settings: RunSettings,
        tracker: SwarmTracker,
        work: Work,
    ) -> None:
        super().__init__(gradients, state, settings)
        self._settings = settings
        self._tracker = tracker
        self._work = work
        pace = state.committed.now.pace
        self._copied = range(0)  # indices of the weights that `_copies` is made for
        self.outer = OuterState(state.weights, pace.outer_learning_rate, pace.outer_momentum)
        state.set_agreed(self.outer.anchor, self.outer)
        self.samples_aside = 0
        self.weight_aside = 0.0
        self._samples_stepped = 0
        self._goes_on = False
        self._own_weights = [0.0]  # see `OwnSteps.weights`
        self.set_pace(pace)

    def set_pace(self, pace: Pace) -> None:
        """Change the number of local steps, or of fragments, between two rounds."""
        self._steps_per_round = pace.steps_per_round
        self._fragments = divide([param.numel() for param in self._state.weights], pace.num_fragments)
        if len(self._own_weights) != len(self._fragments):
            self._own_weights = [max(self._own_weights)] * len(self._fragments)
        self._weights_aside = [0.0] * len(self._fragments)

    @property
    def own_steps(self) -> OwnSteps:
        """Return this peer's steps that are in no committed round; steps in a running round are included."""
        samples = self.samples_aside + self._samples_stepped
        return OwnSteps(tuple(self._own_weights), samples, self._work.first(samples))

    def resume(self, own: OwnSteps) -> bool:
        """Count a checkpoint's steps; if its number of fragments differs, return False and count none."""
        if len(own.weights) != len(self._own_weights):
            return False
        self._own_weights = list(own.weights)
        self._samples_stepped = own.samples
        self._work.resume(own.positions)
        return True

    def begin(self, step: int, num_peers: int) -> None:
        """Divide the swarm's batch by its peers: an average peer takes one step for each of the swarm's."""
        left = max(1, self._settings.max_steps - step)
        self.steps = min(self._steps_per_round, left)
        self._is_last = self.steps == left
        which = self.outer.rounds % len(self._fragments)
        self.places = range(len(self._state.weights)) if self._is_last else self._fragments[which]
        self._inner_batch = -(-self._settings.target_batch_size // num_peers)
        self._first_step = step

    def account(self, samples: int) -> None:
        """Accumulate gradients; once they cover this peer's share of the swarm's batch, take a step."""
        self._gradients.accumulate(samples)
        held = self._gradients.samples
        weight = self._gradients.weight
        if held < self._inner_batch:
            return
        done = min(self.steps - 1, self._tracker.samples_accumulated // self._settings.target_batch_size)
        self._state.move_schedule(self._first_step + done)
        with self._gradients.use_accumulated_gradients():
            norm = get_total_norm([weight.grad for weight in self._state.weights if weight.grad is not None])
            if bool(norm.isfinite()):
                if weight:  # without a trained token a step would only decay the weights
                    with self._state.lock_state.changing():  # a joiner copies the optimizer's statistics
                        self._step_inner(norm)
                self._samples_stepped += held
                self._own_weights = [stepped + weight for stepped in self._own_weights]
            else:
                self.dropped_samples += held
        self._gradients.reset()

    @property
    def samples_held(self) -> int:
        """Samples towards the next round, including samples set aside or without a step yet."""
        return self.samples_aside + self._samples_stepped + self._gradients.samples

    def reset(self) -> None:
        """Forget all samples, and gradients without a step: the weights were replaced."""
        self._gradients.reset()
        self.samples_aside = 0
        self.weight_aside = 0.0
        self._samples_stepped = 0
        self._own_weights = [0.0] * len(self._fragments)

    @torch.no_grad()
    def go_back(self) -> None:
        """Go back to the agreed weights, and forget this peer's own steps."""
        for weight, agreed in zip(self._state.weights, self.outer.anchor, strict=True):
            weight.copy_(agreed)
        self.reset()

    @torch.no_grad()
    def set_aside(self, *, goes_on: bool) -> bool:
        """Copy the weights as they are; if one is not finite, go back to the agreed ones and return False."""
        self._goes_on = goes_on
        weights = self._state.weights[self.places.start : self.places.stop]
        if not are_finite(weights):  # a finite gradient may make too large a step
            self.dropped_samples += self.samples_held
            self.go_back()
            return False
        if self._copied != self.places:
            self._copies, self._copied = HostCopies(weights), self.places
        self._copies.begin(weights)
        self.samples_aside = self._samples_stepped
        self._samples_stepped = 0
        self._weights_aside = [
            weight if places.start in self.places else 0.0
            for places, weight in zip(self._fragments, self._own_weights, strict=True)
        ]
        self.weight_aside = sum(self._weights_aside)
        return True

    def load(self) -> None:
        """Write the pseudo-gradient to the averaged tensors: agreed weights minus the copies set aside."""
        with self._gradients.averages.locked() as tensors:
            for place, weight in zip(self.places, self._copies.wait(), strict=True):
                anchor = self.outer.anchor[place]
                own = weight
                out = tensors[place].detach()
                np.subtract(anchor.numpy(), own.numpy(), out=out.numpy())

    def held_in_common(self) -> Sequence[torch.Tensor]:
        """Return the agreed weights of the exchanged fragment, their momenta, and the agreed buffers."""
        outer = [held[place] for held in (self.outer.anchor, self.outer.momentum) for place in self.places]
        return [*outer, *self._state.buffers.common]

    def take_back(self) -> None:
        """Leave the weights as they are; the next round includes these steps and newer ones."""
        self._samples_stepped += self.samples_aside
        self.samples_aside = 0
        self.weight_aside = 0.0

    def apply(self, *, is_empty: bool = False) -> None:
        """Take the outer step; local steps during the round stay on top of it, except in the last round."""
        self._step_outer(self._copies.wait(), keeps_own=self._goes_on, is_empty=is_empty)
        both = zip(self._own_weights, self._weights_aside, strict=True)
        self._own_weights = [done - aside for done, aside in both]
        self.samples_aside = 0
        self.weight_aside = 0.0

    def follow(self, *, is_empty: bool = False) -> None:
        """Take the outer step; this peer's local steps stay on top for the next round, if there is one."""
        before = [self.outer.anchor[place].clone() for place in self.places]
        self._step_outer(before, keeps_own=True, is_empty=is_empty)

    @torch.no_grad()
    def _step_outer(self, before: Sequence[torch.Tensor], *, keeps_own: bool, is_empty: bool) -> None:
        """Take the outer step; with `keeps_own`, this peer's changes since the weights `before` stay on top.

        They do not in the last round of a run. An empty round moves neither agreed weights nor momentum.
        """
        with self._gradients.averages.locked() as averages:
            self.outer.step(range(0) if is_empty else self.places, averages)
        for place, replaced in zip(self.places, before, strict=True):
            agreed = self.outer.anchor[place]
            weight = self._state.weights[place]
            if keeps_own and not self._is_last:
                weight.add_(agreed.sub(replaced).to(weight.device))
            else:
                weight.copy_(agreed)
