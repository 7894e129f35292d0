"""The parts of a peer's state that follow from the run's `Scores`: the best weights, and some schedules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trahiv_cli.progress.scores import BestScore, Scores
from trahiv_cli.rounds.vote import digest_of


class BestWeights:
    """Copies of the weights and buffers with the best score so far, in host memory.

    `PeerState` makes one for a run that ends with these weights.
    """

    def __init__(self, which: BestScore) -> None:
        self.which = which
        self.tensors: list[torch.Tensor] = []
        """The copies, weights first; empty before the first score."""
        self.digest = b""
        """Digest of the copies; empty if there are none."""

    def judge(self, scores: Scores, present: Sequence[torch.Tensor]) -> None:
        """Copy the present tensors if their score, which is the last one, is the best."""
        if scores.best(self.which) == scores.of_steps[-1]:
            self.adopt(present)

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors, on any device, in place of the present ones."""
        self.tensors = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        self.digest = digest_of(self.tensors) if self.tensors else b""


class ScoredSchedule:
    """A learning-rate schedule that looks at scores, such as `ReduceLROnPlateau`.

    All peers of a history have the same scores, so their learning rates are the same.
    """

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self._groups = schedule.optimizer.param_groups
        self._first_rates = [copy.copy(group["lr"]) for group in self._groups]
        own = vars(schedule).items()
        self._first_values = copy.deepcopy({name: value for name, value in own if name != "optimizer"})
        self._followed = Scores()

    @staticmethod
    def is_one(schedule: Any) -> bool:
        """Whether a schedule looks at scores: its `step` takes one."""
        return isinstance(schedule, ReduceLROnPlateau) or not isinstance(schedule, LRScheduler)

    def follow(self, scores: Scores) -> None:
        """Set the learning rates that follow from these scores, from the first on."""
        if scores == self._followed:
            return
        self._followed = scores
        for group, rate in zip(self._groups, self._first_rates, strict=True):
            group["lr"] = copy.copy(rate)
        vars(self._schedule).update(copy.deepcopy(self._first_values))
        for _, score in scores.of_steps:
            self._schedule.step(score)
