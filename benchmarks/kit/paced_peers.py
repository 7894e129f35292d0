"""Peers that compute each sample for a set time, over simulated links: trahiv's modes, and plain hivemind.

Each is a process of its own. The time of a sample is slept, and the gradient is noise that is made once
and scaled anew for each sample; all that the optimizer does comes on top, its work on the CPU as well. A
peer tells through a pipe what happens (`tests.kit.figures`).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import hivemind
import psutil
import torch
from hivemind import compression
from hivemind.utils import MPFuture

from benchmarks.kit.processes import tree_of
from tests.kit.figures import LEARNING_RATE, Adapted, Committed, News, PeerEnded, Sample, Told
from tests.kit.wan import PROCESSES, address_of
from trahiv_cli.progress.pace import Pace
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.step.build import OptKeywords, build_optimizer
from trahiv_cli.step.run_settings import RunSettings
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events

PACE_S = 0.2
INNER_OPTIMIZER = partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
"""Of both systems, with the kernel that transformers takes by default."""

SAMPLED_WEIGHTS = 1024
GO, STOP = "go", "stop"
START_LIMIT_S, LEAVE_LIMIT_S, END_LIMIT_S, POLL_S = 120.0, 20.0, 5.0, 0.25


@dataclass(frozen=True)
class Workload:
    """What each peer trains."""

    shapes: tuple[tuple[int, int], ...]
    target_batch_size: int
    """Samples of all peers behind one step."""


LORA = Workload(((16, 4096), (4096, 16)) * 61, 100)  # 7,995,392 values


@dataclass(frozen=True)
class Side:
    """One of those that are compared."""

    system: str
    """`plain hivemind 1.1.12` or `trahiv`."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keywords of `hivemind.Optimizer`; trahiv's codecs by name."""

    pace: Pace = Pace()
    """Of trahiv's; mode auto has its own."""

    auto_share: float | None = None


PLAIN, OURS = "plain hivemind 1.1.12", "trahiv"
TUNED = {
    "matchmaking_time": 3.0,
    "grad_compression": compression.Float16Compression(),
    "state_averaging_compression": compression.Float16Compression(),
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


# -- in a peer's process --------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """How a peer enters the swarm."""

    side: Side
    workload: Workload
    folder: str
    """For its key and its log."""

    number: int
    listens_at: str
    initial_peer: str | None
    pace_s: float
    """Seconds for a sample."""

    is_late: bool
    """Whether the swarm has trained already, and this peer must get its state."""


class OurPeer:
    """A peer of trahiv's in one of its modes.

    `limits` are fields of `RunSettings`, and `training` keywords of `build_optimizer`, where they are to be
    others.
    """

    def __init__(
        self, entry: Entry, weights: Any, limits: dict[str, Any] | None = None, **training: Any
    ) -> None:
        side, known = entry.side, (entry.initial_peer,) if entry.initial_peer else ()
        dht = DhtSection(host_maddrs=[entry.listens_at], nat_port_map=False, auto_nat=False)
        self._node = Node(dht, Path(entry.folder) / f"{entry.number}.key", known)
        self.address = self._node.own_addresses()[0]
        self._news: deque[News] = deque()
        self._paces: deque[str] = deque()
        usual: dict[str, Any] = {
            "params": [{"params": weights}],
            "optimizer": INNER_OPTIMIZER,
            "scheduler": lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0),
        }
        target = entry.workload.target_batch_size
        options = {"run_id": "home", "target_batch_size": target, "average_state_every": 1, **side.options}
        self.optimizer = build_optimizer(
            OptKeywords.model_validate(options),
            RunSettings(pace=side.pace, auto_share=side.auto_share, **limits or {}),
            dht=self._node.dht,
            samples_per_step=1,
            events=Events(self._hear),
            **usual | training,
        )
        self._digest, self._round = self.optimizer.history.digest, self.optimizer.last_round
        self._pace = self.optimizer.pace
        if not entry.is_late:
            self.optimizer.position.enter(self.optimizer.history)  # all begin with the same weights

    def take_state(self) -> None:
        """Download the swarm's state, as a peer does that joins."""
        from trahiv_cli.train.entry import enter_swarm  # takes a second to import

        enter_swarm(self.optimizer, None, 0)

    def _hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "download":
            self._news.append(("downloading", (time.monotonic(), event["bytes"], event["total"])))
        elif event["event"] == "pace":
            self._paces.append(event["message"])
        if "message" in event:
            print(event, flush=True)

    def compute(self, params: Sequence[torch.Tensor], noise: Sequence[torch.Tensor]) -> None:
        """Do what a backward pass does with the gradient of one sample: add it to the accumulators."""
        self.optimizer.expect_batch(1, 1.0, lend=True)
        torch._foreach_add_([param.grad for param in params], noise)

    def news(self) -> Iterator[News]:
        """Tell of what has happened since the last call."""
        own, now = self.optimizer, time.monotonic()
        while self._news:
            yield self._news.popleft()
        if own.last_round is not self._round and own.last_round and not own.last_round.committed:
            yield "failures", own.last_round.reason
        self._round = own.last_round
        if own.history.digest != self._digest:
            self._digest = own.history.digest
            held = own.tracker.local_progress.samples_accumulated
            if own.step_taken == own.local_epoch:
                yield "committed", Committed(now, self._digest.hex(), own.step_samples, False, held)
            else:
                yield "adopted", now
        while self._paces:
            yield "adapted", Adapted(now, self._paces.popleft(), self._pace, own.pace)
            self._pace = own.pace

    def close(self) -> None:
        self.optimizer.shutdown()
        self._node.close()


