"""Plain data back to YAML, one value a line, so that something can be said behind each."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.document import Location, leaves, read_value

Line = tuple[str, Location | None]


def render(data: dict[str, Any]) -> list[Line]:
    """Return the lines of a YAML document that reads as `data` again.

    Returns:
        Each line with the place of the value on it; a line that only opens a section has none.
    """
    lines: list[Line] = []
    opened: Location = ()
    for location, value in leaves(data):
        for depth in range(_num_common(opened, location), len(location) - 1):
            if not isinstance(location[depth], int):
                lines.append((_indented(opened, location[: depth + 1]), None))
            opened = location[: depth + 1]
        lines.append((_indented(opened, location) + " " + _inline(value), location))
        opened = location
    return lines


def _num_common(one: Location, other: Location) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _indented(opened: Location, location: Location) -> str:
    """Write the key at `location`, with the dash of its list if it is the first of an entry."""
    if isinstance(location[-1], int):
        return "  " * (len(location) - 1) + "-"
    key = f"{_inline(location[-1])}:"
    if opened == location[:-1] and opened and isinstance(opened[-1], int):
        return "  " * (len(location) - 2) + "- " + key
    return "  " * (len(location) - 1) + key


def _inline(value: Any) -> str:
    if isinstance(value, str) and _is_plain(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def _is_plain(text: str) -> bool:
    """Tell whether YAML reads the bare text as itself, also with a comment behind it."""
    try:
        return bool(read_value(f"key: {text}  # x") == {"key": text})
    except RecipeError:
        return False
