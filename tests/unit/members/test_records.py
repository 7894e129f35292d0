"""The owner of a record, records that no node stores, and signed statements that others pass on."""

from dataclasses import replace

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from tests.kit.identities import id_of, key_of
from trahiv_cli.clock import swarm_time
from trahiv_cli.members import records
from trahiv_cli.members.membership import KEY_BYTES, Owner
from trahiv_cli.members.records import OwnersOnly, Quota, Readable, own_subkey, owner_of, sign, verified

KEY, OTHER, THIRD = RSAPrivateKey(), RSAPrivateKey(), RSAPrivateKey()
PLACE = own_subkey(KEY)
OWNER = Owner(bytes(KEY_BYTES))
VALUE = MSGPackSerializer.dumps("value")


def record(value=VALUE, place=PLACE, ttl_s=60.0, key="key"):
    ends_at = swarm_time() + ttl_s
    return DHTRecord(DHTID.generate(source=key).to_bytes(), MSGPackSerializer.dumps(place), value, ends_at)


def place_by(invitation, key=KEY):
    """The place of a peer, with its certificate from an invitation."""
    return own_subkey(key, invitation.certify(PeerID.from_base58(owner_of(own_subkey(key))).to_bytes()))


@pytest.fixture
def quota(request):
    return Quota(**getattr(request, "param", {}))


@pytest.fixture
def keeps(quota):
    """`keeps(place=PLACE)` tells whether a node has room for a valid record, which it then keeps."""

    def keeps(**wanted):
        has_room = quota.has_room(record(**wanted))
        if has_room:
            quota.count(record(**wanted))
        return has_room

    return keeps


@pytest.mark.parametrize(
    "place",
    [
        None,
        7,
        b"",
        b"QmPeer",
        b"[owner:ssh-rsa AAAA]",
        b"[owner:ssh-rsa %b]" % (b"A" * 372),
        b"[owner:ssh-rsa %b]" % (b"A" * 5000),
        PLACE[:-1],
        PLACE.decode(),
        PLACE + PLACE,
        PLACE + b"/1",
        b" " + PLACE,
    ],
    ids=lambda place: str(place)[:20],
)
def test_invalid_place_has_no_records(place):
    assert owner_of(place) is None
    assert not OwnersOnly().validate(record(place=place))
    assert not Quota().has_room(record(place=place))


def test_oversized_or_overlong_records_are_refused():
    longest = bytes(3600)
    timeless = (record(ttl_s=ttl_s) for ttl_s in (7260, float("nan"), -1e12))
    placeless = (replace(record(), subkey=subkey) for subkey in (b"", b"\xc1"))
    for wrong in (record(longest + b"x"), *timeless, *placeless):
        assert not OwnersOnly().validate(wrong)
    assert OwnersOnly().validate(record(longest))


def test_unreadable_record_is_refused():
    assert Readable().validate(record())
    assert not Readable().validate(record(b"\xc1"))


def test_closed_swarm_refuses_records_of_nonmembers():
    place, validator = place_by(OWNER.invite()), OwnersOnly(OWNER.public)
    assert owner_of(place) == owner_of(PLACE)
    assert validator.validate(record(place=place))
    stolen = own_subkey(OTHER) + place.removeprefix(PLACE)
    for wrong in (PLACE, stolen, place_by(Owner(b"1" * KEY_BYTES).invite()), place[:-40]):
        assert not validator.validate(record(place=wrong))
    assert not OwnersOnly().validate(record(place=place))  # no certificate counts in an open swarm


def test_quota_limits_records_per_peer(monkeypatch, quota, keeps):
    now = swarm_time()
    for number in range(32 + 1):
        assert quota.has_room(record(key=f"{number}"))  # it counts only once it is found valid
    found = [keeps(key=f"{number}") for number in range(32 + 9)]
    assert found == [True] * 32 + [False] * 9
    assert keeps(key="0")  # in the place of one that is there
    monkeypatch.setattr(records, "swarm_time", lambda: now + 61)
    assert keeps(key="another")


@pytest.mark.parametrize("quota", [{"max_remembered": 1}], indirect=True)
def test_quota_forgets_oldest_owner(quota, keeps):
    for number in range(32):
        keeps(key=f"{number}")
    keeps(place=own_subkey(OTHER))
    assert keeps(key="more")


@pytest.mark.parametrize("quota", [{"max_owners": 2}], indirect=True)
def test_quota_limits_peers_per_invitation(monkeypatch, quota, keeps):
    now, shared, other = swarm_time(), OWNER.invite(), OWNER.invite()
    for key in (KEY, OTHER, KEY):
        assert keeps(place=place_by(shared, key))
    assert not keeps(place=place_by(other))  # by another certificate
    assert not keeps(place=place_by(shared)[:-1] + b"_")  # the same certificate, written otherwise
    for key in ("key", "another"):
        assert not keeps(place=place_by(shared, THIRD), key=key)
        assert keeps(place=place_by(shared, OTHER), key=key)
    assert keeps(place=place_by(other), key="more")
    assert keeps(place=place_by(other, THIRD))
    assert all(keeps(place=own_subkey(key), key="open") for key in (KEY, OTHER, THIRD))  # no bound
    monkeypatch.setattr(records, "swarm_time", lambda: now + 61)
    assert keeps(place=place_by(shared, THIRD))  # the others' are over


SAID = b"I bring 8 samples"
STATEMENT = sign(key_of("alice"), b"step 7", SAID)
PARTS = MSGPackSerializer.loads(STATEMENT)


def test_statement_is_short_and_salted():
    assert verified(STATEMENT, id_of("alice"), b"step 7") == records.content_of(STATEMENT) == SAID
    assert sign(key_of("alice"), b"step 7", SAID) != STATEMENT
    assert len(STATEMENT) < 560 + len(SAID)


@pytest.mark.parametrize("peer, about", [("bob", b"step 7"), ("alice", b"step 8"), ("alice", b"")])
def test_misattributed_statement_is_refused(peer, about):
    with pytest.raises(ValueError):
        verified(STATEMENT, id_of(peer), about)


BOBS_KEY = MSGPackSerializer.loads(sign(key_of("bob"), b"step 7", SAID))[0]


@pytest.mark.parametrize(
    "at, part",
    [
        (0, BOBS_KEY),
        (0, b""),
        (1, bytes(128)),
        (1, b""),
        (2, b"I bring 9"),
        (2, SAID.decode()),
    ],
)
def test_altered_statement_is_refused(at, part):
    altered = MSGPackSerializer.dumps([*PARTS[:at], part, *PARTS[at + 1 :]])
    with pytest.raises(ValueError):
        verified(altered, id_of("alice"), b"step 7")


@pytest.mark.parametrize("endless", [[bytes(601), *PARTS[1:]], [PARTS[0], bytes(513), SAID]])
def test_endless_statement_is_not_read(endless):
    with pytest.raises(ValueError, match="not a statement"):
        records.content_of(MSGPackSerializer.dumps(endless))
