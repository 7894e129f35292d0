"""Who is waited for, decided from reports that are always a little old; and what a step steps with."""

import concurrent.futures
import contextlib
import math
import threading
import time
from collections import deque
from types import SimpleNamespace

import bitsandbytes
import pytest
import torch
from hivemind.averaging.control import AveragingStage

from tests.kit.averagers import gradient_averager, state_averager
from trahiv_cli.errors import NotAdmitted, NotFinite, PeerBroken, RoundFailed
from trahiv_cli.optim import optimizer as optimizing
from trahiv_cli.optim.assemble import initialize_state
from trahiv_cli.optim.auto import RECENT, Measured
from trahiv_cli.optim.averagers import ExactGradientAverager, common_digest
from trahiv_cli.optim.ballot import NotCommitted, digest_of, joint_digest
from trahiv_cli.optim.doubts import CREDIT_MARGIN, Doubts
from trahiv_cli.optim.history import History
from trahiv_cli.optim.ledger import MAX_POSITION, Ledger, Spans
from trahiv_cli.optim.majority import Past, Standing, Way
from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.optim.progress import PacedEvent, PeerProgress
from trahiv_cli.optim.rounds import Outcome
from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.swarm.snapshot import JoinerActivity
from trahiv_cli.swarm.vitals import Vitals
from trahiv_cli.telemetry.events import Events

torch.set_num_threads(1)


def after(step, branch=b""):
    """The history of `step` steps of 10 samples each; another `branch` is another history."""
    history = History()
    for number in range(step):
        history = history.extend(samples=10, proof=b"%d" % number + branch)
    return history


HERE = after(5)
LEDGER = Ledger(Spans.of([(0, 320), (400, 450)]))
ELSEWHERE = {
    "a step behind": after(4),
    "far behind": after(0),
    "ahead": after(6),
    "at this step of another history": after(5, branch=b"!"),
}


class Tracker:
    """What the others reported, and what was reported of this peer."""

    own_id, is_behind, refreshed = "QmMe", False, 0

    def __init__(self, others=(), gone=()):
        self.others, self.gone, self.history, self.samples = tuple(others), frozenset(gone), None, None
        self.fetch_every_s, self.doubts = 0.0, Doubts()
        self.vouched, self.attested = None, {}

    @property
    def mates(self):
        return self.others

    pause_updates = staticmethod(contextlib.nullcontext)

    def refresh(self):
        self.refreshed += 1

    def update_history(self, history, samples=0, *, is_next=True):
        self.history, self.samples, self.vouched = history, samples, None

    def vouch(self, history):
        self.vouched = history

    def attest(self, history, common, *, is_given=False):
        self.attested[history] = common, is_given

    @property
    def standing(self):
        return Standing(
            own=self.history or History(),
            witnesses=self.others,
            there=[peer.history for peer in self.others],
            vouched=self.vouched,
        )

    @property
    def target(self):
        return self.standing.target

    @property
    def samples_accumulated(self):
        return self.samples or 0

    @property
    def ready_to_update_epoch(self):
        return not self.is_behind and (self.samples is None or self.samples >= self.target_batch_size)

    def report_local_progress(self, step, samples_accumulated):
        self.samples = samples_accumulated

    def announce(self):
        self.announced = self.history


def report(name, history=HERE, way=()):
    """What a peer reported that came through all histories of its `way`."""
    past = Past()
    for passed in way:
        past.go_on(passed)
    way = Way.from_wire(**past.to_wire()) if way else Way()
    return PeerProgress(name, history, 8, samples_per_second=1.0, is_client=False, way=way)


def peer(*others, companions=(), gone=(), solo_after_s=300.0, without_group_s=None, tries=0):
    """This peer at `HERE`, without its constructor, which starts processes.

    Args:
        others: names of those that reported this peer's history, or reports.
        companions: the others of the last group.
        without_group_s: how long it has been looking for a group; None if it is not.
    """
    optimizer = object.__new__(SwarmOptimizer)
    reports = [report(other) if isinstance(other, str) else other for other in others]
    optimizer.tracker = Tracker(reports, gone)
    optimizer.state_averager = SimpleNamespace(history=HERE, local_epoch=HERE.step)
    optimizer._companions = frozenset({*companions, "QmMe"})
    optimizer._rules, optimizer._tries = RoundRules(solo_after_s=solo_after_s), tries
    optimizer._without_group_since = (
        math.inf if without_group_s is None else time.monotonic() - without_group_s
    )
    return optimizer


# -- who is waited for ----------------------------------------------------------------------------


def test_peers_of_the_same_history_are_waited_for():
    assert peer("QmB", "QmC")._groupmates() == ["QmB", "QmC"]


@pytest.mark.parametrize("where", ELSEWHERE)
def test_peers_of_another_history_are_not_waited_for(where):
    assert peer(report("QmB", ELSEWHERE[where]))._groupmates() == []


@pytest.mark.parametrize("step", [4, 3, 0])
def test_a_companion_of_the_last_round_is_waited_for_however_old_its_report(step):
    assert peer(report("QmB", after(step)), companions=["QmB"])._groupmates() == ["QmB"]


def test_a_companion_that_is_ahead_is_no_groupmate():
    assert peer(report("QmB", after(6)), companions=["QmB"])._groupmates() == []


def test_companions_that_are_not_seen_any_more_have_vanished():
    optimizer = peer("QmB", companions=["QmB", "QmC", "QmD"])
    assert optimizer._vanished() == {"QmC", "QmD"}


def test_who_said_goodbye_has_not_vanished():
    assert peer("QmB", companions=["QmB", "QmC", "QmD"], gone=["QmC"])._vanished() == {"QmD"}


def test_who_was_in_no_group_can_not_vanish():
    assert peer(companions=[], gone=["QmB"])._vanished() == set()


# -- how many are needed --------------------------------------------------------------------------


@pytest.mark.parametrize(("others", "quorum"), [("", 2), ("B", 2), ("BC", 2), ("BCD", 3), ("BCDE", 3)])
def test_a_group_needs_most_of_those_that_hold_the_state(others, quorum):
    assert peer(*others, companions=others)._quorum() == quorum


def test_those_that_hold_another_state_are_not_needed():
    assert peer("B", *(report(name, after(2)) for name in "CDEF"))._quorum() == 2


