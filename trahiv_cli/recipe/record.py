"""The wire form of a recipe, and the checks of a stranger's recipe before the schema sees it.

1. `to_wire` returns the agreement, and the starter's own choices as suggestions.
2. `pack` compresses the wire form as JSON, and refuses a recipe that other peers would refuse.
3. `unpack` decompresses a stranger's bytes, with limits on size, depth and number of values.
4. `from_wire` refuses names of places on this machine (absolute and relative paths, globs, URLs) and this
   peer's own fields. Then the schema checks the recipe, also for keys that make transformers run code from a
   hub, and the newcomer must bring the files that only the starter has.

A chat template is text, never the name of a file; transformers renders it in Jinja's sandbox. Not covered:
whether the model or the data are worth training on, and a template that never ends. `join` shows the recipe
and asks.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trahiv_cli.errors import Finding, RecipeError
from trahiv_cli.recipe.agreement import AgreedRun, canonical
from trahiv_cli.recipe.content import in_words, with_copies
from trahiv_cli.recipe.document import LARGEST, Document, Location, dotted, is_text, kind_of, leaves
from trahiv_cli.recipe.load import parse_recipe
from trahiv_cli.recipe.paths import (
    LOCAL,
    PACKAGED_BUILDERS,
    is_hub_id,
    is_local,
    is_own_reward,
    reaches_out,
)
from trahiv_cli.recipe.schema import Recipe, marks_of
from trahiv_cli.recipe.section import COMPARED, OWN, SUGGESTED

SOURCE = "the swarm's recipe"
WIRE_VERSION = 1

MAX_PACKED_BYTES = 14_000
"""Limited because every newcomer fetches the recipes of all peers. A usual recipe takes 800 bytes, 1,800 with
the chat template of Qwen3, 5,000 with the template of gpt-oss (17 KB, the longest that TRL ships)."""

MAX_RECIPE_BYTES = 128 * 1024
"""Limit of the JSON, in bytes, and of all its texts together, in characters."""

PATH_KEYS = frozenset({"path", "model_name_or_path", "tokenizer_name_or_path"})
"""Fields whose text libraries look up on this machine before they ask the hub."""


def to_wire(run: AgreedRun) -> dict[str, Any]:
    """Return the wire form: the agreement, and the starter's own choices as suggestions."""
    suggested = Document({}, "")
    for location, value in leaves(run.recipe.to_data()):
        if SUGGESTED in marks_of(location):
            suggested.put(location, value)
    return {"v": WIRE_VERSION, "shared": run.agreement, "suggested": suggested.data}


def from_wire(obj: object, overrides: Sequence[str] = (), files: Path | None = None) -> Recipe:
    """Check the wire form that a swarm published, which is untrusted, and make a recipe of it.

    The newcomer's own `overrides` (`--set`) are trusted, and give the path for a `local:` entry. `files`, a
    folder with copies of the starter's data (`with_copies`), may do that too; without it no file is read.

    Raises:
        RecipeError: it is too large, names a place on this machine or one of this peer's own fields, is
            no recipe, or needs a file that neither `overrides` nor `files` provide.
    """
    wire = _bounded(obj)
    if type(wire["v"]) is not int or wire["v"] != WIRE_VERSION:
        message = f"is in another form than this version's ({WIRE_VERSION})"
        raise _refusal(("v", message), hint="use the starter's trahiv")
    _require_harmless(wire)
    recipe = parse_recipe(_completed(wire["shared"], wire["suggested"]), SOURCE, overrides)
    recipe = with_copies(recipe, files)
    _require_brought(recipe, files)
    return recipe


def pack(run: AgreedRun) -> bytes:
    """Compress a recipe's wire form; `RecipeError` if it is too long, or if other peers would refuse it."""
    wire = to_wire(run)
    try:
        _require_harmless(_bounded(wire))
    except RecipeError as error:
        findings = tuple(replace(finding, file="") for finding in error.findings)
        raise RecipeError("No other peer would take this recipe over.", error.hint, findings) from None
    text = canonical(wire)
    packed = zlib.compress(text, level=9)
    if len(packed) > MAX_PACKED_BYTES or len(text) > MAX_RECIPE_BYTES:
        length, part = max((len(canonical(value)), dotted(place)) for place, value in leaves(wire["shared"]))
        raise RecipeError(
            f"The recipe is too long to travel: {len(text)} bytes, {len(packed)} deflated; at most "
            f"{MAX_RECIPE_BYTES} and {MAX_PACKED_BYTES}.",
            f"`{part}` takes {length} bytes of it: shorten that",
        )
    return packed


def unpack(packed: bytes) -> dict[str, Any]:
    """Decompress a stranger's bytes to a wire form, or raise `RecipeError`; trailing bytes are ignored."""
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(packed, MAX_RECIPE_BYTES)
        if len(packed) > MAX_PACKED_BYTES or not inflater.eof:
            raise ValueError("too long, or broken off")
        return _bounded(json.loads(text))  # `from_wire` checks the version
    except (zlib.error, ValueError, RecursionError) as error:
        raise RecipeError("A peer published a recipe that is too long, or can't be read.") from error


