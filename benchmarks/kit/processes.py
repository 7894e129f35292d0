"""What processes take of a machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def tree_of(pid: int) -> list[psutil.Process]:
    """Find a process and all that it has started, itself first; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        return [first, *sorted(first.children(recursive=True), key=lambda one: one.pid)]
    return []


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Return what these processes have used of processors so far."""
    total = 0.0
    for one in processes:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return what these processes hold in memory (PSS: what several share is divided among them)."""
    total = 0
    for one in processes:
        with contextlib.suppress(psutil.Error, OSError):
            total += one.memory_full_info().pss
    return total
