"""What a peer tells others of itself, and what it compares with them, over a DHT that is a stand-in."""

import io
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
from trahiv_cli.train.entry import Comparison

DEADLINE_S = 10.0


class SlowNode(FakeNode):
    """A node whose DHT does not answer for the next `failures`, one after the other; `is_over` afterwards."""

    def __init__(self, *args, failures=()):
        super().__init__(*args)
        self.failures, self.is_over = iter(failures), threading.Event()

    def _ask(self):
        fails = next(self.failures, None)
        if fails is None:
            self.is_over.set()
        if fails:
            raise SwarmError("This peer's DHT process did not answer.", hint="start again")

    def publish(self, key, value, ttl_s):
        if not key.endswith("_recipe"):  # each time the run's entry follows it
            self._ask()
        return super().publish(key, value, ttl_s)

    def fetch(self, key):
        self._ask()
        return super().fetch(key)


@pytest.mark.parametrize(
    ("failures", "num_warnings"),
    [
        ([True, True, False, True, True, False], 0),
        ([True] * 7, 1),
        ([True, True, True, False, True, True, True], 2),
    ],
)
def test_a_recipe_that_is_not_published_once_or_twice_is_no_news(monkeypatch, failures, num_warnings):
    monkeypatch.setattr(announcing, "REPUBLISH_EVERY_S", 0.001)
    told, node = [], SlowNode(failures=[False, *failures])
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


@pytest.mark.parametrize(
    ("handlers", "is_notebook", "is_private"),
    [  # who gets what is logged, and whether that is a person alone
        ([logging.StreamHandler(TERMINAL)], False, True),
        ([logging.StreamHandler(TERMINAL), logging.StreamHandler(FILE)], False, False),
        ([logging.StreamHandler(FILE)], True, False),
        ([logging.NullHandler()], False, False),
        ([], False, False),
        ([], True, True),
    ],
)
def test_an_invitation_is_shown_to_a_person_and_to_no_log(monkeypatch, handlers, is_notebook, is_private):
    monkeypatch.setattr("sys.stderr", Screen(False))
    monkeypatch.setattr("transformers.utils.import_utils.is_in_notebook", lambda: is_notebook)
    above, log = logging.Logger("above"), logging.Logger("log")
    log.parent, above.handlers = above, handlers
    assert is_shown_to_a_person(log) == is_private


def test_two_that_entered_together_with_other_models_part_and_a_slow_dht_ends_nobody():
    first, second = SlowNode("QmA"), FakeNode("QmB")
    second.records = first.records
    theirs, ours = (
        Comparison(node, "run-1", {"frozen weights": node.peer_id * 64}) for node in (first, second)
    )
    (a, b) = ((PeerProgress(name, History(), 0, 1.0, is_client=False),) for name in ("QmA", "QmB"))
    theirs.repeat(b)  # one of two is enough
    with pytest.raises(RecipeMismatch, match="frozen weights"):
        ours.repeat(a)
    first.failures = iter([True])
    theirs.repeat(b + b)
    with pytest.raises(RecipeMismatch):
        theirs.repeat(b + b)
