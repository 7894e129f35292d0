"""Copies of local data, found by what they hold: their names do not matter.

Nothing is looked through but a folder that the user names; suffixes and sizes decide which of its files are
read. A swarm whose recipe asks for a file learns from a peer that joins that the peer has a copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

from pydantic import ValidationError

from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.content import content_of, is_data
from trahiv_cli.recipe.document import is_text
from trahiv_cli.recipe.paths import LOCAL, READERS, is_local
from trahiv_cli.recipe.schema import ContentSection, DatasetSection, Recipe

MAX_FILES = 200_000
"""The largest number of files in a folder that is searched. It takes seconds; a whole disk takes minutes."""

_Summary = tuple[int, int, frozenset[str]]
"""The number of files, their size in bytes, and their readers."""


def put_copies(datasets: list[Any], folder: Path) -> None:
    """Put the paths of copies in the place of paths where the data of a dataset is not.

    A copy is a data file in `folder` or below. Several files are one dataset if a folder has them and no
    other data files, which is how a folder is read that a recipe names.

    Args:
        datasets: entries of `data.datasets` as plain data, maybe a stranger's. Those that do not say what
            they hold stay as they are, and so do those of which no copy is found.
        folder: looked through, without hidden folders and without following links to folders.

    Raises:
        AssetError: there are more than `MAX_FILES` files in it; none of them was read.
    """
    missing = [(dataset, content) for dataset in datasets if (content := _missing(dataset)) is not None]
    summaries = _summaries(folder.absolute()) if missing else {}
    for dataset, content in missing:
        wanted = (content.num_files, content.num_bytes, frozenset(content.readers))
        fitting = (place for place, summary in summaries.items() if summary == wanted)
        if place := next((str(place) for place in fitting if _holds(str(place), content)), None):
            dataset |= {"path": place, "data_files": None}


def with_copies(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with the paths of copies, see `put_copies`.

    Raises:
        AssetError: see `put_copies`.
    """
    copied = recipe.to_data()["data"]["datasets"]
    put_copies(copied, folder)
    datasets = [
        dataset.model_copy(update={key: plain[key] for key in ("path", "data_files")})
        for dataset, plain in zip(recipe.data.datasets, copied, strict=True)
    ]
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"datasets": datasets})})


def _missing(dataset: Any) -> ContentSection | None:
    """Tell what a local dataset holds if that is known and not at its path; `dataset` may be anything."""
    try:
        content, path = ContentSection.model_validate(dataset["content"]), dataset["path"]
    except (ValidationError, LookupError, TypeError):
        return None
    if not isinstance(path, str):
        return None
    if path.startswith(LOCAL):
        return content
    return content if is_local(path) and not _holds(path, content, dataset.get("data_files")) else None


def _holds(path: str, content: ContentSection, data_files: Any = None) -> bool:
    try:
        return content_of(DatasetSection(path=path, data_files=data_files)) == content
    except (AssetError, ValidationError):  # such as a file that can't be read, or a stranger's `data_files`
        return False


def _summaries(folder: Path) -> dict[Path, _Summary]:
    """Sum up each data file, and each folder with all that is below it."""
    summaries: dict[Path, _Summary] = {}
    for file, size in _data_files(folder):
        for place in (file, *file.parents):
            num_files, num_bytes, readers = summaries.get(place, (0, 0, frozenset()))
            summaries[place] = num_files + 1, num_bytes + size, readers | {READERS[file.suffix]}
            if place == folder:
                break
    return summaries


def _data_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the data files in a folder and below, with their size."""
    num_files = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        num_files += len(names)
        if num_files > MAX_FILES:
            raise AssetError(
                f"{folder} has more than {MAX_FILES:,} files in it and below; none was read.",
                "Name a folder closer to the data.",
            )
        for name in sorted(names):
            file = Path(parent, name)
            if not is_data(file.relative_to(folder)) or not is_text(str(file)):
                continue
            with suppress(OSError):  # a link to nothing, or to itself
                found = file.stat()
                if S_ISREG(found.st_mode):
                    yield file, found.st_size
