"""What processes that are gone left is swept, and nothing else."""

import inspect
import multiprocessing
import multiprocessing.util
import os
import shutil
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hivemind.p2p import p2p_daemon

from trahiv_cli.swarm import leftovers
from trahiv_cli.swarm.leftovers import private_folder

DEAD_PID = 2**22 + 1  # above the kernel's largest pid
OWN_PID = DEAD_PID + 9
"""Of the process that the test says it is: the memory of this one is in use."""


@pytest.fixture
def end_new_process(monkeypatch):
    """Without a private folder as yet; what it does at its end is done."""
    at_its_end = []
    monkeypatch.setattr(leftovers, "_folders", {})
    monkeypatch.setattr(leftovers, "os", SimpleNamespace(getpid=lambda: OWN_PID))
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {})
    monkeypatch.setattr(
        multiprocessing.util,
        "Finalize",
        lambda _, call, args, exitpriority: at_its_end.append(partial(call, *args)),
    )
    yield lambda: at_its_end.pop()()
    while at_its_end:
        at_its_end.pop()()


@pytest.fixture
def made():
    """Folders and files that are removed at the end."""
    made = []
    yield made
    for path in made:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def folder_of(made, pid):
    """Make a folder as a process with that pid would."""
    made.append(Path(f"/tmp/trahiv-{pid}-test{os.getpid()}"))
    made[-1].mkdir()
    (made[-1] / "p2pd.sock").touch()
    return made[-1]


def memory_of(made, pid):
    made.append(Path(f"/dev/shm/torch_{pid}_{os.getpid()}_0"))
    made[-1].touch()
    return made[-1]


def with_child(folder, pid):
    (folder / "children").mkdir()
    (folder / "children" / str(pid)).touch()


def test_a_process_has_one_folder_that_fits_into_a_socket_path(end_new_process):
    folder = private_folder()
    assert private_folder() == folder and folder.name.startswith(f"trahiv-{OWN_PID}-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(f"{folder}/p2pclient-0123456789abcdef0123456789abcdef.sock".encode()) <= 107
    assert multiprocessing.util.get_temp_dir() == str(folder)


def test_upstream_still_puts_its_sockets_into_one_shared_folder():
    # This process may have moved them already, so the source is asked.
    assert '_UNIX_SOCKET_PREFIX = "/unix/tmp/hivemind-"' in inspect.getsource(p2p_daemon)


def test_what_processes_that_are_gone_left_is_swept_and_nothing_else(end_new_process, made):
    dead, alive, named = (folder_of(made, pid) for pid in (DEAD_PID, os.getppid(), "scout"))
    with_child(dead, DEAD_PID + 1)
    memory = [memory_of(made, pid) for pid in (DEAD_PID, DEAD_PID + 1, DEAD_PID + 2)]
    private_folder()
    assert not dead.exists() and alive.exists() and named.exists()
    assert [one.exists() for one in memory] == [False, False, True]


def test_torch_s_sockets_are_swept_where_nobody_listens(end_new_process, monkeypatch, tmp_path):
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    sockets = []
    for name in ("dead", "alive"):
        (tmp_path / f"torch-shm-dir-{name}").mkdir()
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(str(tmp_path / f"torch-shm-dir-{name}" / "manager.sock"))
    sockets[0].close()
    with sockets[1]:
        sockets[1].listen()
        private_folder()
    assert [path.name for path in tmp_path.iterdir()] == ["torch-shm-dir-alive"]


def test_a_process_whose_memory_nobody_keeps_any_more_leaves_nothing(end_new_process, made):
    folder = private_folder()
    with_child(folder, DEAD_PID)
    memory = [memory_of(made, OWN_PID), memory_of(made, DEAD_PID)]
    end_new_process()
    assert not folder.exists() and not any(one.exists() for one in memory)
