"""How busy home links leave two peers: trahiv's modes beside plain hivemind.

    .venv/bin/python benchmarks/home_links.py [--links 100 20 5] [--sides NAME ...] [--runs 3] [--parallel 2]

Two peers train 8M parameters (the LoRA of a 7B) on hosts of a simulated network (`wan.py`): one sample each
0.2 s, `target_batch_size` 100, 50 ms round trip. The 0.2 s are slept, the gradient is noise that is made once
and scaled anew for each sample; all that the optimizer does comes on top, its work on the CPU as well.

**Utilisation** is the number of samples in joint steps, over those that two peers without an optimizer
compute in the same time: seconds / 0.2 s * 2. A step is joint when both peers have committed it. Of ours that
is proved by equal digests of `history`, and both must have taken it themselves rather than downloaded it.
Plain hivemind's is one whose gradients both averaged in a group of two at the same epoch, starting from about
the same weights: half of 1024 of them differ by less than one learning rate, or they train different models.

**The window** opens when the first joint step is committed, by the later of the two, and closes with the
first that is committed `--seconds` after that. So it has whole cycles, each in full: to close at the last
step before the time is up would favour short ones.

**Only samples computed in the window count.** Peers compute during a round, too, and before the first one
while the swarm forms. So when the window opens they hold samples that a later step will commit, and to count
all of that step's would credit the window with what was computed before it (5 to 9 % too much at 5 Mbit/s).
With each step a peer says how many samples it holds; those that it computes until the other has committed the
step it holds as well. Counted are the samples of all joint steps after the first one, less what was held at
the first one's commit, plus what was held at the closing one's. Where nothing is lost, that is the number of
samples computed in the window, so a utilisation is at most 1, however short the window. Who loses samples
gains nothing: they are in no joint step, and held no more. What is held at the close and lost after it has
its like, taken off though it was lost, in what was held at the opening; and what can be held is bounded, so
the difference of the two goes to nothing with the length of the window.

A side that commits nothing for as long again as `--seconds`, or as two of its rounds compute if that is
longer, plus a minute, is given up. The time counts; what it holds does not, as no step may ever commit it.
One that never commits a joint step has 0.

**Blocked** is the share of the window that a peer's thread spent in `step()` beyond the median call, which
only accounts for one sample. That call itself, on this machine's CPU, bounds the utilisation: **bound** is
0.2 s over 0.2 s and the median call. **Bytes** are counted by the router on both uplinks together, over the
window's samples.

Both peers begin together, from the same weights, so that a state download is no part of it (`joining.py`).

Links below 100 Mbit/s may be simulated several at a time (`--parallel`): paced peers mostly sleep.
Needs root.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import multiprocessing as mp
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import hivemind
import torch
from hivemind import compression
from hivemind.utils import MPFuture

from trahiv_cli.optim.assemble import build_optimizer
from trahiv_cli.optim.codecs import CODECS
from trahiv_cli.optim.pace import Pace
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.node import Node

sys.path.insert(0, str(Path(__file__).parent))  # also where a process is started from a test

from wan import Counters, Wan, address_of

PACE_S = 0.2
LEARNING_RATE = 1e-3
INNER_OPTIMIZER = partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
"""Of both systems, with the kernel that transformers takes by default."""

DELAY_MS = 25.0
CLOSE_RUNS_MBIT = 100.0
"""Links of this rate and more are simulated one at a time: the router takes a third of a core."""

SAMPLED_WEIGHTS = 1024
PATIENCE_S = 60.0
GO, STOP = "go", "stop"
DOWNLOADED = "it fell behind, and took over the others' state"
START_LIMIT_S, LEAVE_LIMIT_S = 120.0, 20.0
POLL_S = 0.25


@dataclass(frozen=True)
class Workload:
    """What each peer trains."""

    shapes: tuple[tuple[int, int], ...]
    target_batch_size: int
    """Samples of all peers behind one step."""


LORA = Workload(((16, 4096), (4096, 16)) * 61, 100)
"""7,995,392 values."""


@dataclass(frozen=True)
class Side:
    """One of those that are compared."""

    system: str
    """`plain hivemind 1.1.12` or `trahiv`."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keywords of `hivemind.Optimizer`; codecs by name."""

    pace: Pace = Pace()
    """Of trahiv's; mode auto has its own."""

    auto_share: float | None = None


