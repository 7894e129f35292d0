"""What a peer tells others of itself, and what it compares with them, over a DHT that is a stand-in."""

import io
import itertools
import logging
import threading

import pytest

from tests.kit.fakes import FakeNode
from trahiv_cli.errors import RecipeMismatch, SwarmError
from trahiv_cli.optim.history import History
from trahiv_cli.optim.progress import PeerProgress
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train import announcing
from trahiv_cli.train.announcing import is_shown_to_a_person, published
from trahiv_cli.train.comparing import Comparison

DEADLINE_S = 10.0


class Node:
    """Stores a recipe, or fails to, as it is told; the first time it succeeds.

    Args:
        failures: for each later time whether it fails; `is_over` is set when they are used up.
    """

    peer_id = "QmSomebody"

    def __init__(self, *failures: bool) -> None:
        self._failures = itertools.chain([False], failures)
        self.is_over = threading.Event()

    def publish(self, key, value, ttl_s):
        if key.endswith("_recipe"):
            return True  # each time the run's entry follows it
        fails = next(self._failures, None)
        if fails is None:
            self.is_over.set()
        if fails:
            raise SwarmError("This peer's DHT process did not answer.", hint="start again")
        return True


@pytest.mark.parametrize(
    ("failures", "num_warnings"),
    [
        ([True, True, False, True, True, False], 0),
        ([True, True, True, False], 1),
        ([True] * 7, 1),
        ([True, True, True, False, True, True, True], 2),
    ],
)
def test_a_recipe_that_is_not_published_once_or_twice_is_no_news(monkeypatch, failures, num_warnings):
    monkeypatch.setattr(announcing, "REPUBLISH_EVERY_S", 0.001)
    told, node = [], Node(*failures)
    with published(node, load_recipe("quickstart").recipe, Events(told.append), lambda: 0):
        assert node.is_over.wait(DEADLINE_S)
    assert [one["code"] for one in told] == ["swarm"] * num_warnings
    assert all("3 times" in one["message"] and "nothing to do" in one["hint"] for one in told)


class Screen(io.StringIO):
    """A terminal, a notebook's cell, or a file."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


TERMINAL, FILE = Screen(True), Screen(False)
READERS = [  # who gets what is logged, and whether that is a person alone
    ([logging.StreamHandler(TERMINAL)], False, True),
    ([logging.StreamHandler(TERMINAL), logging.StreamHandler(FILE)], False, False),
    ([logging.StreamHandler(FILE)], False, False),
    ([logging.StreamHandler(FILE)], True, False),
    ([logging.NullHandler()], False, False),
    ([], False, False),
    ([], True, True),
]


@pytest.mark.parametrize(("handlers", "is_notebook", "is_private"), READERS)
def test_an_invitation_is_shown_to_a_person_and_to_no_log(monkeypatch, handlers, is_notebook, is_private):
    monkeypatch.setattr("sys.stderr", Screen(False))
    monkeypatch.setattr("transformers.utils.import_utils.is_in_notebook", lambda: is_notebook)
    above, log = logging.Logger("above"), logging.Logger("log")
    log.parent, above.handlers = above, handlers
    assert is_shown_to_a_person(log) == is_private


# -- what was loaded ------------------------------------------------------------------------------


class SlowNode(FakeNode):
    """A node whose look-ups end without an answer while it `is_slow`."""

    is_slow = False

    def fetch(self, key):
        if self.is_slow:
            raise SwarmError("The DHT did not answer within 10 s; nothing was changed.")
        return super().fetch(key)


def test_two_that_entered_together_with_other_models_part_and_a_slow_dht_ends_nobody():
    first = SlowNode("QmA")
    second = SlowNode("QmB", first.records)
    ours, theirs = (
        Comparison(node, "run-1", {"frozen weights": name * 64})
        for node, name in ((second, "a"), (first, "b"))
    )
    ours.publish()
    theirs.publish()
    others = {
        node.peer_id: (PeerProgress(node.peer_id, History(), 0, 1.0, is_client=False),)
        for node in (first, second)
    }
    second.is_slow = True
    ours.repeat(others["QmA"])
    second.is_slow = False
    theirs.repeat(others["QmB"])  # one of two is enough
    with pytest.raises(RecipeMismatch, match="frozen weights"):
        ours.repeat(others["QmA"])
