"""Peers that are ready at about the same moment, and average in one group: how soon, and whether all do.

Real processes, DHT and sockets on 127.0.0.1; each peer averages 4 KiB. All become ready within 50 ms, and
are told by the parent who is there, as they would know from progress reports. They are trahiv's averagers,
or hivemind's `DecentralizedAverager`, which finds its groups through the DHT.
"""

from __future__ import annotations

import multiprocessing as mp
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

VALUES = 1024
MATCHMAKING_S = 2.0
READY_WITHIN_S = 0.05
ROUND_LIMIT_S = 15.0
START_LIMIT_S = 60.0
POLL_S = 0.002
LOOPBACK = "/ip4/127.0.0.1/tcp/0"

PROCESSES = mp.get_context("forkserver")  # a clean process that has imported everything once
PROCESSES.set_forkserver_preload(["hivemind", "trahiv_cli.optim.gradients", "trahiv_cli.swarm.node"])


@dataclass(frozen=True)
class Order:
    """What the parent tells a peer of a round."""

    step: int
    members: tuple[str, ...]
    """Who is there, as far as anybody knows."""

    start: float
    """When this peer becomes ready, on the clock that all processes of a machine share."""


@dataclass(frozen=True)
class Report:
    """What a peer says of a round."""

    ready: float
    standing: float
    """When its (last) group stood."""

    ended: float
    group: tuple[str, ...]
    """Empty if it averaged with nobody."""

    proof: bytes
    reason: str


@dataclass(frozen=True)
class Result:
    """What came of a round, over all peers that survived it."""

    is_full: bool
    """All of them averaged in one group."""

    standing_s: float
    committed_s: float
    """Both since the last of them was ready."""

    reasons: tuple[str, ...] = ()


# -- in a peer's process --------------------------------------------------------------------------


def run_peer(pipe: Connection, folder: str, number: int, initial: Sequence[str], plain: bool) -> None:
    """Take part in rounds as the parent says, until it says "leave" or is gone."""
    import torch
    from hivemind.utils import MPFuture

    torch.set_num_threads(1)
    MPFuture.reset_backend()  # its locks would be those of all peers: one that is killed may hold them
    mp.set_start_method("fork", force=True)  # hivemind's processes can't be pickled
    with (_plain_peer if plain else _peer)(Path(folder), number, initial) as (peer_id, address, average):
        pipe.send((peer_id, address))
        while True:
            try:
                order = pipe.recv()
            except (EOFError, ConnectionError):
                return
            if order is None:
                return
            time.sleep(max(0.0, order.start - time.monotonic()))
            pipe.send(average(order))


@contextmanager
def _peer(folder: Path, number: int, initial: Sequence[str]) -> Iterator[Any]:
    import torch

    from trahiv_cli.optim.averager import ExactAverager
    from trahiv_cli.optim.codecs import Verbatim
    from trahiv_cli.optim.rounds import Exchange
    from trahiv_cli.optim.rules import RoundRules
    from trahiv_cli.optim.soundness import Claim
    from trahiv_cli.recipe.schema import DhtSection
    from trahiv_cli.swarm.corrections.dht import drain
    from trahiv_cli.swarm.node import Node

    settings = DhtSection(host_maddrs=[LOOPBACK], nat_port_map=False, auto_nat=False)
    with Node(settings, folder / f"{number}.key", tuple(initial)) as node:
        averager = ExactAverager(
            averaged_tensors=[torch.zeros(VALUES)], dht=node.dht, prefix="forming", rules=RoundRules(),
            min_matchmaking_time=MATCHMAKING_S, request_timeout=MATCHMAKING_S / 2,
            next_chunk_timeout=2 * MATCHMAKING_S, allreduce_timeout=ROUND_LIMIT_S, compression=Verbatim(),
            start=True,
        )  # fmt: skip
        own = node.peer_id

        def average(order: Order) -> Report:
            others = [peer for peer in order.members if peer != own]
            quorum = len(order.members) // 2 + 1
            with averager.get_tensors() as tensors:
                tensors[0].fill_(float(number))
            ready = time.monotonic()
            deadline = ready + ROUND_LIMIT_S
            while True:
                averager.expect_group(others, [], quorum, order.step.to_bytes(8, "big"))
                claim = Claim(samples=1, norm=0.0, quorum=quorum)
                patience_s = max(deadline - time.monotonic(), 1.5 * MATCHMAKING_S)
                control = averager.start_round(claim, patience_s, Exchange(range(1)))
                standing = _watch(control)
                if control.exception() is None:
                    outcome = control.result()
                    return Report(
                        ready, standing, time.monotonic(), outcome.group, outcome.proof, outcome.reason
                    )
                if time.monotonic() >= deadline:
                    return Report(ready, standing, time.monotonic(), (), b"", str(control.exception()))

        yield own, str(node.dht.get_visible_maddrs()[0]), average
        drain(averager)
        averager.shutdown()


