"""Estimates of a run's memory, compared with torch, bitsandbytes and a real pass."""

from typing import get_args

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from packaging.version import Version
from transformers import Trainer, TrainingArguments

from tests.unit.assets.conftest import INT8, LORA, NF4, TINY_LLAMA, built, recipe
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
from trahiv_cli.optim.inner import initialize_state
from trahiv_cli.recipe.schema import OptimName, TrainingSection


def copies(needed, num_bytes):
    """Bytes as a number of float32 copies of the trained weights."""
    return num_bytes / (FLOAT32_BYTES * needed.num_trainable)


def test_adapters_need_less_memory():
    bf16 = {"model_section": {"dtype": "bfloat16"}}
    full, lora = require_memory(recipe(**bf16)), require_memory(recipe(**bf16, peft=LORA))
    assert full.num_frozen == full.frozen_bytes == 0
    assert lora.num_frozen == full.num_trainable
    assert lora.frozen_bytes == 2 * lora.num_frozen
    assert lora.total_bytes < full.total_bytes
    compared = require_memory(recipe("dpo"))
    assert compared.reference_bytes == compared.trainable_bytes, "with the model as it was"
    assert require_memory(recipe("dpo", peft=LORA)).reference_bytes == 0


@pytest.mark.parametrize("quantization", [NF4, {"load_in_4bit": True}, INT8], ids=["nested", "nf4", "int8"])
def test_quantized_base_estimate_matches_bitsandbytes(llama_folder, quantization):
    wanted = recipe(model=llama_folder, peft=LORA, quantization=quantization)
    num_bytes = 0
    for weight in built(wanted).parameters():
        if weight.requires_grad:
            continue
        num_bytes += weight.nbytes
        if (scales := getattr(weight, "SCB", None)) is not None:
            num_bytes += scales.nbytes
        if (state := getattr(weight, "quant_state", None)) is not None:
            num_bytes += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
    assert require_memory(wanted).frozen_bytes == num_bytes


@pytest.fixture
def _bitsandbytes_was_told_nothing():
    """The manager is one for the whole process, and remembers weights by identity and by position."""
    GlobalOptimManager.get_instance().initialize()
    yield
    GlobalOptimManager.get_instance().initialize()


WITH_ARGUMENTS = [("sgd", "momentum=0.9"), ("rmsprop", "momentum=0.9,centered=true")]


@pytest.mark.usefixtures("_bitsandbytes_was_told_nothing")
@pytest.mark.parametrize(
    ("optim", "optim_args"), [*dict.fromkeys(get_args(OptimName)).items(), *WITH_ARGUMENTS]
)
def test_optimizer_state_estimate_is_exact(tmp_path, optim, optim_args):
    arguments = TrainingArguments(str(tmp_path), optim=optim, optim_args=optim_args, report_to=[])
    cls, keywords = Trainer.get_optimizer_cls_and_kwargs(arguments)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((96, 96), (7, 300), (3, 5, 400), (9,))]
    optimizer = cls(weights, **keywords)
    initialize_state(optimizer)
    training = TrainingSection(max_steps=1, optim=optim, optim_args=optim_args)
    shared = ("qmap1", "qmap2")  # tables that all weights share
    for weight in weights:
        made = [
            value.nbytes
            for name, value in optimizer.state[weight].items()
            if isinstance(value, torch.Tensor) and value.dim() and name not in shared
        ]
        assert state_bytes(weight.shape, training) == sum(made)
    assert (optim in OFFLOADED_OPTIMIZERS) is not cls.__module__.startswith("bitsandbytes")


def test_8bit_optimizer_keeps_32bit_embeddings():
    model = TINY_LLAMA | {"tie_word_embeddings": True, "vocab_size": 4096}
    needed = require_memory(recipe(model=model, training={"optim": "adamw_8bit"}))
    assert needed.optimizer_bytes > 2 * FLOAT32_BYTES * 4096 * 32


def test_cpu_peer_holds_everything_in_ram():
    needed = require_memory(recipe(swarm={"mode": "sync"}))
    held = needed.held_on_device + needed.held_on_host - needed.libraries_bytes
    # weights, accumulators, two moments, averaged values, the last average
    assert copies(needed, held) == 6
    assert needed.total_bytes == needed.held_on_device + needed.held_on_host + needed.moment_bytes
    auto = require_memory(recipe())  # takes at most what its last mode takes
    assert copies(auto, auto.mode_device_bytes + auto.mode_host_bytes) == 3


