"""What was probably meant: the nearest of the names that there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def closest(word: object, words: Iterable[str], *, by_start: bool = False) -> str:
    """Return the nearest of `words`, or nothing if none is near.

    With `by_start` the first one that begins like `word` goes before that.
    """
    if not isinstance(word, str) or not word:
        return ""
    words = list(words)
    starting = [each for each in words if by_start and each.startswith(word.lower())]
    return next(iter(starting or difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.7)), "")


def closest_file(missing: Path) -> str:
    """Return the path beside `missing` whose name is nearest, or nothing."""
    try:
        near = closest(missing.name, [entry.name for entry in missing.parent.iterdir()])
    except OSError:
        return ""
    return str(missing.with_name(near)) if near else ""
