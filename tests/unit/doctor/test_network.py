"""Checks of ports, of members' addresses, and of the reachability of a node, which is a stand-in.

Routers and firewalls are tested in `tests/swarm/test_doctor.py`.
"""

import itertools
import re
import socket

import pytest
from hivemind.p2p import PeerID

from tests.kit.fakes import FakeNode
from trahiv_cli.doctor import network
from trahiv_cli.doctor.checks import Check
from trahiv_cli.doctor.network import Network, examine_members, examine_ports, examine_reach
from trahiv_cli.errors import NotAdmitted, Unreachable
from trahiv_cli.members.invitation import Invitation
from trahiv_cli.reach.hole_punching import Seen
from trahiv_cli.reach.reachability import Reach
from trahiv_cli.recipe.schema import DhtSection

NAMES = [PeerID(b"\x12\x20" + bytes(31) + bytes([number])).to_base58() for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("ways", "missed", "said"),
    [
        ("dialled dialled", (), "You can train: directly with {0}, {1}."),
        ("relayed punched", (), "You can train: through both routers with {1}; through a member with {0}."),
        ("punched", NAMES[2:], "You can train: through both routers with {0}. Not connected in time: {2}."),
        ("", NAMES[1:], "You are connected with no peer. Not connected in time: {1}, {2}."),
    ],
)
def test_connection_ways_make_one_sentence(ways, missed, said):
    found = Network(dict(zip(NAMES, ways.split(), strict=False)), tuple(missed))
    assert found.sentence == said.format(*(f"...{name[-6:]}" for name in NAMES))


@pytest.fixture
def listening():
    """A port of 127.0.0.1 with a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def address(port):
    return f"/ip4/127.0.0.1/tcp/{port}"


def test_listening_address_is_examined(listening):
    taken, free = (examine_ports(DhtSection(host_maddrs=[address(port)])) for port in (listening, 0))
    assert taken.verdict == "bad"
    assert f"port {listening} is already in use" in taken.found
    assert "--host-maddr" in taken.fix
    assert free == Check("ports", "fine", f"{address(0)} can be listened on.")


def test_notes_on_ports_are_sentences():
    noted = examine_ports(DhtSection(host_maddrs=["/ip4/127.0.0.1/udp/0/quic"] * 2))
    assert noted.verdict == "fine"
    assert ". /ip4" in noted.found
    assert ".." not in noted.found


def test_unusable_announced_address_is_bad():
    section = DhtSection(host_maddrs=[address(0)], announce_maddrs=["/ip4/203.0.113.7"])
    assert examine_ports(section).verdict == "bad"


def test_one_answering_member_is_enough(listening):
    with socket.socket() as probe:  # bound, but without a listener
        probe.bind(("127.0.0.1", 0))
        silent = probe.getsockname()[1]
        found = examine_members(Invitation((address(silent), address(listening))))
        refused = examine_members(Invitation((address(silent),)))
    assert found == Check("members", "fine", "1 of 2 addresses answer")
    assert refused.verdict == "bad"
    assert re.match(f"0 of 1 addresses answer: .*nothing listens on port {silent}", refused.found)
    assert "a fresh `trahiv join`" in refused.fix


@pytest.fixture
def entered(monkeypatch):
    """`entered(reach)` gives the checks, by name, of a node with this reach or this failure."""

    def entered(reach, ahead_s=0.0, announced=()):
        def enter(*_, **__):
            if isinstance(reach, Exception):
                raise reach
            node = FakeNode()
            node.known_reach = lambda within_s: reach
            node.run = lambda coroutine: {}
            return node

        monkeypatch.setattr(network, "Node", enter)
        monkeypatch.setattr(network, "ahead_s", lambda: ahead_s)
        section = DhtSection(announce_maddrs=[f"/ip4/{host}/tcp/4001" for host in announced])
        found = examine_reach(Invitation((address(9),)), section, None)
        return {check.name: check for check in itertools.takewhile(lambda one: type(one) is Check, found)}

    return entered


HERE, ANOTHER = ("5.5.5.9", 4001), ("5.5.5.9", 4002)
DIALLED = Reach("direct", "", (HERE,), (Seen((ANOTHER,), (HERE,), False),))


def looked(*places, carries=True):
    return Reach("dials-out", "Nobody could.", looks=tuple(Seen((one,), (), carries) for one in places))


@pytest.mark.parametrize(
    ("reach", "announced", "wrong"),
    [
        (DIALLED, ["5.5.5.9"], {}),
        (DIALLED, ["9.9.9.9"], {"announced": "9.9.9.9 is announced, and members see 5.5.5.9."}),
        (looked(HERE), (), {"inbound": "Nobody could."}),
        (looked(HERE, HERE), (), {"inbound": "Nobody could."}),
        (looked(HERE, ANOTHER), (), {"inbound": "", "router": "another port for each destination"}),
        (looked(HERE, carries=False), (), {"inbound": "", "relay": "No member has room to relay"}),
        (Reach("alone", "Nobody is there."), ["9.9.9.9"], {"inbound": "Nobody is there."}),
    ],
)
def test_router_problem_has_own_check(entered, reach, announced, wrong):
    found = entered(reach, announced=announced)
    verdicts = {name: check.verdict for name, check in found.items() if check.verdict != "fine"}
    assert verdicts == {name: "bad" if name == "announced" else "poor" for name in wrong}
    for name, words in wrong.items():
        assert words in found[name].found
        assert found[name].fix


@pytest.mark.parametrize(
    ("ahead_s", "said"),
    [(-59.0, ""), (3600.0, "3600 s behind the swarm's"), (-60.0, "60 s ahead of the swarm's")],
)
def test_wrong_clock_is_poor(entered, ahead_s, said):
    check = entered(DIALLED, ahead_s)["clock"]
    assert check.verdict == ("poor" if said else "fine")
    assert said in check.found


@pytest.mark.parametrize(
    ("error", "name"), [(NotAdmitted("Out."), "membership"), (Unreachable("Gone."), "swarm")]
)
def test_refused_entry_is_one_check(entered, error, name):
    [check] = entered(error).values()
    assert check[:3] == (name, "bad", error.message)
