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
    MAX_ID_BYTES,
    MAX_OWNERS,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    MAX_TTL_S,
    OwnersOnly,
    Quota,
    Readable,
    is_member_s,
    own_place,
    owner_of,
    peer_from,
    read_signing_key,
)

KEY, OTHER, THIRD = RSAPrivateKey(), RSAPrivateKey(), RSAPrivateKey()
PLACE = own_place(KEY)
PEER = owner_of(PLACE)
OWNER = Owner(bytes(KEY_BYTES))


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
    assert owner_of(own_place(key)) == peer


@pytest.mark.parametrize(
    "place",
    [
        *(None, 7, "text", b"", b"QmPeer", b"[owner:]", b"[owner:ssh-rsa AAAA]", PLACE[:-1], b" " + PLACE),
        PLACE.decode(),
        PLACE + b"/1",
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


def kept(quota, **wanted):
    """Whether a node with this quota keeps a valid record."""
    has_room = quota.has_room(record(**wanted))
    if has_room:
        quota.count(record(**wanted))
    return has_room


def test_a_peer_has_so_many_records_at_a_time_and_others_as_many():
    quota = Quota()
    found = [kept(quota, key=f"{number}") for number in range(MAX_RECORDS + 9)]
    assert sum(found) == MAX_RECORDS and all(found[:MAX_RECORDS])
    assert kept(quota, key="0"), "in the place of one that is there"
    assert kept(quota, place=own_place(OTHER))


def test_what_was_not_found_valid_does_not_count():
    quota = Quota()
    for number in range(MAX_RECORDS + 1):
        assert quota.has_room(record(key=f"{number}"))


@pytest.mark.parametrize("place", [None, b"QmPeer", b"[owner:]"])
def test_in_nobody_s_place_there_is_no_room(place):
    assert not Quota().has_room(record(place=place))


# -- of members alone -----------------------------------------------------------------------------


def test_in_a_closed_swarm_who_is_no_member_has_no_records():
    place = place_by(OWNER.invite())
    assert owner_of(place) == PEER and is_member_s(place, OWNER.public)
    validator = OwnersOnly(OWNER.public)
    assert validator.validate(record(place=place))
    stolen = own_place(OTHER) + place.removeprefix(PLACE)
    others = place_by(Owner(b"1" * KEY_BYTES).invite())
    for wrong in (PLACE, stolen, others, place[:-40]):
        assert not validator.validate(record(place=wrong))


def place_by(invitation, key=KEY):
    """The place of a peer that came by an invitation."""
    return own_place(key, invitation.certify(PeerID.from_base58(owner_of(own_place(key))).to_bytes()))


def test_a_peer_has_one_place_under_a_key_whatever_certificates_it_has():
    first, second = OWNER.invite(), OWNER.invite()
    assert not OwnersOnly().validate(record(place=place_by(first))), "no certificate counts in an open swarm"
    quota = Quota()
    assert kept(quota, place=place_by(first)) and kept(quota, place=place_by(first))
    assert not kept(quota, place=place_by(second))
    assert not kept(quota, place=place_by(first)[:-1] + b"_"), "the same certificate, written otherwise"
    assert kept(quota, place=place_by(second), key="another")


def test_so_many_peers_have_records_that_came_by_one_invitation(monkeypatch):
    assert MAX_OWNERS >= 100, "honest ones"
    monkeypatch.setattr(records_module, "MAX_OWNERS", 2)
    now, quota, shared = swarm_time(), Quota(), OWNER.invite()
    assert kept(quota, place=place_by(shared, KEY)) and kept(quota, place=place_by(shared, OTHER))
    for key in ("key", "another"):
        assert not kept(quota, place=place_by(shared, THIRD), key=key)
        assert kept(quota, place=place_by(shared, OTHER), key=key)
    assert kept(quota, place=place_by(OWNER.invite(), THIRD)), "by another one"
    monkeypatch.setattr(records_module, "swarm_time", lambda: now + 61)
    assert kept(quota, place=place_by(shared, THIRD)), "the others' are over"


def test_in_an_open_swarm_any_number_of_peers_has_records(monkeypatch):
    monkeypatch.setattr(records_module, "MAX_OWNERS", 2)
    quota = Quota()
    assert all(kept(quota, place=own_place(key)) for key in (KEY, OTHER, THIRD))


@pytest.mark.parametrize("value", [b"\xc1", b"", b"\x91", b"\xdf\xff\xff\xff\xff"])
def test_a_value_that_nobody_can_read_is_refused(value):
    assert not validator_of_a_node().validate(signed(KEY, value=value))


def test_records_that_are_over_make_room(monkeypatch):
    now = [swarm_time()]
    quota = Quota()
    for number in range(MAX_RECORDS):
        assert kept(quota, key=f"{number}")
    assert not kept(quota, key="more")
    monkeypatch.setattr(records_module, "swarm_time", lambda: now[0] + 61)
    assert kept(quota, key="more")


def test_the_owners_that_are_remembered_are_few(monkeypatch):
    monkeypatch.setattr(records_module, "OWNERS_REMEMBERED", 1)
    quota = Quota()
    for number in range(MAX_RECORDS):
        assert kept(quota, key=f"{number}")
    assert kept(quota, place=own_place(OTHER)), "whom there is room for"
    assert kept(quota, key="more"), "of one who is forgotten"


def test_one_of_each_validator_is_enough():
    for one in (OwnersOnly(), Readable()):
        assert one.merge_with(type(one)())
    assert not Readable().merge_with(OwnersOnly())


def test_what_is_longer_than_an_id_is_none_and_costs_nothing():
    known = PeerID.from_base58(PEER)
    assert peer_from(known.to_bytes()) == known
    with pytest.raises(ValueError, match="no id"):
        peer_from(bytes(MAX_ID_BYTES + 1))
