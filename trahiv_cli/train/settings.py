"""What a Trainer in a swarm is told: `hivemind_config`, the recipe's `swarm` section, and its own arguments.

All of it is checked before a model is wrapped or a process started; what cannot work in a swarm is refused
with what to do instead.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
from hivemind.compression import CompressionBase
from pydantic import ValidationError
from transformers import IntervalStrategy, Trainer, TrainingArguments, get_scheduler
from transformers.trainer_utils import SaveStrategy, has_length

from trahiv_cli.errors import RecipeError, SetupError
from trahiv_cli.optim.pace import Pace, RoundRules
from trahiv_cli.recipe.schema import DhtSection, OptSection, Section, SwarmSection

_Section = TypeVar("_Section", bound=Section)

REFUSED_OPTIMIZERS = ("galore", "apollo", "lomo", "schedule_free", "layerwise")
METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
ENDLESS = 2**31 - 1
"""Local steps that the Trainer plans for: the swarm decides when the run ends."""


@dataclass
class SwarmTrainingArguments(TrainingArguments):
    """`TrainingArguments` that also carry `hivemind_config={"dht": {...}, "opt": {...}}`.

    With it, `max_steps` and all other steps (warm-up, logging, ...) are steps of the whole swarm.
    """

    hivemind_config: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Keywords of hivemind.DHT under `dht`, of hivemind.Optimizer under `opt`."},
    )


@dataclass(frozen=True)
class SwarmSettings:
    """What a trainer is told of its swarm, checked."""

    options: dict[str, Any]
    """`hivemind_config.opt`, with defaults; compressions by name or as hivemind's objects."""

    dht: DhtSection  # without `initial_peers`
    initial_peers: tuple[str, ...]  # multiaddrs, invitations, or `@FILE` with some of them
    swarm: SwarmSection
    run_id: str  # the run's name in the DHT
    target: int  # samples in a step of the swarm

    @classmethod
    def read(cls, config: Mapping[str, Any], swarm: SwarmSection | dict[str, Any] | None) -> Self:
        """Check `hivemind_config`, and the recipe's `swarm` section or its fields; or raise `RecipeError`."""
        dht, opt = (dict(config.get(name) or {}) for name in ("dht", "opt"))
        options, peers = OptSection().model_dump() | opt, dht.pop("initial_peers", None) or ()
        section = swarm if isinstance(swarm, SwarmSection) else _checked(SwarmSection, "swarm", swarm or {})
        said = {name: options[name] for name in OptSection.model_fields}
        said = {name: value for name, value in said.items() if not isinstance(value, CompressionBase)}
        _checked(OptSection, "hivemind_config.opt", said)
        if options["run_id"] is None:
            raise RecipeError(
                "hivemind_config.opt.run_id is missing: peers find each other by it.",
                hint='hivemind_config={"opt": {"run_id": "my_run", "target_batch_size": 256}}',
            )
        return cls(
            options,
            _checked(DhtSection, "hivemind_config.dht", dht),
            (peers,) if isinstance(peers, str) else tuple(map(str, peers)),
            section,
            str(options["run_id"]),
            int(options["target_batch_size"]),
        )

    def round_keywords(self) -> dict[str, Any]:
        """Return how rounds are judged, and what they average how often, as `build_optimizer` takes it."""
        swarm, is_auto = self.swarm, self.swarm.mode == "auto"
        said = swarm.model_dump(include={"local_steps", "fragments", "outer_learning_rate", "outer_momentum"})
        pace = Pace("sync" if swarm.mode == "auto" else swarm.mode, **said)  # what auto begins with
        rules = RoundRules(swarm.solo_after_s, swarm.norm_limit, swarm.robust_mean)
        return {"rules": rules, "pace": pace, "auto_share": swarm.communication_share if is_auto else None}

    def samples_per_step(self, args: TrainingArguments) -> int:
        """Return the samples of a window of accumulation; raises `RecipeError` if the target is smaller."""
        local = args.per_device_train_batch_size * args.gradient_accumulation_steps
        if local > self.target:
            raise RecipeError(
                f"One local batch is {local} samples but target_batch_size is {self.target}.",
                hint="lower per_device_train_batch_size or gradient_accumulation_steps, or raise the target",
            )
        return int(local)

    def max_steps(self, args: TrainingArguments, dataset: Any) -> int:
        """Return where the run ends, in steps of the swarm; raises `RecipeError` if nothing says that."""
        if args.max_steps > 0:
            return int(args.max_steps)
        if not has_length(dataset):
            raise RecipeError("A dataset without a length needs `max_steps`.", hint="max_steps=1000")
        return max(1, math.ceil(args.num_train_epochs * len(dataset) / self.target))


def _checked(section: type[_Section], path: str, values: Mapping[str, Any]) -> _Section:
    """Check the section at `path` as a recipe's would be."""
    plain = {key: list(map(str, v)) if isinstance(v, (list, tuple)) else v for key, v in values.items()}
    try:
        return section.model_validate({key: value for key, value in plain.items() if value is not None})
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, (path, *one['loc'])))}: {one['msg']}" for one in error.errors()]
        raise RecipeError("; ".join(wrong), hint="see `trahiv schema` for what may be said") from error


