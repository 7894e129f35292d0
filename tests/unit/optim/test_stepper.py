"""A round and the step after it: what is applied, what is kept, what is said, and when training waits."""

import math
import threading
import time
from collections import deque

import bitsandbytes
import pytest
import torch

from tests.kit.stepping import LIMITS, Peer, Tracker, commits, fails, of_one_weight, report, sgd, with_b
from trahiv_cli.errors import NotFinite, RoundFailed
from trahiv_cli.optim import seeker as seeking
from trahiv_cli.optim.ballot import NotCommitted, digest_of, joint_digest
from trahiv_cli.optim.doubts import CREDIT_MARGIN
from trahiv_cli.optim.history import History
from trahiv_cli.optim.ledger import MAX_POSITION, Ledger, Spans
from trahiv_cli.optim.pace import Pace
from trahiv_cli.optim.position import MOST_ROUNDS_AHEAD
from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.optim.state import common_digest

torch.set_num_threads(1)

INNER = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_8bit": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=0.01, weight_decay=0.1),
    "lion_32bit": lambda p: bitsandbytes.optim.Lion(p, lr=0.01, weight_decay=0.1),
}

ENOUGH = seeking.ACCUMULATE_AT_MOST * LIMITS.target_batch_size
"""Samples with which a peer trains no further without a group."""


# -- the inner optimizer's step ---------------------------------------------------------------------


