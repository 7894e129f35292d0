"""A script that says on stdout, as JSON, what it finds of itself at its start and with libraries imported.

It imports what is named after `--import`, as a command does.
"""

import atexit
import ctypes
import gc
import importlib
import json
import locale
import os
import resource
import signal
import sys
import threading
import warnings
from typing import Any

LIBC = ctypes.CDLL(None)
LIBC.getenv.restype = ctypes.c_char_p
PR_GET_PDEATHSIG = 2  # linux/prctl.h
MAIN = sys.modules["__main__"]


def at_start() -> dict[str, Any]:
    main_thread = threading.main_thread()
    return {
        "arguments": [sys.argv, sys.orig_argv, _shown("cmdline")],
        "environment": [dict(os.environ), _shown("environ")],
        "C's environment": [str(LIBC.getenv(name)) for name in (b"LANG", b"TMPDIR", b"ROOM")],
        "interpreter": [sys.executable, str(sys.flags), sys.warnoptions, sys.getfilesystemencoding()],
        "recursion": sys.getrecursionlimit(),
        "folders": [os.getcwd(), sys.path],
        "main": sorted(vars(MAIN)),
        "main's names": [str(getattr(MAIN, name)) for name in ("__name__", "__package__", "__builtins__")],
        "main's loader": getattr(MAIN.__loader__, "__name__", str(type(MAIN.__loader__))),
        "main's spec": [getattr(MAIN.__spec__, name, None) for name in ("name", "origin", "parent")],
        "descriptors": [n for n in range(4096) if os.path.exists(f"/proc/self/fd/{n}")],
        "stdin": os.readlink("/proc/self/fd/0"),
        "streams": [_stream(one) for one in (sys.stdin, sys.stdout, sys.stderr)],
        "originals": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        "limits": [resource.getrlimit(number) for number in range(16)],
        "umask": os.umask(0o77),
        "processor": [os.nice(0), sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0)],
        "family": [os.getppid(), os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), _death_signal()],
        "masks": _masks(),
        "signals": {number: str(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
        "wakeup": [signal.set_wakeup_fd(-1), signal.getitimer(signal.ITIMER_REAL)],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "tracing": [sys.gettrace(), sys.getprofile(), sys.getswitchinterval()],
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks],
        "locale": locale.getlocale(),
        "threads": [one.name for one in threading.enumerate()],
        "number of threads": len(os.listdir("/proc/self/task")),
        "thread": [number == os.getpid() for number in (threading.get_native_id(), main_thread.native_id)],
        "our modules": [name for name in sys.modules if name.partition(".")[0] in ("tests", "trahiv_cli")],
    }


def after_imports(names: list[str]) -> dict[str, Any]:
    from trahiv_cli.cli.libraries import quiet_libraries

    quiet_libraries()
    for name in names:
        importlib.import_module(name)
    import asyncio
    import logging
    import multiprocessing
    import tempfile

    import datasets.config
    import huggingface_hub.constants
    import torch
    import transformers.utils.hub

    vars(transformers.utils.hub).pop("SESSION_ID")  # by chance; hubs are told it
    loggers = {name: one for name, one in logging.root.manager.loggerDict.items() if hasattr(one, "level")}
    return {
        "loggers": {name: _logger(one) for name, one in loggers.items()} | {"": _logger(logging.root)},
        "logging": [logging.root.manager.disable, str(logging.lastResort), logging.raiseExceptions],
        "warnings": [str(one) for one in warnings.filters],
        "callbacks at exit": atexit._ncallbacks(),
        "constants": [
            {name: _constant(value) for name, value in vars(module).items() if name.isupper()}
            for module in (huggingface_hub.constants, datasets.config, transformers.utils.hub)
        ],
        "torch": [torch.get_num_threads(), str(torch.get_default_dtype())],
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "multiprocessing": [multiprocessing.get_start_method(), multiprocessing.current_process().name],
        "event loops": str(type(asyncio.get_event_loop_policy())),
        "temporary folder": tempfile.gettempdir(),
        "read": _where(os.environ["TMPDIR"]) + _where(os.environ["TEST_PROCESS"]),
        "modules": sorted(sys.modules),
        "main's other name": sys.modules["__mp_main__"] is MAIN,
    }


def _where(text: str) -> list[str]:
    """Variables of modules that have this text in their values."""
    return [
        f"{module.__name__}.{name}"
        for module in list(sys.modules.values())
        for name, value in list(vars(module).items())
        if issubclass(type(value), (str, os.PathLike)) and text in str(value)  # isinstance asks the value
    ]


def _shown(file: str) -> list[str]:
    """What others see: words that end in a zero byte, of which there may be more at the end."""
    with open(f"/proc/self/{file}", "rb") as block:
        return os.fsdecode(block.read().rstrip(b"\0")).split("\0")


def _masks() -> list[str]:
    """Signals that are pending, blocked, ignored and caught."""
    with open("/proc/self/status") as status:
        return [line for line in status if line.startswith(("SigP", "SigB", "SigI", "SigC", "ShdP"))]


def _stream(one: Any) -> list[object]:
    raw = one.buffer.raw
    text = [one.encoding, one.errors, one.line_buffering, one.write_through, one.isatty(), one.name, one.mode]
    return [*text, one.fileno(), one.newlines, str(one.buffer), raw.name, raw.mode, raw.closefd, raw._blksize]


def _constant(value: Any) -> object:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(type(value)) if type(value) is object else str(value)


def _logger(one: Any) -> list[object]:
    handlers = [
        [str(type(each)), each.level, getattr(each, "stream", None) is sys.stderr] for each in one.handlers
    ]
    return [one.level, one.disabled, one.propagate, len(one.filters), handlers]


def _death_signal() -> int:
    number = ctypes.c_int()
    LIBC.prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


found = at_start()
if "--import" in sys.argv:
    found |= after_imports(sys.argv[sys.argv.index("--import") + 1 :])
print(json.dumps(found))
