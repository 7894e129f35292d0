"""Membership in a closed swarm, and how a peer proves it.

1. The person who starts a swarm owns it: they have the owner's key, and all peers know its public half.
2. Each invitation has a key of its own. A `Grant`, signed by the owner, states the invitation's terms.
3. A peer's certificate is the grant, and the peer's id signed with the invitation's key. Every peer can check
   these two signatures without asking another one (Ed25519, RFC 8032).

libp2p proves to both ends of a connection whose id the other has. So a certificate is of use to its own peer
only, and need not be secret or fresh.

The owner's later decisions are a `Policy`, signed and numbered: the one with the highest number counts. A
certificate does not say when it was made. So when an invitation expires, the peers that the owner's peer has
seen before stay members, and no others: at any time all peers agree on the members.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import struct
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from trahiv_cli.clock import swarm_time
from trahiv_cli.errors import SetupError
from trahiv_cli.net.keys import MAX_RECORD_BYTES
from trahiv_cli.wire import packed, unpacked

SECRET_BYTES = 16
KEY_BYTES = 32
SIGNATURE_BYTES = 64
TERMS = struct.Struct(">32sBIQ")  # of a grant: the invitation's public key, flags, era, expiry
GRANT_BYTES = TERMS.size + SIGNATURE_BYTES
CERTIFICATE_BYTES = GRANT_BYTES + SIGNATURE_BYTES

MARK_BYTES = 8  # making a key whose id has a given mark takes some 2^64 RSA keys
MAX_MARKS = 380  # in one policy, which is one record in the DHT

TAKEN_OUT = "the owner has taken it out"
USED = "its invitation was used before"
CLOSED = "its invitation was closed"
OVER = "its invitation is over"
UNSIGNED = USED, CLOSED, OVER  # reasons that a peer may give without the owner's policy

_CERTIFIED = b"trahiv: a member is "
_DECIDED = b"trahiv: the owner decides "


class Role(IntEnum):
    """The role that an invitation gives to a peer."""

    member = 0  # trains, and may call every handler
    watcher = 1  # only reads the records in the DHT


@dataclass(frozen=True)
class Grant:
    """The terms of an invitation, signed by the owner."""

    key: bytes  # the invitation's public key, `KEY_BYTES` long
    role: Role = Role.member
    is_once: bool = False  # only one peer can join with it
    expires: int = 0  # swarm time, in seconds since 1970; 0: never. Peers seen before that stay
    era: int = 0  # the policy's era when the grant was made; a later era closes it
    signature: bytes = b""  # the owner's, of `statement`

    @property
    def id(self) -> str:
        """Short name of the invitation, for people; it does not reveal the secret."""
        return mark_of(self.key).hex()[:8]

    @property
    def terms(self) -> bytes:
        """The terms, `TERMS.size` bytes long."""
        return TERMS.pack(self.key, self.role | self.is_once << 1, self.era, self.expires)

    @property
    def statement(self) -> bytes:
        """The bytes that the owner signs."""
        return b"trahiv: the owner grants " + self.terms

    def to_bytes(self) -> bytes:
        """Return `GRANT_BYTES` bytes that `parse` reads."""
        return self.terms + self.signature

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Parse the bytes of `to_bytes` without checking the signature; ValueError if they are malformed."""
        if len(content) != GRANT_BYTES:
            raise ValueError("not a grant")
        key, flags, era, expires = TERMS.unpack_from(content)
        if flags > 3:
            raise ValueError("a grant of another version")
        return cls(key, Role(flags & 1), bool(flags & 2), expires, era, content[TERMS.size :])

    def is_by(self, owner: bytes) -> bool:
        """Whether the owner with this public key signed the grant."""
        return is_signed(owner, self.signature, self.statement)


@dataclass(frozen=True)
class Membership:
    """A member's secret: an invitation without the addresses."""

    owner: bytes  # public key, `KEY_BYTES` long
    secret: bytes = field(repr=False)  # `SECRET_BYTES` long; its holder can pass the invitation on
    grant: Grant

    def to_parts(self) -> list[Any]:
        """Return the membership as a list for MessagePack; `from_parts` reads it."""
        grant = self.grant
        terms = [int(grant.role), grant.is_once, grant.expires, grant.era]
        return [self.owner, self.secret, *terms, grant.signature]

    @classmethod
    def from_parts(cls, parts: list[Any]) -> Self:
        """Parse a list from `to_parts`; raise ValueError if it is malformed or the owner did not sign it."""
        match parts:
            case [bytes(owner), bytes(secret), int(role), bool(once), int(expires), int(era), bytes(signed)]:
                if len(secret) == SECRET_BYTES and 0 <= expires < 2**40 and 0 <= era < 2**32:
                    grant = Grant(_public(_key_of(secret)), Role(role), once, expires, era, signed)
                    if grant.is_by(owner):
                        return cls(owner, secret, grant)
        raise ValueError("of another version, or not signed by the owner")

    def certify(self, peer_id: bytes) -> bytes:
        """Return the certificate, `CERTIFICATE_BYTES` long, of a peer (id as bytes)."""
        return self.grant.to_bytes() + _key_of(self.secret).sign(_CERTIFIED + peer_id)


def certified(owner: bytes, peer_id: bytes, certificate: bytes) -> Grant | None:
    """Return the grant in a certificate; None if it is not valid for that peer in that owner's swarm."""
    with contextlib.suppress(ValueError):
        return _certified(owner, peer_id, certificate)
    return None


