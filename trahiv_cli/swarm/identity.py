"""The key file that fixes a peer's id."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm.files import require_private, write_private

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
