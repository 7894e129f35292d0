"""Where a name in a recipe leads: beside the recipe, to the current folder, or to the hub."""

import pytest

from trahiv_cli.recipe.paths import anchor


@pytest.fixture
def project(put, tmp_path, monkeypatch):
    """The recipe's folder, beside the current one: `tmp_path / "here"`."""
    files = "project/both.jsonl here/both.jsonl project/data/a.txt here/only.jsonl here/own/er/x home/x.jsonl"
    put(dict.fromkeys([*files.split(), "here/odd [1].csv", "here/~/x.jsonl"], ""))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "project"


def test_a_path_is_looked_for_beside_the_recipe_and_then_here(project):
    beside = (
        "both.jsonl data data/*.txt **/a.txt ../here/only.jsonl nowhere.jsonl no*.csv ~nobody-of-that-name/x"
    )
    for name in beside.split():
        assert anchor(name, project) == (f"{project}/{name}", False)
    for name in ("only.jsonl", "on*.jsonl", "odd [1].csv", "own/er"):
        assert anchor(name, project) == (f"{project.parent}/here/{name}", True)
    assert anchor("./nowhere", project) == (f"{project}/nowhere", False)
    assert anchor("~/x.jsonl", project) == (f"{project.parent}/home/x.jsonl", False)


def test_what_is_no_path_here_stays_as_it_is_unless_it_can_only_be_one(project):
    for name in ("owner/model", "gpt2", "builtin/bytes", "/no/where"):
        assert anchor(name, project) == (name, False)
    assert anchor("my.key", project, always=True) == (f"{project}/my.key", False)


def test_special_characters_of_the_recipes_folder_are_no_pattern(project):
    odd = project / "set [a]*"
    odd.mkdir()
    (odd / "x.jsonl").touch()
    assert anchor("*.jsonl", odd) == (f"{project}/set [[]a][*]/*.jsonl", False)
    assert anchor("x.jsonl", odd) == (f"{odd}/x.jsonl", False)
