"""A user's recipe is read as meant; mistakes are reported with their places, and all at once."""

import json
import math
import os
import re
from pathlib import Path

import pytest

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.document import read_document, read_location, render
from trahiv_cli.recipe.load import MAX_TEMPLATE_BYTES, load_recipe, parse_recipe
from trahiv_cli.recipe.paths import anchor
from trahiv_cli.recipe.schema import TASK_SECTIONS, SwarmSection

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


def only_finding(path, overrides=()):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    (finding,) = caught.value.findings
    return finding


def mistakes():
    """Read `mistakes.txt`: a change of GOOD, and the expected finding."""
    text = Path(__file__).with_name("mistakes.txt").read_text()
    for block in re.findall(r"^[^ #\n].*\n(?:    .*\n)+", text, re.MULTILINE):
        change, *said = block.splitlines()
        yield pytest.param(change, [line.strip() for line in said], id=change)


@pytest.mark.parametrize(("change", "said"), list(mistakes()))
def test_mistake_is_one_finding_with_hint(write, change, said):
    old, is_change, new = change.replace("\\n", "\n").partition(" =>")
    overrides = [change.removeprefix("--set ")] if change.startswith("--set ") else []
    text = GOOD.replace(old, new.lstrip()) if is_change or overrides else old[2:]
    text += ("\n" + GOOD) * old.startswith("+ ")
    assert text != GOOD or overrides
    found = only_finding(path := write(text), overrides)
    assert found.file == (change if overrides else str(path))
    lines = [f"{found.line}:{found.col} {found.path}: {found.message}"]
    lines += [f"= {found.hint}"] if found.hint else []
    for line, expected in zip(lines, said, strict=True):
        assert re.fullmatch(re.escape(expected).replace(re.escape("..."), ".*"), line), line


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
    found = only_finding(write(text))
    assert (f"{found.line}:{found.col}", found.message) == (place, message)


def test_multiplying_aliases_are_refused(write):
    text = GOOD.replace("owner/data", "&here owner/data") + "  optim_args: *here\n"
    assert load_recipe(write(text)).recipe.training.optim_args == "owner/data"
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8)]
    assert only_finding(write("\n".join(lines))).message == "not valid YAML: too many values"


def test_recipe_knows_origin_of_each_value(write):
    overrides = ["peft.r=4", "training.max_steps=7", "data.datasets.0.path=b/c", "swarm.mode=diloco"]
    overrides += ["training.lr_scheduler_type=constant", "training.warmup_steps=50", "swarm.local_steps=20"]
    on_windows = "\ufeff" + GOOD.replace("\n", "\r\n")
    loaded = load_recipe(write(on_windows, "my run.v2.yaml"), overrides)
    recipe = loaded.recipe
    assert (recipe.name, recipe.training.learning_rate, recipe.training.max_steps) == ("my-run-v2", 2e-4, 7)
    assert (recipe.peft.r, recipe.data.datasets[0].path) == (4, "b/c")
    said = {"data.datasets.0.path": "--set", "peft.r": "--set", "peft.lora_alpha": "default"}
    said |= {"training.learning_rate": "my run.v2.yaml:8", "data.datasets": "my run.v2.yaml:4"}
    for place, origin in said.items():
        assert loaded.document.origin_of(read_location(place)) == origin


def test_all_mistakes_are_listed_in_order(write):
    text = GOOD.replace("owner/model", "7").replace("max_steps: 10", "max_step: 10\n  seed: 1\n  seed: 2")
    path = write(text)
    with pytest.raises(RecipeError, match=f"^{path}: 7 errors$") as caught:
        load_recipe(path, ["training.optim=no", "x.y=1", "nothing"])
    found = [f"{finding.line} {finding.path}" for finding in caught.value.findings]
    in_file = ["2 model.model_name_or_path", "6 training.max_steps", "7 training.max_step", "9 training.seed"]
    assert found == [*in_file, "0 nothing", "0 training.optim", "0 x"]
    broken = ["training.fp16=true", "training.bf16=true", "training.warmup_steps=50"]
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(GOOD), broken)
    assert [finding.path for finding in caught.value.findings] == ["training.fp16", "training.warmup_steps"]
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"name": "x", "base_model": "y", "training": {"max_steps": "5"}}, "the swarm")
    found = {str(finding): finding.line for finding in caught.value.findings}
    assert found["the swarm: training.max_steps: should be a whole number, got '5'"] == 0


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
        "numbers": {"a": 1, "b": {"c": None, "d": {}}, "e": [], "f": [1, "x"], "g": 1e-8, "h": 1e18, "i": -3},
        "texts": [{"x": text} for text in ("true", "x: y", "#x", "", "2e-4", " x ", "a\nb", "\u00e9")],
        "keys": {"true": 1, "a: b": 2, "#": 3},
        "list": [{"a": 1, "b": {"c": [{"d": 1}, {"d": 2}]}}, {"b": {"c": 1}}, "word", {}],
    }
    text = "\n".join(f"{line}  # from somewhere" for line, _ in render(data))
    assert read_document(text, "x.yaml").data == data


