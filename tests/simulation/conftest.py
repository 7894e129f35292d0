"""What simulations share."""

import gc
import logging
import signal
import sys
from pathlib import Path

import pytest

from tests.kit.fakes import Clock

PROCESSOR_S = 180
"""How long a test may keep the processor busy, unless its mark `timeout` says otherwise."""


def pytest_collection_modifyitems(items):
    """Take off limits of wall-clock time: on a virtual clock, only processor time says that a test hangs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.fixture(autouse=True)
def _limited_processor_time(request):
    def stop(*_):
        pytest.fail(f"it took more than {seconds} s of processor time", pytrace=False)

    if sys.version_info < (3, 11, 5):  # its parser of code, which pytest shows, fails in greenlets
        request.config.option.tbstyle = "native"
    seconds = max(mark.args[0] for mark in request.node.iter_markers("timeout")) or PROCESSOR_S
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.fixture
def clock():
    clock = Clock()
    clock.now = 1000.0
    return clock


@pytest.fixture
def undisturbed():
    """Do without logs, and without collections but a run's own: they take a third of the time."""
    gc.collect()
    gc.freeze()  # what is there before the test
    gc.disable()
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.collect()  # greenlets that end in the midst of what others do confuse CPython
    gc.enable()
    gc.unfreeze()
