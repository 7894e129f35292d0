"""A forked command starts in the same state as a new process; its end is tested elsewhere in this folder."""

import json
import signal
import subprocess
import sys

import psutil
import pytest

from tests.kit import commands, warm
from tests.kit.commands import Workplace

FINDS = """
import gc, json, os, re, signal, sys, threading
block = lambda name: open(f"/proc/self/{name}", "rb").read().rstrip(b"\\0").decode().split("\\0")
streams = [
    [one.encoding, one.errors, one.line_buffering, one.isatty(), one.name, one.mode, str(one.buffer)]
    for one in (sys.stdin, sys.stdout, sys.stderr)
]
found = {
    "arguments": [sys.argv, sys.orig_argv, block("cmdline")],
    "environment": [dict(os.environ), block("environ")],
    "folders": [os.getcwd(), sys.path],
    "descriptors": [number for number in range(4096) if os.path.exists(f"/proc/self/fd/{number}")],
    "streams": streams,
    "family": [os.getppid(), os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "signals": {number: str(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
    "limits": block("limits"),
    "masks": re.findall("(?:Sig[^Q]|ShdP).*", open("/proc/self/status").read()),  # SigQ: the whole user's
    "threads": [threading.get_native_id() == os.getpid(), len(os.listdir("/proc/self/task"))],
    "main": [sorted(vars(sys.modules["__main__"])), gc.isenabled()],
}
print(json.dumps(found))
"""

OWN = """
import json, multiprocessing, random, tempfile, uuid
import numpy, torch
from hivemind.utils.mpfuture import MPFuture, SharedBytes
names = [str(uuid.uuid4()), tempfile.mktemp(), multiprocessing.current_process().authkey.hex()]
for lock in (MPFuture._initialization_lock, MPFuture._update_lock, SharedBytes._lock):
    assert lock.acquire(timeout=1)
print(json.dumps([random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed(), *names]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with Workplace(tmp_path_factory.mktemp("warm")) as made:
        (made.folder / "finds.py").write_text(FINDS)
        yield made


def said(place, *words, is_cold=False):
    """What `python WORDS` printed, as JSON."""
    env = place.environment(**{warm.MARK: "in-both"})
    process = commands.popen([sys.executable, *words], place.folder, env, is_cold, stderr=subprocess.PIPE)
    assert isinstance(process, warm.Fork) is not is_cold
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize("words", [("-c", FINDS, "--peer", "ä b", ""), ("-m", "finds", "join")], ids=len)
def test_fork_matches_fresh_process(place, words):
    forked, fresh = said(place, *words), said(place, *words, is_cold=True)
    assert forked == fresh


def test_forks_share_no_randomness_or_lock(place):
    """Each takes all locks and keeps them."""
    assert not set(said(place, "-c", OWN)) & set(said(place, "-c", OWN))


def test_forks_end_with_parent(place):
    """This closes the socket, as the kernel does for a process that is killed."""
    parent, env = warm.Parent(place.environment(), libraries=[]), place.environment()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    options = {"cwd": place.folder, "env": env, "start_new_session": True, **pipes}
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    with warm.Fork(parent, command, **options) as fork:
        assert fork.stdout.readline() == b"here\n"
        assert psutil.Process(fork.pid).environ() == env
        assert psutil.Process(fork.pid).ppid() == psutil.Process().pid
        parent.close()
        assert fork.wait(10) == -signal.SIGKILL
