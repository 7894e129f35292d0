"""How a peer fetches another one's state: in chunks, from several peers at once, going on where it broke off.

1. The joiner asks those that are furthest what they have. Each copies its state once (a *snapshot*) and
   answers with its digest; those whose states are equal give the same one.
2. The joiner takes what most of them offer, of those that are far enough. It fetches the manifest from one
   peer, and the chunks from all that have it. What it holds itself (at a run's first step: everything) is
   not fetched.
3. Every chunk is checked on arrival. One that is damaged is fetched elsewhere, and its sender not asked
   again; what a slow or dead peer owes is fetched from the others.

A download has no time limit; silence has one. Broken off, it goes on with the next try, as long as one peer
keeps the snapshot (`KEEP_S`). Whether a state is adopted is decided in `state_averager.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, AsyncIterator, ClassVar  # noqa: UP035 - hivemind knows a stream by typing's

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.p2p import P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MPFuture

from trahiv_cli.errors import RoundFailed
from trahiv_cli.swarm.chunks import ChunkBoard, Damaged
from trahiv_cli.swarm.records import disbelieve
from trahiv_cli.swarm.snapshot import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    JoinerActivity,
    Manifest,
    Rank,
    SharedNumber,
    Snapshot,
    SnapshotCache,
    build_snapshot,
    digest_of_bytes,
    read_rank,
    read_state,
    unpacked,
    views_of,
)

GONE = (P2PDaemonError, P2PHandlerError, ConnectionError, EOFError, TimeoutError)  # or it hangs
MAX_DONORS = 4  # asked for one state: they fill a home's downlink, and each has to copy its state
OTHERS_S = 1.0  # after the first answer the others have so long: a further state may be among them
COPY_S = 30.0  # within this time a donor's training process has given a copy of its state
PAUSE_S = 1.0  # before a donor whose stream broke off is asked again
IDLE_S = 0.2  # how often a donor that has nothing left to give is looked at again
REPORT_EVERY_S = 0.25
ANSWER_S = 10.0  # how much longer than its three waits together the DHT's process may be silent
MAX_MANIFEST_BYTES = 64 * 2**20
NOT_AS_OFFERED, OF_NO_USE = "it gives another state than it offers", "the state that it gives is of no use"
Report = Callable[[int, int, int], None]  # told: bytes that are there, of how many, from how many donors
State = tuple[dict[str, Any], list[torch.Tensor]]  # metadata, and tensors on the CPU


class NobodyHas(Exception):
    """No donor keeps the snapshot any more, or none has one that is far enough."""


@dataclass(frozen=True)
class StateOffer:
    """What a donor has."""

    rank: Rank
    digest: bytes  # of the snapshot

    def to_wire(self) -> list[Any]:
        """Return a list that MessagePack carries."""
        return [list(self.rank), self.digest]

    @classmethod
    def from_wire(cls, data: object) -> StateOffer:
        """Read what `to_wire` gave; ValueError if it is not that."""
        match data:
            case [rank, bytes(digest)] if len(digest) == DIGEST_BYTES:
                return cls(read_rank(rank), digest)
        raise ValueError("not an offer")


Asked = asyncio.Task[StateOffer | None]


@dataclass(frozen=True)
class StateRequest:
    """What a joiner wants."""

    donors: tuple[str, ...]  # ids, base58, of peers that may have it
    rank: Rank  # that donors shall have at least, if they can
    own_rank: Rank  # of what the joiner holds; states of a lower rank are of no use
    limit_bytes: int  # no encoded state of this model is larger
    silence_s: float  # the download fails if no new chunk comes for so long


@dataclass(frozen=True)
class Fetched:
    """A state that is there as it was encoded."""

    manifest: Manifest
    content: torch.Tensor  # encoded bytes: uint8, on the CPU, in memory that other processes can map
    donor: str  # one of those that had it


class Downloader:
    """Fetches states through an averager, one at a time; one that broke off goes on with the next try.

    `own` makes this peer's own snapshot; `report` is called whenever something has come.
    """

    def __init__(self, donors: StateExchange, own: Callable[[], Awaitable[Snapshot]], report: Report) -> None:
        self._donors, self._own, self._report = donors, own, report
        self._board: ChunkBoard | None = None  # of what is being fetched, or broke off
        self._active: set[str] = set()

    async def fetch(self, wanted: StateRequest) -> Fetched:
        """Fetch the state that most donors offer.

        Raises:
            NobodyHas: no donor has a state that is far enough, or none keeps it any more.
            RoundFailed: nothing came for too long, or what came is not a state of this model.
        """
        digest = self._board.digest if self._board else b""
        asked = {
            donor: asyncio.create_task(self._ask(donor, wanted, digest))
            for donor in wanted.donors[:MAX_DONORS]
        }
        try:
            offers = await _first_answers(asked, wanted.silence_s)
            if not offers:
                raise NobodyHas
            if self._board is None or digest not in {offer.digest for offer in offers.values()}:
                self._board = None
                self._board = await self._begin(offers, wanted)
            board = self._board
            alike = [donor for donor, offer in offers.items() if offer.digest == board.digest]
            await self._complete(board, wanted, asked, len(alike))
        finally:
            for task in asked.values():
                task.cancel()
        self._board = None
        return Fetched(board.manifest, board.content, alike[0])

    async def _ask(self, donor: str, wanted: StateRequest, digest: bytes) -> StateOffer | None:
        try:
            async with asyncio.timeout(wanted.silence_s):
                offer = await self._donors.ask(donor, digest, wanted.rank, wanted.own_rank)
            return offer if offer is not None and offer.rank >= wanted.own_rank else None
        except ValueError:
            disbelieve(donor, "its offer of a state can't be read")
        except GONE:
            pass
        return None

    async def _begin(self, offers: dict[str, StateOffer], wanted: StateRequest) -> ChunkBoard:
        """Fetch the manifest of the state that most offer, before one that is less far than was wished."""
        alike = Counter(offers.values())
        best = max(offers.values(), key=lambda offer: (offer.rank >= wanted.rank, alike[offer]))
        for donor in [peer for peer, offer in offers.items() if offer == best]:
            described = bytearray()
            try:
                async with aclosing(self._pieces(donor, best.digest, 0, 0, wanted.silence_s)) as pieces:
                    async for piece in pieces:
                        described += piece
                        if len(described) > MAX_MANIFEST_BYTES:
                            break
            except GONE:
                continue
            if digest_of_bytes(described) != best.digest:
                if described:  # or it does not have it any more
                    disbelieve(donor, NOT_AS_OFFERED)
                continue
            try:
                manifest = Manifest.from_bytes(bytes(described))
                if manifest.num_bytes > wanted.limit_bytes:
                    raise ValueError("it is larger than this model's can be")
            except ValueError as error:
                disbelieve(donor, OF_NO_USE)
                raise RoundFailed(f"A peer offers a state that is of no use: {error}.") from error
            board = ChunkBoard(best.digest, manifest)
            if best.rank == wanted.own_rank:  # the beginning of a run, or a checkpoint of the same step
                board.take_over(await self._own())
            return board
        raise NobodyHas

    async def _pieces(
        self, donor: str, digest: bytes, start: int, stop: int, silence_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Fetch from a donor; one that is silent for too long is gone (`TimeoutError`)."""
        async with aclosing(self._donors.fetch(donor, digest, start, stop)) as pieces:
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                yield piece

    async def _complete(
        self, board: ChunkBoard, wanted: StateRequest, asked: dict[str, Asked], num_alike: int
    ) -> None:
        """Fetch from all donors at once until every chunk is there."""
        self._active, board.heard_at = set(), time.monotonic()
        helping = [
            asyncio.create_task(self._help(board, wanted, donor, answer, num_alike))
            for donor, answer in asked.items()
        ]
        try:
            running = set(helping)
            while not board.is_complete:
                if not running:
                    raise NobodyHas
                done, running = await asyncio.wait(running, timeout=IDLE_S, return_when="FIRST_COMPLETED")
                for task in done:
                    task.result()  # raises what nobody foresaw
                if not board.is_complete and time.monotonic() - board.heard_at > wanted.silence_s:
                    raise RoundFailed(
                        f"The download of the state stands at {board.bytes_there} of "
                        f"{board.manifest.num_bytes} bytes: nothing came for {wanted.silence_s:.0f} s."
                    )
        finally:
            for task in helping:
                task.cancel()

    async def _help(
        self, board: ChunkBoard, wanted: StateRequest, donor: str, answer: Asked, num_alike: int
    ) -> None:
        """Fetch chunks from one donor as long as some are missing, and it has the snapshot."""
        offer = await answer
        while not board.is_complete:
            if offer is None or offer.digest != board.digest:
                offer = await self._ask(donor, replace(wanted, rank=board.manifest.rank), board.digest)
            if offer is None or offer.digest != board.digest:
                return
            self._active.add(donor)
            request = board.request(max(num_alike, len(self._active)))
            if request is None:
                await asyncio.sleep(IDLE_S)
                continue
            try:
                async with aclosing(
                    self._pieces(donor, board.digest, request.next, request.stop, wanted.silence_s)
                ) as chunks:
                    async for chunk in chunks:
                        board.put(request, chunk)
                        self._report(board.bytes_there, board.manifest.num_bytes, len(self._active))
                        if request.next >= request.stop or board.is_complete:
                            break
                    else:
                        raise ConnectionError("the stream broke off")
            except Damaged:
                disbelieve(donor, NOT_AS_OFFERED)
                return
            except GONE:
                offer = None
            finally:
                board.release(request)
                self._active.discard(donor)
            if offer is None:
                await asyncio.sleep(PAUSE_S)


