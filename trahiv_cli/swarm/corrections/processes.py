"""hivemind's processes: they end with their parent, survive each other's failures, and leave nothing behind.

p2p/p2p_daemon.py:74 puts hivemind's sockets directly into /tmp under random names, where multiprocessing has
some, too. Here each process has a folder for them, with its process id in the name.
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
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from hivemind.utils import MPFuture

from trahiv_cli.errors import SwarmError
from trahiv_cli.shared_memory import shared_bytes

PREFIX = "trahiv-"


def die_with_parent() -> None:
    """Ask the kernel to kill this process as soon as the thread that forked it ends.

    `daemon=True` does not help when the parent is killed: a ghost peer keeps its port and id. Only Linux
    can do this; elsewhere, a user ends the processes of a killed peer by hand.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def become_child(parent_pid: int) -> None:
    """Make the process that was just forked die with its parent, and leave signals to the parent.

    Ctrl-C reaches the whole process group: the DHT's process would end in the middle of the goodbye. The
    process also keeps its tasks, returns freed memory, and gets threads of its own.
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
    """Make torch replace the threads that this process lost in the fork, while it has only one thread.

    caffe2/utils/threadpool/pthreadpool-cpp.cc does that without a lock when a thread first uses them; the
    threads of a round do so at once, and fail ("Invalid thread pool!").
    """
    torch.set_num_threads(torch.get_num_threads())


def return_freed_memory() -> None:
    """Make glibc return large pieces of freed memory to the system.

    glibc raises the threshold, up to 32 MiB, with each large piece that is freed (mallopt(3)), and keeps
    smaller ones: of 1.4 GiB that a process held after two rounds of 82M weights, 1.0 GiB were free.
    """
    if sys.platform == "linux":
        m_mmap_threshold = -3  # malloc.h
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 128 * 1024)  # the initial threshold


def keep_tasks(create_task: Callable[..., asyncio.Task[Any]]) -> Callable[..., asyncio.Task[Any]]:
    """Wrap `asyncio.create_task` so that tasks are referenced until they are done.

    The event loop refers to a task weakly, and dht/dht.py:133 drops its own: a task that waits for an object
    without other references is collected, and its caller waits forever.
    """
    held: set[asyncio.Task[Any]] = set()

    def create_and_hold(coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = create_task(coro, **kwargs)
        held.add(task)
        task.add_done_callback(held.discard)
        return task

    return create_and_hold


class ControlPipe:
    """One end of a pipe to a hivemind process that keeps messages whole, from any thread and of any length.

    Several threads send into it, and a message above 4,096 bytes may be sent in pieces. uvloop makes the
    other end non-blocking, so that it reads half a message. Either ends the loop of dht/dht.py:127.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._is_sending = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def send(self, message: Any) -> None:
        """Send a message after the messages of other threads."""
        with self._is_sending:
            self._pipe.send(message)

    def recv(self) -> Any:
        """Return the next message, once it has arrived completely."""
        os.set_blocking(self._pipe.fileno(), True)
        return self._pipe.recv()


def require_start(ready: MPFuture[None], is_alive: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until the DHT's process reports that it is ready; raise the error that it reports instead.

    dht/dht.py:144 waits forever for a process that was killed or has stalled. This function raises SwarmError
    if the process has ended, and after `timeout_s`; p2pd has 15 s.
    """
    until = time.monotonic() + timeout_s
    is_starting = True
    while is_starting:
        is_starting = is_alive() and time.monotonic() < until  # before the last look, not after it
        with contextlib.suppress(TimeoutError):
            ready.result(timeout=0.5)
            return
    raise SwarmError(
        "This peer's DHT process ended, or stood still, while it started; nothing was changed.",
        hint="start again with the same command",
    )


def start_memory_manager() -> None:
    """Make torch start its process that keeps shared memory, with SIGINT blocked: Ctrl-C does not reach it.

    lib/libshm/core.cpp waits forever for a process that Ctrl-C ended while it started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        shared_bytes(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def close_event_loop() -> None:
    """Close the event loop of this thread, if it has one that does not run.

    utils/mpfuture.py:107 makes one and never closes it: at the interpreter's exit its sockets may be closed
    first, and the user sees a traceback at the end ("Invalid file descriptor: -1").
    """
    with contextlib.suppress(RuntimeError):  # there is none, or it runs
        asyncio.get_event_loop().close()


@cache
def private_folder(pid: int) -> Path:
    """Return the folder for the sockets of this process, by its id; it is removed when the process ends.

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
            if one.connect_ex(str(address)) == errno.ECONNREFUSED:  # torch's process was killed
                shutil.rmtree(address.parent)
    # Not tempfile's default folder: a unix socket's path may have at most 107 bytes.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{pid}-", dir="/tmp"))
    _lock(unlocked)
    folder = unlocked.rename(unlocked.with_name(unlocked.name.removeprefix(".")))
    cast(Any, multiprocessing.process.current_process())._config.setdefault("tempdir", str(folder))
    # Last of all: multiprocessing removes its sockets, then its own folder, at -100.
    multiprocessing.util.Finalize(None, _sweep, args=(folder, pid), exitpriority=-100)
    return folder


def _lock(folder: Path) -> int | None:
    """Lock a private folder until this process ends; None if another process or user has it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            os.close(descriptor)
    return None


def _sweep(folder: Path, pid: int) -> None:
    """Remove a private folder, and its process's shared memory unless another process may have made that."""
    shutil.rmtree(folder, ignore_errors=True)
    if any(Path("/tmp").glob(f"{PREFIX}{pid}-*")):
        return
    for memory in Path("/dev/shm").glob(f"torch_{pid}_*"):  # lib/libshm/alloc_info.h
        with contextlib.suppress(OSError):  # it is gone, or another user's
            memory.unlink()


def effort_of(pids: Iterable[int]) -> tuple[float, bool]:
    """Return the processor time of processes, in seconds, and whether one is stopped or a zombie.

    Processes that are gone add none. A process that waits for a disk counts as busy.
    """
    used = 0.0
    is_stopped = False
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            times = process.cpu_times()
            status = process.status()
            used += times.user + times.system
            if status == psutil.STATUS_DISK_SLEEP:
                used += time.monotonic()
            is_stopped |= status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)
    return used, is_stopped
