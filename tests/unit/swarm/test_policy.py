"""What an owner decides, and how the others come to know it."""

import os
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
GRANT, ONCE, SHORT = (
    OWNER.invite().grant,
    OWNER.invite(is_once=True).grant,
    OWNER.invite(expires=1000).grant,
)
ALICE, MALLORY = b"alice", b"mallory"
KICKED = Policy(1, out=frozenset({mark_of(MALLORY)}))


# -- who is a member ------------------------------------------------------------------------------


def test_without_a_policy_every_good_certificate_is_one():
    assert [Policy().objection(ALICE, grant, now=0) for grant in (GRANT, ONCE, SHORT)] == ["", "", ""]


def test_who_was_taken_out_is_out_whatever_else_is_decided():
    policy = replace(KICKED, stay=frozenset({mark_of(MALLORY, GRANT.key)}))
    assert policy.objection(MALLORY, GRANT, now=0) == TAKEN_OUT
    assert policy.objection(ALICE, GRANT, now=0) == ""


@pytest.mark.parametrize(("grant", "word"), [(GRANT, "closed"), (ONCE, "used before")])
def test_by_a_closed_invitation_nobody_comes_and_some_stay(grant, word):
    policy = Policy(1, closed=frozenset({mark_of(grant.key)}), stay=frozenset({mark_of(ALICE, grant.key)}))
    assert word in policy.objection(MALLORY, grant, now=0)
    assert policy.objection(ALICE, grant, now=0) == ""


def test_who_stays_by_one_invitation_does_not_by_another():
    closed = frozenset({mark_of(GRANT.key), mark_of(ONCE.key)})
    policy = Policy(1, closed=closed, stay=frozenset({mark_of(ALICE, GRANT.key)}))
    assert policy.objection(ALICE, ONCE, now=0)


def test_a_later_era_closes_all_invitations_of_those_before():
    policy = Policy(2, stay=frozenset({mark_of(ALICE, GRANT.key)}), era=1)
    assert policy.objection(MALLORY, GRANT, now=0) == policy.objection(MALLORY, SHORT, now=0) != ""
    assert policy.objection(ALICE, GRANT, now=0) == ""
    assert policy.objection(MALLORY, OWNER.invite(era=1).grant, now=0) == ""


def test_an_invitation_is_over_at_its_time():
    assert Policy().objection(ALICE, SHORT, now=999) == ""
    assert "over" in Policy().objection(ALICE, SHORT, now=1000)
    stays = Policy(1, stay=frozenset({mark_of(ALICE, SHORT.key)}))
    assert stays.objection(ALICE, SHORT, now=1e9) == ""


# -- as bytes -------------------------------------------------------------------------------------


def test_it_comes_back_as_it_was():
    policy = replace(
        KICKED, era=5, closed=frozenset({mark_of(b"1"), mark_of(b"2")}), stay=frozenset({mark_of(b"3")})
    )
    assert Policy.parse(policy.to_bytes(OWNER), OWNER.public) == policy


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


def test_one_that_grows_too_long_is_refused():
    many = frozenset(mark_of(b"%d" % number) for number in range(500))
    with pytest.raises(SetupError, match="policy"):
        Policy(1, out=many).to_bytes(OWNER)


# -- the book -------------------------------------------------------------------------------------


def wire(serial, owner=OWNER):
    return replace(KICKED, serial=serial).to_bytes(owner)


@pytest.mark.parametrize("is_file", [True, False])
def test_the_newest_counts_in_whatever_order_they_come(tmp_path, is_file):
    book = PolicyBook(OWNER.public, tmp_path / "policy" if is_file else None)
    assert book.policy == Policy() and book.wire == b""
    taken = [book.offer(wire(serial)) for serial in (2, 1, 3, 3, 2)]
    assert taken == [True, False, True, False, False]
    assert book.policy.serial == 3 and book.wire == wire(3)
    assert not book.offer(wire(9, OTHER)) and not book.offer(None)


def test_other_processes_of_the_peer_see_it_soon_and_after_a_restart(tmp_path):
    now = [0.0]
    first, second = (PolicyBook(OWNER.public, tmp_path / "policy", clock=lambda: now[0]) for _ in range(2))
    assert second.policy == Policy()
    first.offer(wire(4))
    now[0] += LOOK_EVERY_S
    assert second.policy.serial == 4
    assert PolicyBook(OWNER.public, tmp_path / "policy").wire == wire(4)


def test_a_file_that_is_torn_or_an_older_one_changes_nothing(tmp_path):
    now = [0.0]
    book = PolicyBook(OWNER.public, tmp_path / "policy", clock=lambda: now[0])
    book.offer(wire(4))
    for content in (b"", wire(3), wire(9, OTHER), wire(4)[:50]):
        (tmp_path / "policy").write_bytes(content)
        now[0] += LOOK_EVERY_S
        assert book.policy.serial == 4
    (tmp_path / "policy").unlink()
    now[0] += LOOK_EVERY_S
    assert book.policy.serial == 4


def test_a_decision_is_numbered_kept_and_known_to_others(tmp_path):
    book = PolicyBook(OWNER.public, tmp_path / "policy")
    first = book.decide(OWNER, lambda policy: replace(policy, out=KICKED.out))
    assert book.policy == KICKED
    assert PolicyBook(OWNER.public, tmp_path / "policy").policy == KICKED
    assert book.decide(OWNER, lambda policy: policy) == first, "nothing has changed"
    book.decide(OWNER, lambda policy: replace(policy, out=frozenset()))
    assert book.policy == Policy(2)
    assert os.stat(tmp_path / "policy").st_mode & 0o077 == 0


