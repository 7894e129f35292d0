"""A recipe from a file, a pipe, a built-in name or the network: checked once, every mistake found at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trahiv_cli.errors import Finding, RecipeError
from trahiv_cli.recipe.builtin import builtin_recipes
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
from trahiv_cli.recipe.paths import anchor, is_template_file, places_of
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.recipe.suggest import closest
from trahiv_cli.recipe.template import read_template

MAX_BYTES = 512 * 1024
"""More is not read at all; `document.MAX_CHARACTERS` is the limit of what is parsed."""

STDIN = "-"


@dataclass(frozen=True)
class Loaded:
    """A recipe and how it came about.

    `text` is the file as it was given, `file` its name for messages. `origins` says of every value, by dotted
    path, where it came from: `quickstart.yaml:41`, `--set` or `default`, and which file its text was read
    from, if any. `is_from_pipe`: it can't be read a second time. `document` says where each value stands, and
    which paths are relative to the current folder instead of the recipe's.
    """

    recipe: Recipe
    text: str
    file: str
    origins: dict[str, str]
    is_from_pipe: bool
    document: Document


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Load a recipe from a path, or a built-in one by its name.

    Every path in the recipe becomes absolute, so that the recipe means the same in any current folder
    (`places_of` tells where it is looked for). Paths after `--set` are relative to the current folder, as are
    those of a recipe that comes through a pipe.

    Args:
        source: a file, a FIFO, `-` for stdin, or a name from `builtin_recipes`; a file of that name goes
            first.
        overrides: `a.b=c`, each as typed after `--set`; later ones win.

    Raises:
        RecipeError: there is no such recipe, or something in it is wrong; `findings` has everything.
    """
    path = None if source == STDIN else _find(source)
    text = _read(path)
    is_from_pipe = path is None or not path.is_file() or path.is_relative_to("/dev")
    document = read_document(text, str(path or "<stdin>"))
    stem = "" if path is None or is_from_pipe else valid_name(path.stem)  # `<(generate)` is called /dev/fd/63
    document.data.setdefault("name", stem or "recipe")
    folder = Path.cwd() if path is None or is_from_pipe else path.parent.resolve()
    recipe, applied = _validate(document, overrides, folder)
    origins = _origins(recipe, document, applied)
    return Loaded(recipe, text, document.file, origins, is_from_pipe, document)


def parse_recipe(data: dict[str, Any], file: str, overrides: Sequence[str] = ()) -> Recipe:
    """Check data that never was a file, such as what a swarm published; findings have no lines.

    Paths, such as those of `overrides`, are relative to the current folder.

    Raises:
        RecipeError: something in it is wrong; `findings` has everything, under the name `file`.
    """
    return _validate(Document(data, file), overrides)[0]


def _validate(
    document: Document, overrides: Sequence[str], folder: Path | None = None
) -> tuple[Recipe, list[Override]]:
    """Check a document and make its paths absolute; templates are read from `folder`, or not at all."""
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
    return _anchored(recipe, document, folder or Path.cwd(), applied), applied


def _put_template(document: Document, folder: Path, overrides: Sequence[Override]) -> None:
    """Put the text of a chat template in the place of its file's name, or note why that can't be done."""
    data = document.data.get("data")
    name = data.get("chat_template") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(name, str) or not is_template_file(name):
        return
    location: Location = ("data", "chat_template")
    try:
        data["chat_template"], file = read_template(name, base := _base(location, folder, overrides))
        document.files[location] = name
        if str(file) != places_of(name, base)[0]:
            document.strays[dotted(location)] = str(file)
    except RecipeError as error:
        path, mark = dotted(location), document.values.get(location)
        finding = finding_at(location, path, error.message, error.hint, document, overrides, mark)
        document.findings.append(finding)


def _anchored(recipe: Recipe, document: Document, folder: Path, overrides: Sequence[Override]) -> Recipe:
    """Return the recipe with absolute paths for all that it has on this machine."""

    def place(name: str, *location: str | int, always: bool = False) -> str:
        found, is_stray = anchor(name, _base(location, folder, overrides), always=always)
        if is_stray:
            document.strays[dotted(location)] = found
        return found

    model = {
        key: place(name, "model", key)
        for key in ("model_name_or_path", "tokenizer_name_or_path")
        if (name := getattr(recipe.model, key)) is not None
    }
    datasets = [
        dataset.model_copy(update={"path": place(dataset.path, "data", "datasets", index, "path")})
        for index, dataset in enumerate(recipe.data.datasets)
    ]
    dht = recipe.hivemind_config.dht
    where = ("hivemind_config", "dht")
    own: dict[str, Any] = {
        "initial_peers": [
            "@" + place(peer[1:], *where, "initial_peers", always=True) if peer.startswith("@") else peer
            for peer in dht.initial_peers
        ]
    }
    if dht.identity_path is not None:
        own["identity_path"] = place(dht.identity_path, *where, "identity_path", always=True)
    config = recipe.hivemind_config.model_copy(update={"dht": dht.model_copy(update=own)})
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=model),
            "data": recipe.data.model_copy(update={"datasets": datasets}),
            "hivemind_config": config,
        }
    )


def _base(location: Location, folder: Path, overrides: Sequence[Override]) -> Path:
    """The folder that a path at `location` is relative to."""
    return Path.cwd() if any(override.covers(location) for override in overrides) else folder


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
    if os.path.exists(path) and not os.path.isdir(path):
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


def _read(path: Path | None) -> str:
    """Read a file or a FIFO; without one, stdin to its end."""
    name = str(path or "<stdin>")
    try:
        with open(path or 0, "rb", closefd=path is not None) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{name} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise RecipeError(f"{name} is larger than {MAX_BYTES // 1024} KiB, so it is not a recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        hint = "save it as UTF-8" if b"\0" not in content else ""
        finding = Finding("", "is not UTF-8 text", hint, name, line, 1)
        raise RecipeError(f"{name}: 1 error", findings=(finding,)) from None
