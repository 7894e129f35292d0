"""Local data is known by its content: files that count, equality, missing files, and places of copies."""

import os
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.unit.conftest import refused
from tests.unit.recipe.conftest import of_task, quickstart
from trahiv_cli.errors import RecipeMismatch
from trahiv_cli.recipe import content
from trahiv_cli.recipe.builtin import TEXT, builtin_recipes, text_files, version
from trahiv_cli.recipe.content import content_of, knows_contents, local_files, read_contents, with_copies
from trahiv_cli.recipe.load import parse_recipe
from trahiv_cli.recipe.schema import DatasetSection

ROOT = Path(__file__).parents[3]


def files_of(path, **more):
    return [file.as_posix() for file in local_files(DatasetSection(path=path, **more))]


def held_by(path, **more):
    return content_of(DatasetSection(path=path, **more))


def recipe_of(datasets):
    return quickstart(f"data.datasets=[{datasets}]")


def test_content_hash_is_cached(put, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    put({"chat.jsonl": "hello\n"})
    held = held_by("chat.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(content.hashlib, "file_digest", None)
        assert held_by("chat.jsonl") == held
    assert held_by("~/chat.jsonl") == held
    put({"chat.jsonl": "yy"})
    assert held_by("chat.jsonl").sha256 != held.sha256


def of_rewards(*rewards):
    """Read the contents of a recipe with these rewards."""
    options = (*of_task("grpo"), f"grpo.rewards=[{', '.join(rewards)}]")
    return read_contents(quickstart("data.datasets.0.path=owner/data", *options)).grpo.rewards


def test_own_rewards_get_digests(put):
    put({"mine.py": "def score(completions, **_):\n    return [1 / 0]\n"})
    known, own = of_rewards("number", "./mine.py:score")
    assert known.sha256 is None
    assert own.name.startswith("/")
    assert own.sha256 == "2de5f6d5d8910b7271afbd0bb4c296fbbe0bb1a097c3b1a8efa3dba5c573fe70"
    with refused("is not the file that the run takes its rewards from", error=RecipeMismatch):
        of_rewards(f"{{name: mine.py:score, sha256: {'a' * 64}}}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:scores", "has no function 'scores'"),
        ("other.py:score", "There is no file"),
        ("broken.py:score", "is no Python file"),
    ],
)
def test_missing_reward_function_is_named(put, name, message):
    put({"mine.py": "def score(**_): pass", "broken.py": "def score("})
    with refused(message):
        of_rewards(name)


def test_content_ignores_file_names(put):
    put({"a/1.jsonl": "x", "a/2.jsonl": "y", "b/1.json": "x", "b/2.jsonl": "y", "b/c.csv": ""})
    assert held_by("a/*.jsonl") == held_by("b", data_files=["2.jsonl", "1.json"]) == held_by("a")


@pytest.mark.parametrize(
    "texts",
    [
        {"b/1.jsonl": "xy"},
        {"b/1.jsonl": "", "b/2.jsonl": "xy"},
        {"b/1.jsonl": "y", "b/2.jsonl": "x"},
        {"b/1.txt": "x", "b/2.txt": "y"},
    ],
)
def test_order_and_kind_are_content(put, texts):
    put({"a/1.jsonl": "x", "a/2.jsonl": "y"} | texts)
    assert held_by("a") != held_by("b")


def test_folder_content_counts_chosen_data_files(put):
    read = dict.fromkeys(("d[t]/b.jsonl", "d[t]/a-b/x.csv", "d[t]/a/y.txt"), "1")
    hidden = (".hidden.jsonl", ".cache/z.jsonl", "__pycache__/z.jsonl")
    put(read | {f"d[t]/{name}": "no" for name in ("README.md", "dataset_info.json", *hidden)})
    assert files_of("d[t]") == ["d[t]/a/y.txt", "d[t]/a-b/x.csv", "d[t]/b.jsonl"]
    assert held_by("d[t]").readers == ["csv", "json", "text"]
    assert files_of("d[t]", data_files="b.jsonl") == ["d[t]/b.jsonl"]
    assert files_of("d[t]", data_files=["a-b/*", "b.jsonl", "?.jsonl"]) == ["d[t]/a-b/x.csv", "d[t]/b.jsonl"]


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("empty", "The folder 'empty' holds no data files.", "Known are .txt .jsonl .json .csv .par"),
        ("./chat.xyz", "'chat.xyz' has a suffix that is not known.", "Known are .txt"),
        ("./chats.jsonl/x", "There is no file or folder 'chats.jsonl/x'.", "Looked in "),
    ],
)
def test_missing_path_gets_suggestion(put, path, message, hint):
    put({"chats.jsonl": "x", "empty/README.md": "x", "chat.xyz": "x"})
    with refused(f"^{message}\n", hint):
        held_by(path)


def test_only_local_data_gets_content(put):
    put({"here.jsonl": "x"})
    recipe = recipe_of(f"{{path: {TEXT}}}, {{path: here.jsonl}}, {{path: owner/hub}}")
    read = read_contents(recipe)
    assert [dataset.content is not None for dataset in read.data.datasets] == [True, True, False]
    assert (knows_contents(recipe), knows_contents(read)) == (False, True)
    assert read_contents(read) == read


