"""What a reducer takes from its group: finite values, no more than their sender claimed, no outliers.

Before a round each peer claims the norm of what it brings; the claims reach every member in the same
message, so all come to the same verdict. While the parts arrive each reducer holds their senders to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.utils import MSGPackSerializer

from trahiv_cli.optim.auto import Measured
from trahiv_cli.optim.ledger import Spans
from trahiv_cli.swarm.snapshot import unpacked

CLAIM_SLACK = 1.25
"""A sender's parts may have so many times the norm it claimed: codecs round, and what a lossy one lost in
an earlier round comes on top (uniform8 loses up to 3 % of the norm a round)."""

CLIPPING_ROUNDS = 5
"""Iterations of centered clipping; arXiv 2012.10333 shows one to be enough from a good start, and the start
here is the coordinate-wise median."""


GREATEST_WEIGHT = 1e12
"""Trained tokens that one peer may bring to one step: far above any step, far below float32's limit."""

USELESS_AT_MOST = 1024
"""Positions that a peer may claim beyond its samples: those whose gradients were not finite."""

MOST_SAMPLES, MOST_QUORUM, MOST_DIGEST_BYTES = 2**40, 2**16, 32
"""Of a claim that can be read; how many samples count is for `Claim.counted` to say."""


@dataclass(frozen=True)
class Claim:
    """What a peer says of its contribution before the round."""

    samples: int = 0
    weight: float = 1.0
    norm: float = 0.0
    """Euclidean norm of its tensors together."""

    state: bytes = b""
    """Digest of the weights that it holds."""

    quorum: int = 2
    """The smallest group that it would commit with."""

    is_client: bool = False
    """Whether others can't call it, so that it averages no share."""

    measured: Measured = Measured()
    """What it knows of its own pace and link."""

    trained: Spans = Spans()
    """Positions of the data that it brings, and those whose gradients were of no use."""

    def counted(self, most_samples: int) -> Claim:
        """Return what counts of it: as many samples as a peer can hold, with their positions and weight.

        Args:
            most_samples: that a peer can hold; the same for all members.
        """
        if self.samples <= most_samples:
            return self
        weight = self.weight * most_samples / self.samples
        trained = self.trained.lowest(most_samples + USELESS_AT_MOST)
        return replace(self, samples=most_samples, weight=weight, trained=trained)

    def to_bytes(self) -> bytes:
        """Write it as MessagePack."""
        numbers = [self.samples, float(self.weight), float(self.norm), self.state, self.quorum]
        lists = [self.measured.to_wire(), self.trained.to_wire()]
        packed: bytes = MSGPackSerializer.dumps([*numbers, self.is_client, *lists])
        return packed

    @classmethod
    def parse(cls, content: bytes) -> Claim:
        """Read what `to_bytes` gave.

        Raises:
            ValueError: it is not that, or beyond what anybody can claim.
        """
        match unpacked(content):
            case [
                int(samples), float(weight), float(norm), bytes(state), int(quorum), bool(is_client),
                measured, trained,
            ] if (
                0 <= samples <= MOST_SAMPLES
                and 0.0 <= weight <= GREATEST_WEIGHT
                and not norm < 0.0  # one that is not finite is read, and left out
                and len(state) <= MOST_DIGEST_BYTES
                and 1 <= quorum <= MOST_QUORUM
            ):  # fmt: skip
                known, spans = Measured.from_wire(measured), Spans.from_wire(trained)
                if len(spans) <= samples + USELESS_AT_MOST:
                    return cls(samples, weight, norm, state, quorum, is_client, known, spans)
        raise ValueError("not a claim")


def outliers(claims: Mapping[str, Claim], norm_limit: float) -> dict[str, str]:
    """Find the members whose contribution is to be left out, with the reason.

    The median is the lower one of two: a group of two is then judged by the smaller norm. Contributions
    of norm 0 have no say in it.

    Args:
        claims: of all members.
        norm_limit: how many times the median norm is still accepted; 0 accepts every finite norm.
    """
    found = {
        peer: "its gradient is not finite" for peer, claim in claims.items() if not math.isfinite(claim.norm)
    }
    norms = [claim.norm for peer, claim in claims.items() if claim.norm > 0 and peer not in found]
    if not norm_limit or not norms:
        return found
    median = statistics.median_low(norms)
    for peer, claim in claims.items():
        if peer not in found and claim.norm > norm_limit * median:
            found[peer] = f"the norm of its gradient is {claim.norm:.3g}, the group's median {median:.3g}"
    return found


