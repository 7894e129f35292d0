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

# A sender's parts may have so many times the norm it claimed: codecs round, and what a lossy one lost in an
# earlier round comes on top (uniform8 loses up to 3 % of the norm a round).
CLAIM_SLACK = 1.25

CLIPPING_ROUNDS = 5  # of centered clipping; arXiv 2012.10333 shows one to be enough from a good start

# Of a claim that can be read; how many samples count is for `Claim.counted` to say. A weight is of trained
# tokens: far above any step, far below float32's limit.
MOST_SAMPLES, MOST_QUORUM, MOST_DIGEST_BYTES, GREATEST_WEIGHT = 2**40, 2**16, 32, 1e12

USELESS_AT_MOST = 1024  # positions claimed beyond the samples: those whose gradients were not finite


@dataclass(frozen=True)
class Claim:
    """What a peer says of its contribution before the round."""

    samples: int = 0
    weight: float = 1.0
    norm: float = 0.0  # euclidean norm of its tensors together
    state: bytes = b""  # digest of the weights that it holds
    quorum: int = 2  # the smallest group that it would commit with
    is_client: bool = False  # whether others can't call it, so that it averages no share
    measured: Measured = Measured()  # what it knows of its own pace and link
    trained: Spans = Spans()  # positions of the data that it brings, and those whose gradients were of no use

    def counted(self, most_samples: int) -> Claim:
        """Return what counts of it, if a peer can hold so many samples: these, their positions and weight."""
        if self.samples <= most_samples:
            return self
        weight = self.weight * most_samples / self.samples
        trained = self.trained.lowest(most_samples + USELESS_AT_MOST)
        return replace(self, samples=most_samples, weight=weight, trained=trained)

    def to_bytes(self) -> bytes:
        """Write it as MessagePack."""
        numbers = [self.samples, float(self.weight), float(self.norm), self.state, self.quorum]
        lists = [self.measured.to_wire(), self.trained.to_wire()]
        return bytes(MSGPackSerializer.dumps([*numbers, self.is_client, *lists]))

    @classmethod
    def parse(cls, content: bytes) -> Claim:
        """Read what `to_bytes` gave; raise `ValueError` if it is not that, or more than anybody can claim."""
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

    A norm may be `norm_limit` times the median; 0 accepts every finite norm. The median is the lower one of
    two: a group of two is judged by the smaller norm. Contributions of norm 0 have no say in it.
    """
    found, norms = {}, [claim.norm for claim in claims.values() if 0 < claim.norm < math.inf]
    median = statistics.median_low(norms) if norms else 0.0
    most = norm_limit * median or math.inf
    for peer, claim in claims.items():
        if not math.isfinite(claim.norm):
            found[peer] = "its gradient is not finite"
        elif claim.norm > most:
            found[peer] = f"the norm of its gradient is {claim.norm:.3g}, the group's median {median:.3g}"
    return found


def state_to_adopt(states: Mapping[str, bytes], lot: bytes) -> bytes:
    """Return the digest of the state that all members of a group adopt: the one that most of them hold.

    Between equals `lot` decides, the same for all; none knew it before the claims, to make a state that wins.
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

    Stands in for hivemind's `TensorPartReducer`, which takes a weight from each part, and averages on without
    a sender that fails half-way: parts then differ in whose they are. Here a failed sender fails the round.
    Parts of `left_out` are not used. `robust`: average by centered clipping, not by the weighted mean.
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
        self.notes: dict[str, str] = {}  # senders that broke their word, and how; not used from then on
        self._shapes, self._senders, self._claims = part_shapes, senders, claims
        self._left_out, self._robust = left_out, robust
        self._squares = [0.0] * len(senders)
        self._arrived: list[dict[int, torch.Tensor]] = [{} for _ in part_shapes]
        self._averages: list[asyncio.Future[torch.Tensor]] = [asyncio.Future() for _ in part_shapes]

    async def accumulate_part(self, sender: int, index: int, part: torch.Tensor | None) -> torch.Tensor:
        """Take one part of a sender, wait for the others', return their average, in float32.

        If `part` is not floating-point, or of another shape, or None as it can't be read, it is not used, nor
        is what its sender sends after it.

        Raises:
            AllreduceException: a sender failed, or nobody's part can be used.
        """
        name = self._senders[sender]
        if index >= self.num_parts:
            raise BrokenPart(f"{name} sent more parts than there are")
        if part is None or part.shape != self._shapes[index] or not part.is_floating_point():
            self.notes.setdefault(name, "its parts are no tensors of the right shape")
            part = torch.empty(0)
        self._squares[sender] += float(torch.linalg.vector_norm(part)) ** 2
        sent, claimed = math.sqrt(self._squares[sender]), self._claims[name].norm
        if not math.isfinite(sent):
            self.notes.setdefault(name, "its parts are not finite")
        elif sent > CLAIM_SLACK * claimed + torch.finfo(torch.float32).tiny:
            self.notes.setdefault(name, f"its parts are larger than the norm {claimed:.3g} that it claimed")
        arrived, average = self._arrived[index], self._averages[index]
        arrived[sender] = part
        if len(arrived) == len(self._senders) and not average.done():
            try:
                average.set_result(self._combine(arrived))
            except (AllreduceException, RuntimeError) as error:  # the latter is torch's
                average.set_exception(error)
            arrived.clear()
        return await asyncio.shield(average)

    def on_sender_failed(self, sender: int) -> None:
        """Fail what still needs this sender."""
        self._fail(f"peer {self._senders[sender]} did not send its part in time")

    def finalize(self) -> None:
        """Fail what is not finished, and free the memory. Safe to call twice."""
        self._fail("the round is over")
        self._arrived = [{} for _ in self._shapes]

    def _fail(self, why: str) -> None:
        for average in self._averages:
            if not average.done():
                average.set_exception(AllreduceException(why))
                average.exception()  # somebody may be waiting, or nobody; asyncio complains of the latter

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
