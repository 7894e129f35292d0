"""What an owner decides, and how the others come to know it."""

from dataclasses import replace

import pytest

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm.membership import KEY_BYTES, Owner
from trahiv_cli.swarm.policy import (
    ARRIVALS_FILE,
    LOOK_EVERY_S,
    MAX_ARRIVALS,
    MAX_MARKS,
    MAX_POLICY_BYTES,
    TAKEN_OUT,
    Policy,
    PolicyBook,
    mark_of,
)

OWNER, OTHER = Owner(bytes(range(KEY_BYTES))), Owner(bytes(KEY_BYTES))
GRANT, ONCE, SHORT = (OWNER.invite(**terms).grant for terms in ({}, {"is_once": True}, {"expires": 1000}))
ALICE, MALLORY = b"alice", b"mallory"
KICKED = Policy(1, out=frozenset({mark_of(MALLORY)}))
MANY = frozenset(mark_of(b"%d" % number) for number in range(500))


def marks(*parts):
    return frozenset(mark_of(*one) for one in parts)


# -- who is a member ------------------------------------------------------------------------------

STAYS = marks((ALICE, GRANT.key), (ALICE, SHORT.key))


@pytest.mark.parametrize(
    ("policy", "peer", "grant", "word"),
    [
        (Policy(), ALICE, GRANT, ""),
        (Policy(), ALICE, ONCE, ""),
        (Policy(), ALICE, SHORT, ""),
        (KICKED, ALICE, GRANT, ""),
        (replace(KICKED, stay=marks((MALLORY, GRANT.key))), MALLORY, GRANT, TAKEN_OUT),
        (Policy(1, closed=marks((GRANT.key,))), ALICE, GRANT, "closed"),
        (Policy(1, closed=marks((ONCE.key,))), ALICE, ONCE, "used before"),
        (Policy(1, closed=marks((GRANT.key,)), stay=STAYS), ALICE, GRANT, ""),
        (Policy(1, closed=marks((ONCE.key,)), stay=STAYS), ALICE, ONCE, "used before"),
        (Policy(1, era=1), ALICE, GRANT, "closed"),
        (Policy(1, era=1), ALICE, SHORT, "closed"),
        (Policy(1, era=1, stay=STAYS), ALICE, GRANT, ""),
        (Policy(1, era=1), ALICE, OWNER.invite(era=1).grant, ""),
    ],
)
def test_who_is_a_member(policy, peer, grant, word):
    objection = policy.objection(peer, grant, now=999)
    assert word in objection and bool(word) == bool(objection)


def test_an_invitation_is_over_at_its_time():
    assert "over" in Policy().objection(ALICE, SHORT, now=1000)
    assert Policy(1, stay=STAYS).objection(ALICE, SHORT, now=1e9) == ""


# -- as bytes -------------------------------------------------------------------------------------


def test_it_comes_back_as_it_was_and_only_from_its_owner():
    policy = replace(KICKED, era=5, closed=marks((b"1",), (b"2",)), stay=marks((b"3",)))
    assert Policy.parse(policy.to_bytes(OWNER), OWNER.public) == policy
    with pytest.raises(SetupError, match="policy"):
        Policy(1, out=MANY).to_bytes(OWNER)


@pytest.mark.parametrize(
    "wire",
    [
        *(b"", b"x", bytes(64), bytes(MAX_POLICY_BYTES + 1), None, "text", 7),
        KICKED.to_bytes(OTHER),
        KICKED.to_bytes(OWNER)[:-1],
        KICKED.to_bytes(OWNER) + b"\0",
        OWNER.sign(b"trahiv: the owner decides " + b"\x90") + b"\x90",
    ],
)
def test_what_the_owner_did_not_sign_is_none(wire):
    with pytest.raises(ValueError, match="polic|owner"):
        Policy.parse(wire, OWNER.public)


# -- the book -------------------------------------------------------------------------------------


def wire(serial, owner=OWNER):
    return replace(KICKED, serial=serial).to_bytes(owner)


@pytest.fixture
def open_book(tmp_path, clock):
    """Open the policy as a process of the peer does."""
    return lambda: PolicyBook(OWNER.public, tmp_path / "policy", clock)


@pytest.mark.parametrize("is_file", [True, False])
def test_the_newest_counts_in_whatever_order_they_come(open_book, is_file):
    book = open_book() if is_file else PolicyBook(OWNER.public)
    assert book.policy == Policy() and book.wire == b""
    taken = [book.offer(wire(serial)) for serial in (2, 1, 3, 3, 2)]
    assert taken == [True, False, True, False, False]
    assert book.policy.serial == 3 and book.wire == wire(3)
    assert not book.offer(wire(9, OTHER)) and not book.offer(None)


def test_other_processes_see_it_soon_and_no_torn_or_older_file_changes_it(open_book, tmp_path, clock):
    first, second = open_book(), open_book()
    assert second.policy == Policy()
    first.offer(wire(4))
    clock.now += LOOK_EVERY_S
    assert second.policy.serial == 4 and open_book().wire == wire(4)
    for content in (b"", wire(3), wire(9, OTHER), wire(4)[:50], None):
        (tmp_path / "policy").unlink() if content is None else (tmp_path / "policy").write_bytes(content)
        clock.now += LOOK_EVERY_S
        assert second.policy.serial == 4


