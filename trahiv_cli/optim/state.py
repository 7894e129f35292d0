"""The state of a peer, which it gives to joiners or adopts: weights, optimizer state, committed history.

A state is more than hivemind's: history, ledger and pace belong to the weights, and in modes with local steps
so do the values that the swarm agrees on (`OuterState`). A joiner adopts all of it or nothing, and only if
most others report the same values. `download` fetches a state; this module composes, copies and adopts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import TYPE_CHECKING, Any, AsyncIterator, ClassVar  # noqa: UP035 - hivemind knows a stream by typing's

import torch
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MPFuture, MSGPackSerializer, nested_flatten

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.ballot import digest_of, joint_digest
from trahiv_cli.optim.buffers import Buffers
from trahiv_cli.optim.history import MOST_STEPS, History
from trahiv_cli.optim.inner import adopt_optimizer_state
from trahiv_cli.optim.ledger import Ledger
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.swarm.corrections.dht import CorrectedAverager
from trahiv_cli.swarm.download import OF_NO_USE, Downloader, Fetched, NobodyHas, Report, StateRequest
from trahiv_cli.swarm.host_copies import StateLock
from trahiv_cli.swarm.records import disbelieve
from trahiv_cli.swarm.snapshot import (
    FEW_BYTES,
    JoinerActivity,
    Rank,
    SharedNumber,
    Snapshot,
    SnapshotCache,
    StateOffer,
    buffer_bytes,
    build_snapshot,
    copy_into,
    is_plain,
    read_rank,
    read_state,
    shared_bytes,
    unpacked,
    views_of,
)

if TYPE_CHECKING:
    from trahiv_cli.optim.local_steps import OuterState

COPY_S = 30.0  # limit for a donor's training process to copy its state
REPORT_EVERY_S = 0.25
ANSWER_S = 10.0  # the DHT's process may be silent this much longer than its three waits together


class ExactStateAverager(CorrectedAverager, TrainingStateAverager):
    """Holds weights and optimizer state, and gives them to joiners, whole or not at all; averages nothing.

    averaging/averager.py:583 sends all in one stream, without a check of its content, and begins anew when
    the stream breaks off: `download` replaces it. Hold `lock_state` while weights, optimizer state and
    `local_epoch` change together. `Position` updates history, ledger and pace under `lock_state`.
    """

    SERVED: ClassVar[tuple[str, ...]] = ("_interest", "_download_progress")

    local_epoch: int
    rpc_join_group: Any = None
    rpc_aggregate_part: Any = None  # not served: this averager joins no group
    donor: str = ""  # id of the peer that gave the last downloaded state
    outer: OuterState | None = None  # the values that the swarm agrees on, in modes with local steps
    agreed: Sequence[torch.Tensor] | None = None  # the common weights, while the model holds other values
    pace: Pace = DEFAULT_PACE  # of the round after this state

    # Callbacks that other parts of a peer set. `set_pace` changes to the pace of an adopted state.
    # `note_given` gets each state that a joiner fetches, with the digest of `common_tensors`. `is_believed`
    # returns, after some seconds, whether to adopt a donor's state; its digest is empty if it can't be
    # compared.
    set_pace: Callable[[Pace], None] = staticmethod(lambda pace: None)
    note_given: Callable[[History, bytes], None] = staticmethod(lambda history, common: None)
    is_believed: Callable[[History, bytes, str], bool] = staticmethod(lambda history, common, donor: True)

    def __init__(self, *args: Any, interest: JoinerActivity, buffers: Buffers, **kwargs: Any) -> None:
        self.lock_state = StateLock()
        self._interest = interest
        self.history = History()
        self.ledger = Ledger()
        self.buffers = buffers
        # Written by the process that serves the averager, read by the training process.
        self._download_progress = tuple(SharedNumber(0) for _ in range(3))
        super().__init__(*args, **kwargs)
        self.lock_state.devices = frozenset(weight.device for weight in self.weights if weight.is_cuda)

    def _make_averaged_parameters(self, main_parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Copy the weights to host memory only if the optimizer is offloaded, since it moves the copies.

        optim/state_averager.py:173 always copies them, to average them. Here no weights are averaged.
        """
        return super()._make_averaged_parameters(main_parameters) if self.offload_optimizer else ()

    def _init_averaged_tensors(self) -> Sequence[torch.Tensor]:
        return ()

    def _init_tensor_infos(self) -> Sequence[CompressionInfo]:
        return ()

    @property
    def weights(self) -> list[torch.Tensor]:
        """The parameters that the inner optimizer moves; copies in host memory if it is offloaded."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def common_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are the same for all peers of a step: weights first, then buffers.

        In modes with local steps the weights are the agreed ones, and the outer momentum comes last.
        """
        common = [*self.weights, *self.buffers.common]
        common[: len(self.agreed or ())] = self.agreed or ()
        return common if self.outer is None else [*common, *self.outer.momentum]

    def own_metadata(self) -> dict[str, Any]:
        """Return the metadata of the state that hivemind does not have."""
        own: dict[str, Any] = {
            "history": self.history.to_wire(),
            "ledger": self.ledger.to_wire(),
            "pace": self.pace.to_wire(),
        }
        return own if self.outer is None else own | {"outer_rounds": self.outer.rounds}

    def get_current_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[CompressionInfo]]:
        """Copy the state of one step for joiners, and report its digest. No step is taken during the copy.

        optim/state_averager.py:600 hands out the live tensors, which the next step changes while they are
        being sent. Here the result is metadata, one buffer with all tensors as stored (see
        `snapshot.copy_into`; each tensor that is handed over takes two open files), and the tensors' infos.
        """
        with torch.no_grad(), self.lock_state:
            metadata, tensors, roles = self._live_state()
            flat = shared_bytes(buffer_bytes(tensors))
            copy_into(flat, tensors, self.lock_state.changes)
        infos = [
            CompressionInfo.from_tensor(tensor, key=name, role=role)
            for tensor, (name, role) in zip(tensors, roles, strict=True)
        ]
        num_common = sum(info.role is not TensorRole.OPTIMIZER for info in infos)
        common = common_digest((digest_of([one]) for one in views_of(flat, infos)[:num_common]), metadata)
        self.note_given(History.from_wire(metadata["history"]), common)
        return metadata, [flat], infos

    def _live_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[tuple[Any, TensorRole]]]:
        """Return metadata and the tensors themselves, weights first, with their names and roles."""
        common = self.common_tensors()
        layout: list[dict[str, Any]] = []
        statistics: list[torch.Tensor] = []
        for value in nested_flatten(self.optimizer.state_dict()):
            if isinstance(value, torch.Tensor):
                layout.append({"type": "tensor", "index": len(statistics)})
                statistics.append(value)
            else:
                layout.append({"type": "value", "value": value})
        roles = [(name, TensorRole.PARAMETER) for name in self.parameter_names]
        roles += [(index, TensorRole.UNSPECIFIED) for index in range(len(common) - len(roles))]
        roles += [(index, TensorRole.OPTIMIZER) for index in range(len(statistics))]
        metadata = {"rank": list(self.history.rank), "epoch": self.local_epoch, "optimizer_metadata": layout}
        return metadata | self.own_metadata(), [*common, *statistics], roles

    # -- adopting another state ---------------------------------------------------------------------

    def load_state_from_peers(
        self,
        *,
        donors: Sequence[str],
        rank: Rank,
        lowest: Rank,
        silence_s: float,
        report: Report = lambda *told: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Download the state that most of the `donors` (ids, base58) offer, and adopt it.

        It should have at least `rank`, if the donors have that, and must have at least `lowest`; see
        `StateRequest`. `is_wanted` is called under the lock, right before anything changes.

        Returns:
            Whether a state was adopted. If no donor offers one that is far enough, believed and still wanted,
            nothing was changed.

        Raises:
            RoundFailed: nothing came in time, or not the state of this run; nothing was changed.
        """
        _, tensors, _ = self._live_state()
        limit_bytes = 2 * buffer_bytes(tensors) + FEW_BYTES  # codecs for many small tensors have headers
        loaded = self.fetch_state(StateRequest(tuple(donors), rank, lowest, limit_bytes, silence_s), report)
        if loaded is None:
            return False
        try:
            return self._adopt(*loaded, lowest, is_wanted)
        except RoundFailed:
            disbelieve(str(loaded[0].get("donor", "")), OF_NO_USE)
            raise

    def fetch_state(
        self, wanted: StateRequest, report: Report
    ) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
        """Fetch a state without adopting it. Blocks, and reports at most four times a second; in any thread.

        The metadata that it returns has a `donor`. Returns None if no peer has such a state.

        Raises:
            RoundFailed: see `Downloader.fetch`; or the state can't be read, or the DHT's process is silent.
        """
        self._note_progress(0, 0, 0)
        future: MPFuture[Fetched | None] = MPFuture()
        self._outer_pipe.send(("_fetch_state", [wanted], {"future": future}))
        told = [0, 0, 0]
        changed_at = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                fetched = future.result(timeout=REPORT_EVERY_S)
                break
            if (progress := [number.value for number in self._download_progress]) != told:
                told = progress
                changed_at = time.monotonic()
                report(*told)
            if not self.is_alive() or time.monotonic() - changed_at > 3 * wanted.silence_s + ANSWER_S:
                raise RoundFailed("The DHT's process did not report the result of the download.")
        if fetched is None:
            return None
        try:
            metadata, tensors = read_state(fetched.manifest, fetched.content)
        except ValueError as error:
            disbelieve(fetched.donor, OF_NO_USE)
            raise RoundFailed(f"A peer sent a state that can't be read: {error}.") from error
        report(fetched.manifest.num_bytes, fetched.manifest.num_bytes, max(1, told[2]))
        return metadata | {"donor": fetched.donor}, tensors

    def _adopt(
        self,
        metadata: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        lowest: Rank,
        is_wanted: Callable[[], bool],
    ) -> bool:
        """Adopt a state that `get_current_state` returned, all on the CPU, and its pace; see the caller.

        It checks everything before anything changes. optim/state_averager.py:630 loads the optimizer's state
        before it checks the weights.
        """
        layout = metadata.get("optimizer_metadata")
        rounds = metadata.get("outer_rounds")
        try:
            history = History.from_wire(metadata.get("history"))
            ledger = Ledger.from_wire(metadata.get("ledger"))
            pace = Pace.from_wire(metadata.get("pace"))
        except ValueError as error:
            raise RoundFailed("A peer sent a state without a history, a ledger or a pace.") from error
        shapes = [tensor.shape for tensor in (*self.weights, *self.buffers.common)]
        if pace.has_local_steps:  # the outer momentum of each weight
            shapes += [weight.shape for weight in self.weights]
        common = tensors[: len(shapes)]
        statistics = tensors[len(shapes) :]
        if not isinstance(layout, (list, tuple)):
            raise RoundFailed("A peer sent a state without its optimizer's layout.")
        if [tensor.shape for tensor in common] != shapes:
            raise RoundFailed("The state that a peer sent has other shapes than this model, or broke off.")
        if not all(bool(tensor.isfinite().all()) for tensor in common):
            raise RoundFailed("The weights that a peer sent are not finite.")
        if pace.has_local_steps and not (isinstance(rounds, int) and 0 <= rounds <= MOST_STEPS):
            raise RoundFailed("A peer sent a state that does not say which fragment is next.")
        donor = str(metadata.get("donor", ""))
        if history.rank < lowest or not self.is_believed(history, self._digest(metadata, common), donor):
            return False
        with torch.no_grad(), self.lock_state.changing():
            if not is_wanted():
                return False
            try:
                adopt_optimizer_state(self.optimizer, layout, statistics)
            except ValueError as error:
                raise RoundFailed(f"A peer sent a state that is not whole, or not ours: {error}.") from error
            self.set_pace(pace)
            for target, tensor in zip(self.common_tensors(), common, strict=True):
                target.copy_(tensor)
            self.buffers.restore()
            self.history = history
            self.local_epoch = history.step
            self.ledger = ledger
            self.donor = donor
            if self.outer is not None:
                self.outer.rounds = metadata["outer_rounds"]
                for weight, agreed in zip(self.weights, self.outer.anchor, strict=True):
                    weight.copy_(agreed)
            self.move_schedule(history.step)
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()
        return True

    def _digest(self, metadata: Mapping[str, Any], common: Sequence[torch.Tensor]) -> bytes:
        """Digest a donor's common tensors; return empty bytes if a codec has rounded them."""
        roles = [TensorRole.PARAMETER] * len(self.weights)
        roles += [TensorRole.UNSPECIFIED] * (len(common) - len(roles))
        has_very_values = all(
            is_plain(self.state_compression, CompressionInfo.from_tensor(tensor, role=role))
            for tensor, role in zip(common, roles, strict=True)
        )
        return common_digest((digest_of([one]) for one in common), metadata) if has_very_values else b""

    def move_schedule(self, step: int) -> None:
        """Set the learning rates of a step; optim/state_averager.py:703 takes every step up to it."""
        if self.scheduler is not None and self.scheduler._step_count != step + 1:
            self.scheduler.last_epoch = step - 1
            self.scheduler._step_count = step
            with warnings.catch_warnings():  # a joiner is at a step without having taken one
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                self.scheduler.step()

    # -- in the DHT's process ------------------------------------------------------------------------

    @cached_property
    def _snapshots(self) -> SnapshotCache:
        return SnapshotCache(self._make_snapshot)

    @cached_property
    def _downloader(self) -> Downloader:
        return Downloader(self, self._make_snapshot, self._note_progress)

    def _note_progress(self, num_bytes: int, total: int, num_donors: int) -> None:
        for number, value in zip(self._download_progress, (num_bytes, total, num_donors), strict=True):
            number.value = value

    async def _fetch_state(self, wanted: StateRequest, *, future: Any) -> None:
        await self.fulfil(future, self._downloader.fetch(wanted), (NobodyHas,))

    async def ask(self, donor: str, digest: bytes, rank: Rank, own: Rank) -> StateOffer | None:
        """Ask a donor for the snapshot with `digest`, else one of at least `rank`; `own` is this peer's rank.

        Raises the errors in `GONE`, or ValueError if the answer can't be read.
        """
        answer = await self._call(donor, "rpc_offer_state", digest, list(rank), own[0])
        return StateOffer.from_wire(unpacked(answer.metadata)) if answer.metadata else None

    async def fetch(self, donor: str, digest: bytes, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Fetch the chunks [start, stop) of a snapshot, or its manifest in pieces if `stop` is 0."""
        async with aclosing(await self._call(donor, "rpc_send_state", digest, start, stop)) as stream:
            async for message in stream:
                yield message.tensor_part.buffer

    async def _call(self, donor: str, rpc: str, *content: Any) -> Any:
        stub = self.get_stub(self._p2p, PeerID.from_base58(donor), namespace=self.prefix)
        request = averaging_pb2.DownloadData(metadata=self.serializer.dumps(list(content)))
        return await getattr(stub, rpc)(request)

    async def _make_snapshot(self) -> Snapshot:
        """Request a copy of the state from the training process, and encode it beside the event loop."""
        async with asyncio.timeout(COPY_S):
            described, [flat], infos = await self._get_current_state_from_host_process()
        metadata = self.serializer.loads(described)
        size, tie = metadata.pop("rank")
        state = (size, tie), self.serializer.dumps(metadata), views_of(flat, infos), infos
        return await asyncio.get_running_loop().run_in_executor(
            None, build_snapshot, *state, self.state_compression
        )

    async def rpc_offer_state(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """Return the offer of the snapshot that this peer gives; an empty message if it gives none."""
        del context
        match unpacked(request.metadata):
            case [bytes(digest), rank, int()] if self.allow_state_sharing:
                wished = read_rank(rank)
                self._interest.note()  # before the state is copied, so that no round after it is missing
                snapshot = await self._snapshots.find(digest, wished)
                offer = StateOffer(snapshot.manifest.rank, snapshot.digest).to_wire()
                return averaging_pb2.DownloadData(metadata=self.serializer.dumps(offer))
        return averaging_pb2.DownloadData()

    async def rpc_send_state(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Send chunks of a snapshot, or its manifest; nothing if it is not kept any more."""
        del context
        match unpacked(request.metadata):
            case [bytes(digest), int(start), int(stop)]:
                with contextlib.closing(self._snapshots.pieces(digest, start, stop)) as pieces:
                    for piece in pieces:
                        self._interest.note()
                        part = runtime_pb2.Tensor(buffer=piece)
                        yield averaging_pb2.DownloadData(tensor_part=part)


def common_digest(digests: Iterable[bytes], metadata: Mapping[str, Any]) -> bytes:
    """Digest `common_tensors`, given the digest of each, with ledger, pace and next fragment; 32 bytes."""
    small = [metadata.get(name) for name in ("ledger", "pace", "outer_rounds")]
    return joint_digest([*digests, hashlib.sha256(MSGPackSerializer.dumps(small)).digest()])
