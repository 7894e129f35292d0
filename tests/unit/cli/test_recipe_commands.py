"""`new`, `check`, `show`, `schema`: their output, its places and exit codes."""

import re

import pytest

from trahiv_cli.cli import app as app_module
from trahiv_cli.recipe.builtin import builtin_recipes

RENDERED = """\
broken.yaml:8:14: training.max_steps: should be a whole number, got 'many'
    8 |   max_steps: many
      |              ^
broken.yaml:9:3: training.lerning_rate: unknown key
    9 |   lerning_rate: 2e-4
      |   ^
      hint: did you mean `learning_rate`?
error: broken.yaml: 2 errors
"""

SFT = """\
task: sft
model:
  model_name_or_path: owner/model
data:
  datasets:
    - path: chat.jsonl
training:
  max_steps: 10
"""


@pytest.fixture(autouse=True)
def folder(here):
    (here / "broken.yaml").write_text(SFT.replace("10", "many\n  lerning_rate: 2e-4"))
    (here / "sft.yaml").write_text(SFT)
    return here


SHOW = "show quickstart --set training.max_steps=7"


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("check quickstart", r"run_id +quickstart-[0-9a-f]{8}\nfingerprint +[0-9a-f]{64}\n$"),
        (SHOW, "^# fingerprint [0-9a-f]{64}\n"),
        (SHOW, r"\n  max_steps: 7 +# --set\n"),
        (SHOW, r"\n  learning_rate: 0.01 +# quickstart.yaml:\d+\n"),
        (SHOW, r"\n    run_id: quickstart-[0-9a-f]{8} +# name and agreement\n"),
        ("new", r"(^|\n)quickstart +The embedded default: "),
        ("schema", '"title": "trahiv recipe"'),
        ("--version", r"^trahiv \S+\n$"),
    ],
)
def test_result_is_printed(trahiv, line, pattern):
    out, err = trahiv(line)
    assert err == ""
    assert re.search(pattern, out)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (
            "check quickstart --set training.max_steps=0",
            2,
            "--set training.max_steps=0: training.max_steps: should be greater than or equal to 1, got 0\n",
        ),
        ("new chatsft", 2, "no built-in recipe 'chatsft'\nhint: did you mean `trahiv new chat-sft`?"),
        ("new Chat-SFT", 2, "did you mean `trahiv new chat-sft`?"),
        ("new cake", 2, "recipes: "),
        ("new quickstart -o no/such/mine.yaml", 3, "cannot be written"),
    ],
)
def test_refusal_is_explained(trahiv, line, code, said):
    out, err = trahiv(line, code=code)
    assert out == ""
    assert said in err


def test_check_lists_mistakes_with_places(trahiv):
    assert trahiv("check broken.yaml", code=2) == ("", RENDERED)


def test_mistake_is_error_event(events):
    _, event = events("check broken.yaml", code=2)
    assert event.pop("t") > 0
    place = {"file": "broken.yaml", "line": 9, "col": 3, "path": "training.lerning_rate"}
    said = {"message": "unknown key", "hint": "did you mean `learning_rate`?"}
    assert event == {"v": 1, "event": "error", "code": "recipe", **said, **place}


def test_check_and_show_warn_about_missing_data(trahiv, folder):
    (folder / "chats.jsonl").write_text("{}")
    said = f"There is no file or folder '{folder}/chat.jsonl'."
    out, err = trahiv("check sft.yaml")
    assert out.count("depends on the data") == 2
    assert err == (
        f"warning: sft.yaml:6:13: data.datasets.0.path: {said}\nhint: Did you mean '{folder}/chats.jsonl'?\n"
    )
    out, err = trahiv("show sft.yaml")
    assert err.startswith(f"warning: {said}\n")
    assert out.startswith("# fingerprint depends on the data\n")


def test_missing_data_is_warning_event(events):
    warning, checked = events("check sft.yaml --set hivemind_config.opt.run_id=mine")
    assert warning["event"] == "warning"
    assert warning["code"] == "asset"
    assert checked["run_id"] == "mine"
    assert checked["fingerprint"] is None


@pytest.fixture
def trained(trahiv, folder):
    """A folder `run`, of a run of `sft.yaml`."""
    (folder / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    (folder / "run").mkdir()
    (folder / "run" / "recipe.json").write_text(trahiv("show sft.yaml").out)


def test_check_knows_run_with_its_data(trahiv, trained):
    known = trahiv("check run/recipe.json --set name=sft").out
    assert known.splitlines()[1:] == trahiv("check sft.yaml").out.splitlines()[1:]


def test_check_refuses_run_with_changed_data(trahiv, trained, folder):
    (folder / "chat.jsonl").write_text('{"prompt": "a", "completion": "another"}')
    assert "data.datasets.0.content.num_bytes" in trahiv("check run/recipe.json", code=5).err


@pytest.mark.parametrize(("recipe", "origin"), [("sft.yaml", "the files"), ("run", r"recipe.json:\d+")])
def test_show_tells_origin_of_content(trahiv, trained, recipe, origin):
    line = rf"^        num_bytes: \d+ +# {origin}$"
    assert re.search(line, trahiv(f"show {recipe}").out, re.MULTILINE)


def test_long_line_is_cut_around_mistake(trahiv, folder):
    (folder / "long.yaml").write_text(f"{{name: {'x' * 300}, lerning_rate: {'y' * 300}}}")
    err = trahiv("check long.yaml", code=2).err
    [(line, before)] = re.findall(r"lerning_rate: unknown key\n    1 [|] (.*)\n      [|] ( *)\^\n", err)
    assert len(line) == 100
    assert line[len(before) :].startswith("lerning_rate: yyy")


def test_strangers_text_cannot_steer_terminal(trahiv, folder):
    (folder / "evil.yaml").write_text('"\\e[31mkey": 1\n')
    err = trahiv("check evil.yaml", code=2).err
    assert "\x1b" not in err
    assert "?[31mkey: unknown key" in err


@pytest.mark.parametrize("wish", ["", "1"])
def test_traceback_is_shown_only_on_request(trahiv, monkeypatch, wish):
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(app_module, "app", broken)
    monkeypatch.setenv("TRAHIV_DEBUG", wish)
    out, err = trahiv("check quickstart", code=1)
    assert out == ""
    assert ("Traceback" in err) == bool(wish)
    assert "error: ZeroDivisionError: a bug\nhint: this is a bug in trahiv" in err


def test_new_lists_builtin_recipes(trahiv):
    assert re.findall(r"^\S+", trahiv("new").out, re.MULTILINE) == [*builtin_recipes()]


def test_new_overwrites_only_on_request(trahiv, folder):
    file = folder / "broken.yaml"
    before = file.read_text()
    out, err = trahiv("new quickstart -o broken.yaml", code=2)
    assert out == ""
    assert "error: broken.yaml exists; nothing was written\n" in err
    assert file.read_text() == before
    assert "wrote broken.yaml" in trahiv("new quickstart -o broken.yaml --force").err
    assert file.read_text().startswith("# ")
