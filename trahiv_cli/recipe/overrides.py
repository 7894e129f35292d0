"""`--set a.b=c`: one value of a recipe, replaced from the command line."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trahiv_cli.errors import Finding, RecipeError
from trahiv_cli.recipe.document import Location, dotted, read_location, read_value


@dataclass(frozen=True)
class Override:
    """One `--set`, as typed and as understood."""

    text: str
    location: Location
    value: Any

    def covers(self, location: Location) -> bool:
        """Tell whether the value at `location` came from here."""
        return _words(location)[: len(self.location)] == _words(self.location)

    def concerns(self, location: Location) -> bool:
        """Tell whether `location` came from here, or is a section that this made."""
        return self.covers(location) or _words(self.location)[: len(location)] == _words(location)


def read_overrides(texts: Sequence[str]) -> tuple[list[Override], list[Finding]]:
    """Understand each `a.b=c`; its value follows the same YAML rules as a recipe's."""
    overrides, findings = [], []
    for text in texts:
        path, equals, value = text.partition("=")
        location = read_location(path.strip())
        if not equals or "" in location:
            findings.append(_finding(text, path, "expected `section.key=value`"))
            continue
        try:
            overrides.append(Override(text, location, read_value(value)))
        except RecipeError as error:
            findings += [_finding(text, path, found.message, found.hint) for found in error.findings]
    return overrides, findings


def apply_overrides(
    data: dict[str, Any], overrides: Sequence[Override]
) -> tuple[dict[str, Any], list[Finding]]:
    """Return a copy of `data` with the overrides in it; missing sections are made on the way."""
    data, findings = copy.deepcopy(data), []
    for override in overrides:
        try:
            _assign(data, override.location, override.value)
        except LookupError as error:
            findings.append(_finding(override.text, dotted(override.location), str(error.args[0])))
    return data, findings


def _words(location: Location) -> list[str]:
    """Compare as written: `id2label.0` may be an entry of a list or a key of a section."""
    return [str(part) for part in location]


def _assign(data: Any, location: Location, value: Any) -> None:
    for depth, part in enumerate(location):
        where = dotted(location[:depth])
        if isinstance(data, list):
            if not isinstance(part, int) or part >= len(data):
                raise LookupError(f"`{where}` has the entries 0 to {len(data) - 1}, not {part!r}")
        elif isinstance(data, dict):
            part = str(part)
        else:
            raise LookupError(f"`{where}` is a value, not a section")
        if depth == len(location) - 1:
            data[part] = value
        else:
            if isinstance(data, dict) and data.get(str(part)) is None:
                data[part] = {}
            data = data[part]


def _finding(text: str, path: str, message: str, hint: str = "") -> Finding:
    return Finding(path, message, hint, f"--set {text}")
