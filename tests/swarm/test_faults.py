"""Peers that die or flood others: faults that only real processes and sockets can show.

Each failure of the table is in `tests/simulation/test_failures.py`, and rounds full of random ones in
`test_whole_swarms.py` there; one of two goes on alone in `test_restarts.py`. Each test ends with
checks that no fault excuses: equal weights at equal steps, one history, each sample once.
"""

import pickle
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from tests.kit.commands import Peer, Workplace, wait_until
from tests.kit.faulty_peer import (
    AVERAGING_TIMEOUT_S,
    MODES_BESIDE_TRAINING,
    PHASES,
    Settings,
    ask_too_much,
    change_pace,
    drop_peer,
    send_just_in_time,
    stay_away,
)
from tests.kit.verdicts import find_broken_promises, find_lost_steps
from trahiv_cli.progress.pace import Pace
from trahiv_cli.rounds.matchmaking import SUSPECT_S

pytestmark = pytest.mark.timeout(240)

STEP_S = 60.0
"""Deadline for a few steps without a fault, on a busy machine."""

AFTER_DEATH_S = AVERAGING_TIMEOUT_S + STEP_S


@pytest.fixture
def join(workplace: Workplace) -> Callable[..., Peer]:
    """`join(2, fault)` starts a toy peer (`tests.kit.faulty_peer`), and waits until it takes part.

    It joins the running peers. Its number sets its identity and its stream of data; faults strike in it.
    """

    def start(number: int, *faults: Any, settings: Settings | None = None, **options: Any) -> Peer:
        plan = pickle.dumps((settings or Settings(), faults)).hex()
        others = [peer.maddr for peer in workplace.peers if peer.is_running]
        script = "from tests.kit.faulty_peer import main; main()"
        peer = workplace.start_script(script, number, plan, *others, **options)
        peer.wait_for("ready", 60.0)
        return peer

    return start


def require_promises(*peers: Peer) -> None:
    """Require that these peers kept every promise, and that no step of theirs is lost."""
    said = {str(peer.pid): peer.events for peer in peers}
    assert find_broken_promises(said) == []
    assert find_lost_steps(said) == {}


def wait_until_equal(*peers: Peer, timeout_s: float, beyond: int) -> None:
    """Wait until these peers have reached the same history beyond a step."""

    def digests(peer: Peer) -> set[str]:
        return {one["digest"] for one in peer.events if "digest" in one and one["step"] > beyond}

    wait_until(lambda: bool(set.intersection(*map(digests, peers))), timeout_s)


def test_survivors_continue_after_death_in_any_phase(join, workplace, tmp_path):
    survivors = join(0), join(1)
    for index, phase in enumerate(PHASES):
        if index in (2, 4):  # it comes back with another identity
            (tmp_path / "2.key").unlink()
        victim = join(2, drop_peer(phase))
        victim.exit_code(STEP_S)
        died = victim.wait_for("fault", 1, phase=phase)["time"]
        for survivor in survivors:
            following = survivor.wait_for("step", AFTER_DEATH_S, time=lambda at, died=died: at > died)
            assert following["blocked"] < AVERAGING_TIMEOUT_S
    last = max(survivor.steps[-1]["step"] for survivor in survivors) + 2
    for survivor in survivors:
        survivor.wait_for("step", STEP_S, step=lambda step: step >= last)
    require_promises(*workplace.peers)


def test_streaming_fragments_agree_despite_peer_death(join, workplace):
    """In `tests/simulation` a run has one thread; `diloco` is this mode with waiting."""
    join = partial(join, settings=(settings := MODES_BESIDE_TRAINING["streaming"]))
    survivors = join(0), join(1)
    victim = join(2, drop_peer("half-way", searches=9))
    victim.exit_code(STEP_S)
    first, last = survivors[0].wait_for("ready", 1), victim.steps[-1]
    assert last["loss"] < 0.7 * first["loss"]
    for survivor in survivors:
        survivor.wait_for("step", AFTER_DEATH_S, step=lambda step: step > last["step"])
    again = join(2)
    joined = again.wait_for("ready", 1)
    assert joined["step"] > last["step"] and joined["loss"] < 0.7 * first["loss"]
    together = again.wait_for("step", AFTER_DEATH_S)
    # Each fragment once: momentum that is missing in the downloaded state would show.
    beyond = together["step"] + settings.pace.steps_per_round * settings.pace.num_fragments
    wait_until_equal(*survivors, again, timeout_s=AFTER_DEATH_S, beyond=beyond)
    assert len(again.steps[-1]["group"]) == 3
    require_promises(*workplace.peers)


