"""Reports, and the user's callbacks, once per step of the swarm instead of per local batch."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from trahiv_cli.run.leaving import Budget, Left
from trahiv_cli.run.own_status import Contribution
from trahiv_cli.step.optimizer import SwarmOptimizer
from trahiv_cli.step.round_runner import OVERTAKEN
from trahiv_cli.train.batches import BatchWeight
from trahiv_cli.train.checkpoint import CheckpointData, Checkpoints
from trahiv_cli.train.settings import temporarily


class MeanLoss:
    """The mean loss of batches, each weighted by its trained tokens or samples."""

    def __init__(self) -> None:
        self._sum = torch.zeros(())
        self._weight = 0.0
        self.has_empty = False
        """Whether a batch had no trained token."""

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """Add a batch's mean loss, a scalar on any device, without waiting for a GPU."""
        if weight:
            self._sum = loss.detach() * weight + self._sum
            self._weight += weight
        self.has_empty |= not weight

    @property
    def value(self) -> float | None:
        """The mean of all batches; None if none of them had a trained token."""
        return float(self._sum) / self._weight if self._weight else None


class SwarmCallback(TrainerCallback):
    """Checks after each local batch whether the swarm has taken a step, and reports the step.

    `InSwarm.create_optimizer` creates one per call of `train`. It ends training at `max_steps` of the
    optimizer, when `should_leave()` is true, or when the budget is spent. The budget's time begins now.
    `on_step` is called after each step of the swarm. `earlier` is this peer's earlier contribution.
    """

    def __init__(
        self,
        trainer: Any,
        optimizer: SwarmOptimizer,
        checkpoints: Checkpoints,
        should_leave: Callable[[], bool],
        on_step: Callable[[], None],
        budget: Budget,
        earlier: Contribution,
    ) -> None:
        args = trainer.args
        self._trainer = trainer
        self._optimizer = optimizer
        self._events = optimizer.events
        self._should_leave = should_leave
        self._on_step = on_step
        self.checkpoints = checkpoints
        minutes = trainer.swarm_settings.swarm.save_minutes
        self._save_seconds = math.inf if args.save_strategy == "no" or not minutes else 60 * minutes
        self._began_at = self._saved_at = time.monotonic()
        self.step = self.began_at_step = optimizer.local_epoch
        self._budget = budget
        self._my_samples = 0
        self._my_steps = 0
        self._logged_losses = {"loss": MeanLoss(), "train_loss": MeanLoss()}
        """Means for the Trainer's logs of these names: since the last log, and since the start."""
        self._contribution = earlier
        self._reported_round: object = None
        self._samples_dropped = 0
        self._overflows = 0
        self.has_spent_budget = False
        self.evaluated_at = -1  # step of the swarm
        self.samples_seen = 0  # of the whole swarm, in the steps that this peer took part in
        self.most_peers = 1  # the largest number of peers in one step, this one included
        self._begin_step()

    def _begin_step(self) -> None:
        self._step_began = time.monotonic()
        self._samples = 0
        self._tokens = 0
        self._loss = MeanLoss()
        self._rewards: list[float] = []

    def add_loss(self, loss: torch.Tensor, batch: BatchWeight) -> None:
        """Add one batch to this step; `loss` is its mean, a scalar. Does not wait for a GPU."""
        self._samples += batch.samples
        self._tokens += batch.tokens
        for mean in (self._loss, *self._logged_losses.values()):
            mean.add(loss, batch.weight)

    def add_reward(self, reward: float) -> None:
        """Add the mean reward of completions that were generated at once to this step."""
        self._rewards.append(reward)

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Start the clock of the first step."""
        self._step_began = time.monotonic()
        control.should_training_stop |= self.step >= self._optimizer.max_steps

    def end_batch(self, control: TrainerControl) -> bool:
        """Return whether the swarm has taken a step during this batch; end training if it is over."""
        now = self._optimizer.local_epoch
        max_steps = self._optimizer.max_steps
        steps = now - self.step
        is_new_step = steps != 0
        self._warn_of_trouble(is_new_step)
        if is_new_step:
            self.step = now
            self._report_step(steps)
            self._on_step()
        is_late = time.monotonic() - self._saved_at >= self._save_seconds
        has_more = is_new_step or bool(self._optimizer.own_steps)
        control.should_save |= is_late and has_more and now < max_steps
        self.has_spent_budget = self._budget.is_exhausted_by(self.spent, is_border=is_new_step)
        if self._should_leave() or self.has_spent_budget or now >= max_steps:
            control.should_training_stop = True
        self._trainer.count_swarm_steps()
        return is_new_step

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """End an evaluation between two of its batches if this peer should leave."""
        if self._trainer.is_evaluating and self._should_leave():
            raise Left

    def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
        """Emit the metrics of an evaluation; its time does not count as training."""
        numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        self.evaluated_at = self._optimizer.local_epoch
        self._events.emit("eval", step=self.evaluated_at, **numbers)
        self._step_began = time.monotonic()

    @property
    def spent(self) -> Budget:
        """The time, samples and steps that this peer has given since it began."""
        return Budget(time.monotonic() - self._began_at, self._my_samples, self._my_steps)

    def complete(self, logs: dict[str, float]) -> None:
        """Add the swarm's figures to one of the Trainer's logs, in place, and correct its losses.

        The Trainer counts the loss of a batch without trained tokens as 0. A mean over no batch is removed.
        """
        if "loss" in logs:
            norm = self._optimizer.last_grad_norm
            logs |= self.figures() | ({} if norm is None else {"grad_norm": norm})
        for name in logs.keys() & self._logged_losses.keys():
            mean = self._logged_losses[name]
            if mean.has_empty and mean.value is not None:
                logs[name] = mean.value
            elif mean.has_empty:
                del logs[name]
        self._logged_losses["loss"] = MeanLoss()

    def figures(self) -> dict[str, float]:
        """Return the swarm's figures of the last step, which trackers get beside the Trainer's own."""
        optimizer = self._optimizer
        last = optimizer.last_round
        figures = {
            "step": optimizer.local_epoch,
            "peers": 1 + len(optimizer.tracker.others),
            "samples": optimizer.step_samples,
        }
        if last:
            figures |= {
                "group_size": len(last.group),
                "round_seconds": last.seconds,
                "bytes_sent": last.bytes_sent,
                "bytes_received": last.bytes_received,
            }
        return {f"swarm/{name}": value for name, value in figures.items()}

    def save_checkpoint(self) -> None:
        """Begin to write a checkpoint of the swarm's step; `checkpoints.finish` waits for it."""
        self._saved_at = time.monotonic()
        self.checkpoints.save_beside(CheckpointData.of(self._trainer.plain_model, self._optimizer))

    def _report_step(self, steps: int) -> None:
        """Emit `step`, which is `steps` after the one before."""
        optimizer = self._optimizer
        last = optimizer.last_round
        took_part = optimizer.step_taken == self.step  # else this peer downloaded or replayed it
        my_samples = optimizer.my_step_samples if took_part else 0
        my_tokens = self._tokens if took_part else 0
        round_: dict[str, Any] | None = None
        if took_part:
            self.samples_seen += optimizer.step_samples
            self._my_steps += steps
        if took_part and last:
            self.most_peers = max(self.most_peers, len(last.group))
            round_ = asdict(last) | {
                "group": list(last.group),
                "reason": last.reason or None,
                "seconds": round(last.seconds, 3),
                "blocked_seconds": round(last.blocked_seconds, 3),
            }
        self._my_samples += my_samples
        samples, tokens = self._contribution
        self._contribution = Contribution(samples + my_samples, tokens + my_tokens)
        self._events.emit(
            "step",
            step=self.step,
            loss=self._loss.value,
            **({"reward": sum(self._rewards) / len(self._rewards)} if self._rewards else {}),
            learning_rate=optimizer.last_learning_rates[0],
            samples=optimizer.step_samples if took_part else None,
            my_samples=my_samples,
            my_tokens=my_tokens,
            given=self._contribution._asdict(),
            peers=1 + len(optimizer.tracker.others),
            samples_per_second=round(self._samples / max(time.monotonic() - self._step_began, 1e-9), 3),
            round=round_,
            data=optimizer.data_figures,
        )
        self._begin_step()

    def _warn_of_trouble(self, is_new_step: bool) -> None:
        last = self._optimizer.last_round
        if last and not last.committed and last is not self._reported_round:
            # A peer that joins during a step of the others misses this step; that is no trouble.
            if self._reported_round or self._my_steps or last.reason != OVERTAKEN:
                self._events.warn(
                    "round",
                    f"The round for step {self._optimizer.local_epoch + 1} failed ({last.reason}); "
                    "no weights were changed, and the gradients go into the next try.",
                    hint="nothing to do, unless it repeats: then look at the links to these peers",
                )
            self._reported_round = last
        if dropped := self._optimizer.dropped_samples - self._samples_dropped:
            self._samples_dropped += dropped
            self._events.warn(
                "not-finite",
                f"The gradients of {dropped} samples were not finite and were dropped before they could "
                "reach a peer.",
                hint="lower training.learning_rate, or look at the data",
            )
        if self._trainer.accelerator.optimizer_step_was_skipped:
            self._optimizer.forget_announced()  # the gradients are gone, and no step has counted them
            self._overflows += 1
        # Warn after a step, or after many overflows. A few are normal: each lowers the scale.
        if self._overflows >= 20 or (self._overflows and is_new_step):
            self._events.warn(
                "overflow",
                f"The gradients of {self._overflows} local batches did not fit into float16 and were "
                "left out; the loss scale was lowered. A few at the start are normal.",
                hint="if it goes on: training.bf16 where the GPU has it, or a lower training.learning_rate",
            )
            self._overflows = 0


