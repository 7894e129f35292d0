"""Conditions under which a peer may use its machine, and how this machine answers."""

import datetime
import os
import shutil
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from trahiv_cli.train import conditions as module
from trahiv_cli.train.conditions import (
    idle_seconds,
    parse_condition,
    unmet_gpu_free,
    unmet_hours,
    unmet_idle,
    unmet_mains,
    unmet_process,
)


@pytest.fixture
def tools(monkeypatch):
    """`tools(name=answer)` has these commands answer, and all others be missing."""

    def tools(**answers):
        def asked(name, *words):
            found = answers.get(name.replace("-", "_"), "")
            return found(words) if callable(found) else found

        monkeypatch.setattr(module, "_asked", asked)
        is_there = {name.replace("_", "-") for name in answers}
        monkeypatch.setattr(shutil, "which", lambda name: name if name in is_there else None)

    tools()
    return tools


@pytest.mark.parametrize(
    "text",
    [
        "",
        "idle 10",
        "idle m",
        "always",
        "25:00-07:00",
        "22:00",
        "22:00-07:60",
        "gpu-free",
        "gpu-free -1",
        "not",
    ],
)
def test_unknown_condition_lists_known_ones(tools, text):
    tools(nvidia_smi="")
    with pytest.raises(
        ValueError, match="is not a condition; there are idle, .* mains .* gpu-free 8 .* not PROC"
    ):
        parse_condition(text)


def test_unsupported_condition_is_refused(tools):
    with pytest.raises(ValueError, match="needs nvidia-smi"):
        parse_condition("gpu-free 8")


def test_conditions_are_parsed(tools, monkeypatch):
    tools(nvidia_smi="")
    said = {}
    for name in ("idle", "hours", "gpu_free", "process"):
        monkeypatch.setattr(
            module, f"unmet_{name}", lambda *args, name=name: said.__setitem__(name, args) or ""
        )
    for text in ("idle 30m", "22:00-7:30", "gpu-free 7.5", "not My Game.exe"):
        condition = parse_condition(text)
        assert condition.text == text and condition.unmet() == ""
    hours = (datetime.time(22, 0), datetime.time(7, 30))
    assert said == {"idle": (1800,), "hours": hours, "gpu_free": (7.5,), "process": ("My Game.exe",)}
    parse_condition("idle").unmet()
    assert said["idle"] == (module.IDLE_S,)


@pytest.mark.parametrize(
    ("hours", "is_in", "is_out"),
    [
        ("22:00-07:00", ("22:00", "23:59", "00:00", "06:59"), ("07:00", "21:59")),
        ("09:00-17:00", ("9:00",), ("17:00",)),
    ],
)
def test_hours_may_cross_midnight(hours, is_in, is_out):
    def at(text):
        return datetime.time(*map(int, text.split(":")))

    start, end = map(at, hours.split("-"))
    assert all(unmet_hours(start, end, at(now)) == "" for now in is_in)
    assert {unmet_hours(start, end, at(now)) for now in is_out} == {
        f"it trains from {hours.replace('-', ' to ')}"
    }


def test_running_program_is_found_by_name():
    own = psutil.Process().name()
    assert unmet_process(own) == f"{own} runs" and unmet_process("no such game") == ""


def test_machine_on_battery_pauses(monkeypatch):
    for battery, is_unmet in ((None, False), (True, False), (None, False), (False, True)):
        state = None if battery is None else SimpleNamespace(power_plugged=battery)
        monkeypatch.setattr(psutil, "sensors_battery", lambda state=state: state, raising=False)
        assert bool(unmet_mains()) == is_unmet


def test_terminal_input_counts_as_use(tools):
    leader, terminal = os.openpty()
    try:
        os.utime(os.ttyname(terminal), (time.time() - 1, time.time()))
        assert 0.0 <= idle_seconds() < 60 and "this machine was used" in unmet_idle(60)
    finally:
        os.close(leader)
        os.close(terminal)


def test_xprintidle_reports_screen_use(tools, monkeypatch):
    monkeypatch.setattr(module, "Path", lambda _: SimpleNamespace(glob=lambda _: ()))  # no terminal
    assert unmet_idle(1e9) == ""
    monkeypatch.setenv("DISPLAY", ":0")
    tools(xprintidle="90000\n")
    assert idle_seconds() == 90.0 and unmet_idle(60) == "" and unmet_idle(91) != ""
    tools(xprintidle="no screen")
    assert unmet_idle(1e9) == ""


@pytest.mark.parametrize(
    ("kind", "hint", "since_s", "seconds"),
    [
        ("wayland", "no", 0, 0.0),
        ("x11", "yes", 900, 900.0),
        ("x11", "yes", None, 0.0),
        ("tty", "no", 0, None),
    ],
)
def test_logind_reports_desktop_idle_time(tools, monkeypatch, kind, hint, since_s, seconds):
    monkeypatch.setattr(module, "Path", lambda _: SimpleNamespace(glob=lambda _: ()))
    now = time.time()

    def loginctl(words):
        if words[0] == "show-seat":
            return "c2\n"
        since = "n/a" if since_s is None else int((now - since_s) * 1e6)
        return f"Type={kind}\nIdleHint={hint}\nIdleSinceHint={since}\n" if words[1] == "c2" else ""

    tools(loginctl=loginctl, xprintidle="")
    found = module.screen_idle_seconds()
    assert found is None if seconds is None else found == pytest.approx(seconds, abs=60)
    tools(loginctl="")
    assert module.screen_idle_seconds() is None, "nobody is logged in"


def test_own_gpu_memory_counts_as_free(tools, monkeypatch):
    said = {"--query-gpu=memory.free": "2048\n"}
    tools(nvidia_smi=lambda words: next((text for word, text in said.items() if word in words), ""))
    said["--query-compute-apps=pid,used_memory"] = f"1, [N/A]\n77, 9000\n{os.getpid()}, 4096\n"
    assert unmet_gpu_free(6.0) == ""
    assert unmet_gpu_free(6.1) == "other programs leave 6.0 GiB of the GPU's memory"
    said["--query-compute-apps=pid,used_memory"] = "4711, 4096\n"  # a container's processes have other ids
    cuda = SimpleNamespace(is_initialized=lambda: True, memory_reserved=lambda: 1536 * 2**20)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert unmet_gpu_free(4.0) == "" and unmet_gpu_free(4.1) != ""
    said["--query-gpu=memory.free"] = "Failed to initialize NVML"
    with pytest.raises(ValueError, match="does not say"):
        unmet_gpu_free(1.0)


def test_failing_or_missing_tool_is_silent():
    assert (
        module._asked("false") == module._asked("no-such-tool") == "" and module._asked("echo", "7") == "7\n"
    )
