"""State downloads: in chunks, from several peers at once, and resumable.

1. The joiner asks the most advanced peers for an offer. Each of them copies its state once (a *snapshot*) and
   answers with its digest. Equal states have equal digests.
2. Among the states that are far enough, the joiner takes the one that most peers offer. It fetches the
   manifest from one peer, and chunks from all peers that have the snapshot. It does not fetch chunks that its
   own state has as well (at a run's first step: all of them).
3. The joiner checks every chunk on arrival. It fetches a damaged chunk from another peer, and asks the sender
   for nothing more. It fetches chunks that a slow or dead peer owes from the other peers.

A download has no time limit, only a limit on silence. After a failure, the next try resumes it as long as one
peer keeps the snapshot (`KEEP_S`). `state/peer_state.py` decides whether to adopt a state.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from trahiv_cli.errors import RoundFailed
from trahiv_cli.members.records import ignore_peer
from trahiv_cli.net.streams import UNREACHABLE
from trahiv_cli.shared_memory import shared_bytes
from trahiv_cli.state.snapshot import Manifest, Rank, Snapshot, StateOffer
from trahiv_cli.wire import digest_of_bytes

GONE = (*UNREACHABLE, EOFError)  # errors of a call to a donor that is gone or hangs
MAX_DONORS = 4  # per state: they fill a home's downlink, and each has to copy its state
NOT_AS_OFFERED = "it gives another state than it offers"
OF_NO_USE = "the state that it gives is of no use"
Report = Callable[[int, int, int], None]  # called with bytes present, bytes in total, and number of donors


class NobodyHas(Exception):
    """No donor keeps the snapshot any more, or no donor's state is far enough."""


@dataclass(frozen=True)
class Pauses:
    """Waits of a download, in seconds."""

    others_s: float = 1.0  # for other offers after the first one: one of them may be further
    quiet_s: float = 5.0  # a donor without a new chunk for this time loses its request to an idle one
    broken_s: float = 1.0  # before another request to a donor whose stream broke off
    idle_s: float = 0.2  # an idle donor looks for new requests at this interval


@dataclass(frozen=True)
class StateRequest:
    """A joiner's request for a state."""

    donors: tuple[str, ...]  # ids (base58) of peers that may have a state
    rank: Rank  # lowest rank that donors should offer, if they can
    own_rank: Rank  # rank of the joiner's own state; states of a lower rank are useless to it
    limit_bytes: int  # upper bound of an encoded state of this model
    silence_s: float  # the download fails if no new chunk arrives for this time


@dataclass(frozen=True)
class Fetched:
    """A downloaded state, still encoded."""

    manifest: Manifest
    content: torch.Tensor  # encoded bytes: uint8, on the CPU, in memory that other processes can map
    donor: str  # id (base58) of one of its donors


@dataclass(eq=False)
class ChunkRequest:
    """Chunks [next, stop), requested from one donor; `stop` may decrease while they arrive."""

    next: int
    stop: int
    heard_at: float = -math.inf  # when it was made, or its last chunk arrived; -inf: no donor has it

    def __len__(self) -> int:
        return max(0, self.stop - self.next)

    def note_chunk(self) -> None:
        """Record that the next chunk has arrived."""
        self.next += 1
        self.heard_at = time.monotonic()

    def release(self) -> None:
        """Leave the rest to any donor."""
        self.heard_at = -math.inf

    def hand_over(self, share: int) -> ChunkRequest:
        """Move the last `share` chunks to a new request for a donor."""
        taken = ChunkRequest(max(self.next, self.stop - share), self.stop, time.monotonic())
        self.stop = taken.next
        return taken


