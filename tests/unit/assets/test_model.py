from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from tests.kit.stand_ins import CHATML_MARKED, write_bert, write_llama
from tests.unit.assets.conftest import TINY_LLAMA
from trahiv_cli.assets.model import adapter_config, build_model, build_tokenizer, require_memory
from trahiv_cli.errors import AssetError, OutOfMemory, SetupError
from trahiv_cli.recipe.schema import Recipe

LORA = {"r": 4}
NF4 = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
INT8 = {"load_in_8bit": True}
LABELS = ["bad", "fair", "good"]


def recipe(task: str = "clm", model: Path | dict[str, Any] = TINY_LLAMA, **sections: Any) -> Recipe:
    """Make a recipe: `model` is a folder or the fields of a new config; the rest are sections."""
    if isinstance(model, Path):
        source: dict[str, Any] = {"model_name_or_path": str(model)}
    else:
        source = {"config": model, "tokenizer_name_or_path": "builtin/bytes"}
    return Recipe.model_validate(
        {
            "name": "test",
            "task": task,
            "data": {"datasets": [{"path": "builtin/trahiv"}], **sections.pop("data", {})},
            "seq_cls": {"labels": LABELS} if task == "seq-cls" else None,
            "training": {"max_steps": 1, **sections.pop("training", {})},
            "model": source | sections.pop("model_section", {}),
            **sections,
        }
    )


def built(wanted: Recipe, **options: bool) -> PreTrainedModel:
    return build_model(wanted, build_tokenizer(wanted), **options)


def saved(model: PreTrainedModel, folder: Path) -> dict[str, str]:
    """Save a model without a tokenizer; give back what the `model` section says of it."""
    model.save_pretrained(folder)
    return {"model_name_or_path": str(folder), "tokenizer_name_or_path": "builtin/bytes"}


def from_section(section: dict[str, str], **sections: Any) -> Recipe:
    return recipe(model=Path(section["model_name_or_path"]), model_section=section, **sections)


def word_tokenizer(folder: Path, **special: str) -> dict[str, str]:
    words = Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1, "hello": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **special).save_pretrained(folder)
    return {"tokenizer_name_or_path": str(folder)}


def dtypes(model: torch.nn.Module, *, trained: bool) -> set[torch.dtype]:
    return {weight.dtype for weight in model.parameters() if weight.requires_grad is trained}


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


# -- tokenizers -----------------------------------------------------------------------------------


