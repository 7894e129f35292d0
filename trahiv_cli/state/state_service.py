"""States travel between peers: a service gives this peer's state, whole or not at all, and fetches others'.

`snapshot` says how a state is encoded, and `download` how it is fetched; `state` composes and adopts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, ClassVar  # noqa: UP035 - hivemind knows a stream by typing's

import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import runtime_pb2
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.utils import MPFuture, MSGPackSerializer

from trahiv_cli.errors import RoundFailed
from trahiv_cli.members.records import ignore_peer
from trahiv_cli.progress.history import History
from trahiv_cli.shared_memory import JoinerActivity, SharedNumber, shared_bytes
from trahiv_cli.state.download import OF_NO_USE, Downloader, Fetched, NobodyHas, Report, StateRequest
from trahiv_cli.state.peer_state import PeerState
from trahiv_cli.state.snapshot import (
    Rank,
    Snapshot,
    SnapshotCache,
    StateOffer,
    build_snapshot,
    read_rank,
    read_state,
    views_of,
)
from trahiv_cli.swarm.corrections.dht import CorrectedDHT
from trahiv_cli.swarm.service import Service, ServiceHandle
from trahiv_cli.wire import FEW_BYTES, packed, unpacked

Copy = tuple[dict[str, Any], torch.Tensor, list[CompressionInfo]]
"""Metadata of a state, its tensors in one buffer, and their infos; see `PeerState.copy`."""


@dataclass(eq=False)
class StateService(Service):
    """Gives this peer's state to other peers, and fetches theirs, in the DHT's process.

    `StateExchange` makes one. `is_giving` says whether this peer gives its state at present; `progress` are
    the bytes of a download that are there, all its bytes, and the number of its donors.
    """

    WIRE_NAME: ClassVar[str] = "ExactStateAverager"

    codec: CompressionBase
    activity: JoinerActivity
    is_giving: SharedNumber = field(default_factory=lambda: SharedNumber(0))
    progress: torch.Tensor = field(default_factory=lambda: shared_bytes(3 * 8).view(torch.int64))

    async def start(self, dht: CorrectedDHT, p2p: P2P, pipe: Any) -> None:
        """Begin to work; see `Service.start`."""
        await super().start(dht, p2p, pipe)
        self._pipe = pipe
        self._snapshots = SnapshotCache(self._make_snapshot)
        self._downloader = Downloader(self, self._make_snapshot, self.note_progress)

    def note_progress(self, num_bytes: int, total: int, num_donors: int) -> None:
        """Note the progress of a download, for the training process."""
        self.progress.copy_(torch.tensor([num_bytes, total, num_donors]))

    async def fetch_state(self, wanted: StateRequest) -> Fetched | None:
        """Fetch a state; see `StateExchange.fetch`."""
        try:
            return await self._downloader.fetch(wanted)
        except NobodyHas:
            return None

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
        request = DownloadData(metadata=packed(list(content)))
        return await getattr(self.stub(PeerID.from_base58(donor)), rpc)(request)

    async def _make_snapshot(self) -> Snapshot:
        """Request a copy of the state from the training process, and encode it beside the event loop."""
        copy: MPFuture[Copy] = MPFuture()
        self._pipe.send(copy)
        async with asyncio.timeout(30.0):
            metadata, flat, infos = await copy
        size, tie = metadata.pop("rank")
        state = (size, tie), MSGPackSerializer.dumps(metadata), views_of(flat, infos), infos
        return await asyncio.to_thread(build_snapshot, *state, self.codec)

    async def rpc_offer_state(self, request: DownloadData, context: P2PContext) -> DownloadData:
        """Return the offer of the snapshot that this peer gives; an empty message if it gives none."""
        del context
        match unpacked(request.metadata):
            case [bytes(digest), rank, int()] if self.is_giving.value:
                wished = read_rank(rank)
                self.activity.note()  # before the state is copied, so that no round after it is missing
                snapshot = await self._snapshots.find(digest, wished)
                offer = StateOffer(snapshot.manifest.rank, snapshot.digest).to_wire()
                return DownloadData(metadata=packed(offer))
        return DownloadData()

    async def rpc_send_state(self, request: DownloadData, context: P2PContext) -> AsyncIterator[DownloadData]:
        """Send chunks of a snapshot, or its manifest; nothing if it is not kept any more."""
        del context
        match unpacked(request.metadata):
            case [bytes(digest), int(start), int(stop)]:
                with contextlib.closing(self._snapshots.pieces(digest, start, stop)) as pieces:
                    for piece in pieces:
                        self.activity.note()
                        part = runtime_pb2.Tensor(buffer=piece)
                        yield DownloadData(tensor_part=part)


# -- in the training process -----------------------------------------------------------------------


class StateExchange(ServiceHandle):
    """Gives this peer's state to other peers, and fetches theirs. `SwarmOptimizer` makes and ends one.

    `note_given` gets the history of each state that a joiner fetches, and the digest of its common tensors.
    Raises `SwarmError` if the DHT's process does not start the service.
    """

    def __init__(
        self,
        dht: CorrectedDHT,
        service: StateService,
        state: PeerState,
        note_given: Callable[[History, bytes], None],
    ) -> None:
        self._state = state
        self._service = service
        self._note_given = note_given
        super().__init__(dht, service, self._give)

    def allow(self, is_giving: bool) -> None:
        """Give this peer's state to joiners from now on, or no more."""
        self._service.is_giving.put(is_giving)

    def _give(self) -> Copy:
        metadata, flat, infos, common = self._state.copy()
        self._note_given(History.from_wire(metadata["history"]), common)
        return metadata, flat, infos

    def load(
        self,
        *,
        donors: Sequence[str],
        rank: Rank,
        lowest: Rank,
        silence_s: float,
        report: Report = lambda *told: None,
        is_believed: Callable[[History, bytes, str], bool],
        **options: Any,
    ) -> bool:
        """Download the state that most of the `donors` (ids, base58) offer, and adopt it.

        It should have at least `rank`, if the donors have that, and must have at least `lowest`; see
        `StateRequest`. `is_believed` returns, after some seconds, whether to adopt a state of this history
        from this donor; the digest of its common tensors is empty if it can't be compared. For `options` see
        `PeerState.adopt`.

        Returns:
            Whether a state was adopted. If no donor offers one that is far enough, believed and still wanted,
            nothing was changed.

        Raises:
            RoundFailed: nothing came in time, or not the state of this run; nothing was changed.
        """
        limit_bytes = 2 * self._state.num_bytes + FEW_BYTES  # codecs for many small tensors have headers
        fetched = self.fetch(StateRequest(tuple(donors), rank, lowest, limit_bytes, silence_s), report)
        if fetched is None:
            return False
        metadata, tensors = fetched
        donor = str(metadata["donor"])
        try:
            committed = self._state.check(metadata, tensors)
            common = self._state.digest_of(metadata, tensors, committed.pace)
            if committed.history.rank < lowest or not is_believed(committed.history, common, donor):
                return False
            return self._state.adopt(committed, metadata, tensors, **options)
        except RoundFailed:
            ignore_peer(donor, OF_NO_USE)
            raise

    def fetch(self, wanted: StateRequest, report: Report) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
        """Fetch a state without adopting it. Blocks, and reports at most four times a second; in any thread.

        Returns metadata, with the id of a `donor`, and the tensors; None if no peer has such a state.

        Raises:
            RoundFailed: see `Downloader.fetch`; or the state can't be read, or the DHT's process is silent.
        """
        self._service.note_progress(0, 0, 0)
        future: MPFuture[Fetched | None] = self.request("fetch_state", wanted)
        told = [0, 0, 0]
        changed_at = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                fetched = future.result(timeout=0.25)
                break
            if (progress := self._service.progress.tolist()) != told:
                told = progress
                changed_at = time.monotonic()
                report(*told)
            longest_s = 3 * wanted.silence_s + 10.0  # the three waits of the DHT's process, with a margin
            if not self.is_alive() or time.monotonic() - changed_at > longest_s:
                raise RoundFailed("The DHT's process did not report the result of the download.")
        if fetched is None:
            return None
        try:
            metadata, tensors = read_state(fetched.manifest, fetched.content)
        except ValueError as error:
            ignore_peer(fetched.donor, OF_NO_USE)
            raise RoundFailed(f"A peer sent a state that can't be read: {error}.") from error
        report(fetched.manifest.num_bytes, fetched.manifest.num_bytes, max(1, told[2]))
        return metadata | {"donor": fetched.donor}, tensors
