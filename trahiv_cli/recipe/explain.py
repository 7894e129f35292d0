"""pydantic's errors, said for people: where it is in the file, what was expected, what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trahiv_cli.errors import Finding
from trahiv_cli.recipe.document import Document, Location, Mark, dotted, kind_of, read_location
from trahiv_cli.recipe.foreign import FOREIGN_CHOICES, REFUSED_CHOICES, UNBUILT_CHOICES, UNBUILT_KEYS
from trahiv_cli.recipe.overrides import Override
from trahiv_cli.recipe.suggest import OF_TASKS, about_missing, about_unknown, closest_choice

EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a section (`key: value` lines)",
    "model": "a section (`key: value` lines)",
}
BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}


def explain(error: ValidationError, document: Document, overrides: Sequence[Override]) -> list[Finding]:
    """Turn one validation's errors into findings, in the order of the file.

    Places that the document already complains about are left out: one mistake, one finding.
    """
    known = {finding.path for finding in document.findings}
    located = [(_locate(details, document.data), details) for details in error.errors(include_url=False)]
    findings = [
        _finding(location, group, document, overrides)
        for location, group in _without_alternatives(located).items()
        if dotted(location) not in known
    ]
    return sorted(findings, key=lambda finding: (finding.line, finding.col))


def finding_at(
    location: Location,
    path: str,
    message: str,
    hint: str,
    document: Document,
    overrides: Sequence[Override],
    mark: Mark | None,
) -> Finding:
    """Make a finding about `path` at `mark`, or at the `--set` that put something at `location`."""
    for override in overrides:
        if override.concerns(location) and (override.covers(location) or location not in document.values):
            return Finding(path, message, hint, f"--set {override.text}")
    return document.finding(path, message, hint, mark)


def _finding(
    location: Location, group: list[ErrorDetails], document: Document, overrides: Sequence[Override]
) -> Finding:
    message, hint = _say(location, group, document)
    path = dotted(location)
    # A section that nobody wrote is the task's, so the task is what asks for what is missing in it.
    is_unwritten = location[:1] in OF_TASKS and not _holds(document.data, location[:1])
    location = ("task",) if is_unwritten else location
    return finding_at(location, path, message, hint, document, overrides, _mark(location, group[0], document))


def _mark(location: Location, details: ErrorDetails, document: Document) -> Mark | None:
    """Choose what to point at: the key if it is unknown or empty, else the value, else the section."""
    if location in document.values:
        is_section = any(key[:-1] == location for key in document.keys)
        points_at_key = is_section or details["type"] == "extra_forbidden" or details["input"] is None
        first, second = (document.keys, document.values)[:: 1 if points_at_key else -1]
        return first.get(location) or second.get(location)
    while location and location not in document.values:
        location = location[:-1]
    return document.keys.get(location) or document.values.get(location)


def _locate(details: ErrorDetails, data: Any) -> Location:
    """Follow an error's `loc` through the data, skipping the names of union members that it also holds."""
    if details["type"] == "broken_rule":
        places = [read_location(place) for place in details["ctx"]["places"]]
        return next((place for place in places if _holds(data, place)), places[-1])
    if details["type"] == "missing":
        return details["loc"]
    location: Location = ()
    for part in details["loc"]:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            location, data = (*location, part), data[part]
        elif isinstance(data, dict) and isinstance(part, str) and part in data:
            location, data = (*location, part), data[part]
    return location


def _holds(data: Any, place: Location) -> bool:
    for part in place:
        is_there = (
            part in data if isinstance(data, dict) else isinstance(data, list) and part in range(len(data))
        )
        if not is_there:
            return False
        data = data[part]
    return True


def _without_alternatives(
    located: Iterable[tuple[Location, ErrorDetails]],
) -> dict[Location, list[ErrorDetails]]:
    """Group errors by place; a union's rejected members go when another member got further inside."""
    groups: dict[Location, list[ErrorDetails]] = {}
    for location, details in located:
        groups.setdefault(location, []).append(details)
    for location in list(groups):
        deeper = any(len(other) > len(location) and other[: len(location)] == location for other in groups)
        if deeper and len(groups[location][0]["loc"]) > len(location):
            del groups[location]
    return groups


def _say(location: Location, group: list[ErrorDetails], document: Document) -> tuple[str, str]:
    """Return the message and the hint for what is wrong at one place.

    Of a union's members, the one that has the right type knows best.
    """
    group = [details for details in group if not details["type"].endswith("_type")][:1] or group
    if len(group) > 1:
        kinds = [EXPECTED[kind] for details in group if (kind := details["type"].split("_")[0]) in EXPECTED]
        return _unexpected(" or ".join(dict.fromkeys(kinds)), group[0]["input"]), ""
    details = group[0]
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind in BOUNDS:
        word, bound = BOUNDS[kind]
        return f"must be {word} {context[bound]}, got {kind_of(value)}", ""
    if kind in _SPECIAL:
        return _SPECIAL[kind](location, value, context, document)
    family = kind.split("_")[0]
    if family in EXPECTED and kind.endswith("_type"):
        return _unexpected(EXPECTED[family], value), _about_type(family, value)
    return details["msg"].removeprefix("Value error, "), ""


