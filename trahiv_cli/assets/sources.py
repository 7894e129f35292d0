"""Where the documents come from: the hub, a local folder, files, or the standard library's own source.

Tokens, blocks and splits are `data.py`'s business. Everything that goes wrong here is an `AssetError`
raised before anything is trained; what `datasets` had already put into its cache stays there.
"""

from __future__ import annotations

import difflib
import glob
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetNotFoundError, DatasetsError

from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import DatasetSection

Documents: TypeAlias = Dataset | IterableDataset

BUILTIN_STDLIB = "builtin/python-stdlib"

STDLIB_BYTES = 1_250_000
"""Enough for 9,500 blocks of 128 bytes. The byte tokenizer is Python: it takes 2 s on one core for these."""

STDLIB_FILE_BYTES = 50_000
"""Larger files are left out: with more and smaller documents, a held-out one is neither huge nor alone."""

BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Suffix of a file -> the builder of `datasets` that reads it."""

_DOCUMENT_TEXT = {"sample_by": "document"}
"""A text file is one document. By default `datasets` makes every line one and drops the newlines, and the
model would learn a language without them."""

_NO_SOURCE_OF_OURS = ("test", "tests", "idle_test", "site-packages", "dist-packages")


def load_documents(source: DatasetSection, text_field: str, *, streaming: bool) -> Documents:
    """Open one dataset and keep its text column.

    Args:
        source: one entry of `data.datasets`.
        text_field: name of the column that holds the text, `clm.dataset_text_field`.
        streaming: read while iterating, in bounded memory and disk, instead of now.

    Returns:
        Documents with the one column `text_field` of strings; a value may be null or empty.

    Raises:
        AssetError: there is no such file, folder, dataset, split or column, it cannot be read, it is
            empty, or the column is not text.
    """
    with _reading(source):
        if source.path == BUILTIN_STDLIB:
            documents = _stdlib(streaming)
        else:
            documents = load_dataset(**_arguments(source), split=source.split, streaming=streaming)
        first = next(iter(documents), None)
    _require_text(source, text_field, first)
    return documents.select_columns([text_field])


def hub_names(sources: list[DatasetSection]) -> list[str]:
    """Name the datasets that others can find: hub ids, without this machine's own paths."""
    return [source.path for source in sources if not _is_local(source.path)]


def _is_local(path: str) -> bool:
    """Whether `path` can only mean a file or folder here, or names one that exists."""
    looks_local = path.startswith(("/", "./", "../", "~", "builtin/")) or path.count("/") > 1
    return (
        looks_local
        or Path(path).suffix in BUILDERS
        or glob.has_magic(path)
        or Path(path).expanduser().exists()
    )


def _arguments(source: DatasetSection) -> dict[str, Any]:
    """Say to `load_dataset` what `source` means."""
    path = Path(source.path).expanduser()
    own = {"name": source.name, "data_files": source.data_files}
    if path.is_dir():
        return _folder(path, own)
    if not _is_local(source.path):
        return {"path": source.path, "revision": source.revision, **own}
    return _files(source.path, [path] if path.is_file() else sorted(map(Path, _matches(path))))


def _matches(pattern: Path) -> list[str]:
    return [name for name in glob.glob(str(pattern), recursive=True) if Path(name).is_file()]


def _files(asked: str, files: list[Path]) -> dict[str, Any]:
    if not files and glob.has_magic(asked):
        raise AssetError(f"No file matches {asked!r}.", f"Relative patterns start in {Path.cwd()}.")
    if not files:
        raise AssetError(f"There is no file or folder {asked!r}.", _neighbours(Path(asked).expanduser()))
    builders = {BUILDERS.get(file.suffix) for file in files}
    if len(builders) > 1:
        suffixes = ", ".join(sorted({file.suffix or "no suffix" for file in files}))
        raise AssetError(
            f"{asked!r} matches files of several kinds ({suffixes}).",
            "Give each kind its own entry in `data.datasets`.",
        )
    builder = builders.pop()
    if builder is None:
        raise AssetError(
            f"{files[0].name!r} has a suffix that is not known.", f"Known are {' '.join(BUILDERS)}."
        )
    own = _DOCUMENT_TEXT if builder == "text" else {}
    return {"path": builder, "data_files": [str(file) for file in files], **own}


