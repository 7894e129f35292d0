"""A peer's optimizer without processes: its real parts around rounds that end as they are told."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch

from tests.kit.states import gradient_buffer, peer_state
from trahiv_cli.errors import RoundFailed
from trahiv_cli.progress.committed import Committed, CommittedCell
from trahiv_cli.progress.history import History
from trahiv_cli.progress.leases import Work
from trahiv_cli.progress.pace import DEFAULT_PACE, Pace
from trahiv_cli.progress.reports import Past, PeerProgress, Report
from trahiv_cli.progress.trust import Doubts, Standing
from trahiv_cli.rounds.claims import Outcome
from trahiv_cli.rounds.round_service import RoundInProgress
from trahiv_cli.rounds.vote import NotCommitted
from trahiv_cli.shared_memory import JoinerActivity
from trahiv_cli.state.inner_optimizer import initialize_state
from trahiv_cli.step.auto import Adaptation
from trahiv_cli.step.catch_up import CatchUp
from trahiv_cli.step.position import Position
from trahiv_cli.step.quorum import Quorum
from trahiv_cli.step.round_runner import RoundRunner
from trahiv_cli.step.run_settings import RunSettings
from trahiv_cli.step.stepper import Stepper
from trahiv_cli.step.weight_digests import WeightDigests
from trahiv_cli.swarm.watchdog import Alive
from trahiv_cli.telemetry.events import Event, Events

SETTINGS = RunSettings(
    matchmaking_s=0.001, averaging_s=0.01, target_batch_size=8, max_grad_norm=1.0, schema=b"schema"
)


def after(step: int, branch: bytes = b"", samples: int = 10) -> History:
    """The history of `step` steps of so many samples each; another `branch` is another history."""
    history = History()
    for number in range(step):
        history = history.extend(samples=samples, proof=b"%d" % number + branch)
    return history


def report(name: str, history: History, way: Sequence[History] = ()) -> PeerProgress:
    """What a peer reported that came through all histories of its `way`."""
    past = Past()
    for one in way:
        past.go_on(one)
    return reported(name, history, **past.to_wire() if way else {})


def reported(name: str, history: History, **told: bytes) -> PeerProgress:
    """What a peer reported that `told` of its past as `Past.to_wire` does."""
    stands = {"epoch": history.step, "samples_committed": history.samples, "history": history.digest}
    trains = {"samples_accumulated": 8, "samples_per_second": 1.0, "client_mode": False}
    return PeerProgress.of(name, Report(peer_id=b"", time=0.0, **stands, **trains, **told), 8)


class Tracker:
    """What the others reported, and what was reported of this peer."""

    own_id, fetch_every_s, steps_a_round, target_batch_size = "QmMe", 0.0, 1, 8
    is_behind = False

    def __init__(self, others: Iterable[PeerProgress] = (), gone: Iterable[str] = ()) -> None:
        self.others, self.gone, self.missing = tuple(others), frozenset(gone), frozenset[str]()
        self.committed = CommittedCell(Committed())
        self.samples: int | None = None
        self.doubts = Doubts()
        self.vouched: History | None = None
        self.attested: dict[History, tuple[bytes, bool]] = {}

    pause_updates = staticmethod(contextlib.nullcontext)
    refresh = announce = staticmethod(lambda: None)

    mates = property(attrgetter("others"))
    target = property(attrgetter("standing.target"))
    samples_accumulated = property(lambda self: self.samples or 0)

    history = property(attrgetter("committed.now.history"))
    companions = property(attrgetter("committed.now.group"))

    def begin_step(self, samples: int = 0, *, is_next: bool = True) -> None:
        self.samples, self.vouched = samples, None

    def expect_steps(self, steps: int, samples: int) -> None:
        self.steps_a_round, self.target_batch_size = steps, samples

    def vouch(self, history: History) -> None:
        self.vouched = history

    def attest(self, history: History, common: bytes, *, is_given: bool = False) -> None:
        self.attested[history] = common, is_given

    @property
    def standing(self) -> Standing:
        return Standing(own=self.history, witnesses=self.others, vouched=self.vouched)

    @property
    def ready_to_update_epoch(self) -> bool:
        return not self.is_behind and (self.samples is None or self.samples >= self.target_batch_size)

    def report_local_progress(self, step: int, samples_accumulated: int) -> None:
        self.samples = samples_accumulated


class Rounds:
    """Rounds without a process: each ends as `end` says; `claims` are those of this peer."""

    is_alive = staticmethod(lambda: True)
    cancel = staticmethod(lambda running: running.outcome.cancel())

    def __init__(self, peer: Peer, end: Callable[[Any], Outcome] | None) -> None:
        self.peer, self.end = peer, end
        self.averages = peer.gradients.averages
        self.claims: list[Any] = []
        self.exchanges: list[Any] = []
        self.asked: list[str] = []
        self.kept: dict[str, Any] = {}

    def expect_group(self, peers: Sequence[str], clients: Any, quorum: int, schema_suffix: bytes) -> None:
        self.expected = (tuple(peers), quorum, schema_suffix)

    def start_replay(self, donor: str, exchange: Any, silence_s: float) -> Any:
        self.asked.append(donor)
        replay: Any = concurrent.futures.Future()
        end = self.kept.get(donor, {}).get(exchange.after)
        replay.set_result(end and end(self))
        return replay

    def start(self, claim: Any, patience_s: float, exchange: Any) -> Any:
        self.claims.append(claim)
        self.exchanges.append(exchange)
        running: Any = RoundInProgress(concurrent.futures.Future(), concurrent.futures.Future())  # type: ignore[arg-type]
        try:
            running.outcome.set_result(self.end(self))
        except (RoundFailed, NotCommitted) as error:
            running.outcome.set_exception(error)
        return running


class Peer:
    """The parts of one peer's optimizer, around an inner one that is made of its weights, or of copies.

    `end` ends a round: it is given the averager, writes the average, and returns the outcome. The buffers are
    those of a `model`. `settings` are changes of `SETTINGS`.
    """

    def __init__(
        self,
        weights: Sequence[torch.nn.Parameter],
        make: Callable[[Any], torch.optim.Optimizer],
        tracker: Any = None,
        end: Callable[[Any], Outcome] | None = None,
        pace: Pace = DEFAULT_PACE,
        *,
        offload: bool = False,
        model: torch.nn.Module | None = None,
        **settings: Any,
    ) -> None:
        copies = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
        inner = make(copies if offload else weights)
        initialize_state(inner)
        self.told: list[Event] = []
        self.asked_for_help: list[str] = []  # one entry for each time that no group was found for long
        self.tracker, self.leaves = tracker or Tracker(), False
        self.leaves_after = math.inf  # tries that failed, after which it wishes to leave
        self.tracker.committed.change(pace=pace)
        committed = self.tracker.committed
        self.state = peer_state(inner, weights, model=model, committed=committed, offload=offload)
        self.gradients = gradient_buffer(weights)
        for copy, average in zip(copies, self.gradients.averages.tensors, strict=True):
            copy.grad = average
        self.rounds: Any = Rounds(self, end)
        self.exchange: Any = SimpleNamespace(allow=lambda is_giving: None)
        self.activity, self.work, told = JoinerActivity(), Work(), replace(SETTINGS, **settings)
        self.adaptation = Adaptation(told.auto_share, self.activity, 2, told.target_batch_size)
        self.quorum = Quorum(self.tracker, told.rules)
        events = Events(self.told.append)
        known: dict[str, Any] = vars(self) | {"settings": told, "events": events}
        known |= {
            "alive": Alive(None, events, self._is_to_leave),
            "digests": WeightDigests(self.state, self.tracker),
        }
        known |= {"when_no_group_is_found": lambda: self.asked_for_help.append("help")}

        def made(component: Any) -> Any:
            return component(**{one.name: known[one.name] for one in fields(component)})

        self.position = known["position"] = made(Position)
        self.runner = known["runner"] = made(RoundRunner)
        self.catch_up = known["catch_up"] = made(CatchUp)
        self.stepper = made(Stepper)
        self.position.enter(History())
        self.tracker.samples = None

    history = property(attrgetter("position.history"))

    def _is_to_leave(self) -> bool:
        return self.leaves or self.quorum.tries >= self.leaves_after

    @property
    def codes(self) -> list[str]:
        """The codes of the warnings so far."""
        return [event["code"] for event in self.told if event["event"] == "warning"]

    def train(self, gradient: float = 0.5, samples: int = 8, positions: Sequence[int] = ()) -> None:
        """Account for one batch; every weight has the same gradient everywhere."""
        if positions:
            samples = len(positions)
            self.work.announce(positions)
            self.gradients.expect_batch(samples, 10.0, lend=False)
        for weight in self.gradients.parameters:
            weight.grad = torch.full_like(weight, gradient)
        self.stepper.step(samples)
        for weight in self.gradients.parameters:
            weight.grad = None


class Positions:
    """Leases of a peer's next positions, without a network: notes what comes back."""

    unit = 1

    def __init__(self, peer: Peer) -> None:
        self.returned: list[int] = []
        self.settled: list[int] = []
        self.give_back, self.settle = self.returned.extend, self.settled.extend
        peer.work.divide(self)  # type: ignore[arg-type]


