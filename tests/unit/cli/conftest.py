"""The command line within this process."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest

from trahiv_cli.cli import swarm
from trahiv_cli.cli.app import run

LOGGERS = ("", "hivemind", "transformers", "datasets")
"""Whose levels and handlers a command changes; the first is the root."""

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"


@contextlib.contextmanager
def left_as_it_was() -> Iterator[None]:
    """Give the process back as it was: its environment, and what libraries log, and where."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    with mock.patch.dict(os.environ):
        yield
    logging.captureWarnings(False)
    if hivemind_logging := sys.modules.get("hivemind.utils.logging"):
        hivemind_logging.use_hivemind_log_handler("in_hivemind")
    kept = {handler for *_, handlers in before for handler in handlers}
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        for handler in set(logger.handlers) - kept:
            handler.close()
        logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers


@pytest.fixture
def trahiv(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`trahiv("check", ...)` runs a command: its exit code, stdout and stderr."""

    def trahiv(*args: object) -> tuple[int, str, str]:
        capfd.readouterr()  # what a library said while the test made its files
        with left_as_it_was(), pytest.raises(SystemExit) as left:
            run([str(arg) for arg in args])
        said = capfd.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return trahiv


@pytest.fixture
def events(trahiv: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """`events("check", ...)` runs a command with `--format json`: its exit code and its events."""

    def events(*args: object) -> tuple[int, list[dict[str, Any]]]:
        code, out, err = trahiv(*args, "--format", "json")
        assert err == ""
        return code, [json.loads(line) for line in out.splitlines()]

    return events


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.fixture
def nothing_starts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a peer would be started."""
    monkeypatch.setattr(swarm, "live", lambda *_: pytest.fail("a peer would have been started"))