@pytest.mark.parametrize(
    ("others", "vanished", "quorum"),
    [
        ("BCD", "E", 3),
        ("BC", "DE", 2),
        ("B", "CD", 2),  # of four, half is there
        ("B", "CDE", 3),  # two of five are too few
        ("", "B", 2),
        ("BC", "DEFGH", 5),
    ],
)
def test_a_group_needs_as_many_as_have_vanished_from_the_last_one(others, vanished, quorum):
    assert peer(*others, companions=others + vanished)._quorum() == quorum


def test_of_two_parts_that_were_cut_apart_the_smaller_never_has_a_quorum():
    for size in range(2, 10):
        names = "ABCDEFGHI"[: size - 1]
        for there in range(size // 2 + 1):
            part = peer(*names[:there], companions=names)
            members = 1 + there
            assert (members >= part._quorum()) == (2 * members >= size and members >= 2)


def test_those_that_have_gone_on_from_this_state_are_needed():
    """Else those whose reports are the last to tell of a round could go another way."""
    gone_on = [report(name, after(6), [after(5), after(6)]) for name in ("QmD", "QmE")]
    assert peer("QmB", "QmC", *gone_on)._quorum() == 3
    assert peer("QmB", "QmC")._quorum() == 2


@pytest.mark.parametrize(("home", "who_is_out"), [(True, {"QmB"}), (False, set())])
def test_the_tracker_is_told_whom_the_owner_has_taken_out(home, who_is_out, monkeypatch):
    monkeypatch.setattr(optimizing, "SwarmTracker", SimpleNamespace)
    optimizer, *_ = ready()
    optimizer._home = SimpleNamespace(is_out={"QmB"}.__contains__) if home else None
    optimizer.dht, optimizer.run_id = SimpleNamespace(signing_key=None), "run"
    optimizer.client_mode, optimizer.status_loglevel = False, 20
    tracker = optimizer._make_progress_tracker(8)
    assert {peer for peer in ("QmA", "QmB") if tracker.is_out(peer)} == who_is_out


def test_who_said_goodbye_is_not_needed():
    assert peer("B", companions="BCDE", gone="CDE")._quorum() == 2


def test_whoever_may_go_on_alone_may_go_on_with_anybody():
    many = {"companions": "BCDEFGH", "solo_after_s": 60.0}
    assert peer(*"BCDE", **many, without_group_s=59.0)._quorum() == 3
    assert peer(*"BCDE", **many, without_group_s=61.0)._quorum() == 2
    assert peer(*"BCDE", **many)._quorum() == 3


# -- who may step alone ---------------------------------------------------------------------------


def test_a_peer_that_has_always_been_alone_steps_alone():
    assert peer()._is_alone()


def test_a_peer_whose_only_companion_left_or_vanished_steps_alone():
    assert peer(companions="B")._is_alone()
    assert peer(companions="B", gone="B")._is_alone()


def test_a_peer_that_lost_more_than_one_without_a_goodbye_may_be_the_one_that_is_cut_off():
    assert not peer(companions="BC")._is_alone()
    assert peer(companions="BC", gone="B")._is_alone()
    assert peer(companions="BCDE", gone="BCDE")._is_alone()


@pytest.mark.parametrize("where", ["a step behind", "far behind", "at this step of another history"])
def test_a_peer_that_is_seen_is_company_wherever_it_is(where):
    assert not peer(report("QmB", ELSEWHERE[where]))._is_alone()


@pytest.mark.parametrize("others", ["B", ""], ids=["others there", "two vanished"])
@pytest.mark.parametrize(
    ("solo_after_s", "without_group_s", "tries", "is_alone"),
    [
        (300.0, 299.0, 9, False),
        (300.0, 301.0, 9, True),
        (300.0, None, 0, False),  # it is not looking for a group
        (0.0, 0.0, 0, False),  # one try it owes to the others
        (0.0, 0.0, 1, True),
        (math.inf, 1e6, 9, False),
    ],
)
def test_company_is_waited_for_as_long_as_the_rules_say(
    others, solo_after_s, without_group_s, tries, is_alone
):
    optimizer = peer(
        *others,
        companions="BCD",
        gone="" if others else "B",
        solo_after_s=solo_after_s,
        without_group_s=without_group_s,
        tries=tries,
    )
    assert optimizer._is_alone() is is_alone


def test_a_hurried_event_does_not_wait_for_its_pace():
    event = PacedEvent(interval_s=lambda: 1000.0)
    event.set()
    assert event.wait(0)
    event.hurry()
    assert event.wait(0)


def test_an_event_that_keeps_its_pace_can_be_hurried_meanwhile():
    event = PacedEvent(interval_s=lambda: 1000.0)
    event.set()
    assert event.wait(0)
    waiting = threading.Thread(target=event.wait, args=(0,), daemon=True)
    waiting.start()
    event.hurry()
    waiting.join(20.0)
    assert not waiting.is_alive()


# -- a step ---------------------------------------------------------------------------------------

INNER = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_8bit": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=0.01, weight_decay=0.1),
    "lion_32bit": lambda p: bitsandbytes.optim.Lion(p, lr=0.01, weight_decay=0.1),
}


class Rounds(ExactGradientAverager):
    """An averager without a process: a round ends as `end` says; `claims` are those of this peer."""

    traffic = (0, 0)

    def expect_group(self, peers, clients, quorum, schema_suffix):
        self.expected = (tuple(peers), quorum, schema_suffix)

    def start_replay(self, donor, exchange, silence_s):
        self.asked.append(donor)
        replay = concurrent.futures.Future()
        rounds = self.kept.get(donor, {})
        replay.set_result(rounds[exchange.after](self) if exchange.after in rounds else None)
        return replay

    def is_alive(self):
        return True

    def start_round(self, claim, timeout_s, places):
        self.claims.append(claim)
        self.exchanges.append(places)
        control = concurrent.futures.Future()
        control.stage = AveragingStage.LOOKING_FOR_GROUP
        try:
            control.set_result(self.end(self))
        except (RoundFailed, NotCommitted) as error:
            control.set_exception(error)
        return control