def test_a_decision_that_can_t_be_written_counts_for_nothing(tmp_path):
    book = PolicyBook(OWNER.public, tmp_path / "policy")
    many = frozenset(mark_of(b"%d" % number) for number in range(500))
    with pytest.raises(SetupError):
        book.decide(OWNER, lambda policy: replace(policy, out=many))
    assert book.policy == Policy() and not (tmp_path / "policy").exists()


def kicking(peer):
    return lambda policy: replace(policy, out=policy.out | {mark_of(peer)})


@pytest.mark.parametrize("before", [0, 1], ids=["of one serial", "of a later one"])
def test_kicks_from_two_copies_of_the_owner_s_folder_both_count(tmp_path, before):
    one, other = (PolicyBook(OWNER.public, tmp_path / copy / "policy") for copy in ("one", "other"))
    for _ in range(before):
        one.decide(OWNER, lambda policy: replace(policy, closed=frozenset({mark_of(GRANT.key)})))
    first, second = one.decide(OWNER, kicking(ALICE)), other.decide(OWNER, kicking(MALLORY))
    both = []
    for book, wire in ((one, second), (other, first)):
        book.offer(wire)
        both.append(book.decide(OWNER, lambda policy: policy))
        assert book.policy.is_out(ALICE) and book.policy.is_out(MALLORY)
        assert book.policy.closed == Policy.parse(first, OWNER.public).closed
    member = PolicyBook(OWNER.public)
    assert [member.offer(wire) for wire in (first, both[0])] == [True, True]
    assert one.offer(both[1]) is False and one.decide(OWNER, lambda policy: policy) == both[0], "no end of it"


def test_what_a_later_era_has_closed_is_not_added_from_an_earlier_one():
    key, stays = mark_of(GRANT.key), frozenset({mark_of(MALLORY, GRANT.key)})
    earlier = Policy(3, out=frozenset({mark_of(ALICE)}), closed=frozenset({key}), stay=stays)
    for one, other in ((earlier, Policy(2, era=1)), (Policy(2, era=1), earlier)):
        assert one.with_those_of(other) == Policy(one.serial, earlier.out, frozenset(), stays, 1)


def test_those_who_stay_leave_room_for_decisions():
    full = Policy(2, stay=frozenset(mark_of(b"%d" % number) for number in range(MAX_MARKS)))
    joint = full.with_those_of(replace(KICKED, stay=frozenset({mark_of(ALICE)})))
    assert joint.out == KICKED.out and joint.room == 0 and joint.stay < full.stay
    joint.to_bytes(OWNER)


# -- who came in time -----------------------------------------------------------------------------


@pytest.fixture
def book(tmp_path):
    return PolicyBook(OWNER.public, tmp_path / "policy")


def test_who_came_in_time_is_known_to_all_processes_of_the_peer(tmp_path):
    now = [0.0]
    first, second = (PolicyBook(OWNER.public, tmp_path / "policy", clock=lambda: now[0]) for _ in range(2))
    assert not second.came_in_time(ALICE, SHORT)
    first.note_arrival(ALICE, SHORT)
    second.note_arrival(MALLORY, SHORT)
    now[0] += LOOK_EVERY_S
    third = PolicyBook(OWNER.public, tmp_path / "policy")
    for one in (first, second, third):
        assert one.came_in_time(ALICE, SHORT) and one.came_in_time(MALLORY, SHORT)
        assert not one.came_in_time(ALICE, GRANT) and not one.came_in_time(b"bob", SHORT)
    assert (tmp_path / ARRIVALS_FILE).stat().st_mode & 0o077 == 0


def test_names_by_one_invitation_take_no_places_of_another(book):
    for number in range(MAX_ARRIVALS):
        book._arrivals[mark_of(b"%d" % number)] = mark_of(SHORT.key)
    for grant in (SHORT, ONCE):
        book.note_arrival(ALICE, grant)
    assert not book.came_in_time(ALICE, SHORT) and book.came_in_time(ALICE, ONCE)


def test_a_file_of_arrivals_that_is_torn_loses_the_last_one_only(book, tmp_path):
    for peer in (ALICE, MALLORY):
        book.note_arrival(peer, SHORT)
    content = (tmp_path / ARRIVALS_FILE).read_bytes()
    for length in range(len(content)):
        (tmp_path / ARRIVALS_FILE).write_bytes(content[:length])
        torn = PolicyBook(OWNER.public, tmp_path / "policy")
        assert torn.came_in_time(ALICE, SHORT) == (length >= 16)
        assert not torn.came_in_time(MALLORY, SHORT)


def test_of_those_about_whom_the_owner_has_decided_nothing_is_handed_on(book):
    for grant in (SHORT, ONCE):
        for peer in (ALICE, MALLORY):
            book.note_arrival(peer, grant)
    stay, closed = frozenset({mark_of(ALICE, SHORT.key)}), frozenset({mark_of(ONCE.key)})
    book.decide(OWNER, lambda policy: replace(policy, stay=stay, closed=closed))
    assert book.witnessed() == mark_of(MALLORY, SHORT.key)
