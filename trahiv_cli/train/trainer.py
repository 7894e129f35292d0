"""How transformers' Trainer carries a swarm: a mixin over its public hooks.

The Trainer runs local steps and believes that it has no end; the swarm's optimizer decides when a step
of the whole swarm is taken, and `SwarmCallback` turns that into logging, evaluation, saving and the end
of the run. Traps are numbered P1-P31 as in the project's notes; each that applies is named where it is
stepped around.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import inspect
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import datasets
import torch
from hivemind.compression import CompressionBase as _Codec
from pydantic import ValidationError
from torch.utils.data import DataLoader
from transformers import (
    IntervalStrategy,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    get_scheduler,
)
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import SaveStrategy, has_length
from transformers.utils.import_utils import is_in_notebook

from trahiv_cli.assets.data import is_divisible
from trahiv_cli.assets.likeness import INITIAL, likeness
from trahiv_cli.assets.memory import is_out_of_memory
from trahiv_cli.errors import (
    AssetError,
    RecipeError,
    RecipeMismatch,
    RoundFailed,
    SetupError,
    SwarmError,
)
from trahiv_cli.optim.assemble import build_optimizer
from trahiv_cli.optim.history import History
from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.optim.pace import Pace
from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.recipe.foreign import REFUSED_CHOICES
from trahiv_cli.recipe.forms import require_a_batch
from trahiv_cli.recipe.schema import DhtSection, OptSection, Section, SwarmSection
from trahiv_cli.swarm.acquaintances import FILE, Acquaintances
from trahiv_cli.swarm.alike import (
    REPUBLISH_S,
    SAMPLES,
    SHARDS,
    Likeness,
    digest,
    publish_likeness,
    require_alike,
    without,
)
from trahiv_cli.swarm.invitation import find_standing, read_invitation, write_invitation
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.callbacks import Plan, SwarmCallback
from trahiv_cli.train.checkpoint import CHECKPOINTS, Checkpoint, Checkpoints, saved_in
from trahiv_cli.train.division import DividedSampler, DividedStream
from trahiv_cli.train.folder import owned
from trahiv_cli.train.leaving import ENDLESS_BUDGET, Budget, Leaving, Left
from trahiv_cli.train.micro_batches import split
from trahiv_cli.train.weights import BatchWeight, weigh, zero_loss

logger = logging.getLogger(__name__)

_Section = TypeVar("_Section", bound=Section)

ENDLESS = 2**31 - 1
"""Local steps that the Trainer plans for (P11): the swarm decides when the run ends."""

STEP_0_PATIENCE_S = 15.0
STRAGGLERS_S = 60.0
LIKENESS_S = 120.0
GATHER_S = 3600.0
OTHERS_S = 20.0
"""A peer that starts again waits so long for those that were there when it left: they may be further."""

LOGS_KEPT = 20_000
"""Entries of `state.log_history`, about 1 kB each: a run goes on for weeks."""

SECRET_HERE = ". This contains a secret: treat it like a password."
SECRET_THERE = ". On another machine, copy this file there (chmod 600) and use its path there: @PATH."

CONSOLE_RECORDERS = ("wandb", "comet_ml", "clearml", "neptune")
"""Trackers that may send what a terminal shows to a server."""

REFUSED_OPTIMIZERS = ("galore", "apollo", "lomo", "schedule_free", "layerwise")


@dataclass
class SwarmTrainingArguments(TrainingArguments):
    """`TrainingArguments` that also carry `hivemind_config={"dht": {...}, "opt": {...}}`.

    With it, `max_steps`, `warmup_steps`, `logging_steps`, `eval_steps` and `save_steps` count steps of
    the whole swarm.
    """

    hivemind_config: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Keywords of hivemind.DHT under `dht`, of hivemind.Optimizer under `opt`."},
    )


class ReportingScheduler:
    """Stands where the Trainer expects a scheduler, and only reports (P1, P13).

    The real schedule lives inside the swarm's optimizer and counts swarm steps.
    """

    def __init__(self, optimizer: SwarmOptimizer) -> None:
        self._optimizer = optimizer

    def step(self, *_: object) -> None:
        """Do nothing: a local step moves no schedule."""

    def get_last_lr(self) -> list[float]:
        """Learning rates of the last swarm step, one per param group."""
        return self._optimizer.last_learning_rates

    def state_dict(self) -> dict[str, Any]:
        """Empty: the step is the state, and the checkpoint has it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


# At run time it is mixed into any Trainer; to the type checker it is one.
_Host: Any = Trainer if TYPE_CHECKING else object


