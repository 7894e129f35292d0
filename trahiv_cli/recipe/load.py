"""Load a recipe from a file, a pipe, a built-in name or the network; report all its mistakes at once.

1. The text is found and read. It becomes a `Document`, in which `--set` replaces values.
2. Names of files become absolute paths; the text of a chat template replaces its file's name.
3. The schema checks the data; `explain.py` words its errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from trahiv_cli.errors import Finding, RecipeError
from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.content import with_copies
from trahiv_cli.recipe.document import Document, Location, leaves, read_document
from trahiv_cli.recipe.explain import explain
from trahiv_cli.recipe.paths import anchor, closest, closest_file, is_own_reward, is_template_file
from trahiv_cli.recipe.schema import Recipe, marks_of
from trahiv_cli.recipe.section import LOOKED_UP, Section

_Section = TypeVar("_Section", bound=Section)


@dataclass(frozen=True)
class Loaded:
    """A recipe and its source."""

    recipe: Recipe
    text: str  # the file as its author wrote it
    piped: str | None  # the user's name for a pipe, from which it can't be read again
    document: Document  # it has the origin of each value


def load_recipe(source: str | Path, overrides: Sequence[str] = (), files: Path | None = None) -> Loaded:
    """Load a recipe from a path, or a built-in one by its name.

    Every path in the recipe becomes absolute (`anchor`). Paths after `--set` are relative to the current
    folder, as are the paths in a recipe that is built in or comes through a pipe.

    Args:
        source: a file, a FIFO, `-` for stdin, or, if there is no such file, a name from `builtin_recipes`.
        overrides: `a.b=c`, each as typed after `--set`; later ones win.
        files: a folder with copies of the recipe's data, see `with_copies`.

    Raises:
        RecipeError: there is no such recipe, or it has mistakes, all of which are in `findings`.
    """
    path = None if source == "-" else _find(source)
    text = _read(path, 128 * 1024, "recipe")
    document = read_document(text, str(path or "<stdin>"))
    piped: str | None = str(source)
    stem = ""
    folder = Path.cwd()
    # `<(generate)` is called /dev/fd/63.
    if path is not None and path.is_file() and not path.is_relative_to("/dev"):
        piped = None
        stem = path.stem
        if path not in builtin_recipes().values():
            folder = path.parent.resolve()
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stem)[:48].strip("-")
    document.data.setdefault("name", name or "recipe")
    document.replace(overrides)
    recipe = with_copies(_checked(document, folder, reads_template=True), files)
    return Loaded(recipe, text, piped, document)


def parse_recipe(data: dict[str, Any], file: str, overrides: Sequence[str] = ()) -> Recipe:
    """Check data that never was a file, such as a swarm's recipe; findings have no lines.

    Paths, also in `overrides`, are relative to the current folder. No file is read.

    Raises:
        RecipeError: the data has mistakes; `findings` has all of them, under the name `file`.
    """
    document = Document(data, file)
    document.replace(overrides)
    return _checked(document, Path.cwd(), reads_template=False)


def _checked(document: Document, folder: Path, *, reads_template: bool) -> Recipe:
    """Make names of files absolute, insert the text of a chat template, and validate a document's data."""
    for location, value in leaves(document.data, is_deep=True):
        base = Path.cwd() if document.is_replaced(location) else folder
        if not isinstance(value, str):
            continue
        if location == ("data", "chat_template") and reads_template and is_template_file(value):
            _put_template(document, location, Path(anchor(value, base, always=True)))
        elif location[-2:-1] == ("initial_peers",) and value.startswith("@"):
            document.put(location, "@" + anchor(value[1:], base, always=True))
        elif location[:2] == ("grpo", "rewards") and is_own_reward(value):
            document.put(location, anchor(value, base, always=True))
        elif LOOKED_UP in marks_of(location):
            document.put(location, anchor(value, base, always="dht" in location))
    findings = list(document.findings)
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        findings += explain(error, document)
    if findings:
        raise document.error(findings)
    return recipe


def _put_template(document: Document, location: Location, file: Path) -> None:
    """Replace the name of a chat template's file by its text, or record why that is impossible."""
    try:
        text = _read(file, 64 * 1024, "chat template")
        if "{" not in text:
            raise RecipeError(f"{file} is no chat template: there is no `{{` in it")
    except RecipeError as error:
        message = str(error.findings[0]) if error.findings else error.message
        near = "" if os.path.exists(file) else closest_file(file)
        hint = f"did you mean `{near}`?" if near else error.hint
        document.findings.append(document.finding_at(location, message, hint))
    else:
        document.put(location, text.replace("\r\n", "\n"))  # it must be the same for every peer


def _find(source: str | Path) -> Path:
    path = Path(source)
    builtin = builtin_recipes()
    is_folder = os.path.isdir(path)
    if os.path.exists(path) and not is_folder:
        return path
    if str(source) in builtin:
        return builtin[str(source)]
    near = closest_file(path / "recipe.yaml" if is_folder else path) or closest(path.stem, builtin)
    hint = f"did you mean `{near}`?" if near else "built-in recipes: " + ", ".join(builtin)
    missing = f"{path} is a folder, not a recipe" if is_folder else f"there is no recipe {str(source)!r}"
    raise RecipeError(missing, hint)


def _read(path: Path | None, max_bytes: int, what: str) -> str:
    """Read a file or a FIFO; without a path, read stdin to its end."""
    name = str(path or "<stdin>")
    try:
        with open(path or 0, "rb", closefd=path is not None) as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise RecipeError(f"{name} cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise RecipeError(f"{name} is larger than {max_bytes // 1024} KiB, so it is no {what}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        finding = Finding("", "is not UTF-8 text", "save it as UTF-8", name, line, 1)
        raise RecipeError(f"{name}: 1 error", finding.hint, (finding,)) from None


def parse_section(section: type[_Section], path: str, values: Mapping[str, Any] | None) -> _Section:
    """Validate values as a recipe's section at `path`, and leave out None; raises `RecipeError`."""
    given = {
        name: list(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in (values or {}).items()
        if value is not None
    }
    try:
        return section.model_validate(given)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, (path, *one['loc'])))}: {one['msg']}" for one in error.errors()]
        raise RecipeError(
            "; ".join(wrong), hint="see `trahiv schema` for the fields and their values"
        ) from error
