"""What `join` says of a swarm's recipe before this peer is one of it.

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
from trahiv_cli.train import folder

pytestmark = pytest.mark.usefixtures("nothing_starts")


@pytest.fixture(autouse=True)
def publish(here, monkeypatch):
    """`publish()` has a swarm publish the tiny recipe; until then, one of its peers answers and has none."""
    node = FakeNode("QmStarter")
    monkeypatch.setattr(folder, "visiting", lambda *_: contextlib.nullcontext(node.neighbour("QmNew")))

    def publish():
        theirs = resolve(load_recipe(write_tiny(here)).recipe)
        publish_recipe(node, theirs, run_id(theirs), 3)

    return publish


def test_a_swarm_that_trains_nothing_has_no_recipe_to_give(events):
    code, (error,) = events("join", "--peer", ADDRESS, "--yes")
    assert (code, error["code"]) == (4, "nothing-published")
    assert "nobody publishes a recipe" in error["message"] and "trahiv join RECIPE" in error["hint"]


def test_what_is_wrong_with_a_value_of_ones_own_is_not_said_of_the_swarm(events, publish, here):
    publish()
    own = ["--set", "training.report_to=[azure_ml]"]
    code, (error,) = events("join", "--peer", ADDRESS, "--yes", "--files", here, *own)
    assert (code, error["path"], error["file"]) == (3, "training.report_to.0", " ".join(own))


def test_a_recipe_that_differs_is_refused_field_by_field(trahiv, events, publish, here):
    publish()
    recipe = write_tiny(here, training__learning_rate=0.5)
    code, (error,) = events("join", recipe, "--peer", ADDRESS, "--yes")
    assert (code, error["differences"]) == (5, [["training.learning_rate", 0.5, 0.001]])
    code, out, err = trahiv("join", recipe, "--set", "clm.max_length=64", "--peer", ADDRESS)
    assert (code, out, (here / "runs").exists()) == (5, "", False)
    assert re.search("^error: .* trains another recipe: it differs in 2", err)
    assert re.findall(r"^  (\S+) +(.+?) {2,}(.+)$", err, re.MULTILINE) == [
        ("field", "here", "in the swarm"),
        ("clm.max_length", "64", "32"),
        ("training.learning_rate", "0.5", "0.001"),
    ]
    assert re.search("\nhint: join without RECIPE.*\n$", err)
