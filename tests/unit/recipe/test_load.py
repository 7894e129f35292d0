"""A user's recipe is read as meant; mistakes are reported with their places, and all at once."""

import json
import math
import os
import re
from pathlib import Path

import pytest

from tests.unit.recipe.conftest import error_of
from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.document import read_document, read_location, render
from trahiv_cli.recipe.load import load_recipe, parse_recipe
from trahiv_cli.recipe.paths import anchor
from trahiv_cli.recipe.schema import SwarmSection
from trahiv_cli.recipe.task_sections import TASK_SECTIONS

GOOD = """\
model:
  model_name_or_path: owner/model
data:
  datasets:
    - path: owner/data
training:
  max_steps: 10
  learning_rate: 2e-4
"""


@pytest.fixture
def write(put):
    """Write a recipe, or a file beside it, and return its path; its folder is the current one."""
    return lambda text, name="recipe.yaml": put({name: text}) / name


def findings_of(*arguments):
    return error_of(load_recipe, *arguments).findings


MISTAKES = Path(__file__).with_name("mistakes.txt").read_text()


@pytest.mark.parametrize(
    ("change", "said"), re.findall(r"^([^ #\n].*)\n((?:    .*\n)+)", MISTAKES, re.MULTILINE)
)
def test_mistake_is_one_finding_with_hint(write, change, said):
    old, is_change, new = change.replace("\\n", "\n").partition(" =>")
    overrides = [change.removeprefix("--set ")] if change.startswith("--set ") else []
    text = GOOD.replace(old, new.lstrip()) if is_change or overrides else old[2:]
    text += ("\n" + GOOD) * old.startswith("+ ")
    assert text != GOOD or overrides
    (found,) = findings_of(path := write(text), overrides)
    assert found.file == (change if overrides else str(path))
    lines = f"    {found.line}:{found.col} {found.path}: {found.message}\n"
    lines += f"    = {found.hint}\n" * bool(found.hint)
    assert re.fullmatch(re.escape(said).replace(re.escape("..."), ".*"), lines), lines


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", "0:0", "expected `key: value` lines, got nothing"),
        ("a: 1\nb: \x07\n", "2:1", "has a control character (#x0007)"),
        ("[" * 5000, "1:32", "not valid YAML: nested more than 32 deep"),
        (b"a: 1\nb: \xe9\n", "2:1", "is not UTF-8 text"),
    ],
)
def test_invalid_yaml_is_one_finding(write, text, place, message):
    (found,) = findings_of(write(text))
    assert (f"{found.line}:{found.col}", found.message) == (place, message)


def test_alias_repeats_its_value(write):
    text = GOOD.replace("owner/data", "&here owner/data") + "  optim_args: *here\n"
    assert load_recipe(write(text)).recipe.training.optim_args == "owner/data"


def test_multiplying_aliases_are_refused(write):
    more = (f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 16))
    (found,) = findings_of(write("a0: &a0 [1, 1]\n" + "".join(more)))
    assert found.message == "not valid YAML: too many values"


def test_recipe_knows_origin_of_each_value(write):
    overrides = ["peft.r=4", "training.max_steps=7", "data.datasets.0.path=b/c", "swarm.mode=diloco"]
    overrides += ["training.lr_scheduler_type=constant", "training.warmup_steps=50", "swarm.local_steps=20"]
    on_windows = "\ufeff" + GOOD.replace("\n", "\r\n")
    loaded = load_recipe(write(on_windows, "my run.v2.yaml"), overrides)
    recipe = loaded.recipe
    assert (recipe.name, recipe.training.learning_rate, recipe.peft.r) == ("my-run-v2", 2e-4, 4)
    origins = {"data.datasets.0.path": "--set", "peft.r": "--set", "peft.lora_alpha": "default"}
    origins |= {"training.learning_rate": "my run.v2.yaml:8", "data.datasets": "my run.v2.yaml:4"}
    assert {place: loaded.document.origin_of(read_location(place)) for place in origins} == origins


def test_all_mistakes_are_listed_in_order(write):
    text = GOOD.replace("owner/model", "7").replace("max_steps: 10", "max_step: 10\n  seed: 1\n  seed: 2")
    found = findings_of(write(text), ["training.optim=no", "x.y=1", "nothing"])
    in_file = ["2 model.model_name_or_path", "6 training.max_steps", "7 training.max_step", "9 training.seed"]
    in_order = [*in_file, "0 nothing", "0 training.optim", "0 x"]
    assert [f"{finding.line} {finding.path}" for finding in found] == in_order


