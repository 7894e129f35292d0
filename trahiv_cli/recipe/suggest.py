"""Hints: the key, the section or the choice that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from trahiv_cli.recipe.document import Location
from trahiv_cli.recipe.foreign import FOREIGN, MEANINGLESS, OF_THE_TASK
from trahiv_cli.recipe.schema import TASK_SECTIONS, Recipe, Section, section_of

Fields = dict[str, FieldInfo]

OF_TASKS = frozenset((section,) for section in TASK_SECTIONS.values())
"""Places of the sections that are about a task."""


def closest(word: str, words: Iterable[str]) -> str:
    """Return the nearest of `words`, or nothing if none is near."""
    return next(iter(difflib.get_close_matches(word.lower(), list(words), n=1, cutoff=0.7)), "")


def closest_choice(value: object, choices: Iterable[str]) -> str:
    """Return the choice that was probably meant: a near spelling, or the one that begins like it."""
    if not isinstance(value, str) or not value:
        return ""
    choices = list(choices)
    starting = [choice for choice in choices if choice.startswith(value.lower())]
    return starting[0] if starting else closest(value, choices)


def about_unknown(location: Location, task: object) -> str:
    """Say where an unknown key belongs, what it is called here, or which keys there are.

    Args:
        location: the key's place.
        task: what the recipe says its task is; decides between sections that have the same keys, unless
            the key is in the section of a task.
    """
    section, key = _general(location[:-1]), str(location[-1])
    sections = sections_of_a_recipe()
    task = next((task for task, name in TASK_SECTIONS.items() if (name,) == section), task)
    if key == "trust_remote_code":
        return "trahiv never runs code that a model or dataset brings"
    if key in FOREIGN:
        return _translated(key, task)
    homes = [home for home, fields in sections.items() if key in fields]
    if len(homes) > 1 and OF_TASKS.issuperset(homes):
        own = [home for home in homes if home[0] == section_of(task)]
        if not own and key in MEANINGLESS:
            return MEANINGLESS[key].format(task=task)
        homes = own or homes
    if homes:
        return (
            f"`{key}` belongs under {_either(homes)}"
            if homes != [()]
            else f"`{key}` belongs at the top level"
        )
    if near := closest(key, sections[section]):
        return f"did you mean `{near}`?"
    elsewhere = {field: home for home, fields in sections.items() for field in fields}
    if near := closest(key, elsewhere):
        return f"did you mean `{_path((*elsewhere[near], near))}`?"
    return "keys here: " + ", ".join(sections[section])


def about_missing(location: Location, is_section_there: bool) -> str:
    """Say what a missing key is for, and that its section is missing too if it is."""
    fields = sections_of_a_recipe()[_general(location[:-1])]
    key = str(location[-1])
    if _section_in(fields[key].annotation):
        return f"add `{key}:`; `trahiv new quickstart` writes a whole recipe to start from"
    about = " ".join((fields[key].description or "").split())
    where = "" if is_section_there else f"`{_path(location[:-1])}:` with "
    return f"add {where}`{key}: ...` ({about.split('. ')[0].rstrip('.')})"


def _translated(key: str, task: object) -> str:
    """Say what another tool's key is called here, in the section of the recipe's task if it is about that."""
    tool, here = FOREIGN[key]
    if OF_THE_TASK in here:
        section = section_of(task) or "clm"
        field = here.strip("`").rpartition(".")[2]
        if field not in sections_of_a_recipe()[(section,)]:
            return MEANINGLESS[field].format(task=task)
        here = here.replace(OF_THE_TASK, section)
    return f"{tool} calls it `{key}`; here it is {here}"


@cache
def sections_of_a_recipe() -> dict[Location, Fields]:
    """Return the fields of every section, by its place; an entry of a list has the index 0."""
    return dict(_walk(Recipe, ()))


def _walk(section: type[Section], location: Location) -> Iterator[tuple[Location, Fields]]:
    yield location, section.model_fields
    for name, field in section.model_fields.items():
        if inner := _section_in(field.annotation):
            index = (0,) if _holds_a_list(field.annotation) else ()
            yield from _walk(inner, (*location, name, *index))


def _section_in(annotation: Any) -> type[Section] | None:
    """Find the section inside `Section | None` or `list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


def _holds_a_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is list


def _general(location: Location) -> Location:
    return tuple(0 if isinstance(part, int) else part for part in location)


def _path(location: Location) -> str:
    return ".".join(map(str, location))


def _either(homes: list[Location]) -> str:
    return " or ".join(f"`{_path(home)}`" if home else "the top level" for home in homes)
