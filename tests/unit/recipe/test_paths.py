"""Where a name in a recipe leads: beside the recipe, or to the hub."""

import pytest

from trahiv_cli.recipe.paths import anchor


@pytest.fixture
def project(put, tmp_path, monkeypatch):
    """The recipe's folder, which is not the current one."""
    put(dict.fromkeys(["project/x.jsonl", "project/odd [1].csv", "here/only.jsonl", "home/x.jsonl"], ""))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "project"


def test_a_path_is_looked_for_beside_the_recipe(project):
    names = "x.jsonl data/*.txt only.jsonl ../here/only.jsonl nowhere.jsonl ~nobody-of-that-name/x".split()
    for name in (*names, "odd [1].csv"):
        assert anchor(name, project) == f"{project}/{name}"
    assert anchor("./nowhere", project) == f"{project}/nowhere"
    assert anchor("~/x.jsonl", project) == f"{project.parent}/home/x.jsonl"


def test_what_is_no_path_stays_as_it_is_unless_it_can_only_be_one(project):
    for name in ("owner/model", "gpt2", "builtin/bytes", "local:x.jsonl", "/no/where", "https://x/y.csv", ""):
        assert anchor(name, project) == name
    assert anchor("my.key", project, always=True) == f"{project}/my.key"


def test_special_characters_of_the_recipes_folder_are_no_pattern(project):
    odd = project / "set [a]*"
    odd.mkdir()
    (odd / "x.jsonl").touch()
    assert anchor("*.jsonl", odd) == f"{project}/set [[]a][*]/*.jsonl"
    assert anchor("x.jsonl", odd) == f"{odd}/x.jsonl"
