"""What simulations share."""

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
