"""How busy home links leave two peers: trahiv's modes beside plain hivemind.

    .venv/bin/python benchmarks/home_links.py [--links 100 20 5] [--sides NAME ...] [--runs 3]
    .venv/bin/python benchmarks/home_links.py --links falling lossy far unlike --seconds 180 --runs 1

Two peers train 8M parameters (the LoRA of a 7B) on hosts of a simulated network (`tests/kit/wan.py`): one
sample each 0.2 s, `target_batch_size` 100, 50 ms round trip. The 0.2 s are slept, the gradient is noise
that is made once and scaled anew for each sample; all that the optimizer does comes on top, its work on
the CPU as well.

| `--links` | |
|---|---|
| a number | that many Mbit/s up and down |
| `falling` | both links fall from 100 to 5 Mbit/s in the middle of the window |
| `lossy` | 20 Mbit/s, 2 % of all packets get lost |
| `far` | 20 Mbit/s, 300 ms round trip |
| `unlike` | 20 Mbit/s, one peer takes four times as long for a sample |
| `punched` | 20 Mbit/s, both peers are behind routers that let in whom they called, port and all |
| `relayed` | 20 Mbit/s, both routers have a port for each whom they call: a third host passes on all bytes |

**Utilisation** is the number of samples in joint steps, over those that two peers without an optimizer
compute in the same time: seconds / 0.2 s * 2. `tests/kit/figures.py` says which steps are joint, and which
samples count, and why that has no bias.

A side that commits nothing for as long again as `--seconds`, or as two of its rounds compute if that is
longer, plus a minute, is given up. The time counts; what it holds does not, as no step may ever commit it.
One that never commits a joint step has 0.

**Blocked** is the share of the window that the thread of the peer which waited more spent in `step()`
beyond the median call, which only accounts for one sample. **Bytes** are counted by the router on both
uplinks together, over the window's samples.

Both peers begin together, from the same weights, so that a state download is no part of it (`joining.py`).
Below the tables stand the reasons for which rounds failed, what mode auto said of its pace, and how many
joint steps and seconds after the links fell it went over to one that sends less. What a loss costs depends
on TCP's congestion control (`--congestion`).

Needs root.
"""

from __future__ import annotations

import argparse
import bisect
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder and `tests` are not installed

from benchmarks.kit.cells import Scenario, add_options, cells_of, run_cells
from benchmarks.kit.paced_peers import LORA, POLL_S, SIDES
from benchmarks.kit.tables import blocked_s, calls_in, counted, median_of, reasons_of, spread, table
from tests.kit.figures import Adapted, Joint, Told, find_joint, find_window, utilisation
from trahiv_cli.rounds.codecs import CODECS

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Result:
    """One run of a side."""

    side: str
    link: str
    utilisation: float
    steps: int
    """Joint ones in the window."""

    seconds: float
    """Of the window."""

    bytes_per_sample: float | None
    """On all uplinks together; None without a joint step."""

    blocked: list[float]
    """Share of the window, by peer."""

    longest_stall_s: list[float]
    """The longest call of `step()` in the window, by peer."""

    reasons: list[str]
    """Why rounds failed, from the first sample on, as all peers tell it: one may be told of by both."""

    adapted: list[Adapted]
    """What mode auto said, by peer and then by time; times since the window opened."""

    fell_after_s: float | None
    """When the links fell, since the window opened."""

    adapted_after: tuple[int, float] | None
    """Joint steps and seconds from then until mode auto first went over to a lighter pace."""

    def __str__(self) -> str:
        """Say the most important, for a person who waits."""
        return f"{self.utilisation:.3f} ({self.steps} steps in {self.seconds:.0f} s)"


def is_lighter(one: Adapted) -> bool:
    """Say whether fewer bytes than before are sent for a step."""
    before, after = (
        CODECS[pace.codec or "none"]().encoded_bytes(2**20, torch.float32)
        / (pace.local_steps if pace.has_local_steps else 1)
        for pace in (one.before, one.after)
    )
    return after < before


