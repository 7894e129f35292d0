"""Whole swarms with many faults: invariants hold after each event, and no peer waits for ever.

The promises are in `swarm.Run`, which also requires all rounds. `python -m tests.simulation` plays more runs.
"""

from typing import get_args

import pytest

from tests.kit.faulty_peer import Settings
from tests.simulation.__main__ import explain
from tests.simulation.faults import Fault, draw, shortest
from tests.simulation.swarm import Plan, Wrong, simulate
from trahiv_cli.progress.pace import Mode, Pace

pytestmark = pytest.mark.usefixtures("undisturbed")


def play(num_peers, rounds, seed, every=8, **more):
    """Simulate a run with a fault in every `every` rounds; shrink a failing run for up to a minute."""
    plan = Plan(num_peers, rounds, draw(seed, num_peers, rounds, every), **more)
    try:
        return simulate(plan, seed)
    except Wrong as wrong:
        pytest.fail(explain(plan, seed, wrong, patience_s=60.0), pytrace=False)


@pytest.mark.parametrize(
    ("num_peers", "rounds", "seed"),
    [(3, 300, 0), (4, 300, 1), (5, 200, 2), (6, 100, 3), (7, 50, 4), (8, 50, 5)],
)
def test_swarm_survives_random_faults(num_peers, rounds, seed):
    assert play(num_peers, rounds, seed).struck


@pytest.mark.parametrize("mode", get_args(Mode))
def test_buffers_stay_equal_despite_faults(mode):
    damage = Fault("corrupt", 3, 1, "rpc_aggregate_part")
    death = Fault("kill", 6, 2, seconds=1.0, homecoming="from-checkpoint")
    pace = Pace(mode, local_steps=2, fragments=2)
    settings = Settings(has_buffers=True, pace=pace, codec="blockwise4")
    run = simulate(Plan(3, 10, [damage, death], settings=settings), 0)
    assert run.failed
    assert run.struck == {"corrupt": 1, "kill": 1}


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_hundred_peers_survive_faults_behind_routers():
    settings = Settings(batches=1, seconds_per_batch=1.0)
    patience_s = 60.0  # their reports are 15 s old
    assert play(100, 120, 6, every=10, num_clients=97, settings=settings, patience_s=patience_s).struck


def test_same_seed_repeats_run():
    first, again = (play(3, 25, 11) for _ in range(2))
    assert first.events == again.events
    assert first.struck == again.struck


def test_failing_run_shrinks_to_guilty_faults():
    faults = [Fault("stall", at_step, 0) for at_step in range(1, 60)]
    guilty = {faults[17], faults[18], faults[40]}
    assert shortest(faults, lambda some: guilty <= set(some)) == [faults[17], faults[18], faults[40]]
