"""What the page's buttons do in the folder of a run whose peer does not run."""

import pytest

from trahiv_cli.cli.watch import deeds_of
from trahiv_cli.errors import SetupError, TrahivError
from trahiv_cli.files import INVITATION_FILE
from trahiv_cli.swarm.invitation import Invitation, find_standing, keep_invitation
from trahiv_cli.swarm.roll import write_down

MEMBER = "QmaoLhCedeDYXDFCXFXNqnSzAB7VEdVeeY2bG2QAvF7Jbp"


@pytest.fixture
def owned(tmp_path):
    """The owner's folder of a swarm that one other peer has joined."""
    membership = find_standing(tmp_path, Invitation()).membership
    nobody = (f"/ip4/127.0.0.1/tcp/1/p2p/{MEMBER}",)
    keep_invitation(tmp_path / INVITATION_FILE, Invitation(nobody, membership=membership))
    write_down(tmp_path, {MEMBER: membership.grant})
    return deeds_of(tmp_path)


def test_owner_invites(owned):
    made = owned["invite"]({"watch": False, "once": True, "hours": 24})
    assert made["line"].startswith("trahiv join --peer trahiv1:")
    assert made["message"].startswith("It is to train along, for one peer, until 20")
    made = owned["invite"]({"watch": True, "once": False, "hours": 1})
    assert made["message"].startswith("It is to look on, for any number of peers, until 20")
    assert "until it is closed" in owned["invite"]({})["message"]
    for wrong in ({"hours": 0}, {"hours": "1"}, {"hours": 1e9}, {"watch": True}):
        with pytest.raises(TrahivError):
            owned["invite"](wrong)


def test_owner_kicks_member(owned):
    said = owned["kick"]({"peer": MEMBER})["message"]
    assert said.startswith(f"{MEMBER} is out, and the invitation that it joined with is closed.")
    assert said.endswith("No peer answers here; it counts once one sees this folder's peer.")
    for wrong in ({}, {"peer": "nobody"}, {"peer": ["x"]}):
        with pytest.raises(SetupError, match="nothing was changed"):
            owned["kick"](wrong)


def test_non_owner_controls_only_own_peer(tmp_path):
    assert deeds_of(tmp_path) == {}, "the peer of a program hears no wishes"
    (tmp_path / "recipe.json").touch()
    deeds = deeds_of(tmp_path)
    assert sorted(deeds) == ["finish", "pause", "resume"]
    for deed in deeds.values():
        with pytest.raises(SetupError, match="No peer trains"):
            deed({})
