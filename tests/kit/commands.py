"""Real `trahiv` processes on 127.0.0.1: run one to its end, or start one and wait for its events.

Every process carries a mark that its descendants inherit, so that what it leaves behind can be found after
it is gone, and ended by process id. Nothing here sleeps and hopes: every wait is for a condition and has a
deadline, and what fails says which events came and what was on stderr.
"""

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import psutil

from tests.kit import warm
from tests.kit.warm import MARK

ROOT = Path(__file__).parents[2]
ORIGINAL = ROOT / "tests/kit/spanish_qlora.py"
"""The example of the original trahiv."""
LOOPBACK = ("--host-maddr", "/ip4/127.0.0.1/tcp/0")
"""Where a joiner listens too: libp2p does not pass on addresses of a kind that can't be routed, and another
address of this machine may be of that kind."""

STOP_S = 20.0  # a peer that is told to leave writes a checkpoint and says goodbye; after this it is killed
VANISH_S = 5.0  # what dies with its parent dies by a signal that the kernel sends, not all at the same time


def wait_until(condition, seconds=30):
    """Return as soon as a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


_marks = {}


def _marked(mark):
    """Living processes with this mark: parents die, sessions are left (torch_shm_manager), marks stay."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def children_of(pid):
    """Every living descendant of a process that was started here, which may have ended."""
    return [process for process in _marked(_marks[pid]) if process.pid != pid]


def left_by(pid):
    """What is still there of a process that has ended: processes and folders of sockets."""
    deadline = time.monotonic() + VANISH_S
    while (children := children_of(pid)) and time.monotonic() < deadline:
        psutil.wait_procs(children, timeout=0.1)
    left = [str(path) for path in Path("/tmp").glob(f"trahiv-{pid}-*")]
    for child in children:
        with contextlib.suppress(psutil.Error):
            left.append(f"process {child.pid}: {' '.join(child.cmdline())}")
    return left


def _end(pid):
    """Kill a process that was started here and everything that it started, and see them gone."""
    for process in (processes := _marked(_marks[pid])):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=VANISH_S)


