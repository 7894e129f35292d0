"""What is wrong with a complete recipe, as far as it is certain without loading a heavy library.

Its words are compared with what is on this machine: the first file of each dataset, the model's context, the
installed packages. What only tokenizers, models and whole files can tell is found where they are loaded, with
the same words (`forms.py`). Samples longer than the context of a new model are wrong even where they might
train.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trahiv_cli.errors import AssetError, Finding, RecipeError, SetupError
from trahiv_cli.recipe import forms
from trahiv_cli.recipe.content import local_files, unreadable
from trahiv_cli.recipe.document import Document, Location, dotted
from trahiv_cli.recipe.paths import READERS, is_local
from trahiv_cli.recipe.schema import DatasetSection, Recipe, section_of
from trahiv_cli.recipe.upstream import lacks_tracker, model_types, unknown_model_type, without_tracker

READ_BYTES = 10 * 2**20
"""The bytes of a file that are read, beside the rest of the line. From that part of a JSON file `datasets`
takes the columns (datasets 5.2); parsing it takes a quarter of a second."""

ADVICE = "advice"
"""The code of a finding about what can be trained, but was hardly meant."""

_TABLES = frozenset({"biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt"})
"""Causal models whose positions are a table: no sample can be longer. Others can go beyond it."""

Row = dict[str, Any]


class Problem(NamedTuple):
    """Something that is wrong with a recipe; it is pointed at the first of `places` that was written."""

    message: str
    hint: str
    places: tuple[Location, ...]
    code: str = RecipeError.code


class Glimpse(NamedTuple):
    """What was seen of a data file: its first rows as they are written, all columns, whether that is all.

    A line of JSON that is no `dict` can't be read by `datasets`; pyarrow 26 crashes if it is a first `null`.
    """

    rows: list[Any]
    columns: tuple[str, ...]
    is_whole: bool


class _Table(NamedTuple):
    name: str
    place: str
    first: Row


def require_sound(
    recipe: Recipe, document: Document, warn: Callable[[Finding], None], *, needs_data: bool = True
) -> None:
    """Refuse a recipe that certainly can't be trained on this machine.

    `warn` is told what can be trained, and was hardly meant; and, unless it `needs_data`, which local files
    are not here.

    Raises:
        RecipeError: it contradicts itself, or its data; with everything that is wrong.
        SetupError: it only needs a package that is not installed.
        AssetError: only files are not here.
    """
    errors, excused = [], {ADVICE} if needs_data else {ADVICE, AssetError.code}
    trackers = (
        Problem(*without_tracker(name), (("training", "report_to", index),), SetupError.code)
        for index, name in enumerate(recipe.training.report_to)
        if lacks_tracker(name)
    )
    for message, hint, places, code in (*_about_model(recipe), *trackers, *_about_data(recipe)):
        location = next((place for place in places if place in document.values), places[0])
        finding = document.finding_at(location, message, hint, path=dotted(places[0]))
        finding = replace(finding, code=code)
        if code in excused:
            warn(finding)
        else:
            errors.append(finding)
    for kind in (RecipeError, SetupError, AssetError):
        if any(finding.code == kind.code for finding in errors):
            raise document.error(errors, kind)


def _about_model(recipe: Recipe) -> Iterator[Problem]:
    config, name = recipe.model.config, recipe.model.model_name_or_path
    if config is not None:
        model_type, known = config["model_type"], model_types()
        if isinstance(model_type, str) and known and model_type not in known:
            yield Problem(*unknown_model_type(model_type, known), (("model", "config", "model_type"),))
    else:
        try:  # a local model's
            with (Path(name or "").expanduser() / "config.json").open("rb") as file:
                config = json.loads(file.read(2**20))
        except (OSError, ValueError, RecursionError):
            return
        is_filled = recipe.clm is not None and recipe.clm.packing  # else no sample may be that long
        if not isinstance(config, dict) or config.get("model_type") not in _TABLES or not is_filled:
            return
    section = section_of(recipe.task) or ""
    max_length = getattr(recipe, section).max_length
    key = "max_position_embeddings" if "max_position_embeddings" in config else "n_positions"
    context = config.get(key)
    if isinstance(context, int) and max_length > context:
        raise_it = "" if name else f", or raise `model.config.{key}`"
        yield Problem(
            f"samples of {max_length} tokens do not fit into the model's context of {context}",
            f"write at most {context}{raise_it}",
            ((section, "max_length"), ("model", "config", key), ("model", "model_name_or_path")),
        )


# -- data -----------------------------------------------------------------------------------------


def _about_data(recipe: Recipe) -> Iterator[Problem]:
    counts: list[int | None] = []
    for index, source in enumerate(recipe.data.datasets):
        place, code, counted = f"data.datasets.{index}", AssetError.code, None
        try:
            files = local_files(source) if is_local(source.path) else []
            # Of a folder `datasets` may read some files only, as their names and a README.md say.
            seen = look_at(files[0]) if files and not Path(source.path).expanduser().is_dir() else None
            code = RecipeError.code  # they are here, but they do not fit
            if seen is not None:
                is_all = seen.is_whole and len(files) == 1
                counted = _count(recipe, source, place, seen, is_all=is_all)
        except (AssetError, OSError) as failure:
            error = unreadable(failure) if isinstance(failure, OSError) else failure
            yield Problem(error.message, error.hint, (("data", "datasets", index, "path"),), code)
        counts.append(counted)
    if None not in counts and not recipe.data.streaming:
        yield from _about_amount(recipe, sum(filter(None, counts)))


def _count(recipe: Recipe, source: DatasetSection, place: str, seen: Glimpse, *, is_all: bool) -> int | None:
    """Count the rows, None if that is not certain; an `AssetError` if there are none or they do not fit."""
    for number, row in enumerate(seen.rows):
        if not isinstance(row, dict):
            raise forms.broken_row(repr(source.path), number, "is no JSON object: {...}")
    if is_all and not any(seen.rows):
        raise forms.empty_dataset(source.path, source.split)
    has_all = is_all and source.split == "train" and source.fraction is None
    if seen.rows:
        table = _Table(repr(source.path), place, dict.fromkeys(seen.columns) | seen.rows[0])
        forms.require_renamable(table, source.columns)

        def rename(row: Row) -> Row:
            return {source.columns.get(name, name): value for name, value in row.items()}

        rows = [rename(row) for row in seen.rows] if has_all else []
        _require_fit(recipe, table._replace(first=rename(table.first)), rows)
    return len(seen.rows) if has_all else None


def _require_fit(recipe: Recipe, table: _Table, rows: list[Row]) -> None:
    """Raise an `AssetError` if columns, or `rows` as far as they are known, are not what the task reads."""
    if recipe.sft is not None or recipe.dpo is not None:
        form = forms.sft_form(table, recipe.sft) if recipe.sft is not None else forms.dpo_form(table)
        for number, row in enumerate(rows):
            for column in form.columns:
                if problem := form.problem(column, row.get(column)):
                    raise forms.broken_row(table.name, number, problem)
        return
    section = section_of(recipe.task) or ""
    text = getattr(recipe, section).dataset_text_field
    forms.require_text(table, text, f"{section}.dataset_text_field")
    if recipe.seq_cls is None:
        return
    label, numbers = recipe.seq_cls.dataset_label_field, forms.numbers_of(recipe.seq_cls)
    forms.require_column(table, label, "seq_cls.dataset_label_field")
    for number, row in enumerate(rows):
        said = row.get(label)
        is_known = isinstance(said, int | float | str) and said in numbers
        # What pandas makes of a number in CSV depends on the whole column.
        may_be_known = isinstance(said, str) and re.fullmatch(r"[-+.0-9eE]+|true|false", said.lower())
        if row.get(text) and not is_known and not may_be_known:
            raise forms.unknown_label(table.name, number, said, recipe.seq_cls.labels)


def _about_amount(recipe: Recipe, num_rows: int) -> Iterator[Problem]:
    """Compare the number of rows with what is held out and with what a batch and a step take."""
    training, target = recipe.training, recipe.hivemind_config.opt.target_batch_size
    places: tuple[Location, ...] = (("data", "eval", "test_split_size"),)
    sft, clm = recipe.sft, recipe.clm
    try:
        if share := recipe.data.eval.test_split_size:
            num_rows -= forms.num_held_out(num_rows, share)
        if clm.packing if clm else sft is not None and sft.packing and sft.packing_strategy != "bfd":
            return  # a row may become several samples
        places = ("training", "per_device_train_batch_size"), ("training",)
        batch_size = training.per_device_train_batch_size * training.gradient_accumulation_steps
        forms.require_a_batch(num_rows, batch_size)
    except AssetError as error:
        yield Problem(error.message, error.hint, places)
        return
    if target > num_rows:
        yield Problem(
            f"A step takes {target} samples and the training data has {num_rows}: each step "
            f"repeats every sample {target / num_rows:.3g} times.",
            "lower hivemind_config.opt.target_batch_size, or bring more data",
            (("hivemind_config", "opt", "target_batch_size"), ("data", "datasets")),
            ADVICE,
        )


# -- files ----------------------------------------------------------------------------------------


def look_at(file: Path) -> Glimpse | None:
    """Look at a data file of a kind in `READERS`; an empty one has no rows.

    Returns:
        None if nothing is certain: it is Parquet, no UTF-8, or written in a way that is not understood here.

    Raises:
        OSError: it can't be read.
    """
    reader = READERS[file.suffix]
    with file.open("rb") as stream:
        content = stream.read(READ_BYTES) + stream.readline(READ_BYTES)
        is_whole = not stream.read(1)
    if not content:
        return Glimpse([], (), is_whole=True)
    if reader == "parquet" or not (is_whole or reader == "text" or content.endswith(b"\n")):
        return None
    try:
        text = content.decode("utf-8-sig", errors="ignore" if reader == "text" and not is_whole else "strict")
        if reader == "csv":
            return _csv(text, is_whole=is_whole)
        rows = _json_rows(text) if reader == "json" else [{"text": text}]
    except (ValueError, RecursionError):  # JSON may be broken, or have numbers that are too long for Python
        return None
    columns = tuple(dict.fromkeys(column for row in rows if isinstance(row, dict) for column in row))
    return Glimpse(rows, columns, is_whole=is_whole or reader == "text")  # a text is one row, however long


def _json_rows(text: str) -> list[Any]:
    """Read the values that follow each other in a text, or the entries of a single list."""
    rest, decoder, rows = text.strip(" \t\r\n"), json.JSONDecoder(), []
    if rest.startswith("["):
        entries = json.loads(rest, strict=False)  # in a list, `datasets` takes line breaks within texts
        rows = [{"text": entry} if isinstance(entry, str) else entry for entry in entries]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("not a list of rows")
        return rows
    at, blank = 0, re.compile(r"[ \t\r\n]*")
    while at < len(rest):
        row, at = decoder.raw_decode(rest, at)
        rows.append(row)
        if gap := blank.match(rest, at):
            at = gap.end()
    return rows


def _csv(text: str, *, is_whole: bool) -> Glimpse | None:
    rows: list[Row] = []
    columns: tuple[str, ...] = ()
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        columns = tuple(reader.fieldnames or next((cells for cells in reader.reader if cells), ()))
        reader.fieldnames = columns
        for row in reader:
            if None in row:  # more fields than columns
                return None
            rows.append({name: cell or None for name, cell in row.items()})
    except csv.Error:  # pandas takes some of what is no CSV
        is_whole = False
    return Glimpse(rows, columns, is_whole=is_whole)
