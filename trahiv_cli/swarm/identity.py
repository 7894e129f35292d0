"""The key file that fixes a peer's id, so that its join line stays valid after a restart."""

from __future__ import annotations

import tempfile
from pathlib import Path

from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, PeerID

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm.private_files import require_private, write_private

IDENTITY_FILE = "identity.key"
"""Its name in a run's folder."""


def ensure_identity(path: Path) -> str:
    """Return the peer id (base58) of a key file; make the file and its folder if there is none.

    Raises:
        SetupError: the file can't be written, is not a libp2p private key, or other users of this machine can
            read it. Nothing is overwritten.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # its mode is 0700
                P2P.generate_identity(f"{folder}/key")
                write_private(path, Path(folder, "key").read_bytes())
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
