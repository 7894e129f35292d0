from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from trahiv_cli.assets.model import build_model, build_tokenizer, require_memory
from trahiv_cli.errors import AssetError, OutOfMemory
from trahiv_cli.recipe.schema import ModelSection, PeftSection, TrainingSection

Llama = Callable[..., ModelSection]
TRAINING = TrainingSection(max_steps=1)
LORA = PeftSection(r=4)


def saved(model: PreTrainedModel, folder: Path) -> ModelSection:
    model.save_pretrained(folder)
    return ModelSection(model_name_or_path=str(folder), tokenizer_name_or_path="builtin/bytes")


def word_tokenizer(folder: Path, **special: str) -> str:
    words = Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1, "hello": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **special).save_pretrained(folder)
    return str(folder)


def test_the_byte_tokenizer_needs_no_file(llama: Llama) -> None:
    tokenizer = build_tokenizer(llama())
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (384, 1, 0)


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_of_text(tmp_path: Path, llama: Llama) -> None:
    folder = word_tokenizer(tmp_path, eos_token="<eos>")
    tokenizer = build_tokenizer(llama().model_copy(update={"tokenizer_name_or_path": folder}))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def test_a_tokenizer_without_an_end_of_text_token_is_refused(tmp_path: Path, llama: Llama) -> None:
    folder = word_tokenizer(tmp_path)
    with pytest.raises(AssetError, match="no end-of-text token"):
        build_tokenizer(llama().model_copy(update={"tokenizer_name_or_path": folder}))


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused_with_both_numbers(llama: Llama) -> None:
    with pytest.raises(AssetError, match=r"384 tokens.* only 300 embeddings"):
        build_tokenizer(llama(vocab_size=300))


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_the_same_seed_draws_the_same_weights(llama: Llama, peft: PeftSection | None) -> None:
    ours = build_model(llama(), peft, seed=7).state_dict()
    torch.rand(3)  # another peer's generator is somewhere else
    theirs = build_model(llama(), peft, seed=7).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_another_seed_draws_other_weights(llama: Llama, peft: PeftSection | None) -> None:
    ours = dict(build_model(llama(), peft, seed=7).named_parameters())
    theirs = dict(build_model(llama(), peft, seed=8).named_parameters())
    drawn = [name for name, weight in ours.items() if weight.requires_grad and weight.std() > 0]
    assert drawn
    assert not any(torch.equal(ours[name], theirs[name]) for name in drawn)


def test_adapters_of_one_seed_are_equal_over_a_checkpoint(tmp_path: Path, llama: Llama) -> None:
    section = saved(build_model(llama(), None, seed=1), tmp_path)
    ours = build_model(section, LORA, seed=7).state_dict()
    theirs = build_model(section, LORA, seed=7).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_lora_trains_float32_adapters_over_a_bfloat16_base(llama: Llama) -> None:
    peft = PeftSection(r=4, modules_to_save=["lm_head"])
    model = build_model(llama(dtype="bfloat16"), peft, seed=0)
    assert isinstance(model, PeftModel) and model.training
    dtypes = {(weight.requires_grad, weight.dtype) for weight in model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def test_full_training_of_a_bfloat16_checkpoint_is_in_float32(tmp_path: Path, llama: Llama) -> None:
    section = saved(build_model(llama(), None, seed=0).bfloat16(), tmp_path)
    model = build_model(section, None, seed=0)
    assert {(weight.requires_grad, weight.dtype) for weight in model.parameters()} == {(True, torch.float32)}


def test_auto_keeps_frozen_weights_in_the_checkpoints_dtype(tmp_path: Path, llama: Llama) -> None:
    section = saved(build_model(llama(), None, seed=0).to(torch.float16), tmp_path)
    model = build_model(section, LORA, seed=0)
    assert {weight.dtype for weight in model.parameters() if not weight.requires_grad} == {torch.float16}


def test_an_unknown_model_type_is_answered_with_the_nearest(llama: Llama) -> None:
    with pytest.raises(AssetError, match="no `model_type` 'llamma'") as caught:
        build_model(llama(model_type="llamma"), None, seed=0)
    assert "'llama'" in caught.value.hint


def test_a_misspelt_config_field_is_answered_with_the_nearest(llama: Llama) -> None:
    with pytest.raises(AssetError, match="no field 'num_hiden_layers'") as caught:
        config = {k: v for k, v in (llama().config or {}).items() if k != "num_hidden_layers"}
        build_model(llama().model_copy(update={"config": {**config, "num_hiden_layers": 2}}), None, seed=0)
    assert "'num_hidden_layers'" in caught.value.hint


@pytest.mark.parametrize("field", [{"hidden_size": "wide"}, {"hidden_size": 33}])
def test_a_config_value_that_does_not_fit_names_itself(llama: Llama, field: dict[str, object]) -> None:
    with pytest.raises(AssetError, match=rf"{field['hidden_size']}") as caught:
        build_model(llama(**field), None, seed=0)
    assert "model.config" in caught.value.hint


def test_a_model_that_is_not_a_causal_language_model_is_refused(llama: Llama) -> None:
    section = llama().model_copy(update={"config": {"model_type": "t5"}})
    with pytest.raises(AssetError, match="is a t5, which is not a causal language model"):
        build_model(section, None, seed=0)


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match=r"not a model: it has no config\.json"):
        build_model(ModelSection(model_name_or_path=str(tmp_path)), None, seed=0)


