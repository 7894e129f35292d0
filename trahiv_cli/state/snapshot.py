"""A peer's state at one step, as bytes that joiners fetch in pieces and from several peers at once.

A snapshot is all tensors of a state, encoded one after the other and cut into chunks. Its manifest says how
to decode the bytes and has a checksum of every chunk; its digest is the manifest's. So one digest proves the
whole state, from whichever peers the chunks come, and equal states have equal snapshots.

Tensors without a codec travel as their bytes in memory, little-endian. A peer may offer a state that no peer
has trained: the joiner judges whether to adopt it.
"""

from __future__ import annotations

import asyncio
import bisect
import ctypes
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole
from hivemind.compression.adaptive import AdaptiveCompressionBase
from hivemind.proto import runtime_pb2

from trahiv_cli.errors import RoundFailed
from trahiv_cli.progress.committed import NO_CHANGES, Changes
from trahiv_cli.rounds.codecs import is_shape, read_tensor
from trahiv_cli.shared_memory import KEEP_S
from trahiv_cli.state.host_copies import aligned, host_values
from trahiv_cli.wire import DIGEST_BYTES, digest_of_bytes, packed, unpacked

CHUNK_BYTES = 256 * 1024  # lost when a stream breaks off: 0.1 s at 20 Mbit/s
MAX_RANK = 2**62

Rank = tuple[int, bytes]  # orders states: a greater rank is further
Entry = tuple[str, tuple[int, ...], int, int]
"""A tensor's dtype, shape, codec (hivemind's CompressionType) and number of bytes."""


# -- between the processes of a peer --------------------------------------------------------------


