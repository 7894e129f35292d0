"""`new`, `check`, `show`, `schema`: what is said, where, and with which exit code."""

import json
import re

import pytest

from trahiv_cli.cli import app as app_module
from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.load import load_recipe

BROKEN = """\
model:
  model_name_or_path: owner/model
data:
  datasets:
    - path: owner/data
training:
  max_steps: many
  lerning_rate: 2e-4
"""

RENDERED = """\
broken.yaml:7:14: training.max_steps: should be a valid integer, got 'many'
    7 |   max_steps: many
      |              ^
broken.yaml:8:3: training.lerning_rate: unknown key
    8 |   lerning_rate: 2e-4
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
    (here / "broken.yaml").write_text(BROKEN)
    (here / "sft.yaml").write_text(SFT)
    return here


def chat(answer):
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


# -- check ----------------------------------------------------------------------------------------


def test_check_says_what_a_recipe_is_or_every_mistake_with_its_place(trahiv, events):
    code, out, err = trahiv("check", "quickstart")
    assert (code, err) == (0, "")
    assert re.search(r"run_id +quickstart-[0-9a-f]{8}\nfingerprint +[0-9a-f]{64}\n$", out)
    assert trahiv("check", "broken.yaml") == (2, "", RENDERED)
    code, (_, event) = events("check", "broken.yaml")
    assert (code, event["event"], event["v"], event["t"] > 0, event["code"]) == (
        2,
        "error",
        1,
        True,
        "recipe",
    )
    assert (event["message"], event["hint"]) == ("unknown key", "did you mean `learning_rate`?")
    place = [event[name] for name in ("file", "line", "col", "path")]
    assert place == ["broken.yaml", 8, 3, "training.lerning_rate"]
    code, (event,) = events("check", "nowhere.yaml")  # an error without findings is one event
    assert (code, event["code"], event["message"]) == (2, "recipe", "there is no recipe 'nowhere.yaml'")


def test_check_and_show_of_a_recipe_whose_data_is_not_here_warn_and_exit_with_0(trahiv, events, folder):
    (folder / "chats.jsonl").write_text("{}")
    code, out, err = trahiv("check", "sft.yaml")
    assert code == 0
    assert out == "sft.yaml: ok\nrun_id       depends on the data\nfingerprint  depends on the data\n"
    place = "sft.yaml:6:13: data.datasets.0.path"
    said = f"There is no file or folder '{folder}/chat.jsonl'."
    assert err == f"warning: {place}: {said}\nhint: Did you mean '{folder}/chats.jsonl'?\n"
    code, (warning, checked) = events("check", "sft.yaml", "--set", "hivemind_config.opt.run_id=mine")
    assert (code, warning["event"], warning["code"]) == (0, "warning", "asset")
    assert (checked["run_id"], checked["fingerprint"]) == ("mine", None)
    code, out, err = trahiv("show", "sft.yaml")
    assert (code, err.splitlines()[0]) == (0, f"warning: {said}")
    assert out.startswith("# fingerprint depends on the data\n")
    assert re.search(r"^    run_id: null +# default$", out, re.MULTILINE)


def test_check_knows_a_run_by_its_data_and_refuses_changed_data(trahiv, folder):
    said = []
    for name, text in (("chat.jsonl", "1"), ("copy.jsonl", "1"), ("copy.jsonl", "2")):
        (folder / name).write_text(chat(text))
        said.append(trahiv("check", "sft.yaml", "--set", f"data.datasets.0.path={name}")[1])
    assert said[0] == said[1] != said[2]
    (folder / "known.yaml").write_text(trahiv("show", "sft.yaml")[1])
    known = trahiv("check", "known.yaml", "--set", "name=sft")
    assert (known[0], known[1].splitlines()[1:]) == (0, said[0].splitlines()[1:])
    (folder / "chat.jsonl").write_text(chat("22"))
    code, _, err = trahiv("check", "known.yaml")
    assert (code, "data.datasets.0.content.num_bytes" in err) == (5, True)
    assert trahiv("show", "known.yaml")[0] == 0
    _, _, err = trahiv("init", "sft.yaml", "--files", ".", "--set", "data.datasets.0.path=./no.csv")
    assert err.startswith("warning: `--files` has no effect: this recipe does not say what its data holds.\n")


def test_a_finding_is_rendered_for_a_terminal(trahiv, folder):
    _, _, err = trahiv("check", "quickstart", "--set", "training.max_steps=0")
    assert err.startswith(
        "--set training.max_steps=0: training.max_steps: should be greater than or equal to 1, got 0\n"
    )
    (folder / "evil.yaml").write_text('"\\e[31mkey": 1\n')
    _, _, err = trahiv("check", "evil.yaml")
    assert "\x1b" not in err and "?[31mkey: unknown key" in err, "a stranger's text cannot steer the terminal"
    (folder / "long.yaml").write_text("model: {revision: " + "long" * 50 + ", x: 1}\n")
    lines = trahiv("check", "long.yaml")[2].splitlines()
    quoted = next(index for index, line in enumerate(lines) if "x: 1}" in line)
    assert lines[quoted][lines[quoted + 1].index("^")] == "x", "a long line is cut around the caret"
    assert max(map(len, lines[quoted : quoted + 2])) < 120


def test_no_traceback_is_shown_unless_asked_for(trahiv, monkeypatch):
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(app_module, "app", broken)
    code, out, err = trahiv("check", "quickstart")
    assert (code, out, "Traceback" in err) == (1, "", False)
    assert err.startswith("error: ZeroDivisionError: a bug\nhint: this is a bug in trahiv")
    monkeypatch.setenv("TRAHIV_DEBUG", "1")
    assert "Traceback" in trahiv("check", "quickstart")[2]


# -- show -----------------------------------------------------------------------------------------


def test_show_prints_a_recipe_that_loads_again_with_origins(trahiv, folder):
    changes = ("--set", "training.max_steps=7")
    code, out, _ = trahiv("show", "quickstart", *changes)
    assert code == 0 and re.match(r"# fingerprint [0-9a-f]{64}\n", out)
    assert re.search(r"^  max_steps: 7 +# --set$", out, re.MULTILINE)
    assert re.search(r"^  learning_rate: 0.01 +# quickstart.yaml:\d+$", out, re.MULTILINE)
    assert re.search(r"^    run_id: quickstart-[0-9a-f]{8} +# name and agreement$", out, re.MULTILINE)
    (folder / "shown.yaml").write_text(out)
    shown, loaded = load_recipe("shown.yaml"), load_recipe("quickstart", changes[1:])
    assert shown.recipe.training == loaded.recipe.training


def test_show_says_what_local_data_holds_and_which_file_a_template_is_from(trahiv, folder):
    (folder / "chat.jsonl").write_text(chat("1"))
    (folder / "chat.jinja").write_text("{{ x }}\n")
    override = ("--set", "data.chat_template=chat.jinja")
    _, out, _ = trahiv("show", "sft.yaml", *override)
    assert re.search(r"^        num_bytes: \d+ +# the files$", out, re.MULTILINE)
    assert re.search(r'^  chat_template: "\{\{ x \}\}\\n" +# --set, chat.jinja$', out, re.MULTILINE)
    assert re.search(r"^  packing: false +# default$", out, re.MULTILINE)


def test_show_takes_the_folder_of_a_run(trahiv, folder):
    (folder / "run").mkdir()
    code, _, err = trahiv("show", "run")
    assert (code, err.splitlines()[0]) == (2, "error: run is a folder, not a recipe")
    resolved = load_recipe("quickstart").recipe.model_dump(mode="json")
    (folder / "run" / "recipe.json").write_text(json.dumps(resolved, indent=2))
    code, out, _ = trahiv("show", "run")
    assert code == 0 and re.search(r"^  max_steps: 2000 +# recipe.json:\d+$", out, re.MULTILINE)


# -- new, schema, --version -----------------------------------------------------------------------


def test_new_lists_the_builtin_recipes_and_suggests_the_one_that_was_meant(trahiv):
    code, out, _ = trahiv("new")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(builtin_recipes())
    assert re.search(r"^quickstart +The embedded default: ", out, re.MULTILINE)
    for name in ("chatsft", "Chat-SFT", "cake"):
        code, _, err = trahiv("new", name)
        assert (code, f"there is no built-in recipe {name!r}" in err, "recipes: " in err) == (2, True, True)
        assert ("did you mean `trahiv new chat-sft`?" in err) == (name != "cake")


@pytest.mark.parametrize("name", builtin_recipes())
def test_new_writes_a_commented_recipe_that_is_complete_and_its_schema(trahiv, folder, name):
    code, out, err = trahiv("new", name, "-o", "mine.yaml")
    assert (code, out, "wrote mine.yaml" in err) == (0, "", True)
    text = (folder / "mine.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n# ")
    assert (folder / "recipe.schema.json").read_text() == trahiv("schema")[1]
    assert trahiv("check", "mine.yaml")[0] == 0


def test_new_never_overwrites_in_silence(trahiv, folder):
    code, _, err = trahiv("new", "quickstart", "-o", "broken.yaml")
    assert (code, err.splitlines()[0]) == (2, "error: broken.yaml exists; nothing was written")
    assert (folder / "broken.yaml").read_text() == BROKEN
    assert not (folder / "recipe.schema.json").exists()
    assert trahiv("new", "quickstart", "-o", "broken.yaml", "--force")[0] == 0
    assert (folder / "broken.yaml").read_text() != BROKEN
    (folder / "recipe.schema.json").write_text('{"title": "cakes"}')
    code, _, err = trahiv("new", "quickstart")
    assert (code, "recipe.schema.json is not trahiv's; nothing was written" in err) == (2, True)
    assert not (folder / "quickstart.yaml").exists()
    code, _, err = trahiv("new", "quickstart", "-o", "no/such/mine.yaml")
    assert (code, "cannot be written" in err) == (3, True)


def test_the_version_is_one_line(trahiv):
    code, out, _ = trahiv("--version")
    assert code == 0 and re.fullmatch(r"trahiv \S+\n", out)
