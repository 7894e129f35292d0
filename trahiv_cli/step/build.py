"""Build the optimizer that a peer steps from the options in `hivemind_config.opt`.

Combinations that hivemind accepts but that do harm are refused here, before the optimizer is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import hivemind
import torch
from hivemind import compression
from hivemind.averaging import DecentralizedAverager
from pydantic import ConfigDict, ValidatorFunctionWrapHandler, field_validator

from trahiv_cli.errors import RecipeError
from trahiv_cli.progress.pace import Pace
from trahiv_cli.recipe.schema import OptSection
from trahiv_cli.rounds.codecs import CODECS, EightBitStatistics
from trahiv_cli.state.inner_optimizer import initialize_state
from trahiv_cli.step.auto import START_CODEC
from trahiv_cli.step.optimizer import SwarmOptimizer
from trahiv_cli.step.run_settings import RunSettings

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]

UPSTREAM: dict[type, str] = {
    compression.NoCompression: "none",
    compression.Float16Compression: "float16",
    compression.ScaledFloat16Compression: "float16",
    compression.Uniform8BitQuantization: "uniform8",
    compression.Quantile8BitQuantization: "blockwise8",
    compression.BlockwiseQuantization: "blockwise8",
}
"""Maps hivemind's codecs to the names of the codecs that replace them."""

REFUSED = frozenset(
    "auxiliary average_opt_statistics batch_size_per_step delay_grad_averaging delay_optimizer_step "
    "delta_rule_averaging dht extra_tensors grad_averager_factory optimizer params reuse_grad_buffers "
    "scheduler use_local_updates".split()
)
"""Keywords of `hivemind.Optimizer` that the Trainer or `swarm.mode` sets; most would do harm."""

PLAIN = (bool, int, float, str, type(None))
"""Types of the values beside tensors in an optimizer's state: JSON and MessagePack restore them exactly."""

TRACKER_OPTIONS = {
    "metadata_expiration": 20.0,  # for a peer that died without a goodbye; hivemind's 60 s stall a pair
    "min_refresh_period": 0.25,  # with hivemind's periods, 0.5 to 10 s, fast peers run far past the target
    "max_refresh_period": 3.0,
}
"""Seconds."""


class OptKeywords(OptSection):
    """`hivemind_config.opt` in Python: codecs may be objects, and `hivemind.Optimizer` has more keywords."""

    model_config = ConfigDict(extra="allow")

    @field_validator("grad_compression", "state_averaging_compression", "load_state_compression", mode="wrap")
    @classmethod
    def _may_be_an_object(cls, given: Any, check: ValidatorFunctionWrapHandler) -> Any:
        return given if isinstance(given, compression.CompressionBase) else check(given)


def build_optimizer(
    options: OptSection,
    run: RunSettings,
    *,
    dht: hivemind.DHT,
    params: list[dict[str, Any]],
    optimizer: OptimizerFactory,
    samples_per_step: int,
    only_dials: bool = False,
    **keywords: Any,
) -> SwarmOptimizer:
    """Build the swarm's optimizer from `hivemind_config.opt` and the settings of the run.

    `params` are groups of trainable float32 tensors on the model's device. `optimizer` makes the inner torch
    optimizer from them (on the CPU when offloaded). One call of `step()` covers `samples_per_step` samples.
    A peer that `only_dials` averages in client mode, unless `options` set `client_mode`.
    `keywords` are further ones of `SwarmOptimizer`; among these, `scheduler` makes a learning-rate schedule
    in swarm steps.

    Raises:
        RecipeError: `options` has a keyword that does harm or that hivemind lacks, or the inner optimizer
            can't be used in a swarm.
    """
    own = _keywords(options, run)
    if run.auto_share is not None:
        run = replace(run, pace=_start_of_auto(run.pace, own.get("grad_compression")))
    inner = optimizer(params)
    is_on_gpu = any(param.is_cuda for param in _params(params))

    def factory(groups: Any) -> torch.optim.Optimizer:
        inner = optimizer(groups)
        _carry_overrides(inner, _params(params))
        initialize_state(inner)
        require_usable(inner)
        return inner

    defaults: dict[str, Any] = {
        # optim/optimizer.py:205 has this inverted: only a value that is not None is replaced by the DHT's.
        "client_mode": only_dials,
        "grad_compression": CODECS["none"](),
        # A groupmate that sends nothing for this long is left out. hivemind takes `matchmaking_time`, which
        # is meant for another wait: if it is short, a peer on a busy machine misses every other round.
        "next_chunk_timeout": max(10.0, options.matchmaking_time),
        "allreduce_timeout": 3600.0,  # for any size: the other limit ends an exchange without progress
    }
    own["offload_optimizer"] = _offloads(options.offload_optimizer, run, inner, is_on_gpu)
    return SwarmOptimizer(
        dht=dht,
        params=params,
        optimizer=factory,
        batch_size_per_step=samples_per_step,
        settings=run,
        **defaults | own,
        **keywords,
    )


