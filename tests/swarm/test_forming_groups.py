"""Peers that are ready find one another, all of them, every time; the benchmark has the figures."""

from __future__ import annotations

import pytest

from tests.kit.forming import Swarm

pytestmark = pytest.mark.timeout(120)


def test_all_peers_stand_in_one_group_in_every_round_while_peers_come_and_die() -> None:
    with Swarm() as swarm:
        swarm.join(2)
        of_two = [swarm.round() for _ in range(10)]
        assert all(result.is_full for result in of_two), of_two
        swarm.join(4)
        of_six = [swarm.round() for _ in range(5)]
        assert all(result.is_full for result in of_six), of_six
        during = swarm.round(victim=swarm.members[3])
        assert during.is_full, during
        unnoticed = swarm.round()
        assert unnoticed.is_full, unnoticed
        swarm.join()
        again = swarm.round()
        assert again.is_full, again
        assert len(swarm.members) == 6
