"""A peer steps: it counts batches, begins a round when one is due, and applies a round that is over.

1. A peer counts and reports each batch (`step`).
2. If the swarm holds the samples of a round, the peer sets its work aside and begins a round in a background
   thread (`GroupSeeker`); training waits for it or goes on.
3. A committed round moves the weights and the history (`Position`). A failed one gives the work back, for the
   next try.
4. If members of the group had different weights before the round, this peer adopts the majority's weights.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import Future, wait
from dataclasses import replace

from hivemind.utils import get_logger

from trahiv_cli.background import in_background
from trahiv_cli.errors import RoundFailed
from trahiv_cli.rounds.claims import Outcome, Round
from trahiv_cli.step.auto import idle_members
from trahiv_cli.step.catch_up import CatchUp
from trahiv_cli.step.lateness import Lateness, Moment
from trahiv_cli.step.parts import Parts
from trahiv_cli.step.position import Position
from trahiv_cli.step.seeker import POLL_S, Attempt, GroupSeeker
from trahiv_cli.telemetry.events import short_name

logger = get_logger(__name__)

LEAVING_S = 10.0
"""Seconds that a leaving peer waits for an exchange to end."""


class Stepper:
    """Takes the steps of a peer's optimizer. `SwarmOptimizer` creates one and keeps it."""

    def __init__(self, parts: Parts, position: Position, seeker: GroupSeeker, catch_up: CatchUp) -> None:
        self._parts = parts
        self._position = position
        self._seeker = seeker
        self._catch_up = catch_up
        self._tracker = parts.tracker
        self.last_round: Round | None = None
        """The last round that was tried; None while this peer is alone."""
        self.step_samples = self.my_step_samples = 0
        """Samples that went into the last round, of all peers and of this one."""
        self._running: Future[Attempt] | None = None
        self._goes_on = False  # whether training goes on during the present round
        self.lateness = Lateness(parts.events)
        self._is_fresh = True  # whether the batch in training is the first one with its state
        self._told_slow: set[str] = set()
        self._equal_until = 0  # before this step, this peer adopts no more weights to be equal
        self._blocked_s = self._blocked_since = 0.0

    def step(self, num_samples: int) -> None:
        """Count one local batch; see `SwarmOptimizer.step`, also for the errors."""
        parts = self._parts
        method = self._position.method
        num_samples = parts.gradients.announced_samples or num_samples
        seconds = parts.adaptation.end_batch(num_samples)
        is_behind = self._running is None and self._tracker.is_behind
        if is_behind and not self.lateness.is_hopeless and self._come(num_samples, seconds):
            return
        if self._running is None and not is_behind:
            self.lateness.note_in_time(self._moment_before(seconds))
        dropped = method.dropped_samples
        before = self._position.history
        method.account(num_samples)
        parts.work.count_announced(num_samples)
        parts.work.drop(method.samples_held, are_useless=method.dropped_samples > dropped)
        self._report(method.samples_held)
        self._blocked_since = time.monotonic()
        try:
            if is_behind and self.lateness.is_hopeless:
                self._catch_up.wait_for_longer_steps(self.lateness.batch_s, self.lateness.next_pause_s())
                self._come(num_samples, seconds)
            self._advance()
        finally:
            method = self._position.method
            parts.work.drop(method.samples_held, are_useless=method.dropped_samples > dropped)
            self._blocked_s += time.monotonic() - self._blocked_since
            self._is_fresh = self._position.history != before
            parts.adaptation.begin_batch()

    def _come(self, num_samples: int, seconds: float) -> bool:
        """Catch up with the swarm after a batch; return whether the batch's gradient is useless now."""
        began = self._moment_before(seconds)
        ended = Moment(time.monotonic(), self._tracker.target.step)
        if not self._catch_up.come():
            return False
        # This batch's gradient belonged to weights that the swarm has left.
        self._parts.gradients.forget_announced()
        if not self.lateness.is_hopeless:  # otherwise it was counted, and was dropped
            self._parts.work.forget_announced(num_samples)
        is_to_attend = self.lateness.is_hopeless and self._parts.settings.auto_share is not None
        if self._is_fresh and seconds:
            usual_s = num_samples * self._parts.adaptation.seconds_per_sample
            is_to_attend |= self.lateness.note_late(num_samples, usual_s, began, ended)
        self._is_fresh = True
        if is_to_attend:
            self._attend()
        self._parts.adaptation.begin_batch()
        return True

    def _moment_before(self, seconds: float) -> Moment:
        """Return when the batch that took `seconds` began, with this peer's step."""
        return Moment(time.monotonic() - seconds, self._position.history.step)

    def _attend(self) -> None:
        """Take part in a round without samples: all members learn this peer's speed from its claim."""
        self._blocked_since = time.monotonic()
        self._parts.adaptation.measure_speed()
        for _ in range(16):  # tries: the others do not wait for a peer that was absent
            self._catch_up.wait_for_round()
            self._advance()
            if not self._tracker.is_behind or self._parts.alive.should_leave():
                return
            self._catch_up.come()

    def start_batch_over(self, num_samples: int) -> None:
        """See `SwarmOptimizer.start_batch_over`."""
        self._parts.work.forget_announced(-num_samples)
        self._parts.gradients.reset()
        for param in self._parts.gradients.parameters:
            param.grad = None
        held = self._position.method.samples_held
        self._parts.work.drop(held)
        self._report(held)

    def stop(self) -> None:
        """End a running round after its exchange; the model then has the weights of this peer's history."""
        if self._running is not None:
            wait([self._running], LEAVING_S)
            self._position.method.take_back()
            self._running = None

    def _report(self, num_samples: int) -> None:
        self._tracker.report_local_progress(self._position.history.step, num_samples)

    def _advance(self) -> None:
        """Begin a round if one is due, apply or undo one that is over, and wait if training can't go on."""
        parts = self._parts
        position = self._position
        seeker = self._seeker
        while True:
            if self._running is None:
                is_at_end = position.history.step >= parts.settings.max_steps
                if is_at_end or not self._tracker.ready_to_update_epoch:
                    return
                # Alone there is no network wait to overlap, and delaying the step would change it.
                self._goes_on = position.pace.is_background and not parts.company.may_step_alone
                if not position.method.set_aside(goes_on=self._goes_on):
                    self._report(0)
                    return
                parts.state.buffers.set_aside()
                parts.company.missed_since = min(parts.company.missed_since, time.monotonic())
                self._running = in_background(seeker.average)
            if not self._goes_on or seeker.holds_enough():
                self._wait_for(self._running)
            if not self._running.done():
                return
            if not self._settle() and (
                not seeker.holds_enough() or parts.alive.must_stop or self._tracker.is_behind
            ):
                return

    def _wait_for(self, running: Future[Attempt]) -> None:
        """Wait for a round to end, but only for `LEAVING_S` once this peer should leave."""
        alive = self._parts.alive
        leave_at = float("inf")
        step = self._position.history.step + 1
        others = len(self._parts.company.groupmates)
        with self._parts.events.waiting(
            f"a round for step {step} with {others} other peer(s)", self._seeker.patience_s()
        ):
            while not wait([running], POLL_S).done and not alive.ailment and time.monotonic() < leave_at:
                if alive.should_leave():
                    leave_at = min(leave_at, time.monotonic() + LEAVING_S)

    def _settle(self) -> bool:
        """Apply the round that is over, or take its work back; return whether it was applied."""
        assert self._running is not None
        parts = self._parts
        position = self._position
        running = self._running
        self._running = None
        try:
            self.last_round, outcome = running.result()
        except BaseException:
            position.method.take_back()
            raise
        if self.last_round is not None and not self.last_round.committed:
            parts.company.tries += 1
            logger.debug(f"Round not committed: {self.last_round.reason}")
            position.method.take_back()
            return False
        self.my_step_samples, own = position.method.samples_aside, self._tracker.own_id
        brought = parts.work.aside(self.my_step_samples)
        if outcome is None:  # a step alone; its random proof makes the history unique
            position.method.load()
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
                is_empty=not position.method.weight_aside,
            )
        self.step_samples = sum(outcome.samples.values())
        history = position.after(self.step_samples, outcome.proof)
        self._take_note(outcome, history.step)
        position.commit(history, outcome)
        now = time.monotonic()
        if self.last_round is not None:
            blocked_s = self._blocked_s + now - self._blocked_since
            self.last_round = replace(self.last_round, blocked_seconds=blocked_s)
        self._blocked_s = 0.0
        self._blocked_since = now
        parts.work.settle(self.my_step_samples, brought)
        if parts.equality.claimed and len(outcome.group) > 1:
            self._make_equal()
        return True

    def _take_note(self, outcome: Outcome, step: int) -> None:
        """Record and report the facts about the members of a committed round."""
        for peer, why in outcome.left_out.items():
            who = "This peer's" if peer == self._tracker.own_id else f"Peer {peer}'s"
            self._parts.events.warn(
                "left-out",
                f"{who} gradient was left out of step {self._position.history.step + 1}: {why}.",
                "look at that peer's data and learning rate; swarm.norm_limit says how far a norm may be off",
            )
        reported = dict.fromkeys((mate.peer_id for mate in self._tracker.mates if mate.samples), 0)
        brought = {peer: samples for peer, samples in outcome.samples.items() if samples}
        self._tracker.doubts.commit(step, reported | brought, self._tracker.target_batch_size)
        self._parts.equality.compare(outcome.states)
        if not self._position.pace.has_local_steps:
            self._tell_who_is_slow(outcome)

    def _tell_who_is_slow(self, outcome: Outcome) -> None:
        """Warn once about each other member that came without samples: its batches take too long."""
        for peer in idle_members(outcome) - self._told_slow - {self._tracker.own_id}:
            self._told_slow.add(peer)
            self._parts.events.warn(
                "slow-peer",
                f"Peer {short_name(peer)} brought no samples to a step: it trains "
                f"{outcome.measured[peer].samples_per_second:.3g} samples per second, too slowly for steps "
                "that do not wait for it.",
                hint="nothing to do; for all to count: swarm.mode: diloco, or a larger target_batch_size",
            )

    def _make_equal(self) -> None:
        """Adopt the majority's weights: at once, but at most every `average_state_every` steps."""
        parts = self._parts
        step = self._position.history.step
        # With local steps a difference would stay for ever: agreed weights always move by equal amounts.
        is_due = self._position.pace.has_local_steps or step >= self._equal_until
        if not is_due or not (holders := parts.equality.restore()):
            return
        self._equal_until = step + parts.settings.average_state_every
        try:
            is_equal = self._catch_up.load(holders=holders)
            why = "none of them gives its state"
        except RoundFailed as failure:
            is_equal = False
            why = failure.message
        if parts.alive.should_leave():
            return
        done = "it has taken theirs over" if is_equal else f"it keeps its own for now: {why}"
        parts.events.warn(
            "drift",
            f"This peer's weights at step {step} were not those of others; {done.rstrip('.')}.",
            "nothing to do if its processor is of another kind than theirs; else its memory may be damaged",
        )