def _offloads(wanted: bool | str, run: RunSettings, inner: torch.optim.Optimizer, is_on_gpu: bool) -> bool:
    """Return whether the inner optimizer steps copies of the weights in host memory; decide on "auto"."""
    if wanted == "auto":
        # Not in mode overlap: an offloaded optimizer makes no guess (`method.SharedGradients`).
        is_useful = is_on_gpu and not _is_bitsandbytes(inner)
        return is_useful and run.pace.mode == "sync" and run.auto_share is None
    if wanted and (run.pace.has_local_steps or run.auto_share is not None):
        raise RecipeError(
            "hivemind_config.opt.offload_optimizer can't be used in modes with local steps (auto, diloco, "
            "streaming): each of them would wait for the CPU.",
            hint="remove it, or say `swarm.mode: sync`",
        )
    return bool(wanted)


def _keywords(options: OptSection, run: RunSettings) -> dict[str, Any]:
    """Return the options that are not None as keywords of `hivemind.Optimizer`; refuse harmful ones."""
    own = {key: value for key, value in options if value is not None}
    known = set(inspect.signature(hivemind.Optimizer.__init__).parameters)
    for key in sorted(own):
        if key not in known | REFUSED:
            raise RecipeError(
                f"hivemind_config.opt.{key}: hivemind.Optimizer has no such keyword.", hint="remove it"
            )
        if key in REFUSED and own.pop(key) is not False:
            raise RecipeError(
                f"hivemind_config.opt.{key} can't be used: the Trainer decides it, or `swarm.mode`.",
                hint="remove it; modes overlap and diloco have rounds beside training, and local steps",
            )
    del own["state_averaging_compression"]  # weights are never averaged
    if "grad_compression" in own:
        own["grad_compression"] = _codec(own["grad_compression"])
    of_state = _codec(options.load_state_compression)
    if not isinstance(of_state, compression.RoleAdaptiveCompression):
        # The codec is for the weights alone: most codecs raise on step counts and on the bytes of 8-bit
        # optimizers, and blockwise8 would quantize these bytes once more. With local steps each peer has its
        # own optimizer state, which may be rounded.
        of_optimizer = EightBitStatistics() if run.pace.has_local_steps else compression.NoCompression()
        of_state = compression.RoleAdaptiveCompression(parameter=of_state, optimizer=of_optimizer)
    averager_opts = own.get("averager_opts", {})
    for key in averager_opts.keys() - inspect.signature(DecentralizedAverager).parameters.keys():
        raise RecipeError(
            f"hivemind_config.opt.averager_opts.{key}: hivemind's averagers have no such keyword.",
            hint="remove it",
        )
    request_timeout = min(3.0, 0.5 * options.matchmaking_time)
    return own | {
        "load_state_compression": of_state,
        "averager_opts": {"request_timeout": request_timeout} | averager_opts,
        "tracker_opts": TRACKER_OPTIONS | options.tracker_opts,
        "delay_state_averaging": False,  # without effect: weights are never averaged
    }