def trained(make, offload, steps=3):
    """Take steps alone, of two lent batches each; return the weights and the norms of the gradients."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((96, 96), (7,))]
    peer, norms = Peer(weights, make, offload=offload), []
    for step in range(1, steps + 1):
        for _ in range(2):
            assert peer.gradients.expect_batch(4, 4, lend=True) == 1.0
            sum((weight * torch.randn(weight.shape)).sum() for weight in weights).backward()
            peer.stepper.step(4)
        norms.append(peer.position.method.last_grad_norm)
        assert all(weight.grad is None for weight in weights)
        assert peer.history.step == peer.position.step_taken == step
    return weights, norms


@pytest.mark.parametrize("name", INNER)
def test_a_step_where_the_weights_are_is_the_step_of_an_offloaded_copy(name):
    (here, norms), (offloaded, same_norms) = (trained(INNER[name], offload) for offload in (False, True))
    assert norms == same_norms and min(norms) > 1.0, "clipping must have something to do"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(here, offloaded, strict=True))


def test_the_averaged_gradient_is_clipped_before_the_step():
    weight = torch.nn.Parameter(torch.zeros(4))
    peer = Peer([weight], sgd, with_b(), commits(average=10.0))
    peer.train()
    assert peer.position.method.last_grad_norm == 20.0
    assert weight.detach().norm().item() == pytest.approx(1.0, rel=1e-4)


# -- a round ----------------------------------------------------------------------------------------


def test_a_peer_alone_steps_with_its_own_gradients():
    peer, weight = of_one_weight()
    peer.train()
    assert weight.tolist() == [-0.5, -0.5] and peer.stepper.last_round is None
    assert (peer.history.step, peer.history.samples) == (1, 8)
    assert (peer.stepper.step_samples, peer.stepper.my_step_samples) == (8, 8)
    assert peer.tracker.companions == {"QmMe"} and peer.gradients.claims == []
    other, _ = of_one_weight()
    other.train()
    assert other.history.digest != peer.history.digest, "two that step alone have different histories"


def test_a_committed_round_is_stepped_with_and_becomes_history():
    peer, weight = of_one_weight(with_b(), commits())
    peer.train()
    assert weight.tolist() == [-0.25, -0.25]
    assert peer.history == peer.tracker.history == History().extend(samples=13, proof=b"proof")
    assert (peer.stepper.step_samples, peer.stepper.my_step_samples) == (13, 8)
    last = peer.stepper.last_round
    assert last.committed and last.group == ("QmMe", "QmB") and last.blocked_seconds >= last.seconds > 0
    assert peer.tracker.companions == {"QmMe", "QmB"} and peer.codes == []


def test_a_peer_claims_what_it_brings_and_what_it_holds():
    peer, _ = of_one_weight(with_b(), commits())
    peer.expect(8, 20.0)
    small, weights = peer.state.own_metadata(), [digest_of([torch.zeros(2)])]
    peer.train()
    [claim] = peer.gradients.claims
    assert (claim.samples, claim.weight, claim.norm, claim.quorum) == (8, 20.0, 0.0, 2)
    assert claim.state == joint_digest(weights)[:8]
    expected, quorum, suffix = peer.gradients.expected
    assert (expected, quorum) == (("QmB",), 2)
    assert History().digest in suffix and suffix.endswith(b"schema")
    assert peer.tracker.attested == {History(): (common_digest(weights, small), False)}, "it is reported, too"
    for other in ({"ledger": [[0, 2**62], 0]}, {"pace": None}, {"outer_rounds": 7}):
        assert common_digest(weights, small) != common_digest(weights, small | other)


def test_a_round_that_failed_changes_nothing_and_its_gradients_go_into_the_next():
    peer, weight = of_one_weight(with_b(), fails, averaging_s=0.0)
    peer.train()
    last = peer.stepper.last_round
    assert not last.committed and "QmB sent nothing" in last.reason and last.group == ()
    assert (peer.history, weight.tolist()) == (History(), [0.0, 0.0])
    peer.gradients.end = commits()
    peer.train(samples=1)
    assert [claim.samples for claim in peer.gradients.claims] == [8, 9]
    assert peer.history.samples == 13 and weight.tolist() == [-0.25, -0.25]


def test_a_peer_vouches_for_the_average_that_it_voted_for_until_the_next_step():
    def not_committed(averager):
        raise NotCommitted("one of two peers holds this average", b"proof", 13)

    peer, _ = of_one_weight(with_b(), not_committed, averaging_s=0.1)
    peer.train()
    assert peer.tracker.vouched == History().extend(samples=13, proof=b"proof")
    peer.gradients.end = commits()
    peer.train()
    assert peer.history.step == 1 and peer.tracker.vouched is None


def test_patience_grows_with_each_try_and_ends_at_the_averaging_timeout():
    slow, _ = of_one_weight(with_b(), averaging_s=0.01)
    patience = []
    for slow.parts.company.tries in range(6):
        patience.append(slow.seeker.patience_s())
    assert patience == [0.002, 0.004, 0.008, 0.01, 0.01, 0.01]
    slow.parts.company.tries = 0
    slow.gradients.local_samples_accumulated = ENOUGH
    assert slow.seeker.patience_s() == 0.01


def test_a_peer_that_holds_enough_trains_no_further_until_there_is_a_group():
    def fail_and_leave_at_last(averager):
        peer.leaves = len(averager.claims) == 5
        return fails(averager)

    peer, _ = of_one_weight(with_b(), fail_and_leave_at_last, averaging_s=0.0)
    peer.train()
    assert len(peer.gradients.claims) == 1
    peer.train(samples=ENOUGH)
    assert len(peer.gradients.claims) == 5 and peer.history.step == 0


def test_a_peer_that_may_go_solo_takes_the_step_after_one_failed_try():
    peer, weight = of_one_weight(with_b(), fails, rules=RoundRules(solo_after_s=0.0), averaging_s=0.0)
    peer.train()
    assert peer.history.step == 0 and not peer.stepper.last_round.committed
    peer.train()
    assert peer.history.samples == 16 and weight.tolist() == [-0.5, -0.5]
    assert peer.stepper.last_round is None and len(peer.gradients.claims) == 1


def test_a_peer_whose_others_leave_during_the_round_steps_alone():
    def leave(averager):
        peer.tracker.others, peer.tracker.gone = (), frozenset({"QmB"})
        return fails(averager)

    peer, weight = of_one_weight(with_b(), leave)
    peer.train()
    assert weight.tolist() == [-0.5, -0.5], "its own gradients, not what the round left"
    assert peer.stepper.last_round is None and peer.history.samples == 8


def test_who_was_left_out_is_named_to_a_person():
    left_out = {"QmB": "its gradient is not finite", "QmMe": "the norm is too large"}
    peer, _ = of_one_weight(with_b(), commits(left_out=left_out, samples={"QmC": 3}))
    peer.train()
    assert peer.codes == ["left-out"] * 2
    theirs, ours = (event["message"] for event in peer.told if event["event"] == "warning")
    assert theirs.startswith("Peer QmB's gradient was left out of step 1: its gradient is not finite")
    assert ours.startswith("This peer's gradient")
    assert peer.stepper.step_samples == 3 and peer.stepper.last_round.left_out == left_out


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_gradients_that_are_not_finite_are_dropped_and_counted(poison):
    peer, weight = of_one_weight(with_b(), commits())
    peer.train(poison)
    assert (peer.position.method.dropped_samples, peer.history.step) == (8, 0)
    assert peer.gradients.claims == [] and weight.tolist() == [0.0, 0.0] and peer.tracker.samples == 0
    peer.train()
    assert weight.tolist() == [-0.25, -0.25] and peer.gradients.claims[0].samples == 8


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_end_training_before_anything_is_sent(poison):
    peer, weight = of_one_weight(with_b(), commits())
    with torch.no_grad():
        weight[1] = poison
    with pytest.raises(NotFinite, match="not finite at step 0; nothing was sent"):
        peer.train()
    assert peer.gradients.claims == [] and peer.history == History()
    assert peer.position.method.samples_held == 8


def test_equal_weights_have_equal_digests_and_others_do_not():
    digests = []
    for value in (0.0, 0.0, 1e-30):
        peer, weight = of_one_weight(with_b(), commits())
        with torch.no_grad():
            weight[1] = value
        peer.train()
        peer.train()
        digests.append([claim.state for claim in peer.gradients.claims])
    assert digests[0] == digests[1] and digests[0][0] != digests[2][0]
    assert digests[0][0] != digests[0][1], "of each step anew"


@pytest.mark.parametrize(
    ("solo_after_s", "words"), [(300.0, "after 300 s (swarm.solo)"), (math.inf, "never (swarm.solo)")]
)
def test_a_long_search_for_a_group_is_said_and_again_when_it_has_lasted_twice_as_long(
    solo_after_s, words, monkeypatch
):
    def fail_until_it_was_said_twice(averager):
        peer.leaves = len(peer.asked_for_help) >= 2
        return fails(averager)

    monkeypatch.setattr(seeking, "SAY_AFTER_S", 0.2)
    others, rules = [report("Qm...23456B", History())], RoundRules(solo_after_s=solo_after_s)
    peer, _ = of_one_weight(Tracker(others), fail_until_it_was_said_twice, rules=rules)
    peer.tracker.companions = frozenset({"QmMe", "Qm...23456C"})
    began = time.monotonic()
    peer.train(samples=ENOUGH)
    said = [event for event in peer.told if event["event"] == "warning"]
    assert len(said) == len(peer.asked_for_help) >= 2 and time.monotonic() - began >= 0.4
    assert said[0]["code"] == "no-group" and "step 1" in said[0]["message"]
    assert said[0]["hint"].endswith(words)
    assert "...23456B, ...23456C can't be reached" in said[0]["message"]


# -- a group that holds different weights -------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "rest", "holders"), [("x", "xy", None), ("x", "xx", None), ("y", "xx", {"QmB", "QmC"})]
)
def test_the_weights_that_most_hold_are_adopted(mine, rest, holders, monkeypatch):
    states = dict(zip(("QmMe", "QmB", "QmC"), (state.encode() for state in mine + rest), strict=False))
    peer, _ = of_one_weight(with_b(), commits(states=states, group=tuple(states)))
    asked = []
    monkeypatch.setattr(peer.catch_up, "load", lambda holders: asked.append(holders))
    peer.train()
    assert asked == ([holders] if holders else []) and peer.codes == ["drift"] * len(asked)


def test_weights_that_could_not_be_taken_over_end_no_training(monkeypatch):
    def fails_to_load(holders):
        raise RoundFailed("nothing came")

    states = {"QmMe": b"y", "QmB": b"x", "QmC": b"x"}
    peer, _ = of_one_weight(with_b(), commits(states=states, group=tuple(states)))
    monkeypatch.setattr(peer.catch_up, "load", fails_to_load)
    peer.train()
    assert peer.history.step == 1


def test_a_group_that_has_drifted_is_made_equal_at_the_step_that_is_for_it(monkeypatch):
    states = {"QmMe": b"mine", "QmB": b"theirs", "QmC": b"theirs"}
    peer, _ = of_one_weight(with_b(), commits(states=states), average_state_every=2)
    asked = []
    monkeypatch.setattr(peer.catch_up, "load", lambda holders: asked.append(peer.history.step))
    peer.train()
    assert asked == []
    peer.gradients.end = commits()
    peer.train()
    assert asked == [2]


# -- which samples ----------------------------------------------------------------------------------


class Positions:
    """Leases of the next positions, without a network."""

    unit = 1

    def __init__(self, peer):
        self.returned, self.settled = [], []
        peer.parts.work.leases = self

    def give_back(self, positions):
        self.returned += positions

    def settle(self, done):
        self.settled += done


EIGHT = range(8)


def divided(*args, **kwargs):
    peer, _ = of_one_weight(*args, **kwargs)
    return peer, Positions(peer)


def test_a_committed_round_covers_what_its_members_brought():
    trained = (Spans.of([(0, 8)]), Spans.of([(8, 13)]))
    peer, leases = divided(with_b(), commits(trained=trained))
    peer.train(positions=EIGHT)
    assert peer.gradients.claims[0].trained == trained[0]
    assert peer.state.ledger == Ledger(Spans.of([(0, 13)]))
    assert (leases.settled, leases.returned) == (list(EIGHT), [])


def test_a_step_that_a_peer_takes_alone_covers_its_own():
    peer, leases = divided()
    peer.train(positions=EIGHT)
    assert peer.history.step == 1 and peer.state.ledger == Ledger(Spans.of([(0, 8)]))
    assert leases.settled == list(EIGHT)


def test_a_round_that_failed_covers_nothing_and_its_positions_are_in_the_next():
    peer, leases = divided(with_b(), fails, averaging_s=0.0)
    peer.train(positions=EIGHT)
    assert peer.state.ledger == Ledger() and leases.settled == leases.returned == []
    peer.gradients.end = commits(trained=(Spans.of([(0, 10)]),))
    peer.train(positions=[8, 9])
    assert peer.gradients.claims[-1].trained == Spans.of([(0, 10)])
    assert peer.state.ledger == Ledger(Spans.of([(0, 10)])) and leases.settled == list(range(10))


def test_positions_that_somebody_claims_far_ahead_are_to_be_trained():
    most_ahead = MOST_ROUNDS_AHEAD * LIMITS.target_batch_size
    lie = Spans.of([(2 * most_ahead - 4, MAX_POSITION)])
    peer, _ = divided(with_b(), commits(trained=(Spans.of([(0, 8)]), lie)))
    peer.train(positions=EIGHT)
    assert peer.state.ledger == Ledger(Spans.of([(0, 8), (2 * most_ahead - 4, 2 * most_ahead)]))


def test_positions_whose_gradients_are_of_no_use_are_not_trained_again():
    peer, leases = divided(with_b(), commits(trained=(Spans.of([(0, 16)]),)))
    peer.train(torch.nan, positions=EIGHT)
    assert peer.position.method.dropped_samples == 8 and leases.returned == []
    peer.train(positions=range(8, 16))
    [claim] = peer.gradients.claims
    assert claim.trained == Spans.of([(0, 16)]) and claim.samples == 8
    assert peer.state.ledger == Ledger(Spans.of([(0, 16)]))
    peer.train(positions=range(16, 24))
    assert peer.gradients.claims[-1].trained == Spans.of([(16, 24)]), "they were brought once"


def test_positions_whose_gradients_belonged_to_older_weights_are_trained_again():
    peer, leases = divided(with_b(), fails, averaging_s=0.0)
    peer.train(positions=EIGHT)
    peer.position.method.reset()
    peer.stepper.start_batch_over()
    assert leases.returned == list(EIGHT)


def test_a_batch_that_was_left_out_is_trained_again():
    peer, leases = divided()
    peer.expect(2, 10.0, positions=[8, 9])
    peer.parts.work.forget_announced(but=[9])
    assert leases.returned == [8]


# -- rounds beside training -----------------------------------------------------------------------

LIMIT_S = 10.0


class Gate:
    """Rounds that end one by one, each when it is let through."""

    def __init__(self, *ends):
        self._ends, self._passes, self._over = deque(ends), threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, averager):
        assert self._passes.acquire(timeout=LIMIT_S)
        try:
            return self._ends.popleft()(averager)
        finally:
            self._over.release()

    def let_through(self):
        """Let the present round end, and wait until it has."""
        self._passes.release()
        assert self._over.acquire(timeout=LIMIT_S)

    def open(self):
        self._passes.release(100)


def until(peer, condition, samples=1):
    """Train until a round's thread has ended and what it left was applied; say how many batches it took."""
    deadline, count = time.monotonic() + LIMIT_S, 0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
        peer.train(samples=samples)
        count += 1
    return count