def state_to_adopt(states: Mapping[str, bytes], lot: bytes) -> bytes:
    """Return the digest of the state that all members of a group adopt: the one that most of them hold.

    Between equals a lot decides, so that nobody can make a state that wins.

    Args:
        states: by member, the digest that it claims to hold; at least one.
        lot: the same for all members, and not known to any of them when they made their claims.
    """
    counts = Counter(states.values())
    return max(counts, key=lambda state: (counts[state], hashlib.sha256(lot + state).digest()))


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all values are finite.

    By numpy where it can: torch would start OpenMP threads for a thread beside the one that trains, too.
    """
    return all(
        bool(tensor.isfinite().all() if tensor.is_cuda else np.isfinite(tensor.detach().numpy()).all())
        for tensor in tensors
    )


class BrokenPart(AllreduceException):
    """A member sent what nobody can use."""


class SoundReducer:
    """Averages the parts of one share, each sender by the weight that it claimed.

    Stands in for hivemind's `TensorPartReducer`, which averages on without a sender that fails half-way:
    parts then differ in whose they are. Here a failed sender fails the round.

    Args:
        part_shapes: of this share's parts.
        senders: ids of those who send parts, in the order of the group.
        claims: of all members.
        left_out: members whose parts are not used.
        robust: average by centered clipping, not by the weighted mean.
    """

    def __init__(
        self,
        part_shapes: Sequence[torch.Size],
        senders: Sequence[str],
        claims: Mapping[str, Claim],
        left_out: Mapping[str, str],
        *,
        robust: bool,
    ) -> None:
        self.num_parts = len(part_shapes)
        self.finished = asyncio.Event()
        self.notes: dict[str, str] = {}
        """Senders that broke their word, and how; their parts were not used from then on."""
        self._shapes, self._senders, self._claims = part_shapes, senders, claims
        self._left_out, self._robust = left_out, robust
        self._squares = [0.0] * len(senders)
        self._arrived: list[dict[int, torch.Tensor]] = [{} for _ in part_shapes]
        self._averages: list[asyncio.Future[torch.Tensor]] = [asyncio.Future() for _ in part_shapes]

    async def accumulate_part(
        self, sender_index: int, part_index: int, part: torch.Tensor | None, weight: float = 1.0
    ) -> torch.Tensor:
        """Take one part, wait for the others', return their average.

        `weight`, which comes with each part, is not used: a sender could change it from part to part.

        Args:
            sender_index: who sent it, among the senders.
            part_index: which one it is.
            part: of the share's shape; of another one, or None if it can't be read, it is not used, nor what
                its sender sends after it.
            weight: not used.

        Raises:
            AllreduceException: a sender failed, or nobody's part can be used.
        """
        del weight
        if part_index >= self.num_parts:
            raise BrokenPart(f"{self._senders[sender_index]} sent more parts than there are")
        arrived = self._arrived[part_index]
        if part is None or part.shape != self._shapes[part_index] or not part.is_floating_point():
            self.notes.setdefault(self._senders[sender_index], "its parts are no tensors of the right shape")
            part = torch.empty(0)
        else:
            self._judge(sender_index, part)
        arrived[sender_index] = part
        average = self._averages[part_index]
        if len(arrived) == len(self._senders) and not average.done():
            try:
                average.set_result(self._combine(arrived))
            except (AllreduceException, RuntimeError) as error:  # the latter is torch's
                average.set_exception(error)
            arrived.clear()
            if all(one.done() for one in self._averages):
                self.finished.set()
        return await asyncio.shield(average)

    def on_sender_failed(self, sender_index: int) -> None:
        """Fail what still needs this sender."""
        self._fail(AllreduceException(f"peer {self._senders[sender_index]} did not send its part in time"))

    def finalize(self) -> None:
        """Fail what is not finished, and free the memory. Safe to call twice."""
        self._fail(AllreduceException("the round is over"))
        self._arrived = [{} for _ in self._shapes]
        self.finished.set()

    def _fail(self, error: AllreduceException) -> None:
        for average in self._averages:
            if not average.done():
                average.set_exception(error)
                average.exception()  # somebody may be waiting, or nobody; asyncio complains of the latter

    def _judge(self, sender_index: int, part: torch.Tensor) -> None:
        """Note a sender whose parts are not finite, or larger together than it claimed."""
        sender = self._senders[sender_index]
        claimed = self._claims[sender].norm
        self._squares[sender_index] += float(torch.linalg.vector_norm(part)) ** 2
        sent = math.sqrt(self._squares[sender_index])
        if not math.isfinite(sent):
            self.notes.setdefault(sender, "its parts are not finite")
        elif 0 <= claimed and sent > CLAIM_SLACK * claimed + torch.finfo(torch.float32).tiny:
            self.notes.setdefault(sender, f"its parts are larger than the norm {claimed:.3g} that it claimed")

    def _combine(self, arrived: Mapping[int, torch.Tensor]) -> torch.Tensor:
        used = [
            (arrived[index], self._claims[sender].weight)
            for index, sender in enumerate(self._senders)
            if sender not in self._left_out and sender not in self.notes and self._claims[sender].weight
        ]
        if not used:
            raise AllreduceException("nobody's contribution can be used")
        if self._robust and len(used) > 2:
            return centered_clipping([part for part, _ in used])
        return weighted_mean(used)


def weighted_mean(parts: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """Average (tensor, weight) pairs of one shape; a new float32 tensor."""
    total = torch.zeros(parts[0][0].shape)
    for part, weight in parts:
        total.add_(part, alpha=weight)
    return total.div_(sum(weight for _, weight in parts))


def centered_clipping(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Average tensors of one shape so that a minority of them can't move the result far.

    v <- v + mean_i clip(x_i - v, t), where clip scales a difference down to the norm t, the median of all
    differences' norms, and v starts at the coordinate-wise median (arXiv 2012.10333, algorithm 2). All
    count alike: a weight is what its owner says. Needs at least three. A new float32 tensor.
    """
    values = torch.stack([part.float().flatten() for part in parts])
    center = values.median(dim=0).values
    for _ in range(CLIPPING_ROUNDS):
        differences = values - center
        norms = torch.linalg.vector_norm(differences, dim=1)
        scale = torch.clamp(norms.median() / norms, max=1.0).nan_to_num(1.0)
        center = center + (scale @ differences) / len(parts)
    return center.reshape(parts[0].shape)
