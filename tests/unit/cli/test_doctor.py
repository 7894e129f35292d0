"""`trahiv doctor` turns checks into lines, a verdict, an exit code. The modules that look are stand-ins."""

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


class Looks:
    """The findings of each module, and the DHT section and invitation that were examined."""

    def __init__(self):
        self.machine, self.ports, self.members, self.network = [], FINE, FINE, []
        self.entered = None
        self.recipe = self.folder = None

    def examine_machine(self, recipe, folder):
        self.recipe, self.folder = recipe, folder
        yield from self.machine

    def examine_reach(self, invitation, section, folder):
        self.entered = invitation, section
        yield from self.network


@pytest.fixture
def looks(here, monkeypatch):
    looks = Looks()
    monkeypatch.setattr(machine, "examine_machine", looks.examine_machine)
    monkeypatch.setattr(machine, "names", lambda: FINE._replace(name="hub"))
    monkeypatch.setattr(network, "examine_ports", lambda _: looks.ports)
    monkeypatch.setattr(network, "examine_members", lambda _: looks.members)
    monkeypatch.setattr(network, "examine_reach", looks.examine_reach)
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
    vars(looks).update({"network": [BOTH], **found})
    left, (*checks, last) = events("doctor", "--peer", ADDRESS)
    assert (left, last["exit_code"], last["event"]) == (code, code, "verdict")
    assert verdict in last["message"]
    assert {event["event"] for event in checks} == {"check"} and checks[-1]["name"] == "hub"
    is_entered = looks.ports.verdict != "bad" and looks.members.verdict != "bad"
    assert (looks.entered is not None) == is_entered


def test_check_is_shown_with_fix(trahiv, events, looks):
    looks.machine, looks.network = [FINE, POOR, bad("memory")], [Network({ALICE: "punched"}, (BOB,))]
    *told, verdict = events("doctor")[1]
    assert bad("memory") == Check(**{key: told[2][key] for key in Check._fields})
    assert (verdict["ways"], verdict["missed"]) == ({ALICE: "punched"}, [BOB])
    code, out, err = trahiv("doctor")
    assert (code, err) == (6, "")
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
    listens = "--host-maddr", "/ip4/0.0.0.0/tcp/9", "--announce-maddr", "/ip4/5.5.5.1/tcp/9"
    more = "--set", "training.max_steps=9", "--output-dir", "there"
    assert trahiv("doctor", recipe, "--peer", ADDRESS, *listens, *more)[0] == 0
    invitation, section = looks.entered
    assert invitation.addresses == (ADDRESS,)
    assert (section.host_maddrs, section.announce_maddrs) == ([listens[1]], [listens[3]])
    assert not section.client_mode, "others are to try whether they can dial it"
    assert (looks.recipe.training.max_steps, str(looks.folder)) == (9, "there")


def test_doctor_without_line_skips_members(events, looks, here):
    looks.members = bad("members")
    assert events("doctor")[0] == 0 and looks.entered[0].addresses == ()
    code, told = events("doctor", write_tiny(here, training__max_steps=-1))
    assert code == 2 and told[0]["event"] == "error"
    assert events("doctor", "--peer", "nonsense")[0] == 4
