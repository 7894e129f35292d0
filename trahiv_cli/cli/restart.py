"""A peer whose processes have failed starts itself again, with its own command line.

The process keeps its id, its terminal and its output; everything else begins anew, from the checkpoint or the
swarm's state.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import time
from typing import NoReturn

import psutil

from trahiv_cli.errors import PeerBroken

VARIABLE = "TRAHIV_RESTARTS"
"""Environment variable with the times of this process's restarts, in seconds since 1970."""

RESTARTS, RESTARTS_WITHIN_S = 3, 600.0
"""At most this many restarts within this time; then the failure ends the peer."""


def restart(command: str, failure: PeerBroken) -> NoReturn:
    """Start this process again with a command line, whose first word is `trahiv`, because of a failure.

    Raises:
        PeerBroken: this peer has failed `RESTARTS` times within `RESTARTS_WITHIN_S`.
    """
    now = time.time()
    recent = [at for at in restarts() if at > now - RESTARTS_WITHIN_S]
    if len(recent) >= RESTARTS:
        often = f"{RESTARTS} times within {RESTARTS_WITHIN_S / 60:.0f} minutes"
        said = f"{failure.message} This peer had started again {often}."
        raise PeerBroken(said, hint=failure.hint) from failure
    os.environ[VARIABLE] = " ".join(map(str, [*recent, now]))
    atexit._run_exitfuncs()  # `execv` does not: temporary folders and shared memory would stay
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "trahiv_cli", *shlex.split(command)[1:]])


def restarts() -> list[float]:
    """Return when this process has started again; empty if it never has."""
    return [float(word) for word in os.environ.get(VARIABLE, "").split()]


def seconds_spent() -> float:
    """Return how long ago this process was first started, if it has started again; else 0."""
    return time.time() - psutil.Process().create_time() if restarts() else 0.0
