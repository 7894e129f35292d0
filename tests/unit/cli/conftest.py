"""The command line within this process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator

import pytest

from trahiv_cli.cli.app import run

LOGGERS = ("", "hivemind", "transformers", "datasets")
"""Whose levels and handlers a command changes; the first is the root."""


@contextlib.contextmanager
def left_as_it_was() -> Iterator[None]:
    """Give the process back as it was: its environment, and what libraries log, and where."""
    environment = dict(os.environ)
    before = []
    for logger in map(logging.getLogger, LOGGERS):
        before.append((logger, logger.level, logger.propagate, logger.handlers[:]))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        logging.captureWarnings(False)
        if hivemind_logging := sys.modules.get("hivemind.utils.logging"):
            hivemind_logging.use_hivemind_log_handler("in_hivemind")
        kept = {handler for *_, handlers in before for handler in handlers}
        for logger, level, propagate, handlers in before:
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
