"""Mode sync: all peers take the same optimizer step with the same averaged gradient.

A peer accumulates gradients until the swarm holds `target_batch_size` samples, averages them with all
peers at the same step, and only then moves its weights. A round that fails changes nothing: the
gradients stay, and the round is tried again. A peer never steps on its own gradients while others of
its step are alive, and one that missed a round downloads the state of those that did not; so replicas
are equal at equal steps by construction, not by repair.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import hivemind
import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.utils import get_dht_time, get_logger
from torch.nn.utils import clip_grad_norm_, get_total_norm

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.progress import SwarmTracker
from trahiv_cli.optim.rounds import ExactGradientAverager, ExactStateAverager, Round
from trahiv_cli.swarm.corrections import CorrectedAverager, drain

logger = get_logger(__name__)

POLL_S = 0.1
"""How often a wait looks whether it is over, or whether the user wants to leave."""

REFRESH_S = 1.0
"""How often a peer that waits for its group asks the DHT who is still there."""

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


class SyncOptimizer(hivemind.Optimizer):
    """`hivemind.Optimizer` with exact rounds that either happen for a peer or do not.

    Use it like a torch optimizer: `step()` after each local backward pass. `local_epoch` is the swarm
    step reached. Keywords are `hivemind.Optimizer`'s; those that contradict mode sync are refused in
    `assemble`.

    Args:
        max_grad_norm: the averaged gradient is scaled down to this norm; 0 leaves it alone.
        schema: peers average only with those that have the same.
        narrate: told about waits.
        should_leave: asked during waits; True makes a wait end early with nothing changed.
        keywords: see `hivemind.Optimizer`.
    """

    def __init__(
        self,
        *,
        dht: hivemind.DHT,
        max_grad_norm: float = 0.0,
        schema: bytes = b"",
        narrate: Narrator = silent,
        should_leave: Callable[[], bool] = lambda: False,
        averager_opts: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.narrate, self.should_leave, self.max_grad_norm = narrate, should_leave, max_grad_norm
        self._schema = schema
        self.last_round: Round | None = None
        """The last round that was tried; None while this peer is alone."""
        self.step_samples = self.my_step_samples = 0
        """Samples that went into the last step, of all peers and of this one."""
        self.step_taken = -1
        """The last step that this peer took itself, rather than downloaded."""
        self.dropped_samples = 0
        """Samples whose gradients were not finite, since the start."""
        self._companions: frozenset[str] = frozenset()
        self._closed = False
        options = averager_opts or {}
        try:
            super().__init__(
                dht=dht,
                # Not shared before this peer has a state worth sharing (`enter_step`); initialized already
                # by `assemble.initialize_state`, also where that leaves no tensors, as for plain SGD.
                averager_opts=options | {"allow_state_sharing": False, "initialize_optimizer": False},
                grad_averager_factory=partial(ExactGradientAverager, **options),
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
            start=True,
            **keywords,
        )

    # -- one local step ----------------------------------------------------------------------------

    def lend_accumulators(self) -> None:
        """Have the next backward pass add its gradients where `step` would; see `ExactGradientAverager`."""
        self.grad_averager.lend_accumulators_()

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
        self.my_step_samples = self.step_samples = self.grad_averager.local_samples_accumulated
        group_size = 1
        if self._groupmates():
            self.last_round = self._average_gradients()
            if not self.last_round.committed:
                logger.log(self.status_loglevel, f"Round not committed: {self.last_round.reason}")
                return
            self.step_samples = sum(self.last_round.samples.values())
            group_size = len(self.last_round.samples)
            self._companions = frozenset(self.last_round.samples)
        else:
            self.last_round = None
            self._companions = frozenset()
            self.grad_averager.load_accumulators_into_averager_()
        self._take_step()
        if group_size > 1 and self.local_epoch % self.average_state_every == 0:
            self._average_weights(group_size)

    def _gradients_are_finite(self) -> bool:
        """Drop this peer's gradients if one of them is not finite: it would spoil every peer's weights."""
        if bool(get_total_norm(list(self.grad_averager._grad_accumulators())).isfinite()):
            return True
        self.dropped_samples += self.grad_averager.local_samples_accumulated
        self.grad_averager.reset_accumulated_grads_()
        self.tracker.report_local_progress(self.local_epoch, samples_accumulated=0)
        return False

    def _groupmates(self) -> list[str]:
        """Peers that are at this step and have not said goodbye.

        One that was in the round which brought this peer here is at this step too, however old its last
        report is: without this, a quick peer would take the next step alone.
        """
        here = self.local_epoch
        return [
            peer.peer_id
            for peer in self.tracker.others
            if peer.step == here or (peer.step < here and peer.peer_id in self._companions)
        ]

    # -- rounds ------------------------------------------------------------------------------------

    def _average_gradients(self) -> Round:
        """Average with the groupmates, trying again until `averaging_timeout` is over."""
        started, traffic = time.monotonic(), self.grad_averager.traffic
        deadline = started + self.averaging_timeout
        group: dict[str, int] = {}
        reason = ""
        waiting_for = f"a round for step {self.local_epoch + 1} with {len(self._groupmates())} other peer(s)"
        with self.narrate(waiting_for, self.averaging_timeout):
            while not group:
                try:
                    group = self._try_round(deadline)
                except RoundFailed as failure:
                    reason = failure.message
                    if self.should_leave() or self.tracker.is_behind or time.monotonic() >= deadline:
                        break
        sent, received = self.grad_averager.traffic
        return Round(
            samples=group,
            seconds=time.monotonic() - started,
            bytes_sent=sent - traffic[0],
            bytes_received=received - traffic[1],
            committed=bool(group),
            reason="" if group else reason,
        )

    def _try_round(self, deadline: float) -> dict[str, int]:
        """Look for a group and average with it, once.

        Returns:
            For each peer of the group the samples behind its gradient; only this peer if everybody else
            has left meanwhile. In both cases the averager's buffers hold the gradient to step with.

        Raises:
            RoundFailed: there was no average; the accumulated gradients are unchanged.
        """
        samples = self.grad_averager.local_samples_accumulated
        self._expect_group()
        patience = max(deadline - time.monotonic(), 1.5 * self.matchmaking_time)
        control: StepControl = self.grad_averager.step(
            reset_accumulators=False, wait=False, timeout=patience, allow_retries=False, gather=samples
        )
        refresh_at = time.monotonic() + REFRESH_S
        try:
            while not _is_over(control):
                if control.stage == AveragingStage.RUNNING_ALLREDUCE:
                    continue  # ends by itself within allreduce_timeout, and can't be called back
                if self.should_leave():
                    raise RoundFailed("this peer is leaving")
                if time.monotonic() < refresh_at:
                    continue
                refresh_at = time.monotonic() + REFRESH_S
                self.tracker.refresh()
                if self.tracker.is_behind:
                    raise RoundFailed("the others took this step without this peer")
                if not self._groupmates():
                    control.cancel()
                    self.grad_averager.load_accumulators_into_averager_()
                    return {self.tracker.own_id: samples}
                self._expect_group()
        finally:
            if not control.done():
                control.cancel()
        if control.cancelled() or control.exception():
            raise RoundFailed(
                str(control.exception() if not control.cancelled() else "") or "the round broke off"
            )
        return {peer.to_base58(): count for peer, count in control.result().items()}

    def _expect_group(self) -> None:
        self._set_group(self.grad_averager, size=1 + len(self._groupmates()))

    def _set_group(self, averager: CorrectedAverager, size: int) -> None:
        """Expect a group of `size` peers that are at this step and loaded the same model."""
        averager.set_group(size, self.local_epoch.to_bytes(8, "big") + self._schema)

    def _take_step(self) -> None:
        """Move the weights by the gradient in the averager's buffers, and count the step.

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
            self.tracker.update_epoch(self.local_epoch)
            self.grad_averager.reset_accumulated_grads_()
        self.step_taken = self.local_epoch
        if not self.client_mode:
            self.state_averager.state_sharing_priority = self.local_epoch

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
        params = (param for group in self.opt.param_groups for param in group["params"])
        limit = self.max_grad_norm or float("inf")
        return float(clip_grad_norm_([param for param in params if param.grad is not None], limit))

    def _average_weights(self, group_size: int) -> None:
        """Average the weights of peers that have just taken the same step; without a group, keep them."""
        self._set_group(self.state_averager, size=group_size)
        self.state_averager.step(
            averaging_round=True,
            delay_averaging=True,
            averaging_opts={"timeout": 1.5 * self.matchmaking_time, "allow_retries": False},
        )
        with self.narrate(f"the weights' average at step {self.local_epoch}", self.averaging_timeout):
            while any(not update.done() for update in self.state_averager.pending_updates):
                time.sleep(POLL_S)
        self.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)

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
        with self.narrate(f"the swarm's state at step {self.tracker.global_epoch}", timeout_s):
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
        self.enter_step(self.local_epoch)
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
        return outcome and self.local_epoch >= self.tracker.global_epoch - 1

    def enter_step(self, step: int) -> None:
        """Take part from swarm step `step` on, with weights and optimizer state as they are now.

        Call it after loading a checkpoint or at a fresh start; from here on others can download this
        peer's state.
        """
        with self.state_averager.lock_state:
            self.state_averager.local_epoch = step
            self.state_averager._update_scheduler()
        self.tracker.update_step(step)
        self.tracker.announce()
        if not self.client_mode:
            self.state_averager.state_sharing_priority = step
            self.state_averager.allow_state_sharing = True

    def wait_for_stragglers(self, limit_s: float) -> None:
        """Stay for peers that are behind, so that they can download the last state; at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        with self.narrate("peers that are behind to fetch the last state", limit_s):
            while time.monotonic() < deadline and not self.should_leave():
                self.tracker.refresh()
                if all(peer.step >= self.local_epoch for peer in self.tracker.others):
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


def eta_s(tracker: SwarmTracker) -> float:
    """Seconds until the swarm holds its target, by what peers last reported; inf if nothing is known."""
    return max(0.0, float(tracker.global_progress.eta_next_epoch) - get_dht_time())
