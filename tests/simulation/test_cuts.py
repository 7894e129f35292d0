"""Links that are cut temporarily: how soon all peers rejoin, and how much work is lost."""

import math
from dataclasses import replace

import pytest

from tests.kit.faulty_peer import BATCH, Settings
from tests.simulation.faults import Fault
from tests.simulation.swarm import Plan, simulate
from trahiv_cli.progress.pace import RoundRules

pytestmark = pytest.mark.usefixtures("undisturbed")

AT_STEP = 4
JOINT_WITHIN_S = 15.0
SETTINGS = Settings(seconds_per_batch=1.0)


def play(num_peers, side, seconds, settings=SETTINGS):
    """Simulate a run in which the peers of one side can't reach the others for `seconds`.

    Returns the run, and the seconds from the restoration of links to the next step of all peers.
    """
    first, *others = side
    cut = Fault("halve", AT_STEP, first, others=tuple(others), seconds=seconds)
    rounds = AT_STEP + 8 + int(seconds / settings.batches / settings.seconds_per_batch)
    run = simulate(Plan(num_peers, rounds, [cut], settings=settings, patience_s=60.0), seed=0)
    whole_at = run.steps("0")[AT_STEP - 1]["time"] + seconds
    together = [said["time"] for said in run.steps("0") if len(said["group"]) == num_peers]
    return run, min(at - whole_at for at in together if at > whole_at)


@pytest.mark.parametrize(
    ("num_peers", "side", "seconds"),
    [
        *((2, (1,), seconds) for seconds in (10.0, 40.0, 240.0)),
        *((3, (2,), seconds) for seconds in (10.0, 40.0, 240.0)),
        *((8, side, seconds) for side in ((6, 7), (4, 5, 6, 7)) for seconds in (10.0, 40.0)),
    ],
)
def test_peers_rejoin_soon_after_cut(num_peers, side, seconds):
    run, apart_s = play(num_peers, side, seconds)
    assert apart_s < JOINT_WITHIN_S
    step_samples = SETTINGS.batches * num_peers * BATCH
    assert 4 * run.thrown_away() <= 5 * step_samples, "those of one step, and the batches in training"
    if num_peers == 2:
        assert run.thrown_away() == 0, "neither went on alone"


def test_pair_without_solo_steps_loses_nothing():
    settings = replace(SETTINGS, rules=RoundRules(solo_after_s=math.inf))
    run, apart_s = play(2, (1,), 600.0, settings)
    assert apart_s < JOINT_WITHIN_S
    assert run.thrown_away() == 0
