"""What goes wrong in a simulated swarm, as data: drawn by a seed, struck as planned.

A fault strikes once the swarm has reached `at_step`: at once, or when its peer sends the next message of a
kind (`moment`), which hits the phases of a round.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

SHARES = {
    "kill": 6, "late": 1, "cut": 3, "halve": 1, "stall": 3, "slow": 1,
    "corrupt": 3, "misshapen": 1, "codec": 1, "nan": 1, "enormous": 1, "two-votes": 1, "boast": 1,
}  # fmt: skip
"""How often each kind is drawn. Of peers: one vanishes, and comes back after a while; a new one comes. Of the
network: the link between two is cut for a while; the swarm is cut in two, this peer and `others` on one side.
Of time: nothing of a peer's moves for a while; it computes and sends slowly. Of rounds: one byte of a part is
another one; a part is no tensor of its shape; the codec raises; a gradient is not finite, or enormous. Lies:
a vote for another average to some than to others; a claim of more than a peer can have."""

LIES = ("two-votes", "boast")
MOMENTS = ("", "rpc_join_group", "rpc_aggregate_part", "rpc_vote")
HOMECOMINGS = ("as-new", "from-checkpoint", "empty-handed")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    at_step: int
    peer: int
    moment: str = ""  # name of the call whose next message it waits for; empty: none
    is_answer: bool = False
    skip: int = 0  # messages of that kind that pass before
    seconds: float = 0.0
    others: tuple[int, ...] = ()
    homecoming: str = ""
    """How a killed peer comes back: with another identity, with its checkpoint, or with neither."""


def draw(seed: int, num_peers: int, rounds: int, every: int) -> list[Fault]:
    """Draw the faults of a run, one in every so many rounds, none in the last of them.

    All lies are one peer's: to more than half of a group that lie nobody promises anything.
    """
    dice = random.Random(seed)
    liar = dice.randrange(num_peers)
    faults: list[Fault] = []
    step = every
    while step < rounds - every:
        kind = dice.choices(list(SHARES), list(SHARES.values()))[0]
        peer = liar if kind in LIES else dice.randrange(num_peers)
        fault = Fault(kind, step, peer, seconds=round(dice.uniform(0.5, 12.0), 1))
        others = [number for number in range(num_peers) if number != peer]
        if kind in ("kill", "cut", "stall", "corrupt", "misshapen"):
            moment = dice.choice(MOMENTS[2:3] if kind in ("corrupt", "misshapen") else MOMENTS)
            is_answer = kind != "misshapen" and dice.random() < 0.5
            fault = replace(fault, moment=moment, is_answer=is_answer, skip=dice.randrange(3))
        if kind == "kill":
            fault = replace(fault, homecoming=dice.choice(HOMECOMINGS))
        if kind == "cut":
            fault = replace(fault, others=(dice.choice(others),))
        if kind == "halve":  # never in two equal parts: exactly half of a group may go on, by the rules
            sizes = [size for size in range(1, num_peers) if 2 * size != num_peers]
            fault = replace(fault, others=tuple(dice.sample(others, dice.choice(sizes) - 1)), seconds=45.0)
        faults.append(fault)
        step += dice.randrange(every // 2, 3 * every // 2 + 1)
    return faults
