"""Commands that are forked from one process that has imported the libraries, where each would import them.

`python -m trahiv_cli` takes 5 s of processor time to import torch, hivemind, datasets and transformers. Here
a `Parent` imports them once and forks; `Fork` is a `subprocess.Popen` of such a command. The command is a
child of the tests' process, as if that had started it, and has of its own what a new process has: arguments,
environment, folder, files, session, locks, random numbers. `tests/swarm/test_warm.py` compares.

Three differences remain. Strings have the same hashes in all commands of one parent, so sets of strings are
in the same order in them; a test that needs another order sets `is_cold`. The libraries are in `sys.modules`
before the command asks for them. The memory allocator of pyarrow has no thread, as in any process that was
forked by one that uses it.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

LIBRARIES = (
    "torch",
    "hivemind",
    "datasets",
    "transformers",
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.models.llama.modeling_llama",
    "torch._inductor.compile_fx",
)
"""What every peer imports, in its order, and then what takes long in what a peer imports after that.

None of it may say anything, as each command would have said it. So the commands import peft and
`transformers.trainer` themselves: these import bitsandbytes, which warns. No module of ours is here: what
one makes when it is imported, such as the shared memory of `swarm/clock.py`, belongs to one peer.
"""

MARK = "TEST_PROCESS"
"""A variable that every command has with a value of its own, and so have its descendants."""

FREE = {"TMPDIR", MARK}
"""Variables that may differ between a parent and its commands: a fork forgets where TMPDIR is."""

ROOM = 2**15
"""Bytes for a command's arguments, and for its environment, where the system shows them to others."""

START_S = 120.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
NAME = "warm parent"


class Parent:
    """A process that has imported the libraries and forks commands. It starts with the first command.

    It ends with this process, however that ends, and then ends what it has forked.

    Args:
        environment: variables with which the libraries are imported; those of `FREE` don't count.
        libraries: modules to import.
    """

    def __init__(self, environment, libraries=LIBRARIES):
        self._environment = _bound(environment)
        self._libraries = list(libraries)
        self._lock = threading.Lock()
        self._process = None

    def can_fork(self, command, environment):
        """Whether a fork would be the same as a new process: the same interpreter, the same environment."""
        is_python = list(command[:1]) == [sys.executable] and command[1:2] in (["-m"], ["-c"])
        return (
            sys.platform == "linux"
            and is_python
            and _bound(environment) == self._environment
            and max(map(len, _shown(command, environment))) <= ROOM
        )

    def fork(self, request, files):
        """Fork a command, with these files as its stdin, stdout and stderr, and return its process id."""
        with self._lock:
            if self._process is None:
                self._start()
            # The kernel gives a process whose parent has ended to the nearest ancestor that asked for such.
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                return int(self._answer())
            finally:
                ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _start(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_S)
        self._said = tempfile.TemporaryFile()
        namespace = {"__name__": NAME, "ARGUMENTS": (theirs.fileno(), self._libraries)}
        # `__main__` stays as it is in a new interpreter: this file is executed in a namespace of its own.
        boot = f"exec(compile(open({__file__!r}).read(), {__file__!r}, 'exec'), {namespace!r})"
        more = {"ROOM": "-" * ROOM, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot, "-" * ROOM],
                env=self._environment | more,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at pytest is not for it
            )
        atexit.register(self.close)
        assert self._answer() == b"ready"

    def _answer(self):
        answer = self._socket.recv(100)
        if not answer:
            self._said.seek(0)
            raise AssertionError(f"the {NAME} has ended: {self._said.read().decode(errors='replace')}")
        return answer

    def close(self):
        """End it, and all that it has forked."""
        self._socket.close()
        if self._process is not None:
            self._process.wait()