def require_swarmable(args: TrainingArguments, kwargs: Mapping[str, Any]) -> None:
    """Raise `RecipeError` if a swarm can't do what the Trainer is told."""
    problems: Sequence[tuple[Any, str, str]] = (
        (args.device.type not in ("cpu", "cuda"), f"a device of type {args.device.type}", "use_cpu=True"),
        (args.n_gpu > 1, "several GPUs in one process", "one peer per GPU: CUDA_VISIBLE_DEVICES=0 ..."),
        (args.auto_find_batch_size, "auto_find_batch_size", "set per_device_train_batch_size"),
        (kwargs.get("model_init"), "model_init", "pass the model itself"),
        (args.fsdp or args.deepspeed, "FSDP or DeepSpeed", "one peer per GPU without them"),
        (args.push_to_hub, "push_to_hub of output_dir, which holds keys,", "trainer.model.push_to_hub(...)"),
        (args.load_best_model_at_end, "load_best_model_at_end", "choose among the checkpoints afterwards"),
        (any(kwargs.get("optimizers") or ()), "optimizers=...", "name it with `optim`"),
        (kwargs.get("optimizer_cls_and_kwargs"), "optimizer_cls_and_kwargs", "name it with `optim`"),
        (args.lr_scheduler_type in METRIC_SCHEDULES, "a schedule that looks at metrics", "cosine"),
    )
    for wrong, what, instead in problems:
        if wrong:
            raise RecipeError(f"In a swarm, {what} can't be used.", hint=f"instead: {instead}")


def local_arguments(args: TrainingArguments) -> TrainingArguments:
    """Copy the arguments for a Trainer that runs local steps without end and leaves the rest to the swarm."""
    local = copy.copy(args)
    if type(local) is SwarmTrainingArguments:  # TRL makes its own config of all fields, and knows not ours
        local.__class__ = TrainingArguments
        del local.hivemind_config
    elif isinstance(local, SwarmTrainingArguments):
        local.hivemind_config = None  # trackers keep the arguments, and an invitation may be in it
    local.max_steps = ENDLESS
    local.max_grad_norm = 0.0  # the averaged gradient is clipped, not each batch's
    local.dataloader_drop_last = False  # but see `SwarmTrainerMixin.get_train_dataloader`
    local.ignore_data_skip = True  # in a swarm there is no order of batches to replay
    local.logging_strategy = local.eval_strategy = IntervalStrategy.NO
    local.save_strategy = SaveStrategy.NO
    local.warmup_steps = 0
    return local


def by_name(trainer: type, mixin: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name positional arguments as the trainer that is mixed into does (`DPOTrainer` has its own order)."""
    after = trainer.__mro__[trainer.__mro__.index(mixin) + 1 :]
    signatures = (inspect.signature(cls.__init__) for cls in after)  # type: ignore[misc]
    named = next(
        one
        for one in signatures
        if "args" in one.parameters and one.parameters["args"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
    given = named.bind_partial(None, *args).arguments
    del given["self"]
    return dict(**given, **kwargs)


def training_keywords(
    trainer: Trainer, args: TrainingArguments, model: torch.nn.Module, max_steps: int
) -> dict[str, Any]:
    """Return what the arguments say of the optimizer and its schedule, as `build_optimizer` takes it.

    Trainable parameters are grouped as the Trainer does: those that decay apart from the others. Raises
    `RecipeError` for an optimizer that can't be used in a swarm, and what `registered` does.
    """
    name, (cls, keywords) = str(getattr(args.optim, "value", args.optim)), registered(args, model, trainer)
    if (
        any(word in name for word in REFUSED_OPTIMIZERS)
        or {"params", "model", "optimizer_dict"} & keywords.keys()
        or not issubclass(cls, torch.optim.Optimizer)
    ):
        raise RecipeError(
            f"optim={name} can't be used in a swarm: it updates weights outside of `optimizer.step()`.",
            hint="adamw_torch, adafactor, sgd and others that step once can",
        )
    if keywords.get("optim_bits") == 8:  # as in the Trainer's own `create_optimizer`
        from bitsandbytes.optim import GlobalOptimManager

        manager = GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})

    def schedule(inner: torch.optim.Optimizer) -> Any:
        warmup, more = args.get_warmup_steps(max_steps), args.lr_scheduler_kwargs
        kind = args.lr_scheduler_type
        return get_scheduler(kind, inner, warmup, max_steps, scheduler_specific_kwargs=more)

    names = set(trainer.get_decay_parameter_names(model))
    decaying: dict[str, Any] = {"params": [], "weight_decay": args.weight_decay}
    others: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for path, param in model.named_parameters():
        if param.requires_grad:
            (decaying if path in names else others)["params"].append(param)
    how = {"optimizer": lambda groups: cls(groups, **keywords), "scheduler": schedule}
    limits = {"max_grad_norm": args.max_grad_norm or 0.0, "max_steps": max_steps}
    return {"params": [group for group in (decaying, others) if group["params"]], **how, **limits}


def registered(
    args: TrainingArguments, model: Any = None, trainer: type[Trainer] | Trainer = Trainer
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and keywords of `args.optim`; raises `SetupError` if its package is not installed."""
    try:
        return trainer.get_optimizer_cls_and_kwargs(args, model)
    except ImportError as error:
        name = str(getattr(args.optim, "value", args.optim))
        raise SetupError(
            f"optim={name} needs a package that is not installed here; nothing was trained.",
            hint="pip install torch-optimi" if name == "stable_adamw" else str(error),
        ) from error
