"""Who stands in the roll, and what becomes of those that came by an invitation that is not good any more."""

import pytest
from hivemind.p2p import PeerID

from tests.kit.fakes import FakeNode
from trahiv_cli.swarm import roll as roll_module
from trahiv_cli.swarm.membership import KEY_BYTES, Owner, Role
from trahiv_cli.swarm.policy import MAX_ARRIVALS, TAKEN_OUT, Policy, PolicyBook
from trahiv_cli.swarm.roll import (
    CERTIFICATE_TTL_S,
    LOOK_EVERY_S,
    MAX_MEMBERS,
    POLICY_TTL_S,
    PUBLISH_EVERY_S,
    ROLL_FILE,
    Credentials,
    MemberList,
    closing,
    lost,
    members_key,
    policy_key,
    read_members,
    read_roll,
    without,
    write_down,
)

OWNER = Owner(bytes(range(KEY_BYTES)))
IDS = {name: PeerID(b"\x12\x20" + name.encode() * 32) for name in "ABCMS"}
A, B, C, M, STRANGER = (str(id_.to_base58()) for id_ in IDS.values())
BOOK = PolicyBook(OWNER.public)


def made_up(number, grant):
    """Names that one member makes up."""
    return {str(PeerID(b"\x12\x20" + b"%032d" % n).to_base58()): grant for n in range(number)}


class Swarm:
    """Members with a roll each, over a DHT that is a dict; `run` has all take their turns for so long."""

    def __init__(self, folder):
        self.folder, self.now, self.rolls, self.books = folder, 0.0, {}, {}
        self.dht = FakeNode(A, now=lambda: self.now)
        self.home = OWNER.invite()

    def enter(self, membership, *peers):
        for peer in peers:
            owner = OWNER if peer == A else None
            standing = Credentials(membership, owner, self.folder if owner else None)
            self.books[peer], node = standing.book(), self.dht.neighbour(peer)
            self.rolls[peer] = MemberList(node, standing, self.books[peer], lambda: self.now)

    def run(self, seconds):
        for _ in range(int(seconds)):
            for roll in list(self.rolls.values()):
                roll.turn()
            self.now += 1.0

    def decide(self, change, *args):
        roll = read_roll(self.folder)
        self.books[A].decide(OWNER, lambda policy: change(*args, roll, policy))

    def objection(self, peer, membership, asked=A, now=0.0):
        policy = self.books[asked].policy
        return policy.objection(PeerID.from_base58(peer).to_bytes(), membership.grant, now)


@pytest.fixture
def swarm(tmp_path, monkeypatch):
    made = Swarm(tmp_path)
    monkeypatch.setattr(roll_module, "swarm_time", lambda: made.now)
    made.enter(made.home, A)
    return made


def test_members_are_listed_while_they_are_there_and_the_owner_remembers_them(swarm):
    swarm.enter(swarm.home, B)
    swarm.run(LOOK_EVERY_S + 2)
    assert read_members(swarm.dht, OWNER.public) == {A: swarm.home.grant, B: swarm.home.grant}
    del swarm.rolls[B]
    swarm.run(CERTIFICATE_TTL_S + PUBLISH_EVERY_S)
    assert read_members(swarm.dht, OWNER.public).keys() == {A}
    assert read_roll(swarm.folder).keys() == {A, B}
    assert swarm.books[A].policy == Policy(), "an invitation that is good for ever needs no word"


def test_what_is_no_certificate_is_nobody_s(swarm):
    stranger = swarm.dht.neighbour(M)
    for value in (swarm.home.certify(IDS["B"].to_bytes()), b"x", None, 7, [b"x"]):
        stranger.publish(members_key(), value, 60)
        assert read_members(swarm.dht, OWNER.public) == {}


def test_an_invitation_for_one_is_used_by_the_first(swarm):
    once = OWNER.invite(is_once=True)
    swarm.enter(once, B)
    swarm.run(LOOK_EVERY_S + 1)
    assert "used before" in swarm.objection(C, once)
    swarm.enter(once, C)
    swarm.run(3 * LOOK_EVERY_S)
    assert swarm.objection(B, once) == "" and "used before" in swarm.objection(C, once)


def test_who_came_in_time_stays(swarm):
    short = OWNER.invite(expires=100)
    swarm.enter(short, B)
    swarm.run(LOOK_EVERY_S + 1)
    swarm.now = 200.0
    swarm.enter(short, C)
    swarm.run(LOOK_EVERY_S + 1)
    assert swarm.objection(B, short, now=1000) == "" and "over" in swarm.objection(C, short, now=1000)


def test_who_came_by_a_full_invitation_does_not_fill_the_policy(swarm):
    short, other = OWNER.invite(expires=100), OWNER.invite(expires=100)
    for peer in made_up(MAX_ARRIVALS + 10, short.grant):
        id_ = PeerID.from_base58(peer).to_bytes()
        swarm.dht.neighbour(peer).publish(members_key(), short.certify(id_), 60)
    swarm.run(1)
    swarm.enter(other, B)
    swarm.run(LOOK_EVERY_S + 1)
    assert len(swarm.books[A].policy.stay) == MAX_ARRIVALS + 1
    assert swarm.objection(B, other, now=1000) == ""


