"""Tokenizers and models as a recipe asks for them, and errors where they are not available."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from tests.kit.recipes import HUGE
from tests.kit.stand_ins import write_llama
from tests.unit.assets.conftest import INT8, LABELS, LORA, NF4, TINY_LLAMA, are_equal, built, recipe
from tests.unit.conftest import refused
from trahiv_cli.assets.memory import checkpoint_activations
from trahiv_cli.assets.model import (
    bounded,
    build_tokenizer,
    estimate,
    read_config,
    require_memory,
    require_room,
)
from trahiv_cli.assets.tokenizer import train_tokenizer
from trahiv_cli.errors import OutOfMemory, SetupError
from trahiv_cli.recipe.builtin import BPE

BYTES = {"tokenizer_name_or_path": "builtin/bytes"}


def word_tokenizer(folder, **special):
    words = Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return {"tokenizer_name_or_path": str(folder)}


def kinds(model, among=""):
    """The dtypes of weights, each with whether it is trained; of those with `among` in their names."""
    return {(one.dtype, one.requires_grad) for name, one in model.named_parameters() if among in name}


def test_trained_tokenizer_round_trips_any_text():
    model = TINY_LLAMA | {"vocab_size": 2048}
    tokenizer = build_tokenizer(recipe(model=model, model_section={"tokenizer_name_or_path": BPE}))
    assert len(tokenizer) == 2048
    text = "def f(x):\n\n    return x  # Grüße, 世界 \x00"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_trained_tokenizer_is_reproducible(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    for other in (AutoTokenizer.from_pretrained(tmp_path), train_tokenizer()):
        assert other.get_vocab() == tokenizer.get_vocab()
        assert other.eos_token == "<|end|>"


@pytest.mark.parametrize(
    ("task", "message", "hint"),
    [
        ("clm", "no end-of-text token, which `task: clm` needs", "`eos_token`"),
        ("mlm", "no mask token, which `task: mlm` needs", "`mask_token`"),
        ("seq-cls", "no token to pad with", "`pad_token`"),
    ],
)
def test_tokenizer_lacking_required_token_is_refused(tmp_path, task, message, hint):
    wanted = recipe(task, model_section=word_tokenizer(tmp_path))
    with refused(message, hint):
        build_tokenizer(wanted)


def test_tokenizer_pads_with_eos(tmp_path):
    tokenizer = build_tokenizer(recipe(model_section=word_tokenizer(tmp_path, eos_token="<eos>")))
    assert tokenizer.pad_token == "<eos>"


def test_classifier_has_recipe_labels(llama_folder):
    model = built("seq-cls", llama_folder)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    config = model.config
    assert config.id2label == dict(enumerate(LABELS))
    assert config.label2id == {label: number for number, label in enumerate(LABELS)}
    assert config.pad_token_id is not None


@pytest.mark.parametrize("task", ["clm", "sft", "seq-cls"])
def test_seed_determines_weights(task, llama_folder, bert_folder):
    model = {"clm": TINY_LLAMA, "sft": llama_folder, "seq-cls": bert_folder}[task]

    def drawn(seed):
        return built(task, model, peft=LORA, training={"seed": seed})

    ours = drawn(7)
    torch.rand(3)  # another peer's generator is in another state
    assert are_equal(ours, drawn(7))
    assert not are_equal(ours, drawn(8))


def test_weights_beside_adapters_keep_recipe_dtype():
    model = built(model_section={"dtype": "bfloat16"}, peft=LORA | {"modules_to_save": ["lm_head"]})
    assert model.training
    assert kinds(model) == {(torch.float32, True), (torch.bfloat16, False)}


def test_only_adapters_leave_checkpoint_dtype(tmp_path):
    built().half().save_pretrained(tmp_path)
    lora, full = (built(model=tmp_path, model_section=BYTES, peft=peft) for peft in (LORA, None))
    assert kinds(lora) == {(torch.float32, True), (torch.float16, False)}
    assert kinds(full) == {(torch.float32, True)}


def test_adapters_follow_recipe_targets(llama_folder):
    option = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens"]}
    weights = built(model=llama_folder, peft=LORA | option).named_parameters()
    trained = {name.split(".")[-4] for name, one in weights if one.requires_grad}
    assert trained == {"q_proj", "v_proj", "embed_tokens"}


@pytest.mark.parametrize(
    ("quantization", "dtype"), [(NF4, torch.uint8), (INT8, torch.int8), (None, torch.float32)]
)
def test_adapters_learn_through_frozen_base(llama_folder, quantization, dtype):
    training = {"activation_checkpointing": True}
    model = built("sft", llama_folder, peft=LORA, quantization=quantization, training=training)
    assert kinds(model, "_proj") == {(torch.float32, True), (dtype, False)}
    assert kinds(model, "norm") == kinds(model, "lm_head") == {(torch.float32, False)}
    checkpoint_activations(model)  # as the Trainer does
    tokens = torch.arange(16).reshape(2, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(weight.grad.any() for name, weight in model.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize(
    ("option", "dtype"), [({}, torch.float32), ({"bnb_4bit_compute_dtype": "bfloat16"}, torch.bfloat16)]
)
def test_quantized_layers_compute_in_recipe_dtype(llama_folder, option, dtype):
    model = built(model=llama_folder, peft=LORA, quantization=NF4 | option)
    assert {one.compute_dtype for one in model.modules() if hasattr(one, "compute_dtype")} == {dtype}


def test_skipped_layers_stay_unquantized(llama_folder):
    option = {"llm_int8_skip_modules": ["q_proj", "lm_head"]}
    model = built(model=llama_folder, peft=LORA, quantization=NF4 | option)
    assert kinds(model, "q_proj.base") == {(torch.float32, False)}
    assert kinds(model, "k_proj.base") == {(torch.uint8, False)}


@pytest.mark.parametrize("use", [built, lambda **sections: require_memory(recipe(**sections))])
def test_quantizing_without_bitsandbytes_names_package(llama_folder, monkeypatch, use):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: find(name) if name == "peft" else None)
    with refused("bitsandbytes is not installed", "pip install bitsandbytes", SetupError):
        use(model=llama_folder, peft=LORA, quantization=NF4)


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (
            lambda held: held.update({f"_orig_mod.{name}": held.pop(name) for name in list(held)}),
            "21 of 21 .*embed_tokens",
            "torch.compile",
        ),
        (
            lambda held: held.pop("lm_head.weight"),
            "1 of 21 weights are not in the checkpoint, such as lm_head",
            "complete",
        ),
        (
            lambda held: held.update({EMBEDDING: held[EMBEDDING][1:]}),
            rf"{EMBEDDING}' has the shape \[\d+, 64\], and the model's \[\d+, 64\]",
            "config.json",
        ),
    ],
)
def test_checkpoint_lacking_model_weights_is_refused(tmp_path, change, message, hint):
    file = write_llama(tmp_path) / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})
    with refused(message, hint):
        built("sft", tmp_path)


def test_encoder_gets_new_head(tmp_path, bert_folder, bert_tokenizer):
    AutoModel.from_pretrained(bert_folder, add_pooling_layer=False).save_pretrained(tmp_path)
    bert_tokenizer.save_pretrained(tmp_path)
    assert type(built("mlm", tmp_path)).__name__ == "BertForMaskedLM"
    built("seq-cls", tmp_path, peft=LORA)
    with refused("cls.predictions.bias"):
        built("mlm", tmp_path, peft=LORA)


def test_missing_shard_asks_for_whole_folder(tmp_path):
    built().save_pretrained(tmp_path, max_shard_size="50KB")
    min(tmp_path.glob("model-*.safetensors")).unlink()
    with refused("No such file.*model-00001", "Copy the whole folder"):
        built(model=tmp_path, model_section=BYTES)


def test_new_model_uses_tokenizer_eos(byte_tokenizer):
    config = built().generation_config
    assert (config.eos_token_id, config.bos_token_id) == (byte_tokenizer.eos_token_id, None)


def changed(**fields):
    return {"model": TINY_LLAMA | fields}


@pytest.mark.parametrize(
    ("sections", "message", "hint"),
    [
        ({"peft": {"target_modules": ["query"]}}, "query", "q_proj"),
        ({"peft": {"modules_to_save": ["lm_heads"]}}, "'lm_heads'", "lm_head, "),
        (changed(model_type="llamma"), "identifier: llamma", "`model` section"),
        (changed(hiden_act="silu"), "no field 'hiden_act'", "'hidden_act'"),
        (changed(hidden_size=33), "33", "model.config"),
        (changed(hidden_act="swiglu"), "`model.config.hidden_act`", "'silu'"),
        (changed(rope_scaling={"rope_type": "yarn"}), "KeyError: .*factor", "model"),
        (changed(num_key_value_heads=3), "RuntimeError: .*size", "model"),
        (changed(vocab_size=300), "has 384 tokens, .* only 300 emb", "vocab_size"),
    ],
)
def test_impossible_model_request_gets_hint(sections, message, hint):
    with refused(message, hint):
        built(**sections)
        estimate(recipe(**sections), length=8)


@pytest.mark.parametrize("build", [build_tokenizer, read_config])
def test_model_missing_from_hub_gets_hint(build):
    with refused("nobody/nothing' could not be", "connection"):
        build(recipe(model=Path("nobody/nothing")))


@pytest.mark.parametrize(("task", "kind"), [("sft", "t5"), ("mlm", "llama"), ("seq-cls", "mamba2")])
def test_unfit_kind_of_model_is_refused(task, kind):
    with refused(f"a {kind}, .* can't", "task"):
        read_config(recipe(task, {"model_type": kind}))


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (Path.exists, r"folder' is not a model: it has no config\.json"),
        (Path.rmdir, r"There is no folder '.*folder'"),
        (AutoConfig.for_model(**TINY_LLAMA).save_pretrained, r"could not be loaded: .*model\.safetensors"),
    ],
)
def test_folder_without_model_is_refused(tmp_path, prepare, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    prepare(folder)
    with refused(message):
        built(model=folder, model_section=BYTES)


@pytest.fixture
def llama_with(tmp_path):
    """Write a llama with another config, and return its folder."""

    def write(**fields):
        written = write_llama(tmp_path) / "config.json"
        written.write_text(json.dumps(json.loads(written.read_text()) | fields))
        return tmp_path

    return write


@pytest.mark.parametrize(
    "field",
    [
        {"attn_implementation": "owner/kernels"},
        {"experts_implementation": "owner/kernels"},
        {"output_attentions": True},
    ],
)
def test_hub_config_chooses_no_code(llama_with, field):
    config = built(model=llama_with(**field)).config
    assert config._attn_implementation == "sdpa"
    assert config._experts_implementation in (None, "eager")


def test_config_with_million_layers_is_refused(llama_with):
    with refused("asks for 1,000,000 `num_hidden_layers`"):
        read_config(recipe(model=llama_with(num_hidden_layers=10**6)))


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size"])
def test_sizes_beyond_memory_raise_asset_error(field):
    with refused("could not be loaded: .*long", "`model` section"):
        require_memory(recipe(**changed(**{field: 10**20})))


def test_oversized_model_is_not_built():
    with bounded(8):
        nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(4)))
    numbers = iter(range(10**9))
    with refused("more than 8 layers and weights; it was not built"), bounded(8):
        nn.ModuleList(nn.Linear(1, 1) for _ in numbers)
    assert next(numbers) == 3
    nn.Linear(1, 1)


def test_memory_is_checked_before_loading():
    words = r"needs \d{3,}\.\d GiB of RAM before activations, and \d+\.\d GiB are free"
    with refused(words, "LoRA", OutOfMemory):
        require_memory(recipe(model=HUGE))


@pytest.mark.parametrize("place", ["GPU", "RAM"])
def test_last_missing_byte_is_refused(gpu, place):
    needed = estimate(recipe(), length=8)
    free = {"GPU": needed.device_bytes, "RAM": needed.host_bytes}
    require_room(needed, free)
    with refused(f"GiB of (the )?{place}, and", error=OutOfMemory):
        require_room(needed, free | {place: free[place] - 1})
