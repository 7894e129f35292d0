"""What others rely on is pinned, and the habits that a linter cannot see are kept."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import trahiv_cli
from trahiv_cli import errors

ROOT = Path(__file__).parents[2]
SURFACE = Path(__file__).with_name("cli_surface.txt")
REWRITE = "TRAHIV_REWRITE_CLI_SURFACE"
"""Set to 1 to write the list anew, when a command or an option was meant to change."""

FILES = sorted((ROOT / "trahiv_cli").rglob("*.py"))
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
NAMES_THAT_SAY_NOTHING = {"utils", "helpers", "common", "misc"}
MAY_CATCH_EVERYTHING = (
    "trahiv_cli/cli/app.py",  # the last resort: a bug of ours becomes words and an exit code
    "trahiv_cli/telemetry/",  # telling must never stop training
    "trahiv_cli/optim/averager.py",  # whatever ended an exchange, the group is told in the vote
    "trahiv_cli/optim/background.py",  # hands what went wrong in its thread to the one that waits for it
)
MAY_PRINT = ("trahiv_cli/cli/output.py",)


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


each_file = pytest.mark.parametrize("path", FILES, ids=place)


def test_the_face_offers_exactly_this() -> None:
    of_errors = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    trainers = {"SwarmDPOTrainer", "SwarmSFTTrainer", "SwarmTrainer", "SwarmTrainerMixin"}
    lazy = trainers | {"SwarmTrainingArguments", "load_recipe"}
    assert set(trahiv_cli.__all__) == of_errors | lazy | {"__version__"}
    assert set(trahiv_cli.__all__) <= set(dir(trahiv_cli))


def test_every_name_of_the_face_is_there() -> None:
    for name in trahiv_cli.__all__:
        assert getattr(trahiv_cli, name) is not None


def test_the_face_knows_no_other_name() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        trahiv_cli.no_such_name  # noqa: B018


@pytest.mark.parametrize("path", RECIPES, ids=place)
def test_a_recipe_that_we_ship_loads(path: Path) -> None:
    trahiv_cli.load_recipe(path)


def test_recipes_are_shipped() -> None:
    assert ROOT / "configs" / "quickstart.yaml" in RECIPES


def cli_surface() -> list[str]:
    """Each argument and option of each command, one line each, as `command --option`."""
    from typer.main import get_command

    from trahiv_cli.cli.app import app

    def lines(command: object, words: str) -> Iterator[str]:
        yield words
        for parameter in command.params:  # type: ignore[attr-defined]
            is_option = parameter.param_type_name == "option"
            for name in (
                [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name.upper()]
            ):
                yield f"{words} {name}"
        for name, child in getattr(command, "commands", {}).items():
            yield from lines(child, f"{words} {name}")

    return sorted(lines(get_command(app), "trahiv"))


def test_commands_and_options_are_the_listed_ones() -> None:
    if os.environ.get(REWRITE) == "1":
        SURFACE.write_text("\n".join(cli_surface()) + "\n", encoding="utf-8")
    listed = SURFACE.read_text(encoding="utf-8").splitlines()
    assert cli_surface() == listed, f"meant to change? {REWRITE}=1 writes {place(SURFACE)} anew"


@each_file
def test_a_file_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree(path))
    assert path.stem not in NAMES_THAT_SAY_NOTHING


@each_file
def test_only_the_edges_catch_everything(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{place(path)}:{node.lineno} catches without saying what"
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
            last = node.body[-1]
            passes_it_on = isinstance(last, ast.Raise) and last.exc is None
            if caught & {"Exception", "BaseException"} and not passes_it_on:
                assert place(path).startswith(MAY_CATCH_EVERYTHING), (
                    f"{place(path)}:{node.lineno}: name what it may be"
                )


@each_file
def test_only_the_output_prints(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert place(path) in MAY_PRINT, f"{place(path)}:{node.lineno} prints; cli/output.py does that"