@pytest.mark.parametrize(
    ("swarm", "opt", "on_device", "on_host"),
    [
        ({"mode": "sync"}, {}, 0, 1),
        ({"mode": "sync"}, {"offload_optimizer": False}, 0, 1),
        ({"mode": "overlap"}, {"offload_optimizer": True}, 1, 1),
        ({"mode": "overlap"}, {}, 2, 1),
        ({"mode": "diloco"}, {}, 0, 3),
        ({"mode": "streaming"}, {}, 0, 3),
        ({"mode": "auto"}, {}, 2, 4),
        ({"mode": "sync"}, {"grad_compression": "float16"}, 0, 1),
    ],
)
def test_gpu_peer_memory_depends_on_mode(monkeypatch, swarm, opt, on_device, on_host):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    scaler = {"fp16": "grad_compression" in opt}
    needed = estimate(recipe(swarm=swarm, hivemind_config={"opt": opt}, training=scaler), length=16)
    assert copies(needed, needed.mode_device_bytes) == on_device
    assert copies(needed, needed.mode_host_bytes) == on_host
    # guesses and local steps are computed on the model's device
    assert needed.is_offloaded is opt.get("offload_optimizer", swarm["mode"] == "sync")
    assert copies(needed, needed.copy_bytes) == needed.is_offloaded
    moments, what_codecs_lose = 2, swarm["mode"] == "auto" or "grad_compression" in opt
    in_ram = on_host + 2 + what_codecs_lose / 2 + (moments + 1) * needed.is_offloaded
    assert copies(needed, needed.held_on_host - needed.libraries_bytes) == in_ram
    gradients = 1 + scaler["fp16"]  # a scaler's own
    of_optimizer = moments * (not needed.is_offloaded)
    assert copies(needed, needed.held_on_device) == 1 + gradients + on_device + of_optimizer
    assert needed.host_bytes == needed.held_on_host + needed.moment_bytes


def rehearsed(task="clm", model=TINY_LLAMA, *, rows=2, length=32, dtype=torch.float32, training=None, **more):
    training = {"per_device_train_batch_size": rows, **(training or {})}
    wanted = recipe(task, model, training=training, **more)
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
    model = built(recipe(model=deep, peft=peft, training=training))
    if has_checkpoints:
        checkpoint_activations(model)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    with Count(model) as count, torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        model(input_ids=tokens, labels=tokens).loss.backward()
    said = rehearsed(model=deep, peft=peft, training=training, dtype=dtype)
    assert said == pytest.approx(count.peak, rel=0.02)


def test_tiled_head_holds_no_full_logits(monkeypatch):
    large = TINY_LLAMA | {"vocab_size": 200_000, "max_position_embeddings": 512}
    assert rehearsed("sft", large, rows=16, length=512) > 2**31
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # with Triton
    assert rehearsed("sft", large, rows=16, length=512) < 16 * 512 * 200_000 * 4 / 4


@pytest.mark.parametrize("task", ["sft", "dpo", "mlm", "seq-cls"])
def test_every_task_has_activation_estimate(task, llama_folder, bert_folder):
    wanted = recipe(task, llama_folder if task in ("sft", "dpo") else bert_folder)
    outline, _ = build_outline(wanted)
    expected = activation_bytes(outline, wanted, 16, torch.float32)
    outline.config._attn_implementation = "flash_attention_2"
    assert expected and activation_bytes(outline, wanted, 16, torch.float32) == expected


def test_preferences_double_activations(llama_folder):
    one, both = (rehearsed(task, llama_folder, length=64, peft=LORA) for task in ("sft", "dpo"))
    assert both == pytest.approx(2 * one, rel=0.2)
    needed = estimate(recipe(model=TINY_LLAMA | {"model_type": "mixtral"}), length=16)
    has_fake = Version(torch.__version__).release >= (2, 14)  # newer ones have fakes of some experts as well
    assert needed.activation_bytes is None or has_fake
    known = needed.held_on_device + needed.moment_bytes + (needed.activation_bytes or 0)
    assert needed.device_bytes == known


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
    with pytest.raises(OutOfMemory, match=where) as caught, translated_out_of_memory():
        raise failure
    assert "activation_checkpointing" in caught.value.hint
    with pytest.raises(RuntimeError, match="shapes"), translated_out_of_memory():
        raise RuntimeError("shapes don't match")
