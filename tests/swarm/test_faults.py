"""Peers that die, flood others, or come late: what real processes and sockets alone can show.

Each failure of the table is in `tests/simulation/test_failures.py`, and rounds full of random ones in
`test_whole_swarms.py` there; one of two goes on alone in `test_restarts.py`. What no fault excuses is checked
at the end of each test: equal weights at equal steps, one history, each sample once.
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import Peer, Workplace, wait_until
from tests.kit.faults import PHASES, ask_too_much, drop_peer, give_state_slowly
from tests.kit.faulty_peer import AVERAGING_TIMEOUT_S, GO, MODES_BESIDE_TRAINING, Event, Settings
from tests.kit.promises import find_broken_promises, find_lost_steps

pytestmark = pytest.mark.timeout(240)

START_S = 60.0
STEP_S = 60.0
"""Deadline for a few steps without a fault, on a busy machine."""

AFTER_DEATH_S = AVERAGING_TIMEOUT_S + STEP_S


class Swarm(Workplace):
    """Peers (`tests.kit.faulty_peer`) by number, on one machine, for as long as the `with` block lasts.

    Args:
        folder: for identities and logs.
        settings: of each peer.
    """

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        super().__init__(folder)
        self.settings = settings or Settings()
        self._lives: dict[int, list[Peer]] = defaultdict(list)

    def join(self, number: int, *faults: Any, as_new: bool = False, **changes: Any) -> Peer:
        """Start a peer that joins those that run, and wait until it takes part.

        Args:
            number: of the peer; its stream of data follows from it.
            *faults: what goes wrong in it.
            as_new: give it a new identity.
            **changes: of its settings.
        """
        if as_new:
            (self.folder / f"{number}.key").unlink()
        plan = pickle.dumps((replace(self.settings, **changes), faults)).hex()
        script = "from tests.kit.faulty_peer import main; main()"
        peer = self.start_script(script, number, plan, *self.addresses())
        self._lives[number].append(peer)
        peer.wait_for("ready", START_S)
        return peer

    def go(self) -> None:
        """Let those that are ready, and all that come, train."""
        (self.folder / GO).touch()

    def addresses(self) -> list[str]:
        """Where those can be reached that take part."""
        newest = [lives[-1] for lives in self._lives.values()]
        return [peer.wait_for("ready", 1)["maddr"] for peer in newest if peer.is_running]

    def events(self, number: int, event: str = "") -> list[Event]:
        """What a peer said in all of its lives, or only events of one name."""
        said = (one for life in self._lives[number] for one in tuple(life.events))
        return [one for one in said if event in ("", one["event"])]

    def places(self, number: int) -> list[Event]:
        """What a peer said of where it is: of the weights and the history that it holds."""
        return [said for said in self.events(number) if "digest" in said]

    def reached(self, *numbers: int) -> int:
        """The furthest swarm step that any of these peers holds."""
        return max(self.places(number)[-1]["step"] for number in numbers)

    def wait_until_equal(self, numbers: Iterable[int], timeout_s: float, beyond: int = 0) -> None:
        """Wait until these peers have come to one same history beyond a step."""
        deadline = time.monotonic() + timeout_s
        while True:
            held = [{one["digest"] for one in self.places(n) if one["step"] > beyond} for n in numbers]
            if set.intersection(*held):
                return
            assert time.monotonic() < deadline, [self.places(number)[-5:] for number in numbers]
            time.sleep(0.05)

    def require_promises(self, *numbers: int) -> None:
        """Require that these peers (all) kept every promise, and that no step of theirs is lost."""
        said = {str(number): self.events(number) for number in numbers or self._lives}
        assert find_broken_promises(said) == []
        assert find_lost_steps(said) == {}


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


def test_a_download_is_finished_from_the_other_donor_when_one_dies(tmp_path: Path) -> None:
    """How chunks are shared, damaged and fetched again is in `tests/unit/swarm/test_states.py`."""
    with Swarm(tmp_path, Settings(hidden=10_000)) as swarm:
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
        # Also the last round of the donor that died, if only the other one knows that it was committed.
        assert swarm.events(2, "download") == told, "it went through the steps that were taken meanwhile"
        swarm.require_promises()  # equal weights at equal steps, so equal moments


def test_who_asks_too_much_and_is_deaf_stops_nobody(tmp_path: Path) -> None:
    """Lies in reports, claims, votes, states and parts are in `tests/simulation`."""
    honest, liar, steps, limit_s = (0, 1, 2), 3, 3, 8.0
    settings = Settings(num_peers=len(honest) + 1, num_samples=100_000, averaging_timeout=limit_s)
    with Swarm(tmp_path, settings) as swarm:
        peers = [swarm.join(number) for number in honest]
        swarm.go()
        for peer in peers:
            peer.wait_for("step", STEP_S, step=steps)
        swarm.join(liar, ask_too_much()).wait_for("fault", STEP_S)
        reached = swarm.reached(*honest)
        for peer in peers:
            peer.wait_for("step", limit_s + STEP_S, step=lambda step: step >= reached + steps)
        swarm.wait_until_equal(honest, STEP_S, beyond=reached + steps - 1)
        swarm.require_promises(*honest)
