"""What a peer averages, and what it gives to joiners: hivemind's two averagers, in the DHT's process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, AsyncIterator, ClassVar  # noqa: UP035 - hivemind knows a stream by typing's

import numpy as np
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    RoleAdaptiveCompression,
    TensorRole,
)
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MPFuture, MSGPackSerializer, get_logger
from hivemind.utils.asyncio import aiter_with_timeout, enter_asynchronously

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.ballot import digest_of, joint_digest
from trahiv_cli.optim.codecs import register
from trahiv_cli.optim.history import MOST_STEPS, History
from trahiv_cli.optim.ledger import Ledger
from trahiv_cli.optim.outer import OuterState
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.optim.replay import STATES_KEPT, Header, Log, Record, decode
from trahiv_cli.optim.rounds import ExactAverager, Exchange, Outcome, count
from trahiv_cli.optim.statistics import EightBitStatistics
from trahiv_cli.swarm.corrections import (
    UNREACHABLE,
    CorrectedDHT,
    CorrectedGradientAverager,
    CorrectedStateAverager,
)
from trahiv_cli.swarm.host_copies import HostCopies, host_values, write_beside
from trahiv_cli.swarm.records import peer_from
from trahiv_cli.swarm.snapshot import (
    FEW_BYTES,
    JoinerActivity,
    Rank,
    buffer_bytes,
    copy_into,
    is_plain,
    shared_bytes,
    views_of,
)

logger = get_logger(__name__)

ROUNDED_EVERY_S = 600.0
"""At most this often a peer rounds its own statistics to 8 bits. Within that time it gives them as they are,
which takes a joiner twice as long."""


class ExactGradientAverager(ExactAverager, CorrectedGradientAverager):
    """Averages accumulated gradients, weighted by what is trained: tokens of a language model, else samples.

    The accumulators hold the sum over batches of `weight / anchor` times the gradient of the batch's mean
    loss, where the anchor is the first batch's weight: with equal batches that is the plain sum.
    """

    SERVED: ClassVar[tuple[str, ...]] = ("_interest",)

    _local_accumulators: tuple[torch.Tensor, ...]
    local_samples_accumulated: int

    def __init__(self, *args: Any, interest: JoinerActivity, **kwargs: Any) -> None:
        self._interest = interest
        self._anchor_weight = self.local_weight = 0.0
        self._aside: tuple[torch.Tensor, ...] = ()
        self._spare: tuple[torch.Tensor, ...] = ()
        self._copies: HostCopies | None = None
        self.samples_aside, self.weight_aside = 0, 0.0
        self.forget_announced()
        super().__init__(*args, **kwargs)

    def _grad_accumulators(self) -> Iterator[torch.Tensor]:
        if not self._local_accumulators:  # they were set aside, and nothing came since
            self._local_accumulators = self._spare or tuple(map(torch.zeros_like, self._aside))
            self._spare = ()
        yield from self._local_accumulators

    def expect_batch(self, samples: int, weight: float, *, lend: bool) -> float:
        """Announce a batch whose gradients come next; `accumulate_grads_` counts all that were announced.

        Args:
            samples: rows of the batch, which count towards the swarm's next step.
            weight: what its mean loss is a mean over: trained tokens, or rows; 0 if nothing is trained.
            lend: make the accumulators the parameters' `.grad`, so that the next backward pass adds to them.
                Saves a second gradient in memory and, for each batch, allocating, adding and freeing it.
                Not for gradients that somebody scales afterwards. Accumulators on another device than
                their parameter are not lent.

        Returns:
            The factor for the batch's mean loss before its backward pass; exactly 1 for equal batches.
        """
        self._anchor_weight = self._anchor_weight or float(weight)
        self._announced_samples += samples
        self._announced_weight += weight
        self._is_announced = True
        if lend:
            for param, accumulator in zip(self.parameters, self._grad_accumulators(), strict=True):
                if param.device == accumulator.device:
                    param.grad = accumulator
        return weight / self._anchor_weight if self._anchor_weight else 1.0

    def forget_announced(self) -> None:
        """Take back what was announced and not counted."""
        self._announced_samples, self._announced_weight, self._is_announced = 0, 0.0, False

    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int) -> None:
        """Count what was announced, and add those of its gradients that are not in the accumulators yet.

        Lent accumulators are taken back: clearing the gradients must not clear them.

        Args:
            batch_size: samples of a batch that nobody announced, and the weight of its mean gradient.
        """
        factor = 1.0 if self._is_announced else self.expect_batch(batch_size, batch_size, lend=False)
        self.local_samples_accumulated += self._announced_samples
        self.local_weight += self._announced_weight
        self.forget_announced()
        for param, accumulator in zip(self.parameters, self._grad_accumulators(), strict=True):
            if param.grad is accumulator:
                param.grad = None
            elif param.grad is not None:
                accumulator.add_(param.grad.to(accumulator.device), alpha=factor)

    # -- a round -----------------------------------------------------------------------------------

    def set_aside(self) -> None:
        """Set what was accumulated aside, for a round; what comes from now on goes into other memory.

        That memory is taken when the first batch comes: a round that training waits for needs none.
        """
        self._aside, self._local_accumulators = tuple(self._grad_accumulators()), ()
        self.samples_aside, self.weight_aside = self.local_samples_accumulated, self.local_weight
        self.local_samples_accumulated, self.local_weight = 0, 0.0
        if any(accumulator.is_cuda for accumulator in self._aside):
            self._copies = self._copies or HostCopies(self._aside)
            self._copies.begin(self._aside)

    @property
    def aside(self) -> tuple[torch.Tensor, ...]:
        """What was set aside: sums, where they were accumulated. Not to be written to."""
        return self._aside

    @property
    def scale_aside(self) -> float:
        """Times which the sums that were set aside are the mean gradient."""
        return self._scale_of(self.weight_aside)

    def _scale_of(self, weight: float) -> float:
        return self._anchor_weight / weight if weight else 0.0

    def load_aside(self) -> None:
        """Write the mean gradient of what was set aside into the averager's buffers.

        optim/grad_averager.py:203 divides the sum of (b_i / b_0) g_i by the *number* of batches, which is
        the mean only if all b_i are equal; here it is divided by the sum of the weights. By numpy, because
        it may run beside training: torch would start OpenMP threads for this thread, too.
        """
        sums = self._aside if self._copies is None else self._copies.wait()
        with self.get_tensors() as buffers:
            for accumulated, buffer in zip(sums, buffers, strict=True):
                np.multiply(accumulated.numpy(), np.float32(self.scale_aside), out=buffer.detach().numpy())

    @torch.no_grad()
    def take_back(self) -> None:
        """Add what was set aside to what came meanwhile."""
        for aside, came in zip(self._aside, self._local_accumulators, strict=False):
            aside.add_(came)
            came.zero_()
        self._spare = self._local_accumulators or self._spare
        self._local_accumulators, self._aside = self._aside, ()
        self.local_samples_accumulated += self.samples_aside
        self.local_weight += self.weight_aside
        self.samples_aside, self.weight_aside = 0, 0.0

    @torch.no_grad()
    def use_up(self) -> None:
        """Forget what was set aside: a step was taken with it."""
        for accumulator in self._aside:
            accumulator.zero_()
        if self._local_accumulators:
            self._spare = self._aside
        else:
            self._local_accumulators = self._aside
        self._aside = ()
        self.samples_aside, self.weight_aside = 0, 0.0

    def release_spare(self) -> None:
        """Give back memory that only a round beside training needs."""
        self._spare = ()

    def reset_accumulated_grads_(self) -> None:
        """Forget what was accumulated, and batches that were announced and not counted."""
        self.local_weight = 0.0
        self.forget_announced()
        super().reset_accumulated_grads_()

    @contextlib.contextmanager
    def use_averaged_gradients(self) -> Iterator[None]:
        """Have the averages as the parameters' `.grad` within the block; afterwards they have none.

        They lie in the memory of what was set aside, so that a step where the parameters are needs no
        gradients besides. Upstream's (optim/grad_averager.py:223) hands out the averager's buffers, which are
        in host memory wherever a parameter is. `use_up` comes next.
        """
        try:
            with torch.no_grad(), self.get_tensors() as averages:
                for param, aside, average in zip(self.parameters, self._aside, averages, strict=True):
                    param.grad = aside.copy_(average).to(param.device)
            self.notify_used_averaged_gradients()
            yield
        finally:
            self._clear_gradients()

    @contextlib.contextmanager
    def use_accumulated_gradients(self) -> Iterator[None]:
        """Have this peer's mean gradient as the parameters' `.grad` within the block; afterwards none.

        It lies in the accumulators' memory; `reset_accumulated_grads_` comes next.
        """
        scale = self._scale_of(self.local_weight)
        try:
            with torch.no_grad():
                for param, accumulator in zip(self.parameters, self._grad_accumulators(), strict=True):
                    param.grad = accumulator.mul_(scale).to(param.device)
            yield
        finally:
            self._clear_gradients()

    def _clear_gradients(self) -> None:
        for param in self.parameters:
            param.grad = None

    # -- a round that others went through ------------------------------------------------------------

    def start_replay(self, donor: str, exchange: Exchange, silence_s: float) -> MPFuture[Outcome | None]:
        """Fetch a round that continued this peer's history, in the background.

        `expect_group` comes before it: the round must have had the schema that this peer would average with.

        Args:
            donor: id, base58, of a peer that may have kept it.
            exchange: what this peer would exchange.
            silence_s: it fails if nothing comes for so long.

        Returns:
            What follows from the round's claims; the averager's tensors then hold its average. None if the
            donor did not keep it, sent something else, or is gone; the tensors are unchanged.
        """
        future: MPFuture[Outcome | None] = MPFuture()
        self._outer_pipe.send(("_replay", [donor, exchange, silence_s], {"future": future}))
        return future

    @cached_property
    def _log(self) -> Log:
        return Log(STATES_KEPT * sum(tensor.nbytes for tensor in self._averaged_tensors))

    def _keep(self, record: Record) -> None:
        self._log.add(record, is_wanted=self._interest.is_there)

    async def _replay(self, donor: str, exchange: Exchange, silence_s: float, *, future: Any) -> None:
        try:
            future.set_result(await self._replayed(PeerID.from_base58(donor), exchange, silence_s))
        except (*UNREACHABLE, StopAsyncIteration, ValueError) as error:
            logger.debug(f"{donor} gave no round to go through: {error!r}")
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)  # else the caller would wait for a long time
            raise

    async def _replayed(self, donor: PeerID, exchange: Exchange, silence_s: float) -> Outcome | None:
        stub = self.get_stub(self._p2p, donor, namespace=self.prefix)
        async with asyncio.timeout(silence_s):
            stream = await stub.rpc_replay(averaging_pb2.DownloadData(metadata=exchange.after))
        tensors = self._averaged_tensors[exchange.places.start : exchange.places.stop]
        async with aclosing(stream), aclosing(aiter_with_timeout(stream, silence_s)) as messages:
            if not (first := await anext(messages)).metadata:
                return None
            header = Header.from_wire(first.metadata)
            limit = FEW_BYTES + 2 * sum(tensor.nbytes for tensor in tensors)
            if header.num_bytes > limit or header.num_parts > header.num_bytes + len(tensors):
                raise ValueError("an average of larger tensors")
            parts: list[runtime_pb2.Tensor] = []
            missing = header.num_bytes
            while len(parts) < header.num_parts and missing >= 0:
                parts.append((await anext(messages)).tensor_part)
                count(self._bytes_received, parts[-1])
                missing -= len(parts[-1].buffer)
            if missing:
                raise ValueError("parts of another size than was said")
        loop = asyncio.get_running_loop()
        averages = await loop.run_in_executor(None, decode, parts, tensors)
        group_info = GroupInfo(b"", tuple(map(peer_from, header.members)), header.gathered)
        said = zip(group_info.peer_ids, group_info.gathered, strict=True)
        read = {peer.to_base58(): self._matchmaking.claim_of(peer, statement) for peer, statement in said}
        claims, left_out = self._judge(read, exchange)
        proof = await loop.run_in_executor(None, self._digest, group_info, averages)
        if proof != header.proof:
            raise ValueError("another average than its proof says, or a round of other rules")
        async with enter_asynchronously(self.get_tensors()):
            for tensor, average in zip(tensors, averages, strict=True):
                tensor.copy_(average)
        return Outcome.of_claims(claims, left_out, proof)

    async def rpc_replay(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Send the round that continued a history; nothing if it is not kept."""
        del context
        record = self._log.find(request.metadata)
        if record is None:
            return
        yield averaging_pb2.DownloadData(metadata=self.serializer.dumps(record.header()))
        for part in record.parts:
            self._interest.note()
            yield averaging_pb2.DownloadData(tensor_part=part)


