"""Findings from pydantic's errors: the position in the file, the expected value, and a suggestion.

1. `explain` follows each error to its location in the data, and keeps one error for each location.
2. `_say` words it: pydantic's own message, and a hint about an unknown key, a missing key or a wrong choice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trahiv_cli.errors import Finding
from trahiv_cli.recipe.document import Document, Location, dotted, kind_of, read_location
from trahiv_cli.recipe.foreign import FOREIGN, FOREIGN_CHOICES, REFUSED_CHOICES
from trahiv_cli.recipe.paths import closest
from trahiv_cli.recipe.schema import general, sections_of_a_recipe
from trahiv_cli.recipe.section import NAME_PATTERN


def explain(error: ValidationError, document: Document) -> list[Finding]:
    """Turn the errors of one validation into findings.

    Locations for which the document already has a finding are left out: one mistake, one finding.
    """
    known = {finding.path for finding in document.findings}
    groups: dict[Location, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        for message, *places in details.get("ctx", {}).get("rules", [(details["msg"],)]):
            location = _locate(details, places, document.data)
            groups.setdefault(location, []).append({**details, "msg": message})
    findings = []
    for location, group in groups.items():
        inside = any(len(other) > len(location) and other[: len(location)] == location for other in groups)
        if inside and len(group[0]["loc"]) > len(location):
            continue  # a union's rejected member, where another member got further inside
        if (path := dotted(location)) in known:
            continue
        message, hint = _say(location, group)
        is_section = any(key[:-1] == location for key in document.keys)
        of_key = is_section or group[0]["input"] is None or group[0]["type"] == "extra_forbidden"
        findings.append(document.finding_at(location, message, hint, path=path, of_key=of_key))
    return findings


def _locate(details: ErrorDetails, places: Sequence[str], data: Any) -> Location:
    """Follow an error's `loc` through the data, skipping the names of union members in it.

    If a rule of a section names `places`, the result is the first of them that the data has.
    """
    for place in places:
        if _holds(data, named := (*details["loc"], *read_location(place))):
            return named
    if details["type"] == "missing":
        return details["loc"]
    location: Location = ()
    for part in details["loc"]:
        if _holds(data, (part,)):
            location = (*location, part)
            data = data[part]
    return location


def _holds(data: Any, place: Location) -> bool:
    for part in place:
        keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
        if part not in keys:
            return False
        data = data[part]
    return True


def _say(location: Location, group: list[ErrorDetails]) -> tuple[str, str]:
    """Return the message and the hint for the errors at one location.

    For a union, the message is from the member that has the right type.
    """
    kinds = [each["type"] for each in group]
    near = [kind for kind in kinds if not kind.endswith("_type") and kind != "literal_error"]
    group = [each for each in group if each["type"] in (near or kinds)]
    details = group[0]
    kind = details["type"]
    got = kind_of(details["input"])
    if kind == "extra_forbidden":
        return "unknown key", _about_unknown(location)
    if kind == "missing":
        return "is missing", _about_missing(location)
    if kind in ("broken_rules", "value_error"):
        return details["msg"].removeprefix("Value error, "), ""
    if kind == "literal_error" and len(group) == 1:
        path = dotted(location)
        chosen = str(details["input"])
        if refused := REFUSED_CHOICES.get(path, {}).get(chosen):
            return f"{got} can't work in a swarm: {refused[0]}", refused[1]
        meant = closest(FOREIGN_CHOICES.get(chosen, chosen), re.findall(r"'([^']*)'", details["msg"]))
        newer = "a newer version of the format needs a newer trahiv" * (path == "version")
        hint = f"did you mean `{meant}`?" if meant else newer
        return f"{details['msg'].removeprefix('Input ')}, got {got}", hint
    said = (re.sub(r"^.*? should | after validation| or instance of \w+", "", each["msg"]) for each in group)
    message = " or ".join(dict.fromkeys(said)).replace(" or be ", " or ")
    words_of_pydantic = {
        "a valid integer": "a whole number",
        "a valid number": "a number",
        "a valid boolean": "true or false",
        "a valid string": "text",
        "a valid list": "a list",
        "a valid dictionary": "a section (`key: value` lines)",
        f"match pattern '{NAME_PATTERN}'": "be letters, digits, `-` and `_`, at most 48",
    }
    for words, ours in words_of_pydantic.items():
        message = message.replace(words, ours)
    is_number = kinds == ["string_type"] and isinstance(details["input"], int | float)
    return f"should {message}" + f", got {got}" * (kind != "too_short"), "put it in quotes" * is_number


def _about_unknown(location: Location) -> str:
    """Return a hint about an unknown key: its section, its name here, or the keys that exist here."""
    section = general(location[:-1])
    key = str(location[-1])
    sections = sections_of_a_recipe()
    if key in FOREIGN:
        return f"other tools call it `{key}`; here it is {FOREIGN[key]}".rpartition("it is nothing: ")[2]
    if homes := [home for home, fields in sections.items() if key in fields]:
        places = (f"under `{dotted(home)}`" if home else "at the top level" for home in homes)
        return f"`{key}` belongs {' or '.join(places)}"
    elsewhere = {field: dotted((*home, field)) for home, fields in sections.items() for field in fields}
    near = closest(key, sections[section]) or elsewhere.get(closest(key, elsewhere))
    return f"did you mean `{near}`?" if near else "keys here: " + ", ".join(sections[section])


def _about_missing(location: Location) -> str:
    """Return a hint about a missing key, with the field's description."""
    field = sections_of_a_recipe()[general(location[:-1])][str(location[-1])]
    about = " ".join((field.description or "`trahiv new quickstart` has all sections").split())
    return f"add `{location[-1]}: ...` ({about.partition('. ')[0].rstrip('.')})"
