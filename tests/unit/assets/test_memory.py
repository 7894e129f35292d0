"""Estimates of a run's memory, compared with torch, bitsandbytes and a real pass."""

from typing import get_args

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from packaging.version import Version
from transformers import Trainer, TrainingArguments

from tests.unit.assets.conftest import INT8, LORA, NF4, TINY_LLAMA, built, recipe
from tests.unit.conftest import refused
from trahiv_cli.assets.memory import (
    FLOAT32_BYTES,
    OFFLOADED_OPTIMIZERS,
    Count,
    activation_bytes,
    checkpoint_activations,
    state_bytes,
    translated_out_of_memory,
)
from trahiv_cli.assets.model import build_outline, estimate, require_memory
from trahiv_cli.errors import OutOfMemory
from trahiv_cli.recipe.schema import OptimName, TrainingSection
from trahiv_cli.state.inner_optimizer import initialize_state


def copies(needed, num_bytes):
    """Bytes as a number of float32 copies of the trained weights."""
    return num_bytes / (FLOAT32_BYTES * needed.num_trainable)


def test_adapters_need_less_memory():
    section = {"dtype": "bfloat16"}
    full, lora = (require_memory(recipe(model_section=section, peft=peft)) for peft in (None, LORA))
    assert (full.num_frozen, lora.num_frozen) == (0, full.num_trainable)
    assert lora.frozen_bytes == 2 * lora.num_frozen
    assert lora.total_bytes < full.total_bytes


def test_full_preferences_need_second_model():
    full, lora = (require_memory(recipe("dpo", peft=peft)) for peft in (None, LORA))
    assert (full.reference_bytes, lora.reference_bytes) == (full.trainable_bytes, 0)


@pytest.mark.parametrize("quantization", [NF4, {"load_in_4bit": True}, INT8])
def test_quantized_base_estimate_matches_bitsandbytes(llama_folder, quantization):
    sections = {"model": llama_folder, "peft": LORA, "quantization": quantization}
    held = []
    for weight in built(**sections).parameters():
        if not weight.requires_grad:
            state = getattr(weight, "quant_state", None)
            held += [weight, getattr(weight, "SCB", None), getattr(state, "absmax", None)]
            held.append(getattr(getattr(state, "state2", None), "absmax", None))
    assert require_memory(recipe(**sections)).frozen_bytes == sum(
        one.nbytes for one in held if one is not None
    )


@pytest.fixture
def _bitsandbytes_was_told_nothing():
    """The manager is one for the whole process, and remembers weights by identity and by position."""
    GlobalOptimManager.get_instance().initialize()
    yield
    GlobalOptimManager.get_instance().initialize()


@pytest.mark.usefixtures("_bitsandbytes_was_told_nothing")
@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        *((optim, None) for optim in get_args(OptimName)),
        ("sgd", "momentum=0.9"),
        ("rmsprop", "momentum=0.9,centered=true"),
    ],
)
def test_optimizer_state_estimate_is_exact(tmp_path, optim, optim_args):
    arguments = TrainingArguments(str(tmp_path), optim=optim, optim_args=optim_args, report_to=[])
    cls, keywords = Trainer.get_optimizer_cls_and_kwargs(arguments)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((96, 96), (7, 300), (3, 5, 400), (9,))]
    optimizer = cls(weights, **keywords)
    initialize_state(optimizer)
    training = TrainingSection(max_steps=1, optim=optim, optim_args=optim_args)
    for weight in weights:
        made = [
            value.nbytes
            for name, value in optimizer.state[weight].items()
            # Tables that all weights share are not counted.
            if getattr(value, "ndim", 0) and name not in ("qmap1", "qmap2")
        ]
        assert state_bytes(weight.shape, training) == sum(made)
    assert (optim in OFFLOADED_OPTIMIZERS) is not cls.__module__.startswith("bitsandbytes")


def test_8bit_optimizer_keeps_32bit_embeddings():
    model = TINY_LLAMA | {"tie_word_embeddings": True, "vocab_size": 4096}
    needed = require_memory(recipe(model=model, training={"optim": "adamw_8bit"}))
    assert needed.optimizer_bytes > 2 * FLOAT32_BYTES * 4096 * 32


