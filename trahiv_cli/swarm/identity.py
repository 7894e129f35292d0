"""The key file that determines a peer's id."""

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
    """Return the peer id (base58) of a key file; create the file and its folder if there is none.

    Raises SetupError if the file can't be written, is not a libp2p private key, or is readable by other
    users; the file is unchanged then.
    """
    try:
        if not path.exists():
            # `P2P.generate_identity` does the same, but lets other users read the file for a moment.
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
