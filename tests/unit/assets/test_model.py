"""Tokenizers and models as a recipe asks for them, and errors where they are not available."""

import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from tests.kit.stand_ins import write_llama
from tests.unit.assets.conftest import INT8, LABELS, LORA, NF4, TINY_LLAMA, are_equal, built, recipe
from trahiv_cli.assets.memory import checkpoint_activations
from trahiv_cli.assets.model import (
    END,
    NUM_TOKENS,
    bounded,
    build_model,
    build_tokenizer,
    read_config,
    require_memory,
    train_tokenizer,
)
from trahiv_cli.assets.model import estimate as memory_estimate
from trahiv_cli.errors import AssetError, OutOfMemory, SetupError
from trahiv_cli.recipe.builtin import BPE

BIG = TINY_LLAMA | {"vocab_size": NUM_TOKENS}
BYTES = {"tokenizer_name_or_path": "builtin/bytes"}


def word_tokenizer(folder, **special):
    words = Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1, "hello": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **special).save_pretrained(folder)
    return {"tokenizer_name_or_path": str(folder)}


def weights(model, *, trained):
    """The trained or the untrained weights, by name."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad is trained}


def dtypes(model, *, trained, among=""):
    return {one.dtype for name, one in weights(model, trained=trained).items() if among in name}


def test_trained_tokenizer_round_trips_any_text(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    tokenizer = build_tokenizer(recipe(model_section={"tokenizer_name_or_path": BPE}, model=BIG))
    assert (len(tokenizer), tokenizer.eos_token) == (NUM_TOKENS, END)
    for text in ("def f(x):\n\n    return x  # ok", "Grüße, 世界 \x00"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    for other in (AutoTokenizer.from_pretrained(tmp_path), train_tokenizer()):
        assert other.get_vocab() == tokenizer.get_vocab() and other.eos_token == END


@pytest.mark.parametrize(
    ("task", "special", "message", "hint"),
    [
        ("clm", {}, "no end-of-text token, which `task: clm` needs", "`eos_token`"),
        ("mlm", {"pad_token": "<unk>"}, "no mask token, which `task: mlm` needs", "`mask_token`"),
        ("seq-cls", {}, "no token to pad with", "`pad_token`"),
    ],
)
def test_tokenizer_lacking_required_token_is_refused(tmp_path, task, special, message, hint):
    wanted = recipe(task, model_section=word_tokenizer(tmp_path, **special))
    with pytest.raises(AssetError, match=message) as refused:
        build_tokenizer(wanted)
    assert hint in refused.value.hint
    tokenizer = build_tokenizer(recipe(model_section=word_tokenizer(tmp_path, eos_token="<eos>")))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1, "it pads with its end of text"


@pytest.mark.parametrize(
    ("task", "kind", "name"),
    [
        ("sft", "llama", "LlamaForCausalLM"),
        ("mlm", "bert", "BertForMaskedLM"),
        ("seq-cls", "llama", "LlamaForSequenceClassification"),
    ],
)
def test_task_builds_its_model_class(task, kind, name, request):
    model = built(recipe(task, request.getfixturevalue(f"{kind}_folder")))
    assert type(model).__name__ == name
    if task == "seq-cls":
        assert model.config.id2label == dict(enumerate(LABELS))
        assert model.config.label2id == {label: index for index, label in enumerate(LABELS)}
        assert model.config.num_labels == 3 and model.config.pad_token_id is not None


@pytest.mark.parametrize("task", ["clm", "sft", "seq-cls"], ids=["new", "checkpoint", "new head"])
def test_seed_determines_weights(task, llama_folder, bert_folder):
    model = {"clm": TINY_LLAMA, "sft": llama_folder, "seq-cls": bert_folder}[task]
    ours = built(recipe(task, model, peft=LORA, training={"seed": 7}))
    torch.rand(3)  # another peer's generator is in another state
    assert are_equal(ours, built(recipe(task, model, peft=LORA, training={"seed": 7})))
    assert not are_equal(ours, built(recipe(task, model, peft=LORA, training={"seed": 8})))


def test_only_trained_weights_become_float32(tmp_path):
    wanted = recipe(model_section={"dtype": "bfloat16"}, peft=LORA | {"modules_to_save": ["lm_head"]})
    model = built(wanted)
    assert isinstance(model, PeftModel) and model.training
    assert dtypes(model, trained=True) == {torch.float32}
    assert dtypes(model, trained=False) == {torch.bfloat16}
    built(recipe()).to(torch.float16).save_pretrained(tmp_path)
    section = {"model_name_or_path": str(tmp_path), "config": None, **BYTES}
    assert dtypes(built(recipe(model_section=section, peft=LORA)), trained=False) == {torch.float16}
    full = built(recipe(model_section=section))
    assert dtypes(full, trained=True) == {torch.float32} and not weights(full, trained=False)


def test_adapters_follow_recipe_targets(llama_folder, bert_folder):
    option = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens"]}
    names = weights(built(recipe(model=llama_folder, peft=LORA | option)), trained=True)
    found = {name.split(".lora_A")[0].rpartition(".")[2] for name in names if "lora_A" in name}
    assert found == {"q_proj", "v_proj"}
    assert any("embed_tokens.modules_to_save" in name for name in names)
    names = weights(built(recipe("seq-cls", bert_folder, peft=LORA)), trained=True)
    assert any("classifier" in name and "lora" not in name for name in names)


@pytest.mark.parametrize(
    ("quantization", "dtype"), [(NF4, torch.uint8), (INT8, torch.int8), (None, torch.float32)]
)
def test_adapters_learn_through_frozen_base(llama_folder, quantization, dtype):
    training = {"activation_checkpointing": True}
    model = built(recipe("sft", llama_folder, peft=LORA, quantization=quantization, training=training))
    assert dtypes(model, trained=True) == {torch.float32}
    assert dtypes(model, trained=False, among="_proj") == {dtype}
    assert dtypes(model, trained=False, among="norm") == {torch.float32}
    assert dtypes(model, trained=False, among="lm_head") == {torch.float32}
    checkpoint_activations(model)  # as the Trainer does
    tokens = torch.arange(16).reshape(2, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    last = [weight for name, weight in model.named_parameters() if "lora_B" in name]
    assert last and all(weight.grad is not None and weight.grad.any() for weight in last)


def test_quantization_follows_recipe_options(llama_folder):
    option = {"llm_int8_skip_modules": ["q_proj", "lm_head"], "bnb_4bit_compute_dtype": "bfloat16"}
    for more, expected in (({}, torch.float32), (option, torch.bfloat16)):
        model = built(recipe(model=llama_folder, peft=LORA, quantization=NF4 | more))
        layers = [one for one in model.modules() if type(one).__name__ == "Linear4bit"]
        assert {one.compute_dtype for one in layers if hasattr(one, "compute_dtype")} == {expected}
    assert dtypes(model, trained=False, among="q_proj") == {torch.float32}
    assert dtypes(model, trained=False, among="k_proj") == {torch.uint8}


def test_quantizing_without_bitsandbytes_names_package(llama_folder, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: find(name) if name == "peft" else None)
    for use in (built, require_memory):
        with pytest.raises(SetupError, match="bitsandbytes is not installed") as caught:
            use(recipe(model=llama_folder, peft=LORA, quantization=NF4))
        assert "pip install bitsandbytes" in caught.value.hint


estimate = partial(memory_estimate, length=8)


def without_tokenizer(wanted):
    """Build a recipe's model alone."""
    return build_model(wanted, build_tokenizer(recipe()))


