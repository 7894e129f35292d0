"""The event stream: listeners, files, and failures that never stop training."""

import json
import logging
import math
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.cli.conftest import left_as_it_was
from trahiv_cli.telemetry import events
from trahiv_cli.telemetry.events import OLDER_FILES, TRANSIENT, EventFile, Events, RotatingFile, to_json
from trahiv_cli.train.folder import log_to


def test_event_has_version_time_and_name(monkeypatch):
    monkeypatch.setattr(events.time, "time", lambda: 1700000000.12345)
    record, stream = [], Events()
    stream.emit("before")
    listener = record.append
    stream.add(listener)
    stream.emit("checkpoint", step=3, path="here")
    stream.remove(listener)
    stream.remove(listener)
    stream.emit("after")
    assert record == [{"v": 1, "t": 1700000000.123, "event": "checkpoint", "step": 3, "path": "here"}]


def test_event_json_is_one_valid_line():
    event = {"loss": math.nan, "round": {"group": [1.5, math.inf], "pair": (-math.inf, 2)}, "none": None}
    line = to_json(event | {"text": "für\nalle \u2028 \x1b[2J"})
    assert "\n" not in line and "\x1b" not in line and "für" in line
    read = {"loss": None, "round": {"group": [1.5, None], "pair": [None, 2]}, "none": None}
    assert json.loads(line) == read | {"text": "für\nalle \u2028 \x1b[2J"}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A path whose files are limited to 200 bytes."""
    monkeypatch.setattr(events, "MAX_BYTES", 200)
    return tmp_path / "events.jsonl"


def lines_of(path, key="step"):
    return [json.loads(line)[key] for line in path.read_text().splitlines()]


def test_event_file_skips_transient_events(path):
    assert "progress" in TRANSIENT
    for step in (1, 2):  # a later run adds to the file
        file = EventFile(path)
        for name in (*TRANSIENT, "step"):
            Events(file).emit(name, step=step, loss=float("nan"))
        assert lines_of(path) == [1, 2][:step], "before it is closed"
        file.close()
        file.close()
    assert (lines_of(path, "event"), lines_of(path, "loss")) == (["step"] * 2, [None] * 2)
    path.write_text('{"step": 3, "ev')  # by a process that was killed while the disk was full
    EventFile(path)({"event": "step"})
    assert path.read_text() == '{"step": 3, "ev\n{"event": "step"}\n'


def test_event_files_rotate_across_processes(path):
    processes = EventFile(path), EventFile(path)
    for step in range(100):
        processes[step % 2]({"event": "step", "step": step})  # 29 or 30 bytes
        assert lines_of(path)[-1] == step
    for file in processes:
        file.close()
    files = [*(path.with_name(f"{path.name}.{number}") for number in range(OLDER_FILES, 0, -1)), path]
    assert sorted(path.parent.iterdir()) == sorted(files)
    assert all(one.stat().st_size <= 200 for one in files)
    numbers = [number for one in files for number in lines_of(one)]
    assert numbers == list(range(numbers[0], 100)) and len(numbers) > OLDER_FILES * 6


def test_peer_log_rotates(path):
    with left_as_it_was():
        log_to(path, is_verbose=False)
        [handler] = logging.getLogger().handlers
        logging.getLogger("a.library").warning("something")
    assert isinstance(handler, RotatingFile) and path.read_text().endswith("something\n")


def test_full_disk_loses_only_whole_events(path, capfd):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file, lost = EventFile(path), EventFile(path.with_name("lost"))
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
    assert lines_of(path) == [0, 1, 4] and capfd.readouterr().err == ""


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

    file = EventFile(path)
    stream = Events(Screen(), once, file, record.append)
    stream.emit("step", step=1)
    stream.emit("eval", loss=object())  # not JSON
    stream.emit("step", step=2)
    file.close()
    told = [event["event"] for event in record if "step" in event or "loss" in event]
    assert told == ["step", "eval", "step"]
    warnings = [event for event in record if event["event"] == "warning"]
    assert {event["code"] for event in warnings} == {"telemetry"} and all(event["hint"] for event in warnings)
    assert warnings[0]["message"] == "Screen failed (no space left); it gets no more events."
    assert warnings[-1]["message"].startswith("EventFile failed")


def test_events_of_threads_are_serialized():
    record, inside = [], threading.Lock()

    def listener(event):
        assert inside.acquire(blocking=False), "another thread is told at the same time"
        record.append(event["step"])
        inside.release()

    stream = Events(listener)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda step: stream.emit("step", step=step), range(200)))
    assert sorted(record) == list(range(200))


def test_long_wait_is_reported_repeatedly(monkeypatch):
    record, said = [], threading.Semaphore(0)

    def listener(event):
        record.append(event)
        if event["event"] == "waiting":
            said.release()

    with pytest.raises(KeyError), Events(listener).waiting("nothing much", until_s=60):
        raise KeyError
    assert record == [], "it was short"
    monkeypatch.setattr(events, "SAY_AFTER_S", 0.001)
    with Events(listener).waiting("the others", until_s=60.04) as tell:
        assert said.acquire(timeout=10) and said.acquire(timeout=10)
        tell("download", "half of it", 30.0, bytes=5)
        while record[-1]["what"] != "half of it" or record[-1]["event"] != "waiting":
            assert said.acquire(timeout=10)
    assert not any(thread.name.startswith("waiting for") for thread in threading.enumerate())
    first = [record[0][key] for key in ("event", "what", "until_seconds")]
    assert first == ["waiting", "the others", 60.0]
    assert record[0]["seconds"] <= record[1]["seconds"]
    [news] = [event for event in record if event["event"] == "download"]
    assert (news["what"], news["bytes"]) == ("half of it", 5)
    assert news["until_seconds"] == pytest.approx(30.0 + news["seconds"], abs=0.2)
