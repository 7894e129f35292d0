"""hivemind's processes outlive each other's failures, and leave nothing behind."""

import asyncio
import ctypes
import fcntl
import gc
import importlib.util
import multiprocessing
import multiprocessing.util
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from unittest.mock import Mock, call

import hivemind
import pytest
from hivemind.utils import MPFuture

from tests.unit.conftest import refused
from trahiv_cli.clock import swarm_time
from trahiv_cli.errors import SetupError
from trahiv_cli.swarm import corrections
from trahiv_cli.swarm.corrections import processes
from trahiv_cli.swarm.corrections.processes import ControlPipe, private_folder, return_freed_memory

DEAD_PID = 2**22 + 1  # above the kernel's largest pid
IN_A_CONTAINER = DEAD_PID + 2  # its process lives, with an id that has no meaning here


def test_other_hivemind_version_is_refused(monkeypatch):
    monkeypatch.setattr(hivemind, "__version__", "1.1.13")
    spec = importlib.util.spec_from_file_location("corrections_again", corrections.__file__)
    with refused(r"1\.1\.13", corrections.CORRECTED_VERSION, SetupError):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_hivemind_uses_swarm_time():
    corrections.apply()
    of_hivemind = [module for name, module in sys.modules.items() if name.partition(".")[0] == "hivemind"]
    clocks = [module.get_dht_time for module in of_hivemind if hasattr(module, "get_dht_time")]
    assert len(clocks) > 8
    assert set(clocks) == {swarm_time}


def test_process_may_open_many_files():
    corrections.apply()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "upstream still"])
def test_control_pipe_waits_for_whole_message(is_ours):
    reader, writer = multiprocessing.Pipe(duplex=False)
    os.set_blocking(reader.fileno(), False)  # as uvloop does
    message = b"x" * 9000
    packed = bytes(ForkingPickler.dumps(message))
    sent = len(packed).to_bytes(4, "big") + packed
    os.write(writer.fileno(), sent[:5000])
    rest = threading.Timer(0.05, os.write, (writer.fileno(), sent[5000:]))
    rest.start()
    with nullcontext() if is_ours else pytest.raises(BlockingIOError):
        assert (ControlPipe(reader) if is_ours else reader).recv() == message
    rest.join()


def test_concurrent_messages_stay_whole():
    reader, writer = map(ControlPipe, multiprocessing.Pipe(duplex=False))
    messages = [bytes([number]) * 9000 for number in range(4)]
    for one in messages:
        threading.Thread(target=lambda one=one: [writer.send(one) for _ in range(50)]).start()
    assert {reader.recv() for _ in range(4 * 50)} == set(messages)


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "as upstream leaves them"])
async def test_unreferenced_task_survives_collection(is_kept):
    create = processes.keep_tasks(asyncio.create_task) if is_kept else asyncio.create_task
    ended = []

    async def wait_for_what_only_this_task_knows():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("collected")

    create(wait_for_what_only_this_task_knows())
    await asyncio.sleep(0)
    gc.collect()
    assert ended == ([] if is_kept else ["collected"])


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "as upstream leaves it"])
def test_future_event_loop_is_closed(is_closed):
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    loop = MPFuture()._loop
    if is_closed:
        processes.close_event_loop()
    assert loop.is_closed() == is_closed
    processes.close_event_loop()
    asyncio.set_event_loop_policy(before)


def test_large_allocation_is_mapped_separately():
    libc, num_bytes = ctypes.CDLL(None), 30 * 2**20
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    libc.free(libc.malloc(num_bytes))  # from now on glibc treats sizes up to this as small
    return_freed_memory()
    pieces = [libc.malloc(num_bytes) for _ in range(40)]  # the first may reuse freed memory
    header = ctypes.c_size_t.from_address(pieces[-1] - ctypes.sizeof(ctypes.c_size_t))  # malloc.c
    is_mapped = header.value & 2
    for piece in pieces:
        libc.free(piece)
    assert is_mapped


