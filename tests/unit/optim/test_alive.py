"""When a peer trains no further."""

import time
from types import SimpleNamespace

import pytest

from trahiv_cli.errors import NotAdmitted, PeerBroken
from trahiv_cli.optim.parts import Alive
from trahiv_cli.telemetry.events import Events


class Home:
    """The DHT's home: it runs, or not; this peer is a member, or not."""

    name = "the DHT's process"

    def __init__(self, runs=True, out=()):
        self._runs, self._out = runs, out

    def is_alive(self):
        return self._runs

    def pulse(self):
        return SimpleNamespace(done=lambda: False)

    def pids(self):
        return []

    def is_out(self, peer_id):
        return peer_id in self._out

    def require_membership(self):
        if "QmMe" in self._out:
            raise NotAdmitted("The owner of this swarm has taken this peer out.")


def test_a_peer_whose_process_failed_trains_no_further_and_says_so():
    told, wants_to_leave = [], []
    alive = Alive(Home(runs=False), Events(told.append), lambda: bool(wants_to_leave))
    alive.watch()
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(PeerBroken, match="The DHT's process has ended"):
        alive.require()
    assert alive.must_stop and [event["code"] for event in told] == ["broken"]
    wants_to_leave.append(True)
    alive.require()  # it leaves in good order, whatever failed
    assert alive.close() and not alive.close()


def test_a_peer_that_was_taken_out_trains_no_further():
    alive = Alive(Home(out={"QmMe", "QmB"}), Events(), lambda: False)
    with pytest.raises(NotAdmitted):
        alive.require()
    assert alive.is_out("QmB") and not alive.is_out("QmA") and not Alive(None, Events(), bool).is_out("QmB")
