"""Files that are written whole, most for this peer's eyes alone. Nothing heavy is loaded for that."""

from __future__ import annotations

import os
from pathlib import Path

from trahiv_cli.errors import SetupError


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
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
