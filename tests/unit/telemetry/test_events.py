"""The event stream: listeners, files, and failures that never stop training."""

import json
import logging
import math
import queue
import re
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.cli.conftest import left_as_it_was
from trahiv_cli.run.folder import log_to
from trahiv_cli.telemetry import events
from trahiv_cli.telemetry.events import TRANSIENT, EventFile, Events, RotatingFile, to_json


def test_event_has_version_time_and_name(monkeypatch):
    monkeypatch.setattr(events.time, "time", lambda: 1700000000.12345)
    record = []
    listener = record.append
    stream = Events()
    stream.emit("before")
    stream.add(listener)
    stream.emit("checkpoint", step=3, path="here")
    for _ in range(2):
        stream.remove(listener)
        stream.emit("after")
    assert record == [{"v": 1, "t": 1700000000.123, "event": "checkpoint", "step": 3, "path": "here"}]


def test_event_json_is_one_valid_line():
    text = "für\nalle \u2028 \x1b[2J"
    line = to_json({"text": text, "round": {"group": [1.5, math.inf], "pair": (-math.inf, math.nan)}})
    assert "für" in line
    assert not re.search("[\n\x1b]", line)
    assert json.loads(line) == {"text": text, "round": {"group": [1.5, None], "pair": [None, None]}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_event_file_skips_transient_events(path):
    for step in (1, 2):  # a later run adds to the file
        file = EventFile(path)
        for name in ("progress", *TRANSIENT, "step"):
            Events(file).emit(name, step=step)
        assert steps_in(path) == [1, 2][:step], "before it is closed"
        file.close()
        file.close()


def test_half_line_of_killed_process_is_ended(path):
    path.write_text('{"step": 3, "ev')
    EventFile(path)({"event": "step"})
    assert path.read_text() == '{"step": 3, "ev\n{"event": "step"}\n'


def test_event_files_rotate_across_processes(path):
    processes = EventFile(path, 200), EventFile(path, 200)
    for step in range(100):
        processes[step % 2]({"event": "step", "step": step})  # 29 or 30 bytes
        assert steps_in(path)[-1] == step
    for file in processes:
        file.close()
    files = sorted(path.parent.iterdir(), reverse=True)
    assert [file.name.removeprefix("events.jsonl") for file in files] == [".3", ".2", ".1", ""]
    assert max(file.stat().st_size for file in files) <= 200
    numbers = [number for file in files for number in steps_in(file)]
    assert numbers == [*range(numbers[0], 100)]
    assert len(numbers) > 18


def test_peer_log_rotates(path):
    with left_as_it_was():
        log_to(path, is_verbose=False)
        [handler] = logging.getLogger().handlers
        logging.getLogger("a.library").warning("something")
    assert isinstance(handler, RotatingFile)
    assert path.read_text().endswith("something\n")


def test_full_disk_loses_only_whole_events(path, capfd):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = EventFile(path)
    lost = EventFile(path.with_name("lost"))
    file({"event": "step", "step": 0})
    try:  # a limit as on a disk that fills up: not enough for a line
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 7, hard))
        for step in (1, 2, 3):
            file({"event": "step", "step": step})
        lost({"event": "step", "text": "x" * 100})
        lost.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file({"event": "step", "step": 4})
    file.close()
    assert steps_in(path) == [0, 1, 4]
    assert capfd.readouterr().err == ""


def test_failing_listener_is_dropped_with_warning(path):
    record = []

    class Screen:
        def __call__(self, event):
            if event["event"] == "step":
                stream.emit("echo")
            raise OSError("no space left")

    def once(event):
        stream.remove(once)
        raise OSError("closed")

    stream = Events(Screen(), once, EventFile(path), record.append)
    stream.emit("step", step=1)
    stream.emit("step", step=object())  # not JSON
    stream.emit("step", step=3)
    assert sum(event["event"] == "step" for event in record) == 3
    warnings = [event for event in record if event["event"] == "warning"]
    assert {event["code"] for event in warnings} == {"telemetry"}
    assert all(event["hint"] for event in warnings)
    assert warnings[0]["message"] == "Screen failed (no space left); it gets no more events."
    assert warnings[-1]["message"].startswith("EventFile failed")


def test_events_of_threads_are_serialized():
    record = []
    inside = threading.Lock()

    def listener(event):
        assert inside.acquire(blocking=False), "another thread is told at the same time"
        record.append(event["step"])
        inside.release()

    stream = Events(listener)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda step: stream.emit("step", step=step), range(200)))
    assert sorted(record) == list(range(200))


def test_long_wait_is_reported_repeatedly():
    told = queue.Queue()
    stream = Events(told.put)
    with pytest.raises(KeyError), stream.waiting("nothing much", until_s=60):
        raise KeyError
    assert told.empty(), "it was short"
    with stream.waiting("the others", until_s=60.04, every_s=0.001) as tell:
        first, second = (told.get(timeout=10) for _ in range(2))
        tell("download", "half of it", 30.0, bytes=5)
        while (news := told.get(timeout=10))["event"] != "download":
            pass
        while told.get(timeout=10)["what"] != "half of it":
            pass
    assert not any(thread.name.startswith("waiting for") for thread in threading.enumerate())
    assert first == first | {"event": "waiting", "what": "the others", "until_seconds": 60.0}
    assert first["seconds"] <= second["seconds"]
    until_s = pytest.approx(30.0 + news["seconds"], abs=0.2)
    assert news == news | {"what": "half of it", "bytes": 5, "until_seconds": until_s}
