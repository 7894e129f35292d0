"""What a peer says of itself, and what is made of it by those who hear it from others."""

import pytest
from hivemind.utils import MSGPackSerializer

from tests.kit.identities import id_of, key_of
from trahiv_cli.swarm.statements import content_of, sign, verified

KEY, SIGNATURE, CONTENT = range(3)
SAID = b"I bring 8 samples"


def stated(name="alice"):
    return sign(key_of(name), b"step 7", SAID)


def test_a_statement_is_read_as_it_was_made_and_no_two_are_the_same():
    assert verified(stated(), id_of("alice"), b"step 7") == content_of(stated()) == SAID
    assert stated() != stated() and len(stated()) < 560 + len(SAID)


@pytest.mark.parametrize(
    ("peer", "about", "changed"),
    [
        *(("bob", b"step 7", {}), ("alice", b"step 8", {}), ("alice", b"", {})),
        *(("alice", b"step 7", {CONTENT: content}) for content in (b"I bring 9 samples", SAID.decode())),
        *(("alice", b"step 7", {SIGNATURE: signature}) for signature in (bytes(128), b"", bytes(513))),
        *(
            ("alice", b"step 7", {KEY: key})
            for key in (MSGPackSerializer.loads(stated("bob"))[KEY], b"", bytes(601))
        ),
    ],
)
def test_a_statement_of_another_one_or_about_something_else_or_changed_is_none(peer, about, changed):
    parts = dict(enumerate(MSGPackSerializer.loads(stated()))) | changed
    with pytest.raises(ValueError):
        verified(MSGPackSerializer.dumps(list(parts.values())), id_of(peer), about)
