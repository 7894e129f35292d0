"""What a peer tells others of itself, and what it compares with them, over a DHT that is a stand-in."""

import io
import itertools
import logging
import threading

import pytest

from trahiv_cli.errors import SwarmError
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.train import announcing
from trahiv_cli.train.announcing import is_shown_to_a_person, published


def test_a_recipe_is_published_again_and_again_whether_the_dht_answers_or_not(monkeypatch):
    steps, is_over = itertools.count(), threading.Event()

    def publish(node, recipe, run, step):
        if 0 < step < 4:
            raise SwarmError("no answer")
        if step > 5:
            is_over.set()

    monkeypatch.setattr(announcing, "REPUBLISH_EVERY_S", 0.001)
    monkeypatch.setattr(announcing, "publish_recipe", publish)
    with published(None, load_recipe("quickstart").recipe, lambda: next(steps)):
        assert is_over.wait(10)


TERMINAL, FILE = io.StringIO(), io.StringIO()
TERMINAL.isatty = lambda: True


@pytest.mark.parametrize(
    ("streams", "is_notebook", "is_private"),
    [  # what gets what is logged, and whether that is a person alone
        ([TERMINAL], False, True),
        ([TERMINAL, FILE], False, False),
        ([FILE], True, False),
        ([None], False, False),
        ([], False, False),
        ([], True, True),
    ],
)
def test_an_invitation_is_shown_to_a_person_and_to_no_log(monkeypatch, streams, is_notebook, is_private):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("transformers.utils.import_utils.is_in_notebook", lambda: is_notebook)
    log = logging.Logger("log")
    log.parent = logging.Logger("above")
    log.parent.handlers = [logging.StreamHandler(one) if one else logging.NullHandler() for one in streams]
    assert is_shown_to_a_person(log) == is_private