class SwarmEvents(CallbackHandler):
    """Calls the Trainer's callbacks per step of the swarm, while the Trainer itself counts local batches.

    A batch in which the swarm takes a step ends a step, and the next batch begins one. Any other batch ends a
    substep, as in gradient accumulation. A pass over the data, for strategies by epoch, takes
    `steps_per_pass` steps of the swarm; the end of the run also ends a pass. `on_save` follows when the
    checkpoint has been written, with the checkpoint's step; training goes on in the meantime.
    """

    def __init__(self, before: CallbackHandler, swarm: SwarmCallback, steps_per_pass: int) -> None:
        own = [swarm, *(one for one in before.callbacks if not isinstance(one, SwarmCallback))]
        super().__init__(own, before.model, before.processing_class, before.optimizer, before.lr_scheduler)
        self._swarm = swarm
        self._steps_per_pass = steps_per_pass
        self._begun: set[str] = set()
        self._saves: deque[tuple[int, Future[Path | None]]] = deque()  # checkpoints of these steps

    def call_event(
        self, event: str, args: Any, state: TrainerState, control: TrainerControl, **more: Any
    ) -> Any:
        """Call the callbacks, unless the event concerns a local batch or pass only; return the control."""
        if event == "on_step_end":
            return self._end_batch(args, state, control, **more)
        if event in self._begun or event == "on_epoch_end":
            return control
        if event in ("on_step_begin", "on_epoch_begin"):
            self._begun.add(event)
        if event == "on_save":
            if (last := self._swarm.checkpoints.last) is not None:
                self._saves.append((state.global_step, last))
            return control
        if event == "on_train_end":
            self.report_saved(args, state, control)
        return super().call_event(event, args, state, control, **more)

    def report_saved(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        """Wait for the checkpoints that are being written, and call `on_save` with the step of each."""
        while self._saves:
            step, saved = self._saves.popleft()
            if not saved.cancelled() and saved.result() is not None:
                with temporarily(state, global_step=step):
                    super().call_event("on_save", args, state, control)

    def _end_batch(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> Any:
        if self._saves and self._saves[-1][1].done():
            self.report_saved(args, state, control)
        before = self._swarm.step
        if not self._swarm.end_batch(control):
            return super().call_event("on_substep_end", args, state, control, **more)
        now = state.global_step
        # A download of the state may have skipped steps whose logs, evaluations and checkpoints are due.
        flows = [one for one in self.callbacks if isinstance(one, DefaultFlowCallback)]
        for step in range(before + 1, now):
            with temporarily(state, global_step=step):
                for flow in flows:
                    flow.on_step_end(args, state, control)
        self._begun.discard("on_step_begin")
        control = super().call_event("on_step_end", args, state, control, **more)
        if now // self._steps_per_pass > before // self._steps_per_pass or now >= state.max_steps:
            control = super().call_event("on_epoch_end", args, state, control, **more)
            if not control.should_training_stop:
                control = super().call_event("on_epoch_begin", args, state, control, **more)
        return control
