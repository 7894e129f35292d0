"""Transformers' Trainer in a swarm: the start and end of a run, around `Trainer.train`.

The Trainer's loop calls the methods in `hooks.py`. Without `hivemind_config`, neither module has an effect.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import Trainer, TrainerState, TrainingArguments, enable_full_determinism, set_seed
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.utils import is_in_notebook

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.schema import HivemindConfig, SwarmSection
from trahiv_cli.run.announcing import (
    Ended,
    announce,
    log_event,
    log_how_to_join,
    progress_reported,
    published,
    reach_reported,
)
from trahiv_cli.run.folder import CHECKPOINTS, recorded, saved_in
from trahiv_cli.run.leaving import ENDLESS_BUDGET, Budget, Leaving, Left
from trahiv_cli.run.lock import join_line, owned
from trahiv_cli.run.own_status import Contribution, OwnStatus, contribution_in
from trahiv_cli.run.peer_options import PeerOptions
from trahiv_cli.step.optimizer import SwarmOptimizer
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.batches import Batches
from trahiv_cli.train.callbacks import SwarmCallback
from trahiv_cli.train.failing import leaving_a_checkpoint
from trahiv_cli.train.hooks import TrainerHost, put_in_swarm, require_no_replaced
from trahiv_cli.train.inner import GivenOptimizer
from trahiv_cli.train.launched import Launch
from trahiv_cli.train.settings import (
    SwarmSettings,
    config_of,
    require_swarmable,
    score_name,
    temporarily,
    without_config,
)

logger = logging.getLogger(__name__)


def constructor(init: Callable[..., None]) -> Callable[..., Any]:
    """Return the `__new__` of a class of trainers whose `__init__` is `init`: it makes them by `in_swarm`."""

    @functools.wraps(init)
    def new(cls: type, *_: Any, **__: Any) -> Any:
        return object.__new__(in_swarm(cls))

    return new


@functools.cache
def in_swarm(cls: type) -> type:
    """Return the class of the trainers that a call of `cls` makes: its subclass, under the same name.

    The mixin comes first, where it takes its keywords, unless `cls` has it in another place. `SwarmSetup`
    comes directly in front of `Trainer`.
    """
    if issubclass(cls, SwarmSetup):
        return cls
    mixin = () if issubclass(cls, SwarmTrainerMixin) else (SwarmTrainerMixin,)
    own = () if cls is Trainer else (cls,)
    names = {"__module__": cls.__module__, "called_class": cls}
    return type(cls.__name__, (*mixin, *own, SwarmSetup), names)


class SwarmSetup(Trainer):
    """Prepares a trainer for its swarm when `Trainer.__init__` is called, with the arguments of that call.

    A subclass may have arguments of its own, and may make those of `Trainer` itself.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(Trainer.__init__).bind(self, *args, **kwargs).arguments
        del arguments["self"]
        given = arguments.get("args")
        self.swarm_config = config_of(given, self.swarm_config)
        if self.swarm_config is None:
            super().__init__(**arguments)
            self.__class__ = self.called_class  # it is as its user made it, and can be pickled
            return
        if given is None:
            raise RecipeError("A swarm needs `args`.", hint="args=SwarmTrainingArguments(max_steps=..., ...)")
        self.require_usable(given, arguments)
        self._batches = Batches(self, given.per_device_train_batch_size, self._events)
        own = without_config(given)
        own.auto_find_batch_size = False  # `Batches` divides what does not fit, without starting over
        super().__init__(**arguments | {"args": own})
        self._given_optimizer = GivenOptimizer(self.optimizer, self.lr_scheduler)
        self.accelerator.backward = partial(self._batches.backward, self.accelerator.backward)
        if self._launch is not None:  # the live view has their figures
            self.pop_callback(PrinterCallback)
            self.pop_callback(DEFAULT_PROGRESS_CALLBACK)
        # Printed rows have the swarm's figures; a progress bar has no room for them.
        elif not is_in_notebook() and self.pop_callback(DEFAULT_PROGRESS_CALLBACK) is not None:
            self.add_callback(PrinterCallback)


