"""Read rows from the hub, a local folder, files, or the text that comes with trahiv.

Every failure here is an `AssetError`, raised before anything is trained, or, in a stream, when the broken
row is reached. Data that `datasets` has already put into its cache stays there.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from datasets import (
    ClassLabel,
    Dataset,
    Features,
    IterableDataset,
    LargeList,
    List,
    Value,
    load_dataset,
    load_dataset_builder,
)
from datasets.config import DATASETDICT_INFOS_FILENAME, HF_DATASETS_CACHE, REPOYAML_FILENAME
from datasets.exceptions import DatasetNotFoundError, DatasetsError
from datasets.utils.file_utils import CONNECTION_ERRORS_TO_RETRY

from trahiv_cli.errors import AssetError
from trahiv_cli.recipe import forms
from trahiv_cli.recipe.builtin import BUILT_IN_DATA
from trahiv_cli.recipe.content import local_files
from trahiv_cli.recipe.files import csv_columns, read_rows, require_readable
from trahiv_cli.recipe.paths import BUILTIN, Reader, is_local, reader_of
from trahiv_cli.recipe.rows import listed
from trahiv_cli.recipe.schema import DatasetSection

logger = logging.getLogger(__name__)

logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # it raises the errors that it logs

Documents: TypeAlias = Dataset | IterableDataset

FAILURES = (DatasetsError, OSError, ValueError, TypeError, RuntimeError)
"""Errors of `datasets` about files that can't be read."""


@dataclass(frozen=True)
class Opened(forms.Table):
    """A dataset that was opened with `datasets`."""

    source: DatasetSection
    rows: Documents
    features: dict[str, Any]  # column -> its feature, if known: a stream may have none
    parallel: dict[str, int | None]  # the option of `map` for the number of processes; a stream has none


def load_rows(source: DatasetSection, place: str, *, streaming: bool, num_proc: int | None = None) -> Opened:
    """Open the dataset of one entry of the recipe (`place`), and rename its columns as the entry says.

    A stream is read while iterating, in bounded memory and disk, and raises `AssetError` at a broken row.

    Raises:
        AssetError: the dataset is missing, can't be read or is empty, or a column can't be renamed.
    """
    files = local_files(source)
    if files and not any(file.stat().st_size for file in files):
        raise forms.empty_dataset(source)
    with reading(source):
        if source.path in BUILT_IN_DATA:
            rows = Dataset.from_list(BUILT_IN_DATA[source.path]())
            rows = rows.to_iterable_dataset(num_shards=16) if streaming else rows
        else:
            rows = load_dataset(**arguments(source, files), split=source.split, streaming=streaming)
        first = next(iter(rows), None)
    if first is None:
        raise forms.empty_dataset(source)
    features = dict(rows.features or {})
    if isinstance(rows, IterableDataset):  # a broken row is an `AssetError` whenever it is reached
        shards = list(range(rows.num_shards))  # `datasets` divides lists among workers
        told = {"rows": rows, "source": source, "shards": shards}
        known = rows.features if is_plain(rows.features) else None
        rows = IterableDataset.from_generator(guarded_rows, features=known, gen_kwargs=told)
    parallel = {} if streaming else {"num_proc": num_proc}
    opened = Opened(repr(source.path), place, first, source, rows, features, parallel)
    forms.require_renamable(opened, source.columns)
    if not source.columns:
        return opened
    return replace(
        opened,
        first=source.renamed(first),
        rows=rows.rename_columns(source.columns),
        features=source.renamed(features),
    )


def require_text(opened: Opened, column: str, setting: str) -> None:
    """Refuse a column, named by the recipe's field `setting`, that is missing or holds no text."""
    feature = opened.features.get(column)
    is_text = feature is None or getattr(feature, "dtype", "") in ("string", "large_string", "null")
    forms.require_text(opened, column, setting, is_mixed=not is_text)