def test_two_broken_rules_are_both_found(write):
    found = findings_of(write(GOOD), ["training.fp16=true", "training.bf16=true", "training.warmup_steps=50"])
    assert [finding.path for finding in found] == ["training.fp16", "training.warmup_steps"]


def test_mistakes_in_data_have_no_lines():
    error = error_of(parse_recipe, {"training": {"max_steps": "5"}}, "the swarm")
    said = "the swarm: training.max_steps: should be a whole number, got '5'"
    assert said in map(str, error.findings)


def test_equal_solo_waits_are_normalized():
    for text, seconds, written in (
        ("never", math.inf, "never"),
        ("after 0 seconds", 0, "always"),
        ("after 1.0 seconds", 1, "after 1 second"),
        ("after 999999999.999 seconds", 999999999.999, "after 999999999.999 seconds"),
    ):
        swarm = SwarmSection(solo=text)
        assert (swarm.solo, swarm.solo_after_s) == (written, seconds)


def test_rendered_data_loads_back_equal():
    data = {
        "values": {"a": [1, 1e-8, 1e18, -3, "x"], "b": {"c": None, "d": {}, "e": []}},
        "texts": [{"x": text} for text in ("true", "x: y", "#x", "", "2e-4", " x ", "a\nb", "\u00e9")],
        "keys": {"true": 1, "a: b": 2, "#": 3},
        "list": [{"a": {"b": [{"c": 1}, {"d": 2}]}}, "word", {}],
    }
    text = "\n".join(f"{line}  # from somewhere" for line, _ in render(data))
    assert read_document(text, "x.yaml").data == data


@pytest.mark.parametrize("task", TASK_SECTIONS)
def test_recipe_keeps_only_its_task_section(write, task):
    needed = {"seq-cls": ["seq_cls: {labels: [a, b]}"], "grpo": ["grpo: {rewards: number}"]}
    written = needed.get(task, ["", f"{task}:", f"{task}: {{}}"])
    empty = "sft:" if task == "dpo" else "dpo: null"
    for section in written:
        recipe = load_recipe(write(f"task: {task}\n{section}\n{empty}\n{GOOD}")).recipe
        assert set(TASK_SECTIONS.values()) & recipe.to_data().keys() == {TASK_SECTIONS[task]}


SFT = "task: sft\n" + GOOD.replace("training:", "  chat_template: chat.jinja\ntraining:")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "{{ x }}\n{# y #}\n"),
        (["data.chat_template=chat.jinja"], "here {{ x }}"),
        (["data.chat_template='{{ x }}.jinja'"], "{{ x }}.jinja"),
    ],
)
def test_chat_template_is_read_from_file(write, overrides, text):
    write("\ufeff{{ x }}\r\n{# y #}\r\n", "project/chat.jinja")
    write("here {{ x }}", "chat.jinja")
    assert load_recipe(write(SFT, "project/recipe.yaml"), overrides).recipe.data.chat_template == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no template", "{folder}/chat.jinja is no chat template: there is no `{` in it"),
        (b"{{ x }}\n\xff", "{folder}/chat.jinja:2:1: is not UTF-8 text"),
        (b"{" * (64 * 1024 + 1), "{folder}/chat.jinja is larger than 64 KiB, so it is no chat"),
        (b"{{ x }}\n{% if x }", "is not valid Jinja: unexpected '}' (line 2 of the template)"),
    ],
)
def test_unusable_chat_template_names_line(write, tmp_path, content, message):
    write(content, "chat.jinja")
    (found,) = findings_of(write(SFT))
    assert (found.line, found.col, found.path) == (7, 18, "data.chat_template")
    assert found.message.startswith(message.replace("{folder}", str(tmp_path)))


def test_missing_chat_template_gets_suggestion(write, tmp_path):
    write("{{ x }}", "chat.jinja")
    (found,) = findings_of(write(SFT), ["data.chat_template=chaat.jinja"])
    assert found.hint == f"did you mean `{tmp_path}/chat.jinja`?"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("./spanich.yaml", "did you mean `spanish.yaml`?"),
        ("quikstart", "did you mean `quickstart`?"),
        ("x" * 5000, "built-in recipes: " + ", ".join(builtin_recipes())),
    ],
)
def test_missing_recipe_gets_suggestion(write, name, hint):
    write(GOOD, "spanish.yaml")
    assert error_of(load_recipe, name).hint == hint


def test_folder_hides_no_builtin_recipe(put):
    put({"quickstart/x": ""})
    assert load_recipe("quickstart").recipe.name == "quickstart"


