"""What proves membership."""

import pickle

import pytest

from trahiv_cli.swarm.membership import (
    CERTIFICATE_BYTES,
    GRANT_BYTES,
    KEY_BYTES,
    SECRET_BYTES,
    Grant,
    Membership,
    Owner,
    Role,
    certified,
)

OWNER, OTHER = Owner(bytes(range(KEY_BYTES))), Owner(bytes(KEY_BYTES))
SWARM = OWNER.invite()
ALICE, MALLORY = b"\x12\x20" + b"a" * 32, b"\x12\x20" + b"m" * 32


def test_a_member_is_known_by_everybody_who_knows_the_owner_and_by_nobody_else():
    certificate = SWARM.certify(ALICE)
    assert len(certificate) == CERTIFICATE_BYTES
    assert certified(OWNER.public, ALICE, certificate) == SWARM.grant
    assert certified(OWNER.public, MALLORY, certificate) is None, "stolen"
    assert certified(OTHER.public, ALICE, certificate) is None, "of another swarm"


@pytest.mark.parametrize("place", range(CERTIFICATE_BYTES))
def test_a_certificate_that_was_changed_anywhere_is_none(place):
    certificate = bytearray(SWARM.certify(ALICE))
    certificate[place] ^= 1
    assert certified(OWNER.public, ALICE, bytes(certificate)) is None


@pytest.mark.parametrize("nonsense", [b"", b"x", bytes(CERTIFICATE_BYTES), bytes(4 * CERTIFICATE_BYTES)])
def test_nonsense_is_no_certificate(nonsense):
    assert certified(OWNER.public, ALICE, nonsense) is None


def test_what_an_invitation_is_good_for_can_t_be_widened():
    narrow = OWNER.invite(Role.watcher, is_once=True, expires=1000, era=3)
    assert narrow.grant.role is Role.watcher and narrow.grant.is_once and narrow.grant.expires == 1000
    signature = narrow.grant.signature
    for wider in (
        (Role.member, True, 1000, 3),
        (Role.watcher, False, 1000, 3),
        (Role.watcher, True, 0, 3),
        (Role.watcher, True, 1000, 4),
    ):
        with pytest.raises(ValueError, match="did not sign"):
            Membership.of(narrow.owner, narrow.secret, *wider, signature)
    same = Membership.of(narrow.owner, narrow.secret, Role.watcher, True, 1000, 3, signature)
    assert same == narrow


def test_an_invitation_of_another_secret_or_owner_is_none():
    terms = (0, False, 0, 0, SWARM.grant.signature)
    for owner, secret in ((OTHER.public, SWARM.secret), (OWNER.public, bytes(SECRET_BYTES)), (b"", b"")):
        with pytest.raises(ValueError, match="did not sign"):
            Membership.of(owner, secret, *terms)


def test_two_invitations_are_two_keys():
    assert OWNER.invite().grant.key != OWNER.invite().grant.key


def test_a_grant_comes_back_as_it_was():
    grant = OWNER.invite(Role.watcher, expires=2**33).grant
    assert Grant.parse(grant.to_bytes()) == grant
    for size in (0, GRANT_BYTES - 1, GRANT_BYTES + 1):
        with pytest.raises(ValueError, match="not a grant"):
            Grant.parse(bytes(size))
    with pytest.raises(ValueError, match="another version"):
        Grant.parse(bytes(KEY_BYTES) + b"\x04" + bytes(GRANT_BYTES - KEY_BYTES - 1))


def test_a_certificate_and_what_is_shown_say_nothing_of_the_secret():
    assert SWARM.secret not in SWARM.certify(ALICE)
    assert repr(SWARM.secret) not in repr(SWARM)


def test_it_can_be_sent_to_another_process():
    SWARM.certify(ALICE)  # its key has been derived
    assert pickle.loads(pickle.dumps(SWARM)).certify(ALICE) == SWARM.certify(ALICE)
