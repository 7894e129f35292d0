"""Control requests to the peer of a run's folder: pause, or finish after the present round.

A request is a file in the folder, which the peer reads every second. So it is the same request from another
terminal, from the page, and after a restart of the peer. This module imports nothing heavy.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal, get_args

from trahiv_cli.errors import SetupError
from trahiv_cli.files import write_whole
from trahiv_cli.run.lock import LAUNCHED, RESOLVED, holder_of

Request = Literal["pause", "finish"]

REQUEST_FILE = "wish"
BY_ITS_USER = "its user paused it"


def request(folder: Path, what: Request | None) -> None:
    """Request `what` of the peer that trains in a folder; None requests that it trains.

    Raises SetupError if no peer trains there, or the folder can't be written; nothing was changed.
    """
    if not heeds_requests(folder):
        raise SetupError(
            f"No peer trains in {folder}; nothing was changed.",
            hint="name the run's folder: trahiv pause RUN_DIR; to stop a program of your own, press Ctrl-C",
        )
    try:
        if what is None:
            (folder / REQUEST_FILE).unlink(missing_ok=True)
        else:
            write_whole(folder / REQUEST_FILE, what.encode())
    except OSError as error:
        raise SetupError(
            f"{folder} can't be written: {error.strerror or error}; nothing was changed.",
            hint="free some space; Ctrl-C in the peer's own terminal has it leave with a checkpoint",
        ) from error


def heeds_requests(folder: Path) -> bool:
    """Return whether a peer trains in a folder; with an earlier request, it may be restarting."""
    is_there = holder_of(folder) is not None or requested(folder) is not None
    return is_there and reads_requests(folder)


def reads_requests(folder: Path) -> bool:
    """Return whether the peer of a folder reads requests: of a recipe, or of `trahiv launch`."""
    return (folder / RESOLVED).exists() or (folder / LAUNCHED).exists()


def requested(folder: Path) -> Request | None:
    """Read the request to the peer of a folder, if there is one."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (folder / REQUEST_FILE).read_text(encoding="ascii").strip()
        return next((one for one in get_args(Request) if one == text), None)
    return None


def forget_request(folder: Path) -> None:
    """Delete an earlier request: a peer that its user has just started should train."""
    with contextlib.suppress(OSError):
        (folder / REQUEST_FILE).unlink(missing_ok=True)
