"""One peer of a few brings poison, nothing more, or a claim that is a lie: the others train on."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kit import faulty_peer
from tests.kit.faulty_peer import Settings
from tests.simulation import world
from tests.simulation.faults import Fault
from tests.simulation.liars import Lie, claim, fall_silent, poison
from tests.simulation.swarm import Plan, Run, simulate
from trahiv_cli.optim.averager import MOST_PATIENCE_S
from trahiv_cli.optim.rules import RoundRules

pytestmark = pytest.mark.usefixtures("undisturbed")

ROUNDS = 40
BAND = 0.05
"""How much larger the honest peers' loss may be, as a share of what it is without poison."""


def play(num_peers: int, rounds: int, *lies: Lie, faults: tuple[Fault, ...] = (), **settings: object) -> Run:
    """Play a run whose last peer tells lies."""
    of_last = {num_peers - 1: lies} if lies else {}
    patience_s = MOST_PATIENCE_S + 15.0  # others wait for a liar that says it is slow
    plan = Plan(num_peers, rounds, faults, lies=of_last, settings=Settings(**settings), patience_s=patience_s)
    return simulate(plan, 0)


def loss(run: Run) -> float:
    """The largest of the honest peers' on data that they have not seen."""
    models = [peer._model for peer in run.world.peers.values()][:-1]
    inputs = torch.randn(512, models[0][0].in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return max(float((model(inputs) - inputs.flip(-1)).square().mean()) for model in models)


def naming(run: Run, number: int) -> list[bool]:
    """Which honest peers have said who lies, or let it into no group."""
    liar = run.world.peers[str(number)]
    return [
        any(liar.peer_id in one["message"] for one in run.said("notice", peer.name))
        or liar.dht.peer_id in peer.optimizer.grad_averager._matchmaking.blame.excluded_until
        for peer in run.world.peers.values()
        if peer is not liar
    ]


POISONS: dict[str, tuple[Lie, RoundRules, bool]] = {
    "nan-behind-a-sound-norm": (poison(norm=math.nan, claimed=1.0), RoundRules(), True),
    "turned-round": (poison(factor=-10.0), RoundRules(robust_mean=True, norm_limit=0.0), False),
    "enlarged": (poison(factor=-1000.0), RoundRules(), True),
}


def test_poison_moves_nobody_and_would_without_the_rules():
    fast = {"learning_rate": 1e-2}
    honest = loss(play(5, ROUNDS, **fast))
    assert honest < 0.8, "they learn"
    for name, (lie, rules, is_told) in POISONS.items():
        poisoned = play(5, ROUNDS, lie, rules=rules, **fast)
        assert loss(poisoned) < (1 + BAND) * honest, name
        assert all(naming(poisoned, 4)) or not is_told, name
    unruled = play(5, ROUNDS, poison(factor=-10.0), rules=RoundRules(norm_limit=0.0), **fast)
    assert loss(unruled) > (1 + BAND) * honest


SLOW = claim({"measured": [10.0, 3e6, 1.0, 1.0, 0.0]})
"""It claims a link of a byte in five weeks, for which others wait."""

SILENT = fall_silent(from_step=4)


@pytest.mark.parametrize("lies", [[SILENT], [SLOW, SILENT]], ids=["silent", "slow-and-silent"])
def test_who_has_round_after_round_fail_is_let_into_no_more(lies, monkeypatch):
    for name in ("WIDTH", "HIDDEN"):  # several parts for each member
        monkeypatch.setattr(world, name, getattr(faulty_peer, name))
    run = play(4, 20, *lies)
    failed = [len(run.said("failed", name)) for name in "012"]
    assert 1 <= max(failed) <= 4, "two, and as many when it is let in again"


@pytest.mark.parametrize(
    ("lie", "is_told"),
    [
        (claim({"samples": 2**62, "trained": [0, 2**62]}), True),
        (claim({"samples": 4096}, num_isolated=4096), False),
        (claim({"samples": 2**64 - 1}), True),
        (SLOW, False),
        (claim({"quorum": 10**6}), True),
        (claim({"quorum": 60_000}), True),
    ],
    ids=["all", "scattered", "endless samples", "slow", "endless quorum", "large quorum"],
)
def test_a_claim_neither_ends_nor_splits_nor_stops_the_honest_and_newcomers_are_let_in(lie, is_told):
    """They read the ledger into which the liar's positions were entered."""
    killed = Fault("kill", 8, 1, seconds=3.0, homecoming="empty-handed")
    run = play(4, 20, lie, faults=(killed, Fault("late", 12, 0)))
    assert any(naming(run, 3)) or not is_told
    for name in ("1", "4 late"):
        assert run.steps(name)[-1]["step"] >= 20, "it trains along"
