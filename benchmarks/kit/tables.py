"""How figures are told to a person."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence


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