async def _first_answers(asked: dict[str, Asked], limit_s: float) -> dict[str, StateOffer]:
    """Wait for the first offer, then a moment for the others; none if nobody offers anything."""
    deadline = time.monotonic() + limit_s
    pending = set(asked.values())
    offers: dict[str, StateOffer] = {}
    while pending and (left_s := deadline - time.monotonic()) > 0:
        _, pending = await asyncio.wait(pending, timeout=left_s, return_when="FIRST_COMPLETED")
        found = {donor: offer for donor, task in asked.items() if task.done() and (offer := task.result())}
        if found and not offers:
            deadline = min(deadline, time.monotonic() + OTHERS_S)
        offers = found
    return offers


class StateExchange(DecentralizedAverager):
    """An averager that gives its state to others, and fetches theirs, in place of hivemind's own download.

    averaging/averager.py:583 sends all in one stream, which nobody checks, and which begins anew when it
    breaks off. Mix in before a concrete averager, whose `get_current_state` gives metadata with the state's
    `rank`, one buffer with all tensors (`snapshot.copy_into`), and their infos.
    """

    SERVED: ClassVar[tuple[str, ...]] = ("_interest", "_download_progress")

    def __init__(self, *args: Any, interest: JoinerActivity, **kwargs: Any) -> None:
        self._interest = interest
        # Written by the process that serves the averager, read by the one that trains.
        self._download_progress = tuple(SharedNumber(0) for _ in range(3))
        super().__init__(*args, **kwargs)

    def fetch_state(self, wanted: StateRequest, report: Report) -> State | None:
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
                with contextlib.suppress(KeyError), self._snapshots.opened(digest) as snapshot:
                    described = snapshot.described if stop == 0 else b""
                    for at in range(0, len(described), CHUNK_BYTES):
                        part = runtime_pb2.Tensor(buffer=described[at : at + CHUNK_BYTES])
                        yield averaging_pb2.DownloadData(tensor_part=part)
                    for index in range(max(start, 0), min(stop, len(snapshot.manifest.checksums))):
                        self._interest.note()
                        part = runtime_pb2.Tensor(buffer=snapshot.chunk(index))
                        yield averaging_pb2.DownloadData(tensor_part=part)
