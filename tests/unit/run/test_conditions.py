"""Conditions under which a peer may use its machine, and how this machine answers."""

import datetime
import os
import shutil
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from trahiv_cli.run import conditions as module
from trahiv_cli.run.conditions import (
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
    """`tools(name=answer)` has these commands answer, and all others be missing; no terminal is open."""

    def tools(**answers):
        answers = {name.replace("_", "-"): answer for name, answer in answers.items()}

        def asked(name, *words):
            found = answers.get(name, "")
            return found(words) if callable(found) else found

        monkeypatch.setattr(module, "_asked", asked)
        monkeypatch.setattr(shutil, "which", answers.get)

    monkeypatch.setattr(module, "Path", lambda _: SimpleNamespace(glob=lambda _: ()))
    tools()
    return tools


UNKNOWN = ", idle 10, idle m, always, 25:00-07:00, 22:00, 22:00-07:60, gpu-free, gpu-free -1, not"


@pytest.mark.parametrize("text", UNKNOWN.split(", "))
def test_unknown_condition_lists_known_ones(text):
    with pytest.raises(
        ValueError, match="is not a condition; there are idle, .* mains .* gpu-free 8 .* not PROC"
    ):
        parse_condition(text)


def test_unsupported_condition_is_refused(tools):
    with pytest.raises(ValueError, match="needs nvidia-smi"):
        parse_condition("gpu-free 8")


@pytest.mark.parametrize(
    ("text", "check", "arguments"),
    [
        ("idle", "idle", (600,)),
        ("idle 30m", "idle", (1800,)),
        ("22:00-7:30", "hours", (datetime.time(22, 0), datetime.time(7, 30))),
        ("gpu-free 7.5", "gpu_free", (7.5,)),
        ("not My Game.exe", "process", ("My Game.exe",)),
    ],
)
def test_conditions_are_parsed(tools, monkeypatch, text, check, arguments):
    tools(nvidia_smi="there")
    monkeypatch.setattr(module, f"unmet_{check}", lambda *given: given)
    condition = parse_condition(text)
    assert condition.text == text
    assert condition.unmet() == arguments


def test_hours_may_cross_midnight():
    at = datetime.time.fromisoformat
    for start, end, inside, outside in (
        ("22:00", "07:00", "22:00 23:59 00:00 06:59", "07:00 21:59"),
        ("09:00", "17:00", "09:00", "17:00"),
    ):
        for times, unmet in ((inside, ""), (outside, f"it trains from {start} to {end}")):
            assert {unmet_hours(at(start), at(end), at(now)) for now in times.split()} == {unmet}


def test_running_program_is_found_by_name():
    own = psutil.Process().name()
    assert unmet_process(own) == f"{own} runs"
    assert unmet_process("no such game") == ""


def test_machine_on_battery_pauses(monkeypatch):
    batteries = [None, *(SimpleNamespace(power_plugged=state) for state in (True, None, False))]
    monkeypatch.setattr(psutil, "sensors_battery", iter(batteries).__next__, raising=False)
    assert [bool(unmet_mains()) for _ in batteries] == [False, False, False, True]


def test_terminal_input_counts_as_use():
    leader, terminal = os.openpty()
    try:
        os.utime(os.ttyname(terminal), (time.time() - 1, time.time()))
        assert 0.0 <= idle_seconds() < 60
        assert "this machine was used" in unmet_idle(60)
    finally:
        os.close(leader)
        os.close(terminal)


def test_xprintidle_reports_screen_use(tools, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    tools(xprintidle="90000\n")
    assert idle_seconds() == 90.0
    assert unmet_idle(60) == ""
    assert unmet_idle(91) != ""


def test_machine_without_screen_is_idle(tools, monkeypatch):
    assert unmet_idle(1e9) == ""
    monkeypatch.setenv("DISPLAY", ":0")
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
def test_logind_reports_desktop_idle_time(tools, kind, hint, since_s, seconds):
    since = "n/a" if since_s is None else int((time.time() - since_s) * 1e6)

    def loginctl(words):
        if words[0] == "show-seat":
            return "c2\n"
        return f"Type={kind}\nIdleHint={hint}\nIdleSinceHint={since}\n" if words[1] == "c2" else ""

    tools(loginctl=loginctl)
    assert module.screen_idle_seconds() == pytest.approx(seconds, abs=60)


@pytest.fixture
def gpu(tools):
    """What nvidia-smi says of the GPU, by option."""
    said = {"--query-gpu=memory.free": "2048\n"}
    tools(nvidia_smi=lambda words: next((text for word, text in said.items() if word in words), ""))
    return said


def test_own_gpu_memory_counts_as_free(gpu):
    gpu["--query-compute-apps=pid,used_memory"] = f"1, [N/A]\n77, 9000\n{os.getpid()}, 4096\n"
    assert unmet_gpu_free(6.0) == ""
    assert unmet_gpu_free(6.1) == "other programs leave 6.0 GiB of the GPU's memory"


def test_torch_tells_own_gpu_memory_in_container(gpu, monkeypatch):
    gpu["--query-compute-apps=pid,used_memory"] = "4711, 4096\n"  # of other ids
    cuda = SimpleNamespace(is_initialized=lambda: True, memory_reserved=lambda: 1536 * 2**20)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert unmet_gpu_free(4.0) == ""
    assert unmet_gpu_free(4.1) != ""


def test_silent_gpu_tool_is_refused(gpu):
    gpu["--query-gpu=memory.free"] = "Failed to initialize NVML"
    with pytest.raises(ValueError, match="does not say"):
        unmet_gpu_free(1.0)


def test_failing_or_missing_tool_is_silent():
    commands = ["false"], ["no-such-tool"], ["echo", "7"]
    assert [module._asked(*words) for words in commands] == ["", "", "7\n"]
