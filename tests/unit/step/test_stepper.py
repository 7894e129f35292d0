"""A round and the step after it: what is applied, kept and reported, and when training waits."""

import math
import time
from functools import partial

import bitsandbytes
import pytest
import torch

from tests.kit.stepping import (
    SETTINGS,
    Peer,
    Tracker,
    commits,
    divided,
    fails,
    of_one_weight,
    report,
    spans,
    with_b,
)
from trahiv_cli.errors import NotFinite, RoundFailed
from trahiv_cli.progress.committed import Committed
from trahiv_cli.progress.history import History
from trahiv_cli.progress.ledger import MAX_POSITION, Ledger
from trahiv_cli.progress.pace import Pace, RoundRules
from trahiv_cli.progress.trust import CREDIT_MARGIN
from trahiv_cli.rounds.vote import NotCommitted, digest_of, joint_digest
from trahiv_cli.state.peer_state import common_digest
from trahiv_cli.step.position import MOST_ROUNDS_AHEAD

torch.set_num_threads(1)

EIGHT = range(8)
FIRST = spans(0, 8)
TEN = spans(0, 10)
LIMIT_S = 10.0
EACH_MODE = pytest.mark.parametrize("mode", ["sync", "overlap"])
NO_NUMBERS = pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])


@pytest.mark.parametrize("cls", [torch.optim.AdamW, bitsandbytes.optim.AdamW8bit, bitsandbytes.optim.Lion])
def test_offloaded_step_matches_in_place_step(cls):
    trained = []
    for offload in (False, True):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((96, 96), (7,))]
        peer = Peer(weights, partial(cls, lr=0.01, weight_decay=0.1), offload=offload)
        for _ in range(3 * 2):  # three lone steps of two lent batches each
            assert peer.gradients.expect_batch(4, 7.3, lend=True) == 1.0
            sum((weight * torch.randn(weight.shape)).sum() for weight in weights).backward()
            peer.stepper.step(4)
        assert peer.history.step == peer.position.step_taken == 3
        assert all(weight.grad is None for weight in weights)
        trained.append((peer.position.method.last_grad_norm, weights))
    (norm, here), (same_norm, offloaded) = trained
    assert norm == same_norm > 1.0, "clipping must have something to do"
    assert all(map(torch.equal, here, offloaded))


@EACH_MODE
def test_lone_peer_steps_with_own_gradients(mode):
    peer, weight, leases = divided(pace=Pace(mode=mode))
    peer.train(positions=EIGHT)
    assert weight.tolist() == [-0.5, -0.5]
    assert peer.stepper.last_round is peer.state.agreed is None
    assert (peer.history.step, peer.history.samples) == (1, 8)
    assert peer.stepper.step_samples == peer.stepper.my_step_samples == 8
    assert peer.tracker.companions == {"QmMe"}
    assert peer.rounds.claims == []
    assert peer.state.committed.now.ledger == Ledger(FIRST)
    assert leases.settled == list(EIGHT)
    other, _ = of_one_weight()
    other.train()
    assert other.history.digest != peer.history.digest, "two that step alone have different histories"


@EACH_MODE
def test_empty_lone_step_keeps_weights(mode):
    weight = torch.nn.Parameter(torch.ones(2))
    peer = Peer([weight], partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5), pace=Pace(mode=mode))
    for step in range(1, 4):
        peer.gradients.expect_batch(8, 0.0, lend=False)
        peer.train(gradient=0.0)
        assert peer.history.step == step
        assert weight.tolist() == [1.0, 1.0]


def test_committed_round_steps_and_extends_history():
    most_ahead = MOST_ROUNDS_AHEAD * SETTINGS.target_batch_size
    trained = FIRST, spans(8, 13, 2 * most_ahead - 4, MAX_POSITION)
    peer, weight, leases = divided(with_b(), commits(10.0, trained=trained))
    peer.train(positions=EIGHT)
    [claim], (expected, quorum, suffix) = peer.rounds.claims, peer.rounds.expected
    assert (claim.samples, claim.weight, claim.norm, claim.quorum) == (8, 10.0, 0.0, 2)
    assert claim.trained == FIRST
    assert (expected, quorum) == (("QmB",), 2)
    assert History().digest in suffix
    assert suffix.endswith(b"schema")

    assert weight.detach().norm().item() == pytest.approx(1.0, rel=1e-4), "it was clipped"
    assert peer.position.method.last_grad_norm == pytest.approx(10 * math.sqrt(2))
    assert peer.history == peer.tracker.history == History().extend(samples=13, proof=b"proof")
    assert (peer.stepper.step_samples, peer.stepper.my_step_samples) == (13, 8)
    last = peer.stepper.last_round
    assert last.committed
    assert last.blocked_seconds >= last.seconds > 0
    assert peer.tracker.companions == {*last.group} == {"QmMe", "QmB"}
    near = spans(0, 13, 2 * most_ahead - 4, 2 * most_ahead)
    assert peer.state.committed.now.ledger == Ledger(near), "what nobody can have come to is to be trained"
    assert (leases.settled, leases.returned) == (list(EIGHT), [])


