"""Broken recipes and broken data: what `check` says of each, where, and that `init` invites nobody to it.

A row is a recipe that works with one thing changed. Each must be told what is wrong, where (line and column
of the recipe), what to do about it, and with which exit code, before a socket is opened.
"""

import json
import re
from dataclasses import dataclass, field

import pytest

from trahiv_cli.cli import swarm

MODEL = """\
name: broken
model:
  config: {model_type: llama, hidden_size: 32, max_position_embeddings: 64}
  tokenizer_name_or_path: builtin/bytes
"""
DATA = """\
data:
  datasets:
    - path: rows.jsonl
"""
TRAINING = """\
training:
  max_steps: 3
  learning_rate: 1e-3
  warmup_steps: 0
  per_device_train_batch_size: 2
hivemind_config:
  opt:
    target_batch_size: 4
"""
IN_4_BITS = "quantization: {load_in_4bit: true}\n"
RECIPES = {
    "clm": f"{MODEL}task: clm\n{DATA}clm:\n  max_length: 32\n  packing: false\n{TRAINING}",
    "sft": f"{MODEL}task: sft\n{DATA}sft:\n  max_length: 32\n{TRAINING}",
    "mlm": f"{MODEL}task: mlm\n{DATA}mlm:\n  max_length: 32\n{TRAINING}",
    "dpo": f"{MODEL}task: dpo\n{DATA}dpo:\n  max_length: 32\n{TRAINING}",
    "seq-cls": f"{MODEL}task: seq-cls\n{DATA}seq_cls:\n  max_length: 32\n  labels: [bad, good]\n{TRAINING}",
}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def chat(*messages):
    return {"messages": list(messages)}


ASK = {"role": "user", "content": "Hi."}
ANSWER = {"role": "assistant", "content": "Yes."}

ROWS = {
    "clm": lines(*({"text": f"a fox {number}"} for number in range(8))),
    "sft": lines(*[chat(ASK, ANSWER)] * 8),
    "mlm": lines(*({"text": f"a fox {number}"} for number in range(8))),
    "dpo": lines(*[{"prompt": "Hi. ", "chosen": "Yes.", "rejected": "No."}] * 8),
    "seq-cls": lines(*({"text": "a film", "label": number % 2} for number in range(8))),
}


@dataclass(frozen=True)
class Broken:
    """One thing that is wrong."""

    place: str
    """Line and column that it is pointed at."""

    message: str
    hint: str = ""
    """What to do; where it is nothing, the message says what is taken instead."""

    old: str = ""
    new: str = ""
    """What is changed in the recipe."""

    task: str = "clm"
    rows: str | bytes | None = None
    """What the data file holds instead."""

    files: dict = field(default_factory=dict)
    """More files beside the recipe."""

    step: int = 4
    """Samples in a step."""

    whole: str | bytes | None = None
    """Instead of any recipe."""

    code: int = 2

    check_code: int | None = None
    """Of `check`, if it is another than that of `init`."""


def data(place, message, hint, rows, task="clm", **more):
    """Make a row whose data is broken."""
    return Broken(place, message, hint, task=task, rows=rows, **more)


def other_file(name, content, message, hint, task="clm"):
    """Make a row with data in another file."""
    return Broken("8:13", message, hint, "rows.jsonl", name, task=task, files={name: content})


STEPS = "max_steps: 3"
RATE = "learning_rate: 1e-3"