class Fork(subprocess.Popen):
    """A command that a parent forks in a session of its own; used like any `subprocess.Popen`."""

    def __init__(self, parent, command, **options):
        self._parent = parent
        super().__init__(command, **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        ends = rest[3:9]  # of pipes: of stdin to read and to write, the same of stdout and of stderr
        request = {"command": args, "environment": env, "cwd": os.fspath(cwd)}
        try:
            self.pid = self._parent.fork(request, (ends[0], ends[3], ends[5]))
            self._child_created = True
        finally:
            self._close_pipe_fds(*ends)


def _bound(environment):
    return {name: value for name, value in environment.items() if name not in FREE}


def _shown(command, environment):
    """What /proc/PID/cmdline and /proc/PID/environ show of them."""
    pairs = [f"{name}={value}" for name, value in environment.items()]
    return [b"".join(os.fsencode(word) + b"\0" for word in words) for words in (command, pairs)]


def _serve(connection, libraries):
    """Import, and fork as asked until the tests' process is gone. In a fork it returns after the command."""
    from trahiv_cli.cli.output import quiet_libraries

    quiet_libraries()
    for name in [name for name in sys.modules if name.partition(".")[0] == "trahiv_cli"]:
        del sys.modules[name]  # a command imports its own
    for name in libraries:
        importlib.import_module(name)
    from multiprocessing.synchronize import SemLock

    sys.stdout.flush()
    assert os.fstat(2).st_size == 0, "an import said something that each command would have said"
    # Locks that imports have made: forks would share them.
    locks = [one for one in gc.get_objects() if isinstance(one, SemLock)]
    gc.collect()
    gc.freeze()  # a collection in one fork would copy what all of them share
    connection.send(b"ready")
    forked = []
    while True:
        message, files, _, _ = socket.recv_fds(connection, 4 * ROOM, 3)
        ended, _, _ = select.select(forked, [], [], 0)
        for descriptor in forked if not message else ended:
            if not message:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        if not message:
            return
        forked = [descriptor for descriptor in forked if descriptor not in ended]
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"a fork would lose threads: {threads}"
        if (pid := _fork_for_grandparent()) == 0:
            connection.detach()
            _become(**json.loads(message), files=files, locks=locks)
            return
        forked.append(os.pidfd_open(pid))
        for file in files:
            os.close(file)
        connection.send(str(pid).encode())


def _fork_for_grandparent():
    """Fork a process that the tests' process adopts; 0 in that process, else its id."""
    reader, writer = os.pipe()
    if between := os.fork():
        os.close(writer)
        pid = int(os.read(reader, 20))
        os.close(reader)
        os.waitpid(between, 0)
        return pid
    between = os.getpid()
    if pid := os.fork():
        os.write(writer, str(pid).encode())
        os._exit(0)
    while os.getppid() == between:
        os.sched_yield()
    return 0


def _become(command, environment, cwd, files, locks):
    """Make this fork of the parent what a new process is, and run the command in it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.setsid()
    os.chdir(cwd)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    starts_and_ends = [int(fields[number - 3]) for number in range(48, 52)]  # man 5 proc_pid_stat
    places = zip(starts_and_ends[::2], starts_and_ends[1::2], strict=True)
    for block, (start, end) in zip(_shown(command, environment), places, strict=True):
        ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)
    os.environ.clear()  # and libc's
    os.environ.update(environment)
    _renew(locks)
    _, option, what, *words = command
    sys.orig_argv[:] = command
    sys.argv[:] = [option, *words]
    sys.path[0] = os.getcwd() if option == "-m" else ""
    if option == "-m":
        runpy._run_module_as_main(what)
    else:
        exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))


def _renew(locks):
    """Make anew what a process has of its own in Python: streams, locks, secrets, random numbers.

    The streams stay the objects to which loggers refer; Python chooses buffers by what kind of file is there
    (Python/pylifecycle.c, create_stdio). Its `random` seeds itself in a fork.
    """
    import multiprocessing.process

    import multiprocess.process
    import numpy as np

    for stream, mode in ((sys.stdin, "rb"), (sys.stdout, "wb"), (sys.stderr, "wb")):
        name = stream.name
        number = stream.fileno()
        buffer = open(number, mode, closefd=False)  # noqa: SIM115 - it stays open
        buffer.raw.name = name
        is_by_line = stream is sys.stderr or buffer.raw.isatty()
        stream.__init__(buffer, stream.encoding, stream.errors, newline="\n", line_buffering=is_by_line)
    for lock in locks:
        lock.__init__(ctx=multiprocessing.get_context())
    for module in (multiprocessing.process, multiprocess.process):
        module.current_process().authkey = os.urandom(32)
    np.random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    tempfile.tempdir = None
    threading.main_thread()._set_native_id()


if __name__ == NAME:
    number, modules = globals()["ARGUMENTS"]
    _serve(socket.socket(fileno=number), modules)
