"""The log of several processes stays within its bound, and all of them write into the newest file."""

import logging

import hivemind
import pytest

from trahiv_cli.telemetry import rotating
from trahiv_cli.telemetry.rotating import OLDER_FILES, RotatingFile
from trahiv_cli.train.folder import log_to


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(rotating, "MAX_BYTES", 200)
    return tmp_path / "trahiv.log"


def test_two_that_write_in_turn_fill_one_file_after_the_other_and_the_oldest_go(path):
    files = RotatingFile(path), RotatingFile(path)
    for number in range(100):
        files[number % 2].emit(logging.makeLogRecord({"msg": f"line {number:04d}"}))
        assert path.read_text().splitlines()[-1] == f"line {number:04d}"
    for file in files:
        file.close()
    numbered = [path.with_name(f"trahiv.log.{number}") for number in range(OLDER_FILES, 0, -1)]
    assert sorted(path.parent.iterdir()) == sorted([path, *numbered])
    assert all(one.stat().st_size <= 200 for one in (*numbered, path))
    lines = [line for one in (*numbered, path) for line in one.read_text().splitlines()]
    assert lines == [f"line {number:04d}" for number in range(100 - len(lines), 100)]
    assert len(lines) > OLDER_FILES * 15


def test_a_peer_s_log_is_such_a_file(path, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(hivemind.utils.logging, "use_hivemind_log_handler", lambda where: None)
    level = root.level
    try:
        log_to(path, is_verbose=False)
        for number in range(20):
            logging.getLogger("a.library").warning("line %04d", number)
    finally:
        root.handlers[0].close()
        root.setLevel(level)
        logging.captureWarnings(False)
    assert path.stat().st_size <= 200 and path.read_text().endswith("line 0019\n")
