"""What goes wrong in rounds, and how long it holds up the others.

    .venv/bin/python benchmarks/faults.py [--turns 3]

Real processes on loopback, a tiny model; `tests/kit/faults.py` has the faults. One of three peers fails, and
the others' time in `step()` from there to the next committed step is their stall. Printed: medians and
maxima over turns and survivors, beside what a usual step takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tests` is beside this folder, not installed

from tests.kit.faults import PHASES, codec_raises, corrupt_part, drop_peer, stall
from tests.kit.faulty_swarm import Swarm

FAULTS_AFTER = 5
"""Steps between the moment when everybody is there and the fault."""

DEADLINE_S = 120.0

Fault = drop_peer | codec_raises | corrupt_part | stall

FAULTS: tuple[Fault, ...] = (
    *(drop_peer(phase=phase) for phase in PHASES),
    codec_raises(),
    corrupt_part(),
    corrupt_part(averaged=True),
    stall(2.0),
    stall(10.0),
    stall(10.0, whole_peer=False),
)


@dataclass(frozen=True)
class Stall:
    """What one fault cost those that survived it, in seconds."""

    fault: str
    median_s: float
    largest_s: float
    usual_s: float
    """The median of their steps before the fault."""

    reasons: list[str]
    """What they said."""


def measure(folder: Path, fault: Fault, turns: int) -> Stall:
    """Let one peer of three have a fault, `turns` times."""
    stalls: list[float] = []
    usual: list[float] = []
    reasons: set[str] = set()
    with Swarm(folder) as swarm:
        swarm.start_all({2: [replace(fault, at_step=FAULTS_AFTER)]})
        for turn in range(turns):
            if turn:
                if swarm.is_running(2):
                    swarm.stop_running(2)
                swarm.start(2, replace(fault, at_step=swarm.reached(0) + FAULTS_AFTER), as_new=True)
                swarm.wait_for_ready(2)
            swarm.wait(lambda turn=turn: len(swarm.events(2, "fault")) > turn, DEADLINE_S, "the fault")
            struck = swarm.events(2, "fault")[-1]["time"]
            for survivor in (0, 1):
                stalls.append(swarm.wait_for_step_after(struck, survivor, DEADLINE_S)["blocked"])
                steps = swarm.events(survivor, "step")
                usual += [said["blocked"] for said in steps if len(said["group"]) == 3]
                told = [said for said in swarm.events(survivor, "failed") if said["time"] > struck]
                words = [said["reason"].split() for said in told[:1]]
                reasons |= {
                    " ".join("N" if one.startswith("Qm") else one for one in all_of) for all_of in words
                }
        swarm.require_promises()
    fields = ", ".join(f"{name}={value}" for name, value in asdict(fault).items() if name != "at_step")
    what = f"{type(fault).__name__}({fields})"
    return Stall(what, statistics.median(stalls), max(stalls), statistics.median(usual), sorted(reasons))


def measure_all(folder: Path, turns: int) -> list[dict[str, Any]]:
    """Measure each fault, and print a row of a table for it."""
    print("| fault | survivors stall, median | largest | a usual step | they say |")
    print("|---|---|---|---|---|")
    rows = []
    for index, fault in enumerate(FAULTS):
        one = measure(folder / f"stall-{index}", fault, turns)
        times = f"{one.median_s:.1f} s | {one.largest_s:.1f} s | {one.usual_s:.2f} s"
        print(f"| {one.fault} | {times} | {'; '.join(one.reasons) or '--'} |", flush=True)
        rows.append(asdict(one))
    return rows


def main() -> None:
    """Measure all, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="of each fault")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure_all(Path(folder), options.turns)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