def buffer_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the size in bytes of the buffer that `copy_into` needs."""
    return sum(aligned(tensor.nbytes) for tensor in tensors)


def copy_into(flat: torch.Tensor, tensors: Sequence[torch.Tensor], after: Changes = NO_CHANGES) -> None:
    """Copy tensors, on any device, into a buffer of `buffer_bytes`; they must not change meanwhile.

    It copies in this thread only: `copy_` would start OpenMP threads for the calling thread, which is
    hivemind's and never ends. For `after` see `HostCopies.begin`. Raises `ValueError` if the buffer is too
    small.
    """
    if flat.nbytes < buffer_bytes(tensors):
        raise ValueError(f"{flat.nbytes} bytes are too few for tensors of {buffer_bytes(tensors)} bytes")
    address = flat.data_ptr()
    for source in host_values(tensors, after):
        ctypes.memmove(address, source.data_ptr(), source.nbytes)
        address += aligned(source.nbytes)


def views_of(flat: torch.Tensor, infos: Iterable[CompressionInfo]) -> list[torch.Tensor]:
    """Return the tensors that `copy_into` put into a buffer, as views of it."""
    views = []
    start = 0
    for shape, dtype in ((info.descriptor.size, info.descriptor.dtype) for info in infos):
        length = math.prod(shape) * dtype.itemsize
        views.append(flat[start : start + length].view(dtype).view(shape))
        start += aligned(length)
    return views


# -- a snapshot -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """A snapshot's rank, metadata, tensor descriptions and chunk checksums."""

    rank: Rank
    metadata: bytes  # small values of the state, as MessagePack
    tensors: tuple[Entry, ...]
    checksums: tuple[bytes, ...]  # of each chunk

    @property
    def num_bytes(self) -> int:
        """Number of encoded bytes of all tensors."""
        return sum(length for *_, length in self.tensors)

    def span(self, chunk: int) -> slice:
        """Return a chunk's span in the encoded bytes."""
        return slice(chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self.num_bytes))

    def to_bytes(self) -> bytes:
        """Return the packed manifest; equal manifests give equal bytes."""
        tensors = [[dtype, list(shape), codec, length] for dtype, shape, codec, length in self.tensors]
        content = [list(self.rank), self.metadata, CHUNK_BYTES, tensors, b"".join(self.checksums)]
        return packed(content)

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Parse the bytes of `to_bytes`; raise ValueError if they are malformed or contradict themselves."""
        match unpacked(content):
            case [rank, bytes(metadata), int(chunk), list(entries), bytes(sums)] if (
                chunk == CHUNK_BYTES and len(sums) % DIGEST_BYTES == 0
            ):
                checksums = (sums[at : at + DIGEST_BYTES] for at in range(0, len(sums), DIGEST_BYTES))
                tensors = tuple(map(_tensor_entry, entries))
                manifest = cls(read_rank(rank), metadata, tensors, tuple(checksums))
                if len(manifest.checksums) == -(-manifest.num_bytes // CHUNK_BYTES):
                    return manifest
        raise ValueError("not the manifest of a state")


def read_rank(data: object) -> Rank:
    """Parse an untrusted rank; raise ValueError if it is malformed."""
    match data:
        case [int(size), bytes(tie)] if 0 <= size <= MAX_RANK and len(tie) <= 32:
            return size, tie
    raise ValueError("not the rank of a state")


def _tensor_entry(entry: object) -> Entry:
    match entry:
        case [str(dtype), list(shape), int(codec), int(length)] if (
            all(type(one) is int and 0 <= one < 2**63 for one in (codec, length, *shape))
            and codec < 2**31  # the range of a protobuf enum
            and is_shape(shape)
        ):
            return dtype, tuple(shape), codec, length
    raise ValueError("not the description of a tensor")


@dataclass(eq=False)
class Snapshot:
    """An encoded state, with its use by other peers."""

    manifest: Manifest
    described: bytes  # the packed manifest
    digest: bytes  # of the manifest: equal for all peers with equal states
    content: tuple[memoryview, ...]  # the encoded bytes of each tensor
    starts: tuple[int, ...]  # the offset of each, as if they were concatenated
    made_at: float = 0.0  # when the peer was last known to have this state
    used_at: float = 0.0
    num_streams: int = 0

    def note_state(self) -> None:
        """Record that the peer has this state now."""
        self.made_at = time.monotonic()

    def note_use(self, new_streams: int = 0) -> None:
        """Record that another peer uses the snapshot now, and that streams of it begin or end."""
        self.num_streams += new_streams
        self.used_at = time.monotonic()

    def chunk(self, index: int) -> bytes:
        """Return one chunk of the encoded bytes."""
        return _joined(self.content, self.starts, self.manifest.span(index))


@dataclass(frozen=True)
class StateOffer:
    """A snapshot that a peer offers."""

    rank: Rank
    digest: bytes  # of the snapshot

    def to_wire(self) -> list[Any]:
        """Return the offer as a list for MessagePack."""
        return [list(self.rank), self.digest]

    @classmethod
    def from_wire(cls, data: object) -> StateOffer:
        """Parse a list from `to_wire`; raise ValueError if it is malformed."""
        match data:
            case [rank, bytes(digest)] if len(digest) == DIGEST_BYTES:
                return cls(read_rank(rank), digest)
        raise ValueError("not an offer")


def build_snapshot(
    rank: Rank,
    metadata: bytes,
    tensors: Sequence[torch.Tensor],
    infos: Sequence[CompressionInfo],
    codec: CompressionBase,
) -> Snapshot:
    """Encode a state: its `metadata` (as MessagePack), and its tensors (on the CPU).

    `codec` encodes each tensor, or selects a codec by its info; tensors for which it selects none stay as
    they are. Raises RoundFailed if the weights are not finite: no peer gets them. Raises ValueError if a
    tensor can't be encoded.
    """
    content: list[memoryview] = []
    entries: list[Entry] = []
    # If no tensor is encoded, the copy of the state itself is what travels. Otherwise plain tensors are
    # cloned, so that the copy, which is larger, can be freed.
    is_kept = all(is_plain(codec, info) for info in infos)
    for tensor, info in zip(tensors, infos, strict=True):
        if info.role is TensorRole.PARAMETER and not bool(tensor.isfinite().all()):
            raise RoundFailed("This peer's weights are not finite; they were not given to a joiner.")
        used: int = runtime_pb2.NONE
        if is_plain(codec, info):
            own = (tensor if is_kept else tensor.clone()).contiguous()
            content.append(memoryview(own.view(-1).view(torch.uint8).numpy().data))
        else:
            message = codec.compress(tensor, info)
            content.append(memoryview(message.buffer))
            used = int(message.compression)
        name = str(tensor.dtype).removeprefix("torch.")
        entries.append((name, tuple(tensor.shape), used, len(content[-1])))
    *starts, num_bytes = itertools.accumulate(map(len, content), initial=0)
    chunks = (slice(at, at + CHUNK_BYTES) for at in range(0, num_bytes, CHUNK_BYTES))
    checksums = tuple(digest_of_bytes(_joined(content, starts, chunk)) for chunk in chunks)
    manifest = Manifest(rank, metadata, tuple(entries), checksums)
    described = manifest.to_bytes()
    return Snapshot(manifest, described, digest_of_bytes(described), tuple(content), tuple(starts))


def _joined(content: Sequence[memoryview], starts: Sequence[int], span: slice) -> bytes:
    """Copy a span of concatenated pieces; `starts` has the offset of each piece."""
    first = bisect.bisect_right(starts, span.start) - 1
    after = bisect.bisect_left(starts, span.stop)
    pairs = zip(content[first:after], starts[first:after], strict=True)
    return b"".join(piece[max(0, span.start - start) : span.stop - start] for piece, start in pairs)


def is_plain(codec: CompressionBase, info: CompressionInfo) -> bool:
    """Whether a tensor travels as its bytes in memory."""
    while isinstance(codec, AdaptiveCompressionBase):
        codec = codec.choose_compression(info)
    return getattr(codec, "compression_type", None) == runtime_pb2.NONE


def read_state(manifest: Manifest, content: torch.Tensor) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Decode a state whose chunks (uint8, on the CPU) were all verified; return metadata and tensors.

    Tensors that no codec encoded stay in the memory of `content` where they are aligned. Raises ValueError if
    a tensor's bytes do not match the manifest, or if the metadata is not a dict.
    """
    metadata = unpacked(manifest.metadata)
    if not isinstance(metadata, dict):
        raise ValueError("a state without metadata")
    tensors = []
    start = 0
    for dtype, shape, codec, length in manifest.tensors:
        part = content[start : start + length]
        start += length
        if codec == runtime_pb2.NONE:
            tensors.append(_read_plain(part, dtype, shape))
        else:
            encoded = part.numpy().tobytes()
            message = runtime_pb2.Tensor(compression=codec, buffer=encoded, size=shape, dtype=dtype)
            tensors.append(read_tensor(message))
    return metadata, tensors