def test_child_dies_with_parent(monkeypatch):
    did = Mock()
    for name in ("die_with_parent", "private_folder", "return_freed_memory", "renew_thread_pool"):
        monkeypatch.setattr(processes, name, getattr(did, name))
    monkeypatch.setattr(signal, "signal", did.signal)
    monkeypatch.setattr(asyncio, "create_task", asyncio.create_task)
    processes.become_child(os.getppid())
    assert did.mock_calls == [
        call.signal(signal.SIGINT, signal.SIG_IGN),
        call.signal(signal.SIGTERM, signal.SIG_DFL),
        call.die_with_parent(),
        call.private_folder(os.getpid()),
        call.return_freed_memory(),
        call.renew_thread_pool(),
    ]
    assert asyncio.create_task.__name__ == "create_and_hold"


OWN_PID = DEAD_PID + 1
OWN_MEMORY = Path(f"/dev/shm/torch_{OWN_PID}_0")


@pytest.fixture
def finalize(monkeypatch, tmp_path):
    """Stand in for the registration of work at the end of a process, whose private folder is then removed."""
    finalize = Mock()
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {})
    monkeypatch.setattr("multiprocessing.util.Finalize", finalize)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private_folder.cache_clear()
    yield finalize
    shutil.rmtree(private_folder(OWN_PID), ignore_errors=True)


@pytest.mark.parametrize(
    "pid, is_kept",
    [
        (DEAD_PID, False),
        (IN_A_CONTAINER, True),
        (os.getpid(), True),  # of an earlier version, which did not lock its folder
        ("scout", True),
    ],
    ids=["dead", "in a container", "alive", "no process"],
)
@pytest.mark.usefixtures("finalize")
def test_files_of_dead_processes_are_swept(pid, is_kept):
    folder, memory = Path(f"/tmp/trahiv-{pid}-{os.getpid()}"), Path(f"/dev/shm/torch_{pid}_{os.getpid()}")
    stuck = Path(f"{memory}_1")  # can't be removed, like another user's memory
    for path in (folder, stuck):
        path.mkdir()
    memory.touch()
    lock = os.open(folder, os.O_RDONLY)
    if pid == IN_A_CONTAINER:
        fcntl.flock(lock, fcntl.LOCK_EX)
    private_folder(OWN_PID)
    os.close(lock)
    stuck.rmdir()
    there = [folder.exists(), memory.exists()]
    shutil.rmtree(folder, ignore_errors=True)
    memory.unlink(missing_ok=True)
    assert there == [is_kept] * 2


@pytest.mark.usefixtures("finalize")
@pytest.mark.parametrize("is_alive", [True, False])
def test_folder_of_dead_memory_manager_is_swept(tmp_path, is_alive):
    folder = tmp_path / "torch-shm-dir-1"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as manager:
        manager.bind(str(folder / "manager.sock"))
        if is_alive:
            manager.listen()
        private_folder(OWN_PID)
    assert folder.exists() is is_alive


@pytest.mark.usefixtures("finalize")
def test_private_folder_fits_sockets():
    folder = private_folder(OWN_PID)
    assert private_folder(OWN_PID) == folder
    assert folder.name.startswith(f"trahiv-{OWN_PID}-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(f"{folder}/p2pclient-0123456789abcdef0123456789abcdef.sock".encode()) <= 107
    assert multiprocessing.util.get_temp_dir() == str(folder)


def test_private_folder_ends_with_process(finalize):
    folder = private_folder(OWN_PID)
    (_, sweep), options = finalize.call_args
    of_another = folder.with_name(f"trahiv-{OWN_PID}-container")
    of_another.mkdir()
    OWN_MEMORY.touch()
    sweep(*options["args"])
    assert not folder.exists()
    assert OWN_MEMORY.exists(), "another container's process may have made it"
    of_another.rmdir()
    sweep(*options["args"])
    assert not OWN_MEMORY.exists()
