"""What one more peer costs every other: 2, 4, 8 and 16 peers on one machine's loopback.

    .venv/bin/python benchmarks/many_peers.py [--peers 2 4 8 16] [--side overlap-uniform8]

The peers of `home_links.py`, with 1M parameters, one sample each 2 s, and a `target_batch_size` of 20 times
the number of peers: a step takes 40 s, however many they are. That is for sixteen on two cores; peers of
shorter steps (`--pace`) report more often. **load** is the share of the machine's processors that was busy;
near 1 the figures are of the machine, not of the swarm.

`tests/kit/figures.py` says what a joint step, the window and utilisation are; **blocked** is the mean of
the peers'. **CPU** is that of all processes of a peer, in seconds per joint step; what the training itself
takes is in it. **Bytes** are those that passed through the loopback interface in the window, over the
number of peers and of joint steps; so nothing else may use that interface meanwhile. With n peers each
averages one n-th of the gradient for all (a butterfly all-reduce): it sends n - 1 parts and n - 1 averages of
that size, together

    2 (n - 1) / n    times the encoded gradient: 1 at two peers, 1.5 at four, 1.75 at eight, 1.875 at sixteen

and never twice that. So what must not grow with the number of peers is the **quotient**: the bytes over
that number and over those of the encoded gradient. What it has beyond 1 is headers, encryption, reports,
claims and votes.

Asked of it: a utilisation at sixteen peers of at least 0.9 of that at two, and quotients within 20 %.
A size whose peers don't fit into free memory is left out, and that is said.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder and `tests` are not installed

from benchmarks.kit.cells import Cell, run_cells
from benchmarks.kit.paced_peers import OURS, SIDES, Peers, Workload
from benchmarks.kit.processes import cpu_s, memory_bytes
from benchmarks.kit.tables import blocked_s, calls_in, counted, reasons_of, table
from tests.kit.figures import PeerEnded, find_joint, find_window, utilisation
from tests.kit.wan import PROCESSES
from trahiv_cli.rounds.codecs import CODECS

SHAPES = ((256, 256),) * 16  # 1,048,576 values
SAMPLES_A_STEP = 20
"""Of each peer."""

HOST = "127.0.0.1"
PEER_BYTES, SPARE_BYTES = 6 * 2**27, 2**30
"""What is asked for a peer, somewhat more than it takes, and what is left for others."""

PATIENCE_S, PATIENCE_STEPS = 60.0, 4
COLUMNS = (
    *(
        "peers",
        "utilisation",
        "of the first",
        "CPU of a peer, s a step",
        "kB of a peer and round",
        "quotient",
    ),
    *("of the first", "blocked", "joint steps", "failed rounds", "memory of a peer, MiB", "load"),
)


@dataclass(frozen=True)
class Result:
    """One run."""

    side: str
    peers: int
    utilisation: float
    steps: int
    seconds: float
    """Of the window."""

    cpu_s: float
    """Of a peer, per joint step."""

    bytes_a_round: float
    """That a peer sent, per joint step."""

    quotient: float
    """That over 2 (n - 1) / n times the encoded gradient."""

    blocked: float
    """Share of the window, mean of the peers."""

    reasons: list[str]
    """Why rounds failed, as all peers tell it."""

    peer_bytes: float
    """Memory of a peer (PSS: what processes share is divided among them), mean."""

    load: float
    """Share of the machine's processors, over the window."""


def encoded_bytes(name: str) -> int:
    """Return the size of one gradient as a side sends it."""
    side = SIDES[name]
    codec = CODECS[side.pace.codec or side.options.get("grad_compression", "none")]()
    return sum(codec.encoded_bytes(torch.Size(shape).numel(), torch.float32) for shape in SHAPES)


