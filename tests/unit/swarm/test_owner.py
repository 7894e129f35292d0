"""The members of a closed swarm, and what its owner can do; a dict stands in for the DHT."""

import os
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from tests.kit.fakes import FakeNode
from tests.unit.conftest import refused
from trahiv_cli.errors import SetupError, Unreachable
from trahiv_cli.files import INVITATION_FILE
from trahiv_cli.members import membership
from trahiv_cli.members.identity import IDENTITY_FILE, ensure_identity, id_bytes
from trahiv_cli.members.invitation import Invitation, find_credentials, keep_invitation, read_invitation
from trahiv_cli.members.membership import TAKEN_OUT, Policy, Role, mark_of
from trahiv_cli.members.policy_book import Credentials
from trahiv_cli.swarm import member_list as roll
from trahiv_cli.swarm import owner as owning
from trahiv_cli.swarm.member_list import read_members, read_roll
from trahiv_cli.swarm.owner import OwnedSwarm, list_members, own_folder
from trahiv_cli.telemetry.events import short_name

MAX_STAYING = 190
MAX_MEMBERS = 1000


def peers(numbers):
    return [PeerID(b"\x12\x20" + b"%032d" % number).to_base58() for number in numbers]


A, B, C, M, STRANGER = peers(range(9000, 9005))
HOME = f"/ip4/192.168.1.20/tcp/31337/p2p/{A}"


class Swarm(FakeNode):
    """The DHT of a swarm, whose members take turns in `run`; visitors see it, too."""

    def __init__(self, folder, clock):
        super().__init__("visitor", now=clock)
        self.clock = clock
        self.lists = {}
        self.books = {}
        self.folder = folder
        credentials = find_credentials(folder, Invitation())
        self.home = credentials.membership
        self.owner = credentials.owner
        keep_invitation(folder / INVITATION_FILE, Invitation((HOME,), self.home, "run-1", "ab" * 8))
        self.owned = OwnedSwarm(folder)
        self.enter(A, credentials)

    def visited(self, addresses, credentials, met):
        assert HOME in addresses
        self.credentials = credentials
        self.is_sought_here = f"/ip4/127.0.0.1/tcp/31337/p2p/{A}" in addresses
        return self

    def enter(self, peer, credentials=None):
        """Have a peer join, by the invitation for all unless other credentials are given."""
        credentials = credentials or Credentials(self.home)
        self.books[peer] = credentials.book
        self.lists[peer] = roll.MemberList(self.neighbour(peer), credentials, self.clock)

    def run(self, seconds=7.0):
        for _ in range(int(seconds)):
            for one in self.lists.values():
                one.turn()
            self.clock.now += 1.0

    def members(self):
        return read_members(self, self.owner.public)

    def objection(self, peer, membership, asked=A):
        return self.books[asked].policy.objection(id_bytes(peer), membership.grant)

    def made_up(self, number):
        """Enter some made-up peers in the roll, with the invitation for all; return their ids."""
        made = peers(range(number))
        roll.write_down(self.folder, dict.fromkeys(made, self.home.grant))
        return made

    def out(self, membership, *peers):
        """Which of some peers the policy in the owner's folder excludes."""
        policy = self.owned.book.policy
        return [one for one in peers if policy.objection(id_bytes(one), membership.grant)]

    def invite(self, role=Role.member, lasts_s=None):
        """Return an invitation that the owner makes, and its file."""
        _, path = self.owned.invite(role, is_once=False, lasts_s=lasts_s)
        return read_invitation([f"@{path}"]), path

    def home_now(self):
        return read_invitation([f"@{self.folder / INVITATION_FILE}"]).membership


@pytest.fixture
def swarm(tmp_path, monkeypatch, clock):
    """A swarm that A started; B and M joined by its invitation."""
    clock.now = 1e9
    made = Swarm(tmp_path, clock)
    monkeypatch.setattr(owning, "visiting", made.visited)
    for module in (membership, owning):
        monkeypatch.setattr(module, "swarm_time", clock)
    for one in (B, M):
        made.enter(one)
    made.run()
    return made


def test_owner_remembers_absent_members(swarm):
    del swarm.lists[B]
    swarm.run(660.0)
    assert swarm.members() == dict.fromkeys((A, M), swarm.home.grant)
    assert read_roll(swarm.folder).keys() == {A, B, M}
    assert swarm.books[A].policy == Policy()  # members by a lasting invitation need no decision