class ExactStateAverager(CorrectedStateAverager):
    """Holds weights and optimizer state, and gives them to joiners; averages nothing.

    Args:
        statistics_codec: encodes the inner optimizer's state for joiners, in place of what
            `state_compression` chooses for it. A lossy one only where peers need not hold the same.
        args, kwargs: see `StateExchange` and `TrainingStateAverager`.
    """

    rpc_join_group: Any = None
    rpc_aggregate_part: Any = None
    """Not served: this averager is in no group."""

    def serve(self, dht: CorrectedDHT, pipe: Any) -> None:
        """Serve this averager; see the base class."""
        register()
        super().serve(dht, pipe)

    history: History
    """What was committed on the way to these weights; kept by the optimizer, under `lock_state`."""

    ledger: Ledger
    """The samples that the history's rounds have trained; kept by the optimizer, under `lock_state`."""

    donor: str = ""
    """Id of the peer that these weights were last downloaded from."""

    outer: OuterState | None = None
    """What the swarm agrees on, in modes with local steps."""

    agreed: Sequence[torch.Tensor] | None = None
    """The weights that all peers of this history agree on, where the model's are others at the moment."""

    pace: Pace = DEFAULT_PACE
    """The pace of the round after this state."""

    _rounded_at = -math.inf

    set_pace: Callable[[Pace], None] = staticmethod(lambda pace: None)
    """Has the peer go over to another pace; called when a state that was adopted has another one."""

    holds_alone: Callable[[], bool] = staticmethod(lambda: False)
    """Whether no other peer is known to hold this state."""

    note_given: Callable[[History, bytes], None] = staticmethod(lambda history, common: None)
    """Told of each state that somebody fetches: its history, and the digest of `common_tensors`."""

    is_believed: Callable[[History, bytes, str], bool] = staticmethod(lambda history, common, donor: True)
    """Asked whether to take over a state: its history, that digest (empty if it can't be compared), and a
    donor. May take some seconds."""

    def __init__(self, *args: Any, statistics_codec: CompressionBase | None = None, **kwargs: Any) -> None:
        self.history, self.ledger = History(), Ledger()
        if statistics_codec is not None:
            rest = kwargs.get("state_compression", NoCompression())
            codec = RoleAdaptiveCompression(parameter=rest, optimizer=statistics_codec, default=rest)
            kwargs["state_compression"] = codec
        register()
        super().__init__(*args, **kwargs)

    @property
    def rank(self) -> Rank:
        """The rank of the history."""
        return self.history.rank

    def common_tensors(self) -> list[torch.Tensor]:
        """The weights that are agreed on; in modes with local steps, the outer momentum too."""
        common = super().common_tensors()
        common[: len(self.agreed or ())] = self.agreed or ()
        return common if self.outer is None else [*common, *self.outer.momentum]

    def get_current_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[CompressionInfo]]:
        """Copy the state for joiners; see the base class.

        With Adam's statistics in 8 bits a joiner waits half as long. In modes in which all hold the same,
        nobody may round its own; but a peer that is the only one to hold its state can, before it gives it:
        once in `ROUNDED_EVERY_S`, as those who ask need not join, and what is lost adds up.
        """
        if self.outer is not None or not self.holds_alone() or not self._may_round:
            state = super().get_current_state()
        else:
            with self.lock_state:
                state = self._state_with_rounded_statistics()
            self._rounded_at = time.monotonic()
        metadata, [flat], infos = state
        num_common = sum(info.role is not TensorRole.OPTIMIZER for info in infos)
        common = common_digest((digest_of([one]) for one in views_of(flat, infos)[:num_common]), metadata)
        self.note_given(History.from_wire(metadata["history"]), common)
        return state

    @property
    def _may_round(self) -> bool:
        """Whether who asks is not as far as this peer, and nothing was rounded for `ROUNDED_EVERY_S`."""
        is_over = time.monotonic() >= self._rounded_at + ROUNDED_EVERY_S
        return is_over and self._interest.asked_from < self.rank[0]

    @property
    def _gives_exactly(self) -> bool:
        """Whether a joiner gets the very values that this peer holds in common with others."""
        _, tensors, roles = self._live_state()
        return all(
            is_plain(self.state_compression, CompressionInfo.from_tensor(tensor, key=name, role=role))
            for tensor, (name, role) in zip(tensors, roles, strict=True)
            if role is not TensorRole.OPTIMIZER
        )

    def _state_with_rounded_statistics(
        self,
    ) -> tuple[dict[str, Any], list[torch.Tensor], list[CompressionInfo]]:
        """Round the inner optimizer's statistics to 8 bits; copy the state with these bits.

        The caller holds `lock_state`.
        """
        codec = EightBitStatistics()
        metadata, tensors, roles = self._live_state()
        statistics = [
            tensor for tensor, (_, role) in zip(tensors, roles, strict=True) if role is TensorRole.OPTIMIZER
        ]
        values = host_values(statistics, self.lock_state.changes)
        encoded: list[list[Any]] = []
        infos: list[CompressionInfo] = []
        for index, (tensor, (name, role)) in enumerate(zip(tensors, roles, strict=True)):
            info = CompressionInfo.from_tensor(tensor, key=name, role=role)
            if role is TensorRole.OPTIMIZER and codec.is_lossy_for(value := next(values)):
                message = codec.compress(value, info)
                write_beside(tensor, codec.extract(message))
                dtype = str(tensor.dtype).removeprefix("torch.")
                encoded.append([index, dtype, list(tensor.shape), message.compression])
                tensors[index] = torch.frombuffer(bytearray(message.buffer), dtype=torch.uint8)
                info = CompressionInfo.from_tensor(tensors[index], key=name, role=role)
            infos.append(info)
        flat = shared_bytes(buffer_bytes(tensors))
        copy_into(flat, tensors, self.lock_state.changes)
        return metadata | {"encoded": encoded}, [flat], infos

    def _live_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[Any]]:
        metadata, tensors, roles = super()._live_state()
        return metadata | self.own_metadata(), tensors, roles

    def own_metadata(self) -> dict[str, Any]:
        """Return what is small in the state beside what hivemind has there."""
        own: dict[str, Any] = {
            "history": self.history.to_wire(),
            "ledger": self.ledger.to_wire(),
            "pace": self.pace.to_wire(),
        }
        return own if self.outer is None else own | {"outer_rounds": self.outer.rounds}

    def adopt_state(self, metadata: dict[str, Any], tensors: Sequence[torch.Tensor], lowest: Rank) -> bool:
        """Adopt a state and the pace that goes with it, whole or not at all; see the base class."""
        before = self.pace
        try:
            self.set_pace(Pace.from_wire(metadata.get("pace")))
        except ValueError as error:
            raise RoundFailed("A peer sent a state without a pace.") from error
        is_adopted = False
        try:
            is_adopted = super().adopt_state(metadata, tensors, lowest)
        finally:
            if not is_adopted:
                self.set_pace(before)
        return is_adopted

    def is_welcome(self, metadata: dict[str, Any], common: Sequence[torch.Tensor], lowest: Rank) -> bool:
        """Whether a state is of a history that is far enough, and what most others say that they hold."""
        try:
            theirs = History.from_wire(metadata.get("history"))
            Ledger.from_wire(metadata.get("ledger"))
        except ValueError as error:
            raise RoundFailed("A peer sent a state without a history, or without a ledger.") from error
        rounds = metadata.get("outer_rounds")
        if self.outer is not None and not (isinstance(rounds, int) and 0 <= rounds <= MOST_STEPS):
            raise RoundFailed("A peer sent a state that does not say which fragment is next.")
        if theirs.step != metadata.get("epoch") or theirs.rank < lowest:
            return False
        digest = common_digest((digest_of([one]) for one in common), metadata) if self._gives_exactly else b""
        return self.is_believed(theirs, digest, str(metadata.get("donor", "")))

    def take_note(self, metadata: dict[str, Any]) -> None:
        """Go on with the history of the state that was adopted; with local steps, from the agreed weights."""
        self.history, self.donor = History.from_wire(metadata["history"]), str(metadata.get("donor", ""))
        self.ledger = Ledger.from_wire(metadata["ledger"])
        if self.outer is not None:
            self.outer.rounds = metadata["outer_rounds"]
            for weight, agreed in zip(self.weights, self.outer.anchor, strict=True):
                weight.copy_(agreed)


def common_digest(digests: Iterable[bytes], metadata: Mapping[str, Any]) -> bytes:
    """Digest all that peers of a history hold in common; 32 bytes.

    Args:
        digests: of `common_tensors`, one by one.
        metadata: what is small in the state, of which the ledger, the pace and the next fragment count.
    """
    small = [metadata.get(name) for name in ("ledger", "pace", "outer_rounds")]
    return joint_digest([*digests, hashlib.sha256(MSGPackSerializer.dumps(small)).digest()])
