"""Mistakes in a complete recipe that are certain without loading a heavy library.

The recipe is compared with this machine: the files of each dataset, the model's context, the model types that
are installed. Mistakes that only tokenizers, models and packages reveal are found where these are loaded,
with the same messages (`forms.py`, `rows.py`). Samples longer than the context of a new model are a mistake
even where they might train.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trahiv_cli.errors import AssetError, Finding, RecipeError
from trahiv_cli.recipe import forms
from trahiv_cli.recipe.content import local_files, unreadable
from trahiv_cli.recipe.document import Document, Location, dotted
from trahiv_cli.recipe.files import READ_BYTES, read_rows
from trahiv_cli.recipe.paths import reader_of
from trahiv_cli.recipe.rows import (
    LABEL_HINT,
    MEND_A_ROW,
    Form,
    Tally,
    broken_row,
    label_error,
    listed,
    picture_error,
)
from trahiv_cli.recipe.schema import DatasetSection, ModelSection, Recipe
from trahiv_cli.recipe.task_sections import TASK_SECTIONS, TASKS_OF_TRL
from trahiv_cli.recipe.upstream import BORDERLESS, mistakes_in_config, model_types, unknown_model_type

DOUBT = "data"
"""The code of a finding that is a warning: the rows may be intended."""


def require_sound(recipe: Recipe, document: Document) -> list[Finding]:
    """Refuse a recipe that certainly can't be trained on this machine; return warnings about its data.

    Raises:
        RecipeError: the recipe contradicts itself or its data; the error has all findings.
        AssetError: the only mistakes are files that are not here or have an unknown suffix.
    """
    found = [*_about_model(recipe, document), *_about_data(recipe, document)]
    errors = [finding for finding in found if finding.code != DOUBT]
    for kind in (RecipeError, AssetError):
        if any(finding.code == kind.code for finding in errors):
            raise document.error(errors, kind)
    return found


def _about_model(recipe: Recipe, document: Document) -> Iterator[Finding]:
    new = recipe.model.config
    config = _local_config(recipe.model) if new is None else new
    source: Location = ("model", "model_name_or_path" if new is None else "config")
    model_type = config.get("model_type")
    known = model_types()
    if isinstance(model_type, str) and known and model_type not in known:
        location: Location = ("model", "config", "model_type")
        yield document.finding_at(location, *unknown_model_type(model_type, known))
    for field, *mistake in mistakes_in_config(config):
        yield document.finding_at((*source, field), *mistake)
    if model_type in BORDERLESS and recipe.sft is not None and recipe.sft.sees_borders:
        said = f"packed samples would see each other in a {model_type}, which has no borders between them"
        yield document.finding_at(("sft", "packing"), said, "packing: false, or `packing_strategy: wrapped`")
    # These causal models have a table of positions, which no sample can exceed. Others accept longer samples.
    has_table = model_type in ("biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt")
    if new is None and not (recipe.clm is not None and recipe.clm.packing and has_table):
        return  # in all other cases a sample longer than the context is a mistake
    key = "max_position_embeddings" if "max_position_embeddings" in config else "n_positions"
    max_length = recipe.section.max_length
    context = config.get(key)
    if isinstance(context, int) and max_length > context:
        path: Location = (TASK_SECTIONS[recipe.task], "max_length")
        is_said = path in document.values or document.is_replaced(path)
        yield document.finding_at(
            path if is_said else (*source, key),
            f"samples of {max_length} tokens do not fit into the model's context of {context}",
            f"write at most {context}" + ("" if new is None else f", or raise `model.config.{key}`"),
            path=dotted(path),
        )


def _local_config(model: ModelSection) -> dict[str, Any]:
    """Return the config of a model in a local folder; empty for other models, or if it can't be read."""
    try:
        with (Path(model.model_name_or_path or "").expanduser() / "config.json").open("rb") as file:
            config = json.loads(file.read(2**20))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _about_data(recipe: Recipe, document: Document) -> Iterator[Finding]:
    for index, source in enumerate(recipe.data.datasets):
        location: Location = ("data", "datasets", index, "path")
        code = AssetError.code
        try:
            files = local_files(source)
            code = RecipeError.code  # the files are here, but they do not fit
            if files and not any(file.stat().st_size for file in files):
                raise forms.empty_dataset(source)
            # In a folder, `datasets` may read only some files, depending on their names and a README.md.
            whole = [] if Path(source.path).expanduser().is_dir() else files
            place = f"data.datasets.{index}"
            num_bytes = READ_BYTES
            for file in whole:
                for found, message, hint in _about_file(recipe, source, place, file, num_bytes):
                    yield replace(document.finding_at(location, message, hint), code=found)
                num_bytes = max(0, num_bytes - file.stat().st_size)
        except (AssetError, OSError) as failure:
            error = unreadable(failure) if isinstance(failure, OSError) else failure
            yield replace(document.finding_at(location, error.message, error.hint), code=code)


