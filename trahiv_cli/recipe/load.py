"""A recipe from a file, a built-in name or the network: checked once, with every mistake found at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trahiv_cli.errors import Finding, RecipeError
from trahiv_cli.recipe.document import (
    Document,
    Location,
    dotted,
    in_order,
    leaves,
    read_document,
    summary,
)
from trahiv_cli.recipe.explain import explain, finding_at, valid_name
from trahiv_cli.recipe.overrides import Override, apply_overrides, read_overrides
from trahiv_cli.recipe.paths import is_template_file
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.recipe.suggest import closest
from trahiv_cli.recipe.template import read_template

MAX_BYTES = 512 * 1024
"""More is not read at all; `document.MAX_CHARACTERS` is the limit of what is parsed."""


@dataclass(frozen=True)
class Loaded:
    """A recipe and how it came about.

    `text` is the file as it was given. `origins` says of every value, by dotted path, where it came
    from: `quickstart.yaml:41`, `--set` or `default`, and which file its text was read from, if any.
    `document` says it by line and column.
    """

    recipe: Recipe
    text: str
    file: str
    origins: dict[str, str]
    document: Document


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Load a recipe from a path, or a built-in one by its name.

    Args:
        source: a file, or a name from `builtin_recipes`; a file of that name goes first.
        overrides: `a.b=c`, each as typed after `--set`; later ones win.

    Raises:
        RecipeError: there is no such recipe, or something in it is wrong; `findings` has everything.
    """
    path = _find(source)
    text = _read(path)
    document = read_document(text, str(path))
    document.data.setdefault("name", valid_name(path.stem) or "recipe")
    recipe, applied = _validate(document, overrides, path.parent)
    origins = _origins(recipe, document, applied)
    return Loaded(recipe, text, document.file, origins, document)


def parse_recipe(data: dict[str, Any], file: str, overrides: Sequence[str] = ()) -> Recipe:
    """Check data that never was a file, such as what a swarm published; findings have no lines.

    Raises:
        RecipeError: something in it is wrong; `findings` has everything, under the name `file`.
    """
    return _validate(Document(data, file), overrides)[0]


def builtin_recipes() -> dict[str, Path]:
    """Return the recipes that come with trahiv: name to file."""
    package = Path(__file__).parents[1]
    in_wheel, in_checkout = package / "configs", package.parent / "configs"
    folder = in_wheel if in_wheel.is_dir() else in_checkout
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _validate(
    document: Document, overrides: Sequence[str], folder: Path | None = None
) -> tuple[Recipe, list[Override]]:
    """Check a document; files that it names are read from `folder`, or not at all."""
    applied, misread = read_overrides(overrides)
    document.data, misplaced = apply_overrides(document.data, applied)
    if folder is not None:
        _put_template(document, folder, applied)
    findings = [*document.findings, *misread, *misplaced]
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        findings += explain(error, document, applied)
    if findings:
        raise RecipeError(summary(document, findings), findings=in_order(findings))
    return recipe, applied


def _put_template(document: Document, folder: Path, overrides: Sequence[Override]) -> None:
    """Put the text of a chat template in the place of its file's name, or note why that can't be done."""
    data = document.data.get("data")
    name = data.get("chat_template") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(name, str) or not is_template_file(name):
        return
    location: Location = ("data", "chat_template")
    try:
        data["chat_template"], document.files[location] = read_template(name, folder), name
    except RecipeError as error:
        path, mark = dotted(location), document.values.get(location)
        finding = finding_at(location, path, error.message, error.hint, document, overrides, mark)
        document.findings.append(finding)


def _origins(recipe: Recipe, document: Document, overrides: Sequence[Override]) -> dict[str, str]:
    file = Path(document.file).name

    def origin(location: Location) -> str:
        read_from = f", {document.files[location]}" if location in document.files else ""
        if any(override.covers(location) for override in overrides):
            return "--set" + read_from
        mark = document.keys.get(location) or document.values.get(location)
        return f"{file}:{mark.line}{read_from}" if mark else "default"

    return {dotted(location): origin(location) for location, _ in leaves(recipe.to_data())}


def _find(source: str | Path) -> Path:
    path, builtin = Path(source), builtin_recipes()
    if os.path.isfile(path):
        return path
    if str(source) in builtin:
        return builtin[str(source)]
    if os.path.isdir(path):
        raise RecipeError(f"{path} is a folder, not a recipe", _nearby(path / "recipe.yaml"))
    raise RecipeError(f"there is no recipe {str(source)!r}", _nearby(path))


def _nearby(path: Path) -> str:
    """Name what could have been meant by `path`: a file beside it, or a built-in recipe."""
    try:
        beside = [other.name for other in path.parent.iterdir() if other.suffix in (".yaml", ".yml")]
    except OSError:
        beside = []
    builtin = builtin_recipes()
    if near := closest(path.name, beside):
        return f"did you mean `{path.parent / near}`?"
    if near := closest(path.stem, builtin):
        return f"did you mean the built-in recipe `{near}`?"
    return "built-in recipes: " + ", ".join(builtin)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise RecipeError(f"{path} is larger than {MAX_BYTES // 1024} KiB, so it is not a recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        hint = "save it as UTF-8" if b"\0" not in content else ""
        finding = Finding("", "is not UTF-8 text", hint, str(path), line, 1)
        raise RecipeError(f"{path}: 1 error", findings=(finding,)) from None
