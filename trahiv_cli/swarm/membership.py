"""Who belongs to a closed swarm, and how a peer proves it.

Whoever starts a swarm owns it: he holds the owner's key, and all others know its public half. An invitation
is a key of its own, and a `Grant` says, signed by the owner, what it is good for. A peer's certificate is the
grant, and the peer's id signed with the invitation's key. Two signatures are all that has to be checked, by
anybody and without asking (Ed25519, RFC 8032). libp2p proves to both ends of a connection whose id the other
has, so a certificate is of use to nobody else, and need not be secret or fresh.

What the owner decides later, whom he takes out above all, is in the `policy`.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET_BYTES = 16
KEY_BYTES = 32
SIGNATURE_BYTES = 64
TERMS = struct.Struct(">32sBIQ")
"""Of a grant: the invitation's public key, flags, era, and when nobody is let in by it any more."""

GRANT_BYTES = TERMS.size + SIGNATURE_BYTES
CERTIFICATE_BYTES = GRANT_BYTES + SIGNATURE_BYTES

_PURPOSE = b"trahiv: the key of an invitation"
_GRANTED = b"trahiv: the owner grants "
_CERTIFIED = b"trahiv: a member is "


class Role(IntEnum):
    """What an invitation is to."""

    member = 0
    """Train along, and all that belongs to it."""

    watcher = 1
    """Read the records in the DHT."""


@dataclass(frozen=True)
class Grant:
    """What the owner lets an invitation be good for."""

    key: bytes
    """The invitation's public key, `KEY_BYTES` long."""

    role: Role = Role.member
    is_once: bool = False
    """Whether one peer alone can come by it."""

    expires: int = 0
    """Seconds since 1970, of the swarm's time; 0: never. Who came before stays."""

    era: int = 0
    """The policy's when it was made: a later one closes all invitations of those before."""

    signature: bytes = b""
    """The owner's, of all that."""

    @property
    def terms(self) -> bytes:
        """What the owner signs, `TERMS.size` long."""
        return TERMS.pack(self.key, self.role | self.is_once << 1, self.era, self.expires)

    def to_bytes(self) -> bytes:
        """Write it, `GRANT_BYTES` long."""
        return self.terms + self.signature

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Read what `to_bytes` gave; the signature is not checked.

        Raises:
            ValueError: it is not that.
        """
        if len(content) != GRANT_BYTES:
            raise ValueError("not a grant")
        key, flags, era, expires = TERMS.unpack_from(content)
        if flags > 3:
            raise ValueError("a grant of another version")
        return cls(key, Role(flags & 1), bool(flags & 2), expires, era, content[TERMS.size :])

    def is_by(self, owner: bytes) -> bool:
        """Whether this owner (his public key) signed it."""
        return is_signed(owner, self.signature, _GRANTED + self.terms)


@dataclass(frozen=True)
class Membership:
    """What a member of a closed swarm holds: an invitation, without the addresses."""

    owner: bytes
    """The owner's public key, `KEY_BYTES` long."""

    secret: bytes = field(repr=False)
    """Of the invitation, `SECRET_BYTES` long. Who has it can let others in, as far as the grant goes."""

    grant: Grant

    @classmethod
    def of(
        cls, owner: bytes, secret: bytes, role: int, is_once: bool, expires: int, era: int, signature: bytes
    ) -> Self:
        """Put together what an invitation says.

        Raises:
            ValueError: the owner did not sign that.
        """
        key = _key_of(secret).public_key().public_bytes_raw()
        grant = Grant(key, Role(role), is_once, expires, era, signature)
        if not grant.is_by(owner):
            raise ValueError("the owner did not sign this invitation")
        return cls(owner, secret, grant)

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        return _key_of(self.secret)

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is derived: a key of the library's can't be sent to another process."""
        return {name: value for name, value in self.__dict__.items() if name != "_key"}

    def certify(self, peer_id: bytes) -> bytes:
        """Make the certificate, `CERTIFICATE_BYTES` long, of a peer (its id as bytes)."""
        return self.grant.to_bytes() + self._key.sign(_CERTIFIED + peer_id)


def certified(owner: bytes, peer_id: bytes, certificate: bytes) -> Grant | None:
    """Read by what a peer is a member; None: it is no certificate of that peer in that owner's swarm."""
    try:
        grant = Grant.parse(certificate[:GRANT_BYTES])
    except ValueError:
        return None
    is_good = grant.is_by(owner) and is_signed(grant.key, certificate[GRANT_BYTES:], _CERTIFIED + peer_id)
    return grant if is_good else None


class Owner:
    """Who started a swarm.

    Args:
        key: private, `KEY_BYTES` long.
    """

    def __init__(self, key: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(key)
        self.public = self._key.public_key().public_bytes_raw()

    def invite(
        self, role: Role = Role.member, *, is_once: bool = False, expires: int = 0, era: int = 0
    ) -> Membership:
        """Make an invitation; see `Grant` for what it is good for."""
        secret = secrets.token_bytes(SECRET_BYTES)
        key = _key_of(secret).public_key().public_bytes_raw()
        signature = self.sign(_GRANTED + Grant(key, role, is_once, expires, era).terms)
        return Membership.of(self.public, secret, role, is_once, expires, era, signature)

    def sign(self, content: bytes) -> bytes:
        """Sign; `is_signed` checks it."""
        return self._key.sign(content)


def is_signed(public_key: bytes, signature: bytes, content: bytes) -> bool:
    """Whether this is the signature of that key (raw Ed25519) of that content."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def _key_of(secret: bytes) -> Ed25519PrivateKey:
    """Derive an invitation's key (HKDF, RFC 5869)."""
    seed = HKDF(SHA256(), length=KEY_BYTES, salt=None, info=_PURPOSE).derive(secret)
    return Ed25519PrivateKey.from_private_bytes(seed)
