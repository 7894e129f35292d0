"""What is wrong with a complete recipe, as far as it is certain without loading a heavy library.

The schema says what a recipe's words mean; here they are compared with what is on this machine: the first and
last rows of local files, the model's context, the installed packages. What only tokenizers, models and whole
files can tell is found where they are loaded, with the same words (`forms.py`). A recipe that contradicts
itself is wrong, too, even where it might train: samples longer than the context of its own new model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trahiv_cli.errors import AssetError, Finding, RecipeError, SetupError, TrahivError
from trahiv_cli.recipe import forms
from trahiv_cli.recipe.content import local_files, unreadable
from trahiv_cli.recipe.document import Document, Location, Mark, dotted, in_order, summary
from trahiv_cli.recipe.explain import finding_at
from trahiv_cli.recipe.glimpse import Glimpse, Row, look_at
from trahiv_cli.recipe.overrides import Override
from trahiv_cli.recipe.paths import is_local
from trahiv_cli.recipe.schema import DatasetSection, Recipe, section_of
from trahiv_cli.recipe.upstream import lacks_tracker, model_types, unknown_model_type, without_tracker

MOST_FILES = 20
"""The number of a dataset's files that are looked at."""

MOST_CONFIG_BYTES = 2**20
"""The number of bytes that are read of a model's config.json."""

ADVICE = "advice"
"""The code of a finding about what can be trained, but was hardly meant."""

_KINDS: tuple[type[TrahivError], ...] = (RecipeError, SetupError, AssetError)
"""What a finding's code makes an error of; of several, the first."""

_TABLES = frozenset(
    "albert bert biogpt camembert distilbert electra gpt2 gpt_bigcode gpt_neo openai-gpt opt roberta "
    "xlm-roberta".split()
)
"""Model types whose positions are a table: no sample can be longer. Others can go beyond it."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a recipe."""

    message: str
    hint: str
    places: tuple[Location, ...]
    """Where to point: at the first that was written, else at the first."""

    code: str = RecipeError.code


@dataclass(frozen=True)
class _Table:
    """The first row of a dataset; see `forms.Table`."""

    name: str
    place: str
    first: Row


def require_sound(
    recipe: Recipe,
    document: Document,
    overrides: Sequence[Override],
    warn: Callable[[Finding], None],
    *,
    needs_data: bool = True,
) -> None:
    """Refuse a recipe that certainly can't be trained on this machine.

    Args:
        recipe: complete.
        document: what it was read from, for places.
        overrides: what was put over that, for places.
        warn: told what can be trained, and was hardly meant.
        needs_data: whether local files that are not here are an error; else `warn` is told.

    Raises:
        RecipeError: it contradicts itself, or its data; with everything that is wrong.
        SetupError: it only needs a package that is not installed.
        AssetError: only files are not here.
    """
    findings = examine(recipe, document, overrides)
    excused = {ADVICE} if needs_data else {ADVICE, AssetError.code}
    for finding in findings:
        if finding.code in excused:
            warn(finding)
    errors = [finding for finding in findings if finding.code not in excused]
    codes = {finding.code for finding in errors}
    for kind in _KINDS:
        if kind.code in codes:
            raise kind(summary(document, errors), findings=in_order(errors))


def examine(recipe: Recipe, document: Document, overrides: Sequence[Override] = ()) -> tuple[Finding, ...]:
    """List what is wrong, in the order of the file; reads no file as a whole unless it is small."""
    found = []
    for problem in (*_about_model(recipe), *_about_trackers(recipe), *_about_data(recipe)):
        location = next((place for place in problem.places if place in document.values), problem.places[0])
        finding = finding_at(
            location,
            dotted(problem.places[0]),
            problem.message,
            problem.hint,
            document,
            overrides,
            _mark(location, document),
        )
        found.append(replace(finding, code=problem.code))
    return in_order(found)


def _mark(location: Location, document: Document) -> Mark | None:
    """Point at a value, or at the key of the section that it would be in."""
    if location in document.values:
        return document.values[location]
    while location and location not in document.values:
        location = location[:-1]
    return document.keys.get(location) or document.values.get(location)


# -- model, trackers ------------------------------------------------------------------------------


def _about_model(recipe: Recipe) -> Iterator[Problem]:
    config, name = recipe.model.config, recipe.model.model_name_or_path
    if config is not None:
        model_type = config["model_type"]
        if isinstance(model_type, str) and model_types() and model_type not in model_types():
            message, hint = unknown_model_type(model_type, model_types())
            yield Problem(message, hint, (("model", "config", "model_type"),))
    else:
        config = _config_in(Path(name or "").expanduser())
        if config.get("model_type") not in _TABLES or not _is_filled(recipe):
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


def _is_filled(recipe: Recipe) -> bool:
    """Whether every sample is as long as `max_length`; else none may be longer than the context."""
    return recipe.clm is not None and recipe.clm.packing


