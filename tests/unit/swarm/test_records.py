"""The owner of a record, records that no node stores, and signed statements that others pass on."""

from dataclasses import replace

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from tests.kit.identities import id_of, key_of
from trahiv_cli.clock import swarm_time
from trahiv_cli.swarm import records
from trahiv_cli.swarm.identity import ensure_identity, read_signing_key
from trahiv_cli.swarm.membership import KEY_BYTES, Owner
from trahiv_cli.swarm.records import OwnersOnly, Quota, Readable, own_place, owner_of, sign, verified

KEY, OTHER, THIRD = RSAPrivateKey(), RSAPrivateKey(), RSAPrivateKey()
PLACE = own_place(KEY)
PEER = owner_of(PLACE)
OWNER = Owner(bytes(KEY_BYTES))
VALUE = MSGPackSerializer.dumps("value")


def record(value=VALUE, place=PLACE, ttl_s=60.0, key="key"):
    subkey = b"" if place is None else MSGPackSerializer.dumps(place)
    return DHTRecord(DHTID.generate(source=key).to_bytes(), subkey, value, swarm_time() + ttl_s)


def place_by(invitation, key=KEY):
    """The place of a peer, with its certificate from an invitation."""
    return own_place(key, invitation.certify(PeerID.from_base58(owner_of(own_place(key))).to_bytes()))


def kept(quota, **wanted):
    """Whether a node with this quota keeps a valid record."""
    has_room = quota.has_room(record(**wanted))
    if has_room:
        quota.count(record(**wanted))
    return has_room


def test_only_valid_place_has_owner(tmp_path):
    peer = ensure_identity(tmp_path / "identity.key")
    assert owner_of(own_place(read_signing_key(tmp_path / "identity.key"))) == peer
    known = PeerID.from_base58(peer)
    assert records.peer_from(known.to_bytes()) == known
    with pytest.raises(ValueError, match="no id"):
        records.peer_from(bytes(records.MAX_ID_BYTES + 1))
    for place in (
        *(None, 7, b"", b"QmPeer", b"[owner:ssh-rsa AAAA]", PLACE[:-1], b" " + PLACE, PLACE.decode()),
        *(PLACE + b"/1", PLACE + PLACE, *(b"[owner:ssh-rsa " + b"A" * size + b"]" for size in (372, 5000))),
    ):
        assert owner_of(place) is None
        assert not OwnersOnly().validate(record(place=place)) and not Quota().has_room(record(place=place))


def test_validators_refuse_oversized_or_forged_records():
    validator, plain, no_messagepack, most = OwnersOnly(), record(), b"\xc1", bytes(records.MAX_RECORD_BYTES)
    assert validator.validate(plain) and validator.validate(record(most))
    timeless = (record(ttl_s=ttl_s) for ttl_s in (records.MAX_TTL_S + 60, float("nan"), -1e12))
    for wrong in (record(most + b"x"), replace(plain, subkey=no_messagepack), *timeless):
        assert not validator.validate(wrong)
    assert not Readable().validate(replace(plain, value=no_messagepack))
    node_s = CompositeValidator([RSASignatureValidator(OTHER), validator, Readable()])
    for by in (KEY, OTHER):
        signed = RSASignatureValidator(by).sign_value(plain)
        assert node_s.validate(replace(plain, value=signed)) == (by is KEY)


def test_closed_swarm_refuses_records_of_nonmembers():
    place, validator = place_by(OWNER.invite()), OwnersOnly(OWNER.public)
    assert owner_of(place) == PEER and validator.validate(record(place=place))
    stolen = own_place(OTHER) + place.removeprefix(PLACE)
    for wrong in (PLACE, stolen, place_by(Owner(b"1" * KEY_BYTES).invite()), place[:-40]):
        assert not validator.validate(record(place=wrong))
    assert not OwnersOnly().validate(record(place=place)), "no certificate counts in an open swarm"


def test_quota_limits_records_per_peer(monkeypatch):
    quota, now = Quota(), swarm_time()
    for number in range(records.MAX_RECORDS + 1):
        assert quota.has_room(record(key=f"{number}")), "what was not found valid does not count"
    found = [kept(quota, key=f"{number}") for number in range(records.MAX_RECORDS + 9)]
    assert sum(found) == records.MAX_RECORDS and all(found[: records.MAX_RECORDS])
    assert kept(quota, key="0"), "in the place of one that is there"
    monkeypatch.setattr(records, "OWNERS_REMEMBERED", 1)
    assert kept(quota, place=own_place(OTHER)) and kept(quota, key="more"), "of one who is forgotten"
    monkeypatch.setattr(records, "swarm_time", lambda: now + 61)
    assert kept(quota, key="another")


def test_quota_limits_peers_per_invitation(monkeypatch):
    monkeypatch.setattr(records, "MAX_OWNERS", 2)
    now, quota, shared, other = swarm_time(), Quota(), OWNER.invite(), OWNER.invite()
    for key in (KEY, OTHER, KEY):
        assert kept(quota, place=place_by(shared, key))
    assert not kept(quota, place=place_by(other)), "by another certificate"
    assert not kept(quota, place=place_by(shared)[:-1] + b"_"), "the same certificate, written otherwise"
    for key in ("key", "another"):
        assert not kept(quota, place=place_by(shared, THIRD), key=key)
        assert kept(quota, place=place_by(shared, OTHER), key=key)
    assert kept(quota, place=place_by(other), key="more") and kept(quota, place=place_by(other, THIRD))
    assert all(kept(quota, place=own_place(key), key="open") for key in (KEY, OTHER, THIRD)), "no bound"
    monkeypatch.setattr(records, "swarm_time", lambda: now + 61)
    assert kept(quota, place=place_by(shared, THIRD)), "the others' are over"


def test_altered_or_misattributed_statement_is_refused():
    said = b"I bring 8 samples"
    first, second, bob_s = (sign(key_of(name), b"step 7", said) for name in ("alice", "alice", "bob"))
    assert verified(first, id_of("alice"), b"step 7") == records.content_of(first) == said
    assert first != second and len(first) < 560 + len(said)
    parts = MSGPackSerializer.loads(first)
    for peer, about, changed in (
        *(("bob", b"step 7", {}), ("alice", b"step 8", {}), ("alice", b"", {})),
        *(("alice", b"step 7", {2: content}) for content in (b"I bring 9 samples", said.decode())),
        *(("alice", b"step 7", {1: signature}) for signature in (bytes(128), b"")),
        *(("alice", b"step 7", {0: key}) for key in (MSGPackSerializer.loads(bob_s)[0], b"")),
    ):
        statement = [changed.get(at, part) for at, part in enumerate(parts)]
        with pytest.raises(ValueError):
            verified(MSGPackSerializer.dumps(statement), id_of(peer), about)
    for endless in ([bytes(601), *parts[1:]], [parts[0], bytes(513), said]):
        with pytest.raises(ValueError, match="not a statement"):
            records.content_of(MSGPackSerializer.dumps(endless))
