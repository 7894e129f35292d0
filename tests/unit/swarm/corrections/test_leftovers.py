"""What processes that are gone left is swept, and nothing else."""

import multiprocessing
import multiprocessing.util
import os
import shutil
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from trahiv_cli.swarm.corrections import processes
from trahiv_cli.swarm.corrections.processes import note_child, private_folder

DEAD_PID = 2**22 + 1  # above the kernel's largest pid
OWN_PID = DEAD_PID + 9  # the memory of this process is in use


@pytest.fixture
def end_new_process(monkeypatch):
    """Without a private folder as yet; what it does at its end is done."""
    at_its_end = []
    monkeypatch.setattr(processes, "_folders", {})
    monkeypatch.setattr(processes, "os", SimpleNamespace(getpid=lambda: OWN_PID))
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
def left_by():
    """`left_by(pid, child)` makes what a process and its child have: a folder, and memory of both."""
    made = []

    def leave(pid, child):
        folder = Path(f"/tmp/trahiv-{pid}-test{os.getpid()}")
        (folder / "children").mkdir(parents=True)
        (folder / "children" / str(child)).touch()
        memory = [Path(f"/dev/shm/torch_{one}_{os.getpid()}_0") for one in (pid, child)]
        for one in memory:
            one.touch()
        made.extend([folder, *memory])
        return made[-3:]

    yield leave
    for path in made:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            path.unlink()


def test_a_process_has_one_folder_that_fits_into_a_socket_path_and_goes_with_it(end_new_process):
    folder = private_folder()
    assert private_folder() == folder and folder.name.startswith(f"trahiv-{OWN_PID}-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(f"{folder}/p2pclient-0123456789abcdef0123456789abcdef.sock".encode()) <= 107
    assert multiprocessing.util.get_temp_dir() == str(folder)
    note_child(OWN_PID)
    assert [child.name for child in (folder / "children").iterdir()] == [str(OWN_PID)]
    end_new_process()
    assert not folder.exists()


def test_what_processes_that_are_gone_left_is_swept_and_nothing_else(
    end_new_process, left_by, monkeypatch, tmp_path
):
    dead, alive = left_by(DEAD_PID, DEAD_PID + 1), left_by(os.getppid(), DEAD_PID + 2)
    named = left_by("scout", DEAD_PID + 3)
    monkeypatch.setattr(processes.tempfile, "gettempdir", lambda: str(tmp_path))
    sockets = {name: socket.socket(socket.AF_UNIX) for name in ("dead", "alive")}
    for name, one in sockets.items():
        (tmp_path / f"torch-shm-dir-{name}").mkdir()
        one.bind(str(tmp_path / f"torch-shm-dir-{name}" / "manager.sock"))
    sockets["dead"].close()
    with sockets["alive"] as listens:
        listens.listen()
        private_folder()
    assert [path.name for path in tmp_path.iterdir()] == ["torch-shm-dir-alive"]
    assert not any(path.exists() for path in dead) and all(path.exists() for path in [*alive, *named])
