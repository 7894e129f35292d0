"""From the words of `hivemind_config.opt` to the optimizer that a peer steps.

Combinations that hivemind accepts and that do harm are refused here, before any peer is met.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import hivemind
import torch
from hivemind import compression
from torch.optim.lr_scheduler import LRScheduler

from trahiv_cli.errors import RecipeError
from trahiv_cli.optim.sync import Narrator, SyncOptimizer, silent

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]

CODECS: dict[str, Callable[[], compression.CompressionBase]] = {
    "none": compression.NoCompression,
    "float16": compression.Float16Compression,
    "meanstd16": compression.ScaledFloat16Compression,
    "uniform8": compression.Uniform8BitQuantization,
    "quantile8": compression.Quantile8BitQuantization,
    "blockwise8": compression.BlockwiseQuantization,
}

REFUSED: dict[str, str] = {
    "use_local_updates": "with hivemind's defaults it takes one local step per averaging, or never trains",
    "delay_optimizer_step": "the step would be counted before it is known whether its round happened",
    "delay_grad_averaging": "the step would be counted before it is known whether its round happened",
    "reuse_grad_buffers": "transformers' Trainer clears `.grad` after each batch, and the samples with it",
    "auxiliary": "a peer that does not train can't run a Trainer",
    "grad_averager_factory": "mode sync needs its own averager, which makes rounds exact",
    "delta_rule_averaging": "it belongs to use_local_updates",
}
"""Keywords of `hivemind.Optimizer` that contradict mode sync, with the reason."""

OURS: frozenset[str] = frozenset({"optimizer", "params", "scheduler", "dht", "batch_size_per_step"})
"""Keywords of `hivemind.Optimizer` that the Trainer decides."""

METADATA_EXPIRATION_S = 20.0
"""How long a peer that died without a goodbye is waited for; hivemind's 60 s stalls a pair for a minute."""

REFRESH_S = {"min_refresh_period": 0.25, "max_refresh_period": 1.0}
"""How often progress is fetched; hivemind's 0.5 to 10 s lets fast peers run far past the target."""

MIN_CHUNK_TIMEOUT_S = 10.0
"""A groupmate that sends nothing for so long is left out. hivemind's rule, `matchmaking_time`, is meant
for another wait: with a short one, a peer on a busy machine is left out of every other round."""


def build_optimizer(
    options: dict[str, Any],
    *,
    dht: hivemind.DHT,
    params: list[dict[str, Any]],
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory,
    samples_per_step: int,
    max_grad_norm: float,
    narrate: Narrator = silent,
    should_leave: Callable[[], bool] = lambda: False,
) -> SyncOptimizer:
    """Build the swarm's optimizer. Starts two processes; call from the main thread.

    Args:
        options: `hivemind_config.opt`; compressions by name or as hivemind's objects.
        dht: a running DHT.
        params: param groups of trainable float32 tensors on the model's device.
        optimizer: makes the inner torch optimizer from param groups (on the CPU when offloaded).
        scheduler: makes its learning-rate schedule, counted in swarm steps.
        samples_per_step: samples behind one call of `step()`.
        max_grad_norm: the averaged gradient is scaled down to this norm; 0 leaves it alone.
        narrate: told about waits.
        should_leave: asked during waits.

    Raises:
        RecipeError: `options` has a keyword that contradicts mode sync, or one that hivemind lacks.
    """
    options = {key: value for key, value in options.items() if value is not None}
    _require_sync(options)
    offload = options.pop("offload_optimizer", "auto")
    matchmaking_time = options.setdefault("matchmaking_time", 5.0)
    options.setdefault("next_chunk_timeout", max(MIN_CHUNK_TIMEOUT_S, matchmaking_time))
    averager_opts = {"request_timeout": min(3.0, 0.5 * matchmaking_time)} | options.pop("averager_opts", {})
    tracker_opts = {"metadata_expiration": METADATA_EXPIRATION_S} | REFRESH_S
    for key in ("grad_compression", "state_averaging_compression", "load_state_compression"):
        if isinstance(options.get(key), str):
            options[key] = _codec(key, options[key])

    def factory(groups: Any) -> torch.optim.Optimizer:
        inner = optimizer(groups)
        _require_startable(inner)
        initialize_state(inner)
        return inner

    return SyncOptimizer(
        dht=dht,
        params=params,
        optimizer=factory,
        scheduler=scheduler,
        batch_size_per_step=samples_per_step,
        # optim/optimizer.py:205 has this inverted: only a value that is not None is replaced by the DHT's.
        client_mode=options.pop("client_mode", dht.client_mode),
        offload_optimizer=_can_offload(optimizer) if offload == "auto" else offload,
        # The pair gradient averaging and weight averaging is sequential here, see SyncOptimizer.
        delay_state_averaging=False,
        averager_opts=averager_opts,
        tracker_opts=tracker_opts | options.pop("tracker_opts", {}),
        max_grad_norm=max_grad_norm,
        narrate=narrate,
        should_leave=should_leave,
        **options,
    )


