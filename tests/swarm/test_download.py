"""A joiner fetches the swarm's state while it trains: bit by bit the same, whatever becomes of the donors.

What it missed meanwhile it goes through after them.

Two donors and a joiner on 127.0.0.1, each a process group of its own, with a state of 48 chunks. Donors give
their chunks slowly, so that things can happen meanwhile; what goes wrong is said in data (`Wrong`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing as mp
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.utils import MPFuture

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.assemble import build_optimizer
from trahiv_cli.optim.ballot import digest_of
from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.chunks import ChunkBoard, Damaged
from trahiv_cli.swarm.corrections.processes import die_with_parent
from trahiv_cli.swarm.download import StateExchange
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.snapshot import CHUNK_BYTES
from trahiv_cli.telemetry.events import Events

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

SHAPES = [(1024, 512), (512, 1024)]
STATE_BYTES = 3 * 4 * 2**20
"""Weights and Adam's two moments."""

CHUNKS = STATE_BYTES // CHUNK_BYTES
BATCH = 8
PAUSE_AT = 3
"""The step at which donors stop until they may go on, so that both hold the same state."""

READY_S, DOWNLOAD_S, STEPS_S = 90.0, 60.0, 60.0
DHT = DhtSection(host_maddrs=["/ip4/127.0.0.1/tcp/0"], nat_port_map=False, auto_nat=False)

Event = dict[str, Any]


@dataclass(frozen=True)
class Wrong:
    """What a donor does to what it sends."""

    pace_s: float = 0.03
    dies_after: int = 10**6
    """Messages, one of them the manifest."""

    damages_from: int = 10**6
    batch_s: float = 0.1
    """For a batch; two are a step."""


# -- in a peer's process --------------------------------------------------------------------------


def make_it_so(wrong: Wrong) -> None:
    """Have the processes that are forked from here on do it."""
    sends, num_sent = StateExchange.rpc_send_state, 0

    @wraps(sends)
    async def sends_so(averager: StateExchange, request: Any, context: Any) -> Any:
        nonlocal num_sent
        async with aclosing(sends(averager, request, context)) as messages:  # type: ignore[type-var]
            async for message in messages:
                await asyncio.sleep(wrong.pace_s)
                num_sent += 1
                if num_sent > wrong.dies_after:
                    os.killpg(os.getpgrp(), signal.SIGKILL)
                if num_sent > wrong.damages_from:
                    message.tensor_part.buffer = message.tensor_part.buffer[:-1] + b"?"
                yield message

    StateExchange.rpc_send_state = sends_so  # type: ignore[method-assign]


def count_chunks() -> tuple[Any, Any]:
    """Count the bytes of all chunks that come, and the damaged ones, in the processes forked from here on."""
    fork = mp.get_context("fork")
    fetched, damaged = fork.Value("q", 0), fork.Value("q", 0)
    put = ChunkBoard.put

    def counted(board: ChunkBoard, request: Any, content: bytes) -> None:
        fetched.value += len(content)
        try:
            put(board, request, content)
        except Damaged:
            damaged.value += 1
            raise

    ChunkBoard.put = counted  # type: ignore[method-assign]
    return fetched, damaged


def state_digest(optimizer: SwarmOptimizer, params: list[torch.nn.Parameter]) -> str:
    """Of the weights that train, those that the optimizer moves, and its state."""
    inner = optimizer.opt
    moved = [param for group in inner.param_groups for param in group["params"]]
    statistics = [inner.state[param][name] for param in moved for name in sorted(inner.state[param])]
    return digest_of([*params, *moved, *statistics]).hex()


def be_peer(folder: Path, name: str, addresses: tuple[str, ...], wrong: Wrong) -> None:
    """Be a peer; the whole life of a process."""
    os.setsid()
    die_with_parent()
    torch.set_num_threads(1)
    MPFuture.reset_backend()
    with (folder / f"{name}.txt").open("ab") as errors:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    make_it_so(wrong)
    fetched, damaged = count_chunks()
    try:
        counts = lambda: {"fetched": fetched.value, "damaged": damaged.value}  # noqa: E731
        live(folder, name, addresses, wrong.batch_s, counts)
    finally:
        traceback.print_exc()
        os.killpg(os.getpgrp(), signal.SIGKILL)


def may_reach(folder: Path) -> int:
    """The step at which peers wait."""
    file = folder / "may-reach"
    return int(file.read_text() or 0) if file.exists() else 0


