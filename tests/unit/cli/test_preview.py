"""`trahiv preview`: its findings about data and their look, and data that is refused before a run."""

import logging
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from datasets import Dataset
from transformers import ByT5Tokenizer

from tests.kit.recipes import write_tiny
from tests.kit.stand_ins import CHATML, CHATML_MARKED, chat_tokenizer, write_bert, write_llama
from tests.unit.conftest import refused
from trahiv_cli.assets.data import Splits
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.cli.preview import readable
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.train.preview import build_preview, pieces_of, require_trainable
from trahiv_cli.train.tasks import forwarding_trl_warnings, preparing

PICTURE = Path(__file__).with_name("preview.txt")


@pytest.fixture(scope="module")
def model_for(tmp_path_factory):
    """`model_for("sft")`: the folder of a model for a task."""
    folder = tmp_path_factory.mktemp("models")
    bert = write_bert(folder / "bert")
    llama = write_llama(folder / "llama", chat_template=CHATML_MARKED)
    return lambda task: str(bert if task in ("mlm", "seq-cls") else llama)


@pytest.fixture
def write(model_for, here, write_rows):
    """Write a recipe and its rows: `write("sft", rows, max_length=64)`."""

    def write(task, rows, *, data=None, **section):
        write_rows(rows)
        sections = {"clm": None, task.replace("-", "_"): section}
        sections["model"] = {"model_name_or_path": model_for(task)}
        sections["data"] = {"datasets": [{"path": "rows.jsonl"}], "shuffle": False} | (data or {})
        return write_tiny(here, name=task, task=task, training={"max_steps": 1}, **sections)

    return write


@pytest.fixture
def usual(write):
    return lambda task: write(task, **USUAL[task])


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


USUAL = {
    "sft": {
        "max_length": 64,
        "assistant_only_loss": True,
        "rows": [
            chat("2 + [red]2?", "It is 4."),
            chat("And 2 + 3?", "C'est 5 :\n\n\tcinq été\u202e 🙂, and this is where it is too long."),
            chat("2 + 4?", "6"),
        ],
    },
    "dpo": {
        "max_length": 16,
        "rows": [
            {"prompt": "2 + 2?", "chosen": " It is 4.", "rejected": " 5"},
            {"prompt": "3?", "chosen": " 3", "rejected": " No\x1b[31m"},
            {"prompt": "A question that leaves no place", "chosen": "1", "rejected": "2"},
        ],
    },
    "kto": {
        "max_length": 16,
        "loss_type": "apo_zero_unpaired",
        "rows": [
            {"prompt": "2 + 2?", "completion": " It is 4.", "label": True},
            {"prompt": "3?", "completion": " No\x1b[31m", "label": False},
        ],
    },
    "reward": {
        "max_length": 16,
        "rows": [
            {"chosen": "2 + 2 is 4.", "rejected": "2 + 2 is 5."},
            {"chosen": "4", "rejected": "an answer that is too long by far"},
        ],
    },
    "clm": {
        "max_length": 32,
        "rows": [{"text": text} for text in ("One text.\n", "Another one.", "And a third, which goes on.")],
    },
    "mlm": {"max_length": 32, "rows": [{"text": "Some words to hide."}] * 3},
    "seq-cls": {
        "labels": ["[red]\x1b", "good"],
        "max_length": 24,
        "rows": [
            {"text": "I like it.", "label": "good"},
            {"text": "I do not like it, not at all.", "label": 0},
        ],
    },
}
"""Options and rows of each task."""


def test_previews_match_picture(trahiv, usual):
    """For a new picture: TRAHIV_REWRITE=1 pytest tests/unit/cli/test_preview.py, then look at it."""
    shown = []
    for command in (
        "sft",
        "sft --set sft.packing=true",
        "dpo",
        "kto",
        "reward",
        "clm",
        "mlm -n 1",
        "seq-cls",
    ):
        task, *options = command.split()
        torch.seed()  # the masks of `mlm` are drawn by the recipe's seed alone
        shown.append(f"$ trahiv preview {command}\n{trahiv('preview', usual(task), *options).out}")
    text = "\n".join(shown)
    if os.environ.get("TRAHIV_REWRITE"):
        PICTURE.write_text(text, encoding="utf-8")
    assert text == PICTURE.read_text(encoding="utf-8")


def test_preview_writes_completions_and_their_rewards(trahiv, write, events):
    rows = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "x" * 40, "answer": "?"}]
    counted = {"name": "length", "max_tokens": 6, "weight": 0.5}
    section = {"rewards": ["exact_match", counted], "num_generations": 2, "max_completion_length": 6}
    recipe = write("grpo", rows, max_length=32, **section)
    event, *_, warning = events("preview -n 3", recipe)
    assert "the same reward" in warning["message"]
    assert (event["num_samples"], event["trained_tokens"]) == (1, None), "the other prompt is too long"
    [sample] = event["samples"]
    prompt, *completions = sample["parts"]
    assert "".join(piece["text"] for piece in prompt["pieces"]) == "2 + 2 ="
    assert [one["reward"] for one in completions] == [0.5, 0.5]
    assert all(piece["trained"] for one in completions for piece in one["pieces"])
    out = trahiv("preview", recipe).out
    assert "completion 2, reward 0.5 ──" in out
    assert "longer ones are left out" in out


