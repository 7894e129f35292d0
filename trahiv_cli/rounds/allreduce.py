"""One exact exchange: all peers of a group end with the same bits, or with none.

hivemind's all-reduce sends each peer the *difference* between the average and that peer's own part. Every
peer then adds a number that was rounded, or quantized, for it alone, so replicas drift: by 4e-8 a round
without a codec, and by 2.5 % of the gradient with an 8-bit one. Here the peer that reduces a part sends the
average itself, in the same bytes, to every member, and adopts the values that these bytes decode to. Every
part travels with a checksum. Any failure fails the round for this peer.

A reducer uses only finite contributions, up to the norm that their sender claimed, and no outliers.

Each part has a time limit, and so has the whole exchange. Otherwise a member that sends each part just before
its limit would delay every round without blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows a stream by typing's

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException, TensorPartContainer
from hivemind.compression import CompressionBase, CompressionInfo, PerTensorCompression
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.proto.averaging_pb2 import AVERAGED_PART, PART_FOR_AVERAGING, AveragingData
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor, as_aiter, attach_event_on_finished

from trahiv_cli.net.streams import UNREACHABLE
from trahiv_cli.rounds.buffers import are_usable
from trahiv_cli.rounds.claims import Claim
from trahiv_cli.rounds.codecs import Codec, Verbatim, read_tensor
from trahiv_cli.rounds.vote import Vote
from trahiv_cli.wire import digest_of_bytes

# The norm of a sender's parts may be this many times the norm that it claimed: codecs round, and the losses
# of a lossy codec in an earlier round are added (uniform8 loses up to 3 % of the norm a round).
CLAIM_SLACK = 1.25


def message_of(code: Any, part: runtime_pb2.Tensor, **fields: Any) -> AveragingData:
    """Return a message with a part; its checksum is in a field that hivemind leaves empty."""
    checksum = digest_of_bytes(part.buffer)
    return AveragingData(code=code, tensor_part=part, peer_id=checksum, **fields)


def checked(message: AveragingData, peer: PeerID) -> torch.Tensor | None:
    """Decode a part; None if its bytes are no tensor. Raises `BrokenPart` if the checksum does not match."""
    if message.peer_id != digest_of_bytes(message.tensor_part.buffer):
        raise BrokenPart(f"a part from peer {peer} was damaged on its way")
    with contextlib.suppress(ValueError):
        return read_tensor(message.tensor_part)
    return None


class BrokenPart(AllreduceException):
    """A member sent a part that can't be used."""


class BrokenOff(AllreduceException):
    """A member broke off the exchange, perhaps because of another member."""


