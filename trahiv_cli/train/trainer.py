"""How transformers' Trainer carries a swarm: a mixin over its hooks.

1. The Trainer runs local steps and believes that it has no end (`settings.local_arguments`).
2. `create_optimizer` gives it the swarm's optimizer, after this peer has entered the swarm (`entry.py`).
3. `training_step` computes a batch for that optimizer (`batches.py`), which decides when the whole swarm
   takes a step.
4. `SwarmCallback` turns a step of the swarm into logging, evaluation, saving and the end of the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import has_length

from trahiv_cli.errors import RecipeError, SwarmError
from trahiv_cli.optim.assemble import build_optimizer
from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.recipe.forms import require_a_batch
from trahiv_cli.recipe.schema import SwarmSection
from trahiv_cli.swarm.invitation import read_invitation
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.reach import ReachRules
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.account import NOTHING_GIVEN, Given
from trahiv_cli.train.announcing import log_how_to_join
from trahiv_cli.train.batches import Batches
from trahiv_cli.train.callbacks import SwarmCallback
from trahiv_cli.train.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    Checkpoints,
    derive_peer_seed,
    set_random_states,
)
from trahiv_cli.train.comparison import Comparison, likeness
from trahiv_cli.train.division import DividedSampler, DividedStream, divide
from trahiv_cli.train.entry import enter
from trahiv_cli.train.folder import owned, start_node
from trahiv_cli.train.leaving import ENDLESS_BUDGET, Budget, Leaving, Left
from trahiv_cli.train.settings import (
    SwarmSettings,
    by_name,
    local_arguments,
    require_swarmable,
    training_keywords,
)

logger = logging.getLogger(__name__)

STRAGGLERS_S, GATHER_S, DIGESTS_S = 60.0, 3600.0, 120.0
LOGS_KEPT = 20_000
"""Entries of `state.log_history`, about 1 kB each: a run goes on for weeks."""

# At run time it is mixed into any Trainer; to the type checker it is one.
_Host: Any = Trainer if TYPE_CHECKING else object


class SwarmTrainerMixin(_Host):
    """Gives any `Trainer` subclass a swarm: `class SwarmSFTTrainer(SwarmTrainerMixin, SFTTrainer)`.

    Without `hivemind_config` (here or in the arguments) it behaves exactly like the class it is mixed into.

    In logs, evaluations and after training, `state.global_step` and `state.max_steps` count steps of the
    swarm; in callbacks after a local batch, this peer's batches. `state.epoch` counts this peer's passes, and
    `train_samples_per_second` its samples. `state.log_history` keeps the newest 20,000 entries.

    Args:
        hivemind_config: `{"dht": keywords of hivemind.DHT, "opt": keywords of hivemind.Optimizer}`;
            default: `args.hivemind_config`. `opt` needs `run_id` and `target_batch_size`. In `dht`,
            `initial_peers` may hold invitations, or `@FILE` with one.
        swarm: the recipe's section of that name, or its fields (`{"solo": "never"}`), as on every peer.
        node: a running node to use instead of starting one; its owner closes it.
        events: told about all that the contract names.
        should_leave: asked after each local step and during waits; True ends training in good order.
            Default: whether Ctrl-C was pressed, or SIGTERM came, while `train` runs.
        reached_step: the step that the swarm is known to have reached; a fresh start is refused above 0.
        wait_s: how long the first step of a run waits for `swarm.min_peers`; default: an hour.
        budget: what this peer gives, beside what it has `given_before`; then it leaves.

    Raises:
        RecipeError: the arguments contain something that can't work in a swarm; the message says what.
    """

    optimizer: Any
    train_dataset: Any
    current_gradient_accumulation_steps: int
    node: Node | None = None
    swarm_callback: SwarmCallback  # of the last call of `train`, as `swarm_optimizer` is
    swarm_optimizer: SwarmOptimizer | None = None
    _divided: DividedSampler | DividedStream | None = None
    _resumes_from: Checkpoint | None = None
    _owns_node = False

    def __init__(
        self,
        *args: Any,
        hivemind_config: dict[str, Any] | None = None,
        swarm: SwarmSection | dict[str, Any] | None = None,
        node: Node | None = None,
        events: Events | None = None,
        should_leave: Callable[[], bool] | None = None,
        reached_step: int = 0,
        wait_s: float | None = None,
        budget: Budget = ENDLESS_BUDGET,
        given_before: Given = NOTHING_GIVEN,
        **kwargs: Any,
    ) -> None:
        kwargs = by_name(type(self), SwarmTrainerMixin, args, kwargs)
        given = kwargs.get("args")
        config = hivemind_config if hivemind_config is not None else getattr(given, "hivemind_config", None)
        self.swarm_config = config
        if config is None:
            super().__init__(**kwargs)
            return
        if given is None:
            raise RecipeError("A swarm needs `args`.", hint="args=SwarmTrainingArguments(max_steps=..., ...)")
        require_swarmable(given, kwargs)
        self.swarm_args = given
        self.swarm_settings = SwarmSettings.read(config, swarm)
        self._samples_per_step = self.swarm_settings.samples_per_step(given)
        self._owns_node, self.node = node is None, node
        self._events = events or Events()
        self._leaving, self._hears_signals = Leaving(), should_leave is None
        self._should_leave = should_leave or (lambda: self._leaving())
        self._reached_step, self._budget, self._given_before = reached_step, budget, given_before
        self._wait_s = GATHER_S if wait_s is None else wait_s
        self._batches = Batches(self, given.per_device_train_batch_size, self._events)
        super().__init__(**kwargs | {"args": local_arguments(given)})
        if self.swarm_settings.swarm.divide_data:
            self._divided = divide(self.train_dataset, self.args, self._should_leave)
        # A progress bar would count local steps towards an end that is not there.
        if self.pop_callback(DEFAULT_PROGRESS_CALLBACK) is not None:
            self.add_callback(PrinterCallback)

    # -- the life of a run ---------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train with the swarm until its `max_steps`.

        Resuming needs no argument: with peers alive their state is taken, else the newest checkpoint in
        `output_dir/checkpoints`. In the main thread, the first Ctrl-C (or SIGTERM) saves a checkpoint and
        says goodbye to the others; the second skips the checkpoint. Then the signal takes its usual effect.

        Raises:
            KeyboardInterrupt: after Ctrl-C. No process is left, and `train` may be called again.
            RecipeError: `resume_from_checkpoint` was given.
            FolderTaken: another trainer, or a `trahiv` command, trains in `output_dir`.
            Unreachable, SetupError, NotAdmitted, RoundFailed, RecipeMismatch: see `Node` and `enter`.
        """
        if self.swarm_config is None:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        if resume_from_checkpoint:
            raise RecipeError(
                "`resume_from_checkpoint` has no meaning in a swarm.",
                hint="leave it out: a run resumes from its peers, or from output_dir/checkpoints",
            )

        def interrupt() -> None:  # and not the process: it may be a notebook's kernel
            raise KeyboardInterrupt

        result, self._leaving = None, Leaving(at_once=interrupt)
        hears = self._hears_signals and threading.current_thread() is threading.main_thread()
        with self._leaving.installed() if hears else contextlib.nullcontext(), contextlib.suppress(Left):
            result = self._train_in_swarm(**kwargs)
        if self._leaving.signal is not None:
            signal.raise_signal(self._leaving.signal)
        return result

    def _train_in_swarm(self, **kwargs: Any) -> Any:
        """Start the node, train, and close, whatever happens; `Left` if a signal came before it trained."""
        if self.swarm_optimizer is not None:  # of an earlier call, whose processes have ended
            if self.optimizer is not None:
                self.remove_callback(self.swarm_callback)
            self.optimizer = self.swarm_optimizer = None
        folder, settings = Path(self.swarm_args.output_dir), self.swarm_settings
        # A node that was passed in has an owner, and so has its folder.
        with contextlib.nullcontext() if self.node else owned(folder), contextlib.closing(self):
            if self.node is None:
                with self._leaving.interruptible():
                    if not settings.options["verbose"] and "HIVEMIND_LOGLEVEL" not in os.environ:
                        logging.getLogger("hivemind").setLevel(logging.WARNING)
                    invitation = read_invitation(settings.initial_peers)
                    is_public = settings.swarm.public
                    reach = ReachRules(relay_mbit=settings.swarm.relay)
                    self.node = start_node(settings.dht, folder, invitation, is_public=is_public, reach=reach)
                    log_how_to_join(self.node, folder, settings.run_id)
            try:
                result = super().train(**kwargs)
                optimizer = self.swarm_optimizer
                if optimizer is not None and optimizer.local_epoch >= optimizer.max_steps:
                    optimizer.catch_up.wait_for_stragglers(STRAGGLERS_S)
                if optimizer is not None and self._leaving():
                    self.swarm_callback.save_checkpoint()
                    path = self.swarm_callback.checkpoints.finish()
                    what = f"`train()` resumes from the checkpoint {path}."
                    if path is None:
                        what = f"No checkpoint could be written to {folder / CHECKPOINTS}."
                    logger.warning("Stopped at step %d. %s", optimizer.local_epoch, what)
                return result
            except SwarmError:
                if self.optimizer is not None:  # it has entered the swarm
                    self.swarm_callback.save_checkpoint()
                raise
            finally:
                if self.swarm_optimizer is not None and self.optimizer is not None:
                    self.swarm_callback.checkpoints.finish()

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload `output_dir`; raises `RecipeError` in a swarm, where that folder holds this peer's keys."""
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
            if self._owns_node and self.node is not None:
                node, self.node = self.node, None
                node.close()

    @property
    def plain_model(self) -> torch.nn.Module:
        """The model itself, if it was compiled: its weights have the same names as on other peers."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    # -- the Trainer's hooks -------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Read this peer's data in an order of its own; raises `AssetError` if it fills no local batch."""
        if self.swarm_config is None:
            return super().get_train_dataloader()
        if has_length(self.train_dataset):
            # With fewer the Trainer would end at once and say nothing.
            require_a_batch(len(self.train_dataset), self._samples_per_step)
        elif self._divided is None:
            logger.warning("A dataset without a length is not divided: shuffle it differently on each peer.")
        assert self.node is not None
        args = self.swarm_args  # the seed is for data order and dropout: the same after a restart
        base = args.data_seed if args.data_seed is not None else args.seed
        seed = derive_peer_seed(base, self.node.peer_id)
        if self._divided is None:
            self.args.data_seed = seed
        torch.manual_seed(seed)
        # `weigh` can't see the samples of every batch, so each is full; what is left over at the end of a
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
        inner.generator = torch.Generator().manual_seed(seed)
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        # Not public, but TRL's trainers override it, too: the one place where the Trainer asks for an order.
        is_order = isinstance(self._divided, DividedSampler)
        return self._divided if is_order else super()._get_train_sampler(train_dataset)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> Any:
        """Build the swarm's optimizer and enter the swarm: with its state, a checkpoint's, or fresh."""
        if self.swarm_config is None:
            return super().create_optimizer(model) if model is not None else super().create_optimizer()
        if self.optimizer is not None:
            return self.optimizer
        assert self.node is not None
        settings, args, plain, events = self.swarm_settings, self.swarm_args, self.plain_model, self._events
        max_steps = settings.max_steps(args, self.train_dataset)
        for param in plain.parameters():
            if param.requires_grad:  # hivemind averages and steps them in float32
                param.data = param.data.float()
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        with events.waiting("the model to be compared with the swarm's", DIGESTS_S):
            own = likeness(plain, tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None)
        own |= self._divided.size if self._divided is not None else {}
        comparison = Comparison(self.node, settings.run_id, own)
        checkpoints = Checkpoints(Path(args.output_dir) / CHECKPOINTS, args.save_total_limit, events)
        newest = checkpoints.newest()
        if newest is not None:
            newest.load_weights(plain)  # before the constructor: with offload its copies are the truth
        optimizer: SwarmOptimizer
        self.swarm_optimizer = optimizer = build_optimizer(
            settings.options,
            dht=self.node.dht,
            home=self.node,
            schema=comparison.schema,
            samples_per_step=self._samples_per_step,
            only_dials=self.node.only_dials(),
            **training_keywords(self, args, plain, max_steps),
            **settings.round_keywords(),
            events=events,
            when_no_group_is_found=lambda: comparison.repeat(optimizer.tracker.others),
            should_leave=self._should_leave,
        )
        if self._divided is not None:
            self._divided.lease_from(optimizer)
        waits = self._reached_step, settings.swarm.min_peers, self._wait_s
        entry = enter(optimizer, checkpoints, newest, comparison, *waits)
        if newest is not None and entry.source == "checkpoint":
            self._resumes_from = newest
            optimizer.position.method.resume(newest.load_own(plain))
        gives = self._budget, self._given_before
        self.swarm_callback = SwarmCallback(
            self, optimizer, checkpoints, self._should_leave, comparison.publish, *gives
        )
        self.add_callback(self.swarm_callback)
        # Wrapped by accelerate itself, but without moving the state to the device; and only once: the Trainer
        # prepares it again, and two wrappers would step the gradient scaler twice.
        self.optimizer = self.accelerator.prepare_optimizer(optimizer, device_placement=False)
        self.optimizer._is_accelerate_prepared = True
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Stand in a scheduler that only reports; the real one counts swarm steps."""
        swarm = self.swarm_optimizer
        if swarm is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self._created_lr_scheduler = True
        self.lr_scheduler = SimpleNamespace(
            step=lambda *_: None,
            get_last_lr=lambda: swarm.last_learning_rates,
            state_dict=dict,  # for a callback of the user's that has the Trainer save
            load_state_dict=lambda _: None,
        )
        return self.lr_scheduler

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch the batches of one window; where a stream has ended, its next pass begins."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        if not batches and self.swarm_optimizer is not None:
            self.control.should_epoch_stop = True  # the Trainer would ask an ended stream `max_steps` times
        return batches, num_items

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run one local batch forward and backward; in a swarm see `Batches`."""
        if self.swarm_optimizer is None:
            return super().training_step(model, inputs, num_items_in_batch)
        if self._resumes_from is not None:  # here: all that draws numbers before the first batch has done so
            set_random_states(self._resumes_from.state.random)
            self._resumes_from = None
        if self._divided is not None:
            self.swarm_optimizer.parts.work.announce(self._divided.next_batch())
        train_one = partial(super().training_step, model)
        return self._batches.train(inputs, num_items_in_batch, train_one)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as the class that is mixed into; in a swarm's training step, times its factor."""
        result = super().compute_loss(model, inputs, *args, **kwargs)
        return result if self.swarm_optimizer is None else self._batches.scaled(model, result)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: float | None = None) -> float | None:
        # Not public: the Trainer would compute the norm of each local batch's gradient, 2 % of a small
        # model's time, to log a number that no step was taken with.
        swarm = self.swarm_optimizer
        return super()._get_grad_norm(model, grad_norm=grad_norm) if swarm is None else swarm.last_grad_norm

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the weights that all peers agree on, which this peer's own may be ahead of."""
        evaluate = partial(super().evaluate, *args, **kwargs)
        if self.swarm_optimizer is None:
            return evaluate()

        def evaluate_alike() -> Any:
            torch.default_generator.manual_seed(self.swarm_args.seed)  # `mlm` hides the same words each time
            return evaluate()

        agreed = self.swarm_optimizer.agreed_weights()
        with agreed, self._counting_swarm_steps(), torch.random.fork_rng([]):
            return self._batches.evaluate(evaluate_alike)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log under the swarm's step, as all peers do, and beside a training loss the swarm's figures."""
        if self.swarm_optimizer is None:
            return super().log(logs, *args, **kwargs)
        if "loss" in logs:
            logs |= self.swarm_callback.figures()
        if logs.get("train_runtime"):  # the Trainer counted local steps
            steps = self.swarm_optimizer.local_epoch - self.swarm_callback.began_at_step
            logs["train_steps_per_second"] = round(steps / logs["train_runtime"], 3)
        with self._counting_swarm_steps():
            super().log(logs, *args, **kwargs)
        del self.state.log_history[:-LOGS_KEPT]

    @contextlib.contextmanager
    def _counting_swarm_steps(self) -> Iterator[None]:
        """While the block runs, the Trainer's state counts steps of the swarm, and not local ones."""
        state, swarm, local = self.state, self.swarm_optimizer, (self.state.global_step, self.state.max_steps)
        assert swarm is not None
        state.global_step, state.max_steps = swarm.local_epoch, swarm.max_steps
        try:
            yield
        finally:
            state.global_step, state.max_steps = local


class SwarmTrainer(SwarmTrainerMixin, Trainer):
    """Drop-in for `transformers.Trainer` that trains with a swarm when given `hivemind_config`."""
