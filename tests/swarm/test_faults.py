"""Rounds in which something goes wrong: either they happened for most of the group, or for nobody.

What real processes alone can show: peers that die at whatever moment, and half a minute of random faults
(`tests/kit/faults.py`). Each failure of the table is in `tests/simulation/test_failures.py`. What no fault
excuses is checked at the end of every test: equal weights at equal steps, one history, each sample once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.faults import PHASES, drop_peer
from tests.kit.faulty_peer import (
    AVERAGING_TIMEOUT_S,
    Settings,
    Swarm,
    find_broken_promises,
    find_lost_steps,
)
from tests.kit.random_faults import run_rounds

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

STEP_S = 60.0
"""Deadline for a few steps without a fault, on a busy machine."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path) as swarm:
        yield swarm
        assert find_broken_promises(swarm.everything()) == []


def test_survivors_go_on_at_whatever_moment_of_a_round_a_peer_dies(swarm: Swarm) -> None:
    swarm.start_all({2: [drop_peer(at_step=3, phase=PHASES[0])]})
    for index, phase in enumerate(PHASES):
        if index:
            swarm.start(2, drop_peer(at_step=swarm.reached(0) + 5, phase=phase), as_new=index % 2 == 0)
            swarm.wait_for_ready(2)
        swarm.wait_for_end(2, STEP_S)
        died = swarm.events(2, "fault")[-1]
        assert died["phase"] == phase
        for survivor in (0, 1):
            following = swarm.wait_for_step_after(died["time"], survivor, AVERAGING_TIMEOUT_S + STEP_S)
            assert following["blocked"] < AVERAGING_TIMEOUT_S
        swarm.wait_for_step(max(swarm.reached(0), swarm.reached(1)) + 3, (0, 1), STEP_S)
    assert find_lost_steps(swarm.everything()) == {}


def test_the_other_of_two_goes_on_alone_when_the_record_of_the_dead_one_has_expired(tmp_path: Path) -> None:
    expires_s = 8.0
    with Swarm(tmp_path, Settings(num_peers=2, metadata_expiration=expires_s)) as swarm:
        swarm.start_all({1: [drop_peer(at_step=3, phase="half-way")]})
        swarm.wait_for_end(1, STEP_S)
        died = swarm.events(1, "fault")[-1]["time"]
        alone = swarm.wait_for_step_after(died, 0, expires_s + AVERAGING_TIMEOUT_S + STEP_S)
        assert alone["group"] == []
        assert any(said["code"] == "no-group" for said in swarm.events(0, "notice"))
        assert find_broken_promises(swarm.everything()) == []
        assert find_lost_steps(swarm.everything()) == {}


def test_thirty_rounds_with_random_faults_keep_every_promise(tmp_path: Path) -> None:
    report = run_rounds(tmp_path, rounds=30, seed=1)
    assert report.verdict == []
