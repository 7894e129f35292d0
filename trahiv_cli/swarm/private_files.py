"""Files that nobody else on this machine can read: keys, and invitations."""

from __future__ import annotations

import os
from pathlib import Path

from trahiv_cli.errors import SetupError


def require_private(path: Path) -> None:
    """Refuse a file of secrets that other users of this machine can read or change.

    Raises:
        SetupError: they can.
        OSError: the file's mode can't be read.
    """
    if path.stat().st_mode & 0o077:
        raise SetupError(
            f"{path} can be read by other users of this machine; it was not used.",
            hint=f"chmod 600 {path}; if somebody else may have read it, move it away: a new one is then made",
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that nobody else can read at any moment (mode 0600), and make its folder.

    Raises:
        OSError: it can't be written; what was there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    aside.replace(path)