class ObservedOptimizer(hivemind.Optimizer):
    """hivemind's, unchanged, that notes which of its rounds averaged gradients with whom."""

    def __init__(self, **keywords: Any) -> None:
        self.news: deque[News] = deque()
        self._begun: dict[int, tuple[int, int, Sample]] = {}
        super().__init__(**keywords)

    def _begin_averaging_gradients(self, grad_scaler: Any) -> bool:
        samples = self.grad_averager.samples
        state = (self.local_epoch, samples, _some(self.state_averager.main_parameters))
        has_begun = super()._begin_averaging_gradients(grad_scaler)
        if has_begun:
            self._begun[id(self.scheduled_grads)] = state
        else:
            self.news.append(("failures", "no round was begun: it saw nobody, or its group was lost"))
        return has_begun

    def _average_gradients_and_load_into_optimizer(self, control: Any) -> None:
        super()._average_gradients_and_load_into_optimizer(control)
        epoch, samples, weights = self._begun.pop(id(control))
        if not control.done() or control.cancelled() or control.exception() is not None:
            self.news.append(("failures", "the gradients were not averaged"))
        elif len(control.result()) < 2:
            self.news.append(("failures", "a group of one"))
        else:
            held = self.grad_averager.samples  # begun rounds have taken theirs
            step = Committed(time.monotonic(), str(epoch), samples, True, held, weights)
            self.news.append(("committed", step))

    def load_state_from_peers(self, **keywords: Any) -> None:
        """Load, and note whether anything came: hivemind goes on if not, and says nothing."""
        before = _some(self.state_averager.main_parameters)
        super().load_state_from_peers(**keywords)
        has_come = _some(self.state_averager.main_parameters) != before
        no_state = ("failures", "the state did not come")
        self.news.append(("adopted", time.monotonic()) if has_come else no_state)


