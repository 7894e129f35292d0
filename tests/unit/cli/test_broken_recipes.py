"""Recipes that contradict their data or this machine: `check` reports it, and `init` refuses them.

A row is a working recipe with one change. The error must have the mistake, its place, a hint and an exit
code, before a socket is opened. Mistakes of a recipe alone are in `tests/unit/recipe/mistakes.txt`; those
that only the libraries find, in `test_before_anybody_is_invited.py`.
"""

import json
import re

import pytest

from tests.kit.recipes import write_tiny

pytestmark = pytest.mark.usefixtures("nothing_starts")

TALK = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}]
TALKS = {"chosen": TALK, "rejected": TALK}
SHAREGPT = [{"from": "human", "value": "Hi."}]
PREFERENCES = {"prompt": "Hi. ", "chosen": "Yes.", "rejected": "No."}
SECTIONS = {"clm": {"packing": False}, "sft": {}, "dpo": {}, "seq-cls": {"labels": ["bad", "good"]}}


@pytest.fixture
def write(here):
    """`write("sft", [row])`: a recipe of this task on rows in `rows.jsonl`."""

    def write(task, rows, **changes):
        sections = {"clm": None, task.replace("-", "_"): {"max_length": 32, **SECTIONS[task]}}
        data = {"data": {"datasets": [{"path": "rows.jsonl"}]}}
        file = write_tiny(here, task=task, **(data | sections | changes))
        (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file.relative_to(here)

    return write


DATA, COLUMNS = "data.datasets.0.path", "data.datasets.0.columns"
BROKEN = [
    ("clm", {"text": "a"}, "clm.max_length=4096", "4096 tokens do not fit .* context of 64", "at most 64"),
    ("clm", {"text": "a"}, "model.config.model_type=lama", "knows no `model_type` 'lama'", "'llama'"),
    ("clm", {"text": "a"}, "model.config.hidden_act=swiglu", "knows no 'swiglu' here", "did you mean 'silu'"),
    ("clm", {"text": "a"}, "model.config.dtype=bf16", "knows no 'bf16' here", "bfloat16"),
    ("clm", {"text": "a"}, "model.config.rope_scaling={rope_type: yarm}", "knows no 'yarm' here", "'yarn'"),
    ("clm", {"body": "a"}, "", "no column 'text'; it has body", "Set `clm.dataset_text_field`"),
    ("clm", {"text": 5}, "", "holds int, not text", "one of text"),
    ("clm", [], "", "is empty", "Check its files"),
    ("clm", [{"text": "a"}, "a fox"], "", "Row 2 .* is no JSON object", "Fix or remove"),
    ("sft", [{"text": "a"}] * 5 + [{"text": None}], "", "Row 6 .* has no 'text'", "Fix or remove"),
    ("sft", [{"a": "x"}, {"a": None}], f"{COLUMNS}={{a: text}}", "Row 2 .* has no 'text'", "Fix or remove"),
    ("clm", {"text": "a"}, f"{COLUMNS}={{chat: text}}", "no column 'chat' to rename", "columns"),
    ("clm", {"text": "a", "n": 1}, f"{COLUMNS}={{text: n}}", "'n': that name is taken", "another one"),
    ("dpo", {"prompt": "Hi."} | TALKS, "", "'prompt' holds text, 'c", "leaves it out"),
    ("dpo", {"chosen": "a", "rejected": TALK}, "", "do not fit together", "all of them messages"),
    ("dpo", {"messages": TALK}, "", "has no `chosen`", "task: sft"),
    ("sft", PREFERENCES, "", "has no `messages`", "task: dpo"),
    ("sft", {"instruction": "a"}, "", "has no `messages`", "0.columns`, .* `{instruction: prompt, output"),
    ("sft", {"text": "a"}, "sft.completion_only_loss=true", "no `completion` to train", "only_loss: auto"),
    ("sft", {"text": "a"}, "sft.assistant_only_loss=true", "only in conversations", "only_loss: false"),
    ("sft", {"messages": SHAREGPT}, "", "'messages' .* list .* no.* conversation", "messages: conversa"),
    ("seq-cls", {"text": "a", "labels": 1}, "", "no column 'label'", "dataset_label_field` to 'labels'"),
    ("seq-cls", [{"text": "a", "label": 1}, {"text": "a"}], "", "Row 2 .* has no label", "mend the row"),
    ("seq-cls", [{"text": "a", "label": 2}], "", "Row 1 .* the label 2, .* 2 classes", "mend the row"),
    ("seq-cls", [{"text": "a", "label": True}], "", "Row 1 .* the label true, .* classes", "mend the row"),
    ("clm", [{"data": [{"text": "a"}], "n": 1}], "", "is one object, .*: its rows are in data", "jq -c"),
    ("clm", [{str(n): {"text": "a"} for n in range(99)}], "", "one object, .* in 0, 1, .*, 9, [.]{3}", "jq"),
    ("clm", [{"text": ["a"], "n": [1]}], "", "one object, .* its rows are in text, n", "one a line"),
    ("clm", [{str(n): 1 for n in range(99)}] * 2, "", r"it has (\d, ){10}\.\.\.", "dataset_text_field"),
    ("sft", [{"messages": TALK}] * 8 + [{"messages": TALK[:1]}], "", "Row 9 .* no message of the as", "Fix"),
    ("sft", [{"messages": [{**TALK[0], "content": ["Hi"]}, TALK[1]]}], "", "Row 1 .* has a list as", "Fix"),
]


@pytest.mark.parametrize(("task", "row", "setting", "message", "hint"), BROKEN)
def test_check_and_init_report_mistake(write, events, here, task, row, setting, message, hint):
    file = write(task, row if isinstance(row, list) else [row] * 8)
    before = set(here.iterdir())
    path = DATA if setting.startswith((COLUMNS, "sft")) or not setting else setting.partition("=")[0]
    for command in (["check"], ["init"], ["init", "--dry-run"]):
        code, (event,) = events(*command, file, *(["--set", setting] if setting else []))
        assert (code, event["event"], event["path"]) == (2, "error", path)
        assert re.search(message, event["message"]) and re.search(hint, event["hint"]), event
        assert event["file"] == (f"--set {setting}" if path != DATA else "tiny.yaml")
    assert set(here.iterdir()) == before


def test_each_broken_row_kind_is_reported(write, events):
    broken = [TALK[0], {"role": "assistant", "value": "Yes."}], TALK[:1]
    file = write("sft", [{"messages": messages} for messages in (TALK, *broken, TALK, *broken)])
    code, told = events("check", file)
    assert code == 2 and [event["message"][:5] for event in told] == ["Row 2", "Row 3"]
    assert all(re.search(r"\(2 rows: \d, \d\)", event["message"]) for event in told)


def test_doubtful_rows_warn(write, events):
    rows = [TALK, [TALK[0], {**TALK[1], "content": ""}], TALK[::-1]]
    code, told = events("check", write("sft", [{"messages": messages} for messages in rows]))
    assert (code, [event["event"] for event in told]) == (0, ["warning", "warning", "checked"])
    assert "Row 2 of" in told[0]["message"] and "Row 3 of" in told[1]["message"]
    parts = [{"type": "text", "text": "Hi."}]
    for message, said in (({"role": "human"}, "unknown role 'human'"), ({"content": parts}, "a list as a")):
        code, (warning, _) = events("check", write("sft", [{"messages": [TALK[0] | message, TALK[1]]}]))
        assert code == 0 and said in warning["message"]
    code, (warning, _) = events("check", write("clm", [{"text": "a"}, {"text": ""}]))
    assert code == 0 and "rows.jsonl' has no 'text' and is left out" in warning["message"]


def test_one_budget_bounds_dataset_reading(write, events, here):
    file = write("clm", [{"text": "a" * 2**25}], data={"datasets": [{"path": "*.jsonl"}]})
    for content, code in ((b"{\n", 0), ("{\n".encode("utf-16"), 2)):
        (here / "s.jsonl").write_bytes(content)
        assert events("check", file)[0] == code


def test_possibly_unused_row_is_not_judged(write, events):
    file = write("sft", [{"text": "a"}, {"text": None}])
    whole, half = "{path: rows.jsonl}", "{path: rows.jsonl, fraction: 0.5}"
    for entries, code in {
        whole: 2,
        '{path: rows.jsonl, split: "train[:1]"}': 0,
        f"{half}, {half}": 0,
    }.items():
        assert events("check", file, "--set", f"data.datasets=[{entries}]")[0] == code
    file = write("seq-cls", [{"label": None}, {"text": "a", "label": 0}])  # one without a text is left out
    assert events("check", file)[0] == 0


def test_missing_data_fails_init(write, events):
    file = write("clm", [{"text": "a"}], data={"datasets": [{"path": "rows.jsonl"}, {"path": "rowz.jsonl"}]})
    code, (event,) = events("init", file)
    assert (code, event["event"], event["path"]) == (3, "error", "data.datasets.1.path")
    assert re.search(r"no file or folder '.*rowz\.jsonl'", event["message"]) and "rows." in event["hint"]
    code, told = events("init", file, "--set", "clm.max_length=4096")
    assert (code, len(told)) == (2, 2), "what is wrong with a recipe is more than what is not here"


def test_all_mistakes_are_reported_with_places(write, events, here):
    file = write("clm", [{"body": "a"}])
    code, told = events("check", file, "--set", "clm.max_length=129")
    assert (code, [event["path"] for event in told]) == (2, [DATA, "clm.max_length"])
    source = (here / file).read_text().splitlines()[told[0]["line"] - 1]
    assert source.strip(" -") == "path: rows.jsonl" and source[told[0]["col"] - 1 :] == "rows.jsonl"
    config = dict.fromkeys(("hidden_size", "num_hidden_layers"), 4) | {"model_type": "gpt2", "n_positions": 8}
    file = write("clm", [{"text": "a"}], model__config=config, clm={})
    code, (event,) = events("check", file, "--set", "clm.max_length=9")
    assert (code, event["file"]) == (2, "--set clm.max_length=9") and "context of 8" in event["message"]


def test_context_limit_comes_from_position_table(write, events, here):
    (here / "base").mkdir()
    for model_type, packing, context, is_right in (
        *(("llama", True, 16, True), ("gpt2", False, 16, True)),  # rotary positions; a short text fits
        *(("gpt2", True, 1024, True), ("gpt2", True, 1023, False)),
    ):
        (here / "base/config.json").write_text(f'{{"model_type": "{model_type}", "n_positions": {context}}}')
        model, clm = {"model_name_or_path": "./base"}, {"packing": packing}
        code, (event,) = events("check", write("clm", [{"text": "a"}], model=model, clm=clm))
        assert (code, event["event"]) == ((0, "checked") if is_right else (2, "error")), event
    assert (event["path"], event["hint"]) == ("clm.max_length", "write at most 1023")
    assert (here / "tiny.yaml").read_text().splitlines()[
        event["line"] - 1
    ].strip() == "model_name_or_path: ./base"
