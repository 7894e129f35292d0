"""What goes wrong in a simulated swarm: faults, as data, drawn by a seed and struck as planned; and lies.

A fault strikes once the swarm has reached `at_step`: at once, or when its peer sends the next message of a
kind (`moment`), which hits the phases of a round.
"""

import asyncio
import math
import random
import time
from dataclasses import dataclass, fields, replace

import torch
from hivemind.utils import MSGPackSerializer

from tests.kit.faulty_peer import CHUNK_TIMEOUT_S
from trahiv_cli.clock import swarm_time
from trahiv_cli.members.records import sign
from trahiv_cli.rounds.claims import Claim
from trahiv_cli.rounds.vote import Vote

SHARES = {
    "kill": 6, "late": 1, "cut": 3, "halve": 1, "stall": 3, "slow": 1,
    "corrupt": 3, "misshapen": 1, "codec": 1, "nan": 1, "enormous": 1, "two-votes": 1, "boast": 1,
}  # fmt: skip
"""How often each kind is drawn. Of peers: one vanishes, and comes back after a while; a new one comes. Of the
network: the link between two is cut for a while; the swarm is cut in two, this peer and `others` on one side.
Of time: nothing of a peer's moves for a while; it computes and sends slowly. Of rounds: one byte of a part is
another one; a part is no tensor of its shape; the codec raises; a gradient is not finite, or enormous. Lies:
a vote for another average to some than to others; a claim of more than a peer can have."""

LIES = ("two-votes", "boast")
MOMENTS = ("", "rpc_join_group", "rpc_aggregate_part", "rpc_vote")
HOMECOMINGS = ("as-new", "from-checkpoint", "empty-handed")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    at_step: int
    peer: int
    moment: str = ""  # name of the call whose next message it waits for; empty: none
    is_answer: bool = False
    skip: int = 0  # messages of that kind that pass before
    seconds: float = 0.0
    others: tuple[int, ...] = ()
    homecoming: str = ""
    """How a killed peer comes back: with another identity, with its checkpoint, or with neither."""


def draw(seed, num_peers, rounds, every):
    """Draw the faults of a run, one in every so many rounds, none in the last of them.

    All lies are one peer's: to more than half of a group that lie nobody promises anything.
    """
    dice = random.Random(seed)
    liar = dice.randrange(num_peers)
    faults = []
    step = every
    while step < rounds - every:
        kind = dice.choices(list(SHARES), list(SHARES.values()))[0]
        peer = liar if kind in LIES else dice.randrange(num_peers)
        fields = {"seconds": round(dice.uniform(0.5, 12.0), 1)}
        others = [number for number in range(num_peers) if number != peer]
        if kind in ("kill", "cut", "stall", "corrupt", "misshapen"):
            is_of_part = kind in ("corrupt", "misshapen")
            fields["moment"] = dice.choice(MOMENTS[2:3] if is_of_part else MOMENTS)
            fields["is_answer"] = kind != "misshapen" and dice.random() < 0.5
            fields["skip"] = dice.randrange(3)
        if kind == "kill":
            fields["homecoming"] = dice.choice(HOMECOMINGS)
        if kind == "cut":
            fields["others"] = (dice.choice(others),)
        if kind == "halve":
            fields["others"] = tuple(dice.sample(others, dice.randrange(num_peers - 1)))
            fields["seconds"] = 45.0
        faults.append(Fault(kind, step, peer, **fields))
        step += dice.randrange(every // 2, 3 * every // 2 + 1)
    return faults


def shortest(faults, fails, patience_s=math.inf):
    """Leave out faults as long as a run of them still fails: first the half, then less and less.

    After `patience_s`, what is left then is given; the run fails with that.
    """
    left = list(faults)
    size = max(1, len(faults) // 2)
    until = time.monotonic() + patience_s
    while True:
        start = 0
        while start < len(left):
            if time.monotonic() > until:
                return left
            fewer = left[:start] + left[start + size :]
            if fails(fewer):
                left = fewer
            else:
                start += size
        if size == 1:
            return left
        size //= 2


# A lie is a function that changes one thing in a `tests.simulation.swarm.Peer`, once that has its optimizer.
# The product's own code runs in a liar up to the edge: the lie is put in after the peer's own checks.

CLAIMED = [field.name for field in fields(Claim)]  # what a claim says, in the order in which it travels


def poison(factor, claimed=None):
    """Bring another gradient in every round: the true one times `factor`.

    `claimed` is the norm that the peer says it brings; None: that which it brings.
    """

    def tell(peer):
        averager = peer.dht.services["ExactGradientAverager"]
        prepare = averager._prepare_contribution

        def poisoned(exchange):
            norm = abs(factor) * float(prepare(exchange))
            with averager.averages.locked() as tensors, torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(factor)
            return norm if claimed is None else claimed

        averager._prepare_contribution = poisoned

    return tell


def claim(said, rounds=math.inf):
    """Claim something else in so many rounds: `said` by the fields of `Claim`, as they travel."""

    def tell(peer):
        finder = peer.dht.services["ExactGradientAverager"].finder
        look_for_group = finder.look_for_group
        left = rounds

        async def lying(content, deadline):
            nonlocal left
            left -= 1
            if left >= 0:
                own = MSGPackSerializer.loads(content)
                claimed = dict(zip(CLAIMED, own, strict=False)) | said  # the last field may be left out
                content = MSGPackSerializer.dumps(list(claimed.values()))
            return await look_for_group(content, deadline)

        finder.look_for_group = lying

    return tell


def fall_silent(peer):
    """Send no more than the first part of a share, from step 4 on, though the stream stays open."""
    begun = set()

    def tamper(message):
        step = peer.optimizer.local_epoch
        if message.call != "rpc_aggregate_part" or message.is_answer or step < 4:
            return [message.content]
        is_first = (message.receiver, step) not in begun
        begun.add((message.receiver, step))
        return [message.content] if is_first else None

    peer.tamper = tamper


def send_slowly(peer):
    """Wait before each part of every round, almost so long that the others give it up."""
    averager = peer.dht.services["ExactGradientAverager"]
    make_runner = averager._make_runner

    async def make_slow_runner(*arguments, **options):
        runner = await make_runner(*arguments, **options)
        generate = runner._generate_input_for_peer

        async def parts(index):
            async for part in generate(index):
                await asyncio.sleep(CHUNK_TIMEOUT_S - 0.5)
                yield part

        runner._generate_input_for_peer = parts
        return runner

    averager._make_runner = make_slow_runner


def never_come(peer):
    """Report like all others, and look for no group."""

    async def look_for_group(_, deadline):
        await asyncio.sleep(deadline - swarm_time())

    peer.dht.services["ExactGradientAverager"].finder.look_for_group = look_for_group


def vote_twice(peer):
    """Tell half of the others, in the next round, of another average than the peer holds."""
    averager = peer.dht.services["ExactGradientAverager"]
    exchange_votes = averager._exchange_votes
    told = []

    async def exchange(group_id, other, call):
        ballot = averager.ballots[group_id]
        told.append(other)
        if len(told) % 2:
            vote = Vote(b"x" * 32).to_bytes()
            call = replace(call, vote=sign(peer.dht.signing_key, ballot.about, vote, has_key=False))
        if len(told) >= len(ballot.members) - 1:
            averager._exchange_votes = exchange_votes
        return await exchange_votes(group_id, other, call)

    averager._exchange_votes = exchange