def _bounded(obj: Any) -> dict[str, Any]:
    """Return `obj` if it is a wire form of plain data within the limits; `RecipeError` if it is not."""
    parts = {"v", "shared", "suggested"}  # another version may have more
    is_whole = isinstance(obj, dict) and obj.keys() >= parts and (obj["v"] != WIRE_VERSION or len(obj) == 3)
    if not is_whole or not isinstance(obj["shared"], dict) or not isinstance(obj["suggested"], dict):
        raise _refusal(("", "is not in a form that this version reads"))
    max_depth = 16
    max_values = 2_000
    num_values = 0
    num_characters = 0
    waiting: list[tuple[Any, int]] = [(obj, 0)]
    while waiting:
        value, depth = waiting.pop()
        texts = list(value) if isinstance(value, dict) else [value] if isinstance(value, str) else []
        is_plain = isinstance(value, str | list | dict | None)
        if isinstance(value, int | float):
            is_plain = abs(value) <= LARGEST  # false for NaN
        if not is_plain or not all(isinstance(text, str) and is_text(text) for text in texts):
            raise _refusal(("", f"has a value that is no list, no text and no number up to {LARGEST}"))
        num_values += 1
        num_characters += sum(map(len, texts))
        if depth > max_depth or num_values > max_values or num_characters > MAX_RECIPE_BYTES:
            limits = f"{max_depth} levels, {max_values} values or {MAX_RECIPE_BYTES} characters"
            raise _refusal(("", f"has more than {limits}"))
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(inner, depth + 1) for inner in inside]
    return obj


def _require_harmless(wire: dict[str, Any]) -> None:
    """Refuse values that name a place on this machine, and fields that are this peer's own choice."""
    wrong = []
    for part in ("shared", "suggested"):
        for location, value in leaves(wire[part], is_deep=True):
            objection = _objection(location, value)
            marks = marks_of(location)
            if part == "shared" and OWN in marks:
                objection = "is this peer's own choice; a swarm may not set it"
            elif part == "suggested" and location and SUGGESTED not in marks:
                objection = "is not something that a swarm may suggest"
            if objection:
                wrong.append((dotted(location), objection))
    if wrong:
        raise _refusal(*wrong)


def _objection(location: Location, value: Any) -> str:
    """Return the objection to one value from a stranger, or ""."""
    if location == ("peft", "target_modules") and isinstance(value, str) and value != "all-linear":
        return "is a pattern, which a stranger could make run for ever; a list of names is not"
    if not isinstance(value, str) or COMPARED in marks_of(location):
        return ""
    if location[:2] == ("grpo", "rewards") and location[-1] == "name":
        is_harmless = not is_own_reward(value) or _is_local_name(value)
    elif location[-1] not in PATH_KEYS:
        is_harmless = not reaches_out(value)
    elif value.startswith(LOCAL):
        is_harmless = _is_local_name(value)
    else:
        is_harmless = is_hub_id(value) and not is_local(value) and value not in PACKAGED_BUILDERS
    return "" if is_harmless else f"{kind_of(value)} names a place on this machine or a URL"


def _is_local_name(value: str) -> bool:
    """Tell whether a stranger's text is `local:` and the name of a file or folder, without a place."""
    name = value.removeprefix(LOCAL)
    is_name = bool(re.fullmatch(r"[^/\\]+", name)) and name.isprintable() and name != ".."
    return value.startswith(LOCAL) and is_name


def _completed(shared: dict[str, Any], suggested: dict[str, Any]) -> dict[str, Any]:
    """Merge the suggestions into the shared fields; a suggestion never replaces a shared value."""
    both = {
        key: _completed(shared[key], value)
        for key, value in suggested.items()
        if isinstance(value, dict) and isinstance(shared.get(key), dict)
    }
    return {**suggested, **shared, **both}


def _require_brought(recipe: Recipe, looked_in: Path | None) -> None:
    """Raise `RecipeError` if the recipe still names files that only the starter has; hints say which."""
    findings = []
    for location, value in leaves(recipe.to_data()):
        if location[-1] not in {*PATH_KEYS, "name"} or not str(value).startswith(LOCAL):
            continue
        path = dotted(location)
        name = value.removeprefix(LOCAL)
        if location[0] == "grpo":
            said = "the starter's own code gives rewards: get the file from them, read it, and"
            hint = f"{said} `--set {path}=FILE.py:{name.rpartition(':')[2]}`"
            findings.append(Finding(path, "is on the starter's machine only", hint, SOURCE))
            continue
        content = recipe.data.datasets[int(location[2])].content if location[0] == "data" else None
        if content is None:
            hint = f"the starter has its own folder `{name}`: bring a copy and `--set {path}=FOLDER`"
        else:
            hint = "bring a copy, and name the folder that it is in: `--files DIR`"
            hint = f"{looked_in} has no copy in it or below" if looked_in else hint
            hint = f"the starter trains on its own `{name}` ({in_words(content)}): {hint}"
            if content.num_files > 1:
                hint += ". File names must sort in the same order, and there may be no other data files"
        findings.append(Finding(path, "is on the starter's machine only", hint, SOURCE))
    if findings:
        raise RecipeError(f"{SOURCE} is refused", findings[0].hint, tuple(findings))


def _refusal(*wrong: tuple[str, str], hint: str = "") -> RecipeError:
    findings = tuple(Finding(path, message, "", SOURCE) for path, message in wrong)
    return RecipeError(f"{SOURCE} is refused", hint, findings)
