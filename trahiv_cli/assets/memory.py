"""What a run costs a peer, said before it starts: memory by purpose, and traffic. Nothing is loaded.

Covered: weights, gradients, optimizer state, every copy that the swarm's optimizer keeps in the recipe's
mode, one batch's activations, the libraries. Not covered: the data in memory, what CUDA and its
libraries take of the RAM, and how a GPU's memory is cut to pieces; leave a GPU a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trahiv_cli.assets.traffic import Traffic, add_up_traffic
from trahiv_cli.errors import OutOfMemory
from trahiv_cli.recipe.schema import (
    OptimName,
    QuantizationSection,
    Recipe,
    SwarmSection,
    TrainingSection,
    section_of,
)

BACKGROUND_MODES = frozenset(("overlap", "streaming", "auto"))
"""The modes in which training goes on during a round."""

GIB = 2**30
MIB = 2**20

FLOAT32_BYTES = 4

LIBRARIES_BYTES = 800 * MIB
"""Python, torch, transformers, the DHT's process and p2pd, measured with a model of 0.1M weights."""

REPLAYED_COPIES = 3
"""Averages that are kept at most for a joiner, who goes through them (`optim/replay.py`), in copies."""

CPU_FRAGMENTS = 1.4
"""Memory that the C library holds for each byte of activations: it keeps freed blocks of up to 32 MiB. 1.2 to
1.6 were measured; with `MALLOC_MMAP_THRESHOLD_=131072` it is 1.0, and training is slower."""

