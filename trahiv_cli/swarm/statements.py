"""What a peer says of itself, signed: whoever passes it on can leave it out, but can't change it.

A statement is about something that both sides know and that does not travel: a claim is about the history
that a round continues, a vote about the round. Elsewhere it is worth nothing. Each signature is salted.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache

from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from trahiv_cli.swarm.records import peer_of
from trahiv_cli.swarm.snapshot import unpacked

_KIND = b"ssh-rsa "
# Enough for RSA with 4096 bits; ours have 2048. To check signatures of a much longer key takes long.
MOST_KEY_BYTES, MOST_SIGNATURE_BYTES = 600, 512


def sign(key: RSAPrivateKey, about: bytes, content: bytes) -> bytes:
    """Make a statement: the content, and some 540 bytes of an identity's public key and signature.

    `verified` must be told what it is `about`, to find it good.
    """
    public_key = base64.b64decode(key.get_public_key().to_bytes().removeprefix(_KIND))
    signature = base64.b64decode(key.sign(_signed(about, content)))
    packed: bytes = MSGPackSerializer.dumps([public_key, signature, content])
    return packed


def content_of(statement: bytes) -> bytes:
    """Read what a statement says, whoever made it; ValueError if it is none."""
    return _parts(statement)[2]


def verified(statement: bytes, peer: PeerID, about: bytes) -> bytes:
    """Read what a peer stated; ValueError if it is not that peer's, or about something else. Takes 0.1 ms."""
    public_key, signature, content = _parts(statement)
    readable = _KIND + base64.b64encode(public_key)
    if peer_of(readable) != peer.to_base58():
        raise ValueError(f"not a statement of peer {peer}")
    if not _key(readable).verify(_signed(about, content), base64.b64encode(signature)):
        raise ValueError(f"peer {peer} did not state this")
    return content


def _parts(statement: bytes) -> tuple[bytes, bytes, bytes]:
    match unpacked(statement):
        case [bytes(public_key), bytes(signature), bytes(content)] if (
            len(public_key) <= MOST_KEY_BYTES and len(signature) <= MOST_SIGNATURE_BYTES
        ):
            return public_key, signature, content
    raise ValueError("not a statement")


def _signed(about: bytes, content: bytes) -> bytes:
    return hashlib.sha256(about).digest() + content


@lru_cache(1024)
def _key(readable: bytes) -> RSAPublicKey:
    key = RSAPublicKey.from_bytes(readable)
    assert isinstance(key, RSAPublicKey)  # hivemind annotates it as bytes
    return key
