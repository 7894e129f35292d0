"""Each failure of the table in docs/rounds.md by itself, in memory: how the others and the peer react.

In the last tests one of a few peers lies throughout: it brings poison, falls silent, or makes a false claim.
"""

import math
import statistics
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from bitsandbytes.optim import AdamW

from tests.kit import faulty_peer
from tests.kit.faulty_peer import AVERAGING_TIMEOUT_S, MODES_BESIDE_TRAINING, Settings
from tests.simulation import world
from tests.simulation.faults import Fault, claim, fall_silent, never_come, poison, send_slowly
from tests.simulation.swarm import Plan, simulate
from trahiv_cli.progress import tracker as progress
from trahiv_cli.progress.pace import Pace, RoundRules
from trahiv_cli.rounds.round_service import RoundService

pytestmark = pytest.mark.usefixtures("undisturbed")

AT_STEP = 4
BAND = 0.05
"""How much larger the honest peers' loss may be than without poison, as a fraction."""
WAITED_AT_MOST = 0.25
"""Share of the median step that quick peers may wait. Waiting for one four times slower takes half a step."""


def play(*faults, num_peers=3, rounds=10, settings=Settings(), lies=()):  # noqa: B008 - it is frozen
    """Simulate a run whose last peer tells `lies`."""
    plan = Plan(num_peers, rounds, faults, settings=settings)
    if lies:  # others wait for a liar that claims to be slow
        plan = replace(plan, lies={num_peers - 1: lies}, patience_s=75.0)
    run = simulate(plan, seed=0)
    assert sum(run.struck.values()) == len(faults)
    return run


def reasons(run):
    return " ".join(said["reason"] for said in run.said("failed") + run.said("step"))


def gaps(steps):
    """Return the seconds between successive steps."""
    return [later - earlier for earlier, later in pairwise(sorted(said["time"] for said in steps))]


def longest_wait(run, names):
    """Return the most seconds between two successive steps of the named peers."""
    return max(gaps(run.said("step", *names)))


def id_of(run, name):
    return run.world.peers[name].peer_id


PART = "rpc_aggregate_part"
KILLED = Fault("kill", AT_STEP, 1, seconds=3.0, homecoming="empty-handed")
DAMAGED = Fault("corrupt", AT_STEP, 1, PART)


@pytest.mark.parametrize(
    ("moment", "is_answer", "homecoming"),
    [
        ("rpc_join_group", False, "empty-handed"),
        ("rpc_join_group", True, "empty-handed"),
        (PART, False, "empty-handed"),
        (PART, True, "empty-handed"),
        ("rpc_vote", False, "from-checkpoint"),
        ("rpc_vote", True, "as-new"),
    ],
)
def test_killed_peer_trains_again(moment, is_answer, homecoming):
    fault = Fault("kill", 6, 1, moment, is_answer, seconds=3.0, homecoming=homecoming)
    run = play(fault, rounds=30)
    assert longest_wait(run, "02") < AVERAGING_TIMEOUT_S
    back = "1'" if homecoming == "as-new" else "1"
    assert len(run.said("ready", *{"1", back})) == 2
    assert run.steps(back)[-1]["step"] >= 30, "it trains along again"


def test_death_after_vote_stays_within_timeout():
    run = play(replace(KILLED, moment="rpc_vote", is_answer=True, skip=1))
    assert longest_wait(run, "02") < AVERAGING_TIMEOUT_S


def test_group_continues_without_stalled_member():
    run = play(Fault("stall", AT_STEP, 1, PART, seconds=30.0), rounds=20)
    assert longest_wait(run, "02") < AVERAGING_TIMEOUT_S
    assert any(id_of(run, "1") not in said["group"] for said in run.steps("0"))
    assert run.said("loaded", "1")


@pytest.mark.parametrize("is_answer", [False, True], ids=["part", "average"])
def test_damaged_part_names_its_sender(is_answer):
    run = play(replace(DAMAGED, is_answer=is_answer))
    assert "damaged" in reasons(run)
    assert id_of(run, "1") in reasons(run)
    assert longest_wait(run, "012") < 5.0


