import dataclasses
from typing import get_args

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from hivemind.compression import CompressionInfo
from transformers import Trainer, TrainingArguments

from tests.unit.assets.conftest import INT8, LORA, NF4, TINY_LLAMA, built, recipe
from trahiv_cli.assets.memory import (
    FLOAT32_BYTES,
    OFFLOADED_OPTIMIZERS,
    savings,
    state_bytes,
    translated_out_of_memory,
)
from trahiv_cli.assets.model import build_outline, estimate, require_memory
from trahiv_cli.assets.rehearsal import Count, Pass, activation_bytes
from trahiv_cli.assets.traffic import AUTO_CODECS, PART_BYTES, Traffic, encoded_bytes
from trahiv_cli.errors import OutOfMemory
from trahiv_cli.optim.assemble import CODECS, initialize_state
from trahiv_cli.optim.auto import CODECS_BY_LOSS
from trahiv_cli.optim.pace import Pace
from trahiv_cli.recipe.schema import OptimName, TrainingSection

BATCH = Pass(2, 32, torch.float32, has_checkpoints=False, has_tiled_head=False, has_triton=False)


@pytest.fixture
def gpu(monkeypatch):
    """Let this machine pass for one with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)


def copies(needed, num_bytes):
    """How many float32 copies of the trained weights that is."""
    return num_bytes / (FLOAT32_BYTES * needed.num_trainable)


# -- weights --------------------------------------------------------------------------------------


def test_adapters_take_less_than_training_every_weight():
    bf16 = {"model_section": {"dtype": "bfloat16"}}
    full, lora = require_memory(recipe(**bf16)), require_memory(recipe(**bf16, peft=LORA))
    assert full.num_frozen == full.frozen_bytes == 0
    assert lora.num_frozen == full.num_trainable
    assert lora.frozen_bytes == 2 * lora.num_frozen
    assert lora.total_bytes < full.total_bytes


@pytest.mark.parametrize("quantization", [NF4, {"load_in_4bit": True}, INT8], ids=["nested", "nf4", "int8"])
def test_a_quantized_base_is_counted_as_bitsandbytes_holds_it(llama_folder, quantization):
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


def test_preference_training_of_every_weight_has_a_second_model_beside_it():
    full = require_memory(recipe("dpo"))
    assert full.reference_bytes == full.trainable_bytes
    assert require_memory(recipe("dpo", peft=LORA)).reference_bytes == 0


# -- the optimizer and the swarm's copies ---------------------------------------------------------


@pytest.fixture
def _bitsandbytes_was_told_nothing():
    """Its manager is one for the whole process, and remembers weights by identity and by place."""
    GlobalOptimManager.get_instance().initialize()
    yield
    GlobalOptimManager.get_instance().initialize()


SAID = dict.fromkeys(get_args(OptimName))
WITH_ARGUMENTS = [("sgd", "momentum=0.9"), ("rmsprop", "momentum=0.9,centered=true")]


@pytest.mark.usefixtures("_bitsandbytes_was_told_nothing")
@pytest.mark.parametrize(("optim", "optim_args"), [*SAID.items(), *WITH_ARGUMENTS])
def test_each_optimizer_is_counted_with_the_state_that_it_makes(tmp_path, optim, optim_args):
    arguments = TrainingArguments(str(tmp_path), optim=optim, optim_args=optim_args, report_to=[])
    cls, keywords = Trainer.get_optimizer_cls_and_kwargs(arguments)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((96, 96), (7, 300), (3, 5, 400), (9,))]
    optimizer = cls(weights, **keywords)
    initialize_state(optimizer)
    training = TrainingSection(max_steps=1, optim=optim, optim_args=optim_args)
    shared = ("qmap1", "qmap2")  # tables that all weights have together
    for weight in weights:
        made = [
            value.nbytes
            for name, value in optimizer.state[weight].items()
            if isinstance(value, torch.Tensor) and value.dim() and name not in shared
        ]
        assert state_bytes(weight.shape, training) == sum(made)


def test_an_8_bit_optimizer_keeps_32_bits_for_embeddings():
    model = TINY_LLAMA | {"tie_word_embeddings": True, "vocab_size": 4096}
    needed = require_memory(recipe(model=model, training={"optim": "adamw_8bit"}))
    assert needed.optimizer_bytes > 2 * FLOAT32_BYTES * 4096 * 32


@pytest.mark.parametrize(
    ("optim", "offload", "is_offloaded"),
    [
        ("adamw_torch", "auto", True),
        ("paged_adamw_8bit", "auto", False),
        ("adamw_torch", False, False),
        ("adamw_8bit", True, True),
    ],
)
def test_the_state_is_where_the_optimizer_steps(gpu, optim, offload, is_offloaded):
    opt = {"opt": {"offload_optimizer": offload}}
    needed = estimate(recipe(training={"optim": optim}, hivemind_config=opt, swarm={"mode": "sync"}))
    without = dataclasses.replace(needed, optimizer_bytes=0)
    assert (needed.held_on_host > without.held_on_host) is is_offloaded
    assert (needed.held_on_device > without.held_on_device) is not is_offloaded
    assert copies(needed, needed.copy_bytes) == is_offloaded


def test_offloaded_optimizers_are_those_that_are_not_bitsandbytes():
    for optim in get_args(OptimName):
        words = ("8bit", "paged", "bnb", "lion", "ademamix")
        assert (optim in OFFLOADED_OPTIMIZERS) is not any(word in optim for word in words)


def test_accumulators_are_the_gradients_except_beside_a_scaler(gpu):
    plain, scaled = estimate(recipe()), estimate(recipe(training={"fp16": True}))
    assert copies(plain, plain.gradient_bytes) == 1
    assert copies(scaled, scaled.gradient_bytes) == 2


def test_a_cpu_peer_pays_for_everything_in_ram():
    needed = require_memory(recipe(swarm={"mode": "sync"}))
    held = needed.held_on_device + needed.held_on_host - needed.libraries_bytes
    # weights, accumulators, two moments, what is averaged, what is stepped
    assert copies(needed, held) == 6
    assert needed.total_bytes == needed.held_on_device + needed.held_on_host + needed.moment_bytes
    auto = require_memory(recipe())  # takes at most what its last mode takes
    assert copies(auto, auto.mode_device_bytes + auto.mode_host_bytes) == 3


def test_a_gpu_peer_pays_for_the_model_there_and_for_the_rest_in_ram(gpu):
    needed = estimate(recipe(swarm={"mode": "sync"}))
    assert copies(needed, needed.held_on_device) == 2
    # two moments, what is averaged, what is stepped, and gradients on their way from the GPU
    assert copies(needed, needed.held_on_host - needed.libraries_bytes) == 5
    assert needed.device_bytes == needed.held_on_device + (needed.activation_bytes or 0)
    assert needed.host_bytes == needed.held_on_host + needed.moment_bytes


@pytest.mark.parametrize(
    ("swarm", "opt", "on_device", "on_host"),
    [
        ({"mode": "sync"}, {}, 0, 1),
        ({"mode": "overlap"}, {"offload_optimizer": True}, 1, 1),
        ({"mode": "overlap"}, {}, 2, 1),
        ({"mode": "diloco"}, {}, 0, 3),
        ({"mode": "streaming"}, {}, 0, 3),
        ({"mode": "auto"}, {}, 2, 4),
    ],
    ids=["sync", "overlap, offloaded", "overlap", "diloco", "streaming", "auto"],
)
def test_a_mode_has_copies_of_its_own(gpu, swarm, opt, on_device, on_host):
    needed = estimate(recipe(swarm=swarm, hivemind_config={"opt": opt}))
    assert copies(needed, needed.mode_device_bytes) == on_device
    assert copies(needed, needed.mode_host_bytes) == on_host
    # guesses and local steps are taken where the model is
    assert needed.is_offloaded == (swarm["mode"] == "sync" or "offload_optimizer" in opt)


def test_a_lossy_codec_keeps_what_it_lost():
    exact, lossy = (
        require_memory(recipe(swarm={"mode": "sync"}, hivemind_config={"opt": {"grad_compression": codec}}))
        for codec in ("none", "float16")
    )
    assert copies(exact, exact.residual_bytes) == 0 and copies(lossy, lossy.residual_bytes) == 1
    assert lossy.held_on_host - exact.held_on_host == lossy.residual_bytes
    assert require_memory(recipe()).residual_bytes, "as auto's codecs are"


def test_a_round_is_beside_a_batch_where_training_goes_on():
    modes = ("sync", "overlap")
    waiting, going_on = (estimate(recipe(swarm={"mode": mode}), length=64) for mode in modes)
    assert waiting.working_bytes == max(waiting.activation_bytes or 0, waiting.moment_bytes)
    assert going_on.working_bytes == max(
        (going_on.activation_bytes or 0) + going_on.trainable_bytes, going_on.moment_bytes
    )


# -- activations ----------------------------------------------------------------------------------


def rehearsed(task="clm", model=TINY_LLAMA, batch=BATCH, **sections):
    outline, _ = build_outline(recipe(task, model, **sections))
    found = activation_bytes(outline, batch)
    assert found is not None
    return found


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_the_rehearsal_counts_what_the_real_pass_holds(peft):
    model = built(recipe(peft=peft))
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    with Count(model) as count:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert rehearsed(peft=peft) == pytest.approx(count.peak, rel=0.02)


def test_activations_grow_with_the_batch_and_shrink_with_checkpoints_and_half_precision():
    one = rehearsed()
    assert rehearsed(batch=dataclasses.replace(BATCH, rows=4)) == pytest.approx(2 * one, rel=0.05)
    deep = TINY_LLAMA | {"num_hidden_layers": 8}
    kept = rehearsed(model=deep)
    assert rehearsed(model=deep, batch=dataclasses.replace(BATCH, has_checkpoints=True)) < 0.6 * kept
    # and in half precision
    wide = TINY_LLAMA | {"hidden_size": 128, "intermediate_size": 512}
    whole = dataclasses.replace(BATCH, rows=32, length=128)
    half = dataclasses.replace(whole, dtype=torch.bfloat16)
    assert rehearsed(model=wide, batch=half) < 0.8 * rehearsed(model=wide, batch=whole)


def test_a_tiled_head_holds_no_logits_but_tiles():
    tiled = dataclasses.replace(BATCH, has_tiled_head=True, has_triton=True, rows=16, length=512)
    large = {"vocab_size": 200_000, "max_position_embeddings": 512}
    assert rehearsed("sft", TINY_LLAMA | large, tiled) < 16 * 512 * 200_000 * 4 / 4
    assert rehearsed("sft", TINY_LLAMA | large, dataclasses.replace(tiled, has_triton=False)) > 2**31


@pytest.mark.parametrize(
    ("task", "kind"), [("sft", "llama"), ("dpo", "llama"), ("mlm", "bert"), ("seq-cls", "bert")]
)
def test_every_task_can_be_rehearsed(task, kind, request):
    assert estimate(recipe(task, request.getfixturevalue(f"{kind}_folder")), length=16).activation_bytes


def test_preferences_take_two_sequences_each(llama_folder):
    one, both = (
        estimate(recipe(task, llama_folder, peft=LORA), length=64).activation_bytes for task in ("sft", "dpo")
    )
    assert both == pytest.approx(2 * one, rel=0.2)


def test_a_model_that_has_no_fake_has_unknown_activations():
    wanted = recipe(model=TINY_LLAMA | {"model_type": "mixtral"})
    needed = estimate(wanted, length=16)
    assert needed.activation_bytes is None
    assert needed.working_bytes == needed.moment_bytes


def test_other_attention_kernels_are_counted_like_torch_s_own(llama_folder):
    outline, _ = build_outline(recipe(model=llama_folder))
    outline.config._attn_implementation = "flash_attention_2"
    assert activation_bytes(outline, BATCH) == rehearsed(model=llama_folder)
    assert outline.config._attn_implementation == "flash_attention_2"


# -- traffic --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_encoded_tensors_are_as_long_as_hivemind_makes_them(codec):
    shapes = [torch.Size((300, 1000)), torch.Size((700, 1000)), torch.Size((64,))]
    tensors = [torch.randn(shape) for shape in shapes]
    make = CODECS[codec]()
    size = int(PART_BYTES / (4 * make.estimate_compression_ratio(CompressionInfo.from_tensor(tensors[0]))))
    parts = [part for tensor in tensors for part in tensor.view(-1).split(size)]

    def encoded(some):
        return sum(len(make.compress(part, CompressionInfo.from_tensor(part)).buffer) for part in some)

    assert encoded_bytes(shapes, codec, has_parts=True) == encoded(parts)
    assert encoded_bytes(shapes, codec, has_parts=False) == encoded(tensors)


def test_two_peers_send_the_gradient_once_and_many_almost_twice():
    traffic = Traffic(gradient_bytes=1000, state_bytes=3000)
    assert [traffic.sent_in_round(peers) for peers in (1, 2, 4, 1000)] == [0, 1000, 1500, 1998]


def test_modes_with_local_steps_exchange_one_fragment_every_few_steps():
    common = require_memory(recipe(swarm={"mode": "sync"}))
    for mode, steps, share in (("diloco", 50, 1), ("streaming", 13, 4)):
        traffic = require_memory(recipe(swarm={"mode": mode})).traffic
        assert traffic.steps_per_round == Pace(mode=mode).steps_per_round == steps
        assert share * traffic.sent_in_round(2) == pytest.approx(common.traffic.sent_in_round(2), abs=share)


def test_a_joiner_of_a_mode_with_local_steps_gets_momentum_and_statistics_in_8_bits():
    modes = ("sync", "auto", "diloco")
    sync, auto, diloco = (require_memory(recipe(swarm={"mode": mode})) for mode in modes)
    assert [copies(sync, needed.traffic.state_bytes) for needed in (sync, auto)] == [3, 4]
    assert 2.5 <= copies(diloco, diloco.traffic.state_bytes) < 2.6
    small = {"optim": "adamw_8bit"}
    in_8_bits = require_memory(recipe(training=small, swarm={"mode": "diloco"}))
    assert in_8_bits.traffic.state_bytes == 2 * in_8_bits.trainable_bytes + in_8_bits.optimizer_bytes


def test_what_auto_chooses_from_is_told():
    assert tuple(CODECS_BY_LOSS) == AUTO_CODECS
    traffic = require_memory(recipe()).traffic
    sizes = traffic.sent_by_choice(1000)
    assert list(sizes) == [*AUTO_CODECS, "a fragment"]
    assert sorted(sizes.values(), reverse=True) == list(sizes.values())
    assert sizes["float16"] == traffic.sent_in_round(1000)
    named = require_memory(recipe(hivemind_config={"opt": {"grad_compression": "blockwise8"}})).traffic
    assert list(named.by_choice) == ["blockwise8", "a fragment"]


def test_only_what_is_trained_travels(llama_folder):
    opt = {"opt": {"grad_compression": "float16", "load_state_compression": "float16"}}
    nf4 = {"quantization": NF4, "training": {"optim": "paged_adamw_8bit"}}
    wanted = recipe("sft", llama_folder, peft=LORA, hivemind_config=opt, swarm={"mode": "overlap"}, **nf4)
    needed = require_memory(wanted)
    adapters = [weight.shape for weight in built(wanted).parameters() if weight.requires_grad]
    codec, num_values = CODECS["float16"](), [shape.numel() for shape in adapters]
    encoded = sum(codec.encoded_bytes(count, torch.float32) for count in num_values)
    assert needed.num_trainable == sum(num_values) and max(num_values) < PART_BYTES / 2, "one part each"
    assert 2 * needed.num_trainable < encoded < 2.01 * needed.num_trainable
    assert needed.traffic.gradient_bytes == encoded
    assert needed.traffic.state_bytes == encoded + needed.optimizer_bytes


# -- when it runs out -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "where"),
    [
        (MemoryError(), "RAM"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "GPU"),
        (RuntimeError("CUDA error: out of memory"), "GPU"),
    ],
)
def test_running_out_of_memory_says_what_to_change(failure, where):
    with pytest.raises(OutOfMemory, match=where) as caught, translated_out_of_memory(recipe()):
        raise failure
    assert "activation_checkpointing" in caught.value.hint and "clm.max_length" in caught.value.hint


def test_what_torch_raises_on_a_cpu_is_understood_and_other_errors_pass_through():
    with pytest.raises(OutOfMemory, match="RAM"), translated_out_of_memory(recipe()):
        torch.empty(2**50)
    with pytest.raises(RuntimeError, match="shapes"), translated_out_of_memory(recipe()):
        raise RuntimeError("shapes don't match")


def test_savings_propose_nothing_that_is_there_already(llama_folder):
    said = savings(recipe(model=llama_folder))
    assert "LoRA" in said and "batch_size" in said and "4bit" not in said
    tight = {"per_device_train_batch_size": 1, "activation_checkpointing": True}
    said = savings(recipe(model=llama_folder, peft=LORA, training=tight))
    assert "load_in_4bit" in said and "batch_size" not in said and "checkpointing" not in said
    assert "`swarm.mode: overlap`" in said
    exact = {"swarm": {"mode": "sync"}}
    said = savings(recipe(model=llama_folder, peft=LORA, quantization=NF4, training=tight, **exact))
    assert said == "Lower `clm.max_length`, or choose a smaller model."
