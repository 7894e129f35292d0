"""Reports of a swarm's peers, through a child process that stands in for `trahiv status` here."""

import sys

import pytest

from trahiv_cli.cli.options import PEER_VARIABLE
from trahiv_cli.errors import TrahivError
from trahiv_cli.telemetry.events import PEERS_FILE
from trahiv_cli.watch.lookout import Follower, Seen

PEERS = '{"v": 1, "t": 1, "event": "peers", "run_id": "run-1", "peers": [{"peer_id": "QmA"}]}'
ERROR = '{"v": 1, "t": 1, "event": "error", "message": "No peer answers.", "hint": "start one"}'


@pytest.fixture
def follower(request):
    """`follower(lines)` follows a child that prints these lines, and then lives on for some seconds."""

    def follower(lines, seconds=0):
        one = Follower(["trahiv1:a", "trahiv1:b"], PEER_VARIABLE, again_s=0.0)
        assert one._command[1:] == ["-m", "trahiv_cli", "status", "--follow", "--format", "json"]
        script = f"import os, time; assert os.environ[{PEER_VARIABLE!r}] == 'trahiv1:a trahiv1:b'\n"
        script += f"print({lines!r}, flush=True); time.sleep({seconds})"
        one._command = [sys.executable, "-c", script]
        request.addfinalizer(one.close)
        return one

    return follower


def test_follower_restarts_ended_child(follower):
    look = follower(PEERS + '\n{"event": "something else"}')
    for _ in range(2):
        assert look()["peers"] == [{"peer_id": "QmA"}]
        assert [look(), look()] == [None, None]


def test_follower_raises_child_error(follower):
    with pytest.raises(TrahivError, match="No peer answers.") as caught:
        follower(ERROR)()
    assert caught.value.hint == "start one"


def test_closed_follower_ends_its_child(follower):
    look = follower(PEERS, seconds=600)
    look()
    look.close()
    assert look._child.wait(10) != 0


def test_peers_file_of_folder_is_read(tmp_path):
    seen = Seen(tmp_path)
    assert seen() is None
    for content, peers in (("", None), ("{", None), (PEERS, [{"peer_id": "QmA"}])):
        (tmp_path / PEERS_FILE).write_text(content)
        assert (seen() or {}).get("peers") == peers
