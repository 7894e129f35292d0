"""Who floods honest peers stops nobody: what only real processes and sockets can show.

Lies in reports, claims, votes, states and parts are in `tests/simulation`; what a DHT keeps of one peer is in
`tests/unit/swarm/test_records.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.faults import ask_too_much
from tests.kit.faulty_peer import Settings
from tests.kit.faulty_swarm import STEP_S, Swarm

pytestmark = pytest.mark.timeout(240)

HONEST, LIAR = (0, 1, 2), 3
STEPS = 3
AVERAGING_TIMEOUT_S = 8.0


def test_who_asks_too_much_and_is_deaf_stops_nobody(tmp_path: Path) -> None:
    settings = Settings(num_peers=len(HONEST) + 1, num_samples=100_000, averaging_timeout=AVERAGING_TIMEOUT_S)
    with Swarm(tmp_path, settings) as swarm:
        honest = [swarm.join(number) for number in HONEST]
        swarm.go()
        for peer in honest:
            peer.wait_for("step", STEP_S, step=STEPS)
        swarm.join(LIAR, ask_too_much()).wait_for("fault", STEP_S)
        reached = swarm.reached(*HONEST)
        for peer in honest:
            limit_s = AVERAGING_TIMEOUT_S + STEP_S
            peer.wait_for("step", limit_s, step=lambda step: step >= reached + STEPS)
        swarm.wait_until_equal(HONEST, STEP_S, beyond=reached + STEPS - 1)
        swarm.require_promises(*HONEST)
