"""Two peers in processes of their own, which begin together."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Sequence
from multiprocessing.context import SpawnContext
from typing import Any

from trahiv_cli.train.trainer import SwarmTrainer

CONTEXT: SpawnContext = mp.get_context("spawn")


LIMIT_S = 150.0


def run_pair(be_peer: Callable[..., None], *arguments: Sequence[Any]) -> None:
    """Run `be_peer(*arguments[i])` in a process each; all must leave by themselves, without an error."""
    peers = [CONTEXT.Process(target=be_peer, args=tuple(args)) for args in arguments]
    for peer in peers:
        peer.start()
    try:
        for peer in peers:
            peer.join(timeout=LIMIT_S)
    finally:
        for peer in peers:
            peer.kill()  # nothing to end if it has left by itself, as it must
            peer.join()
    assert [peer.exitcode for peer in peers] == [0] * len(peers)


def hold_until_both_are_in(trainer: SwarmTrainer, barrier: Any) -> None:
    """Have the trainer wait, once it has entered the swarm, until the other has."""
    create = trainer.create_optimizer

    def create_and_wait(*args: Any) -> Any:
        optimizer = create(*args)
        barrier.wait(timeout=120)
        return optimizer

    trainer.create_optimizer = create_and_wait  # type: ignore[method-assign]