def _config_in(folder: Path) -> dict[str, Any]:
    """Read a local model's config; nothing if there is none, or the model is on the hub."""
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(MOST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _about_trackers(recipe: Recipe) -> Iterator[Problem]:
    for index, name in enumerate(recipe.training.report_to):
        if lacks_tracker(name):
            message, hint = without_tracker(name)
            yield Problem(message, hint, (("training", "report_to", index),), SetupError.code)


# -- data -----------------------------------------------------------------------------------------


def _about_data(recipe: Recipe) -> Iterator[Problem]:
    num_rows: int | None = 0
    for index, source in enumerate(recipe.data.datasets):
        place: Location = ("data", "datasets", index)
        places, counted = ((*place, "path"),), None
        if is_local(source.path):
            try:
                try:
                    files = local_files(source)
                except AssetError as error:
                    yield Problem(error.message, error.hint, places, error.code)
                else:
                    counted = _look_into(recipe, source, dotted(place), files)
            except AssetError as error:
                yield Problem(error.message, error.hint, places)
            except OSError as failure:
                said = unreadable(failure)
                yield Problem(said.message, said.hint, places, said.code)
        num_rows = None if num_rows is None or counted is None else num_rows + counted
    if num_rows is not None and not recipe.data.streaming:
        yield from _about_amount(recipe, num_rows)


def _look_into(recipe: Recipe, source: DatasetSection, place: str, files: list[Path]) -> int | None:
    """Look at the files of a dataset, and count its rows.

    Returns:
        How many rows there are; None if it is not certain.

    Raises:
        AssetError: they can't be read, or do not fit the task.
        OSError: one can't be opened.
    """
    if Path(source.path).expanduser().is_dir():
        return None  # `datasets` may read some files only, as their names and a README.md say
    seen = [look_at(file) for file in files[: 1 if recipe.data.streaming else MOST_FILES]]
    if damage := next((each.damage for each in seen if each.damage is not None), None):
        raise AssetError(f"{damage}", damage.hint)
    is_all = len(seen) == len(files) and all(each.is_whole for each in seen)
    if is_all and not any(any(each.rows) for each in seen):
        raise forms.empty_dataset(source.path, source.split)
    has_all = is_all and source.split == "train" and source.fraction is None
    first = next((each for each in seen if each.rows), None)
    if first is not None:
        _require_fit(recipe, source, place, first, has_its_rows=has_all and len(files) == 1)
    return sum(len(each.rows) for each in seen) if has_all else None


def _require_fit(
    recipe: Recipe, source: DatasetSection, place: str, seen: Glimpse, *, has_its_rows: bool
) -> None:
    """Make sure that rows have the columns that the task reads, and in them what it reads.

    Args:
        recipe: with the task.
        source: the dataset.
        place: its entry in the recipe.
        seen: the first rows of its first file.
        has_its_rows: whether these are all its rows.

    Raises:
        AssetError: it is certain that they do not fit.
    """
    names = {*source.columns, *(_read_columns(recipe) - set(source.columns.values()))}
    if any(name not in seen.columns and seen.may_have(name) for name in names):
        return

    def rename(row: Row) -> Row:
        return {source.columns.get(name, name): value for name, value in row.items()}

    table = _Table(repr(source.path), place, seen.first)
    forms.require_renamable(table, source.columns)
    table = replace(table, first=rename(seen.first))
    rows = [rename(row) for row in seen.rows] if has_its_rows else []
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
        readings = _readings(said) if seen.file.suffix == ".csv" else [said]
        if row.get(text) and not any(isinstance(it, int | float | str) and it in numbers for it in readings):
            raise forms.unknown_label(table.name, number, said, recipe.seq_cls.labels)


def _read_columns(recipe: Recipe) -> set[str]:
    """Name the columns that the task may read."""
    if recipe.sft is not None:
        return {"prompt", "completion", "messages", "conversations", recipe.sft.dataset_text_field}
    if recipe.dpo is not None:
        return {"prompt", "chosen", "rejected"}
    section = getattr(recipe, section_of(recipe.task) or "")
    return {section.dataset_text_field, getattr(section, "dataset_label_field", section.dataset_text_field)}


def _readings(cell: Any) -> list[Any]:
    """List what pandas may read in a cell of CSV: what it does depends on the whole column."""
    readings = [cell]
    if isinstance(cell, str):
        try:
            readings.append(float(cell))
        except ValueError:
            readings += [cell.lower() == "true"] * (cell.lower() in ("true", "false"))
    return readings


def _about_amount(recipe: Recipe, num_rows: int) -> Iterator[Problem]:
    """Compare the number of rows with what is held out and with what a batch and a step take."""
    share, training = recipe.data.eval.test_split_size, recipe.training
    if share:
        try:
            num_rows -= forms.num_held_out(num_rows, share)
        except AssetError as error:
            yield Problem(error.message, error.hint, (("data", "eval", "test_split_size"),))
            return
    if _may_be_divided(recipe):
        return
    target = recipe.hivemind_config.opt.target_batch_size
    try:
        forms.require_a_batch(
            num_rows, training.per_device_train_batch_size * training.gradient_accumulation_steps
        )
    except AssetError as error:
        places = (("training", "per_device_train_batch_size"), ("training",))
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


def _may_be_divided(recipe: Recipe) -> bool:
    """Whether a row may become several samples."""
    if recipe.sft is not None:
        return recipe.sft.packing and recipe.sft.packing_strategy != "bfd"
    return recipe.clm is not None and recipe.clm.packing