def test_certificate_of_earlier_version_is_accepted(swarm):
    marks = mark_of(id_bytes(M)) * 2  # of the members that it saw
    swarm.neighbour(C).publish(roll.MEMBERS_KEY, swarm.home.certify(id_bytes(C)) + marks, 60)
    assert C in swarm.members()


def test_single_use_invitation_keeps_first_member(swarm):
    once = swarm.owner.invite(is_once=True)
    for one in (M, STRANGER):
        swarm.enter(one, Credentials(once))
        swarm.run(15.0)
    assert swarm.objection(M, once) == ""
    assert "used before" in swarm.objection(STRANGER, once)


def test_members_seen_before_expiry_stay(swarm):
    short, other = (swarm.owner.invite(expires=int(swarm.clock.now) + 100) for _ in range(2))
    for name in peers(range(MAX_STAYING + 10)):
        swarm.neighbour(name).publish(roll.MEMBERS_KEY, short.certify(id_bytes(name)), 60)
    swarm.run(5.0)
    swarm.enter(C, Credentials(other))
    swarm.run()
    assert len(swarm.books[A].policy.stay) == MAX_STAYING + 1
    absent = swarm.lists.pop(A)
    swarm.enter(STRANGER, Credentials(other))
    swarm.run(200)
    swarm.lists[A] = absent
    swarm.run()
    for asked in (A, B, STRANGER):
        assert swarm.objection(C, other, asked) == ""
        assert "over" in swarm.objection(STRANGER, other, asked)


def test_decision_spreads_and_outlives_record(swarm):
    swarm.owned.take_out(STRANGER)
    assert swarm.owned.synchronize()
    swarm.run()
    assert {swarm.books[one].policy.serial for one in (A, B, M)} == {1}
    del swarm.lists[A]  # the owner leaves; the others pass the decision on
    swarm.run(240.0)
    assert list(swarm.fetch(roll.POLICY_KEY).values()) == [swarm.owned.book.wire]  # one record is enough
    swarm.enter(STRANGER)
    swarm.run(1)
    assert swarm.objection(STRANGER, swarm.home, asked=STRANGER) == TAKEN_OUT


def test_owner_command_learns_of_new_members(swarm):
    del swarm.lists[A]
    swarm.enter(C)
    swarm.run(1)
    assert swarm.owned.synchronize()
    assert swarm.is_sought_here
    assert C in read_roll(swarm.folder)


def test_damaged_invitation_file_is_reported(swarm):
    (swarm.folder / INVITATION_FILE).write_text("trahiv1:AAAA")
    with pytest.raises(Unreachable, match="damaged"):
        swarm.owned.synchronize()


def test_roll_has_room_for_each_invitation(swarm):
    folder, other = swarm.folder, swarm.owner.invite().grant
    swarm.made_up(2 * MAX_MEMBERS)
    kept = roll.write_down(folder, {C: swarm.home.grant, STRANGER: other})
    assert kept == read_roll(folder)
    assert len(kept) == MAX_MEMBERS + 1
    assert kept.keys() >= {A, B, M, STRANGER}
    assert C not in kept
    assert roll.write_down(folder, {B: other})[B] == other  # it came by another one
    assert (folder / roll.ROLL_FILE).stat().st_mode & 0o077 == 0


def test_damaged_roll_counts_as_empty(tmp_path):
    (tmp_path / roll.ROLL_FILE).write_text('{"version": 1, "members": {"x": {}}}')
    assert read_roll(tmp_path) == {}


def test_owner_makes_private_invitation(swarm):
    invitation, path = swarm.invite(Role.watcher, lasts_s=3600)
    grant = invitation.membership.grant
    assert invitation == Invitation((HOME,), invitation.membership, "run-1", "ab" * 8)
    assert (grant.role, grant.expires) == (Role.watcher, int(swarm.clock.now) + 3600)
    assert path.stat().st_mode & 0o077 == 0
    assert swarm.owned.given() == [grant, swarm.home.grant]


def test_closed_invitation_admits_no_newcomer(swarm):
    closed, other = (swarm.invite()[0].membership for _ in range(2))
    swarm.owned.close(closed.grant.id)
    assert swarm.owned.book.policy.stay == frozenset()  # it has no members
    assert swarm.out(closed, STRANGER)
    assert not swarm.out(other, STRANGER)
    assert closed.grant not in swarm.owned.given()
    for id_ in (closed.grant.id, "00000000"):
        with refused("no invitation", error=SetupError):
            swarm.owned.close(id_)


