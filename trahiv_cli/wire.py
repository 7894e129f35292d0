"""Bytes between peers: MessagePack as hivemind writes it, and digests."""

from __future__ import annotations

import hashlib

import msgpack

DIGEST_BYTES = 16
FEW_BYTES = 2**20  # margin of encoded tensors over twice their stored size: codecs have headers
TUPLE = 0x40  # MessagePack's extension type with which hivemind marks a tuple


def packed(value: object) -> bytes:
    """Pack lists, dicts and plain values as MessagePack."""
    return bytes(msgpack.packb(value, strict_types=True))


def unpacked(content: bytes) -> object:
    """Parse untrusted MessagePack, with hivemind's tuples in it; raise ValueError if it is malformed."""
    try:
        return msgpack.unpackb(content, ext_hook=_tuple_of)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"not MessagePack: {error}") from error


def _tuple_of(kind: int, content: bytes) -> tuple[object, ...]:
    if kind != TUPLE:
        raise ValueError(f"an unknown type {kind}")
    return tuple(msgpack.unpackb(content, ext_hook=_tuple_of))


def digest_of_bytes(content: bytes | bytearray | memoryview) -> bytes:
    """Return the SHA-256 digest, truncated to 16 bytes."""
    return hashlib.sha256(content).digest()[:DIGEST_BYTES]
