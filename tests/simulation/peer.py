"""One peer's life in memory: that of `tests.kit.faulty_peer`, without its processes."""

from __future__ import annotations

import asyncio
import contextvars
import shutil
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.kit import faulty_peer
from tests.kit.faulty_peer import Settings
from tests.simulation.liars import Lie
from tests.simulation.network import Tamper
from tests.simulation.strands import Strand
from tests.simulation.world import OWNER, Dht, World
from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.train.checkpoint import CheckpointData, Checkpoints
from trahiv_cli.train.entry import enter_swarm


class Peer(faulty_peer.Peer):
    """One peer's life in memory, from its start to its death. Its name is that of its identity, its number
    that of its data; others can dial it if it `can_be_called`.
    """

    def __init__(
        self,
        world: World,
        name: str,
        number: int,
        settings: Settings,
        can_be_called: bool = True,
        lies: Sequence[Lie] = (),
    ) -> None:
        super().__init__(number, settings)
        self.name, self.number, self.world, self._lies = name, number, world, lies
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.strands: list[Strand] = []
        self.dht = Dht(world, name)
        self.dht.client_mode = not can_be_called
        self.peer_id = self.dht.peer_id.to_base58()
        self.is_running, self.is_ready = True, False
        self.slowness = 1.0  # times which a batch takes longer
        self.spoils: float | None = None  # what the next batch's gradients are multiplied by
        self.tamper: Tamper | None = None
        """What a liar makes of the messages that it sends."""
        self.optimizer: SwarmOptimizer | None = None
        self._checkpoints = Checkpoints(world.folder / name, keep=1)

    def say(self, event: str, **fields: Any) -> None:
        self.is_ready = self.is_ready or event == "ready"
        self.world.hear(self, {"event": event, "time": time.monotonic()} | fields)

    def addresses(self) -> list[Any]:
        return [SimpleNamespace(maddr="")]

    def start(self) -> None:
        context = contextvars.copy_context()
        context.run(OWNER.set, self)
        context.run(self.world.strands.spawn, self._run)

    def _run(self) -> None:
        self._newest = self._checkpoints.newest()
        if self._newest is not None:
            self._newest.load_weights(self._model)  # before the optimizer is built, as the Trainer does
        self.live(self, is_first=False)

    def kill(self) -> None:
        """End at once, without a goodbye."""
        self.is_running, self.dht.is_dead = False, True
        self.world.network.remove(self.dht.peer_id)
        for strand in self.strands:
            strand.kill()
        for task in tuple(self.tasks):
            task.cancel()

    def forget(self) -> None:
        shutil.rmtree(self.world.folder / self.name, ignore_errors=True)

    def save(self) -> None:
        self._checkpoints.save(CheckpointData.of(self._model, self.optimizer))

    def _enter(self, optimizer: SwarmOptimizer, is_first: bool) -> None:
        self.optimizer = optimizer
        for lie in self._lies:
            lie(self)
        while True:
            try:
                enter_swarm(optimizer, self._newest, self.world.furthest)
                return
            except RoundFailed:  # a person would type the command again
                time.sleep(1.0)

    def _wait_for_go(self) -> None:
        pass

    def _compute(self) -> None:
        time.sleep(self.slowness * self._settings.seconds_per_batch)
        if self.spoils is not None:
            for param in self._model.parameters():
                param.grad.mul_(self.spoils)
            self.spoils = None
