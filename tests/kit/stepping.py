"""A peer's optimizer without processes: its real parts around rounds that end as they are told."""

import concurrent.futures
import contextlib
import math
from dataclasses import fields, replace
from operator import attrgetter
from types import SimpleNamespace

import torch

from tests.kit.states import gradient_buffer, peer_state
from trahiv_cli.errors import RoundFailed
from trahiv_cli.progress.committed import Committed, CommittedCell
from trahiv_cli.progress.history import History
from trahiv_cli.progress.leases import Work
from trahiv_cli.progress.ledger import Spans
from trahiv_cli.progress.pace import DEFAULT_PACE
from trahiv_cli.progress.reports import CommitPath, PeerProgress, Report
from trahiv_cli.progress.trust import Plausibility, SwarmView
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
from trahiv_cli.swarm.watchdog import Watchdog
from trahiv_cli.telemetry.events import Events

SETTINGS = RunSettings(
    matchmaking_s=0.001, averaging_s=0.01, target_batch_size=8, max_grad_norm=1.0, schema=b"schema"
)


def after(step, branch=b"", samples=10):
    """The history of `step` steps of so many samples each; another `branch` is another history."""
    history = History()
    for number in range(step):
        history = history.extend(samples=samples, proof=b"%d" % number + branch)
    return history


def spans(*bounds):
    """Return spans of these bounds, ascending: `spans(0, 4, 8, 12)` has two."""
    return Spans.from_wire(list(bounds))


def report(name, history, way=()):
    """What a peer reported that came through all histories of its `way`."""
    past = CommitPath()
    for one in way:
        past.go_on(one)
    return reported(name, history, **past.to_wire() if way else {})


def reported(name, history, **told):
    """What a peer reported that `told` of its past as `CommitPath.to_wire` does."""
    stands = {"epoch": history.step, "samples_committed": history.samples, "history": history.digest}
    trains = {"samples_accumulated": 8, "samples_per_second": 1.0, "client_mode": False}
    return PeerProgress.of(name, Report(peer_id=b"", time=0.0, **stands, **trains, **told), 8)


class Tracker:
    """What the others reported, and what was reported of this peer."""

    own_id = "QmMe"
    fetch_every_s = 0.0
    steps_a_round = 1
    target_batch_size = 8
    is_behind = False

    def __init__(self, others=(), gone=()):
        self.others = tuple(others)
        self.gone = frozenset(gone)
        self.missing = frozenset()
        self.committed = CommittedCell(Committed())
        self.samples = None
        self.plausibility = Plausibility()
        self.vouched = None
        self.attested = {}

    pause_updates = staticmethod(contextlib.nullcontext)
    refresh = announce = staticmethod(lambda: None)

    mates = property(attrgetter("others"))
    target = property(attrgetter("view.target"))
    samples_accumulated = property(lambda self: self.samples or 0)

    history = property(attrgetter("committed.now.history"))
    companions = property(attrgetter("committed.now.group"))

    def begin_step(self, samples=0, *, is_next=True):
        self.samples = samples
        self.vouched = None

    def expect_steps(self, steps, samples):
        self.steps_a_round = steps
        self.target_batch_size = samples

    def vouch(self, history):
        self.vouched = history

    def attest(self, history, common, *, is_given=False):
        self.attested[history] = common, is_given

    @property
    def view(self):
        return SwarmView(own=self.history, witnesses=self.others, vouched=self.vouched)

    @property
    def ready_to_update_epoch(self):
        return not self.is_behind and (self.samples is None or self.samples >= self.target_batch_size)

    def report_local_progress(self, step, samples_accumulated):
        self.samples = samples_accumulated


