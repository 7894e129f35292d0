"""How a page reads a run's folder while a peer writes there."""

import json

import pytest

from tests.web.recorded import step, write
from trahiv_cli.telemetry.events import EventFile
from trahiv_cli.watch.tail import Recording, Tail


def everything(tail):
    """The steps that are read until two reads are empty: after a renaming, the old file is read once more."""
    found = []
    silences = 0
    while silences < 2:
        lines = tail.read()
        silences = 0 if lines else silences + 1
        found += [json.loads(line)["step"] for line in lines]
    return found


@pytest.fixture
def writer(tmp_path):
    """A peer's file of events that is full after some ten steps."""
    file = EventFile(tmp_path / "events.jsonl", max_bytes=3000)
    yield lambda numbers: [file(step(1.0, number, 2.0)) for number in numbers]
    file.close()


@pytest.mark.parametrize("at_a_time", [1, 7, 25])
def test_rotated_events_are_read_once_in_order(writer, tmp_path, at_a_time):
    writer(range(20))
    assert (tmp_path / "events.jsonl.1").exists()
    tail = Tail(tmp_path)
    found = everything(tail)
    for first in range(20, 220, at_a_time):
        writer(range(first, min(220, first + at_a_time)))
        found += everything(tail)
    assert found == [*range(220)]
    tail.close()


def test_late_lines_of_renamed_file_are_read(tmp_path):
    write(tmp_path, [step(1.0, 1, 2.0)])
    tail = Tail(tmp_path)
    assert everything(tail) == [1]
    (tmp_path / "events.jsonl").rename(tmp_path / "events.jsonl.1")
    write(tmp_path, [step(3.0, 3, 2.0)])
    assert tail.read() == []
    write(tmp_path, [step(2.0, 2, 2.0)], "events.jsonl.1")
    assert everything(tail) == [2, 3]


FIRST, SECOND = (json.dumps(step(1.0, number, 2.0)) for number in (1, 2))


def test_half_line_waits_for_its_end(tmp_path):
    tail = Tail(tmp_path)
    for content, steps in ((f"{FIRST}\n{SECOND[:40]}", [1]), (f"{FIRST}\n{SECOND}\n", [2])):
        assert tail.read() == []
        (tmp_path / "events.jsonl").write_text(content)
        assert everything(tail) == steps


@pytest.mark.parametrize(
    "broken", [SECOND[:40], '{"t": NaN, "event": "step"}', '["step"]', '{"event": "step"}', "", "\xff"]
)
def test_broken_line_is_skipped(tmp_path, broken):
    (tmp_path / "events.jsonl").write_text(f"{broken}\n{FIRST}\n", encoding="latin-1")
    assert everything(Tail(tmp_path)) == [1]


def test_recordings_are_merged_by_time(tmp_path):
    for name, times in (("mine", (1.0, 3.0, 3.5)), ("theirs", (0.5, 2.0, 9.0))):
        write(tmp_path / name, [step(t, 1, 2.0) for t in times])
    recording = Recording([tmp_path / "mine", tmp_path / "theirs"])
    labels = {event["t"]: event["of"] for event in map(json.loads, recording.read())}
    assert [*labels] == sorted(labels)
    assert [*labels.values()] == ["theirs", "mine", "theirs", "mine", "mine", "theirs"]
    assert recording.read() == []
