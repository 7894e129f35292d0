"""Modes in which peers do not wait for each other at each step: what they agree on, and what a failure costs.

The same small peers and the same promises as in `test_faults.py`, at whose weights one looks as they are
agreed on: between rounds each peer's own may be elsewhere. `diloco` is `streaming` that waits; see
`tests/unit/optim/test_method.py`. What a slow peer costs the others is in `tests/simulation/test_modes.py`:
there no machine is busy with anything else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.faults import drop_peer
from tests.kit.faulty_peer import (
    AVERAGING_TIMEOUT_S,
    MODES_BESIDE_TRAINING,
    Swarm,
    find_broken_promises,
    find_lost_steps,
)

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

STEP_S = 60.0
"""Deadline for a few steps without a fault, on a busy machine."""

EVERYBODY = (0, 1, 2)


@pytest.mark.parametrize("mode", MODES_BESIDE_TRAINING)
def test_peers_agree_and_go_on_without_one_that_dies_and_with_it_when_it_comes_back(
    mode: str, tmp_path: Path
) -> None:
    settings = MODES_BESIDE_TRAINING[mode]
    with Swarm(tmp_path, settings) as swarm:
        swarm.start_all({2: [drop_peer(at_step=16, phase="half-way")]})
        swarm.wait_for_end(2, STEP_S)
        died = swarm.events(2, "fault")[0]
        first, last = swarm.events(2, "ready")[0], swarm.last_place(2)
        assert last["step"] == died["step"] >= 16 and last["loss"] < 0.7 * first["loss"]
        for survivor in (0, 1):
            following = swarm.wait_for_step_after(died["time"], survivor, AVERAGING_TIMEOUT_S + STEP_S)
            assert following["blocked"] < AVERAGING_TIMEOUT_S

        swarm.start(2)
        joined = swarm.wait_for_ready(2)
        assert joined["step"] > died["step"] and joined["loss"] < 0.7 * first["loss"]
        together = swarm.wait_for_step_after(joined["time"], 2, AVERAGING_TIMEOUT_S + STEP_S)
        # Each fragment once, so that a momentum that did not come with the state would show.
        beyond = together["step"] + settings.pace.steps_per_round * settings.pace.num_fragments
        swarm.wait_until_equal(EVERYBODY, AVERAGING_TIMEOUT_S + STEP_S, beyond)
        assert len(swarm.events(2, "step")[-1]["group"]) == 3
        assert find_broken_promises(swarm.everything()) == []
        assert find_lost_steps(swarm.everything()) == {}