class ChunkBoard:
    """Tracks which chunks of the snapshot with this digest are present, and which are requested.

    Each donor gets its share of the missing chunks. An idle donor takes over half of another donor's request,
    or a share of the request of a donor that has been silent for a while. Every chunk is checked against the
    manifest. Chunks that `own`, this peer's own snapshot, has at the same position are present from the
    start.
    """

    def __init__(self, digest: bytes, manifest: Manifest, own: Snapshot | None = None) -> None:
        self.digest = digest
        self.manifest = manifest
        self.content = shared_bytes(manifest.num_bytes)  # encoded, uint8; other processes can map it
        self._view: Any = self.content.numpy().data
        self._is_there = [False] * len(manifest.checksums)
        self.bytes_there = 0
        self.heard_at = time.monotonic()  # when the last new chunk arrived
        if own is not None:
            pairs = zip(manifest.checksums, own.manifest.checksums, strict=False)
            for chunk, (theirs, mine) in enumerate(pairs):
                if theirs == mine:
                    self._store(chunk, own.chunk(chunk))
        runs = groupby(range(len(self._is_there)), key=self._is_there.__getitem__)
        missing = [list(run) for is_there, run in runs if not is_there]
        self._requests = [ChunkRequest(run[0], run[-1] + 1) for run in missing]  # not assigned to a donor

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are present."""
        return all(self._is_there)

    def request(self, num_donors: int, quiet_s: float) -> ChunkRequest | None:
        """Return the next request for one of the donors; None if active donors owe only a few chunks.

        A donor that has been silent for `quiet_s` owes nothing any more.
        """
        now = time.monotonic()
        self._requests = [request for request in self._requests if request]
        free = [request for request in self._requests if now - request.heard_at > quiet_s]
        owed = max(free or self._requests, key=len, default=None)
        if owed is None or (not free and len(owed) < 4):  # too few to be worth halving
            return None
        taken = owed.hand_over(-(-self._is_there.count(False) // num_donors) if free else len(owed) // 2)
        self._requests.append(taken)
        return taken

    def put(self, request: ChunkRequest, chunk: bytes) -> bool:
        """Store the next chunk of a request if it matches the manifest; return whether it does."""
        is_it = digest_of_bytes(chunk) == self.manifest.checksums[request.next]
        if not is_it or not self._store(request.next, chunk):
            return False
        request.note_chunk()
        return True

    def _store(self, chunk: int, content: bytes) -> bool:
        """Store a chunk; return False if its length is not its span's: the manifest contradicts itself."""
        span = self.manifest.span(chunk)
        if len(content) != span.stop - span.start:
            return False
        if not self._is_there[chunk]:
            self._view[span] = content
            self._is_there[chunk] = True
            self.bytes_there += len(content)
            self.heard_at = time.monotonic()
        return True


