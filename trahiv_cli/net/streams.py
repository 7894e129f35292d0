"""Messages between peers: their size is limited, an unreadable one ends its stream, and none is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError
from hivemind.proto.p2pd_pb2 import RPCError

from trahiv_cli.net.byte_streams import DOWNLOAD, PIECE_BYTES, UPLOAD

# The errors of a call to a peer that is gone or hangs.
UNREACHABLE = (P2PDaemonError, P2PHandlerError, ConnectionError, TimeoutError)
# The largest message of a stream; p2pd has the same limit for calls without one. Ours are parts of tensors.
MAX_MESSAGE_BYTES = 4 * 2**20
URGENT_BYTES = 2**13  # votes, claims and records are shorter, and must arrive soon

_receive_protobuf = P2P.receive_protobuf


async def receive_raw_data(reader: asyncio.StreamReader) -> bytes:
    """Receive the bytes of a message; ConnectionError if it is longer than `MAX_MESSAGE_BYTES`.

    p2p/p2p_daemon.py:378 reads any number of bytes that the sender announces.
    """
    length = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes, where {MAX_MESSAGE_BYTES} are the most")
    if DOWNLOAD.rate is None:
        return await reader.readexactly(length)
    chunks = []
    for start in range(0, length, PIECE_BYTES):
        size = min(PIECE_BYTES, length - start)
        await DOWNLOAD.take(size, is_urgent=length <= URGENT_BYTES)
        chunks.append(await reader.readexactly(size))
    return b"".join(chunks)


async def send_raw_data(data: bytes, writer: asyncio.StreamWriter, *, chunk_size: int = PIECE_BYTES) -> None:
    """Send the bytes of a message, no faster than the limit of this peer's user (`pipes.UPLOAD`).

    p2p/p2p_daemon.py:369 writes all of them at once.
    """
    writer.write(len(data).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
    view = memoryview(data)
    for offset in range(0, len(view), chunk_size):
        chunk = view[offset : offset + chunk_size]
        await UPLOAD.take(len(chunk), is_urgent=len(view) <= URGENT_BYTES)
        writer.write(chunk)
    await writer.drain()


async def receive_protobuf(kind: type[Any], reader: asyncio.StreamReader) -> tuple[Any, Any]:
    """Receive a message, or an error; ConnectionError if it can't be read.

    p2p/p2p_daemon.py:396 raises the errors of protobuf, which no caller expects.
    """
    try:
        return await _receive_protobuf(kind, reader)
    except (DecodeError, TypeError) as error:
        raise ConnectionError(f"a message that can't be read: {error}") from error


# p2pd may lose the last bytes of a handler if its stream is closed at once (p2p/p2p_daemon.py:462) and the
# bytes come in bursts, as through a relay: measured, 7 of 3,000 replies; none if it is closed 0.2 s later. So
# a handler reports that it has sent all, and its stream is closed after the caller has closed its own.
ALL_IS_SENT = RPCError(message="trahiv: all is sent")


async def and_end(responses: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield `ALL_IS_SENT` after the responses of a handler."""
    async with contextlib.aclosing(responses):
        async for response in responses:
            yield response
    yield ALL_IS_SENT


async def until_end(responses: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield the responses of a handler until `ALL_IS_SENT` arrives."""
    async with contextlib.aclosing(responses):
        try:
            async for response in responses:
                yield response
        except P2PHandlerError as error:
            if not str(error).endswith(ALL_IS_SENT.message):
                raise


async def caller_is_gone(reader: asyncio.StreamReader, within_s: float) -> None:
    """Wait until a caller has closed its stream, for at most `within_s`; not in a task that was cancelled."""
    await asyncio.sleep(0)  # hivemind's cancelled read task still uses the reader until then
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(within_s):
            while await reader.read(MAX_MESSAGE_BYTES):
                pass
