"""The swarm's step as the Trainer's clock: what is due when the whole swarm has taken a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.train.account import NOTHING_GIVEN, Given
from trahiv_cli.train.batches import BatchWeight
from trahiv_cli.train.checkpoint import CheckpointData, Checkpoints
from trahiv_cli.train.leaving import ENDLESS_BUDGET, Budget

OVERFLOWS_IN_A_ROW = 20


def interval(args: TrainingArguments, what: str, max_steps: int) -> int:
    """Return after how many swarm steps `what` ("logging", "eval", "save") is due; 0: never.

    It is read from the user's arguments, where a value below 1 is a share of `max_steps`.
    """
    value = getattr(args, f"{what}_steps")
    if getattr(args, f"{what}_strategy") != "steps" or not value:
        return 0
    return max(1, int(value if value >= 1 else value * max_steps))


class SwarmCallback(TrainerCallback):
    """After each local step, looks whether the swarm has moved, and does what is due.

    It ends training at `max_steps` of the optimizer, when `should_leave`, or when the budget is spent, whose
    time begins now. `on_step` is called after each step of the swarm. This peer has `given` so much before.
    """

    def __init__(
        self,
        trainer: Any,
        optimizer: SwarmOptimizer,
        checkpoints: Checkpoints,
        should_leave: Callable[[], bool],
        on_step: Callable[[], None] = lambda: None,
        budget: Budget = ENDLESS_BUDGET,
        given: Given = NOTHING_GIVEN,
    ) -> None:
        args, self._trainer, self._optimizer = trainer.swarm_args, trainer, optimizer
        self._events, self._should_leave, self._on_step = optimizer.events, should_leave, on_step
        self.checkpoints = checkpoints
        names = ["logging", "save"] if trainer.eval_dataset is None else ["logging", "save", "eval"]
        self._intervals = {name: interval(args, name, optimizer.max_steps) for name in names}
        minutes = trainer.swarm_settings.swarm.save_minutes
        self._save_seconds = math.inf if args.save_strategy == "no" or not minutes else 60 * minutes
        self._began_at = self._saved_at = self._step_began = time.monotonic()
        self._step = self.began_at_step = optimizer.local_epoch
        self._budget, self._my_samples, self._my_steps = budget, 0, 0
        self._samples, self._tokens, self._weight, self._loss = 0, 0, 0.0, torch.zeros(())
        self._given = given
        self._reported_round: object = None
        self._samples_dropped = self._overflows = 0
        self.has_spent_budget = False
        self.evaluated_at = -1  # step of the swarm
        self.samples_seen = 0  # of the whole swarm, in the steps that this peer took part in
        self.most_peers = 1  # that took part in one step, this one included

    def add_loss(self, loss: torch.Tensor, batch: BatchWeight) -> None:
        """Add one batch's mean loss over its weight, a scalar, to this step's, without waiting for a GPU."""
        self._samples += batch.samples
        self._tokens += batch.tokens
        if batch.weight:
            self._loss = loss.detach() * batch.weight + self._loss
            self._weight += batch.weight

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Start the clock when the first batch is about to be computed."""
        self._step_began = time.monotonic()
        control.should_training_stop |= self._step >= self._optimizer.max_steps

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Turn a step of the swarm into log, evaluation, checkpoint or the end."""
        before, now, max_steps = self._step, self._optimizer.local_epoch, self._optimizer.max_steps

        def is_due(what: str) -> bool:  # also if a state download has skipped the step
            steps = self._intervals.get(what, 0)
            return steps > 0 and now // steps > before // steps

        is_new_step = now != before
        self._warn_of_trouble(is_new_step)
        if is_new_step:
            self._step = now
            self._report_step(now, steps=now - before)
            self._on_step()
            control.should_log, control.should_evaluate = is_due("logging"), is_due("eval")
            is_late = time.monotonic() - self._saved_at >= self._save_seconds
            if now < max_steps and (is_late or is_due("save")):
                self.save_checkpoint()
        self.has_spent_budget = self._budget.is_spent(
            seconds=time.monotonic() - self._began_at,
            samples=self._my_samples,
            steps=self._my_steps,
            is_border=is_new_step,
        )
        if self._should_leave() or self.has_spent_budget or now >= max_steps:
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        """Publish an evaluation; its time is not counted as training."""
        numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        self.evaluated_at = self._optimizer.local_epoch
        self._events.emit("eval", step=self.evaluated_at, **numbers)
        self._step_began = time.monotonic()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Leave the Trainer's state as after a run of so many steps: the local ones count no more."""
        state.global_step, state.max_steps = self._optimizer.local_epoch, self._optimizer.max_steps
        state.num_train_epochs = math.ceil(state.epoch or 0)

    @property
    def spent(self) -> Budget:
        """What this peer has given since it began."""
        return Budget(time.monotonic() - self._began_at, self._my_samples, self._my_steps)

    def figures(self) -> dict[str, float]:
        """What trackers are told about the last step beside the Trainer's own numbers."""
        optimizer, peers = self._optimizer, 1 + len(self._optimizer.tracker.others)
        figures = {"step": optimizer.local_epoch, "peers": peers, "samples": optimizer.step_samples}
        if (last := optimizer.last_round) is not None:
            figures |= {"group_size": len(last.group), "round_seconds": last.seconds}
            figures |= {"bytes_sent": last.bytes_sent, "bytes_received": last.bytes_received}
        return {f"swarm/{name}": value for name, value in figures.items()}

    def save_checkpoint(self) -> None:
        """Begin to write a checkpoint of the swarm's step; `checkpoints.finish` waits for it."""
        self._saved_at = time.monotonic()
        self.checkpoints.save_beside(CheckpointData.of(self._trainer.plain_model, self._optimizer))

    def _report_step(self, step: int, *, steps: int) -> None:
        optimizer, last, now = self._optimizer, self._optimizer.last_round, time.monotonic()
        took_part = optimizer.step_taken == step  # and did not download it
        round_: dict[str, Any] | None = None
        if took_part:
            self.samples_seen += optimizer.step_samples
            self._my_samples += optimizer.my_step_samples
            self._my_steps += steps
            samples, tokens = self._given
            self._given = Given(samples + optimizer.my_step_samples, tokens + self._tokens)
        if took_part and last is not None:
            self.most_peers = max(self.most_peers, len(last.group))
            seconds = {name: round(getattr(last, name), 3) for name in ("seconds", "blocked_seconds")}
            round_ = asdict(last) | {"group": list(last.group), "reason": last.reason or None} | seconds
        self._events.emit(
            "step",
            step=step,
            loss=float(self._loss) / self._weight if self._weight else None,
            learning_rate=optimizer.last_learning_rates[0],
            samples=optimizer.step_samples if took_part else None,
            my_samples=optimizer.my_step_samples if took_part else 0,
            my_tokens=self._tokens if took_part else 0,
            given=self._given._asdict(),
            peers=1 + len(optimizer.tracker.others),
            samples_per_second=round(self._samples / max(now - self._step_began, 1e-9), 3),
            round=round_,
            data=optimizer.data_figures,
        )
        self._step_began = now
        self._samples, self._tokens, self._weight, self._loss = 0, 0, 0.0, torch.zeros(())

    def _warn_of_trouble(self, is_new_step: bool) -> None:
        last = self._optimizer.last_round
        if last is not None and not last.committed and last is not self._reported_round:
            self._reported_round = last
            self._events.warn(
                "round",
                f"The round for step {self._optimizer.local_epoch + 1} failed ({last.reason}); "
                "no weights were changed, and the gradients go into the next try.",
                hint="nothing to do, unless it repeats: then look at the link to the peers that are named",
            )
        if dropped := self._optimizer.dropped_samples - self._samples_dropped:
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
