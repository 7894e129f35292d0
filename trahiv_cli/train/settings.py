"""Settings of a Trainer in a swarm: `hivemind_config`, the recipe's section `swarm`, and its own arguments.

All of them are checked before a model is wrapped or a process started. A setting that can't work in a swarm
raises an error with a hint on what to do instead.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar, Self

from pydantic import field_validator
from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from trahiv_cli.errors import RecipeError, SetupError
from trahiv_cli.progress.pace import Pace, RoundRules
from trahiv_cli.progress.scores import BestScore
from trahiv_cli.recipe.load import parse_section
from trahiv_cli.recipe.schema import DhtSection, HivemindConfig, OptSection, SwarmSection
from trahiv_cli.step.build import OptKeywords
from trahiv_cli.step.run_settings import RunSettings


@dataclass
class SwarmTrainingArguments(TrainingArguments):
    """`TrainingArguments` with an additional field `hivemind_config={"dht": {...}, "opt": {...}}`.

    With it, `max_steps` and all other steps (warm-up, logging, ...) are steps of the whole swarm.
    """

    is_taking_config: ClassVar[bool] = True  # the Trainer's own class is the one before it
    hivemind_config: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Keywords of hivemind.DHT under `dht`, of hivemind.Optimizer under `opt`."},
    )


class DhtKeywords(DhtSection):
    """`hivemind_config.dht` in Python, where `initial_peers` may hold invitations, or be one of them."""

    initial_peers: list[str] = []

    @field_validator("initial_peers", mode="before")
    @classmethod
    def _may_be_one(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else list(map(str, given))


@dataclass(frozen=True)
class SwarmSettings:
    """A trainer's settings of its swarm, checked. A `SwarmTrainerMixin` creates them once and keeps them."""

    dht: DhtSection
    opt: OptSection  # with a `run_id`
    swarm: SwarmSection

    @classmethod
    def read(
        cls, config: HivemindConfig | Mapping[str, Any], swarm: SwarmSection | Mapping[str, Any] | None
    ) -> Self:
        """Take the sections of a recipe, or check a drop-in's `hivemind_config` and the fields of `swarm`.

        Raises:
            RecipeError: a field is unknown or wrong, or there is no `run_id`.
        """
        if not isinstance(swarm, SwarmSection):
            swarm = parse_section(SwarmSection, "swarm", swarm)
        if not isinstance(config, HivemindConfig):
            config = HivemindConfig(
                opt=parse_section(OptKeywords, "hivemind_config.opt", config.get("opt")),
                dht=parse_section(DhtKeywords, "hivemind_config.dht", config.get("dht")),
            )
        if config.opt.run_id is None:
            raise RecipeError(
                "hivemind_config.opt.run_id is missing: peers find each other by it.",
                hint='hivemind_config={"opt": {"run_id": "my_run", "target_batch_size": 256}}',
            )
        return cls(config.dht, config.opt, swarm)

    def run_settings(self, args: TrainingArguments, schema: bytes, max_steps: int) -> RunSettings:
        """Return the settings of the run for `build_optimizer`; peers of one schema average."""
        swarm = self.swarm
        rules = RoundRules(swarm.solo_after_s, swarm.norm_limit, swarm.robust_mean)
        share = swarm.communication_share if swarm.mode == "auto" else None
        best: BestScore = "highest" if args.greater_is_better else "lowest"
        return RunSettings(
            pace=Pace.of(swarm),
            auto_share=share,
            max_steps=max_steps,
            max_grad_norm=args.max_grad_norm or 0.0,
            keeps_best=best if args.load_best_model_at_end else None,
            schema=schema,
            rules=rules,
        )

    def samples_per_step(self, args: TrainingArguments) -> int:
        """Return the samples in a window of accumulation; raises `RecipeError` if the target is smaller."""
        local = args.per_device_train_batch_size * args.gradient_accumulation_steps
        if local > self.opt.target_batch_size:
            raise RecipeError(
                f"One local batch is {local} samples but target_batch_size is {self.opt.target_batch_size}.",
                hint="lower per_device_train_batch_size or gradient_accumulation_steps, or raise the target",
            )
        return int(local)

    def max_steps(self, args: TrainingArguments, samples_per_pass: int | None) -> int:
        """Return the run's length in steps of the swarm; raises `RecipeError` if it can't be determined."""
        if args.max_steps > 0:
            return int(args.max_steps)
        if samples_per_pass is None:
            raise RecipeError("A dataset without a length needs `max_steps`.", hint="max_steps=1000")
        return max(1, math.ceil(args.num_train_epochs * samples_per_pass / self.opt.target_batch_size))