@contextmanager
def _plain_peer(folder: Path, number: int, initial: Sequence[str]) -> Iterator[Any]:
    import hivemind
    import torch

    dht = hivemind.DHT(host_maddrs=[LOOPBACK], initial_peers=list(initial) or None, start=True)
    averager = hivemind.DecentralizedAverager(
        averaged_tensors=[torch.zeros(VALUES)], dht=dht, prefix="forming",
        min_matchmaking_time=MATCHMAKING_S, request_timeout=MATCHMAKING_S / 2,
        next_chunk_timeout=2 * MATCHMAKING_S, allreduce_timeout=ROUND_LIMIT_S, start=True,
    )  # fmt: skip

    def average(order: Order) -> Report:
        ready = time.monotonic()
        control = averager.step(gather=order.step, timeout=ROUND_LIMIT_S, allow_retries=False, wait=False)
        standing = _watch(control)
        ended = time.monotonic()
        if control.exception() is not None:
            return Report(ready, standing, ended, (), b"", str(control.exception()))
        return Report(ready, standing, ended, tuple(peer.to_base58() for peer in control.result()), b"", "")

    yield dht.peer_id.to_base58(), str(dht.get_visible_maddrs()[0]), average
    averager.shutdown()
    dht.shutdown()


def _watch(control: Any) -> float:
    """Wait for a round's end; return when its group stood."""
    from hivemind.averaging.control import AveragingStage

    standing = float("nan")
    while not control.done():
        if standing != standing and control.stage == AveragingStage.RUNNING_ALLREDUCE:
            standing = time.monotonic()
        time.sleep(POLL_S)
    return standing if standing == standing else time.monotonic()


# -- in the parent --------------------------------------------------------------------------------


@dataclass
class Member:
    """One peer's process."""

    process: Any
    pipe: Connection
    peer_id: str = ""
    address: str = ""


@dataclass
class Swarm:
    """Peers in processes of their own; ends them all when it is left.

    Args:
        plain: use hivemind's averager.
        seed: of the moments when peers become ready.
    """

    plain: bool = False
    seed: int = 0
    members: list[Member] = field(default_factory=list)
    unnoticed: tuple[str, ...] = ()
    """Peers that are gone, and nobody has noticed yet."""

    def __enter__(self) -> Swarm:
        self._folder = tempfile.TemporaryDirectory()
        self._chance = random.Random(self.seed)
        self._started = self._step = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.leave(*self.members)
        self._folder.cleanup()

    def join(self, count: int = 1) -> None:
        """Start peers and wait until they are there; the first of all before the others."""
        if not self.members and count > 1:
            self.join()
            count -= 1
        initial = [member.address for member in self.members]
        for _ in range(count):
            ours, theirs = PROCESSES.Pipe()
            arguments = (theirs, self._folder.name, self._started, initial, self.plain)
            process = PROCESSES.Process(target=run_peer, args=arguments)
            process.start()
            theirs.close()
            self._started += 1
            self.members.append(Member(process, ours))
        for member in self.members[-count:]:
            if not member.pipe.poll(START_LIMIT_S):
                raise TimeoutError(f"A peer did not start in {START_LIMIT_S:.0f} s.")
            member.peer_id, member.address = member.pipe.recv()

    def leave(self, *leaving: Member) -> None:
        """Have peers leave in good order, and see them gone."""
        for member in leaving:
            self.members.remove(member)
            with suppress(OSError):  # it is gone already
                member.pipe.send(None)
        for member in leaving:
            member.process.join(START_LIMIT_S)
            member.process.kill()
            member.process.join()

    def round(self, victim: Member | None = None) -> Result:
        """Hold one round of all; kill `victim` (SIGKILL) while it goes on."""
        self._step += 1
        known = (*(member.peer_id for member in self.members), *self.unnoticed)
        start = time.monotonic() + READY_WITHIN_S
        for member in self.members:
            moment = start + self._chance.random() * READY_WITHIN_S
            member.pipe.send(Order(self._step, known, moment))
        self.unnoticed = ()
        if victim is not None:
            time.sleep(max(0.0, start + self._chance.random() * 2 * READY_WITHIN_S - time.monotonic()))
            victim.process.kill()
            victim.process.join()
            self.members.remove(victim)
            self.unnoticed = (victim.peer_id,)
        reports: list[Report] = []
        for member in self.members:
            if not member.pipe.poll(3 * ROUND_LIMIT_S):
                raise TimeoutError(f"Peer {member.peer_id} did not end its round.")
            reports.append(member.pipe.recv())
        last_ready = max(report.ready for report in reports)
        survivors = {member.peer_id for member in self.members}
        agreed = {(report.group, report.proof) for report in reports}
        return Result(
            is_full=len(agreed) == 1 and survivors <= set(reports[0].group),
            standing_s=max(report.standing for report in reports) - last_ready,
            committed_s=max(report.ended for report in reports) - last_ready,
            reasons=tuple({report.reason for report in reports} - {""}),
        )
