"""A message between peers has a largest size, and one that can't be read ends its stream."""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError

# What a call to a peer that is gone, or hangs, ends with.
UNREACHABLE = (P2PDaemonError, P2PHandlerError, ConnectionError, TimeoutError)
# The largest message of a stream; p2pd has the same limit for calls without one. Ours are parts of tensors.
MAX_MESSAGE_BYTES = 4 * 2**20

_receive_protobuf = P2P.receive_protobuf


async def receive_raw_data(reader: asyncio.StreamReader) -> bytes:
    """Receive the bytes of a message; ConnectionError if it is longer than `MAX_MESSAGE_BYTES`.

    p2p/p2p_daemon.py:378 takes as many bytes as the sender says that there are.
    """
    length = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes, where {MAX_MESSAGE_BYTES} are the most")
    return await reader.readexactly(length)


async def receive_protobuf(kind: type[Any], reader: asyncio.StreamReader) -> tuple[Any, Any]:
    """Receive a message, or an error; ConnectionError if it can't be read.

    p2p/p2p_daemon.py:396 raises what protobuf raises, which no caller expects.
    """
    try:
        return await _receive_protobuf(kind, reader)
    except (DecodeError, TypeError) as error:
        raise ConnectionError(f"a message that can't be read: {error}") from error
