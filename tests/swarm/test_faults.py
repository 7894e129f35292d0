"""Peers that die or flood others: faults that only real processes and sockets can show.

Each failure of the table is in `tests/simulation/test_failures.py`, and rounds full of random ones in
`test_whole_swarms.py` there; one of two goes on alone in `test_restarts.py`. Each test ends with
checks that no fault excuses: equal weights at equal steps, one history, each sample once.
"""

import pickle
import re
from functools import partial
from itertools import pairwise

import pytest

from tests.kit.commands import wait_until
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
from tests.swarm.conftest import above, advance, told
from trahiv_cli.progress.pace import Pace
from trahiv_cli.rounds.matchmaking import SUSPECT_S

pytestmark = pytest.mark.timeout(240)

STEP_S = 60.0
"""Deadline for a few steps without a fault, on a busy machine."""

AFTER_DEATH_S = AVERAGING_TIMEOUT_S + STEP_S


@pytest.fixture
def join(workplace):
    """`join(2, fault)` starts a toy peer (`tests.kit.faulty_peer`), and waits until it takes part.

    It joins the running peers. Its number sets its identity and its stream of data; faults strike in it.
    """

    def start(number, *faults, settings=None, **options):
        plan = pickle.dumps((settings or Settings(), faults)).hex()
        others = [peer.maddr for peer in workplace.peers if peer.is_running]
        script = "from tests.kit.faulty_peer import main; main()"
        peer = workplace.start_script(script, number, plan, *others, **options)
        peer.wait_for("ready", 60.0)
        return peer

    return start


def events_of(*peers):
    return {str(peer.pid): peer.events for peer in peers}


def require_promises(*peers):
    """Require that these peers kept every promise, and that no step of theirs is lost."""
    assert find_broken_promises(events_of(*peers)) == []
    assert find_lost_steps(events_of(*peers)) == {}


def wait_until_equal(*peers, timeout_s, beyond):
    """Wait until these peers have reached the same history beyond a step."""

    def digests(peer):
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
            following = survivor.wait_for("step", AFTER_DEATH_S, time=above(died))
            assert following["blocked"] < AVERAGING_TIMEOUT_S
    advance(*survivors, steps=2, timeout=STEP_S)
    require_promises(*workplace.peers)


def test_streaming_fragments_agree_despite_peer_death(join, workplace):
    """In `tests/simulation` a run has one thread; `diloco` is this mode with waiting."""
    settings = MODES_BESIDE_TRAINING["streaming"]
    join = partial(join, settings=settings)
    survivors = join(0), join(1)
    victim = join(2, drop_peer("half-way", searches=9))
    victim.exit_code(STEP_S)
    last = victim.steps[-1]
    little = 0.7 * survivors[0].wait_for("ready", 1)["loss"]
    assert last["loss"] < little
    for survivor in survivors:
        survivor.wait_for("step", AFTER_DEATH_S, step=above(last["step"]))
    again = join(2)
    joined = again.wait_for("ready", 1)
    assert joined["step"] > last["step"]
    assert joined["loss"] < little
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
    first = other.wait_for("made-equal", STEP_S)
    equal = [first, other.wait_for("made-equal", STEP_S, step=above(first["step"]))]
    for peer in alike:
        peer.wait_for("step", STEP_S, step=above(equal[-1]["step"] - 1))
        held = {one["digest"]: one["weights"] for one in peer.events if "digest" in one}
        known = [one for one in equal if one["digest"] in held]
        assert all(held[one["digest"]] == one["weights"] for one in known)
        assert known or any(map(drifts, alike))
        was_in_majority = all(len(one["group"]) != 2 or one["step"] < joined for one in peer.steps)
        assert not (was_in_majority and drifts(peer))
    assert drifts(other)
    assert first["step"] <= min(one["step"] for one in other.steps if len(one["group"]) == 3) + 1
    assert find_lost_steps(events_of(*alike, other)) == {}


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
        peer.wait_for("step", STEP_S, step=above(changed + rounds * pace.steps_per_round - 1))
    later = [one for peer in peers for one in peer.steps if one["step"] > changed + pace.steps_per_round]
    held = {(one["digest"], one["weights"]) for one in later}
    assert len(held) == len({digest for digest, _ in held})
    if all(len(one["group"]) == 3 for one in later):  # of two that differ, a lot decides
        assert [len(drifts(peer)) for peer in peers] == [0, 0, is_changed]
    assert find_lost_steps(events_of(*peers)) == {}


def drifts(peer):
    """Return a peer's notices that its weights differed."""
    return told(peer.events, "notice", code="drift")


@pytest.mark.parametrize(
    "attack",
    [send_just_in_time(), stay_away(accepts=True), stay_away(accepts=False)],
    ids=["parts", "leader", "absent"],
)
def test_delaying_member_is_named(join, attack):
    """The same in memory, and with more parts, is in `tests/simulation/test_failures.py`."""
    settings = Settings(num_peers=4, part_bytes=1040)
    join = partial(join, settings=settings)  # 20 parts of each share
    peers = [join(number) for number in range(3)]
    usual_s = settings.batches * settings.seconds_per_batch
    liar = join(3, attack)
    liar_id, began = liar.wait_for("ready", 1)["peer"], liar.wait_for("fault", STEP_S)["time"]
    advance(*peers, steps=8, timeout=2 * STEP_S)
    for peer in peers:
        taken = [began, *(one["time"] for one in peer.steps if one["time"] > began)]
        late = [after - before for before, after in pairwise(taken) if after - before > usual_s + 2.0]
        again = (taken[-1] - began) // SUSPECT_S  # it is waited for once more
        assert len(late) <= 3 + again, late
        assert max(late, default=0.0) < AVERAGING_TIMEOUT_S
        failed = [one for one in told(peer.events, "failed") if one["time"] > began]
        assert len(failed) <= 2, failed
        assert re.search(f"Peer {liar_id} is let into no group|do not wait for peer {liar_id}", peer.err)
    assert find_lost_steps(events_of(*peers)) == {}


def test_flooding_peer_stops_no_round(join):
    """Lies in reports, claims, votes, states and parts are in `tests/simulation`."""
    limit_s = 8.0
    join = partial(join, settings=Settings(num_peers=4, num_samples=100_000, averaging_timeout=limit_s))
    peers = [join(number) for number in range(3)]
    for peer in peers:
        peer.wait_for("step", STEP_S, group=lambda group: len(group) == len(peers))
    join(3, ask_too_much()).wait_for("fault", STEP_S)
    last = advance(*peers, steps=3, timeout=limit_s + STEP_S)
    wait_until_equal(*peers, timeout_s=STEP_S, beyond=last - 1)
    require_promises(*peers)