@lru_cache(1024)
def _certified(owner: bytes, peer_id: bytes, certificate: bytes) -> Grant:
    """Do the same, but raise ValueError if it is not valid, so that the cache keeps only valid ones."""
    grant = Grant.parse(certificate[:GRANT_BYTES])
    signature = certificate[GRANT_BYTES:]
    if not grant.is_by(owner) or not is_signed(grant.key, signature, _CERTIFIED + peer_id):
        raise ValueError("not signed by the owner, or not for that peer")
    return grant


class Owner:
    """The key pair of a swarm's owner. Raises ValueError if the private key is not `KEY_BYTES` long."""

    def __init__(self, key: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(key)
        self.public = _public(self._key)

    def invite(
        self, role: Role = Role.member, *, is_once: bool = False, expires: int = 0, era: int = 0
    ) -> Membership:
        """Make an invitation with these terms; see `Grant`."""
        secret = secrets.token_bytes(SECRET_BYTES)
        grant = Grant(_public(_key_of(secret)), role, is_once, expires, era)
        return Membership(self.public, secret, replace(grant, signature=self.sign(grant.statement)))

    def sign(self, content: bytes) -> bytes:
        """Return a signature that `is_signed` checks."""
        return self._key.sign(content)


def is_signed(public_key: bytes, signature: bytes, content: bytes) -> bool:
    """Whether this is the signature of the content by that key (raw Ed25519)."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def _public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _key_of(secret: bytes) -> Ed25519PrivateKey:
    """Derive an invitation's key (HKDF, RFC 5869)."""
    derived = HKDF(SHA256(), KEY_BYTES, salt=None, info=b"trahiv: the key of an invitation").derive(secret)
    return Ed25519PrivateKey.from_private_bytes(derived)


def mark_of(*parts: bytes) -> bytes:
    """Hash a peer's id, an invitation's key, or both, to `MARK_BYTES` bytes."""
    return hashlib.sha256(b"".join(parts)).digest()[:MARK_BYTES]


@dataclass(frozen=True)
class Policy:
    """The owner's decisions; all sets contain marks."""

    serial: int = 0
    out: frozenset[bytes] = frozenset()  # removed peers
    closed: frozenset[bytes] = frozenset()  # invitations that admit no more peers
    # Peers, each with its invitation: members even if it is closed, used or expired.
    stay: frozenset[bytes] = frozenset()
    era: int = 0  # invitations of earlier eras are closed, including unknown ones

    @property
    def room(self) -> int:
        """Number of marks that still fit."""
        return MAX_MARKS - len(self.out) - len(self.closed) - len(self.stay)

    def with_those_of(self, other: Policy) -> Policy:
        """Add the decisions of another policy, which comes from another copy of the owner's folder.

        Removed peers stay out, and closed invitations stay closed. Peers that stay are kept as far as there
        is room, this policy's first. If the other one has no more removals, closed invitations or eras,
        nothing is added.
        """
        era = max(self.era, other.era)
        closed = frozenset[bytes]().union(*(one.closed for one in (self, other) if one.era == era))
        joint = replace(self, out=self.out | other.out, closed=closed, era=era)
        if joint == self:
            return self
        stay = [*sorted(self.stay), *sorted(other.stay - self.stay)]
        return replace(joint, stay=frozenset(stay[: max(0, joint.room + len(self.stay))]))

    def objection(self, peer_id: bytes, grant: Grant) -> str:
        """Return why a peer (id as bytes) with a valid certificate is no member now; empty if it is one."""
        if self.is_out(peer_id):
            return TAKEN_OUT
        if self.keeps(peer_id, grant):
            return ""
        if grant.era < self.era or mark_of(grant.key) in self.closed:
            return USED if grant.is_once else CLOSED
        return OVER if 0 < grant.expires <= swarm_time() else ""

    def is_out(self, peer_id: bytes) -> bool:
        """Whether the owner has removed a peer (id as bytes)."""
        return mark_of(peer_id) in self.out

    def keeps(self, peer_id: bytes, grant: Grant) -> bool:
        """Whether a peer stays a member although its invitation is closed, used or expired."""
        return mark_of(peer_id, grant.key) in self.stay

    def to_bytes(self, owner: Owner) -> bytes:
        """Pack and sign the policy; raise SetupError if it is too long."""
        marks = (b"".join(sorted(one)) for one in (self.out, self.closed, self.stay))
        content = packed([self.serial, self.era, *marks])
        if SIGNATURE_BYTES + len(content) > MAX_RECORD_BYTES:
            raise SetupError(
                f"The swarm's policy would be longer than {MAX_RECORD_BYTES} bytes; nothing was changed.",
                hint="start the swarm anew in another folder: --output-dir DIR",
            )
        return owner.sign(_DECIDED + content) + content

    @classmethod
    def parse(cls, wire: object, owner: bytes) -> Self:
        """Parse the bytes of `to_bytes`; raise ValueError if malformed, or not signed by this owner."""
        if not isinstance(wire, bytes) or len(wire) > MAX_RECORD_BYTES:
            raise ValueError("not a policy")
        content = wire[SIGNATURE_BYTES:]
        if not is_signed(owner, wire[:SIGNATURE_BYTES], _DECIDED + content):
            raise ValueError("not signed by the owner")
        match unpacked(content):
            case [int(serial), int(era), bytes(out), bytes(closed), bytes(stay)]:
                return cls(serial, _split(out), _split(closed), _split(stay), era)
        raise ValueError("a policy of another version")


def _split(marks: bytes) -> frozenset[bytes]:
    return frozenset(marks[start : start + MARK_BYTES] for start in range(0, len(marks), MARK_BYTES))
