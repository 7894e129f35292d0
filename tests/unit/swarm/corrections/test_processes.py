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

import hivemind
import pytest
from hivemind.utils import MPFuture

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
    with pytest.raises(SetupError, match=r"1\.1\.13") as refused:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert corrections.CORRECTED_VERSION in refused.value.hint


def test_hivemind_uses_swarm_time():
    corrections.apply()
    of_hivemind = [module for name, module in sys.modules.items() if name.partition(".")[0] == "hivemind"]
    clocks = [module.get_dht_time for module in of_hivemind if hasattr(module, "get_dht_time")]
    assert len(clocks) > 8 and set(clocks) == {swarm_time}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "upstream still"])
def test_control_pipe_waits_for_whole_message(is_ours):
    reader, writer = multiprocessing.Pipe(duplex=False)
    os.set_blocking(reader.fileno(), False)  # as uvloop does
    packed = bytes(ForkingPickler.dumps(message := b"x" * 9000))
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
def test_unreferenced_task_survives_collection(is_kept):
    create = processes.keep_tasks(asyncio.create_task) if is_kept else asyncio.create_task
    ended = []

    async def wait_for_what_only_this_task_knows():
        try:
            await asyncio.get_running_loop().create_future()
        except GeneratorExit:
            ended.append("collected")
            raise

    async def run():
        create(wait_for_what_only_this_task_knows())
        await asyncio.sleep(0)
        gc.collect()
        assert ended == ([] if is_kept else ["collected"])

    asyncio.run(run())


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
    did = []
    for name in ("die_with_parent", "private_folder", "return_freed_memory", "renew_thread_pool"):
        monkeypatch.setattr(processes, name, lambda *args, name=name: did.append((name, *args)))
    monkeypatch.setattr(signal, "signal", lambda *args: did.append(args))
    monkeypatch.setattr(asyncio, "create_task", asyncio.create_task)
    processes.become_child(os.getppid())
    signals = [(signal.SIGINT, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_DFL)]
    own = [("die_with_parent",), ("private_folder", os.getpid())]
    assert did == [*signals, *own, ("return_freed_memory",), ("renew_thread_pool",)]
    assert asyncio.create_task.__name__ == "create_and_hold"


def test_private_folder_sweeps_dead_processes(monkeypatch, tmp_path):
    at_end, left, own_pid = [], {}, DEAD_PID + 1
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {})
    monkeypatch.setattr("multiprocessing.util.Finalize", lambda _, do, args, **_k: at_end.append((do, args)))
    alive = os.getpid()  # of an earlier version, which did not lock its folder
    for pid in (DEAD_PID, IN_A_CONTAINER, alive, "scout"):
        name = f"{pid}_{os.getpid()}_0"
        left[pid] = Path(f"/tmp/trahiv-{name.replace('_', '-')}"), Path(f"/dev/shm/torch_{name}")
        left[pid][0].mkdir()
        left[pid][1].touch()
    lock = os.open(left[IN_A_CONTAINER][0], os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    keepers = {"alive": socket.socket(socket.AF_UNIX), "killed": socket.socket(socket.AF_UNIX)}
    for name, one in keepers.items():  # torch's managers of shared memory, whose folders are elsewhere
        (tmp_path / f"torch-shm-dir-{name}").mkdir()
        one.bind(str(tmp_path / f"torch-shm-dir-{name}" / "manager.sock"))
    keepers["alive"].listen()
    keepers["killed"].close()
    (stuck := Path(f"{left[DEAD_PID][1]}1")).mkdir()  # can't be removed, like another user's memory
    folder, memory = private_folder(own_pid), Path(f"/dev/shm/torch_{own_pid}_0")
    stuck.rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["torch-shm-dir-alive"]
    keepers["alive"].close()
    os.close(lock)
    there = {pid: [path.exists() for path in paths] for pid, paths in left.items()}
    for one, its_memory in left.values():
        shutil.rmtree(one, ignore_errors=True)
        its_memory.unlink(missing_ok=True)
    assert there.pop(DEAD_PID) == [False] * 2 and all(map(all, there.values()))
    assert private_folder(own_pid) == folder and folder.name.startswith(f"trahiv-{own_pid}-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(f"{folder}/p2pclient-0123456789abcdef0123456789abcdef.sock".encode()) <= 107
    assert multiprocessing.util.get_temp_dir() == str(folder)
    memory.touch()
    [(sweep, swept)] = at_end
    (of_another := folder.with_name(f"trahiv-{own_pid}-container")).mkdir()
    sweep(*swept)
    assert not folder.exists() and memory.exists(), "another container's process may have made it"
    of_another.rmdir()
    sweep(*swept)
    assert not memory.exists()
