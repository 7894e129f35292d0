"""What else is told of a run, and how figures are told to a person."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.kit.figures import Told, Window


def calls_in(window: Window, told: Told) -> list[float]:
    """Return what is in the window of each of a peer's calls of `step()`, in seconds."""
    ended = (call for call in told.calls if window.start < call[0] <= window.end)
    return [min(took, at - window.start) for at, took in ended]


def blocked_s(calls: Sequence[float]) -> float:
    """Return how long calls took together, each beyond the median."""
    usual = statistics.median(calls) if calls else 0.0
    return sum(max(0.0, took - usual) for took in calls)


def reasons_of(told: Iterable[Told]) -> list[str]:
    """Say why rounds failed, as all peers tell it: one may be told of by several."""
    fell_behind = "it fell behind, and took over the others' state"
    return [why for one in told for why in (*one.failures, *(fell_behind for _ in one.adopted))]


def median_of(values: Iterable[float | None]) -> float:
    """Return the median of those that are known; NaN if none is."""
    known = [value for value in values if value is not None and value == value]
    return statistics.median(known) if known else float("nan")


def spread(values: Iterable[float | None], form: str) -> str:
    """Write the median of those that are known, and the range if there are several."""
    known = [value for value in values if value is not None and value == value]
    low, high = (format(limit(known, default=math.nan), form) for limit in (min, max))
    return f"{median_of(known):{form}}" + (f" ({low} to {high})" if len(known) > 1 else "")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay rows out as Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def counted(name: str, reasons: Iterable[str]) -> list[str]:
    """Say in lines how often there was which reason, the most frequent first."""
    return [f"- {name}: {times} x {reason}" for reason, times in Counter(reasons).most_common()]
