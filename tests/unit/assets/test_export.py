"""The result of a run: a folder that is written whole or stays as it was, its card, and a sample."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.kit.stand_ins import CHATML, chat_tokenizer
from tests.unit.assets.conftest import LORA, TINY_LLAMA, are_equal, built, recipe
from trahiv_cli.assets.export import model_card, open_turn, sample_text, write_final
from trahiv_cli.errors import SetupError
from trahiv_cli.recipe.agreement import AgreedRun

ADAPTERS = LORA | {"modules_to_save": ["lm_head"]}


def moved(model):
    """Stand in for training: every trained weight differs from what the seed draws."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.125 * weight.requires_grad)
    return model


def names(folder):
    return {entry.name for entry in folder.iterdir()}


def test_exported_model_loads_back_equal(tmp_path, byte_tokenizer):
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


def test_failed_export_keeps_old_folder(tmp_path, byte_tokenizer, monkeypatch):
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
def test_model_card_has_valid_metadata(model, dataset, peft):
    opt = {"opt": {"run_id": "run-1"}}
    data = {"datasets": [{"path": dataset}]}
    wanted = recipe(model=model, data=data, peft=peft, training={"max_steps": 1200}, hivemind_config=opt)
    text = model_card(AgreedRun.of(wanted), samples=76800, peers=5)
    front = ModelCard(text).data
    assert front.library_name == ("peft" if peft else "transformers") and "trahiv" in front.tags
    assert (front.base_model, front.datasets) == (("owner/base", ["owner/corpus"]) if peft else (None, None))
    assert ("base_model" in text) == ("datasets:" in text) == bool(peft)
    assert all(word in text for word in ("# test", "`run-1`", "1,200", "76,800"))


@pytest.mark.parametrize(("peft", "prompt"), [(None, ""), (ADAPTERS, "def ")], ids=["full", "lora"])
def test_sample_depends_only_on_seed(byte_tokenizer, peft, prompt):
    model, generator = built(recipe(peft=peft)), torch.get_rng_state()
    ids = byte_tokenizer(prompt, add_special_tokens=False)["input_ids"]
    text, again, other = (sample_text(model, byte_tokenizer, ids, 24, seed) for seed in (3, 3, 4))
    assert len(text) <= 24 and text == again != other
    assert model.training and torch.equal(generator, torch.get_rng_state())


XLNET = {"model_type": "xlnet", "vocab_size": 384, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}
NEW_HEADS = {"bert": None, "xlnet": {"target_modules": ["layer_1"]}}


@pytest.mark.parametrize("kind", NEW_HEADS)
def test_export_keeps_new_head_beside_adapters(tmp_path, byte_tokenizer, bert_folder, kind):
    folder = bert_folder
    if kind == "xlnet":
        folder = tmp_path / "base"
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**XLNET)).save_pretrained(folder)
        byte_tokenizer.save_pretrained(folder)
    model = moved(built(recipe("seq-cls", folder, peft=LORA | (NEW_HEADS[kind] or {})))).eval()
    write_final(model, byte_tokenizer, tmp_path / "final", "a card")
    ids = torch.tensor([[5, 6, 7]])
    for seed in (1, 2):
        torch.manual_seed(seed)
        base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
        again = PeftModel.from_pretrained(base, tmp_path / "final").eval()
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


TALK = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Pip, a parrot."}]
PLAIN_CHATML = CHATML.partition("{% if add_generation_prompt %}")[0]


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"messages": TALK}, "Who?"),
        ({"messages": [{"role": "system", "content": "Be terse."}, *TALK]}, "Who?"),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, "Who?"),
        ({"chosen": TALK, "rejected": TALK}, "Who?"),
        ({"text": "Who?"}, None),
        ({"prompt": "Who?", "completion": "Pip."}, None),
    ],
)
@pytest.mark.parametrize("template", [CHATML, PLAIN_CHATML], ids=["opens", "plain"])
def test_assistant_turn_is_opened(row, shown, template):
    tokenizer = chat_tokenizer(template)
    prompt = open_turn(tokenizer, row, 500)
    if shown is None:
        assert prompt is None
        return
    assert (prompt.text, prompt.is_reply) == (shown, True)
    assert tokenizer.decode(prompt.ids).endswith("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")
    assert open_turn(tokenizer, row, 5).ids == prompt.ids[-5:]


REFUSES_SYSTEM = "{% if messages[-1].role == 'system' %}{{ raise_exception('no user') }}{% endif %}" + CHATML


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be terse."}]])
def test_answer_without_question_opens_no_turn(before):
    assert open_turn(chat_tokenizer(REFUSES_SYSTEM), {"messages": [*before, TALK[1]]}, 500) is None


def test_question_parts_are_shown_as_text():
    asked = {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "?"}]}
    assert open_turn(chat_tokenizer(), {"messages": [asked, TALK[1]]}, 500).text == "Who?"


def test_memorized_answer_is_reply(llama_folder):
    wanted = recipe("sft", llama_folder)
    model, tokenizer = built(wanted), chat_tokenizer()
    ids = tokenizer.apply_chat_template(TALK, return_tensors="pt", return_dict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prompt = open_turn(tokenizer, {"messages": TALK}, 100)
    assert sample_text(model, tokenizer, prompt.ids, 60, seed=1) == TALK[1]["content"]