def optimizer_of(weights, make, offload=False, tracker=None, end=None, pace=DEFAULT_PACE):
    """A peer's optimizer around its parts, as the constructor puts them together, but for the network."""
    averages = [torch.zeros_like(weight) for weight in weights]
    stepped = [torch.nn.Parameter(weight.detach().clone()) for weight in weights] if offload else weights
    inner = make(stepped)
    initialize_state(inner)
    if offload:
        for copy, average in zip(stepped, averages, strict=True):
            copy.grad = average
    optimizer = object.__new__(SwarmOptimizer)
    optimizer.__dict__.update(
        offload_optimizer=offload,
        client_mode=True,
        pace=pace,
        max_steps=10**6,
        target_batch_size=8,
        batch_size_per_step=8,
        average_state_every=1,
        matchmaking_time=0.001,
        averaging_timeout=0.01,
        status_loglevel=0,
        tracker=tracker or Tracker(),
        last_round=None,
        events=Events(lambda event: optimizer.told.append((event.get("code"), event["message"]))),
        _when_no_group_is_found=lambda: None,
        should_leave=lambda: False,
        told=[],
        _schema=b"schema",
        _rules=RoundRules(),
        _companions=frozenset(),
        _digests={},
        _states={},
        _has_drifted=False,
        _usual_wait_s=0.0,
        _blocked_s=0.0,
        _blocked_since=0.0,
        _running=None,
        _notices=deque(),
        _leases=None,
        _announced=[],
        _work=[],
        _useless=[],
        _vitals=Vitals(()),
        _home=None,
        _auto_share=None,
        _max_grad_norm=1.0,
        _seconds_per_sample=deque(),
        _left_step_at=None,
        _measured=Measured(),
        _rates=deque(maxlen=RECENT),
        _num_disturbed=0,
        _goes_on=False,
        _interest=JoinerActivity(),
        _donors_asked=[],
        _disbelieved=set(),
        load_state_timeout=60.0,
        _closed=False,
    )
    optimizer.state_averager = state_averager(inner, weights, offload_optimizer=offload)
    optimizer.grad_averager = gradient_averager(
        weights, Rounds, _averaged_tensors=averages, claims=[], exchanges=[], asked=[], kept={}, end=end
    )
    optimizer._method = optimizer._make_method()
    optimizer._begin_step()
    return optimizer


def trained(make, offload, steps=3):
    """Take steps of two batches each; return the weights and the norms of the averaged gradients."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((96, 96), (7,))]
    optimizer, norms = optimizer_of(weights, make, offload), []
    for step in range(1, steps + 1):
        for _ in range(2):
            assert optimizer.expect_batch(4, 4, lend=True) == 1.0
            sum((weight * torch.randn(weight.shape)).sum() for weight in weights).backward()
            optimizer.grad_averager.accumulate_grads_(batch_size=4)
        assert optimizer._method.set_aside(goes_on=False)
        optimizer._method.load()
        optimizer._take_step(after(step))
        norms.append(optimizer.last_grad_norm)
        assert all(weight.grad is None for weight in weights)
        assert not any(accumulator.any() for accumulator in optimizer.grad_averager._local_accumulators)
        assert optimizer.local_epoch == optimizer.step_taken == step
        assert optimizer.history == optimizer.tracker.history == after(step)
    return weights, norms


@pytest.mark.parametrize("name", INNER)
def test_a_step_where_the_weights_are_is_the_step_of_an_offloaded_copy(name):
    (here, norms), (offloaded, same_norms) = (trained(INNER[name], offload) for offload in (False, True))
    assert norms == same_norms and min(norms) > 1.0, "clipping must have something to do"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(here, offloaded, strict=True))


def test_the_averaged_gradient_is_clipped_before_the_step():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = optimizer_of([weight], lambda p: torch.optim.SGD(p, lr=1.0), offload=False)
    assert optimizer._method.set_aside(goes_on=False)
    optimizer.grad_averager._averaged_tensors[0].fill_(10.0)
    optimizer._take_step(after(1))
    assert optimizer.last_grad_norm == 20.0
    assert weight.detach().norm().item() == pytest.approx(1.0, rel=1e-4)


# -- a round and the step after it ----------------------------------------------------------------


def ready(tracker=None, end=None, gradient=0.5, pace=DEFAULT_PACE):
    """A peer of one weight, at 0, that has accumulated 8 samples of a gradient; SGD with a rate of 1."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = optimizer_of([weight], lambda p: torch.optim.SGD(p, lr=1.0), False, tracker, end, pace)
    optimizer.expect_batch(8, 20.0, lend=False)
    weight.grad = torch.full((2,), gradient)
    optimizer.grad_averager.accumulate_grads_(batch_size=8)
    weight.grad = None
    return optimizer, weight


def with_b():
    return Tracker([report("QmB", History())])


def commits(average=0.25, **changes):
    """A round with QmB that ends with an average."""

    def end(averager):
        averager._averaged_tensors[0].fill_(average)
        fields = {
            "samples": {"QmMe": 8, "QmB": 5},
            "group": ("QmMe", "QmB"),
            "left_out": {},
            "states": dict.fromkeys(("QmMe", "QmB"), b"same"),
            "proof": b"proof",
            "reason": "",
        }
        return Outcome(**fields | changes)

    return end


def fails(averager):
    averager._averaged_tensors[0].fill_(torch.nan)  # whatever a round leaves there
    raise RoundFailed("peer QmB sent nothing for too long")


def test_what_is_held_before_a_round_is_told_to_others():
    optimizer, _ = ready(with_b(), commits())
    small, weights = optimizer.state_averager.own_metadata(), [digest_of([torch.zeros(2)])]
    optimizer._advance()
    [(common, is_given)] = optimizer.tracker.attested.values()
    assert joint_digest(weights)[:8] == optimizer.grad_averager.claims[0].state and not is_given
    assert common == common_digest(weights, small)
    for other in ({"ledger": [[0, 2**62], 0]}, {"pace": None}, {"outer_rounds": 7}):
        assert common != common_digest(weights, small | other), "what is small counts, too"


def test_a_peer_vouches_for_the_average_that_it_voted_for_until_the_next_step():
    def not_committed(averager):
        raise NotCommitted("one of two peers holds this average", b"proof", 13)

    optimizer, weight = ready(with_b(), not_committed)
    optimizer.averaging_timeout = 0.1
    optimizer._advance()
    assert optimizer.tracker.vouched == History().extend(samples=13, proof=b"proof")
    optimizer.grad_averager.end = commits()
    train(optimizer, weight)
    assert optimizer.history.step == 1 and optimizer.tracker.vouched is None