def arguments(source: DatasetSection, files: list[Path]) -> dict[str, Any]:
    """Return the arguments of `load_dataset` for `source`, whose local files are `files`.

    Raises:
        AssetError: there is no such dataset or configuration, or its files are of several kinds.
    """
    if source.path.startswith(BUILTIN):
        there = f"There are {listed(BUILT_IN_DATA)}."
        raise AssetError(f"There is no built-in dataset {source.path!r}.", there)
    own = {"name": source.name, "data_files": source.data_files}
    if not is_local(source.path):
        return {"path": source.path, "revision": source.revision, **own}
    path = Path(source.path).expanduser()
    splits = splits_of(source, files)
    if passed_over := set(files).difference(*splits.values()):
        told = "%d files of %r are not read, because other file names mark a split: %s"
        names = listed(sorted(file.name for file in passed_over))
        logger.warning(told, len(passed_over), source.path, names)
    splits = read_splits(splits, source.split)
    files = list(chain.from_iterable(splits.values()))
    for file in files:
        require_readable(file)
    reader, *more = {reader_of(file) for file in files}
    if describes_itself(path):
        # It may define configurations, of which one is read; each may have columns of its own.
        return {"path": plain(path), **own, **({} if more else reader_options(reader, []))}
    if source.name not in (None, "default"):
        said = f"`name` chooses a configuration, and no README.md in {source.path!r} has any."
        raise AssetError(said, f"Remove `name: {source.name}` from the entry in `data.datasets`.")
    if more:
        suffixes = ", ".join(sorted({file.suffix for file in files}))
        raise AssetError(
            f"{source.path!r} has files of several kinds ({suffixes}).",
            "Give each kind its own entry in `data.datasets`.",
        )
    return {
        "path": reader,
        "data_files": {split: [plain(file) for file in of_split] for split, of_split in splits.items()},
        **reader_options(reader, files),
    }


def describes_itself(folder: Path) -> bool:
    """Tell whether a folder has metadata that `datasets` reads: configurations, or columns."""
    readme = folder / "README.md"
    card = readme.read_text(errors="replace") if readme.is_file() else ""
    others = (folder / name for name in (REPOYAML_FILENAME, DATASETDICT_INFOS_FILENAME))
    return bool(re.search("^(configs|dataset_info):", card, re.MULTILINE)) or any(map(Path.is_file, others))


def splits_of(source: DatasetSection, files: list[Path]) -> dict[str, list[Path]]:
    """Sort the files of a local dataset into splits; in a folder, by their names as `datasets` does."""
    folder = Path(source.path).expanduser()
    if not folder.is_dir() or source.data_files is not None or describes_itself(folder):
        return {"train": files}
    with tempfile.TemporaryDirectory() as name:  # empty files with the same names, for `datasets` to sort
        root = Path(name).resolve()
        twins = {}
        for file in files:
            twin = root / str(file.relative_to(folder)).replace("::", "..")
            twin.parent.mkdir(parents=True, exist_ok=True)
            twin.touch()
            twins[str(twin)] = file
        found = load_dataset_builder("text", data_dir=str(root)).config.data_files
    return {str(split): [twins[name] for name in names] for split, names in found.items()}


def read_splits(splits: dict[str, list[Path]], said: str) -> dict[str, list[Path]]:
    """Return the splits that an entry's `split` names, such as `train[:10%]+test`; all if one is missing."""
    named = {part.partition("[")[0] for part in said.split("+")}
    return {split: splits[split] for split in sorted(named)} if named <= splits.keys() else splits


def plain(path: Path) -> str:
    """Return a name of a file that no library takes for a pattern or a chain of file systems.

    It is the file's own path, or the path of a link to it in the cache of `datasets`.
    """
    path = path.absolute()
    if not re.search(r"[*?\[\]]|::", str(path)):
        return str(path)
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    link = Path(HF_DATASETS_CACHE) / "trahiv-links" / f"{digest}{path.suffix}"
    link.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        link.symlink_to(path)
    return str(link)


