"""Members of rounds, made of the product's own parts, in one event loop.

A member is an averager without its process: what that would do when it starts is done here. Its data are the
numbers that it averages; what it trains is not simulated.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager

from tests.kit.identities import id_of, key_of
from tests.simulation.network import Network
from trahiv_cli.optim.averager import EXCHANGE
from trahiv_cli.optim.ballot import Ballots
from trahiv_cli.optim.gradients import ExactGradientAverager
from trahiv_cli.optim.group_finder import GroupFinder
from trahiv_cli.optim.history import History
from trahiv_cli.optim.pace import RoundRules
from trahiv_cli.optim.rounds import Exchange, Outcome
from trahiv_cli.optim.soundness import Claim
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.corrections.streams import UNREACHABLE
from trahiv_cli.swarm.snapshot import JoinerActivity

AVERAGING_TIMEOUT_S, MATCHMAKING_S, CHUNK_S = 60.0, 5.0, 10.0  # the defaults of a swarm
VALUES, PART_BYTES = 32, 16  # numbers that are averaged, and the bytes of them that travel in one message
SAMPLES = 8  # that a member brings to a round


class Control:
    """What the optimizer's process holds of a round; see hivemind's `StepControl`."""

    allow_retries = triggered = False
    stage: Any = None

    def __init__(self, claim: bytes, deadline: float) -> None:
        self._data_for_gather, self.deadline, self.weight = claim, deadline, 1.0
        self.result: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.set_result, self.set_exception = self.result.set_result, self.result.set_exception
        self.done, self.cancelled = self.result.done, self.result.cancelled

    @property
    def data_for_gather(self) -> bytes:
        return self._data_for_gather

    def attach(self, *_: Any) -> None:
        pass

    async def wait_for_trigger(self) -> None:
        pass

    async def wait_for_cancel(self) -> None:
        await asyncio.get_running_loop().create_future()


@dataclass
class Member:
    """One of a swarm's peers, from one committed round to the next."""

    name: str
    number: int
    history: History = field(default_factory=History)
    outcome: Outcome | None = None  # of its last try; None if that was not committed
    average: torch.Tensor = torch.zeros(0)  # what it took its last step with
    trouble: list[str] = field(default_factory=list)  # why tries failed

    def __post_init__(self) -> None:
        self.id = id_of(self.name)
        dht = SimpleNamespace(peer_id=self.id, signing_key=key_of(self.name), client_mode=False)
        self.averager = ExactGradientAverager(
            [torch.nn.Parameter(torch.zeros(VALUES))],
            dht=dht,
            prefix="run",
            start=False,
            interest=JoinerActivity(),
            rules=RoundRules(),
            next_chunk_timeout=CHUNK_S,
            allreduce_timeout=AVERAGING_TIMEOUT_S,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=0.5 * MATCHMAKING_S,
            part_size_bytes=PART_BYTES,
        )

    async def enter(self, network: Network, history: History) -> None:
        """Begin anew, at a history, with nothing held against anybody."""
        self.history, self.outcome, self.trouble = history, None, []
        averager = self.averager
        p2p = averager._p2p = network.p2p_of(self.id)
        averager._matchmaking = GroupFinder(
            p2p, averager.schema_hash, averager.dht, client_mode=False, **averager.matchmaking_kwargs
        )
        averager._ballots = Ballots()
        averager.__dict__.pop("_log", None)
        averager._running_groups = {}
        averager._pending_groups_registered, averager._state_updated = asyncio.Event(), asyncio.Event()
        averager._pending_groups_registered.set()
        averager._interest.note()
        await averager.add_p2p_handlers(p2p, namespace="run")

    @property
    def exchange(self) -> Exchange:
        return Exchange(range(1), after=self.history.digest, most_samples=8 * 4 * SAMPLES)

    def expect(self, others: list[Member]) -> None:
        """Know of the others that hold its state, and want more than half of all."""
        self.quorum = (len(others) + 1) // 2 + 1
        suffix = self.history.step.to_bytes(8, "big") + self.history.digest
        self.averager._matchmaking.expect([other.id for other in others], [], self.quorum, suffix)

    async def attempt(self, claim: bytes | None = None) -> bool:
        """Try one round, with a claim in place of its own; say whether it was committed."""
        averager, exchange = self.averager, self.exchange
        with averager.get_tensors() as [tensor]:
            tensor.copy_(torch.linspace(-1.0, 1.0, VALUES) * (1 + self.number))
        own = Claim(SAMPLES, float(SAMPLES), 0.0, bytes(8), self.quorum)
        control = Control(own.to_bytes(), swarm_time() + AVERAGING_TIMEOUT_S)
        init = SimpleNamespace(set_result=lambda _: None, set_exception=lambda _: None)
        try:
            if claim is None:
                await averager._step(exchange, step=control, future_for_init=init)
            else:  # the averager would read it, and fill in the norm
                control._data_for_gather = claim
                EXCHANGE.set(exchange)
                await DecentralizedAverager._step(averager, step=control, future_for_init=init)
            self.outcome = control.result.result()
        except Exception as error:  # noqa: BLE001 - as the optimizer does: the try has failed
            self.outcome = None
            self.trouble.append(str(error) or repr(error))
            return False
        self._commit(self.outcome)
        return True

    async def replay(self, donor: Member) -> bool:
        """Go through the round that others took meanwhile; say whether the donor gave it."""
        try:
            self.outcome = await self.averager._replayed(donor.id, self.exchange, CHUNK_S)
        except (*UNREACHABLE, StopAsyncIteration, ValueError) as error:
            self.outcome = None
            self.trouble.append(str(error) or repr(error))
        if self.outcome is not None:
            self._commit(self.outcome)
        return self.outcome is not None

    def _commit(self, outcome: Outcome) -> None:
        self.history = self.history.extend(samples=sum(outcome.samples.values()), proof=outcome.proof)
        with self.averager.get_tensors() as [tensor]:
            self.average = tensor.clone()

    def names(self, other: Member) -> bool:
        """Whether this one has said who it was."""
        outcome = self.outcome
        told = [*self.trouble, outcome.reason if outcome else "", *(outcome.left_out if outcome else ())]
        return self.has_set_aside(other) or any(other.id.to_base58() in words for words in told)

    def has_set_aside(self, other: Member) -> bool:
        return other.id in self.averager._matchmaking.blame.excluded_until