def test_all_missing_files_are_listed(put, tmp_path):
    put({"here.jsonl": "x"})
    missing = [f"There is no file or folder '{tmp_path}/{name}'." for name in ("a.jsonl", "b.csv")]
    with refused("^{}\n{}\n".format(*missing), "Looked in "):
        read_contents(recipe_of("{path: a.jsonl}, {path: here.jsonl}, {path: owner/hub}, {path: b.csv}"))


def test_other_builtin_text_names_version():
    wanted = read_contents(recipe_of(f"{{path: {TEXT}}}")).to_data()
    wanted["data"]["datasets"][0]["content"] |= {"sha256": "0" * 64, "version": "99.1"}
    hint = "install trahiv 99.1 unchanged on all machines"
    with refused("is not what the run trains on", hint, RecipeMismatch) as caught:
        read_contents(parse_recipe(wanted, "the swarm"))
    assert ("data.datasets.0.content.version", version(), "99.1") in caught.value.differences


def test_builtin_text_is_sorted_as_everywhere():
    files = [file.relative_to(ROOT) for file in text_files()]
    assert files == sorted(files, key=lambda file: file.parts)
    assert {file.parts[0] for file in files} == {"docs", "trahiv_cli"}


def test_wheel_has_same_builtin_files(tmp_path):
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source in wheel["only-include"]:
        place = tmp_path / wheel["sources"].get(source, source)
        shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
    in_wheel = runpy.run_path(str(tmp_path / "trahiv_cli/recipe/builtin.py"))
    assert in_wheel["read_text"]() == [file.read_text() for file in text_files()]
    assert in_wheel["builtin_recipes"]().keys() == builtin_recipes().keys()


def found(path):
    """Return the place in `mine` of a copy of the data that a swarm's starter has at `path`."""
    recipe = recipe_of(f"{{path: 'local:data', content: {held_by(path).model_dump_json()}}}")
    return with_copies(recipe, Path("mine")).data.datasets[0].path.removeprefix(f"{Path.cwd()}/")


@pytest.mark.parametrize(
    ("texts", "wanted", "place"),
    [
        ({"mine/a/b/c.jsonl": "yy", "mine/a/b/d.jsonl": "zz"}, "starter/2.jsonl", "mine/a/b/c.jsonl"),
        ({"mine/a.txt": "yy", "mine/b.jsonl": "zz", "mine/c.jsonl": "yyy"}, "starter/2.jsonl", "local:data"),
        (
            {"mine/.hidden/a.jsonl": "yy", "mine/.a.jsonl": "yy", "mine/a": "yy"},
            "starter/2.jsonl",
            "local:data",
        ),
        ({"mine/a.csv": "z"}, "starter/more", "mine/a.csv"),
        ({"mine/in/a.json": "x", "mine/in/b/c.json": "yy", "mine/d.csv": ""}, "starter/*.jsonl", "mine/in"),
        ({"mine/b.jsonl": "x", "mine/a.jsonl": "yy"}, "starter/*.jsonl", "local:data"),
        ({"mine/a.jsonl": "x", "mine/b.jsonl": "yy", "mine/c.csv": ""}, "starter/*.jsonl", "local:data"),
        ({"mine/a.jsonl": "x", "mine/b.jsonl": "yy", "mine/c/d.csv": "z"}, "starter", "mine"),
    ],
)
def test_copy_is_found_by_content(put, texts, wanted, place):
    starter = {"starter/1.jsonl": "x", "starter/2.jsonl": "yy", "starter/more/3.csv": "z"}
    put(starter | {"mine/notes.md": ""} | texts)
    assert found(wanted) == place


def test_search_survives_loops_pipes_and_links(put):
    mine = put({"starter.jsonl": "yy", "blobs/ab12": "yy", "mine/z/notes.md": ""}) / "mine"
    copy = mine.parent / "blobs/ab12"
    (mine / "z/copy.jsonl").symlink_to(copy)  # a link to a file is that file
    (mine / "loop").symlink_to(mine)
    (mine / "self.jsonl").symlink_to(mine / "self.jsonl")
    (mine / "broken.jsonl").symlink_to(mine / "nowhere")
    os.mkfifo(mine / "pipe.jsonl")
    os.symlink(os.fsencode(copy), os.fsencode(mine) + b"/a\xff.jsonl")
    assert found("starter.jsonl") == "mine/z/copy.jsonl"


def test_moved_data_is_found(put, tmp_path):
    put({"a/1.jsonl": "x", "a/2.jsonl": "yy", "b.jsonl": "z"})
    recipe = recipe_of("{path: a, data_files: '*.jsonl'}, {path: b.jsonl}, {path: owner/data}")
    recipe = read_contents(recipe)
    (tmp_path / "a").rename("moved")
    moved = with_copies(recipe, tmp_path).data.datasets
    assert [dataset.path for dataset in moved] == [f"{tmp_path}/moved", f"{tmp_path}/b.jsonl", "owner/data"]
    assert moved[0].data_files is None
