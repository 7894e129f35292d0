"""Estimate the memory that a run needs on a peer, by purpose, before it starts. Nothing is loaded.

Covered: weights, gradients, optimizer state, every copy that the swarm's optimizer keeps in the recipe's
mode, one batch's activations, the libraries. Not covered: the data in memory, the RAM of CUDA and its
libraries, and fragmentation of a GPU's memory; leave a tenth of a GPU free.

The memory of a batch is found by running one on tensors without memory. torch's fake tensors have a shape
and a dtype but no values, so a pass through a 7B model takes seconds and no memory, and yet every operation
is the real one: attention, checkpointing and loss need no formula here.
"""

from __future__ import annotations

import copy
import logging
import re
import weakref
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trahiv_cli.errors import OutOfMemory
from trahiv_cli.recipe.schema import OptimName, QuantizationSection, Recipe, TrainingSection
from trahiv_cli.recipe.task_sections import TASKS_OF_TRL, WRITING_TASKS

FLOAT32_BYTES = 4

OFFLOADED_OPTIMIZERS: frozenset[OptimName] = frozenset(
    ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd", "stable_adamw")
)
"""The optimizers whose state `offload_optimizer: auto` keeps in RAM; bitsandbytes' states are small."""

SAVINGS = (
    "Lower `training.per_device_train_batch_size` or `max_length`, set `training.activation_checkpointing: "
    "true`, train adapters only (LoRA, section `peft`) on a quantized base (`quantization: {load_in_4bit: "
    "true}`), choose a smaller model; on a GPU `swarm.mode: overlap` and `hivemind_config.opt."
    "offload_optimizer: true` hold less."
)
"""The hint for a recipe that needs too much memory; the cheapest change comes first."""


