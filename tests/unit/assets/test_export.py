"""What a run leaves behind: a folder that is whole or as it was, its card, and a sample."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.assets.conftest import LORA, TINY_LLAMA, are_equal, built, recipe
from trahiv_cli.assets.export import model_card, sample_text, write_final
from trahiv_cli.errors import SetupError

ADAPTERS = LORA | {"modules_to_save": ["lm_head"]}


def moved(model):
    """Stand in for training: every trained weight differs from what the seed draws."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.125 * weight.requires_grad)
    return model


def names(folder):
    return {entry.name for entry in folder.iterdir()}


def test_a_full_model_or_adapters_alone_are_read_back_as_they_were(tmp_path, byte_tokenizer):
    model, folder = moved(built(recipe())).to(torch.bfloat16), tmp_path / "run" / "final"
    write_final(model, byte_tokenizer, folder, "a card")
    assert names(tmp_path / "run") == {"final"}
    assert (folder / "README.md").read_text() == "a card"
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert read.dtype == torch.bfloat16 and are_equal(read, model)
    assert AutoTokenizer.from_pretrained(folder)("ab") == byte_tokenizer("ab")
    model = moved(built(recipe(peft=ADAPTERS)))
    write_final(model, byte_tokenizer, folder, "a card")
    assert "adapter_model.safetensors" in names(folder) and "model.safetensors" not in names(folder)
    assert are_equal(PeftModel.from_pretrained(built(recipe()), folder), model)


def test_what_was_there_is_replaced_or_if_writing_fails_left_as_it_was(tmp_path, byte_tokenizer, monkeypatch):
    model = built(recipe())
    for leftover in (".final.new", ".final.old", "final"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "stale").touch()
    write_final(model, byte_tokenizer, tmp_path / "final", "first")
    assert names(tmp_path) == {"final"} and "stale" not in names(tmp_path / "final")

    def disk_full(folder):
        raise OSError(28, "No space left on device")

    rename = Path.rename
    for owner, name, fails in (
        (byte_tokenizer, "save_pretrained", disk_full),
        (Path, "rename", lambda at, to: disk_full(at) if at.suffix == ".new" else rename(at, to)),
    ):
        with monkeypatch.context() as context, pytest.raises(SetupError, match=r"No space left.* unchanged"):
            context.setattr(owner, name, fails)
            write_final(moved(model), byte_tokenizer, tmp_path / "final", "second")
        assert names(tmp_path) == {"final"}
        assert (tmp_path / "final" / "README.md").read_text() == "first"


@pytest.mark.parametrize(
    ("model", "dataset", "peft"), [(Path("owner/base"), "owner/corpus", LORA), (TINY_LLAMA, "rows.csv", None)]
)
def test_the_card_is_one_that_the_hub_reads(model, dataset, peft):
    opt = {"opt": {"run_id": "run-1"}}
    data = {"datasets": [{"path": dataset}]}
    wanted = recipe(model=model, data=data, peft=peft, training={"max_steps": 1200}, hivemind_config=opt)
    text = model_card(wanted, samples=76800, peers=5)
    front = ModelCard(text).data
    assert front.library_name == ("peft" if peft else "transformers") and "trahiv" in front.tags
    assert (front.base_model, front.datasets) == (("owner/base", ["owner/corpus"]) if peft else (None, None))
    assert ("base_model" in text) == ("datasets:" in text) == bool(peft)
    assert all(word in text for word in ("# test", "`run-1`", "1,200", "76,800"))


@pytest.mark.parametrize(("peft", "prompt"), [(None, ""), (ADAPTERS, "def ")], ids=["full", "lora"])
def test_a_sample_is_the_seeds_and_leaves_no_trace(byte_tokenizer, peft, prompt):
    model, generator = built(recipe(peft=peft)), torch.get_rng_state()
    text, again, other = (sample_text(model, byte_tokenizer, prompt, 24, seed) for seed in (3, 3, 4))
    assert len(text) <= 24 and text == again != other
    assert model.training and torch.equal(generator, torch.get_rng_state())