BROKEN = {
    # -- numbers
    "23 digits": Broken("13:14", "too large", "smaller", STEPS, "max_steps: 12345678901234567890123"),
    "1e400": Broken("14:18", "1e400 is too large", "smaller", RATE, "learning_rate: 1e400"),
    "more steps than anybody has": Broken("13:14", "at most 1000000000", "", STEPS, "max_steps: 99999999999"),
    "no steps": Broken("13:14", "must be at least 1, got 0", "", STEPS, "max_steps: 0"),
    "half a step": Broken("13:14", "expected a whole number, got 2.5", "", STEPS, "max_steps: 2.5"),
    "a number in quotes": Broken(
        "13:14", "whole number, got '3'", "write 3, without", STEPS, 'max_steps: "3"'
    ),
    "a number of Python": Broken("13:14", "got '1_000'", "write 1000", STEPS, "max_steps: 1_000"),
    "steps are true": Broken("13:14", "expected a whole number, got true", "", STEPS, "max_steps: true"),
    "a negative rate": Broken("14:18", "must be at least 0.0, got -0.001", "", RATE, "learning_rate: -1e-3"),
    "a rate that is no number": Broken(
        "14:18", "expected a number, got '.nan'", "finite", RATE, "learning_rate: .nan"
    ),
    "a rate with a comma": Broken(
        "14:18", "expected a number, got '0,001'", "write 0.001", RATE, "learning_rate: 0,001"
    ),
    "warm-up beyond the end": Broken(
        "15:17",
        "would rise for 50 steps, and the run ends after 3",
        "",
        "warmup_steps: 0",
        "warmup_steps: 50",
    ),
    "longer than the context": Broken(
        "10:15",
        "4096 tokens do not fit .* context of 64",
        "write at most 64",
        "max_length: 32",
        "max_length: 4096",
    ),
    "a batch larger than a step": Broken(
        "19:24", "one local batch is 100000 samples", "", "batch_size: 2\n", "batch_size: 100000\n"
    ),
    "a batch larger than the data": Broken(
        "16:32",
        "training data: 8; in one local batch: 100000",
        "lower training.per_device",
        "batch_size: 2\n",
        "batch_size: 100000\n",
        step=100000,
    ),
    "yes": Broken("11:12", "expected true or false", "write true", "packing: false", "packing: yes"),
    # -- YAML
    "a tab": Broken("13:1", "not valid YAML", "spaces, not with tabs", "  max_steps", "\tmax_steps"),
    "nothing": Broken("", "the file is empty", "trahiv new quickstart", whole=""),
    "only a comment": Broken("", "the file is empty", "trahiv new quickstart", whole="# a recipe\n"),
    "an image": Broken("1:1", "is not UTF-8 text", "", whole=b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff"),
    "written on Windows": Broken(
        "1:1", "is not UTF-8", "save it as UTF-8", whole="# caf\xe9\n".encode("cp1252")
    ),
    "a list": Broken("1:1", "expected `key: value` lines, got a list", "", whole="- model\n- data\n"),
    "a sentence": Broken("1:1", "expected `key: value` lines, got 'train it", "", whole="train it\n"),
    "a key twice": Broken(
        "14:3", "given twice; the first is on line 13", "keep one", STEPS, f"{STEPS}\n  {STEPS}"
    ),
    "an open quote": Broken("8:13", "not valid YAML", "", "rows.jsonl", '"rows.jsonl'),
    "an open bracket": Broken("9:4", "not valid YAML", "", "path: rows.jsonl", "{path: rows.jsonl"),
    "a colon too many": Broken("1:8", "mapping values", "quote a text", "name: broken", "name: a: b"),
    "two documents": Broken(
        "5:1", "a second document", "remove the `---`", "task: clm\n", "---\ntask: clm\n"
    ),
    "an anchor of nothing": Broken("8:13", "undefined alias", "", "rows.jsonl", "*rows"),
    "Python's tag": Broken("8:13", "tag .* is not known", "", "rows.jsonl", "!!python/name:os.system x"),
    "a number for a key": Broken("6:1", "a key must be a word", "quotes", "task: clm", "task: clm\n7: seven"),
    "a control character": Broken("1:10", "control character", "", "name: broken", "name: bro\x07ken"),
    # -- words
    "a misspelt key": Broken("14:3", "unknown key", "`learning_rate`", "learning_rate", "lerning_rate"),
    "another tool's key": Broken(
        "5:1", "unknown key", "model_name_or_path", "task: clm", "base_model: x\ntask: clm"
    ),
    "a key one level up": Broken(
        "5:1", "unknown key", "belongs under `training`", "task: clm", f"{STEPS}\ntask: clm"
    ),
    "a value for a section": Broken(
        "9:6", "expected a section", "", "clm:\n  max_length: 32\n  packing: false", "clm: 32"
    ),
    "a section for a value": Broken(
        "13:3", "expected a whole number, got a section", "", STEPS, "max_steps: {all: 3}"
    ),
    "a key that is missing": Broken("12:1", "is missing", "add `max_steps", f"  {STEPS}\n", ""),
    "a section that is missing": Broken("1:1", "is missing", "add `data:`", DATA, ""),
    "an unknown task": Broken("5:7", "got 'stf'", "", "task: clm", "task: stf"),
    "a name with a dot": Broken(
        "1:7", "expected letters, digits", "`my-run` would do", "name: broken", "name: my.run"
    ),
    "another task's section": Broken(
        "6:6", "about `task: sft`.* is `clm`: change", "", "task: clm", "task: clm\nsft: {}"
    ),
    "an unknown model type": Broken("3:24", "knows no `model_type` 'lama'", "'llama'", "llama", "lama"),
    "packing of masked words": Broken(
        "11:3", "unknown key", "remove it", "  max_length: 32", "  max_length: 32\n  packing: true", "mlm"
    ),
    "4 bits without adapters": Broken(
        "4:1",
        "add a `peft` section",
        "",
        MODEL,
        f"name: broken\nmodel:\n  model_name_or_path: owner/model\n{IN_4_BITS}",
    ),
    "4 bits from scratch": Broken(
        "5:1", "`model.config` makes a new one", "", MODEL, f"{MODEL}{IN_4_BITS}peft: {{r: 2}}\n"
    ),
    "a template without conversations": Broken(
        "9:18",
        "reads plain text, not conversations",
        "",
        DATA,
        DATA + "  chat_template: '{{ messages }}'\n",
    ),
    "an unknown tracker": Broken(
        "15:15", "got 'tensorbord'", "did you mean `tensorboard`", RATE, f"{RATE}\n  report_to: [tensorbord]"
    ),
    "a tracker that is not installed": Broken(
        "15:15",
        "'neptune' .* is not installed",
        "pip install neptune",
        RATE,
        f"{RATE}\n  report_to: [neptune]",
        code=3,
    ),
    "a tracker whose package has another name": Broken(
        "15:15",
        "'azure_ml' .* is not installed",
        "pip install azureml-core",
        RATE,
        f"{RATE}\n  report_to: [azure_ml]",
        code=3,
    ),
    # -- data
    "no file": Broken(
        "8:13",
        "no file or folder '.*rowz.jsonl'",
        "rows.jsonl",
        "rows.jsonl",
        "rowz.jsonl",
        code=3,
        check_code=0,
    ),
    "another column": data(
        "8:13", "no column 'text'; it has body", "clm.dataset_text_field", lines({"body": "a"})
    ),
    "numbers for texts": data("8:13", "holds int, not text", "one of text", lines({"text": 5}, {"text": 6})),
    "JSON broken in its first line": data(
        "8:13", "rows.jsonl, line 1: not JSON", "Fix", "{'text': 'a'}\n" + ROWS["clm"]
    ),
    "JSON broken off": data(
        "8:13",
        r"rows\.jsonl, line 9: the file ends in the middle of the line\.",
        "Bring the file again",
        ROWS["clm"] + '{"text": "a f',
    ),
    "a list that is broken off": data(
        "8:13", "ends in the middle of a value", "Bring", '[{"text": "a"},\n{"text": "b"}\n'
    ),
    "texts for rows": data("8:13", "a row must be a JSON object", '"text": ', '"a fox"\n"a dog"\n'),
    "a row that is null": data("8:13", "a row must be a JSON object", "", 'null\n{"text": "a"}\n'),
    "an empty file": data("8:13", "rows.jsonl' .* is empty", "Check its files, .* `data.datasets`", ""),
    "an empty list": data("8:13", "rows.jsonl' .* is empty", "Check its files", "[]"),
    "data that is not UTF-8": data(
        "8:13", "line 1: byte 14 .* is not UTF-8", "iconv", b'{"text": "caf\xe9"}\n'
    ),
    "a table without rows": other_file(
        "rows.csv", "text,label\n", "rows.csv' .* is empty", "Check its files"
    ),
    "a table with a comma too many": other_file(
        "rows.csv",
        'text,n\na,1\nb, c,2\n"a, b",5\n',
        r"rows\.csv, line 3: 3 fields, and the header has 2\.",
        "in quotes",
    ),
    "a table with semicolons": other_file(
        "rows.csv", "text;n\na;1\n", "no column 'text'; it has text;n", "dataset_text"
    ),
    "a table with an open quote": other_file("rows.csv", 'text,n\n"a,1\nb,2\n', "never closed", "Close it"),
    "a text that is not UTF-8": other_file("rows.txt", b"caf\xe9", "byte 4 .* is not UTF-8", "iconv"),
    "what is no Parquet": other_file("rows.parquet", "text\n", "no Parquet file", "Bring"),
    # -- conversations
    "ShareGPT's keys": data(
        "8:13",
        "'messages' .* holds list .* not a conversation",
        "columns: {messages: conversations}",
        lines(chat({"from": "human", "value": "Hi."})),
        "sft",
    ),
    "messages that are a text": data(
        "8:13", "'messages' .* holds str", "columns", lines({"messages": "Hi."}), "sft"
    ),
    "no messages": data("8:13", "holds list in its first row", "columns", lines(chat()), "sft"),
    "a message without a role": data(
        "8:13",
        "Row 2 .* something else in 'messages'",
        "Fix or remove",
        lines(chat(ASK, ANSWER), chat({"content": "x"})),
        "sft",
    ),
    "a prompt without an answer": data(
        "8:13",
        "Row 2 of '.*rows.jsonl' has no 'completion'",
        "Fix or remove",
        lines({"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": None}),
        "sft",
    ),
    "others' names for columns": data(
        "8:13",
        "has no `messages`",
        "{instruction: prompt, output: completion}",
        lines({"instruction": "a", "output": "b"}),
        "sft",
    ),
    "preferences for answers": data("8:13", "has no `messages`", "task: dpo", ROWS["dpo"], "sft"),
    "others' names for preferences": data(
        "8:13",
        r"rows.jsonl' has no `chosen` and `rejected`; it has prompt, winner, loser\.",
        "winner: chosen, loser: rejected",
        lines({"prompt": "Hi. ", "winner": "Yes.", "loser": "No."}),
        "dpo",
    ),
    "answers for preferences": data("8:13", "has no `chosen`", "task: sft", ROWS["sft"], "dpo"),
    "a column that is not there to rename": Broken(
        "8:13",
        "no column 'chat' to rename",
        "columns",
        "rows.jsonl",
        "rows.jsonl\n      columns: {chat: messages}",
        "sft",
    ),
    "an assistant in texts": Broken(
        "8:13",
        "holds texts, and only in conversations",
        "assistant_only_loss: false",
        "  max_length: 32",
        "  max_length: 32\n  assistant_only_loss: true",
        "sft",
        lines({"text": "a"}),
    ),
    "a template that does not end": Broken(
        "9:18",
        "not valid Jinja: .*'endfor'.*line 1",
        "",
        DATA,
        DATA + "  chat_template: '{% for m in messages %}'\n",
        "sft",
    ),
    "a template in a file that is broken": Broken(
        "9:18",
        r"unexpected '\}'.*line 2 of the template",
        "",
        DATA,
        DATA + "  chat_template: chat.jinja\n",
        "sft",
        files={"chat.jinja": "{{ x }}\n{% if x }"},
    ),
    "a template that is not there": Broken(
        "9:18",
        "there is no file 'chta.jinja'",
        "chat.jinja",
        DATA,
        DATA + "  chat_template: chta.jinja\n",
        "sft",
        files={"chat.jinja": "{{ x }}"},
    ),
    # -- classes
    "a class that is not named": data(
        "8:13",
        r"Row 2 of '.*rows.jsonl' has the label 2, and `seq_cls.labels` names 2 classes: bad, good\.",
        "a number from 0 to 1",
        lines({"text": "a", "label": 1}, {"text": "b", "label": 2}),
        "seq-cls",
    ),
    "a class in words": data(
        "8:13", "Row 1 .* the label 'fine'", "these names", lines({"text": "a", "label": "fine"}), "seq-cls"
    ),
    "a row without a class": data(
        "8:13",
        "Row 2 .* no label",
        "mend the row",
        lines({"text": "a", "label": 1}, {"text": "b"}),
        "seq-cls",
    ),
    "no column of classes": data(
        "8:13", "no column 'label'; it has text", "dataset_label_field", lines({"text": "a"}), "seq-cls"
    ),
    "no classes": Broken("9:1", "is missing", "labels", "  labels: [bad, good]\n", "", "seq-cls"),
    "one class": Broken("11:11", "at least 2 entries", "", "[bad, good]", "[bad]", "seq-cls"),
    # -- what is held out
    "almost all is held out": Broken(
        "10:22",
        "Of 8 documents, 8 would be held out",
        "test_split_size: 0",
        DATA,
        f"{DATA}  eval:\n    test_split_size: 0.9999\n",
    ),
    "all is held out": Broken(
        "10:22", "must be below 1.0, got 1", "", DATA, f"{DATA}  eval:\n    test_split_size: 1\n"
    ),
} | {
    f"the optimizer {name}": Broken(
        "15:10",
        f"'{name}' can't work in a swarm: {why}",
        "`adam",
        RATE,
        f"{RATE}\n  optim: {name}",
    )
    for name, why in {
        "galore_adamw_layerwise": "it updates each layer in a hook",
        "galore_adamw": "its state holds projections",
        "adalomo": "it updates weights during the backward pass",
        "schedule_free_adamw": "it keeps two sets of weights",
        "adamw_torch_4bit": "its state is in torchao's own kind of tensors",
        "grokadamw": "it keeps its state among its settings",
    }.items()
}


def write(folder, broken):
    recipe = RECIPES[broken.task]
    assert broken.old in recipe
    recipe = recipe.replace(broken.old, broken.new, 1) if broken.old else recipe
    rows = ROWS[broken.task] if broken.rows is None else broken.rows
    recipe = recipe.replace("target_batch_size: 4", f"target_batch_size: {broken.step}")
    whole = recipe if broken.whole is None else broken.whole
    for name, content in {"broken.yaml": whole, "rows.jsonl": rows, **broken.files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def require_told(broken, said, events):
    """Check that one event says what is wrong, where, and what to do."""
    (event,) = events
    assert re.search(broken.message, event["message"]), said
    assert re.search(broken.hint, event["hint"]), said
    assert event["hint"] or re.search(
        "must|expected|needs|write|add|remove|change|correct|only|has no effect|UTF-8", event["message"]
    )
    place = f"{event['line']}:{event['col']}" if event["line"] else ""
    assert (event["file"], place) == ("broken.yaml", broken.place), said


@pytest.mark.parametrize("name", BROKEN)
def test_check_says_what_is_wrong_where_and_what_to_do(name, trahiv, folder):
    broken = BROKEN[name]
    write(folder, broken)
    code, out, err = trahiv("check", "broken.yaml", "--format", "json")
    events = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    if broken.check_code is None:
        assert code == broken.code, out
        assert {event["event"] for event in events} == {"error"}
        require_told(broken, out, events)
        return
    assert code == broken.check_code, out
    (warning,) = [event for event in events if event["event"] == "warning"]
    assert re.search(f"^broken.yaml:{broken.place}: .*{broken.message}", warning["message"])
    assert re.search(broken.hint, warning["hint"])


@pytest.mark.parametrize("name", BROKEN)
def test_init_says_the_same_before_anybody_is_invited(name, trahiv, folder, monkeypatch):
    def live(*_):
        raise AssertionError("a peer would have been started")

    monkeypatch.setattr(swarm, "_live", live)
    broken = BROKEN[name]
    write(folder, broken)
    before = set(folder.iterdir())
    code, out, err = trahiv("init", "broken.yaml", "--format", "json")
    assert (code, err) == (broken.code, ""), out
    require_told(broken, out, [json.loads(line) for line in out.splitlines()])
    assert set(folder.iterdir()) == before


WELL = {
    "CRLF": Broken("", "", whole=RECIPES["clm"].replace("\n", "\r\n")),
    "a byte order mark": Broken("", "", whole="\ufeff" + RECIPES["clm"]),
    "anchors": Broken("", "", old=STEPS, new="max_steps: &three 3\n  save_total_limit: *three"),
    "a share for warm-up": Broken("", "", old="warmup_steps: 0", new="warmup_steps: 0.9"),
    "a constant rate": Broken(
        "", "", old="warmup_steps: 0", new="warmup_steps: 9\n  lr_scheduler_type: constant"
    ),
    "one list for lines": data("", "", "", json.dumps([{"text": f"a fox {number}"} for number in range(8)])),
    "a list of texts": data("", "", "", json.dumps([f"a fox {number}" for number in range(8)])),
    "rows over several lines": data(
        "", "", "", "".join(json.dumps({"text": "a"}, indent=1) + "\n" for _ in range(8))
    ),
    "rows on one line": data("", "", "", '{"text": "a"}' * 8),
    "a column that comes later": data("", "", "", lines({"n": 1}, *[{"text": "a"}] * 8)),
    "numbers that are no JSON": data("", "", "", '{"text": "a", "n": NaN}\n' * 8),
    "a class by a number of CSV": other_file(
        "rows.csv", "text,label\n" + "a,1.0\nb,True\n" * 4, "", "", "seq-cls"
    ),
    "a generation tag": Broken(
        "", "", "", DATA, DATA + "  chat_template: '{% generation %}{{ x }}{% endgeneration %}'\n", "sft"
    ),
    "a context of turned positions": Broken(
        "",
        "",
        "",
        "config: {model_type: llama, hidden_size: 32, max_position_embeddings: 64}\n  tokenizer_name",
        "model_name_or_path: here\n  tokenizer_name",
        files={"here/config.json": '{"model_type": "llama", "max_position_embeddings": 16}'},
    ),
}


@pytest.mark.parametrize("name", WELL)
def test_check_takes_what_can_be_trained(name, trahiv, folder):
    write(folder, WELL[name])
    code, out, _ = trahiv("check", "broken.yaml", "--format", "json")
    assert (code, [json.loads(line)["event"] for line in out.splitlines()]) == (0, ["checked"]), out


def test_a_step_that_repeats_all_data_is_advised_against(trahiv, folder):
    write(folder, Broken("", "", old="target_batch_size: 4", new="target_batch_size: 800"))
    code, out, err = trahiv("check", "broken.yaml")
    assert (code, out.splitlines()[0]) == (0, "broken.yaml: ok")
    assert "broken.yaml:19:24: hivemind_config.opt.target_batch_size: A step takes 800 samples" in err
    assert "repeats every sample 100 times" in err


def test_all_that_is_wrong_is_said_at_once(trahiv, folder):
    write(folder, BROKEN["an unknown model type"])
    changes = ("--set", "clm.max_length=65", "--set", "training.report_to=[neptune]")
    (folder / "rows.jsonl").write_text(lines({"body": "a"}))
    code, out, _ = trahiv("check", "broken.yaml", "--format", "json", *changes)
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 2
    assert [event["path"] for event in events] == [
        *("model.config.model_type", "data.datasets.0.path", "clm.max_length", "training.report_to.0")
    ]
    assert [event["file"].partition(" ")[0] for event in events] == ["broken.yaml"] * 2 + ["--set"] * 2


def test_a_table_of_positions_ends_where_blocks_are_filled(trahiv, folder):
    """gpt2 has no position beyond its context; a document that is shorter than `max_length` needs none."""
    old, new = "config: {model_type: llama, hidden_size: 32, max_position_embeddings: 64}", "revision: main"
    files = {"here/config.json": '{"model_type": "gpt2", "n_positions": 16}'}
    write(folder, Broken("", "", "", old, f"model_name_or_path: here\n  {new}", files=files))
    assert trahiv("check", "broken.yaml")[0] == 0
    code, out, err = trahiv("check", "broken.yaml", "--set", "clm.packing=true")
    assert (code, out) == (2, "")
    assert "clm.max_length: samples of 32 tokens do not fit into the model's context of 16" in err
