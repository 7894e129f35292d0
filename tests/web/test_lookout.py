"""Reports of a swarm's peers, through a child process that stands in for `trahiv status` here."""

import sys

import pytest

from tests.kit.commands import wait_until
from trahiv_cli.cli.options import PEER_VARIABLE
from trahiv_cli.errors import TrahivError
from trahiv_cli.telemetry.events import PEERS_FILE
from trahiv_cli.watch import lookout
from trahiv_cli.watch.lookout import Follower, Lookout, Seen

PEERS = '{"v": 1, "t": 1, "event": "peers", "run_id": "run-1", "peers": [{"peer_id": "QmA"}]}'
ERROR = '{"v": 1, "t": 1, "event": "error", "message": "No peer answers.", "hint": "start one"}'


@pytest.fixture
def follower(monkeypatch):
    """`follower(line, ...)` follows a child that prints these lines, and then ends or not."""
    monkeypatch.setattr(lookout, "AGAIN_S", 0.0)
    made = []

    def follower(*lines, ends=True):
        one = Follower(["trahiv1:a", "trahiv1:b"], PEER_VARIABLE)
        assert one._command[1:] == ["-m", "trahiv_cli", "status", "--follow", "--format", "json"]
        script = f"import os, time; assert os.environ[{PEER_VARIABLE!r}] == 'trahiv1:a trahiv1:b'\n"
        script += f"print({chr(10).join(lines)!r}, flush=True); time.sleep({0 if ends else 600})"
        one._command = [sys.executable, "-c", script]
        made.append(one)
        return one

    yield follower
    for one in made:
        one.close()


def test_follower_restarts_ended_child(follower):
    look = follower(PEERS, '{"event": "something else"}')
    for _ in range(2):
        assert look()["peers"] == [{"peer_id": "QmA"}]
        assert look() is None and look() is None


def test_follower_raises_child_error(follower):
    with pytest.raises(TrahivError, match="No peer answers.") as caught:
        follower(ERROR)()
    assert caught.value.hint == "start one"
    look = follower(PEERS, ends=False)
    look()
    child = look._child
    look.close()
    assert child.wait(10) != 0


def test_lookout_keeps_newest_report_or_error(follower):
    seen = Lookout(follower(PEERS, ends=False))
    wait_until(lambda: b'"QmA"' in seen.newest)
    troubled = Lookout(follower(ERROR, ends=False))
    wait_until(lambda: b'"trouble": "No peer answers."' in troubled.newest)


def test_peers_file_of_folder_is_read(tmp_path):
    seen = Seen(tmp_path)
    assert seen() is None
    for noise in ("", "{"):
        (tmp_path / PEERS_FILE).write_text(noise)
        assert seen() is None
    (tmp_path / PEERS_FILE).write_text(PEERS)
    assert seen()["peers"] == [{"peer_id": "QmA"}]
