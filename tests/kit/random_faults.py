"""Rounds among three peers while kills, stalls, cuts and corrupt parts go on: what held, what not.

Loopback, a tiny model, real processes. The seed makes the list of faults: which, for which peer, at which
step. A killed peer is started again, every other time with another identity. Judged is that after each
committed step all that took it hold the same weights, that no peer's samples are missing or counted twice,
and that every history is a prefix of the longest one. A step that only a killed peer had taken, which no
other could hear of, is listed as such.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.kit.faults import PHASES, corrupt_part, drop_peer, stall
from tests.kit.faulty_peer import Settings, Swarm, find_broken_promises, find_lost_steps

NUM_PEERS = 3
EVERY_STEPS = 12
"""A fault strikes so often, on average."""

SHARES = {"kill": 3, "stall": 2, "corrupt": 4, "cut": 2}
LONGEST_STALL_S = 8.0
LONGEST_CUT_S = 8.0
PER_ROUND_S = 3.0
"""Deadline for all rounds together, for each of them."""

SETTLE_S = 90.0


@dataclass(frozen=True)
class Cut:
    """A link between two peers that is cut for a while."""

    at_step: int
    a: int
    b: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """All faults of a run, by peer, and the links that are cut."""

    faults: dict[int, list[drop_peer | stall | corrupt_part]]
    cuts: list[Cut]


def plan(rounds: int, seed: int) -> Plan:
    """Draw the faults of a run."""
    dice = random.Random(seed)
    faults: dict[int, list[drop_peer | stall | corrupt_part]] = {n: [] for n in range(NUM_PEERS)}
    cuts: list[Cut] = []
    at_step = EVERY_STEPS
    while at_step < rounds - EVERY_STEPS:
        number = dice.randrange(NUM_PEERS)
        kind = dice.choices(list(SHARES), list(SHARES.values()))[0]
        if kind == "kill":
            faults[number].append(drop_peer(at_step, dice.choice(PHASES)))
        elif kind == "stall":
            seconds = round(dice.uniform(0.5, LONGEST_STALL_S), 1)
            faults[number].append(stall(seconds, at_step, dice.choice(PHASES), dice.random() < 0.7))
        elif kind == "corrupt":
            faults[number].append(corrupt_part(at_step, averaged=dice.random() < 0.5))
        else:
            other = (number + dice.randrange(1, NUM_PEERS)) % NUM_PEERS
            cuts.append(Cut(at_step, number, other, round(dice.uniform(0.5, LONGEST_CUT_S), 1)))
        at_step += dice.randrange(EVERY_STEPS // 2, 3 * EVERY_STEPS // 2)
    return Plan(faults, cuts)


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


class Run:
    """One run: keeps peers alive and links as the plan says."""

    def __init__(self, swarm: Swarm, drawn: Plan) -> None:
        self._swarm, self._plan = swarm, drawn
        self._cuts = list(drawn.cuts)
        self._healing: list[tuple[float, Cut]] = []
        self._kills = 0
        self.struck: Counter[str] = Counter()

    @property
    def furthest(self) -> int:
        """The longest history's step, as far as anybody wrote it down."""
        return max(map(self._swarm.reached, range(NUM_PEERS)))

    def look_after(self) -> None:
        """Start again who was killed; cut and heal links that are due."""
        for number in range(NUM_PEERS):
            if not self._swarm.is_running(number) and self._swarm.addresses():
                self._kills += 1
                rest = [fault for fault in self._plan.faults[number] if fault.at_step > self.furthest]
                self._swarm.start(number, *rest, as_new=self._kills % 2 == 0)
        while self._cuts and self._cuts[0].at_step <= self.furthest:
            cut = self._cuts.pop(0)
            self._swarm.cut(cut.a, cut.b)
            self._healing.append((time.monotonic() + cut.seconds, cut))
            self.struck["cut_link"] += 1
        self._heal(time.monotonic())

    def heal_all(self) -> None:
        """Join every link."""
        self._cuts.clear()
        self._heal(math.inf)

    def _heal(self, now: float) -> None:
        for end, cut in [one for one in self._healing if one[0] <= now]:
            self._healing.remove((end, cut))
            self._swarm.heal(cut.a, cut.b)


def run_rounds(folder: Path, rounds: int, seed: int) -> Report:
    """Run until the longest history has `rounds` steps, then let all peers meet and judge."""
    began = time.monotonic()
    drawn = plan(rounds, seed)
    with Swarm(folder, Settings(num_peers=NUM_PEERS, seconds_per_batch=0.02)) as swarm:
        run = Run(swarm, drawn)
        swarm.start_all({number: tuple(faults) for number, faults in drawn.faults.items()})
        verdict: list[str] = []
        deadline = time.monotonic() + rounds * PER_ROUND_S + SETTLE_S
        while run.furthest < rounds:
            run.look_after()
            if time.monotonic() > deadline:
                verdict.append(f"only {run.furthest} rounds in {deadline - began:.0f} s")
                break
            time.sleep(0.05)
        run.heal_all()
        run.look_after()
        try:
            swarm.wait_until_equal(range(NUM_PEERS), SETTLE_S, beyond=run.furthest)
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
    struck = run.struck + Counter(one["fault"] for one in said if one["event"] == "fault")
    failed = sum(one["event"] == "failed" for one in said)
    return Report(seed, run.furthest, failed, dict(struck), time.monotonic() - began, verdict, unheard)


def _was_killed_after(events: list[dict[str, object]], digest: str) -> bool:
    """Whether the peer died with this step as the last that it had taken."""
    at = next(i for i, said in enumerate(events) if said.get("digest") == digest)
    following = (said for said in events[at + 1 :] if said["event"] in ("fault", "step"))
    return next(following, {}).get("fault") == "drop_peer"
