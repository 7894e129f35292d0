"""Arguments and options that several commands share, so that each means the same in all of them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trahiv_cli.cli.output import FormatOption
from trahiv_cli.recipe.pasted import INVITATION, INVITATION_PREFIX, peers_in
from trahiv_cli.run.conditions import Condition, parse_condition
from trahiv_cli.run.leaving import Budget

PEER_VARIABLE = "TRAHIV_PEER"
"""Environment variable with invitations, separated by spaces: only its owner can read it."""


def option(form: str, help: str, **how: Any) -> Any:
    """Define an option of the form `--name VALUE`; its help text states its default, if it has one."""
    name, _, metavar = form.partition(" ")
    return typer.Option(name, metavar=metavar or None, help=help, show_default=False, **how)


def argument(metavar: str, help: str) -> Any:
    """Define an argument."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


RECIPE = argument("RECIPE", "A file, - for stdin, or the name of a built-in recipe.")

SetOption = Annotated[
    list[str] | None,
    option("--set SECTION.KEY=VALUE", "Replace one value of the recipe. Can be repeated."),
]


def or_usage_error(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Turn a `ValueError` of a function that parses an option into a usage error with its message."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed


def read_command(text: str) -> str:
    """Check a command line of the user's, whose program must exist, and return it unchanged."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} can't be read: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise typer.BadParameter(f"there is no program {words[0] if words else ''!r} here")
    return text


def parse_seconds(text: str) -> float:
    """Read a time, such as `2h`."""
    with contextlib.suppress(ValueError):
        if math.isfinite(seconds := Budget.parse(text).seconds):
            return seconds
    raise typer.BadParameter(f"{text!r} is not a time; write one like 10m, 2h or 3d")


def parse_multiaddr(text: str) -> str:
    """Check a multiaddr, on which a peer can listen or which it can announce, and return it unchanged."""
    from trahiv_cli.net.borrowed.multiaddr import Multiaddr

    try:
        Multiaddr(text)
    except (ValueError, TypeError, LookupError) as error:
        message = f"{text!r} is not a multiaddr; write one like /ip4/0.0.0.0/tcp/31337"
        raise typer.BadParameter(message) from error
    return text


PeerOption = Annotated[
    list[str] | None,
    option(
        "--peer ADDR",
        f"An invitation, @FILE with one, or a multiaddr. Can be repeated. Also read from {PEER_VARIABLE}.",
    ),
]
PublicOption = Annotated[bool, option("--public", "Let in each peer that knows the address.")]
HostOption = Annotated[
    list[str] | None,
    option(
        "--host-maddr M",
        "Listen on M; if M is not this machine's, announce it. Can be repeated. Default: a free TCP port.",
        parser=parse_multiaddr,
    ),
]
AnnounceOption = Annotated[
    list[str] | None,
    option(
        "--announce-maddr M",
        "Tell others that M is your address. Can be repeated.",
        parser=parse_multiaddr,
    ),
]
FolderOption = Annotated[Path | None, option("--output-dir DIR", "The run's folder. Default: runs/RUN_ID.")]


@dataclass(frozen=True)
class SharedOptions:
    """The options that `init` and `join` share, in the order of `--help`."""

    host_maddr: HostOption = None
    announce_maddr: AnnounceOption = None
    reach: Annotated[
        Literal["auto", "direct", "relay", "dial-out"],
        option("--reach", "How others reach this peer. Default: auto, which finds out."),
    ] = "auto"
    identity: Annotated[
        Path | None,
        option("--identity FILE", "This peer's key file. Default: the one in the run's folder."),
    ] = None
    output_dir: FolderOption = None
    overrides: SetOption = None
    files: Annotated[
        Path | None,
        option(
            "--files DIR",
            "Look here for copies of the run's data, by what they hold.",
            exists=True,
            file_okay=False,
        ),
    ] = None
    budget: Annotated[
        Budget | None,
        option(
            "--budget B",
            "Stop cleanly after B: 2h, 500 samples or 20 steps.",
            parser=or_usage_error(Budget.parse),
        ),
    ] = None
    wait: Annotated[
        float | None,
        option(
            "--wait T",
            "Wait at most T for swarm.min_peers before step 1. Default: 1h.",
            parser=parse_seconds,
        ),
    ] = None
    name: Annotated[
        str,
        option("--name NAME", "A name that all in the swarm see beside this peer's id."),
    ] = ""
    only_when: Annotated[
        list[Condition] | None,
        option(
            "--only-when CONDITION",
            "Pause unless it holds, like idle or 22:00-07:00. Can be repeated.",
            parser=or_usage_error(parse_condition),
        ),
    ] = None
    max_upload: Annotated[
        float | None,
        option("--max-upload MBIT", "Send no more than so many Mbit/s. Default: no limit.", min=1),
    ] = None
    max_download: Annotated[
        float | None,
        option("--max-download MBIT", "Receive no more than so many Mbit/s. Default: no limit.", min=1),
    ] = None
    niceness: Annotated[
        int | None,
        option(
            "--niceness N",
            "Let other programs go first: 0 to 19. Default: as the shell.",
            min=0,
            max=19,
        ),
    ] = None
    metrics: Annotated[
        int | None,
        option(
            "--metrics PORT",
            "Serve metrics for Prometheus on this port of this machine.",
            min=1,
            max=65535,
        ),
    ] = None
    on_event: Annotated[
        str | None,
        option(
            "--on-event C",
            "Run C, the event on its stdin, when a person should know of it.",
            parser=read_command,
        ),
    ] = None
    format: FormatOption = None
    yes: Annotated[bool, option("--yes", "Do not ask questions.")] = False
    dry_run: Annotated[bool, option("--dry-run", "Only show what would run and what it costs.")] = False


def with_shared_options(command: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """Give a command the options of `SharedOptions` after its own; it gets them as its last parameter.

    The ones in `without` have no meaning for it and keep their defaults.
    """
    every = inspect.signature(SharedOptions, eval_str=True).parameters
    shared = {name: parameter for name, parameter in every.items() if name not in without}
    *own, last = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {name: given.pop(name) for name in shared}
        command(**given, **{last.name: SharedOptions(**values)})

    run.__signature__ = inspect.Signature([*own, *shared.values()])  # type: ignore[attr-defined]
    return run


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
        # A word processor makes other dashes of `--`.
        if words and re.fullmatch("[-–—]+peer", words[-1]):
            words.pop()
    while words[:1] == ["trahiv"]:
        del words[0]
    if words[:3] == ["join", "trahiv", "join"]:
        del words[:2]
    words = words or ["join"] * bool(invitations)
    if invitations and words[0] not in ("join", "launch", "status", "watch", "doctor", "members"):
        return [INVITATION.sub(f"{INVITATION_PREFIX}...", word) for word in typed], []  # none accepted
    return words, invitations


def taken_peers(typed: list[str] | None = None) -> list[str]:
    """Take the invitations out of the environment, so that child processes do not get them.

    They come after the `typed` ones.
    """
    text = os.environ.pop(PEER_VARIABLE, "")
    return [*(typed or ()), *(peers_in(text) or text.split())]
