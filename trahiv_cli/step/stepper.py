"""A peer steps: it counts batches, begins a round when one is due, and applies a round that is over.

1. A peer counts and reports each batch (`step`).
2. If the swarm holds the samples of a round, the peer sets its work aside and begins a round in a background
   thread (`RoundRunner`); training waits for it or goes on.
3. A committed round moves the weights and the history (`Position`). A failed one gives the work back, for the
   next try.
4. If members of the group had different weights before the round, this peer adopts the majority's weights.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from hivemind.utils import get_logger

from trahiv_cli.background import in_background
from trahiv_cli.errors import RoundFailed
from trahiv_cli.progress.leases import Work
from trahiv_cli.progress.tracker import SwarmTracker
from trahiv_cli.rounds.claims import Outcome, Round
from trahiv_cli.step.auto import Adaptation, idle_members
from trahiv_cli.step.catch_up import CatchUp
from trahiv_cli.step.gradients import GradientBuffer
from trahiv_cli.step.lateness import Lateness, Moment
from trahiv_cli.step.position import Position
from trahiv_cli.step.quorum import Quorum
from trahiv_cli.step.round_runner import POLL_S, Attempt, RoundRunner
from trahiv_cli.step.run_settings import RunSettings
from trahiv_cli.step.weight_digests import WeightDigests
from trahiv_cli.swarm.watchdog import Watchdog
from trahiv_cli.telemetry.events import Events, short_name

logger = get_logger(__name__)

LEAVING_S = 10.0
"""Seconds that a leaving peer waits for an exchange to end."""


@dataclass(eq=False, kw_only=True)
class Stepper:
    """Takes the steps of a peer's optimizer. `SwarmOptimizer` creates one and keeps it."""

    settings: RunSettings
    position: Position
    runner: RoundRunner
    catch_up: CatchUp
    gradients: GradientBuffer
    work: Work
    tracker: SwarmTracker
    quorum: Quorum
    digests: WeightDigests
    adaptation: Adaptation
    alive: Watchdog
    events: Events

    def __post_init__(self) -> None:
        self.last_round: Round | None = None
        """The last round that was tried; None while this peer is alone."""
        self.step_samples = 0
        self.my_step_samples = 0
        """Samples that went into the last round, of all peers and of this one."""
        self._running: Future[Attempt] | None = None
        self._goes_on = False  # whether training goes on during the present round
        self.lateness = Lateness(self.events)
        self._is_fresh = True  # whether the batch in training is the first one with its state
        self._told_slow: set[str] = set()
        self._equal_until = 0  # before this step, this peer adopts no more weights to be equal
        self._blocked_s = 0.0
        self._blocked_since = 0.0

    def step(self, num_samples: int) -> None:
        """Count one local batch; see `SwarmOptimizer.step`, also for the errors."""
        method = self.position.method
        num_samples = self.gradients.announced_samples or num_samples
        seconds = self.adaptation.end_batch(num_samples)
        is_behind = self._running is None and self.tracker.is_behind
        if is_behind and not self.lateness.is_hopeless and self._come(num_samples, seconds):
            return
        if self._running is None and not is_behind:
            self.lateness.note_in_time(self._moment_before(seconds))
        dropped = method.dropped_samples
        before = self.position.history
        method.account(num_samples)
        self.work.count_announced(num_samples)
        self.work.drop(method.samples_held, are_useless=method.dropped_samples > dropped)
        self._report(method.samples_held)
        self._blocked_since = time.monotonic()
        try:
            if is_behind and self.lateness.is_hopeless:
                self.catch_up.wait_for_longer_steps(self.lateness.batch_s, self.lateness.next_pause_s())
                self._come(num_samples, seconds)
            self._advance()
        finally:
            method = self.position.method
            self.work.drop(method.samples_held, are_useless=method.dropped_samples > dropped)
            self._blocked_s += time.monotonic() - self._blocked_since
            self._is_fresh = self.position.history != before
            self.adaptation.begin_batch()

    def _come(self, num_samples: int, seconds: float) -> bool:
        """Catch up with the swarm after a batch; return whether the batch's gradient is useless now."""
        began = self._moment_before(seconds)
        ended = Moment(time.monotonic(), self.tracker.target.step)
        if not self.catch_up.come():
            return False
        # This batch's gradient belonged to weights that the swarm has left.
        self.gradients.forget_announced()
        if not self.lateness.is_hopeless:  # otherwise it was counted, and was dropped
            self.work.forget_announced(num_samples)
        is_to_attend = self.lateness.is_hopeless and self.settings.auto_share is not None
        if self._is_fresh and seconds:
            usual_s = num_samples * self.adaptation.seconds_per_sample
            is_to_attend |= self.lateness.note_late(num_samples, usual_s, began, ended)
        self._is_fresh = True
        if is_to_attend:
            self._attend()
        self.adaptation.begin_batch()
        return True

    def _moment_before(self, seconds: float) -> Moment:
        """Return when the batch that took `seconds` began, with this peer's step."""
        return Moment(time.monotonic() - seconds, self.position.history.step)

    def _attend(self) -> None:
        """Take part in a round without samples: all members learn this peer's speed from its claim."""
        self._blocked_since = time.monotonic()
        self.adaptation.measure_speed()
        for _ in range(16):  # tries: the others do not wait for a peer that was absent
            self.catch_up.wait_for_round()
            self._advance()
            if not self.tracker.is_behind or self.alive.should_leave():
                return
            self.catch_up.come()

    def start_batch_over(self, num_samples: int) -> None:
        """See `SwarmOptimizer.start_batch_over`."""
        self.work.forget_announced(-num_samples)
        self.gradients.reset()
        self.gradients.clear()
        held = self.position.method.samples_held
        self.work.drop(held)
        self._report(held)

    def stop(self) -> None:
        """End a running round after its exchange; the model then has the weights of this peer's history."""
        if self._running is not None:
            wait([self._running], LEAVING_S)
            self.position.method.take_back()
            self._running = None

    def _report(self, num_samples: int) -> None:
        self.tracker.report_local_progress(self.position.history.step, num_samples)

    def _advance(self) -> None:
        """Begin a round if one is due, apply or undo one that is over, and wait if training can't go on."""
        while True:
            if self._running is None:
                is_at_end = self.position.history.step >= self.settings.max_steps
                if is_at_end or not self.tracker.ready_to_update_epoch:
                    return
                # Alone there is no network wait to overlap, and delaying the step would change it.
                self._goes_on = self.position.pace.is_background and not self.quorum.may_step_alone
                if not self.position.method.set_aside(goes_on=self._goes_on):
                    self._report(0)
                    return
                self.position.state.buffers.set_aside()
                self.quorum.begin_search()
                self._running = in_background(self.runner.average)
            if not self._goes_on or self.runner.holds_enough():
                self._wait_for(self._running)
            if not self._running.done():
                return
            if self._settle():
                if self.position.state.follows_scores:
                    return  # the next round agrees on the new weights' score: they may be evaluated first
            elif not self.runner.holds_enough() or self.alive.must_stop or self.tracker.is_behind:
                return

    def _wait_for(self, running: Future[Attempt]) -> None:
        """Wait for a round to end, but only for `LEAVING_S` once this peer should leave."""
        alive = self.alive
        leave_at = float("inf")
        step = self.position.history.step + 1
        others = len(self.quorum.expected)
        with self.events.waiting(
            f"a round for step {step} with {others} other peer(s)", self.runner.patience_s()
        ):
            while not wait([running], POLL_S).done and not alive.failure and time.monotonic() < leave_at:
                if alive.should_leave():
                    leave_at = min(leave_at, time.monotonic() + LEAVING_S)

    def _settle(self) -> bool:
        """Apply the round that is over, or take its work back; return whether it was applied."""
        assert self._running is not None
        running = self._running
        self._running = None
        try:
            self.last_round, outcome = running.result()
        except BaseException:
            self.position.method.take_back()
            raise
        if self.last_round is not None and not self.last_round.committed:
            self.quorum.note_failure()
            logger.debug(f"Round not committed: {self.last_round.reason}")
            self.position.method.take_back()
            return False
        self.my_step_samples, own = self.position.method.samples_aside, self.tracker.own_id
        brought = self.work.aside(self.my_step_samples)
        if outcome is None:  # a step alone; its random proof makes the history unique
            self.position.method.load()
            samples = {own: self.my_step_samples}
            proof = secrets.token_bytes(16)
            outcome = Outcome(
                samples,
                (own,),
                left_out={},
                states={},
                proof=proof,
                trained=(brought,),
                moves_buffers=True,
                is_empty=not self.position.method.weight_aside,
                score=self.position.score,
            )
        self.step_samples = sum(outcome.samples.values())
        history = self.position.after(self.step_samples, outcome.proof)
        self._take_note(outcome, history.step)
        self.position.commit(history, outcome)
        now = time.monotonic()
        if self.last_round is not None:
            blocked_s = self._blocked_s + now - self._blocked_since
            self.last_round = replace(self.last_round, blocked_seconds=blocked_s)
        self._blocked_s = 0.0
        self._blocked_since = now
        self.work.settle(self.my_step_samples, brought)
        if self.digests.claimed and len(outcome.group) > 1:
            self._make_equal()
        return True

    def _take_note(self, outcome: Outcome, step: int) -> None:
        """Record and report the facts about the members of a committed round."""
        for peer, why in outcome.left_out.items():
            who = "This peer's" if peer == self.tracker.own_id else f"Peer {peer}'s"
            self.events.warn(
                "left-out",
                f"{who} gradient was left out of step {self.position.history.step + 1}: {why}.",
                "look at that peer's data and learning rate; swarm.norm_limit says how far a norm may be off",
            )
        reported = dict.fromkeys((mate.peer_id for mate in self.tracker.mates if mate.samples), 0)
        brought = {peer: samples for peer, samples in outcome.samples.items() if samples}
        self.tracker.plausibility.commit(step, reported | brought, self.tracker.target_batch_size)
        self.digests.compare(outcome.states)
        if not self.position.pace.has_local_steps:
            self._tell_who_is_slow(outcome)

    def _tell_who_is_slow(self, outcome: Outcome) -> None:
        """Warn once about each other member that came without samples: its batches take too long."""
        for peer in idle_members(outcome) - self._told_slow - {self.tracker.own_id}:
            self._told_slow.add(peer)
            self.events.warn(
                "slow-peer",
                f"Peer {short_name(peer)} brought no samples to a step: it trains "
                f"{outcome.measured[peer].samples_per_second:.3g} samples per second, too slowly for steps "
                "that do not wait for it.",
                hint="nothing to do; for all to count: swarm.mode: diloco, or a larger target_batch_size",
            )

    def _make_equal(self) -> None:
        """Adopt the majority's weights: at once, but at most every `average_state_every` steps."""
        step = self.position.history.step
        # With local steps a difference would stay for ever: agreed weights always move by equal amounts.
        is_due = self.position.pace.has_local_steps or step >= self._equal_until
        if not is_due or not (holders := self.digests.take_holders()):
            return
        self._equal_until = step + self.settings.average_state_every
        try:
            is_equal = self.catch_up.load(holders=holders)
            why = "none of them gives its state"
        except RoundFailed as failure:
            is_equal = False
            why = failure.message
        if self.alive.should_leave():
            return
        done = "it has taken theirs over" if is_equal else f"it keeps its own for now: {why}"
        self.events.warn(
            "drift",
            f"This peer's weights at step {step} were not those of others; {done.rstrip('.')}.",
            "nothing to do if its processor is of another kind than theirs; else its memory may be damaged",
        )
