"""What simulations share."""

import gc
import logging

import pytest


class Clock:
    """Seconds that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


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
