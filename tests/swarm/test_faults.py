"""Rounds in which something goes wrong: either they happened for most of the group, or for nobody.

Three peers each, all faults are data (`tests/kit/faults.py`). What no fault excuses is checked at the end of
every test: equal weights at equal steps, one history, each sample counted once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.faults import PHASES, codec_raises, corrupt_part, drop_peer, stall
from tests.kit.faulty_peer import (
    AVERAGING_TIMEOUT_S,
    Event,
    Settings,
    Swarm,
    find_broken_promises,
    find_lost_steps,
)
from tests.kit.random_faults import run_rounds
from trahiv_cli.optim.assemble import METADATA_EXPIRATION_S
from trahiv_cli.optim.rules import RoundRules

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

STEP_S = 60.0
"""Deadline for a few steps without a fault, on a busy machine."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path) as swarm:
        yield swarm
        assert find_broken_promises(swarm.everything()) == []


def failures(swarm: Swarm, number: int, word: str) -> list[Event]:
    return [said for said in swarm.events(number, "failed") if word in said["reason"]]


def test_survivors_go_on_at_whatever_moment_of_a_round_a_peer_dies(swarm: Swarm) -> None:
    swarm.start_all({2: [drop_peer(at_step=3, phase=PHASES[0])]})
    for index, phase in enumerate(PHASES):
        if index:
            swarm.start(2, drop_peer(at_step=swarm.reached(0) + 5, phase=phase), as_new=index % 2 == 0)
            swarm.wait_for_ready(2)
        swarm.wait_for_end(2, STEP_S)
        died = swarm.events(2, "fault")[-1]
        assert died["phase"] == phase
        for survivor in (0, 1):
            following = swarm.wait_for_step_after(died["time"], survivor, AVERAGING_TIMEOUT_S + STEP_S)
            assert following["blocked"] < AVERAGING_TIMEOUT_S
        swarm.wait_for_step(max(swarm.reached(0), swarm.reached(1)) + 3, (0, 1), STEP_S)
    assert find_lost_steps(swarm.everything()) == {}


def test_the_other_of_two_goes_on_alone_when_the_record_of_the_dead_one_has_expired(tmp_path: Path) -> None:
    expires_s = 8.0
    with Swarm(tmp_path, Settings(num_peers=2, metadata_expiration=expires_s)) as swarm:
        swarm.start_all({1: [drop_peer(at_step=3, phase="half-way")]})
        swarm.wait_for_end(1, STEP_S)
        died = swarm.events(1, "fault")[-1]["time"]
        alone = swarm.wait_for_step_after(died, 0, expires_s + AVERAGING_TIMEOUT_S + STEP_S)
        assert alone["group"] == []
        assert any(said["code"] == "no-group" for said in swarm.events(0, "notice"))
        assert find_broken_promises(swarm.everything()) == []
        assert find_lost_steps(swarm.everything()) == {}


def test_a_round_that_fails_is_undone_names_who_failed_and_loses_nothing(swarm: Swarm) -> None:
    swarm.start_all(
        {
            0: [corrupt_part(at_step=12, averaged=True)],
            1: [codec_raises(at_step=4), stall(seconds=10, at_step=16)],
            2: [corrupt_part(at_step=8)],
        }
    )
    swarm.wait_for_step(20, (0, 1, 2), 10 + 2 * AVERAGING_TIMEOUT_S + STEP_S)
    assert failures(swarm, 1, "the codec failed")
    damaged = [said["reason"] for n in range(3) for said in failures(swarm, n, "damaged")]
    assert any(swarm.ids[2] in reason for reason in damaged)
    assert any(swarm.ids[0] in reason for reason in damaged)
    for number in range(3):
        assert sum(1 for said in swarm.events(number, "step")) >= 12, "most steps are everybody's"
    for number in range(3):
        for failed in failures(swarm, number, "codec") + failures(swarm, number, "damaged"):
            following = swarm.wait_for_step_after(failed["time"], number, STEP_S)
            # A peer that is late for the next try is told of the others' step, and says what it dropped.
            dropped = sum(
                one["lost"]
                for one in swarm.events(number, "loaded")
                if failed["time"] < one["time"] < following["time"]
            )
            assert following["my_samples"] + dropped >= failed["samples"], "they go into the next try"
    swarm.wait_until_equal((0, 1, 2), STEP_S, beyond=20)
    assert find_lost_steps(swarm.everything()) == {}


def test_a_cut_between_two_of_three_makes_no_second_history(swarm: Swarm) -> None:
    swarm.start_all()
    swarm.wait_for_step(3, (0, 1, 2), STEP_S)
    swarm.cut(1, 2)
    swarm.wait_for_step(swarm.reached(0) + 5, [0], 2 * AVERAGING_TIMEOUT_S)
    swarm.heal(1, 2)
    swarm.wait_until_equal((0, 1, 2), 2 * AVERAGING_TIMEOUT_S, beyond=max(map(swarm.reached, range(3))))
    assert find_lost_steps(swarm.everything()) == {}


def test_a_peer_that_nobody_reaches_says_so_and_waits_and_takes_the_others_state(swarm: Swarm) -> None:
    swarm.start_all()
    swarm.wait_for_step(3, (0, 1, 2), STEP_S)
    swarm.cut(0, 2)
    swarm.cut(1, 2)
    before = time.monotonic()
    swarm.wait(lambda: bool(swarm.events(2, "notice")), STEP_S, "peer 2 says that it has no group")
    swarm.wait_for_step(swarm.reached(0) + 5, (0, 1), 2 * AVERAGING_TIMEOUT_S)
    said, first_try = swarm.events(2, "notice")[0], swarm.events(2, "failed")[0]
    assert said["code"] == "no-group"
    assert said["time"] - (first_try["time"] - first_try["took"]) < 5.0
    alone = [step for step in swarm.events(2, "step") if step["time"] > before + 1 and len(step["group"]) < 2]
    assert alone == []
    swarm.heal(0, 2)
    swarm.heal(1, 2)
    swarm.wait_until_equal((0, 1, 2), 2 * AVERAGING_TIMEOUT_S, beyond=max(map(swarm.reached, range(3))))
    assert find_lost_steps(swarm.everything()) == {}


def test_a_peer_steps_alone_when_the_recipe_says_so(swarm: Swarm) -> None:
    patience = {0: 0.0, 1: 6.0, 2: math.inf}
    for number, solo_after_s in patience.items():
        swarm.start(number, rules=RoundRules(solo_after_s=solo_after_s))
        swarm.wait_for_ready(number)
    swarm.go()
    swarm.wait_for_step(3, (0, 1, 2), STEP_S)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        swarm.cut(a, b)
    began = time.monotonic()
    swarm.wait_for_step(max(swarm.reached(0), swarm.reached(1)) + 2, (0, 1), STEP_S)
    assert time.monotonic() - began < METADATA_EXPIRATION_S, "too late: the others' records have expired"
    steps = {n: [said for said in swarm.events(n, "step") if not said["group"]] for n in patience}
    assert steps[0] and steps[1] and not steps[2]
    assert steps[0][0]["time"] < steps[1][0]["time"]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        swarm.heal(a, b)
    swarm.wait_until_equal((0, 1, 2), 2 * AVERAGING_TIMEOUT_S, beyond=max(map(swarm.reached, range(3))))


def test_thirty_rounds_with_random_faults_keep_every_promise(tmp_path: Path) -> None:
    report = run_rounds(tmp_path, rounds=30, seed=1)
    assert report.verdict == []
