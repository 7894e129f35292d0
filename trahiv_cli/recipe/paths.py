"""Names in recipes: which ones are local paths, where these are, how others see them, and near matches."""

from __future__ import annotations

import difflib
import os.path
import re
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath
from typing import Literal, TypeVar

BUILTIN = "builtin/"
LOCAL = "local:"
"""Prefix, in an agreement, of a file or folder that only the starter has."""

Reader = Literal["csv", "json", "parquet", "text"]

READERS: dict[str, Reader] = {
    ".txt": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".ndjson": "json",
}
"""Suffix of a data file -> the reader of `datasets`."""

PACKAGED_BUILDERS = frozenset(
    "arrow audiofolder cache csv hdf5 imagefolder json lance nifti pandas parquet pdffolder spark sql "
    "text videofolder webdataset xml".split()
)
"""Names that `load_dataset` takes for a reader of local files, not for a dataset on the hub."""

_Text = TypeVar("_Text", str, str | None)


def is_data(name: str | Path) -> bool:
    """Tell whether a file's suffix is one of `READERS`, in small letters or capitals."""
    return Path(name).suffix.lower() in READERS


def reader_of(name: str | Path) -> Reader:
    """Return the reader of a data file, by its suffix."""
    return READERS[Path(name).suffix.lower()]


def is_local(name: str) -> bool:
    """Tell whether `name` means a file or folder on this machine rather than one on the hub.

    Files and folders in the current folder count too, since libraries look there before they ask the hub.
    """
    if name.startswith(BUILTIN):
        return False
    return (
        re.search(r"^[/.~]|[*?\[]", name) is not None
        or name.count("/") > 1
        or is_data(name)
        or os.path.exists(name)
    )


def anchor(name: str, folder: Path, *, always: bool = False) -> str:
    """Make a name an absolute path or pattern, unless it means a model or dataset on the hub.

    The name is relative to `folder`, since a recipe and its data are moved and shared together. `always`: it
    can only be a path.
    """
    if name.startswith((BUILTIN, LOCAL)) or "://" in name or not name.strip():
        return name
    expanded = os.path.expanduser(name)
    place = str(folder.absolute() / expanded)
    return place if always or os.path.exists(place) or is_local(name) else name


def is_template_file(text: str) -> bool:
    """Tell whether `text` is the name of a chat template's file rather than a chat template."""
    return text.endswith((".jinja", ".j2")) and "{" not in text


def is_own_reward(name: str) -> bool:
    """Tell whether a reward's name means a function in a file: `FILE.py:FUNCTION`."""
    return re.search(r"\.py:[^\W\d]\w*$", name) is not None


def local_name(name: _Text) -> _Text:
    """Return `name` as other peers see it: without its folders if it is local."""
    if name is None or not is_local(name):
        return name
    base = PureWindowsPath(name).name
    return LOCAL + (base if base not in ("", "..") else Path(name).resolve().name)


def reaches_out(text: str) -> bool:
    """Tell whether a stranger's text could name a place: an absolute path, a home, a parent, a URL.

    fsspec, with which `datasets` reads, takes text that begins with `file:` or `local:` for a path.
    """
    is_place = re.search(r"^([/\\~]|file:|local:|[A-Za-z]:[\\/])|://|::", text) is not None
    return is_place or ".." in re.split(r"[\\/]", text)


def is_hub_id(name: str) -> bool:
    """Tell whether `name` can only be `owner/name`, `name` or a built-in `builtin/name`."""
    return re.fullmatch(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", name, re.ASCII) is not None


def closest(word: str, words: Iterable[str]) -> str:
    """Return the first of `words` that begins with `word`, else the nearest one, or "" if none is near."""
    if not word:
        return ""
    words = list(words)
    starting = [each for each in words if each.startswith(word.lower())]
    near = starting or difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.7)
    return near[0] if near else ""


def closest_file(missing: Path) -> str:
    """Return the path beside `missing` with the nearest name, or "" if none is near."""
    try:
        near = closest(missing.name, [entry.name for entry in missing.parent.iterdir()])
    except OSError:
        return ""
    return str(missing.with_name(near)) if near else ""
