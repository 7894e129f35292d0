"""Conditions of `--only-when`, under which a peer may use its machine. It checks them every few seconds."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Condition:
    """One condition, as the user wrote it; `unmet()` returns why it does not hold, or an empty text."""

    text: str
    unmet: Callable[[], str]


def parse_condition(text: str) -> Condition:
    """Parse a condition; raises ValueError if it has an unknown form, or this machine can't check it."""
    words = text.strip()
    if found := re.fullmatch(r"idle(?: (\d+)([smh]))?", words):
        seconds = int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found[1] else 600
        return Condition(text, partial(unmet_idle, seconds))
    if words == "mains":
        return Condition(text, unmet_mains)
    if found := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)", words):
        hours = [datetime.time(int(found[at]), int(found[at + 1])) for at in (1, 3)]
        return Condition(text, partial(unmet_hours, *hours))
    if found := re.fullmatch(r"gpu-free (\d+(?:\.\d+)?)", words):
        if shutil.which("nvidia-smi") is None:
            raise ValueError(f"{text!r} needs nvidia-smi, which is not on this machine")
        return Condition(text, partial(unmet_gpu_free, float(found[1])))
    if found := re.fullmatch(r"not (\S.*)", words):
        return Condition(text, partial(unmet_process, found[1]))
    raise ValueError(
        f"{text!r} is not a condition; there are idle, idle 30m (nobody has typed, or moved the mouse, for "
        "so long), mains (not on battery), 22:00-07:00 (in these hours), gpu-free 8 (other programs leave "
        "so many GiB of the GPU's memory), or not PROCESS (while no program of that name runs)"
    )


def unmet_idle(seconds: float) -> str:
    """Return a reason if a terminal or the screen was used within the last `seconds`."""
    idle = idle_seconds()
    return f"this machine was used {idle:.0f} s ago" if idle < seconds else ""


def idle_seconds() -> float:
    """Return the seconds since the last input in a terminal or on the screen of this machine.

    A terminal's access time is the time of the last read from it. The screen's idle time comes from
    `xprintidle` if it works, else from logind, if the desktop reports it there.
    """
    used_at = [0.0]
    for terminal in (*Path("/dev/pts").glob("[0-9]*"), *Path("/dev").glob("tty[0-9]*")):
        with contextlib.suppress(OSError):
            used_at.append(terminal.stat().st_atime)
    idle = max(0.0, time.time() - max(used_at))
    screen = screen_idle_seconds()
    return idle if screen is None else min(idle, screen)


def screen_idle_seconds() -> float | None:
    """Return the seconds since the last use of the screen; None without a screen or a tool to ask."""
    if os.environ.get("DISPLAY") and (idle_ms := _asked("xprintidle").strip()).isdigit():
        return int(idle_ms) / 1000
    session = _asked("loginctl", "show-seat", "seat0", "-p", "ActiveSession", "--value").strip()
    if not session:
        return None
    wanted = ("-p", "Type", "-p", "IdleHint", "-p", "IdleSinceHint")
    lines = _asked("loginctl", "show-session", session, *wanted).splitlines()
    fields = dict(line.partition("=")[::2] for line in lines)
    if fields.get("Type") not in ("x11", "wayland"):
        return None
    since = fields.get("IdleSinceHint", "")  # microseconds
    is_idle = fields.get("IdleHint") == "yes" and since.isdigit()
    return max(0.0, time.time() - int(since) / 1e6) if is_idle else 0.0


def unmet_mains() -> str:
    """Return a reason if this machine runs on its battery; a machine without a battery is on mains."""
    battery = psutil.sensors_battery()
    return "this machine runs on its battery" if battery and battery.power_plugged is False else ""


def unmet_hours(start: datetime.time, end: datetime.time, now: datetime.time | None = None) -> str:
    """Return a reason outside of these hours of the local clock; they may include midnight."""
    now = now or datetime.datetime.now().time()
    is_in = start <= now < end if start < end else now >= start or now < end
    return "" if is_in else f"it trains from {start:%H:%M} to {end:%H:%M}"


def unmet_gpu_free(gib: float) -> str:
    """Return a reason if other programs leave less than `gib` GiB of the GPU's memory.

    This peer's own memory counts as left. It is read from nvidia-smi, or from torch in a container, where
    nvidia-smi lists other process ids. Raises `ValueError` if nvidia-smi does not tell the free memory.
    """
    options = "--format=csv,noheader,nounits"
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    free = _asked("nvidia-smi", "-i", gpu, "--query-gpu=memory.free", options).strip()
    if not free.isdigit():
        raise ValueError("nvidia-smi does not say how much memory is free")
    apps = _asked("nvidia-smi", "-i", gpu, "--query-compute-apps=pid,used_memory", options)
    own = re.search(rf"^{os.getpid()}, (\d+)$", apps, re.MULTILINE)
    left = (int(free) + (int(own[1]) if own else taken_mib())) / 1024
    return f"other programs leave {left:.1f} GiB of the GPU's memory" if left < gib else ""


def taken_mib() -> int:
    """Return the GPU memory in MiB that torch and CUDA use in this process, without importing torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    context_mib = 512  # approximately, in each process
    return int(torch.cuda.memory_reserved()) // 2**20 + context_mib


def unmet_process(name: str) -> str:
    """Return a reason if a program of this name runs."""
    running = (process.info["name"] for process in psutil.process_iter(["name"]))
    return f"{name} runs" if name in running else ""


def _asked(*command: str) -> str:
    """Return a tool's output, or an empty text if it fails or takes more than 5 s."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    return ""
