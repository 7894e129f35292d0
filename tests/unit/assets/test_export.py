"""The result of a run: a folder that is written whole or stays as it was, its card, and a sample."""

import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ByT5Tokenizer,
    XLNetConfig,
    XLNetLMHeadModel,
)

from tests.kit.recipes import tiny_llama
from tests.kit.stand_ins import CHATML, chat_tokenizer
from tests.unit.assets.conftest import LORA, TINY_LLAMA, are_equal, built, recipe
from tests.unit.conftest import refused
from trahiv_cli.assets.export import Prompt, model_card, open_turn, sample_text, write_final
from trahiv_cli.errors import SetupError
from trahiv_cli.recipe.agreement import AgreedRun

ADAPTERS = LORA | {"modules_to_save": ["lm_head"]}


def moved(model):
    """Stand in for training: every trained weight differs from what the seed draws."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.125 * weight.requires_grad)
    return model


@pytest.fixture
def export(tmp_path, byte_tokenizer):
    """Write a model to a folder, which is returned."""

    def export(model, card="a card"):
        write_final(model, byte_tokenizer, tmp_path / "run/final", card)
        return tmp_path / "run/final"

    return export


def test_exported_model_loads_back_equal(export, byte_tokenizer):
    model = moved(built()).to(torch.bfloat16)
    folder = export(model)
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert read.dtype == torch.bfloat16
    assert are_equal(read, model)
    assert AutoTokenizer.from_pretrained(folder)("ab") == byte_tokenizer("ab")


def test_exported_adapters_load_back_equal(export):
    model = moved(built(peft=ADAPTERS))
    folder = export(model)
    assert not (folder / "model.safetensors").exists()
    assert are_equal(PeftModel.from_pretrained(built(), folder), model)


def test_export_replaces_leftovers(export, tmp_path):
    for leftover in (".final.new", ".final.old", "final"):
        (tmp_path / "run" / leftover / "stale").mkdir(parents=True)
    assert "stale" not in os.listdir(export(built()))
    assert os.listdir(tmp_path / "run") == ["final"]


def disk_full(*_):
    raise OSError(28, "No space left on device")


rename = Path.rename


@pytest.mark.parametrize(
    ("owner", "name", "fail"),
    [
        (ByT5Tokenizer, "save_pretrained", disk_full),
        (Path, "rename", lambda at, to: disk_full() if at.suffix == ".new" else rename(at, to)),
    ],
)
def test_failed_export_keeps_old_folder(export, tmp_path, monkeypatch, owner, name, fail):
    model = built()
    folder = export(model, "first")
    monkeypatch.setattr(owner, name, fail)
    with refused(r"No space left.* unchanged", error=SetupError):
        export(model, "second")
    assert os.listdir(tmp_path / "run") == ["final"]
    assert (folder / "README.md").read_text() == "first"


ON_HUB = {"library_name": "peft", "base_model": "owner/base", "datasets": ["owner/corpus"]}


@pytest.mark.parametrize(
    ("model", "dataset", "peft", "expected"),
    [
        (Path("owner/base"), "owner/corpus", LORA, ON_HUB),
        (TINY_LLAMA, "rows.csv", None, {"library_name": "transformers"}),
    ],
)
def test_model_card_has_valid_metadata(model, dataset, peft, expected):
    wanted = recipe(model=model, data={"datasets": [{"path": dataset}]}, peft=peft)
    text = model_card(AgreedRun.of(wanted), samples=1, peers=1)
    front = ModelCard(text).data.to_dict()
    assert "trahiv" in front.pop("tags")
    assert front == expected
    assert "null" not in text


def test_model_card_has_summary_of_run():
    wanted = recipe(training={"max_steps": 1200}, hivemind_config={"opt": {"run_id": "run-1"}})
    text = model_card(AgreedRun.of(wanted), samples=76800, peers=5)
    assert all(word in text for word in ("# test", "`run-1`", "1,200", "76,800"))


@pytest.mark.parametrize(("peft", "prompt"), [(None, ""), (ADAPTERS, "def ")])
def test_sample_depends_only_on_seed(byte_tokenizer, peft, prompt):
    model = built(peft=peft)
    generator = torch.get_rng_state()
    ids = byte_tokenizer(prompt, add_special_tokens=False)["input_ids"]
    text, again, other = (sample_text(model, byte_tokenizer, Prompt(ids, ""), 24, seed) for seed in (3, 3, 4))
    assert len(text) <= 24
    assert text == again != other
    assert model.training
    assert torch.equal(generator, torch.get_rng_state())


def test_sample_has_no_token_of_padded_vocabulary(byte_tokenizer):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_llama(vocab_size=4096)))
    assert len(byte_tokenizer) < 4096
    assert sample_text(model, byte_tokenizer, Prompt([40], ""), 24, seed=3)


@pytest.mark.parametrize(
    ("kind", "peft"), [("bert", LORA), ("xlnet", LORA | {"target_modules": ["layer_1"]})]
)
def test_export_keeps_new_head_beside_adapters(tmp_path, export, byte_tokenizer, bert_folder, kind, peft):
    folder = bert_folder
    if kind == "xlnet":
        folder = tmp_path
        config = XLNetConfig(vocab_size=384, d_model=32, n_layer=1, n_head=2, d_inner=32)
        XLNetLMHeadModel(config).save_pretrained(folder)
        byte_tokenizer.save_pretrained(folder)
    model = moved(built("seq-cls", folder, peft=peft)).eval()
    final = export(model)
    ids = torch.tensor([[5, 6, 7]])
    for seed in (1, 2):
        torch.manual_seed(seed)
        base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
        again = PeftModel.from_pretrained(base, final).eval()
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


TALK = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Pip, a parrot."}]
SYSTEM = {"role": "system", "content": "Be terse."}
PLAIN_CHATML = CHATML.partition("{% if add_generation_prompt %}")[0]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"messages": [SYSTEM, *TALK]},
        {"prompt": TALK[:1], "completion": TALK[1:]},
        {"chosen": TALK, "rejected": TALK},
    ],
)
@pytest.mark.parametrize("template", [CHATML, PLAIN_CHATML])
def test_assistant_turn_is_opened(row, template):
    tokenizer = chat_tokenizer(template)
    prompt = open_turn(tokenizer, row, 500)
    assert (prompt.text, prompt.is_reply) == ("Who?", True)
    assert tokenizer.decode(prompt.ids).endswith("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")
    assert open_turn(tokenizer, row, 5).ids == prompt.ids[-5:]


REFUSES_SYSTEM = "{% if messages[-1].role == 'system' %}{{ raise_exception('no user') }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    "row",
    [
        {"text": "Who?"},
        {"prompt": "Who?", "completion": "Pip."},
        {"messages": TALK[1:]},
        {"messages": [SYSTEM, TALK[1]]},
    ],
)
def test_row_without_question_opens_no_turn(row):
    assert open_turn(chat_tokenizer(REFUSES_SYSTEM), row, 500) is None


def test_question_parts_are_shown_as_text():
    parts = [{"type": "text", "text": text} for text in ("Who", "?")]
    assert open_turn(chat_tokenizer(), {"messages": [TALK[0] | {"content": parts}]}, 500).text == "Who?"


def test_memorized_answer_is_reply(llama_folder):
    model = built("sft", llama_folder)
    tokenizer = chat_tokenizer()
    ids = tokenizer.apply_chat_template(TALK, return_tensors="pt", return_dict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    prompt = open_turn(tokenizer, {"messages": TALK}, 100)
    assert sample_text(model, tokenizer, prompt, 60, seed=1) == TALK[1]["content"]