def _codec(given: str | compression.CompressionBase) -> compression.CompressionBase:
    """Return the codec of this name, or our replacement of a hivemind codec, also within adaptive codecs."""
    if isinstance(given, compression.RoleAdaptiveCompression):
        choices = {role.name.lower(): _codec(one) for role, one in given.role_compressions.items()}
        return compression.RoleAdaptiveCompression(default=choices.pop("unspecified"), **choices)
    if isinstance(given, compression.SizeAdaptiveCompression):
        less = _codec(given.less)
        more = _codec(given.greater_equal)
        return compression.SizeAdaptiveCompression(given.threshold, less, more)
    if isinstance(given, compression.CompressionBase) and type(given) not in UPSTREAM:
        return given
    codec: compression.CompressionBase = CODECS[given if isinstance(given, str) else UPSTREAM[type(given)]]()
    return codec


def _start_of_auto(pace: Pace, codec: compression.CompressionBase | None) -> Pace:
    """Return the first pace of mode auto, which keeps a codec that the recipe names."""
    ours: dict[Any, str] = {type(None): START_CODEC} | {made: name for name, made in CODECS.items()}
    if (name := ours.get(type(codec))) is None:
        raise RecipeError(
            f"hivemind_config.opt.grad_compression: mode auto can't reckon with {type(codec).__name__}.",
            hint="remove it, give a codec by its name, or say another mode: swarm={'mode': 'overlap'}",
        )
    return replace(pace, mode="overlap", codec=name, keeps_codec=codec is not None)


def require_usable(optimizer: torch.optim.Optimizer) -> None:
    """Raise `RecipeError` for an optimizer with a special first step, or with a state that can't be shared.

    The state must have tensors and plain values only (`PLAIN`); grokadamw, for one, puts dicts of parameters
    into its groups.
    """
    if any(group.get("dampening") for group in optimizer.param_groups):
        raise RecipeError(
            "SGD with dampening can't be used in a swarm: torch leaves it out of the first step only, and a "
            "joiner's first step is not the swarm's.",
            hint="remove `dampening` from training.optim_args",
        )
    groups = ({name: group[name] for name in group if name != "params"} for group in optimizer.param_groups)
    for holder in (*optimizer.state.values(), *groups):
        for name, value in holder.items():
            parts = value if isinstance(value, (list, tuple)) else (value,)
            if any(type(part) not in (torch.Tensor, *PLAIN) for part in parts):
                raise RecipeError(
                    f"{type(optimizer).__name__} can't be used in a swarm: part of its state is `{name}`, a "
                    f"{type(value).__name__}, which can't be given to a joiner or kept in a checkpoint.",
                    hint="use another training.optim, for example adamw_torch",
                )


def _is_bitsandbytes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is from bitsandbytes: its state on a GPU is small, in 8 bits or paged."""
    return type(optimizer).__module__.startswith("bitsandbytes")


def _carry_overrides(optimizer: Any, params: Iterable[torch.Tensor]) -> None:
    """Copy bitsandbytes' settings for the model's own weights `params` to the offloaded copies.

    bitsandbytes knows weights by identity. Without this, embeddings would have 8-bit state with offload and
    32-bit state without.
    """
    if not _is_bitsandbytes(optimizer):
        return
    stepped = {id(param): own for param, own in zip(params, _params(optimizer.param_groups), strict=True)}
    for module, name, settings in optimizer.mng.module_weight_config_triple:
        if (own := stepped.get(id(getattr(module, name)))) is not None:
            optimizer.mng.override_config(own, key_value_dict=settings)


def _params(groups: Iterable[dict[str, Any]]) -> Iterable[torch.Tensor]:
    return (param for group in groups for param in group["params"])
