"""One peer of five brings poison: the others train on as if it were not there.

More kinds of poison, by the same function, are in `benchmarks/round_faults.py --poison`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.round_faults import Poisoned, train_with_poison
from tests.faults import poison
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
