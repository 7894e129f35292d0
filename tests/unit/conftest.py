"""What unit tests of several rooms share."""

import pytest


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    """Make a clock that stands at 0; modules with another idea of time have a fixture of their own."""
    return Clock()


@pytest.fixture
def download():
    """Adopt what a donor gives (metadata and tensors) as if it had come over the network."""
    # Only tests that adopt something load it.
    from tests.kit.states import Giving

    def adopt(state, given, **more):
        options = {"is_believed": lambda *_: True, "is_wanted": lambda: True}
        options["set_pace"] = lambda pace: state.committed.change(pace=pace)
        own = state.committed.now.history.rank
        return Giving(state, given).load(donors=["A"], rank=own, lowest=own, silence_s=1.0, **options | more)

    return adopt
