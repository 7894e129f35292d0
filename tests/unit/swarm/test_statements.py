"""What a peer says of itself, and what is made of it by those who hear it from others."""

import pytest
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from tests.kit.identities import id_of, key_of
from trahiv_cli.swarm.identity import ensure_identity
from trahiv_cli.swarm.records import read_signing_key
from trahiv_cli.swarm.statements import content_of, sign, verified

ALICE, BOB = id_of("alice"), id_of("bob")


def stated(content=b"I bring 8 samples", about=b"step 7", name="alice"):
    return sign(key_of(name), about, content)


def test_a_statement_is_read_as_it_was_made_and_no_two_are_the_same(tmp_path):
    assert verified(stated(), ALICE, b"step 7") == content_of(stated()) and stated() != stated()
    for peer, about in [(BOB, b"step 7"), (ALICE, b"step 8"), (ALICE, b"")]:
        with pytest.raises(ValueError, match="not a statement of|did not state"):
            verified(stated(), peer, about)
    peer_id = ensure_identity(tmp_path / "identity.key")
    statement = sign(read_signing_key(tmp_path / "identity.key"), b"step 7", b"so many")
    assert len(statement) < 560 + len(b"so many")
    assert verified(statement, PeerID.from_base58(peer_id), b"step 7") == b"so many"


def changed(place, value):
    parts = MSGPackSerializer.loads(stated())
    parts[place] = value
    return MSGPackSerializer.dumps(parts)


@pytest.mark.parametrize(
    "statement",
    [
        *(changed(2, b"I bring 9 samples"), changed(2, "I bring 8 samples")),
        *(changed(1, bytes(128)), changed(1, b""), changed(1, bytes(513))),
        *(
            changed(0, MSGPackSerializer.loads(stated(name="bob"))[0]),
            changed(0, b""),
            changed(0, bytes(601)),
        ),
        *(MSGPackSerializer.dumps(MSGPackSerializer.loads(stated())[:2]), b"\xc1"),
    ],
)
def test_a_statement_that_was_changed_is_none(statement):
    with pytest.raises(ValueError):
        verified(statement, ALICE, b"step 7")
