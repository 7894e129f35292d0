"""Three honest peers and one after another that lies: nobody ends, and all go on in one history.

Real processes, and each lie comes from the product's own code with one thing changed on its way out. One
swarm lives through all of them; each liar has an identity of its own, and finds what the one before has left
behind: the report of a peer that never comes. Poison is in `tests/simulation/test_poison.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.kit.attacker import attack
from tests.kit.faults import Fault, ask_too_much, lie_about_time, lie_in_claim, lie_in_report, send_nonsense
from tests.kit.faulty_peer import Settings, Swarm, find_broken_promises, find_lost_steps

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

HONEST, LIAR = (0, 1, 2), 3
STEPS = 3
AVERAGING_TIMEOUT_S = 8.0
STEP_S = 60.0
"""Deadline for a few steps without a lie, on a busy machine."""

SLOW = {"measured": [10.0, 3e6, 1.0, 1.0, 0.0]}
"""A link of a byte in five weeks."""


@dataclass(frozen=True)
class Lie:
    """What a liar does, and whether the honest can say of whom it is."""

    name: str
    faults: tuple[Fault, ...]
    is_named: bool = True


LIES = [
    Lie("leases-all-and-has-no-time", (lie_in_report({"leases": [0, 2**62]}), lie_about_time(math.nan))),
    Lie("trained-all", (lie_in_claim({"samples": 2**62, "trained": [0, 2**62]}),)),
    Lie("trained-scattered", (lie_in_claim({"samples": 4096}, num_isolated=4096),), is_named=False),
    Lie("endless-samples", (lie_in_claim({"samples": 2**64 - 1}),)),
    Lie("silent", (send_nonsense("none"),)),
    Lie("slow", (lie_in_claim(SLOW),), is_named=False),
    Lie("asks-too-much-and-is-deaf", (ask_too_much("votes"), ask_too_much("states")), is_named=False),
    Lie("endless-quorum", (lie_in_claim({"quorum": 10**6}),)),
    Lie("large-quorum", (lie_in_claim({"quorum": 60_000}),)),
]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    settings = Settings(num_peers=len(HONEST) + 1, num_samples=100_000, averaging_timeout=AVERAGING_TIMEOUT_S)
    with Swarm(tmp_path_factory.mktemp("liars"), settings) as swarm:
        for number in HONEST:
            swarm.start(number)
            swarm.wait_for_ready(number)
        swarm.go()
        swarm.wait_for_step(STEPS, HONEST, STEP_S)
        yield swarm


def require_that_the_honest_go_on(swarm: Swarm) -> None:
    """Require a few more steps in common, an averaging timeout later at most, and one history."""
    reached = max(map(swarm.reached, HONEST))
    swarm.wait_for_step(reached + STEPS, HONEST, AVERAGING_TIMEOUT_S + STEP_S)
    swarm.wait_until_equal(HONEST, STEP_S, beyond=reached + STEPS - 1)
    assert all(map(swarm.is_running, HONEST))
    said = {str(number): swarm.events(number) for number in HONEST}
    assert find_broken_promises(said) == []
    assert find_lost_steps(said) == {}


def is_named(swarm: Swarm, peer: str) -> bool:
    """Whether an honest peer says that something is wrong with another one."""
    return any(
        peer in swarm.log(number)
        or any(peer in said["reason"] for said in swarm.events(number, "failed"))
        or any(peer in said["left_out"] for said in swarm.events(number, "step"))
        for number in HONEST
    )


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_neither_ends_nor_splits_nor_stops_the_honest(swarm: Swarm, lie: Lie) -> None:
    liar = swarm.renew(LIAR)
    num_lies = len(swarm.events(LIAR, "fault")) if (swarm.folder / f"{LIAR}.jsonl").exists() else 0
    swarm.start(LIAR, *lie.faults)
    try:
        swarm.wait_for_ready(LIAR)
        struck = num_lies + len(lie.faults)
        swarm.wait(lambda: len(swarm.events(LIAR, "fault")) >= struck, STEP_S, f"{lie.name} strikes")
        require_that_the_honest_go_on(swarm)
        if lie.is_named:
            swarm.wait(lambda: is_named(swarm, liar), STEP_S, f"{liar} is named")
    finally:
        swarm.stop_running(LIAR)


def test_records_of_peers_that_somebody_made_up_fill_nobody_s_answer(swarm: Swarm) -> None:
    async def fill() -> None:
        name, address = "store_records_of_made_up_peers", swarm.addresses()[0]
        outcomes = [one async for one in attack(address, "faults", "trahiv", None, b"", [name])]
        assert outcomes == [(name, "P2PHandlerError: 18 of 144 records were kept")]

    asyncio.run(fill())
    require_that_the_honest_go_on(swarm)


def test_afterwards_a_newcomer_is_let_in_and_one_that_died_comes_back(swarm: Swarm) -> None:
    # They read the ledger into which the liars' positions were entered.
    swarm.renew(LIAR)
    swarm.start(LIAR)
    swarm.wait_for_ready(LIAR)
    swarm.stop_running(2)
    swarm.start(2)
    swarm.wait_for_ready(2)
    swarm.wait_until_equal(
        (*HONEST, LIAR), AVERAGING_TIMEOUT_S + STEP_S, beyond=max(map(swarm.reached, HONEST))
    )
    require_that_the_honest_go_on(swarm)
