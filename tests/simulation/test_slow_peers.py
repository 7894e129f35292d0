"""A peer whose batches take longer than the swarm's steps: it counts with smaller ones, or warns once."""

from collections import Counter

import pytest

from tests.kit.faulty_peer import BATCH, Settings
from tests.simulation.swarm import Plan, simulate
from trahiv_cli.progress.pace import Pace

pytestmark = pytest.mark.usefixtures("undisturbed")

SLOW = "2"
"""Name of the slow peer."""


def play(mode, batch_s, smallest_batch, rounds=100, seed=1):
    """Simulate three peers, two of which train a batch in 0.1 s and one in `batch_s`."""
    settings = Settings(pace=Pace(mode=mode), smallest_batch=smallest_batch)
    slowness = {int(SLOW): batch_s / settings.seconds_per_batch}
    return simulate(Plan(3, rounds, slowness=slowness, settings=settings, patience_s=120.0), seed)


def said(run, *peers):
    """Count warnings of some peers by code."""
    return Counter(event["code"] for event in run.said("notice", *peers))


@pytest.mark.parametrize(
    ("mode", "batch_s", "seed"),
    [*(("sync", 3.0, seed) for seed in range(4)), ("sync", 6.0, 1), ("overlap", 6.0, 1)],
)
def test_slow_peer_counts_with_smaller_batches(mode, batch_s, seed):
    run = play(mode, batch_s, smallest_batch=1, seed=seed)
    steps = run.steps(SLOW)
    assert 2 * len(steps) >= run.world.furthest
    assert sum(not step["my_samples"] for step in steps) <= 1, "that by which others learn its speed"
    assert said(run, SLOW)["slow"] == 1
    assert not said(run)["too-slow"]


def test_slow_peer_warns_once():
    run = play("sync", 6.0, smallest_batch=BATCH, rounds=120)
    assert said(run, SLOW)["too-slow"] == 1
    assert [said(run, name)["slow-peer"] for name in ("0", "1")] == [1, 1]
    assert len(run.said("loaded", SLOW)) <= 6, "it does not fetch the state in vain"
