"""Five peers of which the last one brings poison: what does it do to the others' loss?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.kit.faults import Fault
from tests.kit.faulty_peer import Settings, Swarm, find_broken_promises
from trahiv_cli.optim.rules import RoundRules

NUM_PEERS = 5
STEPS = 50
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Poisoned:
    """What came of a run with a poisoner."""

    loss: float
    """Of the honest peers, on held-out data, after the last step; the largest."""

    is_named: bool
    """Whether every honest peer said who brought it: in a notice, or in its log as it let that one into no
    group. Who forges claims as soon as it leads is never in a round that could leave its gradient out."""

    rounds_without_it: int
    """Steps whose round left the poisoner's gradient out, as the first peer saw it."""

    seconds: float


def train_with_poison(
    folder: Path,
    fault: Fault | None = None,
    rules: RoundRules | None = None,
) -> Poisoned:
    """Train five peers, the last of which has the fault."""
    # Small steps: the loss still falls at the end, by gradients larger than their noise.
    settings = Settings(
        num_peers=NUM_PEERS, seconds_per_batch=0.02, learning_rate=4e-4, rules=rules or RoundRules()
    )
    honest = range(NUM_PEERS - 1)
    with Swarm(folder, settings) as swarm:
        swarm.start_all({NUM_PEERS - 1: [fault] if fault else []})
        seconds = swarm.wait_for_step(STEPS, list(honest), DEADLINE_S)
        poisoner = swarm.ids[-1]
        losses, named = [], []
        for number in honest:
            at_end = [
                said for said in swarm.events(number) if said.get("step", 0) >= STEPS and "loss" in said
            ]
            losses.append(at_end[0]["loss"])
            told = [said["message"] for said in swarm.events(number, "notice")]
            left_out = [poisoner in said["left_out"] for said in swarm.events(number, "step")]
            is_told = any(left_out) and any(poisoner in message for message in told)
            named.append(is_told or f"Peer {poisoner} is let into no group" in swarm.log(number))
        first = [poisoner in said["left_out"] for said in swarm.events(0, "step")]
        assert not find_broken_promises(swarm.everything())
    return Poisoned(max(losses), all(named), sum(first), seconds)
