"""Recipes that contradict their data or this machine: `check` reports it, and `init` refuses them.

A row is a working recipe with one change. The error must have the mistake, its place, a hint and an exit
code, before a socket is opened. Mistakes of a recipe alone are in `tests/unit/recipe/mistakes.txt`, those of
a row in `tests/unit/recipe/test_rows.py`; those that only the libraries find, in
`test_before_anybody_is_invited.py`.
"""

import json
import re

import pytest

from tests.kit.recipes import write_tiny

pytestmark = pytest.mark.usefixtures("nothing_starts")

TEXT = {"text": "a"}
QUESTION, ANSWER = TALK = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}]
PREFERENCES = {"prompt": "Hi. ", "chosen": "Yes.", "rejected": "No."}
JUDGED = {"prompt": "a", "completion": "b", "label": True}
PROMPT = {"prompt": "2 + 2 =", "answer": "4"}
SECTIONS = {
    "clm": {"packing": False},
    "grpo": {"rewards": "number", "max_completion_length": 16, "num_generations": 2},
    "seq-cls": {"labels": ["bad", "good"]},
}


@pytest.fixture
def write(here, write_rows):
    """`write("sft", [row])`: a recipe of this task on rows in `rows.jsonl`."""

    def write(task, rows, **changes):
        write_rows(rows)
        section = {task.replace("-", "_"): {"max_length": 32, **SECTIONS.get(task, {})}}
        data = {"datasets": [{"path": "rows.jsonl"}]}
        changes = {"clm": None, **section, "data": data, **changes}
        return write_tiny(here, task=task, **changes).relative_to(here)

    return write


DATA, COLUMNS = "data.datasets.0.path", "data.datasets.0.columns"
BROKEN = [
    ("clm", TEXT, "clm.max_length=4096", "4096 tokens do not fit .* context of 64", "at most 64"),
    ("clm", TEXT, "model.config.model_type=lama", "knows no `model_type` 'lama'", "'llama'"),
    ("clm", TEXT, "model.config.dtype=bf16", "knows no 'bf16' here", "bfloat16"),
    ("clm", TEXT, "model.config.rope_scaling={rope_type: yarm}", "knows no 'yarm' here", "'yarn'"),
    ("clm", {"body": "a"}, "", "no column 'text'; it has body", "Set `clm.dataset_text_field`"),
    ("clm", {"text": 5}, "", "holds int, not text", "one of text"),
    ("clm", [], "", "is empty", "Check its files"),
    ("clm", [TEXT, "a fox"], "", "Row 2 .* is no JSON object", "Fix or remove"),
    ("sft", [{"a": "x"}, {"a": None}], f"{COLUMNS}={{a: text}}", "Row 2 .* has no 'text'", "Fix or remove"),
    ("clm", TEXT, f"{COLUMNS}={{chat: text}}", "no column 'chat' to rename", "columns"),
    ("clm", TEXT | {"n": 1}, f"{COLUMNS}={{text: n}}", "'n': that name is taken", "another one"),
    ("dpo", PREFERENCES | {"chosen": TALK, "rejected": TALK}, "", "'prompt' holds text, 'c", "leaves it out"),
    ("dpo", {"chosen": "a", "rejected": TALK}, "", "do not fit together", "all of them messages"),
    ("dpo", {"messages": TALK}, "", "has no `chosen`", "task: sft"),
    ("sft", PREFERENCES, "", "has no `messages`", "task: dpo"),
    ("sft", {"instruction": "a"}, "", "has no `messages`", "0.columns`, .* `{instruction: prompt, output"),
    ("sft", TEXT, "sft.completion_only_loss=true", "no `completion` to train", "only_loss: auto"),
    ("sft", TEXT, "sft.assistant_only_loss=true", "only in conversations", "only_loss: false"),
    (
        "sft",
        {"messages": [{"from": "a", "value": "b"}]},
        "",
        "'messages' .* list .* no.* conversation",
        "messages: conversa",
    ),
    (
        "kto",
        {"prompt": "a", "completion": "b"},
        "",
        "has no `prompt`, `completion` and `label`, or",
        "Rename",
    ),
    ("kto", JUDGED | {"label": "yes"}, "", "Row 1 .* has 'yes' in 'label', and not true or false", "Fix or"),
    ("reward", {"messages": TALK}, "", "has no `chosen`", "task: sft"),
    ("grpo", {"question": "a", "answer": "b"}, "", "has no `prompt`", "instruction: prompt"),
    ("grpo", {"prompt": "a", "solution": "b"}, "", "no column 'answer'", r"rewards\.0\.column"),
    ("grpo", [PROMPT, PROMPT | {"answer": None}], "", "Row 2 .* has no 'answer'", "Fix or remove"),
    (
        "grpo",
        PROMPT,
        "grpo.rewards=think_format_reward",
        "reads conversations, and the prompts",
        "as messages",
    ),
    ("grpo", {"prompt": TALK[:1]}, "grpo.rewards=[accuracy_reward]", "has no `solution`", "Rename"),
    ("seq-cls", {"text": "a", "labels": 1}, "", "no column 'label'", "dataset_label_field` to 'labels'"),
    ("seq-cls", [{"text": "a", "label": 1}, TEXT], "", "Row 2 .* has no label", "mend the row"),
    ("clm", [{"data": [TEXT], "n": 1}], "", "is one object, .*: its rows are in data", "jq -c"),
    ("clm", dict.fromkeys("abcdefghijk"), "", r"it has (\w, ){10}\.\.\.", "dataset_text_field"),
]