@pytest.fixture
def beside():
    """Make a peer in mode overlap with QmB whose rounds end as is told."""
    gates = []

    def make(*ends, **changes):
        gates.append(Gate(*ends))
        return *of_one_weight(with_b(), gates[-1], Pace(mode="overlap"), **changes), gates[-1]

    yield make
    for gate in gates:
        gate.open()


def test_training_goes_on_during_a_round_and_a_later_step_applies_it(beside):
    peer, weight, gate = beside(commits(0.25))
    peer.train(samples=16)
    peer.train(samples=1)
    assert peer.history.step == 0 and peer.state.agreed[0].tolist() == [0.0, 0.0]
    gate.let_through()
    assert peer.history.step == 0, "the weights move when training asks"
    count = until(peer, lambda: peer.history.step == 1)
    assert weight.tolist() == [-0.25, -0.25]
    assert peer.stepper.my_step_samples == 16, "those that were there when it began"
    assert peer.tracker.samples == 1 + count, "the others go into the next"


def test_a_failed_round_leaves_the_agreed_weights_and_its_gradients_go_into_the_next(beside):
    peer, weight, gate = beside(fails, commits(), averaging_s=0.0)
    peer.train(samples=9)
    gate.let_through()
    until(peer, lambda: peer.stepper.last_round is not None)
    assert not peer.stepper.last_round.committed and weight.tolist() == [0.0, 0.0]
    held = peer.tracker.samples
    peer.train(samples=1)
    gate.let_through()
    until(peer, lambda: peer.history.step == 1)
    assert [claim.samples for claim in peer.gradients.claims] == [9, held + 1]


