"""A joiner fetches the swarm's state while that trains, whatever becomes of the donors, and goes on from it.

Donors give their chunks slowly, so that things can happen meanwhile. How chunks are shared, damaged and
fetched again is in `tests/unit/swarm/test_download.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.commands import wait_until
from tests.kit.faults import give_state_slowly
from tests.kit.faulty_peer import Settings
from tests.kit.faulty_swarm import STEP_S, Swarm

pytestmark = pytest.mark.timeout(240)

HIDDEN = 10_000


def test_a_download_is_finished_from_the_other_donor_when_one_dies(tmp_path: Path) -> None:
    with Swarm(tmp_path, Settings(hidden=HIDDEN)) as swarm:
        donors = [
            swarm.join(number, give_state_slowly(0.05, after)) for number, after in ((0, 10**6), (1, 8))
        ]
        swarm.go()
        for donor in donors:
            donor.wait_for("step", STEP_S, step=3)
        joined = swarm.join(2).wait_for("ready", 1)
        wait_until(lambda: not donors[1].is_running, 10)  # it dies while it sends
        told = swarm.events(2, "download")
        assert joined["step"] >= 3 and max(said["donors"] for said in told) == 2
        amounts = [said["bytes"] for said in told]
        assert amounts == sorted(amounts) and amounts[-1] == told[-1]["total"]
        swarm.wait_until_equal((0, 2), STEP_S, beyond=joined["step"] + 3)
        assert swarm.events(2, "loaded") == [], "it went through the steps that were taken meanwhile"
        swarm.require_promises()  # equal weights at equal steps, so equal moments
