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

IDS = {name: PeerID(b"\x12\x20" + name.encode() * 32) for name in "ABM"}
A, B, M = (str(id_.to_base58()) for id_ in IDS.values())
HOME = f"/ip4/192.168.1.20/tcp/31337/p2p/{A}"


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
    for peer, id_ in ((A, IDS["A"]), (B, IDS["B"]), (M, IDS["M"])):
        swarm.neighbour(peer).publish(members_key(), standing.membership.certify(id_.to_bytes()), 60)
    made = Estate(tmp_path)
    assert made.look()
    return made


def objection(estate, peer, grant):
    return estate.book.policy.objection(PeerID.from_base58(peer).to_bytes(), grant, swarm_time())


def home_of(estate):
    return read_invitation([f"@{estate.folder / INVITATION_FILE}"])


def test_who_started_no_swarm_owns_none(tmp_path):
    find_standing(tmp_path, Invitation((HOME,), None))
    with pytest.raises(SetupError, match="not yours, or open"):
        Estate(tmp_path)


def test_an_invitation_says_where_and_what_for_and_is_a_private_file(estate):
    invitation, path = estate.invite(Role.watcher, is_once=False, lasts_s=3600)
    assert (invitation.addresses, invitation.run_id, invitation.fingerprint) == ((HOME,), "run-1", "ab" * 8)
    grant = invitation.membership.grant
    assert grant.role is Role.watcher and swarm_time() + 3590 < grant.expires <= swarm_time() + 3600
    assert path.stat().st_mode & 0o077 == 0 and read_invitation([f"@{path}"]) == invitation
    assert grant in estate.given()


def test_before_the_first_start_there_is_nowhere_to_invite_to(tmp_path):
    find_standing(tmp_path, Invitation())
    with pytest.raises(SetupError, match="can be reached"):
        Estate(tmp_path).invite(Role.member, is_once=False, lasts_s=None)


def test_one_invitation_is_closed_and_the_others_are_not(estate):
    first, _ = estate.invite(Role.member, is_once=False, lasts_s=None)
    second, _ = estate.invite(Role.member, is_once=True, lasts_s=None)
    estate.close(invitation_id(first.membership.grant))
    assert "closed" in objection(estate, M, first.membership.grant)
    assert objection(estate, M, second.membership.grant) == ""
    for id_ in (invitation_id(first.membership.grant), "00000000"):
        with pytest.raises(SetupError, match="no invitation"):
            estate.close(id_)


def test_where_all_are_closed_everybody_stays_and_the_owner_has_a_fresh_one(estate):
    old = home_of(estate).membership.grant
    given, _ = estate.invite(Role.member, is_once=False, lasts_s=None)
    forgotten, path = estate.invite(Role.member, is_once=False, lasts_s=None)
    path.unlink()
    estate.close(None)
    assert "closed" in objection(estate, M, forgotten.membership.grant), "also one without a file"
    assert [objection(estate, peer, old) for peer in (A, B, M)] == ["", "", ""]
    assert "closed" in objection(estate, str(PeerID(b"\x12\x20" + b"s" * 32).to_base58()), old)
    assert objection(estate, M, given.membership.grant)
    fresh = home_of(estate)
    assert fresh.membership.grant != old and fresh.addresses == (HOME,)
    assert find_standing(estate.folder, Invitation()).membership == fresh.membership
    assert estate.given() == [fresh.membership.grant]


def test_a_peer_is_taken_out_with_its_invitation_and_the_others_stay(estate):
    old = home_of(estate).membership.grant
    estate.take_out(estate.find(M[-6:]))
    assert objection(estate, M, old) == TAKEN_OUT
    assert [objection(estate, peer, old) for peer in (A, B)] == ["", ""]
    assert home_of(estate).membership.grant != old
    assert objection(estate, M, home_of(estate).membership.grant) == TAKEN_OUT


def joined(estate, number):
    """Have peers join by the invitation of all; return their ids."""
    grant = home_of(estate).membership.grant
    peers = [str(PeerID(b"\x12\x20" + b"%032d" % n).to_base58()) for n in range(number)]
    write_down(estate.folder, dict.fromkeys(peers, grant), estate.book)
    return peers


