"""The optimizer that a peer steps: it trains, and averages with the others when a round is due.

A peer works until the swarm holds the samples of a round, averages what it worked for (`method`) with all
peers of the same history, and moves its weights once most of them hold the same average; training waits for
that, or goes on, as the `pace` says. A round that is not committed changes nothing: the work stays, and goes
into the next try. A peer that missed a round takes over the state of those that did not, and so does the
smaller half of a swarm that was cut in two, once enough of the others say that it is theirs (`majority`).

A peer steps alone where it is alone. Where others are alive, or most of its last group vanished without a
goodbye, it goes on working, up to a bound, for as long as `RoundRules.solo_after_s`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import hivemind
import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.utils import MPFuture, get_logger

from trahiv_cli.errors import NotFinite, PeerBroken, RoundFailed
from trahiv_cli.optim.auto import RECENT, Measured, choose
from trahiv_cli.optim.averagers import ExactGradientAverager, ExactStateAverager, common_digest
from trahiv_cli.optim.background import Background
from trahiv_cli.optim.ballot import NotCommitted, digest_of, joint_digest
from trahiv_cli.optim.history import History
from trahiv_cli.optim.leases import MOST_ROUNDS, Leases, ShardLeases
from trahiv_cli.optim.ledger import SHARD, Ledger, Spans
from trahiv_cli.optim.majority import went_by
from trahiv_cli.optim.method import LocalSteps, Method, SharedGradients
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.optim.progress import PeerProgress, SwarmTracker
from trahiv_cli.optim.rounds import (
    ANSWER_S,
    Exchange,
    Outcome,
    Round,
)
from trahiv_cli.optim.rules import DEFAULT_RULES, RoundRules
from trahiv_cli.optim.soundness import USELESS_AT_MOST, Claim, are_finite, state_to_adopt
from trahiv_cli.optim.statistics import EightBitStatistics
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.corrections import UNREACHABLE, drain
from trahiv_cli.swarm.download import MAX_DONORS, Report
from trahiv_cli.swarm.host_copies import host_values
from trahiv_cli.swarm.snapshot import JoinerActivity
from trahiv_cli.swarm.vitals import Organ, Vitals
from trahiv_cli.telemetry.events import Events
from trahiv_cli.telemetry.names import short_name

logger = get_logger(__name__)

POLL_S = 0.1
"""How often a wait looks whether it is over, or whether the user wants to leave."""

REFRESH_S = 1.0
"""How often a peer that waits for its group asks the DHT who is still there; in a large swarm less often."""

SAY_AFTER_S = 3.5
"""A peer that has been looking for a group for so long says so, unless it usually takes half as long."""

MOST_ROUNDS_AHEAD = 4 * MOST_ROUNDS
"""A member may bring samples so many rounds behind the last that is trained: what it leased when rounds were
longer, or more peers there."""

ACCUMULATE_AT_MOST = 4
"""A peer without a group trains on until it holds so many times `target_batch_size` samples."""

STATE_DIGEST_BYTES = SCHEMA_BYTES = 8

DISTURBED_AT_MOST = 50
"""Rounds on end whose exchanges are not measured, because somebody was sent a state meanwhile."""

BATCHES_MEASURED = 20
"""Batches whose median is this peer's pace: one that comes after an evaluation does not count."""

LEAVING_S = 10.0
"""A peer that wants to leave waits so long for parts that are being exchanged."""

ENDLESS = 2**31 - 1
"""Steps of a run without an end of its own."""

FOLLOWED_AT_MOST = 8
"""Peers that are asked for one round; those that gave this peer its state have kept it, first of all."""

BELIEVED_S, SAID_S = 10.0, 60.0
"""A peer that has downloaded a state waits so long for others to say whether it is theirs: their reports may
be as old. If nobody does but who gave it, it waits longer: they say so before their next round."""

DONOR_PAUSE_S = 1.0
"""Between two tries to download the state; upstream has none and flooded a donor 2,230 times in 47 s."""


Attempt = tuple[Round | None, Outcome | None]
"""A round and what it gave: see `SwarmOptimizer._average`."""


class Home(Organ, Protocol):
    """What is needed of a `Node`."""

    def require_membership(self) -> None:
        """See `Node.require_membership`."""

    def is_out(self, peer_id: str) -> bool:
        """See `Node.is_out`."""