def test_pair_meets_soon_after_link_recovers():
    cut = Fault("cut", AT_STEP, 1, moment="rpc_vote", others=(0,), seconds=6.0)
    assert longest_wait(play(cut, num_peers=2), "01") < AVERAGING_TIMEOUT_S


def test_codec_error_fails_round_quickly():
    run = play(Fault("codec", AT_STEP, 1))
    assert "the codec failed" in reasons(run)
    assert longest_wait(run, "012") < 5.0


def test_codec_residual_survives_failed_round(monkeypatch):
    brought = {}
    prepare = RoundService._prepare_contribution

    def watch(service, exchange):
        residual = [tensor.tolist() for _, tensor in sorted(service._residual.items())]
        brought.setdefault((service._p2p.peer_id, exchange.after), []).append(residual)
        return prepare(service, exchange)

    monkeypatch.setattr(RoundService, "_prepare_contribution", watch)
    assert play(DAMAGED, settings=Settings(codec="blockwise4")).failed
    again = [tries for tries in brought.values() if len(tries) > 1]
    assert again
    assert all(tries[0] and tries == [tries[0]] * len(tries) for tries in again)


def test_nonfinite_gradient_is_dropped():
    run = play(Fault("nan", AT_STEP, 1))
    assert not run.failed
    assert run.world.peers["1"].optimizer.dropped_samples > 0


def test_outlier_gradient_is_left_out():
    run = play(Fault("enormous", AT_STEP, 1))
    assert not run.failed
    assert any(id_of(run, "1") in said["left_out"] for said in run.steps("0"))


def test_misshapen_parts_are_left_out():
    run = play(*(Fault("misshapen", at_step, 1, PART) for at_step in (AT_STEP, 6, 8)))
    named = [said["left_out"].get(id_of(run, "1"), "") for said in run.steps("0")]
    assert not run.failed
    assert sum("no tensors of the right shape" in why for why in named) == 3


def test_group_continues_despite_cut_link():
    run = play(Fault("cut", AT_STEP, 1, others=(2,), seconds=60.0), num_peers=4, rounds=30)
    without = [said for said in run.steps("0") if len(said["group"]) == 3]
    assert without
    assert longest_wait(run, "03") < 2 * AVERAGING_TIMEOUT_S


@pytest.mark.parametrize("seconds", [10.0, 60.0])
def test_isolated_peer_catches_up(seconds):
    run = play(Fault("halve", AT_STEP, 1, seconds=seconds), rounds=30)
    assert longest_wait(run, "02") < 2 * AVERAGING_TIMEOUT_S
    assert not [said for said in run.steps("1") if len(said["group"]) < 2]
    assert [said["step"] for said in run.events["1"] if "step" in said][-1] >= run.world.furthest - 1


@pytest.mark.parametrize(("solo_after_s", "latest"), [(0.0, 8.0), (8.0, 40.0), (math.inf, math.inf)])
def test_isolated_peers_follow_solo_rules(solo_after_s, latest):
    cuts = [Fault("cut", AT_STEP, a, others=(b,), seconds=40.0) for a, b in combinations(range(3), 2)]
    rules = RoundRules(solo_after_s=solo_after_s)
    run = play(*cuts, settings=Settings(rules=rules, metadata_expiration=60.0))
    began = run.steps("0")[AT_STEP - 1]["time"]
    alone = [said["time"] - began for said in run.said("step") if len(said["group"]) < 2]
    first_alone = min((after_s for after_s in alone if after_s < 40.0), default=math.inf)
    assert solo_after_s <= first_alone <= latest
    if solo_after_s == 8.0:
        for name in "012":
            first = run.said("notice", name)[0]
            assert first["code"] == "no-group"
            assert first["time"] - began < 6.0


