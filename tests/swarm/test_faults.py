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

AFTER_DEATH_S = AVERAGING_TIMEOUT_S + STEP_S


def test_survivors_go_on_at_whatever_moment_of_a_round_a_peer_dies(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        survivors = swarm.join(0), swarm.join(1)
        victim = swarm.join(2, drop_peer(phase=PHASES[0]))
        swarm.go()
        for index, phase in enumerate(PHASES):
            if index:
                fault = drop_peer(at_step=swarm.reached(0) + 4, phase=phase)
                victim = swarm.join(2, fault, as_new=index % 2 == 0)
            victim.exit_code(STEP_S)
            died = victim.wait_for("fault", 1, phase=phase)["time"]
            for survivor in survivors:
                following = survivor.wait_for("step", AFTER_DEATH_S, time=lambda at, died=died: at > died)
                assert following["blocked"] < AVERAGING_TIMEOUT_S
        last = swarm.reached(0, 1) + 2
        for survivor in survivors:
            survivor.wait_for("step", STEP_S, step=lambda step: step >= last)
        swarm.require_promises()


def test_the_other_of_two_goes_on_alone_when_the_record_of_the_dead_one_has_expired(tmp_path: Path) -> None:
    expires_s = 8.0
    with Swarm(tmp_path, Settings(num_peers=2, metadata_expiration=expires_s)) as swarm:
        survivor, victim = swarm.join(0), swarm.join(1, drop_peer(at_step=3, phase="half-way"))
        swarm.go()
        victim.exit_code(STEP_S)
        died = victim.wait_for("fault", 1)["time"]
        alone = survivor.wait_for("step", expires_s + AFTER_DEATH_S, time=lambda at: at > died)
        assert alone["group"] == []
        survivor.wait_for("notice", 1, code="no-group")
        swarm.require_promises()


def test_fragments_are_agreed_on_by_threads_beside_training_also_with_one_that_died(tmp_path: Path) -> None:
    """In `tests/simulation` a run has one thread; `diloco` is this mode, but that it waits."""
    settings = MODES_BESIDE_TRAINING["streaming"]
    with Swarm(tmp_path, settings) as swarm:
        survivors = swarm.join(0), swarm.join(1)
        victim = swarm.join(2, drop_peer(at_step=16, phase="half-way"))
        swarm.go()
        victim.exit_code(STEP_S)
        first, last = swarm.places(2)[0], swarm.places(2)[-1]
        assert last["step"] >= 16 and last["loss"] < 0.7 * first["loss"]
        for survivor in survivors:
            survivor.wait_for("step", AFTER_DEATH_S, step=lambda step: step > last["step"])
        again = swarm.join(2)
        joined = again.wait_for("ready", 1)
        assert joined["step"] > last["step"] and joined["loss"] < 0.7 * first["loss"]
        together = again.wait_for("step", AFTER_DEATH_S)
        # Each fragment once, so that a momentum that did not come with the state would show.
        beyond = together["step"] + settings.pace.steps_per_round * settings.pace.num_fragments
        swarm.wait_until_equal((0, 1, 2), AFTER_DEATH_S, beyond)
        assert len(again.steps[-1]["group"]) == 3
        swarm.require_promises()


def test_replicas_with_8_bit_statistics_are_equal_and_a_latecomer_that_offloads_becomes_one(
    tmp_path: Path,
) -> None:
    with Swarm(tmp_path, Settings(optimizer="adamw_8bit", offload=False)) as swarm:
        early = swarm.join(0), swarm.join(1)
        swarm.go()
        for peer in early:
            peer.wait_for("step", STEP_S, step=3)
        late = swarm.join(2, offload=True)
        reached = late.wait_for("ready", 1)["step"]
        assert reached >= 3
        swarm.wait_until_equal((0, 1, 2), STEP_S, beyond=reached + 4)
        assert len(late.steps[-1]["group"]) == 3
        swarm.require_promises()
