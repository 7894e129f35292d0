"""Which names mean a place on this machine, and what others get to see of them."""

from __future__ import annotations

import os.path
import re
from pathlib import Path, PureWindowsPath
from typing import Literal, TypeVar

BUILTIN = "builtin/"
LOCAL = "local:"
"""Marks, in an agreement, a file or folder that only the starter has."""

Reader = Literal["csv", "json", "parquet", "text"]

READERS: dict[str, Reader] = {
    ".txt": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
"""Suffix of a data file -> what `datasets` reads it with."""

DATA_SUFFIXES = frozenset(READERS)

TEMPLATE_SUFFIXES = (".jinja", ".j2")

PACKAGED_BUILDERS = frozenset(
    "arrow audiofolder cache csv hdf5 imagefolder json lance nifti pandas parquet pdffolder spark sql "
    "text videofolder webdataset xml".split()
)
"""Names that `load_dataset` takes for a reader of this machine's files, not for a dataset on the hub."""

_Text = TypeVar("_Text", str, str | None)


def is_local(name: str) -> bool:
    """Tell whether `name` means a file or folder of this machine rather than one on the hub."""
    if name.startswith(BUILTIN):
        return False
    return (
        name.startswith(("/", ".", "~"))
        or name.count("/") > 1
        or re.search(r"[*?\[]", name) is not None
        or Path(name).suffix in DATA_SUFFIXES
        or os.path.exists(name)
    )


def is_template_file(text: str) -> bool:
    """Tell whether `text` names the file of a chat template rather than being one."""
    return text.endswith(TEMPLATE_SUFFIXES) and "{" not in text


def local_name(name: _Text, *, always: bool = False) -> _Text:
    """Return `name` as others see it: a local one without its folders, any other as it is.

    Args:
        name: a hub id, a path, or nothing.
        always: treat it as local whatever it looks like.
    """
    if name is None or not (always or is_local(name)):
        return name
    base = PureWindowsPath(name).name
    return LOCAL + (base if base not in ("", "..") else Path(name).resolve().name)


def reaches_out(text: str) -> bool:
    """Tell whether a stranger's text could name a place: an absolute path, a home, a parent, a URL."""
    return (
        text.startswith(("/", "\\", "~"))
        or re.match(r"[A-Za-z]:[\\/]", text) is not None
        or ".." in re.split(r"[\\/]", text)
        or "://" in text
        or "::" in text
    )


def is_hub_id(name: str) -> bool:
    """Tell whether `name` can only be `owner/name`, `name` or a `builtin/` of ours."""
    return re.fullmatch(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", name, re.ASCII) is not None
