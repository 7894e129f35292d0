"""What a mode's samples are worth: the losses of its runs beside those of `sync`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.kit.figures import median_of

SYNC = "sync-float16"


ACCEPTED = 1.02
"""Times the final loss of `sync`."""


@dataclass(frozen=True)
class Point:
    """How good the agreed weights were, and when."""

    samples: int
    """Of all peers, committed until then."""

    seconds: float
    """Since the run began."""

    loss: float
    """On held-out data, in nats per token."""


@dataclass(frozen=True)
class Run:
    """One run of a side."""

    side: str
    seed: int
    points: list[Point]
    """By samples; the first one before the first step, the last one after the last."""

    bytes_sent: int
    """On both uplinks."""

    reasons: list[str]
    """Why rounds failed, as both peers tell it: one may be told of by both."""

    late: float
    """Share of batches that took the CPU longer than the pace allows, of the peer that was worse off."""

    def __str__(self) -> str:
        """Say what came of it, for a person who waits."""
        return f"{self.last.loss:.4f} after {self.last.samples} samples in {self.last.seconds:.0f} s"

    @property
    def last(self) -> Point:
        """What came of it."""
        return self.points[-1]

    @property
    def bytes_per_sample(self) -> float:
        """On both uplinks."""
        return self.bytes_sent / self.last.samples


def seconds_to(points: Sequence[Point], loss: float) -> float | None:
    """Find when a loss was reached first, on straight lines between points; None if it was not."""
    if points[0].loss <= loss:
        return points[0].seconds
    for before, after in pairwise(points):
        if after.loss <= loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def spread(values: Sequence[float], form: str) -> str:
    """Write a median, and the range if there are several."""
    if not values:
        return "-"
    low, high = (format(limit(values), form) for limit in (min, max))
    return f"{median_of(values):{form}}" + (f" ({low} to {high})" if len(values) > 1 else "")


def table(runs: Sequence[Run]) -> str:
    """Lay the medians out as Markdown, sides in the order in which they come."""
    lines = [
        "| side | final eval loss | against sync, % | samples | wall time, s | to sync + 2 %, s "
        "| kB a sample | times fewer than sync | failed rounds | late |",
        "|---" * 10 + "|",
    ]
    sync = {run.seed: run for run in runs if run.side == SYNC}
    for side in dict.fromkeys(run.side for run in runs):
        own = [run for run in runs if run.side == side]
        pairs = [(run, sync[run.seed]) for run in own if run.seed in sync]
        times = [seconds_to(run.points, ACCEPTED * other.last.loss) for run, other in pairs]
        cells = (
            spread([run.last.loss for run in own], ".4f"),
            spread([100 * (run.last.loss / other.last.loss - 1) for run, other in pairs], "+.2f"),
            f"{median_of(run.last.samples for run in own):.0f}",
            f"{median_of(run.last.seconds for run in own):.0f}",
            "never" if pairs and None in times else f"{median_of(times):.0f}" if pairs else "-",
            f"{median_of(run.bytes_per_sample for run in own) / 1e3:.1f}",
            spread([other.bytes_per_sample / run.bytes_per_sample for run, other in pairs], ".1f"),
            f"{median_of(float(len(run.reasons)) for run in own):g}",
            f"{median_of(run.late for run in own):.3f}",
        )
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines)
