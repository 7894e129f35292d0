"""Peers that loaded something else are refused with the reason, by what others published."""

import pytest

from tests.kit.fakes import FakeNode
from trahiv_cli.errors import RecipeMismatch
from trahiv_cli.swarm.alike import SAMPLES, digest, publish_likeness, require_alike

OURS = {"frozen weights": "a" * 64, "tokenizer": "b" * 64}
THEIRS = OURS | {"frozen weights": "c" * 64}


def swarm_of(**peers):
    node = FakeNode("me")
    for peer, likeness in peers.items():
        publish_likeness(node.neighbour(peer), "run", likeness)
    return node


def test_a_first_peer_and_one_like_the_others_are_welcome():
    require_alike(swarm_of(), "run", OURS, [])
    require_alike(swarm_of(one=OURS, two=OURS), "run", OURS, ["one", "two"])


def test_what_differs_is_said():
    with pytest.raises(RecipeMismatch) as refused:
        require_alike(swarm_of(one=THEIRS), "run", OURS, ["one"])
    assert refused.value.differences == (("frozen weights", "a" * 12, "c" * 12),)
    assert "frozen weights" in refused.value.message
    assert "revision" in refused.value.hint


def test_who_brings_data_of_another_size_is_told_how_each_may_have_its_own():
    ours, theirs = OURS | {SAMPLES: "800"}, OURS | {SAMPLES: "801"}
    with pytest.raises(RecipeMismatch) as refused:
        require_alike(swarm_of(one=theirs), "run", ours, ["one"])
    assert refused.value.differences == ((SAMPLES, "800", "801"),)
    assert "divide_data" in refused.value.hint


def test_one_liar_keeps_nobody_out():
    require_alike(swarm_of(one=OURS, two=THEIRS), "run", OURS, ["one", "two"])


def test_a_peer_that_has_left_or_says_nonsense_does_not_count():
    require_alike(swarm_of(gone=THEIRS), "run", OURS, ["one"])
    require_alike(swarm_of(one=["?"], two={"frozen weights": 3}), "run", OURS, ["one", "two"])


def test_unlike_peers_never_have_the_same_schema():
    assert digest(OURS) == digest(dict(reversed(OURS.items())))
    assert digest(OURS) != digest(THEIRS)
