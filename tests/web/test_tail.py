"""How a page reads a run's folder while a peer writes there."""

import json

import pytest

from tests.web import recorded
from trahiv_cli.telemetry import events
from trahiv_cli.telemetry.events import EventFile
from trahiv_cli.watch.tail import Recording, Tail


def everything(tail: Tail) -> list[int]:
    """The steps that are read until two reads are empty: after a renaming, the old file is read once more."""
    found, silences = [], 0
    while silences < 2:
        lines = tail.read()
        silences = 0 if lines else silences + 1
        found += [json.loads(line)["step"] for line in lines]
    return found


@pytest.fixture
def writer(tmp_path, monkeypatch):
    """A peer's file of events that is full after some ten steps."""
    monkeypatch.setattr(events, "MAX_BYTES", 3000)
    file = EventFile(tmp_path / "events.jsonl")
    yield lambda first, last: [file(recorded.step(1.0, number, 2.0)) for number in range(first, last)]
    file.close()


@pytest.mark.parametrize("at_a_time", [1, 7, 25], ids=lambda number: f"{number}-a-look")
def test_rotated_events_are_read_once_in_order(writer, tmp_path, at_a_time):
    writer(0, 20)
    tail = Tail(tmp_path)
    assert everything(tail) == [*range(20)]
    assert (tmp_path / "events.jsonl.1").exists()
    found = []
    for first in range(20, 220, at_a_time):
        writer(first, min(220, first + at_a_time))
        found += everything(tail)
    assert found == [*range(20, 220)]
    tail.close()


def test_late_lines_of_renamed_file_are_read(tmp_path):
    recorded.write(tmp_path, [recorded.step(1.0, 1, 2.0)])
    tail = Tail(tmp_path)
    assert everything(tail) == [1]
    (tmp_path / "events.jsonl").rename(tmp_path / "events.jsonl.1")
    recorded.write(tmp_path, [recorded.step(3.0, 3, 2.0)])
    assert tail.read() == []
    recorded.write(tmp_path, [recorded.step(2.0, 2, 2.0)], "events.jsonl.1")
    assert everything(tail) == [2, 3]


def test_half_lines_wait_broken_lines_are_skipped(tmp_path):
    tail, path = Tail(tmp_path), tmp_path / "events.jsonl"
    assert tail.read() == []
    first, second = (json.dumps(recorded.step(1.0, number, 2.0)) for number in (1, 2))
    path.write_text(first + "\n" + second[:40])
    assert everything(tail) == [1]
    path.write_text(first + "\n" + second + "\n")
    assert everything(tail) == [2]
    sound = json.dumps(recorded.step(1.0, 3, 2.0))
    for broken in (second[:40], '{"t": NaN, "event": "step"}', '["step"]', '{"event": "step"}', "", "\xff"):
        with path.open("a", encoding="latin-1") as file:
            file.write(f"{broken}\n")
    with path.open("a") as file:
        file.write(sound + "\n")
    assert everything(tail) == [3]


def test_recordings_are_merged_by_time(tmp_path):
    for name, times in (("mine", (1.0, 3.0, 3.5)), ("theirs", (0.5, 2.0, 9.0))):
        recorded.write(tmp_path / name, [recorded.step(t, 1, 2.0) for t in times])
    recording = Recording([tmp_path / "mine", tmp_path / "theirs"])
    read = [json.loads(line) for line in recording.read()]
    assert [(one["t"], one["of"]) for one in read] == [
        *((0.5, "theirs"), (1.0, "mine"), (2.0, "theirs")),
        *((3.0, "mine"), (3.5, "mine"), (9.0, "theirs")),
    ]
    assert recording.read() == []