def change_weights(folder, change):
    """Rewrite a folder's weights: `change` takes a name and a tensor, and returns both or None."""
    weights = load_file(folder / "model.safetensors")
    changed = filter(None, (change(name, value) for name, value in weights.items()))
    save_file(dict(changed), folder / "model.safetensors", {"format": "pt"})


LOST = {
    "prefix": (lambda name, value: (f"_orig_mod.{name}", value), r"21 of 21 .*embed_tokens", "torch.compile"),
    "layer": (
        lambda name, value: None if ".layers.1." in name else (name, value),
        "9 of 21 weights are not in the checkpoint, such as",
        "complete",
    ),
    "head": (
        lambda name, value: None if "lm_head" in name else (name, value),
        "1 of 21 .*lm_head",
        "complete",
    ),
    "shape": (
        lambda name, value: (name, value[1:] if "embed_tokens" in name else value),
        r"embed_tokens.weight' has the shape \[\d+, 64\], and the model's \[\d+, 64\]",
        "config.json",
    ),
}


@pytest.mark.parametrize("change", LOST)
def test_checkpoint_lacking_model_weights_is_refused(tmp_path, change):
    changed, message, hint = LOST[change]
    change_weights(write_llama(tmp_path), changed)
    with pytest.raises(AssetError, match=message) as refused:
        built(recipe("sft", tmp_path))
    assert hint in refused.value.hint


def test_encoder_gets_new_head(tmp_path, bert_folder):
    AutoModel.from_pretrained(bert_folder, add_pooling_layer=False).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert_folder).save_pretrained(tmp_path)
    assert built(recipe("mlm", tmp_path)) and built(recipe("seq-cls", tmp_path, peft=LORA))
    with pytest.raises(AssetError, match="cls.predictions.bias"):
        built(recipe("mlm", tmp_path, peft=LORA))


