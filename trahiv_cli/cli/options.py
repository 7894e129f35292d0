"""Arguments and options that several commands share, so that a word means the same in all of them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trahiv_cli.cli.output import out
from trahiv_cli.recipe.prefix import INVITATION_PREFIX

if TYPE_CHECKING:
    from trahiv_cli.recipe.load import Loaded
    from trahiv_cli.train.leaving import Budget

PEER_VARIABLE = "TRAHIV_PEER"
"""Environment variable with invitations, separated by spaces: only its owner can read it."""

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A file, - for stdin, or the name of a built-in recipe.", show_default=False
    ),
]

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Replace one value of the recipe; repeats.",
        show_default=False,
    ),
]


def read_recipe(recipe: str, overrides: Sequence[str] | None, files: Path | None = None) -> Loaded:
    """Load the recipe of a command line, and say which of its paths lead to the current folder.

    Args:
        recipe: a path or a name, as typed.
        overrides: what was typed after each `--set`.
        files: a folder with copies of its data, see `with_copies`.

    Raises:
        RecipeError: see `load_recipe`.
        AssetError: see `with_copies`.
    """
    from trahiv_cli.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    for path, file in loaded.strays.items():
        out.warning(
            "path",
            f"`{path}` is not in the recipe's folder, so {file} of the current folder is used.",
            "paths in a recipe are relative to the recipe: put the file there, or write its whole path",
        )
    if files is None:
        return loaded
    from trahiv_cli.recipe.copies import with_copies

    if not any(dataset.content for dataset in loaded.recipe.data.datasets):
        out.warning(
            "data",
            "`--files` has no effect: this recipe does not say what its data holds.",
            "it is for a recipe that comes from the swarm, or from a run's folder (`recipe.json`)",
        )
    return replace(loaded, recipe=with_copies(loaded.recipe, files))


def parse_budget(text: str | None, option: str) -> Budget:
    """Read `2h`, `500 samples` or `20 steps`; nothing is an endless one.

    Raises:
        typer.BadParameter: it is none of these.
    """
    from trahiv_cli.train.leaving import ENDLESS_BUDGET, Budget

    try:
        return Budget.parse(text) if text is not None else ENDLESS_BUDGET
    except ValueError as error:
        raise typer.BadParameter(f"{error}", param_hint=option) from error


def parse_seconds(text: str | None, option: str, examples: str) -> float | None:
    """Read a time; None if there is none.

    Raises:
        typer.BadParameter: it is none; `examples` are.
    """
    seconds = parse_budget(text, option).seconds
    if text and math.isinf(seconds):
        raise typer.BadParameter(f"give a time: {examples}", param_hint=option)
    return seconds if text else None


def hide_invitations(arguments: Sequence[str]) -> None:
    """Start this process again without the invitations after `--peer`, which all users here can read there.

    Returns only if there are none. They go into `PEER_VARIABLE`.

    Args:
        arguments: of the interpreter (`sys.orig_argv`).
    """
    rest, invitations = without_invitations(arguments)
    if not invitations or not {"join", "members"} & set(arguments):
        return
    os.environ[PEER_VARIABLE] = " ".join([*invitations, os.environ.get(PEER_VARIABLE, "")])
    os.execv(sys.executable, rest)


def without_invitations(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into what is no invitation after `--peer`, and what is."""
    rest: list[str] = []
    invitations: list[str] = []
    for word in arguments:
        value = word.removeprefix("--peer=")
        if INVITATION_PREFIX in value and (value != word or (rest and rest[-1] == "--peer")):
            invitations.append(value)
            if value == word:
                rest.pop()
        else:
            rest.append(word)
    return rest, invitations


def taken_peers() -> list[str]:
    """Take the invitations out of the environment; what this process starts does not get them."""
    return os.environ.pop(PEER_VARIABLE, "").split()
