"""A process that starts itself again: after a failure, or to free all that it held."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import sys
import time
from typing import NoReturn

import psutil

from trahiv_cli.errors import PeerBroken
from trahiv_cli.train.leaving import Budget

RESTARTS_VARIABLE = "TRAHIV_RESTARTS"
"""Environment variable with the times of this process's restarts after failures, in seconds since 1970."""

SPENT_VARIABLE = "TRAHIV_SPENT"
"""Environment variable with the samples and steps of a budget that were given before it started again."""

RESTARTS = 3
RESTARTS_WITHIN_S = 600.0
"""At most this many restarts within this time; then the failure ends the peer."""


def restart(command: str, failure: PeerBroken) -> NoReturn:
    """Start this process again with a command line because of a failure.

    Raises:
        PeerBroken: this peer has failed `RESTARTS` times within `RESTARTS_WITHIN_S`.
    """
    now = time.time()
    recent = [at for at in restarts() if at > now - RESTARTS_WITHIN_S]
    if len(recent) >= RESTARTS:
        often = f"{RESTARTS} times within {RESTARTS_WITHIN_S / 60:.0f} minutes"
        said = f"{failure.message} This peer had started again {often}."
        raise PeerBroken(said, hint=failure.hint) from failure
    os.environ[RESTARTS_VARIABLE] = " ".join(map(str, [*recent, now]))
    start_again(command)


def start_again(command: str) -> NoReturn:
    """Start this process again with a command line, whose first word is `trahiv`."""
    os.environ.setdefault(RESTARTS_VARIABLE, "")
    atexit._run_exitfuncs()  # `execv` does not: temporary folders and shared memory would stay
    sys.stdout.flush()
    sys.stderr.flush()
    for file in map(int, os.listdir("/dev/fd")):  # torch's keeper of memory stays while one is open
        with contextlib.suppress(OSError):  # the list's own
            os.set_inheritable(file, file <= 2)
    os.execv(sys.executable, [sys.executable, "-m", "trahiv_cli", *shlex.split(command)[1:]])


def is_again() -> bool:
    """Whether this process has started again by itself: after a failure, or to free all that it held."""
    return RESTARTS_VARIABLE in os.environ


def restarts() -> list[float]:
    """Return when this process has started again after a failure."""
    return [float(word) for word in os.environ.get(RESTARTS_VARIABLE, "").split()]


def spent_before() -> tuple[int, int]:
    """Return how many samples and steps of its budget this peer has spent before it started again."""
    samples, steps = map(int, os.environ.get(SPENT_VARIABLE, "0 0").split())
    return samples, steps


def note_spent(spent: Budget) -> None:
    """Have the next process know what this one has spent of the budget, and those before it."""
    samples, steps = spent_before()
    os.environ[SPENT_VARIABLE] = f"{samples + spent.samples:.0f} {steps + spent.steps:.0f}"


def seconds_spent() -> float:
    """Return how long ago this process was first started, if it has started again; else 0."""
    return time.time() - psutil.Process().create_time() if is_again() else 0.0