def test_json_is_one_preview_event(events, usual):
    event, warning = events("preview -n 1", usual("sft"))
    assert "1 of the first 3 samples fill 64 tokens" in warning["message"]
    lengths = {"shortest": 26, "median": 38, "longest": 64}
    assert event == event | {"event": "preview", "num_samples": 3, "looked_at": 3, "lengths": lengths}
    [sample] = event["samples"]
    assert sample["trained_tokens"] == len("It is 4.") + 1
    [part] = sample["parts"]
    assert [piece for piece in part["pieces"] if piece["trained"]] == [
        {"text": "It is 4.", "trained": True, "special": False},
        {"text": "<|im_end|>", "trained": True, "special": True},
    ]


def test_untrainable_samples_warn(trahiv, usual):
    out, err = trahiv("preview -n 1 --set dpo.max_length=2", usual("dpo"))
    assert "left out  3 that would train nothing" in out
    assert "none of the first 3 samples trains a token" in err
    assert "Raise `dpo.max_length` (it is 2)" in err


def test_control_characters_are_escaped():
    assert readable("a\tb\n\x1b[31m\r\u202e\u2028") == "a⇥   b↵\n\\x1b[31m\\r\\u202e\\u2028"
    assert readable("👩\u200d🚀 é\xa0ü") == "👩\u200d🚀 é\xa0ü"


PLAIN = "[CLS]Some words to hide⟦[MASK]⟧"


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, "\x1b[36m[CLS]\x1b[0mSome words to hide⟦\x1b[1;32m[MASK]\x1b[0m⟧"),
        ({"NO_COLOR": "1"}, PLAIN),
        ({"TERM": "dumb"}, PLAIN),
    ],
)
def test_only_willing_terminals_get_colour(trahiv, usual, monkeypatch, environment, shown):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with mock.patch.dict(os.environ, {"NO_COLOR": "", "TERM": "xterm"} | environment):
        assert shown in trahiv("preview --format human", usual("mlm")).out


@pytest.mark.parametrize("tokenizer", [chat_tokenizer(), ByT5Tokenizer()])
def test_pieces_keep_characters_whole(tokenizer):
    text = "so é 🙂 z"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for num_bytes in range(1, 12):
        pieces = pieces_of(tokenizer, [(token, place >= num_bytes) for place, token in enumerate(ids)])
        whole = text.encode()[:num_bytes].decode(errors="ignore")
        assert [piece.text for piece in pieces] == [whole, text.removeprefix(whole)]


@pytest.mark.parametrize(("task", "is_stream", "total"), [("sft", True, "a stream"), ("clm", False, "1,001")])
def test_only_first_samples_are_examined(trahiv, write, task, is_stream, total):
    recipe = write(task, [{"text": "is a text"}] * 1001, data={"streaming": is_stream}, packing=False)
    out = trahiv("preview -n 1001", recipe).out
    assert f"samples  {total}, the first 1,000 looked at" in out
    assert re.findall(r"^sample (\d+)", out, re.MULTILINE)[-1] == "1000"


ADDS = CHATML.replace("{{ message['content'] }}", "{{ '> ' + message['content'] }}")


@pytest.mark.parametrize(
    ("question", "template", "message", "hint"),
    [
        ("Hi", CHATML, "{% generation %}", r"`sft\.assistant_only_loss`"),
        (None, ADDS, "Row 1 of .* has a message without 'content'", "Fix or remove"),
    ],
)
def test_trl_refusal_is_explained(write, question, template, message, hint):
    data = {"chat_template": template}
    recipe = load_recipe(write("sft", [chat(question, "Yes")], data=data, assistant_only_loss=True)).recipe
    with refused(message, hint):
        build_preview(recipe, 3)


def test_trl_warning_is_passed_on_once():
    warned = []
    warn = logging.getLogger("trl.trainer").warning
    with forwarding_trl_warnings(lambda *said: warned.append(said)):
        for text in ("[RANK 0] it may not learn to stop", "[RANK 0] it may not learn to stop", "another"):
            warn(text)
    warn("afterwards")
    messages, hints = zip(*warned, strict=True)
    assert messages == ("it may not learn to stop", "another")
    assert all("trahiv preview" in hint for hint in hints)


def test_own_mistake_is_no_data_error():
    with pytest.raises(TypeError), preparing():
        raise TypeError("of ours")


@pytest.fixture
def require(write):
    """`require("sft", row)` asks whether a dataset of this row trains a token."""

    def require(task, row, **section):
        recipe = load_recipe(write(task, [], **section)).recipe
        require_trainable(recipe, Splits(Dataset.from_list([row] * 8), None, build_tokenizer(recipe)))

    return require


@pytest.mark.parametrize(
    ("task", "row", "section"),
    [
        ("clm", {"input_ids": [1, 2]}, {}),
        ("seq-cls", {"input_ids": [1, 2], "labels": 0}, {"labels": ["a", "b"]}),
        ("sft", {"prompt": "ab", "completion": "cdefghij"}, {"max_length": 6}),
        ("dpo", {"prompt": "abcd", "chosen": "efgh", "rejected": "i"}, {"max_length": 6}),
    ],
)
def test_data_with_trained_tokens_is_accepted(require, task, row, section):
    require(task, row, **section)


@pytest.mark.parametrize(
    ("task", "answers", "section"),
    [
        ("sft", {"completion": "ij"}, {}),
        ("sft", {"completion": "ij"}, {"packing": True}),
        ("dpo", {"chosen": "i", "rejected": "j"}, {}),
    ],
)
def test_data_without_trained_tokens_is_refused(require, task, answers, section):
    with refused("none of the first 8 samples trains a token", rf"`{task}\.max_length` \(it is 6\)"):
        require(task, {"prompt": "abcdefgh", **answers}, max_length=6, **section)
