"""How a peer fetches another one's state: in chunks, from several peers at once, going on where it broke off.

1. The joiner asks those that are furthest what they have. Each copies its state once (a *snapshot*) and
   answers with its digest; those whose states are equal give the same one.
2. The joiner takes what most of them offer, of those that are far enough. It fetches the manifest from one
   peer, and the chunks from all that have it. What it holds itself (at a run's first step: everything) is
   not fetched.
3. Every chunk is checked on arrival. One that is damaged is fetched elsewhere, and its sender not asked
   again; what a slow or dead peer owes is fetched from the others.

A download has no time limit; silence has one. Broken off, it goes on with the next try, as long as one peer
keeps the snapshot (`KEEP_S`). Whether a state is adopted is decided in `optim/state.py`.
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
from trahiv_cli.swarm.corrections.streams import UNREACHABLE
from trahiv_cli.swarm.records import disbelieve
from trahiv_cli.swarm.snapshot import Manifest, Rank, Snapshot, StateOffer, digest_of_bytes, shared_bytes

GONE = (*UNREACHABLE, EOFError)  # or it hangs
MAX_DONORS = 4  # asked for one state: they fill a home's downlink, and each has to copy its state
OTHERS_S = 1.0  # after the first answer the others have so long: a further state may be among them
QUIET_S = 5.0  # a donor that sends no chunk for so long loses what it was asked for to one that has time
WORTH_HALVING = 4  # chunks: of fewer nothing is taken from a donor that is not quiet
PAUSE_S = 1.0  # before a donor whose stream broke off is asked again
IDLE_S = 0.2  # how often a donor that has nothing left to give is looked at again
MAX_MANIFEST_BYTES = 64 * 2**20
NOT_AS_OFFERED = "it gives another state than it offers"
OF_NO_USE = "the state that it gives is of no use"
Report = Callable[[int, int, int], None]  # told: bytes that are there, of how many, from how many donors


class NobodyHas(Exception):
    """No donor keeps the snapshot any more, or none has one that is far enough."""


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


@dataclass(eq=False)
class ChunkRequest:
    """Chunks [next, stop) that one donor was asked for; `stop` may fall while they come."""

    next: int
    stop: int
    heard_at: float = -math.inf  # when the donor sent the last one; never, if none is asked any more


class ChunkBoard:
    """Keeps which chunks of the snapshot with this digest are there, and which donor is asked for which.

    Each donor is asked for its share of what is missing. Who is done takes over half of what another owes,
    and a share of what one owes that has been silent for `QUIET_S`. Every chunk is checked against the
    manifest. What `own`, this peer's own snapshot, has in the same place is there from the beginning.
    """

    def __init__(self, digest: bytes, manifest: Manifest, own: Snapshot | None = None) -> None:
        self.digest = digest
        self.manifest = manifest
        self.content = shared_bytes(manifest.num_bytes)  # encoded, uint8; other processes can map it
        self._view: Any = self.content.numpy().data
        self._is_there = [False] * len(manifest.checksums)
        self.bytes_there = 0
        self.heard_at = time.monotonic()  # when the last new chunk came
        if own is not None:
            pairs = zip(manifest.checksums, own.manifest.checksums, strict=False)
            for chunk, (theirs, mine) in enumerate(pairs):
                if theirs == mine:
                    self._store(chunk, own.chunk(chunk))
        runs = groupby(range(len(self._is_there)), key=self._is_there.__getitem__)
        missing = [list(run) for is_there, run in runs if not is_there]
        self._requests = [ChunkRequest(run[0], run[-1] + 1) for run in missing]  # of nobody as yet

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are there."""
        return all(self._is_there)

    def request(self, num_donors: int) -> ChunkRequest | None:
        """Decide what one of several donors is asked for next; None if others owe little, and send."""
        now = time.monotonic()
        self._requests = [request for request in self._requests if request.next < request.stop]
        free = [request for request in self._requests if now - request.heard_at > QUIET_S]
        owed = max(free or self._requests, key=lambda request: request.stop - request.next, default=None)
        if owed is None or (not free and owed.stop - owed.next < WORTH_HALVING):
            return None
        share = -(-self._is_there.count(False) // num_donors) if free else (owed.stop - owed.next) // 2
        taken = ChunkRequest(max(owed.next, owed.stop - share), owed.stop, now)
        owed.stop = taken.next
        self._requests.append(taken)
        return taken

    def put(self, request: ChunkRequest, chunk: bytes) -> bool:
        """Take the next chunk of a request, if it is what the manifest says; say whether it is."""
        is_it = digest_of_bytes(chunk) == self.manifest.checksums[request.next]
        if not is_it or not self._store(request.next, chunk):
            return False
        request.next += 1
        request.heard_at = time.monotonic()
        return True

    def _store(self, chunk: int, content: bytes) -> bool:
        """Store a chunk; not if the manifest contradicts itself, and it has another length than its span."""
        span = self.manifest.span(chunk)
        if len(content) != span.stop - span.start:
            return False
        if not self._is_there[chunk]:
            self._view[span] = content
            self._is_there[chunk] = True
            self.bytes_there += len(content)
            self.heard_at = time.monotonic()
        return True


class Downloader:
    """Fetches states through an averager, one at a time; one that broke off goes on with the next try.

    `donors` has the `ask` and `fetch` of `ExactStateAverager`. `own` makes this peer's own snapshot;
    `report` is called whenever something has come.
    """

    def __init__(self, donors: Any, own: Callable[[], Awaitable[Snapshot]], report: Report) -> None:
        self._donors = donors
        self._own = own
        self._report = report
        self._board: ChunkBoard | None = None  # of what is being fetched, or broke off
        self._active: set[str] = set()  # donors that have it, and are asked

    async def fetch(self, wanted: StateRequest) -> Fetched:
        """Fetch the state that most donors offer.

        Raises:
            NobodyHas: no donor has a state that is far enough, or none keeps it any more.
            RoundFailed: nothing came for too long, or what came is not a state of this model.
        """
        offers = await self._offers(wanted)
        if not offers:
            raise NobodyHas
        if self._board is None or self._board.digest not in {offer.digest for offer in offers.values()}:
            self._board = None
            self._board = await self._begin(offers, wanted)
        board = self._board
        alike = [donor for donor, offer in offers.items() if offer.digest == board.digest]
        self._active, board.heard_at = set(alike), time.monotonic()
        await self._complete(board, wanted)
        self._board = None
        return Fetched(board.manifest, board.content, alike[0])

    async def _offers(self, wanted: StateRequest) -> dict[str, StateOffer]:
        """Ask donors, wait for the first offer, then a moment for the others; none if nobody offers any."""
        digest = self._board.digest if self._board else b""
        offers = dict[str, StateOffer]()
        donors = wanted.donors[:MAX_DONORS]
        loop = asyncio.get_running_loop()

        async def ask(donor: str, limit: asyncio.Timeout) -> None:
            if (offer := await self._ask(donor, wanted, digest)) is not None:
                offers[donor] = offer
                limit.reschedule(min(limit.when() or math.inf, loop.time() + OTHERS_S))

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wanted.silence_s) as limit:
                await asyncio.gather(*(ask(donor, limit) for donor in donors))
        return {donor: offers[donor] for donor in donors if donor in offers}

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
                stream = aclosing(self._donors.fetch(donor, best.digest, 0, 0))
                async with asyncio.timeout(wanted.silence_s), stream as pieces:
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
            # Of the same rank, at the beginning of a run or from a checkpoint, chunks are equal to our own.
            own = await self._own() if best.rank == wanted.own_rank else None
            return ChunkBoard(best.digest, manifest, own)
        raise NobodyHas

    async def _complete(self, board: ChunkBoard, wanted: StateRequest) -> None:
        """Fetch from all donors at once until every chunk is there."""
        helping = running = {
            asyncio.create_task(self._help(board, wanted, donor)) for donor in wanted.donors[:MAX_DONORS]
        }
        try:
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

    async def _help(self, board: ChunkBoard, wanted: StateRequest, donor: str) -> None:
        """Fetch chunks from one donor as long as some are missing, and it has the snapshot."""
        while not board.is_complete:
            if donor not in self._active:
                offer = await self._ask(donor, replace(wanted, rank=board.manifest.rank), board.digest)
                if offer is None or offer.digest != board.digest:
                    return
                self._active.add(donor)
            request = board.request(len(self._active))
            if request is None:
                await asyncio.sleep(IDLE_S)
                continue
            try:
                stream = aclosing(self._donors.fetch(donor, board.digest, request.next, request.stop))
                async with asyncio.timeout(wanted.silence_s) as silence, stream as chunks:
                    async for chunk in chunks:
                        silence.reschedule(asyncio.get_running_loop().time() + wanted.silence_s)
                        if not board.put(request, chunk):
                            disbelieve(donor, NOT_AS_OFFERED)
                            self._active.remove(donor)
                            return
                        self._report(board.bytes_there, board.manifest.num_bytes, len(self._active))
                        if request.next >= request.stop or board.is_complete:
                            break
                    else:
                        raise ConnectionError("the stream broke off")
            except GONE:
                self._active.remove(donor)
            finally:
                request.heard_at = -math.inf  # others may have what is left
            if donor not in self._active:
                await asyncio.sleep(PAUSE_S)