def test_missing_shard_asks_for_whole_folder(tmp_path):
    built(recipe()).save_pretrained(tmp_path, max_shard_size="50KB")
    min(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(AssetError, match="No such file.*model-00001") as refused:
        built(recipe(model=tmp_path, model_section=BYTES))
    assert "Copy the whole folder" in refused.value.hint


def test_new_model_uses_tokenizer_eos(byte_tokenizer):
    model = built(recipe())
    assert model.generation_config.eos_token_id == byte_tokenizer.eos_token_id
    assert model.generation_config.bos_token_id is None


MISSPELT = {"model_type": "llama", "num_hiden_layers": 2}
NOWHERE = {"model": Path("nobody/nothing")}
OTHER_KINDS = {"sft": "t5", "mlm": "llama", "seq-cls": "mamba2"}


@pytest.mark.parametrize(
    ("build", "sections", "message", "hint"),
    [
        (built, {"peft": {"target_modules": ["query"]}}, "query", "q_proj"),
        (built, {"peft": {"modules_to_save": ["lm_heads"]}}, "'lm_heads'", "lm_head, "),
        (built, {"model": TINY_LLAMA | {"model_type": "llamma"}}, "identifier: llamma", "`model` section"),
        (built, {"model": MISSPELT}, "no field 'num_hiden_layers'", "'num_hidden_layers'"),
        (built, {"model": TINY_LLAMA | {"hidden_size": 33}}, "33", "model.config"),
        (
            built,
            {"model": TINY_LLAMA | {"hidden_act": "swiglu"}},
            "`model.config.hidden_act`",
            "'silu'",
        ),
        (built, {"model": TINY_LLAMA | {"dtype": "bf16"}}, "`model.config.dtype`", "bfloat16"),
        (
            built,
            {"model": TINY_LLAMA | {"rope_scaling": {"rope_type": "yarn"}}},
            "KeyError: .*factor",
            "model",
        ),
        (estimate, {"model": TINY_LLAMA | {"num_key_value_heads": 3}}, "RuntimeError: .*size", "model"),
        (built, {"model": TINY_LLAMA | {"vocab_size": 300}}, "has 384 tokens, .* only 300 emb", "vocab_size"),
        (build_tokenizer, NOWHERE, "nobody/nothing' could not be", "connection"),
        (without_tokenizer, NOWHERE, "nobody/nothing' could not be", "connection"),
        (require_memory, NOWHERE, "nobody/nothing' could not be", "connection"),
        *(
            (without_tokenizer, {"task": task, "model": {"model_type": kind}}, f"a {kind}, .* can't", "task")
            for task, kind in OTHER_KINDS.items()
        ),
    ],
)
def test_impossible_model_request_gets_hint(build, sections, message, hint):
    with pytest.raises(AssetError, match=message) as refused:
        build(recipe(**sections))
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, r"folder' is not a model: it has no config\.json"),
        (lambda folder: folder.rmdir(), r"There is no folder '.*folder'"),
        (AutoConfig.for_model(**TINY_LLAMA).save_pretrained, r"could not be loaded: .*model\.safetensors"),
    ],
)
def test_folder_without_model_is_refused(tmp_path, prepare, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(AssetError, match=message):
        built(recipe(model=folder, model_section=BYTES))


@pytest.mark.parametrize("name", ["attn_implementation", "experts_implementation", "output_attentions"])
def test_hub_config_chooses_no_code(tmp_path, name):
    written = write_llama(tmp_path) / "config.json"
    value = True if name == "output_attentions" else "owner/kernels"
    written.write_text(json.dumps(json.loads(written.read_text()) | {name: value}))
    model = built(recipe(model=tmp_path))
    assert model.config._attn_implementation == "sdpa"
    assert model.config._experts_implementation in (None, "eager")


def test_config_with_million_layers_is_refused(tmp_path):
    written = write_llama(tmp_path) / "config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"num_hidden_layers": 10**6}))
    with pytest.raises(AssetError, match="asks for 1,000,000 `num_hidden_layers`"):
        read_config(recipe(model=tmp_path))


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size"])
def test_sizes_beyond_memory_raise_asset_error(field):
    with pytest.raises(AssetError, match="could not be loaded: .*long") as refused:
        require_memory(recipe(model=TINY_LLAMA | {field: 10**20}))
    assert "`model` section" in refused.value.hint


def test_oversized_model_is_not_built():
    built_parts = []
    with bounded(8):
        torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(4)))
    with pytest.raises(AssetError, match="more than 8 layers and weights; it was not built"), bounded(8):
        torch.nn.ModuleList(built_parts.append(_) or torch.nn.Linear(1, 1) for _ in range(10**9))
    assert len(built_parts) == 3
    torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(9)))


def test_memory_is_checked_before_loading(monkeypatch):
    huge = {"hidden_size": 12288, "num_hidden_layers": 48, "num_attention_heads": 96}
    words = r"needs \d{3,}\.\d GiB of RAM before activations, and \d+\.\d GiB are free"
    with pytest.raises(OutOfMemory, match=words) as caught:
        require_memory(recipe(model=TINY_LLAMA | huge | {"intermediate_size": 4 * 12288}))
    assert "LoRA" in caught.value.hint
    wanted, room = recipe(training={"bf16": False}), [2**40]
    needed = require_memory(wanted)
    assert needed.places == {"RAM": needed.device_bytes + needed.host_bytes}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (room[-1], 0))
    needed = require_memory(wanted)
    assert needed.places == {"GPU": needed.device_bytes, "RAM": needed.host_bytes}
    room.append(needed.device_bytes)
    require_memory(wanted)
    room.append(needed.device_bytes - 1)
    with pytest.raises(OutOfMemory, match="the GPU"):
        require_memory(wanted)
