"""The private files of a run's folder, and atomic writes. This module imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path

from trahiv_cli.errors import SetupError

# Private files in a run's folder.
OWNER_FILE = "owner.key"  # the private key of the swarm's owner, in hex
MEMBER_FILE = "secret.key"  # this peer's membership: an invitation without addresses
INVITATION_FILE = "invitation"  # the invitation that this peer gives to others
INVITED_BY_FILE = "invited-by"  # this peer's own; a command line names the file, without the secret


def require_private(path: Path) -> None:
    """Raise SetupError if other users of this machine can read or change a file of secrets."""
    if path.stat().st_mode & 0o077:
        raise SetupError(
            f"{path} can be read by other users of this machine; it was not used.",
            hint=f"chmod 600 {path}; if others may have read it, move it away: a new one is then made",
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically, never readable by other users (mode 0600); create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content, 0o600)


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically, with `mode` less the umask; after an OSError the old file stays."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
