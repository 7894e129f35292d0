"""The position of a peer in the run. It moves by its own round, by a replayed round, or to another state.

History, ledger and pace belong to the weights: they change together, under the state's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trahiv_cli.progress.history import History
from trahiv_cli.progress.leases import MOST_ROUNDS, Work
from trahiv_cli.progress.ledger import Ledger
from trahiv_cli.progress.pace import Pace
from trahiv_cli.progress.scores import MOST_SCORE
from trahiv_cli.progress.tracker import SwarmTracker
from trahiv_cli.rounds.claims import Outcome
from trahiv_cli.state.peer_state import PeerState
from trahiv_cli.state.state_service import StateExchange
from trahiv_cli.step.auto import Adaptation
from trahiv_cli.step.gradients import GradientBuffer
from trahiv_cli.step.local_steps import LocalSteps
from trahiv_cli.step.method import SharedGradients
from trahiv_cli.step.quorum import Quorum
from trahiv_cli.step.run_settings import RunSettings
from trahiv_cli.step.weight_digests import WeightDigests
from trahiv_cli.telemetry.events import Events

MOST_ROUNDS_AHEAD = 4 * MOST_ROUNDS
"""A member may bring samples this number of rounds beyond the last trained position: it may have leased them
when rounds were longer or there were more peers."""


@dataclass(eq=False, kw_only=True)
class Position:
    """Moves a peer from one committed state to the next. `SwarmOptimizer` creates one and keeps it."""

    settings: RunSettings
    state: PeerState
    gradients: GradientBuffer
    work: Work
    tracker: SwarmTracker
    quorum: Quorum
    digests: WeightDigests
    adaptation: Adaptation
    exchange: StateExchange
    events: Events

    def __post_init__(self) -> None:
        self._committed = self.state.committed
        self.method = self._make_method()
        self.step_taken = -1
        """The present step if this peer took it itself; -1 if it was replayed or downloaded."""
        self.last_learning_rates: list[float] = [group["lr"] for group in self.state.optimizer.param_groups]
        """Learning rates of the last step, one per param group; before any step, the rates of the first."""
        self.score: float | None = None
        """See `note_score`; None before the evaluation."""

    def _make_method(self) -> SharedGradients | LocalSteps:
        self.state.set_agreed(None)
        shared = self.gradients, self.state, self.settings
        if self.pace.has_local_steps:
            return LocalSteps(*shared, self.tracker, self.work)
        return SharedGradients(*shared)

    @property
    def history(self) -> History:
        """The committed steps behind this peer's weights."""
        return self._committed.now.history

    @property
    def pace(self) -> Pace:
        """The pace of the next round."""
        return self._committed.now.pace

    def after(self, samples: int, proof: bytes) -> History:
        """Return the history after the next round; see `History.extend`."""
        return self.history.extend(samples=samples, proof=proof, steps=self.method.steps)

    def enter(self, history: History, ledger: Ledger | None = None) -> None:
        """Take part from `history` on, with the present state, which others can download from now on.

        Call it after loading a checkpoint or at a fresh start. Without `ledger`, this peer's ledger stays.
        """
        with self._committed.lock:
            self._committed.change(history=history, ledger=ledger or self._committed.now.ledger)
            self.state.move_schedule(history.step)
        self.digests.forget()
        with self.tracker.pause_updates():
            self.tracker.begin_step(self.method.samples_held, is_next=False)
        self.tracker.announce()
        self._begin_step()
        self.exchange.allow(True)

    def commit(self, history: History, outcome: Outcome) -> None:
        """Take the step of a round of this peer, which may have been alone in it."""
        self._move(history, outcome, self.method.apply)
        self.step_taken = history.step
        self.adaptation.measure(outcome)

    def follow(self, history: History, outcome: Outcome) -> None:
        """Take the step of a round that others committed. Of this peer's work, only its local steps stay.

        They do not stay if this peer was in the round: it brought some of them, and did not learn that the
        round was committed.
        """
        self._move(history, outcome, self.method.follow)
        if isinstance(self.method, LocalSteps) and self.tracker.own_id in outcome.samples:
            self.method.go_back()
        self.step_taken = -1
        self.work.leave_to_others(self.method.samples_held)

    def adopt(self) -> None:
        """Continue from the downloaded state; drop the gradients accumulated for older weights."""
        self.method.reset()
        self.work.leave_to_others(self.method.samples_held)
        if self.history.step:  # at step 0 there is no trained state yet
            self.tracker.plausibility.join()
        self.enter(self.history)
        self.step_taken = -1

    def note_score(self, score: float) -> None:
        """Note the score of this peer's evaluation of the present step, for the next round's claim.

        A score that is not a number, or beyond `MOST_SCORE`, counts as none.
        """
        if abs(score) <= MOST_SCORE:
            self.score = score

    def set_pace(self, pace: Pace) -> None:
        """Change to another pace between two rounds, as all peers do.

        After a change from local steps to shared gradients a state must be adopted next: inner optimizers
        differ.
        """
        if pace == self.pace:
            return
        before = self.method
        self._committed.change(pace=pace)
        self.digests.forget()
        if isinstance(before, LocalSteps) and pace.has_local_steps:
            before.set_pace(pace)
        elif isinstance(before, LocalSteps) or pace.has_local_steps:
            self.method = self._make_method()
            self.method.continue_from(before)

    def _move(self, history: History, outcome: Outcome, move: Callable[..., None]) -> None:
        """Move the weights by the averages in the averaged tensors, and all that belongs to the weights.

        The next pace follows from the measurements that the round's members claimed before it.
        """
        with self._committed.lock.changing():  # a joiner gets the pace that belongs to the state
            with self.tracker.pause_updates():
                if outcome.score is not None:
                    self.state.judge(outcome.score)
                self.last_learning_rates = [group["lr"] for group in self.state.optimizer.param_groups]
                round_size = self.method.steps * self.settings.target_batch_size * self.work.unit
                ledger = self._committed.now.ledger.extend(outcome.trained, MOST_ROUNDS_AHEAD * round_size)
                move(is_empty=outcome.is_empty)
                if outcome.moves_buffers and not outcome.is_empty:
                    is_last = history.step >= self.settings.max_steps
                    self.state.buffers.apply(keeps_own=self.pace.is_background and not is_last)
                self.digests.forget(self.method.held_in_common())
                self._committed.change(history=history, ledger=ledger, group=frozenset(outcome.group))
                self.state.move_schedule(history.step)
                self.tracker.begin_step(self.method.samples_held)
            pace, reason = self.adaptation.choose(self.pace, outcome)
            self.set_pace(pace)
            self._begin_step()
        if reason:  # without the lock that joiners wait for: a listener may be slow
            message = f"From step {history.step} on: {reason}"
            self.events.emit("pace", message=message, **pace.to_wire())

    def _begin_step(self) -> None:
        """Reset the data about the previous step."""
        method = self.method
        self.score = None
        self.quorum.begin_step()
        method.begin(self.history.step, 1 + len(self.tracker.others))
        self.tracker.expect_steps(method.steps, method.steps * self.settings.target_batch_size)