def test_a_decision_is_numbered_kept_and_known_to_others(open_book, tmp_path):
    book = open_book()
    with pytest.raises(SetupError):
        book.decide(OWNER, lambda policy: replace(policy, out=MANY))
    assert book.policy == Policy() and not (tmp_path / "policy").exists()
    first = book.decide(OWNER, lambda policy: replace(policy, out=KICKED.out))
    assert book.policy == open_book().policy == KICKED
    assert book.decide(OWNER, lambda policy: policy) == first, "nothing has changed"
    book.decide(OWNER, lambda policy: replace(policy, out=frozenset()))
    assert book.policy == Policy(2)
    assert (tmp_path / "policy").stat().st_mode & 0o077 == 0


def kicking(peer):
    return lambda policy: replace(policy, out=policy.out | {mark_of(peer)})


@pytest.mark.parametrize("before", [0, 1], ids=["of one serial", "of a later one"])
def test_kicks_from_two_copies_of_the_owner_s_folder_both_count(tmp_path, before):
    one, other = (PolicyBook(OWNER.public, tmp_path / copy / "policy") for copy in ("one", "other"))
    for _ in range(before):
        one.decide(OWNER, lambda policy: replace(policy, closed=marks((GRANT.key,))))
    first, second = one.decide(OWNER, kicking(ALICE)), other.decide(OWNER, kicking(MALLORY))
    both = []
    for book, offered in ((one, second), (other, first)):
        book.offer(offered)
        both.append(book.decide(OWNER, lambda policy: policy))
        assert book.policy.is_out(ALICE) and book.policy.is_out(MALLORY)
        assert book.policy.closed == Policy.parse(first, OWNER.public).closed
    member = PolicyBook(OWNER.public)
    assert [member.offer(offered) for offered in (first, both[0])] == [True, True]
    assert one.offer(both[1]) is False and one.decide(OWNER, lambda policy: policy) == both[0], "no end of it"


def test_what_a_later_era_has_closed_is_not_added_from_an_earlier_one():
    stays = marks((MALLORY, GRANT.key))
    earlier = Policy(3, out=marks((ALICE,)), closed=marks((GRANT.key,)), stay=stays)
    for one, other in ((earlier, Policy(2, era=1)), (Policy(2, era=1), earlier)):
        assert one.with_those_of(other) == Policy(one.serial, earlier.out, frozenset(), stays, 1)


def test_those_who_stay_leave_room_for_decisions():
    full = Policy(2, stay=frozenset(sorted(MANY)[:MAX_MARKS]))
    joint = full.with_those_of(replace(KICKED, stay=marks((ALICE,))))
    assert joint.out == KICKED.out and joint.room == 0 and joint.stay < full.stay
    joint.to_bytes(OWNER)


# -- who came in time -----------------------------------------------------------------------------


def test_who_came_in_time_is_known_to_all_processes_of_the_peer(open_book, tmp_path, clock):
    first, second = open_book(), open_book()
    assert not second.came_in_time(ALICE, SHORT)
    first.note_arrival(ALICE, SHORT)
    second.note_arrival(MALLORY, SHORT)
    clock.now += LOOK_EVERY_S
    for one in (first, second, open_book()):
        assert one.came_in_time(ALICE, SHORT) and one.came_in_time(MALLORY, SHORT)
        assert not one.came_in_time(ALICE, GRANT) and not one.came_in_time(b"bob", SHORT)
    content = (tmp_path / ARRIVALS_FILE).read_bytes()
    assert (tmp_path / ARRIVALS_FILE).stat().st_mode & 0o077 == 0
    for length in range(len(content)):  # a torn file loses the last one only
        (tmp_path / ARRIVALS_FILE).write_bytes(content[:length])
        torn = open_book()
        assert torn.came_in_time(MALLORY, SHORT) == (length >= 16)
        assert not torn.came_in_time(ALICE, SHORT)


def test_names_by_one_invitation_take_no_places_of_another():
    book = PolicyBook(OWNER.public)
    for number in range(MAX_ARRIVALS):
        book.note_arrival(b"%d" % number, SHORT)
    for grant in (SHORT, ONCE):
        book.note_arrival(ALICE, grant)
    assert not book.came_in_time(ALICE, SHORT) and book.came_in_time(ALICE, ONCE)


def test_of_those_about_whom_the_owner_has_decided_nothing_is_handed_on(open_book):
    book = open_book()
    for grant in (SHORT, ONCE):
        for peer in (ALICE, MALLORY):
            book.note_arrival(peer, grant)
    stay, closed = marks((ALICE, SHORT.key)), marks((ONCE.key,))
    book.decide(OWNER, lambda policy: replace(policy, stay=stay, closed=closed))
    assert book.witnessed() == mark_of(MALLORY, SHORT.key)