def measure(name: str, num_peers: int, pace_s: float, seconds: float) -> Result:
    """Run one size once.

    Args:
        name: of the side.
        num_peers: that size.
        pace_s: seconds for a sample.
        seconds: least length of the window.

    Raises:
        PeerEnded: a peer was ended by an error, or no joint step closed the window in time.
    """
    side = SIDES[name]
    workload = Workload(SHAPES, SAMPLES_A_STEP * num_peers)
    with Peers() as peers:
        began = peers.start_all(side, workload, [pace_s] * num_peers, lambda _: HOST)
        deadline = began + seconds + PATIENCE_STEPS * SAMPLES_A_STEP * pace_s + PATIENCE_S
        processes: list[psutil.Process] = []
        is_closed = False
        while not is_closed:
            if time.monotonic() > deadline:
                raise PeerEnded(f"no joint step closed the window within {deadline - began:.0f} s")
            if not peers.listen():
                continue
            joint = find_joint(peers.told)
            if joint and not processes:
                processes = peers.tree()
                before, all_before, sent_before = cpu_s(processes), busy_s(), sent_bytes()
                opened = time.monotonic()
            window, is_closed = find_window(joint, seconds, began, time.monotonic())
        used_s, memory = cpu_s(processes) - before, memory_bytes(processes)
        bytes_a_round = (sent_bytes() - sent_before) / num_peers / window.steps
        load = (busy_s() - all_before) / (time.monotonic() - opened) / len(psutil.cpu_times(percpu=True))
    told = peers.told
    calls = [calls_in(window, one) for one in told]
    butterfly = 2 * (num_peers - 1) / num_peers * encoded_bytes(name)
    length = window.end - window.start
    return Result(
        side=name,
        peers=num_peers,
        utilisation=utilisation(window, [pace_s] * num_peers),
        steps=window.steps,
        seconds=length,
        cpu_s=used_s / num_peers / window.steps,
        bytes_a_round=bytes_a_round,
        quotient=bytes_a_round / butterfly,
        blocked=statistics.fmean(blocked_s(took) for took in calls) / length,
        reasons=reasons_of(told),
        peer_bytes=memory / num_peers,
        load=load,
    )


def sent_bytes() -> int:
    """Return how many bytes have been sent through the loopback interface."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def busy_s() -> float:
    """Return for how long the machine's processors have been busy, together."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """Give the figures, one row for each size; the first size is what others are compared with."""
    for one in results:
        yield (
            f"{one.peers}",
            f"{one.utilisation:.3f}",
            f"{one.utilisation / results[0].utilisation:.3f}",
            f"{one.cpu_s:.2f}",
            f"{one.bytes_a_round / 1e3:.0f}",
            f"{one.quotient:.3f}",
            f"{one.quotient / results[0].quotient:.3f}",
            f"{one.blocked:.3f}",
            f"{one.steps}",
            f"{len(one.reasons)}",
            f"{one.peer_bytes / 2**20:.0f}",
            f"{one.load:.2f}",
        )


def cells_of(sizes: Sequence[int], side: str, pace_s: float, seconds: float) -> Iterator[Cell]:
    """Give a cell for each size whose peers fit into memory; say which don't."""
    for size in sizes:
        needed, free = size * PEER_BYTES + SPARE_BYTES, psutil.virtual_memory().available
        if free < needed:
            print(f"  {size} peers are left out: {needed / 2**30:.1f} GiB of memory are needed, "
                  f"{free / 2**30:.1f} are free", file=sys.stderr)  # fmt: skip
        else:
            yield f"{size} peers", partial(measure, side, size, pace_s, seconds)


def main() -> None:
    """Measure all sizes, print the table."""
    ours = [name for name, side in SIDES.items() if side.system == OURS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8, 16], help="sizes of the swarm")
    parser.add_argument("--side", choices=ours, default="overlap-uniform8", metavar="NAME",
                        help=f"of {', '.join(ours)}")  # fmt: skip
    parser.add_argument("--pace", type=float, default=2, help="seconds for a sample")
    parser.add_argument("--seconds", type=float, default=240, help="least length of the window")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    PROCESSES.set_forkserver_preload(["trahiv_cli.step.build"])  # or each would import torch anew
    cells = cells_of(options.peers, options.side, options.pace, options.seconds)
    results = run_cells(cells, options.json)
    reasons = (counted(f"{one.peers} peers", one.reasons) for one in results)
    print(table(COLUMNS, rows(results)), *chain.from_iterable(reasons), sep="\n")


if __name__ == "__main__":
    main()
