"""What goes wrong in rounds, and what it costs: stalls, and a thousand rounds full of faults.

    .venv/bin/python benchmarks/faults.py [stalls] [rounds] [--turns 3] [--rounds 1000] [--seed 0]

Real processes on loopback, a tiny model; `tests/kit/faults.py` has the faults. Without a name both are run.

- `stalls`: one of three peers has a fault, and the others' time in `step()` from there to the next committed
  step is their stall. Printed: medians and maxima over turns and survivors, beside what a usual step takes.
- `rounds`: three peers, and a list of faults that the seed makes (`tests/kit/random_faults.py`). Printed: the
  list, the rounds, the time, and the verdict, which alone makes the exit code 1.
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
from tests.kit.random_faults import plan, run_rounds
from tests.kit.verdicts import verdict_of

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


def judge_rounds(folder: Path, rounds: int, seed: int) -> dict[str, Any]:
    """Run many rounds with faults, and print what came of them."""
    print(f"seed {seed}, planned:")
    for number, faults in plan(rounds, seed).items():
        for fault in faults:
            print(f"  peer {number}: {fault}", flush=True)
    report = run_rounds(folder, rounds, seed)
    print(f"struck: {report.struck}")
    print(
        f"{report.rounds} rounds committed, {report.failed_rounds} tries undone, {report.seconds:.0f} s, "
        f"{report.seconds / report.rounds:.2f} s a round"
    )
    for told in report.unheard:
        print(f"unheard of, its peer was killed: {told}")
    print("\n".join(verdict_of(report.verdict)))
    return asdict(report)


def main() -> None:
    """Run what was asked for, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", help="stalls, rounds (default: both)")
    parser.add_argument("--turns", type=int, default=3, help="stalls: of each fault")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="rounds: draws the faults")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "stalls": lambda: measure_all(Path(folder), options.turns),
            "rounds": lambda: judge_rounds(Path(folder), options.rounds, options.seed),
        }
        if unknown := set(options.what) - set(parts):
            parser.error(f"there is no {', '.join(unknown)}")
        found: dict[str, Any] = {what: parts[what]() for what in options.what or parts}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    sys.exit(bool(found.get("rounds", {}).get("verdict")))


if __name__ == "__main__":
    main()
