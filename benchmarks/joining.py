"""How long a second peer takes to join over a home link: trahiv beside plain hivemind.

    .venv/bin/python benchmarks/joining.py [--links 100 20 5] [--sides NAME ...]

Peers, links and sides are those of `home_links.py`: 8M parameters and AdamW, so 96 MB of weights
and moments. The first peer trains alone; in the middle of its second round the second one's process is
started, knows the first one's address, and must get its state. Told, from the start of the process:

- **first byte** of the state, and how long **all bytes** took from there, of the first download;
- the first **sample** that it trains in the swarm: in the first call of `step()` that begins after the last
  download before the first joint step, or the time limit; and the same from the first byte on;
- the first **joint** step, that both peers have committed; `tests/kit/figures.py` says what that is;
- **downloads**: how often it took over the others' state until then, or steps that they had taken without it.
  A second one means that they were ahead when the first was done;
- the longest call of **the donor's** `step()` from the start of the joiner's process to that sample.

What had not happened after `--limit` seconds is `never`. Plain hivemind does not say when bytes come. If
the state breaks off it goes on without, as if it had come: a state counts that changed the joiner's
weights. Needs root.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder and `tests` are not installed

from benchmarks.kit.cells import Scenario, add_options, cells_of, run_cells
from benchmarks.kit.paced_peers import LORA, SIDES, Peers
from benchmarks.kit.tables import counted, table
from tests.kit.figures import Told, find_joint
from tests.kit.wan import address_of

DONOR, JOINER = 0, 1
ROUNDS_BEFORE = 1.5
"""That the donor trains alone: at step 0 there would be no state to get."""

DEFAULT_SIDES = ("auto", "sync-float16", "streaming-10", "hivemind")
COLUMNS = (
    *("link", "side", "first byte, s", "all bytes, s", "first sample, s", "from the first byte, s"),
    *("joint step, s", "downloads", "donor's longest `step()`, s"),
)


@dataclass(frozen=True)
class Joining:
    """How one peer joined; times in seconds since its process was started, None for what did not happen."""

    side: str
    link: str
    first_byte_s: float | None
    last_byte_s: float | None
    sample_s: float | None
    joint_s: float | None
    downloads: int
    donor_stall_s: float
    reasons: list[str]
    """Why rounds and downloads failed, as both peers tell it."""

    def __str__(self) -> str:
        """Say the most important, for a person who waits."""
        sample, joint = say_median([self.sample_s]), say_median([self.joint_s])
        return f"seconds to the first sample: {sample}, joint step: {joint}; downloads: {self.downloads}"


def joining_of(name: str, link: str, told: Sequence[Told], started: float, limit: float) -> Joining:
    """Tell how a peer joined from what donor and joiner told, its start, and the end of the run."""
    donor, joiner = told
    joint = next((one.at for one in find_joint(told)), None)
    adopted = [at for at in joiner.adopted if at <= (joint or limit)]
    begun = (at for at, took in joiner.calls if adopted and at - took >= adopted[-1])
    sample = next(begun, None)
    until = sample or limit
    stalls = (took for at, took in donor.calls if started < at <= until)
    return Joining(
        side=name,
        link=link,
        first_byte_s=_between(started, next((at for at, have, _ in joiner.downloading if have), None)),
        last_byte_s=_between(
            started, next((at for at, have, total in joiner.downloading if have == total > 0), None)
        ),
        sample_s=_between(started, sample),
        joint_s=_between(started, joint),
        downloads=len(adopted),
        donor_stall_s=max(stalls, default=until - started),
        reasons=[*donor.failures, *joiner.failures],
    )


def say_median(times: Iterable[float | None]) -> str:
    """Say the median; what never happened comes last."""
    median = statistics.median_low(math.inf if one is None else one for one in times)
    return "never" if math.isinf(median) else f"{median:.1f}"


def measure(name: str, scenario: Scenario, limit_s: float) -> Joining:
    """Have one peer join once, and wait until both have committed a step, or for `limit_s`."""
    side = SIDES[name]
    alone = ROUNDS_BEFORE * LORA.target_batch_size * side.pace.steps_per_round
    with scenario.network() as wan, Peers(spawn=wan.spawn) as peers:

        def start(number: int) -> None:
            pace_s, host = scenario.paces_s[number], address_of(number)
            peers.start(side, LORA, pace_s, host, is_late=number == JOINER)
            peers.go([number])

        start(DONOR)
        while len(peers.told[DONOR].calls) < alone:
            peers.listen()
        started = time.monotonic()
        start(JOINER)
        while time.monotonic() < started + limit_s:
            if peers.listen() and find_joint(peers.told):
                break
        return joining_of(name, scenario.name, peers.told, started, time.monotonic())


def rows(results: Sequence[Joining]) -> Iterator[tuple[str, ...]]:
    """Give the medians, one row for each side on each link."""
    for link, side in dict.fromkeys((one.link, one.side) for one in results):
        runs = [one for one in results if (one.link, one.side) == (link, side)]
        yield (
            link,
            side,
            say_median(one.first_byte_s for one in runs),
            say_median(_between(one.first_byte_s, one.last_byte_s) for one in runs),
            say_median(one.sample_s for one in runs),
            say_median(_between(one.first_byte_s, one.sample_s) for one in runs),
            say_median(one.joint_s for one in runs),
            f"{statistics.median(one.downloads for one in runs):g}",
            f"{statistics.median(one.donor_stall_s for one in runs):.2f}",
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def main() -> None:
    """Measure all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, DEFAULT_SIDES, runs=1)
    parser.add_argument("--limit", type=float, default=600, help="s after which a joiner is given up")
    options = parser.parse_args()
    results = run_cells(cells_of(options, partial(measure, limit_s=options.limit)), options.json)
    reasons = (counted(f"{one.link} Mbit/s, {one.side}", one.reasons) for one in results)
    print(table(COLUMNS, rows(results)), *chain.from_iterable(reasons), sep="\n")


if __name__ == "__main__":
    main()
