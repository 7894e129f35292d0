"""Peers in memory that lie all along. A lie changes one thing in a peer, once that has its optimizer.

The product's own code runs in a liar up to the edge: the lie is put in after the peer's own checks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from hivemind.utils import MSGPackSerializer

from tests.simulation.network import Message
from trahiv_cli.optim.ballot import Vote
from trahiv_cli.optim.rounds import Claim
from trahiv_cli.swarm.records import sign

Lie = Callable[[Any], None]
"""Makes a liar of a `tests.simulation.swarm.Peer`."""

CLAIMED = [field.name for field in fields(Claim)]
"""What a claim says, in the order in which it travels."""

FAR_AHEAD = 4096
"""Of the positions that honest peers have trained after some steps."""


def poison(factor: float, claimed: float | None = None) -> Lie:
    """Bring another gradient in every round: the true one times `factor`.

    `claimed` is the norm that the peer says it brings; None: that which it brings.
    """

    def tell(peer: Any) -> None:
        averager = peer.optimizer.grad_averager
        prepare = averager._prepare_contribution

        def poisoned(exchange: Any) -> float:
            norm = abs(factor) * float(prepare(exchange))
            with averager.get_tensors() as tensors, torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(factor)
            return norm if claimed is None else claimed

        averager._prepare_contribution = poisoned

    return tell


def claim(said: Mapping[str, Any], num_isolated: int = 0, rounds: float = math.inf) -> Lie:
    """Claim something else, in so many rounds.

    `said` by the fields of `Claim`, as they travel. `num_isolated`: claim to have trained so many positions,
    far ahead, none of which touches another; others in each round.
    """

    def tell(peer: Any) -> None:
        finder = peer.optimizer.grad_averager._matchmaking
        look_for_group, left = finder.look_for_group, rounds
        starts = itertools.count(FAR_AHEAD, 2 * num_isolated)

        async def lying(step: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                own = MSGPackSerializer.loads(step.data_for_gather)
                claimed = dict(zip(CLAIMED, own, strict=True)) | said
                if num_isolated:
                    at = next(starts)
                    claimed["trained"] = list(range(at, at + 2 * num_isolated))
                step._data_for_gather = MSGPackSerializer.dumps(list(claimed.values()))
            return await look_for_group(step)

        finder.look_for_group = lying

    return tell


def fall_silent(from_step: int) -> Lie:
    """Send no more than the first part of a share, from a step on, though the stream stays open."""

    def tell(peer: Any) -> None:
        begun: set[tuple[Any, int]] = set()

        def tamper(message: Message) -> list[bytes] | None:
            step = peer.optimizer.local_epoch
            if message.call != "rpc_aggregate_part" or message.is_answer or step < from_step:
                return [message.content]
            is_first = (message.receiver, step) not in begun
            begun.add((message.receiver, step))
            return [message.content] if is_first else None

        peer.tamper = tamper

    return tell


def vote_twice(peer: Any) -> None:
    """Tell half of the others, in the next round, of another average than the peer holds."""
    averager = peer.optimizer.grad_averager
    exchange_votes, told = averager._exchange_votes, []

    async def exchange(group_id: bytes, other: Any, statement: bytes) -> Any:
        ballot = averager._ballots[group_id]
        told.append(other)
        if len(told) % 2:
            statement = sign(peer.dht.signing_key, ballot.about, Vote(b"x" * 32).to_bytes())
        if len(told) >= len(ballot.members) - 1:
            averager._exchange_votes = exchange_votes
        return await exchange_votes(group_id, other, statement)

    averager._exchange_votes = exchange
