"""What unit tests of several rooms share."""

import pytest

from tests.kit.fakes import Clock
from trahiv_cli.errors import AssetError
from trahiv_cli.telemetry.events import Events


def refused(message, hint="", error=AssetError):
    """Expect an error; `message` and `hint` are patterns of its parts."""
    return pytest.raises(error, match=rf"({message})(.|\n)*hint: (.|\n)*({hint})" if hint else message)


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Write files below the working directory: path -> text; returns that folder."""
    monkeypatch.chdir(tmp_path)

    def put(texts):
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path

    return put


@pytest.fixture
def told():
    """All events of `events`."""
    return []


@pytest.fixture
def events(told):
    return Events(told.append)


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
