"""What goes wrong in rounds, and what it costs: stalls, poison, and a thousand rounds full of faults.

    .venv/bin/python benchmarks/faults.py [stalls] [poison] [rounds] [--turns 3] [--rounds 1000] [--seed 0]

Loopback, a tiny model, real processes (`tests/kit/faulty_peer.py`); timeouts: 20 s for averaging, 4 s for
a chunk, 2 s for matchmaking, 1 s for an answer. Without a name all three are run.

- `stalls`: in each turn one of three peers has a fault, and the others' time in `step()` from there to the
  next committed step is their stall. Printed: medians and maxima over turns and survivors, beside what a step
  without a fault takes.
- `poison`: five peers, 50 steps, one brings poison. Printed: the honest peers' loss on held-out data beside
  that without poison.
- `rounds`: three peers, and a list of faults that the seed makes (`tests/kit/random_faults.py`). Printed: the
  list, the rounds, the time, and the verdict, which alone makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tests` is beside this folder, not installed

from tests.kit.faults import PHASES, Fault, codec_raises, corrupt_part, drop_peer, poison, stall
from tests.kit.faulty_peer import Swarm, find_broken_promises
from tests.kit.poisoned import NUM_PEERS, STEPS, train_with_poison
from tests.kit.random_faults import plan, run_rounds
from tests.kit.verdicts import verdict_of
from trahiv_cli.optim.rules import RoundRules

FAULTS_AFTER = 5
"""Steps between the moment when everybody is there and the fault."""

DEADLINE_S = 120.0


FAULTS: tuple[drop_peer | codec_raises | corrupt_part | stall, ...] = (
    *(drop_peer(phase=phase) for phase in PHASES),
    codec_raises(),
    corrupt_part(),
    corrupt_part(averaged=True),
    stall(2.0),
    stall(10.0),
    stall(10.0, whole_peer=False),
)


# -- stalls ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stall:
    """What one fault cost those that survived it, in seconds."""

    fault: dict[str, object]
    median_s: float
    largest_s: float
    usual_s: float
    """The median of their steps before the fault."""

    reasons: tuple[str, ...]
    """What they said."""


def measure(folder: Path, fault: drop_peer | codec_raises | corrupt_part | stall, turns: int) -> Stall:
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
                next_step = swarm.wait_for_step_after(struck, survivor, DEADLINE_S)
                stalls.append(next_step["blocked"])
                steps = swarm.events(survivor, "step")
                usual += [said["blocked"] for said in steps if len(said["group"]) == 3]
                told = [said for said in swarm.events(survivor, "failed") if said["time"] > struck]
                reasons |= {_without_ids(said["reason"], swarm.ids) for said in told[:1]}
        broken = find_broken_promises(swarm.everything())
        assert not broken, broken
    return Stall(
        {name: value for name, value in fault.to_json().items() if name != "at_step"},
        statistics.median(stalls),
        max(stalls),
        statistics.median(usual),
        tuple(sorted(reasons)),
    )


def _without_ids(text: str, ids: list[str]) -> str:
    for number, peer_id in enumerate(ids):
        text = text.replace(peer_id, str(number))
    return " ".join("N" if word.startswith("Qm") else word for word in text.split())


def _stall_table(folder: Path, turns: int) -> list[dict[str, object]]:
    print("| fault | survivors stall, median | largest | a usual step | they say |")
    print("|---|---|---|---|---|")
    rows: list[dict[str, object]] = []
    for index, fault in enumerate(FAULTS):
        found = measure(folder / f"stall-{index}", fault, turns)
        fields = ", ".join(f"{name}={value}" for name, value in found.fault.items() if name != "fault")
        what = f"{found.fault['fault']}({fields})"
        said = "; ".join(found.reasons) or "--"
        print(
            f"| {what} | {found.median_s:.1f} s | {found.largest_s:.1f} s | {found.usual_s:.2f} s | {said} |",
            flush=True,
        )
        rows.append(asdict(found))
    return rows


# -- poison ---------------------------------------------------------------------------------------


def _poison_table(folder: Path) -> list[dict[str, object]]:
    robust = RoundRules(robust_mean=True, norm_limit=0.0)
    runs: list[tuple[str, Fault | None, RoundRules]] = [
        ("none", None, RoundRules()),
        ("NaN", poison(norm=math.nan), RoundRules()),
        ("NaN, claims norm 1", poison(norm=math.nan, claimed=1.0), RoundRules()),
        ("norm 1e6", poison(norm=1e6), RoundRules()),
        ("norm -1e6", poison(norm=-1e6), RoundRules()),
        ("norm -1e6, claims norm 1", poison(norm=-1e6, claimed=1.0), RoundRules()),
        ("none, robust mean", None, robust),
        ("sign flip x10, robust mean", poison(factor=-10.0), robust),
        ("sign flip x10, plain mean", poison(factor=-10.0), RoundRules(norm_limit=0.0)),
    ]
    print(
        f"| poison of one in {NUM_PEERS} | honest loss after {STEPS} steps | to that without "
        "| named | rounds without it | seconds |"
    )
    print("|---|---|---|---|---|---|")
    rows: list[dict[str, object]] = []
    base = math.nan
    for index, (name, fault, rules) in enumerate(runs):
        found = train_with_poison(folder / f"poison-{index}", fault, rules)
        base = found.loss if fault is None else base
        print(
            f"| {name} | {found.loss:.4f} | {found.loss / base:.3f} | {'yes' if found.is_named else 'no'} "
            f"| {found.rounds_without_it} | {found.seconds:.0f} |",
            flush=True,
        )
        rows.append({"poison": name} | asdict(found))
    return rows


# -- a thousand rounds ----------------------------------------------------------------------------


def _rounds(folder: Path, rounds: int, seed: int) -> dict[str, Any]:
    drawn = plan(rounds, seed)
    print(f"seed {seed}, planned:")
    for number, faults in drawn.faults.items():
        for fault in faults:
            print(f"  peer {number}: {json.dumps(fault.to_json())}")
    for cut in drawn.cuts:
        print(f"  {json.dumps({'fault': 'cut_link'} | asdict(cut))}", flush=True)
    report = run_rounds(folder, rounds, seed)
    print(f"struck: {json.dumps(report.struck)}")
    print(
        f"{report.rounds} rounds committed, {report.failed_rounds} tries undone, {report.seconds:.0f} s, "
        f"{report.seconds / report.rounds:.2f} s a round"
    )
    for told in report.unheard:
        print(f"unheard of, its peer was killed: {told}")
    print("\n".join(verdict_of(report.verdict)))
    return asdict(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", help="stalls, poison, rounds (default: all)")
    parser.add_argument("--turns", type=int, default=3, help="stalls: of each fault")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="rounds: draws the faults")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "stalls": lambda: _stall_table(Path(folder), options.turns),
            "poison": lambda: _poison_table(Path(folder)),
            "rounds": lambda: _rounds(Path(folder), options.rounds, options.seed),
        }
        if unknown := set(options.what) - set(parts):
            parser.error(f"there is no {', '.join(unknown)}")
        found: dict[str, Any] = {what: parts[what]() for what in options.what or parts}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    sys.exit(bool(found.get("rounds", {}).get("verdict")))


if __name__ == "__main__":
    main()