def test_training_waits_for_a_round_once_it_holds_enough(beside):
    peer, _, gate = beside(commits())
    peer.train(samples=ENOUGH - 8)
    assert peer.history.step == 0
    threading.Timer(0.2, gate.let_through).start()
    peer.train(samples=8)
    assert peer.history.step == 1


def test_what_a_round_has_to_tell_is_told_by_the_thread_that_trains(beside, monkeypatch):
    monkeypatch.setattr(seeking, "SAY_AFTER_S", 0.0)
    peer, _, gate = beside(fails, averaging_s=0.0)
    threads = []
    peer.parts.events.add(lambda event: threads.append(threading.current_thread()))
    peer.train()
    gate.let_through()
    until(peer, lambda: bool(threads))
    assert peer.codes == ["no-group"] and set(threads) == {threading.current_thread()}


def test_no_round_begins_at_the_last_step(beside):
    peer, _, gate = beside(commits(), commits(), max_steps=1)
    peer.train(samples=16)
    gate.let_through()
    until(peer, lambda: peer.history.step == 1)
    for _ in range(3):
        peer.train()
    assert peer.history.step == 1 and len(peer.gradients.claims) == 1


def test_weights_that_are_not_finite_end_training_that_goes_on_during_a_round(beside):
    peer, weight, _ = beside()
    with torch.no_grad():
        weight[1] = torch.nan
    with pytest.raises(NotFinite, match="nothing was sent"):
        until(peer, lambda: False)
    assert peer.gradients.claims == [] and peer.position.method.samples_aside == 0
    assert peer.position.method.samples_held >= 8


