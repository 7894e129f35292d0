"""`trahiv doctor` turns checks into lines, a verdict, an exit code. The modules that look are stand-ins."""

from types import SimpleNamespace

import pytest

from tests.kit.recipes import write_tiny
from tests.unit.cli.conftest import ADDRESS
from trahiv_cli.doctor import machine, network
from trahiv_cli.doctor.checks import Check
from trahiv_cli.doctor.network import Network

FINE, POOR = Check("disk", "fine", "9 GiB are free", "much", "nothing"), Check("gpu", "poor", "None is here.")
ALICE, BOB = "QmAlice00000001", "QmBob0000000002"
BOTH = Network({ALICE: "dialled", BOB: "relayed"}, ())


def bad(name):
    return Check(name, "bad", f"The {name} won't do.", "another one", "buy one")


@pytest.fixture
def looks(here, monkeypatch):
    """The findings of each module, and what they were asked about."""
    looks = SimpleNamespace(machine=[], ports=FINE, members=FINE, network=[BOTH], entered=None)

    def examine_machine(recipe, folder):
        looks.recipe = recipe
        looks.folder = folder
        return looks.machine

    def examine_reach(invitation, section, folder):
        looks.entered = invitation, section
        return looks.network

    monkeypatch.setattr(machine, "examine_machine", examine_machine)
    monkeypatch.setattr(machine, "names", lambda: FINE._replace(name="hub"))
    monkeypatch.setattr(network, "examine_ports", lambda _: looks.ports)
    monkeypatch.setattr(network, "examine_members", lambda _: looks.members)
    monkeypatch.setattr(network, "examine_reach", examine_reach)
    return looks


@pytest.mark.parametrize(
    ("found", "code", "verdict"),
    [
        ({}, 0, "directly with ...000001; through a member with ...000002."),
        ({"machine": [POOR], "network": [BOTH, POOR]}, 0, "You can train: directly with"),
        ({"network": []}, 0, "You can train here; `--peer LINE` says with whom."),
        ({"machine": [bad("packages"), FINE]}, 3, "You can't train here yet: see packages."),
        ({"machine": [bad("memory")]}, 6, "see memory."),
        ({"ports": bad("ports")}, 3, "see ports."),
        ({"members": bad("members")}, 4, "see members."),
        ({"network": [bad("swarm")]}, 4, "see swarm."),
        ({"network": [bad("membership")]}, 5, "see membership."),
        ({"network": [bad("announced"), BOTH]}, 3, "see announced."),
        ({"machine": [bad("disk"), bad("memory")]}, 3, "see disk, memory."),
    ],
)
def test_verdict_and_exit_code_follow_checks(events, looks, found, code, verdict):
    vars(looks).update(found)
    *checks, hub, last = events(f"doctor --peer {ADDRESS}", code=code)
    assert {event["event"] for event in (*checks, hub)} == {"check"}
    assert hub["name"] == "hub"
    assert last["event"] == "verdict"
    assert last["exit_code"] == code
    assert verdict in last["message"]
    assert bool(looks.entered) == found.keys().isdisjoint(("ports", "members"))


@pytest.fixture
def lacking(looks):
    """A machine without a GPU and the memory."""
    looks.machine = [FINE, POOR, bad("memory")]
    looks.network = [Network({ALICE: "punched"}, (BOB,))]


@pytest.mark.usefixtures("lacking")
def test_check_and_verdict_are_events(events):
    _, _, memory, *_, verdict = events("doctor", code=6)
    assert memory == memory | bad("memory")._asdict()
    assert verdict["ways"] == {ALICE: "punched"}
    assert verdict["missed"] == [BOB]


@pytest.mark.usefixtures("lacking")
def test_check_is_shown_with_fix(trahiv):
    out, err = trahiv("doctor", code=6)
    assert err == ""
    assert out.splitlines()[:5] == [
        "ok   disk       9 GiB are free",
        "poor gpu        None is here.",
        "bad  memory     The memory won't do.",
        "                wanted: another one",
        "                to do: buy one",
    ]
    assert out.endswith("\n\nYou can't train here yet: see memory.\n")


def test_doctor_uses_recipe_and_options(trahiv, looks, here):
    recipe = write_tiny(here, hivemind_config__dht__client_mode=True)
    line = f"doctor --peer {ADDRESS} --host-maddr /ip4/0.0.0.0/tcp/9 --announce-maddr /ip4/5.5.5.1/tcp/9"
    trahiv(f"{line} --set training.max_steps=9 --output-dir there", recipe)
    invitation, section = looks.entered
    assert invitation.addresses == (ADDRESS,)
    assert section.host_maddrs == ["/ip4/0.0.0.0/tcp/9"]
    assert section.announce_maddrs == ["/ip4/5.5.5.1/tcp/9"]
    assert not section.client_mode, "others are to try whether they can dial it"
    assert looks.recipe.training.max_steps == 9
    assert str(looks.folder) == "there"


def test_doctor_without_line_skips_members(events, looks):
    looks.members = bad("members")
    events("doctor")
    assert looks.entered[0].addresses == ()


def test_broken_recipe_is_refused(events, looks):
    [error] = events("doctor quickstart --set x=1", code=2)
    assert error["event"] == "error"
