"""What a peer says of itself, and what is made of it by those who hear it from others."""

import pytest
from hivemind.utils import MSGPackSerializer

from tests.kit.identities import id_of, key_of
from trahiv_cli.swarm.statements import content_of, sign, verified

ALICE, BOB = id_of("alice"), id_of("bob")


def stated(content=b"I bring 8 samples", about=b"step 7", name="alice"):
    return sign(key_of(name), about, content)


def test_a_statement_is_read_as_it_was_made_and_no_two_are_the_same():
    assert verified(stated(), ALICE, b"step 7") == content_of(stated()) and stated() != stated()
    assert len(stated()) < 560 + len(content_of(stated()))
    for peer, about in [(BOB, b"step 7"), (ALICE, b"step 8"), (ALICE, b"")]:
        with pytest.raises(ValueError, match="not a statement of|did not state"):
            verified(stated(), peer, about)


KEY, SIGNATURE, CONTENT = range(3)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((CONTENT, b"I bring 9 samples"), (CONTENT, "I bring 8 samples")),
        *((SIGNATURE, bytes(128)), (SIGNATURE, b""), (SIGNATURE, bytes(513))),
        *((KEY, MSGPackSerializer.loads(stated(name="bob"))[KEY]), (KEY, b""), (KEY, bytes(601))),
    ],
)
def test_a_statement_that_was_changed_is_none(place, value):
    parts = MSGPackSerializer.loads(stated())
    parts[place] = value
    with pytest.raises(ValueError):
        verified(MSGPackSerializer.dumps(parts), ALICE, b"step 7")
