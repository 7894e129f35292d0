"""Mode sync: all peers take the same optimizer step with the same averaged gradient.

A peer accumulates gradients until the swarm holds `target_batch_size` samples, averages them with all
peers of the same history, and moves its weights once most of them hold the same average. A round that is
not committed changes nothing: the gradients stay, and go into the next try. A peer that missed a round
takes over the state of those that did not, and so does the smaller half of a swarm that was cut in two.

A peer steps alone where it is alone. Where others are alive, or most of its last group vanished without a
goodbye, it goes on accumulating, up to a bound, for as long as `RoundRules.solo_after_s`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import hivemind
import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.utils import get_dht_time, get_logger
from torch.nn.utils import clip_grad_norm_, get_total_norm

from trahiv_cli.errors import NotFinite, RoundFailed
from trahiv_cli.optim.ballot import digest_of
from trahiv_cli.optim.history import History
from trahiv_cli.optim.progress import SwarmTracker
from trahiv_cli.optim.rounds import (
    ANSWER_S,
    ExactAverager,
    ExactGradientAverager,
    ExactStateAverager,
    Outcome,
    Round,
)
from trahiv_cli.optim.rules import DEFAULT_RULES, RoundRules
from trahiv_cli.optim.soundness import Claim
from trahiv_cli.swarm.corrections import drain

logger = get_logger(__name__)

POLL_S = 0.1
"""How often a wait looks whether it is over, or whether the user wants to leave."""

REFRESH_S = 1.0
"""How often a peer that waits for its group asks the DHT who is still there."""

SAY_AFTER_S = 3.5
"""A peer that has been looking for a group for so long says so, unless it usually takes half as long."""

ACCUMULATE_AT_MOST = 4
"""A peer without a group trains on until it holds so many times `target_batch_size` samples."""

STATE_DIGEST_BYTES = SCHEMA_BYTES = 8

DONOR_PAUSE_S = 1.0
"""Between two tries to download the state; upstream has none and flooded a donor 2,230 times in 47 s."""


class Narrator(Protocol):
    """Told about every wait that may take long, so that a person can be told."""

    def __call__(self, what: str, until_s: float) -> AbstractContextManager[Any]:
        """Enter when the wait for `what` begins; it ends after `until_s` seconds at the latest."""


def silent(what: str, until_s: float) -> AbstractContextManager[Any]:
    """Tell nobody."""
    del what, until_s
    return nullcontext()


class Notify(Protocol):
    """Told what a person should know, while training goes on."""

    def __call__(self, code: str, message: str, hint: str) -> None:
        """Take note of one warning."""


def unnoticed(code: str, message: str, hint: str) -> None:
    """Tell nobody."""
    del code, message, hint


class SwarmOptimizer(hivemind.Optimizer):
    """`hivemind.Optimizer` with exact rounds that either happen for a peer or do not.

    Use it like a torch optimizer: `step()` after each local backward pass. `local_epoch` is the swarm
    step reached. Keywords are `hivemind.Optimizer`'s; those that contradict mode sync are refused in
    `assemble`.

    Args:
        max_grad_norm: the averaged gradient is scaled down to this norm; 0 leaves it alone.
        schema: peers average only with those that have the same.
        rules: how rounds are judged, and when this peer may step alone.
        narrate: told about waits.
        notify: told about trouble.
        should_leave: asked during waits; True makes a wait end early with nothing changed.
        keywords: see `hivemind.Optimizer`.
    """

    def __init__(
        self,
        *,
        dht: hivemind.DHT,
        max_grad_norm: float = 0.0,
        schema: bytes = b"",
        rules: RoundRules = DEFAULT_RULES,
        narrate: Narrator = silent,
        notify: Notify = unnoticed,
        should_leave: Callable[[], bool] = lambda: False,
        averager_opts: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.narrate, self.should_leave, self.max_grad_norm = narrate, should_leave, max_grad_norm
        judged_by = repr((rules.norm_limit, rules.robust_mean)).encode()
        self._schema = schema + hashlib.sha256(judged_by).digest()[:SCHEMA_BYTES]
        self._rules, self._notify = rules, notify
        self.last_round: Round | None = None
        """The last round that was tried; None while this peer is alone."""
        self.step_samples = self.my_step_samples = 0
        """Samples that went into the last step, of all peers and of this one."""
        self.step_taken = -1
        """The last step that this peer took itself, rather than downloaded."""
        self.dropped_samples = 0
        """Samples whose gradients were not finite, since the start."""
        self._companions: frozenset[str] = frozenset()
        self._without_group_since = float("inf")
        self._tries = 0
        self._usual_wait_s = 0.0
        self._has_said_so = self._has_drifted = False
        self._state_digest = b""
        self._closed = False
        options = averager_opts or {}
        try:
            super().__init__(
                dht=dht,
                # Not shared before this peer has a state worth sharing (`enter_step`); initialized already
                # by `assemble.initialize_state`, also where that leaves no tensors, as for plain SGD.
                averager_opts=options | {"allow_state_sharing": False, "initialize_optimizer": False},
                grad_averager_factory=partial(ExactGradientAverager, rules=rules, **options),
                **keywords,
            )
        except BaseException:
            self.shutdown()  # the tracker's threads would keep the process from ever ending
            raise
        self.last_learning_rates: list[float] = [group["lr"] for group in self.opt.param_groups]
        """Learning rates of the last step, one per param group; before the first, those it will have."""
        self.last_grad_norm: float | None = None
        """Norm of the averaged gradient of the last step, before clipping; None before the first."""

    # -- what hivemind.Optimizer builds ------------------------------------------------------------

    def _make_progress_tracker(self, target_batch_size: int, **keywords: Any) -> SwarmTracker:
        return SwarmTracker(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            start=True,
            **keywords,
        )

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
            rules=self._rules,
            start=True,
            **keywords,
        )

    @property
    def history(self) -> History:
        """What was committed on the way to the weights that this peer holds."""
        return self.state_averager.history

    # -- one local step ----------------------------------------------------------------------------

    def expect_batch(self, samples: int, weight: float, *, lend: bool) -> float:
        """Announce a batch whose gradients the next `step` accounts for; see `ExactGradientAverager`."""
        return float(self.grad_averager.expect_batch(samples, weight, lend=lend))

    def forget_announced(self) -> None:
        """Take back what was announced since the last `step`: its gradients will not come."""
        self.grad_averager.forget_announced()

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
        """
        del grad_scaler
        loss = closure() if closure is not None else None
        if self.tracker.is_behind and self.load_state_from_peers():
            return loss  # this batch's gradient belonged to weights that the swarm has left
        self._check_and_accumulate_gradients(batch_size or self.batch_size_per_step, None)
        if self.tracker.ready_to_update_epoch:
            self._update_global_epoch(None)
        return loss

    def _update_global_epoch(self, grad_scaler: Any) -> None:
        if not self._gradients_are_finite():
            return
        self.tracker.refresh()
        if self.tracker.is_behind:
            return
        self._without_group_since = min(self._without_group_since, time.monotonic())
        self.my_step_samples = self.step_samples = self.grad_averager.local_samples_accumulated
        outcome = None
        if self._is_alone():
            self.last_round = None
        else:
            while True:
                self.last_round, outcome = self._average_gradients()
                if self.last_round is None or self.last_round.committed:
                    break
                self._tries += 1
                logger.log(self.status_loglevel, f"Round not committed: {self.last_round.reason}")
                if not self._holds_enough() or self.should_leave() or self.tracker.is_behind:
                    return
        if outcome is None:
            self.grad_averager.load_accumulators_into_averager_()
            proof = secrets.token_bytes(16)
            group: tuple[str, ...] = (self.tracker.own_id,)
        else:
            self.step_samples = sum(outcome.samples.values())
            self._usual_wait_s = max(0.9 * self._usual_wait_s, time.monotonic() - self._without_group_since)
            self._tell_who_was_left_out(outcome.left_out)
            proof, group = outcome.proof, outcome.group
        self._take_step(self.history.extend(samples=self.step_samples, proof=proof))
        self._companions = frozenset(group)
        if outcome is not None and len(set(outcome.states.values())) > 1:
            self._has_drifted = True
        if self._has_drifted and len(group) > 1 and self.local_epoch % self.average_state_every == 0:
            self._average_weights(group)

    def _gradients_are_finite(self) -> bool:
        """Drop this peer's gradients if one of them is not finite: it would spoil every peer's weights."""
        if bool(get_total_norm(list(self.grad_averager._grad_accumulators())).isfinite()):
            return True
        self.dropped_samples += self.grad_averager.local_samples_accumulated
        self.grad_averager.reset_accumulated_grads_()
        self.tracker.report_local_progress(self.local_epoch, samples_accumulated=0)
        return False

    def _tell_who_was_left_out(self, left_out: dict[str, str]) -> None:
        for peer, why in left_out.items():
            who = "This peer's" if peer == self.tracker.own_id else f"Peer {peer}'s"
            self._notify(
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
        """Members that a group needs: most of those that hold this state, and half of the last group."""
        if self._may_go_solo():
            return 2
        return max(2, (1 + len(self._groupmates())) // 2 + 1, len(self._vanished()))

    # -- rounds ------------------------------------------------------------------------------------

    def _average_gradients(self) -> tuple[Round | None, Outcome | None]:
        """Average with the groupmates; try again while there is patience.

        Returns:
            The round and what it gave; without an outcome it was not committed. Both None: everybody else
            has left meanwhile, or has been away for so long that this peer may go on alone.
        """
        started, traffic = time.monotonic(), self.grad_averager.traffic
        patience = self._patience_s()
        deadline = started + patience
        outcome: Outcome | None = None
        reasons: dict[str, None] = {}
        waiting_for = f"a round for step {self.local_epoch + 1} with {len(self._groupmates())} other peer(s)"
        with self.narrate(waiting_for, patience):
            while outcome is None:
                try:
                    outcome = self._try_round(deadline)
                    break
                except RoundFailed as failure:
                    reasons[failure.message] = None
                    self._say_that_there_is_no_group()
                if self._is_alone():
                    return None, None
                if self.should_leave() or self.tracker.is_behind or time.monotonic() >= deadline:
                    break
                time.sleep(POLL_S)  # a round may fail at once, again and again
        sent, received = self.grad_averager.traffic
        attempt = Round(
            samples=outcome.samples if outcome else {},
            seconds=time.monotonic() - started,
            bytes_sent=sent - traffic[0],
            bytes_received=received - traffic[1],
            committed=outcome is not None,
            reason="; ".join(filter(None, [outcome.reason if outcome else "", *reasons])),
            left_out=outcome.left_out if outcome else {},
        )
        return attempt, outcome

    def _patience_s(self) -> float:
        """How long to look for a group before the next local batch: longer with each try for a step."""
        if self._holds_enough():
            return float(self.averaging_timeout)
        return float(min(self.averaging_timeout, 2 ** (self._tries + 1) * self.matchmaking_time))

    def _holds_enough(self) -> bool:
        """Whether this peer trains no further without a group."""
        held: int = self.grad_averager.local_samples_accumulated
        return held >= ACCUMULATE_AT_MOST * self.target_batch_size

    def _try_round(self, deadline: float) -> Outcome:
        """Look for a group and average with it, once.

        Returns:
            What came of it; the averager's buffers hold the gradient to step with.

        Raises:
            RoundFailed: there was no average; the accumulated gradients are unchanged.
        """
        claim = Claim(
            samples=self.grad_averager.local_samples_accumulated,
            weight=self.grad_averager.local_weight,
            norm=0.0,
            state=self._digest_of_weights(),
            quorum=self._quorum(),
        )
        self._expect_group(self.grad_averager, self._groupmates(), claim.quorum)
        self.grad_averager.load_accumulators_into_averager_()
        patience = max(deadline - time.monotonic(), 1.5 * self.matchmaking_time)
        control = self.grad_averager.start_round(claim, patience)
        refresh_at = time.monotonic() + REFRESH_S
        looked_at = time.monotonic()
        try:
            while not _is_over(control):
                if control.stage in (AveragingStage.RUNNING_ALLREDUCE, AveragingStage.FINISHED):
                    # Ends by itself within allreduce_timeout, and can't be called back.
                    if time.monotonic() - looked_at > self.allreduce_timeout + ANSWER_S:
                        raise RoundFailed("the averager's process did not say how the round ended")
                    continue
                looked_at = time.monotonic()
                if self.should_leave():
                    raise RoundFailed("this peer is leaving")
                if time.monotonic() < refresh_at:
                    continue
                refresh_at = time.monotonic() + REFRESH_S
                self.tracker.refresh()
                if self.tracker.is_behind:
                    raise RoundFailed("the others took this step without this peer")
                if self._is_alone():
                    raise RoundFailed("the others have left")
                if time.monotonic() >= deadline:
                    raise RoundFailed("no group was found in time")
                self._say_that_there_is_no_group()
                self._expect_group(self.grad_averager, self._groupmates(), self._quorum())
        finally:
            if not control.done():
                control.cancel()
        return _outcome_of(control)

    def _say_that_there_is_no_group(self) -> None:
        """Say once for each step that this peer has been waiting for a group, and what it does meanwhile."""
        waited = time.monotonic() - self._without_group_since
        if self._has_said_so or waited < max(SAY_AFTER_S, 2 * self._usual_wait_s):
            return
        self._has_said_so = True
        missing = {peer.peer_id for peer in self.tracker.others} | self._vanished()
        names = [f"...{peer[-6:]}" for peer in sorted(missing)]
        solo_s = self._rules.solo_after_s
        self._notify(
            "no-group",
            f"No group for step {self.local_epoch + 1} yet: {', '.join(names)} can't be reached or did not "
            "come. This peer goes on accumulating gradients and tries again with longer times.",
            "nothing to do; it steps alone "
            + ("never (swarm.solo)" if solo_s == float("inf") else f"after {solo_s:.0f} s (swarm.solo)"),
        )

    def _expect_group(self, averager: ExactAverager, peers: Sequence[str], quorum: int) -> None:
        """Expect `peers` in the next group; all of it have this history, and loaded the same model."""
        clients = [peer.peer_id for peer in self.tracker.others if peer.is_client]
        suffix = self.local_epoch.to_bytes(8, "big") + self.history.digest + self._schema
        averager.expect_group(peers, [peer for peer in clients if peer in peers], quorum, suffix)

    def _digest_of_weights(self) -> bytes:
        """Digest the weights of this step, once.

        Raises:
            NotFinite: they are not finite. Nothing left this peer.
        """
        if not self._state_digest:
            weights = self._weights()
            if not all(bool(weight.isfinite().all()) for weight in weights):
                raise NotFinite(
                    f"The weights of this peer are not finite at step {self.local_epoch}; nothing was sent.",
                    hint="run the same command again: it takes the swarm's state, or the last checkpoint",
                )
            self._state_digest = digest_of(weights)[:STATE_DIGEST_BYTES]
        return self._state_digest

    def _weights(self) -> list[torch.Tensor]:
        """The parameters that the inner optimizer moves; copies in host memory where it is offloaded."""
        return [param for group in self.opt.param_groups for param in group["params"]]

    def _take_step(self, history: History) -> None:
        """Move the weights by the gradient in the averager's buffers, and commit the step.

        In this thread: `TrainingStateAverager.step` would run the optimizer in a thread of its own, whose
        OpenMP threads stay; libgomp then manages more threads than there are cores, no longer spins at
        barriers, and the next forward and backward passes take half as long again (2 cores).
        """
        averager = self.state_averager
        self.last_learning_rates = [group["lr"] for group in self.opt.param_groups]
        with self.tracker.pause_updates(), averager.lock_state:
            with self._averaged_gradients(), averager.lock_averaged_tensors:
                self.last_grad_norm = self._clip()
                self.opt.step()
                averager.local_epoch += 1
                averager._update_scheduler()
            if self.offload_optimizer:
                averager._apply_optimizer_parameters_()
            averager.history = history
            self.tracker.update_history(history)
            self.grad_averager.reset_accumulated_grads_()
        self.step_taken = self.local_epoch
        self._begin_step()

    def _begin_step(self) -> None:
        """Forget what was known of the step before, and offer the new state to joiners."""
        self._without_group_since, self._tries = float("inf"), 0
        self._has_said_so, self._state_digest = False, b""
        if not self.client_mode:
            self.state_averager.state_sharing_priority = self.history.samples

    def _averaged_gradients(self) -> AbstractContextManager[None]:
        """Have the averages as `.grad` of the inner optimizer's parameters within the block.

        Upstream (optim/optimizer.py:626) makes gradients in host memory if there are none, which a parameter
        on a GPU can't have.
        """
        if not self.offload_optimizer:
            return self.grad_averager.use_averaged_gradients()
        self.grad_averager.notify_used_averaged_gradients()
        return nullcontext()  # offloaded parameters have the averager's own buffers, from the start

    def _clip(self) -> float:
        """Scale the averaged gradient down to `max_grad_norm`; return its norm as it was."""
        limit = self.max_grad_norm or float("inf")
        return float(clip_grad_norm_([param for param in self._weights() if param.grad is not None], limit))

    def _average_weights(self, group: Sequence[str]) -> None:
        """Average the weights of peers that have just taken the same step; without a group, keep them."""
        averager = self.state_averager
        with self.narrate(f"the weights' average at step {self.local_epoch}", self.averaging_timeout):
            self._digest_of_weights()
            if not averager.reuse_tensors:
                averager._load_local_tensors_into_averager_()
            self._expect_group(averager, [peer for peer in group if peer != self.tracker.own_id], len(group))
            deadline = time.monotonic() + self.averaging_timeout
            try:
                control = averager.start_round(Claim(quorum=len(group)), 1.5 * self.matchmaking_time)
                while not _is_over(control) and time.monotonic() < deadline:
                    pass
                _outcome_of(control)
            except RoundFailed as failure:
                logger.log(self.status_loglevel, f"The weights were not averaged: {failure.message}")
                return
        with averager.lock_state:
            if not averager.reuse_tensors:
                averager._apply_averaging_results_()
            if self.offload_optimizer:
                averager._apply_optimizer_parameters_()
        self._has_drifted, self._state_digest = False, b""

    # -- the swarm's state -------------------------------------------------------------------------

    def load_state_from_peers(self, timeout_s: float | None = None) -> bool:
        """Adopt the newest state in the swarm: weights, optimizer state, step and learning rate.

        Gradients that were accumulated for older weights are dropped.

        Args:
            timeout_s: give up after so long; default `load_state_timeout`.

        Returns:
            Whether a state was adopted; False if all other peers left meanwhile, or this one is leaving.

        Raises:
            RoundFailed: there are peers, but none gave its state in time; this peer is unchanged.
        """
        timeout_s = self.load_state_timeout if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        with self.narrate(f"the swarm's state at step {self.tracker.furthest.step}", timeout_s):
            while not self._try_download(deadline - time.monotonic()):
                if self.should_leave() or not self.tracker.others:
                    return False
                if time.monotonic() + DONOR_PAUSE_S >= deadline:
                    raise RoundFailed(
                        f"No peer gave the swarm's state within {timeout_s:.0f} s; this peer is unchanged.",
                        hint="try again; if it happens again, raise hivemind_config.opt.load_state_timeout",
                    )
                time.sleep(DONOR_PAUSE_S)
                self.tracker.refresh()
        self.grad_averager.reset_accumulated_grads_()
        self._companions, self.step_taken = frozenset({self.state_averager.donor}) - {""}, -1
        self.enter_step(self.history)
        return True

    def _try_download(self, timeout_s: float) -> bool:
        """Download in a thread of its own, so that a wish to leave is heard meanwhile."""
        result: list[bool | Exception] = []

        def download() -> None:
            try:
                result.append(self.state_averager.load_state_from_peers(timeout=timeout_s))
            except Exception as error:  # noqa: BLE001 - handed to the waiting thread, which judges it
                result.append(error)

        thread = threading.Thread(target=download, name="state download", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            if self.should_leave():
                return False
        outcome = result[0]
        if isinstance(outcome, Exception):
            logger.warning(f"Could not load the swarm's state: {outcome}")
            return False
        return outcome

    def enter_step(self, history: History) -> None:
        """Take part from `history.step` on, with weights and optimizer state as they are now.

        Call it after loading a checkpoint or at a fresh start; from here on others can download this
        peer's state.
        """
        with self.state_averager.lock_state:
            self.state_averager.local_epoch, self.state_averager.history = history.step, history
            self.state_averager._update_scheduler()
        with self.tracker.pause_updates():
            self.tracker.update_history(history)
        self.tracker.announce()
        self._begin_step()
        if not self.client_mode:
            self.state_averager.allow_state_sharing = True

    def wait_for_stragglers(self, limit_s: float) -> None:
        """Stay for peers that are behind, so that they can download the last state; at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        with self.narrate("peers that are behind to fetch the last state", limit_s):
            while time.monotonic() < deadline and not self.should_leave():
                self.tracker.refresh()
                if all(peer.history.rank >= self.history.rank for peer in self.tracker.others):
                    return
                time.sleep(REFRESH_S)

    def shutdown(self) -> None:
        """Say goodbye, then end both averagers. Safe to call twice; the DHT is its owner's to close."""
        if self._closed:
            return
        self._closed = True
        if (tracker := getattr(self, "tracker", None)) is not None:
            tracker.shutdown(self.shutdown_timeout)
        built = [getattr(self, name, None) for name in ("state_averager", "grad_averager")]
        alive = [averager for averager in built if averager is not None and averager.is_alive()]
        drain(*alive)
        for averager in alive:
            averager.shutdown()

    def __del__(self) -> None:
        """Leave processes to `shutdown`: at interpreter exit half of what it needs is gone."""


def _is_over(control: StepControl) -> bool:
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
        raise RoundFailed(str(error) or type(error).__name__)
    outcome: Outcome = control.result()
    return outcome


def eta_s(tracker: SwarmTracker) -> float:
    """Seconds until the swarm holds its target, by what peers last reported; inf if nothing is known."""
    return max(0.0, float(tracker.global_progress.eta_next_epoch) - get_dht_time())