_STATES: dict[OptimName, tuple[int, int]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "stable_adamw", "paged_adamw_32bit"), (2, 32)),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), (2, 8)),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), (3, 32)),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), (3, 8)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), (1, 32)),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), (1, 8)),
    **dict.fromkeys(("adagrad", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_32bit"), (1, 32)),
    "rmsprop_bnb_8bit": (1, 8),
    "sgd": (0, 32),
}
"""Numbers that an optimizer keeps for each weight, and their bits. Adafactor has another rule."""

OFFLOADED_OPTIMIZERS: frozenset[OptimName] = frozenset(
    ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd", "stable_adamw")
)
"""The optimizers whose state `offload_optimizer: auto` keeps in RAM; those of bitsandbytes are small."""

STEP_COPIES = 2
BITSANDBYTES_STEP_COPIES = 5
"""A weight has so many float32 copies while it is stepped on a CPU; the largest weight decides. Counted for
AdamW, and for 8-bit Adam in bitsandbytes/backends/cpu/ops.py:469. On a GPU bitsandbytes has none."""

MIN_8BIT_VALUES = 4096
OPTIMIZER_BLOCK = 256
"""Tensors of fewer values keep 32 bits, and this many values of a larger one share a float32 scale; source:
bitsandbytes/optim/optimizer.py."""

BASE_BLOCK = 64
NESTED_BLOCK = 256
"""A scale is of so many values of a 4-bit weight, or of so many scales; see bitsandbytes/functional.py."""


@dataclass(frozen=True)
class Estimate:
    """Bytes by purpose, at the peak: with the model (of the GPU's memory, if it has one), and of the RAM."""

    on_gpu: bool
    is_offloaded: bool
    """Optimizer state and step are in RAM, wherever the model is."""

    num_frozen: int
    num_trainable: int

    frozen_bytes: int
    """Weights that are not trained, in their own dtype or quantized; with the model."""

    reference_bytes: int
    """The model that `dpo` without adapters compares with; with the model."""

    trainable_bytes: int
    """Trained weights, float32; with the model."""

    gradient_bytes: int
    """The sum of gradients that a backward pass adds to, and with fp16 a batch's own; with the model."""

    activation_bytes: int | None
    """What one batch holds at most; with the model. None: it can't be known for this kind of model."""

    optimizer_bytes: int
    """Optimizer state; in RAM if offloaded."""

    averaged_bytes: int
    """The gradients as they are exchanged with peers; in RAM."""

    copy_bytes: int
    """The trained weights that an offloaded optimizer steps; in RAM."""

    libraries_bytes: int
    """Code and data of Python, its libraries and p2pd, in all processes; in RAM."""

    moment_bytes: int
    """What a round, the optimizer's step or a checkpoint copies for a moment, between two batches; in RAM."""

    joiner_bytes: int
    """What is copied while a joiner downloads the state from this peer; in RAM. In no sum: a peer alone
    has none, and where it lacks, the joiner asks another peer."""

    traffic: Traffic

    mode: str
    """`swarm.mode`; of `auto`, the sums are those of the mode that takes most."""

    mode_device_bytes: int
    """Further copies of the mode, with the model: gradients that come during a round, agreed weights."""

    mode_host_bytes: int
    """Further copies of the mode in RAM: the agreed weights, the outer momentum, copies for a round."""

    residual_bytes: int
    """What a lossy codec left out, which the next round brings; in RAM."""

    round_bytes: int
    """What a round holds, until it is over: averages, and what its codec loses; in RAM."""

    device_moment_bytes: int
    """What the optimizer's step or an evaluation copies for a moment on a GPU."""

    @property
    def held_on_device(self) -> int:
        """Bytes that are there from the first step to the last where the model runs."""
        weights = self.frozen_bytes + self.reference_bytes + self.trainable_bytes
        state = 0 if self.is_offloaded else self.optimizer_bytes
        return weights + self.gradient_bytes + state + self.mode_device_bytes

    @property
    def held_on_host(self) -> int:
        """Bytes that are there from the first step to the last in RAM beside it."""
        copies = self.averaged_bytes + self.copy_bytes + self.mode_host_bytes + self.residual_bytes
        return copies + self.libraries_bytes + (self.optimizer_bytes if self.is_offloaded else 0)

    @property
    def working_bytes(self) -> int:
        """Bytes that come and go where the model runs; on a CPU, by a batch or between two."""
        batch = self.activation_bytes or 0
        if self.on_gpu:
            return max(batch, self.device_moment_bytes)
        beside = self.round_bytes if self.mode in BACKGROUND_MODES else 0
        return max(batch + beside, self.moment_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes that must fit where the model runs."""
        return self.held_on_device + self.working_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that must fit into RAM beside it."""
        return self.held_on_host + (self.moment_bytes if self.on_gpu else 0)

    @property
    def total_bytes(self) -> int:
        """Bytes that a CPU peer needs."""
        return self.device_bytes + self.host_bytes


def add_up(
    recipe: Recipe, outline: torch.nn.Module, quantized: Set[torch.Tensor], activation_bytes: int | None
) -> Estimate:
    """Add up what training `outline` as `recipe` says takes of a peer.

    `outline` is the model on the meta device, with its adapters; of its weights those with `requires_grad`
    are trained, and bitsandbytes will hold the `quantized` ones. `activation_bytes` are of one batch, as
    tensors; None if not known.
    """
    training, opt, swarm = recipe.training, recipe.hivemind_config.opt, recipe.swarm
    on_gpu, quantization = torch.cuda.is_available(), recipe.quantization
    trainable = [weight for weight in outline.parameters() if weight.requires_grad]
    frozen = [weight for weight in outline.parameters() if not weight.requires_grad]
    shapes = [weight.shape for weight in trainable]
    num_trainable = sum(shape.numel() for shape in shapes)
    one_copy = FLOAT32_BYTES * num_trainable
    embeddings = {module.weight for module in outline.modules() if isinstance(module, torch.nn.Embedding)}
    state = sum(state_bytes(one.shape, training, in_32_bits=one in embeddings) for one in trainable)
    _, bits = _STATES.get(training.optim, (0, 32))
    is_offloaded = _is_offloaded(recipe)
    # Who does not wait for a round has weights that are a guess, beside those that are agreed on.
    has_own_weights = not (swarm.mode == "sync" or is_offloaded)
    device_copies, host_copies = _mode_copies(swarm, on_gpu=on_gpu, is_offloaded=is_offloaded)
    is_lossy = (opt.grad_compression or ("uniform8" if swarm.mode == "auto" else "none")) != "none"
    step_copies = STEP_COPIES if training.optim in OFFLOADED_OPTIMIZERS else BITSANDBYTES_STEP_COPIES
    steps_on_host = is_offloaded or not on_gpu
    step = step_copies * FLOAT32_BYTES * max(map(torch.Size.numel, shapes), default=0) * steps_on_host
    if activation_bytes is not None and not on_gpu:
        activation_bytes = round(CPU_FRAGMENTS * activation_bytes)
    # optim/rounds.py keeps the averages until all are there, and beside them what the codec loses.
    round_bytes = (2 if is_lossy else 1) * one_copy
    return Estimate(
        on_gpu=on_gpu,
        is_offloaded=is_offloaded,
        num_frozen=sum(weight.numel() for weight in frozen),
        num_trainable=num_trainable,
        frozen_bytes=sum(
            quantized_bytes(one.shape, quantization) if quantization and one in quantized else one.nbytes
            for one in frozen
        ),
        reference_bytes=one_copy if recipe.dpo is not None and recipe.peft is None else 0,
        trainable_bytes=one_copy,
        gradient_bytes=2 * one_copy if training.fp16 else one_copy,
        activation_bytes=activation_bytes,
        optimizer_bytes=state,
        averaged_bytes=one_copy,
        copy_bytes=one_copy if is_offloaded else 0,
        libraries_bytes=LIBRARIES_BYTES,
        # train/checkpoint.py copies the state; beside the agreed weights, the model's own are kept.
        moment_bytes=max(round_bytes, state + (one_copy if on_gpu or has_own_weights else 0), step),
        joiner_bytes=state + (REPLAYED_COPIES + (2 if swarm.may_step_locally else 1)) * one_copy,
        traffic=add_up_traffic(shapes, state, opt, swarm, are_float32=bits == 32),
        mode=swarm.mode,
        mode_device_bytes=device_copies * one_copy,
        mode_host_bytes=host_copies * one_copy,
        residual_bytes=one_copy if is_lossy else 0,
        round_bytes=round_bytes,
        # torch's AdamW steps all weights of a GPU at once.
        device_moment_bytes=one_copy if on_gpu and not is_offloaded else 0,
    )


def _is_offloaded(recipe: Recipe) -> bool:
    """Tell whether the optimizer steps in RAM, as `optim/assemble.py` decides it."""
    offload = recipe.hivemind_config.opt.offload_optimizer
    if offload == "auto":
        offload = recipe.training.optim in OFFLOADED_OPTIMIZERS and recipe.swarm.mode == "sync"
    return bool(offload) and not recipe.swarm.may_step_locally


def _mode_copies(swarm: SwarmSection, *, on_gpu: bool, is_offloaded: bool) -> tuple[int, int]:
    """Count the float32 copies of the trained weights that a mode keeps, with the model and in RAM.

    Source: `optim/method.py` and `optim/rounds.py`. Gradients of a GPU go to RAM through pinned memory of
    their own. When `auto` goes over to local steps, what `overlap` kept is freed.
    """
    pinned, late, outer = int(on_gpu), 1 if is_offloaded else 2, 3
    match swarm.mode:
        case "sync":
            return 0, pinned
        case "overlap":
            return late, pinned
        case "auto":
            return (late, pinned + outer) if on_gpu else (0, max(late, outer))
    return 0, outer


def state_bytes(shape: torch.Size, training: TrainingSection, *, in_32_bits: bool = False) -> int:
    """Count what the recipe's optimizer keeps for a weight; bitsandbytes has 32 bits for embeddings."""
    num_values = shape.numel()
    if training.optim == "adafactor":
        rows_and_columns = shape[:-1].numel() + (shape[:-2] + shape[-1:]).numel()
        return FLOAT32_BYTES * (rows_and_columns if len(shape) > 1 else num_values)
    states, bits = _STATES[training.optim]
    if training.optim in ("sgd", "rmsprop"):
        said = (training.optim_args or "").replace(" ", "").lower()
        states += ("momentum=" in said) + ("centered=true" in said)
    if bits == 8 and num_values >= MIN_8BIT_VALUES and not in_32_bits:
        return states * (num_values + FLOAT32_BYTES * -(-num_values // OPTIMIZER_BLOCK))
    return states * FLOAT32_BYTES * num_values


def quantized_bytes(shape: torch.Size, quantization: QuantizationSection) -> int:
    """Count what bitsandbytes holds for one weight of a quantized layer: codes and scales."""
    num_values = shape.numel()
    if quantization.load_in_8bit:
        return num_values + FLOAT32_BYTES * shape[0]
    num_scales = -(-num_values // BASE_BLOCK)
    if quantization.bnb_4bit_use_double_quant:
        scales = num_scales + FLOAT32_BYTES * -(-num_scales // NESTED_BLOCK)
    else:
        scales = FLOAT32_BYTES * num_scales
    return -(-num_values // 2) + scales


@contextmanager
def translated_out_of_memory(recipe: Recipe) -> Iterator[None]:
    """Turn what torch and Python raise when memory runs out into `OutOfMemory`, with what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as failure:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(failure):
            raise
        is_of_cpu = isinstance(failure, MemoryError) or "CPUAllocator" in str(failure)
        where = "RAM" if is_of_cpu else "GPU's memory"
        raise OutOfMemory(
            f"This machine's {where} ran out; what is in the run's folder stays.", savings(recipe)
        ) from failure


def is_out_of_memory(failure: BaseException) -> bool:
    """Tell whether torch or Python raised this because memory ran out."""
    if isinstance(failure, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(words in str(failure) for words in _OUT_OF_MEMORY)


_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "ALLOC_FAILED")
"""Parts of the messages of those errors that torch raises as a plain `RuntimeError`."""


def savings(recipe: Recipe) -> str:
    """Say what in the recipe could be changed so that it takes less memory, and has not been."""
    training, section = recipe.training, section_of(recipe.task)
    changes = []
    if training.per_device_train_batch_size > 1:
        changes.append("lower `training.per_device_train_batch_size`")
    if not training.activation_checkpointing:
        changes.append("set `training.activation_checkpointing: true`")
    changes.append(f"lower `{section}.max_length`")
    if recipe.peft is None:
        changes.append("add a `peft` section (LoRA) to train adapters only")
    elif recipe.quantization is None and recipe.model.config is None:
        changes.append("quantize the base (`quantization: {load_in_4bit: true}`)")
    if recipe.swarm.may_step_locally and training.optim in OFFLOADED_OPTIMIZERS:
        words = "set `swarm.mode: overlap` and `hivemind_config.opt.offload_optimizer: true`"
        changes.append(f"{words}, which keep less on a GPU")
    text = ", ".join(changes)
    return f"{text[0].upper()}{text[1:]}, or choose a smaller model."