def test_a_folder_without_weights_says_so(tmp_path: Path, llama: Llama) -> None:
    AutoConfig.for_model(**(llama().config or {})).save_pretrained(tmp_path)
    with pytest.raises(AssetError, match=r"could not be loaded: .*model\.safetensors"):
        build_model(ModelSection(model_name_or_path=str(tmp_path)), None, seed=0)


def test_damaged_weights_say_so(tmp_path: Path, llama: Llama) -> None:
    section = saved(build_model(llama(), None, seed=0), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(AssetError, match="could not be loaded"):
        build_model(section, None, seed=0)


def test_a_config_of_an_unknown_type_in_a_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(AssetError, match="unheard-of"):
        build_model(ModelSection(model_name_or_path=str(tmp_path)), None, seed=0)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    section = ModelSection(model_name_or_path=str(tmp_path / "missing"))
    with pytest.raises(AssetError, match=r"missing' does not exist"):
        build_model(section, None, seed=0)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path, llama: Llama) -> None:
    section = saved(build_model(llama(), None, seed=0), tmp_path)
    with pytest.raises(AssetError, match="The tokenizer .* could not be loaded"):
        build_tokenizer(section.model_copy(update={"tokenizer_name_or_path": None}))


@pytest.mark.parametrize("build", [build_tokenizer, lambda section: build_model(section, None, seed=0)])
def test_a_hub_that_cannot_be_reached_says_what_was_wanted(build: Callable[[ModelSection], object]) -> None:
    with pytest.raises(AssetError, match=r"nobody/nothing' could not be loaded") as caught:
        build(ModelSection(model_name_or_path="nobody/nothing"))
    assert "connection" in caught.value.hint


def test_an_attention_that_transformers_does_not_have_is_refused(llama: Llama) -> None:
    section = llama().model_copy(update={"attn_implementation": "quick"})
    with pytest.raises(AssetError, match="quick"):
        build_model(section, None, seed=0)


def test_target_modules_that_the_model_lacks_are_answered_with_those_it_has(llama: Llama) -> None:
    with pytest.raises(AssetError, match="query") as caught:
        build_model(llama(), PeftSection(target_modules=["query"]), seed=0)
    assert "q_proj" in caught.value.hint


def test_modules_to_save_that_the_model_lacks_are_answered_with_the_nearest(llama: Llama) -> None:
    with pytest.raises(AssetError, match="'lm_heads'") as caught:
        build_model(llama(), PeftSection(modules_to_save=["lm_heads"]), seed=0)
    assert "'lm_head'" in caught.value.hint


def test_a_model_of_100_billion_weights_is_refused_without_loading_it(llama: Llama) -> None:
    huge = llama(hidden_size=12288, intermediate_size=49152, num_hidden_layers=48, num_attention_heads=96)
    with pytest.raises(OutOfMemory, match=r"needs \d{4}\.\d GiB of RAM .* and 16\.0 GiB are free") as caught:
        require_memory(huge, None, TRAINING, available_bytes=16 * 2**30)
    assert "LoRA" in caught.value.hint


def test_lora_needs_less_memory_than_full_training(llama: Llama) -> None:
    full = require_memory(llama(dtype="bfloat16"), None, TRAINING)
    lora = require_memory(llama(dtype="bfloat16"), LORA, TRAINING)
    assert full.num_frozen == 0 and full.frozen_bytes == 0
    assert lora.num_frozen == full.num_trainable
    assert lora.frozen_bytes == 2 * lora.num_frozen
    assert lora.total_bytes < full.total_bytes


def test_memory_is_told_before_a_checkpoint_is_loaded(tmp_path: Path, llama: Llama) -> None:
    section = saved(build_model(llama(), None, seed=0).bfloat16(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    estimate = require_memory(section, LORA, TRAINING)
    assert estimate.frozen_bytes == 2 * estimate.num_frozen


def test_a_gpu_holds_the_model_and_ram_the_rest(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = require_memory(llama(), None, TRAINING)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (needed.device_bytes, 0))
    require_memory(llama(), None, TRAINING)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (needed.device_bytes - 1, 0))
    with pytest.raises(OutOfMemory, match="the GPU"):
        require_memory(llama(), None, TRAINING)


@pytest.mark.parametrize(
    ("optim", "optim_args", "copies"),
    [
        ("adamw_torch", None, 2),
        ("adagrad", None, 1),
        ("rmsprop", None, 1),
        ("sgd", None, 0),
        ("sgd", "momentum=0.9", 1),
        ("adafactor", None, 0),
    ],
)
def test_each_optimizer_is_counted_with_its_state(
    llama: Llama, optim: str, optim_args: str | None, copies: int
) -> None:
    training = TrainingSection(max_steps=1, optim=optim, optim_args=optim_args)
    estimate = require_memory(llama(), None, training)
    assert estimate.optimizer_bytes == copies * 4 * estimate.num_trainable
    assert estimate.total_bytes == (5 + copies) * 4 * estimate.num_trainable