def misses(folder: Path) -> str:
    """The peer that does not train for a while."""
    file = folder / "misses"
    return file.read_text() if file.exists() else ""


def live(
    folder: Path, name: str, addresses: tuple[str, ...], batch_s: float, counts: Callable[[], Event]
) -> None:
    def say(event: str, **fields: Any) -> None:
        with (folder / f"{name}.jsonl").open("a") as log:
            log.write(json.dumps({"event": event, "time": time.monotonic()} | fields) + "\n")

    def hear(event: Event) -> None:
        if event["event"] == "download":
            say(**{name: value for name, value in event.items() if name not in ("v", "t")})

    def place() -> Event:
        return {
            "step": optimizer.local_epoch,
            "history": optimizer.history.digest.hex(),
            "state": state_digest(optimizer, params),
        }

    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    node = Node(DHT, folder / f"{name}.key", addresses)
    optimizer = build_optimizer(
        {
            "run_id": "download",
            "target_batch_size": 2 * BATCH,
            "matchmaking_time": 2.0,
            "averaging_timeout": 10.0,
            "load_state_timeout": 10.0,
            "grad_compression": "float16",
        },
        dht=node.dht,
        params=[{"params": params}],
        optimizer=lambda groups: torch.optim.Adam(groups, lr=1e-3),
        scheduler=lambda inner: torch.optim.lr_scheduler.ConstantLR(inner, factor=1.0),
        samples_per_step=BATCH,
        max_grad_norm=0.0,
        events=Events(hear),
    )
    optimizer.tracker.refresh()
    began = time.monotonic()
    if addresses and optimizer.load_state_from_peers():
        say("loaded", seconds=time.monotonic() - began, **place(), **counts())
    else:
        optimizer.enter_step(optimizer.history)
    say("ready", maddr=node.addresses()[0].maddr)
    generator = torch.Generator().manual_seed(os.getpid())
    while True:
        while optimizer.local_epoch >= may_reach(folder) or misses(folder) == name:
            time.sleep(0.05)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        time.sleep(batch_s)
        before, began = optimizer.history, time.monotonic()
        with contextlib.suppress(RoundFailed):
            optimizer.step()
        for param in params:
            param.grad = None
        if optimizer.history != before:
            took_part = optimizer.step_taken == optimizer.local_epoch
            say("step", blocked=time.monotonic() - began, took_part=took_part, **place(), **counts())


# -- in the test's process ------------------------------------------------------------------------


