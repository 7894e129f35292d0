"""Where a name in a recipe leads: beside the recipe, to the current folder, or to the hub."""

import pytest

from trahiv_cli.recipe.paths import anchor


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The recipe's folder, beside the current one: `tmp_path / "here"`."""
    for file in (
        *("project/both.jsonl", "here/both.jsonl", "project/data/a.txt", "here/only.jsonl", "here/own/er/x"),
        *("here/odd [1].csv", "home/x.jsonl", "here/~/x.jsonl"),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "project"


@pytest.mark.parametrize(
    ("name", "found", "is_stray"),
    [
        ("both.jsonl", "project/both.jsonl", False),
        ("./both.jsonl", "project/both.jsonl", False),
        ("data", "project/data", False),
        ("data/*.txt", "project/data/*.txt", False),
        ("**/a.txt", "project/**/a.txt", False),
        ("../here/only.jsonl", "project/../here/only.jsonl", False),
        ("only.jsonl", "here/only.jsonl", True),
        ("on*.jsonl", "here/on*.jsonl", True),
        ("odd [1].csv", "here/odd [1].csv", True),
        ("own/er", "here/own/er", True),
        ("nowhere.jsonl", "project/nowhere.jsonl", False),
        ("no*.csv", "project/no*.csv", False),
        ("./nowhere", "project/nowhere", False),
        ("~/x.jsonl", "home/x.jsonl", False),
        ("~/nowhere", "home/nowhere", False),
        ("~nobody-of-that-name/x", "project/~nobody-of-that-name/x", False),
    ],
)
def test_a_path_is_looked_for_beside_the_recipe_and_then_here(project, name, found, is_stray):
    assert anchor(name, project) == (str(project.parent / found), is_stray)


@pytest.mark.parametrize("name", ["owner/model", "gpt2", "builtin/bytes", "builtin/trahiv", "/no/where"])
def test_what_is_no_path_here_stays_as_it_is(project, name):
    assert anchor(name, project) == (name, False)


def test_what_can_only_be_a_path_is_one(project):
    assert anchor("my.key", project, always=True) == (f"{project}/my.key", False)


def test_special_characters_of_the_recipes_folder_are_no_pattern(project):
    odd = project / "set [a]*"
    odd.mkdir()
    (odd / "x.jsonl").touch()
    assert anchor("*.jsonl", odd) == (f"{project}/set [[]a][*]/*.jsonl", False)
    assert anchor("x.jsonl", odd) == (f"{odd}/x.jsonl", False)
