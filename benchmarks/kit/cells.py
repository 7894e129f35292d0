"""What benchmarks on simulated links measure: each side on each link, as often as asked."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.kit.paced_peers import PACE_S, SIDES, Peers
from tests.kit.figures import PeerEnded
from tests.kit.homes import KINDS, Home, addresses_of
from tests.kit.wan import Wan, routers_of


@dataclass(frozen=True)
class Scenario:
    """What the peers' links and machines are like."""

    name: str
    rate_mbit: float
    delay_ms: float = 25.0
    loss: float = 0.0
    paces_s: tuple[float, ...] = (PACE_S, PACE_S)
    """Seconds for a sample, by peer."""

    falls_to_mbit: float | None = None
    """The rate from the middle of the window on."""

    congestion: str = ""
    homes: str = ""
    """The kind of router behind which the peers are (`tests.kit.homes.KINDS`); empty: none."""

    def network(self) -> Wan:
        """Simulate the links: a host for each peer and, if they are at home, one that all can reach."""
        routers = [KINDS[self.homes]] * len(self.paces_s) if self.homes else []
        hosts, homes = len(self.paces_s) + bool(routers), routers_of(routers)
        return Wan(hosts, self.rate_mbit, self.delay_ms, self.loss, self.congestion, homes)

    @contextmanager
    def peers(self) -> Iterator[tuple[Wan, Peers]]:
        """Give the network, and peers of it that are to be started."""
        with self.network() as wan, TemporaryDirectory() as folder:
            middle = Home(wan, len(self.paces_s), Path(folder)) if self.homes else None
            with Peers(spawn=wan.spawn, entrance=middle and middle.ask(addresses_of)[0]) as peers:
                yield wan, peers


BAD_LINKS = {
    one.name: one
    for one in (
        Scenario("falling", 100, falls_to_mbit=5),
        Scenario("lossy", 20, loss=0.02),
        Scenario("far", 20, delay_ms=150),
        Scenario("unlike", 20, paces_s=(PACE_S, 4 * PACE_S)),
        Scenario("punched", 20, homes="port"),
        Scenario("relayed", 20, homes="symmetric"),
    )
}


def link_of(text: str) -> Scenario:
    """Read a link as a person names it: one of `BAD_LINKS`, or Mbit/s up and down."""
    return BAD_LINKS.get(text) or Scenario(text, float(text))


def add_options(parser: argparse.ArgumentParser, sides: Sequence[str], runs: int) -> None:
    """Add what all benchmarks on simulated links can be told; `sides` and `runs` are defaults."""
    parser.add_argument("--links", type=link_of, nargs="+", default=list(map(link_of, ("100", "20", "5"))),
                        help=f"Mbit/s up and down, or of {', '.join(BAD_LINKS)}")  # fmt: skip
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=sides, metavar="NAME",
                        help=f"of {', '.join(SIDES)}")  # fmt: skip
    parser.add_argument("--runs", type=int, default=runs, help="of which the median counts")
    parser.add_argument("--congestion", default="", help="TCP's control (default: this machine's own)")
    parser.add_argument("--json", type=Path, help="write all runs here too")


Cell = tuple[str, Callable[[], Any]]
"""What is measured, for a person who waits, and what measures it and returns a dataclass."""


def cells_of(options: argparse.Namespace, measure: Callable[[str, Scenario], Any]) -> Iterator[Cell]:
    """Give a cell for each side on each link, as often as `add_options` was told."""
    for _ in range(options.runs):
        for link in options.links:
            scenario = replace(link, congestion=options.congestion)
            for side in options.sides:
                yield f"{side}, link {link.name}", partial(measure, side, scenario)


def run_cells(cells: Iterable[Cell], file: Path | None) -> list[Any]:
    """Measure all one after the other, tell of each on stderr, and write it all to a file, if one is named.

    Returns:
        What was measured, without cells in which a peer was ended by an error.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    measured = []
    for name, measure in cells:
        try:
            measured.append(measure())
        except PeerEnded as error:
            print(f"  {name}: a peer has ended.\n{error}", file=sys.stderr, flush=True)
        else:
            print(f"  {name}: {measured[-1]}", file=sys.stderr, flush=True)
    if file is not None:
        file.write_text(json.dumps([asdict(one) for one in measured], indent=1))
    return measured
