"""`trahiv preview`: what is said, where, and how it looks; compared with a picture."""

import json
import os
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from tests.kit.stand_ins import CHATML_MARKED, write_bert, write_llama
from trahiv_cli.cli.preview import draw, picture, readable
from trahiv_cli.train.preview import Part, Piece, Preview, Sample

PICTURE = Path(__file__).with_name("preview.txt")
RECIPE = """\
task: {task}
model: {{model_name_or_path: {model}}}
data: {{datasets: [{{path: {task}.jsonl}}], shuffle: false}}
{section}: {options}
training: {{max_steps: 1}}
"""


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


TASKS = {
    "sft": (
        "{max_length: 64, assistant_only_loss: true}",
        [
            chat("2 + 2?", "It is 4."),
            chat("And 2 + 3?", "C'est 5 :\n\n\tcinq été\u202e 🙂, and this is where it is too long."),
            chat("2 + 4?", "6"),
        ],
    ),
    "dpo": (
        "{max_length: 16}",
        [
            {"prompt": "2 + 2?", "chosen": " It is 4.", "rejected": " 5"},
            {"prompt": "3?", "chosen": " 3", "rejected": " No\x1b[31m"},
        ],
    ),
    "clm": (
        "{max_length: 32}",
        [{"text": text} for text in ("One text.\n", "Another one.", "And a third, which goes on.")],
    ),
    "mlm": ("{max_length: 32}", [{"text": "Some words to hide."}] * 3),
    "seq-cls": (
        "{labels: [bad, good], max_length: 24}",
        [{"text": "I like it.", "label": "good"}, {"text": "I do not like it, not at all.", "label": 0}],
    ),
}
"""Options and rows of each task."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, data and a recipe for each task."""
    folder = tmp_path_factory.mktemp("preview")
    write_llama(folder / "llama", chat_template=CHATML_MARKED)
    write_bert(folder / "bert")
    for task, (options, rows) in TASKS.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        model, section = "./bert" if task in ("mlm", "seq-cls") else "./llama", task.replace("-", "_")
        recipe = RECIPE.format(task=task, model=model, section=section, options=options)
        (folder / f"{task}.yaml").write_text(recipe)
    return folder


@pytest.fixture(autouse=True)
def here(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


PIECES = (
    Piece("<s>", False, True),
    Piece("Hi [red]you\n", False),
    Piece("é\n", True),
    Piece("</s>", True, True),
)
PREVIEW = Preview(
    name="hand-made",
    task="sft",
    max_length=2048,
    packed=False,
    num_samples=52_000,
    looked_at=1000,
    rows=993,
    tokens=300_000,
    trained_tokens=100_000,
    lengths={"shortest": 100, "median": 110, "longest": 2048},
    full_samples=1,
    classes={},
    samples=(Sample(12, 3, (Part("", PIECES),)),),
)


def test_previews_look_as_they_did(trahiv):
    """For a new picture: TRAHIV_REWRITE=1 pytest tests/unit/cli/test_preview_command.py, then look at it."""
    shown = []
    for command in ("sft", "sft --set sft.packing=true", "dpo", "clm", "seq-cls"):
        recipe, *options = command.split()
        code, out, _ = trahiv("preview", f"{recipe}.yaml", *options)
        assert code == 0
        shown.append(f"$ trahiv preview {command}\n{out}")
    shown.append(f"60 columns:\n{draw(*picture(PREVIEW), width=60, is_coloured=False)}\n")
    text = "\n".join(shown)
    if os.environ.get("TRAHIV_REWRITE"):
        PICTURE.write_text(text, encoding="utf-8")
    assert text == PICTURE.read_text(encoding="utf-8")


def test_hidden_words_are_marked(trahiv):
    code, out, err = trahiv("preview", "mlm.yaml", "-n", "1")
    assert (code, err) == (0, "")
    assert "sample 2" not in out
    lines = [line.strip("│ ") for line in out.splitlines()]
    sees, guesses = (
        next(after for line, after in zip(lines, lines[1:], strict=False) if line.startswith(part))
        for part in ("the model sees", "and is to guess")
    )
    assert "⟦" in sees and sees != guesses
    assert guesses.replace("⟦", "").replace("⟧", "") == "[CLS]Some words to hide.[SEP]"


def test_json_is_one_preview_event(events):
    code, (event,) = events("preview", "sft.yaml", "-n", "1")
    assert (code, event["event"], event["v"]) == (0, "preview", 1)
    assert event["num_samples"] == event["looked_at"] == 3
    assert event["lengths"] == {"shortest": 26, "median": 33, "longest": 64}
    (sample,) = event["samples"]
    assert sample["trained_tokens"] == len("It is 4.") + 1
    assert [piece for part in sample["parts"] for piece in part["pieces"] if piece["trained"]] == [
        {"text": "It is 4.", "trained": True, "special": False},
        {"text": "<|im_end|>", "trained": True, "special": True},
    ]


def test_what_trains_nothing_is_warned_of(trahiv, events):
    too_short = ("preview", "dpo.yaml", "--set", "dpo.max_length=2")
    code, out, err = trahiv(*too_short, "-n", "1")
    assert code == 0 and "left out  2 that would train nothing" in out
    assert "none of the first 2 samples trains a token" in err and "Raise `dpo.max_length` (it is 2)" in err
    code, told = events(*too_short)
    assert (code, [event["event"] for event in told]) == (0, ["preview", "warning"])


def test_nothing_in_a_text_or_a_name_steers_the_terminal():
    assert readable("a\tb\n\x1b[31m\r\u202e\u2028") == "a⇥   b↵\n\\x1b[31m\\r\\u202e\\u2028"
    assert readable("👩\u200d🚀 é\xa0ü") == "👩\u200d🚀 é\xa0ü"
    classes = replace(PREVIEW, task="seq-cls", classes={"[red]\x1b": 1}, samples=())
    drawn = draw(*picture(classes), width=30, is_coloured=False)
    assert "[red]\\x1b" in drawn and {len(line) for line in drawn.splitlines()} == {30}


@pytest.mark.parametrize("unwanted", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colour_is_for_terminals_that_want_it(trahiv, monkeypatch, unwanted):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in unwanted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _, out, _ = trahiv("preview", "clm.yaml", "--format", "human")
    assert "⟦" in out and ("\x1b[1;32mne text." in out) == (not unwanted)