def test_closing_all_invitations_replaces_own_one(swarm):
    other, path = swarm.invite()
    path.unlink()
    swarm.owned.close(None)
    assert swarm.out(other.membership, M)
    assert swarm.out(swarm.home, A, B, M, STRANGER) == [STRANGER]
    fresh = swarm.home_now()
    assert find_credentials(swarm.folder, Invitation()).membership == fresh
    assert swarm.owned.given() == [fresh.grant]


def test_kick_closes_invitation_and_keeps_members(swarm):
    others = [A, B, *swarm.made_up(300)]
    swarm.owned.take_out(STRANGER)
    assert swarm.home_now() == swarm.home  # its invitation is unknown
    swarm.owned.take_out(M)
    assert swarm.out(swarm.home, *others, M, C) == [M, C]  # C: another name
    assert swarm.home_now() != swarm.home
    assert swarm.out(swarm.home_now(), M, C) == [M]


def test_kick_evicting_others_is_refused(swarm):
    others = [A, B, *swarm.made_up(600)]
    with refused("^224 others", "trahiv invite --close all", SetupError):
        swarm.owned.take_out(M)
    assert swarm.owned.book.policy == Policy()
    swarm.owned.close(None)
    assert swarm.out(swarm.home, *others, M) == others[-223:]
    for one in (M, *others[2:9]):
        swarm.owned.take_out(one)
    assert swarm.out(swarm.home, *others, M) == [*others[2:9], *others[-223:], M]
    assert not swarm.out(swarm.home_now(), *others[-223:])  # they can join again


def test_member_is_found_by_id_or_its_end(swarm):
    for word, found in ((short_name(M), M), (A, A), (STRANGER, STRANGER)):
        assert swarm.owned.find(word) == found


@pytest.mark.parametrize("word", ["", "...", "Qm", "nobody", M[-3:], "Qmxxxxxxxx"])
def test_word_that_names_no_member_is_refused(swarm, word):
    with pytest.raises(SetupError, match="is the id of no member"):
        swarm.owned.find(word)


def test_own_peer_is_no_other_member(swarm):
    own = ensure_identity(swarm.folder / IDENTITY_FILE)
    with pytest.raises(SetupError, match="own peer"):
        swarm.owned.find(own)


def test_owner_lists_absent_and_kicked_members(swarm):
    watcher, _ = swarm.invite(Role.watcher)
    swarm.owned.take_out(M)
    del swarm.records[roll.MEMBERS_KEY][B]
    came = {"invitation": swarm.home.grant.id, "role": "member"}
    for invitation in (watcher, Invitation()):
        assert list_members(swarm.folder, invitation) == [
            {"peer_id": one, "is_there": is_there, "objection": objection} | came
            for one, is_there, objection in ((A, True, None), (B, False, None), (M, True, TAKEN_OUT))
        ]
        assert swarm.is_sought_here


def test_folder_of_other_swarm_changes_no_list(swarm, tmp_path):
    watcher, _ = swarm.invite(Role.watcher)
    other = find_credentials(tmp_path / "other", Invitation())
    other.book.decide(other.owner, lambda policy: Policy(out=frozenset({mark_of(id_bytes(M))})))
    for folder in (None, other.folder):
        listed = {one["peer_id"]: one["objection"] for one in list_members(folder, watcher)}
        assert listed == dict.fromkeys((A, B, M))
        assert swarm.credentials == Credentials(watcher.membership)


def test_open_swarm_has_no_member_list():
    with pytest.raises(SetupError, match="open swarm"):
        list_members(None, Invitation((HOME,)))


def test_newest_own_folder_is_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match="no run of yours"):
        own_folder()
    for name in ("old", "new"):
        find_credentials(tmp_path / "runs" / name, Invitation())
    os.utime("runs/old", (1, 1))
    assert own_folder() == Path("runs/new")


def test_folder_without_owner_key_is_refused(tmp_path):
    with pytest.raises(SetupError, match="not yours, or open"):
        OwnedSwarm(tmp_path)


def test_invitation_needs_started_peer(tmp_path):
    find_credentials(tmp_path, Invitation())
    with refused("where its peer can be reached", "start the peer once", SetupError):
        OwnedSwarm(tmp_path).invite(Role.member, is_once=False, lasts_s=None)