def test_held_state_is_claimed_and_reported():
    peer, _ = of_one_weight(with_b(), commits())
    small = peer.state.own_metadata()
    weights = [digest_of([torch.zeros(2)])]
    common = common_digest(weights, small)
    peer.train()
    assert peer.rounds.claims[0].state == joint_digest(weights)[:8]
    assert peer.tracker.attested == {History(): (common, False)}
    for other in ({"ledger": [[0, 2**62], 0]}, {"pace": None}, {"outer_rounds": 7}):
        assert common != common_digest(weights, small | other)


def test_left_out_members_are_named():
    left_out = {"QmB": "its gradient is not finite", "QmMe": "the norm is too large"}
    peer, _ = of_one_weight(with_b(), commits(left_out=left_out))
    peer.train()
    assert peer.stepper.last_round.left_out == left_out
    assert peer.codes == ["left-out"] * 2
    theirs, ours = (event["message"] for event in peer.said("warning"))
    assert theirs == "Peer QmB's gradient was left out of step 1: its gradient is not finite."
    assert ours.startswith("This peer's gradient")


def test_uncommitted_round_carries_work_over():
    def not_committed(rounds):
        raise NotCommitted("one of two peers holds this average", b"proof", 13)

    peer, weight, leases = divided(with_b(), not_committed, averaging_s=0.0)
    peer.leaves_after = 1
    peer.train(positions=EIGHT)
    last = peer.stepper.last_round
    assert not last.committed
    assert "one of two" in last.reason
    assert last.group == ()
    assert peer.state.committed.now == Committed()
    assert weight.tolist() == [0.0, 0.0]
    assert peer.tracker.vouched == History().extend(samples=13, proof=b"proof"), "it voted for it"
    assert leases.settled == leases.returned == []
    peer.leaves_after = math.inf
    peer.rounds.end = commits(trained=(TEN,))
    peer.train(positions=[8, 9])
    assert [(claim.samples, claim.trained) for claim in peer.rounds.claims] == [(8, FIRST), (10, TEN)]
    assert peer.tracker.vouched is None
    assert peer.history.samples == 13
    assert weight.tolist() == [-0.25, -0.25]
    assert peer.state.committed.now.ledger == Ledger(TEN)
    assert leases.settled == list(TEN)


@NO_NUMBERS
def test_nonfinite_gradients_are_dropped_and_counted(poison):
    sixteen = spans(0, 16)
    peer, weight, leases = divided(with_b(), commits(trained=(sixteen,)))
    peer.train(poison, positions=EIGHT)
    assert peer.position.method.dropped_samples == 8
    assert peer.history.step == peer.tracker.samples == 0
    assert peer.rounds.claims == []
    assert weight.tolist() == [0.0, 0.0]
    for start in (8, 16):
        peer.train(positions=range(start, start + 8))
    brought = [(claim.samples, claim.trained) for claim in peer.rounds.claims]
    assert brought == [(8, sixteen), (8, spans(16, 24))], "useless ones count as trained, once"
    assert weight.tolist() == [-0.5, -0.5]
    assert leases.returned == []


@NO_NUMBERS
def test_nonfinite_weights_end_training_before_sending(poison):
    peer, weight = of_one_weight(with_b(), commits())
    with torch.no_grad():
        weight[1] = poison
    with pytest.raises(NotFinite, match="not finite at step 0; nothing was sent"):
        peer.train()
    assert peer.rounds.claims == []
    assert peer.history == History()
    assert peer.position.method.samples_held == 8


@pytest.mark.parametrize(("solo_after_s", "words"), [(300.0, "after 300 s"), (math.inf, "never")])
def test_long_group_search_warns_with_backoff(solo_after_s, words):
    def fail_until_it_was_said_twice(rounds):
        peer.leaves = len(peer.asked_for_help) >= 2
        return fails(rounds)

    tracker = Tracker([report("Qm...23456B", History())])
    began = time.monotonic()
    peer, _ = of_one_weight(tracker, fail_until_it_was_said_twice, rules=RoundRules(solo_after_s))
    peer.runner.warns_after_s = 0.2
    tracker.committed.change(group=frozenset({"QmMe", "Qm...23456C"}))
    peer.train()
    assert peer.codes == ["no-group"] * len(peer.asked_for_help)
    assert time.monotonic() - began >= 0.4
    assert peer.history.step == 0
    assert len(peer.rounds.claims) > 2, "it trains no further without a group"
    said = peer.said("warning")[0]
    assert "step 1" in said["message"]
    assert "...23456B, ...23456C can't be reached" in said["message"]
    assert said["hint"].endswith(f"{words} (swarm.solo)")


def test_usual_group_search_is_silent():
    peer, _ = of_one_weight(with_b(), commits())
    peer.runner.warns_after_s = 0.0
    peer.quorum.missed_since = time.monotonic() - 100.0
    peer.train()
    peer.rounds.end = fails
    peer.leaves_after = 1
    peer.train()
    assert peer.history.step == 1
    assert peer.stepper.last_round.reason
    assert not peer.codes