@pytest.mark.parametrize(
    ("witness", "is_believed"),
    [
        (OWNER.invite(), True),
        (OWNER.invite(expires=1000), True),
        (OWNER.invite(expires=200), False),
        (OWNER.invite(is_once=True), False),
        (OWNER.invite(Role.watcher), False),
    ],
    ids=["open", "open until later", "expired", "for one", "to watch"],
)
def test_who_could_let_others_in_is_believed_who_came_in_time(swarm, witness, is_believed):
    short = OWNER.invite(expires=100)
    del swarm.rolls[A]  # the owner is away
    swarm.enter(short, B)
    swarm.enter(witness, C)
    swarm.books[C].note_arrival(IDS["B"].to_bytes(), short.grant)
    swarm.run(1)
    swarm.now = 300.0
    swarm.enter(swarm.home, A, M)
    swarm.enter(short, STRANGER)
    swarm.run(2 * LOOK_EVERY_S)
    for peer in (A, M):
        assert swarm.books[peer].came_in_time(IDS["B"].to_bytes(), short.grant) == is_believed
    assert (swarm.objection(B, short, now=1000) == "") == is_believed, "the owner's peer has it stay"
    assert swarm.objection(STRANGER, short, now=1000)


def test_a_decision_reaches_all_in_seconds_and_outlives_its_record(swarm):
    swarm.enter(swarm.home, B, C)
    swarm.run(LOOK_EVERY_S + 2)
    swarm.books[A].decide(OWNER, lambda policy: without(M, {}, policy))
    swarm.run(LOOK_EVERY_S + 2)
    assert {swarm.books[peer].policy.serial for peer in (A, B, C)} == {1}
    assert len(swarm.dht.fetch(policy_key())) == 1, "one record is enough for all"
    del swarm.rolls[A]  # the owner leaves; the others hand it on
    swarm.run(2 * POLICY_TTL_S)
    assert len(swarm.dht.fetch(policy_key())) == 1
    swarm.enter(swarm.home, M)
    swarm.run(LOOK_EVERY_S)
    assert swarm.objection(M, swarm.home, asked=M) == TAKEN_OUT, "also who is meant learns it"


def test_whom_the_owner_takes_out_can_t_come_back_by_the_same_invitation_and_all_others_stay(swarm):
    swarm.enter(swarm.home, B, M)
    swarm.run(LOOK_EVERY_S + 2)
    swarm.now += 60
    write_down(swarm.folder, made_up(2 * MAX_MEMBERS, swarm.home.grant), BOOK)  # M's, that keep nobody in
    swarm.decide(without, M)
    assert [swarm.objection(peer, swarm.home) for peer in (A, B)] == ["", ""]
    assert "closed" in swarm.objection(C, swarm.home), "under another name"
    swarm.run(3 * LOOK_EVERY_S)
    assert swarm.objection(M, swarm.home) == TAKEN_OUT


def test_all_stay_where_all_invitations_are_closed(swarm):
    once = OWNER.invite(is_once=True)
    swarm.enter(swarm.home, B)
    swarm.enter(once, C)
    swarm.run(LOOK_EVERY_S + 2)
    swarm.decide(closing, None)
    fresh = OWNER.invite(era=1)
    assert [swarm.objection(p, m) for p, m in ((A, swarm.home), (B, swarm.home), (C, once))] == [""] * 3
    assert "closed" in swarm.objection(M, swarm.home) and swarm.objection(M, fresh) == ""


def test_a_full_invitation_keeps_nobody_out_of_the_roll_who_comes_by_another(tmp_path):
    first, second = OWNER.invite().grant, OWNER.invite().grant
    write_down(tmp_path, made_up(2 * MAX_MEMBERS, first), BOOK)
    kept = write_down(tmp_path, {A: first, B: second}, BOOK)
    assert len(kept) == MAX_MEMBERS + 1 and B in kept and A not in kept
    assert write_down(tmp_path, {A: first}, BOOK) == read_roll(tmp_path) == kept


def test_whom_there_was_no_room_for_a_later_closing_does_not_let_in(tmp_path):
    grant = OWNER.invite().grant
    roll = write_down(tmp_path, made_up(600, grant), BOOK)
    closed = closing([grant.key], roll, Policy())
    out = lost(roll, Policy(), closed)
    assert len(out) == 600 - len(closed.stay) and closed.room == 0
    stays = next(iter(roll.keys() - out))
    kicked = without(stays, roll, closed)
    assert lost(roll, closed, kicked) == {stays} and kicked.stay < closed.stay


def test_the_roll_is_a_private_file_that_is_kept_and_an_empty_one_if_torn(tmp_path):
    first, second = OWNER.invite().grant, OWNER.invite().grant
    before = write_down(tmp_path, {A: first}, BOOK)
    assert read_roll(tmp_path) == before == write_down(tmp_path, {A: first}, BOOK)
    assert write_down(tmp_path, {A: second, B: first}, BOOK)[A].grant == second, "it came by another one"
    assert read_roll(tmp_path).keys() == {A, B}
    assert (tmp_path / ROLL_FILE).stat().st_mode & 0o077 == 0
    for content in ("", "{", "[]", '{"version": 9}', '{"version": 1, "members": {"x": {}}}'):
        (tmp_path / ROLL_FILE).write_text(content)
        assert read_roll(tmp_path) == {}
