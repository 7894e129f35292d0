"""What `join` says of a swarm's recipe, and of what it needs, before this peer is one of it.

The swarm is the records that it would publish: visits find those.
"""

import contextlib
import re

import pytest

from tests.kit.fakes import FakeNode
from tests.kit.recipes import write_tiny
from tests.unit.cli.conftest import ADDRESS
from trahiv_cli.recipe.agreement import resolve, run_id
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.swarm.exchange import publish_recipe
from trahiv_cli.train import joining

pytestmark = pytest.mark.usefixtures("nothing_starts")


@pytest.fixture
def starter(tmp_path, monkeypatch):
    """`starter(peft={"r": 4})` has a swarm train the tiny recipe with changes, on a text of its own."""
    node = FakeNode("QmStarter")
    monkeypatch.setattr(joining, "visiting", lambda *_: contextlib.nullcontext(node.neighbour("QmNew")))

    def starter(**changes):
        resolved = resolve(load_recipe(write_tiny(tmp_path / "starter", **changes)).recipe)
        publish_recipe(node, resolved, run_id(resolved), 3)

    return starter


@pytest.fixture
def bob(tmp_path, monkeypatch):
    """The folder of who joins."""
    folder = tmp_path / "bob"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def join(events, bob):
    """`join("tiny.yaml", ...)`: its exit code, and its errors; nothing is left in the folder."""

    def join(*args):
        before = set(bob.iterdir())
        code, errors = events("join", *args, "--peer", ADDRESS, "--yes")
        assert {event["event"] for event in errors} == {"error"}
        assert set(bob.iterdir()) == before
        return code, errors

    return join


def test_a_swarm_that_trains_nothing_has_no_recipe_to_give(join, starter):
    code, (error,) = join()
    assert (code, error["code"]) == (4, "nothing-published")
    assert "nobody publishes a recipe" in error["message"] and "trahiv join RECIPE" in error["hint"]


def test_a_recipe_that_differs_is_refused_field_by_field(trahiv, join, bob, starter):
    starter()
    recipe = write_tiny(bob, training__learning_rate=0.5)
    code, (error,) = join(recipe)
    assert (code, error["code"]) == (5, "mismatch")
    assert error["differences"] == [["training.learning_rate", 0.5, 0.001]]
    code, out, err = trahiv("join", recipe, "--set", "clm.max_length=64", "--peer", ADDRESS)
    assert (code, out) == (5, "")
    assert re.search("^error: .* trains another recipe: it differs in 2", err)
    assert re.findall(r"^  (\S+) +(.+?) {2,}(.+)$", err, re.MULTILINE) == [
        ("field", "here", "in the swarm"),
        ("clm.max_length", "64", "32"),
        ("training.learning_rate", "0.5", "0.001"),
    ]
    assert re.search("\nhint: join without RECIPE.*\n$", err)