UNLIKE = {"env": {"ATEN_CPU_CAPABILITY": "default"}, "is_cold": True}
"""A processor without AVX2: torch rounds sums in another order there, as a GPU does."""


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_unlike_processors_get_equal_weights(join, mode):
    """As early as the round after the first difference."""
    join = partial(join, settings=Settings(pace=Pace(mode)))
    alike, other = (join(0), join(1)), join(2, **UNLIKE)
    joined = other.wait_for("ready", 1)["step"]
    first = other.wait_for("made-equal", STEP_S)["step"]
    equal = [
        other.wait_for("made-equal", STEP_S, step=lambda step, at=at: step >= at) for at in (0, first + 1)
    ]
    for peer in alike:
        peer.wait_for("step", STEP_S, step=lambda step: step >= equal[-1]["step"])
        held = {one["digest"]: one["weights"] for one in peer.events if "digest" in one}
        known = [one for one in equal if one["digest"] in held]
        assert all(held[one["digest"]] == one["weights"] for one in known)
        assert known or any(notices(peer, "drift") for peer in alike)
        was_in_majority = all(len(one["group"]) != 2 or one["step"] < joined for one in peer.steps)
        assert not (was_in_majority and notices(peer, "drift"))
    assert notices(other, "drift")
    assert first <= min(one["step"] for one in other.steps if len(one["group"]) == 3) + 1
    assert find_lost_steps({str(peer.pid): peer.events for peer in (*alike, other)}) == {}


@pytest.mark.parametrize("is_changed", [False, True], ids=["streaming", "auto"])
def test_local_steps_of_unlike_processors_agree(join, is_changed):
    """Also when mode `auto` has changed to local steps while weights differed."""
    pace = Pace("streaming", local_steps=4, fragments=2)
    settings = Settings(auto_share=0.1) if is_changed else Settings(pace=pace)
    faults = [change_pace(pace, group_size=3)] if is_changed else []
    join = partial(join, settings=settings)
    peers = join(0, *faults), join(1, *faults), join(2, *faults, **UNLIKE)
    changed = peers[2].wait_for("step", STEP_S, group=lambda group: len(group) == 3)["step"]
    rounds = 4 * pace.num_fragments
    for peer in peers:
        peer.wait_for("step", STEP_S, step=lambda step: step >= changed + rounds * pace.steps_per_round)
    later = [one for peer in peers for one in peer.steps if one["step"] > changed + pace.steps_per_round]
    held = {(one["digest"], one["weights"]) for one in later}
    assert len(held) == len({digest for digest, _ in held})
    if all(len(one["group"]) == 3 for one in later):  # of two that differ, a lot decides
        assert not any(notices(peer, "drift") for peer in peers[:2])
        assert len(notices(peers[2], "drift")) == is_changed
    assert find_lost_steps({str(peer.pid): peer.events for peer in peers}) == {}


def notices(peer: Peer, code: str) -> list[dict[str, Any]]:
    """Return a peer's notices with this code."""
    return [one for one in peer.events if one["event"] == "notice" and one["code"] == code]


ATTACKS = {
    "parts": send_just_in_time(),
    "leader": stay_away(accepts=True),
    "absent": stay_away(accepts=False),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_delaying_member_is_named(join, name):
    """The same in memory, and with more parts, is in `tests/simulation/test_failures.py`."""
    steps, settings = 8, Settings(num_peers=4, part_bytes=1040)
    join = partial(join, settings=settings)  # 20 parts of each share
    peers = [join(number) for number in range(3)]
    usual_s = settings.batches * settings.seconds_per_batch
    liar = join(3, ATTACKS[name])
    liar_id, began = liar.wait_for("ready", 1)["peer"], liar.wait_for("fault", STEP_S)["time"]
    reached = max(peer.steps[-1]["step"] for peer in peers)
    for peer in peers:
        peer.wait_for("step", 2 * STEP_S, step=lambda step: step >= reached + steps)
        taken = [began, *(one["time"] for one in peer.steps if one["time"] > began)]
        late = [after - before for before, after in pairwise(taken) if after - before > usual_s + 2.0]
        again = (taken[-1] - began) // SUSPECT_S  # it is waited for once more
        assert len(late) <= 3 + again and max(late, default=0.0) < AVERAGING_TIMEOUT_S, late
        assert len([one for one in peer.events if one["event"] == "failed"]) <= 2
        assert re.search(f"Peer {liar_id} is let into no group|do not wait for peer {liar_id}", peer.err)
    assert find_lost_steps({str(peer.pid): peer.events for peer in peers}) == {}


def test_flooding_peer_stops_no_round(join):
    """Lies in reports, claims, votes, states and parts are in `tests/simulation`."""
    steps, limit_s = 3, 8.0
    join = partial(join, settings=Settings(num_peers=4, num_samples=100_000, averaging_timeout=limit_s))
    peers = [join(number) for number in range(3)]
    for peer in peers:
        peer.wait_for("step", STEP_S, group=lambda group: len(group) == len(peers))
    join(3, ask_too_much()).wait_for("fault", STEP_S)
    reached = max(peer.steps[-1]["step"] for peer in peers)
    for peer in peers:
        peer.wait_for("step", limit_s + STEP_S, step=lambda step: step >= reached + steps)
    wait_until_equal(*peers, timeout_s=STEP_S, beyond=reached + steps - 1)
    require_promises(*peers)
