"""Records in the DHT belong to peers: each is signed with its peer's key, small, and short-lived.

Every node checks each record that it receives or reads. A record is stored under a key in its owner's place
(`own_subkey`), which has the owner's public key and, in a closed swarm, the certificate: a peer that is not a
member has no records. hivemind's `RSASignatureValidator` signs a record and checks the signature.

Under a key each owner has one record, and by one invitation at most 200 peers have any (`Quota`):
all records under a key travel in one answer. In an open swarm, an answer leaves out records that do not fit.

A statement is a message in which a peer describes itself, signed by the same key: a peer that passes it on
can leave it out, but can't change it. It is about something that both sides know and that is not sent with
it: a claim is about the history that a round continues, a vote about the round. Elsewhere it is invalid.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import re
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from trahiv_cli.clock import swarm_time
from trahiv_cli.members.identity import id_bytes, id_of
from trahiv_cli.members.membership import KEY_BYTES, certified
from trahiv_cli.net.borrowed.crypto import RSAPrivateKey, RSAPublicKey
from trahiv_cli.net.borrowed.validation import DHTRecord, RecordValidatorBase
from trahiv_cli.wire import packed, unpacked

if TYPE_CHECKING:
    from hivemind.p2p import PeerID

logger = logging.getLogger(__name__)

SIGNATURE_PRIORITY = 10  # of hivemind's `RSASignatureValidator`: validators below it see no signatures
# Of a peer's id; the id of an RSA key has 34. The time to write an id in base58, as `PeerID` does, grows with
# the square of its length: hours for the longest message.
MAX_ID_BYTES = 64


@lru_cache(4096)
def ignore_peer(peer: str, why: str) -> None:
    """Log, once per peer (id, base58) and reason, why its messages are ignored; `why` has no full stop."""
    logger.warning(f"Peer {peer} is not believed: {why}.")


class Place(NamedTuple):
    """The parts of a valid place."""

    written: bytes
    owner: str  # id of the peer, base58
    certificate: bytes  # empty in an open swarm


def own_subkey(key: RSAPrivateKey, certificate: bytes = b"") -> bytes:
    """Return the place of the peer with this key and, in a closed swarm, this certificate."""
    place = b"[owner:%b]" % key.get_public_key().to_bytes()
    if certificate:
        place += b"~" + base64.urlsafe_b64encode(certificate).rstrip(b"=")
    return place


@lru_cache(1024)
def _read_place(written: bytes) -> Place | None:
    # A public key, and perhaps a certificate in base64url, without padding.
    pattern = rb"\[owner:(ssh-rsa [A-Za-z0-9+/=]{300,1000})\](?:~([A-Za-z0-9_-]{231}))?"
    found = re.fullmatch(pattern, written)
    if found is None or (owner := peer_of(found[1])) is None:
        return None
    shown = found[2] or b""
    return Place(written, owner, base64.urlsafe_b64decode(shown + b"=" * (-len(shown) % 4)))


def owner_of(place: object) -> str | None:
    """Return the owner of a place: the peer's id, base58; None if the place is invalid."""
    found = _read_place(place) if isinstance(place, bytes) else None
    return found and found.owner


def _place_in(subkey: bytes) -> Place | None:
    """Read a record's place from its subkey; None if it is invalid."""
    with contextlib.suppress(ValueError):
        written = unpacked(subkey)
        return _read_place(written) if isinstance(written, bytes) else None
    return None


@lru_cache(1024)
def peer_of(public_key: bytes) -> str | None:
    """Return the id, base58, of the peer with this public key (RSA, SSH's format); None if it is invalid."""
    with contextlib.suppress(ValueError):
        return id_of(load_ssh_public_key(public_key))
    return None


def peer_from(sent: bytes) -> PeerID:
    """Read a peer's id from untrusted bytes; ValueError if they are longer than `MAX_ID_BYTES`."""
    if len(sent) > MAX_ID_BYTES:
        raise ValueError(f"{len(sent)} bytes are no id of a peer")
    from hivemind.p2p import PeerID

    return PeerID(sent)


class OwnersOnly(RecordValidatorBase):
    """Refuses a record that has no valid place of a member, is too large, or would live too long.

    `swarm` is the public key of the closed swarm's owner; None: it is open, and no place has a certificate.
    """

    priority = 20  # before the signature is checked, which costs more

    def __init__(self, swarm: bytes | None = None) -> None:
        self._swarm = swarm

    def validate(self, record: DHTRecord) -> bool:
        """Return whether a record may be kept; its signature has not been checked."""
        # Twice the longest lifetime of our own records. False for NaN, which never expires.
        lives = 0 < record.expiration_time <= swarm_time() + 7200.0
        is_short = len(record.value) <= 3600  # `keys.MAX_RECORD_BYTES`, and some 370 of signature
        place = _place_in(record.subkey)
        if not (lives and is_short) or place is None:
            return False
        if self._swarm is None:
            return not place.certificate
        return certified(self._swarm, id_bytes(place.owner), place.certificate) is not None