def require_swarmable(args: TrainingArguments, kwargs: Mapping[str, Any]) -> None:
    """Raise `RecipeError` if a swarm can't support the Trainer's arguments.

    `kwargs` are the trainer's other keywords. tests/unit/train/test_arguments.py covers each field.
    """
    optim = str(getattr(args.optim, "value", args.optim))
    # Parts of the names of optimizers that update weights outside of `optimizer.step()`.
    steps_itself = any(word in optim for word in ("galore", "apollo", "lomo", "schedule_free", "layerwise"))
    strategies = (args.logging_strategy, args.eval_strategy, args.save_strategy)
    has_passes = "epoch" not in strategies or has_length(kwargs.get("train_dataset"))
    optimizer, _ = kwargs.get("optimizers") or (None, None)
    per_gpu = "one peer for each GPU: CUDA_VISIBLE_DEVICES=0 python ..., CUDA_VISIBLE_DEVICES=1 python ..."
    problems: Sequence[tuple[Any, str, str]] = (
        (args.device.type not in ("cpu", "cuda"), f"a device of type {args.device.type}", "use_cpu=True"),
        (args.n_gpu > 1, "several GPUs in one process", per_gpu),
        (args.world_size > 1, "torchrun or accelerate with several processes", per_gpu),
        (
            args.fsdp or args.deepspeed or args.parallelism_config,
            "FSDP, DeepSpeed or parallelism_config",
            per_gpu,
        ),
        (
            args.push_to_hub and "checkpoint" in args.hub_strategy,
            f"hub_strategy={args.hub_strategy.value}",
            "every_save, or end",
        ),
        (args.enable_jit_checkpoint, "enable_jit_checkpoint", "leave it out: SIGTERM saves a checkpoint"),
        (args.restore_callback_states_from_checkpoint, "restore_callback_states_from_checkpoint", "omit it"),
        (not args.dataloader_in_order, "dataloader_in_order=False", "set it to True"),
        (not has_passes, "a strategy by epoch of data without a length", "a strategy by steps"),
        (steps_itself, f"optim={optim}", "adamw_torch, adafactor, sgd"),
        (optimizer is not None and optimizer.state, "an optimizer that has taken steps", "a new one"),
    )
    for wrong, what, instead in problems:
        if wrong:
            raise RecipeError(f"In a swarm, {what} can't be used.", hint=instead)


def score_name(args: TrainingArguments) -> str:
    """Return the metric by which peers judge weights, as evaluations name it."""
    return "eval_" + str(args.metric_for_best_model or "loss").removeprefix("eval_")


def config_of(args: TrainingArguments | None, default: Any) -> Any:
    """Return the `hivemind_config` of a Trainer's arguments; `default` if they have none."""
    config = getattr(args, "hivemind_config", None)
    return default if config is None else config


def without_config(given: Any) -> Any:
    """Copy the Trainer's arguments without `hivemind_config`; return anything else as it is.

    Trackers store the arguments, and the config may hold an invitation.
    """
    if not isinstance(given, TrainingArguments):
        return given
    plain: Any = copy.copy(given)
    if vars(type(plain)).get("is_taking_config"):
        plain.__class__ = type(plain).__base__
        del plain.hivemind_config
    elif hasattr(plain, "hivemind_config"):
        plain.hivemind_config = None
    return plain


@functools.cache
def taking_config(cls: type[TrainingArguments]) -> type[TrainingArguments]:
    """Return a subclass of a class of arguments, under its name, whose calls also take `hivemind_config`."""
    if hasattr(cls, "hivemind_config"):
        return cls

    def init(self: Any, *args: Any, hivemind_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        if hivemind_config is None:
            self.__class__ = cls  # only this one can be pickled, as the Trainer does with its arguments
        else:
            self.hivemind_config = hivemind_config

    own = {"__init__": init, "__module__": cls.__module__, "is_taking_config": True}
    new = ("hivemind_config", dict[str, Any] | None, field(default=None))
    return make_dataclass(cls.__name__, [new], bases=(cls,), namespace=own, init=False, repr=False, eq=False)


@contextmanager
def temporarily(owner: Any, **values: Any) -> Iterator[None]:
    """While the block runs, give attributes of `owner` these values."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def naming_packages(args: TrainingArguments) -> Iterator[None]:
    """Turn an exception while an optimizer or a schedule is made into a `SetupError` or a `RecipeError`."""
    name = str(getattr(args.optim, "value", args.optim))
    try:
        yield
    except ImportError as error:
        raise SetupError(
            f"optim={name} needs a package that is not installed here; nothing was trained.",
            hint="pip install torch-optimi" if name == "stable_adamw" else str(error),
        ) from error
    except (TypeError, ValueError, ArithmeticError, NotImplementedError) as error:
        raise RecipeError(
            f"The optimizer or its schedule can't be made with these settings: {error}.",
            hint="look at training.optim_args, lr_scheduler_kwargs and the numbers beside them",
        ) from error
