"""What benchmarks on simulated links measure: each side on each link, as often as asked."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tests.kit.figures import PeerEnded
from tests.kit.paced_peers import PACE_S, SIDES, interrupted
from tests.kit.wan import Wan

DELAY_MS = 25.0
CLOSE_RUNS_MBIT = 100.0
"""Links of this rate and more are simulated one at a time: the router takes a third of a core."""

Item = TypeVar("Item")
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Scenario:
    """What the peers' links and machines are like."""

    name: str
    rate_mbit: float
    delay_ms: float = DELAY_MS
    loss: float = 0.0
    paces_s: tuple[float, ...] = (PACE_S, PACE_S)
    """Seconds for a sample, by peer."""

    falls_to_mbit: float | None = None
    """The rate from the middle of the window on."""

    congestion: str = ""

    def network(self) -> Wan:
        """Simulate the links: a host for each peer."""
        return Wan(len(self.paces_s), self.rate_mbit, self.delay_ms, self.loss, self.congestion)

    def __str__(self) -> str:
        """Say what it is, for a person who waits."""
        fall = f", then {self.falls_to_mbit:g}" if self.falls_to_mbit else ""
        return (
            f"{self.rate_mbit:g}{fall} Mbit/s, {2 * self.delay_ms:g} ms, loss {self.loss:g}, "
            f"{' and '.join(f'{pace_s:g}' for pace_s in self.paces_s)} s a sample"
        )


BAD_LINKS = {
    one.name: one
    for one in (
        Scenario("falling", 100, falls_to_mbit=5),
        Scenario("lossy", 20, loss=0.02),
        Scenario("far", 20, delay_ms=150),
        Scenario("unlike", 20, paces_s=(PACE_S, 4 * PACE_S)),
    )
}


def link_of(text: str) -> Scenario:
    """Read a link as a person names it: one of `BAD_LINKS`, or Mbit/s up and down."""
    return BAD_LINKS.get(text) or Scenario(text, float(text))


def run_all(run: Callable[[Item], None], items: Sequence[Item], parallel: int) -> None:
    """Call `run` with each item, so many at a time; an error, or Ctrl-C, ends them all."""
    with ThreadPoolExecutor(parallel) as pool:
        try:
            list(pool.map(run, items))
        except BaseException:
            interrupted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def tell_of(name: str, measure: Callable[[], Measured]) -> Measured | None:
    """Measure, and tell of it on stderr; None if a peer was ended by an error."""
    try:
        measured = measure()
    except PeerEnded as error:
        print(f"  {name}: a peer has ended.\n{error}", file=sys.stderr, flush=True)
        return None
    print(f"  {name}: {measured}", file=sys.stderr, flush=True)
    return measured


def add_options(parser: argparse.ArgumentParser, sides: Sequence[str], runs: int) -> None:
    """Add what all benchmarks on simulated links can be told; `sides` and `runs` are defaults."""
    parser.add_argument("--links", type=link_of, nargs="+", default=list(map(link_of, ("100", "20", "5"))),
                        help=f"Mbit/s up and down, or of {', '.join(BAD_LINKS)}")  # fmt: skip
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=sides, metavar="NAME",
                        help=f"of {', '.join(SIDES)}")  # fmt: skip
    parser.add_argument("--runs", type=int, default=runs, help="of which the median counts")
    parser.add_argument("--parallel", type=int, default=1, help="how many links below 100 Mbit/s at a time")
    parser.add_argument("--congestion", default="", help="TCP's control (default: this machine's own)")
    parser.add_argument("--json", type=Path, help="write all runs here too")


def run_cells(options: argparse.Namespace, measure: Callable[[str, Scenario], Any]) -> list[Any]:
    """Measure each side on each link as often as `add_options` was told, and tell of each on stderr.

    Slow links are simulated several at a time, then the others alone.

    Returns:
        What was measured (a dataclass each), in the order of the cells, without what an error has ended.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cells = [
        (side, replace(link, congestion=options.congestion))
        for _ in range(options.runs)
        for link in options.links
        for side in options.sides
    ]
    results: dict[int, Any] = {}

    def run(place: int) -> None:
        side, scenario = cells[place]
        results[place] = tell_of(f"{side}: {scenario}", partial(measure, side, scenario))

    slow = [place for place, (_, scenario) in enumerate(cells) if scenario.rate_mbit < CLOSE_RUNS_MBIT]
    run_all(run, slow, options.parallel)
    run_all(run, [place for place in range(len(cells)) if place not in slow], 1)
    measured = [one for _, one in sorted(results.items()) if one is not None]
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in measured], indent=1))
    return measured
