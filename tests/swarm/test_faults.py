"""Peers that die or flood others: what real processes and sockets alone can show.

Each failure of the table is in `tests/simulation/test_failures.py`, and rounds full of random ones in
`test_whole_swarms.py` there; one of two goes on alone in `test_restarts.py`. What no fault excuses is checked
at the end of each test: equal weights at equal steps, one history, each sample once.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import Peer, Workplace, wait_until
from tests.kit.faulty_peer import (
    AVERAGING_TIMEOUT_S,
    MODES_BESIDE_TRAINING,
    PHASES,
    Settings,
    ask_too_much,
    drop_peer,
)
from tests.kit.verdicts import find_broken_promises, find_lost_steps

pytestmark = pytest.mark.timeout(240)

START_S = 60.0
STEP_S = 60.0
"""Deadline for a few steps without a fault, on a busy machine."""

AFTER_DEATH_S = AVERAGING_TIMEOUT_S + STEP_S


class Swarm(Workplace):
    """Peers (`tests.kit.faulty_peer`) on one machine, for as long as the `with` block lasts.

    Args:
        folder: for identities and logs.
        settings: of each peer.
    """

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        super().__init__(folder)
        self.settings = settings or Settings()

    def join(self, number: int, *faults: Any) -> Peer:
        """Start a peer that joins those that run, and wait until it takes part.

        Its identity and its stream of data are those of its number; `faults` go wrong in it.
        """
        plan = pickle.dumps((self.settings, faults)).hex()
        others = [peer.maddr for peer in self.peers if peer.is_running]
        script = "from tests.kit.faulty_peer import main; main()"
        peer = self.start_script(script, number, plan, *others)
        peer.wait_for("ready", START_S)
        return peer

    def require_promises(self, *peers: Peer) -> None:
        """Require that these peers (all) kept every promise, and that no step of theirs is lost."""
        said = {str(peer.pid): peer.events for peer in peers or self.peers}
        assert find_broken_promises(said) == []
        assert find_lost_steps(said) == {}


def wait_until_equal(*peers: Peer, timeout_s: float, beyond: int) -> None:
    """Wait until these peers have come to one same history beyond a step."""

    def digests(peer: Peer) -> set[str]:
        return {one["digest"] for one in peer.events if "digest" in one and one["step"] > beyond}

    wait_until(lambda: bool(set.intersection(*map(digests, peers))), timeout_s)


def test_survivors_go_on_at_whatever_moment_of_a_round_a_peer_dies(tmp_path):
    with Swarm(tmp_path) as swarm:
        survivors = swarm.join(0), swarm.join(1)
        for index, phase in enumerate(PHASES):
            if index in (2, 4):  # it comes back with another identity
                (tmp_path / "2.key").unlink()
            victim = swarm.join(2, drop_peer(phase))
            victim.exit_code(STEP_S)
            died = victim.wait_for("fault", 1, phase=phase)["time"]
            for survivor in survivors:
                following = survivor.wait_for("step", AFTER_DEATH_S, time=lambda at, died=died: at > died)
                assert following["blocked"] < AVERAGING_TIMEOUT_S
        last = max(survivor.steps[-1]["step"] for survivor in survivors) + 2
        for survivor in survivors:
            survivor.wait_for("step", STEP_S, step=lambda step: step >= last)
        swarm.require_promises()


def test_fragments_are_agreed_on_by_threads_beside_training_also_with_one_that_died(tmp_path):
    """In `tests/simulation` a run has one thread; `diloco` is this mode, but that it waits."""
    settings = MODES_BESIDE_TRAINING["streaming"]
    with Swarm(tmp_path, settings) as swarm:
        survivors = swarm.join(0), swarm.join(1)
        victim = swarm.join(2, drop_peer("half-way", searches=9))
        victim.exit_code(STEP_S)
        first, last = survivors[0].wait_for("ready", 1), victim.steps[-1]
        assert last["loss"] < 0.7 * first["loss"]
        for survivor in survivors:
            survivor.wait_for("step", AFTER_DEATH_S, step=lambda step: step > last["step"])
        again = swarm.join(2)
        joined = again.wait_for("ready", 1)
        assert joined["step"] > last["step"] and joined["loss"] < 0.7 * first["loss"]
        together = again.wait_for("step", AFTER_DEATH_S)
        # Each fragment once, so that a momentum that did not come with the state would show.
        beyond = together["step"] + settings.pace.steps_per_round * settings.pace.num_fragments
        wait_until_equal(*survivors, again, timeout_s=AFTER_DEATH_S, beyond=beyond)
        assert len(again.steps[-1]["group"]) == 3
        swarm.require_promises()


def test_who_asks_too_much_and_is_deaf_stops_nobody(tmp_path):
    """Lies in reports, claims, votes, states and parts are in `tests/simulation`."""
    steps, limit_s = 3, 8.0
    settings = Settings(num_peers=4, num_samples=100_000, averaging_timeout=limit_s)
    with Swarm(tmp_path, settings) as swarm:
        peers = [swarm.join(number) for number in range(3)]
        for peer in peers:
            peer.wait_for("step", STEP_S, group=lambda group: len(group) == len(peers))
        swarm.join(3, ask_too_much()).wait_for("fault", STEP_S)
        reached = max(peer.steps[-1]["step"] for peer in peers)
        for peer in peers:
            peer.wait_for("step", limit_s + STEP_S, step=lambda step: step >= reached + steps)
        wait_until_equal(*peers, timeout_s=STEP_S, beyond=reached + steps - 1)
        swarm.require_promises(*peers)
