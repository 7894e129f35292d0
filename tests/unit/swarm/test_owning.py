"""What an owner can do from a run's folder; the visit to the swarm is the only part that is replaced."""

import contextlib
import os

import pytest
from hivemind.p2p import PeerID

from tests.kit.fakes import FakeNode
from trahiv_cli.errors import SetupError, Unreachable
from trahiv_cli.swarm import owning
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.invitation import (
    INVITATION_FILE,
    OWNER_FILE,
    Invitation,
    find_standing,
    keep_invitation,
    read_invitation,
)
from trahiv_cli.swarm.membership import Role
from trahiv_cli.swarm.owning import OwnedSwarm, invitation_id, list_members, own_folder
from trahiv_cli.swarm.policy import TAKEN_OUT, mark_of
from trahiv_cli.swarm.roll import members_key, policy_key, read_roll, write_down
from trahiv_cli.telemetry.names import short_name

IDS = {name: PeerID(b"\x12\x20" + name.encode() * 32) for name in "ABMS"}
A, B, M, STRANGER = (str(id_.to_base58()) for id_ in IDS.values())
HOME = f"/ip4/192.168.1.20/tcp/31337/p2p/{A}"
FOREVER = {"is_once": False, "lasts_s": None}


class Swarm(FakeNode):
    """The DHT that a visitor sees; nobody answers when it `is_away`."""

    is_away = False

    @contextlib.contextmanager
    def visited(self, addresses, standing, met, identity=None):
        if self.is_away:
            raise Unreachable("No peer could be reached.")
        assert HOME in addresses
        self.standing = standing
        yield self

    def show(self, name, membership, *marks):
        certificate = membership.certify(IDS[name].to_bytes())
        self.neighbour(str(IDS[name].to_base58())).publish(members_key(), b"".join([certificate, *marks]), 60)


@pytest.fixture
def swarm(monkeypatch):
    made = Swarm("visitor")
    monkeypatch.setattr(owning, "visiting", made.visited)
    return made


@pytest.fixture
def owned(tmp_path, swarm):
    """The folder of A, who started the swarm; B and M came by its invitation."""
    standing = find_standing(tmp_path, Invitation())
    keep_invitation(tmp_path / INVITATION_FILE, Invitation((HOME,), standing.membership, "run-1", "ab" * 8))
    for name in "ABM":
        swarm.show(name, standing.membership)
    made = OwnedSwarm(tmp_path)
    assert made.look()
    return made


def objections(owned, grant, *peers):
    """Why peers are no members, without those that are."""
    policy, now = owned.book.policy, swarm_time()
    said = (policy.objection(PeerID.from_base58(peer).to_bytes(), grant, now) for peer in peers)
    return [objection for objection in said if objection]


def home_of(owned):
    return read_invitation([f"@{owned.folder / INVITATION_FILE}"]).membership


def joined(owned, number):
    """Have peers join by the invitation of all; return their ids."""
    peers = [str(PeerID(b"\x12\x20" + b"%032d" % n).to_base58()) for n in range(number)]
    write_down(owned.folder, dict.fromkeys(peers, home_of(owned).grant), owned.book)
    return peers


def test_who_started_no_swarm_owns_none_and_before_the_first_start_there_is_nowhere_to_invite_to(tmp_path):
    find_standing(tmp_path, Invitation((HOME,), None))
    with pytest.raises(SetupError, match="not yours, or open"):
        OwnedSwarm(tmp_path)
    find_standing(tmp_path, Invitation())
    with pytest.raises(SetupError, match="can be reached"):
        OwnedSwarm(tmp_path).invite(Role.member, **FOREVER)


def test_an_invitation_says_where_and_what_for_and_can_be_closed_alone(owned):
    invitation, path = owned.invite(Role.watcher, is_once=False, lasts_s=3600)
    assert (invitation.addresses, invitation.run_id, invitation.fingerprint) == ((HOME,), "run-1", "ab" * 8)
    grant = invitation.membership.grant
    assert grant.role is Role.watcher and swarm_time() + 3590 < grant.expires <= swarm_time() + 3600
    assert path.stat().st_mode & 0o077 == 0 and read_invitation([f"@{path}"]) == invitation
    other = owned.invite(Role.member, **FOREVER)[0].membership.grant
    assert {grant, other} <= set(owned.given())
    owned.close(invitation_id(grant))
    assert "closed" in objections(owned, grant, M)[0] and not objections(owned, other, M)
    for id_ in (invitation_id(grant), "00000000"):
        with pytest.raises(SetupError, match="no invitation"):
            owned.close(id_)


