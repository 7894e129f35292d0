"""What `kick` and `invite` say; no peer of the swarm answers here."""

from hivemind.p2p import PeerID

from trahiv_cli.errors import Unreachable
from trahiv_cli.swarm import owning
from trahiv_cli.swarm.invitation import INVITATION_FILE, Invitation, find_standing, keep_invitation
from trahiv_cli.swarm.roll import write_down

KNOWN, UNKNOWN = (str(PeerID(b"\x12\x20" + one * 32)) for one in (b"k", b"u"))


def test_kick_says_whether_it_closed_an_invitation_and_what_to_do_next(trahiv, here, monkeypatch):
    def nobody_answers(*_):
        raise Unreachable("No peer could be reached.")

    monkeypatch.setattr(owning, "visiting", nobody_answers)
    membership = find_standing(here, Invitation()).membership
    keep_invitation(here / INVITATION_FILE, Invitation(membership=membership))
    write_down(here, {KNOWN: membership.grant})
    assert trahiv("invite", "--close", "all", "--output-dir", here)[0] == 4, "it is not known who may stay"
    for peer, words, hint in (
        (UNKNOWN, "is out. It is not known which invitation", "`trahiv invite --close all` keeps it"),
        (KNOWN, "is out, and the invitation that it joined with is closed", "`trahiv invite` makes"),
    ):
        code, out, err = trahiv("kick", peer, "--output-dir", here)
        assert code == 0 and f"{peer} {words}" in out and hint in " ".join(err.split())
        assert "No peer of the swarm answers here" in err
