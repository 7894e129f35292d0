"""What is wrong with a complete recipe, as far as it is certain without loading a heavy library.

Its words are compared with what is on this machine: the first file of each dataset, the model's context, the
model types that are installed. What only tokenizers, models, packages and whole files can tell is found where
they are loaded, with the same words (`forms.py`). Samples longer than the context of a new model are wrong
even where they might train.
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
from trahiv_cli.recipe.upstream import model_types, unknown_model_type

READ_BYTES = 10 * 2**20
"""The bytes of a file that are read, beside the rest of the line. From that part of a JSON file `datasets`
takes the columns (datasets 5.2); parsing it takes a quarter of a second."""

_TABLES = frozenset({"biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt"})
"""Causal models whose positions are a table: no sample can be longer. Others can go beyond it."""


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
    new, section = recipe.model.config, section_of(recipe.task) or ""
    config = _config_with_a_table(recipe) if new is None else new
    model_type, known = config.get("model_type"), model_types()
    if isinstance(model_type, str) and known and model_type not in known:
        location: Location = ("model", "config", "model_type")
        yield document.finding_at(location, *unknown_model_type(model_type, known))
    key = "max_position_embeddings" if "max_position_embeddings" in config else "n_positions"
    max_length, context = getattr(recipe, section).max_length, config.get(key)
    if isinstance(context, int) and max_length > context:
        path: Location = (section, "max_length")
        is_said = path in document.values or document.is_replaced(path)
        source: Location = ("model", "model_name_or_path" if new is None else "config")
        yield document.finding_at(
            path if is_said else (*source, key),
            f"samples of {max_length} tokens do not fit into the model's context of {context}",
            f"write at most {context}" + ("" if new is None else f", or raise `model.config.{key}`"),
            path=dotted(path),
        )


def _config_with_a_table(recipe: Recipe) -> dict[str, Any]:
    """Return the config of a local model that fails at filled samples beyond its table, else nothing."""
    if recipe.clm is None or not recipe.clm.packing:  # no sample may be that long
        return {}
    try:
        with (Path(recipe.model.model_name_or_path or "").expanduser() / "config.json").open("rb") as file:
            config = json.loads(file.read(2**20))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) and config.get("model_type") in _TABLES else {}


def _about_data(recipe: Recipe, document: Document) -> Iterator[Finding]:
    for index, source in enumerate(recipe.data.datasets):
        code = AssetError.code
        try:
            files = local_files(source) if is_local(source.path) else []
            # Of a folder `datasets` may read some files only, as their names and a README.md say.
            rows = look_at(files[0]) if files and not Path(source.path).expanduser().is_dir() else []
            code = RecipeError.code  # they are here, but they do not fit
            if files and not any(file.stat().st_size for file in files):
                raise forms.empty_dataset(source.path, source.split)
            if rows:
                _require_fit(recipe, source, f"data.datasets.{index}", rows)
        except (AssetError, OSError) as failure:
            error = unreadable(failure) if isinstance(failure, OSError) else failure
            finding = document.finding_at(("data", "datasets", index, "path"), error.message, error.hint)
            yield replace(finding, code=code)


def _require_fit(recipe: Recipe, source: DatasetSection, place: str, rows: list[Any]) -> None:
    """Raise an `AssetError` if the first rows, or their columns, are not what the task reads."""
    for number, row in enumerate(rows):
        if not isinstance(row, dict):  # `datasets` can't read it; pyarrow 26 crashes if it is a first `null`
            raise forms.broken_row(repr(source.path), number, "is no JSON object: {...}")
    first = dict.fromkeys(column for row in rows for column in row) | rows[0]
    forms.require_renamable(_Table(repr(source.path), place, first), source.columns)
    first, *rows = [
        {source.columns.get(name, name): value for name, value in row.items()} for row in (first, *rows)
    ]
    table, section = _Table(repr(source.path), place, first), section_of(recipe.task) or ""
    if source.split != "train" or source.fraction is not None:
        rows = []  # not all of them are trained on
    if recipe.sft is not None or recipe.dpo is not None:
        form = forms.sft_form(table, recipe.sft) if recipe.sft is not None else forms.dpo_form(table)
        for number, row in enumerate(rows):
            for column in form.columns:
                if problem := form.problem(column, row.get(column)):
                    raise forms.broken_row(table.name, number, problem)
        return
    text = getattr(recipe, section).dataset_text_field
    forms.require_text(table, text, f"{section}.dataset_text_field")
    if recipe.seq_cls is not None:
        label, numbers = recipe.seq_cls.dataset_label_field, forms.numbers_of(recipe.seq_cls)
        forms.require_column(table, label, "seq_cls.dataset_label_field")
        for number, row in enumerate(rows):  # in CSV, a text may be a number
            said = row.get(label)
            if row.get(text) and isinstance(said, int | float | None) and said not in numbers:
                raise forms.unknown_label(table.name, number, said, recipe.seq_cls.labels)


def look_at(file: Path) -> list[Any]:
    """Read the first rows of a data file of a kind in `READERS`, as they are written, with all columns.

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
        return [{"text": ""}]  # a file is one row
    if reader == "parquet" or is_cut:
        return []
    try:
        text = content.decode("utf-8-sig")
        return _csv_rows(text) if reader == "csv" else _json_rows(text)
    except (ValueError, RecursionError, csv.Error):  # a number may be too long for Python
        return []


def _json_rows(text: str) -> list[Any]:
    """Read the values on the lines of a text, or the entries of a single list."""
    if not text.lstrip().startswith("["):
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    # In a list, `datasets` takes line breaks within texts, and texts for rows.
    rows = [{"text": row} if isinstance(row, str) else row for row in json.loads(text, strict=False)]
    return rows if all(isinstance(row, dict) for row in rows) else []


def _csv_rows(text: str) -> list[dict[str, str | None]]:
    """Read the first row of a CSV; pandas takes some of what is none."""
    row = next(csv.DictReader(io.StringIO(text, newline=""), strict=True), {})
    return [{name: cell or None for name, cell in row.items()}] if row and None not in row else []
