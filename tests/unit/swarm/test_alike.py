"""Peers that loaded something else are refused with the reason, by what others published."""

import pytest

from tests.kit.fakes import FakeNode
from trahiv_cli.errors import RecipeMismatch
from trahiv_cli.swarm.alike import SAMPLES, digest, publish_likeness, require_alike, without

OURS = {"frozen weights": "a" * 64, "tokenizer": "b" * 64, SAMPLES: "800"}
THEIRS = OURS | {"frozen weights": "c" * 64}


def swarm_of(**peers):
    node = FakeNode("me")
    for peer, likeness in peers.items():
        publish_likeness(node.neighbour(peer), "run", likeness)
    return node


@pytest.mark.parametrize(
    ("published", "there"),
    [
        ({}, []),
        ({"one": OURS, "two": THEIRS}, ["one", "two"]),
        ({"gone": THEIRS}, ["one"]),
        ({"one": ["?"], "two": {"frozen weights": 3}}, ["one", "two"]),
    ],
    ids=["a first peer", "one liar", "one that has left", "nonsense"],
)
def test_who_is_like_the_others_is_welcome_whatever_a_few_say(published, there):
    require_alike(swarm_of(**published), "run", OURS, there)


@pytest.mark.parametrize(
    ("theirs", "difference", "hint"),
    [
        (THEIRS, ("frozen weights", "a" * 12, "c" * 12), "revision"),
        (OURS | {SAMPLES: "801"}, (SAMPLES, "800", "801"), "divide_data"),
    ],
)
def test_what_differs_is_said_and_unlike_peers_never_have_the_same_schema(theirs, difference, hint):
    with pytest.raises(RecipeMismatch, match=difference[0]) as refused:
        require_alike(swarm_of(one=theirs), "run", OURS, ["one"])
    assert refused.value.differences == (difference,) and hint in refused.value.hint
    assert digest(OURS) == digest(dict(reversed(OURS.items()))) != digest(theirs)
    assert without(OURS, difference[0]) == without(theirs, difference[0])
