"""What a process that was killed leaves in /tmp and /dev/shm is removed by the next one that starts.

p2p/p2p_daemon.py:74 puts hivemind's sockets directly into /tmp under random names, and multiprocessing has
some by which processes hand each other pipes. Who is killed leaves them, and the shared memory, if torch's
process that keeps it is killed, too. Here each process has a folder, whose name says whose it is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any, cast

PREFIX = "trahiv-"
_folders: dict[int, Path] = {}  # by process id: of this process, and of those that it was forked from


def private_folder() -> Path:
    """Return the folder for the sockets of this process and its children, which goes when the process ends.

    The first call makes it, and removes what belonged to processes that are gone.
    """
    if os.getpid() in _folders:
        return _folders[os.getpid()]
    for stale in Path("/tmp").glob(f"{PREFIX}*-*"):
        pid = stale.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _sweep(stale, pid)
    for address in Path(tempfile.gettempdir()).glob("torch-shm-dir-*/manager.sock"):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            try:
                probe.connect(str(address))
            except ConnectionRefusedError:  # nobody listens there any more
                shutil.rmtree(address.parent)
    # Not tempfile's default folder: a unix socket's path may have at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/tmp"))
    _folders[os.getpid()] = folder
    cast(Any, multiprocessing.process.current_process())._config.setdefault("tempdir", str(folder))
    # After all else: multiprocessing removes its sockets, then its own folder, at -100.
    multiprocessing.util.Finalize(None, _sweep, args=(folder, str(os.getpid())), exitpriority=-100)
    return folder


def note_child(parent_pid: int) -> None:
    """Note in the parent's folder that this process is its child: their shared memory goes together."""
    if (folder := _folders.get(parent_pid)) is not None:
        (folder / "children").mkdir(exist_ok=True)
        (folder / "children" / str(os.getpid())).touch()


def _sweep(folder: Path, pid: str) -> None:
    """Remove a private folder, and the shared memory of its process and that one's children."""
    for owner in (pid, *(child.name for child in folder.glob("children/*"))):
        for memory in Path("/dev/shm").glob(f"torch_{owner}_*"):  # lib/libshm/alloc_info.h
            memory.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
