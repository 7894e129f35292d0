"""How long a fault holds up those that survive it, and what a poisoner does to their loss.

    .venv/bin/python benchmarks/round_faults.py [--turns 3] [--poison] [--json FILE]

Three loopback peers with a tiny model; in each turn one of them has a fault, and the others' time in
`step()` from there to the next committed step is their stall. Timeouts: 20 s for averaging, 4 s for a chunk,
2 s for matchmaking, 1 s for an answer. Printed: a Markdown table of medians and maxima over turns and
survivors, beside what a step without a fault takes. `--poison`: five peers, 50 steps, one brings poison;
the honest peers' loss on held-out data beside that without poison.
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

sys.path.insert(0, str(Path(__file__).parent.parent))  # `tests` is beside this folder, not installed

from tests.kit.faults import PHASES, Fault, codec_raises, corrupt_part, drop_peer, poison, stall
from tests.kit.faulty_peer import Settings, Swarm, find_broken_promises
from trahiv_cli.optim.rules import RoundRules

POISON_STEPS = 50
NUM_POISONED = 5
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
            swarm.wait(lambda: bool(swarm.events(2, "fault")), DEADLINE_S, "the fault")
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


# -- poison ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Poisoned:
    """What came of a run with a poisoner."""

    loss: float
    """Of the honest peers, on held-out data, after the last step; the largest."""

    is_named: bool
    """Whether every honest peer was told who brought it."""

    rounds_without_it: int
    """Steps whose round left the poisoner's gradient out, as the first peer saw it."""

    seconds: float


def train_with_poison(
    folder: Path,
    fault: Fault | None = None,
    rules: RoundRules | None = None,
    num_steps: int = POISON_STEPS,
) -> Poisoned:
    """Train five peers, the last of which has the fault."""
    # Small steps: the loss still falls at the end, by gradients larger than their noise.
    settings = Settings(
        num_peers=NUM_POISONED, seconds_per_batch=0.02, learning_rate=4e-4, rules=rules or RoundRules()
    )
    honest = range(NUM_POISONED - 1)
    with Swarm(folder, settings) as swarm:
        swarm.start_all({NUM_POISONED - 1: [fault] if fault else []})
        seconds = swarm.wait_for_step(num_steps, list(honest), DEADLINE_S)
        poisoner = swarm.ids[-1]
        losses, named = [], []
        for number in honest:
            at_end = [
                said for said in swarm.events(number) if said.get("step", 0) >= num_steps and "loss" in said
            ]
            losses.append(at_end[0]["loss"])
            told = [said["message"] for said in swarm.events(number, "notice")]
            left_out = [poisoner in said["left_out"] for said in swarm.events(number, "step")]
            named.append(any(left_out) and any(poisoner in message for message in told))
        first = [poisoner in said["left_out"] for said in swarm.events(0, "step")]
        assert not find_broken_promises(swarm.everything())
    return Poisoned(max(losses), all(named), sum(first), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--poison", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        if args.poison:
            rows = _poison_table(Path(folder))
        else:
            rows = _stall_table(Path(folder), args.turns)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def _stall_table(folder: Path, turns: int) -> list[dict[str, object]]:
    print("| fault | survivors stall, median | largest | a usual step | they say |")
    print("|---|---|---|---|---|")
    rows: list[dict[str, object]] = []
    for index, fault in enumerate(FAULTS):
        found = measure(folder / str(index), fault, turns)
        fields = ", ".join(f"{name}={value}" for name, value in found.fault.items() if name != "fault")
        what = f"{found.fault['fault']}({fields})"
        said = "; ".join(found.reasons) or "--"
        print(
            f"| {what} | {found.median_s:.1f} s | {found.largest_s:.1f} s | {found.usual_s:.2f} s | {said} |",
            flush=True,
        )
        rows.append(asdict(found))
    return rows


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
        f"| poison of one in {NUM_POISONED} | honest loss after {POISON_STEPS} steps | to that without "
        "| named | rounds without it | seconds |"
    )
    print("|---|---|---|---|---|---|")
    rows: list[dict[str, object]] = []
    base = math.nan
    for index, (name, fault, rules) in enumerate(runs):
        found = train_with_poison(folder / str(index), fault, rules)
        base = found.loss if fault is None else base
        print(
            f"| {name} | {found.loss:.4f} | {found.loss / base:.3f} | {'yes' if found.is_named else 'no'} "
            f"| {found.rounds_without_it} | {found.seconds:.0f} |",
            flush=True,
        )
        rows.append({"poison": name} | asdict(found))
    return rows


if __name__ == "__main__":
    main()