@pytest.mark.parametrize(
    ("path", "message"), [("/", "is a folder, not a recipe"), ("/dev/zero", "larger than 128 KiB")]
)
def test_other_file_is_no_recipe(path, message):
    assert message in error_of(load_recipe, path).message


LOCAL = """\
model: {model_name_or_path: base}
data:
  datasets: [{path: a.jsonl}, {path: b.jsonl}, {path: owner/data}]
training: {max_steps: 10, learning_rate: 2e-4}
hivemind_config: {dht: {identity_path: '@my.key', initial_peers: ['@friend', /ip4/1.2.3.4/tcp/1/p2p/Qm]}}
"""


@pytest.fixture
def elsewhere(put, monkeypatch):
    """The current folder, beside that of a recipe (`../project`) with a model and data."""
    files = dict.fromkeys(("project/base/x", "project/a.jsonl", "elsewhere/a.jsonl", "elsewhere/b.jsonl"), "")
    folder = put(files | {"project/recipe.yaml": LOCAL}) / "elsewhere"
    monkeypatch.chdir(folder)
    return folder


def test_paths_are_resolved_beside_recipe(elsewhere, tmp_path):
    project = tmp_path / "project"
    recipe = load_recipe(project / "recipe.yaml").recipe
    paths = [each.path for each in recipe.data.datasets]
    assert paths == [f"{project}/a.jsonl", f"{project}/b.jsonl", "owner/data"]
    assert recipe.model.model_name_or_path == f"{project}/base"
    dht = recipe.hivemind_config.dht
    assert dht.identity_path == f"{project}/@my.key"
    assert dht.initial_peers == [f"@{project}/friend", "/ip4/1.2.3.4/tcp/1/p2p/Qm"]


def test_set_paths_begin_here(elsewhere):
    overrides = ["data.datasets.0.path=a.jsonl", "model.model_name_or_path=base"]
    recipe = load_recipe("../project/recipe.yaml", overrides).recipe
    assert recipe.data.datasets[0].path == f"{elsewhere}/a.jsonl"
    assert recipe.model.model_name_or_path == "base"


def test_builtin_recipe_paths_begin_here(put):
    folder = put({"Qwen/Qwen3-0.6B-Base/x": ""})
    assert load_recipe("chat-sft").recipe.model.model_name_or_path == f"{folder}/Qwen/Qwen3-0.6B-Base"


def test_resolved_recipe_reads_back_equal(elsewhere, write):
    recipe = load_recipe("../project/recipe.yaml").recipe
    written = json.dumps(recipe.to_data())
    assert load_recipe(write(written)).recipe == recipe
    assert parse_recipe(json.loads(written), "recipe.json") == recipe


def test_only_paths_are_anchored(put, monkeypatch):
    odd = put({"set [a]*/x.jsonl": "", "set [a]*/odd [1].csv": "", "home/x.jsonl": ""}) / "set [a]*"
    monkeypatch.setenv("HOME", str(odd.parent / "home"))
    for name in ("owner/model", "gpt2", "builtin/bytes", "local:x.jsonl", "/no/where", "https://x/y.csv", ""):
        assert anchor(name, odd) == name
    for name in ("x.jsonl", "odd [1].csv", "nowhere.jsonl", "../home/x.jsonl", "~nobody-there/x", "*.jsonl"):
        assert anchor(name, odd) == f"{odd}/{name}"
    assert anchor("./nowhere", odd) == f"{odd}/nowhere"
    assert anchor("~/x.jsonl", odd) == f"{odd.parent}/home/x.jsonl"


@pytest.fixture
def stdin():
    """Restore standard input after a test."""
    before = os.dup(0)
    yield
    os.dup2(before, 0)
    os.close(before)


@pytest.mark.usefixtures("stdin")
@pytest.mark.parametrize(("name", "file"), [("/dev/fd/0", "/dev/fd/0"), ("-", "<stdin>")])
def test_recipe_comes_from_pipe_or_stdin(elsewhere, name, file):
    reading, writing = os.pipe()
    os.write(writing, LOCAL.encode())
    os.close(writing)
    os.dup2(reading, 0)
    os.close(reading)
    loaded = load_recipe(name)
    assert (loaded.text, loaded.document.file, loaded.piped) == (LOCAL, file, name)
    assert loaded.recipe.name == "recipe"
    assert loaded.recipe.data.datasets[0].path == f"{elsewhere}/a.jsonl"


@pytest.mark.usefixtures("stdin")
def test_closed_stdin_is_refused():
    os.close(0)
    assert "<stdin> cannot be read" in error_of(load_recipe, "-").message
