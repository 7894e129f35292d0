"""Rows are read from the hub, a local folder, files, or the text that comes with trahiv.

Everything that goes wrong here is an `AssetError`, raised before anything is trained, or, in a stream, when
the broken place is reached; what `datasets` had already put into its cache stays there.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from datasets import ClassLabel, Dataset, IterableDataset, LargeList, List, Value, load_dataset
from datasets.exceptions import DatasetNotFoundError, DatasetsError
from datasets.utils.file_utils import CONNECTION_ERRORS_TO_RETRY

from trahiv_cli.errors import AssetError
from trahiv_cli.recipe import forms
from trahiv_cli.recipe.builtin import TEXT, read_text
from trahiv_cli.recipe.content import local_files
from trahiv_cli.recipe.paths import BUILTIN, READERS, is_local
from trahiv_cli.recipe.schema import DatasetSection

logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # what they log, they raise, too

Documents: TypeAlias = Dataset | IterableDataset

TEXT_SHARDS = 16
"""Shards of the built-in text as a stream."""

READER_OPTIONS: dict[str, dict[str, Any]] = {
    # A text file is one document. By default `datasets` makes every line one and drops the newlines, and the
    # model would learn a language without them.
    "text": {"sample_by": "document"},
    # Only nothing is nothing. pandas takes NA, None, null and their like for it, which may be an answer.
    "csv": {"keep_default_na": False, "na_values": [""]},
}

FAILURES = (DatasetsError, OSError, ValueError, TypeError, RuntimeError)
"""What `datasets` raises where files can't be read."""


@dataclass(frozen=True)
class Opened:
    """A dataset whose first row was read."""

    source: DatasetSection
    place: str  # its entry in the recipe: `data.datasets.0`
    rows: Documents
    features: dict[str, Any]  # column -> its feature, as far as known: a stream may not say
    first: dict[str, Any]  # the first row; its keys are the columns

    @property
    def name(self) -> str:
        """The dataset's path in quotes, for messages."""
        return repr(self.source.path)


def load_rows(source: DatasetSection, place: str, *, streaming: bool) -> Opened:
    """Open the dataset of one entry of the recipe (`place`), and rename its columns as that says.

    A stream is read while iterating, in bounded memory and disk, and raises `AssetError` where it is broken.

    Raises:
        AssetError: it is not there, cannot be read or is empty, or a column cannot be renamed.
    """
    files = local_files(source) if is_local(source.path) else []
    if files and not any(file.stat().st_size for file in files):
        raise forms.empty_dataset(source.path, source.split)
    with reading(source):
        for file in files:  # pyarrow 26 crashes if the first row is `null`
            with file.open("rb") as begun:
                head = begun.read(100).lstrip(b"\xef\xbb\xbf[ \t\r\n")
            if READERS[file.suffix] == "json" and head.startswith(b"null"):
                raise forms.broken_row(repr(str(file)), 0, "is no JSON object: {...}")
        if source.path == TEXT:
            rows = Dataset.from_list([{"text": text} for text in read_text()])
            rows = rows.to_iterable_dataset(TEXT_SHARDS) if streaming else rows
        else:
            rows = load_dataset(**arguments(source), split=source.split, streaming=streaming)
        first = next(iter(rows), None)
    if first is None:
        raise forms.empty_dataset(source.path, source.split)
    if "__index_level_0__" in first and files and files[0].suffix == ".csv":
        # pandas takes the first field of every row for an index, and each column for the one before it.
        raise AssetError(
            f"The first row of {files[0]} has more fields than its header.",
            'Put a field that holds commas in quotes ("...").',
        )
    features = dict(rows.features or {})
    if isinstance(rows, IterableDataset):  # a broken place is an `AssetError` whenever it is reached
        shards = list(range(rows.num_shards))  # a list is what `datasets` divides among workers
        known = rows.features if rows.features is not None and is_plain(rows.features) else None
        told = {"rows": rows, "source": source, "shards": shards}
        rows = IterableDataset.from_generator(guarded_rows, features=known, gen_kwargs=told)
    opened = Opened(source, place, rows, features, first)
    forms.require_renamable(opened, source.columns)
    if not source.columns:
        return opened

    def renamed(old: dict[str, Any]) -> dict[str, Any]:
        return {source.columns.get(name, name): value for name, value in old.items()}

    return Opened(source, place, rows.rename_columns(source.columns), renamed(features), renamed(first))