def test_a_peer_that_is_found_behind_during_a_round_takes_over_the_state_after_it(beside, monkeypatch):
    def find_behind(averager):
        peer.tracker.is_behind = True
        return fails(averager)

    peer, _, gate = beside(find_behind)
    loaded = []
    monkeypatch.setattr(peer.catch_up, "come", lambda: loaded.append(peer.stepper.last_round) or True)
    peer.train()
    peer.train()
    assert loaded == []
    gate.let_through()
    until(peer, lambda: bool(loaded))
    assert not loaded[0].committed and len(peer.gradients.claims) == 1


def test_a_peer_alone_steps_at_once_also_in_a_mode_in_which_training_goes_on():
    peer, _ = of_one_weight(pace=Pace(mode="overlap"))
    for count in range(1, 4):
        peer.train()
        assert peer.history.step == count and peer.state.agreed is None


# -- a peer alone, and joiners ------------------------------------------------------------------------


def test_a_peer_alone_has_its_step_kept_while_somebody_fetches_its_state():
    peer, weight = of_one_weight(end=commits(0.25, samples={"QmMe": 8}, group=("QmMe",)))
    peer.parts.interest.note()
    peer.train()
    [claim], [exchange] = peer.gradients.claims, peer.gradients.exchanges
    assert claim.quorum == 1 and peer.gradients.expected[:2] == ((), 1)
    assert exchange.after == History().digest
    assert weight.tolist() == [-0.25, -0.25], "what the codec made of its gradient"
    assert peer.history == History().extend(samples=8, proof=b"proof")
    assert peer.stepper.last_round is None and peer.position.step_taken == 1