@pytest.mark.parametrize("task", TASK_SECTIONS)
def test_recipe_keeps_only_its_task_section(write, task):
    """The section may be left out or empty, and those of other tasks may be there without content."""
    written = ["seq_cls: {labels: [a, b]}"] if task == "seq-cls" else ["", f"{task}:", f"{task}: {{}}"]
    for section in written:
        empty = "dpo: null" if task != "dpo" else "sft:"
        recipe = load_recipe(write(f"task: {task}\n{section}\n{empty}\n{GOOD}")).recipe
        data = recipe.to_data()
        assert {name for name in TASK_SECTIONS.values() if name in data} == {TASK_SECTIONS[task]}
        assert parse_recipe(data, "data") == recipe


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
        (b"{" * (MAX_TEMPLATE_BYTES + 1), "{folder}/chat.jinja is larger than 64 KiB, so it is no chat"),
        (b"{{ x }}\n{% if x }", "is not valid Jinja: unexpected '}' (line 2 of the template)"),
    ],
)
def test_unusable_chat_template_names_line(write, tmp_path, content, message):
    write(content, "chat.jinja")
    found = only_finding(write(SFT))
    assert (found.line, found.col, found.path) == (7, 18, "data.chat_template")
    assert found.message.startswith(message.replace("{folder}", str(tmp_path)))
    found = only_finding(write(SFT), ["data.chat_template=chaat.jinja"])
    assert found.hint == f"did you mean `{tmp_path}/chat.jinja`?"


def test_missing_recipe_gets_suggestion(tmp_path, write):
    write(GOOD, "spanish.yaml")
    for name, hint in {
        tmp_path / "spanich.yaml": f"did you mean `{tmp_path / 'spanish.yaml'}`?",
        "quikstart": "did you mean `quickstart`?",
        "x" * 5000: "built-in recipes: " + ", ".join(builtin_recipes()),
    }.items():
        with pytest.raises(RecipeError) as caught:
            load_recipe(name)
        assert caught.value.hint == hint
    with pytest.raises(RecipeError, match="is a folder, not a recipe"):
        load_recipe(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert load_recipe("quickstart").recipe.name == "quickstart", "a folder of that name is no recipe"
    with pytest.raises(RecipeError, match="larger than 128 KiB"):
        load_recipe("/dev/zero")


@pytest.fixture
def elsewhere(put, tmp_path, monkeypatch):
    """The current folder, beside that of the recipe: `tmp_path / "project"`."""
    put({"project/base/x": "", "elsewhere/x": ""})
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


LOCAL = """\
model: {model_name_or_path: base}
data:
  datasets: [{path: a.jsonl}, {path: b.jsonl}, {path: owner/data}]
training: {max_steps: 10, learning_rate: 2e-4}
hivemind_config: {dht: {identity_path: '@my.key', initial_peers: ['@friend', /ip4/1.2.3.4/tcp/1/p2p/Qm]}}
"""


def test_paths_are_resolved_beside_recipe(write, tmp_path, elsewhere, monkeypatch):
    project = tmp_path / "project"
    recipe = write(LOCAL, "project/recipe.yaml")
    for file in (project / "a.jsonl", elsewhere / "a.jsonl", elsewhere / "b.jsonl"):
        file.touch()
    loaded = load_recipe(recipe)
    paths, dht = [each.path for each in loaded.recipe.data.datasets], loaded.recipe.hivemind_config.dht
    assert loaded.recipe.model.model_name_or_path == f"{project}/base"
    assert paths == [f"{project}/a.jsonl", f"{project}/b.jsonl", "owner/data"]
    assert dht.identity_path == f"{project}/@my.key"
    assert dht.initial_peers == [f"@{project}/friend", "/ip4/1.2.3.4/tcp/1/p2p/Qm"]

    here = load_recipe(recipe, ["data.datasets.0.path=a.jsonl", "model.model_name_or_path=base"])
    assert here.recipe.data.datasets[0].path == f"{elsewhere}/a.jsonl", "what is set is relative to here"
    assert here.recipe.model.model_name_or_path == "base"
    (elsewhere / "Qwen/Qwen3-0.6B-Base").mkdir(parents=True)
    built_in = load_recipe("chat-sft").recipe.model.model_name_or_path
    assert built_in == f"{elsewhere}/Qwen/Qwen3-0.6B-Base", "as is what comes with trahiv"

    monkeypatch.chdir(tmp_path)
    assert parse_recipe(loaded.recipe.to_data(), "recipe.json") == loaded.recipe
    again = load_recipe(write(json.dumps(loaded.recipe.to_data()), "recipe.json"))
    assert again.recipe == loaded.recipe


def test_only_paths_are_anchored(put, monkeypatch):
    odd = put({"set [a]*/x.jsonl": "", "set [a]*/odd [1].csv": "", "home/x.jsonl": ""}) / "set [a]*"
    monkeypatch.setenv("HOME", str(odd.parent / "home"))
    for name in ("owner/model", "gpt2", "builtin/bytes", "local:x.jsonl", "/no/where", "https://x/y.csv", ""):
        assert anchor(name, odd) == name
    for name in ("x.jsonl", "odd [1].csv", "nowhere.jsonl", "../home/x.jsonl", "~nobody-of-that-name/x"):
        assert anchor(name, odd) == f"{odd}/{name}"
    assert anchor("*.jsonl", odd) == f"{odd}/*.jsonl"
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
def test_recipe_comes_from_pipe_or_stdin(elsewhere):
    (elsewhere / "a.jsonl").touch()
    for name, file in (("/dev/fd/0", "/dev/fd/0"), ("-", "<stdin>")):
        reading, writing = os.pipe()
        os.write(writing, LOCAL.encode())
        os.close(writing)
        os.dup2(reading, 0)
        os.close(reading)
        loaded = load_recipe(name)
        assert (loaded.text, loaded.document.file, loaded.piped) == (LOCAL, file, name)
        assert loaded.recipe.name == "recipe"
        assert loaded.recipe.data.datasets[0].path == f"{elsewhere}/a.jsonl"
    os.close(0)
    with pytest.raises(RecipeError, match="<stdin> cannot be read"):
        load_recipe("-")