def test_where_all_are_closed_everybody_stays_and_the_owner_has_a_fresh_one(owned):
    old = home_of(owned).grant
    forgotten, path = owned.invite(Role.member, **FOREVER)
    path.unlink()
    assert owned.close(None) == 0
    assert objections(owned, forgotten.membership.grant, M), "also one without a file"
    assert not objections(owned, old, A, B, M) and "closed" in objections(owned, old, STRANGER)[0]
    fresh = home_of(owned)
    assert find_standing(owned.folder, Invitation()).membership == fresh
    assert owned.given() == [fresh.grant] != [old]


def test_a_peer_is_taken_out_of_many_with_its_invitation_and_all_others_stay(owned):
    others, old = [A, B, *joined(owned, 300)], home_of(owned).grant
    assert not owned.take_out(STRANGER) and home_of(owned).grant == old, "never seen: nothing is closed"
    assert owned.take_out(M) and not objections(owned, old, *others)
    fresh = home_of(owned).grant
    assert fresh != old and objections(owned, old, M) == objections(owned, fresh, M) == [TAKEN_OUT]


def test_where_not_all_others_could_stay_nobody_is_taken_out(owned):
    peers, old, before = [A, B, M, *joined(owned, 600)], home_of(owned).grant, owned.book.wire
    with pytest.raises(SetupError, match=r"224 others .* could not stay.*nothing was changed") as refused:
        owned.take_out(M)
    assert "invite --close all" in refused.value.hint
    assert owned.book.wire == before and not objections(owned, old, *peers)
    assert owned.close(None) == 223
    assert not objections(owned, old, A, B, M), "those that came first"
    stay = [peer for peer in peers if peer != M and not objections(owned, old, peer)]
    owned.take_out(M)
    assert objections(owned, old, M, *stay) == [TAKEN_OUT]


def test_who_came_in_time_while_the_owner_was_away_stays_when_another_one_is_taken_out(owned, swarm):
    short = owned.owner.invite(expires=1)
    for name in "BM":
        swarm.show(name, short)
    assert owned.look(), "its peer has seen them too late"
    swarm.show("A", home_of(owned), *(mark_of(IDS[name].to_bytes(), short.grant.key) for name in "BM"))
    assert owned.look() and owned.take_out(M)
    assert objections(owned, short.grant, M) == [TAKEN_OUT] and not objections(owned, short.grant, B)


def test_a_peer_can_be_named_as_it_is_shown_or_in_full(owned):
    assert owned.find(short_name(M)) == owned.find(M[-6:]) == M and owned.find(STRANGER) == STRANGER
    for word in ("", "...", "Qm", "nobody", M[-3:], "Qmxxxxxxxx"):
        with pytest.raises(SetupError, match="nothing was changed"):
            owned.find(word)
    with pytest.raises(SetupError, match="own peer"):
        owned.find(A)


def test_a_decision_is_handed_on_if_anybody_answers(owned, swarm):
    owned.take_out(M)
    assert owned.hand_on() and list(swarm.fetch(policy_key()).values()) == [owned.book.wire]
    swarm.is_away = True
    assert not owned.hand_on() and not owned.look()


def test_the_owner_s_list_has_those_who_are_away_and_those_who_are_out(owned, swarm):
    watcher, _ = owned.invite(Role.watcher, is_once=False, lasts_s=60)
    assert {one.peer_id for one in list_members(None, watcher)} == {A, B, M}, "somebody else's"
    assert swarm.standing.membership == watcher.membership and swarm.standing.owner is None
    owned.take_out(M)
    del swarm.records[members_key()][B]
    listed = list_members(owned.folder, Invitation())
    states = {one.peer_id: (one.is_there, one.objection) for one in listed}
    assert states == {A: (True, ""), B: (False, ""), M: (True, TAKEN_OUT)}
    assert read_roll(owned.folder).keys() == {A, B, M}
    with pytest.raises(SetupError, match="open swarm"):
        list_members(None, Invitation((HOME,)))


def test_the_newest_folder_is_meant_where_none_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match="no run of yours"):
        own_folder(None)
    for name in ("old", "new"):
        find_standing(tmp_path / "runs" / name, Invitation())
    os.utime(tmp_path / "runs" / "old", (1, 1))
    assert own_folder(None).name == "new" and (own_folder(None) / OWNER_FILE).exists()
    assert own_folder(tmp_path) == tmp_path
