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
from trahiv_cli.swarm.owning import Estate, invitation_id, list_members, own_folder
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
def estate(tmp_path, swarm):
    """The folder of A, who started the swarm; B and M came by its invitation."""
    standing = find_standing(tmp_path, Invitation())
    keep_invitation(tmp_path / INVITATION_FILE, Invitation((HOME,), standing.membership, "run-1", "ab" * 8))
    for name in "ABM":
        swarm.show(name, standing.membership)
    made = Estate(tmp_path)
    assert made.look()
    return made


def objections(estate, grant, *peers):
    """Why peers are no members, without those that are."""
    policy, now = estate.book.policy, swarm_time()
    said = (policy.objection(PeerID.from_base58(peer).to_bytes(), grant, now) for peer in peers)
    return [objection for objection in said if objection]


def home_of(estate):
    return read_invitation([f"@{estate.folder / INVITATION_FILE}"])


def grant_of(estate):
    return home_of(estate).membership.grant


def test_who_started_no_swarm_owns_none_and_before_the_first_start_there_is_nowhere_to_invite_to(tmp_path):
    find_standing(tmp_path, Invitation((HOME,), None))
    with pytest.raises(SetupError, match="not yours, or open"):
        Estate(tmp_path)
    find_standing(tmp_path, Invitation())
    with pytest.raises(SetupError, match="can be reached"):
        Estate(tmp_path).invite(Role.member, **FOREVER)


def test_an_invitation_says_where_and_what_for_and_is_a_private_file(estate):
    invitation, path = estate.invite(Role.watcher, is_once=False, lasts_s=3600)
    assert (invitation.addresses, invitation.run_id, invitation.fingerprint) == ((HOME,), "run-1", "ab" * 8)
    grant = invitation.membership.grant
    assert grant.role is Role.watcher and swarm_time() + 3590 < grant.expires <= swarm_time() + 3600
    assert path.stat().st_mode & 0o077 == 0 and read_invitation([f"@{path}"]) == invitation
    assert grant in estate.given()


def test_one_invitation_is_closed_and_the_others_are_not(estate):
    first, second = (estate.invite(Role.member, **FOREVER)[0].membership.grant for _ in range(2))
    estate.close(invitation_id(first))
    assert "closed" in objections(estate, first, M)[0] and not objections(estate, second, M)
    for id_ in (invitation_id(first), "00000000"):
        with pytest.raises(SetupError, match="no invitation"):
            estate.close(id_)


def test_where_all_are_closed_everybody_stays_and_the_owner_has_a_fresh_one(estate):
    old = grant_of(estate)
    given, _ = estate.invite(Role.member, **FOREVER)
    forgotten, path = estate.invite(Role.member, **FOREVER)
    path.unlink()
    estate.close(None)
    assert objections(estate, forgotten.membership.grant, M), "also one without a file"
    assert objections(estate, given.membership.grant, M)
    assert not objections(estate, old, A, B, M) and "closed" in objections(estate, old, STRANGER)[0]
    fresh = home_of(estate)
    assert fresh.membership.grant != old and fresh.addresses == (HOME,)
    assert find_standing(estate.folder, Invitation()).membership == fresh.membership
    assert estate.given() == [fresh.membership.grant]


def joined(estate, number):
    """Have peers join by the invitation of all; return their ids."""
    peers = [str(PeerID(b"\x12\x20" + b"%032d" % n).to_base58()) for n in range(number)]
    write_down(estate.folder, dict.fromkeys(peers, grant_of(estate)), estate.book)
    return peers


def test_a_peer_is_taken_out_of_many_with_its_invitation_and_all_others_stay(estate):
    others, old = [A, B, *joined(estate, 300)], grant_of(estate)
    assert estate.take_out(M)
    assert not objections(estate, old, *others)
    assert grant_of(estate) != old
    assert objections(estate, old, M) == objections(estate, grant_of(estate), M) == [TAKEN_OUT]


def test_where_not_all_others_could_stay_nobody_is_taken_out(estate):
    peers, old, before = [A, B, M, *joined(estate, 600)], grant_of(estate), estate.book.wire
    with pytest.raises(SetupError, match=r"224 others .* could not stay.*nothing was changed") as refused:
        estate.take_out(M)
    assert "invite --close all" in refused.value.hint
    assert estate.book.wire == before and not objections(estate, old, *peers)
    assert estate.close(None) == 223
    assert not objections(estate, old, A, B, M), "those that came first"
    stay = [peer for peer in peers if peer != M and not objections(estate, old, peer)]
    estate.take_out(M)
    assert objections(estate, old, M, *stay) == [TAKEN_OUT]


def test_who_came_in_time_while_the_owner_was_away_stays_when_another_one_is_taken_out(estate, swarm):
    short = estate.owner.invite(expires=1)
    swarm.show("B", short)
    swarm.show("M", short)
    assert estate.look(), "its peer has seen them too late"
    swarm.show(
        "A", home_of(estate).membership, *(mark_of(IDS[name].to_bytes(), short.grant.key) for name in "BM")
    )
    assert estate.look()
    assert estate.take_out(M)
    assert objections(estate, short.grant, M) == [TAKEN_OUT] and not objections(estate, short.grant, B)


def test_of_a_peer_that_was_never_seen_no_invitation_is_closed(estate):
    old = grant_of(estate)
    assert not estate.take_out(STRANGER)
    assert grant_of(estate) == old


def test_a_peer_can_be_named_as_it_is_shown_or_in_full(estate):
    assert short_name(M) == f"...{M[-6:]}"
    assert estate.find(short_name(M)) == estate.find(M[-6:]) == M
    assert estate.find(STRANGER) == STRANGER
    for word in ("", "...", "Qm", "nobody", M[-3:], "Qmxxxxxxxx"):
        with pytest.raises(SetupError, match="nothing was changed"):
            estate.find(word)
    with pytest.raises(SetupError, match="own peer"):
        estate.find(A)


def test_a_decision_is_handed_on_if_anybody_answers(estate, swarm):
    estate.take_out(M)
    assert estate.hand_on()
    assert list(swarm.fetch(policy_key()).values()) == [estate.book.wire]
    swarm.is_away = True
    assert not estate.hand_on() and not estate.look()


def test_the_owner_s_list_has_those_who_are_away_and_those_who_are_out(estate, swarm):
    watcher, _ = estate.invite(Role.watcher, is_once=False, lasts_s=60)
    assert {one.peer_id for one in list_members(None, watcher)} == {A, B, M}, "somebody else's"
    assert swarm.standing.membership == watcher.membership and swarm.standing.owner is None
    estate.take_out(M)
    del swarm.records[members_key()][B]
    listed = {one.peer_id: one for one in list_members(estate.folder, Invitation())}
    assert {peer: (one.is_there, one.objection) for peer, one in listed.items()} == {
        A: (True, ""),
        B: (False, ""),
        M: (True, TAKEN_OUT),
    }
    assert read_roll(estate.folder).keys() == {A, B, M}
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
