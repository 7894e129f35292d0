"""The processes of a program that `trahiv launch` runs: which one trains, and what it tells the first one.

`prelude/sitecustomize.py` calls `prepare` at the start of each Python process of the program. A process that
imports transformers' Trainer trains: it reads the same command line, `trahiv launch`, to enable the swarm.
A launcher between it and the user, such as accelerate's, must not end on Ctrl-C before it, and hides its exit
code: so the process that trains leaves its id and its exit code in a file. This module imports nothing heavy.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

import psutil

LAUNCH_VARIABLE = "TRAHIV_LAUNCH"
"""Environment variable with the words after `trahiv`, in JSON, completed by what the swarm's peers share."""

RESULT_VARIABLE = "TRAHIV_RESULT"
"""Environment variable with the path of a file with the `Result` of the process that trains."""

PAUSED_VARIABLE = "TRAHIV_PAUSED"
"""Environment variable with the folder of a peer that has restarted itself to pause."""

PRELUDE = Path(__file__).parent / "prelude"


def result() -> dict[str, int]:
    """Read the process id of the process that trains, and its exit code once it has one; maybe neither."""
    try:
        found: dict[str, int] = json.loads(Path(os.environ[RESULT_VARIABLE]).read_text())
        return found
    except (OSError, ValueError, KeyError):
        return {}


def note_result(**fields: int) -> None:
    """Write fields of the result, for the user's process."""
    Path(os.environ[RESULT_VARIABLE]).write_text(json.dumps(result() | fields))


class AfterTrainer(importlib.abc.MetaPathFinder):
    """Calls a function once the module `transformers.trainer` has been imported."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find that module as other finders do, and add the call to its loader."""
        if name != "transformers.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or multiprocessing.parent_process() is not None:
            return spec  # a worker of the program does not train
        return importlib.util.spec_from_file_location(
            name, spec.origin, loader=LoaderWithCall(name, spec.origin, self._call)
        )


class LoaderWithCall(SourceFileLoader):
    """Loads a module from its file, and calls a function after it."""

    def __init__(self, name: str, path: str, call: Callable[[], None]) -> None:
        super().__init__(name, path)
        self._call = call

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module's code, then the function."""
        super().exec_module(module)
        self._call()


def prepare(read_command_line: Callable[[], None]) -> None:
    """Prepare a process of the program before its own code runs.

    The process that trains calls `read_command_line`, which runs the command line of `trahiv launch` again.
    """
    sys.excepthook = report
    signal.signal(signal.SIGINT, interrupt)
    if PAUSED_VARIABLE in os.environ:
        read_command_line()
    else:
        sys.meta_path.insert(0, AfterTrainer(read_command_line))


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`, unless another process trains: that one leaves, and then this one ends."""
    pid = result().get("pid", os.getpid())
    if pid == os.getpid() or not psutil.pid_exists(pid):
        signal.default_int_handler(number, frame)


def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
    """Report an exception that ends the program: an error of ours as `trahiv` does, another one as Python."""
    from trahiv_cli.cli.output import out
    from trahiv_cli.errors import TrahivError

    found = result()
    if isinstance(error, TrahivError):
        out.error(error)
        note_result(code=error.exit_code)
        raise SystemExit(error.exit_code)
    if "code" in found and found["pid"] != os.getpid():  # a launcher, whose child has said why
        raise SystemExit(found["code"])
    sys.__excepthook__(kind, error, traceback)
