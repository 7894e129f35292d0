"""Peers that report and give away a state that they made up, among peers that trained theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.faults import lie_about_state
from tests.kit.faulty_peer import Settings, Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

STEP_S = 60.0
"""Deadline for a few steps without a fault, on a busy machine."""

LIAR, NEWCOMER = 3, 4


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path, Settings(num_peers=5)) as swarm:
        yield swarm


def honest_histories(swarm: Swarm) -> dict[str, str]:
    """Weights of each history that was trained, by its digest."""
    return {step["digest"]: step["weights"] for n in (0, 1, 2) for step in swarm.events(n, "step")}


def test_one_of_four_that_makes_a_state_up_moves_nobody(swarm: Swarm) -> None:
    for number, faults in enumerate(([], [], [], [lie_about_state(at_step=3)])):
        swarm.start(number, *faults)
        swarm.wait_for_ready(number)
    swarm.go()
    swarm.wait(lambda: bool(swarm.events(LIAR, "fault")), STEP_S, "the liar begins to lie")
    lied_at = swarm.events(LIAR, "fault")[0]["step"]
    swarm.wait_for_step(lied_at + 6, (0, 1, 2), 2 * STEP_S)
    assert all(swarm.events(number, "loaded") == [] for number in (0, 1, 2)), "nobody took the lie over"

    swarm.start(NEWCOMER)
    ready = swarm.wait_for_ready(NEWCOMER)
    assert ready["step"] > lied_at
    trained = honest_histories(swarm)
    assert trained[ready["digest"]] == ready["weights"], "it holds what the others trained"
    swarm.wait_for_step(ready["step"] + 4, (0, 1, 2, NEWCOMER), 2 * STEP_S)
    swarm.wait_until_equal((0, 1, 2, NEWCOMER), STEP_S, beyond=ready["step"])
    assert not set(honest_histories(swarm)) & {said.get("digest") for said in swarm.events(LIAR, "loaded")}


def test_of_two_neither_can_outvote_the_other(tmp_path: Path) -> None:
    """The fault bites: whom the others can't outvote leads them astray."""
    with Swarm(tmp_path, Settings(num_peers=2)) as swarm:
        swarm.start_all({1: [lie_about_state(at_step=3)]})
        swarm.wait(lambda: bool(swarm.events(0, "loaded")), STEP_S, "the other one takes the lie over")
        assert swarm.events(0, "loaded")[0]["time"] > swarm.events(1, "fault")[0]["time"]
