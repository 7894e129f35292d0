"""Recipes that contradict their data or this machine: `check` says it, and `init` invites nobody to it.

A row is a recipe that works with one thing changed. Each must be told what is wrong, where (line and column
of the recipe), what to do about it, and with which exit code, before a socket is opened. What is wrong with
a recipe alone is in `tests/unit/recipe/mistakes.txt`, files that can't be read in
`test_before_anybody_is_invited.py`.
"""

import json
import re
from dataclasses import dataclass, field

import pytest

pytestmark = pytest.mark.usefixtures("nothing_starts")

CONFIG = "config: {model_type: llama, hidden_size: 32, max_position_embeddings: 64}"
RECIPE = """\
name: broken
model:
  {config}
  tokenizer_name_or_path: builtin/bytes
task: {task}
data:
  datasets:
    - path: rows.jsonl
{section}:
  max_length: 32{more}
training:
  max_steps: 3
  learning_rate: 1e-3
  warmup_steps: 0
  per_device_train_batch_size: 2
hivemind_config:
  opt:
    target_batch_size: 4
"""


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


ASK = {"role": "user", "content": "Hi."}
ANSWER = {"role": "assistant", "content": "Yes."}
CHAT = {"messages": [ASK, ANSWER]}
PREFERENCES = lines(*[{"prompt": "Hi. ", "chosen": "Yes.", "rejected": "No."}] * 8)
ROWS = {
    "clm": lines(*({"text": f"a fox {number}"} for number in range(8))),
    "sft": lines(*[CHAT] * 8),
    "dpo": PREFERENCES,
    "seq-cls": lines(*({"text": "a film", "label": number % 2} for number in range(8))),
}
MORE = {"clm": "\n  packing: false", "seq-cls": "\n  labels: [bad, good]"}


@dataclass(frozen=True)
class Broken:
    """A recipe with one thing changed, and what is said of it: where it is nothing, it can be trained."""

    message: str = ""
    hint: str = ""
    task: str = "clm"
    rows: str | None = None  # what the data file holds instead
    place: str = "8:13"  # line and column that it is pointed at: by default the path of the data
    changes: dict = field(default_factory=dict)  # in the recipe: old -> new
    files: dict = field(default_factory=dict)  # more of them beside the recipe
    code: int = 2


DATA = "path: rows.jsonl"

