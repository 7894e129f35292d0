"""One peer of five brings poison: the others train on as if it were not there.

More kinds of poison, by the same function, are in `benchmarks/faults.py poison`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.kit.faults import Nonsense, poison, rewrite_claims, send_nonsense
from tests.kit.faulty_peer import AVERAGING_TIMEOUT_S, Settings, Swarm, find_broken_promises
from tests.kit.poisoned import Poisoned, train_with_poison
from trahiv_cli.optim.rules import RoundRules

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

STEPS = 30

BAND = 0.05
"""How much larger the honest peers' loss may be, as a share of what it is without poison."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Poisoned:
    return train_with_poison(tmp_path_factory.mktemp("honest"), num_steps=STEPS)


def test_nan_on_the_wire_moves_nobody_although_its_sender_claims_a_sound_norm(
    tmp_path: Path, honest: Poisoned
) -> None:
    poisoned = train_with_poison(tmp_path, poison(norm=math.nan, claimed=1.0), num_steps=STEPS)
    assert poisoned.loss < (1 + BAND) * honest.loss
    assert poisoned.is_named


def test_a_gradient_turned_round_and_enlarged_does_not_turn_the_robust_mean(
    tmp_path: Path, honest: Poisoned
) -> None:
    rules = RoundRules(robust_mean=True, norm_limit=0.0)
    poisoned = train_with_poison(tmp_path, poison(factor=-10.0), rules, STEPS)
    assert poisoned.loss < (1 + BAND) * honest.loss


def test_who_rewrites_the_others_claims_in_the_rounds_that_it_leads_moves_nobody(
    tmp_path: Path, honest: Poisoned
) -> None:
    poisoned = train_with_poison(tmp_path, rewrite_claims(factor=-1000.0), num_steps=STEPS)
    assert poisoned.loss < (1 + BAND) * honest.loss
    assert poisoned.is_named


STEP_S = 60.0
HONEST, LIAR = (0, 1, 2), 3


def train_with_nonsense(swarm: Swarm, how: Nonsense, steps: int, limit_s: float) -> tuple[int, int]:
    """Train until the honest have taken so many steps since a peer began to send nonsense.

    Returns:
        The step at which it began, and how many tries of an honest peer have failed since.
    """
    swarm.start_all({LIAR: [send_nonsense(how, from_step=4)]})
    swarm.wait(lambda: bool(swarm.events(LIAR, "fault")), STEP_S, "the nonsense begins")
    began = swarm.events(LIAR, "fault")[0]["step"]
    swarm.wait_for_step(began + steps, HONEST, limit_s)
    assert find_broken_promises({str(n): swarm.events(n) for n in HONEST}) == []
    failed = [[said for said in swarm.events(n, "failed") if said["step"] >= began] for n in HONEST]
    return began, max(map(len, failed))


@pytest.mark.parametrize("how", ["truncated"])
def test_parts_that_are_no_tensors_of_the_right_shape_cost_no_round(tmp_path: Path, how: Nonsense) -> None:
    with Swarm(tmp_path, Settings(num_peers=4)) as swarm:
        began, num_failed = train_with_nonsense(swarm, how, 5, STEP_S)
        assert num_failed == 0
        named = [step["left_out"] for step in swarm.events(0, "step") if step["step"] > began + 1]
        assert all("no tensors of the right shape" in left_out[swarm.ids[LIAR]] for left_out in named)


@pytest.mark.parametrize("how", ["none", "inflated"])
def test_who_has_round_after_round_fail_is_let_into_no_more(tmp_path: Path, how: Nonsense) -> None:
    with Swarm(tmp_path, Settings(num_peers=4)) as swarm:
        _, num_failed = train_with_nonsense(swarm, how, 12, 3 * AVERAGING_TIMEOUT_S + STEP_S)
        assert 1 <= num_failed <= 4, "two, and as many when it is let in again"
