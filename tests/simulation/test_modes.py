"""In memory: what a slow peer costs the others where peers do not wait for each other at each step."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from tests.kit.faulty_peer import MODES_BESIDE_TRAINING
from tests.simulation.swarm import Plan, simulate

pytestmark = pytest.mark.usefixtures("undisturbed")

ROUNDS = 20

WAITED_AT_MOST = 0.25
"""Share of the median step that quick peers wait. Waiting for one four times slower takes half of a step."""


@pytest.mark.parametrize("mode", MODES_BESIDE_TRAINING)
def test_a_slow_peer_takes_every_step_with_less_and_holds_nobody_up(mode: str) -> None:
    settings = MODES_BESIDE_TRAINING[mode]
    run = simulate(Plan(3, ROUNDS, slowness={2: 4.0}, settings=settings), seed=0)
    steps = [run.steps(name) for name in "012"]
    common = min(map(len, steps))
    assert common >= ROUNDS // settings.pace.steps_per_round
    assert not [said for events in run.events.values() for said in events if said["event"] == "loaded"]
    assert len({tuple(said["digest"] for said in own[:common]) for own in steps}) == 1

    brought = [sum(said["my_samples"] for said in own) for own in steps]
    assert 0 < 2 * brought[2] < min(brought[:2])
    for own in steps[:2]:
        waited_s = statistics.median(said["blocked"] for said in own)
        assert waited_s < WAITED_AT_MOST * statistics.median(b["time"] - a["time"] for a, b in pairwise(own))