BROKEN = {
    # -- the model
    "longer than the context": Broken(
        "4096 tokens do not fit .* context of 64", "at most 64", place="10:15", changes={": 32\n": ": 4096\n"}
    ),
    "an unknown model type": Broken(
        "knows no `model_type` 'lama'", "'llama'", place="3:24", changes={"llama": "lama"}
    ),
    # -- data
    "no file": Broken("no file or folder '.*rowz.jsonl'", "rows.jsonl", changes={"rows.j": "rowz.j"}, code=3),
    "another column": Broken("no column 'text'; it has body", "clm.dataset_text", rows=lines({"body": "a"})),
    "numbers for texts": Broken("holds int, not text", "one of text", rows=lines({"text": 5}, {"text": 6})),
    "texts for rows": Broken("Row 1 .* is no JSON object", "Fix or remove", rows='"a fox"\n"a dog"\n'),
    "a column that is not there to rename": Broken(
        "no column 'chat' to rename", "columns", changes={DATA: f"{DATA}\n      columns: {{chat: text}}"}
    ),
    "a new name that is taken": Broken(
        "'text' of .* cannot be renamed to 'n': that name is taken", "another one",
        rows=lines({"text": "a", "n": 1}), changes={DATA: f"{DATA}\n      columns: {{text: n}}"},
    ),
    # -- conversations
    "a text before conversations": Broken(
        "'prompt' holds text, 'chosen' holds conversations", r"columns: {prompt: prompt_text}` leaves it out",
        "dpo", lines({"prompt": "Hi.", "chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]}),
    ),
    "a text beside a conversation": Broken(
        "do not fit together", "all of them messages",
        "dpo", lines({"chosen": "a", "rejected": [ASK, ANSWER]}),
    ),
    "a completion in texts": Broken(
        "no `completion` to train", "completion_only_loss: auto", "sft", lines({"text": "a"}),
        changes={"length: 32": "length: 32\n  completion_only_loss: true"},
    ),
    "ShareGPT's keys": Broken(
        "'messages' .* holds list .* not a conversation", "columns: {messages: conversations}",
        "sft", lines({"messages": [{"from": "human", "value": "Hi."}]}),
    ),
    "others' names for columns": Broken(
        "has no `messages`", "data.datasets.0.columns`, .* `{instruction: prompt, output: completion}",
        "sft", lines({"instruction": "a", "output": "b"}),
    ),
    "preferences for answers": Broken("has no `messages`", "task: dpo", "sft", PREFERENCES),
    "answers for preferences": Broken("has no `chosen`", "task: sft", "dpo", ROWS["sft"]),
    "an assistant in texts": Broken(
        "holds texts, and only in conversations", "assistant_only_loss: false", "sft", lines({"text": "a"}),
        changes={"length: 32": "length: 32\n  assistant_only_loss: true"},
    ),
    # -- classes
    "no column of classes": Broken(
        "no column 'label'; it has text, labels", "`seq_cls.dataset_label_field` to 'labels'",
        "seq-cls", lines({"text": "a", "labels": 1}),
    ),
}  # fmt: skip


def write(folder, broken):
    task, more = broken.task, MORE.get(broken.task, "")
    recipe = RECIPE.format(config=CONFIG, task=task, section=task.replace("-", "_"), more=more)
    for old, new in broken.changes.items():
        assert old in recipe
        recipe = recipe.replace(old, new, 1)
    rows = ROWS[task] if broken.rows is None else broken.rows
    for name, content in {"broken.yaml": recipe, "rows.jsonl": rows, **broken.files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)


@pytest.mark.parametrize("name", BROKEN)
def test_check_and_init_say_what_is_wrong_where_and_what_to_do(name, events, here):
    broken = BROKEN[name]
    write(here, broken)
    before = set(here.iterdir())
    for command in ("check", "init"):
        code, (event, *more) = events(command, "broken.yaml")
        assert re.search(broken.hint, event["hint"]), event
        if name == "no file" and command == "check":  # it is often checked where the data is not
            assert (code, event["event"]) == (0, "warning")
            assert re.search(f"^broken.yaml:{broken.place}: .*{broken.message}", event["message"])
            continue
        assert (code, event["event"], more) == (broken.code, "error", [])
        assert re.search(broken.message, event["message"]), event
        assert (event["file"], f"{event['line']}:{event['col']}") == ("broken.yaml", broken.place)
    assert set(here.iterdir()) == before


BREAK = '  chat_template: "{% generation %}{{ x }}{% endgeneration %}"'
WELL = {
    "a column that comes later": Broken(rows=lines({"n": 1}, *[{"text": "a"}] * 8)),
    "a generation tag": Broken(task="sft", changes={DATA: f"{DATA}\n{BREAK}"}),
    "a context of turned positions": Broken(
        changes={CONFIG: "model_name_or_path: here"},
        files={"here/config.json": '{"model_type": "llama", "max_position_embeddings": 16}'},
    ),
}


@pytest.mark.parametrize("name", WELL)
def test_check_takes_what_can_be_trained(name, events, here):
    write(here, WELL[name])
    for text in ((here / "broken.yaml").read_text(), "\ufeff" + (here / "broken.yaml").read_text()):
        (here / "broken.yaml").write_bytes(text.replace("\n", "\r\n").encode())
        code, told = events("check", "broken.yaml")
        assert (code, [event["event"] for event in told]) == (0, ["checked"]), told


def test_all_that_is_wrong_is_said_at_once(events, here):
    write(here, BROKEN["an unknown model type"])
    (here / "rows.jsonl").write_text(lines({"body": "a"}))
    code, told = events("check", "broken.yaml", "--set", "clm.max_length=65")
    assert code == 2
    assert [(event["file"].partition(" ")[0], event["path"]) for event in told] == [
        *(("broken.yaml", "model.config.model_type"), ("broken.yaml", "data.datasets.0.path")),
        ("--set", "clm.max_length"),
    ]


def test_a_table_of_positions_ends_where_blocks_are_filled(trahiv, here):
    """gpt2 has no position beyond its context; a document that is shorter than `max_length` needs none."""
    files = {"here/config.json": '{"model_type": "gpt2", "n_positions": 16}'}
    write(here, Broken(changes={CONFIG: "model_name_or_path: here"}, files=files))
    assert trahiv("check", "broken.yaml")[0] == 0
    code, out, err = trahiv("check", "broken.yaml", "--set", "clm.packing=true")
    assert (code, out) == (2, "")
    assert "clm.max_length: samples of 32 tokens do not fit into the model's context of 16" in err
