"""One exact exchange: all peers of a group end with the same bits, or with none.

hivemind's all-reduce sends each peer the *difference* between the average and that peer's own part,
so every peer adds a number that was rounded, or quantized, for it alone: replicas drift by 4e-8 a round
without a codec and by 2.5 % of the gradient with an 8-bit one. Here the peer that reduces a part sends
everybody the average itself, in the same bytes, and adopts what those bytes decode to: that is the canonical
value of a lossy codec. Every part travels with a checksum; whatever fails, fails the round for this peer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows a stream by typing's

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException, TensorPartContainer
from hivemind.compression import (
    CompressionInfo,
    deserialize_torch_tensor,
)
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import get_logger
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor, as_aiter

from trahiv_cli.optim.codecs import encode_with_residual
from trahiv_cli.optim.rounds import count
from trahiv_cli.optim.soundness import (
    CLAIM_SLACK,
    BrokenPart,
    Claim,
    SoundReducer,
)
from trahiv_cli.swarm.corrections.streams import UNREACHABLE
from trahiv_cli.swarm.snapshot import UNREADABLE as UNREADABLE_BYTES
from trahiv_cli.swarm.snapshot import digest_of_bytes

logger = get_logger(__name__)


def checked(message: averaging_pb2.AveragingData, peer: PeerID) -> torch.Tensor:
    """Decode a part that came with its checksum, which travels in a field that hivemind leaves empty.

    Raises:
        BrokenPart: the checksum is another part's.
        ValueError: these bytes are no tensor.
    """
    if message.peer_id != digest_of_bytes(message.tensor_part.buffer):
        raise BrokenPart(f"a part from peer {peer} was damaged on its way")
    try:
        return deserialize_torch_tensor(message.tensor_part).detach()  # it may say that it requires gradients
    except (*UNREADABLE_BYTES, RuntimeError) as error:  # the latter is torch's
        raise ValueError(f"no tensor: {error}") from error


class BrokenOff(AllreduceException):
    """A member went no further, perhaps because of another one."""


class ExactAllReduce(AllReduceRunner):
    """Butterfly all-reduce that yields averages, the same bits for every peer of the group, or raises.

    Args:
        traffic: two counters of bytes, sent and received, that outlive this object.
        claims: what each member said of its contribution.
        left_out: members whose contribution is not used.
        robust: average by centered clipping.
        lost: where to note what the codec loses of this peer's contribution, tensors like those that are
            averaged; None if nobody wants to know.
        kwargs: see `AllReduceRunner`.
    """

    def __init__(
        self,
        *,
        traffic: tuple[Any, Any],
        claims: dict[str, Claim],
        left_out: dict[str, str],
        robust: bool,
        lost: Sequence[torch.Tensor] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tensor_part_reducer.finished.set()  # upstream's is not used
        self.tensor_part_reducer: Any = SoundReducer(
            [part.shape for part in self.parts_for_local_averaging],
            [peer.to_base58() for peer in self.sender_peer_ids],
            claims,
            left_out,
            robust=robust,
        )
        self.blamed = ""
        """Id of the member that this one takes the round to have failed of; empty if it was none."""
        self.is_sure = False
        """See `Vote`."""
        self._sent, self._received = traffic
        container = self.tensor_part_container
        self._compression = container.compression
        own = self.ordered_peer_ids.index(self.peer_id)
        self._infos = [info for _, info in container._input_parts_by_peer[own]]
        self._encoded: dict[int, asyncio.Task[Any]] = {}
        self._averages: dict[int, list[runtime_pb2.Tensor]] = {}
        self._lost: Sequence[Sequence[torch.Tensor]] | None = None
        if lost is not None:
            split = TensorPartContainer(
                lost,
                self.peer_fractions,
                container.compression,
                container.part_size_bytes,
                container.tensor_infos,
            )
            self._lost = [[part for part, _ in parts] for parts in split._input_parts_by_peer]
        total = sum(claim.weight for peer, claim in claims.items() if peer not in left_out)
        norms = [claim.norm for peer, claim in claims.items() if peer not in left_out]
        # No mean is longer than the longest of what it is of. Nor is a median of each coordinate longer than
        # sqrt(2) times that: half of all have at least its value there.
        slack = CLAIM_SLACK * (math.sqrt(2) if robust else 1.0)
        self._most_norm = slack * max(norms) if norms and min(norms) >= 0 else math.inf
        mine = claims[self.peer_id.to_base58()].weight
        self._own_share = mine / total if total and self.peer_id.to_base58() not in left_out else 0.0

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        index = self.ordered_peer_ids.index(peer_id)
        try:
            parts = (
                self._reduce_own_parts() if peer_id == self.peer_id else self._exchange_parts(peer_id, index)
            )
            part_index = -1
            async for part_index, average in parts:
                self.tensor_part_container.register_processed_part(index, part_index, average)
            if part_index + 1 != self.tensor_part_container.num_parts_by_peer[index]:
                raise BrokenOff(f"peer {peer_id} sent {part_index + 1} parts of its share")
        except (Exception, asyncio.CancelledError) as error:  # what this task does not bring is waited for
            self._fail(error, peer_id)
            raise

    def _fail(self, error: BaseException, peer_id: PeerID) -> None:
        """End the round, and let the others learn of it: nothing that could still arrive would save it."""
        if isinstance(error, (*UNREACHABLE, BrokenPart, BrokenOff)):
            # Who returns no average in time may itself wait for another one.
            self._blame(peer_id, is_sure=not isinstance(error, (BrokenOff, TimeoutError)))
        self.finalize(exception=in_words(error, peer_id))

    def _blame(self, peer_id: PeerID, *, is_sure: bool) -> None:
        if not self._future.done() and not self.blamed:
            self.blamed, self.is_sure = peer_id.to_base58(), is_sure

    async def _ban_sender(self, peer_id: PeerID) -> None:
        """Fail the round: a member sends no more."""
        self._blame(peer_id, is_sure=peer_id not in self.active_senders)
        await super()._ban_sender(peer_id)

    @property
    def failure(self) -> BaseException | None:
        """What the round failed of first, if it did."""
        return self._future.exception() if self._future.done() and not self._future.cancelled() else None

    async def _reduce_own_parts(self) -> AsyncIterator[tuple[int, torch.Tensor]]:
        sender = self.sender_peer_ids.index(self.peer_id)
        for part_index, part in enumerate(self.parts_for_local_averaging):
            average = await self.tensor_part_reducer.accumulate_part(sender, part_index, part)
            message = await self._encode(part_index, average)
            self._keep(self.ordered_peer_ids.index(self.peer_id), message)
            decoded = checked(message, self.peer_id)
            if self._lost is not None and self._own_share:
                # This peer alone knows what the average lost: it brings that along next time.
                lost = self._lost[self.ordered_peer_ids.index(self.peer_id)][part_index]
                lost.copy_(average.sub(decoded).div_(self._own_share))
            yield part_index, decoded

    async def _exchange_parts(self, peer_id: PeerID, index: int) -> AsyncIterator[tuple[int, torch.Tensor]]:
        done_sending = asyncio.Event()
        async with asyncio.timeout(self.reducer_timeout):  # dialling a peer that is gone may take minutes
            stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(
                self._counted_input(index, done_sending)
            )
        if self.should_delay_results(self.peer_id):
            await done_sending.wait()

        def decode(
            message: averaging_pb2.AveragingData,
        ) -> tuple[averaging_pb2.AveragingData, torch.Tensor, float]:
            if message.code != averaging_pb2.AVERAGED_PART:
                raise BrokenOff(f"peer {peer_id} broke the round off")
            count(self._received, message.tensor_part)
            try:
                average = checked(message, peer_id)
            except ValueError as error:
                raise BrokenPart(f"peer {peer_id} returned no average") from error
            if not average.is_floating_point() or not bool(average.isfinite().all()):
                raise BrokenPart(f"peer {peer_id} returned an average that is not finite")
            return message, average, float(torch.linalg.vector_norm(average)) ** 2

        shapes = [part.shape for part, _ in self.tensor_part_container._input_parts_by_peer[index]]
        part_index, squares = 0, 0.0
        async for message, average, square in amap_in_executor(
            decode,
            aiter_with_timeout(stream, self.reducer_timeout),
            max_prefetch=self.tensor_part_container.prefetch,
        ):
            if shapes[part_index : part_index + 1] != [average.shape]:
                raise BrokenPart(f"peer {peer_id} returned an average of another shape, or one too many")
            squares += square
            if squares > self._most_norm * self._most_norm + torch.finfo(torch.float32).tiny:
                raise BrokenPart(f"peer {peer_id} returned an average that is longer than all that it is of")
            self._keep(index, message)
            yield part_index, average
            part_index += 1

    def _keep(self, index: int, message: averaging_pb2.AveragingData) -> None:
        self._averages.setdefault(index, []).append(message.tensor_part)

    @property
    def encoded_averages(self) -> tuple[runtime_pb2.Tensor, ...]:
        """All parts of the average, as they travelled, in the order of the tensors' values."""
        return tuple(part for index in sorted(self._averages) for part in self._averages[index])

    async def _counted_input(
        self, index: int, done: asyncio.Event
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        try:
            async for message in self._generate_input_for_peer(index):
                count(self._sent, message.tensor_part)
                yield message
        except Exception as error:  # hivemind's writing task, which runs this, is asked by nobody
            self._fail(error, self.ordered_peer_ids[index])
            raise
        finally:
            done.set()

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        parts = enumerate(self.tensor_part_container._input_parts_by_peer[peer_index])

        def encode(item: tuple[int, tuple[torch.Tensor, CompressionInfo]]) -> averaging_pb2.AveragingData:
            part_index, (part, info) = item
            if self._lost is None:
                encoded = self._compression.compress(part, info)
            else:
                encoded, lost = encode_with_residual(self._compression, part, info)
                self._lost[peer_index][part_index].copy_(lost)
            return averaging_pb2.AveragingData(
                code=averaging_pb2.PART_FOR_AVERAGING,
                group_id=self.group_id,
                peer_id=digest_of_bytes(encoded.buffer),
                tensor_part=encoded,
                weight=self.weight,
            )

        async for message in amap_in_executor(
            encode, as_aiter(*parts), max_prefetch=self.tensor_part_container.prefetch
        ):
            yield message

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        sender = self.sender_peer_ids[sender_index]

        def decode(message: averaging_pb2.AveragingData) -> torch.Tensor | None:
            count(self._received, message.tensor_part)
            try:
                return checked(message, sender)
            except ValueError:
                return None

        part_index = 0
        try:
            async for part in amap_in_executor(
                decode, stream, max_prefetch=self.tensor_part_container.prefetch
            ):
                average = await self.tensor_part_reducer.accumulate_part(sender_index, part_index, part)
                message = await self._encode(part_index, average)
                part_index += 1
                count(self._sent, message.tensor_part)
                yield message
        except AllreduceException as error:
            self._fail(error, sender)
            raise
        except TimeoutError:  # its stream is open, and it sends nothing
            self._blame(sender, is_sure=True)
            raise
        finally:
            if part_index != self.tensor_part_reducer.num_parts:
                await self._ban_sender(sender)

    async def _encode(self, part_index: int, average: torch.Tensor) -> averaging_pb2.AveragingData:
        """Encode the average of one of our parts, once for the whole group.

        hivemind cancels who serves a member that hangs up: the others still need the part.
        """
        if part_index not in self._encoded:
            loop = asyncio.get_running_loop()

            def encode() -> averaging_pb2.AveragingData:
                part = self._compression.compress(average, self._infos[part_index])
                return averaging_pb2.AveragingData(
                    code=averaging_pb2.AVERAGED_PART, peer_id=digest_of_bytes(part.buffer), tensor_part=part
                )

            async def encode_beside() -> averaging_pb2.AveragingData:
                return await loop.run_in_executor(None, encode)

            self._encoded[part_index] = asyncio.create_task(encode_beside())
        return await asyncio.shield(self._encoded[part_index])


def in_words(error: BaseException, peer: PeerID) -> AllreduceException:
    """Say what ended the exchange with a peer."""
    if isinstance(error, AllreduceException):
        return error
    if isinstance(error, asyncio.CancelledError):
        return AllreduceException(f"the exchange with peer {peer} was broken off")
    if isinstance(error, TimeoutError):
        return AllreduceException(f"peer {peer} sent nothing for too long")
    if isinstance(error, UNREACHABLE):
        return AllreduceException(f"peer {peer} can't be reached")
    return AllreduceException(f"{type(error).__name__}: {error}")
