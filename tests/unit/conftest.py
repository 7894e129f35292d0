"""What unit tests of several rooms share."""

import pytest


@pytest.fixture
def download(monkeypatch):
    """Adopt what a donor gives (metadata and tensors) as if it had come over the network."""
    from hivemind.averaging import DecentralizedAverager  # only tests that adopt something load it

    def adopt(averager, given):
        monkeypatch.setattr(DecentralizedAverager, "load_state_from_peers", lambda self, timeout: given)
        return averager.load_state_from_peers(timeout=1)

    return adopt
