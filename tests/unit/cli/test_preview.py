"""`trahiv preview`: its findings about data and their look, and data that is refused before a run."""

import contextlib
import json
import logging
import os
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import ByT5Tokenizer

from tests.kit.stand_ins import CHATML, CHATML_MARKED, chat_tokenizer, write_bert, write_llama
from trahiv_cli.assets.data import Splits
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.cli.preview import readable
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.train import preview as preview_module
from trahiv_cli.train.preview import build_preview, pieces_of, require_trainable
from trahiv_cli.train.tasks import heeding, preparing

PICTURE = Path(__file__).with_name("preview.txt")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models, by task."""
    folder = tmp_path_factory.mktemp("models")
    llama, bert = write_llama(folder / "llama", chat_template=CHATML_MARKED), write_bert(folder / "bert")
    return {"sft": llama, "dpo": llama, "clm": llama, "mlm": bert, "seq-cls": bert}


@pytest.fixture
def write(models, here):
    """Write a recipe and its rows: `write("sft", rows, max_length=64)`."""

    def write(task, rows, *, data=None, **section):
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = {"name": task, "task": task, "model": {"model_name_or_path": str(models[task])}}
        recipe |= {"data": {"datasets": [{"path": "rows.jsonl"}], "shuffle": False} | (data or {})}
        recipe |= {task.replace("-", "_"): section, "training": {"max_steps": 1}}
        path = Path(f"{task}.yaml")
        path.write_text(json.dumps(recipe))
        return path

    return write


@pytest.fixture
def usual(write):
    return lambda task: write(task, LOOKS[task][1], **LOOKS[task][0])


def chat(question, *answers):
    turns = ({"role": "assistant", "content": answer} for answer in answers)
    return {"messages": [{"role": "user", "content": question}, *turns]}


LOOKS = {
    "sft": (
        {"max_length": 64, "assistant_only_loss": True},
        [
            chat("2 + [red]2?", "It is 4."),
            chat("And 2 + 3?", "C'est 5 :\n\n\tcinq été\u202e 🙂, and this is where it is too long."),
            chat("2 + 4?", "6"),
        ],
    ),
    "dpo": (
        {"max_length": 16},
        [
            {"prompt": "2 + 2?", "chosen": " It is 4.", "rejected": " 5"},
            {"prompt": "3?", "chosen": " 3", "rejected": " No\x1b[31m"},
            {"prompt": "A question that leaves no place", "chosen": "1", "rejected": "2"},
        ],
    ),
    "clm": (
        {"max_length": 32},
        [{"text": text} for text in ("One text.\n", "Another one.", "And a third, which goes on.")],
    ),
    "mlm": ({"max_length": 32}, [{"text": "Some words to hide."}] * 3),
    "seq-cls": (
        {"labels": ["[red]\x1b", "good"], "max_length": 24},
        [{"text": "I like it.", "label": "good"}, {"text": "I do not like it, not at all.", "label": 0}],
    ),
}
"""Options and rows of each task."""


def test_previews_match_picture(trahiv, usual):
    """For a new picture: TRAHIV_REWRITE=1 pytest tests/unit/cli/test_preview.py, then look at it."""
    shown = []
    for command in ("sft", "sft --set sft.packing=true", "dpo", "clm", "mlm -n 1", "seq-cls"):
        task, *options = command.split()
        torch.seed()  # the masks of `mlm` are drawn by the recipe's seed alone
        code, out, _ = trahiv("preview", usual(task), *options)
        assert code == 0
        shown.append(f"$ trahiv preview {command}\n{out}")
    text = "\n".join(shown)
    if os.environ.get("TRAHIV_REWRITE"):
        PICTURE.write_text(text, encoding="utf-8")
    assert text == PICTURE.read_text(encoding="utf-8")


def test_json_is_one_preview_event(events, usual):
    code, (event, warning) = events("preview", usual("sft"), "-n", "1")
    assert (code, event["event"], event["v"]) == (0, "preview", 1)
    assert "1 of the first 3 samples fill 64 tokens" in warning["message"]
    assert event["num_samples"] == event["looked_at"] == 3
    assert event["lengths"] == {"shortest": 26, "median": 38, "longest": 64}
    (sample,) = event["samples"]
    assert sample["trained_tokens"] == len("It is 4.") + 1
    assert [piece for part in sample["parts"] for piece in part["pieces"] if piece["trained"]] == [
        {"text": "It is 4.", "trained": True, "special": False},
        {"text": "<|im_end|>", "trained": True, "special": True},
    ]


def test_untrainable_samples_warn(trahiv, events, usual):
    too_short = ("preview", usual("dpo"), "--set", "dpo.max_length=2")
    code, out, err = trahiv(*too_short, "-n", "1")
    assert code == 0 and "left out  3 that would train nothing" in out
    assert "none of the first 3 samples trains a token" in err and "Raise `dpo.max_length` (it is 2)" in err
    code, told = events(*too_short)
    assert (code, [event["event"] for event in told]) == (0, ["preview", "warning"])


def test_control_characters_are_escaped():
    assert readable("a\tb\n\x1b[31m\r\u202e\u2028") == "a⇥   b↵\n\\x1b[31m\\r\\u202e\\u2028"
    assert readable("👩\u200d🚀 é\xa0ü") == "👩\u200d🚀 é\xa0ü"


@pytest.mark.parametrize("unwanted", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_only_willing_terminals_get_colour(trahiv, usual, monkeypatch, unwanted):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in unwanted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _, out, _ = trahiv("preview", usual("mlm"), "--format", "human")
    for painted in ("⟦\x1b[1;32m", "\x1b[36m[CLS]\x1b[0mSome "):
        assert "⟦" in out and (painted in out) == (not unwanted)


@pytest.mark.parametrize("tokenizer", [chat_tokenizer(), ByT5Tokenizer()])
def test_pieces_keep_characters_whole(tokenizer):
    text = "so é 🙂 z"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for untrained in range(1, 12):
        pieces = pieces_of(tokenizer, [(token, place >= untrained) for place, token in enumerate(ids)])
        assert "".join(piece.text for piece in pieces) == text and "\ufffd" not in pieces[0].text
        if untrained in (3, 4):  # a character of two bytes belongs to the later piece
            assert [piece.text for piece in pieces] == ["so ", "é 🙂 z"]


@pytest.mark.parametrize(("task", "is_stream", "total"), [("sft", True, "a stream"), ("clm", False, "5")])
def test_only_first_samples_are_examined(trahiv, write, monkeypatch, task, is_stream, total):
    monkeypatch.setattr(preview_module, "LOOKED_AT", 3)
    recipe = write(task, [{"text": "is a text"}] * 5, data={"streaming": is_stream}, packing=False)
    _, out, _ = trahiv("preview", recipe, "-n", "9")
    assert f"samples  {total}, the first 3 looked at" in out and "sample 3" in out and "sample 4" not in out


FAILS = CHATML.replace("{{ message['role'] }}", "{{ raise_exception('roles must alternate') }}")
ADDS = CHATML.replace("{{ message['content'] }}", "{{ '> ' + message['content'] }}")
ONLY = {"assistant_only_loss": True}


@pytest.mark.parametrize(
    ("row", "template", "section", "message", "hint"),
    [
        (chat("Hi", "Yes"), CHATML, ONLY, "{% generation %}", "`sft.assistant_only_loss`"),
        (chat("Hi"), CHATML_MARKED, ONLY, "Row 1 of .* has no message of the assistant", "Fix or remove"),
        (
            chat("Hi", "Yes"),
            FAILS,
            {},
            "Row 1 of .*`data.chat_template`.*: roles must alternate",
            "Fix or remove",
        ),
        (chat(None, "Yes"), ADDS, {}, "Row 1 of .* has a message without 'content'", "Fix or remove"),
    ],
    ids=["unmarked", "no answer", "refused by the template", "broken in the template"],
)
def test_trl_refusal_is_explained(write, row, template, section, message, hint):
    recipe = load_recipe(write("sft", [row], data={"chat_template": template}, **section)).recipe
    with pytest.raises(AssetError) as refused:
        build_preview(recipe, 3)
    assert re.search(message, refused.value.message) and hint in refused.value.hint


def test_trl_warning_is_passed_on_once():
    warned = []
    with heeding(lambda *said: warned.append(said)):
        for text in ("[RANK 0] it may not learn to stop", "[RANK 0] it may not learn to stop", "another"):
            logging.getLogger("trl.trainer").warning(text)
    logging.getLogger("trl.trainer").warning("afterwards")
    assert [message for message, _ in warned] == ["it may not learn to stop", "another"]
    assert all("trahiv preview" in hint for _, hint in warned)
    with pytest.raises(TypeError), preparing():
        raise TypeError("of ours")


SIX, PACKED = {"max_length": 6}, {"packing": True, "max_length": 6}


@pytest.mark.parametrize(
    ("task", "row", "section", "is_refused"),
    [
        ("clm", {"input_ids": [1, 2]}, {}, False),
        ("seq-cls", {"input_ids": [1, 2], "labels": 0}, {"labels": ["a", "b"]}, False),
        ("sft", {"prompt": "ab", "completion": "cdefghij"}, SIX, False),
        ("sft", {"prompt": "abcdefgh", "completion": "ij"}, SIX, True),
        ("sft", {"prompt": "abcdefgh", "completion": "ij"}, PACKED, True),
        ("dpo", {"prompt": "abcd", "chosen": "efgh", "rejected": "i"}, SIX, False),
        ("dpo", {"prompt": "abcdefgh", "chosen": "i", "rejected": "j"}, SIX, True),
    ],
)
def test_data_without_trained_tokens_is_refused(write, task, row, section, is_refused):
    recipe = load_recipe(write(task, [], **section)).recipe
    splits, meant = (
        Splits(Dataset.from_list([row] * 8), None, build_tokenizer(recipe)),
        "none of the first 8 samples trains a token",
    )
    with pytest.raises(AssetError, match=meant) if is_refused else contextlib.nullcontext() as refused:
        require_trainable(recipe, splits)
    assert not is_refused or f"`{task}.max_length` (it is 6)" in refused.value.hint