def test_a_peer_is_taken_out_of_many_and_all_others_stay(estate):
    others, old = [A, B, *joined(estate, 300)], home_of(estate).membership.grant
    assert estate.take_out(M)
    assert objection(estate, M, old) == TAKEN_OUT
    assert {objection(estate, peer, old) for peer in others} == {""}


def test_where_not_all_others_could_stay_nobody_is_taken_out(estate):
    peers, old = [A, B, M, *joined(estate, 600)], home_of(estate).membership.grant
    before = estate.book.wire
    with pytest.raises(SetupError, match=r"224 others .* could not stay.*nothing was changed") as refused:
        estate.take_out(M)
    assert "invite --close all" in refused.value.hint
    assert estate.book.wire == before and {objection(estate, peer, old) for peer in peers} == {""}
    assert estate.close(None) == 223
    assert [objection(estate, peer, old) for peer in (A, B, M)] == [""] * 3, "those that came first"
    stay = [peer for peer in peers if peer != M and not objection(estate, peer, old)]
    estate.take_out(M)
    assert objection(estate, M, old) == TAKEN_OUT
    assert {objection(estate, peer, old) for peer in stay} == {""}


def test_who_came_in_time_while_the_owner_was_away_stays_when_another_one_is_taken_out(estate, swarm):
    short = estate.owner.invite(expires=1)
    for peer, id_ in ((B, IDS["B"]), (M, IDS["M"])):
        swarm.neighbour(peer).publish(members_key(), short.certify(id_.to_bytes()), 60)
    assert estate.look(), "its peer has seen them too late"
    entry = home_of(estate).membership.certify(IDS["A"].to_bytes())
    entry += b"".join(mark_of(IDS[name].to_bytes(), short.grant.key) for name in "BM")
    swarm.neighbour(A).publish(members_key(), entry, 60)
    assert estate.look()
    assert estate.take_out(M)
    assert objection(estate, M, short.grant) == TAKEN_OUT and objection(estate, B, short.grant) == ""


def test_of_a_peer_that_was_never_seen_no_invitation_is_closed(estate):
    old = home_of(estate).membership.grant
    assert not estate.take_out(str(PeerID(b"\x12\x20" + b"s" * 32).to_base58()))
    assert home_of(estate).membership.grant == old


def test_a_peer_can_be_named_as_it_is_shown(estate):
    assert short_name(M) == f"...{M[-6:]}"
    assert estate.find(short_name(M)) == M


@pytest.mark.parametrize("word", ["", "...", "Qm", "nobody", M[-3:], "Qmxxxxxxxx"])
def test_a_word_that_names_no_member_or_several_takes_nobody_out(estate, word):
    with pytest.raises(SetupError, match="nothing was changed"):
        estate.find(word)


def test_a_peer_that_was_never_seen_can_be_named_in_full(estate):
    stranger = str(PeerID(b"\x12\x20" + b"s" * 32).to_base58())
    assert estate.find(stranger) == stranger


def test_the_own_peer_is_not_taken_out(estate):
    with pytest.raises(SetupError, match="own peer"):
        estate.find(A)


def test_a_decision_is_handed_on_if_anybody_answers(estate, swarm):
    estate.take_out(M)
    assert estate.hand_on()
    assert list(swarm.fetch(policy_key()).values()) == [estate.book.wire]
    swarm.is_away = True
    assert not estate.hand_on() and not estate.look()


def test_the_owner_s_list_has_those_who_are_away_and_those_who_are_out(estate, swarm):
    estate.take_out(M)
    del swarm.records[members_key()][B]
    listed = {one.peer_id: one for one in list_members(estate.folder, Invitation())}
    assert {peer: (one.is_there, one.objection) for peer, one in listed.items()} == {
        A: (True, ""),
        B: (False, ""),
        M: (True, TAKEN_OUT),
    }
    assert read_roll(estate.folder).keys() == {A, B, M}


def test_somebody_else_lists_those_who_are_there(estate, swarm):
    watcher, _ = estate.invite(Role.watcher, is_once=False, lasts_s=60)
    assert {one.peer_id for one in list_members(None, watcher)} == {A, B, M}
    assert swarm.standing.membership == watcher.membership and swarm.standing.owner is None


def test_an_open_swarm_has_no_list(swarm):
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
