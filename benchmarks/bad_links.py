"""What bad links and unlike machines cost two peers: the set-up of `home_links.py`, with something wrong.

    .venv/bin/python benchmarks/bad_links.py [--scenarios NAME ...] [--sides NAME ...] [--seconds 180]

| scenario | |
|---|---|
| `falling` | both links fall from 100 to 5 Mbit/s in the middle of the window |
| `lossy` | 20 Mbit/s, 2 % of all packets get lost |
| `far` | 20 Mbit/s, 300 ms round trip |
| `unlike` | 20 Mbit/s, one peer takes four times as long for a sample |

Printed: utilisation as in `home_links.py`, with each peer's own pace; rounds that failed, and how often each
reason was given; the longest call of `step()` of either peer, and the share of the window that the peer which
waited more spent so; what mode auto said of its pace, and how many joint steps and seconds after the links
fell it went over to one that sends less. What a loss costs depends on TCP's congestion control
(`--congestion`). Needs root.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from home_links import PACE_S, Result, Scenario, add_options, measure, median_of, run_cells

SCENARIOS = {
    "falling": Scenario(100, falls_to_mbit=5),
    "lossy": Scenario(20, loss=0.02),
    "far": Scenario(20, delay_ms=150),
    "unlike": Scenario(20, paces_s=(PACE_S, 4 * PACE_S)),
}

DEFAULT_SIDES = ("auto", "sync-float16", "hivemind-tuned")


def table(results: list[tuple[str, Result]]) -> str:
    """Lay the medians out as Markdown."""
    lines = [
        "| scenario | side | utilisation | joint steps | failed rounds | longest stall, s | blocked |",
        "|---" * 7 + "|",
    ]
    for scenario, side in dict.fromkeys((name, one.side) for name, one in results):
        runs = [one for name, one in results if name == scenario and one.side == side]
        numbers = (
            f"{median_of(one.utilisation for one in runs):.3f}",
            f"{median_of(float(one.steps) for one in runs):g}",
            f"{median_of(float(len(one.reasons)) for one in runs):g}",
            f"{median_of(max(one.longest_stall_s) for one in runs):.1f}",
            f"{median_of(max(one.blocked) for one in runs):.3f}",
        )
        lines.append(f"| {scenario} | {side} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def story(scenario: str, one: Result) -> list[str]:
    """Tell why rounds failed, and what mode auto said."""
    name = f"{scenario}, {one.side}"
    lines = [f"- {name}: {times} x {reason}" for reason, times in Counter(one.reasons).most_common()]
    said: dict[str, float] = {}
    for news in one.adapted:  # each peer says it
        said[news.why] = min(news.at, said.get(news.why, news.at))
    lines += [f"- {name}, {at:+.0f} s: {why}" for why, at in sorted(said.items(), key=lambda item: item[1])]
    if one.fell_after_s is not None and one.adapted:
        fall = f"- {name}: the links fell at {one.fell_after_s:+.0f} s"
        if one.adapted_after is None:
            lines.append(f"{fall}; it went over to no lighter pace.")
        else:
            steps, seconds = one.adapted_after
            lines.append(
                f"{fall}; it went over to a lighter pace {steps} joint steps and {seconds:.0f} s later."
            )
    return lines


def main() -> None:
    """Measure all; print the table, and what happened."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME")
    add_options(parser, DEFAULT_SIDES, runs=1)
    parser.add_argument("--seconds", type=float, default=180, help="least length of the window")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cells = [
        (scenario, side)
        for _ in range(options.runs)
        for scenario in options.scenarios
        for side in options.sides
    ]
    measured = run_cells(
        [(side, replace(SCENARIOS[name], congestion=options.congestion)) for name, side in cells],
        partial(measure, seconds=options.seconds),
        options.parallel,
    )
    results = [(name, one) for (name, _), one in zip(cells, measured, strict=True) if one is not None]
    print(table(results))
    for line in (line for name, one in results for line in story(name, one)):
        print(line)
    if options.json:
        options.json.write_text(json.dumps([{"scenario": name} | asdict(one) for name, one in results]))


if __name__ == "__main__":
    main()
