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
first that is committed `--seconds` after that. So it has whole cycles only, and the cycle that is under way
when the time is up counts in full, samples and seconds. That is a stopping time: by Wald's identity the mean
of the samples over the mean of the seconds is what a long run has. To stop at the last step before the time
is up would favour short cycles. A side that commits nothing for as long again as `--seconds`, or as two of
its rounds compute if that is longer, plus a minute, is given up: the time counts, no samples do. One that
never commits a joint step has 0.

**Blocked** is the share of the window that a peer's thread spent in `step()` beyond the median call, which
only accounts for one sample. That call itself, on this machine's CPU, bounds the utilisation: **bound** is
0.2 s over 0.2 s and the median call. **Bytes** are counted by the router on both uplinks together, over the
window's samples.

Both peers begin together, from the same weights, so that a state download is no part of it; with
`--join-after` the second comes later, and must get the first one's state before there can be a joint step.

Links below 100 Mbit/s may be simulated several at a time (`--parallel`): paced peers mostly sleep.
Needs root.
"""

from __future__ import annotations

import argparse
import bisect
import json
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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind import compression
from hivemind.utils import MPFuture

from trahiv_cli.optim.assemble import build_optimizer
from trahiv_cli.optim.auto import START_CODEC
from trahiv_cli.optim.pace import Pace
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.node import Node

sys.path.insert(0, str(Path(__file__).parent))  # also where a process is started from a test

from wan import Wan, address_of

SHAPES = [(16, 4096), (4096, 16)] * 61  # 7,995,392 values
TARGET, PACE_S = 100, 0.2
LEARNING_RATE = 1e-3
DELAY_MS = 25.0
CLOSE_RUNS_MBIT = 100.0
"""Links of this rate and more are simulated one at a time: the router takes a third of a core."""

SAMPLED_WEIGHTS = 1024
PATIENCE_S = 60.0
GO, STOP = "go", "stop"
START_LIMIT_S, LEAVE_LIMIT_S = 120.0, 20.0
POLL_S = 0.25


@dataclass(frozen=True)
class Side:
    """One of those that are compared."""

    system: str
    """`plain hivemind 1.1.12` or `trahiv`."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keywords of `hivemind.Optimizer`; codecs by name."""

    pace: Pace = Pace()
    """Of trahiv's; in mode auto, to begin with."""

    auto_share: float | None = None

    @property
    def samples_per_round(self) -> int:
        """Samples that one joint round commits, of both peers."""
        return TARGET * self.pace.steps_per_round


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
    "auto": Side(OURS, pace=Pace("overlap", START_CODEC), auto_share=0.05),
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

    joins_after_s: float = 0.0
    """How long the first peer trains before the second one starts; with 0 they begin together."""

    congestion: str = ""

    def __str__(self) -> str:
        """Say what it is, for a person who waits."""
        fall = f", then {self.falls_to_mbit:g}" if self.falls_to_mbit else ""
        return (
            f"{self.rate_mbit:g}{fall} Mbit/s, {2 * self.delay_ms:g} ms, loss {self.loss:g}, "
            f"{' and '.join(f'{pace_s:g}' for pace_s in self.paces_s)} s a sample"
        )


# -- in a peer's process --------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Ended:
    """A peer was ended by an error."""

    why: str


class OurPeer:
    """A peer of trahiv's in one of its modes."""

    def __init__(self, side: Side, folder: Path, number: int, address: str | None, params: Any) -> None:
        dht = DhtSection(host_maddrs=[_listen(number)], nat_port_map=False, auto_nat=False)
        self._node = Node(dht, folder / f"{number}.key", (address,) if address else ())
        self.address = self._node.addresses()[0].maddr
        self._params = params
        self.optimizer = build_optimizer(
            {"run_id": "home", "target_batch_size": TARGET, **side.options},
            dht=self._node.dht,
            params=[{"params": params}],
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=LEARNING_RATE),
            scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0),
            samples_per_step=1,
            max_grad_norm=0.0,
            pace=side.pace,
            auto_share=side.auto_share,
            notify=lambda code, message, hint: print(code, message, hint, flush=True),
        )
        self._digest, self._round = self.optimizer.history.digest, self.optimizer.last_round
        self.optimizer.enter_step(self.optimizer.history)  # all begin with the same weights

    def compute(self, params: Sequence[torch.Tensor], noise: Sequence[torch.Tensor]) -> None:
        """Do what a backward pass does with the gradient of one sample: add it to the accumulators."""
        self.optimizer.expect_batch(1, 1.0, lend=True)
        torch._foreach_add_([param.grad for param in params], noise)

    def news(self) -> Iterator[Committed | str]:
        """Tell of steps that were taken since the last call, and why rounds failed."""
        own = self.optimizer
        if own.last_round is not self._round:
            self._round = own.last_round
            if own.last_round is not None and not own.last_round.committed:
                yield own.last_round.reason
        if own.history.digest != self._digest:
            self._digest = own.history.digest
            if own.step_taken == own.local_epoch:
                yield Committed(
                    time.monotonic(), self._digest.hex(), own.step_samples, False, _some(self._params)
                )
            else:
                yield "downloaded the others' state"

    def close(self) -> None:
        """Leave the swarm."""
        self.optimizer.shutdown()
        self._node.close()


