"""A peer finds a group and averages with it.

1. Read the reports: which peers hold this peer's state, and how many of them must come (`Quorum`).
2. Claim this peer's contribution and its state's digest, and let `RoundService` look for the group.
3. Read the reports repeatedly meanwhile: peers come, leave, or take the step without this one.
4. Retry a failed round while there is patience, which grows with each failed round. Warn the user if that
   takes long.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hivemind.utils import MPFuture, get_logger

from trahiv_cli.errors import RoundFailed
from trahiv_cli.progress.leases import Work
from trahiv_cli.progress.tracker import SwarmTracker
from trahiv_cli.rounds.claims import Claim, Exchange, Outcome, Round
from trahiv_cli.rounds.round_service import RoundInProgress, Rounds
from trahiv_cli.rounds.vote import NotCommitted
from trahiv_cli.shared_memory import JoinerActivity
from trahiv_cli.step.auto import Adaptation
from trahiv_cli.step.position import Position
from trahiv_cli.step.quorum import Quorum
from trahiv_cli.step.run_settings import RunSettings
from trahiv_cli.step.weight_digests import WeightDigests
from trahiv_cli.swarm.watchdog import Watchdog
from trahiv_cli.telemetry.events import Events, short_name

logger = get_logger(__name__)

REFRESH_S = 1.0  # time between two fetches of reports in a wait; in a large swarm it is longer
POLL_S = 0.1  # time between two checks whether a wait is over, or the user wants to leave
HELD_AT_MOST = 4  # rounds of samples that a peer holds, if training goes on during a round
SCHEMA_BYTES = 8
OVERTAKEN = "the others took this step without this peer"

Attempt = tuple[Round | None, Outcome | None]  # a round and its outcome: see `RoundRunner.average`


@dataclass(eq=False, kw_only=True)
class RoundRunner:
    """Finds a group and averages with it until there is an outcome, or no patience is left.

    `when_no_group_is_found` is called if no group is found for long; an exception that it raises ends
    training. `SwarmOptimizer` creates one runner and keeps it.
    """

    settings: RunSettings
    position: Position
    rounds: Rounds
    work: Work
    tracker: SwarmTracker
    quorum: Quorum
    digests: WeightDigests
    adaptation: Adaptation
    activity: JoinerActivity
    alive: Watchdog
    events: Events
    when_no_group_is_found: Callable[[], None]
    warns_after_s: float = 3.5  # and after twice the usual time of a search

    def __post_init__(self) -> None:
        self._usual_wait_s = 0.0  # from the start of a search to a commit

    def patience_s(self) -> float:
        """Return the seconds that one try looks for a group: more with each failed round for a step."""
        doublings = min(1 + self.quorum.tries, 16)
        return min(self.settings.averaging_s, 2**doublings * self.settings.matchmaking_s)

    def holds_enough(self) -> bool:
        """Whether this peer stops training until it has a group: a round has failed, or it is far ahead.

        If the others go on without it, all samples that it holds are lost; otherwise the next step is larger
        than requested.
        """
        method = self.position.method
        most = HELD_AT_MOST * method.steps * self.settings.target_batch_size
        return self.quorum.tries > 0 or method.samples_held >= most

    def average(self) -> Attempt:
        """Average the contribution that was set aside with the groupmates; retry while there is patience.

        Returns one of:
            - the round and its outcome, of a committed round;
            - the round and None: it was not committed, and patience is over;
            - None and an outcome, or None: this peer steps alone. The outcome is there for joiners to replay.

        Raises:
            NotFinite: this peer's weights are not finite.
        """
        self.tracker.refresh()
        started = time.monotonic()
        deadline = started + self.patience_s()
        reasons = dict[str, None]()
        while not self.quorum.may_step_alone:
            try:
                outcome = self.attempt(deadline)
            except RoundFailed as failure:
                reasons[failure.message] = None
                if isinstance(vote := failure.__cause__, NotCommitted) and vote.proof:
                    # Others may have committed the average that this peer voted for.
                    self.tracker.vouch(self.position.after(vote.samples, vote.proof))
            else:
                waited_s = time.monotonic() - self.quorum.missed_since
                self._usual_wait_s = max(0.9 * self._usual_wait_s, waited_s)
                attempt = Round(
                    samples=outcome.samples,
                    seconds=time.monotonic() - started,
                    bytes_sent=outcome.parts_sent,
                    bytes_received=outcome.parts_received,
                    committed=True,
                    reason="; ".join(filter(None, [outcome.reason, *reasons])),
                    left_out=outcome.left_out,
                )
                return attempt, outcome
            self._say_that_there_is_no_group()
            if self.quorum.may_step_alone:
                break
            if self.alive.must_stop or self.tracker.is_behind or time.monotonic() >= deadline:
                return Round({}, time.monotonic() - started, 0, 0, False, "; ".join(reasons)), None
            time.sleep(POLL_S)  # a round may fail at once, again and again
        return None, self._step_for_followers()

    def attempt(self, deadline: float) -> Outcome:
        """Look for a group, once, and average with it into the averaged tensors, or raise `RoundFailed`.

        The contribution that was set aside is unchanged in both cases.
        """
        if self.tracker.is_behind:
            raise RoundFailed(OVERTAKEN)
        patience = max(deadline - time.monotonic(), 1.5 * self.settings.matchmaking_s)
        running = self._start_round(self.quorum.expected, self.quorum.size, patience)
        refreshed_at = time.monotonic()
        try:
            while not is_over(running.outcome):
                if self.alive.failure:
                    raise RoundFailed(self.alive.failure)
                if running.has_group.done():
                    continue  # it ends by itself within the longest exchange, and can't be cancelled
                if self.alive.must_stop:
                    raise RoundFailed("this peer is leaving")
                if time.monotonic() < refreshed_at + max(REFRESH_S, self.tracker.fetch_every_s):
                    continue
                refreshed_at = time.monotonic()
                self.tracker.refresh()
                if self.tracker.is_behind:
                    raise RoundFailed(OVERTAKEN)
                if self.quorum.may_step_alone:
                    raise RoundFailed("the others have left")
                if time.monotonic() >= deadline:
                    raise RoundFailed("no group was found in time")
                self._say_that_there_is_no_group()
                self.expect_group(self.quorum.expected, self.quorum.size)
        finally:
            self.rounds.cancel(running)
        return _outcome_of(running)

    def _start_round(self, peers: Sequence[str], quorum: int, patience_s: float) -> RoundInProgress:
        method = self.position.method
        claim = Claim(
            samples=method.samples_aside,
            weight=method.weight_aside,
            state=self.digests.digest(method.held_in_common()),
            quorum=quorum,
            measured=self.adaptation.measured,
            trained=self.work.aside(method.samples_aside),
            moves_buffers=self.position.state.buffers.have_moved,
            score=self.position.score,
        )
        self.expect_group(peers, quorum)
        method.load()
        return self.rounds.start(claim, patience_s, self.exchange())

    def expect_group(self, peers: Sequence[str], quorum: int) -> None:
        """Expect `peers` in the next group; all its members need this history, and the same loaded model."""
        position = self.position
        clients = [peer.peer_id for peer in self.tracker.others if peer.is_client and peer.peer_id in peers]
        pace = hashlib.sha256(repr((position.pace, position.method.places)).encode()).digest()[:SCHEMA_BYTES]
        history = position.history.step.to_bytes(8, "big") + position.history.digest
        self.rounds.expect_group(peers, clients, quorum, history + pace + self.settings.schema)

    def exchange(self) -> Exchange:
        """Return the description of the next round from this history."""
        pace = self.position.pace
        method = self.position.method
        return Exchange(
            method.places,
            pace.codec,
            is_of_steps=pace.has_local_steps,
            after=self.position.history.digest,
            # A peer may hold more, since its last batch may be larger than a round.
            most_samples=2 * HELD_AT_MOST * method.steps * self.settings.target_batch_size,
        )

    def _step_for_followers(self) -> Outcome | None:
        """If a joiner is present, make this peer's solo step a round that the joiner can replay."""
        if not self.activity.is_there:
            return None
        try:
            running = self._start_round((), 1, self.settings.matchmaking_s)
            while not is_over(running.outcome) and not self.alive.failure:
                pass  # it ends by itself within the longest exchange
            return _outcome_of(running)
        except RoundFailed as failure:
            logger.warning(f"No peer will be able to replay the next step: {failure.message}")
            return None

    def _say_that_there_is_no_group(self) -> None:
        """Warn that this peer has been waiting for a group, and again whenever the wait has doubled."""
        waited = time.monotonic() - self.quorum.missed_since
        if waited < max(self.warns_after_s, 2 * self._usual_wait_s, 2 * self.quorum.said_after_s):
            return
        self.quorum.note_warning(waited)
        missing = {peer.peer_id for peer in self.tracker.others} | self.quorum.vanished
        names = ", ".join(map(short_name, sorted(missing)))
        solo_s = self.settings.rules.solo_after_s
        when = "never" if solo_s == float("inf") else f"after {solo_s:.0f} s"
        self.events.warn(
            "no-group",
            f"No group for step {self.position.history.step + 1} yet: {names} can't be reached or did not "
            "come. This peer waits, and tries again with longer times.",
            f"nothing to do; it steps alone {when} (swarm.solo)",
        )
        self.when_no_group_is_found()


def is_over(future: MPFuture[Any]) -> bool:
    """Wait for a request for a moment; return whether it is over, with success or without."""
    with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
        future.exception(timeout=POLL_S)
    return bool(future.done())


def _outcome_of(running: RoundInProgress) -> Outcome:
    if running.outcome.cancelled() or not running.outcome.done():
        raise RoundFailed("the round broke off")
    if error := running.outcome.exception():
        raise RoundFailed(str(error) or type(error).__name__) from error
    return running.outcome.result()
