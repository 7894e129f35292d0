"""The optimizer that a peer steps: it trains, and averages with the others when a round is due.

1. A peer trains until the swarm holds the samples of a round (`stepper`). Its contribution is a gradient or
   local steps (`method`).
2. It averages its contribution with all peers of the same history (`round_runner`). Training waits meanwhile
   or goes on, as the `pace` says.
3. It moves its weights once most of the group hold the same average (`position`). A round that is not
   committed changes nothing: the contribution is kept for the next try.
4. A peer that missed rounds replays them, or adopts the state of other peers (`catch_up`). So does the
   smaller half of a swarm that was cut in two, once enough other peers report the same history (`trust`).

A peer steps alone if no other peer is there. If others are alive, or a member of its last group vanished
without a goodbye, it waits for them for up to `RoundRules.solo_after_s`.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter
from typing import Any

import hivemind
import torch
from hivemind.compression import CompressionBase

from trahiv_cli.progress.committed import Committed, CommittedCell
from trahiv_cli.progress.leases import Leases, Work
from trahiv_cli.progress.pace import RoundRules
from trahiv_cli.progress.tracker import SwarmTracker
from trahiv_cli.rounds.averages import Averages
from trahiv_cli.rounds.buffers import Buffers
from trahiv_cli.rounds.round_service import RoundOptions, Rounds, RoundService
from trahiv_cli.shared_memory import JoinerActivity
from trahiv_cli.state.peer_state import PeerState
from trahiv_cli.state.state_service import StateExchange, StateService
from trahiv_cli.step.auto import Adaptation
from trahiv_cli.step.catch_up import CatchUp
from trahiv_cli.step.gradients import GradientBuffer, set_gradients
from trahiv_cli.step.position import Position
from trahiv_cli.step.quorum import Quorum
from trahiv_cli.step.round_runner import SCHEMA_BYTES, RoundRunner
from trahiv_cli.step.run_settings import RunSettings
from trahiv_cli.step.stepper import Stepper
from trahiv_cli.step.weight_digests import WeightDigests
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.watchdog import Watchdog
from trahiv_cli.telemetry.events import Events


class SwarmOptimizer(hivemind.Optimizer):
    """`hivemind.Optimizer` with exact rounds: for each peer, a round either happens completely or not at all.

    `build.build_optimizer` creates it. Use it like a torch optimizer, with `step()` after each local
    backward pass. `local_epoch` is the step of the swarm that this peer has reached. With a running `node`:

        optimizer = build_optimizer(
            OptSection(run_id="my_run", target_batch_size=256),  # samples per step, over all peers
            RunSettings(),
            dht=node.dht,
            home=node,
            params=[{"params": list(model.parameters())}],
            model=model,
            optimizer=torch.optim.AdamW,
            samples_per_step=8,  # samples per call of `step()`
        )
        train.entry.enter_swarm(optimizer, newest=None, reached_step=0)  # download the state, or start
        while optimizer.local_epoch < 100:
            loss_of(model, next_batch()).backward()
            optimizer.step()
            model.zero_grad()
        optimizer.shutdown()

    Increase `target_batch_size` if `last_round.blocked_seconds` is a large part of the time between steps.
    Increase `matchmaking_time` if `last_round.group` often lacks peers that were ready for the round.

    `build` refuses harmful keywords of `hivemind.Optimizer`.

    Args:
        settings: settings of the run.
        events: receives waits and warnings.
        when_no_group_is_found: called in the thread of a round; an exception that it raises ends training.
        should_leave: called during waits; if it returns True, the wait ends early with nothing changed.
        home: the node of the DHT; if given, its processes are watched.
        model: the model of the weights, whose moving buffers are averaged, too; see `Buffers`.
        averager_opts: options of rounds; see `RoundOptions`. Other options of hivemind's averagers have no
            effect.
        keywords: see `hivemind.Optimizer`.
    """

    tracker: SwarmTracker
    state_averager: PeerState  # hivemind's names of the parts that hold state and gradients
    grad_averager: GradientBuffer

    def __init__(
        self,
        *,
        dht: hivemind.DHT,
        settings: RunSettings,
        events: Events | None = None,
        when_no_group_is_found: Callable[[], None] = lambda: None,
        should_leave: Callable[[], bool] = lambda: False,
        home: Node | None = None,
        model: torch.nn.Module | None = None,
        averager_opts: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.events = events or Events()
        self._alive = Watchdog(home, self.events, should_leave)
        self._buffers = Buffers(model)
        self.committed = CommittedCell(Committed(pace=settings.pace))
        self._keeps_best = settings.keeps_best
        try:
            super().__init__(dht=dht, **keywords)
            self._make_services(settings.rules, averager_opts or {})
        except BaseException:
            self.shutdown()  # the tracker's threads would go on reporting
            raise
        self._make_components(self._completed(settings), when_no_group_is_found)
        self._alive.watch()

    def _make_services(self, rules: RoundRules, options: dict[str, Any]) -> None:
        """Start the services in the DHT's process."""
        self._activity = JoinerActivity()
        silence_s: Any = options.get("sender_timeout", self.next_chunk_timeout)
        limits = {"sender_timeout": silence_s, "reducer_timeout": 2 * silence_s} | options
        names = {field.name for field in fields(RoundOptions)}
        round_options = RoundOptions(
            compression=self._codec,
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            **{name: value for name, value in limits.items() if name in names},
        )
        round_service = RoundService(
            f"{self.run_id}_grad_averager",  # part of the protocol, as the other prefix
            self.client_mode,
            self.grad_averager.averages,
            self._buffers.exchanged,
            rules,
            round_options,
            self._activity,
        )
        self.rounds = Rounds(self.dht, round_service)
        state = self.state_averager
        state_service = StateService(
            f"{self.run_id}_state_averager", self.client_mode, state.codec, self._activity
        )
        note_given = partial(self.tracker.attest, is_given=True)  # a joiner waits for the report
        self.exchange = StateExchange(self.dht, state_service, state, note_given)

    def _completed(self, settings: RunSettings) -> RunSettings:
        """Fill in the options of hivemind, and add the rules that judge rounds to the schema."""
        rules = settings.rules
        judged_by = repr((rules.norm_limit, rules.robust_mean, settings.pace, settings.auto_share)).encode()
        return replace(
            settings,
            schema=settings.schema + hashlib.sha256(judged_by).digest()[:SCHEMA_BYTES],
            matchmaking_s=self.matchmaking_time,
            averaging_s=self.averaging_timeout,
            load_state_s=self.load_state_timeout,
            target_batch_size=self.target_batch_size,
            average_state_every=self.average_state_every,
        )

    def _make_components(self, settings: RunSettings, when_no_group_is_found: Callable[[], None]) -> None:
        state = self.state_averager
        num_values = sum(param.numel() for param in state.main_parameters)
        shared: dict[str, Any] = {"settings": settings, "tracker": self.tracker, "events": self.events}
        self.settings = settings
        self.work = Work()
        self.adaptation = Adaptation(
            settings.auto_share, self._activity, num_values, settings.target_batch_size
        )
        quorum = Quorum(self.tracker, settings.rules)
        digests = WeightDigests(state, self.tracker)
        self.position = Position(
            **shared,
            state=state,
            gradients=self.grad_averager,
            work=self.work,
            quorum=quorum,
            digests=digests,
            adaptation=self.adaptation,
            exchange=self.exchange,
        )
        self.runner = RoundRunner(
            **shared,
            position=self.position,
            rounds=self.rounds,
            work=self.work,
            quorum=quorum,
            digests=digests,
            adaptation=self.adaptation,
            activity=self._activity,
            alive=self._alive,
            when_no_group_is_found=when_no_group_is_found,
        )
        self.catch_up = CatchUp(
            **shared,
            position=self.position,
            runner=self.runner,
            rounds=self.rounds,
            exchange=self.exchange,
            activity=self._activity,
            alive=self._alive,
        )
        self.stepper = Stepper(
            **shared,
            position=self.position,
            runner=self.runner,
            catch_up=self.catch_up,
            gradients=self.grad_averager,
            work=self.work,
            quorum=quorum,
            digests=digests,
            adaptation=self.adaptation,
            alive=self._alive,
        )

    def _make_progress_tracker(self, target_batch_size: int, **keywords: Any) -> SwarmTracker:
        return SwarmTracker(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            private_key=self.dht.signing_key,
            committed=self.committed,
            is_out=self._alive.is_out,
            start=True,
            **keywords,
        )

    def _make_state_averager(
        self, *, params: Any, optimizer: Any, scheduler: Any, state_compression: CompressionBase, **_: Any
    ) -> PeerState:
        return PeerState(
            params,
            optimizer,
            scheduler,
            committed=self.committed,
            buffers=self._buffers,
            codec=state_compression,
            offload=self.offload_optimizer,
            keeps_best=self._keeps_best,
        )

    def _make_gradient_averager(self, *_: Any, compression: CompressionBase, **__: Any) -> GradientBuffer:
        self._codec = compression
        state = self.state_averager
        shapes = [param.shape for param in state.main_parameters]
        averages = Averages(shapes, self.dht.tensors_lock)
        if self.offload_optimizer:
            set_gradients(state.weights, averages.tensors)
        return GradientBuffer(state.main_parameters, averages)

    def is_alive(self) -> bool:
        """Whether the DHT's process runs this peer's rounds."""
        return self.rounds.is_alive()

    def divide_data(self, number: int, *, unit: int = 1) -> Leases:
        """Divide `number` units of `unit` samples each among the peers; return the leases of this peer."""
        leases = Leases(
            self.tracker,
            lambda: self.ledger,
            number,
            unit=unit,
            samples_per_second=lambda: self.adaptation.measured.samples_per_second,
            # Without a DHT there are no leases, and without leases no steps to notice a failed process.
            while_waiting=self._alive.require,
        )
        self.work.divide(leases)
        return leases

    def expect_batch(self, samples: int, weight: float, *, lend: bool) -> float:
        """Announce a batch, or a part of one; see `GradientBuffer.expect_batch`."""
        return float(self.grad_averager.expect_batch(samples, weight, lend=lend))

    def forget_announced(self) -> None:
        """Withdraw the batches announced since the last `step`: their gradients will not come."""
        self.grad_averager.forget_announced()
        self.work.forget_announced()

    def start_batch_over(self, num_samples: int) -> None:
        """Drop the accumulated gradients: a backward pass that broke off has added a part of its own to them.

        The last `num_samples` announced positions, of the batch in training, stay announced.
        """
        self.stepper.start_batch_over(num_samples)

    def step(
        self, closure: Callable[[], torch.Tensor] | None = None, batch_size: int | None = None
    ) -> torch.Tensor | None:
        """Count one local batch, whose gradients are in `.grad`; take a swarm step if one is due.

        Args:
            closure: recomputes the loss, as in torch; called once.
            batch_size: number of samples in this batch; default `batch_size_per_step`.

        Raises:
            RoundFailed: this peer fell behind, and no peer gave it the newer state in time.
            PeerBroken: one of this peer's processes has failed.
            NotAdmitted: the swarm's owner has removed this peer.
            NotFinite: this peer's weights are not finite.
        """
        self._alive.require()
        loss = closure() if closure is not None else None
        self.stepper.step(batch_size or self.batch_size_per_step)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's weights; they become None in any case."""
        del set_to_none  # torch's own argument
        self.grad_averager.clear()

    def load_state_from_peers(self, timeout_s: float | None = None) -> bool:
        """Adopt the newest state in the swarm; see `CatchUp.load`, also for the errors."""
        return self.catch_up.load(timeout_s)

    def load_best(self) -> tuple[int, float] | None:
        """Put the weights with the best score into the model, after `shutdown`; see `PeerState.load_best`."""
        return self.state_averager.load_best(self.position.score)

    history = property(attrgetter("committed.now.history"))
    """See `Committed`."""
    ledger = property(attrgetter("committed.now.ledger"))
    pace = property(attrgetter("committed.now.pace"))

    last_round = property(attrgetter("stepper.last_round"))
    """See `Stepper`."""
    samples_in_time = property(attrgetter("stepper.lateness.samples_in_time"))
    """The largest number of samples in a batch that is in time for the swarm's steps; see `Lateness`."""
    step_samples = property(attrgetter("stepper.step_samples"))
    my_step_samples = property(attrgetter("stepper.my_step_samples"))

    step_taken = property(attrgetter("position.step_taken"))
    """See `Position`, and `method.Method` for the attributes of its method."""
    last_learning_rates = property(attrgetter("position.last_learning_rates"))
    last_grad_norm = property(attrgetter("position.method.last_grad_norm"))
    dropped_samples = property(attrgetter("position.method.dropped_samples"))
    own_steps = property(attrgetter("position.method.own_steps"))
    max_steps = property(attrgetter("settings.max_steps"))

    data_figures = property(lambda self: self.work.figures(self.ledger))
    """Figures about the trained part of the data; None if it is not divided. See `Work.figures`."""

    @property
    def agreed_values(self) -> dict[torch.Tensor, torch.Tensor]:
        """The agreed values of this history, by parameter or buffer, where the model's own may differ."""
        agreed = self.state_averager.agreed
        weights = self.state_averager.main_parameters
        of_weights = {} if agreed is None else dict(zip(weights, agreed, strict=True))
        return of_weights | self._buffers.agreed

    @contextlib.contextmanager
    def agreed_weights(self) -> Iterator[None]:
        """Put the `agreed_values` into the model within the block; its own values wait in host memory."""
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

    def shutdown(self) -> None:
        """Say goodbye, if a process is left for that; end the services, not the DHT. Safe to call twice."""
        if not self._alive.close():
            return
        built = vars(self)  # not all of it, if the constructor failed
        services = [built[name] for name in ("exchange", "rounds") if name in built]
        alive = [service for service in services if service.is_alive()]
        if "stepper" in built:
            self.stepper.stop()
        if "tracker" in built:
            if self._alive.failure:
                self.tracker.abandon()
                return
            self.tracker.shutdown(self.shutdown_timeout)
        if "exchange" in built:
            self.exchange.allow(False)
        if alive:
            time.sleep(0.7)  # the services answer the last requests: measured, 12 of 12 times
        for service in alive:
            service.shutdown(self.shutdown_timeout)

    def __del__(self) -> None:
        """Leave processes to `shutdown`: at interpreter exit, half of the modules that it needs are gone."""