def test_stalled_peer_catches_up_despite_rare_reports(monkeypatch):
    num_peers = 6
    fetch_every_s = 15.0
    monkeypatch.setattr(progress, "REPORT_EVERY_S_A_PEER", fetch_every_s / num_peers)
    stall = Fault("stall", AT_STEP, 1, seconds=12.0)
    run = play(stall, num_peers=num_peers, rounds=25, settings=Settings(seconds_per_batch=1.0))
    loaded = [said["step"] for said in run.said("loaded", "1")]
    assert 1 <= len(loaded) <= 2
    assert {said["step"] for said in run.steps("1")} >= set(range(loaded[-1] + 1, 25))


@pytest.mark.parametrize(("side", "rest"), [((1, 2), "034"), ((0,), "1234")])
def test_minority_takes_no_step_during_partition(side, rest):
    first, *others = side
    run = play(Fault("halve", AT_STEP, first, others=tuple(others), seconds=60.0), num_peers=5, rounds=40)
    assert longest_wait(run, rest) < 2 * AVERAGING_TIMEOUT_S
    healed = run.steps(rest[0])[AT_STEP - 1]["time"] + 60.0
    fewer = {said["digest"] for said in run.said("step", *map(str, side)) if said["time"] < healed}
    most = {said["digest"] for said in run.steps(rest[0])}
    assert fewer <= most, "those that are fewer took no step of their own"


@pytest.fixture
def as_on_machines(monkeypatch):
    """Use a model with several parts per member and several 256 KiB chunks per donor."""
    for name in ("WIDTH", "HIDDEN"):
        monkeypatch.setattr(world, name, getattr(faulty_peer, name))
    return partial(monkeypatch.setattr, world, "HIDDEN")


def test_download_continues_after_donor_dies(as_on_machines):
    as_on_machines(2000)
    dies = replace(KILLED, moment="rpc_send_state", is_answer=True, skip=1)
    run = play(dies, Fault("late", AT_STEP, 0), rounds=8)
    [joined], told = run.said("ready", "3 late"), run.said("download", "3 late")
    assert joined["step"] >= AT_STEP
    assert told[-1]["bytes"] == told[-1]["total"]
    assert not run.said("loaded", "3 late"), "it went through the steps that were taken meanwhile"


def test_latecomer_joins_with_8_bit_statistics(as_on_machines):
    settings = Settings(optimizer=partial(AdamW, optim_bits=8, is_paged=True))
    run = play(Fault("late", AT_STEP, 0), num_peers=2, settings=settings)
    assert len(run.steps("2 late")[-1]["group"]) == 3


@pytest.mark.parametrize("mode", MODES_BESIDE_TRAINING)
def test_killed_peer_returns_in_background_modes(mode):
    settings = replace(MODES_BESIDE_TRAINING[mode], seconds_per_batch=0.3)
    run = play(replace(KILLED, at_step=16, moment="rpc_aggregate_part"), rounds=48, settings=settings)
    assert longest_wait(run, "02") < AVERAGING_TIMEOUT_S
    _, back = run.said("ready", "1")
    assert back["step"] >= 16
    assert run.steps("1")[-1]["step"] >= 48
    assert run.steps("0")[-1]["loss"] < run.said("ready", "0")[0]["loss"]


