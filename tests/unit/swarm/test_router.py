"""Port forwarding by a home router; `Box` stands in for it, below miniupnpc."""

import pytest

from trahiv_cli.swarm import router
from trahiv_cli.swarm.router import LEASE_S, Forwarded, Router

PORT, LAN, PUBLIC = 4001, "192.168.1.20", "5.5.5.1"


class Box:
    """A router that answers as `miniupnpc.UPnP` does, which raises nothing narrower than `Exception`."""

    lanaddr = LAN

    def __init__(self, outside=PUBLIC, fails_at=""):
        self.outside, self.fails_at, self.forwards, self.forgotten = outside, fails_at, {}, []

    def __call__(self, discoverdelay):
        assert 0 < 4 * discoverdelay <= 2000, "milliseconds"
        return self

    def _answer(self, name, given=None):
        if name == self.fails_at:
            raise Exception("ConflictInMappingEntry")
        return given

    def discover(self):
        return self._answer("discover", 1)

    def selectigd(self):
        return self._answer("selectigd", "http://192.168.1.1:5000/control")

    def externalipaddress(self):
        return self._answer("externalipaddress", self.outside)

    def addportmapping(self, port, protocol, host, inside, name, remote, lease_s):
        self._answer("addportmapping")
        self.forwards[port, protocol] = host, inside, name, remote, lease_s
        return True

    def deleteportmapping(self, port, protocol):
        self._answer("deleteportmapping")
        self.forgotten.append(self.forwards.pop((port, protocol), "nothing"))


@pytest.fixture
def asked(monkeypatch):
    """Ask a box for a port."""

    def ask(box):
        monkeypatch.setattr(router.miniupnpc, "UPnP", box)
        made = Router()
        return made, made.forward(PORT)

    return ask


def test_port_is_forwarded_until_close(asked):
    made, said = asked(box := Box())
    mapping = {(PORT, "TCP"): (LAN, PORT, "trahiv", "", LEASE_S)}
    assert said == Forwarded(PUBLIC, f"The router forwards port {PORT} from {PUBLIC}.")
    assert box.forwards == mapping
    assert made.forward(PORT) == said and box.forwards == mapping, "for another lease"
    for _ in range(2):
        made.close()
        assert box.forgotten == [*mapping.values()], "once"


@pytest.mark.parametrize("outside", ["100.64.0.9", "192.168.0.3", "", "0.0.0.0"])
def test_nested_router_forwards_no_public_port(asked, outside):
    made, said = asked(box := Box(outside))
    assert said.host == "" and "behind another one" in said.why and f"calls it {outside}." in said.why
    assert box.forwards
    made.close()
    assert box.forwards == {}


@pytest.mark.parametrize(
    ("fails_at", "words"),
    [
        ("discover", "No router answers here"),
        ("selectigd", "No router answers here"),
        ("externalipaddress", f"does not forward port {PORT}: ConflictInMappingEntry."),
        ("addportmapping", f"does not forward port {PORT}: ConflictInMappingEntry."),
    ],
)
def test_failed_forwarding_is_reported(asked, fails_at, words):
    made, said = asked(box := Box(fails_at=fails_at))
    assert said.host == "" and words in said.why
    box.fails_at = "deleteportmapping"
    made.close()
    assert made.forward(PORT).host == PUBLIC
    made.close()  # a router that is gone by then causes no error