def test_the_byte_tokenizer_needs_no_file() -> None:
    tokenizer = build_tokenizer(recipe())
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (384, 1, 0)


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_of_text(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(recipe(model_section=word_tokenizer(tmp_path, eos_token="<eos>")))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


@pytest.mark.parametrize("task", ["clm", "sft", "dpo"])
def test_what_writes_text_needs_an_end_of_text_token(tmp_path: Path, task: str) -> None:
    with pytest.raises(AssetError, match=f"no end-of-text token, which `task: {task}` needs") as caught:
        build_tokenizer(recipe(task, model_section=word_tokenizer(tmp_path)))
    assert "`eos_token`" in caught.value.hint


def test_bert_s_tokenizer_needs_no_end_of_text_token(bert_folder: Path) -> None:
    tokenizer = build_tokenizer(recipe("mlm", bert_folder))
    assert tokenizer.eos_token_id is None and tokenizer.pad_token == "[PAD]"


def test_hiding_words_needs_a_mask_token(tmp_path: Path, bert_folder: Path) -> None:
    without = word_tokenizer(tmp_path, pad_token="<unk>")
    with pytest.raises(AssetError, match="no mask token, which `task: mlm` needs"):
        build_tokenizer(recipe("mlm", bert_folder, model_section=without))


def test_a_tokenizer_that_can_t_pad_is_refused(tmp_path: Path, bert_folder: Path) -> None:
    without = word_tokenizer(tmp_path)
    with pytest.raises(AssetError, match="no token to pad with"):
        build_tokenizer(recipe("seq-cls", bert_folder, model_section=without))


def test_the_recipe_s_chat_template_replaces_the_tokenizer_s(llama_folder: Path) -> None:
    theirs = build_tokenizer(recipe("sft", llama_folder))
    ours = build_tokenizer(recipe("sft", llama_folder, data={"chat_template": CHATML_MARKED}))
    assert ours.chat_template == CHATML_MARKED != theirs.chat_template


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused_with_both_numbers() -> None:
    with pytest.raises(AssetError, match=r"384 tokens.* only 300 embeddings"):
        build_tokenizer(recipe(model=TINY_LLAMA | {"vocab_size": 300}))


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    saved(built(recipe()), tmp_path)
    with pytest.raises(AssetError, match="The tokenizer .* could not be loaded"):
        build_tokenizer(recipe(model=tmp_path))


# -- tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["clm", "sft", "dpo"])
def test_tasks_that_write_text_train_a_causal_model(llama_folder: Path, task: str) -> None:
    assert type(built(recipe(task, llama_folder))).__name__ == "LlamaForCausalLM"


def test_mlm_trains_a_masked_model(bert_folder: Path) -> None:
    assert type(built(recipe("mlm", bert_folder))).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_classification_puts_a_head_with_the_recipe_s_labels_on_the_model(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model = built(recipe("seq-cls", request.getfixturevalue(f"{kind}_folder")))
    assert type(model).__name__.endswith("ForSequenceClassification")
    assert model.config.id2label == dict(enumerate(LABELS))
    assert model.config.label2id == {label: index for index, label in enumerate(LABELS)}
    assert model.config.num_labels == 3 and model.config.pad_token_id is not None


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_every_peer_draws_the_same_head(bert_folder: Path, peft: dict | None) -> None:
    wanted = recipe("seq-cls", bert_folder, peft=peft)
    ours = built(wanted).state_dict()
    torch.rand(3)  # another peer's generator is somewhere else
    theirs = built(wanted).state_dict()
    assert any("classifier" in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_adapters_leave_the_new_head_to_be_trained_in_full(bert_folder: Path) -> None:
    model = built(recipe("seq-cls", bert_folder, peft=LORA))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert any("classifier" in name and "lora" not in name for name in trained)


@pytest.mark.parametrize(
    ("task", "kind", "words"),
    [
        ("mlm", "llama", "is a llama, which is not a masked language model"),
        ("clm", "t5", "is a t5, which is not a causal language model"),
        ("seq-cls", "mamba2", "is a mamba2, which is not a model for sequence classification"),
    ],
)
def test_a_model_of_the_wrong_kind_for_the_task_is_refused(task: str, kind: str, words: str) -> None:
    wanted = recipe(task, {"model_type": kind})
    with pytest.raises(AssetError, match=words) as caught:
        build_model(wanted, build_tokenizer(recipe()))
    assert "another task" in caught.value.hint


# -- seeds and dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_the_same_seed_draws_the_same_weights(peft: dict | None) -> None:
    wanted = recipe(peft=peft, training={"seed": 7})
    ours = built(wanted).state_dict()
    torch.rand(3)  # another peer's generator is somewhere else
    theirs = built(wanted).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_another_seed_draws_other_weights(peft: dict | None) -> None:
    ours = dict(built(recipe(peft=peft, training={"seed": 7})).named_parameters())
    theirs = dict(built(recipe(peft=peft, training={"seed": 8})).named_parameters())
    drawn = [name for name, weight in ours.items() if weight.requires_grad and weight.std() > 0]
    assert drawn
    assert not any(torch.equal(ours[name], theirs[name]) for name in drawn)


def test_adapters_of_one_seed_are_equal_over_a_checkpoint(llama_folder: Path) -> None:
    wanted = recipe(model=llama_folder, peft=LORA)
    ours, theirs = built(wanted).state_dict(), built(wanted).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_adapters_that_trl_puts_on_are_those_that_we_would(llama_folder: Path) -> None:
    wanted = recipe("dpo", llama_folder, peft=LORA)
    ours = built(wanted)
    base = built(wanted, adapters=False)
    assert not isinstance(base, PeftModel) and isinstance(ours, PeftModel)
    torch.manual_seed(wanted.training.seed)  # as trl does
    theirs = get_peft_model(base, adapter_config(wanted, base))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_lora_trains_float32_adapters_over_a_bfloat16_base() -> None:
    wanted = recipe(model_section={"dtype": "bfloat16"}, peft=LORA | {"modules_to_save": ["lm_head"]})
    model = built(wanted)
    assert isinstance(model, PeftModel) and model.training
    assert (dtypes(model, trained=True), dtypes(model, trained=False)) == ({torch.float32}, {torch.bfloat16})


def test_full_training_of_a_bfloat16_checkpoint_is_in_float32(tmp_path: Path) -> None:
    section = saved(built(recipe()).bfloat16(), tmp_path)
    model = built(from_section(section))
    assert (dtypes(model, trained=True), dtypes(model, trained=False)) == ({torch.float32}, set())


def test_auto_keeps_frozen_weights_in_the_checkpoints_dtype(tmp_path: Path) -> None:
    section = saved(built(recipe()).to(torch.float16), tmp_path)
    assert dtypes(built(from_section(section, peft=LORA)), trained=False) == {torch.float16}


# -- adapters -------------------------------------------------------------------------------------


def adapted(model: torch.nn.Module) -> set[str]:
    """Names of the layers that have adapters."""
    return {
        name.split(".lora_A")[0].rpartition(".")[2]
        for name, _ in model.named_parameters()
        if "lora_A" in name
    }


def test_all_linear_adapts_every_layer_but_the_head(llama_folder: Path) -> None:
    model = built(recipe(model=llama_folder, peft=LORA))
    assert adapted(model) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_target_modules_are_those_that_are_listed(llama_folder: Path) -> None:
    model = built(recipe(model=llama_folder, peft=LORA | {"target_modules": ["q_proj", "v_proj"]}))
    assert adapted(model) == {"q_proj", "v_proj"}


def test_modules_to_save_are_trained_in_full_beside_the_adapters(llama_folder: Path) -> None:
    model = built(recipe(model=llama_folder, peft=LORA | {"modules_to_save": ["embed_tokens"]}))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert any("embed_tokens.modules_to_save" in name for name in trained)


def test_dora_adds_a_magnitude_to_each_adapter(llama_folder: Path) -> None:
    model = built(recipe(model=llama_folder, peft=LORA | {"use_dora": True}))
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert sum("magnitude" in name for name in names) == sum("lora_A" in name for name in names) > 0


def test_rslora_scales_by_the_root_of_the_rank(llama_folder: Path) -> None:
    model = built(recipe(model=llama_folder, peft={"r": 4, "lora_alpha": 8.0, "use_rslora": True}))
    scales = {m.scaling["default"] for m in model.modules() if hasattr(m, "lora_A")}
    assert scales == {8.0 / 4**0.5}


def test_target_modules_that_the_model_lacks_are_answered_with_those_it_has() -> None:
    with pytest.raises(AssetError, match="query") as caught:
        built(recipe(peft={"target_modules": ["query"]}))
    assert "q_proj" in caught.value.hint


def test_modules_to_save_that_the_model_lacks_are_answered_with_the_nearest() -> None:
    with pytest.raises(AssetError, match="'lm_heads'") as caught:
        built(recipe(peft={"modules_to_save": ["lm_heads"]}))
    assert "'lm_head'" in caught.value.hint


@pytest.mark.parametrize("quantization", [None, NF4], ids=["frozen", "quantized"])
def test_adapters_get_gradients_through_a_frozen_base_with_checkpoints(
    llama_folder: Path, quantization: dict | None
) -> None:
    training = {"activation_checkpointing": True}
    model = built(recipe("sft", llama_folder, peft=LORA, quantization=quantization, training=training))
    model.activation_checkpointing_enable()  # as the Trainer does
    tokens = torch.arange(16).reshape(2, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    last = [weight for name, weight in model.named_parameters() if "lora_B" in name]
    assert last and all(weight.grad is not None and weight.grad.any() for weight in last)


# -- quantization ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "dtype"), [(NF4, torch.uint8), (INT8, torch.int8)], ids=["nf4", "int8"]
)
def test_a_quantized_base_stays_so_under_float32_adapters(
    llama_folder: Path, quantization: dict, dtype: torch.dtype
) -> None:
    model = built(recipe("sft", llama_folder, peft=LORA, quantization=quantization))
    assert dtypes(model, trained=True) == {torch.float32}
    held = {name: weight.dtype for name, weight in model.named_parameters() if not weight.requires_grad}
    assert {held[name] for name in held if "_proj" in name} == {dtype}
    assert {held[name] for name in held if "norm" in name or "lm_head" in name} == {torch.float32}
    tokens = torch.arange(16).reshape(2, 8)
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()


def test_a_quantized_base_computes_in_what_this_peer_trains_in(llama_folder: Path) -> None:
    model = built(recipe(model=llama_folder, peft=LORA, quantization=NF4))
    layer = next(
        m for m in model.modules() if type(m).__name__ == "Linear4bit" and hasattr(m, "compute_dtype")
    )
    assert layer.compute_dtype == torch.float32
    chosen = NF4 | {"bnb_4bit_compute_dtype": "bfloat16"}
    model = built(recipe(model=llama_folder, peft=LORA, quantization=chosen))
    layer = next(
        m for m in model.modules() if type(m).__name__ == "Linear4bit" and hasattr(m, "compute_dtype")
    )
    assert layer.compute_dtype == torch.bfloat16


def test_layers_can_be_left_as_they_are(llama_folder: Path) -> None:
    chosen = NF4 | {"llm_int8_skip_modules": ["q_proj", "lm_head"]}
    model = built(recipe(model=llama_folder, peft=LORA, quantization=chosen))
    held = {name: weight.dtype for name, weight in model.named_parameters() if "base_layer.weight" in name}
    assert {held[name] for name in held if "q_proj" in name} == {torch.float32}
    assert {held[name] for name in held if "k_proj" in name} == {torch.uint8}


@pytest.mark.parametrize("use", [built, require_memory], ids=["build", "memory"])
def test_quantizing_without_bitsandbytes_names_the_package(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Recipe], object]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "bitsandbytes" else found(name, *rest),
    )
    with pytest.raises(SetupError, match="bitsandbytes is not installed") as caught:
        use(recipe(model=llama_folder, peft=LORA, quantization=NF4))
    assert "pip install bitsandbytes" in caught.value.hint


# -- what can't be loaded -------------------------------------------------------------------------


def test_an_unknown_model_type_is_answered_with_the_nearest() -> None:
    with pytest.raises(AssetError, match="no `model_type` 'llamma'") as caught:
        built(recipe(model=TINY_LLAMA | {"model_type": "llamma"}))
    assert "'llama'" in caught.value.hint


def test_a_misspelt_config_field_is_answered_with_the_nearest() -> None:
    fields = {name: value for name, value in TINY_LLAMA.items() if name != "num_hidden_layers"}
    with pytest.raises(AssetError, match="no field 'num_hiden_layers'") as caught:
        built(recipe(model=fields | {"num_hiden_layers": 2}))
    assert "'num_hidden_layers'" in caught.value.hint


@pytest.mark.parametrize("field", [{"hidden_size": "wide"}, {"hidden_size": 33}])
def test_a_config_value_that_does_not_fit_names_itself(field: dict[str, object]) -> None:
    with pytest.raises(AssetError, match=rf"{field['hidden_size']}") as caught:
        built(recipe(model=TINY_LLAMA | field))
    assert "model.config" in caught.value.hint


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match=r"not a model: it has no config\.json"):
        built(recipe(model=tmp_path, model_section={"tokenizer_name_or_path": "builtin/bytes"}))


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    AutoConfig.for_model(**TINY_LLAMA).save_pretrained(tmp_path)
    with pytest.raises(AssetError, match=r"could not be loaded: .*model\.safetensors"):
        built(recipe(model=tmp_path, model_section={"tokenizer_name_or_path": "builtin/bytes"}))


