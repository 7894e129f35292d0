from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, PreTrainedModel

from trahiv_cli.assets.export import model_card, sample_text, write_final
from trahiv_cli.assets.model import build_model
from trahiv_cli.errors import SetupError
from trahiv_cli.recipe.schema import ModelSection, PeftSection, Recipe

Llama = Callable[..., ModelSection]
LORA = PeftSection(r=4, modules_to_save=["lm_head"])


def built(model: ModelSection, peft: PeftSection | None = None) -> PreTrainedModel:
    """Draw the weights of a recipe's model."""
    recipe = {
        "name": "test",
        "model": model.model_dump(),
        "peft": None if peft is None else peft.model_dump(),
        "data": {"datasets": [{"path": "nobody/nothing"}]},
        "training": {"max_steps": 1, "seed": 0},
    }
    return build_model(Recipe.model_validate(recipe), ByT5Tokenizer())


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """Stand in for training: every trained weight differs from what the seed draws."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.125)
    return model


def same_weights(ours: PreTrainedModel, theirs: PreTrainedModel) -> bool:
    left, right = ours.state_dict(), theirs.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_model_is_read_back_as_it_was(
    tmp_path: Path, llama: Llama, byte_tokenizer: ByT5Tokenizer, dtype: torch.dtype
) -> None:
    model = moved(built(llama())).to(dtype)
    write_final(model, byte_tokenizer, tmp_path / "run" / "final", "a card")
    assert names(tmp_path / "run") == {"final"}
    assert (tmp_path / "run" / "final" / "README.md").read_text() == "a card"
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert read.dtype == dtype and same_weights(read, model)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "final")("ab") == byte_tokenizer("ab")


def test_adapters_alone_are_written_and_read_back(
    tmp_path: Path, llama: Llama, byte_tokenizer: ByT5Tokenizer
) -> None:
    model = moved(built(llama(), LORA))
    write_final(model, byte_tokenizer, tmp_path / "final", "a card")
    assert "adapter_model.safetensors" in names(tmp_path / "final")
    assert "model.safetensors" not in names(tmp_path / "final")
    assert (tmp_path / "final" / "README.md").read_text() == "a card"
    base = built(llama())
    assert same_weights(PeftModel.from_pretrained(base, tmp_path / "final"), model)


def test_what_was_there_is_replaced_and_nothing_is_left_beside_it(
    tmp_path: Path, llama: Llama, byte_tokenizer: ByT5Tokenizer
) -> None:
    model = built(llama())
    for leftover in (".final.new", ".final.old", "final"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "stale").touch()
    write_final(model, byte_tokenizer, tmp_path / "final", "second")
    assert names(tmp_path) == {"final"}
    assert "stale" not in names(tmp_path / "final")


def test_a_failure_while_writing_leaves_what_was_there(
    tmp_path: Path, llama: Llama, byte_tokenizer: ByT5Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(llama())
    write_final(model, byte_tokenizer, tmp_path / "final", "first")

    def disk_full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(byte_tokenizer, "save_pretrained", disk_full)
    with pytest.raises(SetupError, match=r"No space left.* unchanged"):
        write_final(moved(model), byte_tokenizer, tmp_path / "final", "second")
    assert names(tmp_path) == {"final"}
    assert (tmp_path / "final" / "README.md").read_text() == "first"


@pytest.mark.parametrize("peft", [False, True])
def test_the_card_is_one_that_the_hub_reads(peft: bool) -> None:
    text = model_card(
        recipe_name="spanish",
        base="owner/base",
        run_id="spanish-12345678",
        fingerprint="ab" * 32,
        step=1200,
        samples=76800,
        peers=5,
        dataset_names=["owner/corpus"],
        peft=peft,
    )
    front = ModelCard(text).data
    assert front.library_name == ("peft" if peft else "transformers")
    assert front.base_model == "owner/base" and front.datasets == ["owner/corpus"]
    assert "trahiv" in front.tags
    assert all(word in text for word in ("# spanish", "1,200", "76,800", "ab" * 32))


def test_the_card_of_a_new_model_names_no_base() -> None:
    text = model_card(
        recipe_name="quickstart",
        base=None,
        run_id="quickstart-1",
        fingerprint="ab",
        step=1,
        samples=64,
        peers=2,
        dataset_names=[],
        peft=False,
    )
    assert ModelCard(text).data.base_model is None
    assert "base_model" not in text and "datasets:" not in text


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("prompt", ["def ", ""])
def test_a_sample_is_the_seeds_and_leaves_no_trace(
    llama: Llama, byte_tokenizer: ByT5Tokenizer, peft: PeftSection | None, prompt: str
) -> None:
    model = built(llama(), peft)
    generator = torch.get_rng_state()
    text = sample_text(model, byte_tokenizer, prompt, 24, seed=3)
    assert text and len(text) <= 24
    assert text == sample_text(model, byte_tokenizer, prompt, 24, seed=3)
    assert text != sample_text(model, byte_tokenizer, prompt, 24, seed=4)
    assert model.training
    assert torch.equal(generator, torch.get_rng_state())