LOCAL = Pace("diloco", local_steps=1, outer_learning_rate=1.0, outer_momentum=0.0)


@pytest.mark.parametrize(  # states held by this peer, B and C
    ("states", "every", "has_failed", "asked_at", "pace"),
    [
        ("xxy", 1, False, [], Pace()),
        ("xxx", 1, False, [], Pace()),
        ("yxx", 1, False, [1, 2, 3], Pace()),
        ("yxx", 1, False, [1, 2, 3], LOCAL),
        ("yxx", 2, False, [1, 3], Pace()),
        ("yxx", 2, True, [1, 3], Pace()),
    ],
)
def test_majority_weights_are_adopted_at_once(states, every, has_failed, asked_at, pace, monkeypatch):
    held = dict(zip(("QmMe", "QmB", "QmC"), (state.encode() for state in states), strict=True))
    end = commits(states=held, group=tuple(held))
    peer, _ = of_one_weight(with_b(), end, pace, average_state_every=every)
    asked = []

    def load(holders):
        asked.append((peer.history.step, holders))
        if has_failed:
            raise RoundFailed("Nothing came.")
        return True

    monkeypatch.setattr(peer.catch_up, "load", load)
    for _ in range(3):
        peer.train()
    assert asked == [(step, {"QmB", "QmC"}) for step in asked_at]
    assert peer.codes == ["drift"] * len(asked)
    assert peer.history.step == 3
    said = "it keeps its own for now: Nothing came." if has_failed else "it has taken theirs over."
    assert all(event["message"].endswith(said) for event in peer.said("warning"))
    assert len({claim.state for claim in peer.rounds.claims}) == len(peer.tracker.attested) == 3


def test_dropped_positions_are_trained_again():
    peer, _, leases = divided(with_b(), fails, averaging_s=0.0)
    peer.leaves_after = 1
    peer.train(positions=EIGHT)
    peer.position.method.reset()
    peer.work.announce([8])
    peer.work.announce([9])
    peer.stepper.start_batch_over(1)
    assert leases.returned == [8, *EIGHT]
    assert peer.tracker.samples == 0
    peer.stepper.start_batch_over(1)
    peer.work.count_announced(1)
    assert leases.returned == [8, *EIGHT]
    assert list(peer.work.aside(9)) == [9], "once, in one batch"


def test_no_round_begins_after_last_step():
    peer, _ = of_one_weight(with_b(), commits(), max_steps=1)
    for _ in range(3):
        peer.train()
    assert len(peer.rounds.claims) == peer.history.step == 1


def test_lone_step_is_kept_for_joiners():
    peer, weight = of_one_weight(end=commits(0.25, samples={"QmMe": 8}, group=("QmMe",)))
    peer.activity.note()
    peer.train()
    [claim], [exchange] = peer.rounds.claims, peer.rounds.exchanges
    assert claim.quorum == 1
    assert peer.rounds.expected[:2] == ((), 1)
    assert exchange.after == History().digest
    assert weight.tolist() == [-0.25, -0.25], "what the codec made of its gradient"
    assert peer.history == History().extend(samples=8, proof=b"proof")
    assert peer.stepper.last_round is None
    assert peer.position.step_taken == 1
    peer.rounds.end = fails
    peer.train()
    assert weight.tolist() == [-0.75, -0.75]
    assert peer.history.step == 2, "it steps if that can't be kept, too"


def test_local_step_round_counts_as_several_steps():
    pace = Pace(mode="diloco", local_steps=4, outer_learning_rate=1.0, outer_momentum=0.0)
    peer, weight = of_one_weight(with_b(), commits(0.25))
    peer.train()
    begun = peer.history
    target = 4 * 8
    peer.position.set_pace(pace)
    peer.position.enter(begun)
    assert peer.tracker.target_batch_size == target
    assert peer.tracker.plausibility.believed_samples("QmB", 10**9, target) == CREDIT_MARGIN * 5 * 4, (
        "its share"
    )
    peer.train(1.0, samples=2)
    peer.train(3.0, samples=2)
    assert peer.position.method.last_grad_norm == pytest.approx(2 * math.sqrt(2)), "the mean of both"
    for count in range(1, 7):
        peer.train(samples=4)
        steps = [-0.25 - math.sqrt(0.5) - 0.5 * count] * 2  # the first one is clipped
        assert weight.tolist() == pytest.approx(steps), "its half of the batch is a step of its own"
    assert len(peer.rounds.claims) == 1
    peer.train(samples=4)
    assert peer.rounds.claims[-1].samples == 32
    assert weight.tolist() == [-0.5, -0.5]
    assert peer.history == begun.extend(samples=13, proof=b"proof", steps=4)
    for _ in range(8):
        peer.train(samples=4)
    assert len({claim.state for claim in peer.rounds.claims}) == 3, "what is held is digested anew"