def test_a_peer_that_goes_back_to_most_others_says_so():
    class Fewer(Tracker):
        target, is_behind = after(2), True

    optimizer, weight = ready(Fewer())
    optimizer.load_state_from_peers = lambda: True
    optimizer.state_averager.history = after(5)
    train(optimizer, weight)
    assert [code for code, _ in optimizer.told] == ["fork"]


def test_a_peer_alone_steps_with_its_own_gradients():
    optimizer, weight = ready()
    optimizer._advance()
    assert weight.tolist() == [-0.5, -0.5] and optimizer.last_round is None
    assert (optimizer.local_epoch, optimizer.history.step, optimizer.history.samples) == (1, 1, 8)
    assert (optimizer.step_samples, optimizer.my_step_samples) == (8, 8)
    assert optimizer._companions == {"QmMe"} and optimizer.grad_averager.claims == []


def test_two_that_step_alone_have_different_histories():
    histories = []
    for optimizer, _ in (ready(), ready()):
        optimizer._advance()
        histories.append(optimizer.history)
    assert histories[0].digest != histories[1].digest and histories[0].samples == histories[1].samples


def test_a_committed_round_is_stepped_with_and_becomes_history():
    optimizer, weight = ready(with_b(), commits())
    optimizer._advance()
    assert weight.tolist() == [-0.25, -0.25]
    assert optimizer.history == optimizer.tracker.history == History().extend(samples=13, proof=b"proof")
    assert (optimizer.step_samples, optimizer.my_step_samples) == (13, 8)
    assert optimizer.last_round.committed and optimizer.last_round.group == ("QmMe", "QmB")
    assert optimizer._companions == {"QmMe", "QmB"} and optimizer.told == []
    assert optimizer.grad_averager.local_samples_accumulated == 0


def test_a_peer_claims_what_it_brings_and_what_it_holds():
    optimizer, _ = ready(with_b(), commits())
    state = optimizer._digest_of_weights()
    optimizer._advance()
    [claim] = optimizer.grad_averager.claims
    assert (claim.samples, claim.weight, claim.norm, claim.quorum, claim.state) == (8, 20.0, 0.0, 2, state)
    expected, quorum, suffix = optimizer.grad_averager.expected
    assert (expected, quorum) == (("QmB",), 2)
    assert History().digest in suffix and suffix.endswith(b"schema")


def test_a_round_that_failed_changes_nothing_and_its_gradients_go_into_the_next():
    optimizer, weight = ready(with_b(), fails)
    optimizer._advance()
    assert not optimizer.last_round.committed and "QmB sent nothing" in optimizer.last_round.reason
    assert optimizer.last_round.group == ()
    assert (optimizer.local_epoch, optimizer.history, weight.tolist()) == (0, History(), [0.0, 0.0])
    assert optimizer.grad_averager.local_samples_accumulated == 8
    assert optimizer.grad_averager._local_accumulators[0].tolist() == [0.5, 0.5]
    assert optimizer._tries == 1
    optimizer.grad_averager.end = commits()
    optimizer._advance()
    assert optimizer.history.samples == 13 and weight.tolist() == [-0.25, -0.25]
    assert optimizer._tries == 0


def test_patience_grows_with_each_try_and_ends_at_the_averaging_timeout():
    optimizer, _ = ready(with_b())
    patience = []
    for optimizer._tries in range(6):
        patience.append(optimizer._patience_s())
    assert patience == [0.002, 0.004, 0.008, 0.01, 0.01, 0.01]
    optimizer._tries = 0
    optimizer.grad_averager.local_samples_accumulated = optimizing.ACCUMULATE_AT_MOST * 8
    assert optimizer._patience_s() == 0.01


def test_a_peer_that_holds_enough_trains_no_further_until_there_is_a_group():
    optimizer, _ = ready(with_b(), fails)
    optimizer.averaging_timeout = 0.0
    optimizer._advance()
    assert len(optimizer.grad_averager.claims) == 1
    optimizer.grad_averager.local_samples_accumulated = optimizing.ACCUMULATE_AT_MOST * 8
    optimizer.should_leave = lambda: len(optimizer.grad_averager.claims) == 5
    optimizer._advance()
    assert len(optimizer.grad_averager.claims) == 5 and optimizer.local_epoch == 0


def test_a_peer_that_may_go_solo_takes_the_step_after_one_failed_try():
    optimizer, weight = ready(with_b(), fails)
    optimizer._rules, optimizer.averaging_timeout = RoundRules(solo_after_s=0.0), 0.0
    optimizer._advance()
    assert optimizer.local_epoch == 0 and not optimizer.last_round.committed
    optimizer._advance()
    assert optimizer.history.samples == 8 and weight.tolist() == [-0.5, -0.5]
    assert optimizer.last_round is None and len(optimizer.grad_averager.claims) == 1


@pytest.mark.parametrize(
    ("solo_after_s", "words"), [(300.0, "after 300 s (swarm.solo)"), (math.inf, "never (swarm.solo)")]
)
def test_a_long_search_for_a_group_is_said_and_again_when_it_has_lasted_twice_as_long(solo_after_s, words):
    optimizer, _ = ready(Tracker([report("Qm...23456B", History())]))
    optimizer._rules, said, asked = RoundRules(solo_after_s=solo_after_s), [], []
    optimizer.events, optimizer._when_no_group_is_found = Events(said.append), lambda: asked.append(len(said))
    optimizer._companions = frozenset({"QmMe", "Qm...23456C"})
    optimizer._without_group_since = time.monotonic()
    optimizer._say_that_there_is_no_group()
    optimizer._tell_notices()
    assert not said
    optimizer._without_group_since -= optimizing.SAY_AFTER_S
    for _ in range(2):
        optimizer._say_that_there_is_no_group()
    optimizer._tell_notices()
    [warning] = said
    assert warning["code"] == "no-group" and "step 1" in warning["message"]
    assert warning["hint"].endswith(words)
    assert "...23456B, ...23456C can't be reached" in warning["message"]
    optimizer._without_group_since -= optimizing.SAY_AFTER_S + 1
    for _ in range(2):
        optimizer._say_that_there_is_no_group()
    optimizer._tell_notices()
    assert len(said) == 2
    optimizer._begin_step()
    optimizer._without_group_since = time.monotonic() - optimizing.SAY_AFTER_S
    optimizer._say_that_there_is_no_group()
    optimizer._tell_notices()
    assert len(said) == 3 and asked == [1, 2, 3]


