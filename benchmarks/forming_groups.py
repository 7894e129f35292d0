"""How long peers that are ready take to stand in one group and to commit a round, and how often all do.

    .venv/bin/python benchmarks/forming_groups.py [--rounds 100] [--baseline-rounds 15] [--json FILE]

Real processes, DHT and sockets on 127.0.0.1; each peer averages 4 KiB. All become ready within 50 ms and
know from this script who is there, as they would from progress reports. Printed, from the moment when the
last of them is ready: when the group stands, when the last of them has committed; how many rounds had all of
the peers in one group, which alone are timed. Then eight peers that are killed, leave and join every few
rounds. Beside it plain hivemind's `DecentralizedAverager`, which finds its groups through the DHT.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tests` is beside this folder, not installed

from tests.kit.forming import Result, Swarm


def steady(count: int, rounds: int, *, plain: bool = False) -> list[Result]:
    """Rounds of the same peers."""
    with Swarm(plain=plain) as swarm:
        swarm.join(count)
        return [_told(swarm.round()) for _ in range(rounds)]


def churn(count: int, rounds: int) -> dict[str, list[Result]]:
    """Rounds with somebody killed, then away unnoticed, then replaced; or leaving and replaced."""
    quiet: list[Result] = []
    found: dict[str, list[Result]] = {
        "one is killed meanwhile": [],
        "one is gone unnoticed": [],
        "one has left or joined": [],
        "quiet": quiet,
    }
    chance = random.Random(1)
    with Swarm() as swarm:
        swarm.join(count)
        while sum(map(len, found.values())) < rounds:
            found["one is killed meanwhile"].append(_told(swarm.round(chance.choice(swarm.members))))
            found["one is gone unnoticed"].append(_told(swarm.round()))
            swarm.join()
            found["one has left or joined"].append(_told(swarm.round()))
            quiet.append(_told(swarm.round()))
            swarm.leave(chance.choice(swarm.members))
            found["one has left or joined"].append(_told(swarm.round()))
            swarm.join()
            found["one has left or joined"].append(_told(swarm.round()))
            quiet += [_told(swarm.round()) for _ in range(4)]
    return found


def _told(result: Result) -> Result:
    if not result.is_full:
        print(f"not everybody: {'; '.join(result.reasons) or 'several groups'}", file=sys.stderr)
    return result


def row(name: str, results: Sequence[Result]) -> dict[str, Any]:
    """Sum up rounds; seconds of those that had everybody in one group."""
    full = [result for result in results if result.is_full]
    times: dict[str, Any] = {}
    for key in ("standing_s", "committed_s"):
        values = sorted(getattr(result, key) for result in full)
        times[key] = values and {
            "median": statistics.median(values),
            "p95": values[min(len(values) - 1, int(0.95 * len(values)))],
            "max": values[-1],
        }
    return {"name": name, "rounds": len(results), "full": len(full)} | times


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        "| peers | all in one group | group stands: median, p95, max (s) | committed: median, p95, max (s) |",
        "|---|---|---|---|",
    ]
    for one in rows:
        cells = [
            ", ".join(f"{value:.2f}" for value in (one[key] or {}).values()) or "-"
            for key in ("standing_s", "committed_s")
        ]
        lines.append(f"| {one['name']} | {one['full']} of {one['rounds']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--baseline-rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    rows = [row(f"{count}", steady(count, options.rounds)) for count in (2, 4, 8)]
    rows += [row(f"8, {what}", results) for what, results in churn(8, options.rounds).items()]
    for count in (2, 8):
        results = steady(count, options.baseline_rounds, plain=True)
        rows.append(row(f"{count}, plain hivemind", results))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
