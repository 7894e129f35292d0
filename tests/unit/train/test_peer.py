"""What one peer says of its life; the DHT is the only part that is replaced here."""

import itertools
import threading

import pytest

from trahiv_cli.errors import SwarmError
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train import peer

DEADLINE_S = 10.0


class Node:
    """Stores a recipe, or fails to, as it is told; the first time it succeeds.

    Args:
        failures: for each later time whether it fails; `is_over` is set when they are used up.
    """

    peer_id = "QmSomebody"

    def __init__(self, *failures: bool) -> None:
        self._failures = itertools.chain(failures)
        self._is_new = True
        self.is_over = threading.Event()

    def publish(self, key, value, ttl_s):
        if key.endswith("_recipe"):
            return True  # each time the run's entry follows it
        fails = not self._is_new and next(self._failures, None)
        self._is_new = False
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
    monkeypatch.setattr(peer, "REPUBLISH_EVERY_S", 0.001)
    told, node = [], Node(*failures)
    with peer._published(node, load_recipe("quickstart").recipe, Events(told.append), reached=[0]):
        assert node.is_over.wait(DEADLINE_S)
    assert [one["code"] for one in told] == ["swarm"] * num_warnings
    assert all("3 times" in one["message"] and "nothing to do" in one["hint"] for one in told)
