"""Restart this process: after a failure, or to free all that it holds."""

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
from trahiv_cli.run.leaving import Budget

RESTARTS_VARIABLE = "TRAHIV_RESTARTS"
"""Environment variable with the times of this process's restarts after failures, in seconds since 1970."""

SPENT_VARIABLE = "TRAHIV_SPENT"
"""Environment variable with the samples and steps of the budget that were spent before the restart."""


def restart(command: str, failure: PeerBroken) -> NoReturn:
    """Restart this process with a command line because of a failure; see `count_restart`."""
    count_restart(failure)
    start_again(command)


def count_restart(failure: PeerBroken) -> None:
    """Count a restart because of a failure.

    Raises:
        PeerBroken: this peer has already restarted 3 times within 10 minutes.
    """
    now = time.time()
    recent = [at for at in restarts() if at > now - 600.0]
    if len(recent) >= 3:
        said = f"{failure.message} This peer had started again 3 times within 10 minutes."
        raise PeerBroken(said, hint=failure.hint) from failure
    os.environ[RESTARTS_VARIABLE] = " ".join(map(str, [*recent, now]))


def start_again(command: str) -> NoReturn:
    """Restart this process with a command line, whose first word is `trahiv`."""
    replace_process([sys.executable, "-m", "trahiv_cli", *shlex.split(command)[1:]])


def replace_process(arguments: list[str]) -> NoReturn:
    """Replace this process by this interpreter with these arguments, of which the first is its name."""
    os.environ.setdefault(RESTARTS_VARIABLE, "")
    atexit._run_exitfuncs()  # `execv` does not run them: temporary folders and shared memory would stay
    sys.stdout.flush()
    sys.stderr.flush()
    for file in map(int, os.listdir("/dev/fd")):  # torch's shared-memory manager lives while one is open
        with contextlib.suppress(OSError):  # the listing's own descriptor
            os.set_inheritable(file, file <= 2)
    os.execv(sys.executable, arguments)


def is_again() -> bool:
    """Whether this process has restarted itself: after a failure, or to free all that it held."""
    return RESTARTS_VARIABLE in os.environ


def restarts() -> list[float]:
    """Return the times of this process's restarts after failures, in seconds since 1970."""
    return [float(word) for word in os.environ.get(RESTARTS_VARIABLE, "").split()]


def spent_before() -> tuple[int, int]:
    """Return how many samples and steps of its budget this peer spent before it restarted."""
    samples, steps = map(int, os.environ.get(SPENT_VARIABLE, "0 0").split())
    return samples, steps


def left_of(budget: Budget) -> Budget:
    """Subtract the time, samples and steps that this peer spent before it restarted."""
    samples, steps = spent_before()
    return Budget(budget.seconds - seconds_spent(), budget.samples - samples, budget.steps - steps)


def note_spent(spent: Budget) -> None:
    """Add the budget that this process has spent to the earlier sum, for the next process."""
    samples, steps = spent_before()
    os.environ[SPENT_VARIABLE] = f"{samples + spent.samples:.0f} {steps + spent.steps:.0f}"


def seconds_spent() -> float:
    """Return the seconds since this process was first started, if it has restarted; else 0."""
    return time.time() - psutil.Process().create_time() if is_again() else 0.0
