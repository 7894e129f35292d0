"""`trahiv doctor` behind each kind of router and firewall: each cause has its own sentence."""

import multiprocessing as mp
import subprocess
import threading
from contextlib import contextmanager, suppress
from typing import NamedTuple

import pytest

from tests.kit.commands import Workplace
from tests.kit.homes import Home, addresses_of
from tests.kit.nat import UDP
from tests.kit.upnp import be_gateway
from tests.kit.wan import IS_POSSIBLE, NEEDS, Wan, home_address_of, routers_of
from tests.swarm.conftest import told

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not IS_POSSIBLE, reason=NEEDS),
]

MEMBERS = 2  # the first hosts of each network
DOCTORS = {
    "public": [],
    "one router": [{}],
    "symmetric": [{"maps": "symmetric"}],
    "no UDP": [{"blocked": (UDP,)}],
    "HTTPS alone": [{"only": (443,)}],
    "no route": [],
}


class Place(NamedTuple):
    """A network with members, and a folder for commands."""

    wan: Wan
    workplace: Workplace
    entrance: str

    def examine(self, host, *more, hub="http://127.0.0.1:9"):
        """Run `trahiv doctor` on a host; there is nothing at the `hub`."""
        inside = "nsenter", f"--net={self.wan.namespace(MEMBERS + host)}", "env", f"HF_ENDPOINT={hub}"
        words = ("doctor", "--peer", self.entrance, "--format", "json", *more)
        return self.workplace.run(*words, prefix=inside)


@contextmanager
def place_of(folder, *kinds, **how):
    """Two public members, and hosts behind routers of these kinds; `how` is for `Home`."""
    with Wan(MEMBERS + len(kinds), 20.0, 20.0, homes=routers_of([[], [], *kinds])) as wan:
        first = Home(wan, 0, folder, **how)
        [address] = [one for one in first.ask(addresses_of) if "/ip4/5." in one]
        second = Home(wan, 1, folder, [address], **how)
        assert second.peer_id
        with Workplace(folder) as workplace:
            yield Place(wan, workplace, address)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with place_of(tmp_path_factory.mktemp("doctors"), *DOCTORS.values()) as place:
        yield place


def found(doctor):
    """The doctor's findings by check name, and its last sentence as `verdict`."""
    said = {event["name"]: event["found"] for event in told(doctor.events, "check")}
    return said | {"verdict": doctor.events[-1]["message"]}


CANNOT_DIAL = "2 tried to dial this peer, and could not. No router answers here"


@pytest.mark.parametrize(
    "kind, more, words, code",
    [
        (
            "public",
            "",
            {
                "inbound": "Members can dial this peer at 5.5.5.3",
                "hub": "127.0.0.1:9 does not answer",
                "clock": "as the swarm's",
                "speed": "Mbit/s back",
            },
            0,
        ),
        ("public", "--announce-maddr /ip4/9.9.9.9/tcp/9", {"announced": "members see 5.5.5.3"}, 3),
        ("one router", "", {"inbound": CANNOT_DIAL}, 0),
        ("symmetric", "", {"router": "another port for each destination"}, 0),
        ("no UDP", "", {"inbound": CANNOT_DIAL}, 0),
        ("HTTPS alone", "", {"members": "so a firewall on the way lets nothing else out"}, 4),
        ("no route", "", {"members": "has no route to any of them"}, 4),
    ],
)
def test_doctor_names_network_cause(place, kind, more, words, code):
    host = list(DOCTORS).index(kind)
    if kind == "no route":
        inside = "nsenter", f"--net={place.wan.namespace(MEMBERS + host)}"
        subprocess.run([*inside, "ip", "link", "set", "wan0", "down"], check=True)
    doctor = place.examine(host, *more.split())
    said = found(doctor)
    assert all(part in said[name] for name, part in words.items()), said
    assert doctor.code == code
    assert ("You can train: directly with" in said["verdict"]) == (not code)


def test_doctor_reports_clock_relay_and_dead_members(tmp_path):
    with place_of(tmp_path, [{}], relay_mbit=0.0, ahead_s=3600.0) as place:
        said = found(place.examine(0))
        assert "is 3600 s behind the swarm's" in said["clock"]
        assert "No member has room to relay" in said["relay"]
        nobody = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
        gone = place._replace(entrance=f"/ip4/5.5.5.1/tcp/9/p2p/{nobody}")
        doctor = gone.examine(0, hub="https://hub.example")
        assert doctor.code == 4
        assert "0 of 1 addresses answer" in found(doctor)["members"]
        assert "ask for a fresh `trahiv join` line" in doctor.out
        assert "hub.example could not be resolved" in found(doctor)["hub"]


def agree(pipe):
    """Let a router confirm every request."""
    with suppress(EOFError):
        while pipe.recv():
            pipe.send("done")


@pytest.mark.parametrize(
    "outside, words",
    [
        ("5.5.5.3", "from 5.5.5.3. But no member could connect through it."),
        ("100.64.2.9", "but is itself behind another one, which calls it 100.64.2.9."),
    ],
)
def test_ineffective_port_forwarding_is_reported(tmp_path, outside, words):
    with place_of(tmp_path, [{}]) as place:
        pipe, its = mp.Pipe()
        place.wan.spawn(MEMBERS, be_gateway, (home_address_of(MEMBERS), outside, its))
        assert pipe.recv() == "listens"
        threading.Thread(target=agree, args=(pipe,), daemon=True).start()
        assert words in found(place.examine(0))["inbound"]