class SwarmTrainerMixin(TrainerHost):
    """Adds training with a swarm to any `Trainer`: `class SwarmSFTTrainer(SwarmTrainerMixin, SFTTrainer)`.

    Without `hivemind_config` (here or in the arguments), the trainer behaves exactly as without the mixin.

    `state.global_step` and `state.max_steps` count steps of the swarm, and `state.epoch` counts the swarm's
    passes over the data. Callbacks get `on_step_end` after a step of the swarm, and `on_substep_end` after a
    local batch without one. `train_samples_per_second` counts this peer's samples. `state.log_history` keeps
    the newest 20,000 entries.

    Args:
        hivemind_config: `{"dht": keywords of hivemind.DHT, "opt": keywords of hivemind.Optimizer}`;
            default: `args.hivemind_config`. `opt` needs `run_id` and `target_batch_size`. In `dht`,
            `initial_peers` may hold invitations, or `@FILE` with one.
        swarm: the recipe's section of that name, or its fields (`{"solo": "never"}`); equal on every peer.
        node: a running node to use instead of starting one; the caller closes it.
        events: receives all events of the run. Default: they are logged.
        should_leave: called after each local step and during waits; True ends training in good order.
            Default: whether Ctrl-C or SIGTERM has arrived while `train` runs.
        reached_step: the step that the swarm is known to have reached; above 0, a fresh start is refused.
        wait_s: longest wait of a run's first step for `swarm.min_peers`; default: an hour.
        budget: the contribution, in one call of `train`, after which this peer leaves.
        given_before: this peer's earlier contribution, which counts in reports but not in the budget.
        has_recipe: the peers have compared a recipe; else they compare their settings.

    Raises:
        RecipeError: an argument can't work in a swarm; the message names it.
    """

    usual_config: ClassVar[dict[str, Any] | None] = None
    """The `hivemind_config` of trainers that are given none; see `enable`."""
    usual_swarm: ClassVar[dict[str, Any] | None] = None
    launch: ClassVar[Launch | None] = None
    """What trainers use beside `usual_config` in a program that `trahiv launch` runs."""
    _of_usual_config: ClassVar[weakref.ref[Any] | None] = None  # the trainer that trains by `usual_config`
    node: Node | None = None
    swarm_callback: SwarmCallback  # of the last call of `train`, like `swarm_optimizer`
    swarm_optimizer: SwarmOptimizer | None = None
    state: TrainerState
    _owns_node = has_entered = False

    def __init__(
        self,
        *args: Any,
        hivemind_config: HivemindConfig | dict[str, Any] | None = None,
        swarm: SwarmSection | dict[str, Any] | None = None,
        node: Node | None = None,
        events: Events | None = None,
        should_leave: Callable[[], bool] | None = None,
        reached_step: int = 0,
        wait_s: float | None = None,
        budget: Budget = ENDLESS_BUDGET,
        given_before: Contribution | None = None,
        has_recipe: bool = False,
        **kwargs: Any,
    ) -> None:
        values = (*args, *kwargs.values())
        given = next((value for value in values if isinstance(value, TrainingArguments)), None)
        if hivemind_config is None:
            hivemind_config = config_of(given, self.usual_config)
        self.swarm_config = hivemind_config
        self._swarm_section = self.usual_swarm if swarm is None else swarm
        self._launch = self.launch if hivemind_config is self.usual_config else None
        if self._launch is not None:
            options = self._launch.options
            budget = options.budget
            wait_s = options.wait_s
            reached_step = options.reached_step
            events = Events()
        self._owns_node = node is None
        self.node = node
        self._events = events or Events(log_event)
        self._has_recipe = has_recipe
        self._leaving = Leaving()
        self._handles_signals = should_leave is None
        self._should_leave = should_leave or (lambda: self._leaving())
        self._reached_step = reached_step
        self._budget = budget
        self._given_before = given_before or Contribution()
        self._wait_s = 3600.0 if wait_s is None else wait_s
        if hivemind_config is not None:
            if given is not None:  # before a subclass prepares its data
                self.require_usable(given, kwargs)
            # TRL copies all fields into its own config, which lacks ours.
            args = tuple(map(without_config, args))
            kwargs = {name: without_config(value) for name, value in kwargs.items()}
        super().__init__(*args, **kwargs)

    @classmethod
    def set_usual(
        cls, config: dict[str, Any] | None, swarm: dict[str, Any] | None, launch: Launch | None = None
    ) -> None:
        """Set what trainers use that are given no `hivemind_config` or `swarm`; see `enable` and `Launch`."""
        cls.usual_config = config
        cls.usual_swarm = swarm
        cls.launch = launch

    def require_usable(self, args: TrainingArguments, keywords: Mapping[str, Any]) -> None:
        """Read the swarm's settings; raise `RecipeError` if a swarm can't use them or this trainer."""
        require_swarmable(args, keywords)
        require_no_replaced(type(self), SwarmTrainerMixin)
        self.swarm_settings = SwarmSettings.read(self.swarm_config, self._swarm_section)
        self._samples_per_step = self.swarm_settings.samples_per_step(args)

    __new__ = constructor(__init__)

    # -- the life of a run ---------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train with the swarm until its `max_steps`.

        Resuming needs no argument: the trainer takes the state of peers that are ahead, else the newest
        checkpoint in `output_dir/checkpoints`. In the main thread, the first Ctrl-C (or SIGTERM) saves a
        checkpoint and notifies the other peers; the second one skips the checkpoint. Then the signal has its
        usual effect.

        Raises:
            KeyboardInterrupt: after Ctrl-C. No process is left, and `train` may be called again.
            RecipeError: also if `resume_from_checkpoint` names a checkpoint.
            FolderTaken: another trainer, or a `trahiv` command, trains in `output_dir`.
            RecipeError, SetupError, AssetError: see `plan_run`; no node was started.
            Unreachable, SetupError, NotAdmitted, RoundFailed, RecipeMismatch: see `Node` and `enter`.
        """
        if self.swarm_config is None:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        train = partial(self._train_in_swarm, **kwargs)
        # A launched program may name one that it found in `output_dir`; the swarm's is as new or newer.
        if self._launch is None and resume_from_checkpoint not in (None, False, True):
            raise RecipeError(
                "In a swarm, `resume_from_checkpoint` can't name a checkpoint.",
                hint="leave it out: a run resumes from its peers, or from output_dir/checkpoints",
            )

        if self._launch is not None:
            return self._launch.train(self, self._events, train)

        def interrupt() -> None:  # raise instead of ending the process, which may be a notebook's kernel
            raise KeyboardInterrupt

        result = None
        self._leaving = Leaving(at_once=interrupt)
        handles_signals = self._handles_signals and threading.current_thread() is threading.main_thread()
        with (
            self._leaving.installed() if handles_signals else contextlib.nullcontext(),
            contextlib.suppress(Left),
        ):
            result = train()
        received = self._leaving.signal
        self._leaving = Leaving()  # so that the next evaluation does not end early
        if received is not None:
            signal.raise_signal(received)
        return result

    def _train_in_swarm(self, **kwargs: Any) -> Any:
        """Start the node, train, and always close; raises `Left` if a signal came before it trained."""
        self.swarm_optimizer = None  # of an earlier call, whose processes have ended
        self.has_entered = False
        self.plan_run()
        folder = Path(self.args.output_dir)
        events = self._events
        leaving = self._leaving
        with contextlib.ExitStack() as stack:
            if self._owns_node:  # else the caller owns the folder, too
                stack.enter_context(owned(folder))
                stack.enter_context(recorded(folder, events))
            stack.enter_context(contextlib.closing(self))
            if self._owns_node:
                with leaving.interruptible():
                    options = self._launch.options if self._launch else PeerOptions()
                    self.node = started(self.swarm_settings, folder, options)
                    self._given_before = stack.enter_context(announced(self, self.node, events, leaving))
            stack.enter_context(leaving_a_checkpoint(self, events))
            with temporarily(self, model_init=None):  # `plan_run` has made the model
                result = super().train(**kwargs)
            optimizer = self.swarm_optimizer
            assert optimizer is not None
            if optimizer.local_epoch >= optimizer.max_steps:
                # Another peer may take hours to download the state from this one.
                optimizer.catch_up.wait_for_stragglers(60.0, 4 * 3600.0)
            is_due = self._should_leave() or self.swarm_callback.has_spent_budget
            is_callers = is_due and self._launch is None  # the caller saves, but no program does
            if optimizer.local_epoch < optimizer.max_steps and (leaving() or not is_callers):
                self.swarm_callback.save_checkpoint()
                self.callback_handler.on_save(self.args, self.state, self.control)
                self.callback_handler.report_saved(self.args, self.state, self.control)
                path = self.swarm_callback.checkpoints.finish()
                what = f"`train()` resumes from the checkpoint {path}."
                if path is None:
                    what = f"No checkpoint could be written to {folder / CHECKPOINTS}."
                logger.warning("Stopped at step %d. %s", optimizer.local_epoch, what)
        if self.args.load_best_model_at_end and not leaving():
            self._load_best(optimizer)
        return result

    def _load_best(self, optimizer: SwarmOptimizer) -> None:
        """Put the weights with the best score into the model, after training, and log which they are."""
        found = optimizer.load_best()
        if found is None:
            logger.warning("The model has the last weights: the peers agreed on no evaluation.")
            return
        step, score = found
        self.state = replace(self.state, best_global_step=step, best_metric=score)
        name = score_name(self.args)
        logger.warning("The model has the weights of step %d, with the best %s: %.6g.", step, name, score)

    def leave_by(self, leaving: Leaving) -> None:
        """Leave when `leaving` says so."""
        self._leaving = leaving

    def plan_run(self) -> None:
        """Decide the run's end, divide the data and make the inner optimizer, before a node is started.

        Raises `RecipeError`, `AssetError` or `SetupError` if this trainer can't train in a swarm.
        """
        if self.swarm_config is self.usual_config:
            if self._of_usual_config is not None and self._of_usual_config() is not self:
                raise RecipeError(
                    f"Another trainer of this program trains in the run {self.swarm_settings.opt.run_id}; "
                    "a run has one training.",
                    hint='give this one a run of its own: hivemind_config={"opt": {"run_id": "...", ...}}',
                )
            SwarmTrainerMixin._of_usual_config = weakref.ref(self)
        if self.model_init is not None:  # as `Trainer.train` does
            seed = self.args.seed
            enable_full_determinism(seed) if self.args.full_determinism else set_seed(seed)
            self.model = self.model_wrapped = self.call_model_init().to(self.args.device)
        put_in_swarm(self)
        require_no_replaced(type(self), SwarmTrainerMixin)  # again, for methods that were assigned meanwhile
        self.divide_data()
        samples = self.samples_per_pass
        self._max_steps = self.swarm_settings.max_steps(self.args, samples)
        target = self.swarm_settings.opt.target_batch_size
        self._steps_per_pass = self._max_steps if samples is None else -(-samples // target)
        self.make_inner_optimizer()

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload the model, its tokenizer and a model card.

        In a swarm they are written to a temporary folder, because `output_dir` holds this peer's keys.
        """
        if self.swarm_config is None:
            return super().push_to_hub(*args, **kwargs)
        files = tempfile.TemporaryDirectory()
        named = Path(files.name, Path(self.args.output_dir).absolute().name)  # a repository's usual name
        with temporarily(self.args, output_dir=str(named)):
            pushed = super().push_to_hub(*args, **kwargs)
        if isinstance(pushed, Future):
            pushed.add_done_callback(lambda _: files.cleanup())
        else:
            files.cleanup()
        return pushed

    def close(self) -> None:
        """Leave the swarm and end its processes here, even if leaving is interrupted. Safe to call twice."""
        try:
            if self.swarm_optimizer is not None:
                self.swarm_optimizer.shutdown()
        finally:
            if self._owns_node and self.node is not None:
                node = self.node
                self.node = None
                node.close()

    @property
    def plain_model(self) -> torch.nn.Module:
        """The model without wrappers, also of compilation: its weights have the same names on all peers."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)


class SwarmTrainer(SwarmTrainerMixin, Trainer):
    """Drop-in for `transformers.Trainer` that trains with a swarm when given `hivemind_config`.

    Example::

        args = SwarmTrainingArguments(
            output_dir="outputs",
            max_steps=100,  # steps of the whole swarm
            per_device_train_batch_size=4,
            hivemind_config={
                "dht": {"initial_peers": []},  # on other peers: the line that the first peer logs
                "opt": {"run_id": "spanish", "target_batch_size": 100},  # samples per step over all peers
            },
        )
        SwarmTrainer(model=model, args=args, train_dataset=data, data_collator=collator).train()

    Increase `target_batch_size` if `swarm/round_seconds` in the logs is a large part of the time per step, so
    that rounds are rarer. Increase `load_state_timeout` in `opt` (default: 60 s) if a joiner fails with
    "Nothing of the swarm's state came".
    """


def started(settings: SwarmSettings, folder: Path, options: PeerOptions) -> Node:
    """Start the node of a drop-in; raises the same errors as `Node`."""
    if not settings.opt.verbose and "HIVEMIND_LOGLEVEL" not in os.environ:
        logging.getLogger("hivemind").setLevel(logging.WARNING)
    is_public = options.is_public or settings.swarm.public
    return replace(options, is_public=is_public).node(settings.dht, folder, settings.swarm.relay)


@contextlib.contextmanager
def announced(trainer: Trainer, node: Node, events: Events, leaving: Leaving) -> Iterator[Contribution]:
    """While the block runs, announce a drop-in and publish its status and progress; then emit `done`.

    `trahiv status`, `watch`, `replay` and `report` read its folder, too. A drop-in ignores control requests
    (`run/requests.py`): its program decides when it stops.

    Yields:
        The samples and tokens that this peer gave when it trained in this folder before.
    """
    settings = trainer.swarm_settings
    folder = Path(trainer.args.output_dir)
    max_steps = trainer._max_steps
    saved = saved_in(folder / CHECKPOINTS)
    earlier = contribution_in(folder)
    launch = trainer._launch
    name = launch.options.name if launch else ""
    step = saved[-1].step if saved else 0
    own_status = OwnStatus(settings.opt.run_id, step, max_steps, earlier, name)
    events.add(own_status)
    with contextlib.ExitStack() as stack:
        stack.callback(events.remove, own_status)
        if launch is not None:
            stack.enter_context(launch.heeding(folder, events, leaving))
        stack.enter_context(published(node, launch.run.pack() if launch else None, own_status, events))
        stack.enter_context(reach_reported(node, events))
        file = announce(
            node,
            folder,
            events,
            settings.opt.run_id,
            launch.run.fingerprint if launch else "",
            joined=partial(join_line, folder) if launch else "initial_peers = [{!r}]".format,
            max_steps=max_steps,
            target_batch_size=settings.opt.target_batch_size,
        )
        if launch is None:
            log_how_to_join(node, file)
        with progress_reported(trainer, events):
            yield earlier
    step = trainer.swarm_optimizer.local_epoch
    early = leaving.reason or ("budget" if trainer.swarm_callback.has_spent_budget else "finish")
    reason = "max_steps" if step >= max_steps else early
    path = next((saved.path for saved in saved_in(folder / CHECKPOINTS) if saved.step == step), None)
    if reason != "pause":  # else it starts again
        Ended(reason, step, path).report(events, leaving.resume or None)
