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
    """Make a clock."""
    return Clock()


@pytest.fixture
def undisturbed():
    """Do without collections and logs, which take a third of the time, and bring chance into a run."""
    gc.collect()
    gc.disable()
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.enable()