@pytest.mark.parametrize(
    ("mine", "rest", "holders"), [("x", "xy", None), ("x", "xx", None), ("y", "xx", {"QmB", "QmC"})]
)
def test_the_weights_that_most_hold_are_adopted(mine, rest, holders):
    states = dict(zip(("QmMe", "QmB", "QmC"), (state.encode() for state in mine + rest), strict=False))
    optimizer, _ = ready(with_b(), commits(states=states, group=tuple(states)))
    asked = []
    optimizer.load_state_from_peers = lambda holders: asked.append(holders) or True
    optimizer._advance()
    assert asked == ([holders] if holders else []) and not optimizer._has_drifted
    assert [code for code, _ in optimizer.told] == ["drift"] * len(asked)


def test_weights_that_could_not_be_taken_over_end_no_training():
    states = {"QmMe": b"y", "QmB": b"x", "QmC": b"x"}
    optimizer, _ = ready(with_b(), commits(states=states, group=tuple(states)))

    def fails_to_load(holders):
        raise RoundFailed("nothing came")

    optimizer.load_state_from_peers = fails_to_load
    optimizer._advance()
    assert optimizer.local_epoch == 1


def test_a_group_whose_members_hold_other_weights_has_drifted():
    states = {"QmMe": b"mine", "QmB": b"theirs"}
    optimizer, _ = ready(with_b(), commits(states=states))
    optimizer.average_state_every = 2  # not at step 1
    optimizer._advance()
    assert optimizer._has_drifted and optimizer.local_epoch == 1


def test_a_peer_whose_others_leave_during_the_round_steps_alone():
    def leave(averager):
        optimizer.tracker.others, optimizer.tracker.gone = (), frozenset({"QmB"})
        fails(averager)

    optimizer, weight = ready(with_b(), leave)
    optimizer._advance()
    assert weight.tolist() == [-0.5, -0.5], "its own gradients, not what the round left"
    assert optimizer.last_round is None and optimizer.history.samples == 8


def test_a_peer_that_finds_itself_behind_does_not_step():
    optimizer, weight = ready(with_b(), commits())
    optimizer.tracker.is_behind = True
    optimizer._advance()
    assert optimizer.local_epoch == 0 and optimizer.grad_averager.claims == []
    assert optimizer.grad_averager.local_samples_accumulated == 8 and weight.tolist() == [0.0, 0.0]


def test_who_was_left_out_is_named_to_a_person():
    left_out = {"QmB": "its gradient is not finite", "QmMe": "the norm is too large"}
    optimizer, _ = ready(with_b(), commits(left_out=left_out, samples={"QmC": 3}))
    optimizer._advance()
    (code, theirs), (_, ours) = optimizer.told
    assert code == "left-out" and theirs.startswith("Peer QmB's gradient was left out of step 1")
    assert "not finite" in theirs and ours.startswith("This peer's gradient")
    assert optimizer.step_samples == 3 and optimizer.last_round.left_out == left_out


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_gradients_that_are_not_finite_are_dropped_and_counted(poison):
    optimizer, weight = ready(with_b(), commits(), gradient=poison)
    optimizer._advance()
    assert (optimizer.dropped_samples, optimizer.local_epoch) == (8, 0)
    assert optimizer.grad_averager.claims == [] and weight.tolist() == [0.0, 0.0]
    assert optimizer.grad_averager.local_samples_accumulated == optimizer.tracker.samples == 0
    assert not optimizer.grad_averager._local_accumulators[0].any()


# -- which samples --------------------------------------------------------------------------------


class Positions:
    """Leases of the next positions, without a network."""

    unit = 1

    def __init__(self, optimizer):
        self.returned, self.settled = [], []
        optimizer._leases = self

    def give_back(self, positions):
        self.returned += positions

    def settle(self, done):
        self.settled += done


def divided(*args, **kwargs):
    """As `ready`, of positions 0 to 7."""
    optimizer, weight = ready(*args, **kwargs)
    optimizer._work = list(range(8))
    return optimizer, weight, Positions(optimizer)


def batch(optimizer, weight, positions):
    """One local batch of these positions."""
    optimizer.expect_batch(len(positions), 10.0, lend=False, positions=positions)
    weight.grad = torch.full((2,), 0.5)
    optimizer.step(batch_size=len(positions))


def test_a_committed_round_covers_what_its_members_brought():
    trained = (Spans.of([(0, 8)]), Spans.of([(8, 13)]))
    optimizer, _, leases = divided(with_b(), commits(trained=trained))
    optimizer._advance()
    assert optimizer.grad_averager.claims[0].trained == trained[0]
    assert optimizer.ledger == Ledger(Spans.of([(0, 13)]))
    assert (optimizer._work, leases.settled, leases.returned) == ([], list(range(8)), [])


def test_a_step_that_a_peer_takes_alone_covers_its_own():
    optimizer, _, leases = divided()
    optimizer._advance()
    assert optimizer.local_epoch == 1 and optimizer.ledger == Ledger(Spans.of([(0, 8)]))
    assert leases.settled == list(range(8))


def test_a_round_that_failed_covers_nothing_and_its_positions_are_in_the_next():
    optimizer, weight, leases = divided(with_b(), fails)
    optimizer._advance()
    assert optimizer.ledger == Ledger() and leases.settled == leases.returned == []
    optimizer.grad_averager.end = commits(trained=(Spans.of([(0, 10)]),))
    batch(optimizer, weight, [8, 9])
    assert optimizer.grad_averager.claims[-1].trained == Spans.of([(0, 10)])
    assert optimizer.ledger == Ledger(Spans.of([(0, 10)])) and optimizer._work == []


def test_positions_that_somebody_claims_far_ahead_are_to_be_trained():
    most_ahead = optimizing.MOST_ROUNDS_AHEAD * divided()[0].target_batch_size
    lie = Spans.of([(2 * most_ahead - 4, MAX_POSITION)])
    optimizer, _, _ = divided(with_b(), commits(trained=(Spans.of([(0, 8)]), lie)))
    optimizer._advance()
    assert optimizer.ledger == Ledger(Spans.of([(0, 8), (2 * most_ahead - 4, 2 * most_ahead)]))