@dataclass(frozen=True)
class Estimate:
    """The memory of a run in bytes, by purpose, at the peak."""

    mode: str  # `swarm.mode`; for `auto`, the totals are for the mode that needs most
    on_gpu: bool
    is_offloaded: bool  # optimizer state and step are in RAM, wherever the model is
    num_frozen: int
    num_trainable: int
    trained_values: tuple[int, ...]  # the number of values of each trained weight

    # -- with the model: in the GPU's memory, if there is a GPU
    frozen_bytes: int  # weights that are not trained, in their own dtype or quantized
    reference_bytes: int  # the model that `dpo` without adapters compares with
    trainable_bytes: int  # trained weights, float32
    gradient_bytes: int  # the accumulated gradients, and with fp16 a batch's own
    activation_bytes: int | None  # the tensors of one batch; None: not known for this kind of model
    mode_device_bytes: int  # further copies of the mode: gradients computed during a round, agreed weights
    device_moment_bytes: int  # temporary copies of the optimizer's step or an evaluation on a GPU

    # -- in RAM
    optimizer_bytes: int  # optimizer state; with the model unless it is offloaded
    averaged_bytes: int  # the gradients to be exchanged, and the last average, for peers that missed it
    copy_bytes: int  # the trained weights that an offloaded optimizer steps
    mode_host_bytes: int  # further copies of the mode: agreed weights, outer momentum, copies for a round
    residual_bytes: int  # error feedback: the values that a lossy codec left out, sent in the next round
    libraries_bytes: int  # Python, its libraries and p2pd, in all processes
    round_bytes: int  # held during a round: its average, and the loss of its codec
    moment_bytes: int  # temporary copies of a round, the optimizer's step or a checkpoint between two batches
    joiner_bytes: int  # for a joiner that downloads the state; in no total, as it can ask another peer

    @property
    def held_on_device(self) -> int:
        """Bytes that stay allocated from the first step to the last, where the model runs."""
        weights = self.frozen_bytes + self.reference_bytes + self.trainable_bytes
        state = 0 if self.is_offloaded else self.optimizer_bytes
        return weights + self.gradient_bytes + state + self.mode_device_bytes

    @property
    def held_on_host(self) -> int:
        """Bytes that stay allocated from the first step to the last, in RAM beside the model."""
        copies = self.averaged_bytes + self.copy_bytes + self.mode_host_bytes + self.residual_bytes
        return copies + self.libraries_bytes + (self.optimizer_bytes if self.is_offloaded else 0)

    @property
    def device_bytes(self) -> int:
        """Bytes that must fit where the model runs: permanent ones, and the peak in or between batches."""
        batch = self.activation_bytes or 0
        if self.on_gpu:
            return self.held_on_device + max(batch, self.device_moment_bytes)
        goes_on = self.mode in ("overlap", "streaming", "auto")  # a round runs beside the batch
        return self.held_on_device + max(batch + self.round_bytes * goes_on, self.moment_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes that must fit into RAM beside the model."""
        return self.held_on_host + (self.moment_bytes if self.on_gpu else 0)

    @property
    def total_bytes(self) -> int:
        """Bytes that a CPU peer needs."""
        return self.device_bytes + self.host_bytes

    @property
    def places(self) -> dict[str, int]:
        """Bytes that must fit into the `GPU`, if there is one, and into `RAM`."""
        on_gpu = {"GPU": self.device_bytes, "RAM": self.host_bytes}
        return on_gpu if self.on_gpu else {"RAM": self.total_bytes}


def add_up(
    recipe: Recipe, outline: torch.nn.Module, quantized: Set[torch.Tensor], activation_bytes: int | None
) -> Estimate:
    """Add up the memory of training `outline` as `recipe` says.

    `outline` is the model on the meta device, with its adapters. Its weights with `requires_grad` are
    trained, and bitsandbytes will hold the `quantized` ones. `activation_bytes` counts the tensors of one
    batch; None if not known.
    """
    training, opt, swarm = recipe.training, recipe.hivemind_config.opt, recipe.swarm
    quantization, on_gpu = recipe.quantization, torch.cuda.is_available()
    trainable = [weight for weight in outline.parameters() if weight.requires_grad]
    frozen = [weight for weight in outline.parameters() if not weight.requires_grad]
    one_copy = FLOAT32_BYTES * sum(trained_values := tuple(weight.numel() for weight in trainable))
    embeddings = {module.weight for module in outline.modules() if isinstance(module, torch.nn.Embedding)}
    state = sum(state_bytes(one.shape, training, in_32_bits=one in embeddings) for one in trainable)
    is_offloaded = not swarm.may_step_locally and opt.offload_optimizer is True
    if opt.offload_optimizer == "auto":  # as step/build.py decides it
        is_offloaded = on_gpu and training.optim in OFFLOADED_OPTIMIZERS and swarm.mode == "sync"
    # Without offloading, in other modes than sync, the model's own weights exist beside the agreed ones.
    has_own_weights = not (swarm.mode == "sync" or is_offloaded)
    device_copies, host_copies = mode_copies(swarm.mode, on_gpu=on_gpu, is_offloaded=is_offloaded)
    is_lossy = (opt.grad_compression or ("uniform8" if swarm.mode == "auto" else "none")) != "none"
    step = step_bytes(training.optim, max(trained_values, default=0)) if is_offloaded or not on_gpu else 0
    if activation_bytes is not None and not on_gpu:
        # The C library keeps freed blocks of up to 32 MiB: it held 1.2 to 1.6 times the activations. With
        # `MALLOC_MMAP_THRESHOLD_=131072` it holds only these, and training is slower.
        activation_bytes = round(1.4 * activation_bytes)
    encoded_average = one_copy // 2 if is_lossy else one_copy  # with 16 bits a value, or fewer
    round_bytes = encoded_average + one_copy * is_lossy
    return Estimate(
        mode=swarm.mode,
        on_gpu=on_gpu,
        is_offloaded=is_offloaded,
        num_frozen=sum(weight.numel() for weight in frozen),
        num_trainable=sum(trained_values),
        trained_values=trained_values,
        frozen_bytes=sum(
            quantized_bytes(one.shape, quantization) if quantization and one in quantized else one.nbytes
            for one in frozen
        ),
        reference_bytes=one_copy if recipe.has_reference else 0,
        trainable_bytes=one_copy,
        gradient_bytes=2 * one_copy if training.fp16 else one_copy,
        activation_bytes=activation_bytes,
        mode_device_bytes=device_copies * one_copy,
        # torch's AdamW steps all weights of a GPU at once.
        device_moment_bytes=one_copy if on_gpu and not is_offloaded else 0,
        optimizer_bytes=state,
        averaged_bytes=one_copy + encoded_average,
        copy_bytes=one_copy if is_offloaded else 0,
        mode_host_bytes=host_copies * one_copy,
        residual_bytes=one_copy if is_lossy else 0,
        libraries_bytes=800 * 2**20,  # measured with a model of 0.1M weights
        round_bytes=round_bytes,
        # A checkpoint copies the state; beside the agreed weights, the model's own are kept.
        moment_bytes=max(round_bytes, state + (one_copy if on_gpu or has_own_weights else 0), step),
        # At most three averages are kept for a joiner to replay (`rounds/replay_log.py`).
        joiner_bytes=state + (3 + (2 if swarm.may_step_locally else 1)) * one_copy,
    )


def mode_copies(mode: str, *, on_gpu: bool, is_offloaded: bool) -> tuple[int, int]:
    """Count the float32 copies of the trained weights that a mode keeps, with the model and in RAM.

    Source: `step/method.py` and `rounds/replay_log.py`. Gradients of a GPU go to RAM through pinned memory of
    their own. When `auto` changes to local steps, the copies of `overlap` are freed.
    """
    pinned = int(on_gpu)
    late = 1 if is_offloaded else 2
    outer = 3
    if mode == "auto":
        return (late, pinned + outer) if on_gpu else (0, max(late, outer))
    return {"sync": (0, pinned), "overlap": (late, pinned)}.get(mode, (0, outer))


def step_bytes(optim: OptimName, num_values: int) -> int:
    """Count the bytes of the float32 copies of a weight while a CPU steps it; a GPU needs none of them.

    2 copies were counted for AdamW, 5 for 8-bit Adam in bitsandbytes/backends/cpu/ops.py:469.
    """
    return (2 if optim in OFFLOADED_OPTIMIZERS else 5) * FLOAT32_BYTES * num_values


def state_bytes(shape: torch.Size, training: TrainingSection, *, in_32_bits: bool = False) -> int:
    """Count the bytes of optimizer state for a weight; bitsandbytes keeps 32 bits for embeddings."""
    num_values = shape.numel()
    if training.optim == "adafactor":
        rows_and_columns = shape[:-1].numel() + (shape[:-2] + shape[-1:]).numel()
        return FLOAT32_BYTES * (rows_and_columns if len(shape) > 1 else num_values)
    # The values that an optimizer keeps for each weight, by a word in its name.
    kept = {"adamw": 2, "ademamix": 3, "lion": 1, "adagrad": 1, "rmsprop": 1, "sgd": 0}
    states = next(number for word, number in kept.items() if word in training.optim)
    if training.optim in ("sgd", "rmsprop"):
        said = (training.optim_args or "").replace(" ", "").lower()
        states += ("momentum=" in said) + ("centered=true" in said)
    # As in bitsandbytes/optim/optimizer.py: small tensors keep 32 bits, and 256 values share a float32 scale.
    if "8bit" in training.optim and num_values >= 4096 and not in_32_bits:
        return states * (num_values + FLOAT32_BYTES * ceil(num_values / 256))
    return states * FLOAT32_BYTES * num_values


def quantized_bytes(shape: torch.Size, quantization: QuantizationSection) -> int:
    """Count the bytes of one weight of a quantized layer in bitsandbytes: codes and scales."""
    num_values = shape.numel()
    if quantization.load_in_8bit:
        return num_values + FLOAT32_BYTES * shape[0]
    # 64 values of 4 bits share a scale, and 256 scales share one; see bitsandbytes/functional.py.
    codes = ceil(num_values / 2)
    scales = ceil(num_values / 64)
    if quantization.bnb_4bit_use_double_quant:
        return codes + scales + FLOAT32_BYTES * ceil(scales / 256)
    return codes + FLOAT32_BYTES * scales


def checkpoint_activations(model: Any) -> None:
    """Make a model recompute its activations in the backward pass instead of keeping them."""
    # transformers before 5.23 has only the older name, about which later versions warn.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def activation_bytes(outline: torch.nn.Module, recipe: Recipe, length: int, dtype: torch.dtype) -> int | None:
    """Run a local batch on fake tensors; return its peak of bytes beside weights and gradients.

    `outline` is the recipe's model on the meta device; `length` is the number of tokens of each sample, and
    autocast computes in `dtype` (float32: no autocast). None if shapes depend on values, as in mixtures of
    experts. If the model's layers do not fit each other, its error is passed on.
    """
    model: Any = copy.deepcopy(outline)
    if model.config._attn_implementation not in ("eager", "sdpa"):
        model.set_attn_implementation("sdpa")  # other kernels have no fakes; they need as much
    if recipe.training.activation_checkpointing:
        checkpoint_activations(model)
    rows = recipe.training.per_device_train_batch_size * recipe.sequences_per_sample
    has_tiled_head = recipe.task in WRITING_TASKS & TASKS_OF_TRL
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it logs its errors with a traceback
    silence = logging.Filter("another logger")  # only records of a logger of this name pass
    log.addFilter(silence)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            model.tie_weights()
            for weight in model.parameters():  # the swarm's accumulators exist before the first pass
                weight.grad = torch.empty_like(weight) if weight.requires_grad else None
            tokens = torch.zeros(rows, length, dtype=torch.long)
            with Count(model) as count:
                held = run(model, tokens, dtype, count, has_head=recipe.task not in TASKS_OF_TRL)
    except RuntimeError as failure:  # where fake tensors lack values, they raise a subclass
        misfits = (
            "broadcast a dimension|must match the size|cannot be multiplied|is invalid for input of size"
        )
        if re.search(misfits, str(failure)):  # shapes do not fit, whatever the values
            raise
        return None
    finally:
        log.removeFilter(silence)
    head = tiles_bytes(model, rows * length, dtype) if has_tiled_head else 0
    return max(count.peak, held + head)


def run(model: Any, tokens: torch.Tensor, dtype: torch.dtype, count: Count, *, has_head: bool) -> int:
    """Run the model forward and backward, with its own loss or without the head.

    Outputs are converted to float32 as by `Trainer` under accelerate. Returns the bytes that live between the
    two passes.
    """
    has_autocast = dtype != torch.float32
    with torch.autocast("cpu", dtype, enabled=has_autocast):
        if has_head:
            is_class = model.config.problem_type == "single_label_classification"
            outputs = model(input_ids=tokens, labels=tokens[:, 0] if is_class else tokens)
        else:
            base = model.get_base_model() if hasattr(model, "peft_config") else model
            outputs = base.base_model(input_ids=tokens, use_cache=False)
    if has_head and has_autocast:
        outputs = convert_to_fp32(outputs)
    last = outputs.loss if has_head else outputs.last_hidden_state
    del outputs
    held = count.live
    last.backward(torch.ones_like(last))
    return held


def tiles_bytes(model: Any, num_tokens: int, dtype: torch.dtype) -> int:
    """Count the bytes of TRL's head in its backward pass; it never holds all logits.

    It works in tiles of tokens and words (trl 1.16, kernels/chunked_logprob.py:31, trainer/utils.py:1506).
    """
    head = model.get_output_embeddings().weight
    rows = min(num_tokens, 4096)
    words = 32_768
    num_bytes = rows * words * dtype.itemsize + num_tokens * head.shape[1] * 4
    if not torch.cuda.is_available():
        # Float32 copies of a tile; 7.25 were counted (kernels/chunked_logprob.py:257-296). On a GPU there is
        # Triton, which works in place.
        num_bytes += 7 * rows * min(head.shape[0], words) * 4
    return int(num_bytes + (head.numel() * 4 if head.requires_grad else 0))


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that live at the same time, without a model's own tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0  # bytes now, and at most
        own = [*model.parameters(), *model.buffers()]
        own += [weight.grad for weight in model.parameters() if weight.grad is not None]
        self._known = {tensor.untyped_storage()._cdata for tensor in own}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, and count the tensors that it creates."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return made

    def _forget(self, key: int, num_bytes: int) -> None:
        self.live -= num_bytes
        self._known.discard(key)


@contextmanager
def translated_out_of_memory() -> Iterator[None]:
    """Turn out-of-memory errors of torch and Python into `OutOfMemory`, with the hint `SAVINGS`."""
    try:
        yield
    except (RuntimeError, MemoryError) as failure:
        if not is_out_of_memory(failure):
            raise
        is_of_cpu = isinstance(failure, MemoryError) or "CPUAllocator" in str(failure)
        where = "RAM" if is_of_cpu else "GPU's memory"
        said = f"This machine's {where} ran out; the run's folder is unchanged."
        raise OutOfMemory(said, SAVINGS) from failure


def is_out_of_memory(failure: BaseException) -> bool:
    """Tell whether torch or Python raised this because memory ran out."""
    if isinstance(failure, torch.OutOfMemoryError | MemoryError):
        return True
    # torch raises these as a plain `RuntimeError`.
    words = "DefaultCPUAllocator: can't allocate memory|CUDA error: out of memory|ALLOC_FAILED"
    return re.search(words, str(failure)) is not None
