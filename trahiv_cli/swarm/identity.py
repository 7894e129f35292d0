"""Files that are written whole, most for this peer's eyes alone; among them the key that fixes its id."""

from __future__ import annotations

import os
from pathlib import Path

from google.protobuf.message import DecodeError
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.errors import SetupError

IDENTITY_FILE = "identity.key"  # in a run's folder


def ensure_identity(path: Path) -> str:
    """Return the peer id (base58) of a key file; make the file and its folder if there is none.

    SetupError if it can't be written, is no libp2p private key, or others can read it; it stays as it was.
    """
    try:
        if not path.exists():
            # As `P2P.generate_identity` does, which gives others a moment to read the file.
            key = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=RSAPrivateKey().to_bytes())
            write_private(path, key.SerializeToString())
        require_private(path)
        return PeerID.from_identity(path.read_bytes()).to_base58()
    except OSError as error:
        raise SetupError(
            f"The identity file {path} can't be used: {error.strerror or error}.",
            hint="choose another place with --output-dir DIR or --identity FILE",
        ) from error
    except (ValueError, DecodeError) as error:
        raise SetupError(
            f"{path} is not a libp2p private key.",
            hint="move it away (a new identity is then made), or name another with --identity FILE",
        ) from error


def require_private(path: Path) -> None:
    """Refuse, as SetupError, a file of secrets that other users of this machine can read or change."""
    if path.stat().st_mode & 0o077:
        raise SetupError(
            f"{path} can be read by other users of this machine; it was not used.",
            hint=f"chmod 600 {path}; if somebody else may have read it, move it away: a new one is then made",
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that nobody else can read at any moment (mode 0600), whole or not; make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content, 0o600)


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file whole or not at all, less the umask; OSError if that fails, and what it held stays."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    aside.replace(path)