def test_positions_whose_gradients_are_of_no_use_are_not_trained_again():
    optimizer, weight, leases = divided(with_b(), commits(trained=(Spans.of([(0, 16)]),)))
    optimizer._work, gradient = [], optimizer.grad_averager
    gradient.reset_accumulated_grads_()
    optimizer.expect_batch(8, 20.0, lend=False, positions=list(range(8)))
    weight.grad = torch.full((2,), torch.nan)
    optimizer.step(batch_size=8)
    assert optimizer.dropped_samples == 8 and leases.returned == [] and optimizer._useless == list(range(8))
    batch(optimizer, weight, list(range(8, 16)))
    assert gradient.claims[-1].trained == Spans.of([(0, 16)]) and gradient.claims[-1].samples == 8
    assert optimizer._useless == [] and optimizer.ledger == Ledger(Spans.of([(0, 16)]))


def test_positions_whose_gradients_belonged_to_older_weights_are_trained_again():
    optimizer, _, leases = divided(with_b())
    optimizer._method.reset()
    optimizer._note_drops()
    assert optimizer._work == [] and leases.returned == list(range(8))


def test_a_batch_that_was_left_out_is_trained_again():
    optimizer, _, leases = divided()
    optimizer.expect_batch(2, 10.0, lend=False, positions=[8, 9])
    optimizer.forget_announced()
    assert leases.returned == [8, 9] and optimizer._work == list(range(8))


# -- rounds beside training -----------------------------------------------------------------------

OVERLAP = Pace(mode="overlap")

LIMIT_S = 10.0


class Gate:
    """Rounds that end one by one, each when it is let through."""

    def __init__(self, *ends):
        self._ends, self._passes = deque(ends), threading.Semaphore(0)

    def __call__(self, averager):
        assert self._passes.acquire(timeout=LIMIT_S)
        return self._ends.popleft()(averager)

    def let_through(self, optimizer):
        """Let the present round end, and wait until it has."""
        running = optimizer._running
        self._passes.release()
        assert running.wait(LIMIT_S)

    def open(self):
        self._passes.release(100)


@pytest.fixture
def beside():
    """Make a peer in mode overlap with QmB whose rounds end as is told; it holds 8 samples of 0.5."""
    gates = []

    def make(*ends, **changes):
        gates.append(Gate(*ends))
        return *ready(with_b(), gates[-1], pace=Pace(**{"mode": "overlap"} | changes)), gates[-1]

    yield make
    for gate in gates:
        gate.open()


def train(optimizer, weight, gradient=0.5, samples=8):
    """Account for one batch."""
    weight.grad = torch.full((2,), gradient)
    optimizer.step(batch_size=samples)
    weight.grad = None


def agreed(optimizer, weight):
    with optimizer.agreed_weights():
        return weight.tolist()


def test_training_goes_on_during_a_round_and_a_later_step_applies_it(beside):
    optimizer, weight, gate = beside(commits(0.25))
    train(optimizer, weight)
    train(optimizer, weight, samples=1)
    assert optimizer.local_epoch == 0 and agreed(optimizer, weight) == [0.0, 0.0]
    assert not optimizer._running.is_over
    gate.let_through(optimizer)
    assert optimizer.local_epoch == 0, "the weights move when training asks"
    train(optimizer, weight, samples=1)
    assert optimizer.local_epoch == 1 and weight.tolist() == [-0.25, -0.25]
    assert optimizer.my_step_samples == 16, "those that were there when it began"
    assert optimizer.tracker.samples == 2, "the others go into the next"


def test_a_failed_round_leaves_the_agreed_weights(beside):
    optimizer, weight, gate = beside(fails)
    optimizer.averaging_timeout = 0.0
    train(optimizer, weight)
    gate.let_through(optimizer)
    train(optimizer, weight)
    assert not optimizer.last_round.committed and optimizer._running is None
    assert weight.tolist() == agreed(optimizer, weight) == [0.0, 0.0]


def test_gradients_of_a_failed_round_are_in_the_next(beside):
    optimizer, weight, gate = beside(fails, commits())
    optimizer.averaging_timeout = 0.0
    train(optimizer, weight, samples=1)
    gate.let_through(optimizer)
    train(optimizer, weight, samples=1)
    assert not optimizer.last_round.committed and optimizer.tracker.samples == 10
    train(optimizer, weight, samples=1)
    gate.let_through(optimizer)
    train(optimizer, weight, samples=1)
    assert [claim.samples for claim in optimizer.grad_averager.claims] == [9, 11]
    assert optimizer.local_epoch == 1 and optimizer.my_step_samples == 11
    assert optimizer.tracker.samples == 1


def test_training_waits_for_a_round_once_it_holds_enough(beside):
    optimizer, weight, gate = beside(commits())
    waits = []

    def waiting(what, until_s):
        waits.append(optimizer._method.samples_held)
        gate.let_through(optimizer)
        return contextlib.nullcontext()

    optimizer.events.waiting = waiting
    for _ in range(2):
        train(optimizer, weight)
    assert waits == [] and optimizer.local_epoch == 0
    train(optimizer, weight)
    assert waits == [optimizing.ACCUMULATE_AT_MOST * 8] and optimizer.local_epoch == 1


def test_what_a_round_has_to_tell_is_told_by_the_thread_that_trains(beside):
    optimizer, weight, gate = beside(fails)
    optimizer.averaging_timeout = 0.0
    told = []
    optimizer.events = Events(lambda event: told.append((event["code"], threading.current_thread())))
    train(optimizer, weight)
    optimizer._usual_wait_s, optimizer._without_group_since = 0.0, time.monotonic() - optimizing.SAY_AFTER_S
    gate.let_through(optimizer)
    assert told == []
    train(optimizer, weight)
    assert told == [("no-group", threading.current_thread())]


def test_no_round_begins_at_the_last_step(beside):
    optimizer, weight, gate = beside(commits(), commits())
    optimizer.max_steps = 1
    train(optimizer, weight)
    train(optimizer, weight)
    gate.let_through(optimizer)
    for _ in range(3):
        train(optimizer, weight)
    assert optimizer.local_epoch == 1 and optimizer._running is None
    assert len(optimizer.grad_averager.claims) == 1


def test_weights_that_are_not_finite_end_training_that_goes_on_during_a_round(beside):
    optimizer, weight, gate = beside()
    with torch.no_grad():
        weight[1] = torch.nan
    with pytest.raises(NotFinite, match="nothing was sent"):
        train(optimizer, weight)
        assert optimizer._running.wait(LIMIT_S)
        train(optimizer, weight)
    assert optimizer.grad_averager.claims == [] and optimizer._running is None
    assert optimizer._method.samples_aside == 0 and optimizer._method.samples_held >= 16