PLAIN, OURS = "plain hivemind 1.1.12", "trahiv"
TUNED = {
    "matchmaking_time": 3.0,
    "grad_compression": "float16",
    "state_averaging_compression": "float16",
    "offload_optimizer": True,
    "delay_optimizer_step": True,
    "delay_grad_averaging": True,
}
SIDES: dict[str, Side] = {
    "hivemind": Side(PLAIN),
    "hivemind-tuned": Side(PLAIN, TUNED),
    "sync": Side(OURS),
    "sync-float16": Side(OURS, {"grad_compression": "float16"}),
    "overlap-float16": Side(OURS, pace=Pace("overlap", "float16")),
    "overlap-uniform8": Side(OURS, pace=Pace("overlap", "uniform8")),
    "overlap-blockwise4": Side(OURS, pace=Pace("overlap", "blockwise4")),
    "diloco-10": Side(OURS, pace=Pace("diloco", "blockwise4", local_steps=10)),
    "streaming-10": Side(OURS, pace=Pace("streaming", "blockwise4", local_steps=10)),
    "auto": Side(OURS, auto_share=0.05),
}
HIVEMINDS_CODECS = {"float16": compression.Float16Compression}

Sample = tuple[float, ...]


@dataclass(frozen=True)
class Scenario:
    """What the peers' links and machines are like."""

    rate_mbit: float
    delay_ms: float = DELAY_MS
    loss: float = 0.0
    paces_s: tuple[float, ...] = (PACE_S, PACE_S)
    """Seconds for a sample, by peer."""

    falls_to_mbit: float | None = None
    """The rate from the middle of the window on."""

    congestion: str = ""

    def network(self) -> Wan:
        """Simulate the links: a host for each peer."""
        return Wan(len(self.paces_s), self.rate_mbit, self.delay_ms, self.loss, self.congestion)

    def __str__(self) -> str:
        """Say what it is, for a person who waits."""
        fall = f", then {self.falls_to_mbit:g}" if self.falls_to_mbit else ""
        return (
            f"{self.rate_mbit:g}{fall} Mbit/s, {2 * self.delay_ms:g} ms, loss {self.loss:g}, "
            f"{' and '.join(f'{pace_s:g}' for pace_s in self.paces_s)} s a sample"
        )


# -- in a peer's process --------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """How a peer enters the swarm."""

    side: Side
    workload: Workload
    folder: str
    """For its key and its log."""

    number: int
    host: str
    """The IPv4 address that it listens at."""

    initial_peer: str | None
    pace_s: float
    """Seconds for a sample."""

    is_late: bool
    """Whether the swarm has trained already, and this peer must get its state."""


@dataclass(frozen=True)
class Ready:
    """A peer can begin to train."""

    address: str


@dataclass(frozen=True)
class Committed:
    """A step, as one peer tells it."""

    at: float
    """On the clock that all processes of a machine share."""

    key: str
    """Equal in peers that took the step together: the history's digest, or hivemind's epoch."""

    samples: int
    is_share: bool
    """`samples` are this peer's alone; otherwise all that went into the step."""

    weights: Sample
    """Some of the peer's, with trahiv after the step, with hivemind before it."""

    held: int
    """Samples that this peer has computed by then, and that are in no committed step yet."""

    sent_bytes: int | None = None
    """In the round that led to it, counted at the sockets; None with hivemind, or if not known."""

    received_bytes: int | None = None


@dataclass(frozen=True)
class Adapted:
    """Mode auto has said by what pace it goes on, and why."""

    at: float
    step: int
    why: str
    before: Pace
    after: Pace

    @property
    def is_lighter(self) -> bool:
        """Whether fewer bytes than before are sent for a step."""
        return _bytes_a_step(self.after) < _bytes_a_step(self.before)


@dataclass(frozen=True)
class Downloading:
    """How far a download of the others' state is."""

    at: float
    num_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Adopted:
    """A peer has taken over the others' state."""

    at: float


@dataclass(frozen=True)
class Ended:
    """A peer was ended by an error."""

    why: str


def _bytes_a_step(pace: Pace) -> float:
    """Return what one of LORA's gradients takes, over the steps that it is sent for."""
    sizes = [torch.Size(shape).numel() for shape in LORA.shapes]
    codec = CODECS[pace.codec or "none"]()
    steps = pace.local_steps if pace.has_local_steps else 1
    return sum(codec.encoded_bytes(size, torch.float32) for size in sizes) / steps


Call = tuple[float, float]
"""When a call of `step()`, one for each sample, ended, and how long it took."""

News = Ready | Call | Committed | Adapted | Downloading | Adopted | Ended | str
"""What a peer tells; a text is why a round failed."""