def _folder(folder: Path, own: dict[str, Any]) -> dict[str, Any]:
    suffixes = {file.suffix for file in folder.rglob("*") if file.suffix in BUILDERS and file.is_file()}
    if not suffixes:
        raise AssetError(
            f"The folder {str(folder)!r} holds no data files.", f"Looked for {' '.join(BUILDERS)}."
        )
    if suffixes == {".txt"}:
        return {"path": "text", "data_dir": str(folder), **own, **_DOCUMENT_TEXT}
    return {"path": str(folder), **own}


def _neighbours(missing: Path) -> str:
    """Hint at a file of a similar name, or at the first folder of the path that does not exist."""
    if not missing.parent.is_dir():
        return f"The folder {str(missing.parent)!r} does not exist either."
    names = [entry.name for entry in missing.parent.iterdir()]
    close = difflib.get_close_matches(missing.name, names, n=1)
    return f"Did you mean {str(missing.with_name(close[0]))!r}?" if close else "Check the path."


def _stdlib(streaming: bool) -> Documents:
    """Read the first `STDLIB_BYTES` of the standard library, whole files in the order of their paths.

    Stays in memory. Peers on another minor version of Python read a slightly different text.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[dict[str, str]] = []
    size_bytes = 0
    for file in sorted(root.rglob("*.py")):
        if any(part in _NO_SOURCE_OF_OURS for part in file.relative_to(root).parts):
            continue
        if file.stat().st_size > STDLIB_FILE_BYTES:
            continue
        size_bytes += file.stat().st_size
        if size_bytes > STDLIB_BYTES:
            break
        texts.append({"text": file.read_text(encoding="utf-8", errors="ignore")})
    if not texts:
        raise AssetError(
            f"This Python ships no source files in {str(root)!r}.", "Name another dataset in `data.datasets`."
        )
    documents = Dataset.from_list(texts)
    return documents.to_iterable_dataset() if streaming else documents


def _require_text(source: DatasetSection, text_field: str, first: dict[str, Any] | None) -> None:
    if first is None:
        raise _empty(source)
    if text_field not in first:
        close = difflib.get_close_matches(text_field, first, n=1)
        raise AssetError(
            f"The dataset {source.path!r} has no column {text_field!r}; it has {', '.join(first)}.",
            f"Set `clm.dataset_text_field`{f' to {close[0]!r}' if close else ''}.",
        )
    if not isinstance(first[text_field], str | None):
        kind = type(first[text_field]).__name__
        raise AssetError(
            f"The column {text_field!r} of {source.path!r} holds {kind}, not text.",
            f"Set `clm.dataset_text_field` to one of {', '.join(first)}.",
        )


def _empty(source: DatasetSection) -> AssetError:
    return AssetError(
        f"The dataset {source.path!r} (split {source.split!r}) is empty.",
        "Check its files, or remove the entry from `data.datasets`.",
    )


@contextmanager
def _reading(source: DatasetSection) -> Iterator[None]:
    """Turn what `datasets` and the hub raise while `source` is opened into an `AssetError`."""
    try:
        yield
    except StopIteration as failure:  # the JSON reader's way to say that a file has no first line
        raise _empty(source) from failure
    except DatasetNotFoundError as failure:
        raise AssetError(
            f"There is no dataset {source.path!r} on the hub, or it is private or gated: {_reason(failure)}",
            "Check the name; for a private or gated one run `hf auth login`.",
        ) from failure
    except ConnectionError as failure:
        raise AssetError(
            f"The hub could not be reached for the dataset {source.path!r}: {_reason(failure)}",
            "Check the connection, or give a local file or folder in `data.datasets`.",
        ) from failure
    except (DatasetsError, OSError, ValueError, RuntimeError) as failure:
        raise AssetError(
            f"The dataset {source.path!r} (split {source.split!r}) could not be read: {_reason(failure)}",
            "Check its files, and `name`, `split` and `data_files` of the entry in `data.datasets`.",
        ) from failure


def _reason(failure: BaseException) -> str:
    """Say what happened in one line; `datasets` hides the reason of a build failure in its cause."""
    root = failure.__cause__ or failure
    return (str(root).strip().splitlines() or [type(root).__name__])[0]