def test_a_peer_that_is_found_behind_during_a_round_takes_over_the_state_after_it(beside):
    def find_behind(averager):
        optimizer.tracker.is_behind = True
        return fails(averager)

    optimizer, weight, gate = beside(find_behind)
    loaded = []
    optimizer.load_state_from_peers = lambda: loaded.append(optimizer._running) or True
    train(optimizer, weight)
    train(optimizer, weight)
    assert loaded == []
    gate.let_through(optimizer)
    train(optimizer, weight)
    train(optimizer, weight)
    assert loaded == [None] and len(optimizer.grad_averager.claims) == 1


def test_how_long_training_stood_still_for_a_round_is_said_of_that_round():
    optimizer, weight = ready(with_b(), commits())
    for _ in range(3):
        train(optimizer, weight)
        assert optimizer.last_round.blocked_seconds >= optimizer.last_round.seconds > 0


def test_a_peer_alone_steps_at_once_also_in_a_mode_in_which_training_goes_on():
    optimizer, weight = ready(pace=Pace(mode="overlap"))
    for count in range(1, 4):
        train(optimizer, weight)
        assert optimizer.local_epoch == count and optimizer._running is None
        assert optimizer.state_averager.agreed is None


# -- rounds that others had -----------------------------------------------------------------------


class Behind(Tracker):
    """A peer of one companion, which is `ahead` rounds further."""

    def __init__(self, ahead, donor="QmB"):
        self._ahead = ahead
        super().__init__([report(donor, after(9))])

    @property
    def is_behind(self):
        return self.history is None or self.history.step < self._ahead

    @is_behind.setter
    def is_behind(self, value):
        """`Tracker` has it as a value."""


def behind(*averages, donor="QmB", pace=DEFAULT_PACE):
    """A peer whose companion kept rounds that ended with these averages, and the histories they led to."""
    optimizer, weight = ready(Behind(len(averages), donor), pace=pace)
    kept, histories = optimizer.grad_averager.kept.setdefault(donor, {}), [History()]
    for number, average in enumerate(averages):
        kept[histories[-1].digest] = commits(average, proof=b"proof %d" % number)
        histories.append(histories[-1].extend(samples=13, proof=b"proof %d" % number))
    optimizer.tracker.others = (report(donor, histories[-1], histories),)
    return optimizer, weight, histories


def test_a_peer_goes_through_all_rounds_that_it_missed_and_loads_nothing():
    optimizer, weight, histories = behind(0.25, 0.5)
    optimizer.load_state_from_peers = None
    train(optimizer, weight)
    assert weight.tolist() == [-0.75, -0.75] and optimizer.history == histories[-1]
    assert optimizer.step_taken == -1, "it did not take them itself"
    assert optimizer._method.samples_held == 0, "gradients were of older weights"
    assert optimizer._companions == {"QmMe", "QmB"}
    assert optimizer.grad_averager.claims == []


def test_positions_trained_before_rounds_of_others_are_trained_again():
    optimizer, weight, _ = behind(0.25, 0.5)
    optimizer._work, leases = list(range(8)), Positions(optimizer)
    train(optimizer, weight)
    assert optimizer._work == [] and leases.returned == list(range(8))


def test_where_the_rounds_are_not_kept_the_state_is_loaded():
    optimizer, weight, histories = behind(0.25, 1.0, 2.0)
    del optimizer.grad_averager.kept["QmB"][histories[1].digest]
    loaded = []
    optimizer.load_state_from_peers = lambda: loaded.append(optimizer.history) or True
    train(optimizer, weight)
    assert loaded == [histories[1]] and weight.tolist() == [-0.25, -0.25]


def test_those_that_gave_the_state_are_asked_first_and_not_everybody():
    optimizer, _, way = behind(0.25, donor="QmZ")
    many = [f"Qm{number}" for number in range(20)]
    optimizer.tracker.others = tuple(report(name, way[-1], way) for name in (*many, "QmZ"))
    optimizer._donors_asked = ["QmZ"]
    assert optimizer._replay_round().proof == b"proof 0" and optimizer.grad_averager.asked == ["QmZ"]
    optimizer.grad_averager.kept.clear()
    assert optimizer._replay_round() is None
    assert len(optimizer.grad_averager.asked[1:]) == optimizing.FOLLOWED_AT_MOST


def test_who_wants_to_leave_does_not_wait_for_a_round_of_others():
    optimizer, _, _ = behind(0.25)
    optimizer.grad_averager.start_replay = lambda *_: concurrent.futures.Future()
    optimizer.should_leave = lambda: True
    assert optimizer._replay_round() is None


def test_a_peer_alone_has_its_step_kept_while_somebody_fetches_its_state():
    optimizer, weight = ready(end=commits(0.25, samples={"QmMe": 8}, group=("QmMe",)))
    optimizer._interest.note()
    optimizer._advance()
    [claim], [exchange] = optimizer.grad_averager.claims, optimizer.grad_averager.exchanges
    assert claim.quorum == 1 and optimizer.grad_averager.expected[:2] == ((), 1)
    assert exchange.after == History().digest
    assert weight.tolist() == [-0.25, -0.25], "what the codec made of its gradient"
    assert optimizer.history == History().extend(samples=8, proof=b"proof")
    assert optimizer.last_round is None and optimizer.step_taken == 1


def test_a_peer_alone_steps_also_if_its_step_can_not_be_kept():
    optimizer, weight = ready(end=fails)
    optimizer._interest.note()
    optimizer._advance()
    assert weight.tolist() == [-0.5, -0.5] and optimizer.local_epoch == 1


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_an_exchange_beside_a_download_is_no_measure_of_the_link(is_disturbed):
    optimizer, weight = ready(with_b(), commits(exchange_s=5.0, parts_sent=100, parts_received=100))
    optimizer._measured = Measured(1.0, 2.0, 100, 100)
    if is_disturbed:
        optimizer._interest.note()
    optimizer._advance()
    assert optimizer._measured.exchange_s == (2.0 if is_disturbed else 5.0)