class OurPeer:
    """A peer of trahiv's in one of its modes.

    Args:
        entry: how it enters.
        weights: what it trains, float32.
        training: keywords of `build_optimizer`, where they are to be others.
    """

    def __init__(self, entry: Entry, weights: Any, **training: Any) -> None:
        side, known = entry.side, (entry.initial_peer,) if entry.initial_peer else ()
        dht = DhtSection(host_maddrs=[_listen(entry)], nat_port_map=False, auto_nat=False)
        self._node = Node(dht, Path(entry.folder) / f"{entry.number}.key", known)
        self.address = self._node.addresses()[0].maddr
        self._params = weights
        self._news: deque[Downloading] = deque()
        self._paces: deque[str] = deque()
        usual: dict[str, Any] = {
            "params": [{"params": weights}],
            "optimizer": INNER_OPTIMIZER,
            "scheduler": lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0),
            "max_grad_norm": 0.0,
        }
        self.optimizer = build_optimizer(
            {"run_id": "home", "target_batch_size": entry.workload.target_batch_size, **side.options},
            dht=self._node.dht,
            samples_per_step=1,
            pace=side.pace,
            auto_share=side.auto_share,
            narrate=self._narrate,
            notify=self._notify,
            **usual | training,
        )
        self._digest, self._round = self.optimizer.history.digest, self.optimizer.last_round
        self._pace = self.optimizer.pace
        if not entry.is_late:
            self.optimizer.enter_step(self.optimizer.history)  # all begin with the same weights

    def take_state(self) -> None:
        """Download the swarm's state, as a peer does that joins."""
        from trahiv_cli.train.trainer import enter_swarm  # takes a second to import

        enter_swarm(self.optimizer, None, 0)

    @contextmanager
    def _narrate(self, what: str, until_s: float) -> Iterator[Any]:
        del what, until_s

        def hear(event: str, text: str, until_s: float, **fields: Any) -> None:
            del text, until_s
            if event == "download":
                self._news.append(Downloading(time.monotonic(), fields["bytes"], fields["total"]))

        yield hear

    def _notify(self, code: str, message: str, hint: str) -> None:
        print(code, message, hint, flush=True)
        if code == "pace":
            self._paces.append(message)

    def compute(self, params: Sequence[torch.Tensor], noise: Sequence[torch.Tensor]) -> None:
        """Do what a backward pass does with the gradient of one sample: add it to the accumulators."""
        self.optimizer.expect_batch(1, 1.0, lend=True)
        torch._foreach_add_([param.grad for param in params], noise)

    def news(self) -> Iterator[News]:
        """Tell of what has happened since the last call."""
        own = self.optimizer
        while self._news:
            yield self._news.popleft()
        last = own.last_round if own.last_round is not self._round else None
        self._round = own.last_round
        if last is not None and not last.committed:
            yield last.reason
        if own.history.digest != self._digest:
            self._digest = own.history.digest
            if own.step_taken == own.local_epoch:
                counted = last if last is not None and last.counted_at == "sockets" else None
                yield Committed(
                    at=time.monotonic(),
                    key=self._digest.hex(),
                    samples=own.step_samples,
                    is_share=False,
                    weights=_some(self._params),
                    held=own.tracker.local_progress.samples_accumulated,
                    sent_bytes=counted.bytes_sent if counted else None,
                    received_bytes=counted.bytes_received if counted else None,
                )
            else:
                yield Adopted(time.monotonic())
        while self._paces:
            yield Adapted(time.monotonic(), own.local_epoch, self._paces.popleft(), self._pace, own.pace)
            self._pace = own.pace

    def close(self) -> None:
        """Leave the swarm."""
        self.optimizer.shutdown()
        self._node.close()


class ObservedOptimizer(hivemind.Optimizer):
    """hivemind's, unchanged, that notes which of its rounds averaged gradients with whom."""

    def __init__(self, **keywords: Any) -> None:
        self.news: deque[News] = deque()
        self._begun: dict[int, tuple[int, int, Sample]] = {}
        super().__init__(**keywords)

    def _begin_averaging_gradients(self, grad_scaler: Any) -> bool:
        samples = self.grad_averager.local_samples_accumulated
        state = (self.local_epoch, samples, _some(self.state_averager.main_parameters))
        has_begun = super()._begin_averaging_gradients(grad_scaler)
        if has_begun:
            self._begun[id(self.scheduled_grads)] = state
        else:
            self.news.append("no round was begun: it saw nobody, or its group was lost")
        return has_begun

    def _average_gradients_and_load_into_optimizer(self, control: Any) -> None:
        super()._average_gradients_and_load_into_optimizer(control)
        epoch, samples, weights = self._begun.pop(id(control))
        if not control.done() or control.cancelled() or control.exception() is not None:
            self.news.append("the gradients were not averaged")
        elif len(control.result()) < 2:
            self.news.append("a group of one")
        else:
            held = self.grad_averager.local_samples_accumulated  # begun rounds have taken theirs
            self.news.append(Committed(time.monotonic(), str(epoch), samples, True, weights, held))

    def load_state_from_peers(self, **keywords: Any) -> None:
        """Load, and note whether anything came: hivemind goes on if not, and says nothing."""
        before = _some(self.state_averager.main_parameters)
        super().load_state_from_peers(**keywords)
        if _some(self.state_averager.main_parameters) == before:
            self.news.append("the state did not come")
        else:
            self.news.append(Adopted(time.monotonic()))


