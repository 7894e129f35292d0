"""A recipe as the bytes that peers publish: its wire form as JSON, deflated, and bounded on both sides."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.agreement import canonical, to_wire
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.recipe.untrusted import require_bounded, require_harmless

MAX_PACKED_BYTES = 14_000
"""Every newcomer fetches what every peer published. A usual recipe takes 800 bytes, one with the chat
template of Qwen3 1,800, with that of gpt-oss (17 KB, the longest that TRL ships) 5,000."""

MAX_RECIPE_BYTES = 128 * 1024
"""Of the JSON."""


def pack(recipe: Recipe) -> bytes:
    """Deflate a recipe's wire form.

    Raises:
        RecipeError: it is too long to travel, or has something in it that no peer would take from another.
    """
    wire = to_wire(recipe)
    try:
        require_harmless(require_bounded(wire, wire["v"]))
    except RecipeError as error:
        findings = tuple(replace(finding, file="") for finding in error.findings)
        raise RecipeError("No other peer would take this recipe over.", error.hint, findings) from None
    text = canonical(wire)
    packed = zlib.compress(text, level=9)
    if len(packed) > MAX_PACKED_BYTES or len(text) > MAX_RECIPE_BYTES:
        raise RecipeError(
            f"The recipe is too long to travel: {len(text)} bytes, {len(packed)} deflated; at most "
            f"{MAX_RECIPE_BYTES} and {MAX_PACKED_BYTES}.",
            _how_to_shorten(recipe),
        )
    return packed


def unpack(packed: bytes) -> dict[str, Any]:
    """Inflate a record to a wire form, at most `MAX_RECIPE_BYTES` of it.

    Args:
        packed: a stranger's bytes; what comes after the end of the deflated text does not count.

    Raises:
        RecipeError: it is not a recipe's record.
    """
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


_SHORTEN: dict[str, tuple[Callable[[Recipe], object], str]] = {
    "data.chat_template": (
        lambda recipe: recipe.data.chat_template,
        "shorten the template, or leave it out to use the tokenizer's own",
    ),
    "model.config": (
        lambda recipe: recipe.model.config,
        "name a model by its hub id or folder instead of spelling it out",
    ),
    "data.datasets": (
        lambda recipe: [dataset.model_dump() for dataset in recipe.data.datasets],
        "name a folder or a glob instead of many files",
    ),
    "seq_cls.labels": (
        lambda recipe: recipe.seq_cls and recipe.seq_cls.labels,
        "shorten the names of the classes",
    ),
}


def _how_to_shorten(recipe: Recipe) -> str:
    """Say which of the parts that may be long is the longest, and what to do about it."""
    lengths = {name: len(canonical(part(recipe))) for name, (part, _) in _SHORTEN.items()}
    longest = max(lengths, key=lambda name: lengths[name])
    return f"`{longest}` takes {lengths[longest]} bytes of it: {_SHORTEN[longest][1]}"
