"""What a forward and backward pass holds in memory, found by running it on tensors that have no memory.

torch's fake tensors have a shape and a dtype but no values, so a pass through a 7B model takes seconds and
no memory, and yet every operation is the real one: attention, checkpointing and loss need no formula here.
"""

from __future__ import annotations

import copy
import logging
import weakref
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trahiv_cli.recipe.schema import Recipe

TILE_TOKENS = 4096
TILE_WORDS = 32768
"""TRL multiplies with the head in tiles of so many tokens and words, and never holds all logits
(trl 1.16, kernels/chunked_logprob.py:31 and trainer/utils.py:1506)."""

TILE_COPIES = 7
"""Number of float32 copies of a tile in its backward pass without Triton, as on a CPU: 7.25 were counted in
kernels/chunked_logprob.py:257-296 with tiles of 4096 x 32768. With Triton there is none."""


def activation_bytes(outline: torch.nn.Module, recipe: Recipe, length: int, dtype: torch.dtype) -> int | None:
    """Rehearse a local batch and return the most bytes that it holds beside weights and gradients.

    `outline` is the recipe's model on the meta device; `length` are the tokens of each sample, and autocast
    computes in `dtype` (float32: without it). None if shapes depend on values, as in mixtures of experts.
    """
    model: Any = copy.deepcopy(outline)
    if model.config._attn_implementation not in ("eager", "sdpa"):
        model.set_attn_implementation("sdpa")  # other kernels have no fakes; they hold as much
    if recipe.training.activation_checkpointing:
        model.activation_checkpointing_enable()
    rows = recipe.training.per_device_train_batch_size * (2 if recipe.dpo is not None else 1)
    has_tiled_head = recipe.sft is not None or recipe.dpo is not None
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it logs, with a traceback, what it raises
    was_disabled, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            model.tie_weights()
            for weight in model.parameters():  # the swarm's accumulators lie there before the first pass
                weight.grad = torch.empty_like(weight) if weight.requires_grad else None
            tokens = torch.zeros(rows, length, dtype=torch.long)
            with Count(model) as count:
                run(model, tokens, dtype, count, has_head=not has_tiled_head)
    except RuntimeError:  # what fake tensors cannot tell is raised as one of its subclasses
        return None
    finally:
        log.disabled = was_disabled
    head = tiles_bytes(model, rows * length, dtype) if has_tiled_head else 0
    return max(count.peak, count.held + head)


def run(model: Any, tokens: torch.Tensor, dtype: torch.dtype, count: Count, *, has_head: bool) -> None:
    """Run the model with its own loss, as `Trainer` does under accelerate, or everything but the head."""
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
    count.held = count.live
    last.backward(torch.ones_like(last))


def tiles_bytes(model: Any, num_tokens: int, dtype: torch.dtype) -> int:
    """Count what TRL's head holds in its backward pass; see `TILE_TOKENS`."""
    head = model.get_output_embeddings().weight
    rows = min(num_tokens, TILE_TOKENS)
    num_bytes = rows * TILE_WORDS * dtype.itemsize + num_tokens * head.shape[1] * 4
    if not torch.cuda.is_available():  # there is Triton on a GPU, which works in place
        num_bytes += TILE_COPIES * rows * min(head.shape[0], TILE_WORDS) * 4
    return int(num_bytes + (head.numel() * 4 if head.requires_grad else 0))


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that live at the same time; a model's weights are left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0  # bytes now, and at most
        self.held = 0  # bytes between the forward and the backward pass
        own = [*model.parameters(), *model.buffers()]
        own += [weight.grad for weight in model.parameters() if weight.grad is not None]
        self._known = {tensor.untyped_storage()._cdata for tensor in own}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, and count what it makes."""
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