class SwarmTrainerMixin(_Host):
    """Gives any `Trainer` subclass a swarm: `class SwarmSFTTrainer(SwarmTrainerMixin, SFTTrainer)`.

    Without `hivemind_config` (here or in the arguments) it behaves exactly like the class it is mixed into.

    In logs, evaluations and after training, `state.global_step` and `state.max_steps` count steps of the
    swarm. `state.epoch` counts this peer's passes over its own data, and `train_samples_per_second` the
    samples of this peer. `state.log_history` keeps the newest 20,000 entries. Callbacks that are called after
    each local batch find the batches of this peer in `state.global_step`.

    Args:
        hivemind_config: `{"dht": keywords of hivemind.DHT, "opt": keywords of hivemind.Optimizer}`;
            default: `args.hivemind_config`. `opt` needs `run_id` and `target_batch_size`. In `dht`,
            `initial_peers` may hold invitations, or `@FILE` with one.
        swarm: the recipe's section of that name, or its fields (`{"solo": "never"}`): how rounds are
            judged, the same on every peer.
        node: a running node to use instead of starting one; its owner closes it.
        events: told about steps, evaluations, checkpoints, waits and warnings, by the contract's names.
        should_leave: asked after each local step and during waits; True ends training in good order.
            Default: whether Ctrl-C was pressed, or SIGTERM came, while `train` runs.
        reached_step: the step that the swarm is known to have reached; a fresh start is refused above 0.
        wait_s: how long the first step of a run waits for `swarm.min_peers`.
        budget: what this peer gives; then it leaves.

    Raises:
        RecipeError: the arguments contain something that can't work in a swarm; the message says what.
    """

    optimizer: Any
    train_dataset: Any
    current_gradient_accumulation_steps: int
    _factor: float | None = None
    """Of the batch in training; None outside of a swarm's training step."""
    _divided: DividedSampler | DividedStream | None = None
    """Reads this peer's part of the data, where it is divided."""
    _num_parts = 1
    """Into how many parts a local batch is divided, for want of memory."""
    _own_loss: torch.Tensor
    """Mean loss of the last batch in training, without its factor: a scalar on the model's device."""

    def __init__(
        self,
        *args: Any,
        hivemind_config: dict[str, Any] | None = None,
        swarm: SwarmSection | dict[str, Any] | None = None,
        node: Node | None = None,
        events: Events | None = None,
        should_leave: Callable[[], bool] | None = None,
        reached_step: int = 0,
        wait_s: float = GATHER_S,
        budget: Budget = ENDLESS_BUDGET,
        **kwargs: Any,
    ) -> None:
        names = _parameters_of_host(type(self))[: len(args)]
        if len(names) < len(args) or kwargs.keys() & set(names):
            raise TypeError(f"{type(self).__name__}() got too many arguments, or one of them twice")
        kwargs |= dict(zip(names, args, strict=True))
        given = kwargs.get("args")
        config = hivemind_config if hivemind_config is not None else getattr(given, "hivemind_config", None)
        self.swarm_optimizer: SwarmOptimizer | None = None
        self.swarm_callback: SwarmCallback
        self.swarm_config = config
        if config is None:
            super().__init__(**kwargs)
            return
        if given is None:
            raise RecipeError("A swarm needs `args`.", hint="args=SwarmTrainingArguments(max_steps=..., ...)")
        require_swarmable(given, kwargs)
        self._own_node, self.node = node is None, node
        self._events = events or Events()
        self._leaving, self._hears_signals = Leaving(), should_leave is None
        self._should_leave = should_leave or (lambda: self._leaving())
        self._reached_step, self._has_damage = reached_step, False
        self._wait_s, self._budget = wait_s, budget
        self._goes_on_from: Checkpoint | None = None
        self.swarm_args = given
        self._likeness: Likeness = {}
        self._publish_likeness_at = 0.0
        self._samples_per_step = given.per_device_train_batch_size * given.gradient_accumulation_steps
        self._options = OptSection().model_dump() | dict(config.get("opt") or {})
        dht = dict(config.get("dht") or {})
        peers = dht.pop("initial_peers", None) or ()
        self._initial_peers = [peers] if isinstance(peers, str) else [str(peer) for peer in peers]
        self._dht = _checked(DhtSection, "hivemind_config.dht", dht)
        section = swarm if isinstance(swarm, SwarmSection) else _checked(SwarmSection, "swarm", swarm or {})
        self._rules, self._pace = _round_rules(section), _pace(section)
        self._save_minutes, self._min_peers = section.save_minutes, section.min_peers
        self._is_public = section.public
        self._auto_share = section.communication_share if section.mode == "auto" else None
        self._require_options()
        kwargs["args"] = _local_arguments(given)
        super().__init__(**kwargs)
        self._divided = self._divide() if section.divide_data else None
        # A progress bar would count local steps towards an end that is not there.
        if self.pop_callback(DEFAULT_PROGRESS_CALLBACK) is not None:
            self.add_callback(PrinterCallback)

    # -- the life of a run ---------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train with the swarm until its `max_steps`.

        Resuming needs no argument: with peers alive their state is taken, else the newest checkpoint in
        `output_dir/checkpoints`. The first Ctrl-C (or SIGTERM) saves a checkpoint and says goodbye to the
        other peers; the second skips the checkpoint. Then the signal goes to whoever handled it before, as
        Python's KeyboardInterrupt. In threads other than the main one, no signal is heard.

        Raises:
            KeyboardInterrupt: after Ctrl-C. No process is left, and `train` may be called again.
            RecipeError: `resume_from_checkpoint` was given.
            Unreachable, SetupError, NotAdmitted: see `Node`.
            FolderTaken: another trainer, or a `trahiv` command, trains in `output_dir`.
            RoundFailed: the swarm's state could not be had.
            RecipeMismatch: the swarm's peers loaded another base model, adapters or tokenizer.
        """
        if self.swarm_config is None:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        if resume_from_checkpoint:
            raise RecipeError(
                "`resume_from_checkpoint` has no meaning in a swarm.",
                hint="leave it out: a run resumes from its peers, or from output_dir/checkpoints",
            )
        result, self._leaving = None, Leaving(at_once=_interrupt)
        if not self._hears_signals or threading.current_thread() is not threading.main_thread():
            return self._train_in_swarm(**kwargs)
        with self._leaving.installed(), contextlib.suppress(Left):
            result = self._train_in_swarm(**kwargs)
        if self._leaving.signal is not None:
            signal.raise_signal(self._leaving.signal)
        return result

    def _train_in_swarm(self, **kwargs: Any) -> Any:
        """Start the node, train, and close, whatever happens; `Left` if a signal came before it trained."""
        self._forget_last_run()
        own_folder = owned(Path(self.swarm_args.output_dir))  # a node that was passed in has an owner
        with contextlib.nullcontext() if self.node else own_folder, contextlib.closing(self):
            if self.node is None:
                with self._leaving.interruptible():
                    self.node = self._start_node()
                    self._say_how_to_join(self.node)
            try:
                result = super().train(**kwargs)
                optimizer = self.swarm_optimizer
                if optimizer is not None and optimizer.local_epoch >= optimizer.max_steps:
                    optimizer.gathering.wait_for_stragglers(STRAGGLERS_S)
                if self._leaving():
                    self._save_and_say_so()
                return result
            except SwarmError:
                if self.optimizer is not None:  # it has entered the swarm
                    self.swarm_callback.save_checkpoint()
                raise
            finally:
                if self.swarm_optimizer is not None and self.optimizer is not None:
                    self.swarm_callback.finish_saving()

    def _forget_last_run(self) -> None:
        """Have the Trainer's hooks build everything anew: the last run's processes have ended."""
        if self.swarm_optimizer is None:
            return
        if self.optimizer is not None:
            self.remove_callback(self.swarm_callback)
        self.optimizer = self.swarm_optimizer = None

    def _save_and_say_so(self) -> None:
        assert self.swarm_optimizer is not None
        self.swarm_callback.save_checkpoint()
        path, step = self.swarm_callback.finish_saving(), self.swarm_optimizer.local_epoch
        if path is None:
            folder = Path(self.swarm_args.output_dir) / CHECKPOINTS
            logger.warning("Stopped at step %d. No checkpoint could be written to %s.", step, folder)
        else:
            logger.warning("Stopped at step %d. `train()` resumes from the checkpoint %s.", step, path)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload `output_dir`; see `transformers.Trainer`.

        Raises:
            RecipeError: in a swarm, where that folder holds this peer's keys. Nothing was uploaded.
        """
        if self.swarm_config is None:
            return super().push_to_hub(*args, **kwargs)
        raise RecipeError(
            "output_dir holds the keys of this peer and of the swarm; nothing was uploaded.",
            hint='trainer.model.push_to_hub("...") uploads the weights alone',
        )

    def close(self) -> None:
        """Say goodbye and end the swarm's processes, also if that is interrupted. Safe to call twice."""
        try:
            if self.swarm_optimizer is not None:
                self.swarm_optimizer.shutdown()
        finally:
            if self.swarm_config is not None and self._own_node and self.node is not None:
                node, self.node = self.node, None
                node.close()

    @property
    def peer_seed(self) -> int:
        """This peer's own seed, for data order and dropout: the same after a restart (P22)."""
        assert self.node is not None
        base = self.swarm_args.data_seed if self.swarm_args.data_seed is not None else self.swarm_args.seed
        return derive_peer_seed(base, self.node.peer_id)

    @property
    def plain_model(self) -> torch.nn.Module:
        """The model itself, if it was compiled: its weights have the same names as on other peers."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    # -- the Trainer's hooks -------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Read this peer's data in an order of its own.

        Raises:
            AssetError: the dataset has fewer samples than one local batch.
        """
        if self.swarm_config is None:
            return super().get_train_dataloader()
        if has_length(self.train_dataset):
            # With fewer the Trainer would end at once and say nothing.
            require_a_batch(len(self.train_dataset), self._samples_per_step)
        elif isinstance(self._divided, DividedStream):
            logger.info(
                f"The stream's {self._divided.num_shards} shards are divided: give each peer the same stream."
            )
        else:
            logger.warning(
                "A dataset without a length is read as it comes: shuffle it differently on each peer."
            )
        if self._divided is None:
            self.args.data_seed = self.peer_seed
        torch.manual_seed(self.peer_seed)
        # P5: `weigh` can't see the samples of every batch, so each is full; what is left over at the end of a
        # pass, less than a batch, is not trained. Not for evaluation: no sample is left out.
        self.args.dataloader_drop_last = True
        samples = self.train_dataset
        if isinstance(self._divided, DividedStream):
            self.train_dataset = self._divided
        try:
            loader = super().get_train_dataloader()
        finally:
            self.args.dataloader_drop_last, self.train_dataset = False, samples
        # Each iterator draws a number for its workers: not from the generator that dropout goes on with.
        inner = getattr(loader, "base_dataloader", loader)  # accelerate's is a shell around it
        inner.generator = torch.Generator().manual_seed(self.peer_seed)
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        # Not public, but TRL's trainers override it, too: the one place where the Trainer asks for an order.
        if isinstance(self._divided, DividedSampler):
            return self._divided
        return super()._get_train_sampler(train_dataset)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> Any:
        """Build the swarm's optimizer and enter the swarm: with its state, a checkpoint's, or fresh."""
        if self.swarm_config is None:
            return super().create_optimizer(model) if model is not None else super().create_optimizer()
        if self.optimizer is not None:
            return self.optimizer
        assert self.node is not None
        target = self.plain_model
        _upcast_trainable(target)
        args = self.swarm_args
        max_steps = self._max_swarm_steps()
        checkpoints = Checkpoints(Path(args.output_dir) / CHECKPOINTS, keep=args.save_total_limit)
        with self._events.waiting("the model to be compared with the swarm's", LIKENESS_S):
            self._likeness = likeness(target, _tokenizer_of(self.processing_class))
        if isinstance(self._divided, DividedSampler):
            self._likeness[SAMPLES] = str(len(self.train_dataset))
        elif self._divided is not None:
            self._likeness[SHARDS] = str(self._divided.num_shards)
        self._publish_likeness()
        newest = checkpoints.newest(self._warn_of_damage)
        if newest is not None:
            newest.load_weights(target)  # before the constructor: with offload its copies are the truth
        self.swarm_optimizer = build_optimizer(
            self._options,
            dht=self.node.dht,
            home=self.node,
            schema=digest(without(self._likeness, INITIAL)),
            params=self._param_groups(target),
            optimizer=self._inner_optimizer(target),
            scheduler=lambda inner: get_scheduler(
                args.lr_scheduler_type,
                optimizer=inner,
                num_warmup_steps=args.get_warmup_steps(max_steps),
                num_training_steps=max_steps,
                scheduler_specific_kwargs=args.lr_scheduler_kwargs,
            ),
            samples_per_step=self._samples_per_step,
            max_grad_norm=args.max_grad_norm or 0.0,
            max_steps=max_steps,
            rules=self._rules,
            pace=self._pace,
            auto_share=self._auto_share,
            events=self._events,
            when_no_group_is_found=self._compare_with_others,
            should_leave=self._should_leave,
        )
        if isinstance(self._divided, DividedSampler):
            self._divided.leases = self.swarm_optimizer.divide_data(len(self.train_dataset))
        elif self._divided is not None:
            self._divided.leases = self.swarm_optimizer.divide_stream(self._divided.num_shards)
        self.swarm_optimizer.tracker.refresh()
        others = self.swarm_optimizer.tracker.others
        has_begun = any(peer.step > 0 for peer in others)  # then the swarm's weights are downloaded
        own = without(self._likeness, INITIAL) if has_begun else self._likeness
        require_alike(self.node, self._options["run_id"], own, [peer.peer_id for peer in others])
        if newest is None and self._has_damage and not has_begun:
            raise AssetError(
                f"All checkpoints in {args.output_dir} are damaged, and no peer is there that has trained.",
                hint="start a peer that has a sound one first, or move that folder away to begin anew",
            )
        try:
            entry = enter_swarm(self.swarm_optimizer, newest, self._reached_step, self.node.met_lately)
        except RoundFailed:
            self.node.require_membership()  # peers that refuse this one look as if they had left
            raise
        self._goes_on_from = newest if entry.source == "checkpoint" else None
        if self._goes_on_from is not None:
            self.swarm_optimizer.own_steps = self._goes_on_from.load_own(target)
        self._events.emit(
            "joined",
            step=self.swarm_optimizer.local_epoch,
            peers=1 + len(self.swarm_optimizer.tracker.others),
            source=entry.source,
            why=entry.why,
        )
        if self.swarm_optimizer.local_epoch == 0:
            self._gather()
        plan = Plan.from_arguments(
            args,
            max_steps=max_steps,
            can_evaluate=self.eval_dataset is not None,
            save_minutes=self._save_minutes,
        )
        self.swarm_callback = SwarmCallback(
            self,
            self.swarm_optimizer,
            plan,
            checkpoints,
            events=self._events,
            should_leave=self._should_leave,
            on_step=self._publish_likeness,
            budget=self._budget,
        )
        self.add_callback(self.swarm_callback)
        # P2, P3: wrapped by accelerate itself, but without moving the state to the device; and only once:
        # the Trainer prepares it again, and two wrappers would step the gradient scaler twice.
        self.optimizer = self.accelerator.prepare_optimizer(self.swarm_optimizer, device_placement=False)
        self.optimizer._is_accelerate_prepared = True
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Stand in a scheduler that only reports; the real one counts swarm steps (P1)."""
        if self.swarm_optimizer is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = ReportingScheduler(self.swarm_optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run one local batch forward and backward, and remember its loss for the step's mean.

        In a swarm its gradient is that of its own mean loss times its factor (`SwarmOptimizer.expect_batch`),
        also within a window of gradient accumulation: the swarm does the accumulating (P7).

        Returns:
            The loss as the Trainer would have it, for its log: without the factor.
        """
        if self.swarm_optimizer is None:
            result: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return result
        if self._goes_on_from is not None:  # here: all that draws numbers before the first batch has done so
            self._goes_on_from.restore_random_states()
            self._goes_on_from = None
        positions = self._divided.delivery.next_batch() if self._divided is not None else ()
        while True:
            try:
                return self._train_in_parts(model, inputs, num_items_in_batch, positions)
            except (RuntimeError, MemoryError) as failure:
                num_parts = 2 * self._num_parts
                size = self.swarm_args.per_device_train_batch_size
                if not is_out_of_memory(failure) or split(inputs, size, num_parts) is None:
                    raise
            # Not within `except`: the failure holds what was computed until then.
            self._go_on_in_parts(num_parts, positions)

    def _train_in_parts(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None,
        positions: Sequence[int],
    ) -> torch.Tensor:
        """Run a local batch in as many parts as memory asks for; return the loss of the whole."""
        assert self.swarm_optimizer is not None
        batch_size = self.swarm_args.per_device_train_batch_size
        whole, window = self._weigh(inputs, batch_size), self.current_gradient_accumulation_steps
        parts = split(inputs, batch_size, self._num_parts)
        assert parts is not None
        weighed: list[tuple[torch.Tensor, BatchWeight]] = []
        for size, part in parts:
            own = whole if len(parts) == 1 else self._weigh(part, size)
            # A gradient scaler (fp16) would scale the accumulators as well.
            factor = self.swarm_optimizer.expect_batch(
                own.samples,
                own.weight,
                lend=self.accelerator.scaler is None,
                positions=() if weighed else positions,
            )
            # Normalized by itself: some models (BERT) do so whatever they are told of the window.
            is_window = window == len(parts) == 1 or num_items_in_batch is None
            self._factor = factor if own.weight else 0.0
            self.current_gradient_accumulation_steps = 1
            try:
                super().training_step(model, part, num_items_in_batch if is_window else own.labels)
            finally:
                self._factor = None
                self.current_gradient_accumulation_steps = window
            weighed.append((self._own_loss, own))
        for loss, own in weighed:
            self.swarm_callback.add_loss(loss, samples=own.samples, weight=own.weight)
        loss = weighed[0][0]
        if len(parts) > 1:
            shares = [loss * (own.weight / whole.weight) for loss, own in weighed if own.weight]
            loss = torch.stack(shares or [torch.zeros_like(loss)]).sum()
        if window == 1:
            return loss
        if num_items_in_batch is None or whole.labels is None or self.loss_is_scaled_for_ga is False:
            return loss / window
        return loss * (whole.labels / num_items_in_batch) if whole.weight else torch.zeros_like(loss)

    def _weigh(self, inputs: dict[str, Any], batch_size: int) -> BatchWeight:
        return weigh(
            inputs,
            batch_size=batch_size,
            # Not public, but what the Trainer itself counts by; where it is gone, so is the difference.
            is_shifted=getattr(self, "_loss_shifts_labels", False),
        )

    def _go_on_in_parts(self, num_parts: int, positions: Sequence[int]) -> None:
        """Divide this batch, which is tried again, and all later ones: the memory does not suffice."""
        assert self.swarm_optimizer is not None
        self._num_parts = num_parts
        self.swarm_optimizer.start_batch_over(positions)
        _free_memory()
        size = self.swarm_args.per_device_train_batch_size
        self._events.warn(
            "memory",
            f"Memory ran out with {2 * size // num_parts} samples at a time; from now on {size} are "
            f"taken in {num_parts} parts. They count for the swarm as before.",
            hint=f"nothing to do; a next run begins so with training.per_device_train_batch_size: "
            f"{max(1, size // num_parts)}",
        )

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as the class that is mixed into; in a swarm's training step, times its factor."""
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if self._factor is None:
            return result
        loss, *outputs = result if isinstance(result, tuple) else (result,)
        self._own_loss = loss.detach()
        if self._factor == 0.0:
            loss = zero_loss(model, loss.device)
        elif self._factor != 1.0:  # equal batches stay as they are, to the bit
            loss = loss * self._factor
        return (loss, *outputs) if outputs else loss

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: float | None = None) -> float | None:
        # The one hook that is not public: the Trainer would compute the norm of each local batch's gradient,
        # 2 % of a small model's time, to log a number that no step was taken with.
        if self.swarm_optimizer is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        return self.swarm_optimizer.last_grad_norm

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the weights that all peers agree on, which this peer's own may be ahead of.

        Where memory runs out, it begins again with half as many samples at a time, and goes on with so many.
        """
        if self.swarm_optimizer is None:
            return super().evaluate(*args, **kwargs)
        with self.swarm_optimizer.agreed_weights(), self._counting_swarm_steps():
            while True:
                try:
                    return super().evaluate(*args, **kwargs)
                except (RuntimeError, MemoryError) as failure:
                    size = self.args.per_device_eval_batch_size
                    if not is_out_of_memory(failure) or size == 1:
                        raise
                # Not within `except`: the failure holds what was computed until then.
                self._evaluate_fewer(size)

    def _evaluate_fewer(self, size: int) -> None:
        """Halve the samples in one forward pass of an evaluation: the memory does not suffice for so many."""
        self.args.per_device_eval_batch_size = size // 2
        self._eval_dataloaders: dict[str, Any] = {}  # the Trainer keeps those with persistent workers
        _free_memory()
        self._events.warn(
            "memory",
            f"Memory ran out in an evaluation with {size} samples at a time; it begins again with "
            f"{size // 2}, and so do later ones.",
            hint=f"nothing to do; a next run begins so with training.per_device_eval_batch_size: {size // 2}",
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log under the swarm's step, so that every tracker's x axis is the same on every peer (P11).

        Beside a training loss go the swarm's own figures, as `swarm/...`. The newest `LOGS_KEPT` entries are
        kept.
        """
        if self.swarm_optimizer is None:
            return super().log(logs, *args, **kwargs)
        if "loss" in logs:
            logs |= self.swarm_callback.figures()
        if logs.get("train_runtime"):  # the Trainer counted local steps
            logs["train_steps_per_second"] = round(self.swarm_callback.steps_here / logs["train_runtime"], 3)
        with self._counting_swarm_steps():
            super().log(logs, *args, **kwargs)
        del self.state.log_history[:-LOGS_KEPT]

    @contextlib.contextmanager
    def _counting_swarm_steps(self) -> Iterator[None]:
        """While the block runs, the Trainer's state counts steps of the swarm, and not local ones."""
        assert self.swarm_optimizer is not None
        state, local = self.state, (self.state.global_step, self.state.max_steps)
        state.global_step, state.max_steps = self.swarm_optimizer.local_epoch, self.swarm_optimizer.max_steps
        try:
            yield
        finally:
            state.global_step, state.max_steps = local

    def _gather(self) -> None:
        """Hold the first step until enough peers are there."""
        assert self.swarm_optimizer is not None
        if not self.swarm_optimizer.gathering.gather(self._min_peers, self._wait_s):
            here = 1 + len(self.swarm_optimizer.tracker.others)
            self._events.warn(
                "min-peers",
                f"{here} of {self._min_peers} peers came in {self._wait_s:.0f} s; training begins.",
                hint="the others may join at any time; wait longer with --wait, or lower swarm.min_peers",
            )

    def _warn_of_damage(self, checkpoint: Checkpoint, damage: str) -> None:
        self._has_damage = True
        self._events.warn(
            "checkpoint",
            f"{checkpoint.path} is passed over: {damage}.",
            hint="the one before it is used, unless the swarm is further; move the damaged one away",
        )

    def _compare_with_others(self) -> None:
        """Find out whether there is no group because the others loaded something else.

        Raises:
            RecipeMismatch: they did.
        """
        assert self.swarm_optimizer is not None and self.node is not None
        others = [peer.peer_id for peer in self.swarm_optimizer.tracker.others]
        # Of two that entered together, and could not compare before, one leaves.
        if len(others) > 1 or self.node.peer_id > min(others, default=self.node.peer_id):
            own = without(self._likeness, INITIAL)
            try:
                require_alike(self.node, self._options["run_id"], own, others)
            except RecipeMismatch:
                raise
            except SwarmError as error:  # links are bad, which may be why there is no group
                logger.warning("What the others loaded was not compared; that is tried again: %s", error)

    # -- parts ---------------------------------------------------------------------------------------

    def _divide(self) -> DividedSampler | DividedStream | None:
        """Make what reads this peer's part of the data; None where that has no shards or no plain order."""
        args, strategy, samples = self.swarm_args, self.args.train_sampling_strategy, self.train_dataset
        if not is_divisible(samples, args.dataloader_num_workers):
            return None
        batch = args.per_device_train_batch_size
        seed = args.data_seed if args.data_seed is not None else args.seed
        order_seed = seed if strategy == "random" else None
        if isinstance(samples, datasets.IterableDataset):
            return DividedStream(samples, batch, order_seed, self._should_leave)
        if strategy not in ("random", "sequential"):
            return None
        return DividedSampler(len(samples), batch, order_seed, self._should_leave)

    def _publish_likeness(self) -> None:
        """Tell newcomers what this peer loaded, now and then: records go with the peers that hold them."""
        if time.monotonic() < self._publish_likeness_at:
            return
        assert self.node is not None
        with contextlib.suppress(SwarmError):  # the next step tries again
            if publish_likeness(self.node, self._options["run_id"], self._likeness):
                self._publish_likeness_at = time.monotonic() + REPUBLISH_S

    def _start_node(self) -> Node:
        if not self._options["verbose"] and "HIVEMIND_LOGLEVEL" not in os.environ:
            logging.getLogger("hivemind").setLevel(logging.WARNING)
        identity = self._dht.identity_path or Path(self.swarm_args.output_dir) / "identity.key"
        folder = Path(self.swarm_args.output_dir)
        invitation = read_invitation(self._initial_peers)
        return Node(
            self._dht,
            Path(identity),
            invitation.addresses,
            met=Acquaintances(folder / FILE),
            must_reach=not saved_in(folder),
            standing=find_standing(folder, invitation, is_public=self._is_public),
        )

    def _say_how_to_join(self, node: Node) -> None:
        """Log what others need: an invitation only where a person alone reads it, and else where it is."""
        peers = [address.maddr for address in node.addresses()]
        note = ""
        if node.standing is not None and peers:
            file = write_invitation(Path(self.swarm_args.output_dir), node, self._options["run_id"], "")
            if file is None:
                return  # this peer's own invitation was for one
            is_private = is_shown_to_a_person(logger)
            peers = [file.read_text(encoding="ascii").strip() if is_private else f"@{file}"]
            note = SECRET_HERE if is_private else SECRET_THERE
        logger.warning("To join the training, use initial_peers = %s%s", peers, note)

    def _require_options(self) -> None:
        names = OptSection.model_fields.keys() & self._options.keys()
        words = {name: self._options[name] for name in names if not isinstance(self._options[name], _Codec)}
        _checked(OptSection, "hivemind_config.opt", words)
        if self._options["run_id"] is None:
            raise RecipeError(
                "hivemind_config.opt.run_id is missing: peers find each other by it.",
                hint='hivemind_config={"opt": {"run_id": "my_run", "target_batch_size": 256}}',
            )
        local, target = self._samples_per_step, self._options["target_batch_size"]
        if local > target:
            raise RecipeError(
                f"One local batch is {local} samples but target_batch_size is {target}.",
                hint="lower per_device_train_batch_size or gradient_accumulation_steps, or raise the target",
            )

    def _max_swarm_steps(self) -> int:
        args = self.swarm_args
        if args.max_steps > 0:
            return int(args.max_steps)
        if not has_length(self.train_dataset):
            raise RecipeError("A dataset without a length needs `max_steps`.", hint="max_steps=1000")
        samples = args.num_train_epochs * len(self.train_dataset)
        return max(1, math.ceil(samples / self._options["target_batch_size"]))

    def _param_groups(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        """Trainable parameters, those that decay apart from the others, as the Trainer groups them."""
        decaying = set(self.get_decay_parameter_names(model))
        trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        groups = [
            {
                "params": [param for name, param in trainable if name in decaying],
                "weight_decay": self.swarm_args.weight_decay,
            },
            {"params": [param for name, param in trainable if name not in decaying], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def _inner_optimizer(self, model: torch.nn.Module) -> Callable[[Any], torch.optim.Optimizer]:
        """A factory for the optimizer that `training.optim` names, from the Trainer's own registry."""
        name = _optimizer_name(self.swarm_args)
        if any(word in name for word in REFUSED_OPTIMIZERS):
            raise _not_steppable(name)
        try:
            cls, keywords = self.get_optimizer_cls_and_kwargs(self.swarm_args, model)
        except ImportError as error:
            raise _without_package(self.swarm_args, error) from error
        if {"params", "model", "optimizer_dict"} & keywords.keys() or not issubclass(
            cls, torch.optim.Optimizer
        ):
            raise _not_steppable(name)
        if keywords.get("optim_bits") == 8:
            _keep_embeddings_in_32_bit(model)
        return lambda groups: cls(groups, **keywords)


class SwarmTrainer(SwarmTrainerMixin, Trainer):
    """Drop-in for `transformers.Trainer` that trains with a swarm when given `hivemind_config`."""


def is_shown_to_a_person(log: logging.Logger) -> bool:
    """Whether everything that is logged there goes to a terminal or a notebook, and nowhere else."""
    handlers: list[logging.Handler | None] = []
    one: logging.Logger | None = log
    while one is not None:
        handlers += one.handlers
        one = one.parent if one.propagate else None
    streams = [getattr(handler, "stream", None) for handler in handlers or [logging.lastResort]]
    shown = (sys.stdout, sys.stderr) if is_in_notebook() else ()
    is_recorded = any(name in sys.modules for name in CONSOLE_RECORDERS)
    return not is_recorded and all(one in shown or getattr(one, "isatty", bool)() for one in streams)


def _interrupt() -> None:
    """End what the main thread does; a process that is a notebook's kernel lives on."""
    raise KeyboardInterrupt


def require_optimizer(args: TrainingArguments) -> None:
    """Make sure that the package of the optimizer is installed here.

    Raises:
        SetupError: it is not.
    """
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise _without_package(args, error) from error


def derive_peer_seed(seed: int, peer_id: str) -> int:
    """A seed of 32 bits from the run's seed and a peer's id, equal on every machine and run of Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{peer_id}".encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Entry:
    """Where a peer begins."""

    source: Literal["fresh", "swarm", "checkpoint"]
    why: str
    """One sentence for a person."""


def enter_swarm(
    optimizer: SwarmOptimizer, newest: Checkpoint | None, reached_step: int, expected: Collection[str] = ()
) -> Entry:
    """Decide where to start from, and take part from there.

    With a checkpoint (its weights are in the model already) this peer offers that state, and takes over
    another's that is further: so those that start again together go on from the furthest. Without one it
    downloads the swarm's state; else the run begins, with the same initial weights on every peer (P14, P16).

    Args:
        optimizer: the swarm's.
        newest: this peer's own checkpoint.
        reached_step: the step that the swarm is known to have reached.
        expected: ids of peers that may have a state that is further, and are waited for, for a while.

    Raises:
        RoundFailed: there are peers that are further, but none gave its state in time; or the swarm had
            reached `reached_step` and has gone: a fresh model must not take a trained one's place.
    """
    tracker = optimizer.tracker
    if newest is not None:
        if optimizer.chooses_pace and newest.pace is not None:
            optimizer.set_pace(newest.pace)
        newest.load_optimizer(optimizer.opt)
        newest.load_outer(optimizer.state_averager.outer)
        optimizer.enter_step(newest.history, newest.ledger)
        optimizer.gathering.wait_for(expected, OTHERS_S)
    tracker.refresh()
    own = f"this run's checkpoint of step {newest.step}" if newest is not None else ""
    target = tracker.target
    if newest is not None and not tracker.is_behind:
        others = len(tracker.others)
        why = f"none of the {others} other peers is further" if others else "no other peer is there"
        return Entry("checkpoint", f"Goes on from {own}: {why}.")
    if tracker.others and (newest is None or tracker.is_behind):
        # At step 0 a download only makes sure of what the common seed already gives; that is not sent.
        patience = STEP_0_PATIENCE_S if target.step == 0 else None
        with contextlib.suppress(*([RoundFailed] if target.step == 0 else [])):
            if optimizer.load_state_from_peers(patience):
                further = f", which is further than {own}" if own else ""
                return Entry(
                    "swarm", f"Took over the swarm's state of step {optimizer.local_epoch}{further}."
                )
    if newest is not None:  # those that were further have left again
        return Entry("checkpoint", f"Goes on from {own}: those that were further have left.")
    if reached_step > 0:
        raise RoundFailed(
            f"The swarm had reached step {reached_step}, but all its peers left before this one was ready; "
            "nothing was trained.",
            hint="join again when one of them is back; what they trained is in their run's folder",
        )
    optimizer.enter_step(History())
    return Entry("fresh", "Begins at step 0: no peer is further, and this run's folder has no checkpoint.")


def _checked(section: type[_Section], path: str, values: dict[str, Any]) -> _Section:
    """Check the section at `path` as a recipe's would be.

    Raises:
        RecipeError: with everything that is wrong with it.
    """
    plain = {key: list(map(str, v)) if isinstance(v, (list, tuple)) else v for key, v in values.items()}
    try:
        return section.model_validate({key: value for key, value in plain.items() if value is not None})
    except ValidationError as error:
        wrong = [_said(".".join(map(str, (path, *e["loc"]))), e["input"], e["msg"]) for e in error.errors()]
        raise RecipeError("; ".join(wrong), hint="see `trahiv schema` for what may be said") from error


def _said(place: str, value: object, message: str) -> str:
    """Say what is wrong at one place, and of a choice that can't work, why and what does."""
    if isinstance(value, str) and (refused := REFUSED_CHOICES.get(place, {}).get(value)):
        message = f"{value!r} can't work in a swarm: {refused[0]}; {refused[1]}"
    return f"{place}: {message}"


def _round_rules(section: SwarmSection) -> RoundRules:
    return RoundRules(
        solo_after_s=section.solo_after_s, norm_limit=section.norm_limit, robust_mean=section.robust_mean
    )


def _pace(section: SwarmSection) -> Pace:
    """What the section says of it; mode auto begins with one of its own."""
    return Pace(
        mode="sync" if section.mode == "auto" else section.mode,
        local_steps=section.local_steps,
        fragments=section.fragments,
        outer_learning_rate=section.outer_learning_rate,
        outer_momentum=section.outer_momentum,
    )


def _without_package(args: TrainingArguments, error: ImportError) -> SetupError:
    name = _optimizer_name(args)
    return SetupError(
        f"optim={name} needs a package that is not installed here; nothing was trained.",
        hint="pip install torch-optimi" if name == "stable_adamw" else str(error),
    )


def _optimizer_name(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _not_steppable(name: str) -> RecipeError:
    return RecipeError(
        f"optim={name} can't be used in a swarm: it updates weights outside of `optimizer.step()`.",
        hint="adamw_torch, adafactor, sgd and others that step once can",
    )


def _tokenizer_of(processing_class: Any) -> PreTrainedTokenizerBase | None:
    """Find the tokenizer in what a Trainer takes: itself, a processor's, or none (images, sound)."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None


def _parameters_of_host(trainer: type) -> list[str]:
    """Name the parameters of the trainer that is mixed into, in its order (`DPOTrainer` has its own)."""
    after = trainer.__mro__[trainer.__mro__.index(SwarmTrainerMixin) + 1 :]
    signatures = (
        inspect.signature(vars(cls)["__init__"]).parameters for cls in after if "__init__" in vars(cls)
    )
    return next(
        list(parameters)[1:]
        for parameters in signatures
        if "args" in parameters and parameters["args"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )


def _local_arguments(args: TrainingArguments) -> TrainingArguments:
    """Copy the arguments for a Trainer that runs local steps without end and leaves the rest to the swarm."""
    local = copy.copy(args)
    if type(local) is SwarmTrainingArguments:  # TRL makes its own config of all fields, and knows not ours
        local.__class__ = TrainingArguments
        del local.hivemind_config
    elif isinstance(local, SwarmTrainingArguments):
        local.hivemind_config = None  # trackers keep the arguments, and an invitation may be in it
    local.max_steps = ENDLESS
    local.max_grad_norm = 0.0  # P6: the averaged gradient is clipped, not each batch's
    local.dataloader_drop_last = False  # but see `get_train_dataloader`
    local.ignore_data_skip = True  # P23
    local.logging_strategy = local.eval_strategy = IntervalStrategy.NO
    local.save_strategy = SaveStrategy.NO
    local.warmup_steps = 0
    return local


def require_swarmable(args: TrainingArguments, kwargs: Mapping[str, Any]) -> None:
    """Make sure that a swarm can do what the Trainer is told to.

    Args:
        args: the Trainer's.
        kwargs: its other keyword arguments.

    Raises:
        RecipeError: it can't.
    """
    problems: Sequence[tuple[bool, str, str]] = (
        (args.device.type not in ("cpu", "cuda"), f"a device of type {args.device.type}", "use_cpu=True"),
        (args.n_gpu > 1, "several GPUs in one process (P19)", "one peer per GPU: CUDA_VISIBLE_DEVICES=0 ..."),
        (args.auto_find_batch_size, "auto_find_batch_size (P20)", "set per_device_train_batch_size"),
        (kwargs.get("model_init") is not None, "model_init (P20)", "pass the model itself"),
        (bool(args.fsdp) or bool(args.deepspeed), "FSDP or DeepSpeed (P21)", "one peer per GPU without them"),
        (
            args.push_to_hub,
            "push_to_hub, which uploads the keys in output_dir,",
            "trainer.model.push_to_hub(...) afterwards",
        ),
        (
            args.load_best_model_at_end,
            "load_best_model_at_end (P25)",
            "choose among the checkpoints afterwards",
        ),
        (
            tuple(kwargs.get("optimizers") or (None, None)) != (None, None),
            "optimizers=...",
            "name it with `optim`",
        ),
        (
            kwargs.get("optimizer_cls_and_kwargs") is not None,
            "optimizer_cls_and_kwargs",
            "name it with `optim`",
        ),
        (
            args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"),
            "a schedule that looks at metrics",
            "cosine",
        ),
    )
    for wrong, what, instead in problems:
        if wrong:
            raise RecipeError(f"In a swarm, {what} can't be used.", hint=f"instead: {instead}")


def _upcast_trainable(model: torch.nn.Module) -> None:
    """Hold trainable weights in float32 (P8): hivemind averages and steps them in float32."""
    for param in model.parameters():
        if param.requires_grad and param.dtype != torch.float32:
            param.data = param.data.float()


def _free_memory() -> None:
    """Give back what a batch that ran out of memory has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _keep_embeddings_in_32_bit(model: torch.nn.Module) -> None:
    """Do what the Trainer's own `create_optimizer` does for 8-bit optimizers (P31)."""
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