def test_damaged_weights_say_so(tmp_path: Path) -> None:
    section = saved(built(recipe()), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(AssetError, match="could not be loaded"):
        built(from_section(section))


def test_a_config_of_an_unknown_type_in_a_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(AssetError, match="unheard-of"):
        built(recipe(model=tmp_path, model_section={"tokenizer_name_or_path": "builtin/bytes"}))


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match=r"missing' does not exist"):
        built(recipe(model=tmp_path / "missing"))


@pytest.mark.parametrize(
    "build",
    [build_tokenizer, lambda wanted: build_model(wanted, build_tokenizer(recipe())), require_memory],
    ids=["tokenizer", "model", "memory"],
)
def test_a_hub_that_cannot_be_reached_says_what_was_wanted(build: Callable[[Recipe], object]) -> None:
    with pytest.raises(AssetError, match=r"nobody/nothing' could not be loaded") as caught:
        build(recipe(model=Path("nobody/nothing")))
    assert "connection" in caught.value.hint


def test_an_attention_that_transformers_does_not_have_is_refused() -> None:
    with pytest.raises(AssetError, match="quick"):
        built(recipe(model_section={"attn_implementation": "quick"}))


# -- memory ---------------------------------------------------------------------------------------


def test_a_model_of_100_billion_weights_is_refused_without_loading_it() -> None:
    huge = {
        "hidden_size": 12288,
        "intermediate_size": 49152,
        "num_hidden_layers": 48,
        "num_attention_heads": 96,
    }
    with pytest.raises(OutOfMemory, match=r"needs \d{4}\.\d GiB of RAM .* and \d+\.\d GiB are free") as caught:
        require_memory(recipe(model=TINY_LLAMA | huge))
    assert "LoRA" in caught.value.hint


def test_memory_is_told_before_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    section = saved(built(recipe()).bfloat16(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    needed = require_memory(from_section(section, peft=LORA))
    assert needed.frozen_bytes == 2 * needed.num_frozen


def test_a_gpu_holds_the_model_and_ram_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = recipe(training={"bf16": False})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 0))
    needed = require_memory(wanted)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (needed.held_on_device, 0))
    require_memory(wanted)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (needed.held_on_device - 1, 0))
    with pytest.raises(OutOfMemory, match="the GPU"):
        require_memory(wanted)
