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
        self.dht, self.home = FakeNode(A, now=lambda: self.now), OWNER.invite()

    def enter(self, membership, *peers):
        for peer in peers:
            owner = OWNER if peer == A else None
            standing = Credentials(membership, owner, self.folder if owner else None)
            self.books[peer], node = standing.book(), self.dht.neighbour(peer)
            self.rolls[peer] = MemberList(node, standing, self.books[peer], lambda: self.now)

    def run(self, seconds=LOOK_EVERY_S + 2):
        for _ in range(int(seconds)):
            for roll in list(self.rolls.values()):
                roll.turn()
            self.now += 1.0

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
    swarm.run()
    assert read_members(swarm.dht, OWNER.public) == {A: swarm.home.grant, B: swarm.home.grant}
    del swarm.rolls[B]
    swarm.run(CERTIFICATE_TTL_S + PUBLISH_EVERY_S)
    assert read_members(swarm.dht, OWNER.public).keys() == {A}
    assert read_roll(swarm.folder).keys() == {A, B}
    assert swarm.books[A].policy == Policy(), "an invitation that is good for ever needs no word"


def test_an_invitation_for_one_is_used_by_the_first(swarm):
    once = OWNER.invite(is_once=True)
    swarm.enter(once, B)
    swarm.run()
    assert "used before" in swarm.objection(C, once)
    swarm.enter(once, C)
    swarm.run(3 * LOOK_EVERY_S)
    assert swarm.objection(B, once) == "" and "used before" in swarm.objection(C, once)


def test_who_came_in_time_stays_and_nobody_fills_the_policy(swarm):
    short, other = OWNER.invite(expires=100), OWNER.invite(expires=100)
    for peer in made_up(MAX_ARRIVALS + 10, short.grant):
        id_ = PeerID.from_base58(peer).to_bytes()
        swarm.dht.neighbour(peer).publish(members_key(), short.certify(id_), 60)
    swarm.run(1)
    swarm.enter(other, B)
    swarm.run()
    assert len(swarm.books[A].policy.stay) == MAX_ARRIVALS + 1
    swarm.now = 200.0
    swarm.enter(other, C)
    swarm.run()
    assert swarm.objection(B, other, now=1000) == "" and "over" in swarm.objection(C, other, now=1000)


@pytest.mark.parametrize(
    ("witness", "is_believed"),
    [
        *((OWNER.invite(), True), (OWNER.invite(expires=1000), True), (OWNER.invite(expires=200), False)),
        *((OWNER.invite(is_once=True), False), (OWNER.invite(Role.watcher), False)),
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
    swarm.run()
    swarm.books[A].decide(OWNER, lambda policy: without(M, {}, policy))
    swarm.run()
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
    swarm.run()
    swarm.now += 60
    write_down(swarm.folder, made_up(2 * MAX_MEMBERS, swarm.home.grant), BOOK)  # M's, that keep nobody in
    roll = read_roll(swarm.folder)
    swarm.books[A].decide(OWNER, lambda policy: without(M, roll, policy))
    assert [swarm.objection(peer, swarm.home) for peer in (A, B)] == ["", ""]
    assert "closed" in swarm.objection(C, swarm.home), "under another name"
    swarm.run(3 * LOOK_EVERY_S)
    assert swarm.objection(M, swarm.home) == TAKEN_OUT


def test_the_roll_is_a_private_file_with_room_for_each_invitation_and_an_empty_one_if_torn(tmp_path):
    first, second = OWNER.invite().grant, OWNER.invite().grant
    assert write_down(tmp_path, {A: first}, BOOK) == read_roll(tmp_path)
    assert write_down(tmp_path, {A: second, B: first}, BOOK)[A].grant == second, "it came by another one"
    write_down(tmp_path, made_up(2 * MAX_MEMBERS, first), BOOK)
    kept = write_down(tmp_path, {C: first, M: second}, BOOK)
    assert len(kept) == MAX_MEMBERS + 2 and kept.keys() >= {A, B, M} and C not in kept
    assert (tmp_path / ROLL_FILE).stat().st_mode & 0o077 == 0
    for content in ("", "{", "[]", '{"version": 9}', '{"version": 1, "members": {"x": {}}}'):
        (tmp_path / ROLL_FILE).write_text(content)
        assert read_roll(tmp_path) == {}
