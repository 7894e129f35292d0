"""The members of a closed swarm, and what its owner can do; a dict stands in for the DHT."""

import os
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from tests.kit.fakes import FakeNode
from trahiv_cli.errors import SetupError, Unreachable
from trahiv_cli.files import INVITATION_FILE
from trahiv_cli.swarm import membership, owning, roll
from trahiv_cli.swarm.identity import IDENTITY_FILE, ensure_identity
from trahiv_cli.swarm.invitation import Invitation, find_standing, keep_invitation, read_invitation
from trahiv_cli.swarm.membership import TAKEN_OUT, Policy, Role, mark_of
from trahiv_cli.swarm.owning import OwnedSwarm, list_members, own_folder
from trahiv_cli.swarm.roll import LOOK_EVERY_S, MAX_MEMBERS, MAX_STAYING, Credentials, read_members, read_roll
from trahiv_cli.telemetry.events import short_name


def peer(number):
    return str(PeerID(b"\x12\x20" + b"%032d" % number).to_base58())


def id_of(peer):
    return PeerID.from_base58(peer).to_bytes()


A, B, C, M, STRANGER = map(peer, range(9000, 9005))
HOME, HERE = (f"/ip4/{host}/tcp/31337/p2p/{A}" for host in ("192.168.1.20", "127.0.0.1"))


class Swarm(FakeNode):
    """The DHT of a swarm, whose members take turns in `run`; visitors see it, too."""

    time = 1e9

    def __init__(self, folder):
        super().__init__("visitor", now=lambda: self.time)
        self.lists, self.books, self.folder = {}, {}, folder
        standing = find_standing(folder, Invitation())
        self.home, self.owner = standing.membership, standing.owner
        keep_invitation(folder / INVITATION_FILE, Invitation((HOME,), self.home, "run-1", "ab" * 8))
        self.owned = OwnedSwarm(folder)
        self.enter(A, standing)

    def visited(self, addresses, standing, met):
        assert HOME in addresses
        self.standing, self.is_sought_here = standing, HERE in addresses
        return self

    def enter(self, peer, standing=None):
        """Have a peer join, by the invitation for all unless other credentials are given."""
        standing = standing or Credentials(self.home)
        self.books[peer] = standing.book
        self.lists[peer] = roll.MemberList(self.neighbour(peer), standing, lambda: self.time)

    def run(self, seconds=LOOK_EVERY_S + 2):
        for _ in range(int(seconds)):
            for one in list(self.lists.values()):
                one.turn()
            self.time += 1.0

    def objection(self, peer, membership, asked=A):
        return self.books[asked].policy.objection(id_of(peer), membership.grant)

    def made_up(self, number):
        """Enter some made-up peers in the roll, with the invitation for all; return their ids."""
        peers = [peer(n) for n in range(number)]
        roll.write_down(self.folder, dict.fromkeys(peers, self.home.grant))
        return peers

    def out(self, membership, *peers):
        """Which of some peers the policy in the owner's folder excludes."""
        policy = self.owned.book.policy
        return [one for one in peers if policy.objection(id_of(one), membership.grant)]

    def invite(self, role=Role.member, lasts_s=None):
        """Return an invitation that the owner makes, and its file."""
        _, path = self.owned.invite(role, is_once=False, lasts_s=lasts_s)
        return read_invitation([f"@{path}"]), path

    def home_now(self):
        return read_invitation([f"@{self.folder / INVITATION_FILE}"]).membership


@pytest.fixture
def swarm(tmp_path, monkeypatch):
    """A swarm that A started; B and M joined by its invitation."""
    made = Swarm(tmp_path)
    monkeypatch.setattr(owning, "visiting", made.visited)
    for module in (membership, owning):
        monkeypatch.setattr(module, "swarm_time", lambda: made.time)
    for one in (B, M):
        made.enter(one)
    made.run()
    return made