def reader_options(reader: Reader, files: list[Path]) -> dict[str, Any]:
    """Return the options of a reader of `datasets`; the columns of CSV files are read as texts.

    Raises:
        AssetError: the columns of the files differ.
    """
    if reader == "text":
        # A text file is one document. By default every line is a document without its newline, and the model
        # would learn a language without newlines.
        return {"sample_by": "document"}
    if reader != "csv":
        return {}
    # Only an empty field is a missing value: pandas also takes NA, None and null for one, but they may be
    # answers.
    options: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
    if not files:
        return options
    columns = [name for name in csv_columns(files[0]) if name]
    for file in files[1:]:
        if {*csv_columns(file), ""} != {*columns, ""}:
            raise AssetError(f"The columns of {files[0]} and {file} differ.", "Give each its own entry.")
    # Texts, as they are written: pandas would guess types.
    return {**options, "features": Features(dict.fromkeys(columns, Value("string")))}


def is_plain(feature: Any) -> bool:
    """Tell whether decoded values are known to look like stored ones, so that they can be encoded again."""
    if isinstance(feature, dict):
        return all(map(is_plain, feature.values()))
    if isinstance(feature, List | LargeList):
        return is_plain(feature.feature)
    return isinstance(feature, Value | ClassLabel)


def guarded_rows(
    rows: IterableDataset, source: DatasetSection, shards: list[int]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of some shards of a stream; raise `AssetError` at a row that can't be read."""
    for index in shards:
        with reading(source):
            # `iter`, as `__iter__` would divide the rows among the loader's workers a second time.
            for batch in rows.shard(rows.num_shards, index).iter(batch_size=1):
                yield {column: values[0] for column, values in batch.items()}


@contextlib.contextmanager
def reading(source: DatasetSection) -> Iterator[None]:
    """Turn errors of `datasets` and the hub while `source` is read into an `AssetError`."""
    try:
        yield
    except StopIteration as failure:  # the JSON reader's way to say that a file has no first line
        raise forms.empty_dataset(source) from failure
    except DatasetNotFoundError as failure:
        raise AssetError(
            f"There is no dataset {source.path!r} on the hub, or it is private or gated: "
            f"{reason_of(failure)}",
            "Check the name; for a private or gated one run `hf auth login`.",
        ) from failure
    except (ConnectionError, *CONNECTION_ERRORS_TO_RETRY) as failure:
        raise AssetError(
            f"The hub could not be reached for the dataset {source.path!r}: {reason_of(failure)}",
            "Check the connection, or give a local file or folder in `data.datasets`.",
        ) from failure
    except FAILURES as failure:
        if "corresponds to no data" in str(failure):  # a header and no row
            raise forms.empty_dataset(source) from failure
        raise unreadable(source, failure) from failure


def unreadable(source: DatasetSection, failure: Exception) -> AssetError:
    """Make the error for a dataset that can't be read; among local files, name the first broken one."""
    name = f"The dataset {source.path!r} (split {source.split!r})"
    said = failure
    hint = "Check its files, and `name`, `split` and `data_files` of the entry in `data.datasets`."
    splits = read_splits(splits_of(source, local_files(source)), source.split)
    for file in chain.from_iterable(splits.values()):
        reader = reader_of(file)
        try:
            read_rows(file)  # raises a better error: which row is broken, and why
            with contextlib.suppress(StopIteration):  # an empty file of JSON
                options = reader_options(reader, [file])
                rows = load_dataset(reader, data_files=plain(file), split="train", streaming=True, **options)
                collections.deque(rows, maxlen=0)
        except AssetError as error:
            return error
        except FAILURES as broken:
            name = str(file)
            said = broken
            hint = "Mend the file, bring it again, or leave it out."
            break
    reason = reason_of(said)
    if isinstance(said.__cause__ or said, UnicodeDecodeError) or "UTF-8" in reason:
        hint = f"If it was written on Windows: iconv -f WINDOWS-1252 -t UTF-8 {name} > NEW_FILE"
    return AssetError(f"{name} could not be read: {reason}", hint)


def reason_of(failure: BaseException) -> str:
    """Return an error's reason in one line; `datasets` hides the reason of a build failure in its cause."""
    root = failure.__cause__ or failure
    # pyarrow counts rows from 0, and starts again for each block of a file.
    reason = re.sub(r" in row \d+", "", " ".join(str(root).split())) or type(root).__name__
    return reason if len(reason) <= 300 else f"{reason[:300]}..."
