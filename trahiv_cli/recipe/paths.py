"""Which names mean a place on this machine, where that is, and what others get to see of it."""

from __future__ import annotations

import glob
import os.path
import re
from pathlib import Path, PureWindowsPath
from typing import Literal, TypeVar

BUILTIN = "builtin/"
LOCAL = "local:"
"""Marks, in an agreement, a file or folder that only the starter has."""

Reader = Literal["csv", "json", "parquet", "text"]

READERS: dict[str, Reader] = {".txt": "text", ".jsonl": "json", ".json": "json"}
READERS |= {".csv": "csv", ".parquet": "parquet"}
"""Suffix of a data file -> what `datasets` reads it with."""

TEMPLATE_SUFFIXES = (".jinja", ".j2")

PACKAGED_BUILDERS = frozenset(
    "arrow audiofolder cache csv hdf5 imagefolder json lance nifti pandas parquet pdffolder spark sql "
    "text videofolder webdataset xml".split()
)
"""Names that `load_dataset` takes for a reader of this machine's files, not for a dataset on the hub."""

_Text = TypeVar("_Text", str, str | None)


def is_local(name: str) -> bool:
    """Tell whether `name` means a file or folder of this machine rather than one on the hub.

    It also counts what the current folder has, since that is where libraries look before they ask the hub.
    """
    if name.startswith(BUILTIN):
        return False
    return (
        name.startswith(("/", ".", "~"))
        or name.count("/") > 1
        or re.search(r"[*?\[]", name) is not None
        or Path(name).suffix in READERS
        or os.path.exists(name)
    )


def anchor(name: str, folder: Path, *, always: bool = False) -> tuple[str, bool]:
    """Make an absolute path or pattern of a name in a recipe, unless it means something on the hub.

    It is looked for in the recipe's `folder`, since a recipe and its data are moved and shared together, and
    then in the current one. `always`: the name can only be a path.

    Returns:
        The name, and whether only the current folder has it, so that the recipe would not work elsewhere.
    """
    if name.startswith(BUILTIN):
        return name, False
    expanded, places = os.path.expanduser(name), []
    for base in (folder.absolute(), Path.cwd()):
        place = str(base / expanded)
        if glob.has_magic(expanded) and not os.path.exists(place):
            place = str(Path(glob.escape(str(base))) / expanded)
        places.append(place)
        if os.path.exists(place) or (glob.has_magic(place) and any(glob.iglob(place, recursive=True))):
            return place, place != places[0]
    return (places[0] if always or is_local(name) else name), False


def is_template_file(text: str) -> bool:
    """Tell whether `text` names the file of a chat template rather than being one."""
    return text.endswith(TEMPLATE_SUFFIXES) and "{" not in text


def local_name(name: _Text) -> _Text:
    """Return `name` as others see it: without its folders if it is local."""
    if name is None or not is_local(name):
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