def test_owner_remembers_absent_members(swarm):
    assert read_members(swarm, swarm.owner.public) == dict.fromkeys((A, B, M), swarm.home.grant)
    del swarm.lists[B]
    swarm.run(roll.CERTIFICATE_TTL_S + roll.PUBLISH_EVERY_S)
    assert read_members(swarm, swarm.owner.public).keys() == {A, M}
    assert read_roll(swarm.folder).keys() == {A, B, M}
    assert swarm.books[A].policy == Policy(), "an invitation that is good for ever needs no word"
    marks = mark_of(id_of(M)) * 2  # of the members that it saw: the previous version adds them
    swarm.neighbour(C).publish(roll.MEMBERS_KEY, swarm.home.certify(id_of(C)) + marks, 60)
    swarm.neighbour(STRANGER).publish(roll.MEMBERS_KEY, ["no bytes"], 60)
    assert read_members(swarm, swarm.owner.public).keys() == {A, M, C}


def test_members_seen_in_time_stay(swarm):
    once = swarm.owner.invite(is_once=True)
    for one in (M, STRANGER):
        swarm.enter(one, Credentials(once))
        swarm.run(3 * LOOK_EVERY_S)
    assert swarm.objection(M, once) == "" and "used before" in swarm.objection(STRANGER, once)
    short, other = (swarm.owner.invite(expires=int(swarm.time) + 100) for _ in range(2))
    for name in map(peer, range(MAX_STAYING + 10)):
        swarm.neighbour(name).publish(roll.MEMBERS_KEY, short.certify(id_of(name)), 60)
    swarm.run(LOOK_EVERY_S)
    swarm.enter(C, Credentials(other))
    swarm.run()
    assert len(swarm.books[A].policy.stay) == MAX_STAYING + 2
    owner_s = swarm.lists.pop(A)
    swarm.enter(STRANGER, Credentials(other))
    swarm.run(200)
    swarm.lists[A] = owner_s
    swarm.run()
    for asked in (A, B, STRANGER):
        assert swarm.objection(C, other, asked) == "" and "over" in swarm.objection(STRANGER, other, asked)


def test_decision_spreads_and_outlives_record(swarm):
    swarm.owned.take_out(STRANGER)
    assert swarm.owned.synchronize()
    swarm.run()
    assert {swarm.books[one].policy.serial for one in (A, B, M)} == {1}
    del swarm.lists[A]  # the owner leaves; the others pass the decision on
    swarm.run(2 * roll.POLICY_TTL_S)
    assert list(swarm.fetch(roll.POLICY_KEY).values()) == [swarm.owned.book.wire], "one record is enough"
    for one in (STRANGER, C):
        swarm.enter(one)
    swarm.run(1)
    assert swarm.objection(STRANGER, swarm.home, asked=STRANGER) == TAKEN_OUT, "also who is meant learns it"
    assert swarm.owned.synchronize() and swarm.is_sought_here and C in read_roll(swarm.folder)
    (swarm.folder / INVITATION_FILE).write_text("trahiv1:AAAA")
    with pytest.raises(Unreachable, match="damaged"):
        swarm.owned.synchronize()


def test_roll_has_room_for_each_invitation(swarm):
    folder, other = swarm.folder, swarm.owner.invite().grant
    swarm.made_up(2 * MAX_MEMBERS)
    kept = roll.write_down(folder, {C: swarm.home.grant, STRANGER: other})
    assert kept == read_roll(folder) and len(kept) == MAX_MEMBERS + 1
    assert kept.keys() >= {A, B, M, STRANGER} and C not in kept
    assert roll.write_down(folder, {B: other})[B] == other, "it came by another one"
    assert (folder / roll.ROLL_FILE).stat().st_mode & 0o077 == 0
    (folder / roll.ROLL_FILE).write_text('{"version": 1, "members": {"x": {}}}')
    assert read_roll(folder) == {}


def test_closed_invitation_admits_no_newcomer(swarm):
    invitation, path = swarm.invite(Role.watcher, lasts_s=3600)
    grant, other = invitation.membership.grant, swarm.invite()[0].membership
    assert invitation == Invitation((HOME,), invitation.membership, "run-1", "ab" * 8)
    assert grant.role is Role.watcher and grant.expires == int(swarm.time) + 3600
    assert path.stat().st_mode & 0o077 == 0 and {grant, other.grant} <= set(swarm.owned.given())
    swarm.owned.close(grant.id)
    assert swarm.owned.book.policy.stay == frozenset(), "nobody came by it"
    assert swarm.out(invitation.membership, STRANGER) and not swarm.out(other, STRANGER)
    for id_ in (grant.id, "00000000"):
        with pytest.raises(SetupError, match="no invitation"):
            swarm.owned.close(id_)
    path.unlink()
    swarm.owned.close(None)
    assert swarm.out(other, M), "of all invitations"
    assert swarm.out(swarm.home, A, B, M, STRANGER) == [STRANGER]
    fresh = swarm.home_now()
    assert find_standing(swarm.folder, Invitation()).membership == fresh != swarm.home
    assert swarm.owned.given() == [fresh.grant]