class ObservedOptimizer(hivemind.Optimizer):
    """hivemind's, unchanged, that notes which of its rounds averaged gradients with whom."""

    def __init__(self, **keywords: Any) -> None:
        self.news: deque[Committed | str] = deque()
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
            self.news.append(Committed(time.monotonic(), str(epoch), samples, True, weights))


class PlainPeer:
    """A peer of plain hivemind's."""

    def __init__(self, side: Side, folder: Path, number: int, address: str | None, params: Any) -> None:
        del folder
        codecs = {
            key: HIVEMINDS_CODECS[value]()
            for key, value in side.options.items()
            if key.endswith("compression")
        }
        self._dht = hivemind.DHT(
            initial_peers=[address] if address else [],
            host_maddrs=[_listen(number)],
            start=True,
            use_relay=False,
            auto_nat=False,
        )
        self.address = str(self._dht.get_visible_maddrs()[0])
        self.optimizer = ObservedOptimizer(
            dht=self._dht,
            run_id="home",
            params=params,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=LEARNING_RATE),
            target_batch_size=TARGET,
            batch_size_per_step=1,
            **side.options | codecs,
        )

    def compute(self, params: Sequence[torch.Tensor], noise: Sequence[torch.Tensor]) -> None:
        """Do what a backward pass does with the gradient of one sample: make it."""
        for param, grad in zip(params, noise, strict=True):
            param.grad = grad

    def news(self) -> Iterator[Committed | str]:
        """Tell of rounds since the last call, and why rounds failed."""
        while self.optimizer.news:
            yield self.optimizer.news.popleft()

    def close(self) -> None:
        """Leave the swarm."""
        self.optimizer.shutdown()
        self._dht.shutdown()


SYSTEMS: dict[str, Any] = {PLAIN: PlainPeer, OURS: OurPeer}


def _listen(number: int) -> str:
    return f"/ip4/{address_of(number)}/tcp/0"


