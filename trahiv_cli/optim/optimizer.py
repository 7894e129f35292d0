"""The optimizer that a peer steps: it trains, and averages with the others when a round is due.

1. A peer works until the swarm holds the samples of a round (`stepper`); what its work is, `method` says.
2. It averages what it worked for with all peers of the same history (`seeker`); training waits for that, or
   goes on, as the `pace` says.
3. It moves its weights once most of the group hold the same average (`position`). A round that is not
   committed changes nothing: the work stays, and goes into the next try.
4. A peer that missed rounds goes through them, or takes over the state of those that did not (`catch_up`),
   and so does the smaller half of a swarm that was cut in two, once enough of the others say that it is
   theirs (`majority`).

A peer steps alone where it is alone. Where others are alive, or most of its last group vanished without a
goodbye, it goes on working, up to a bound, for as long as `RoundRules.solo_after_s`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import hivemind
import torch

from trahiv_cli.optim.alive import Alive, Home
from trahiv_cli.optim.catch_up import CatchUp
from trahiv_cli.optim.codecs import EightBitStatistics
from trahiv_cli.optim.gathering import Gathering
from trahiv_cli.optim.gradients import ExactGradientAverager
from trahiv_cli.optim.history import History
from trahiv_cli.optim.leases import Leases, ShardLeases
from trahiv_cli.optim.ledger import Ledger
from trahiv_cli.optim.local_steps import LocalSteps
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.optim.parts import Limits, Parts
from trahiv_cli.optim.position import Position
from trahiv_cli.optim.progress import SwarmTracker
from trahiv_cli.optim.rounds import Round
from trahiv_cli.optim.rules import DEFAULT_RULES, RoundRules
from trahiv_cli.optim.seeker import SCHEMA_BYTES, GroupSeeker
from trahiv_cli.optim.state import ExactStateAverager
from trahiv_cli.optim.stepper import Stepper
from trahiv_cli.swarm.corrections.dht import drain
from trahiv_cli.swarm.snapshot import JoinerActivity
from trahiv_cli.telemetry.events import Events

ENDLESS = 2**31 - 1
"""Steps of a run without an end of its own."""


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
        self.events = events or Events()
        self._alive = Alive(home, self.events, should_leave)
        self._first_pace, self._interest = pace, JoinerActivity()
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
        self.state_averager.pace = pace
        judged_by = repr((rules.norm_limit, rules.robust_mean, pace, auto_share)).encode()
        self.parts = Parts(
            tracker=self.tracker,
            gradients=self.grad_averager,
            state=self.state_averager,
            alive=self._alive,
            events=self.events,
            interest=self._interest,
            limits=Limits(
                matchmaking_s=self.matchmaking_time,
                averaging_s=self.averaging_timeout,
                allreduce_s=self.allreduce_timeout,
                load_state_s=self.load_state_timeout,
                target_batch_size=self.target_batch_size,
                max_steps=max_steps,
                max_grad_norm=max_grad_norm,
                average_state_every=self.average_state_every,
            ),
            rules=rules,
            schema=schema + hashlib.sha256(judged_by).digest()[:SCHEMA_BYTES],
            auto_share=auto_share,
        )
        self.position = Position(self.parts)
        self.seeker = GroupSeeker(self.parts, self.position, when_no_group_is_found)
        self.catch_up = CatchUp(self.parts, self.position, self.seeker)
        self.stepper = Stepper(self.parts, self.position, self.seeker, self.catch_up)
        self.gathering = Gathering(self.parts)
        self.grad_averager.name = "what averages gradients in the DHT's process"
        self.state_averager.name = "what gives the state in the DHT's process"
        self._alive.watch(self.grad_averager, self.state_averager)

    # -- what hivemind.Optimizer builds ------------------------------------------------------------

    def _make_progress_tracker(self, target_batch_size: int, **keywords: Any) -> SwarmTracker:
        return SwarmTracker(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            private_key=self.dht.signing_key,
            is_out=self._alive.is_out,
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
            interest=self._interest,
            # Each peer's inner optimizer has a state of its own in modes with local steps.
            statistics_codec=EightBitStatistics() if self._first_pace.has_local_steps else None,
            start=True,
            **keywords,
        )

    # -- one local step ----------------------------------------------------------------------------

    def enter_step(self, history: History, ledger: Ledger | None = None) -> None:
        """Take part from `history.step` on, with weights and optimizer state as they are now.

        Call it after loading a checkpoint or at a fresh start; from here on others can download this
        peer's state.

        Args:
            history: of these.
            ledger: of the history; None: the one that this peer has.
        """
        self.position.enter(history, ledger)

    def divide_data(self, num_samples: int) -> Leases:
        """Have the swarm's peers train different samples; return where this peer's positions come from.

        Args:
            num_samples: in one pass over the data; the same for all peers.
        """
        # Without a DHT there are no leases, and without a lease no step, which would notice that.
        leases = Leases(self.tracker, lambda: self.ledger, num_samples, while_waiting=self._alive.require)
        self.parts.work.leases = leases
        return leases

    def divide_stream(self, num_shards: int) -> ShardLeases:
        """Have the swarm's peers read different shards of a stream; return where this peer's come from.

        Args:
            num_shards: in one pass; the same for all peers.
        """
        leases = ShardLeases(self.tracker, lambda: self.ledger, num_shards, while_waiting=self._alive.require)
        self.parts.work.leases = leases
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
        self.parts.work.announce(positions)
        return float(self.grad_averager.expect_batch(samples, weight, lend=lend))

    def forget_announced(self) -> None:
        """Take back what was announced since the last `step`: its gradients will not come."""
        self.grad_averager.forget_announced()
        self.parts.work.forget_announced()

    def start_batch_over(self, positions: Sequence[int]) -> None:
        """Take back the batch in training, which is announced anew, and drop what was accumulated before it.

        A backward pass that broke off has added part of its gradients to that.

        Args:
            positions: of its samples, as they were announced.
        """
        self.parts.work.forget_announced(but=positions)
        self.stepper.start_batch_over()

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
            NotFinite: this peer's weights are not finite.
        """
        del grad_scaler
        self._alive.require()
        loss = closure() if closure is not None else None
        self.stepper.step(batch_size or self.batch_size_per_step)
        return loss

    def load_state_from_peers(
        self, timeout_s: float | None = None, holders: Collection[str] | None = None
    ) -> bool:
        """Adopt the newest state in the swarm; see `CatchUp.load`.

        Raises:
            RoundFailed: nothing of it came for so long; this peer is unchanged.
        """
        return self.catch_up.load(timeout_s, holders)

    # -- where it is -------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """What was committed on the way to the weights that this peer holds."""
        return self.state_averager.history

    @property
    def ledger(self) -> Ledger:
        """The samples that the rounds of this history have trained."""
        return self.state_averager.ledger

    @property
    def pace(self) -> Pace:
        """The pace of the round after this history."""
        return self.state_averager.pace

    @property
    def max_steps(self) -> int:
        """The step of the swarm at which the run ends."""
        return self.parts.limits.max_steps

    @property
    def last_round(self) -> Round | None:
        """The last round that was tried; None while this peer is alone."""
        return self.stepper.last_round

    @property
    def step_samples(self) -> int:
        """Samples of all peers that went into the last round."""
        return self.stepper.step_samples

    @property
    def my_step_samples(self) -> int:
        """Samples of this peer that went into the last round."""
        return self.stepper.my_step_samples

    @property
    def step_taken(self) -> int:
        """The last step that this peer took itself, rather than downloaded."""
        return self.position.step_taken

    @property
    def last_learning_rates(self) -> list[float]:
        """Learning rates of the last step, one per param group; before the first, those it will have."""
        return self.position.last_learning_rates

    @property
    def last_grad_norm(self) -> float | None:
        """Norm of the gradient of the inner optimizer's last step, before clipping; None before the first."""
        return self.position.method.last_grad_norm

    @property
    def dropped_samples(self) -> int:
        """Samples whose gradients were not finite, since the start."""
        return self.position.method.dropped_samples

    @property
    def data_figures(self) -> dict[str, int] | None:
        """How much of the data was trained, where it is divided; see `Work.figures`."""
        return self.parts.work.figures(self.ledger)

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
        return self.position.method.own_steps if isinstance(self.position.method, LocalSteps) else []

    @own_steps.setter
    def own_steps(self, weights: Sequence[float]) -> None:
        if isinstance(self.position.method, LocalSteps):
            self.position.method.own_steps = list(weights)

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

    # -- the end -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Say goodbye, then have neither averager served any more; the end of the DHT ends both, too.

        Safe to call twice; the DHT is its owner's to close. Where one of this peer's processes has failed,
        nobody is left to say goodbye through.
        """
        if not self._alive.close():
            return
        built = [getattr(self, name, None) for name in ("state_averager", "grad_averager")]
        alive = [averager for averager in built if averager is not None and averager.is_alive()]
        tracker = getattr(self, "tracker", None)
        if hasattr(self, "stepper"):
            self.stepper.stop()
        if tracker is not None and self._alive.ailment:
            tracker.abandon()
            return
        if tracker is not None:
            tracker.shutdown(self.shutdown_timeout)
        drain(*alive)
        for averager in alive:
            averager.shutdown()

    def __del__(self) -> None:
        """Leave processes to `shutdown`: at interpreter exit half of what it needs is gone."""
