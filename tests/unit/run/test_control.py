"""Requests to the peer of a run's folder; real commands: `tests/swarm/test_guest.py`."""

from unittest import mock

import pytest

from trahiv_cli.errors import SetupError
from trahiv_cli.run import control
from trahiv_cli.run.control import REQUEST_FILE, forget_request, request, requested
from trahiv_cli.run.lock import RESOLVED, owned


@pytest.fixture
def folder(tmp_path):
    """The folder of a run whose peer trains."""
    (tmp_path / RESOLVED).write_text("{}")
    with owned(tmp_path):
        yield tmp_path


def test_request_stands_until_replaced_or_forgotten(folder):
    for what in ("pause", "finish", None, None, "pause"):
        request(folder, what)
        assert requested(folder) == what
    forget_request(folder)
    assert requested(folder) is None


@pytest.mark.parametrize("noise", [b"", b"dance", b"\xff"])
def test_unreadable_request_is_ignored(folder, noise):
    (folder / REQUEST_FILE).write_bytes(noise)
    assert requested(folder) is None


def test_pause_can_be_withdrawn_during_restart(tmp_path):
    (tmp_path / RESOLVED).write_text("{}")
    with owned(tmp_path):
        request(tmp_path, "pause")
    request(tmp_path, None)
    assert requested(tmp_path) is None
    with pytest.raises(SetupError, match="No peer trains in"):
        request(tmp_path, "finish")


def test_request_without_peer_is_refused(tmp_path):
    with pytest.raises(SetupError, match="No peer trains in"):
        request(tmp_path, "pause")
    with owned(tmp_path), pytest.raises(SetupError, match="No peer trains in"):  # a bootstrap node
        request(tmp_path, "pause")
    assert not (tmp_path / REQUEST_FILE).exists()


def test_full_disk_refuses_request(folder, monkeypatch):
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(control, "write_whole", mock.Mock(side_effect=full))
    with pytest.raises(SetupError, match="No space left on device; nothing was changed"):
        request(folder, "pause")
