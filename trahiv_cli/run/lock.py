"""The lock of a run's folder: two peers in one folder would share an identity and overwrite checkpoints.

This module imports nothing heavy: commands that only look at a folder answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from trahiv_cli.errors import FolderTaken, SetupError
from trahiv_cli.files import INVITATION_FILE
from trahiv_cli.recipe.pasted import join_by, launch_by

RUNS = Path("runs")
"""The folder in which runs live unless the user says otherwise."""

RESOLVED = "recipe.json"
LAUNCHED = "program.txt"
LOCK_FILE = "lock"

_held: set[Path] = set()  # folders that this process owns; the kernel's locks work between processes only


def join_line(folder: Path, place: str) -> str:
    """Return the command that joins the run of a folder, through an address or an invitation's `@FILE`."""
    program = folder / LAUNCHED
    return launch_by(place, program.read_text().strip()) if program.exists() else join_by(place)


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[Path]:
    """Own a folder while the block runs; create it if necessary.

    The lock is a POSIX record lock: the kernel drops it when this process ends, and no child inherits it.

    Raises:
        FolderTaken: a peer of this or another process runs there.
        SetupError: the folder can't be written.
    """
    require_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a")
    except OSError as error:
        raise SetupError(
            f"The run's folder {folder} can't be written: {error.strerror or error}.",
            hint="choose another place with --output-dir DIR",
        ) from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise folder_taken(folder, holder_of(folder)) from error
            # Some network file systems have no locks; other peers can't be kept out there.
        resolved = folder.resolve()
        _held.add(resolved)
        try:
            yield folder
        finally:
            _held.discard(resolved)


def require_free(folder: Path) -> None:
    """Raise `FolderTaken` if a peer runs in a folder."""
    if (pid := holder_of(folder)) is not None:
        raise folder_taken(folder, pid)


def holder_of(folder: Path) -> int | None:
    """Return the id of the process whose peer runs in a folder; 0 if it runs elsewhere, None if none runs."""
    if folder.resolve() in _held:  # do not ask the kernel: closing the file would drop the lock
        return os.getpid()
    layout = "hhqqi0q"  # Linux's `struct flock`: type, whence, start, length, pid
    try:
        with (folder / LOCK_FILE).open() as file:
            wanted = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found = struct.unpack(layout, fcntl.fcntl(file, fcntl.F_GETLK, wanted))
    except OSError:
        return None
    return int(found[4]) if found[0] != fcntl.F_UNLCK else None


def folder_taken(folder: Path, pid: int | None) -> FolderTaken:
    """Return the error that a peer runs in a folder, in a process with this id (None or 0: elsewhere)."""
    file = folder / INVITATION_FILE
    line = join_line(folder, f"@{file}") if file.exists() else "the `trahiv join` line that it printed"
    return FolderTaken(
        f"A peer runs in {folder} already{f' (process {pid})' if pid else ''}; nothing was changed.",
        hint=f"to train with that peer, type: {line}; for anything else, name another folder with "
        "--output-dir DIR (in Python: output_dir)",
    )
