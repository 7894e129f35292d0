"""What the page's buttons do in the folder of a run whose peer does not run."""

import pytest

from trahiv_cli.cli.watch import deeds_of
from trahiv_cli.errors import SetupError, TrahivError
from trahiv_cli.files import INVITATION_FILE
from trahiv_cli.members.invitation import Invitation, find_credentials, keep_invitation
from trahiv_cli.swarm.member_list import write_down

MEMBER = "QmaoLhCedeDYXDFCXFXNqnSzAB7VEdVeeY2bG2QAvF7Jbp"


@pytest.fixture
def owned(tmp_path):
    """What an owner can do in the folder of a swarm that one other peer has joined."""
    membership = find_credentials(tmp_path, Invitation()).membership
    unreachable = (f"/ip4/127.0.0.1/tcp/1/p2p/{MEMBER}",)
    keep_invitation(tmp_path / INVITATION_FILE, Invitation(unreachable, membership=membership))
    write_down(tmp_path, {MEMBER: membership.grant})
    return deeds_of(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "terms"),
    [
        ({"once": True, "hours": 24}, "It is to train along, for one peer, until 20"),
        ({"watch": True, "hours": 1}, "It is to look on, for any number of peers, until 20"),
        ({}, "until it is closed"),
    ],
)
def test_owner_invites(owned, wanted, terms):
    made = owned["invite"](wanted)
    assert terms in made["message"]
    assert made["line"].startswith("trahiv join --peer trahiv1:")


@pytest.mark.parametrize("wrong", [{"hours": 0}, {"hours": "1"}, {"hours": 1e9}, {"watch": True}])
def test_senseless_invitation_is_refused(owned, wrong):
    with pytest.raises(TrahivError):
        owned["invite"](wrong)


def test_owner_kicks_member(owned):
    said = owned["kick"]({"peer": MEMBER})["message"]
    assert said.startswith(f"{MEMBER} is out, and the invitation that it joined with is closed.")
    assert said.endswith("No peer answers here; it counts once one sees this folder's peer.")


@pytest.mark.parametrize("wrong", [{}, {"peer": "nobody"}, {"peer": ["x"]}])
def test_unknown_peer_is_not_kicked(owned, wrong):
    with pytest.raises(SetupError, match="nothing was changed"):
        owned["kick"](wrong)


def test_program_hears_no_wishes(tmp_path):
    assert deeds_of(tmp_path) == {}


def test_non_owner_controls_only_own_peer(tmp_path):
    (tmp_path / "recipe.json").touch()
    deeds = deeds_of(tmp_path)
    assert sorted(deeds) == ["finish", "pause", "resume"]
    for deed in deeds.values():
        with pytest.raises(SetupError, match="No peer trains"):
            deed({})
