"""Rounds among three peers while kills, stalls and corrupt parts go on: what held, what not.

Loopback, a tiny model, real processes. The seed makes the list of faults: which, for which peer, at which
step. A killed peer is started again, every other time with another identity. Judged is that after each
committed step all that took it hold the same weights, that no peer's samples are missing or counted twice,
and that every history is a prefix of the longest one. A step that only a killed peer had taken, which no
other could hear of, is listed as such.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.faults import PHASES, corrupt_part, drop_peer, stall
from tests.kit.faulty_peer import Settings
from tests.kit.faulty_swarm import Swarm
from tests.kit.promises import find_broken_promises, find_lost_steps

NUM_PEERS = 3
EVERY_STEPS = 12
"""A fault strikes so often, on average."""

SHARES = {"kill": 3, "stall": 2, "corrupt": 4}
LONGEST_STALL_S = 8.0
PER_ROUND_S = 3.0
"""Deadline for all rounds together, for each of them."""

SETTLE_S = 90.0

Plan = dict[int, list[drop_peer | stall | corrupt_part]]
"""All faults of a run, by peer."""


def plan(rounds: int, seed: int) -> Plan:
    """Draw the faults of a run."""
    dice = random.Random(seed)
    faults: Plan = {number: [] for number in range(NUM_PEERS)}
    at_step = EVERY_STEPS
    while at_step < rounds - EVERY_STEPS:
        number = dice.randrange(NUM_PEERS)
        match dice.choices(list(SHARES), list(SHARES.values()))[0]:
            case "kill":
                fault: drop_peer | stall | corrupt_part = drop_peer(at_step, dice.choice(PHASES))
            case "stall":
                seconds = round(dice.uniform(0.5, LONGEST_STALL_S), 1)
                fault = stall(seconds, at_step, dice.choice(PHASES), dice.random() < 0.7)
            case _:
                fault = corrupt_part(at_step, averaged=dice.random() < 0.5)
        faults[number].append(fault)
        at_step += dice.randrange(EVERY_STEPS // 2, 3 * EVERY_STEPS // 2)
    return faults


@dataclass(frozen=True)
class Report:
    """What came of a run."""

    seed: int
    rounds: int
    """Steps of the longest history."""

    failed_rounds: int
    """Tries that were undone, counted once for each peer that was in them."""

    struck: dict[str, int]
    """Faults that did strike, by kind."""

    seconds: float
    verdict: list[str]
    """What was not as promised."""

    unheard: list[str]
    """Steps that only peers knew of which were then killed."""


def run_rounds(folder: Path, rounds: int, seed: int) -> Report:
    """Run until the longest history has `rounds` steps, then let all peers meet and judge."""
    began, faults, kills = time.monotonic(), plan(rounds, seed), 0
    verdict: list[str] = []
    with Swarm(folder, Settings(num_peers=NUM_PEERS, seconds_per_batch=0.02)) as swarm:

        def furthest() -> int:
            return max(map(swarm.reached, range(NUM_PEERS)))

        def look_after() -> None:
            nonlocal kills
            for number in range(NUM_PEERS):
                if not swarm.is_running(number) and swarm.addresses():
                    kills += 1
                    rest = [fault for fault in faults[number] if fault.at_step > furthest()]
                    swarm.start(number, *rest, as_new=kills % 2 == 0)

        swarm.start_all(faults)
        deadline = time.monotonic() + rounds * PER_ROUND_S + SETTLE_S
        while furthest() < rounds:
            look_after()
            if time.monotonic() > deadline:
                verdict.append(f"only {furthest()} rounds in {deadline - began:.0f} s")
                break
            time.sleep(0.05)
        look_after()
        reached = furthest()
        try:
            swarm.wait_until_equal(range(NUM_PEERS), SETTLE_S, beyond=reached)
        except AssertionError as error:
            verdict.append(f"the peers did not come together again: {error}")
        everything = swarm.everything()
    verdict += find_broken_promises(everything)
    unheard = []
    for digest, names in find_lost_steps(everything).items():
        died = all(_was_killed_after(everything[name], digest) for name in names)
        told = f"step {digest[:8]} of {', '.join(names)} is in nobody's history"
        (unheard if died else verdict).append(told)
    said = [one for events in everything.values() for one in events]
    struck = Counter(one["fault"] for one in said if one["event"] == "fault")
    failed = sum(one["event"] == "failed" for one in said)
    return Report(seed, reached, failed, dict(struck), time.monotonic() - began, verdict, unheard)


def _was_killed_after(events: list[dict[str, Any]], digest: str) -> bool:
    """Whether the peer died with this step as the last that it had taken."""
    at = next(i for i, said in enumerate(events) if said.get("digest") == digest)
    following = (said for said in events[at + 1 :] if said["event"] in ("fault", "step"))
    return next(following, {}).get("fault") == "drop_peer"