class PlainPeer:
    """A peer of plain hivemind's."""

    def __init__(self, entry: Entry, params: Any) -> None:
        known = [entry.initial_peer] if entry.initial_peer else []
        self._dht = hivemind.DHT(
            initial_peers=known, host_maddrs=[entry.listens_at], start=True, use_relay=False, auto_nat=False
        )
        self.address = str(self._dht.get_visible_maddrs()[0])
        self.optimizer = ObservedOptimizer(
            dht=self._dht,
            run_id="home",
            params=params,
            optimizer=INNER_OPTIMIZER,
            target_batch_size=entry.workload.target_batch_size,
            batch_size_per_step=1,
            **entry.side.options,
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
        self.optimizer.shutdown()
        self._dht.shutdown()


def _some(params: Sequence[torch.Tensor]) -> Sample:
    """Return some of the weights, the same of every peer."""
    each = -(-SAMPLED_WEIGHTS // len(params))
    return tuple(torch.cat([param.detach().flatten()[:each] for param in params]).tolist())


@contextmanager
def as_peer(pipe: Connection, entry: Entry) -> Iterator[None]:
    """Make this process fit for a peer: it prints to a file, leaves when told, and tells of its errors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(Path(entry.folder) / f"{entry.number}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    mp.set_start_method("fork", force=True)  # hivemind's processes can't be pickled
    MPFuture.reset_backend()  # its locks would be those of all peers: one that is ended may hold them
    torch.set_num_threads(1)
    try:
        yield
    except Exception:
        pipe.send(("ended", traceback.format_exc()))
        raise


def run_peer(pipe: Connection, entry: Entry) -> None:
    """Enter the swarm, say so, and once told to, train until something comes through `pipe`.

    Sends `News` through `pipe`, its address first.
    """
    with as_peer(pipe, entry):
        torch.manual_seed(0)
        shapes = entry.workload.shapes
        params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
        generator = torch.Generator().manual_seed(1 + entry.number)
        noise = [torch.randn(shape, generator=generator) * 1e-3 for shape in shapes]
        count = 0
        peer: Any = (PlainPeer if entry.side.system == PLAIN else OurPeer)(entry, params)
        pipe.send(("address", peer.address))
        if pipe.recv() == GO:
            if entry.is_late:
                peer.take_state()
            for one in peer.news():
                pipe.send(one)
            while not pipe.poll():
                begun = time.monotonic()
                count += 1
                torch._foreach_mul_(noise, 0.8 if count % 2 else 1.25)
                peer.compute(params, noise)
                time.sleep(max(0.0, begun + entry.pace_s - time.monotonic()))
                computed = time.monotonic()
                peer.optimizer.step(batch_size=1)
                call = time.monotonic(), time.monotonic() - computed
                for one in (("calls", call), *peer.news()):
                    pipe.send(one)
        peer.close()


# -- in the parent --------------------------------------------------------------------------------


def spawn_here(_: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """See `Wan.spawn`; all hosts are this machine."""
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    return process


class Peers:
    """The peers of a run, each in a process of its own, for as long as the `with` block lasts.

    At its end they leave in good order, if there is time. What they print is in `folder` until then.

    Args:
        run: what they do; called with a pipe and an `Entry`.
        spawn: starts processes, as `Wan.spawn`.
        entrance: the multiaddr of a node that lets peers at home in; None: the first of them does.
    """

    def __init__(
        self,
        run: Callable[..., None] = run_peer,
        spawn: Callable[..., Any] = spawn_here,
        entrance: str | None = None,
    ) -> None:
        self._spawn, self._run, self._entrance = spawn, run, entrance
        self._folder = tempfile.TemporaryDirectory()
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.told: list[Told] = []

    def start(
        self, side: Side, workload: Workload, pace_s: float, host: str, *, is_late: bool = False
    ) -> None:
        """Start one more, which enters the swarm by the first; see `Entry`."""
        number, first = len(self.pipes), self.told[0].address if self.told else None
        address, maddr = self._entrance or first, f"/ip4/{'0.0.0.0' if self._entrance else host}/tcp/0"
        entry = Entry(side, workload, self._folder.name, number, maddr, address, pace_s, is_late)
        ours, theirs = mp.Pipe()
        self.processes.append(self._spawn(number, self._run, (theirs, entry)))
        theirs.close()
        self.pipes.append(ours)
        self.told.append(Told())

    def start_all(
        self,
        side: Side,
        workload: Workload,
        paces_s: Iterable[float],
        host_of: Callable[[int], str] = address_of,
    ) -> float:
        """Start a peer of each pace; once all are ready, have them train, and return when that was."""
        for number, pace_s in enumerate(paces_s):
            self.start(side, workload, pace_s, host_of(number))
            self.wait_until_ready()
        self.go(range(len(self.pipes)))
        return time.monotonic()

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
        """
        wait(self.pipes, POLL_S)
        has_stepped = False
        for pipe, told in zip(self.pipes, self.told, strict=True):
            for one in hear(pipe):
                told.hear(one)
                has_stepped |= one[0] == "committed"
        return has_stepped

    def tree(self) -> list[psutil.Process]:
        """Find all processes of all peers."""
        return [one for process in self.processes for one in tree_of(process.pid)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        left = self.tree()
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send(STOP)
        deadline = time.monotonic() + (0.0 if kind is KeyboardInterrupt else LEAVE_LIMIT_S)
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            while process.is_alive() and time.monotonic() < deadline:
                with suppress(PeerEnded):
                    deque(hear(pipe), maxlen=0)  # or it would wait for room in the pipe
                process.join(0.05)
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, END_LIMIT_S)
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