class PlainPeer:
    """A peer of plain hivemind's."""

    def __init__(self, entry: Entry, params: Any) -> None:
        options = entry.side.options
        codecs = {
            key: HIVEMINDS_CODECS[value]() for key, value in options.items() if key.endswith("compression")
        }
        self._dht = hivemind.DHT(
            initial_peers=[entry.initial_peer] if entry.initial_peer else [],
            host_maddrs=[_listen(entry)],
            start=True,
            use_relay=False,
            auto_nat=False,
        )
        self.address = str(self._dht.get_visible_maddrs()[0])
        self.optimizer = ObservedOptimizer(
            dht=self._dht,
            run_id="home",
            params=params,
            optimizer=INNER_OPTIMIZER,
            target_batch_size=entry.workload.target_batch_size,
            batch_size_per_step=1,
            **options | codecs,
        )

    def take_state(self) -> None:
        """Leave it to the first call of `step()`, which finds that this peer is behind."""

    def compute(self, params: Sequence[torch.Tensor], noise: Sequence[torch.Tensor]) -> None:
        """Do what a backward pass does with the gradient of one sample: make it."""
        for param, grad in zip(params, noise, strict=True):
            param.grad = grad

    def news(self) -> Iterator[News]:
        """Tell of rounds since the last call, and why rounds failed."""
        while self.optimizer.news:
            yield self.optimizer.news.popleft()

    def close(self) -> None:
        """Leave the swarm."""
        self.optimizer.shutdown()
        self._dht.shutdown()


SYSTEMS: dict[str, Any] = {PLAIN: PlainPeer, OURS: OurPeer}


def _listen(entry: Entry) -> str:
    return f"/ip4/{entry.host}/tcp/0"


