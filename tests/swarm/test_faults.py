"""Rounds in which something goes wrong: either they happened for most of the group, or for nobody.

What real processes alone can show: peers that die at whatever moment, threads beside training, and
bitsandbytes' statistics. Each failure of the table is in `tests/simulation/test_failures.py`, and rounds full
of random ones in `test_whole_swarms.py` there. What no fault excuses is checked at the end of each test:
equal weights at equal steps, one history, each sample once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.faults import PHASES, drop_peer
from tests.kit.faulty_peer import AVERAGING_TIMEOUT_S, MODES_BESIDE_TRAINING, Settings
from tests.kit.faulty_swarm import STEP_S, Swarm

pytestmark = pytest.mark.timeout(240)


def test_survivors_go_on_at_whatever_moment_of_a_round_a_peer_dies(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        swarm.start_all({2: [drop_peer(at_step=2, phase=PHASES[0])]})
        for index, phase in enumerate(PHASES):
            if index:
                swarm.start(2, drop_peer(at_step=swarm.reached(0) + 4, phase=phase), as_new=index % 2 == 0)
                swarm.wait_for_ready(2)
            swarm.wait_for_end(2, STEP_S)
            died = swarm.events(2, "fault")[-1]
            assert died["phase"] == phase
            for survivor in (0, 1):
                following = swarm.wait_for_step_after(died["time"], survivor, AVERAGING_TIMEOUT_S + STEP_S)
                assert following["blocked"] < AVERAGING_TIMEOUT_S
        swarm.wait_for_step(max(swarm.reached(0), swarm.reached(1)) + 2, (0, 1), STEP_S)
        swarm.require_promises()


def test_the_other_of_two_goes_on_alone_when_the_record_of_the_dead_one_has_expired(tmp_path: Path) -> None:
    expires_s = 8.0
    with Swarm(tmp_path, Settings(num_peers=2, metadata_expiration=expires_s)) as swarm:
        swarm.start_all({1: [drop_peer(at_step=3, phase="half-way")]})
        swarm.wait_for_end(1, STEP_S)
        died = swarm.events(1, "fault")[-1]["time"]
        alone = swarm.wait_for_step_after(died, 0, expires_s + AVERAGING_TIMEOUT_S + STEP_S)
        assert alone["group"] == []
        assert any(said["code"] == "no-group" for said in swarm.events(0, "notice"))
        swarm.require_promises()


def test_fragments_are_agreed_on_by_threads_beside_training_also_with_one_that_died(tmp_path: Path) -> None:
    """In `tests/simulation` a run has one thread; `diloco` is this mode, but that it waits."""
    settings = MODES_BESIDE_TRAINING["streaming"]
    with Swarm(tmp_path, settings) as swarm:
        swarm.start_all({2: [drop_peer(at_step=16, phase="half-way")]})
        swarm.wait_for_end(2, STEP_S)
        first, last = swarm.events(2, "ready")[0], swarm.places(2)[-1]
        assert last["step"] >= 16 and last["loss"] < 0.7 * first["loss"]
        swarm.wait_for_step(last["step"] + 1, (0, 1), AVERAGING_TIMEOUT_S + STEP_S)
        swarm.start(2)
        joined = swarm.wait_for_ready(2)
        assert joined["step"] > last["step"] and joined["loss"] < 0.7 * first["loss"]
        together = swarm.wait_for_step_after(joined["time"], 2, AVERAGING_TIMEOUT_S + STEP_S)
        # Each fragment once, so that a momentum that did not come with the state would show.
        beyond = together["step"] + settings.pace.steps_per_round * settings.pace.num_fragments
        swarm.wait_until_equal((0, 1, 2), AVERAGING_TIMEOUT_S + STEP_S, beyond)
        assert len(swarm.events(2, "step")[-1]["group"]) == 3
        swarm.require_promises()


def test_replicas_with_8_bit_statistics_are_equal_and_a_latecomer_that_offloads_becomes_one(
    tmp_path: Path,
) -> None:
    with Swarm(tmp_path, Settings(optimizer="adamw_8bit", offload=False)) as swarm:
        for number in (0, 1):
            swarm.start(number)
            swarm.wait_for_ready(number)
        swarm.go()
        swarm.wait_for_step(3, (0, 1), STEP_S)
        swarm.start(2, offload=True)
        ready = swarm.wait_for_ready(2)
        assert ready["step"] >= 3
        swarm.wait_until_equal((0, 1, 2), STEP_S, beyond=ready["step"] + 4)
        assert len(swarm.events(2, "step")[-1]["group"]) == 3
        swarm.require_promises()
