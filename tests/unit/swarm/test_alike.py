"""Peers that loaded something else are refused with the reason, by what others published.

What a liar publishes turns nobody away: `tests/simulation/test_publications_of_a_liar.py`.
"""

import pytest

from tests.kit.fakes import FakeNode
from trahiv_cli.errors import RecipeMismatch
from trahiv_cli.swarm.alike import SAMPLES, digest, publish_likeness, require_alike, without

OURS = {"frozen weights": "a" * 64, "tokenizer": "b" * 64, SAMPLES: "800"}
THEIRS = OURS | {"frozen weights": "c" * 64}


@pytest.mark.parametrize(
    ("theirs", "difference", "hint"),
    [
        (THEIRS, ("frozen weights", "a" * 12, "c" * 12), "revision"),
        (OURS | {SAMPLES: "801"}, (SAMPLES, "800", "801"), "divide_data"),
    ],
)
def test_what_differs_from_most_is_said_and_unlike_peers_never_have_the_same_schema(theirs, difference, hint):
    node = FakeNode("me")
    require_alike(node, "run", OURS, [])
    publish_likeness(node.neighbour("one"), "run", theirs)
    publish_likeness(node.neighbour("two"), "run", OURS)
    for there in (["one", "two"], ["two"], ["another"]):  # that one has left
        require_alike(node, "run", OURS, there)
    with pytest.raises(RecipeMismatch, match=difference[0]) as refused:
        require_alike(node, "run", OURS, ["one"])
    assert refused.value.differences == (difference,) and hint in refused.value.hint
    assert digest(OURS) == digest(dict(reversed(OURS.items()))) != digest(theirs)
    assert without(OURS, difference[0]) == without(theirs, difference[0])
