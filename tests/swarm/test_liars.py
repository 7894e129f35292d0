"""Who floods honest peers, or their DHT, stops nobody: what only real processes and sockets can show.

Lies in reports, claims, votes, states and parts are in `tests/simulation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.kit.attacker import attack
from tests.kit.faults import ask_too_much
from tests.kit.faulty_peer import Settings
from tests.kit.faulty_swarm import STEP_S, Swarm

pytestmark = pytest.mark.timeout(240)

HONEST, LIAR = (0, 1, 2), 3
STEPS = 3
AVERAGING_TIMEOUT_S = 8.0


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
    swarm.require_promises(HONEST)


def test_who_asks_too_much_and_is_deaf_stops_nobody(swarm: Swarm) -> None:
    swarm.start(LIAR, ask_too_much())
    swarm.wait(lambda: bool(swarm.events(LIAR, "fault")), STEP_S, "it asks")
    require_that_the_honest_go_on(swarm)
    swarm.stop_running(LIAR)


def test_records_of_peers_that_somebody_made_up_fill_nobody_s_answer(swarm: Swarm) -> None:
    async def fill() -> None:
        name, address = "store_records_of_made_up_peers", swarm.addresses()[0]
        outcomes = [one async for one in attack(address, "faults", None, b"", [name])]
        assert outcomes == [(name, "P2PHandlerError: 18 of 144 records were kept")]

    asyncio.run(fill())
    require_that_the_honest_go_on(swarm)
