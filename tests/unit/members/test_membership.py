"""Certificates of membership, the owner's policy, and how it reaches the processes of a peer.

That no peer takes over a damaged or older policy is tested in
`tests/simulation/test_records_of_a_liar.py`.
"""

import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest

from trahiv_cli.errors import SetupError
from trahiv_cli.members import membership, policy_book
from trahiv_cli.members.membership import (
    CLOSED,
    KEY_BYTES,
    OVER,
    TAKEN_OUT,
    USED,
    Grant,
    Membership,
    Owner,
    Policy,
    Role,
    certified,
    mark_of,
)
from trahiv_cli.members.policy_book import PolicyBook

OWNER = Owner(bytes(range(KEY_BYTES)))
OTHER = Owner(bytes(KEY_BYTES))
SWARM = OWNER.invite()
ALICE, MALLORY = b"\x12\x20" + b"a" * 32, b"\x12\x20" + b"m" * 32
GRANT, ONCE, SHORT = (OWNER.invite(**terms).grant for terms in ({}, {"is_once": True}, {"expires": 1000}))


def marks(*contents):
    return frozenset(map(mark_of, contents))


KICKED = Policy(1, out=marks(MALLORY))
MANY = marks(*(b"%d" % number for number in range(500)))


def test_stolen_or_altered_certificate_is_refused():
    certificate = SWARM.certify(ALICE)
    assert certified(OWNER.public, ALICE, certificate) == SWARM.grant
    assert certified(OWNER.public, MALLORY, certificate) is None  # stolen
    assert certified(OTHER.public, ALICE, certificate) is None  # of another swarm
    assert SWARM.secret not in certificate
    assert repr(SWARM.secret) not in repr(SWARM)
    flipped = (bytes(one ^ (i == at) for i, one in enumerate(certificate)) for at in range(len(certificate)))
    for content in (*flipped, certificate[:-1], certificate + bytes(1 << 20)):
        before = sys.getrefcount(content)
        assert certified(OWNER.public, ALICE, content) is None
        assert sys.getrefcount(content) == before  # it is kept nowhere


def test_invitation_terms_cannot_be_altered():
    narrow = OWNER.invite(Role.watcher, is_once=True, expires=2**33, era=3)
    assert Grant.parse(narrow.grant.to_bytes()) == narrow.grant
    parts = narrow.to_parts()
    assert Membership.from_parts(parts) == narrow
    for place, other in enumerate((OTHER.public, bytes(16), 0, False, 0, 4)):
        with pytest.raises(ValueError, match="not signed by the owner"):
            Membership.from_parts([*parts[:place], other, *parts[place + 1 :]])


STAYS = marks(ALICE + GRANT.key, ALICE + SHORT.key)
ENDED = replace(SHORT, expires=999)


@pytest.mark.parametrize(
    "policy, grant, objection",
    [
        *((Policy(), grant, "") for grant in (GRANT, ONCE, SHORT)),
        (KICKED, GRANT, ""),
        (Policy(out=marks(ALICE), stay=STAYS), GRANT, TAKEN_OUT),
        (Policy(closed=marks(GRANT.key)), GRANT, CLOSED),
        (Policy(closed=marks(GRANT.key), stay=STAYS), GRANT, ""),
        (Policy(closed=marks(ONCE.key), stay=STAYS), ONCE, USED),
        (Policy(era=1), SHORT, CLOSED),
        (Policy(era=1, stay=STAYS), GRANT, ""),
        (Policy(era=1), OWNER.invite(era=1).grant, ""),
        (Policy(), ENDED, OVER),
        (Policy(stay=STAYS), ENDED, ""),
    ],
)
def test_policy_and_grant_decide_membership(policy, grant, objection, monkeypatch):
    monkeypatch.setattr(membership, "swarm_time", lambda: 999)
    assert policy.objection(ALICE, grant) == objection


def wire(serial, owner=OWNER):
    return replace(KICKED, serial=serial).to_bytes(owner)


def also_out(peer):
    return lambda policy: replace(policy, out=policy.out | marks(peer))


@pytest.fixture
def books(tmp_path):
    """The policy books of two processes of a peer, which read the file on every access."""
    return [PolicyBook(OWNER.public, tmp_path / "policy", look_every_s=0.0) for _ in range(2)]


def test_processes_share_newest_valid_policy(tmp_path, books):
    path, (first, second) = tmp_path / "policy", books
    assert (second.policy, second.wire) == (Policy(), b"")
    for offered, newest in ((wire(3), 3), (wire(1), 3), (wire(4), 4), (wire(9, OTHER), 4), (None, 4)):
        first.offer(offered)
        assert first.wire == path.read_bytes() == wire(newest)
    for content in (wire(4), b"", wire(3), wire(9, OTHER), wire(4)[:50]):
        path.write_bytes(content)
        assert second.policy.serial == 4
    path.unlink()
    assert second.policy.serial == 4


def test_failed_policy_write_is_retried(books, monkeypatch):
    first, second = books
    with monkeypatch.context() as full:
        full.setattr(policy_book, "write_private", Mock(side_effect=OSError))
        with pytest.raises(OSError):
            first.offer(wire(1))
    assert (first.wire, second.wire) == (wire(1), b"")
    first.offer(wire(1))
    assert second.wire == wire(1)
    monkeypatch.setattr(policy_book, "write_private", Mock(side_effect=AssertionError("once is enough")))
    for book in books:
        book.offer(wire(1))


def test_decision_is_saved_once_and_privately(tmp_path, books):
    book, another = books
    with pytest.raises(SetupError, match="longer than"):
        book.decide(OWNER, lambda policy: replace(policy, out=MANY))
    assert book.policy == Policy()
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):  # the second time nothing changes
        book.decide(OWNER, also_out(MALLORY))
        assert book.policy == another.policy == KICKED
    assert (tmp_path / "policy").stat().st_mode & 0o077 == 0


def test_kicks_from_folder_copies_merge(tmp_path):
    one, other = (PolicyBook(OWNER.public, tmp_path / copy / "policy") for copy in ("one", "other"))
    one.decide(OWNER, lambda policy: replace(policy, closed=marks(GRANT.key)))
    first, second = one.decide(OWNER, also_out(ALICE)), other.decide(OWNER, also_out(MALLORY))
    for book, offered in ((one, second), (other, first)):
        book.offer(offered)
        joint = book.decide(OWNER, lambda policy: policy)
        assert book.policy.out == marks(ALICE, MALLORY)
        assert book.policy.closed == marks(GRANT.key)
    before = one.wire
    one.offer(joint)
    assert one.decide(OWNER, lambda policy: policy) == before  # nothing changes any more


LATER = Policy(2, era=1)


def test_policy_merge_takes_later_era():
    earlier = Policy(3, marks(ALICE), marks(GRANT.key), STAYS)
    for one, other in ((earlier, LATER), (LATER, earlier)):
        assert one.with_those_of(other) == Policy(one.serial, earlier.out, frozenset(), STAYS, 1)


def test_policy_merge_without_news_adds_nothing():
    assert LATER.with_those_of(Policy(3, closed=marks(GRANT.key), stay=STAYS)) == LATER


def test_full_policy_merge_prefers_kicks():
    full = Policy(stay=frozenset(sorted(MANY)[: membership.MAX_MARKS]))
    joint = full.with_those_of(KICKED)
    assert joint.out == KICKED.out
    assert joint.room == 0
    assert joint.stay < full.stay