def _about_file(
    recipe: Recipe, source: DatasetSection, place: str, file: Path, num_bytes: int
) -> Iterator[tuple[str, str, str]]:
    """Check the first rows of a file; yield a code, a message and a hint for each error or warning.

    Raises:
        AssetError: the task can't use the columns, or a row can't be read at all.
    """
    if not (rows := read_rows(file, num_bytes)):
        return
    name = repr(str(file))
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):  # `datasets` can't read it; pyarrow 26 crashes if the first is `null`
            raise broken_row(name, number, "is no JSON object: {...}")
    first = dict.fromkeys(column for row in rows for column in row) | rows[0]
    forms.require_renamable(forms.Table(name, place, first), source.columns)
    first = source.renamed(first)
    rows = list(map(source.renamed, rows))
    try:
        form = _form_of(recipe, forms.Table(name, place, first))
    except AssetError as error:
        inner = [column for column, value in first.items() if isinstance(value, list | dict)]
        if len(rows) == 1 and inner:
            raise AssetError(
                f"{name} is one object, and not one for each row: its rows are in {listed(inner)}.",
                "Write an object for each row, one a line; `jq -c '.data[]' FILE > NEW_FILE` takes rows out "
                "of `data`.",
            ) from error
        raise
    tally = Tally(name)
    # With a slice or a fraction of the rows, it is uncertain which ones are used. A text file is one row.
    is_certain = source.split == "train" and source.fraction is None and reader_of(file) != "text"
    for number, row in enumerate(rows if is_certain else [], 1):
        problem, warning = _about_row(recipe, form, row)
        if recipe.sft is not None and not problem:
            problem = picture_error(row, file.parent)
        tally.add(number, problem, warning)
    hint = MEND_A_ROW if recipe.seq_cls is None else LABEL_HINT
    yield from ((RecipeError.code, said, hint) for said in tally.sentences(tally.errors))
    for said in tally.sentences(tally.warnings):
        yield DOUBT, said, "Nothing to do where that is meant."


def _form_of(recipe: Recipe, table: forms.Table) -> Form:
    """Return the form of a table's rows; for `clm`, `mlm` and `seq-cls` the form of a text."""
    if (form := forms.task_form(table, recipe)) is not None:
        return form
    section = TASK_SECTIONS[recipe.task]
    text = getattr(recipe, section).dataset_text_field
    forms.require_text(table, text, f"{section}.dataset_text_field")
    if recipe.seq_cls is not None:
        label = recipe.seq_cls.dataset_label_field
        forms.require_column(table, label, "seq_cls.dataset_label_field")
    return Form((text,), None)


def _about_row(recipe: Recipe, form: Form, row: dict[str, Any]) -> tuple[str, str]:
    """Return the error and the warning about a row, as words to follow its number; empty if there is none."""
    if recipe.task in TASKS_OF_TRL:
        template = recipe.data.chat_template
        error = form.error(row, template)
        return error, "" if error else form.doubt(row, template) or form.warning(row)
    if not (text := row.get(form.columns[0])):
        return "", f"has no {form.columns[0]!r} and is left out"
    if not isinstance(text, str):
        return form.error(row), ""
    labels = recipe.seq_cls
    return "" if labels is None else label_error(row.get(labels.dataset_label_field), labels.labels), ""
