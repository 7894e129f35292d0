"""Records in the DHT belong to peers: each is signed with its peer's key, small, and soon over.

Every node of a swarm judges the records that it is asked to keep, and those that it reads. A record stands
under a key in a place of its owner's (`own_place`), which has the owner's public key and, in a closed swarm,
his certificate: so who is no member has no records either, whoever brings them. hivemind's
`RSASignatureValidator` signs it and checks the signature. Who publishes under another's name, or in no place
at all, is refused by each honest node.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

import multihash
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.membership import certified
from trahiv_cli.swarm.snapshot import unpacked

MAX_RECORD_BYTES = 3600
"""Of a signed value: `node.MAX_RECORD_BYTES`, and some 370 of signature."""

MAX_TTL_S = 2 * 3600.0
"""The longest-lived of our records lives half as long."""

MAX_RECORDS = 128
"""Of a peer, at a time. Ours have some twenty: a long recipe, and what matchmaking leaves behind."""

OWNERS_REMEMBERED = 4096

PLACE = re.compile(
    rb"\[owner:(ssh-rsa [A-Za-z0-9+/=]{300,1000})\](?:~([A-Za-z0-9_-]{231}))?(/[A-Za-z0-9._-]{1,100})?"
)
"""The certificate is in base64url, without padding."""


def read_signing_key(identity: Path) -> RSAPrivateKey:
    """Read the key of an identity file, by which the peer signs.

    Raises:
        ValueError: it is no such file.
    """
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key.__setstate__({"_private_key": crypto_pb2.PrivateKey.FromString(identity.read_bytes()).data})
    return key


def own_place(key: RSAPrivateKey, name: str = "", certificate: bytes = b"") -> bytes:
    """Name a place of the peer with this key, where it alone can publish.

    Args:
        key: of the peer's identity.
        name: of the record, if the peer has several under a key.
        certificate: of the peer; empty in an open swarm.
    """
    place = RSASignatureValidator(key).local_public_key
    if certificate:
        place += b"~" + base64.urlsafe_b64encode(certificate).rstrip(b"=")
    if name:
        place += f"/{name}".encode()
    if not PLACE.fullmatch(place):
        raise ValueError(f"{name!r} can't be the name of a record")
    return place


def owner_of(place: object) -> tuple[str, str] | None:
    """Say whose place this is, and its name; None if it is nobody's.

    Returns:
        The peer's id, base58, and what stands after it.
    """
    found = PLACE.fullmatch(place) if isinstance(place, bytes) else None
    if found is None or (peer := peer_of(found[1])) is None:
        return None
    return peer, (found[3] or b"/")[1:].decode()


@lru_cache(1024)
def is_member_s(place: bytes, owner: bytes) -> bool:
    """Whether a place is of a member of the closed swarm with this owner (his public key)."""
    found = PLACE.fullmatch(place)
    if found is None or not found[2] or (peer := peer_of(found[1])) is None:
        return False
    certificate = base64.urlsafe_b64decode(found[2] + b"=" * (-len(found[2]) % 4))
    return certified(owner, PeerID.from_base58(peer).to_bytes(), certificate) is not None


@lru_cache(1024)
def peer_of(public_key: bytes) -> str | None:
    """Return the id, base58, of the peer with this public key (as SSH writes it); None: it is no RSA key.

    See `PeerID.from_identity`.
    """
    try:
        encoded = load_ssh_public_key(public_key).public_bytes(
            Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        )
    except ValueError:
        return None
    message = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=encoded).SerializeToString()
    digest = multihash.encode(hashlib.sha256(message).digest(), multihash.coerce_code("sha2-256"))
    return PeerID(digest).to_base58()


class Judge(RecordValidatorBase):
    """A validator that judges records and adds nothing to them; one of each kind is enough for a node."""

    def sign_value(self, record: DHTRecord) -> bytes:
        """Return the value as it is."""
        return record.value

    def strip_value(self, record: DHTRecord) -> bytes:
        """Return the value as it is."""
        return record.value

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Say whether the other is of the same kind."""
        return isinstance(other, type(self))


class OwnersOnly(Judge):
    """Refuses what is in nobody's place, or no member's, too large, or would live too long.

    Args:
        swarm: public key of the closed swarm's owner; None: the swarm is open.
    """

    def __init__(self, swarm: bytes | None = None) -> None:
        self._swarm = swarm

    def validate(self, record: DHTRecord) -> bool:
        """Say whether a record may be kept; its signature has been checked."""
        lives = 0 < record.expiration_time <= swarm_time() + MAX_TTL_S  # NaN would live for ever
        if len(record.value) > MAX_RECORD_BYTES or not lives:
            return False
        try:
            place = unpacked(record.subkey) if record.subkey else None
        except ValueError:
            return False
        if not isinstance(place, bytes) or owner_of(place) is None:
            return False
        return self._swarm is None or is_member_s(place, self._swarm)

    @property
    def priority(self) -> int:
        """Of validation: before the signature is checked, which costs more."""
        return 20


class Readable(Judge):
    """Refuses what can't be read.

    dht/node.py:873 reads what was found in a task that nobody looks at: one value that is no MessagePack, and
    whoever looks its key up waits for ever.
    """

    def validate(self, record: DHTRecord) -> bool:
        """Say whether a record may be kept; it has no signature any more."""
        try:
            unpacked(record.value)
        except ValueError:
            return False
        return True

    @property
    def priority(self) -> int:
        """Of validation: after the signature was taken off."""
        return -10


class Quota:
    """Counts the records that each peer has stored at this node; what is over does not count."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, dict[tuple[bytes, bytes], float]] = OrderedDict()

    def has_room(self, record: DHTRecord) -> bool:
        """Say whether a record may be kept, and count it; it is known to be its owner's."""
        owner = owner_of(unpacked(record.subkey))
        if owner is None:
            return False
        held = self._held.setdefault(owner[0], {})
        self._held.move_to_end(owner[0])
        if len(self._held) > OWNERS_REMEMBERED:
            self._held.popitem(last=False)
        name = record.key, record.subkey
        if name not in held and len(held) >= MAX_RECORDS:
            now = swarm_time()
            for other in [other for other, expires in held.items() if expires <= now]:
                del held[other]
            if len(held) >= MAX_RECORDS:
                return False
        held[name] = max(record.expiration_time, held.get(name, 0.0))
        return True
