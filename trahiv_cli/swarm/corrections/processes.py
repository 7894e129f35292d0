"""Here hivemind's processes end with their parent, outlive each other's failures, and leave nothing behind.

p2p/p2p_daemon.py:74 puts hivemind's sockets directly into /tmp under random names, where multiprocessing has
some, too. Here each process has a folder for them, whose name says whose it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import multiprocessing.util
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from hivemind.utils import MPFuture

from trahiv_cli.errors import SwarmError
from trahiv_cli.swarm.snapshot import shared_bytes

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
START_S = 60.0  # what does not say within this time that it has started is given up; p2pd has 15 s
LOOK_EVERY_S = 0.5
M_MMAP_THRESHOLD = -3  # malloc.h
LARGE_BYTES = 128 * 1024  # as glibc begins
PREFIX = "trahiv-"


def die_with_parent() -> None:
    """Have the kernel kill this process as soon as the thread that forked it ends.

    `daemon=True` does not help when the parent is killed: a ghost peer holds its port and id. Only Linux
    can do this; elsewhere, end what a killed peer left behind by hand.
    """
    if LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become_child(parent_pid: int) -> None:
    """Make the process that was just forked die with its parent, and leave signals to the parent.

    Ctrl-C reaches the whole process group: the DHT's process would leave in the middle of the goodbye. It
    keeps its tasks, gives memory back, and has threads of its own from now on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    if os.getppid() != parent_pid:  # it died between fork and prctl
        os._exit(1)
    private_folder(os.getpid())
    asyncio.create_task = keep_tasks(asyncio.create_task)
    return_freed_memory()
    renew_thread_pool()


def renew_thread_pool() -> None:
    """Have torch replace the threads that this process lost when it was forked, while it has just this one.

    caffe2/utils/threadpool/pthreadpool-cpp.cc does that without a lock when threads first ask for them; a
    round's ask at once, and fail ("Invalid thread pool!").
    """
    torch.set_num_threads(torch.get_num_threads())


def return_freed_memory() -> None:
    """Have memory that this process frees go back to the machine, if it was a large piece.

    glibc raises what is large, up to 32 MiB, with each such piece that is freed (mallopt(3)), and keeps
    smaller ones: of 1.4 GiB that a process held after two rounds of 82M weights, 1.0 GiB were free.
    """
    if LINUX:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def keep_tasks(create_task: Callable[..., asyncio.Task[Any]]) -> Callable[..., asyncio.Task[Any]]:
    """Have `asyncio.create_task` hold its tasks until they are done.

    The event loop refers to a task weakly, and dht/dht.py:133 and averaging/averager.py:322 drop theirs: one
    that waits for something that nobody else refers to is collected, and its caller waits for ever.
    """
    held: set[asyncio.Task[Any]] = set()

    def create_and_hold(coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = create_task(coro, **kwargs)
        held.add(task)
        task.add_done_callback(held.discard)
        return task

    return create_and_hold


class ControlPipe:
    """One end of a pipe to a hivemind process; its messages stay whole, whoever sends them, however long.

    Several threads send into it, and a message above 4,096 bytes may go in pieces. uvloop has the other end
    not block, which then reads half a message. dht/dht.py:127 ends at either.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._is_sending = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def send(self, message: Any) -> None:
        """Send a message when those of other threads are sent."""
        with self._is_sending:
            self._pipe.send(message)

    def recv(self) -> Any:
        """Return the next message, when all of it is there."""
        os.set_blocking(self._pipe.fileno(), True)
        return self._pipe.recv()


def require_start(ready: MPFuture[None], is_alive: Callable[[], bool], timeout_s: float | None) -> None:
    """Wait until the DHT's process says that it is ready; what it says instead is raised.

    dht/dht.py:144 and averaging/averager.py:339 wait for ever for one that was killed or stands still. Here
    it is given up, as SwarmError, when it has ended, and after `timeout_s` (None: `START_S`).
    """
    until = time.monotonic() + (START_S if timeout_s is None else timeout_s)
    is_starting = True
    while is_starting:
        is_starting = is_alive() and time.monotonic() < until  # before the last look, not after it
        with contextlib.suppress(TimeoutError):
            ready.result(timeout=LOOK_EVERY_S)
            return
    raise SwarmError(
        "This peer's DHT process ended, or stood still, while it started; nothing was changed.",
        hint="start again with the same command",
    )


def start_memory_manager() -> None:
    """Have torch start its process that keeps shared memory, out of Ctrl-C's reach: SIGINT stays blocked.

    lib/libshm/core.cpp waits without an end for one that Ctrl-C ended while it started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        shared_bytes(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def close_event_loop() -> None:
    """Close the event loop of this thread, if it has one that does not run.

    utils/mpfuture.py:107 makes one that nobody closes: at the interpreter's exit its sockets may go first,
    and a traceback ends what a person sees ("Invalid file descriptor: -1").
    """
    with contextlib.suppress(RuntimeError):  # there is none, or it runs
        asyncio.get_event_loop().close()


@cache
def private_folder(pid: int) -> Path:
    """Return the folder for the sockets of this process, by its id, which goes when the process ends.

    The first call makes it, and removes the folders of processes that have ended. A process locks its folder:
    two containers that share /tmp have processes with the same ids. Earlier versions did not lock theirs.
    """
    for stale in Path("/tmp").glob(f"{PREFIX}*-*"):
        other = stale.name.removeprefix(PREFIX).partition("-")[0]
        if not other.isdigit() or (int(other) != pid and psutil.pid_exists(int(other))):
            continue
        if (lock := _lock(stale)) is not None:
            _sweep(stale, int(other))
            os.close(lock)
    for address in Path(tempfile.gettempdir()).glob("torch-shm-dir-*/manager.sock"):
        with socket.socket(socket.AF_UNIX) as one, contextlib.suppress(OSError):
            if one.connect_ex(str(address)) == errno.ECONNREFUSED:  # torch's process there was killed
                shutil.rmtree(address.parent)
    # Not tempfile's default folder: a unix socket's path may have at most 107 bytes.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{pid}-", dir="/tmp"))
    _lock(unlocked)
    folder = unlocked.rename(unlocked.with_name(unlocked.name.removeprefix(".")))
    cast(Any, multiprocessing.process.current_process())._config.setdefault("tempdir", str(folder))
    # After all else: multiprocessing removes its sockets, then its own folder, at -100.
    multiprocessing.util.Finalize(None, _sweep, args=(folder, pid), exitpriority=-100)
    return folder


def _lock(folder: Path) -> int | None:
    """Lock a private folder until this process ends; None if another process has, or it is another user's."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            os.close(descriptor)
    return None


def _sweep(folder: Path, pid: int) -> None:
    """Remove a private folder, and the shared memory of its process, unless another one may have made it."""
    shutil.rmtree(folder, ignore_errors=True)
    if any(Path("/tmp").glob(f"{PREFIX}{pid}-*")):
        return
    for memory in Path("/dev/shm").glob(f"torch_{pid}_*"):  # lib/libshm/alloc_info.h
        with contextlib.suppress(OSError):  # it is gone, or another user's
            memory.unlink()
