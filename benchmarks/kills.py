"""What SIGKILL costs: all peers killed at once, ten times in a row; one of them killed each minute.

    .venv/bin/python benchmarks/kills.py [--times 10] [--minutes 10] [--json FILE]

The peers are those of `benchmarks/kit/keeper.py`: the real command, and a supervisor that starts a peer again
that has ended, after 3 s.

- **All at once**: for each time the furthest checkpoint that any of them had told of, the step that the run
  went on with, and the seconds from the moment when the first of them was started again until a step was
  taken, and until all of them took one together.
- **One a minute**: the last peer is killed. The others' samples in committed steps for each second, over
  the minutes with kills, as a share of the minutes before without; and the longest time between two of
  their steps. The killed one's start takes ten seconds of a core, of which the others here have two.

Asserts nothing. Needs root, 4 GiB, and nothing else running.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder and `tests` are not installed

from benchmarks.kit.keeper import Keeper, KeptPeer
from benchmarks.kit.tables import spread, table
from tests.kit.verdicts import Event

START_LIMIT_S = 180.0
STEPS_BETWEEN = 12
"""Between two times that all are killed: two checkpoints at least."""

KILL_EVERY_S = 60.0


@dataclass(frozen=True)
class Revival:
    """A time that all were killed at once."""

    saved: int
    """Step of the furthest checkpoint that was told of."""

    reached: int
    """Last step that anybody told of; what lies between the two is trained again."""

    went_on: int
    """First step that was taken after."""

    step_s: float
    together_s: float


@dataclass(frozen=True)
class Cost:
    """What a kill each minute cost those that were not killed."""

    minutes: float
    kills: int
    rate_before: float
    """Their samples a second, all together, without kills."""

    rate: float
    longest_before_s: float
    """Between two of their steps."""

    longest_s: float

    @property
    def lost(self) -> float:
        """Share of their time."""
        return 1 - self.rate / self.rate_before


def kill_all(keeper: Keeper) -> Revival:
    """Kill all peers at once, and wait until they train together again."""
    at = keeper.furthest()
    keeper.wait(lambda: keeper.furthest() >= at + STEPS_BETWEEN, START_LIMIT_S, "some steps")
    for peer in keeper.peers:
        peer.send(signal.SIGKILL)
    keeper.wait(lambda: not any(peer.is_running for peer in keeper.peers), START_LIMIT_S, "all have ended")
    now = time.time()
    saved = max(one["step"] for peer in keeper.peers for one in peer.said("checkpoint"))
    reached = keeper.furthest()
    keeper.wait(lambda: any(peer.is_running for peer in keeper.peers), START_LIMIT_S, "one is started again")
    began = time.monotonic()

    def taken() -> list[Event]:
        return [one for peer in keeper.peers for one in peer.said("step") if one["t"] > now]

    keeper.wait(lambda: bool(taken()), START_LIMIT_S, "a step is taken")
    step_s = time.monotonic() - began
    keeper.wait_until_together(START_LIMIT_S)
    return Revival(saved, reached, min(one["step"] for one in taken()), step_s, time.monotonic() - began)


def kill_one_a_minute(keeper: Keeper, minutes: float) -> Cost:
    """Train half of that time without kills, then all of it with them."""
    *others, victim = keeper.peers
    began = time.time()
    keeper.wait(lambda: time.time() >= began + 30 * minutes, 31 * minutes, "the time is over")
    first, kills = time.time(), 0
    while time.time() < first + 60 * minutes:
        victim.send(signal.SIGKILL)
        kills += 1
        due = first + KILL_EVERY_S * kills
        keeper.wait(lambda due=due: time.time() >= due, 2 * KILL_EVERY_S, "the minute is over")
    rate_before, longest_before_s = figures_of(others, began, first)
    rate, longest_s = figures_of(others, first, time.time())
    return Cost(minutes, kills, rate_before, rate, longest_before_s, longest_s)


def figures_of(peers: Sequence[KeptPeer], start: float, end: float) -> tuple[float, float]:
    """Return these peers' samples a second, and their longest time between two steps, between two moments.

    From each peer's first step there to its last: what lies at the edges belongs to steps outside.
    """
    steps = [[one for one in peer.said("step") if start <= one["t"] < end] for peer in peers]
    rates = (sum(one["my_samples"] for one in own[1:]) / (own[-1]["t"] - own[0]["t"]) for own in steps)
    return sum(rates), max(after["t"] - before["t"] for own in steps for before, after in pairwise(own))


def text_of(revivals: Sequence[Revival], cost: Cost | None) -> str:
    """Say what came of it."""
    lines = []
    if revivals:
        columns = ("saved", "reached", "went on with", "a step after, s", "all together after, s")
        rows = ([f"{value:.4g}" for value in vars(one).values()] for one in revivals)
        step_s = spread((one.step_s for one in revivals), ".1f")
        lines = [table(columns, rows), "", f"a step after {step_s} s", ""]
    if cost is not None:
        lines += [
            f"{cost.kills} kills in {cost.minutes:.0f} min: the others trained {cost.rate:.2f} samples/s, "
            f"{cost.rate_before:.2f} before: {100 * cost.lost:+.1f} % of their time lost",
            f"the longest between two steps: {cost.longest_s:.1f} s, before: {cost.longest_before_s:.1f} s",
        ]
    return "\n".join(lines)


def main() -> None:
    """Run both and tell."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=10, help="that all are killed at once")
    parser.add_argument("--minutes", type=float, default=10, help="with a kill in each")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    revivals: list[Revival] = []
    with tempfile.TemporaryDirectory() as folder, Keeper(Path(folder) / "run") as keeper:
        keeper.start_all(START_LIMIT_S)
        for _ in range(options.times):
            revivals.append(kill_all(keeper))
            print(revivals[-1], flush=True)
        cost = kill_one_a_minute(keeper, options.minutes) if options.minutes else None
    print(text_of(revivals, cost))
    if options.json:
        told = {"revivals": [asdict(one) for one in revivals], "cost": cost and asdict(cost)}
        options.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
