"""What was probably meant: the nearest of the names that there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def closest(word: object, words: Iterable[str]) -> str:
    """Return the first of `words` that begins like `word`, else the nearest, or nothing if none is near."""
    if not isinstance(word, str) or not word:
        return ""
    words = list(words)
    starting = [each for each in words if each.startswith(word.lower())]
    return next(iter(starting or difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.7)), "")


def closest_file(missing: Path) -> str:
    """Return the path beside `missing` whose name is nearest, or nothing."""
    try:
        near = closest(missing.name, [entry.name for entry in missing.parent.iterdir()])
    except OSError:
        return ""
    return str(missing.with_name(near)) if near else ""