class Rounds:
    """Rounds without a process: each ends as `end` says; `claims` are those of this peer."""

    is_alive = staticmethod(lambda: True)
    cancel = staticmethod(lambda running: running.outcome.cancel())

    def __init__(self, peer, end):
        self.end = end
        self.averages = peer.gradients.averages
        self.claims = []
        self.exchanges = []
        self.asked = []
        self.kept = {}

    def expect_group(self, peers, clients, quorum, schema_suffix):
        self.expected = (tuple(peers), quorum, schema_suffix)

    def start_replay(self, donor, exchange, silence_s):
        self.asked.append(donor)
        replay = concurrent.futures.Future()
        end = self.kept.get(donor, {}).get(exchange.after)
        replay.set_result(end and end(self))
        return replay

    def start(self, claim, patience_s, exchange):
        self.claims.append(claim)
        self.exchanges.append(exchange)
        running = RoundInProgress(concurrent.futures.Future(), concurrent.futures.Future())
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
        weights,
        make,
        tracker=None,
        end=None,
        pace=DEFAULT_PACE,
        *,
        offload=False,
        model=None,
        **settings,
    ):
        copies = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
        inner = make(copies if offload else weights)
        initialize_state(inner)
        self.told = []
        self.asked_for_help = []  # one entry for each time that no group was found for long
        self.tracker = tracker or Tracker()
        self.leaves = False
        self.leaves_after = math.inf  # tries that failed, after which it wishes to leave
        self.tracker.committed.change(pace=pace)
        committed = self.tracker.committed
        self.state = peer_state(inner, weights, model=model, committed=committed, offload=offload)
        self.gradients = gradient_buffer(weights)
        for copy, average in zip(copies, self.gradients.averages.tensors, strict=True):
            copy.grad = average
        self.rounds = Rounds(self, end)
        self.exchange = SimpleNamespace(allow=lambda is_giving: None)
        events = Events(self.told.append)
        told = replace(SETTINGS, **settings)
        self.activity = JoinerActivity()
        self.work = Work()
        self.adaptation = Adaptation(told.auto_share, self.activity, 2, told.target_batch_size)
        self.quorum = Quorum(self.tracker, told.rules)
        known = vars(self) | {"settings": told, "events": events}
        known["alive"] = Watchdog(None, events, self._is_to_leave)
        known["digests"] = WeightDigests(self.state, self.tracker)
        known["when_no_group_is_found"] = lambda: self.asked_for_help.append("help")

        def made(component):
            return component(**{one.name: known[one.name] for one in fields(component) if one.name in known})

        self.position = known["position"] = made(Position)
        self.runner = known["runner"] = made(RoundRunner)
        self.catch_up = known["catch_up"] = made(CatchUp)
        self.stepper = made(Stepper)
        self.position.enter(History())
        self.tracker.samples = None

    history = property(attrgetter("position.history"))

    def _is_to_leave(self):
        return self.leaves or self.quorum.tries >= self.leaves_after

    @property
    def codes(self):
        """The codes of the warnings so far."""
        return [event["code"] for event in self.said("warning")]

    def said(self, kind):
        """The events of one kind so far."""
        return [event for event in self.told if event["event"] == kind]

    def train(self, gradient=0.5, samples=8, positions=()):
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

    def __init__(self, peer):
        self.returned = []
        self.settled = []
        self.give_back = self.returned.extend
        self.settle = self.settled.extend
        peer.work.divide(self)


def sgd(params):
    """An inner optimizer that moves weights by their gradients."""
    return torch.optim.SGD(params, lr=1.0)


def of_one_weight(*told, **more):
    """A peer of one weight of two values, at 0, in plain SGD with a rate of 1; the rest as in `Peer`."""
    weight = torch.nn.Parameter(torch.zeros(2))
    return Peer([weight], sgd, *told, **more), weight


def divided(*told, **more):
    """A peer of one weight that leases its positions."""
    peer, weight = of_one_weight(*told, **more)
    return peer, weight, Positions(peer)


def with_b():
    """The reports of one other peer, that holds this peer's state."""
    return Tracker([report("QmB", History())])


def commits(average=0.25, **changes):
    """A round with QmB that ends with an average."""

    def end(rounds):
        rounds.averages.tensors[0].fill_(average)
        samples = {"QmMe": 8, "QmB": 5}
        outcome = Outcome(samples, tuple(samples), {}, dict.fromkeys(samples, b"same"), b"proof", "")
        return replace(outcome, **changes)

    return end


def fails(rounds):
    """A round that leaves nonsense behind and fails."""
    rounds.averages.tensors[0].fill_(torch.nan)
    raise RoundFailed("peer QmB sent nothing for too long")