@pytest.mark.parametrize("pace", [Pace("diloco", local_steps=8), MODES_BESIDE_TRAINING["streaming"].pace])
def test_frequently_restarted_peer_counts(pace):
    batches = 2 * pace.steps_per_round
    plan = Plan(1, 24, stops={0: 2 * batches // 3 + 1}, settings=Settings(pace=pace), patience_s=60.0)
    run = simulate(plan, seed=0)
    lives = run.said("ready", "0")
    steps = run.steps("0")
    assert len(lives) > len(steps) >= 24 // pace.steps_per_round
    assert steps[-1]["samples"] == sum(one["my_samples"] for one in steps)
    assert steps[-1]["duplicates"] == 0


@pytest.mark.parametrize("mode", MODES_BESIDE_TRAINING)
def test_slow_peer_delays_no_other(mode):
    settings = MODES_BESIDE_TRAINING[mode]
    run = simulate(Plan(3, 20, slowness={2: 4.0}, settings=settings), seed=0)
    steps = [run.steps(name) for name in "012"]
    common = min(map(len, steps))
    assert common >= 20 // settings.pace.steps_per_round
    assert not run.said("loaded")
    assert len({tuple(said["digest"] for said in own[:common]) for own in steps}) == 1

    brought = [sum(said["my_samples"] for said in own) for own in steps]
    assert 0 < 2 * brought[2] < min(brought[:2])
    for own in steps[:2]:
        waited_s = statistics.median(said["blocked"] for said in own)
        assert waited_s < WAITED_AT_MOST * statistics.median(gaps(own))


def loss(run):
    """Return the honest peers' largest loss on unseen data."""
    models = [peer._model for peer in run.world.peers.values()][:-1]
    inputs = torch.randn(512, models[0][0].in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return max(float((model(inputs) - inputs.flip(-1)).square().mean()) for model in models)


def naming(run):
    """Return for each honest peer whether it has named or excluded the liar, which is the last one."""
    liar = run.world.peers[str(run.plan.num_peers - 1)]
    return [
        any(liar.peer_id in one["message"] for one in run.said("notice", peer.name))
        or liar.dht.peer_id in peer.dht.services["ExactGradientAverager"].finder.blame.excluded_until
        for peer in run.world.peers.values()
        if peer is not liar
    ]


def test_rules_protect_against_poison():
    def trained(rules, *lies):
        return play(num_peers=5, rounds=40, settings=Settings(learning_rate=1e-2, rules=rules), lies=lies)

    honest = loss(trained(RoundRules()))
    assert honest < 0.8, "they learn"
    most = (1 + BAND) * honest
    for lie in (poison(math.nan, claimed=1.0), poison(-1000.0)):
        poisoned = trained(RoundRules(), lie)
        assert loss(poisoned) < most
        assert all(naming(poisoned))
    assert loss(trained(RoundRules(robust_mean=True, norm_limit=0.0), poison(-10.0))) < most
    assert loss(trained(RoundRules(norm_limit=0.0), poison(-10.0))) > most, "nothing else protects them"


def test_false_buffer_claim_is_harmless():
    assert not play(lies=[claim({"moves_buffers": True})]).failed


SLOW = claim({"measured": [10.0, 3e6, 1.0, 1.0, 0.0]})
"""Claims a link of one byte in five weeks, for which others wait."""


@pytest.mark.parametrize("lies", [[fall_silent], [SLOW, fall_silent]], ids=["silent", "slow-and-silent"])
def test_member_failing_rounds_is_excluded(lies, as_on_machines):
    run = play(num_peers=4, rounds=20, lies=lies)
    failed = [len(run.said("failed", name)) for name in "012"]
    assert 1 <= max(failed) <= 4, "two, and as many when it is let in again"


@pytest.mark.parametrize("num_parts", [20, 400])
def test_deliberately_slow_sender_is_excluded(num_parts, as_on_machines):
    num_values = (2 * faulty_peer.WIDTH + 1) * faulty_peer.HIDDEN + faulty_peer.WIDTH
    settings = Settings(part_bytes=num_values // num_parts)  # per share: four bytes a value, four members
    run = play(num_peers=4, rounds=6, settings=settings, lies=[send_slowly])
    assert all(naming(run))
    assert longest_wait(run, "012") < 40.0, "one exchange has failed"
    assert max(len(run.said("failed", name)) for name in "012") <= 2


def test_absent_reporter_costs_few_waits():
    run = play(num_peers=4, rounds=20, lies=[never_come])
    assert not [said for said in run.steps("0") if len(said["group"]) == 4]
    waits = gaps(run.steps("0"))
    assert sum(wait > statistics.median(waits) + 1.0 for wait in waits) <= 4, waits


def test_joiners_enter_despite_invented_positions():
    """Joiners read a ledger that contains the liar's positions."""
    lie = claim({"samples": 2**62, "trained": [0, 2**62]})
    run = play(replace(KILLED, at_step=8), Fault("late", 12, 0), num_peers=4, rounds=30, lies=[lie])
    assert any(naming(run))
    for name in ("1", "4 late"):
        assert run.steps(name)[-1]["step"] >= 20, "it trains along"