def test_kick_closes_invitation_and_keeps_members(swarm):
    others = [A, B, *swarm.made_up(300)]
    swarm.owned.take_out(STRANGER)
    assert swarm.home_now() == swarm.home, "it was never seen: no invitation is closed"
    swarm.owned.take_out(M)
    assert swarm.out(swarm.home, *others, M, C) == [M, C], "C: another name"
    assert swarm.home_now() != swarm.home and swarm.out(swarm.home_now(), M, C) == [M]


def test_kick_evicting_others_is_refused(swarm):
    others = [A, B, *swarm.made_up(600)]
    with pytest.raises(SetupError, match="^224 others") as refused:
        swarm.owned.take_out(M)
    assert "invite --close all" in refused.value.hint and swarm.owned.book.policy == Policy()
    swarm.owned.close(None)
    assert swarm.out(swarm.home, *others, M) == others[-223:]
    for one in (M, *others[2:9]):
        swarm.owned.take_out(one)
    assert swarm.out(swarm.home, *others, M) == [*others[2:9], *others[-223:], M]
    assert not swarm.out(swarm.home_now(), *others[-223:]), "they can join again"


def test_member_is_found_by_short_id(swarm):
    find, own = swarm.owned.find, ensure_identity(swarm.folder / "other.key")
    assert find(short_name(M)) == find(M[-6:]) == M and find(STRANGER) == STRANGER
    for word in ("", "...", "Qm", "nobody", M[-3:], "Qmxxxxxxxx"):
        with pytest.raises(SetupError, match="is the id of no member"):
            find(word)
    assert (find(own), find(A)) == (own, A), "of this folder is who has its key, wherever one joins"
    (swarm.folder / "other.key").rename(swarm.folder / IDENTITY_FILE)
    swarm.enter(own)
    swarm.run()
    for word in (own, own[-6:]):
        with pytest.raises(SetupError, match="own peer"):
            find(word)
    assert find(A) == A


def test_owner_lists_absent_and_kicked_members(swarm, tmp_path):
    watcher, _ = swarm.invite(Role.watcher)
    other = find_standing(tmp_path / "other", Invitation())
    other.book.decide(other.owner, lambda policy: Policy(out=frozenset({mark_of(id_of(M))})))
    for folder in (None, other.folder):
        listed = {one["peer_id"]: one["objection"] for one in list_members(folder, watcher)}
        assert listed == dict.fromkeys((A, B, M)) and swarm.standing == Credentials(watcher.membership)
    swarm.owned.take_out(M)
    del swarm.records[roll.MEMBERS_KEY][B]
    came = {"invitation": swarm.home.grant.id, "role": "member"}
    for invitation in (watcher, Invitation()):
        assert list_members(swarm.folder, invitation) == [
            {"peer_id": one, "is_there": is_there, "objection": objection} | came
            for one, is_there, objection in ((A, True, None), (B, False, None), (M, True, TAKEN_OUT))
        ]
        assert swarm.is_sought_here
    with pytest.raises(SetupError, match="open swarm"):
        list_members(None, Invitation((HOME,)))


def test_newest_own_folder_is_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match="no run of yours"):
        own_folder()
    with pytest.raises(SetupError, match="not yours, or open"):
        OwnedSwarm(tmp_path)
    for name in ("old", "new"):
        find_standing(tmp_path / "runs" / name, Invitation())
    os.utime(tmp_path / "runs" / "old", (1, 1))
    assert own_folder() == Path("runs/new")
    with pytest.raises(SetupError, match="where its peer can be reached") as refused:
        OwnedSwarm(own_folder()).invite(Role.member, is_once=False, lasts_s=None)
    assert "start the peer once" in refused.value.hint
