"""Atomic file writes, mostly of files that only their owner can read. This module imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path

from trahiv_cli.errors import SetupError


def require_private(path: Path) -> None:
    """Raise SetupError if other users of this machine can read or change a file of secrets."""
    if path.stat().st_mode & 0o077:
        raise SetupError(
            f"{path} can be read by other users of this machine; it was not used.",
            hint=f"chmod 600 {path}; if somebody else may have read it, move it away: a new one is then made",
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