@dataclass(eq=False)
class Downloader:
    """Downloads states, one at a time; the next try resumes an interrupted download.

    `StateService` makes one in the DHT's process and keeps it. `donors` has that class's `ask` and
    `fetch`, `own` makes this peer's own snapshot, and `report` is called after each new chunk.
    """

    donors: Any
    own: Callable[[], Awaitable[Snapshot]]
    report: Report
    pauses: Pauses = Pauses()

    def __post_init__(self) -> None:
        self._board: ChunkBoard | None = None  # of the current or interrupted download
        self._active: set[str] = set()  # donors that have the snapshot and get requests

    async def fetch(self, wanted: StateRequest) -> Fetched:
        """Fetch the state that most donors offer.

        Raises:
            NobodyHas: no donor has a state that is far enough, or none keeps it any more.
            RoundFailed: no chunk arrived for too long, or the offered state is not one of this model.
        """
        offers = await self._offers(wanted)
        if not offers:
            raise NobodyHas
        if self._board is None or self._board.digest not in {offer.digest for offer in offers.values()}:
            self._board = None
            self._board = await self._begin(offers, wanted)
        board = self._board
        alike = [donor for donor, offer in offers.items() if offer.digest == board.digest]
        self._active = set(alike)
        await self._complete(board, wanted)
        self._board = None
        return Fetched(board.manifest, board.content, alike[0])

    async def _offers(self, wanted: StateRequest) -> dict[str, StateOffer]:
        """Return offers by donor: wait for the first one, then a little for the others."""
        digest = self._board.digest if self._board else b""
        offers = dict[str, StateOffer]()
        donors = wanted.donors[:MAX_DONORS]
        loop = asyncio.get_running_loop()

        async def ask(donor: str, limit: asyncio.Timeout) -> None:
            if (offer := await self._ask(donor, wanted, digest)) is not None:
                offers[donor] = offer
                limit.reschedule(min(limit.when() or math.inf, loop.time() + self.pauses.others_s))

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wanted.silence_s) as limit:
                await asyncio.gather(*(ask(donor, limit) for donor in donors))
        return {donor: offers[donor] for donor in donors if donor in offers}

    async def _ask(self, donor: str, wanted: StateRequest, digest: bytes) -> StateOffer | None:
        try:
            async with asyncio.timeout(wanted.silence_s):
                offer = await self.donors.ask(donor, digest, wanted.rank, wanted.own_rank)
            return offer if offer is not None and offer.rank >= wanted.own_rank else None
        except ValueError:
            ignore_peer(donor, "its offer of a state can't be read")
        except GONE:
            pass
        return None

    async def _begin(self, offers: dict[str, StateOffer], wanted: StateRequest) -> ChunkBoard:
        """Fetch the manifest of the state that most donors offer, if possible of one with the wanted rank."""
        alike = Counter(offers.values())
        best = max(offers.values(), key=lambda offer: (offer.rank >= wanted.rank, alike[offer]))
        for donor in [peer for peer, offer in offers.items() if offer == best]:
            described = bytearray()
            try:
                stream = aclosing(self.donors.fetch(donor, best.digest, 0, 0))
                async with asyncio.timeout(wanted.silence_s), stream as pieces:
                    async for piece in pieces:
                        described += piece
                        if len(described) > 64 * 2**20:
                            break
            except GONE:
                continue
            if digest_of_bytes(described) != best.digest:
                if described:  # else it has dropped the snapshot
                    ignore_peer(donor, NOT_AS_OFFERED)
                continue
            try:
                manifest = Manifest.from_bytes(bytes(described))
                if manifest.num_bytes > wanted.limit_bytes:
                    raise ValueError("it is larger than this model's can be")
            except ValueError as error:
                ignore_peer(donor, OF_NO_USE)
                raise RoundFailed(f"A peer offers a state that is of no use: {error}.") from error
            # A state of the same rank, at the start of a run or from a checkpoint, shares chunks with this
            # peer's.
            own = await self.own() if best.rank == wanted.own_rank else None
            return ChunkBoard(best.digest, manifest, own)
        raise NobodyHas

    async def _complete(self, board: ChunkBoard, wanted: StateRequest) -> None:
        """Fetch from all donors at once until every chunk is present."""
        began = time.monotonic()
        helping = running = {
            asyncio.create_task(self._help(board, wanted, donor)) for donor in wanted.donors[:MAX_DONORS]
        }
        try:
            while not board.is_complete:
                if not running:
                    raise NobodyHas
                done, running = await asyncio.wait(
                    running, timeout=self.pauses.idle_s, return_when="FIRST_COMPLETED"
                )
                for task in done:
                    task.result()  # re-raises unexpected errors
                silent_s = time.monotonic() - max(began, board.heard_at)
                if not board.is_complete and silent_s > wanted.silence_s:
                    raise RoundFailed(
                        f"The download of the state stands at {board.bytes_there} of "
                        f"{board.manifest.num_bytes} bytes: nothing came for {wanted.silence_s:.0f} s."
                    )
        finally:
            for task in helping:
                task.cancel()

    async def _help(self, board: ChunkBoard, wanted: StateRequest, donor: str) -> None:
        """Fetch chunks from one donor while some are missing and it has the snapshot."""
        while not board.is_complete:
            if donor not in self._active:
                offer = await self._ask(donor, replace(wanted, rank=board.manifest.rank), board.digest)
                if offer is None or offer.digest != board.digest:
                    return
                self._active.add(donor)
            request = board.request(len(self._active), self.pauses.quiet_s)
            if request is None:
                await asyncio.sleep(self.pauses.idle_s)
                continue
            try:
                stream = aclosing(self.donors.fetch(donor, board.digest, request.next, request.stop))
                async with asyncio.timeout(wanted.silence_s) as silence, stream as chunks:
                    async for chunk in chunks:
                        silence.reschedule(asyncio.get_running_loop().time() + wanted.silence_s)
                        if not board.put(request, chunk):
                            ignore_peer(donor, NOT_AS_OFFERED)
                            self._active.remove(donor)
                            return
                        self.report(board.bytes_there, board.manifest.num_bytes, len(self._active))
                        if not request or board.is_complete:
                            break
                    else:
                        raise ConnectionError("the stream broke off")
            except GONE:
                self._active.remove(donor)
            finally:
                request.release()
            if donor not in self._active:
                await asyncio.sleep(self.pauses.broken_s)
