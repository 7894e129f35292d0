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
- **MB**: what the router brought to it until that sample, headers included;
- the longest call of **the donor's** `step()` from the start of the joiner's process to that sample.

What had not happened after `--limit` seconds is `never`. Plain hivemind does not say when bytes come. If
the state breaks off it goes on without, as if it had come: a state counts that changed the joiner's
weights. Needs root.
"""

from __future__ import annotations

import argparse
import bisect
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder and `tests` are not installed

from benchmarks.kit.cells import Scenario, add_options, cells_of, run_cells
from benchmarks.kit.paced_peers import LORA, SIDES, Peers
from tests.kit.figures import Told, find_joint
from tests.kit.wan import address_of

DONOR, JOINER = 0, 1
ROUNDS_BEFORE = 1.5
"""That the donor trains alone: at step 0 there would be no state to get."""

DEFAULT_SIDES = ("auto", "sync-float16", "streaming-10", "hivemind")


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
    state_bytes: int | None
    """Of what was to be downloaded first."""

    received_bytes: int
    donor_stall_s: float
    reasons: list[str]
    """Why rounds and downloads failed, as both peers tell it."""

    def __str__(self) -> str:
        """Say the most important, for a person who waits."""
        sample, joint = say_median([self.sample_s]), say_median([self.joint_s])
        return f"seconds to the first sample: {sample}, joint step: {joint}; downloads: {self.downloads}"


def joining_of(
    name: str,
    link: str,
    told: Sequence[Told],
    started: float,
    limit: float,
    received: Sequence[tuple[float, int]],
) -> Joining:
    """Tell from the news how a peer joined.

    Args:
        name: of the side.
        link: its name.
        told: what donor and joiner have told.
        started: when the joiner's process was.
        limit: when the run was over.
        received: the bytes that the joiner's link had brought by several times, in their order.
    """
    donor, joiner = told
    joint = next((one.at for one in find_joint(told)), None)
    adopted = [at for at in joiner.adopted if at <= (joint or limit)]
    begun = (at for at, took in joiner.calls if adopted and at - took >= adopted[-1])
    sample = next(begun, None)
    until = sample or limit
    coming = [one for one in joiner.downloading if one[1] > 0]
    first_at, _, state_bytes = coming[0] if coming else (None, None, None)
    last_at = next((at for at, num_bytes, total in coming if num_bytes == total), None)

    def since(at: float | None) -> float | None:
        return None if at is None else at - started

    def brought(at: float) -> int:
        place = bisect.bisect_left(received, (at, 0))
        return received[min(place, len(received) - 1)][1]

    return Joining(
        side=name,
        link=link,
        first_byte_s=since(first_at),
        last_byte_s=since(last_at),
        sample_s=since(sample),
        joint_s=since(joint),
        downloads=len(adopted),
        state_bytes=state_bytes,
        received_bytes=brought(until) - brought(started),
        donor_stall_s=max(
            (took for at, took in donor.calls if started < at <= until), default=until - started
        ),
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
    with scenario.network() as wan, Peers(wan.spawn) as peers:

        def start(number: int) -> None:
            pace_s, host = scenario.paces_s[number], address_of(number)
            peers.start(side, LORA, pace_s, host, is_late=number == JOINER)
            peers.go([number])

        start(DONOR)
        while len(peers.told[DONOR].calls) < alone:
            peers.listen()
        started = now = time.monotonic()
        received = [(started, wan.counters().down_bytes[JOINER])]
        start(JOINER)
        while now < started + limit_s:
            if peers.listen() and find_joint(peers.told):
                break
            now = time.monotonic()
            received.append((now, wan.counters().down_bytes[JOINER]))
        return joining_of(name, scenario.name, peers.told, started, now, received)


def table(results: Sequence[Joining]) -> str:
    """Lay the medians out as Markdown."""
    lines = [
        "| link | side | first byte, s | all bytes, s | first sample, s | from the first byte, s "
        "| joint step, s | downloads | MB | donor's longest `step()`, s |",
        "|---" * 10 + "|",
    ]
    for link, side in dict.fromkeys((one.link, one.side) for one in results):
        runs = [one for one in results if (one.link, one.side) == (link, side)]
        numbers = (
            say_median(one.first_byte_s for one in runs),
            say_median(_between(one.first_byte_s, one.last_byte_s) for one in runs),
            say_median(one.sample_s for one in runs),
            say_median(_between(one.first_byte_s, one.sample_s) for one in runs),
            say_median(one.joint_s for one in runs),
            f"{statistics.median(one.downloads for one in runs):g}",
            f"{statistics.median(one.received_bytes for one in runs) / 1e6:.1f}",
            f"{statistics.median(one.donor_stall_s for one in runs):.2f}",
        )
        lines.append(f"| {link} | {side} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def main() -> None:
    """Measure all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, DEFAULT_SIDES, runs=1)
    parser.add_argument("--limit", type=float, default=600, help="s after which a joiner is given up")
    options = parser.parse_args()
    results = run_cells(cells_of(options, partial(measure, limit_s=options.limit)), options.json)
    print(table(results))
    for one in results:
        for reason, times in Counter(one.reasons).most_common():
            print(f"- {one.link} Mbit/s, {one.side}: {times} x {reason}")


if __name__ == "__main__":
    main()