class SwarmOptimizer(hivemind.Optimizer):
    """`hivemind.Optimizer` with exact rounds that either happen for a peer or do not.

    Use it like a torch optimizer: `step()` after each local backward pass. `local_epoch` is the swarm
    step reached. Keywords are `hivemind.Optimizer`'s; those that do harm are refused in `assemble`.

    Args:
        pace: what is averaged, and how often; in mode auto, to begin with.
        auto_share: the share of its time that training may wait for rounds; None: the pace is not changed.
        max_steps: where the run ends, in steps of the swarm.
        max_grad_norm: the gradient of an inner optimizer's step is scaled down to this norm; 0 leaves it.
        schema: peers average only with those that have the same.
        rules: how rounds are judged, and when this peer may step alone.
        events: told about waits and trouble.
        when_no_group_is_found: called in the thread that trains when no group has been found for long; what
            it raises ends training.
        should_leave: asked during waits; True makes a wait end early with nothing changed.
        home: where the DHT lives; it and the averagers are watched then.
        keywords: see `hivemind.Optimizer`.
    """

    dht: hivemind.DHT
    tracker: SwarmTracker

    def __init__(
        self,
        *,
        dht: hivemind.DHT,
        pace: Pace = DEFAULT_PACE,
        auto_share: float | None = None,
        max_steps: int = ENDLESS,
        max_grad_norm: float = 0.0,
        schema: bytes = b"",
        rules: RoundRules = DEFAULT_RULES,
        events: Events | None = None,
        when_no_group_is_found: Callable[[], None] = lambda: None,
        should_leave: Callable[[], bool] = lambda: False,
        home: Home | None = None,
        averager_opts: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self._home, self._vitals = home, Vitals(())
        self.events, self.should_leave = events or Events(), should_leave
        self._when_no_group_is_found = when_no_group_is_found
        judged_by = repr((rules.norm_limit, rules.robust_mean, pace, auto_share)).encode()
        self._schema = schema + hashlib.sha256(judged_by).digest()[:SCHEMA_BYTES]
        self._rules, self.pace, self.max_steps = rules, pace, max_steps
        self._auto_share, self._max_grad_norm = auto_share, max_grad_norm
        self._measured = Measured()
        self._rates: deque[float] = deque(maxlen=RECENT)
        self._num_disturbed = 0
        self._seconds_per_sample: deque[float] = deque(maxlen=BATCHES_MEASURED)
        self._left_step_at: float | None = None
        self._has_told_pace = False
        self.last_round: Round | None = None
        """The last round that was tried; None while this peer is alone."""
        self.step_samples = self.my_step_samples = 0
        """Samples that went into the last round, of all peers and of this one."""
        self.step_taken = -1
        """The last step that this peer took itself, rather than downloaded."""
        self._companions: frozenset[str] = frozenset()
        self._donors_asked: list[str] = []
        self._wished = History()
        """The state that the present download is to lead to, or beyond."""
        self._disbelieved: set[str] = set()
        """Ids of the peers that gave a state which was not believed, since the present download began."""
        self._without_group_since = float("inf")
        self._tries = 0
        self._blocked_since = 0.0
        self._usual_wait_s = self._blocked_s = self._heard_at = 0.0
        self._has_drifted = False
        self._said_so_after_s = 0.0
        """How long this peer had been waiting for a group when it last said so."""
        self._state_digest = b""
        self._digests: dict[int, bytes] = {}
        """Digests of the tensors that are held in common, by place, unless they have changed since."""
        self._states: dict[str, bytes] = {}
        """What the members of the last round that found them unequal claimed to hold, by id."""
        self._running: Background[Attempt] | None = None
        self._goes_on = False
        """Whether training goes on during the present round."""
        self._notices: deque[Callable[[], None]] = deque()
        self._leases: Leases | None = None
        self._announced: list[int] = []
        self._work: list[int] = []
        """Positions whose gradients or own steps this peer holds, in the order in which they came."""
        self._useless: list[int] = []
        self._closed = False
        self._interest = JoinerActivity()
        options = averager_opts or {}
        try:
            super().__init__(
                dht=dht,
                # Not shared before this peer has a state worth sharing (`enter_step`); initialized already
                # by `assemble.initialize_state`, also where that leaves no tensors, as for plain SGD.
                averager_opts=options | {"allow_state_sharing": False, "initialize_optimizer": False},
                grad_averager_factory=partial(
                    ExactGradientAverager, rules=rules, interest=self._interest, **options
                ),
                **keywords,
            )
        except BaseException:
            self.shutdown()  # the tracker's threads would keep the process from ever ending
            raise
        self._method = self._make_method()
        self.state_averager.pace, self.state_averager.set_pace = pace, self.set_pace
        self.state_averager.holds_alone = lambda: not self._groupmates() and not self._vanished()
        self.state_averager.note_given, self.state_averager.is_believed = self._note_given, self._is_believed
        self.last_learning_rates: list[float] = [group["lr"] for group in self.opt.param_groups]
        """Learning rates of the last step, one per param group; before the first, those it will have."""
        self.grad_averager.name = "what averages gradients in the DHT's process"
        self.state_averager.name = "what gives the state in the DHT's process"
        self._watch()

    # -- what hivemind.Optimizer builds ------------------------------------------------------------

    def _make_progress_tracker(self, target_batch_size: int, **keywords: Any) -> SwarmTracker:
        return SwarmTracker(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            private_key=self.dht.signing_key,
            is_out=self._is_out,
            start=True,
            **keywords,
        )

    def _is_out(self, peer_id: str) -> bool:
        return self._home is not None and self._home.is_out(peer_id)

    def _make_state_averager(self, **keywords: Any) -> ExactStateAverager:
        return ExactStateAverager(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            offload_optimizer=self.offload_optimizer,
            custom_gradients=self.offload_optimizer,
            status_loglevel=self.status_loglevel,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.client_mode,
            auxiliary=self.auxiliary,
            interest=self._interest,
            # Each peer's inner optimizer has a state of its own in modes with local steps.
            statistics_codec=EightBitStatistics() if self.pace.has_local_steps else None,
            start=True,
            **keywords,
        )

    def _make_method(self) -> Method:
        parts = (self.grad_averager, self.state_averager, self._max_grad_norm)
        self.state_averager.outer = self.state_averager.agreed = None
        if not self.pace.has_local_steps:
            return SharedGradients(*parts)
        return LocalSteps(
            *parts,
            pace=self.pace,
            max_steps=self.max_steps,
            target_batch_size=self.target_batch_size,
            samples_of_swarm=lambda: self.tracker.samples_accumulated,
        )

    def set_pace(self, pace: Pace) -> None:
        """Go over to another pace, between two rounds. The caller sees to it that all peers do.

        From local steps to common gradients only with a state that is adopted next: each peer's inner
        optimizer has another one.
        """
        if pace == self.pace:
            return
        before, self.pace, self._digests = self._method, pace, {}
        self.state_averager.pace = pace
        if isinstance(before, LocalSteps) and pace.has_local_steps:
            before.set_pace(pace)
        elif isinstance(before, LocalSteps) or pace.has_local_steps:
            self._method = self._make_method()
            self.grad_averager.release_spare()
            self._method.last_grad_norm = before.last_grad_norm
            self._method.dropped_samples = before.dropped_samples

    @property
    def history(self) -> History:
        """What was committed on the way to the weights that this peer holds."""
        return self.state_averager.history

    @property
    def ledger(self) -> Ledger:
        """The samples that the rounds of this history have trained."""
        return self.state_averager.ledger

    @property
    def data_figures(self) -> dict[str, int] | None:
        """How much of the data was trained, where it is divided.

        `passes` are complete; `covered` samples of those after them, of `samples` in each, or `shards` of a
        stream; `duplicates` were trained twice in a pass; `lost` positions (or shards) this peer had leased
        when others took them over.
        """
        if self._leases is None:
            return None
        passes, covered = self.ledger.passes(self._leases.num_samples)
        is_stream = isinstance(self._leases, ShardLeases)
        unit = SHARD if is_stream else 1
        return {
            "passes": passes,
            "covered": covered // unit,
            "shards" if is_stream else "samples": self._leases.num_samples // unit,
            "duplicates": self.ledger.duplicates,
            "lost": self._leases.lost,
        }

    @property
    def last_grad_norm(self) -> float | None:
        """Norm of the gradient of the inner optimizer's last step, before clipping; None before the first."""
        return self._method.last_grad_norm

    @property
    def dropped_samples(self) -> int:
        """Samples whose gradients were not finite, since the start."""
        return self._method.dropped_samples

    # -- this peer's processes ---------------------------------------------------------------------

    def _watch(self) -> None:
        if self._home is not None:
            organs = (self._home, self.grad_averager, self.state_averager)
            self._vitals = Vitals(organs, self._say_that_it_is_ill)
            self._vitals.start()

    def _say_that_it_is_ill(self, ailment: str) -> None:
        self.events.warn(
            "broken",
            f"{ailment[0].upper()}{ailment[1:]}; this peer saves a checkpoint and ends.",
            "nothing to do where a command trains: it starts again by itself, three times in ten minutes",
        )

    def _require_alive(self) -> None:
        """Refuse to train on without one of this peer's processes, or as nobody's member.

        Raises:
            PeerBroken: a process has ended or stands still.
            NotAdmitted: the swarm's owner has taken this peer out.
        """
        if self._home is not None:
            self._home.require_membership()
        if (ailment := self._vitals.ailment) and not self.should_leave():
            raise PeerBroken(
                f"{ailment[0].upper()}{ailment[1:]}.",
                hint="the same command resumes from the checkpoint; trahiv.log in the run's folder says more",
            )

    # -- one local step ----------------------------------------------------------------------------

    def divide_data(self, num_samples: int) -> Leases:
        """Have the swarm's peers train different samples; return where this peer's positions come from.

        Args:
            num_samples: in one pass over the data; the same for all peers.
        """
        # Without a DHT there are no leases, and without a lease no step, which would notice that.
        leases = Leases(
            self.tracker, lambda: self.state_averager.ledger, num_samples, while_waiting=self._require_alive
        )
        self._leases = leases
        return leases

    def divide_stream(self, num_shards: int) -> ShardLeases:
        """Have the swarm's peers read different shards of a stream; return where this peer's come from.

        Args:
            num_shards: in one pass; the same for all peers.
        """
        leases = ShardLeases(
            self.tracker, lambda: self.state_averager.ledger, num_shards, while_waiting=self._require_alive
        )
        self._leases = leases
        return leases

    def expect_batch(
        self, samples: int, weight: float, *, lend: bool, positions: Sequence[int] = ()
    ) -> float:
        """Announce a batch whose gradients the next `step` accounts for; see `ExactGradientAverager`.

        Args:
            samples: see there, and so are `weight` and `lend`.
            weight: of the batch.
            lend: whether gradients may be accumulated in place.
            positions: of its samples, where the data is divided.
        """
        self._announced += positions
        return float(self.grad_averager.expect_batch(samples, weight, lend=lend))

    def forget_announced(self) -> None:
        """Take back what was announced since the last `step`: its gradients will not come."""
        self.grad_averager.forget_announced()
        self._give_back(self._announced)
        self._announced = []

    def start_batch_over(self, positions: Sequence[int]) -> None:
        """Take back the batch in training, which is announced anew, and drop what was accumulated before it.

        A backward pass that broke off has added part of its gradients to that.

        Args:
            positions: of its samples, as they were announced.
        """
        own = set(positions)
        self._give_back([position for position in self._announced if position not in own])
        self._announced = []
        self.grad_averager.reset_accumulated_grads_()
        for param in self.grad_averager.parameters:
            param.grad = None
        self._note_drops()
        self.tracker.report_local_progress(self.local_epoch, self._method.samples_held)

    def _give_back(self, positions: list[int]) -> None:
        if self._leases is not None:
            self._leases.give_back(positions)

    def _note_drops(self, dropped_before: int | None = None) -> None:
        """Take those positions out of this peer's work whose gradients are gone: always the last ones.

        Those whose gradients were not finite are not trained again: they would not be finite then, either.

        Args:
            dropped_before: samples whose gradients had not been finite; None: these were.
        """
        if self._leases is None:
            return
        gone = self._work[self._method.samples_held :]
        del self._work[self._method.samples_held :]
        if dropped_before is not None and self._method.dropped_samples > dropped_before:
            self._useless = [*self._useless, *gone][-USELESS_AT_MOST:]
        else:
            self._give_back(gone)

    def step(
        self,
        closure: Callable[[], torch.Tensor] | None = None,
        batch_size: int | None = None,
        grad_scaler: Any = None,
    ) -> torch.Tensor | None:
        """Account for one local batch whose gradients are in `.grad`; take a swarm step if it is time.

        Args:
            closure: recomputes the loss, as in torch; called once.
            batch_size: samples in this batch; default `batch_size_per_step`.
            grad_scaler: must be None: accelerate's scaler unscales before this is called.

        Raises:
            RoundFailed: this peer fell behind and nobody gave it the newer state in time.
            PeerBroken: one of this peer's processes has failed.
            NotAdmitted: the swarm's owner has taken this peer out.
        """
        del grad_scaler
        self._require_alive()
        loss = closure() if closure is not None else None
        if self._running is None and self.tracker.is_behind and self._catch_up():
            self.forget_announced()  # this batch's gradient belonged to weights that the swarm has left
            return loss
        samples = batch_size or self.batch_size_per_step
        dropped = self._method.dropped_samples
        self._method.account(samples)
        self._work, self._announced = [*self._work, *self._announced], []
        self._note_drops(dropped)
        if self._left_step_at is not None:
            self._seconds_per_sample.append((time.monotonic() - self._left_step_at) / samples)
        self.tracker.report_local_progress(self.local_epoch, self._method.samples_held)
        self._blocked_since = time.monotonic()
        try:
            self._advance()
        finally:
            self._note_drops(dropped)
            self._left_step_at = time.monotonic()
            self._blocked_s += self._left_step_at - self._blocked_since
            self._tell_notices()
        return loss

    def _tell_notices(self) -> None:
        """Tell what rounds have noticed, in the thread that trains."""
        while self._notices:
            self._notices.popleft()()

    def _advance(self) -> None:
        """Begin a round if one is due; apply, or undo, one that is over. Wait where there is no way round."""
        while True:
            if self._running is None:
                if self.local_epoch >= self.max_steps or not self.tracker.ready_to_update_epoch:
                    return
                # Alone there is nothing to hide, and a step that comes later would be another one.
                self._goes_on = self.pace.is_background and not self._is_alone()
                if not self._method.set_aside(goes_on=self._goes_on):
                    self.tracker.report_local_progress(self.local_epoch, samples_accumulated=0)
                    return
                self._without_group_since = min(self._without_group_since, time.monotonic())
                self._running = Background(self._average)
            if not self._goes_on or self._holds_enough():
                self._wait_for(self._running)
            if not self._running.is_over:
                return
            if not self._settle() and (
                not self._holds_enough()
                or self.should_leave()
                or self.tracker.is_behind
                or self._vitals.ailment
            ):
                return

    def _wait_for(self, running: Background[Attempt]) -> None:
        """Wait for a round to end; a wish to leave ends the wait, if the round does not in time."""
        what = f"a round for step {self.local_epoch + 1} with {len(self._groupmates())} other peer(s)"
        leave_at = float("inf")
        with self.events.waiting(what, self._patience_s()):
            while not running.wait(POLL_S):
                self._tell_notices()
                if self._vitals.ailment:
                    return
                if self.should_leave():
                    leave_at = min(leave_at, time.monotonic() + LEAVING_S)
                if time.monotonic() >= leave_at:
                    return

    def _settle(self) -> bool:
        """Apply the round that is over, or take back what was to go into it; say whether it was applied.

        Raises:
            NotFinite: this peer's weights are not finite.
        """
        assert self._running is not None
        running, self._running = self._running, None
        try:
            self.last_round, outcome = running.result()
        except BaseException:
            self._method.take_back()
            raise
        if self.last_round is not None and not self.last_round.committed:
            self._tries += 1
            logger.log(self.status_loglevel, f"Round not committed: {self.last_round.reason}")
            self._method.take_back()
            return False
        self.my_step_samples = self.step_samples = self._method.samples_aside
        if outcome is None:
            self._method.load()
            proof = secrets.token_bytes(16)
            group: tuple[str, ...] = (self.tracker.own_id,)
        else:
            self.step_samples = sum(outcome.samples.values())
            self._usual_wait_s = max(0.9 * self._usual_wait_s, time.monotonic() - self._without_group_since)
            self._tell_who_was_left_out(outcome.left_out)
            proof, group = outcome.proof, outcome.group
        history = self._history_after(self.step_samples, proof)
        if outcome is not None:
            reported = dict.fromkeys((mate.peer_id for mate in self.tracker.mates if mate.samples), 0)
            target = self.tracker.target_batch_size
            self.tracker.doubts.commit(history.step, reported | outcome.samples, target)
        mine = self._positions_aside()
        with self.state_averager.lock_state:  # a joiner gets the pace that belongs to the state
            self._enter(outcome.trained if outcome is not None else (mine,))
            self._take_step(history)
            if outcome is not None:
                self._measure(outcome)
                self._adapt(outcome)
        if self._leases is not None:
            del self._work[: self.my_step_samples]
            self._useless = []
            self._leases.settle(mine)
        self._companions = self.tracker.companions = frozenset(group)
        if outcome is not None and len(set(outcome.states.values())) > 1:
            self._has_drifted, self._states = True, outcome.states
        if self._has_drifted and len(group) > 1:
            self._make_equal()
        return True

    def _positions_aside(self) -> Spans:
        """The positions that the present round is about, and those that were of no use."""
        mine = Spans.of_positions([*self._work[: self._method.samples_aside], *self._useless])
        if not isinstance(self._leases, ShardLeases):
            return mine
        return mine | Spans.of_positions(self._leases.last_positions(mine))

    def _enter(self, trained: Sequence[Spans]) -> None:
        """Enter what a round's members brought into the ledger. The caller holds the state's lock."""
        unit = self._leases.unit if self._leases is not None else 1
        most_ahead = MOST_ROUNDS_AHEAD * self._method.steps * self.target_batch_size * unit
        self.state_averager.ledger = self.state_averager.ledger.extend(trained, most_ahead)

    def _leave_to_others(self) -> None:
        """After a round of others: note what it dropped here, and leave to them what they have trained."""
        self._note_drops()
        if self._leases is not None:
            self._leases.settle(())

    def _measure(self, outcome: Outcome) -> None:
        """Note how fast this peer trains, and what the round took."""
        per_sample = statistics.median(self._seconds_per_sample) if self._seconds_per_sample else 0.0
        speed = 1 / per_sample if per_sample else 0.0
        self._measured = replace(self._measured, samples_per_second=speed)
        if len(outcome.group) < 2:
            return
        # Beside a joiner's download an exchange takes longer than it will take again, unless it never ends.
        is_disturbed = self._interest.was_sent_since(time.monotonic() - outcome.exchange_s)
        self._num_disturbed = (self._num_disturbed + 1) % (DISTURBED_AT_MOST + 1) if is_disturbed else 0
        if not self._num_disturbed:
            latest = Measured(speed, outcome.exchange_s, outcome.parts_sent, outcome.parts_received)
            if latest.is_known:
                self._rates.append(latest.rate)
            lowest = min(self._rates) if len(self._rates) == RECENT else 0.0
            self._measured = replace(latest, lowest_rate=lowest)

    def _adapt(self, outcome: Outcome) -> None:
        """Go over to the pace that follows from what the round's members had noted before."""
        if self._auto_share is None:
            return
        choice = choose(
            self.pace,
            outcome.measured,
            outcome.samples,
            num_values=sum(param.numel() for param in self.state_averager.main_parameters),
            target_batch_size=self.target_batch_size,
            share=self._auto_share,
        )
        is_news = choice.pace != self.pace or not self._has_told_pace
        if choice.is_founded and is_news:
            self._has_told_pace = True
            message = f"From step {self.local_epoch} on: {choice.reason}"
            self._notices.append(partial(self.events.emit, "pace", message=message, **choice.pace.to_wire()))
        if choice.pace != self.pace:
            self.set_pace(choice.pace)
            self._begin_step()

    def _make_equal(self) -> None:
        """Have the peers of a group hold the same again, when it is time for that."""
        if self.pace.has_local_steps:
            # What is agreed on is reckoned alike on every machine: somebody's memory failed.
            self.events.warn(
                "drift",
                f"The peers of step {self.local_epoch} did not agree on the weights before it.",
                "if it repeats, look for the machine whose memory is damaged",
            )
            self._has_drifted = False
        elif self.local_epoch % self.average_state_every == 0:
            self._has_drifted = False
            adopted = state_to_adopt(self._states, self.history.digest)
            if self._states.get(self.tracker.own_id, adopted) != adopted:
                self._adopt_from({peer for peer, state in self._states.items() if state == adopted})

    def _adopt_from(self, holders: Collection[str]) -> None:
        """Take over the state that others hold; what fails is tried again after the next round."""
        self.events.warn(
            "drift",
            f"This peer's weights at step {self.local_epoch} are not those of others; it takes theirs over.",
            "nothing to do if its processor is of another kind than theirs; else its memory may be damaged",
        )
        try:
            self.load_state_from_peers(holders=holders)
        except RoundFailed as failure:  # the next round finds them unequal again
            logger.warning(f"The weights that others hold were not taken over: {failure.message}")

    def _tell_who_was_left_out(self, left_out: dict[str, str]) -> None:
        for peer, why in left_out.items():
            who = "This peer's" if peer == self.tracker.own_id else f"Peer {peer}'s"
            self.events.warn(
                "left-out",
                f"{who} gradient was left out of step {self.local_epoch + 1}: {why}.",
                "look at that peer's data and learning rate; swarm.norm_limit says how far a norm may be off",
            )

    # -- who is there ------------------------------------------------------------------------------

    def _groupmates(self) -> list[str]:
        """Ids of the peers that hold this peer's state, or are about to.

        One that was in the round which brought this peer here, or gave it this state, holds it too,
        however old its last report is: without this, a quick peer would go on without it.
        """
        own = self.history
        return [
            peer.peer_id
            for peer in self.tracker.others
            if peer.history == own or (peer.peer_id in self._companions and peer.history.rank < own.rank)
        ]

    def _vanished(self) -> set[str]:
        """Members of the last group that are not seen any more and did not say goodbye."""
        there = {peer.peer_id for peer in self.tracker.others} | {self.tracker.own_id}
        return set(self._companions) - there - self.tracker.gone

    def _is_alone(self) -> bool:
        """Whether this peer may step with its own gradients.

        Those that are behind count as well: they are about to take over this peer's state, and a report
        of one that is not may be old.
        """
        if not self.tracker.others and len(self._vanished()) <= 1:
            return True
        return self._tries > 0 and self._may_go_solo()

    def _may_go_solo(self) -> bool:
        return time.monotonic() - self._without_group_since >= self._rules.solo_after_s

    def _quorum(self) -> int:
        """Members that a group needs: most of those that held this state, and half of the last group."""
        if self._may_go_solo():
            return 2
        return max(2, (1 + len(self._voters())) // 2 + 1, len(self._vanished()))

    def _voters(self) -> set[str]:
        """Ids of the others that have a say in what comes after this peer's state.

        Those that have gone on from it are among them: without this, a few whose reports are the last to tell
        of a round could go another way.
        """
        own = self.history
        gone_on = {
            peer.peer_id for peer in self.tracker.others if peer.history.rank > own.rank or went_by(peer, own)
        }
        return gone_on.union(self._groupmates())

    # -- rounds, in a thread of their own --------------------------------------------------------

    def _average(self) -> Attempt:
        """Average with the groupmates; try again while there is patience.

        Returns:
            The round and what it gave; without an outcome it was not committed. No round: this peer is
            alone, or the others have been away for so long that it may go on alone.
        """
        self.tracker.refresh()
        if self._is_alone():
            return None, self._step_for_followers()
        started, before = time.monotonic(), self.grad_averager.traffic
        deadline = started + self._patience_s()
        outcome: Outcome | None = None
        reasons: dict[str, None] = {}
        while outcome is None:
            try:
                if self.tracker.is_behind:
                    raise RoundFailed("the others took this step without this peer")
                outcome = self._try_round(deadline)
                break
            except RoundFailed as failure:
                reasons[failure.message] = None
                self._note_vote(failure.__cause__)
                self._say_that_there_is_no_group()
            if self._is_alone():
                return None, self._step_for_followers()
            if self._must_stop() or self.tracker.is_behind or time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)  # a round may fail at once, again and again
        sent, received = (now - then for now, then in zip(self.grad_averager.traffic, before, strict=True))
        attempt = Round(
            samples=outcome.samples if outcome else {},
            seconds=time.monotonic() - started,
            bytes_sent=sent,
            bytes_received=received,
            committed=outcome is not None,
            reason="; ".join(filter(None, [outcome.reason if outcome else "", *reasons])),
            left_out=outcome.left_out if outcome else {},
        )
        return attempt, outcome

    def _note_vote(self, failure: BaseException | None) -> None:
        """Vouch for the average that this peer voted for: others may have committed it."""
        if isinstance(failure, NotCommitted) and failure.proof:
            self.tracker.vouch(self._history_after(failure.samples, failure.proof))

    def _patience_s(self) -> float:
        """How long to look for a group before the next local batch: longer with each try for a step."""
        if self._holds_enough():
            return float(self.averaging_timeout)
        return float(min(self.averaging_timeout, 2 ** (self._tries + 1) * self.matchmaking_time))

    def _holds_enough(self) -> bool:
        """Whether this peer trains no further without a group."""
        due = self._method.steps * self.target_batch_size
        return self._method.samples_held >= ACCUMULATE_AT_MOST * due

    def _try_round(self, deadline: float) -> Outcome:
        """Look for a group and average with it, once.

        Returns:
            What came of it; the averager's buffers hold the gradient to step with.

        Raises:
            RoundFailed: there was no average; the accumulated gradients are unchanged.
        """
        patience = max(deadline - time.monotonic(), 1.5 * self.matchmaking_time)
        control = self._start_round(self._groupmates(), self._quorum(), patience)
        refresh_at = time.monotonic() + max(REFRESH_S, self.tracker.fetch_every_s)
        looked_at = time.monotonic()
        try:
            while not _is_over(control):
                if self._vitals.ailment:
                    raise RoundFailed(self._vitals.ailment)
                if control.stage in (AveragingStage.RUNNING_ALLREDUCE, AveragingStage.FINISHED):
                    # Ends by itself within allreduce_timeout, and can't be called back.
                    if time.monotonic() - looked_at > self.allreduce_timeout + ANSWER_S:
                        raise RoundFailed("the DHT's process did not say how the round ended")
                    continue
                looked_at = time.monotonic()
                if self._must_stop():
                    raise RoundFailed(self._vitals.ailment or "this peer is leaving")
                if time.monotonic() < refresh_at:
                    continue
                refresh_at = time.monotonic() + max(REFRESH_S, self.tracker.fetch_every_s)
                self.tracker.refresh()
                if self.tracker.is_behind:
                    raise RoundFailed("the others took this step without this peer")
                if self._is_alone():
                    raise RoundFailed("the others have left")
                if time.monotonic() >= deadline:
                    raise RoundFailed("no group was found in time")
                self._say_that_there_is_no_group()
                self._expect_group(self._groupmates(), self._quorum())
        finally:
            if not control.done():
                control.cancel()
        return _outcome_of(control)

    def _must_stop(self) -> bool:
        """Whether nothing more is to be waited for."""
        return self.should_leave() or self._closed or bool(self._vitals.ailment)

    def _start_round(self, peers: Sequence[str], quorum: int, patience_s: float) -> StepControl:
        claim = Claim(
            samples=self._method.samples_aside,
            weight=self._method.weight_aside,
            state=self._digest_of_weights(),
            quorum=quorum,
            measured=self._measured,
            trained=self._positions_aside(),
        )
        self._expect_group(peers, quorum)
        self._method.load()
        return self.grad_averager.start_round(claim, patience_s, self._exchange())

    def _exchange(self) -> Exchange:
        """What the next round from this history is about."""
        return Exchange(
            self._method.places,
            self.pace.codec,
            is_of_steps=self.pace.has_local_steps,
            after=self.history.digest,
            most_samples=2 * ACCUMULATE_AT_MOST * self._method.steps * self.target_batch_size,
        )

    def _step_for_followers(self) -> Outcome | None:
        """Have a step that this peer takes alone be one that a joiner can go through, if there may be one.

        Returns:
            A round of this peer alone, whose average was encoded as for others; None if nobody needs it.
        """
        if not self._interest.is_there:
            return None
        try:
            control = self._start_round((), 1, self.matchmaking_time)
            while not _is_over(control) and not self._vitals.ailment:
                pass  # it ends by itself within allreduce_timeout
            return _outcome_of(control)
        except RoundFailed as failure:
            logger.warning(f"Nobody will be able to follow step {self.local_epoch + 1}: {failure}")
            return None

    def _say_that_there_is_no_group(self) -> None:
        """Say that this peer has been waiting for a group, and again whenever the wait has doubled."""
        waited = time.monotonic() - self._without_group_since
        if waited < max(SAY_AFTER_S, 2 * self._usual_wait_s, 2 * self._said_so_after_s):
            return
        self._said_so_after_s = waited
        missing = {peer.peer_id for peer in self.tracker.others} | self._vanished()
        names = [short_name(peer) for peer in sorted(missing)]
        solo_s = self._rules.solo_after_s
        message = (
            f"No group for step {self.local_epoch + 1} yet: {', '.join(names)} can't be reached or did not "
            "come. This peer trains on and tries again with longer times."
        )
        hint = "nothing to do; it steps alone " + (
            "never (swarm.solo)" if solo_s == float("inf") else f"after {solo_s:.0f} s (swarm.solo)"
        )
        self._notices += [partial(self.events.warn, "no-group", message, hint), self._when_no_group_is_found]

    def _expect_group(self, peers: Sequence[str], quorum: int) -> None:
        """Expect `peers` in the next group; all of it have this history, and loaded the same model."""
        clients = [peer.peer_id for peer in self.tracker.others if peer.is_client]
        pace = hashlib.sha256(repr((self.pace, self._method.places)).encode()).digest()[:SCHEMA_BYTES]
        suffix = self.local_epoch.to_bytes(8, "big") + self.history.digest + pace + self._schema
        present = [peer for peer in clients if peer in peers]
        self.grad_averager.expect_group(peers, present, quorum, suffix)

    def _digest_of_weights(self) -> bytes:
        """Digest what peers of this history hold in common, once.

        Raises:
            NotFinite: it is not finite. Nothing left this peer.
        """
        if not self._state_digest:
            weights, common = self._method.held_in_common(), self.state_averager.common_tensors()
            new = [place for place in range(len(common)) if place not in self._digests]
            values = host_values([common[place] for place in new], self.state_averager.lock_state.changes)
            for place, value in zip(new, values, strict=True):
                if not are_finite([value]):
                    raise NotFinite(
                        f"The weights of this peer are not finite at step {self.local_epoch}; nothing was "
                        "sent.",
                        hint="run the same command again: it takes the swarm's state, or the last checkpoint",
                    )
                self._digests[place] = digest_of([value])
            digests = {id(tensor): self._digests[place] for place, tensor in enumerate(common)}
            self._state_digest = joint_digest(digests[id(weight)] for weight in weights)[:STATE_DIGEST_BYTES]
            metadata = self.state_averager.own_metadata()
            self.tracker.attest(self.history, common_digest(digests.values(), metadata))
        return self._state_digest

    def _move(self, history: History, move: Callable[[], None]) -> None:
        """Move the weights by what the averager's buffers hold, and the history with them."""
        averager = self.state_averager
        self.last_learning_rates = [group["lr"] for group in self.opt.param_groups]
        with self.tracker.pause_updates(), averager.lock_state:
            move()
            self._forget_digests()
            averager.local_epoch, averager.history = history.step, history
            averager._update_scheduler()
            self.tracker.update_history(history, self._method.samples_held)

    def _forget_digests(self) -> None:
        """Forget the digests of what a round has changed: with local steps, of one fragment."""
        outer = self.state_averager.outer
        if outer is None:
            self._digests = {}
            return
        momentum_at = len(self.state_averager.common_tensors()) - len(outer.momentum)
        for place in self._method.places:
            self._digests.pop(place, None)
            self._digests.pop(momentum_at + place, None)

    def _take_step(self, history: History) -> None:
        """Take the step that a round was about, and commit that."""
        self._move(history, self._method.apply)
        self.step_taken = self.local_epoch
        now = time.monotonic()
        if self.last_round is not None:
            blocked_s = self._blocked_s + now - self._blocked_since
            self.last_round = replace(self.last_round, blocked_seconds=blocked_s)
        self._blocked_s, self._blocked_since = 0.0, now
        self._begin_step()

    def _begin_step(self) -> None:
        """Forget what was known of the step before, and offer the new state to joiners."""
        self._without_group_since, self._tries = float("inf"), 0
        self._said_so_after_s, self._state_digest = 0.0, b""
        self._method.begin(self.local_epoch, 1 + len(self.tracker.others))
        self.tracker.steps_a_round = self._method.steps
        self.tracker.target_batch_size = self._method.steps * self.target_batch_size

    # -- the swarm's state -------------------------------------------------------------------------

    def _catch_up(self) -> bool:
        """Come to the state that the swarm has come to, by its rounds or by a download.

        Returns:
            Whether gradients that were taken before are of no use any more.

        Raises:
            RoundFailed: see `load_state_from_peers`.
        """
        if self.tracker.target.rank < self.history.rank:
            self.events.warn(
                "fork",
                f"Most others have gone on another way than this peer, which is at step {self.local_epoch}: "
                "it takes over their state, though fewer samples are behind it.",
                "nothing to do; if it repeats, see which peers can't reach each other: trahiv status",
            )
        has_followed = self._follow()
        if self.tracker.is_behind and self.load_state_from_peers():
            return True
        return has_followed and not self.pace.has_local_steps

    def _follow(self) -> bool:
        """Go through the rounds that others had without this peer, as far as they have kept them.

        Gradients that were accumulated for older weights are dropped; local steps are kept.

        Returns:
            Whether there was one.
        """
        has_followed = False
        while True:
            self.tracker.refresh()
            if not self.tracker.is_behind or (outcome := self._replay_round()) is None:
                return has_followed
            has_followed = True
            with self.state_averager.lock_state:
                self._enter(outcome.trained)
                self._move(self._history_with(outcome), self._method.follow)
                self._adapt(outcome)
            self._leave_to_others()
            self._companions, self.step_taken = frozenset(outcome.group), -1
            self._begin_step()

    def _replay_round(self) -> Outcome | None:
        """Fetch the round that continued this peer's history; None if nobody gives one that is believed."""
        donors = sorted(self._donors(), key=lambda peer: peer not in self._donors_asked)[:FOLLOWED_AT_MOST]
        silence_s = float(self.load_state_timeout)
        self._expect_group((), 2)
        with self.events.waiting(f"the round of step {self.local_epoch + self._method.steps}", silence_s):
            for donor in donors:
                replay = self.grad_averager.start_replay(donor, self._exchange(), silence_s)
                while not _is_over(replay):
                    if self._must_stop() or not self.grad_averager.is_alive():
                        replay.cancel()
                        return None
                outcome = replay.result()
                if outcome is not None and self.tracker.standing.believes(self._history_with(outcome)):
                    return outcome
        return None

    def _history_with(self, outcome: Outcome) -> History:
        """The history after a round of others."""
        return self._history_after(sum(outcome.samples.values()), outcome.proof)

    def _history_after(self, samples: int, proof: bytes) -> History:
        """The history after a round that continues this peer's; see `History.extend`."""
        return self.history.extend(samples=samples, proof=proof, steps=self._method.steps)

    def load_state_from_peers(
        self, timeout_s: float | None = None, holders: Collection[str] | None = None
    ) -> bool:
        """Adopt the newest state in the swarm: weights, optimizer state, step and learning rate.

        Gradients that were accumulated for older weights are dropped.

        Args:
            timeout_s: give up when nothing has come for so long; default `load_state_timeout`.
            holders: ids of the peers that may give it; None: all that have one of use.

        Returns:
            Whether a state was adopted; False if all other peers left meanwhile, or this one is leaving, or
            those that reported a further one gave it to nobody.

        Raises:
            RoundFailed: there are peers, but nothing of their state came for so long; this peer is unchanged.
        """
        timeout_s = self.load_state_timeout if timeout_s is None else timeout_s
        step, was_behind = self.tracker.target.step, self.tracker.is_behind
        self._disbelieved = set()
        what = f"the swarm's state at step {step}"
        self._heard_at = time.monotonic()
        with self.events.waiting(what, timeout_s) as tell:

            def report(num_bytes: int, total: int, num_donors: int) -> None:
                self._heard_at = time.monotonic()
                amount = f"{num_bytes / 1e6:.0f} of {total / 1e6:.0f} MB from {num_donors} peer(s)"
                fields = {"step": step, "bytes": num_bytes, "total": total, "donors": num_donors}
                tell("download", f"{what}, {amount}", timeout_s, **fields)

            while True:
                donors = [peer for peer in self._donors() if holders is None or peer in holders][:MAX_DONORS]
                silence_s = self._heard_at + timeout_s - time.monotonic()
                if self._try_download(donors, silence_s, report):
                    break
                self._require_alive()
                if self.should_leave() or not self.tracker.others or not (donors or holders is None):
                    return False
                if len(self._disbelieved) >= MAX_DONORS:
                    raise RoundFailed(
                        f"{len(self._disbelieved)} peers gave states that others do not hold; this peer is "
                        "unchanged.",
                        hint="trahiv.log has their ids; the swarm's owner can take one out: trahiv kick PEER",
                    )
                if time.monotonic() + DONOR_PAUSE_S >= self._heard_at + timeout_s:
                    raise RoundFailed(
                        f"Nothing of the swarm's state came for {timeout_s:.0f} s; this peer is unchanged.",
                        hint="try again; if it happens again, raise hivemind_config.opt.load_state_timeout",
                    )
                time.sleep(DONOR_PAUSE_S)
                self._doubt_donors()
                self.tracker.refresh()
                if was_behind and not self.tracker.is_behind:
                    return False
        self._method.reset()
        self._leave_to_others()
        self._companions, self.step_taken = frozenset({self.state_averager.donor}) - {""}, -1
        if self.local_epoch:  # else there is nothing yet to hold to
            self.tracker.doubts.join()
        self.enter_step(self.history)
        self._follow()  # what came is as old as the download was long
        return True

    def _doubt_donors(self) -> None:
        """Take note of those that report the state to come to and did not give it."""
        target, others = self.tracker.target, [peer.peer_id for peer in self.tracker.others]
        claim_it = [peer.peer_id for peer in self.tracker.others if peer.history == target]
        if self.tracker.is_behind and set(claim_it) <= set(self._donors_asked) - self._disbelieved:
            self.tracker.doubts.gave_nothing(claim_it, others)

    def _donors(self) -> list[str]:
        """Ids of the peers that may give a state of use, the furthest first, among equals by chance.

        Before them those that went by the state to come to; after them those that were not believed.
        """
        target = self.tracker.target
        there = [peer for peer in self.tracker.others if not peer.is_client]
        of_use = [peer for peer in there if peer.history.rank >= min(self.history.rank, target.rank)]
        mixed = secrets.SystemRandom().sample(of_use, len(of_use))

        def order(peer: PeerProgress) -> tuple[bool, bool, tuple[int, bytes]]:
            return peer.peer_id not in self._disbelieved, bool(went_by(peer, target)), peer.history.rank

        return [peer.peer_id for peer in sorted(mixed, key=order, reverse=True)]

    def _note_given(self, history: History, common: bytes) -> None:
        """Have the next report say what this peer gives to somebody who fetches its state."""
        self.tracker.attest(history, common, is_given=True)

    def _is_believed(self, history: History, common: bytes, donor: str) -> bool:
        """Ask the others whether a state that was downloaded is theirs; wait for their answers, for a while.

        Args:
            history: of the state.
            common: digest of what all peers of that history hold; empty if it can't be compared.
            donor: id of a peer that gave it.
        """
        began, pause_s = time.monotonic(), REFRESH_S
        while True:
            self.tracker.refresh()
            standing, waited_s = self.tracker.standing, time.monotonic() - began
            is_late = waited_s >= BELIEVED_S
            is_one_of_them = history.step >= self._wished.step and standing.believes(history)
            is_held = standing.holds(history, common, is_final=is_late) if common else True
            if is_one_of_them and is_held:
                return True
            is_over = waited_s >= SAID_S or (is_late and not is_one_of_them)
            if self._must_stop() or is_held is False or is_over:
                break
            # Soon at first: where many peers step quickly, more rounds than are kept fit between two fetches.
            time.sleep(min(pause_s, self.tracker.fetch_every_s))
            pause_s *= 2
        why = "others of that history hold other values" if is_one_of_them else "others went another way"
        logger.warning(
            f"The state of step {history.step} that peer {donor} gave was not taken over: {why}. "
            "Others are asked first now."
        )
        self._disbelieved.add(donor)
        return False

    def _try_download(self, donors: list[str], silence_s: float, report: Report) -> bool:
        """Download in a thread of its own, so that a wish to leave is heard meanwhile."""
        heard_at, self._donors_asked = self._heard_at, donors
        self._wished = target = self.tracker.target
        download = Background[bool](
            lambda: self.state_averager.load_state_from_peers(
                donors=self._donors_asked,
                rank=target.rank,
                lowest=min(target.rank, self.history.rank),
                silence_s=silence_s,
                report=report,
            )
        )
        while not download.wait(POLL_S):
            if self._must_stop():
                return False
        try:
            return download.result()
        except (RoundFailed, *UNREACHABLE) as failure:
            logger.warning(f"Could not load the swarm's state: {failure}")
            self._heard_at = heard_at  # what came was of no use
            return False

    def enter_step(self, history: History, ledger: Ledger | None = None) -> None:
        """Take part from `history.step` on, with weights and optimizer state as they are now.

        Call it after loading a checkpoint or at a fresh start; from here on others can download this
        peer's state.

        Args:
            history: of these.
            ledger: of the history; None: the one that this peer has.
        """
        with self.state_averager.lock_state:
            self.state_averager.local_epoch, self.state_averager.history = history.step, history
            self.state_averager.ledger = ledger or self.state_averager.ledger
            self.state_averager._update_scheduler()
        self._digests = {}
        with self.tracker.pause_updates():
            self.tracker.update_history(history, is_next=False)
        self.tracker.announce()
        self._begin_step()
        if not self.client_mode:
            self.state_averager.allow_state_sharing = True

    @property
    def chooses_pace(self) -> bool:
        """Whether the swarm decides by itself what is averaged and how often: mode auto."""
        return self._auto_share is not None

    @property
    def agreed_values(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """What all peers of this history agree on, by parameter, where the model holds something else."""
        agreed, weights = self.state_averager.agreed, self.state_averager.main_parameters
        return {} if agreed is None else dict(zip(weights, agreed, strict=True))

    @property
    def own_steps(self) -> list[float]:
        """What this peer's own steps count for that no round has brought yet: see `LocalSteps.own_steps`.

        Empty in modes without local steps.
        """
        return self._method.own_steps if isinstance(self._method, LocalSteps) else []

    @own_steps.setter
    def own_steps(self, weights: Sequence[float]) -> None:
        if isinstance(self._method, LocalSteps):
            self._method.own_steps = list(weights)

    @contextlib.contextmanager
    def agreed_weights(self) -> Iterator[None]:
        """Have the model hold what all peers of this history agree on within the block, and then its own.

        Its own wait in host memory: what runs in the block needs a GPU's.
        """
        agreed = self.agreed_values
        own = [weight.detach().to("cpu", copy=True) for weight in agreed]
        with torch.no_grad():
            for weight, value in agreed.items():
                weight.copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, before in zip(agreed, own, strict=True):
                    weight.copy_(before)

    def wait_for(self, peers: Collection[str], limit_s: float) -> None:
        """Wait until all of these peers, ids in base58, have reported; at most `limit_s`."""
        self._wait_until(
            lambda: set(peers) <= {peer.peer_id for peer in self.tracker.others},
            "peers that were there before",
            limit_s,
        )

    def _wait_until(self, is_over: Callable[[], bool], what: str, limit_s: float) -> None:
        """Wait until the peers' reports say that something has come to pass; at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        with self.events.waiting(what, limit_s):
            while time.monotonic() < deadline and not self.should_leave():
                self._require_alive()
                self.tracker.refresh()
                if is_over():
                    return
                time.sleep(REFRESH_S)

    def gather(self, count: int, limit_s: float) -> bool:
        """Wait before the first step until so many peers are there, this one included; at most `limit_s`.

        Returns:
            Whether they are, or have begun already, or this peer is leaving.
        """
        deadline = time.monotonic() + limit_s
        with self.events.waiting(f"{count} peers to be there", limit_s) as tell:
            told = -1
            while True:
                self._require_alive()
                self.tracker.refresh()
                here = sorted(short_name(peer.peer_id) for peer in self.tracker.others)
                if 1 + len(here) >= count or self.tracker.is_behind or self.should_leave():
                    return True
                if time.monotonic() >= deadline:
                    return False
                if len(here) != told:
                    told, others = len(here), ", ".join(["this one", *here])
                    what = f"{count - told - 1} more peer(s): {told + 1} of {count} are here ({others})"
                    tell("waiting", what, deadline - time.monotonic())
                time.sleep(REFRESH_S)

    def wait_for_stragglers(self, limit_s: float) -> None:
        """Stay for peers that are behind, so that they can download the last state; at most `limit_s`."""
        self._wait_until(
            lambda: all(peer.history.rank >= self.history.rank for peer in self.tracker.others),
            "peers that are behind to fetch the last state",
            limit_s,
        )

    def shutdown(self) -> None:
        """Say goodbye, then have neither averager served any more; the end of the DHT ends both, too.

        Safe to call twice; the DHT is its owner's to close. Where one of this peer's processes has failed,
        nobody is left to say goodbye through.
        """
        if self._closed:
            return
        self._closed = True
        built = [getattr(self, name, None) for name in ("state_averager", "grad_averager")]
        alive = [averager for averager in built if averager is not None and averager.is_alive()]
        tracker = getattr(self, "tracker", None)
        self._vitals.close()
        if self._running is not None:  # it hears that, unless parts are being exchanged
            self._running.wait(LEAVING_S)
            self._method.take_back()  # the model is left with the weights of its history
            self._running = None
        if tracker is not None and self._vitals.ailment:
            tracker.abandon()
            return
        if tracker is not None:
            tracker.shutdown(self.shutdown_timeout)
        drain(*alive)
        for averager in alive:
            averager.shutdown()

    def __del__(self) -> None:
        """Leave processes to `shutdown`: at interpreter exit half of what it needs is gone."""


def _is_over(control: StepControl | MPFuture[Any]) -> bool:
    """Wait for a round for a moment; say whether it is over, one way or the other."""
    with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
        control.exception(timeout=POLL_S)
    return bool(control.done())


def _outcome_of(control: StepControl) -> Outcome:
    """Return what a round gave, or say why it gave nothing.

    Raises:
        RoundFailed: it was not committed, or is not over.
    """
    if control.cancelled() or not control.done():
        raise RoundFailed("the round broke off")
    if (error := control.exception()) is not None:
        raise RoundFailed(str(error) or type(error).__name__) from error
    outcome: Outcome = control.result()
    return outcome


def eta_s(tracker: SwarmTracker) -> float:
    """Seconds until the swarm holds its target, by what peers last reported; inf if nothing is known."""
    return max(0.0, float(tracker.global_progress.eta_next_epoch) - swarm_time())