def test_a_peer_alone_steps_also_if_its_step_can_not_be_kept():
    peer, weight = of_one_weight(end=fails)
    peer.parts.interest.note()
    peer.train()
    assert weight.tolist() == [-0.5, -0.5] and peer.history.step == 1


# -- local steps --------------------------------------------------------------------------------------


def test_a_round_of_local_steps_is_several_steps_of_the_swarm():
    pace = Pace(mode="diloco", local_steps=4, outer_learning_rate=1.0, outer_momentum=0.0)
    peer, weight = of_one_weight(with_b(), commits(0.25), pace)
    assert peer.tracker.target_batch_size == 4 * 8
    for count in range(1, 8):
        peer.train(samples=4)
        assert weight.tolist() == [-0.5 * count] * 2, "its half of the batch is a step of its own"
    assert peer.gradients.claims == [] and peer.history == History()
    peer.train(samples=4)
    [claim] = peer.gradients.claims
    assert claim.samples == 32 and weight.tolist() == [-0.25, -0.25]
    assert peer.history == History().extend(samples=13, proof=b"proof", steps=4)


def test_in_the_first_round_of_local_steps_others_samples_count_as_a_share_of_it():
    peer, _ = of_one_weight(with_b(), commits())
    peer.train()
    peer.position.set_pace(Pace(mode="diloco", local_steps=4))
    peer.position.enter(peer.history)
    believed = peer.tracker.doubts.believed_samples("QmB", 10**9, peer.tracker.target_batch_size)
    assert believed == CREDIT_MARGIN * 5 * 4
