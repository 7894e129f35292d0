"""Failures as data: `drop_peer(at_step=2, phase="half-way")` says what shall happen, and to nobody yet.

A peer's process calls `install` of its faults before it builds its optimizer, so that processes which that
forks inherit them. They wrap methods at the edges: where a peer looks for a group, sends, votes, is called.
What lies between the edges is under test and does not know of them. A peer says when a fault strikes.

What needs neither processes nor sockets is among the faults of `tests/simulation`.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import multiprocessing as mp
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from trahiv_cli.optim.allreduce import ExactAllReduce
from trahiv_cli.optim.averager import ExactAverager
from trahiv_cli.optim.group_finder import GroupFinder
from trahiv_cli.optim.seeker import GroupSeeker
from trahiv_cli.optim.state import ExactStateAverager

Phase = Literal["matchmaking", "first-part", "half-way", "before-vote", "after-vote"]
"""Moments of a round: it begins; the group stands and nothing was sent; half of the parts for one member
were sent; this peer holds the average and has told nobody; it has voted and not applied anything."""

PHASES: tuple[Phase, ...] = get_args(Phase)
CALLS = 160
"""Of each kind, to each peer, in one round of `ask_too_much`."""


def say_struck(fault: Any) -> None:
    """Have the peer say that a fault strikes; from any of its processes."""
    said = {"v": 1, "event": "fault", "time": time.monotonic(), "fault": type(fault).__name__}
    os.write(1, (json.dumps(said | asdict(fault)) + "\n").encode())


@dataclass(frozen=True)
class drop_peer:
    """All processes die by SIGKILL at one moment of the first round that is tried from a step on."""

    at_step: int = 2
    phase: Phase = "matchmaking"

    def install(self) -> None:
        try_once, look_for_group = GroupSeeker.try_once, GroupFinder.look_for_group
        hold_vote, generate = ExactAverager._hold_vote, ExactAllReduce._generate_input_for_peer
        # Rounds are tried in the first process, and go on in the DHT's.
        step = mp.get_context("fork").Value(ctypes.c_int64, -1)

        def reach(phase: Phase) -> None:
            if phase == self.phase and step.value >= self.at_step:
                say_struck(self)
                os.killpg(os.getpgrp(), signal.SIGKILL)

        def noted_try(seeker: GroupSeeker, deadline: float) -> Any:
            step.value = seeker.position.history.step
            return try_once(seeker, deadline)

        async def noted_look(finder: GroupFinder, step: Any) -> Any:
            reach("matchmaking")
            return await look_for_group(finder, step)

        async def noted_parts(runner: ExactAllReduce, index: int) -> AsyncIterator[Any]:
            reach("first-part")
            half = max(1, runner.tensor_part_container.num_parts_by_peer[index] // 2)
            async with aclosing(generate(runner, index)) as messages:
                num_sent = 0
                async for message in messages:
                    yield message
                    num_sent += 1
                    if num_sent == half:
                        reach("half-way")

        async def noted_vote(averager: ExactAverager, *args: Any, **kwargs: Any) -> Any:
            reach("before-vote")
            result = await hold_vote(averager, *args, **kwargs)
            reach("after-vote")
            return result

        GroupSeeker.try_once = noted_try  # type: ignore[method-assign]
        GroupFinder.look_for_group = noted_look  # type: ignore[method-assign]
        ExactAllReduce._generate_input_for_peer = noted_parts  # type: ignore[method-assign]
        ExactAverager._hold_vote = noted_vote  # type: ignore[method-assign]


@dataclass(frozen=True)
class ask_too_much:
    """In each round the peer asks all others, many times at once and whatever they answer.

    It votes in rounds that do not exist, and asks for a state that is further than any. To votes of others it
    does not answer.
    """

    def install(self) -> None:
        hold_vote = ExactAverager._hold_vote
        asking: set[Any] = set()

        async def ask(averager: ExactAverager, peer: PeerID) -> None:
            votes = averager.get_stub(averager._p2p, peer, namespace=averager.prefix)
            request = averaging_pb2.JoinRequest(schema_hash=os.urandom(20), gather=b"a vote")
            states = averager.prefix.replace("grad", "state")
            stub = ExactStateAverager.get_stub(averager._p2p, peer, namespace=states)
            wish = MSGPackSerializer.dumps([b"", [2**61, b""], 0])
            offer = stub.rpc_offer_state(averaging_pb2.DownloadData(metadata=wish))
            await asyncio.gather(votes.rpc_vote(request), offer, return_exceptions=True)

        async def asking_vote(averager: ExactAverager, group_info: Any, *args: Any, **kwargs: Any) -> Any:
            say_struck(self)
            others = [peer for peer in group_info.peer_ids if peer != averager.peer_id]
            running = asyncio.gather(*(ask(averager, peer) for peer in others for _ in range(CALLS)))
            asking.add(running)
            running.add_done_callback(asking.discard)
            return await hold_vote(averager, group_info, *args, **kwargs)

        @functools.wraps(ExactAverager.rpc_vote)
        async def deaf(averager: ExactAverager, request: Any, context: Any) -> Any:
            await asyncio.sleep(3600)

        ExactAverager._hold_vote = asking_vote  # type: ignore[method-assign]
        ExactAverager.rpc_vote = deaf  # type: ignore[method-assign]