def _unexpected(expected: str, value: object) -> str:
    return f"is empty: expected {expected}" if value is None else f"expected {expected}, got {kind_of(value)}"


def _about_type(family: str, value: object) -> str:
    """Say how to write a scalar that YAML read as another type than was meant."""
    if family == "string" and isinstance(value, int | float):
        return "put it in quotes"
    if not isinstance(value, str):
        return ""
    if family == "list":
        return f"write [{value}]"
    if family == "bool":
        meant = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(value.lower())
        return f"YAML 1.2 reads {value!r} as text: write {meant}" if meant else ""
    if family == "float" and re.fullmatch(r"[-+]?[0-9]+,[0-9]+", value):
        return f"write {value.replace(',', '.')}, with a point"
    if family == "float" and value.lower().lstrip("+-.") in ("nan", "inf"):
        return "it must be finite"
    plain = re.sub(r"[_, ]", "", value)
    is_number = re.fullmatch(
        r"[-+]?[0-9]+" if family == "int" else r"[-+]?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?", plain
    )
    return f"write {plain}, without quotes" if family in ("int", "float") and is_number else ""


def _unknown(
    location: Location, _value: object, _context: dict[str, Any], document: Document
) -> tuple[str, str]:
    key = str(location[-1])
    if key in UNBUILT_KEYS:
        return "not built yet in this version", "remove it"
    return "unknown key", about_unknown(location, document.data.get("task", "clm"))


def _missing(
    location: Location, _value: object, _context: dict[str, Any], document: Document
) -> tuple[str, str]:
    return "is missing", about_missing(location, _holds(document.data, location[:-1]))


def _choice(
    location: Location, value: object, context: dict[str, Any], _document: Document
) -> tuple[str, str]:
    choices = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
    listed = ", ".join(choices)
    path = dotted(location)
    if isinstance(value, str) and value in UNBUILT_CHOICES.get(path, ()):
        return f"{value!r} is not built yet in this version", f"built: {listed}"
    if isinstance(value, str) and value in REFUSED_CHOICES.get(path, ()):
        reason, instead = REFUSED_CHOICES[path][value]
        return f"{value!r} can't work in a swarm: {reason}", instead
    expected = f"one of {listed}" if len(choices) > 1 else listed
    if location == ("version",):
        return _unexpected(expected, value), "a newer version of the format needs a newer trahiv"
    nearest = FOREIGN_CHOICES.get(path, {}).get(str(value)) or closest_choice(value, choices)
    return _unexpected(expected, value), f"did you mean `{nearest}`?" if nearest else ""


def _pattern(
    location: Location, value: object, _context: dict[str, Any], _document: Document
) -> tuple[str, str]:
    if location[-1] == "sha256":
        return f"expected 64 hexadecimal digits, got {kind_of(value)}", ""
    message = f"expected letters, digits, `-` and `_`, at most 48, got {kind_of(value)}"
    name = valid_name(str(value))
    return message, f"`{name}` would do" if name else ""


def _rule(
    _location: Location, _value: object, context: dict[str, Any], _document: Document
) -> tuple[str, str]:
    return str(context["message"]), ""


def _instead(
    _location: Location, value: object, context: dict[str, Any], _document: Document
) -> tuple[str, str]:
    return _unexpected(context["expected"], value), str(context["hint"])


def _empty(
    _location: Location, _value: object, _context: dict[str, Any], _document: Document
) -> tuple[str, str]:
    return "is an empty text", ""


def _too_short(
    _location: Location, _value: object, context: dict[str, Any], _document: Document
) -> tuple[str, str]:
    least = context["min_length"]
    entries = "entry" if least == 1 else "entries"
    return f"needs at least {least} {entries}, got {context['actual_length']}", ""


_SPECIAL: dict[str, Callable[[Location, object, dict[str, Any], Document], tuple[str, str]]] = {
    "extra_forbidden": _unknown,
    "missing": _missing,
    "literal_error": _choice,
    "string_pattern_mismatch": _pattern,
    "broken_rule": _rule,
    "unexpected": _instead,
    "string_too_short": _empty,
    "too_short": _too_short,
}


def valid_name(text: str) -> str:
    """Make a run's name of any text: `my run.v2` becomes `my-run-v2`; empty if nothing is left."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text)[:48].strip("-")
