"""What is wrong with a run of the real command, told from its peers' events and checkpoints."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trahiv_cli.optim.ledger import Ledger

Event = dict[str, Any]

SAME_LOSS = 1e-4
"""Peers whose weights are equal differ by so much at most, relative: by the order of their sums."""


# -- steps ----------------------------------------------------------------------------------------


def group_of(step: Event) -> list[str]:
    """The peers that took a step together; none where there was no round."""
    return (step["round"] or {}).get("group") or []


def find_falls(peers: Sequence[Sequence[Event]]) -> list[str]:
    """Say which peer took a step, or took over a state, that it had been beyond before."""
    falls = []
    for number, events in enumerate(peers):
        reached = -1
        for one in events:
            if one["event"] == "step":
                if one["step"] <= reached:
                    falls.append(f"peer {number} takes step {one['step']} after step {reached}")
                reached = max(reached, one["step"])
            elif one["event"] == "joined" and one["source"] == "fresh" and reached > 0:
                falls.append(f"peer {number} begins with a fresh model after step {reached}")
    return falls


def back_after(events: Sequence[Event], moment: float) -> float | None:
    """Say how long after a moment a peer took its next step together with another one; None if it did not."""
    steps = (one for one in events if one["event"] == "step" and one["t"] > moment)
    return next((one["t"] - moment for one in steps if len(group_of(one)) > 1), None)


# -- losses ---------------------------------------------------------------------------------------


def losses_of(peers: Sequence[Sequence[Event]]) -> tuple[dict[int, float], list[str]]:
    """Collect the loss on held-out data after each step at which a peer evaluated.

    Returns:
        The first one told for each step, ascending, and sentences on peers that found another one.
    """
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for number, events in enumerate(peers):
        for one in events:
            if one["event"] == "eval":
                found[one["step"]].append((number, one["eval_loss"]))
    wrong = [
        f"after step {step} peer {number} has a loss of {loss:.6f}, peer {at[0][0]} of {at[0][1]:.6f}"
        for step, at in sorted(found.items())
        for number, loss in at[1:]
        if abs(loss - at[0][1]) > SAME_LOSS * at[0][1]
    ]
    return {step: at[0][1] for step, at in sorted(found.items())}, wrong


def worst_jump(losses: Mapping[int, float]) -> float:
    """The greatest ratio of a loss to the one before."""
    return max((after / before for before, after in pairwise(losses.values())), default=math.nan)


# -- data -----------------------------------------------------------------------------------------


def newest_checkpoint(run: Path) -> Path | None:
    """The folder of a run's newest checkpoint, if it has one."""
    return max(run.glob("checkpoints/step-*"), key=lambda path: int(path.name[5:]), default=None)


def furthest_of(runs: Sequence[Path]) -> tuple[Ledger, list[str]]:
    """Read what the furthest of the peers' newest checkpoints says was trained.

    Returns:
        Its ledger, and sentences on others' checkpoints of that step that say something else.
    """
    found = []
    for number, run in enumerate(runs):
        newest = newest_checkpoint(run)
        assert newest is not None, f"peer {number} has no checkpoint"
        state = json.loads((newest / "state.json").read_text())
        found.append((int(newest.name[5:]), number, Ledger.from_wire(state["ledger"])))
    step, first, ledger = max(found, key=lambda one: one[0])
    wrong = [
        f"peers {number} and {first} do not agree on what was trained at step {step}"
        for own_step, number, own in found
        if own_step == step and own != ledger
    ]
    return ledger, wrong


def judge_data(ledger: Ledger, num_samples: int, leases_lost: int) -> list[str]:
    """Say what is wrong with what the steps have trained."""
    wrong = []
    passes = ledger.passes(num_samples)[0]
    begun = ledger.covered.spans[-1][1] // num_samples if ledger.covered else 0
    if passes < max(1, begun - 1):
        wrong.append(f"{passes} passes are complete, and the {begun + 1}th has begun")
    if ledger.duplicates > leases_lost:
        wrong.append(f"{ledger.duplicates} samples were trained twice, {leases_lost} leases were lost")
    return wrong


def total_lost(events: Sequence[Event]) -> int:
    """Leases that a peer lost in all of its lives: it counts anew in each."""
    total = before = 0
    for one in events:
        if one["event"] == "step" and one.get("data"):
            total += max(0, one["data"]["lost"] - before)
            before = one["data"]["lost"]
        elif one["event"] == "joined":
            before = 0
    return total