def _read_plain(part: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or math.prod(shape) * dtype.itemsize != part.nbytes:
        raise ValueError(f"{part.nbytes} bytes are no tensor of {name[:20]!r} of shape {shape}")
    if dtype is torch.bool and bool((part > 1).any()):
        raise ValueError("a bool that is neither true nor false")
    is_aligned = part.data_ptr() % dtype.itemsize == part.storage_offset() % dtype.itemsize == 0
    return (part if is_aligned else part.clone()).view(dtype).view(shape)


# -- the snapshots that a peer gives away -----------------------------------------------------------


class SnapshotCache:
    """The snapshots that a peer gives away: at most two, each kept until no peer has used it for `keep_s`.

    `make` copies and encodes the peer's state; it is never called twice at a time. A copy of the state delays
    the current training step. So peers that ask at about the same time get the same snapshot, and a pause
    follows each copy. `StateService` makes one cache in the DHT's process and keeps it.
    """

    def __init__(self, make: Callable[[], Awaitable[Snapshot]], keep_s: float = KEEP_S) -> None:
        self._make = make
        self._keep_s = keep_s
        self._kept: dict[bytes, Snapshot] = {}  # by digest
        self._next: asyncio.Task[Snapshot] | None = None  # for all peers that ask until it is made
        self._rests_until = -math.inf

    async def find(self, digest: bytes, rank: Rank) -> Snapshot:
        """Return the snapshot with this digest (empty: any), else one of this rank or further.

        The latter is at most five seconds old: joiners may not know how far this peer is. If none is far
        enough, it is the next snapshot, of the step that this peer has reached by then. While peers fetch
        both of two snapshots, it is the further one of these. Raises the errors of `build_snapshot`.
        """
        self.forget_unused()
        now = time.monotonic()
        enough = [
            one for one in self._kept.values() if now - one.made_at <= 5.0 and one.manifest.rank >= rank
        ]
        kept = self._kept.get(digest) or max(enough, key=lambda kept: kept.manifest.rank, default=None)
        if kept is None:
            if self._next is None or self._next.done():
                self._next = asyncio.create_task(self._newest())
                # Retrieve the exception: the peers that asked may be gone.
                self._next.add_done_callback(lambda made: made.cancelled() or made.exception())
            kept = await asyncio.shield(self._next)
        self._touch(kept)
        return kept

    async def _newest(self) -> Snapshot:
        """Make a snapshot if there is room for it, and return the furthest one."""
        await asyncio.sleep(self._rests_until - time.monotonic())
        idle = [digest for digest, kept in self._kept.items() if not kept.num_streams]
        has_room = len(self._kept) < 2  # each is as large as the encoded state
        if not has_room and idle:
            del self._kept[min(idle, key=lambda digest: self._kept[digest].used_at)]
            has_room = True
        if has_room:
            began = time.monotonic()
            try:
                made = await self._make()
            finally:
                # Not a fixed time, because a small state is copied in milliseconds, and a joiner of a fast
                # swarm must not wait for it.
                self._rests_until = time.monotonic() + 10 * (time.monotonic() - began)
            kept = self._kept.setdefault(made.digest, made)
            kept.note_state()
            self._touch(kept)
        return max(self._kept.values(), key=lambda kept: kept.manifest.rank)

    def pieces(self, digest: bytes, start: int, stop: int) -> Generator[bytes, None, None]:
        """Yield the chunks [start, stop) of a snapshot, or with stop = 0 its manifest in pieces of that size.

        Yields nothing if the snapshot is not kept any more. The snapshot is kept as long as the generator
        runs.
        """
        if (kept := self._kept.get(digest)) is None:
            return
        kept.note_use(1)
        try:
            described = kept.described if stop == 0 else b""
            for at in range(0, len(described), CHUNK_BYTES):
                yield described[at : at + CHUNK_BYTES]
            for index in range(max(start, 0), min(stop, len(kept.manifest.checksums))):
                yield kept.chunk(index)
        finally:
            self._touch(kept, -1)

    def forget_unused(self) -> None:
        """Drop snapshots that no peer has fetched from for `keep_s`."""
        limit = time.monotonic() - self._keep_s
        kept = self._kept.items()
        self._kept = {digest: one for digest, one in kept if one.num_streams or one.used_at > limit}

    def _touch(self, kept: Snapshot, new_streams: int = 0) -> None:
        kept.note_use(new_streams)
        asyncio.get_running_loop().call_later(self._keep_s + 1, self.forget_unused)