def measured_rounds(optimizer, disturb, num_rounds):
    """Numbers of the rounds whose exchange was noted; before each one somebody disturbs."""
    numbers = []
    for number in range(num_rounds):
        disturb()
        end = commits(exchange_s=number + 5.0, parts_sent=100, parts_received=100)
        outcome = end(optimizer.grad_averager)
        optimizer._measure(outcome)
        if optimizer._measured.exchange_s == outcome.exchange_s:
            numbers.append(number)
    return numbers


def test_who_asks_for_a_state_and_fetches_none_disturbs_no_measure():
    optimizer, _ = ready(with_b())
    assert measured_rounds(optimizer, lambda: optimizer._interest.note_asker(0), 3) == [0, 1, 2]
    assert optimizer._interest.is_there


def test_downloads_that_never_end_are_what_the_link_is_like():
    optimizer, _ = ready(with_b())
    most = optimizing.DISTURBED_AT_MOST
    assert measured_rounds(optimizer, optimizer._interest.note, 2 * most + 2) == [most, 2 * most + 1]


# -- local steps ----------------------------------------------------------------------------------


def test_a_round_of_local_steps_is_several_steps_of_the_swarm():
    pace = Pace(mode="diloco", local_steps=4, outer_learning_rate=1.0, outer_momentum=0.0)
    optimizer, weight = ready(with_b(), commits(0.25), pace=pace)
    optimizer.grad_averager.reset_accumulated_grads_()
    assert optimizer.tracker.target_batch_size == 4 * 8
    for count in range(1, 8):
        train(optimizer, weight, samples=4)
        assert weight.tolist() == [-0.5 * count] * 2, "its half of the batch is a step of its own"
    assert optimizer.grad_averager.claims == [] and optimizer.history == History()
    train(optimizer, weight, samples=4)
    [claim] = optimizer.grad_averager.claims
    assert claim.samples == 32 and weight.tolist() == [-0.25, -0.25]
    assert optimizer.history == History().extend(samples=13, proof=b"proof", steps=4)


def test_in_the_first_round_of_local_steps_others_samples_count_as_a_share_of_it():
    optimizer, _ = ready(with_b(), commits())
    optimizer._advance()
    optimizer.set_pace(Pace(mode="diloco", local_steps=4))
    optimizer._begin_step()
    tracker = optimizer.tracker
    believed = tracker.doubts.believed_samples("QmB", 10**9, tracker.target_batch_size)
    assert believed == CREDIT_MARGIN * 5 * 4


def test_the_agreed_weights_are_in_the_model_for_a_while():
    pace = Pace(mode="streaming", local_steps=4, fragments=1)
    optimizer, weight = ready(with_b(), pace=pace)
    train(optimizer, weight)
    trained = weight.tolist()
    assert trained != [0.0, 0.0]
    with optimizer.agreed_weights():
        assert weight.tolist() == [0.0, 0.0]
    assert weight.tolist() == trained


# -- what a peer says of its weights --------------------------------------------------------------


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_end_training_before_anything_is_sent(poison):
    optimizer, weight = ready(with_b(), commits())
    with torch.no_grad():
        weight[1] = poison
    with pytest.raises(NotFinite, match="not finite at step 0; nothing was sent"):
        optimizer._advance()
    assert optimizer.grad_averager.claims == [] and optimizer.history == History()
    assert optimizer.grad_averager.local_samples_accumulated == 8


def test_equal_weights_have_equal_digests_and_others_do_not():
    (optimizer, _), (same, _), (other, different) = ready(), ready(), ready()
    with torch.no_grad():
        different[1] = 1e-30
    digest = optimizer._digest_of_weights()
    assert len(digest) == optimizing.STATE_DIGEST_BYTES and digest == same._digest_of_weights()
    assert digest != other._digest_of_weights()
    optimizer._advance()
    assert optimizer._digest_of_weights() != digest, "of each step anew"


# -- taking part ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_client", [False, True])
def test_a_peer_takes_part_from_a_history_on(is_client):
    optimizer, _ = ready()
    optimizer.client_mode = is_client
    optimizer.state_averager = SimpleNamespace(
        lock_state=threading.RLock(),
        local_epoch=0,
        history=History(),
        ledger=Ledger(),
        allow_state_sharing=False,
        _update_scheduler=lambda: moved.append(optimizer.local_epoch),
    )
    optimizer._tries, optimizer._state_digest, moved = 3, b"old", []
    optimizer.enter_step(HERE, LEDGER)
    assert optimizer.history == optimizer.tracker.announced == HERE
    assert optimizer.ledger == LEDGER
    assert optimizer.local_epoch == HERE.step and moved == [HERE.step]
    assert (optimizer._tries, optimizer._state_digest) == (0, b"")
    assert optimizer.state_averager.allow_state_sharing is not is_client


# -- this peer's processes ------------------------------------------------------------------------


def test_a_peer_whose_process_failed_trains_no_further():
    optimizer, _ = ready()
    optimizer._vitals.ailment = "the DHT's process has ended"
    with pytest.raises(PeerBroken, match="The DHT's process has ended"):
        optimizer.step()
    assert optimizer.grad_averager.local_samples_accumulated == 8, "unchanged"


def test_a_peer_that_is_leaving_leaves_in_good_order_whatever_failed():
    optimizer, _ = ready()
    optimizer._vitals.ailment, optimizer.should_leave = "the DHT's process has ended", lambda: True
    optimizer._require_alive()


def test_a_peer_that_was_taken_out_trains_no_further():
    def refuse():
        raise NotAdmitted("The owner of this swarm has taken this peer out.")

    optimizer, _ = ready()
    optimizer._home = SimpleNamespace(require_membership=refuse)
    with pytest.raises(NotAdmitted):
        optimizer.step()


@pytest.mark.parametrize(("ailment", "ended_by"), [("its process has ended", "abandon"), ("", "shutdown")])
def test_nobody_is_told_goodbye_through_a_process_that_failed(monkeypatch, ailment, ended_by):
    monkeypatch.setattr(optimizing, "drain", lambda *averagers: None)
    (optimizer, _), ended = ready(), []
    optimizer._closed, optimizer.shutdown_timeout = False, 5.0
    optimizer._vitals.ailment = ailment
    optimizer.grad_averager = optimizer.state_averager = None
    optimizer.tracker = SimpleNamespace(
        abandon=lambda: ended.append("abandon"), shutdown=lambda timeout_s: ended.append("shutdown")
    )
    optimizer.shutdown()
    assert ended == [ended_by]
