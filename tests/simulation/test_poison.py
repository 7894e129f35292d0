"""One peer of a few brings poison, or nonsense: the others train on as if it were not there.

The faults are those of `tests.kit.faults`; `benchmarks/faults.py poison` plays them with real processes.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.kit import faulty_peer
from tests.kit.faults import lie_in_claim, poison, rewrite_claims, send_nonsense
from tests.kit.faulty_peer import Settings
from tests.simulation import world
from tests.simulation.swarm import Plan, Run, simulate
from tests.simulation.world import OWNER
from trahiv_cli.optim.allreduce import ExactAllReduce
from trahiv_cli.optim.averager import MOST_PATIENCE_S, ExactAverager
from trahiv_cli.optim.group_finder import GroupFinder
from trahiv_cli.optim.rules import RoundRules

pytestmark = pytest.mark.usefixtures("undisturbed")

ROUNDS = 40
BAND = 0.05
"""How much larger the honest peers' loss may be, as a share of what it is without poison."""

FROM_STEP = 4
PATCHED = [
    (ExactAverager, "_prepare_contribution"),
    (ExactAllReduce, "_generate_input_for_peer"),
    (ExactAllReduce, "_encode"),
    (GroupFinder, "_form_group"),
    (GroupFinder, "look_for_group"),
]
"""What faults replace."""


class Scene:
    """Stands in for `tests.kit.faults.Scene`: has faults strike in the last of so many peers."""

    def __init__(self, num_peers):
        self._name = str(num_peers - 1)

    def has_reached(self, step):
        """Whether it is that peer whose code runs, at this step or beyond."""
        peer = OWNER.get()
        return peer.name == self._name and peer.optimizer.local_epoch >= step

    def once(self, fault, at_step):
        """Nobody asks when it struck."""
        del fault, at_step
        return lambda: False


@pytest.fixture
def play(monkeypatch):
    """Play a run in which the last peer has faults."""

    def play(num_peers, rounds, *faults, **settings):
        for owner, name in PATCHED:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # so that it comes back
        for fault in faults:
            fault.install(Scene(num_peers))
        # Others wait for a liar that says it is slow.
        plan = Plan(num_peers, rounds, settings=Settings(**settings), patience_s=MOST_PATIENCE_S + 15.0)
        run = simulate(plan, 0)
        monkeypatch.undo()
        return run

    return play


def loss(run: Run) -> float:
    """The largest of the honest peers' on data that they have not seen."""
    models = [peer._model for peer in run.world.peers.values()][:-1]
    inputs = torch.randn(512, models[0][0].in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return max(float((model(inputs) - inputs.flip(-1)).square().mean()) for model in models)


def is_named(run: Run) -> bool:
    """Whether every honest peer said who brings poison, or lets it into no group."""
    *honest, liar = run.world.peers.values()
    return all(
        any(liar.peer_id in said["message"] for said in run.events[peer.name] if said["event"] == "notice")
        or liar.dht.peer_id in peer.optimizer.grad_averager._matchmaking.blame.excluded_until
        for peer in honest
    )


POISONS = {
    "nan-behind-a-sound-norm": (poison(norm=math.nan, claimed=1.0), RoundRules(), True),
    "turned-round": (poison(factor=-10.0), RoundRules(robust_mean=True, norm_limit=0.0), False),
    "enlarged": (poison(factor=-1000.0), RoundRules(), True),
    "claims-rewritten": (rewrite_claims(factor=-1000.0), RoundRules(), True),
}


def test_poison_moves_nobody_and_would_without_the_rules(play):
    fast = {"learning_rate": 1e-2}
    honest = loss(play(5, ROUNDS, **fast))
    assert honest < 0.8, "they learn"
    for name, (fault, rules, is_told) in POISONS.items():
        poisoned = play(5, ROUNDS, fault, rules=rules, **fast)
        assert loss(poisoned) < (1 + BAND) * honest, name
        assert is_named(poisoned) or not is_told, name
    unruled = play(5, ROUNDS, poison(factor=-10.0), rules=RoundRules(norm_limit=0.0), **fast)
    assert loss(unruled) > (1 + BAND) * honest


def test_parts_that_are_no_tensors_of_the_right_shape_cost_no_round(play):
    run = play(4, 12, send_nonsense("truncated", FROM_STEP))
    assert not run.failed
    liar = run.world.peers["3"].peer_id
    named = [said["left_out"] for said in run.steps("0") if said["step"] > FROM_STEP + 1]
    assert named and all("no tensors of the right shape" in left_out[liar] for left_out in named)


SLOW = lie_in_claim({"measured": [10.0, 3e6, 1.0, 1.0, 0.0]})
"""It claims a link of a byte in five weeks, for which others wait."""


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([send_nonsense("none", FROM_STEP)], id="silent"),
        pytest.param([SLOW, send_nonsense("none", FROM_STEP)], id="slow-and-silent"),
        pytest.param([send_nonsense("inflated", FROM_STEP)], id="inflated"),
    ],
)
def test_who_has_round_after_round_fail_is_let_into_no_more(play, faults, monkeypatch):
    for name in ("WIDTH", "HIDDEN"):  # several parts for each member, of which only the first one comes
        monkeypatch.setattr(world, name, getattr(faulty_peer, name))
    run = play(4, 20, *faults)
    failed = [sum(said["event"] == "failed" for said in run.events[name]) for name in "012"]
    assert 1 <= max(failed) <= 4, "two, and as many when it is let in again"
