"""Peers that loaded something else are refused with the reason, by what others published.

What a liar publishes turns nobody away: `tests/simulation/test_records_of_a_liar.py`.
"""

from types import SimpleNamespace

import pytest

from tests.kit.fakes import FakeNode
from trahiv_cli.assets.likeness import INITIAL
from trahiv_cli.errors import RecipeMismatch, SwarmError
from trahiv_cli.train.comparison import SAMPLES, Comparison

OURS = {"frozen weights": "a" * 64, "tokenizer": "b" * 64, SAMPLES: "800", INITIAL: "d" * 64}
ME, ONE, TWO, ANOTHER = (SimpleNamespace(peer_id=name) for name in ("me", "one", "two", "another"))


@pytest.mark.parametrize(
    ("part", "value", "hint"), [("frozen weights", "c" * 64, "revision"), (SAMPLES, "801", "divide_data")]
)
def test_what_differs_from_most_is_said_and_unlike_peers_never_have_the_same_schema(part, value, hint):
    node = FakeNode("me")
    ours = Comparison(node, "run", OURS)
    ours.require_alike([ONE, TWO], has_begun=True)  # they have published nothing
    theirs = Comparison(node.neighbour("one"), "run", OURS | {part: value})
    same = Comparison(node.neighbour("two"), "run", dict(reversed(OURS.items())))
    for there in ([ONE, TWO], [TWO], [ANOTHER]):  # that one has left
        ours.require_alike(there, has_begun=True)
    with pytest.raises(RecipeMismatch, match=part) as refused:
        ours.require_alike([ONE], has_begun=True)
    assert refused.value.differences == ((part, OURS[part][:12], value[:12]),) and hint in refused.value.hint
    assert ours.schema == same.schema != theirs.schema


def test_initial_weights_may_differ_in_a_run_that_has_begun():
    node = FakeNode("me")
    ours, theirs = (
        Comparison(one, "run", OURS | {INITIAL: value})
        for one, value in ((node, "d"), (node.neighbour("one"), "e"))
    )
    ours.require_alike([ONE], has_begun=True)
    assert ours.schema == theirs.schema
    with pytest.raises(RecipeMismatch, match=INITIAL):
        ours.require_alike([ONE], has_begun=False)


class DeafNode(FakeNode):
    """A node whose DHT does not answer while it is deaf."""

    is_deaf = False

    def fetch(self, key):
        if self.is_deaf:
            raise SwarmError("no answer")
        return super().fetch(key)


def test_of_two_that_entered_together_the_one_with_the_greater_id_leaves():
    first = DeafNode("me")
    ours = Comparison(first.neighbour("one"), "run", OURS | {"tokenizer": "e" * 64})
    theirs = Comparison(first, "run", OURS)
    theirs.repeat([ONE])  # one of two is enough
    with pytest.raises(RecipeMismatch, match="tokenizer"):
        ours.repeat([ME])
    first.is_deaf = True
    theirs.repeat([ONE, ONE])
    first.is_deaf = False
    with pytest.raises(RecipeMismatch):
        theirs.repeat([ONE, ONE])
