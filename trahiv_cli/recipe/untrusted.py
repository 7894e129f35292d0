"""What is checked of a recipe that a stranger published, before the schema sees it.

Covered: size and depth; names of places on this machine (absolute and relative paths, globs, URLs); this
peer's own fields; keys that make transformers run code from a hub. A chat template is text, never the name
of a file; transformers renders it in Jinja's sandbox.
Not covered: whether the model or the data are worth training on, and a template that takes for ever.
`join` shows the recipe and asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trahiv_cli.errors import Finding, RecipeError
from trahiv_cli.recipe.content import in_words
from trahiv_cli.recipe.document import LARGEST, Document, Location, dotted, is_text, kind_of
from trahiv_cli.recipe.paths import LOCAL, PACKAGED_BUILDERS, is_hub_id, is_local, reaches_out
from trahiv_cli.recipe.schema import COMPARED, OWN, SUGGESTED, ContentSection, marks_of

SOURCE = "the swarm's recipe"

RUNS_CODE = frozenset({"trust_remote_code", "auto_map", "custom_pipelines"})
PATH_KEYS = frozenset({"path", "model_name_or_path", "tokenizer_name_or_path"})
"""Fields whose text is looked up on this machine before the hub is asked."""

MAX_DEPTH = 16
MAX_VALUES = 2_000
MAX_CHARACTERS = 128 * 1024
"""What a stranger may send."""


def require_bounded(obj: object, version: int) -> dict[str, Any]:
    """Return `obj` as the three parts of the wire format, small enough to look at.

    Raises:
        RecipeError: it is another version, is no plain data, or is larger than the bounds above.
    """
    if not isinstance(obj, dict) or "v" not in obj:
        raise _refusal([("", "is not in a form that this version reads")])
    if type(obj["v"]) is not int or obj["v"] != version:
        message = f"is in another form than this version's ({version})"
        raise _refusal([("v", message)], "use the starter's trahiv")
    parts = obj.get("shared"), obj.get("suggested")
    if set(obj) != {"v", "shared", "suggested"} or not all(isinstance(part, dict) for part in parts):
        raise _refusal([("", "is not in a form that this version reads")])
    num_values = num_characters = 0
    waiting: list[tuple[Any, int]] = [(obj, 0)]
    while waiting:
        value, depth = waiting.pop()
        num_values += 1
        texts = list(value) if isinstance(value, dict) else [value] if isinstance(value, str) else []
        is_unicode = all(isinstance(text, str) and is_text(text) for text in texts)
        num_characters += sum(map(len, texts)) if is_unicode else 0
        wrong = ""
        if depth > MAX_DEPTH or num_values > MAX_VALUES:
            wrong = "is nested too deep or has too many values"
        elif not is_unicode:
            wrong = "has a key or a text that is not Unicode"
        elif num_characters > MAX_CHARACTERS:
            wrong = f"is longer than {MAX_CHARACTERS} characters"
        elif isinstance(value, dict | list):
            inside = value.values() if isinstance(value, dict) else value
            waiting += [(inner, depth + 1) for inner in inside]
        elif isinstance(value, int | float) and not abs(value) <= LARGEST:  # as NaN is
            wrong = f"has {kind_of(value)}, which is no number up to {LARGEST}"
        elif value is not None and not isinstance(value, int | float | str):
            wrong = f"has {kind_of(value)}, which is no number, no text and no list"
        if wrong:
            raise _refusal([("", wrong)])
    return obj


def require_harmless(wire: dict[str, Any]) -> None:
    """Refuse values that name a place here, are this peer's own to choose, or would run code."""
    wrong = []
    for part in ("shared", "suggested"):
        for location, value in _values(wire[part], ()):
            objection, marks = _objection(location, value), marks_of(location)
            if part == "shared" and OWN in marks:
                objection = "is this peer's own choice; a swarm may not set it"
            elif part == "suggested" and location and SUGGESTED not in marks:
                objection = "is not something that a swarm may suggest"
            if objection:
                wrong.append((dotted(location), objection))
    if wrong:
        raise _refusal(wrong)


def require_replaced(data: dict[str, Any], overrides: Sequence[str], looked_in: Path | None = None) -> None:
    """Raise a `RecipeError` where `local:NAME`, which only the starter has, is not replaced in `overrides`.

    It says what the newcomer must bring; `looked_in` is the folder in which copies were looked for.
    """
    brought = Document(data, SOURCE)
    brought.replace(overrides)  # `parse_recipe` reports those that cannot be read
    findings = []
    for location, value in _values(data, ()):
        is_local = isinstance(value, str) and value.startswith(LOCAL) and COMPARED not in marks_of(location)
        if not is_local or brought.is_replaced(location):
            continue
        section: Any = data
        for part in location[:-1]:
            section = section[part]
        path, name = dotted(location), value.removeprefix(LOCAL)
        try:
            known = ContentSection.model_validate(section.get("content"))
        except (ValidationError, AttributeError):  # a model's folder, or a stranger's nonsense
            hint = f"the starter has its own folder `{name}`: bring a copy and `--set {path}=FOLDER`"
        else:
            hint = "bring a copy, and name the folder that it is in: `--files DIR`"
            hint = f"{looked_in} has no copy in it or below" if looked_in else hint
            hint = f"the starter trains on its own `{name}` ({in_words(known)}): {hint}"
            if known.num_files > 1:
                hint += ". File names must sort in the same order, and there may be no other data files"
        findings.append(Finding(path, "is on the starter's machine only", hint, SOURCE))
    if findings:
        raise RecipeError(f"{SOURCE} is refused", findings[0].hint, tuple(findings))


def _values(data: Any, location: Location) -> Iterator[tuple[Location, Any]]:
    """Yield every scalar and every empty list or section; unlike `leaves` it enters all lists."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    if not items or not data:
        yield location, data
    for key, value in items:
        yield from _values(value, (*location, key))


def _objection(location: Location, value: Any) -> str:
    """Say what is wrong with one value of a stranger's, if anything is."""
    if code := RUNS_CODE.intersection(map(str, location)):
        return f"`{min(code)}` would run code from a hub"
    if location == ("peft", "target_modules") and isinstance(value, str) and value != "all-linear":
        return "is a pattern, which a stranger could make run for ever; a list of names is not"
    if not isinstance(value, str) or COMPARED in marks_of(location):
        return ""
    if value.startswith(LOCAL):
        name = value.removeprefix(LOCAL)
        is_harmless = bool(re.fullmatch(r"[^/\\]+", name)) and name.isprintable() and name != ".."
    elif location[-1] in PATH_KEYS:
        is_harmless = is_hub_id(value) and not is_local(value) and value not in PACKAGED_BUILDERS
    else:
        is_harmless = not reaches_out(value)
    return "" if is_harmless else f"{kind_of(value)} names a place on this machine or a URL"


def _refusal(wrong: Iterable[tuple[str, str]], hint: str = "") -> RecipeError:
    findings = tuple(Finding(path, message, "", SOURCE) for path, message in wrong)
    return RecipeError(f"{SOURCE} is refused", hint, findings)
