"""When a peer may use its machine: conditions of `--only-when`, looked at every few seconds."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

IDLE_S = 600.0
PROBE_S = 5.0  # a tool that is asked may take so long
MIB_IN_GIB = 1024

FORMS = """idle, idle 30m (nobody has typed, or moved the mouse, for so long), mains (not on battery),
22:00-07:00 (in these hours), gpu-free 8 (other programs leave so many GiB of the GPU's memory), or
not PROCESS (while no program of that name runs)"""


@dataclass(frozen=True)
class Condition:
    """One condition as it was written; `unmet` says, empty if it holds, why a peer must not train."""

    text: str
    unmet: Callable[[], str]


def parse_condition(text: str) -> Condition:
    """Read a condition; ValueError, with what there is, if it is none or this machine can't tell."""
    words = text.strip()
    if found := re.fullmatch(r"idle(?: (\d+)([smh]))?", words):
        seconds = int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found[1] else IDLE_S
        return Condition(text, lambda: unmet_idle(seconds))
    if words == "mains":
        return Condition(text, unmet_mains)
    if found := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)", words):
        hours = [datetime.time(int(found[at]), int(found[at + 1])) for at in (1, 3)]
        return Condition(text, lambda: unmet_hours(*hours))
    if found := re.fullmatch(r"gpu-free (\d+(?:\.\d+)?)", words):
        if shutil.which("nvidia-smi") is None:
            raise ValueError(f"{text!r} needs nvidia-smi, which is not on this machine")
        gib = float(found[1])
        return Condition(text, lambda: unmet_gpu_free(gib))
    if found := re.fullmatch(r"not (\S.*)", words):
        name = found[1]
        return Condition(text, lambda: unmet_process(name))
    raise ValueError(f"{text!r} is not a condition; there are {' '.join(FORMS.split())}")


def unmet_idle(seconds: float) -> str:
    """Object while somebody uses this machine: its terminals, or its screen where that can tell."""
    idle = idle_seconds()
    return f"this machine was used {idle:.0f} s ago" if idle < seconds else ""


def idle_seconds() -> float:
    """Return for how long nobody has typed in a terminal, or used the screen, of this machine.

    A terminal's time of access is when something was last read from it; the screen's is asked of `xprintidle`
    where there is one, and of logind.
    """
    used_at = [0.0]
    for terminal in (*Path("/dev/pts").glob("[0-9]*"), *Path("/dev").glob("tty[0-9]*")):
        with contextlib.suppress(OSError):
            used_at.append(terminal.stat().st_atime)
    idle = time.time() - max(used_at)
    if os.environ.get("DISPLAY") and shutil.which("xprintidle"):
        with contextlib.suppress(ValueError):
            idle = min(idle, int(_asked("xprintidle")) / 1000)
    if shutil.which("loginctl"):
        is_at_a_screen = os.environ.get("XDG_SESSION_TYPE") in ("x11", "wayland")
        if is_at_a_screen and "=no" in _asked("loginctl", "show-seat", "seat0", "-p", "IdleHint"):
            return 0.0
    return max(0.0, idle)


def unmet_mains() -> str:
    """Object while this machine runs on its battery; one without a battery is on mains."""
    battery = psutil.sensors_battery()
    return "this machine runs on its battery" if battery and battery.power_plugged is False else ""


def unmet_hours(start: datetime.time, end: datetime.time, now: datetime.time | None = None) -> str:
    """Object outside of these hours of this machine's clock, which may go over midnight."""
    now = now or datetime.datetime.now().time()
    is_in = start <= now < end if start < end else now >= start or now < end
    return "" if is_in else f"it trains from {start:%H:%M} to {end:%H:%M}"


def unmet_gpu_free(gib: float) -> str:
    """Object while other programs leave less of the GPU's memory. What this peer has taken counts as left."""
    query = "--format=csv,noheader,nounits"
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    free = _numbers(_asked("nvidia-smi", "-i", gpu, "--query-gpu=memory.free", query))
    used = _numbers(_asked("nvidia-smi", "-i", gpu, "--query-compute-apps=pid,used_memory", query))
    own = sum(mib for pid, mib in zip(used[::2], used[1::2], strict=False) if pid == os.getpid())
    left = (sum(free) + own) / MIB_IN_GIB
    return f"other programs leave {left:.1f} GiB of the GPU's memory" if left < gib else ""


def unmet_process(name: str) -> str:
    """Object while a program of this name runs."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == name:
            return f"{name} runs"
    return ""


def _asked(*command: str) -> str:
    """Return what a tool answers, and nothing if it fails or takes long."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=True).stdout
    return ""


def _numbers(text: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", text)]
