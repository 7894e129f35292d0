"""A peer has a place in the run, and moves on: by its own round, by one of others, or to another state.

History, ledger and pace belong to the weights: they change together, under the state's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trahiv_cli.optim.history import History
from trahiv_cli.optim.leases import MOST_ROUNDS
from trahiv_cli.optim.ledger import Ledger, Spans
from trahiv_cli.optim.local_steps import LocalSteps
from trahiv_cli.optim.method import SharedGradients
from trahiv_cli.optim.pace import Pace
from trahiv_cli.optim.parts import Parts
from trahiv_cli.optim.rounds import Outcome

MOST_ROUNDS_AHEAD = 4 * MOST_ROUNDS
"""A member may bring samples so many rounds behind the last that is trained: what it leased when rounds were
longer, or more peers there."""


class Position:
    """Moves a peer from one committed state to the next."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._state = parts, parts.state
        self.method = self._make_method()
        self.step_taken = -1
        """The last step that this peer took itself, rather than went through after others or downloaded."""
        self.last_learning_rates: list[float] = [group["lr"] for group in self._state.optimizer.param_groups]
        """Learning rates of the last step, one per param group; before the first, those it will have."""
        self._state.set_pace = self.set_pace

    def _make_method(self) -> SharedGradients | LocalSteps:
        parts, limits, pace = self._parts, self._parts.limits, self._state.pace
        self._state.outer = self._state.agreed = None
        common = parts.gradients, parts.state, limits.max_grad_norm
        if not pace.has_local_steps:
            return SharedGradients(*common)
        return LocalSteps(
            *common,
            pace=pace,
            max_steps=limits.max_steps,
            target_batch_size=limits.target_batch_size,
            samples_of_swarm=lambda: parts.tracker.samples_accumulated,
        )

    @property
    def history(self) -> History:
        """What was committed on the way to the weights that this peer holds."""
        return self._state.history

    @property
    def pace(self) -> Pace:
        """The pace of the round after that."""
        return self._state.pace

    def after(self, samples: int, proof: bytes) -> History:
        """Return the history after the next round; see `History.extend`."""
        return self.history.extend(samples=samples, proof=proof, steps=self.method.steps)

    def enter(self, history: History, ledger: Ledger | None = None) -> None:
        """Take part from a history on, with the state as it is now; see `SwarmOptimizer.enter_step`."""
        with self._state.lock_state:
            self._state.local_epoch, self._state.history = history.step, history
            self._state.ledger = ledger or self._state.ledger
            self._state._update_scheduler()
        self._parts.equality.forget()
        with self._parts.tracker.pause_updates():
            self._parts.tracker.update_history(history, is_next=False)
        self._parts.tracker.announce()
        self._begin_step()
        if not self._state.client_mode:
            self._state.allow_state_sharing = True

    def commit(self, history: History, outcome: Outcome) -> None:
        """Take the step of a round of this peer's, perhaps of it alone."""
        with self._state.lock_state:  # a joiner gets the pace that belongs to the state
            self._move(history, outcome.trained, self.method.apply)
            self.step_taken = history.step
            self._parts.adaptation.measure(outcome)
            reason = self._adapt(outcome)
        self._tell(reason)

    def follow(self, history: History, outcome: Outcome) -> None:
        """Take the step of a round that others had: of this peer's work, only its own steps stay."""
        with self._state.lock_state:
            self._move(history, outcome.trained, self.method.follow)
            self.step_taken = -1
            reason = self._adapt(outcome)
        self._tell(reason)
        self._parts.work.leave_to_others(self.method.samples_held)
        self._parts.tracker.companions = frozenset(outcome.group)

    def adopt(self) -> None:
        """Go on from the state that was downloaded; what was accumulated for older weights is dropped."""
        self.method.reset()
        self._parts.work.leave_to_others(self.method.samples_held)
        if self.history.step:  # else there is nothing yet to hold to
            self._parts.tracker.doubts.join()
        self.enter(self.history)
        self._parts.tracker.companions, self.step_taken = frozenset({self._state.donor}) - {""}, -1

    def set_pace(self, pace: Pace) -> None:
        """Go over to another pace, between two rounds, as all peers do.

        From local steps to common gradients only with a state that is adopted next: inner optimizers differ.
        """
        if pace == self.pace:
            return
        before, self._state.pace = self.method, pace
        self._parts.equality.forget()
        if isinstance(before, LocalSteps) and pace.has_local_steps:
            before.set_pace(pace)
        elif isinstance(before, LocalSteps) or pace.has_local_steps:
            self.method = self._make_method()
            self.method.last_grad_norm = before.last_grad_norm
            self.method.dropped_samples = before.dropped_samples

    def _move(self, history: History, trained: Sequence[Spans], move: Callable[[], None]) -> None:
        """Move the weights by what the averager's tensors hold, and all that belongs to them."""
        state, parts = self._state, self._parts
        self.last_learning_rates = [group["lr"] for group in state.optimizer.param_groups]
        with parts.tracker.pause_updates(), state.lock_state:
            round_size = self.method.steps * parts.limits.target_batch_size * parts.work.unit
            state.ledger = state.ledger.extend(trained, MOST_ROUNDS_AHEAD * round_size)
            move()
            parts.equality.forget(self.method.places)
            state.local_epoch, state.history = history.step, history
            state._update_scheduler()
            parts.tracker.update_history(history, self.method.samples_held)
        self._begin_step()

    def _adapt(self, outcome: Outcome) -> str:
        """Go over to the pace that follows from what a round's members had measured before; say why."""
        pace, reason = self._parts.adaptation.choose(self.pace, outcome)
        if pace != self.pace:
            self.set_pace(pace)
            self._begin_step()
        return reason

    def _tell(self, reason: str) -> None:
        """Tell of the pace, without the lock that joiners wait for: whoever listens may be slow."""
        if reason:
            message = f"From step {self.history.step} on: {reason}"
            self._parts.events.emit("pace", message=message, **self.pace.to_wire())

    def _begin_step(self) -> None:
        """Forget what was known of the step before."""
        parts, method = self._parts, self.method
        parts.company.begin_step()
        parts.equality.begin_step()
        method.begin(self.history.step, 1 + len(parts.tracker.others))
        parts.tracker.steps_a_round = method.steps
        parts.tracker.target_batch_size = method.steps * parts.limits.target_batch_size
