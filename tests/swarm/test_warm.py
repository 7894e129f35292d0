"""A command that is forked from a warm parent finds what a new process finds, and ends as it does."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kit import commands, warm
from tests.kit.commands import Workplace

PROBE = Path(commands.__file__).with_name("probe.py").read_text()

WORDS = ("join", "--peer", "ä b", "")

ENDS = {
    "nothing more": "print('é')",
    "a number": "import sys; print('x', end=''); sys.exit(3)",
    "a great number": "import sys; sys.exit(259)",
    "words": "import sys; sys.exit('ü: no')",
    "an error": "def f(): {}['no']\ntry: f()\nexcept KeyError as error: raise OSError(3) from error",
    "a syntax error": "def",
    "its own hook": "import sys; sys.excepthook = lambda *what: print(*what[:2]); raise ValueError('no')",
    "SIGTERM": "import os, time; os.kill(os.getpid(), 15); time.sleep(9)",
    "SIGKILL": "import os; print('lost'); os.kill(os.getpid(), 9)",
    "Ctrl-C": "import os, time; os.kill(os.getpid(), 2); time.sleep(9)",
    "a file that is closed": "import os; os.close(1); print('x')",
    "at once": "import os; print('lost'); os._exit(7)",
    "a callback": "import atexit; atexit.register(print, 'last'); print('first')",
    "a thread": "import threading; threading.Timer(0.2, print, ['last']).start(); print('first')",
}

OWN = """
import json, multiprocessing, random, tempfile, uuid
import numpy, torch
names = [str(uuid.uuid4()), tempfile.mktemp(), multiprocessing.current_process().authkey.hex()]
print(json.dumps([random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed(), *names]))
"""

LOCKS = """
from hivemind.utils.mpfuture import MPFuture, SharedBytes
locks = [MPFuture._initialization_lock, MPFuture._update_lock, SharedBytes._lock]
print(all([lock.acquire(timeout=1) for lock in locks]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with Workplace(tmp_path_factory.mktemp("warm")) as made:
        (made.folder / "probe.py").write_text(PROBE)
        yield made


def outcome(place: Workplace, *words: str, is_cold: bool = False) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python WORDS`."""
    env = place.environment(**{warm.MARK: "in-both"})
    command = [sys.executable, *words]
    process = commands.popen(command, place.folder, env, is_cold, stderr=subprocess.PIPE)
    assert isinstance(process, warm.Fork) is not is_cold
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def said(place: Workplace, *words: str, is_cold: bool = False) -> Any:
    code, out, err = outcome(place, *words, is_cold=is_cold)
    assert (code, err) == (0, "")
    return json.loads(out)


def assert_same(forked: dict[str, Any], fresh: dict[str, Any]) -> None:
    assert forked.keys() == fresh.keys()
    assert {name: (forked[name], fresh[name]) for name in fresh if forked[name] != fresh[name]} == {}


@pytest.mark.parametrize("program", [("-m", "probe"), ("-c", PROBE)], ids=["module", "script"])
def test_a_fork_finds_what_a_new_process_finds(place: Workplace, program: tuple[str, str]) -> None:
    said(place, "-c", "print(0)")  # the parent has its limits now
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files - 1, most_files))
    try:
        assert_same(said(place, *program, *WORDS), said(place, *program, *WORDS, is_cold=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most_files))


def test_libraries_are_as_if_just_imported(place: Workplace) -> None:
    words = ("-m", "probe", "--import", *warm.LIBRARIES)
    forked, fresh = said(place, *words), said(place, *words, is_cold=True)
    assert set(forked.pop("read")) == {"tempfile.tempdir"}
    assert set(fresh.pop("read")) == {"tempfile.tempdir", *warm.READ_AT_IMPORT}
    assert_same(forked, fresh)


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_as_a_new_process_does(place: Workplace, end: str) -> None:
    assert outcome(place, "-c", ENDS[end]) == outcome(place, "-c", ENDS[end], is_cold=True)


def test_forks_share_no_chance_and_no_lock(place: Workplace) -> None:
    ours, theirs = said(place, "-c", OWN), said(place, "-c", OWN)
    assert not set(ours) & set(theirs)
    assert outcome(place, "-c", LOCKS) == outcome(place, "-c", LOCKS) == (0, "True\n", ""), "all stay locked"


def test_other_environments_and_prefixes_start_anew(place: Workplace) -> None:
    parent, command = warm.Parent(place.environment()), [sys.executable, "-m", "trahiv_cli"]
    assert parent.can_fork(command, place.environment(TMPDIR="/elsewhere"))
    assert not parent.can_fork(command, place.environment(HF_HUB_OFFLINE="0"))
    assert not parent.can_fork(command, place.environment(TRAHIV_DEBUG="1"))
    assert not parent.can_fork(["env", *command], place.environment())
    assert not parent.can_fork([sys.executable, "-u", *command[1:]], place.environment())
    assert not parent.can_fork([*command, "x" * warm.ROOM], place.environment())


def test_forks_end_with_the_parent_and_the_parent_with_the_tests(place: Workplace) -> None:
    """As the kernel closes the socket of a process that is killed, this closes it."""
    parent, env = warm.Parent(place.environment(), libraries=[]), place.environment()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    options = {"cwd": place.folder, "env": env, "start_new_session": True, **pipes}
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    with warm.Fork(parent, command, **options) as fork:
        assert fork.stdout.readline() == b"here\n"
        server = parent._process
        assert psutil.Process(fork.pid).environ() == env
        assert psutil.Process(fork.pid).ppid() == psutil.Process(server.pid).ppid()
        with contextlib.closing(parent._socket):
            pass
        assert fork.wait(10) == -signal.SIGKILL
        assert server.wait(10) == 0