class Peer:
    """A `trahiv` that runs, or has run, and what it said so far. What ran to its end has a code."""

    code: int
    seconds: float
    """How long it ran."""

    left: tuple[str, ...]
    """Processes, sockets and temporary files that outlived it; should be empty."""

    def __init__(self, command, cwd, env, log, is_cold=False):
        self.command = command
        self.cwd = cwd
        self._log = log
        self.events = []
        """Every object on stdout. Grows while the peer runs; reading it needs no lock."""
        self.out = ""
        """All of stdout."""
        self.noise = []
        """Lines on stdout that are not an event of `--format json`; there should be none."""

        self._said = threading.Condition()
        self._is_silent = False
        self._was_told = False
        with log.open("w") as errors:
            self._process = popen(command, cwd, env, is_cold, stderr=errors, errors="replace")
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name=f"stdout of {self.pid}", daemon=True)
        self._reader.start()

    @property
    def err(self):
        """What is on stderr so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def address(self):
        """What to join by, after `--peer`; waits for `ready`."""
        ready = self.wait_for("ready", timeout=60)
        return f"@{ready['invitation']}" if ready["invitation"] else ready["maddrs"][0]

    @property
    def maddr(self):
        """The first multiaddr; waits for `ready`."""
        return self.wait_for("ready", timeout=60)["maddrs"][0]

    @property
    def is_running(self):
        return self._process.poll() is None

    @property
    def steps(self):
        return [event for event in self.events if event["event"] == "step"]

    @property
    def errors(self):
        return [event for event in self.events if event["event"] == "error"]

    def wait_for_group(self, size=2, timeout=90, **fields):
        """Wait for the first step that was taken in a group of so many; see `wait_for`."""
        of_size = lambda one: bool(one) and len(one["group"]) == size  # noqa: E731
        return self.wait_for("step", timeout, round=of_size, **fields)

    def wait_for(self, event, timeout, **fields):
        """Wait for the first event of that name, past ones included, whose fields are as given.

        A field may be a value that it must equal, or a function of it:
        `wait_for("step", 30, step=lambda step: step >= 3)`.

        Raises:
            AssertionError: it did not come in `timeout` seconds, or the peer ended without it.
        """

        def fits(record):
            return record["event"] == event and all(
                name in record and (wanted(record[name]) if callable(wanted) else record[name] == wanted)
                for name, wanted in fields.items()
            )

        deadline = time.monotonic() + timeout
        seen = 0
        with self._said:
            while True:
                if found := next(filter(fits, self.events[seen:]), None):
                    return found
                seen = len(self.events)
                if self._is_silent:
                    raise AssertionError(self._story(f"ended without {event} {fields or ''}"))
                if not self._said.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise AssertionError(self._story(f"said no {event} {fields or ''} in {timeout} s"))

    def send_signal(self, number):
        """Send a signal to the process itself, not to its children."""
        self._was_told |= number in (signal.SIGINT, signal.SIGTERM)
        self._process.send_signal(number)

    def press_ctrl_c(self):
        """Send SIGINT to the process and all its children, as a terminal does."""
        self._was_told = True
        os.killpg(self.pid, signal.SIGINT)

    def exit_code(self, timeout):
        """Wait for the end; negative for the signal that killed it.

        Raises:
            AssertionError: it still runs after `timeout` seconds.
        """
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._story(f"still runs after {timeout} s")) from None
        self._reader.join(VANISH_S)
        return code

    def kill(self):
        """End the process itself as a power cut would."""
        self.send_signal(signal.SIGKILL)
        assert self.exit_code(10) == -signal.SIGKILL

    def ask_to_leave(self):
        """Send SIGTERM, unless it was told to leave before: twice means at once, without a goodbye."""
        if self.is_running:
            self.send_signal(signal.SIGCONT)  # a stopped process would not hear of it
            if not self._was_told:
                self.send_signal(signal.SIGTERM)

    def stop(self):
        """End it by process id, in good order if it can, and everything it started."""
        if self.is_running:
            self.ask_to_leave()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        _end(self.pid)
        self._reader.join(VANISH_S)
        if not self._reader.is_alive():
            self._process.stdout.close()

    def _read(self):
        for line in self._process.stdout:
            with self._said:
                self.out += line
                try:
                    event = json.loads(line)
                    is_event = event["v"] == 1
                except (ValueError, KeyError, TypeError):
                    is_event = False
                if is_event:
                    self.events.append(event)
                else:
                    self.noise.append(line)
                self._said.notify_all()
        with self._said:
            self._is_silent = True
            self._said.notify_all()

    def _story(self, what):
        events = "\n".join(f"  {event}" for event in self.events[-20:])
        code = self._process.poll()
        state = "running" if code is None else f"exit code {code}"
        return f"{' '.join(self.command)}\n{what} ({state})\nevents:\n{events}\nstderr:\n{self.err[-3000:]}"


@functools.cache
def _clean_environment():
    """What all commands have. Libraries derive folders from the home when they are imported."""
    home = Path(tempfile.mkdtemp(prefix="tt-home-", dir="/tmp"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return {
        "PYTHONPATH": str(ROOT),  # the code beside these tests
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),  # made in TMPDIR by the mere import
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@functools.cache
def _warm_parent():
    return warm.Parent(_clean_environment())


def popen(command, cwd, env, is_cold, **options):
    """Start a command: by a fork of the warm parent, unless that differs from a start or `is_cold` is set."""
    options = {
        "cwd": cwd,
        "env": dict(env),
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "encoding": "utf-8",
        "start_new_session": True,  # Ctrl-C at pytest is not for it: the fixture ends it in good order
        **options,
    }
    parent = _warm_parent()
    can_fork = not is_cold and parent.can_fork(command, env)
    process = warm.Fork(parent, command, **options) if can_fork else subprocess.Popen(command, **options)
    _marks[process.pid] = env[MARK]
    return process


class Workplace:
    """A folder in which commands run, with temporary files of their own.

    Use as a context manager: at the end it ends what it started, the last first.
    """

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Short: a unix socket's path may have at most 107 bytes, and pytest's folders are deep.
        self.temporary = Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp"))
        self.peers = []

    def run(self, *args, timeout=90, prefix=()):
        """Run `trahiv ARGS` to its end; after `timeout` seconds it is ended and the test fails.

        It runs behind `prefix`, a command that becomes it, such as `ip netns exec NAME`.
        """
        began = time.monotonic()
        peer = self._started([*prefix, sys.executable, "-m", "trahiv_cli", *map(str, args)])
        try:
            peer.code = peer.exit_code(timeout)
            peer.seconds = time.monotonic() - began
            left = left_by(peer.pid)
            if not any(other.is_running for other in self.peers):
                deadline = time.monotonic() + VANISH_S  # torch's keeper of memory ends after its clients
                while (files := list(self.temporary.iterdir())) and time.monotonic() < deadline:
                    time.sleep(0.05)
                left += map(str, files)
            peer.left = tuple(left)
        finally:
            peer.stop()
        return peer

    def start(
        self,
        *args,
        cwd=None,
        env=None,
        is_cold=False,
        pace_s=0.0,
        prefix=(),
    ):
        """Start `trahiv ARGS` behind `prefix`, with `--format json` unless another is named; it runs on.

        If it `is_cold`, it is a new interpreter, whatever a fork could do. A peer that trains all the time
        keeps a core busy, unless its batches take `pace_s` longer, in which it sleeps: see `paced_command`.
        """
        more = () if "--format" in args else ("--format", "json")
        what = ("tests.kit.paced_command", pace_s) if pace_s else ("trahiv_cli",)
        command = [*prefix, sys.executable, "-m", *map(str, (*what, *args, *more))]
        return self._started(command, cwd, env, is_cold)

    def start_script(self, script, *args, env=None, is_cold=False):
        """Start a Python script that says events on stdout as `trahiv` does, and leave it running.

        If it `is_cold`, it is a new interpreter, and nothing of what it prints waits in a buffer.
        """
        options = ["-u", "-c"] if is_cold else ["-c"]
        return self._started([sys.executable, *options, script, *map(str, args)], env=env, is_cold=is_cold)

    def _started(
        self,
        command,
        cwd=None,
        env=None,
        is_cold=False,
    ):
        log = self.folder / f"stderr-{len(self.peers)}.txt"
        env = self.environment(**(env or {}))
        self.peers.append(Peer(command, cwd or self.folder, env, log, is_cold))
        return self.peers[-1]

    def environment(self, **more):
        """Return a command's variables: nothing of the caller's but the path, no hub, no GPU, and `more`."""
        own = {"TMPDIR": str(self.temporary), MARK: uuid.uuid4().hex}
        return {**_clean_environment(), **own, **more}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for peer in reversed(self.peers):
            peer.ask_to_leave()  # all at once: each takes seconds
        for peer in reversed(self.peers):
            peer.stop()
        shutil.rmtree(self.temporary, ignore_errors=True)
