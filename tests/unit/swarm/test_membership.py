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
    assert SWARM.secret not in certificate and repr(SWARM.secret) not in repr(SWARM)
    assert pickle.loads(pickle.dumps(SWARM)).certify(ALICE) == certificate, "in another process"


def test_a_certificate_that_was_changed_anywhere_or_is_nonsense_is_none():
    certificate = SWARM.certify(ALICE)
    changed = [
        bytes(byte ^ (at == i) for i, byte in enumerate(certificate)) for at in range(CERTIFICATE_BYTES)
    ]
    for content in (*changed, b"", b"x", bytes(CERTIFICATE_BYTES), bytes(4 * CERTIFICATE_BYTES)):
        assert certified(OWNER.public, ALICE, content) is None


def test_what_an_invitation_is_good_for_can_t_be_widened():
    narrow = OWNER.invite(Role.watcher, is_once=True, expires=1000, era=3)
    assert narrow.grant.role is Role.watcher and narrow.grant.is_once and narrow.grant.expires == 1000
    terms = (Role.watcher, True, 1000, 3)
    assert Membership.of(narrow.owner, narrow.secret, *terms, narrow.grant.signature) == narrow
    for place, wider in enumerate((Role.member, False, 0, 4)):
        changed = (*terms[:place], wider, *terms[place + 1 :])
        with pytest.raises(ValueError, match="did not sign"):
            Membership.of(narrow.owner, narrow.secret, *changed, narrow.grant.signature)


def test_an_invitation_of_another_secret_or_owner_is_none():
    terms = (0, False, 0, 0, SWARM.grant.signature)
    for owner, secret in ((OTHER.public, SWARM.secret), (OWNER.public, bytes(SECRET_BYTES)), (b"", b"")):
        with pytest.raises(ValueError, match="did not sign"):
            Membership.of(owner, secret, *terms)
    assert OWNER.invite().grant.key != OWNER.invite().grant.key


def test_a_grant_comes_back_as_it_was():
    grant = OWNER.invite(Role.watcher, expires=2**33).grant
    assert Grant.parse(grant.to_bytes()) == grant
    for size in (0, GRANT_BYTES - 1, GRANT_BYTES + 1):
        with pytest.raises(ValueError, match="not a grant"):
            Grant.parse(bytes(size))
    with pytest.raises(ValueError, match="another version"):
        Grant.parse(bytes(KEY_BYTES) + b"\x04" + bytes(GRANT_BYTES - KEY_BYTES - 1))
