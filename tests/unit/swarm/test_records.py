"""Whose a record is, and which ones no node keeps."""

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.swarm import records as records_module
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.identity import ensure_identity
from trahiv_cli.swarm.membership import KEY_BYTES, Owner
from trahiv_cli.swarm.records import (
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    MAX_TTL_S,
    OwnersOnly,
    Quota,
    Readable,
    is_member_s,
    own_place,
    owner_of,
    read_signing_key,
)

KEY, OTHER = RSAPrivateKey(), RSAPrivateKey()
PLACE = own_place(KEY)
PEER = owner_of(PLACE)[0]


VALUE = MSGPackSerializer.dumps("value")


def record(value=VALUE, place=PLACE, ttl_s=60.0, key="key"):
    subkey = b"" if place is None else MSGPackSerializer.dumps(place)
    return DHTRecord(DHTID.generate(source=key).to_bytes(), subkey, value, swarm_time() + ttl_s)


def signed(by, **wanted):
    unsigned = record(**wanted)
    return DHTRecord(
        unsigned.key,
        unsigned.subkey,
        RSASignatureValidator(by).sign_value(unsigned),
        unsigned.expiration_time,
    )


def test_a_place_is_that_of_the_peer_whose_identity_has_the_key(tmp_path):
    peer = ensure_identity(tmp_path / "identity.key")
    key = read_signing_key(tmp_path / "identity.key")
    assert owner_of(own_place(key)) == (peer, "")
    assert owner_of(own_place(key, "1")) == (peer, "1")


@pytest.mark.parametrize("name", [" ", "a/b", "x" * 101, "ä", "]"])
def test_a_name_that_could_be_read_as_something_else_is_refused(name):
    with pytest.raises(ValueError, match="name of a record"):
        own_place(KEY, name)


@pytest.mark.parametrize(
    "place",
    [
        *(None, 7, "text", b"", b"QmPeer", b"[owner:]", b"[owner:ssh-rsa AAAA]", PLACE[:-1], b" " + PLACE),
        PLACE.decode(),
        PLACE + b"/",
        PLACE + PLACE,
        b"[owner:ssh-rsa " + b"A" * 372 + b"]",
        b"[owner:ssh-rsa " + b"A" * 5000 + b"]",
    ],
)
def test_what_is_no_place_is_nobody_s(place):
    assert owner_of(place) is None
    if isinstance(place, bytes):
        assert not OwnersOnly().validate(record(place=place))


def test_a_record_in_a_place_is_kept_unless_it_is_large_or_would_live_long():
    validator = OwnersOnly()
    assert validator.validate(record()) and validator.validate(record(b"x" * MAX_RECORD_BYTES))
    assert not validator.validate(record(b"x" * (MAX_RECORD_BYTES + 1)))
    assert not validator.validate(record(ttl_s=MAX_TTL_S + 60))
    assert not validator.validate(record(ttl_s=float("nan"))) and not validator.validate(record(ttl_s=-1e12))
    assert not validator.validate(record(place=None)), "a plain value"


@pytest.mark.parametrize("subkey", [b"\xc1", b"\x90", b"\x81", b"\xdf\xff\xff\xff\xff", b"\x91" * 3000])
def test_a_subkey_that_is_no_messagepack_is_refused(subkey):
    plain = record()
    assert not OwnersOnly().validate(DHTRecord(plain.key, subkey, plain.value, plain.expiration_time))


def validator_of_a_node():
    return CompositeValidator([RSASignatureValidator(OTHER), OwnersOnly(), Readable()])


def test_what_another_signed_is_refused():
    assert not validator_of_a_node().validate(signed(OTHER))
    assert validator_of_a_node().validate(signed(KEY))


def test_a_peer_has_so_many_records_at_a_time_and_others_as_many():
    quota = Quota()
    kept = [quota.has_room(record(key=f"{number}")) for number in range(MAX_RECORDS + 9)]
    assert sum(kept) == MAX_RECORDS and all(kept[:MAX_RECORDS])
    assert quota.has_room(record(key="0")), "in the place of one that is there"
    assert quota.has_room(record(place=own_place(OTHER)))


# -- of members alone -----------------------------------------------------------------------------


def test_in_a_closed_swarm_who_is_no_member_has_no_records():
    owner = Owner(bytes(KEY_BYTES))
    certificate = owner.invite().certify(PeerID.from_base58(PEER).to_bytes())
    place = own_place(KEY, "1", certificate)
    assert owner_of(place) == (PEER, "1") and is_member_s(place, owner.public)
    validator = OwnersOnly(owner.public)
    assert validator.validate(record(place=place))
    stolen = own_place(OTHER, "1", certificate)
    others = own_place(KEY, "", Owner(b"1" * KEY_BYTES).invite().certify(PeerID.from_base58(PEER).to_bytes()))
    for wrong in (PLACE, stolen, others, place[:-40]):
        assert not validator.validate(record(place=wrong))
    assert OwnersOnly().validate(record(place=place)), "in an open one nobody asks"


@pytest.mark.parametrize("value", [b"\xc1", b"", b"\x91", b"\xdf\xff\xff\xff\xff"])
def test_a_value_that_nobody_can_read_is_refused(value):
    assert not validator_of_a_node().validate(signed(KEY, value=value))


def test_records_that_are_over_make_room(monkeypatch):
    now = [swarm_time()]
    quota = Quota()
    for number in range(MAX_RECORDS):
        assert quota.has_room(record(key=f"{number}"))
    assert not quota.has_room(record(key="more"))
    monkeypatch.setattr(records_module, "swarm_time", lambda: now[0] + 61)
    assert quota.has_room(record(key="more"))


def test_the_owners_that_are_remembered_are_few(monkeypatch):
    monkeypatch.setattr(records_module, "OWNERS_REMEMBERED", 1)
    quota = Quota()
    for key in (KEY, OTHER):
        assert quota.has_room(record(place=own_place(key)))
    assert len(quota._held) == 1


def test_one_of_each_validator_is_enough():
    for one in (OwnersOnly(), Readable()):
        assert one.merge_with(type(one)())
    assert not Readable().merge_with(OwnersOnly())
