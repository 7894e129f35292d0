"""How a recipe travels: its wire form, the bytes that peers publish, and what a newcomer makes of them.

1. `to_wire` is the agreement, and the starter's own choices as suggestions.
2. `pack` deflates that as JSON, and refuses at home what no other peer would take.
3. `unpack` inflates a stranger's bytes within bounds.
4. `from_wire` checks what came as something a stranger wrote (`untrusted.py`), and makes a recipe of it.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.agreement import agreement, canonical, datasets_in
from trahiv_cli.recipe.content import put_copies
from trahiv_cli.recipe.document import dotted, leaves
from trahiv_cli.recipe.load import parse_recipe
from trahiv_cli.recipe.schema import SUGGESTED, Recipe, marks_of
from trahiv_cli.recipe.untrusted import SOURCE, require_bounded, require_harmless, require_replaced

WIRE_VERSION = 1

MAX_PACKED_BYTES = 14_000
"""Every newcomer fetches what every peer published. A usual recipe takes 800 bytes, one with the chat
template of Qwen3 1,800, with that of gpt-oss (17 KB, the longest that TRL ships) 5,000."""

MAX_RECIPE_BYTES = 128 * 1024
"""Limit of the JSON, in bytes."""


def to_wire(recipe: Recipe) -> dict[str, Any]:
    """Return what a newcomer needs: the agreement, and the starter's own choices as suggestions."""
    suggested: dict[str, Any] = {}
    for location, value in leaves(recipe.to_data()):
        if SUGGESTED in marks_of(location):
            *sections, name = map(str, location)
            place = suggested
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
    return {"v": WIRE_VERSION, "shared": agreement(recipe), "suggested": suggested}


def from_wire(obj: object, overrides: Sequence[str] = (), files: Path | None = None) -> Recipe:
    """Check what a swarm published, as something a stranger wrote, and make a recipe of it.

    The newcomer's own `overrides` (`--set`) are trusted, and bring what a `local:` entry stands for; so may
    `files`, a folder with copies of the starter's data (`put_copies`). Without it nothing is read.

    Raises:
        RecipeError: it is too large, names a place on this machine or one of this peer's own fields, is
            no recipe, or needs a file that neither `overrides` nor `files` bring.
    """
    wire = require_bounded(obj, WIRE_VERSION)
    require_harmless(wire)
    data = copy.deepcopy(wire["shared"])
    _fill_in(data, wire["suggested"])
    if files is not None:
        put_copies(datasets_in(data), files)
    require_replaced(data, overrides, files)
    return parse_recipe(data, SOURCE, overrides)


def pack(recipe: Recipe) -> bytes:
    """Deflate a recipe's wire form; a `RecipeError` if it is too long, or no other peer would take it."""
    wire = to_wire(recipe)
    try:
        require_harmless(require_bounded(wire, WIRE_VERSION))
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
    """Inflate a stranger's bytes to a wire form, or raise a `RecipeError`; what follows is ignored."""
    if len(packed) > MAX_PACKED_BYTES:
        raise RecipeError("A peer published a recipe that is too long.")
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(packed, MAX_RECIPE_BYTES)
        if not inflater.eof:
            raise RecipeError("A peer published a recipe that is too long, or broken off.")
        wire: dict[str, Any] = json.loads(text)
        require_bounded(wire, wire["v"])  # before anything walks it; the version is `from_wire`'s to judge
        canonical(wire)  # NaN, half a character: what has no canonical form has no fingerprint
    except (zlib.error, ValueError, TypeError, LookupError, RecursionError) as error:
        raise RecipeError("A peer published a recipe that can't be read.") from error
    return wire


def _fill_in(data: dict[str, Any], more: dict[str, Any]) -> None:
    """Add what `data` does not have; nothing in it is replaced, whatever a stranger put there."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _fill_in(data[key], value)
        else:
            data.setdefault(key, value)