class Readable(RecordValidatorBase):
    """Refuses a record that can't be read: at dht/node.py:873, a lookup of its key would wait forever."""

    priority = SIGNATURE_PRIORITY - 1  # after the signature has been removed

    def validate(self, record: DHTRecord) -> bool:
        """Return whether a record may be kept; its signature has been removed."""
        with contextlib.suppress(ValueError):
            unpacked(record.value)
            return True
        return False


class Quota:
    """Counts a node's records by owner, and their owners by invitation; each `CorrectedProtocol` has one.

    Args:
        max_owners: peers by one invitation that have records at a time: twice the size for which a swarm is
            made.
        max_remembered: owners whose records are counted.
    """

    def __init__(self, max_owners: int = 200, max_remembered: int = 4096) -> None:
        self._max_owners = max_owners
        self._max_remembered = max_remembered
        # The place of each record, and when it ends; by owner and key.
        self._held: OrderedDict[str, dict[bytes, tuple[bytes, float]]] = OrderedDict()
        # When the last of an owner's records ends; by invitation (its public key) and owner.
        self._owners: dict[bytes, dict[str, float]] = {}

    def has_room(self, record: DHTRecord) -> bool:
        """Return whether a record may be kept; its signature, whose check costs more, may be unchecked."""
        place = _place_in(record.subkey) if len(record.subkey) <= 1300 else None  # no valid one is longer
        if place is None:
            return False
        now = swarm_time()
        held = {key: other for key, (other, until) in self._held.get(place.owner, {}).items() if until > now}
        if record.key in held:
            return held[record.key] == place.written
        if len(held) >= 32:  # our peers have a dozen; five are a long recipe
            return False
        owners = self._owners.get(place.certificate[:KEY_BYTES], {})
        return place.owner in owners or sum(until > now for until in owners.values()) < self._max_owners

    def count(self, record: DHTRecord) -> None:
        """Count a valid record for which there is room."""
        place = _place_in(record.subkey)
        now = swarm_time()
        assert place is not None, "it was found valid"
        held = {key: other for key, other in self._held.pop(place.owner, {}).items() if other[1] > now}
        until = max(record.expiration_time, held.get(record.key, (b"", 0.0))[1])
        self._held[place.owner] = held | {record.key: (place.written, until)}
        if len(self._held) > self._max_remembered:
            self._held.popitem(last=False)
        if place.certificate:
            owners = self._owners.get(place.certificate[:KEY_BYTES], {})
            if place.owner not in owners:
                owners = {peer: until for peer, until in owners.items() if until > now}
            owners[place.owner] = max(record.expiration_time, owners.get(place.owner, 0.0))
            self._owners[place.certificate[:KEY_BYTES]] = owners


def sign(key: RSAPrivateKey, about: bytes, content: bytes, *, has_key: bool = True) -> bytes:
    """Make a statement: the content, 256 bytes of signature and, if it `has_key`, 280 of the public key.

    `verified` accepts it only with the same `about`.
    """
    written = key.get_public_key().to_bytes().removeprefix(b"ssh-rsa ") if has_key else b""
    signature = base64.b64decode(key.sign(_signed(about, content)))
    return packed([base64.b64decode(written), signature, content])


def content_of(statement: bytes) -> bytes:
    """Return the content of a statement without verifying it; ValueError if it can't be read."""
    return _parts(statement)[2]


def verified(statement: bytes, peer: PeerID, about: bytes, earlier: bytes = b"") -> bytes:
    """Return the content of a peer's statement; ValueError if another peer made it, or `about` differs.

    A statement without the public key is verified with the key in an `earlier` one of the same peer.
    """
    public_key, signature, content = _parts(statement)
    public_key = _parts(earlier)[0] if earlier else public_key
    readable = b"ssh-rsa " + base64.b64encode(public_key)
    if peer_of(readable) != peer.to_base58():
        raise ValueError(f"not a statement of peer {peer}")
    key = RSAPublicKey.from_bytes(readable)
    assert isinstance(key, RSAPublicKey)  # hivemind annotates it as bytes
    if not key.verify(_signed(about, content), base64.b64encode(signature)):
        raise ValueError(f"peer {peer} did not state this")
    return content


def _parts(statement: bytes) -> tuple[bytes, bytes, bytes]:
    match unpacked(statement):
        case [bytes(public_key), bytes(signature), bytes(content)] if (
            # Enough for RSA with 4096 bits; ours have 2048. A much longer key takes long to check.
            len(public_key) <= 600 and len(signature) <= 512
        ):
            return public_key, signature, content
    raise ValueError("not a statement")


def _signed(about: bytes, content: bytes) -> bytes:
    return hashlib.sha256(about).digest() + content
