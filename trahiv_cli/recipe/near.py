"""What was probably meant: the nearest of the names that there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def closest(word: str, words: Iterable[str]) -> str:
    """Return the nearest of `words`, or nothing if none is near."""
    return next(iter(difflib.get_close_matches(word.lower(), list(words), n=1, cutoff=0.7)), "")


def closest_choice(value: object, choices: Iterable[str]) -> str:
    """Return the choice that was probably meant: the one that begins like `value`, or the nearest."""
    if not isinstance(value, str) or not value:
        return ""
    choices = list(choices)
    starting = [choice for choice in choices if choice.startswith(value.lower())]
    return starting[0] if starting else closest(value, choices)


def closest_file(missing: Path) -> str:
    """Return the path beside `missing` whose name is nearest, or nothing."""
    try:
        near = closest(missing.name, [entry.name for entry in missing.parent.iterdir()])
    except OSError:
        return ""
    return str(missing.with_name(near)) if near else ""