class Peers:
    """Peers by name. Use as a context manager: at the end no process is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._processes: dict[str, Any] = {}

    def start(self, name: str, wrong: Wrong) -> None:
        addresses = tuple(self.events(other, "ready")[0]["maddr"] for other in self._processes)
        process = self._context.Process(target=be_peer, args=(self.folder, name, addresses, wrong))
        process.start()
        self._processes[name] = process

    def start_donors(self, **donors: Wrong) -> None:
        """Start peers that hold the same state, and wait for them there."""
        for name, wrong in donors.items():
            self.start(name, wrong)
            self.wait(lambda name=name: self.events(name, "ready"), READY_S)
        (self.folder / "may-reach").write_text(str(PAUSE_AT))
        self.wait(lambda: all(self.reached(name) == PAUSE_AT for name in donors), STEPS_S)

    def go_on(self) -> None:
        (self.folder / "may-reach").write_text(str(10**6))

    def events(self, name: str, event: str) -> list[Event]:
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [said for said in map(json.loads, lines) if said["event"] == event]

    def reached(self, name: str) -> int:
        events = [*self.events(name, "step"), *self.events(name, "loaded")]
        return max((said["step"] for said in events), default=0)

    def wait(self, is_true: Callable[[], Any], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not is_true():
            assert time.monotonic() < deadline, self._story()
            time.sleep(0.05)

    def _story(self) -> str:
        files = sorted([*self.folder.glob("*.txt"), *self.folder.glob("*.jsonl")])
        return "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in files)

    def loaded(self, name: str) -> Event:
        """Wait until a joiner has the state; say how."""
        self.wait(lambda: self.events(name, "loaded"), DOWNLOAD_S)
        return self.events(name, "loaded")[0]

    def states(self, *names: str) -> dict[str, str]:
        """By history the state that donors held."""
        steps = [said for name in names for said in self.events(name, "step")]
        held = {said["history"]: said["state"] for said in steps}
        assert all(held[said["history"]] == said["state"] for said in steps)
        return held

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not have come to have a group of its own
            process.join()
            for sockets in Path("/tmp").glob(f"trahiv-{process.pid}-*"):
                shutil.rmtree(sockets, ignore_errors=True)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    with Peers(tmp_path) as peers:
        yield peers


def test_a_joiner_gets_equal_bits_from_both_donors_and_a_tenth_more_at_most(peers: Peers) -> None:
    peers.start_donors(A=Wrong(), B=Wrong())
    peers.start("C", Wrong())
    loaded = peers.loaded("C")
    assert loaded["step"] == PAUSE_AT
    assert loaded["state"] == peers.states("A", "B")[loaded["history"]]
    assert STATE_BYTES <= loaded["fetched"] <= 1.1 * STATE_BYTES + CHUNK_BYTES
    told = peers.events("C", "download")
    assert max(said["donors"] for said in told) == 2
    amounts = [said["bytes"] for said in told]
    assert amounts == sorted(amounts) and amounts[-1] == told[-1]["total"] >= STATE_BYTES
    assert len(told) <= 2 + loaded["seconds"] / 0.25
    peers.go_on()
    peers.wait(lambda: all(peers.reached(name) >= PAUSE_AT + 2 for name in "ABC"), STEPS_S)
    peers.states("A", "B", "C")


def test_a_download_is_finished_from_the_other_donor_when_one_dies(peers: Peers) -> None:
    peers.start_donors(A=Wrong(dies_after=8), B=Wrong())
    peers.start("C", Wrong())
    loaded = peers.loaded("C")
    assert not peers._processes["A"].is_alive()
    assert loaded["state"] == peers.states("A", "B")[loaded["history"]]
    assert loaded["fetched"] < 1.3 * STATE_BYTES


def test_a_damaged_chunk_is_fetched_from_another_donor(peers: Peers) -> None:
    peers.start_donors(A=Wrong(damages_from=4), B=Wrong())
    peers.start("C", Wrong())
    loaded = peers.loaded("C")
    assert loaded["damaged"] == 1, "it is not asked again"
    assert loaded["state"] == peers.states("A", "B")[loaded["history"]]
    assert loaded["fetched"] < 1.3 * STATE_BYTES


@pytest.mark.parametrize("donors", ["A", "AB"])
def test_a_joiner_goes_through_the_steps_that_were_taken_during_its_download(
    donors: str, peers: Peers
) -> None:
    slowly = Wrong(pace_s=0.2 * len(donors), batch_s=1.0 * len(donors))  # a step takes two seconds
    peers.start_donors(**dict.fromkeys(donors, slowly))
    peers.go_on()
    peers.start("C", slowly)
    loaded = peers.loaded("C")
    began = loaded["time"] - loaded["seconds"]
    meanwhile = [said for said in peers.events("A", "step") if began < said["time"] < loaded["time"]]
    assert len(meanwhile) >= 2, "the download takes five seconds, or ten"
    assert loaded["state"] == peers.states(*donors)[loaded["history"]], "of one step, all of it"
    peers.wait(lambda: any(said["took_part"] for said in peers.events("C", "step")), STEPS_S)
    own = next(said for said in peers.events("C", "step") if said["took_part"])
    assert own["step"] <= loaded["step"] + 2, "it is in one of the next rounds"
    # Who holds its state alone gives its statistics in 8 bits.
    size = STATE_BYTES if donors == "AB" else STATE_BYTES / 2
    assert own["fetched"] == loaded["fetched"] < 1.3 * size, "one download was enough"
    peers.states(*donors, "C")


def test_a_peer_that_missed_a_round_goes_through_it_and_downloads_nothing(peers: Peers) -> None:
    peers.start_donors(A=Wrong(), B=Wrong(), C=Wrong())
    before = peers.events("C", "step")[-1]
    (peers.folder / "misses").write_text("C")
    (peers.folder / "may-reach").write_text(str(PAUSE_AT + 1))
    peers.wait(lambda: peers.reached("A") == peers.reached("B") == PAUSE_AT + 1, STEPS_S)
    (peers.folder / "misses").unlink()
    peers.wait(lambda: peers.reached("C") == PAUSE_AT + 1, STEPS_S)
    after = peers.events("C", "step")[-1]
    assert after["fetched"] == before["fetched"] and not after["took_part"]
    peers.states("A", "B", "C")
