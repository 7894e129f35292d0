"""What a peer's state is made of, how it is copied for joiners, and how a joiner adopts it, whole or not."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import warnings
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, AsyncIterator, ClassVar  # noqa: UP035 - hivemind knows a stream by typing's

import torch
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MPFuture, nested_flatten, nested_pack

from trahiv_cli.errors import RoundFailed
from trahiv_cli.swarm.corrections.dht import CorrectedAverager
from trahiv_cli.swarm.download import (
    OF_NO_USE,
    Downloader,
    Fetched,
    NobodyHas,
    Report,
    StateOffer,
    StateRequest,
)
from trahiv_cli.swarm.host_copies import StateLock
from trahiv_cli.swarm.records import disbelieve
from trahiv_cli.swarm.snapshot import (
    FEW_BYTES,
    JoinerActivity,
    Rank,
    SharedNumber,
    Snapshot,
    SnapshotCache,
    buffer_bytes,
    build_snapshot,
    copy_into,
    read_rank,
    read_state,
    shared_bytes,
    unpacked,
    views_of,
)

COPY_S = 30.0  # within this time a donor's training process has given a copy of its state
REPORT_EVERY_S = 0.25
ANSWER_S = 10.0  # how much longer than its three waits together the DHT's process may be silent


class CorrectedStateAverager(CorrectedAverager, TrainingStateAverager):
    """`TrainingStateAverager` that gives away whole states only, and adopts them whole or not at all.

    averaging/averager.py:583 sends all in one stream, which nobody checks, and which begins anew when it
    breaks off: `download` replaces it. Hold `lock_state` while weights, optimizer state and `local_epoch`
    change together.
    """

    SERVED: ClassVar[tuple[str, ...]] = ("_interest", "_download_progress")

    local_epoch: int

    def __init__(self, *args: Any, interest: JoinerActivity, **kwargs: Any) -> None:
        self.lock_state, self._interest = StateLock(), interest
        # Written by the process that serves the averager, read by the one that trains.
        self._download_progress = tuple(SharedNumber(0) for _ in range(3))
        super().__init__(*args, **kwargs)
        self.lock_state.devices = frozenset(weight.device for weight in self.weights if weight.is_cuda)

    def _make_averaged_parameters(self, main_parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Copy the weights to host memory where the optimizer is offloaded, and moves the copies.

        optim/state_averager.py:173 copies them everywhere, to average them. Here no weights are averaged.
        """
        return super()._make_averaged_parameters(main_parameters) if self.offload_optimizer else ()

    def _init_averaged_tensors(self) -> Sequence[torch.Tensor]:
        return ()

    def _init_tensor_infos(self) -> Sequence[CompressionInfo]:
        return ()

    @property
    def rank(self) -> Rank:
        """Orders the states of a run: a greater one is further."""
        return self.local_epoch, b""

    @property
    def weights(self) -> list[torch.Tensor]:
        """The parameters that the inner optimizer moves; copies in host memory where it is offloaded."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def common_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are the same for all peers of a step: weights first, then others."""
        return [*self.weights, *self.extra_tensors]

    def get_current_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[CompressionInfo]]:
        """Copy the state of one step for joiners; meanwhile no step can be taken.

        optim/state_averager.py:600 hands out the live tensors, which the next step changes while they are
        being sent. Here they are metadata, one buffer with all tensors as stored (see `snapshot.copy_into`;
        each tensor that is handed over takes two open files), and their infos.
        """
        _, tensors, _ = self._live_state()
        flat = shared_bytes(buffer_bytes(tensors))
        with torch.no_grad(), self.lock_state:
            metadata, tensors, roles = self._live_state()
            copy_into(flat, tensors, self.lock_state.changes)
        infos = [
            CompressionInfo.from_tensor(tensor, key=name, role=role)
            for tensor, (name, role) in zip(tensors, roles, strict=True)
        ]
        return metadata, [flat], infos

    def _live_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[tuple[Any, TensorRole]]]:
        """Gather metadata and the tensors themselves, weights first, with their names and roles."""
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
        metadata = {"rank": list(self.rank), "epoch": self.local_epoch, "optimizer_metadata": layout}
        return metadata, [*common, *statistics], roles

    def load_state_from_peers(
        self,
        *,
        donors: Sequence[str],
        rank: Rank,
        lowest: Rank,
        silence_s: float,
        report: Report = lambda *told: None,
    ) -> bool:
        """Download the state that most of some peers (ids, base58) offer, and adopt it; say whether it was.

        It shall have at least `rank`, if they can, and must have `lowest`; see `StateRequest`. False if no
        peer offers one that is far enough, and believed. RoundFailed if nothing came in time, or not the
        state of this run; nothing was changed.
        """
        _, tensors, _ = self._live_state()
        limit_bytes = 2 * buffer_bytes(tensors) + FEW_BYTES  # codecs for many small tensors have headers
        loaded = self.fetch_state(StateRequest(tuple(donors), rank, lowest, limit_bytes, silence_s), report)
        if loaded is None:
            return False
        try:
            return self.adopt_state(*loaded, lowest)
        except RoundFailed:
            disbelieve(str(loaded[0].get("donor", "")), OF_NO_USE)
            raise

    def fetch_state(
        self, wanted: StateRequest, report: Report
    ) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
        """Fetch a state; nothing is adopted. Blocks, and reports at most four times a second; in any thread.

        Its metadata has a `donor`. None if nobody has such a state; RoundFailed as by `Downloader.fetch`.
        """
        self._note_progress(0, 0, 0)
        future: MPFuture[Fetched | None] = MPFuture()
        self._outer_pipe.send(("_fetch_state", [wanted], {"future": future}))
        told, changed_at = [0, 0, 0], time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                fetched = future.result(timeout=REPORT_EVERY_S)
                break
            if (progress := [number.value for number in self._download_progress]) != told:
                told, changed_at = progress, time.monotonic()
                report(*told)
            if not self.is_alive() or time.monotonic() - changed_at > 3 * wanted.silence_s + ANSWER_S:
                raise RoundFailed("The DHT's process did not say what came of the download.")
        if fetched is None:
            return None
        try:
            metadata, tensors = read_state(fetched.manifest, fetched.content)
        except ValueError as error:
            disbelieve(fetched.donor, OF_NO_USE)
            raise RoundFailed(f"A peer sent a state that can't be read: {error}.") from error
        report(fetched.manifest.num_bytes, fetched.manifest.num_bytes, max(1, told[2]))
        return metadata | {"donor": fetched.donor}, tensors

    def adopt_state(self, metadata: dict[str, Any], tensors: Sequence[torch.Tensor], lowest: Rank) -> bool:
        """Adopt a state that `get_current_state` gave, all on the CPU; say whether it is welcome.

        RoundFailed if it is not the state of this run; nothing was changed. optim/state_averager.py:630
        loads the optimizer's state before it looks at the weights.
        """
        targets = self.common_tensors()
        common, statistics = tensors[: len(targets)], tensors[len(targets) :]
        layout, step = metadata.get("optimizer_metadata"), metadata.get("epoch")
        if not isinstance(step, int) or not isinstance(layout, (list, tuple)):
            raise RoundFailed("A peer sent a state without a step or without its optimizer's layout.")
        if [tensor.shape for tensor in common] != [target.shape for target in targets]:
            raise RoundFailed("The state that a peer sent has other shapes than this model, or broke off.")
        if not all(bool(tensor.isfinite().all()) for tensor in common):
            raise RoundFailed("The weights that a peer sent are not finite.")
        if not self.is_welcome(metadata, common, lowest):
            return False
        with torch.no_grad(), self.lock_state:
            try:
                adopt_optimizer_state(self.optimizer, layout, statistics)
            except ValueError as error:
                raise RoundFailed(f"A peer sent a state that is not whole, or not ours: {error}.") from error
            for target, tensor in zip(targets, common, strict=True):
                target.copy_(tensor)
            self.local_epoch = step
            self.take_note(metadata)
            self._update_scheduler()
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()
        return True

    def is_welcome(self, metadata: dict[str, Any], common: Sequence[torch.Tensor], lowest: Rank) -> bool:
        """Say whether a state is to be adopted: its metadata, and the values for `common_tensors`."""
        del common
        return bool(metadata["epoch"] >= lowest[0])

    def take_note(self, metadata: dict[str, Any]) -> None:
        """Take note of what a state that was adopted says of itself; `lock_state` is held."""

    def _update_scheduler(self) -> None:
        self.move_schedule(self.local_epoch)

    def move_schedule(self, step: int) -> None:
        """Set the learning rates of a step; optim/state_averager.py:703 takes every step up to there."""
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
        try:
            future.set_result(await self._downloader.fetch(wanted))
        except NobodyHas:
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)  # else the caller would wait for a long time
            raise

    async def ask(self, donor: str, digest: bytes, rank: Rank, own: Rank) -> StateOffer | None:
        """Ask a donor for the snapshot of this digest, else one of this rank or further; `own` is ours.

        Raises what is in `GONE`, or ValueError if the answer can't be read.
        """
        answer = await self._call(donor, "rpc_offer_state", digest, list(rank), own[0])
        return StateOffer.from_wire(unpacked(answer.metadata)) if answer.metadata else None

    async def fetch(self, donor: str, digest: bytes, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Fetch the chunks [start, stop) of a snapshot, or with stop = 0 its manifest in pieces."""
        async with aclosing(await self._call(donor, "rpc_send_state", digest, start, stop)) as stream:
            async for message in stream:
                yield message.tensor_part.buffer

    async def _call(self, donor: str, rpc: str, *content: Any) -> Any:
        stub = self.get_stub(self._p2p, PeerID.from_base58(donor), namespace=self.prefix)
        request = averaging_pb2.DownloadData(metadata=self.serializer.dumps(list(content)))
        return await getattr(stub, rpc)(request)

    async def _make_snapshot(self) -> Snapshot:
        """Have the training process copy its state; encode it beside the event loop."""
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
        """Say which snapshot this peer gives; nothing if it gives none."""
        del context
        match unpacked(request.metadata):
            case [bytes(digest), rank, int()] if self.allow_state_sharing:
                wished = read_rank(rank)
                self._interest.note_asker()  # before the state is copied: no round after it shall be missing
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


@torch.no_grad()
def adopt_optimizer_state(
    optimizer: torch.optim.Optimizer, layout: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> None:
    """Adopt an optimizer's state, laid out as by `_live_state`, in the memory of the one that is there.

    optim/state_averager.py:732 replaces the state's tensors: bitsandbytes' paged ones by others that stay on
    the GPU, bytes by floats. Here `tensors`, on the CPU, go into those that the optimizer has
    (`assemble.initialize_state`), which keep dtype, device and memory.

    ValueError if this is not the state of such an optimizer over such parameters; nothing was changed.
    """
    try:
        given = [tensors[e["index"]] if e["type"] == "tensor" else e["value"] for e in layout]
    except (LookupError, TypeError) as error:
        raise ValueError("parts of the optimizer's state are missing") from error
    own = list(nested_flatten(optimizer.state_dict()))
    num_tensors = sum(isinstance(value, torch.Tensor) for value in own)
    if [*map(_kind, given)] != [*map(_kind, own)] or len(tensors) != num_tensors:
        raise ValueError("the optimizer's state has another layout, or tensors of other shapes or types")
    states = {param: _tensors_in(state) for param, state in optimizer.state.items()}
    groups = [_tensors_in(group) for group in optimizer.param_groups]
    values = [torch.empty(0) if isinstance(value, torch.Tensor) else value for value in given]
    optimizer.load_state_dict(nested_pack(values, structure=optimizer.state_dict()))
    for param, held in states.items():
        optimizer.state[param].update(held)
    for group, held in zip(optimizer.param_groups, groups, strict=True):
        group.update(held)
    for mine, theirs in zip(own, given, strict=True):
        if isinstance(mine, torch.Tensor):
            mine.copy_(theirs)


def _kind(value: Any) -> object:
    """Return what must be equal in two states of one optimizer."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # What is no number is a setting, which all peers have alike.
    return ("a number", math.isfinite(value)) if is_number else (type(value), value)


def _tensors_in(holder: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in holder.items() if isinstance(value, torch.Tensor)}
