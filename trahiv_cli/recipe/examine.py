"""What is wrong with a complete recipe, as far as it is certain without loading a heavy library.

Its words are compared with the columns of its local data and the context of a new model. What only whole
files, tokenizers, models and packages can tell is found where they are loaded, with the same words
(`forms.py`). Samples longer than the context of a new model are wrong even where they might train.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trahiv_cli.errors import AssetError, Finding, RecipeError
from trahiv_cli.recipe import forms
from trahiv_cli.recipe.content import local_files, unreadable
from trahiv_cli.recipe.document import Document, Location, dotted
from trahiv_cli.recipe.paths import READERS, is_local
from trahiv_cli.recipe.schema import DatasetSection, Recipe, section_of

READ_BYTES = 10 * 2**20
"""The bytes of a file that are read, beside the rest of the line. From that part of a JSON file `datasets`
takes the columns (datasets 5.2); parsing it takes a quarter of a second."""


class _Table(NamedTuple):
    name: str
    place: str
    first: dict[str, Any]


def require_sound(recipe: Recipe, document: Document) -> None:
    """Refuse a recipe that certainly can't be trained on this machine.

    Raises:
        RecipeError: it contradicts itself, or its data; with everything that is wrong.
        AssetError: only files are not here.
    """
    found = (*_about_model(recipe, document), *_about_data(recipe, document))
    for kind in (RecipeError, AssetError):
        if any(finding.code == kind.code for finding in found):
            raise document.error(found, kind)


def _about_model(recipe: Recipe, document: Document) -> Iterator[Finding]:
    config, section = recipe.model.config or {}, section_of(recipe.task) or ""
    key = "max_position_embeddings" if "max_position_embeddings" in config else "n_positions"
    max_length, context = getattr(recipe, section).max_length, config.get(key)
    if isinstance(context, int) and max_length > context:
        path: Location = (section, "max_length")
        yield document.finding_at(
            path if path in document.values else ("model", "config", key),
            f"samples of {max_length} tokens do not fit into the model's context of {context}",
            f"write at most {context}, or raise `model.config.{key}`",
            path=dotted(path),
        )


def _about_data(recipe: Recipe, document: Document) -> Iterator[Finding]:
    for index, source in enumerate(recipe.data.datasets):
        code = AssetError.code
        try:
            files = local_files(source) if is_local(source.path) else []
            # Of a folder `datasets` may read some files only, as their names and a README.md say.
            first = look_at(files[0]) if files and not Path(source.path).expanduser().is_dir() else {}
            code = RecipeError.code  # they are here, but they do not fit
            if files and not any(file.stat().st_size for file in files):
                raise forms.empty_dataset(source.path, source.split)
            if first:
                _require_columns(recipe, source, _Table(repr(source.path), f"data.datasets.{index}", first))
        except (AssetError, OSError) as failure:
            error = unreadable(failure) if isinstance(failure, OSError) else failure
            finding = document.finding_at(("data", "datasets", index, "path"), error.message, error.hint)
            yield replace(finding, code=code)


def _require_columns(recipe: Recipe, source: DatasetSection, table: _Table) -> None:
    """Raise an `AssetError` if the columns of a dataset, or what is in them, are not what the task reads."""
    forms.require_renamable(table, source.columns)
    renamed = {source.columns.get(name, name): value for name, value in table.first.items()}
    table, section = table._replace(first=renamed), section_of(recipe.task) or ""
    if recipe.sft is not None:
        forms.sft_form(table, recipe.sft)
    elif recipe.dpo is not None:
        forms.dpo_form(table)
    else:
        column = getattr(recipe, section).dataset_text_field
        forms.require_text(table, column, f"{section}.dataset_text_field")
    if recipe.seq_cls is not None:
        forms.require_column(table, recipe.seq_cls.dataset_label_field, "seq_cls.dataset_label_field")


def look_at(file: Path) -> dict[str, Any]:
    """Read the columns of a data file of a kind in `READERS`, with what the first row has in them.

    Returns:
        Nothing if nothing is certain: it is empty, Parquet, no UTF-8, or written in a way that is not
        understood here.

    Raises:
        OSError: it can't be read.
    """
    reader = READERS[file.suffix]
    with file.open("rb") as stream:
        content = stream.read(READ_BYTES) + stream.readline(READ_BYTES)
        is_cut = bool(stream.read(1)) and not content.endswith(b"\n")
    if reader == "text":
        return {"text": ""}  # a file is one row
    if reader == "parquet" or is_cut:
        return {}
    try:
        text = content.decode("utf-8-sig")
        rows = _csv_rows(text) if reader == "csv" else _json_rows(text)
    except (ValueError, RecursionError, csv.Error):  # a number may be too long for Python
        return {}
    if not rows or not all(isinstance(row, dict) for row in rows):
        return {}
    return dict.fromkeys(column for row in rows for column in row) | rows[0]


def _json_rows(text: str) -> list[Any]:
    """Read the values on the lines of a text, or the entries of a single list."""
    if not text.lstrip().startswith("["):
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    # In a list, `datasets` takes line breaks within texts, and texts for rows.
    rows = json.loads(text, strict=False)
    return [{"text": row} if isinstance(row, str) else row for row in rows]


def _csv_rows(text: str) -> list[dict[str, str | None]]:
    """Read the first row of a CSV; pandas takes some of what is none."""
    row = next(csv.DictReader(io.StringIO(text, newline=""), strict=True), {})
    return [{name: cell or None for name, cell in row.items()}] if row and None not in row else []