class ExactAllReduce(AllReduceRunner):
    """Butterfly all-reduce that yields averages, the same bits for every peer of the group, or raises.

    `RoundService` creates one for each round. `SoundReducer` explains the options that hivemind lacks.
    Tensors from index `first_buffer` on are buffers; they travel without a codec. After `limit_s` seconds the
    exchange fails, and blames the member that is furthest behind.
    """

    def __init__(
        self,
        *,
        claims: Mapping[str, Claim],
        left_out: Mapping[str, str],
        robust: bool,
        first_buffer: int,
        limit_s: float,
        compression: CompressionBase,
        **kwargs: Any,
    ) -> None:
        self._limit_s = limit_s
        self._nearly_over_at = math.inf
        codecs = defaultdict(Verbatim, dict.fromkeys(range(first_buffer), compression))
        self._compression = PerTensorCompression(codecs)
        super().__init__(compression=self._compression, **kwargs)
        self._container: Any = self.tensor_part_container
        self._own = self.ordered_peer_ids.index(self.peer_id)
        shares = self._container._input_parts_by_peer
        self._infos = [info for _, info in shares[self._own]]
        self._num_gradients = [sum(info.key < first_buffer for _, info in share) for share in shares]
        self.tensor_part_reducer.finished.set()  # upstream's reducer is not used, and would log a warning
        self.tensor_part_reducer: Any = SoundReducer(
            [part.shape for part in self.parts_for_local_averaging],
            [peer.to_base58() for peer in self.sender_peer_ids],
            claims,
            left_out,
            robust=robust,
            num_gradients=self._num_gradients[self._own],
        )
        self.complaint = Vote()  # with the member that this peer blames for a failure
        self.sent = self.received = 0  # bytes of encoded parts
        self._encoded: dict[int, asyncio.Future[AveragingData]] = {}
        self._averages: list[list[runtime_pb2.Tensor]] = [[] for _ in self.ordered_peer_ids]
        used = {peer: claim for peer, claim in claims.items() if peer not in left_out}
        # The losses of a lossy codec: of this peer's contribution, and of the averages of its own share. The
        # next round may add them (error feedback, arXiv 1901.09847). None if nothing is lost.
        self.lost: list[torch.Tensor] | None = None
        is_lossy = isinstance(compression, Codec) and compression.bits > 0
        if is_lossy and self.peer_id.to_base58() in used:
            self.lost = [torch.zeros_like(tensor) for tensor in self._container.local_tensors]
            cut = self.peer_fractions, self._compression, self._container.part_size_bytes
            split = TensorPartContainer(self.lost, *cut)
            self._lost_parts = [[part for part, _ in parts] for parts in split._input_parts_by_peer]
            total = sum(claim.weight for claim in used.values())
            self._own_share = used[self.peer_id.to_base58()].weight / total if total else 0.0
        # A mean is no longer than the longest contribution. A coordinate-wise median is at most sqrt(2) times
        # as long: in each coordinate at least half of the contributions have its magnitude or more.
        slack = CLAIM_SLACK * (math.sqrt(2) if robust else 1.0)
        self._most_norm = slack * max((claim.norm for claim in used.values()), default=math.inf)

    async def run(self) -> AsyncIterator[torch.Tensor]:
        """Run the exchange, and yield the averages as they arrive; see `AllReduceRunner`."""
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(self._limit_s, self._run_out)
        # At the limit of an exchange its members break off one after the other. After this share of the
        # limit, each member blames the slowest sender that it has observed itself.
        self._nearly_over_at = loop.time() + 0.8 * self._limit_s
        try:
            async with contextlib.aclosing(super().run()) as averages:
                async for average in averages:
                    yield average
        finally:
            alarm.cancel()

    # -- when it fails -------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """The first error of the round; None if there was none."""
        return self._future.exception() if self._future.done() and not self._future.cancelled() else None

    def _fail(self, error: BaseException, peer: PeerID) -> None:
        """End the round and the calls of other members: no part that could still arrive would save it."""
        if isinstance(error, (*UNREACHABLE, BrokenPart, BrokenOff)):
            # A peer that returns no average in time may itself be waiting for another peer.
            self._blame(peer, is_sure=not isinstance(error, (BrokenOff, TimeoutError)))
        if isinstance(error, asyncio.CancelledError):
            error = AllreduceException(f"the exchange with peer {peer} was broken off")
        elif isinstance(error, TimeoutError):
            error = AllreduceException(f"peer {peer} sent nothing for too long")
        elif isinstance(error, UNREACHABLE):
            error = AllreduceException(f"peer {peer} can't be reached")
        elif not isinstance(error, AllreduceException):
            error = AllreduceException(f"{type(error).__name__}: {error}")
        self.finalize(exception=error)

    def _blame(self, peer: PeerID, *, is_sure: bool) -> None:
        if self._future.done() or self.complaint.blames:
            return
        is_nearly_over = asyncio.get_running_loop().time() >= self._nearly_over_at
        sender = self.tensor_part_reducer.slowest if is_nearly_over else None
        if sender is None:
            self.complaint = Vote(blames=peer.to_base58(), is_sure=is_sure)
        else:
            slow = self.sender_peer_ids[sender].to_base58()
            self.complaint = Vote(blames=slow, is_sure=True, is_late=True)

    def _run_out(self) -> None:
        """Fail the round at its limit; blame a slow sender or, if there is none, a slow reducer."""
        limit = f"within the limit of {self._limit_s:.0f} s for an exchange"
        if (sender := self.tensor_part_reducer.slowest) is not None:
            peer = self.sender_peer_ids[sender]
            self._fail(BrokenOff(f"peer {peer} did not send its parts {limit}"), peer)
            return
        missing = [
            (len(parts) / num_parts, peer)
            for peer, parts, num_parts in zip(
                self.ordered_peer_ids, self._averages, self._container.num_parts_by_peer, strict=True
            )
            if len(parts) < num_parts
        ]
        if missing:
            _, peer = min(missing)
            self._fail(BrokenOff(f"peer {peer} did not return its averages {limit}"), peer)

    async def _ban_sender(self, peer_id: PeerID) -> None:
        """Fail the round, because a member sends no more parts."""
        self._blame(peer_id, is_sure=peer_id not in self.active_senders)
        await super()._ban_sender(peer_id)

    # -- as a sender ---------------------------------------------------------------------------------

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        index = self.ordered_peer_ids.index(peer_id)
        try:
            parts = self._reduce_own_parts() if index == self._own else self._exchange_parts(peer_id, index)
            count = 0
            async for average, encoded in parts:
                self._averages[index].append(encoded)
                self._container.register_processed_part(index, count, average)
                count += 1
            if count != self._container.num_parts_by_peer[index]:
                raise BrokenOff(f"peer {peer_id} sent {count} parts of its share")
        except (Exception, asyncio.CancelledError) as error:  # else the round waits for its averages
            self._fail(error, peer_id)
            raise

    @property
    def encoded_averages(self) -> tuple[runtime_pb2.Tensor, ...]:
        """All encoded parts of the average, as they travelled, in the order of the tensors' values."""
        return tuple(part for parts in self._averages for part in parts)

    async def _reduce_own_parts(self) -> AsyncIterator[tuple[torch.Tensor, runtime_pb2.Tensor]]:
        sender = self.sender_peer_ids.index(self.peer_id)
        for part_index, part in enumerate(self.parts_for_local_averaging):
            average = await self.tensor_part_reducer.accumulate_part(sender, part_index, part)
            message = await self._encode(part_index, average)
            decoded = read_tensor(message.tensor_part)
            if self.lost is not None and self._own_share:
                # Only this peer knows the loss of this average, and adds it to its next contribution.
                lost = self._lost_parts[self._own][part_index]
                lost.copy_(average.sub(decoded).div_(self._own_share))
            yield decoded, message.tensor_part

    async def _exchange_parts(
        self, peer_id: PeerID, index: int
    ) -> AsyncIterator[tuple[torch.Tensor, runtime_pb2.Tensor]]:
        done_sending = asyncio.Event()
        parts = attach_event_on_finished(self._generate_input_for_peer(index), done_sending)
        async with asyncio.timeout(self.reducer_timeout):  # dialing a peer that is gone may take minutes
            stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(parts)
        if self.should_delay_results(self.peer_id):
            await done_sending.wait()

        def decode(message: AveragingData) -> tuple[torch.Tensor, runtime_pb2.Tensor, float]:
            if message.code != AVERAGED_PART:
                raise BrokenOff(f"peer {peer_id} broke the round off")
            self.received += len(message.tensor_part.buffer)
            average = checked(message, peer_id)
            if average is None or not average.is_floating_point() or not bool(average.isfinite().all()):
                raise BrokenPart(f"peer {peer_id} returned no average, or one that is not finite")
            return average, message.tensor_part, float(torch.linalg.vector_norm(average)) ** 2

        shapes = [part.shape for part, _ in self._container._input_parts_by_peer[index]]
        num_buffers = len(shapes) - self._num_gradients[index]  # the last parts of a share
        squares = 0.0
        answers = aiter_with_timeout(stream, self.reducer_timeout)
        decoding = amap_in_executor(decode, answers, max_prefetch=self._container.prefetch)
        async for average, encoded, square in decoding:
            if not shapes or shapes.pop(0) != average.shape:
                raise BrokenPart(f"peer {peer_id} returned an average of another shape, or one too many")
            if len(shapes) >= num_buffers:
                squares += square
            elif not are_usable(average):
                raise BrokenPart(f"peer {peer_id} returned buffers that are too large")
            if squares > self._most_norm * self._most_norm + torch.finfo(torch.float32).tiny:
                raise BrokenPart(f"peer {peer_id} returned an average that is longer than all that it is of")
            yield average, encoded

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[AveragingData]:
        parts = enumerate(self._container._input_parts_by_peer[peer_index])

        def encode(item: tuple[int, tuple[torch.Tensor, CompressionInfo]]) -> AveragingData:
            part_index, (part, info) = item
            encoded = self._compression.compress(part, info)
            if self.lost is not None:
                lost = self._lost_parts[peer_index][part_index]
                torch.sub(part, read_tensor(encoded), out=lost)
            return message_of(PART_FOR_AVERAGING, encoded, group_id=self.group_id, weight=self.weight)

        encoding = amap_in_executor(encode, as_aiter(*parts), max_prefetch=self._container.prefetch)
        try:
            async for message in encoding:
                self.sent += len(message.tensor_part.buffer)
                yield message
        except Exception as error:  # hivemind's writing task runs this, and its result is not read
            self._fail(error, self.ordered_peer_ids[peer_index])
            raise

    # -- as a reducer --------------------------------------------------------------------------------

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[AveragingData], sender_index: int
    ) -> AsyncIterator[AveragingData]:
        sender = self.sender_peer_ids[sender_index]

        def decode(message: AveragingData) -> torch.Tensor | None:
            self.received += len(message.tensor_part.buffer)
            return checked(message, sender)

        part_index = 0
        try:
            async for part in amap_in_executor(decode, stream, max_prefetch=self._container.prefetch):
                average = await self.tensor_part_reducer.accumulate_part(sender_index, part_index, part)
                message = await self._encode(part_index, average)
                part_index += 1
                self.sent += len(message.tensor_part.buffer)
                yield message
        except AllreduceException as error:
            self._fail(error, sender)
            raise
        except TimeoutError:  # the sender's stream is open, but it sends nothing
            self._blame(sender, is_sure=True)
            raise
        finally:
            if part_index != self.tensor_part_reducer.num_parts:
                await self._ban_sender(sender)

    async def _encode(self, part_index: int, average: torch.Tensor) -> AveragingData:
        """Encode the average of one part of this peer's share, once for the whole group.

        hivemind cancels the handler of a member that hangs up, but the other members still need the part.
        """

        def encode() -> AveragingData:
            part = self._compression.compress(average, self._infos[part_index])
            return message_of(AVERAGED_PART, part)

        if part_index not in self._encoded:
            self._encoded[part_index] = asyncio.get_running_loop().run_in_executor(None, encode)
        return await asyncio.shield(self._encoded[part_index])


