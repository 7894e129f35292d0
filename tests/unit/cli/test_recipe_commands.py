"""`new`, `check`, `show`, `schema`: their output, its places and exit codes."""

import json
import re

import pytest

from trahiv_cli.cli import app as app_module
from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.load import load_recipe

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
BROKEN = SFT.replace("10", "many\n  lerning_rate: 2e-4")


@pytest.fixture(autouse=True)
def folder(here):
    (here / "broken.yaml").write_text(BROKEN)
    (here / "sft.yaml").write_text(SFT)
    return here


def test_check_lists_mistakes_with_places(trahiv, events):
    code, out, err = trahiv("check", "quickstart")
    assert (code, err) == (0, "")
    assert re.search(r"run_id +quickstart-[0-9a-f]{8}\nfingerprint +[0-9a-f]{64}\n$", out)
    assert trahiv("check", "broken.yaml") == (2, "", RENDERED)
    code, (_, event) = events("check", "broken.yaml")
    assert (code, event.pop("t") > 0) == (2, True)
    place = {"file": "broken.yaml", "line": 9, "col": 3, "path": "training.lerning_rate"}
    said = {"message": "unknown key", "hint": "did you mean `learning_rate`?"}
    assert event == {"v": 1, "event": "error", "code": "recipe", **said, **place}
    code, (event,) = events("check", "nowhere.yaml")  # an error without findings is one event
    assert (code, event["code"], event["message"]) == (2, "recipe", "there is no recipe 'nowhere.yaml'")


def test_check_and_show_warn_about_missing_data(trahiv, events, folder):
    (folder / "chats.jsonl").write_text("{}")
    code, out, err = trahiv("check", "sft.yaml")
    assert (code, out.count("depends on the data")) == (0, 2)
    said = f"There is no file or folder '{folder}/chat.jsonl'."
    place, hint = "sft.yaml:6:13: data.datasets.0.path: ", f"hint: Did you mean '{folder}/chats.jsonl'?\n"
    assert err == f"warning: {place}{said}\n{hint}"
    code, (warning, checked) = events("check", "sft.yaml", "--set", "hivemind_config.opt.run_id=mine")
    assert (code, warning["event"], warning["code"]) == (0, "warning", "asset")
    assert (checked["run_id"], checked["fingerprint"]) == ("mine", None)
    code, out, err = trahiv("show", "sft.yaml")
    assert (code, err.splitlines()[0]) == (0, f"warning: {said}")
    assert out.startswith("# fingerprint depends on the data\n")


def test_check_refuses_run_with_changed_data(trahiv, folder):
    (folder / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    shown = trahiv("show", "sft.yaml")[1]
    assert re.search(r"^        num_bytes: \d+ +# the files$", shown, re.MULTILINE)
    (folder / "run").mkdir()
    (folder / "run" / "recipe.json").write_text(shown)
    known = trahiv("check", "run/recipe.json", "--set", "name=sft")
    assert (known[0], known[1].splitlines()[1:]) == (0, trahiv("check", "sft.yaml")[1].splitlines()[1:])
    (folder / "chat.jsonl").write_text('{"prompt": "a", "completion": "another"}')
    code, _, err = trahiv("check", "run/recipe.json")
    assert (code, "data.datasets.0.content.num_bytes" in err) == (5, True)
    code, out, _ = trahiv("show", "run")
    assert code == 0 and re.search(r"^        num_bytes: \d+ +# recipe.json:\d+$", out, re.MULTILINE)


def test_finding_is_rendered_for_terminal(trahiv, folder):
    _, _, err = trahiv("check", "quickstart", "--set", "training.max_steps=0")
    assert err.startswith(
        "--set training.max_steps=0: training.max_steps: should be greater than or equal to 1, got 0\n"
    )
    (folder / "long.yaml").write_text(f"{{name: {'x' * 300}, lerning_rate: {'y' * 300}}}")
    _, _, err = trahiv("check", "long.yaml")
    (said,) = re.findall(r"lerning_rate: unknown key\n    1 [|] (.*)\n      [|] ( *)\^\n", err)
    assert len(said[0]) == 100 and said[0][len(said[1]) :].startswith("lerning_rate: yyy")
    (folder / "evil.yaml").write_text('"\\e[31mkey": 1\n')
    _, _, err = trahiv("check", "evil.yaml")
    assert "\x1b" not in err and "?[31mkey: unknown key" in err, "a stranger's text cannot steer the terminal"


def test_traceback_is_shown_only_on_request(trahiv, monkeypatch):
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(app_module, "app", broken)
    code, out, err = trahiv("check", "quickstart")
    assert (code, out, "Traceback" in err) == (1, "", False)
    assert err.startswith("error: ZeroDivisionError: a bug\nhint: this is a bug in trahiv")
    monkeypatch.setenv("TRAHIV_DEBUG", "1")
    assert "Traceback" in trahiv("check", "quickstart")[2]


def test_show_prints_loadable_recipe_with_origins(trahiv, folder):
    changes = ("--set", "training.max_steps=7")
    code, out, _ = trahiv("show", "quickstart", *changes)
    assert code == 0 and re.match(r"# fingerprint [0-9a-f]{64}\n", out)
    assert re.search(r"^  max_steps: 7 +# --set$", out, re.MULTILINE)
    assert re.search(r"^  learning_rate: 0.01 +# quickstart.yaml:\d+$", out, re.MULTILINE)
    assert re.search(r"^    run_id: quickstart-[0-9a-f]{8} +# name and agreement$", out, re.MULTILINE)
    (folder / "shown.yaml").write_text(out)
    shown, loaded = load_recipe("shown.yaml"), load_recipe("quickstart", changes[1:])
    assert shown.recipe.training == loaded.recipe.training


def test_new_lists_and_suggests_builtin_recipes(trahiv):
    code, out, _ = trahiv("new")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(builtin_recipes())
    assert re.search(r"^quickstart +The embedded default: ", out, re.MULTILINE)
    for name in ("chatsft", "Chat-SFT", "cake"):
        code, _, err = trahiv("new", name)
        assert (code, f"there is no built-in recipe {name!r}" in err, "recipes: " in err) == (2, True, True)
        assert ("did you mean `trahiv new chat-sft`?" in err) == (name != "cake")


def test_new_writes_valid_recipe(trahiv, folder):
    for name in builtin_recipes():
        code, out, err = trahiv("new", name, "-o", "mine.yaml", "--force")
        assert (code, out, "wrote mine.yaml" in err) == (0, "", True)
        assert (folder / "mine.yaml").read_text().startswith("# ")
        assert trahiv("check", "mine.yaml")[0] == 0
    assert json.loads(trahiv("schema")[1])["title"] == "trahiv recipe"
    assert re.fullmatch(r"trahiv \S+\n", trahiv("--version")[1])


def test_new_refuses_silent_overwrite(trahiv, folder):
    code, _, err = trahiv("new", "quickstart", "-o", "broken.yaml")
    assert (code, err.splitlines()[0]) == (2, "error: broken.yaml exists; nothing was written")
    assert (folder / "broken.yaml").read_text() == BROKEN
    assert trahiv("new", "quickstart", "-o", "broken.yaml", "--force")[0] == 0
    assert (folder / "broken.yaml").read_text() != BROKEN
    code, _, err = trahiv("new", "quickstart", "-o", "no/such/mine.yaml")
    assert (code, "cannot be written" in err) == (3, True)
