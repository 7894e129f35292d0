"""What proves membership, what an owner decides about it, and how the processes of a peer come to know that.

A policy that was damaged, or is older, is taken over by nobody: see
`tests/simulation/test_records_of_a_liar.py`.
"""

import pickle
from dataclasses import replace

import pytest

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm import policy as policies
from trahiv_cli.swarm.membership import (
    CERTIFICATE_BYTES,
    KEY_BYTES,
    Grant,
    Membership,
    Owner,
    Role,
    certified,
)
from trahiv_cli.swarm.policy import Policy, PolicyBook, mark_of

OWNER, OTHER = Owner(bytes(range(KEY_BYTES))), Owner(bytes(KEY_BYTES))
SWARM = OWNER.invite()
ALICE, MALLORY = b"\x12\x20" + b"a" * 32, b"\x12\x20" + b"m" * 32
GRANT, ONCE, SHORT = (OWNER.invite(**terms).grant for terms in ({}, {"is_once": True}, {"expires": 1000}))
KICKED = Policy(1, out=frozenset({mark_of(MALLORY)}))
MANY = frozenset(mark_of(b"%d" % number) for number in range(500))


def marks(*parts):
    return frozenset(mark_of(*one) for one in parts)


def test_a_member_is_known_by_everybody_who_knows_the_owner_and_by_nobody_else():
    certificate = SWARM.certify(ALICE)
    assert certified(OWNER.public, ALICE, certificate) == SWARM.grant
    assert certified(OWNER.public, MALLORY, certificate) is None, "stolen"
    assert certified(OTHER.public, ALICE, certificate) is None, "of another swarm"
    assert SWARM.secret not in certificate and repr(SWARM.secret) not in repr(SWARM)
    assert pickle.loads(pickle.dumps(SWARM)).certify(ALICE) == certificate, "in another process"
    changed = [bytes(one ^ (at == i) for i, one in enumerate(certificate)) for at in range(CERTIFICATE_BYTES)]
    for content in (*changed, certificate[:-1], certificate + b"\0", b"", bytes(CERTIFICATE_BYTES)):
        assert certified(OWNER.public, ALICE, content) is None


def test_what_an_invitation_is_good_for_can_t_be_widened():
    narrow, terms = OWNER.invite(Role.watcher, is_once=True, expires=2**33, era=3), (1, True, 2**33, 3)
    assert Grant.parse(narrow.grant.to_bytes()) == narrow.grant
    whole = (narrow.owner, narrow.secret, *terms, narrow.grant.signature)
    assert Membership.of(*whole) == narrow
    for place, other in enumerate((OTHER.public, bytes(16), 0, False, 0, 4)):
        with pytest.raises(ValueError, match="did not sign"):
            Membership.of(*whole[:place], other, *whole[place + 1 :])


STAYS = marks((ALICE, GRANT.key), (ALICE, SHORT.key))


@pytest.mark.parametrize(
    ("policy", "peer", "grant", "word"),
    [
        *((Policy(), ALICE, grant, "") for grant in (GRANT, ONCE, SHORT)),
        (KICKED, ALICE, GRANT, ""),
        (replace(KICKED, stay=marks((MALLORY, GRANT.key))), MALLORY, GRANT, policies.TAKEN_OUT),
        (Policy(1, closed=marks((GRANT.key,))), ALICE, GRANT, "closed"),
        (Policy(1, closed=marks((GRANT.key,)), stay=STAYS), ALICE, GRANT, ""),
        (Policy(1, closed=marks((ONCE.key,)), stay=STAYS), ALICE, ONCE, "used before"),
        (Policy(1, era=1), ALICE, SHORT, "closed"),
        (Policy(1, era=1, stay=STAYS), ALICE, GRANT, ""),
        (Policy(1, era=1), ALICE, OWNER.invite(era=1).grant, ""),
        (Policy(), ALICE, OWNER.invite(expires=999).grant, "over"),
        (Policy(1, stay=STAYS), ALICE, replace(SHORT, expires=999), ""),
    ],
)
def test_who_is_a_member(policy, peer, grant, word):
    objection = policy.objection(peer, grant, now=999)
    assert word in objection and bool(word) == bool(objection)


# -- the book -------------------------------------------------------------------------------------


def wire(serial, owner=OWNER):
    return replace(KICKED, serial=serial).to_bytes(owner)


@pytest.fixture
def open_book(tmp_path, clock):
    """Open the policy as a process of the peer does."""
    return lambda: PolicyBook(OWNER.public, tmp_path / "policy", clock)


