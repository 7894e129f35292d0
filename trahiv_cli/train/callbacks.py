"""The swarm's step as the Trainer's clock: what is due when the whole swarm has taken a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from transformers import IntervalStrategy, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.checkpoint import CheckpointData, Checkpoints, Saver
from trahiv_cli.train.leaving import ENDLESS_BUDGET, Budget

OVERFLOWS_IN_A_ROW = 20


@dataclass(frozen=True)
class Plan:
    """What is due at which swarm steps; 0 means never."""

    max_steps: int
    logging_steps: int = 0
    eval_steps: int = 0
    save_steps: int = 0
    save_seconds: float = 0.0

    @classmethod
    def from_arguments(
        cls, args: TrainingArguments, *, max_steps: int, can_evaluate: bool, save_minutes: float
    ) -> Self:
        """Read the intervals of the user's arguments; a value below 1 is a share of `max_steps`.

        With `save_minutes`, checkpoints are also due by the clock.
        """

        def steps(value: float | None, wanted: bool) -> int:
            if not wanted or not value:
                return 0
            return max(1, int(value if value >= 1 else value * max_steps))

        return cls(
            max_steps=max_steps,
            logging_steps=steps(args.logging_steps, args.logging_strategy == IntervalStrategy.STEPS),
            eval_steps=steps(args.eval_steps, can_evaluate and args.eval_strategy == IntervalStrategy.STEPS),
            save_steps=steps(args.save_steps, args.save_strategy == SaveStrategy.STEPS),
            save_seconds=0.0 if args.save_strategy == SaveStrategy.NO else 60 * save_minutes,
        )


def is_due(interval: int, before: int, now: int) -> bool:
    """Whether a multiple of `interval` lies in (before, now]: a peer may skip steps by a state download."""
    return interval > 0 and now // interval > before // interval


class SwarmCallback(TrainerCallback):
    """After each local step, looks whether the swarm has moved, and does what is due.

    Args:
        trainer: has the model that is saved.
        optimizer: the swarm's.
        plan: what is due when.
        checkpoints: where they go.
        events: told about steps, evaluations, checkpoints and warnings.
        should_leave: asked after each local step; True ends training.
        on_step: called after each step of the swarm.
        budget: what this peer gives; its time begins now.
    """

    def __init__(
        self,
        trainer: Any,
        optimizer: SwarmOptimizer,
        plan: Plan,
        checkpoints: Checkpoints,
        *,
        events: Events,
        should_leave: Callable[[], bool],
        on_step: Callable[[], None] = lambda: None,
        budget: Budget = ENDLESS_BUDGET,
    ) -> None:
        self._trainer, self._optimizer, self._plan = trainer, optimizer, plan
        self._events, self._should_leave, self._on_step = events, should_leave, on_step
        self._budget, self._began_at, self._my_samples, self._my_steps = budget, time.monotonic(), 0, 0
        self._saver, self._saved_at = Saver(checkpoints, self._tell_of_checkpoint), self._began_at
        self._saved: Path | None = None
        self._step = self._began_at_step = optimizer.local_epoch
        self._step_began, self._samples, self._weight = self._began_at, 0, 0.0
        self._loss: torch.Tensor | None = None
        self._reported_round: object = None
        self._samples_dropped = self._overflows = 0
        self.has_spent_budget = False
        """Whether this peer leaves because it has given what it was to give."""
        self.evaluated_at = -1
        """The swarm step of the last evaluation."""
        self.samples_seen = 0
        """Samples of the whole swarm in the steps that this peer took part in."""
        self.most_peers = 1
        """The most peers that took part in one step, this one included."""

    def add_loss(self, loss: torch.Tensor, *, samples: int, weight: float) -> None:
        """Add one batch's mean loss to this step's mean over trained tokens, without waiting for a GPU.

        The loss is a scalar on the model's device, and a mean over `weight`; if that is 0, it is left out.
        """
        self._samples += samples
        if weight:
            part = loss.detach() * weight
            self._loss = part if self._loss is None else self._loss + part
            self._weight += weight

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Start the clock when the first batch is about to be computed."""
        self._step_began = time.monotonic()
        if self._step >= self._plan.max_steps:
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Turn a step of the swarm into log, evaluation, checkpoint or the end."""
        before, now, plan = self._step, self._optimizer.local_epoch, self._plan
        self._warn_of_trouble(is_new_step=now != before)
        if now != before:
            self._step = now
            self._report_step(now, steps=now - before)
            self._on_step()
            control.should_log = is_due(plan.logging_steps, before, now)
            control.should_evaluate = is_due(plan.eval_steps, before, now)
            is_late = 0 < plan.save_seconds <= time.monotonic() - self._saved_at
            if now < plan.max_steps and (is_late or is_due(plan.save_steps, before, now)):
                self.save_checkpoint()
        self.has_spent_budget = self._budget.is_spent(
            seconds=time.monotonic() - self._began_at,
            samples=self._my_samples,
            steps=self._my_steps,
            is_border=now != before,
        )
        if self._should_leave() or self.has_spent_budget or now >= plan.max_steps:
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        """Publish an evaluation; its time is not counted as training."""
        numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        self.evaluated_at = self._optimizer.local_epoch
        self._events.emit("eval", step=self.evaluated_at, **numbers)
        self._step_began = time.monotonic()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Leave the Trainer's state as after a run of so many steps: the local ones count no more."""
        state.global_step, state.max_steps = self._optimizer.local_epoch, self._plan.max_steps
        state.num_train_epochs = math.ceil(state.epoch or 0)

    @property
    def steps_here(self) -> int:
        """Steps that the swarm took since this peer began."""
        return self._optimizer.local_epoch - self._began_at_step

    def figures(self) -> dict[str, float]:
        """What trackers are told about the last step beside the Trainer's own numbers."""
        optimizer, last = self._optimizer, self._optimizer.last_round
        figures: dict[str, float] = {
            "swarm/step": optimizer.local_epoch,
            "swarm/peers": 1 + len(optimizer.tracker.others),
            "swarm/samples": optimizer.step_samples,
        }
        if last is not None:
            figures |= {
                "swarm/group_size": len(last.group),
                "swarm/round_seconds": last.seconds,
                "swarm/bytes_sent": last.bytes_sent,
                "swarm/bytes_received": last.bytes_received,
            }
        return figures

    def save_checkpoint(self) -> None:
        """Begin to write a checkpoint of the swarm's step; a full disk is a warning, not an end."""
        self._saved_at = time.monotonic()
        self._saver.save(CheckpointData.of(self._trainer.plain_model, self._optimizer))

    def finish_saving(self) -> Path | None:
        """Wait until all checkpoints are written; return the last one's folder, or None if it failed."""
        self._saver.finish()
        return self._saved

    def _tell_of_checkpoint(self, step: int, result: Path | OSError) -> None:
        if isinstance(result, OSError):
            self._saved = None
            self._events.warn(
                "checkpoint",
                f"No checkpoint was written at step {step}: {result}. Training goes on.",
                hint="free disk space; the older checkpoints are untouched",
            )
        else:
            self._saved = result
            self._events.emit("checkpoint", step=step, path=str(result))

    def _report_step(self, step: int, *, steps: int) -> None:
        optimizer, last, now = self._optimizer, self._optimizer.last_round, time.monotonic()
        took_part = optimizer.step_taken == step
        if took_part:
            self.samples_seen += optimizer.step_samples
            self._my_samples += optimizer.my_step_samples
            self._my_steps += steps
            self.most_peers = max(self.most_peers, len(last.group) if last else 1)
        round_: dict[str, Any] | None = None
        if took_part and last is not None:
            round_ = {
                "group": list(last.group),
                **asdict(last),
                "seconds": round(last.seconds, 3),
                "blocked_seconds": round(last.blocked_seconds, 3),
                "reason": last.reason or None,
            }
        self._events.emit(
            "step",
            step=step,
            loss=None if self._loss is None else float(self._loss) / self._weight,
            learning_rate=optimizer.last_learning_rates[0],
            samples=optimizer.step_samples if took_part else None,
            my_samples=optimizer.my_step_samples if took_part else 0,
            peers=1 + len(optimizer.tracker.others),
            samples_per_second=round(self._samples / max(now - self._step_began, 1e-9), 3),
            round=round_,
            data=optimizer.data_figures,
        )
        self._step_began, self._loss, self._samples, self._weight = now, None, 0, 0.0

    def _warn_of_trouble(self, *, is_new_step: bool) -> None:
        """Warn of failed rounds, of dropped batches, and of batches that did not fit into float16."""
        last = self._optimizer.last_round
        if last is not None and not last.committed and last is not self._reported_round:
            self._reported_round = last
            self._events.warn(
                "round",
                f"The round for step {self._optimizer.local_epoch + 1} failed ({last.reason}); "
                "no weights were changed, and the gradients go into the next try.",
                hint="nothing to do, unless it repeats: then look at the link to the peers that are named",
            )
        dropped = self._optimizer.dropped_samples - self._samples_dropped
        if dropped:
            self._samples_dropped += dropped
            self._events.warn(
                "not-finite",
                f"The gradients of {dropped} samples were not finite and were dropped before they could "
                "reach a peer.",
                hint="lower training.learning_rate, or look at the data",
            )
        if self._trainer.accelerator.optimizer_step_was_skipped:
            self._optimizer.forget_announced()  # the gradients are gone, and nobody accounted for them
            self._overflows += 1
        # Once in a step is enough; and the scaler tries smaller numbers, so a few are normal.
        if self._overflows >= OVERFLOWS_IN_A_ROW or (self._overflows and is_new_step):
            self._events.warn(
                "overflow",
                f"The gradients of {self._overflows} local batches did not fit into float16 and were "
                "left out; the loss scale was lowered. A few at the start are normal.",
                hint="if it goes on: training.bf16 where the GPU has it, or a lower training.learning_rate",
            )
            self._overflows = 0


@contextmanager
def counting_swarm_steps(state: TrainerState, optimizer: SwarmOptimizer) -> Iterator[None]:
    """While the block runs, the Trainer's state counts steps of the swarm, and not local ones."""
    local = state.global_step, state.max_steps
    state.global_step, state.max_steps = optimizer.local_epoch, optimizer.max_steps
    try:
        yield
    finally:
        state.global_step, state.max_steps = local