@pytest.mark.parametrize(("task", "row", "setting", "message", "hint"), BROKEN)
def test_check_and_init_report_mistake(write, events, here, task, row, setting, message, hint):
    file = write(task, row if isinstance(row, list) else [row] * 8)
    before = set(here.iterdir())
    path = DATA if setting.startswith((COLUMNS, "sft", "grpo")) or not setting else setting.partition("=")[0]
    origin = "tiny.yaml" if path == DATA else f"--set {setting}"
    for command in ("check", "init", "init --dry-run"):
        [event] = events(command, file, *(["--set", setting] if setting else []), code=2)
        assert event == event | {"event": "error", "path": path, "file": origin}
        assert re.search(message, event["message"])
        assert re.search(hint, event["hint"])
    assert set(here.iterdir()) == before


@pytest.mark.parametrize(
    ("second", "third", "code"),
    [
        ([QUESTION, {"role": "assistant", "value": "Yes."}], [QUESTION], 2),
        ([QUESTION, ANSWER | {"content": ""}], [ANSWER, QUESTION], 0),
    ],
)
def test_each_kind_of_row_is_reported(write, events, second, third, code):
    rows = [{"messages": messages} for messages in (TALK, second, third)]
    told = events("check", write("sft", rows), code=code)
    assert [re.findall(r"Row \d", event["message"]) for event in told[:2]] == [["Row 2"], ["Row 3"]]


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        ("sft", {"messages": [QUESTION | {"role": "human"}, ANSWER]}, "unknown role 'human'"),
        ("sft", {"messages": [QUESTION | {"content": [TEXT | {"type": "text"}]}, ANSWER]}, "a list as a"),
        ("clm", {"text": ""}, "rows.jsonl' has no 'text' and is left out"),
    ],
)
def test_doubtful_row_warns(write, events, task, row, said):
    told = events("check", write(task, [row]))
    assert [event["event"] for event in told] == ["warning", "checked"]
    assert said in told[0]["message"]


def test_one_budget_bounds_dataset_reading(write, events, here):
    file = write("clm", [{"text": "a" * 2**25}], data={"datasets": [{"path": "*.jsonl"}]})
    for content, code in ((b"{\n", 0), ("{\n".encode("utf-16"), 2)):
        (here / "s.jsonl").write_bytes(content)
        events("check", file, code=code)


@pytest.mark.parametrize(
    ("datasets", "code"),
    [
        ("{path: rows.jsonl}", 2),
        ('{path: rows.jsonl, split: "train[:1]"}', 0),
        ("{path: rows.jsonl, fraction: 0.5}, {path: rows.jsonl, fraction: 0.5}", 0),
    ],
)
def test_possibly_unused_row_is_not_judged(write, events, datasets, code):
    file = write("sft", [TEXT, {"text": None}])
    events("check", file, "--set", f"data.datasets=[{datasets}]", code=code)


def test_row_without_text_needs_no_label(write, events):
    events("check", write("seq-cls", [{"label": None}, TEXT | {"label": 0}]))


@pytest.fixture
def lacking(write):
    """A recipe with a second dataset that is not here."""
    return write("clm", [TEXT], data={"datasets": [{"path": "rows.jsonl"}, {"path": "rowz.jsonl"}]})


def test_missing_data_fails_init(lacking, events):
    [event] = events("init", lacking, code=3)
    assert event == event | {"event": "error", "path": "data.datasets.1.path"}
    assert re.search(r"no file or folder '.*rowz\.jsonl'", event["message"])
    assert "rows." in event["hint"]


def test_mistake_counts_more_than_missing_data(lacking, events):
    assert len(events("init", lacking, "--set", "clm.max_length=4096", code=2)) == 2


def test_all_mistakes_are_reported_with_places(write, events, here):
    file = write("clm", [{"body": "a"}])
    missing, too_long = events("check", file, "--set", "clm.max_length=129", code=2)
    assert missing["path"] == DATA
    assert too_long["path"] == "clm.max_length"
    source = (here / file).read_text().splitlines()[missing["line"] - 1]
    assert source.partition("path: ")[::2] == ("  - ", "rows.jsonl")
    assert source[missing["col"] - 1 :] == "rows.jsonl"


@pytest.mark.parametrize(
    ("model_type", "packing", "context", "code", "said"),
    [
        ("llama", True, 16, 0, {}),  # rotary positions
        ("gpt2", False, 16, 0, {}),  # a short text fits
        ("gpt2", True, 1024, 0, {}),
        ("gpt2", True, 1023, 2, {"path": "clm.max_length", "line": 3, "hint": "write at most 1023"}),
    ],
)
def test_context_limit_comes_from_table(write, events, here, model_type, packing, context, code, said):
    (here / "config.json").write_text(json.dumps({"model_type": model_type, "n_positions": context}))
    file = write("clm", [TEXT], model={"model_name_or_path": "."}, clm={"packing": packing})
    assert (here / file).read_text().splitlines()[2] == "  model_name_or_path: ."
    [event] = events("check", file, code=code)
    assert event == event | said
