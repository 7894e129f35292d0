"""The folder of a run: who owns it while a peer runs there, and which one a peer takes.

Two peers in one folder would be the same peer to the swarm, and each would overwrite the other's checkpoints
and invitation. So a peer locks its folder before it writes anything there, and keeps the lock while it runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from trahiv_cli.errors import FolderTaken, SetupError
from trahiv_cli.swarm.acquaintances import FILE, Acquaintances
from trahiv_cli.swarm.identity import IDENTITY_FILE
from trahiv_cli.swarm.invitation import (
    INVITATION_FILE,
    INVITED_BY_FILE,
    OWNER_FILE,
    Invitation,
    join_by,
    passing_standing,
)
from trahiv_cli.swarm.membership import Membership

RUNS = Path("runs")
"""Where runs live unless the user says otherwise."""

LOCK_FILE = "lock"
MAX_FOLDERS_OF_A_RUN = 100
"""The number of peers of one run that can share `runs` without being told where to run."""

MINIMUM_FREE_BYTES = 64 * 2**20

_FLOCK = "hhqqi0q"
"""The kernel's `struct flock`: type, whence, start, length, pid."""

_held: set[Path] = set()
"""Folders that this process owns; the kernel's locks are between processes only."""


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[Path]:
    """Own a folder, which is made if necessary, while the block runs.

    The lock is a POSIX record lock: the kernel drops it when this process ends, however it ends, and the
    children that this process forks do not inherit it.

    Raises:
        FolderTaken: a peer of another process, or of this one, runs there.
        SetupError: the folder can't be written, or its disk is almost full.
    """
    require_free(folder)
    _require_writable(folder)
    place = folder.resolve()
    try:
        lock = (folder / LOCK_FILE).open("a")
    except OSError as error:  # it is another user's
        raise _unwritable(folder, error) from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _taken(folder) from error
            # Some network file systems have no locks: then nobody can be kept out.
        _held.add(place)
        try:
            yield folder
        finally:
            _held.discard(place)


@contextlib.contextmanager
def owned_to_join(run: str, membership: Membership | None) -> Iterator[Path]:
    """Own the folder in `runs` of a peer that joins a run, while the block runs.

    That is the one that this peer had before, if there is one and no peer runs in it. Otherwise it is
    `runs/<run>`, or with a number behind it if another peer runs there.

    Args:
        run: the run's id.
        membership: the one that the peer joins with.

    Raises:
        FolderTaken: peers run in all of them.
        SetupError: see `owned`.
    """
    names = [run, *(f"{run}-{number}" for number in range(2, MAX_FOLDERS_OF_A_RUN))]
    folders = sorted((RUNS / name for name in names), key=lambda folder: _strangeness(folder, membership))
    with contextlib.ExitStack() as stack:
        for folder in folders:
            with contextlib.suppress(FolderTaken):
                stack.enter_context(owned(folder))
                break
        else:
            raise _taken(folders[0])
        yield folder


def _strangeness(folder: Path, membership: Membership | None) -> int:
    """Say how little a folder looks like that of a peer that joins with this membership."""
    if (folder / OWNER_FILE).exists() or not (folder / INVITED_BY_FILE).exists():
        return 2
    return 0 if _membership_in(folder) == membership else 1


def known_run(addresses: Sequence[str], output_dir: Path | None) -> Path | None:
    """Find the folder of a run that was trained here with one of these peers, and can be resumed.

    Args:
        addresses: of the join line.
        output_dir: where it is, if that was said; else those in `runs` in which no peer runs are searched.
    """
    named = {address.rpartition("/p2p/")[2] for address in addresses}
    for folder in _resting(output_dir):
        is_meant = output_dir or named & Acquaintances(folder / FILE).addresses.keys()
        if is_meant and has_begun(folder):
            return folder
    return None


def known_identity(invitation: Invitation, output_dir: Path | None) -> Path | None:
    """Find the key file of a peer that joined with this invitation before.

    A newcomer may be refused where that peer is not, because the invitation was used or closed since.

    Args:
        invitation: of the join line.
        output_dir: the run's folder, if that was said; else those in `runs` in which no peer runs are
            searched.

    Raises:
        SetupError: others can read a folder's secrets.
    """
    if invitation.membership is None:
        return None
    for folder in _resting(output_dir):
        if _membership_in(folder) == invitation.membership:
            own = folder / IDENTITY_FILE
            return own if own.exists() else None
    return None


def has_begun(folder: Path) -> bool:
    """Whether a run's folder has a checkpoint to go on from."""
    from trahiv_cli.train.checkpoint import saved_in

    return bool(saved_in(folder))


def require_free(folder: Path) -> None:
    """Refuse a folder that another peer runs in.

    Raises:
        FolderTaken: one does.
    """
    if not _is_free(folder):
        raise _taken(folder)


def _is_free(folder: Path) -> bool:
    return folder.resolve() not in _held and _holder(folder) is None


def _taken(folder: Path) -> FolderTaken:
    pid = os.getpid() if folder.resolve() in _held else _holder(folder)
    invitation = folder / INVITATION_FILE
    line = join_by(invitation) if invitation.exists() else "the `trahiv join` line that it printed"
    return FolderTaken(
        f"A peer runs in {folder} already{f' (process {pid})' if pid else ''}; nothing was changed.",
        hint=f"to train with that peer, type: {line}; for anything else, name another folder with "
        "--output-dir DIR (in Python: output_dir)",
    )


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _unwritable(folder, error) from error
    if free < MINIMUM_FREE_BYTES:
        raise SetupError(
            f"The disk of {folder} has {free / 2**20:.0f} MiB left.",
            hint="free some, or use --output-dir DIR",
        )


def _unwritable(folder: Path, error: OSError) -> SetupError:
    return SetupError(
        f"The run's folder {folder} can't be written: {error.strerror or error}.",
        hint="choose another place with --output-dir DIR",
    )


def _resting(output_dir: Path | None) -> list[Path]:
    """List the folders that may be this peer's, the newest first; those of swarms started here come last."""
    if output_dir is not None:
        return [output_dir]
    return sorted(
        filter(_is_free, RUNS.glob("*/")),
        key=lambda folder: ((folder / OWNER_FILE).exists(), -folder.stat().st_mtime),
    )


def _membership_in(folder: Path) -> Membership | None:
    standing = passing_standing(folder, Invitation())
    return standing.membership if standing is not None else None


def _holder(folder: Path) -> int | None:
    """Ask the kernel which other process holds the lock of a folder; 0: one elsewhere, None: nobody does.

    Only for folders that this process does not own: closing the file drops the locks that it has there.
    """
    try:
        with (folder / LOCK_FILE).open() as file:
            wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, wanted))
    except OSError:
        return None
    return found[4] if found[0] != fcntl.F_UNLCK else None
