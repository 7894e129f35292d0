"""Arguments and options that several commands share, so that each means the same in all of them."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trahiv_cli.cli.output import out, quiet_libraries
from trahiv_cli.recipe.pasted import INVITATION, INVITATION_PREFIX, peers_in
from trahiv_cli.train.conditions import Condition, parse_condition
from trahiv_cli.train.leaving import Budget

if TYPE_CHECKING:
    from trahiv_cli.recipe.load import Loaded

PEER_VARIABLE = "TRAHIV_PEER"
"""Environment variable with invitations, separated by spaces: only its owner can read it."""

TAKE_INVITATIONS = ("join", "status", "watch", "doctor", "members")
"""Commands that take an invitation."""

PEER_OPTION = re.compile("[-–—]+peer")
"""The option `--peer`, also with the dashes that a word processor makes of `--`."""


def option(name: str, metavar: str | None, help: str, **how: Any) -> Any:
    """Define an option, whose help text states its default, if it has one."""
    return typer.Option(name, metavar=metavar, help=help, show_default=False, **how)


def argument(metavar: str, help: str) -> Any:
    """Define an argument."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


RECIPE = argument("RECIPE", "A file, - for stdin, or the name of a built-in recipe.")

SetOption = Annotated[
    list[str] | None,
    option("--set", "SECTION.KEY=VALUE", "Replace one value of the recipe. Can be repeated."),
]


def read_recipe(
    recipe: str, overrides: Sequence[str] | None, files: Path | None = None, *, is_trained: bool = False
) -> Loaded:
    """Load the recipe of a command line.

    If it `is_trained`, it must be sound, and its data must be here. `files` is a folder with copies of its
    data, see `with_copies`.

    Raises:
        RecipeError, AssetError: see `load_recipe`, `with_copies`, `require_sound` and `read_contents`.
    """
    from trahiv_cli.recipe.content import read_contents, with_copies
    from trahiv_cli.recipe.examine import require_sound
    from trahiv_cli.recipe.load import load_recipe
    from trahiv_cli.telemetry.events import Events

    loaded = load_recipe(recipe, overrides or ())
    ours = loaded.recipe if files is None else with_copies(loaded.recipe, files)
    if is_trained:
        require_sound(ours, loaded.document)
        events = Events()
        with out.listening(events), events.waiting("the data files to be read", until_s=3600):
            ours = read_contents(ours)
    return replace(loaded, recipe=ours)


def parse_budget(text: str) -> Budget:
    """Read `2h`, `500 samples` or `20 steps`."""
    try:
        return Budget.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def read_command(text: str) -> str:
    """Check a command line of the user's, whose program must exist, and return it unchanged."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} can't be read: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise typer.BadParameter(f"there is no program {words[0] if words else ''!r} here")
    return text


def read_condition(text: str) -> Condition:
    """Read a condition of `--only-when`."""
    try:
        return parse_condition(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def parse_seconds(text: str) -> float:
    """Read a time, such as `2h`."""
    with contextlib.suppress(ValueError):
        if math.isfinite(seconds := Budget.parse(text).seconds):
            return seconds
    raise typer.BadParameter(f"{text!r} is not a time; write one like 10m, 2h or 3d")


def parse_multiaddr(text: str) -> str:
    """Check a multiaddr, on which a peer can listen or which it can announce, and return it unchanged."""
    quiet_libraries()
    from hivemind.utils.multiaddr import Multiaddr

    try:
        Multiaddr(text)
    except (ValueError, TypeError, LookupError) as error:
        message = f"{text!r} is not a multiaddr; write one like /ip4/0.0.0.0/tcp/31337"
        raise typer.BadParameter(message) from error
    return text


def hide_invitations() -> None:
    """Move typed invitations to `PEER_VARIABLE` and restart this process; with none, clean up `sys.argv`."""
    typed = sys.argv[1:]
    meant, invitations = understood(typed)
    if invitations:
        os.environ[PEER_VARIABLE] = " ".join([*taken_peers(), *invitations])
        os.execv(sys.executable, [*sys.orig_argv[: len(sys.orig_argv) - len(typed)], *meant])
    sys.argv[1:] = meant


def understood(typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words typed after `trahiv` into a command line and the invitations that were in it.

    An invitation may come without `--peer`, or within the whole line that `init` prints.
    """
    words: list[str] = []
    invitations: list[str] = []
    for word in typed:
        if INVITATION_PREFIX not in word:
            words.append(word)
            continue
        invitations += peers_in(word)
        if words and PEER_OPTION.fullmatch(words[-1]):
            words.pop()
    while words[:1] == ["trahiv"]:
        del words[0]
    if words[:3] == ["join", "trahiv", "join"]:
        del words[:2]
    words = words or ["join"] * bool(invitations)
    if invitations and words[0] not in TAKE_INVITATIONS:
        return [INVITATION.sub(f"{INVITATION_PREFIX}...", word) for word in typed], []  # none accepted
    return words, invitations


def taken_peers() -> list[str]:
    """Take the invitations out of the environment, so that child processes do not get them."""
    text = os.environ.pop(PEER_VARIABLE, "")
    return peers_in(text) or text.split()
