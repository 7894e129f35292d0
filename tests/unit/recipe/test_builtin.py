"""What comes with trahiv is the same in a checkout and in a wheel."""

import shutil
import tomllib
from pathlib import Path

from trahiv_cli.recipe import builtin
from trahiv_cli.recipe.builtin import TEXT, builtin_recipes, text_files
from trahiv_cli.recipe.content import content_of
from trahiv_cli.recipe.schema import DatasetSection

ROOT = Path(__file__).parents[3]


def test_a_wheel_has_the_text_and_the_recipes_of_the_checkout(tmp_path, monkeypatch):
    in_checkout, recipes = content_of(DatasetSection(path=TEXT)), sorted(builtin_recipes())
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for source, place in wheel["force-include"].items():
        shutil.copytree(ROOT / source, tmp_path / place)
    monkeypatch.setattr(builtin, "_PACKAGE", tmp_path / "trahiv_cli")
    assert content_of(DatasetSection(path=TEXT)) == in_checkout
    assert sorted(builtin_recipes()) == recipes


def test_the_text_is_documentation_and_source_in_a_fixed_order():
    names = [file.relative_to(ROOT).as_posix() for file in text_files()]
    assert names[0].startswith("docs/") and names[-1].startswith("trahiv_cli/")
    assert names == sorted(names, key=lambda name: Path(name).parts)