def require_text(opened: Opened, column: str, setting: str) -> None:
    """Refuse a column, named by the recipe's field `setting`, that is missing or holds no text."""
    feature = opened.features.get(column)
    is_text = feature is None or getattr(feature, "dtype", "") in ("string", "large_string", "null")
    forms.require_text(opened, column, setting, is_mixed=not is_text)


def parallel(rows: Documents, num_proc: int | None) -> dict[str, int | None]:
    """Say to `map` and `filter` how many processes work on `rows`; a stream has no such option."""
    return {} if isinstance(rows, IterableDataset) else {"num_proc": num_proc}


def arguments(source: DatasetSection) -> dict[str, Any]:
    """Say to `load_dataset` what `source` means; `AssetError` if it is not there or of several kinds."""
    if source.path.startswith(BUILTIN):
        raise AssetError(f"There is no built-in dataset {source.path!r}.", f"There is `{TEXT}`.")
    own = {"name": source.name, "data_files": source.data_files}
    if not is_local(source.path):
        return {"path": source.path, "revision": source.revision, **own}
    files, path = local_files(source), Path(source.path).expanduser()
    reader, *more = {READERS[file.suffix] for file in files}
    if more and (path / "README.md").is_file():  # it sorts files into configurations, one of which is read
        return {"path": str(path), **own}
    if more:
        suffixes = ", ".join(sorted({file.suffix for file in files}))
        raise AssetError(
            f"{source.path!r} has files of several kinds ({suffixes}).",
            "Give each kind its own entry in `data.datasets`.",
        )
    options = READER_OPTIONS.get(reader, {})
    if not path.is_dir():
        return {"path": reader, "data_files": [str(file) for file in files], **options}
    where = {"path": reader, "data_dir": str(path)} if reader == "text" else {"path": str(path)}
    return {**where, **own, **options}  # a folder may have files for several splits


def is_plain(feature: Any) -> bool:
    """Tell whether a decoded value looks like a stored one, so that it can pass as one again."""
    if isinstance(feature, dict):
        return all(map(is_plain, feature.values()))
    if isinstance(feature, List | LargeList):
        return is_plain(feature.feature)
    return isinstance(feature, Value | ClassLabel)


def guarded_rows(
    rows: IterableDataset, source: DatasetSection, shards: list[int]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of some of a stream's shards; where they can't be read, raise `AssetError`."""
    for index in shards:
        with reading(source):
            # `iter`, as `__iter__` would share the rows out among the loader's workers a second time.
            for batch in rows.shard(rows.num_shards, index).iter(batch_size=1):
                yield {column: values[0] for column, values in batch.items()}


@contextlib.contextmanager
def reading(source: DatasetSection) -> Iterator[None]:
    """Turn what `datasets` and the hub raise while `source` is read into an `AssetError`."""
    try:
        yield
    except StopIteration as failure:  # the JSON reader's way to say that a file has no first line
        raise forms.empty_dataset(source.path, source.split) from failure
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
            raise forms.empty_dataset(source.path, source.split) from failure
        raise unreadable(source, failure) from failure


def unreadable(source: DatasetSection, failure: Exception) -> AssetError:
    """Make the error of a dataset that can't be read; of local files, name the first that can't."""
    name, said = f"The dataset {source.path!r} (split {source.split!r})", failure
    hint = "Check its files, and `name`, `split` and `data_files` of the entry in `data.datasets`."
    for file in local_files(source) if is_local(source.path) else []:
        reader = READERS[file.suffix]
        try:
            with contextlib.suppress(StopIteration):  # an empty file of JSON
                rows = load_dataset(
                    reader,
                    data_files=str(file),
                    split="train",
                    streaming=True,
                    **READER_OPTIONS.get(reader, {}),
                )
                collections.deque(rows, maxlen=0)
        except FAILURES as broken:
            name, said, hint = str(file), broken, "Mend the file, bring it again, or leave it out."
            break
    reason = reason_of(said)
    if isinstance(said.__cause__ or said, UnicodeDecodeError) or "UTF-8" in reason:
        hint = f"If it was written on Windows: iconv -f WINDOWS-1252 -t UTF-8 {name} > NEW_FILE"
    return AssetError(f"{name} could not be read: {reason}", hint)


def reason_of(failure: BaseException) -> str:
    """Say what happened in one line; `datasets` hides the reason of a build failure in its cause."""
    root = failure.__cause__ or failure
    reason = " ".join(str(root).split()) or type(root).__name__
    return reason if len(reason) <= 300 else f"{reason[:300]}..."