def test_the_newest_policy_counts_in_all_processes_and_no_torn_or_older_file(open_book, tmp_path, clock):
    first, second = open_book(), open_book()
    assert second.policy == Policy() and second.wire == b""
    assert [first.offer(wire(serial)) for serial in (3, 1, 4, 4, 3)] == [True, False, True, False, False]
    assert not first.offer(wire(9, OTHER)) and not first.offer(None) and first.wire == wire(4)
    clock.now += policies.LOOK_EVERY_S
    assert second.policy.serial == 4 and open_book().wire == wire(4)
    for content in (b"", wire(3), wire(9, OTHER), wire(4)[:50], None):
        (tmp_path / "policy").unlink() if content is None else (tmp_path / "policy").write_bytes(content)
        clock.now += policies.LOOK_EVERY_S
        assert second.policy.serial == 4


def test_a_decision_is_numbered_kept_and_private(open_book, tmp_path):
    book = open_book()
    with pytest.raises(SetupError, match="longer than"):
        book.decide(OWNER, lambda policy: replace(policy, out=MANY))
    assert book.policy == Policy() and not (tmp_path / "policy").exists()
    first = book.decide(OWNER, lambda policy: replace(policy, out=KICKED.out))
    assert book.policy == open_book().policy == KICKED
    assert book.decide(OWNER, lambda policy: policy) == first, "nothing has changed"
    assert (tmp_path / "policy").stat().st_mode & 0o077 == 0


def test_kicks_from_two_copies_of_the_owner_s_folder_both_count(tmp_path):
    one, other = (PolicyBook(OWNER.public, tmp_path / copy / "policy") for copy in ("one", "other"))
    one.decide(OWNER, lambda policy: replace(policy, closed=marks((GRANT.key,))))
    first, second = (
        book.decide(OWNER, lambda policy, peer=peer: replace(policy, out=policy.out | {mark_of(peer)}))
        for book, peer in ((one, ALICE), (other, MALLORY))
    )
    both = []
    for book, offered in ((one, second), (other, first)):
        book.offer(offered)
        both.append(book.decide(OWNER, lambda policy: policy))
        assert book.policy.is_out(ALICE) and book.policy.is_out(MALLORY)
        assert book.policy.closed == Policy.parse(first, OWNER.public).closed
    assert one.offer(both[1]) is False and one.decide(OWNER, lambda policy: policy) == both[0], "no end of it"


def test_of_two_copies_decisions_the_later_era_counts_and_those_who_stay_leave_room():
    stays = marks((MALLORY, GRANT.key))
    earlier = Policy(3, out=marks((ALICE,)), closed=marks((GRANT.key,)), stay=stays)
    for one, other in ((earlier, Policy(2, era=1)), (Policy(2, era=1), earlier)):
        assert one.with_those_of(other) == Policy(one.serial, earlier.out, frozenset(), stays, 1)
    full = Policy(2, stay=frozenset(sorted(MANY)[: policies.MAX_MARKS]))
    joint = full.with_those_of(KICKED)
    assert joint.out == KICKED.out and joint.room == 0 and joint.stay < full.stay


def test_who_came_in_time_is_known_to_all_processes_and_takes_no_places_of_another_invitation(
    open_book, tmp_path, clock
):
    first, second, arrivals = open_book(), open_book(), tmp_path / policies.ARRIVALS_FILE
    assert not second.came_in_time(ALICE, SHORT)
    first.note_arrival(ALICE, SHORT)
    second.note_arrival(MALLORY, SHORT)
    clock.now += policies.LOOK_EVERY_S
    for one in (first, second, open_book()):
        assert one.came_in_time(ALICE, SHORT) and one.came_in_time(MALLORY, SHORT)
        assert not one.came_in_time(ALICE, GRANT) and not one.came_in_time(b"bob", SHORT)
    content = arrivals.read_bytes()
    assert arrivals.stat().st_mode & 0o077 == 0
    for length in (0, 15, 16, len(content) - 1):  # a torn file loses the last one only
        arrivals.write_bytes(content[:length])
        torn = open_book()
        assert torn.came_in_time(MALLORY, SHORT) == (length >= 16) and not torn.came_in_time(ALICE, SHORT)
    first.note_arrival(ALICE, ONCE)
    decided = {"stay": marks((ALICE, SHORT.key)), "closed": marks((ONCE.key,))}
    first.decide(OWNER, lambda policy: replace(policy, **decided))
    assert first.witnessed() == mark_of(MALLORY, SHORT.key), "about the others the owner has decided"
    full = PolicyBook(OWNER.public)
    for number in range(policies.MAX_ARRIVALS):
        full.note_arrival(b"%d" % number, SHORT)
    for grant in (SHORT, ONCE):
        full.note_arrival(ALICE, grant)
    assert not full.came_in_time(ALICE, SHORT) and full.came_in_time(ALICE, ONCE)
