"""The command line within this process."""

import contextlib
import json
import logging
import os
import sys
from unittest import mock

import datasets
import pytest

from trahiv_cli.cli import swarm
from trahiv_cli.cli.app import run

LOGGERS = [logging.getLogger(name) for name in (None, "hivemind", "transformers", "datasets")]
"""Whose levels and handlers a command changes; the first is the root."""

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"


@contextlib.contextmanager
def left_as_it_was():
    """Give the process back as it was: its environment, and what libraries log, and where."""
    before = [(logger, logger.level, logger.propagate, logger.handlers[:]) for logger in LOGGERS]
    with mock.patch.dict(os.environ):
        yield
    logging.captureWarnings(False)
    if hivemind_logging := sys.modules.get("hivemind.utils.logging"):
        hivemind_logging.use_hivemind_log_handler("in_hivemind")
    kept = {handler for *_, handlers in before for handler in handlers}
    for logger, level, propagate, handlers in before:
        for handler in {*logger.handlers} - kept:
            handler.close()
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers


@pytest.fixture
def trahiv(capfd):
    """`trahiv("check a.yaml", ..., code=2)` runs a command, which ends with this code: its stdout and stderr.

    Words that may have blanks in them are given one by one, after the line.
    """

    def trahiv(line, *words, code=0):
        capfd.readouterr()  # what a library said while the test made its files
        with left_as_it_was(), pytest.raises(SystemExit) as left:
            run([*line.split(), *map(str, words)])
        said = capfd.readouterr()
        assert (left.value.code or 0) == code, said
        return said

    return trahiv


@pytest.fixture
def events(trahiv):
    """`events("check a.yaml", ..., code=2)` runs a command with `--format json`: its events."""

    def events(line, *words, code=0):
        said = trahiv(line, *words, "--format", "json", code=code)
        assert said.err == ""
        return [json.loads(line) for line in said.out.splitlines()]

    return events


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.fixture
def write_rows(here):
    """`write_rows([row])` makes the file `rows.jsonl`."""
    return lambda rows: (here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def nothing_starts(here, monkeypatch):
    """Fail where a peer would be started."""
    monkeypatch.setattr(swarm, "live", lambda *_: pytest.fail("a peer would have been started"))