def _some(params: Sequence[torch.Tensor]) -> Sample:
    """Return some of the weights, the same of every peer."""
    each = -(-SAMPLED_WEIGHTS // len(params))
    return tuple(torch.cat([param.detach().flatten()[:each] for param in params]).tolist())


def become_peer(entry: Entry) -> None:
    """Make this process fit for a peer: it prints to a file, and leaves when the parent says so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(Path(entry.folder) / f"{entry.number}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    mp.set_start_method("fork", force=True)  # hivemind's processes can't be pickled
    MPFuture.reset_backend()  # its locks would be those of all peers: one that is ended may hold them
    torch.set_num_threads(1)


def run_peer(pipe: Connection, entry: Entry) -> None:
    """Enter the swarm, say so, and once told to, train until told to stop.

    Sends `News` through `pipe`, `Ready` first.
    """
    become_peer(entry)
    torch.manual_seed(0)
    shapes = entry.workload.shapes
    params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    generator = torch.Generator().manual_seed(1 + entry.number)
    noise = [torch.randn(shape, generator=generator) * 1e-3 for shape in shapes]
    try:
        peer = SYSTEMS[entry.side.system](entry, params)
        pipe.send(Ready(peer.address))
        if pipe.recv() == GO:
            if entry.is_late:
                peer.take_state()
                _tell_news(pipe, peer)
            _train(pipe, peer, params, noise, entry.pace_s)
        peer.close()
    except Exception:
        pipe.send(Ended(traceback.format_exc()))
        raise


def _train(pipe: Connection, peer: Any, params: Any, noise: list[torch.Tensor], pace_s: float) -> None:
    """Train until something comes through the pipe."""
    count = 0
    while not pipe.poll():
        begun = time.monotonic()
        count += 1
        torch._foreach_mul_(noise, 0.8 if count % 2 else 1.25)
        peer.compute(params, noise)
        time.sleep(max(0.0, begun + pace_s - time.monotonic()))
        computed = time.monotonic()
        peer.optimizer.step(batch_size=1)
        pipe.send((time.monotonic(), time.monotonic() - computed))
        _tell_news(pipe, peer)


def _tell_news(pipe: Connection, peer: Any) -> None:
    for one in peer.news():
        pipe.send(one)


# -- what came of it ------------------------------------------------------------------------------


@dataclass
class Told:
    """What one peer has told."""

    address: str | None = None
    """None until it is ready."""

    calls: list[Call] = field(default_factory=list)
    committed: dict[str, Committed] = field(default_factory=dict)
    adapted: list[Adapted] = field(default_factory=list)
    downloading: list[Downloading] = field(default_factory=list)
    adopted: list[Adopted] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Why rounds failed."""

    def hear(self, one: News) -> None:
        """Take note of one piece of news.

        Raises:
            PeerEnded: it is that the peer has ended.
        """
        match one:
            case Ended(why):
                raise PeerEnded(why)
            case Ready(address):
                self.address = address
            case Committed(key=key):
                self.committed[key] = one
            case Adapted():
                self.adapted.append(one)
            case Downloading():
                self.downloading.append(one)
            case Adopted():
                self.adopted.append(one)
            case str(reason):
                self.failures.append(reason)
            case (float(at), float(took)):
                self.calls.append((at, took))

    def computed(self, after: float, until: float) -> int:
        """Count the samples of calls that began after one moment and ended before another."""
        places = (bisect.bisect_right(self.calls, (at, math.inf)) for at in (after, until))
        return sum(at - took >= after for at, took in self.calls[slice(*places)])


@dataclass(frozen=True)
class Joint:
    """A step that all peers have committed."""

    at: float
    """When the last of them did."""

    samples: int
    held: int
    """Samples computed by then that are in no committed step yet, of all peers."""

    difference: float
    """Of the peers' weights, the largest."""


@dataclass(frozen=True)
class Window:
    """What is measured: see the top of this file."""

    start: float
    end: float
    samples: int
    """Those that count."""

    steps: int


def find_joint(told: Sequence[Told]) -> list[Joint]:
    """Find the steps that all peers have committed together, in their order."""
    joint: list[Joint] = []
    for key in set.intersection(*(set(one.committed) for one in told)):
        views = [one.committed[key] for one in told]
        apart = [max(values) - min(values) for values in zip(*(v.weights for v in views), strict=True)]
        if views[0].is_share and statistics.median(apart) > LEARNING_RATE:
            continue
        samples = sum(v.samples for v in views) if views[0].is_share else views[0].samples
        at = max(v.at for v in views)
        held = sum(v.held + one.computed(v.at, at) for v, one in zip(views, told, strict=True))
        joint.append(Joint(at, samples, held, max(apart)))
    return sorted(joint, key=lambda one: one.at)


def find_window(joint: Sequence[Joint], seconds: float, began: float, now: float) -> tuple[Window, bool]:
    """Find the window as it is so far.

    Args:
        joint: the steps, in their order.
        seconds: how long it shall be at least.
        began: when all peers began to train: there it opens until there is a joint step.
        now: its end, as long as no step has closed it.

    Returns:
        The window, and whether a step has closed it.
    """
    if not joint:
        return Window(began, now, 0, 0), False
    first, *others = joint
    last = next((n for n, one in enumerate(others) if one.at >= first.at + seconds), None)
    counted = others if last is None else others[: last + 1]
    end, held = (now, 0) if last is None else (others[last].at, others[last].held)
    samples = sum(one.samples for one in counted) + held - first.held
    return Window(first.at, end, max(0, samples), len(counted)), last is not None


@dataclass(frozen=True)
class Result:
    """One run of a side."""

    side: str
    rate_mbit: float
    utilisation: float
    steps: int
    """Joint ones in the window."""

    seconds: float
    """Of the window."""

    bytes_per_sample: float | None
    """On all uplinks together; None without a joint step."""

    blocked: list[float]
    """Share of the window, by peer."""

    call_ms: list[float]
    """The median call of `step()`, by peer."""

    longest_stall_s: list[float]
    """The longest call of `step()` in the window, by peer."""

    reasons: list[str]
    """Why rounds failed, from the first sample on, as all peers tell it: one may be told of by both."""

    adapted: list[Adapted]
    """What mode auto said, by peer and then by time; times since the window opened."""

    fell_after_s: float | None
    """When the links fell, since the window opened."""

    adapted_after: tuple[int, float] | None
    """Joint steps and seconds from then until mode auto first went over to a lighter pace."""

    first_step_s: float | None
    """From the moment when both began to train."""

    difference: float | None
    """Between weights of peers in joint steps: the largest of 1024 weights and all steps."""

    dropped_packets: int
    router_cpu: float
    """Share of a core, over the window."""

    def __str__(self) -> str:
        """Say the most important, for a person who waits."""
        return f"{self.utilisation:.3f} ({self.steps} steps in {self.seconds:.0f} s)"


def calls_in(window: Window, told: Told) -> list[float]:
    """Return what is in the window of each of a peer's calls of `step()`, in seconds."""
    ended = (call for call in told.calls if window.start < call[0] <= window.end)
    return [min(took, at - window.start) for at, took in ended]


def utilisation(window: Window, paces_s: Iterable[float]) -> float:
    """Return the window's samples over those that peers of these paces compute in it without an optimizer."""
    return window.samples / sum((window.end - window.start) / pace_s for pace_s in paces_s)


def blocked_s(calls: Sequence[float]) -> float:
    """Return how long calls took together, each beyond the median."""
    usual = statistics.median(calls) if calls else 0.0
    return sum(max(0.0, took - usual) for took in calls)


def adaptation(told: Iterable[Told], after: float) -> tuple[int, float] | None:
    """Find when mode auto first went over to a lighter pace after a moment.

    What it knows is one exchange old: just after a link fell it may go over to a heavier one first.

    Returns:
        How many steps the peer that said it first committed from the moment on, the one with which it said it
        included, and how many seconds passed; None if no peer did.
    """
    said = [(news.at, one) for one in told for news in one.adapted if news.at > after and news.is_lighter]
    if not said:
        return None
    at, one = min(said, key=lambda pair: pair[0])
    return sum(after < step.at <= at for step in one.committed.values()), at - after


def _result(
    name: str,
    scenario: Scenario,
    told: list[Told],
    window: Window,
    began: float,
    fell_at: float | None,
    traffic: list[tuple[float, Counters]],
) -> Result:
    joint = find_joint(told)
    seconds = window.end - window.start
    calls = [calls_in(window, one) for one in told]
    times = [at for at, _ in traffic]
    first, last = (
        traffic[min(bisect.bisect_left(times, at), len(times) - 1)][1] for at in (window.start, window.end)
    )
    sent = sum(last.up_bytes) - sum(first.up_bytes)
    downloads = [DOWNLOADED for one in told for _ in one.adopted]
    return Result(
        side=name,
        rate_mbit=scenario.rate_mbit,
        utilisation=utilisation(window, scenario.paces_s),
        steps=window.steps,
        seconds=seconds,
        bytes_per_sample=sent / window.samples if window.samples else None,
        blocked=[blocked_s(took) / seconds for took in calls],
        call_ms=[1e3 * statistics.median(took) if took else 0.0 for took in calls],
        longest_stall_s=[max(took, default=seconds) for took in calls],
        reasons=[reason for one in told for reason in one.failures] + downloads,
        adapted=[replace(news, at=news.at - window.start) for one in told for news in one.adapted],
        fell_after_s=fell_at - window.start if fell_at else None,
        adapted_after=adaptation(told, fell_at) if fell_at else None,
        first_step_s=joint[0].at - began if joint else None,
        difference=max((one.difference for one in joint), default=None),
        dropped_packets=last.dropped_packets - first.dropped_packets,
        router_cpu=(last.cpu_s - first.cpu_s) / seconds,
    )


# -- in the parent --------------------------------------------------------------------------------

interrupted = threading.Event()
"""Set to end all measurements that are running in other threads."""


class PeerEnded(Exception):
    """A peer has ended in the middle of a run."""


class Spawn(Protocol):
    """Starts a process on a host, as `Wan.spawn`."""

    def __call__(self, host: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
        """Start one that calls the function, and return it."""


class Peers:
    """The peers of a run, each in a process of its own, for as long as the `with` block lasts.

    At its end they leave in good order, if there is time. What they print is in `folder` until then.

    Args:
        spawn: starts processes.
        run: what they do; called with a pipe and what `start` was given.
    """

    def __init__(self, spawn: Spawn, run: Callable[..., None] = run_peer) -> None:
        self._spawn, self._run = spawn, run
        self._folder = tempfile.TemporaryDirectory()
        self.folder = self._folder.name
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.told: list[Told] = []

    @property
    def address(self) -> str | None:
        """Of the first, once it is ready, for the others."""
        return self.told[0].address if self.told else None

    def start(self, entry: Any) -> None:
        """Start one more, which enters the swarm."""
        ours, theirs = mp.Pipe()
        self.processes.append(self._spawn(len(self.pipes), self._run, (theirs, entry)))
        theirs.close()
        self.pipes.append(ours)
        self.told.append(Told())

    def wait_until_ready(self) -> None:
        """Wait until each can begin to train.

        Raises:
            PeerEnded: one has ended, or is not there in time.
        """
        deadline = time.monotonic() + START_LIMIT_S
        while any(one.address is None for one in self.told):
            self.listen()
            if time.monotonic() > deadline:
                raise PeerEnded(f"it did not start in {START_LIMIT_S:.0f} s")

    def go(self, numbers: Iterable[int]) -> None:
        """Have these train, as soon as they are ready."""
        for number in numbers:
            self.pipes[number].send(GO)

    def listen(self) -> bool:
        """Wait a moment for news, and take it down in `told`; say whether somebody told of a step.

        Raises:
            PeerEnded: one has ended.
            KeyboardInterrupt: the benchmark is being ended.
        """
        if interrupted.is_set():
            raise KeyboardInterrupt
        wait(self.pipes, POLL_S)
        has_stepped = False
        for pipe, told in zip(self.pipes, self.told, strict=True):
            for one in hear(pipe):
                told.hear(one)
                has_stepped |= isinstance(one, Committed)
        return has_stepped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send(STOP)
        deadline = time.monotonic() + LEAVE_LIMIT_S
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            while process.is_alive() and time.monotonic() < deadline and not interrupted.is_set():
                with suppress(PeerEnded):
                    deque(hear(pipe), maxlen=0)  # or it would wait for room in the pipe
                process.join(0.05)
        self._folder.cleanup()


def hear(pipe: Connection) -> Iterator[Any]:
    """Give what a peer has sent so far.

    Raises:
        PeerEnded: it was ended from outside.
    """
    try:
        while pipe.poll():
            yield pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise PeerEnded("it was ended from outside") from error


def measure(name: str, scenario: Scenario, seconds: float) -> Result:
    """Run one side once."""
    side = SIDES[name]
    samples = LORA.target_batch_size * side.pace.steps_per_round
    patience_s = max(seconds, 2 * samples / sum(1 / pace_s for pace_s in scenario.paces_s)) + PATIENCE_S
    with scenario.network() as wan, Peers(wan.spawn) as peers:
        for number, pace_s in enumerate(scenario.paces_s):
            at = address_of(number)
            peers.start(Entry(side, LORA, peers.folder, number, at, peers.address, pace_s, is_late=False))
            peers.wait_until_ready()
        peers.go(range(len(peers.told)))
        began = last_step_at = time.monotonic()
        traffic = [(began, wan.counters())]
        joint: list[Joint] = []
        is_closed, fell_at = False, None
        while not is_closed and time.monotonic() < last_step_at + patience_s:
            if peers.listen():
                joint = find_joint(peers.told)
                last_step_at = max([began, *(one.at for one in joint)])
            now = time.monotonic()
            if now >= traffic[-1][0] + POLL_S:
                traffic.append((now, wan.counters()))
            window, is_closed = find_window(joint, seconds, began, now)
            is_half = bool(joint) and now >= window.start + seconds / 2
            if scenario.falls_to_mbit and is_half and fell_at is None:
                fell_at = now
                for host in range(len(peers.told)):
                    wan.set_link(host, scenario.falls_to_mbit, scenario.falls_to_mbit)
        traffic.append((time.monotonic(), wan.counters()))
        return _result(name, scenario, peers.told, window, began, fell_at, traffic)


Item = TypeVar("Item")
Measured = TypeVar("Measured")


def run_all(run: Callable[[Item], None], items: Sequence[Item], parallel: int) -> None:
    """Call `run` with each item, so many at a time; an error, or Ctrl-C, ends them all."""
    with ThreadPoolExecutor(parallel) as pool:
        try:
            list(pool.map(run, items))
        except BaseException:
            interrupted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def tell_of(name: str, measure: Callable[[], Measured]) -> Measured | None:
    """Measure, and tell of it on stderr; None if a peer was ended by an error."""
    try:
        measured = measure()
    except PeerEnded as error:
        print(f"  {name}: a peer has ended.\n{error}", file=sys.stderr, flush=True)
        return None
    print(f"  {name}: {measured}", file=sys.stderr, flush=True)
    return measured


def run_cells(
    cells: Sequence[tuple[str, Scenario]], measure: Callable[[str, Scenario], Measured], parallel: int
) -> list[Measured | None]:
    """Measure sides, those on slow links `parallel` at a time, then the others alone; tell of each on stderr.

    Returns:
        What was measured, in the order of the cells; None where a peer was ended by an error.
    """
    results: list[Measured | None] = [None] * len(cells)

    def run(place: int) -> None:
        side, scenario = cells[place]
        results[place] = tell_of(f"{side}: {scenario}", partial(measure, side, scenario))

    slow = [place for place, (_, scenario) in enumerate(cells) if scenario.rate_mbit < CLOSE_RUNS_MBIT]
    fast = [place for place in range(len(cells)) if place not in slow]
    run_all(run, slow, parallel)
    run_all(run, fast, 1)
    return results


def _of(results: Sequence[Result], side: str, rate_mbit: float) -> list[Result]:
    return [one for one in results if one.side == side and one.rate_mbit == rate_mbit]


def median_of(values: Iterable[float | None]) -> float:
    """Return the median of those that are known; NaN if none is."""
    known = [value for value in values if value is not None and value == value]
    return statistics.median(known) if known else float("nan")


def tables(results: Sequence[Result], links: Sequence[float], sides: Sequence[str]) -> str:
    """Lay the medians out as Markdown."""
    lines = [f"| link, up and down | {' | '.join(sides)} |", "|---" * (1 + len(sides)) + "|"]
    for link in links:
        cells = []
        for side in sides:
            all_of = sorted(one.utilisation for one in _of(results, side, link))
            spread = f" ({all_of[0]:.2f}-{all_of[-1]:.2f})" if len(all_of) > 1 else ""
            cells.append(f"{median_of(all_of):.3f}{spread}")
        lines.append(f"| {link:g} Mbit/s | {' | '.join(cells)} |")
    lines += [
        "",
        "| link | side | kB a sample | blocked | longest stall, s | `step()`, ms | bound "
        "| first joint step, s | joint steps | failed rounds | weights differ by |",
        "|---" * 11 + "|",
    ]
    for link in links:
        for side in sides:
            runs = _of(results, side, link)
            call_ms = median_of(statistics.fmean(one.call_ms) for one in runs)
            numbers = (
                f"{median_of(one.bytes_per_sample for one in runs) / 1e3:.1f}",
                f"{median_of(statistics.fmean(one.blocked) for one in runs):.3f}",
                f"{median_of(max(one.longest_stall_s) for one in runs):.1f}",
                f"{call_ms:.1f}",
                f"{PACE_S / (PACE_S + call_ms / 1e3):.3f}",
                f"{median_of(one.first_step_s for one in runs):.0f}",
                f"{median_of(float(one.steps) for one in runs):g}",
                f"{median_of(float(len(one.reasons)) for one in runs):g}",
                f"{median_of(one.difference for one in runs):.1e}",
            )
            lines.append(f"| {link:g} | {side} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def plot(results: Sequence[Result], links: Sequence[float], sides: Sequence[str], path: Path) -> None:
    """Draw the utilisation as bars, a group for each link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    width = 0.8 / len(sides)
    for number, side in enumerate(sides):
        heights = [median_of(one.utilisation for one in _of(results, side, link)) for link in links]
        places = [place + (number - (len(sides) - 1) / 2) * width for place in range(len(links))]
        axes.bar_label(axes.bar(places, heights, width, label=side), fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(links)), [f"{link:g} Mbit/s" for link in links])
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("utilisation")
    axes.set_title("8M parameters, 2 peers, 0.2 s a sample, target batch 100, 50 ms round trip")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    figure.savefig(path, dpi=150)


def add_options(parser: argparse.ArgumentParser, sides: Sequence[str], runs: int) -> None:
    """Add what all benchmarks on simulated links can be told; `sides` and `runs` are defaults."""
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=sides, metavar="NAME",
                        help=f"of {', '.join(SIDES)}")  # fmt: skip
    parser.add_argument("--runs", type=int, default=runs, help="of which the median counts")
    parser.add_argument("--parallel", type=int, default=1, help="how many links below 100 Mbit/s at a time")
    parser.add_argument("--congestion", default="", help="TCP's control (default: this machine's own)")
    parser.add_argument("--json", type=Path, help="write all runs here too")


def cells_of(options: argparse.Namespace) -> list[tuple[str, Scenario]]:
    """Each run of each side on each link."""
    return [
        (side, Scenario(link, congestion=options.congestion))
        for _ in range(options.runs)
        for link in options.links
        for side in options.sides
    ]


def main() -> None:
    """Measure all, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--links", type=float, nargs="+", default=[100, 20, 5], help="Mbit/s up and down")
    add_options(parser, list(SIDES), runs=3)
    parser.add_argument("--seconds", type=float, default=120, help="least length of the window")
    parser.add_argument("--plot", type=Path, help="draw the utilisation here too (PNG; needs matplotlib)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    measured = run_cells(cells_of(options), partial(measure, seconds=options.seconds), options.parallel)
    results = [one for one in measured if one is not None]
    print(tables(results, options.links, options.sides))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1))
    if options.plot:
        plot(results, options.links, options.sides, options.plot)


if __name__ == "__main__":
    main()
