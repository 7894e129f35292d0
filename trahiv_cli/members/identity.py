"""A peer's key, the file that holds it, and the id that follows from it, as libp2p defines them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import base58
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_private_key

from trahiv_cli.errors import SetupError
from trahiv_cli.files import require_private, write_private
from trahiv_cli.net.borrowed.crypto import RSAPrivateKey

IDENTITY_FILE = "identity.key"  # in a run's folder


def ensure_identity(path: Path) -> str:
    """Return the peer id (base58) of a key file; create the file and its folder if there is none.

    Raises SetupError if the file can't be written, is not a libp2p private key, or is readable by other
    users; the file is unchanged then.
    """
    try:
        if not path.exists():
            # `P2P.generate_identity` does the same, but lets other users read the file for a moment.
            write_private(path, _protobuf(RSAPrivateKey().to_bytes()))
        require_private(path)
        return id_of(load_der_private_key(_read_der(path), None).public_key())
    except OSError as error:
        raise SetupError(
            f"The identity file {path} can't be used: {error.strerror or error}.",
            hint="choose another place with --output-dir DIR or --identity FILE",
        ) from error
    except ValueError as error:
        raise SetupError(
            f"{path} is not a libp2p private key.",
            hint="move it away (a new identity is then made), or name another with --identity FILE",
        ) from error


def read_signing_key(identity: Path) -> RSAPrivateKey:
    """Read the private key of an identity file, with which the peer signs."""
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key.__setstate__({"_private_key": _read_der(identity)})
    return key


def _read_der(identity: Path) -> bytes:
    content = identity.read_bytes()
    der = content[len(_protobuf(b"")) :]
    if content != _protobuf(der):
        raise ValueError("not an RSA key of libp2p")
    return der


def _protobuf(der: bytes) -> bytes:
    """Write libp2p's message PublicKey or PrivateKey of an RSA key (DER, 128 to 16,383 bytes)."""
    return bytes([0x08, 0, 0x12, len(der) % 128 + 128, len(der) // 128]) + der


def id_of(public_key: Any) -> str:
    """Return the id (base58) of the peer with a public key (RSA, of `cryptography`)."""
    der = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(_protobuf(der)).digest()
    return base58.b58encode(b"\x12\x20" + digest).decode()  # a multihash: its kind, its length, the digest


def id_bytes(peer_id: str) -> bytes:
    """Return the bytes of a peer's id in base58; ValueError if it is none."""
    return base58.b58decode(peer_id)