@pytest.mark.parametrize(("mode", "most"), [("sync", 8), ("auto", 12.5)])
def test_cpu_peer_holds_everything_in_ram(mode, most):
    """Sync: weights, accumulators, two moments, averaged values, the last average; a copy of the moments."""
    needed = require_memory(recipe(swarm={"mode": mode}))
    assert copies(needed, needed.places["RAM"] - needed.libraries_bytes) == most


@pytest.mark.parametrize(
    ("mode", "opt", "on_device", "on_host"),
    [
        ("sync", {}, 2, 9),
        ("sync", {"offload_optimizer": False}, 4, 6),
        ("overlap", {"offload_optimizer": True}, 3, 9),
        ("overlap", {}, 6, 6),
        ("diloco", {}, 4, 8),
        ("streaming", {}, 4, 8),
        ("auto", {}, 6, 9.5),
        ("sync", {"grad_compression": "float16"}, 3, 9.5),  # and a scaler's own gradients
    ],
)
def test_gpu_peer_memory_depends_on_mode(gpu, mode, opt, on_device, on_host):
    training = {"fp16": "grad_compression" in opt}
    wanted = recipe(swarm={"mode": mode}, hivemind_config={"opt": opt}, training=training)
    needed = estimate(wanted, length=16)
    assert copies(needed, needed.held_on_device) == on_device
    assert copies(needed, needed.host_bytes - needed.libraries_bytes) == on_host


def rehearsed(task="clm", model=TINY_LLAMA, *, length=32, dtype=torch.float32, **sections):
    wanted = recipe(task, model, **sections)
    return activation_bytes(build_outline(wanted)[0], wanted, length, dtype)


@pytest.mark.parametrize(
    ("peft", "has_checkpoints", "dtype"),
    [
        (None, False, torch.float32),
        (LORA, False, torch.float32),
        (None, True, torch.float32),
        (None, False, torch.bfloat16),
    ],
)
def test_activation_estimate_matches_real_pass(peft, has_checkpoints, dtype):
    deep = TINY_LLAMA | {"num_hidden_layers": 4, "tie_word_embeddings": True}
    training = {"activation_checkpointing": has_checkpoints}
    model = built(model=deep, peft=peft, training=training)
    if has_checkpoints:
        checkpoint_activations(model)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    tokens = torch.zeros(8, 32, dtype=torch.long)
    with Count(model) as count, torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        model(input_ids=tokens, labels=tokens).loss.backward()
    said = rehearsed(model=deep, dtype=dtype, peft=peft, training=training)
    assert said == pytest.approx(count.peak, rel=0.02)


def test_tiled_head_holds_no_full_logits(monkeypatch):
    large = TINY_LLAMA | {"vocab_size": 200_000, "max_position_embeddings": 512}
    assert rehearsed("sft", large, length=512) > 2**31
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # with Triton
    assert rehearsed("sft", large, length=512) < 8 * 512 * 200_000


@pytest.mark.parametrize("task", ["sft", "dpo", "mlm", "seq-cls"])
def test_every_task_has_activation_estimate(task, bert_folder):
    wanted = recipe(task, TINY_LLAMA if task in ("sft", "dpo") else bert_folder)
    outline, _ = build_outline(wanted)
    expected = activation_bytes(outline, wanted, 16, torch.float32)
    outline.config._attn_implementation = "flash_attention_2"
    assert expected
    assert activation_bytes(outline, wanted, 16, torch.float32) == expected


def test_preferences_double_activations():
    one, both = (rehearsed(task, length=64, peft=LORA) for task in ("sft", "dpo"))
    assert both == pytest.approx(2 * one, rel=0.2)


def test_activations_of_experts_may_be_unknown():
    needed = estimate(recipe(model=TINY_LLAMA | {"model_type": "mixtral"}), length=16)
    has_fake = Version(torch.__version__).release >= (2, 14)  # newer ones have fakes of some experts as well
    assert needed.activation_bytes is None or has_fake


@pytest.mark.parametrize(
    ("failure", "where"),
    [
        (MemoryError(), "RAM"),
        (RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried"), "RAM"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "GPU"),
        (RuntimeError("CUDA error: out of memory"), "GPU"),
    ],
)
def test_out_of_memory_is_translated_with_hint(failure, where):
    with refused(where, "activation_checkpointing", OutOfMemory), translated_out_of_memory():
        raise failure


def test_other_errors_stay_unchanged():
    with pytest.raises(RuntimeError, match="shapes"), translated_out_of_memory():
        raise RuntimeError("shapes don't match")