def sgd(params: Any) -> torch.optim.Optimizer:
    """An inner optimizer that moves weights by their gradients."""
    return torch.optim.SGD(params, lr=1.0)


def of_one_weight(*told: Any, **more: Any) -> tuple[Peer, torch.nn.Parameter]:
    """A peer of one weight of two values, at 0, in plain SGD with a rate of 1; the rest as in `Peer`."""
    weight = torch.nn.Parameter(torch.zeros(2))
    return Peer([weight], sgd, *told, **more), weight


def divided(*told: Any, **more: Any) -> tuple[Peer, torch.nn.Parameter, Positions]:
    """A peer of one weight that leases its positions."""
    peer, weight = of_one_weight(*told, **more)
    return peer, weight, Positions(peer)


def with_b() -> Tracker:
    """The reports of one other peer, that holds this peer's state."""
    return Tracker([report("QmB", History())])


def commits(average: float = 0.25, **changes: Any) -> Callable[[Any], Outcome]:
    """A round with QmB that ends with an average."""

    def end(rounds: Any) -> Outcome:
        rounds.averages.tensors[0].fill_(average)
        fields: dict[str, Any] = {"samples": {"QmMe": 8, "QmB": 5}, "group": ("QmMe", "QmB"), "left_out": {}}
        fields |= {"states": {"QmMe": b"same", "QmB": b"same"}, "proof": b"proof", "reason": ""}
        return Outcome(**fields | changes)

    return end


def fails(rounds: Any) -> Outcome:
    """A round that leaves nonsense behind and fails."""
    rounds.averages.tensors[0].fill_(torch.nan)
    raise RoundFailed("peer QmB sent nothing for too long")