def adaptation(told: Iterable[Told], after: float) -> tuple[int, float] | None:
    """Find when mode auto first went over to a lighter pace after a moment.

    What it knows is one exchange old: just after a link fell it may go over to a heavier one first.

    Returns:
        How many steps the peer that said it first committed from the moment on, the one with which it said it
        included, and how many seconds passed; None if no peer did.
    """
    said = [(news.at, one) for one in told for news in one.adapted if news.at > after and is_lighter(news)]
    if not said:
        return None
    at, one = min(said, key=lambda pair: pair[0])
    return sum(after < step.at <= at for step in one.committed.values()), at - after


def measure(name: str, scenario: Scenario, seconds: float) -> Result:
    """Run one side once."""
    side = SIDES[name]
    samples = LORA.target_batch_size * side.pace.steps_per_round
    patience_s = max(seconds, 2 * samples / sum(1 / pace_s for pace_s in scenario.paces_s)) + PATIENCE_S
    with scenario.peers() as (wan, peers):
        began = last_step_at = peers.start_all(side, LORA, scenario.paces_s)
        times, traffic = [began], [wan.sent_bytes()]
        joint: list[Joint] = []
        is_closed, fell_at = False, None
        while not is_closed and time.monotonic() < last_step_at + patience_s:
            if peers.listen():
                joint = find_joint(peers.told)
                last_step_at = max([began, *(one.at for one in joint)])
            now = time.monotonic()
            window, is_closed = find_window(joint, seconds, began, now)
            if is_closed or now >= times[-1] + POLL_S:
                times.append(now)
                traffic.append(wan.sent_bytes())
            is_half = bool(joint) and now >= window.start + seconds / 2
            if scenario.falls_to_mbit and is_half and fell_at is None:
                fell_at = now
                wan.set_rate(scenario.falls_to_mbit)
    length, told = window.end - window.start, peers.told
    calls = [calls_in(window, one) for one in told]
    first, last = (
        traffic[min(bisect.bisect_left(times, at), len(times) - 1)] for at in (window.start, window.end)
    )
    return Result(
        side=name,
        link=scenario.name,
        utilisation=utilisation(window, scenario.paces_s),
        steps=window.steps,
        seconds=length,
        bytes_per_sample=(last - first) / window.samples if window.samples else None,
        blocked=[blocked_s(took) / length for took in calls],
        longest_stall_s=[max(took, default=length) for took in calls],
        reasons=reasons_of(told),
        adapted=[replace(news, at=news.at - window.start) for one in told for news in one.adapted],
        fell_after_s=fell_at - window.start if fell_at else None,
        adapted_after=adaptation(told, fell_at) if fell_at else None,
    )


def tables(results: Sequence[Result]) -> str:
    """Lay the medians out as Markdown."""
    links, sides = (list(dict.fromkeys(getattr(one, of) for one in results)) for of in ("link", "side"))
    runs = {
        (link, side): [one for one in results if (one.link, one.side) == (link, side)]
        for link in links
        for side in sides
    }
    by_link = (
        (link, *(spread([one.utilisation for one in runs[link, side]], ".3f") for side in sides))
        for link in links
    )
    rows = (
        (
            *names,
            f"{median_of(one.bytes_per_sample for one in own) / 1e3:.1f}",
            f"{median_of(max(one.blocked) for one in own):.3f}",
            f"{median_of(max(one.longest_stall_s) for one in own):.1f}",
            f"{median_of(float(one.steps) for one in own):g}",
            f"{median_of(float(len(one.reasons)) for one in own):g}",
        )
        for names, own in runs.items()
    )
    columns = ("link", "side", "kB a sample", "blocked", "longest stall, s", "joint steps", "failed rounds")
    return "\n\n".join((table(("link, up and down", *sides), by_link), table(columns, rows)))


def story(one: Result) -> list[str]:
    """Tell why rounds failed, and what mode auto said."""
    name = f"{one.link}, {one.side}"
    lines = counted(name, one.reasons)
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
    """Measure all; print the tables, and what happened."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, list(SIDES), runs=3)
    parser.add_argument("--seconds", type=float, default=120, help="least length of the window")
    options = parser.parse_args()
    results = run_cells(cells_of(options, partial(measure, seconds=options.seconds)), options.json)
    print(tables(results))
    for line in (line for one in results for line in story(one)):
        print(line)


if __name__ == "__main__":
    main()
