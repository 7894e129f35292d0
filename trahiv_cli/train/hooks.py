"""The hooks of a Trainer in a swarm: one class in front of all others.

`InSwarm` comes first in the method resolution order of a trainer that trains with a swarm. Its `super()`
reaches the user's own methods, wherever they are defined or assigned, and finally the methods of `Trainer`.

1. `create_optimizer` enters the swarm (`entry.py`) with an optimizer that wraps the one from `super()`.
2. The Trainer runs local batches without an end. `training_step` computes each of them for the swarm's
   optimizer (`batches.py`), which decides when the whole swarm takes a step.
3. `SwarmCallback` notices and reports the step, and `SwarmEvents` calls the user's callbacks
   (`callbacks.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers import Trainer
from transformers.trainer_utils import HubStrategy, has_length

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.forms import require_a_batch
from trahiv_cli.run.folder import CHECKPOINTS
from trahiv_cli.run.leaving import Left
from trahiv_cli.step.build import build_optimizer
from trahiv_cli.step.optimizer import SwarmOptimizer
from trahiv_cli.train.callbacks import SwarmCallback, SwarmEvents
from trahiv_cli.train.checkpoint import Checkpoint, Checkpoints, derive_peer_seed, set_random_states
from trahiv_cli.train.compared import compared_by
from trahiv_cli.train.comparison import FROZEN, TOKENIZER, Comparison
from trahiv_cli.train.division import (
    Divided,
    DividedPrompts,
    DividedSampler,
    DividedStream,
    divide,
    samples_of_a_prompt,
)
from trahiv_cli.train.entry import enter
from trahiv_cli.train.inner import (
    SCORED,
    change_to_float32,
    copied,
    described,
    move,
    require_schedule,
    require_steppable,
)
from trahiv_cli.train.settings import naming_packages, score_name, temporarily

INSTEAD = {
    "train": "define it in a class below the mixin: `class T(SwarmTrainerMixin, Yours)`",
    "_clip_grad_norm": "`max_grad_norm` clips the average of all peers' gradients",
    "_get_grad_norm": "logs have the norm of the average of all peers' gradients",
    "_save_checkpoint": "`on_save` of a callback, which is called after each of the swarm's own checkpoints",
}
"""Maps each method that a swarm replaces to the hint for a user who overrides it."""

# At run time, the classes below stand in front of another Trainer, which has all that they use of `self`.
TrainerHost: Any = object


def definer(trainer: type, name: str) -> type:
    """Return the class whose method `name` the trainer calls: `Trainer` itself if no class overrides it."""
    return next(cls for cls in trainer.__mro__ if cls is not InSwarm and name in vars(cls))


def is_permutation(order: Any) -> bool:
    """Tell whether a sampler draws each sample once in a pass, in random order."""
    is_random = type(order) is RandomSampler and not order.replacement
    return is_random and order.num_samples == len(order.data_source)


def require_no_replaced(trainer: type, mixin: Any) -> None:
    """Raise `RecipeError` if the trainer's class overrides a method that a swarm replaces.

    The overrides in transformers and TRL only add a model card to a checkpoint. A launched program can't be
    changed: its checkpoints are written beside the swarm's.
    """
    for name, instead in INSTEAD.items():
        by = definer(trainer, name)
        if name == "_save_checkpoint" and mixin.launch is not None:
            continue
        if by is not mixin and by.__module__.partition(".")[0] not in ("transformers", "trl"):
            raise RecipeError(
                f"In a swarm, `{by.__name__}.{name}` can't be used.", hint=f"instead: {instead}"
            )


def put_in_swarm(trainer: Any) -> None:
    """Put `InSwarm` in front of the trainer's class, and of methods that were assigned to the trainer itself.

    Call it again to include methods that were assigned since the last call.
    """
    names = vars(trainer).keys() & (vars(InSwarm).keys() | INSTEAD.keys())
    own = {name: staticmethod(vars(trainer)[name]) for name in names}
    for name in own:
        delattr(trainer, name)
    below = next(cls for cls in type(trainer).__mro__ if not issubclass(cls, InSwarm))
    if own:
        below = type(below.__name__, (below,), own)
    trainer.__class__ = type(below.__name__, (InSwarm, below), {"__module__": below.__module__})


class InSwarm(TrainerHost):
    """Overrides methods of the Trainer's loop; `put_in_swarm` adds it to a trainer's class permanently."""

    callback_handler: Any
    control: Any
    swarm_callback: SwarmCallback
    swarm_optimizer: SwarmOptimizer | None
    samples_per_pass: int | None = None
    """Samples that a pass over the data trains, of which a prompt has several; None: it has no length."""
    _divided: Divided | None = None
    _resumes_from: Checkpoint | None = None
    _pushed: Future[Any] | None = None  # the last upload of a model during training
    _batches_stepped = 0  # local optimizer steps, as the Trainer counts them
    _are_inputs_prepared = False  # whether the present batch needs no `_prepare_inputs` any more
    is_evaluating = False
    """Whether an evaluation runs, which ends early if this peer should leave."""

    # -- data ----------------------------------------------------------------------------------------

    @property
    def divides_data(self) -> bool:
        """Whether peers divide the data, so that a batch has `per_device_train_batch_size` samples."""
        return self._divided is not None

    def divide_data(self) -> None:
        """Divide the data between peers, unless the user turned that off or overrides the loader or sampler.

        It is called before a node is started. Raises `AssetError` if the data does not fill one local batch.
        """
        hooks = ("get_train_dataloader", "_get_train_sampler")
        own = [f"{by.__name__}.{hook}" for hook in hooks if (by := definer(type(self), hook)) is not Trainer]
        samples = self.train_dataset
        self._divided = None
        order = self._own_order() if own else None
        prompts = order if type(order).__name__ == "RepeatSampler" else None
        strategy = self.args.train_sampling_strategy
        is_random = is_permutation(order)
        if is_random or type(order) is SequentialSampler:
            own = []  # peers can divide it, as the Trainer's own order
            strategy = "random" if is_random else "sequential"
        self.samples_per_pass = None
        if has_length(samples):
            self.samples_per_pass = len(samples)
            # With fewer samples, the Trainer would end at once without an error.
            if prompts is not None:
                require_a_batch(len(samples), prompts.batch_size)
                self.samples_per_pass *= samples_of_a_prompt(prompts, self.args.per_device_train_batch_size)
            elif not own:
                require_a_batch(len(samples), self._samples_per_step)
        self._undivided_for = ""
        if not self.swarm_settings.swarm.divide_data:
            return
        if own and prompts is None:
            self._undivided_for = ", ".join(own)
            return
        self._divided = divide(samples, self.args, strategy, self._should_leave, prompts)
        if self._divided is None and has_length(samples):
            self._undivided_for = strategy
        elif self._divided is None:
            self._undivided_for = "a stream of one shard, or with workers"

    def _own_order(self) -> Any:
        """Return the sampler of a subclass whose loader is that of the Trainer or of TRL; else None."""
        loader = definer(type(self), "get_train_dataloader")
        is_known = loader.__module__.partition(".")[0] in ("transformers", "trl")
        if not is_known or not has_length(self.train_dataset):
            return None
        return self._get_train_sampler(self.train_dataset)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of this peer's data, seeded for this peer; without a node, the Trainer's own."""
        if self.node is None:
            self._divided = None
            return super().get_train_dataloader()
        args = self.args
        # The seed sets the order of the data, and dropout. It is the same after a restart.
        seed = derive_peer_seed(args.seed if args.data_seed is None else args.data_seed, self.node.peer_id)
        self.accelerator.dataloader_config.data_seed = seed
        torch.manual_seed(seed)
        samples = self._divided if isinstance(self._divided, DividedStream) else self.train_dataset
        # `weigh` can't count the samples of every kind of batch, so each batch must be full: an incomplete
        # batch at the end of a pass is dropped. Evaluations drop nothing. An own loader may draw its order
        # from the seed of data, which must be unlike the other peers' then.
        changes = {"dataloader_drop_last": True, "data_seed": seed}
        with temporarily(args, **changes), temporarily(self, train_dataset=samples):
            loader = super().get_train_dataloader()
        # Each iterator draws a seed for its workers. With a generator of its own, it does not change dropout.
        inner = getattr(loader, "base_dataloader", loader)  # accelerate wraps some loaders
        if isinstance(inner, DataLoader):
            inner.generator = torch.Generator().manual_seed(seed)
            if inner.num_workers and not inner.timeout:
                inner.timeout = 600  # seconds without data, after which a worker counts as hung
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        # Private, but TRL's trainers override it, too: only here does the Trainer ask for an order.
        is_order = isinstance(self._divided, DividedSampler | DividedPrompts)
        return self._divided if is_order else super()._get_train_sampler(train_dataset)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch the batches of one window of accumulation; if the data has ended, begin the next pass."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        if not batches:
            self.control.should_epoch_stop = True  # else the Trainer would fetch endlessly from it
        return batches, num_items

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Plan endless local batches, and return the swarm's steps for progress reports."""
        with temporarily(args, max_steps=2**31 - 1):  # the swarm decides when the run ends
            values = super().set_initial_training_values(args, dataloader)
        passes, updates, samples, _, batch_size, batches, _ = values
        planned = self._max_steps * batch_size
        return passes, updates, samples, planned, batch_size, batches, self._max_steps

    # -- the optimizer -------------------------------------------------------------------------------

    def make_inner_optimizer(self) -> None:
        """Make the optimizer and the schedule that the swarm's optimizer will step, by `super()`'s methods.

        It is called before a node is started. Raises `RecipeError` if a swarm can't use them, and
        `SetupError` if their package is not installed.
        """
        change_to_float32(self.plain_model)
        self.optimizer, self.lr_scheduler = self._given_optimizer.as_given()
        with naming_packages(self.args):
            super().create_optimizer()
            require_steppable(self.optimizer, self.plain_model)
            super().create_scheduler(num_training_steps=self._max_steps)
            require_schedule(self.lr_scheduler, self.optimizer, self._max_steps)
        self._schedule = self.lr_scheduler  # the Trainer resets its attribute when it trains

    @property
    def is_scored(self) -> bool:
        """Whether the learning rate, or the choice of the weights at the end, follows evaluations."""
        return self.args.load_best_model_at_end or isinstance(self._schedule, SCORED)

    def own_optimizer(self) -> dict[str, Any]:
        """Return the optimizer's settings for peers to compare, unless the arguments determine them."""
        definers = {definer(type(self), hook) for hook in ("create_optimizer", "create_scheduler")}
        is_given = self._given_optimizer or self.optimizer_cls_and_kwargs
        if definers == {Trainer} and not is_given:
            return {}
        return described(self.optimizer, self._schedule, self.plain_model, self._max_steps)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> Any:
        """Build the swarm's optimizer and enter the swarm: with its state, a checkpoint's, or a fresh one."""
        if self.swarm_optimizer is not None:
            return self.optimizer
        args = self.args
        events = self._events
        with events.waiting("the model to be compared with the swarm's", until_s=120):
            own = compared_by(self, self._max_steps, self._divided, has_recipe=self._has_recipe)
        comparison = Comparison(self.node, self.swarm_settings.opt.run_id, own)
        base = {name: own[name] for name in (FROZEN, TOKENIZER) if name in own}
        checkpoints = Checkpoints(Path(args.output_dir) / CHECKPOINTS, args.save_total_limit, events, base)
        newest = checkpoints.newest()
        if newest is not None:
            newest.load_weights(self.plain_model)  # before the optimizer copies the weights, with offload
        optimizer = self._build_optimizer(comparison)
        self.swarm_optimizer = optimizer
        if self._divided is not None:
            self._divided.lease_from(optimizer)
        elif self._undivided_for:
            events.warn(
                "not-divided",
                f"The data is not divided ({self._undivided_for}): each peer goes through all of it.",
                hint="have each peer read it in another order; swarm.divide_data: false silences this",
            )
        entry = enter(
            optimizer,
            checkpoints,
            newest,
            comparison,
            self._reached_step,
            self.swarm_settings.swarm.min_peers,
            self._wait_s,
        )
        if entry.source == "checkpoint":
            self._resumes_from = newest
        self.swarm_callback = SwarmCallback(
            self,
            optimizer,
            checkpoints,
            self._should_leave,
            comparison.publish,
            self._budget,
            self._given_before,
        )
        self.callback_handler = SwarmEvents(self.callback_handler, self.swarm_callback, self._steps_per_pass)
        self.state.num_train_epochs = math.ceil(self._max_steps / self._steps_per_pass)
        self.state.global_step = optimizer.local_epoch
        self._batches_stepped = 0
        self.has_entered = True
        # Let accelerate wrap it without moving the state to the device, and mark it as prepared: the Trainer
        # would wrap it again, and two wrappers would step the gradient scaler twice.
        self.optimizer = self.accelerator.prepare_optimizer(optimizer, device_placement=False)
        self.optimizer._is_accelerate_prepared = True
        return self.optimizer

    def _build_optimizer(self, comparison: Comparison) -> SwarmOptimizer:
        inner = self.optimizer
        optimizer: SwarmOptimizer = build_optimizer(
            self.swarm_settings.opt,
            self.swarm_settings.run_settings(self.args, comparison.schema, self._max_steps),
            dht=self.node.dht,
            home=self.node,
            samples_per_step=self._samples_per_step,
            only_dials=self.node.only_dials(),
            params=copied(inner.param_groups),
            model=self.plain_model,
            optimizer=partial(move, inner),
            scheduler=lambda _: self._schedule,
            events=self._events,
            when_no_group_is_found=lambda: comparison.repeat(optimizer.tracker.others),
            should_leave=self._should_leave,
        )
        return optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Return a placeholder that only reports learning rates; the real scheduler counts swarm steps."""
        swarm = self.swarm_optimizer
        if swarm is None:
            return super().create_scheduler(*args, **kwargs)
        self._created_lr_scheduler = True
        self.lr_scheduler = SimpleNamespace(
            step=lambda *_: None,
            get_last_lr=lambda: swarm.last_learning_rates,
            state_dict=dict,
            load_state_dict=lambda _: None,
        )
        return self.lr_scheduler

    # -- a batch -------------------------------------------------------------------------------------

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run one local batch forward and backward; see `Batches`."""
        assert self.swarm_optimizer is not None
        if self._resumes_from is not None:  # after all random draws that precede the first batch
            set_random_states(self._resumes_from.state.random)
            self._resumes_from = None
        if self._divided is not None:
            self.swarm_optimizer.work.announce(self._divided.next_batch())
        self._batches_stepped += self.accelerator.sync_gradients
        train_one = partial(super().training_step, model)
        if isinstance(inputs, Mapping) or not hasattr(self, "_generate_and_score_completions"):
            return self._batches.train(inputs, num_items_in_batch, train_one)
        # Prompts of TRL: only their completions tell how much the batch weighs.
        model.train()
        rewards = self._metrics["train"]["reward"]
        num_known = len(rewards)
        inputs = self._prepare_inputs(inputs)
        for reward in rewards[num_known:]:
            self.swarm_callback.add_reward(reward)
        with temporarily(self, _are_inputs_prepared=True):
            return self._batches.train(inputs, num_items_in_batch, train_one)

    def _prepare_inputs(self, inputs: Any) -> Any:
        # Private, but TRL's trainers override it, too: there they generate completions.
        return inputs if self._are_inputs_prepared else super()._prepare_inputs(inputs)

    def end_part(self) -> None:
        """Tell the callbacks that the swarm's optimizer has counted a part of a batch."""
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)

    def _clip_grad_norm(self, model: torch.nn.Module) -> None:
        """Do not clip a batch's gradient: the swarm's optimizer clips the average of all peers."""

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> None:
        """Skip the norm of a batch's gradient, which no step uses: it takes 2 % of a small model's time."""

    # -- a step of the swarm -------------------------------------------------------------------------

    def count_swarm_steps(self) -> None:
        """Set the Trainer's state to the swarm's step, after the Trainer has counted a local batch."""
        assert self.swarm_optimizer is not None
        step = self.swarm_optimizer.local_epoch
        # The Trainer logs a mean loss over the batches since the last log. It takes this difference as their
        # number.
        self._globalstep_last_logged += step - self.state.global_step
        self.state.global_step = step
        self.state.epoch = step / self._steps_per_pass

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log under the swarm's step, which all peers share; add the swarm's figures to a training loss."""
        swarm = self.swarm_optimizer
        if swarm is None:
            return super().log(logs, *args, **kwargs)
        self.state.global_step = swarm.local_epoch
        if "loss" in logs or "train_loss" in logs:
            self.swarm_callback.complete(logs)
        if logs.get("train_runtime"):  # the Trainer counted local steps
            steps = swarm.local_epoch - self.swarm_callback.began_at_step
            logs["train_steps_per_second"] = round(steps / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)
        del self.state.log_history[:-20_000]  # about 1 kB each, and a run may take weeks

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the weights that all peers agree on; return no metrics if this peer should leave."""
        evaluate = partial(super().evaluate, *args, **kwargs)
        if self.swarm_optimizer is None:
            return evaluate()

        def evaluate_alike() -> Any:
            torch.default_generator.manual_seed(self.args.seed)  # `mlm` hides the same tokens each time
            return evaluate()

        agreed = self.swarm_optimizer.agreed_weights()
        with temporarily(self, is_evaluating=True), agreed, torch.random.fork_rng([]):
            with contextlib.suppress(Left):
                return self._batches.evaluate(evaluate_alike)
        return {}

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # Private. The Trainer looks for its metric even after an evaluation that ended early.
        is_new_best = bool(metrics) and super()._determine_best_metric(metrics=metrics, trial=trial)
        if self.is_scored and self.swarm_optimizer is not None:
            self.swarm_optimizer.position.note_score(float(metrics.get(score_name(self.args), math.nan)))
        return is_new_best

    def _load_best_model(self) -> None:
        """Leave the last weights in the model: `train` loads the best ones once no peer needs the last."""

    def _save_checkpoint(self, *given: Any) -> None:
        """Begin to write a checkpoint of the swarm's step, in this package's own format.

        A launched program gets the Trainer's own one too, with the model alone: it may look for that.
        """
        self.swarm_callback.save_checkpoint()
        args = self.args
        optimizer = self.swarm_optimizer
        assert optimizer is not None
        if self._launch is not None:
            with optimizer.agreed_weights(), temporarily(args, save_only_model=True, push_to_hub=False):
                super()._save_checkpoint(*given)
        is_due = args.push_to_hub and args.hub_strategy == HubStrategy.EVERY_SAVE
        if is_due and (self._pushed is None or self._pushed.done() or args.hub_always_push):
            said = f"Training in progress, step {optimizer.local_epoch}"
            with optimizer.agreed_weights():
                self._pushed = self.push_to_hub(said, blocking=False)

    def _finalize_training(self, *args: Any) -> Any:
        # The Trainer divides the sum of the losses by its steps, so these must be this peer's batches.
        self.state.global_step = self._batches_stepped
        self._initial_global_step = 0
        return super()._finalize_training(*args)