def _some(params: Sequence[torch.Tensor]) -> Sample:
    """Return some of the weights, the same of every peer."""
    each = -(-SAMPLED_WEIGHTS // len(params))
    return tuple(torch.cat([param.detach().flatten()[:each] for param in params]).tolist())


def run_peer(
    pipe: Connection, side: Side, folder: str, number: int, address: str | None, pace_s: float
) -> None:
    """Enter the swarm, say so, and once told to, train until told to stop.

    Sends through `pipe`: its address; `(when a call of step() ended, how long it took)` for each sample;
    `Committed` for each step; why a round failed; `Ended` if there was an error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells it when to stop
    log = os.open(Path(folder) / f"{number}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    mp.set_start_method("fork", force=True)  # hivemind's processes can't be pickled
    MPFuture.reset_backend()  # its locks would be those of all peers: one that is ended may hold them
    torch.set_num_threads(1)
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in SHAPES]
    generator = torch.Generator().manual_seed(1 + number)
    noise = [torch.randn(shape, generator=generator) * 1e-3 for shape in SHAPES]
    try:
        peer = SYSTEMS[side.system](side, Path(folder), number, address, params)
        pipe.send(peer.address)
        if pipe.recv() == GO:
            _train(pipe, peer, params, noise, pace_s)
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
        for one in peer.news():
            pipe.send(one)


# -- what came of it ------------------------------------------------------------------------------


@dataclass
class Told:
    """What one peer has told."""

    calls: list[tuple[float, float]] = field(default_factory=list)
    """When each call of `step()` ended, and how long it took."""

    committed: dict[str, Committed] = field(default_factory=dict)
    failures: list[tuple[float, str]] = field(default_factory=list)
    """When the script heard of a failed round, and why it failed."""


@dataclass(frozen=True)
class Joint:
    """A step that all peers have committed."""

    at: float
    samples: int
    difference: float
    """Of the peers' weights, the largest."""


@dataclass(frozen=True)
class Window:
    """What is measured: see the top of this file."""

    start: float
    end: float
    samples: int
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
        joint.append(Joint(max(v.at for v in views), samples, max(apart)))
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
    start = joint[0].at
    last = next((n for n, one in enumerate(joint) if one.at >= start + seconds), None)
    counted = joint[1:] if last is None else joint[1 : last + 1]
    end = now if last is None else joint[last].at
    return Window(start, end, sum(one.samples for one in counted), len(counted)), last is not None


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

    failed_rounds: int
    """From the first sample on, as all peers tell it: one may be told of by both."""

    reasons: list[str]
    """Why."""

    first_step_s: float | None
    """From the moment when both began to train."""

    difference: float | None
    """Between weights of peers in joint steps: the largest of 1024 weights and all steps."""

    dropped_packets: int
    router_cpu: float
    """Share of a core, over the window."""


def _result(
    name: str, scenario: Scenario, told: list[Told], window: Window, began: float, traffic: list[Any]
) -> Result:
    joint = find_joint(told)
    seconds = window.end - window.start
    calls = [
        [min(took, at - window.start) for at, took in one.calls if window.start < at <= window.end]
        for one in told
    ]
    usual = [statistics.median(took) if took else 0.0 for took in calls]
    blocked = [
        sum(max(0.0, one - median) for one in took) / seconds
        for took, median in zip(calls, usual, strict=True)
    ]
    times = [at for at, _ in traffic]
    first, last = (
        traffic[min(bisect.bisect_left(times, at), len(times) - 1)][1] for at in (window.start, window.end)
    )
    sent = sum(last.up_bytes) - sum(first.up_bytes)
    return Result(
        side=name,
        rate_mbit=scenario.rate_mbit,
        utilisation=window.samples / sum(seconds / pace_s for pace_s in scenario.paces_s),
        steps=window.steps,
        seconds=seconds,
        bytes_per_sample=sent / window.samples if window.samples else None,
        blocked=blocked,
        call_ms=[1e3 * one for one in usual],
        longest_stall_s=[max(took, default=seconds) for took in calls],
        failed_rounds=sum(len(one.failures) for one in told),
        reasons=[reason for one in told for _, reason in one.failures],
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


@contextmanager
def _two_peers(wan: Wan, side: Side, scenario: Scenario, folder: str) -> Iterator[list[Connection]]:
    """Have the peers train; let them leave in good order at the end, if there is time."""
    pipes: list[Connection] = []
    processes: list[Any] = []
    address = None
    try:
        for number, pace_s in enumerate(scenario.paces_s):
            ours, theirs = mp.Pipe()
            processes.append(wan.spawn(number, run_peer, (theirs, side, folder, number, address, pace_s)))
            theirs.close()
            pipes.append(ours)
            own = _address(ours)
            address = address or own
            if scenario.joins_after_s and number == 0:
                ours.send(GO)
                interrupted.wait(scenario.joins_after_s)
        for pipe in pipes[1:] if scenario.joins_after_s else pipes:
            pipe.send(GO)
        yield pipes
    finally:
        for pipe in pipes:
            with suppress(OSError):
                pipe.send(STOP)
        deadline = time.monotonic() + LEAVE_LIMIT_S
        for process, pipe in zip(processes, pipes, strict=True):
            while process.is_alive() and time.monotonic() < deadline and not interrupted.is_set():
                with suppress(PeerEnded):
                    _listen_to(pipe, Told())  # or it would wait for room in the pipe
                process.join(0.05)


def _address(pipe: Connection) -> str:
    """Wait until a peer says where it is."""
    deadline = time.monotonic() + START_LIMIT_S
    while not pipe.poll(POLL_S):
        if interrupted.is_set():
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            raise PeerEnded(f"it did not start in {START_LIMIT_S:.0f} s")
    match pipe.recv():
        case Ended(why):
            raise PeerEnded(why)
        case str(address):
            return address
    raise AssertionError("a peer's address comes first")


def _listen_to(pipe: Connection, told: Told) -> bool:
    """Take what a peer has sent; say whether it told of a step.

    Raises:
        PeerEnded: it has ended.
    """
    has_stepped = False
    try:
        while pipe.poll():
            match pipe.recv():
                case Ended(why):
                    raise PeerEnded(why)
                case Committed() as one:
                    told.committed[one.key] = one
                    has_stepped = True
                case str(reason):
                    told.failures.append((time.monotonic(), reason))
                case (at, took):
                    told.calls.append((at, took))
    except (EOFError, ConnectionError) as error:
        raise PeerEnded("it was ended from outside") from error
    return has_stepped


def measure(name: str, scenario: Scenario, seconds: float) -> Result:
    """Run one side once."""
    side = SIDES[name]
    round_s = side.samples_per_round / sum(1 / pace_s for pace_s in scenario.paces_s)
    patience_s = max(seconds, 2 * round_s) + PATIENCE_S
    told = [Told() for _ in scenario.paces_s]
    network = (scenario.rate_mbit, scenario.delay_ms, scenario.loss, scenario.congestion)
    with (
        tempfile.TemporaryDirectory() as folder,
        Wan(len(told), *network) as wan,
        _two_peers(wan, side, scenario, folder) as pipes,
    ):
        began = last_step_at = time.monotonic()
        traffic = [(began, wan.counters())]
        joint: list[Joint] = []
        has_fallen = is_closed = False
        while not is_closed and time.monotonic() < last_step_at + patience_s:
            if interrupted.is_set():
                raise KeyboardInterrupt
            wait(pipes, POLL_S)
            have_stepped = [_listen_to(pipe, one) for pipe, one in zip(pipes, told, strict=True)]
            if any(have_stepped):
                joint = find_joint(told)
                last_step_at = max([began, *(one.at for one in joint)])
            now = time.monotonic()
            if now >= traffic[-1][0] + POLL_S:
                traffic.append((now, wan.counters()))
            window, is_closed = find_window(joint, seconds, began, now)
            is_half = bool(joint) and now >= window.start + seconds / 2
            if scenario.falls_to_mbit and is_half and not has_fallen:
                has_fallen = True
                for host in range(len(told)):
                    wan.set_link(host, scenario.falls_to_mbit, scenario.falls_to_mbit)
        traffic.append((time.monotonic(), wan.counters()))
        return _result(name, scenario, told, window, began, traffic)


def run_cells(cells: Sequence[tuple[str, Scenario]], seconds: float, parallel: int) -> list[Result | None]:
    """Measure sides, those on slow links `parallel` at a time, then the others alone; tell of each on stderr.

    Returns:
        The results, in the order of the cells; None where a peer was ended by an error.
    """
    results: list[Result | None] = [None] * len(cells)

    def run(place: int) -> None:
        side, scenario = cells[place]
        name = f"{side}: {scenario}"
        try:
            results[place] = one = measure(side, scenario, seconds)
        except PeerEnded as error:
            print(f"  {name}: a peer has ended.\n{error}", file=sys.stderr, flush=True)
        else:
            used = f"{one.utilisation:.3f} ({one.steps} steps in {one.seconds:.0f} s)"
            print(f"  {name}: {used}", file=sys.stderr, flush=True)

    slow = [place for place, (_, scenario) in enumerate(cells) if scenario.rate_mbit < CLOSE_RUNS_MBIT]
    fast = [place for place in range(len(cells)) if place not in slow]
    for places, workers in ((slow, parallel), (fast, 1)):
        with ThreadPoolExecutor(workers) as pool:
            try:
                list(pool.map(run, places))
            except BaseException:
                interrupted.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
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
                f"{median_of(float(one.failed_rounds) for one in runs):g}",
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


def main() -> None:
    """Measure all, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--links", type=float, nargs="+", default=[100, 20, 5], help="Mbit/s up and down")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), metavar="NAME",
                        help=f"of {', '.join(SIDES)}")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=120, help="least length of the window")
    parser.add_argument("--runs", type=int, default=3, help="of which the median counts")
    parser.add_argument("--parallel", type=int, default=1, help="how many links below 100 Mbit/s at a time")
    parser.add_argument("--join-after", type=float, default=0, help="s that the first peer trains alone")
    parser.add_argument("--congestion", default="", help="TCP's control (default: this machine's own)")
    parser.add_argument("--json", type=Path, help="write all runs here too")
    parser.add_argument("--plot", type=Path, help="draw the utilisation here too (PNG; needs matplotlib)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cells = [
        (side, Scenario(link, joins_after_s=options.join_after, congestion=options.congestion))
        for _ in range(options.runs)
        for link in options.links
        for side in options.sides
    ]
    results = [one for one in run_cells(cells, options.seconds, options.parallel) if one is not None]
    print(tables(results, options.links, options.sides))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1))
    if options.plot:
        plot(results, options.links, options.sides, options.plot)


if __name__ == "__main__":
    main()