@dataclass(eq=False)
class SoundReducer:
    """Averages the parts of one share, with the weight that each sender claimed.

    `ExactAllReduce` creates one for each round. It replaces hivemind's `TensorPartReducer`, which reads a
    weight from each part, and continues without a sender that fails half-way: parts are then averages over
    different senders. Here a failed sender fails the round.

    Parts of the senders in `left_out` are not used. `robust`: average by centered clipping, not by the
    weighted mean. The parts from index `num_gradients` on are buffers: they count in no norm, and their
    robust mean is the median of each value.
    """

    part_shapes: Sequence[torch.Size]
    senders: Sequence[str]
    claims: Mapping[str, Claim]
    left_out: Mapping[str, str]
    robust: bool
    num_gradients: int

    def __post_init__(self) -> None:
        self.num_parts = len(self.part_shapes)
        self.notes: dict[str, str] = {}  # why a sender violated its claim; it is not used from then on
        counted = [self.claims[name] for name in self.senders if name not in self.left_out]
        self._is_empty = any(claim.samples for claim in counted) and not any(
            claim.weight for claim in counted
        )
        self._squares = [0.0] * len(self.senders)
        self._num_sent = [0] * len(self.senders)  # parts
        self._came_at = [math.inf] * self.num_parts  # when the latest part of each index arrived
        self._waits_s = [0.0] * len(self.senders)  # how long the others waited for each sender alone
        self._arrived: list[dict[int, torch.Tensor]] = [{} for _ in self.part_shapes]
        self._averages: list[asyncio.Future[torch.Tensor]] = [asyncio.Future() for _ in self.part_shapes]

    async def accumulate_part(self, sender: int, index: int, part: torch.Tensor | None) -> torch.Tensor:
        """Take one part of a sender, wait for the other senders' parts, and return their average in float32.

        A part that is not floating-point, has another shape, or is None because it can't be read, is not
        used, nor are the sender's later parts. If no sender's samples had a trained token, the average is 0.

        Raises:
            AllreduceException: a sender failed, or no sender's part can be used.
        """
        name = self.senders[sender]
        if index >= self.num_parts:
            raise BrokenPart(f"{name} sent more parts than there are")
        if part is None or part.shape != self.part_shapes[index] or not part.is_floating_point():
            self.notes.setdefault(name, "its parts are no tensors of the right shape")
            part = torch.empty(0)
        if index < self.num_gradients:
            self._squares[sender] += float(torch.linalg.vector_norm(part)) ** 2
        elif not are_usable(part):
            self._squares[sender] = math.nan
        sent = math.sqrt(self._squares[sender])
        claimed = self.claims[name].norm
        if not math.isfinite(sent):
            self.notes.setdefault(name, "its parts are not finite")
        elif sent > CLAIM_SLACK * claimed + torch.finfo(torch.float32).tiny:
            self.notes.setdefault(name, f"its parts are larger than the norm {claimed:.3g} that it claimed")
        arrived = self._arrived[index]
        average = self._averages[index]
        arrived[sender] = part
        self._num_sent[sender] = index + 1
        now = asyncio.get_running_loop().time()
        waited_s = max(0.0, now - self._came_at[index])
        self._came_at[index] = now
        if len(arrived) == len(self.senders) and not average.done():
            self._waits_s[sender] += waited_s
            try:
                is_gradient = index < self.num_gradients
                average.set_result(self._combine(arrived, self.part_shapes[index], is_gradient=is_gradient))
            except (AllreduceException, RuntimeError) as error:  # the latter is torch's
                average.set_exception(error)
            arrived.clear()
        return await asyncio.shield(average)

    @property
    def slowest(self) -> int | None:
        """Index of the sender with the most missing parts; None if all have sent the same number."""
        fewest = min(self._num_sent, default=0)
        return self._num_sent.index(fewest) if fewest < max(self._num_sent, default=0) else None

    @property
    def longest_wait_s(self) -> float:
        """Seconds that the others waited for the slowest sender alone; 0 with fewer than three senders."""
        return max(self._waits_s) if len(self.senders) > 2 else 0.0

    def on_sender_failed(self, sender: int) -> None:
        """Fail the averages that still need this sender."""
        self._fail(f"peer {self.senders[sender]} did not send its part in time")

    def finalize(self) -> None:
        """Fail the unfinished averages, and free the memory. Safe to call twice."""
        self._fail("the round is over")
        self._arrived = [{} for _ in self.part_shapes]

    def _fail(self, why: str) -> None:
        for average in self._averages:
            if not average.done():
                average.set_exception(AllreduceException(why))
                average.exception()  # else asyncio logs an error if no task waits for it

    def _combine(
        self, arrived: Mapping[int, torch.Tensor], shape: torch.Size, *, is_gradient: bool
    ) -> torch.Tensor:
        if self._is_empty:
            return torch.zeros(shape)
        used = [
            (arrived[index], self.claims[sender].weight)
            for index, sender in enumerate(self.senders)
            if sender not in self.left_out and sender not in self.notes and self.claims[sender].weight
        ]
        if not used:
            raise AllreduceException("no contribution can be used")
        is_robust = self.robust and len(used) > 2
        if is_gradient:
            return centered_clipping([part for part, _ in used]) if is_robust else weighted_mean(used)
        values = torch.stack([part for part, _ in used])
        if is_robust:
            return values.median(dim=0).values
        # Averages the distances from the lowest value, so that equal values keep their bits and a variance
        # never becomes negative.
        lowest = values.amin(dim=0)
        return weighted_mean([(part - lowest, weight) for part, weight in used]).add_(lowest)


def weighted_mean(parts: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """Average (tensor, weight) pairs of one shape; return a new float32 tensor."""
    total = torch.zeros(parts[0][0].shape)
    for part, weight in parts:
        total.add_(part, alpha=weight)
    return total.div_(sum(weight for _, weight in parts))


def centered_clipping(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Average tensors of one shape so that a minority of them can't move the result far.

    v <- v + mean_i clip(x_i - v, t), where clip scales a difference down to the norm t, the median of all
    differences' norms, and v starts at the coordinate-wise median (arXiv 2012.10333, algorithm 2). All
    tensors count equally, because a weight is only a claim. Needs at least three; returns a new float32 one.
    """
    values = torch.stack([part.float().flatten() for part in parts])
    center = values.median(dim=0).values
    for _ in range(5):  # the source shows that one is enough from a good start
        differences = values - center
        norms = torch.linalg.vector_norm(differences, dim=1)
        scale = torch.clamp(norms.median() / norms, max=1.0).nan_to_num(1.0)
        center = center + (scale @ differences) / len(parts)
    return center.reshape(parts[0].shape)