def _require_sync(options: dict[str, Any]) -> None:
    for key, reason in REFUSED.items():
        if options.pop(key, False):
            raise RecipeError(
                f"hivemind_config.opt.{key} can't be used in mode sync: {reason}.", hint="remove it"
            )
    options.pop("delay_state_averaging", None)
    for key in sorted(OURS & options.keys()):
        raise RecipeError(f"hivemind_config.opt.{key} is decided by the Trainer.", hint="remove it")
    known = set(inspect.signature(hivemind.Optimizer.__init__).parameters)
    for key in sorted(options.keys() - known):
        near = difflib.get_close_matches(key, known, n=1)
        raise RecipeError(
            f"hivemind_config.opt.{key}: hivemind.Optimizer has no such keyword.",
            hint=f"did you mean `{near[0]}`?" if near else "remove it",
        )


def _codec(key: str, name: str) -> compression.CompressionBase:
    if name not in CODECS:
        raise RecipeError(
            f"hivemind_config.opt.{key}: there is no compression named {name!r}.",
            hint=f"one of {', '.join(CODECS)}, or an object of hivemind.compression",
        )
    return CODECS[name]()


def _require_startable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose first step differs from a step with zero state (see `initialize_state`)."""
    if any(group.get("dampening") for group in optimizer.param_groups):
        raise RecipeError(
            "SGD with dampening can't be used in a swarm: torch leaves it out of the first step only, and a "
            "joiner's first step is not the swarm's.",
            hint="remove `dampening` from training.optim_args",
        )


def _can_offload(optimizer: OptimizerFactory) -> bool:
    """Whether this optimizer's state belongs on the CPU: not if it is 8-bit or paged already."""
    probe = optimizer([{"params": [torch.nn.Parameter(torch.zeros(1))]}])
    return not type(probe).__module__.startswith("bitsandbytes")


@contextlib.contextmanager
def _without_effect(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make `optimizer.step()` change no parameter: zero gradients, no learning rate, no decay."""
    kept = [
        (group, {str(key): group[key] for key in ("lr", "weight_decay") if key in group})
        for group in optimizer.param_groups
    ]
    grads = [(param, param.grad) for param in _params(optimizer)]
    for group, values in kept:
        group.update(dict.fromkeys(values, 0.0))
    for param, _ in grads:
        param.grad = torch.zeros_like(param)
    try:
        yield
    finally:
        for group, values in kept:
            group.update(values)
        for param, grad in grads:
            param.grad = grad


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state tensors, as a state download needs them, without taking a step.

    hivemind does it by a real step with zero gradients (optim/state_averager.py:707): AdamW then decays
    the weights once and counts one step too many, which scales its first updates by about 0.74.
    """
    with _without_effect(optimizer):
        optimizer.step()
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif step is not None:
            state["step"] = 0


def _params(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])
