"""A chat template that is kept in a file of its own, beside the recipe."""

from __future__ import annotations

import os.path
from pathlib import Path

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.paths import places_of
from trahiv_cli.recipe.suggest import closest

MAX_TEMPLATE_BYTES = 64 * 1024


def read_template(name: str, folder: Path) -> tuple[str, Path]:
    """Read the file of a chat template, whose text stands for the file from then on.

    Args:
        name: the file, see `places_of`.
        folder: the recipe's.

    Returns:
        The text, with lines that end as on Unix: it must be the same for every peer. And the file.

    Raises:
        RecipeError: there is no such file, or it is no template.
    """
    places = [Path(place) for place in places_of(name, folder)]
    path = next((place for place in places if os.path.isfile(place)), None)
    if path is None:
        raise RecipeError(f"there is no file {name!r}", _nearby(places))
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_TEMPLATE_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_TEMPLATE_BYTES:
        raise RecipeError(
            f"{path} is larger than {MAX_TEMPLATE_BYTES // 1024} KiB, so it is no chat template"
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path} is not UTF-8 text (line {line})", "save it as UTF-8") from None
    if "{" not in text:
        raise RecipeError(f"{path} is no chat template: there is no `{{` in it")
    return text.replace("\r\n", "\n"), path


def _nearby(places: list[Path]) -> str:
    """Name a file of nearly this name, or say where was looked."""
    for place in places:
        try:
            beside = [other.name for other in place.parent.iterdir() if other.is_file()]
        except OSError:
            continue
        if near := closest(place.name, beside):
            return f"did you mean `{place.with_name(near)}`?"
    folders = dict.fromkeys(str(place.parent.resolve()) for place in places)
    return "looked in " + " and ".join(folders)
