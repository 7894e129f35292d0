"""What `join` says of a swarm's recipe, and of what it needs, before this peer is one of it.

The swarm is the records that it would publish: visits find those.
"""

import contextlib
import hashlib
import json
import re

import pytest

from tests.kit.fakes import FakeNode
from tests.kit.recipes import TEXT, write_tiny
from tests.kit.stand_ins import write_llama
from trahiv_cli.cli import swarm as swarm_module
from trahiv_cli.recipe.agreement import resolve, run_id
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.swarm.exchange import publish_recipe
from trahiv_cli.train import joining

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"
OTHER_TEXT = TEXT.replace("fox", "cat")


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def starter(tmp_path, monkeypatch):
    """`starter(peft={"r": 4})` has a swarm train the tiny recipe with changes, on a text of its own."""
    node = FakeNode("QmStarter")

    @contextlib.contextmanager
    def visiting(*_):
        yield node.neighbour("QmNew")

    monkeypatch.setattr(joining, "visiting", visiting)

    def starter(**changes):
        resolved = resolve(load_recipe(write_tiny(tmp_path / "starter", **changes)).recipe)
        publish_recipe(node, resolved, run_id(resolved), 3)

    return starter


@pytest.fixture
def bob(tmp_path, monkeypatch):
    """The folder of who joins, in which nothing may be started."""

    def live(*_):
        raise AssertionError("a peer would have been started")

    monkeypatch.setattr(swarm_module, "live", live)
    folder = tmp_path / "bob"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def join(trahiv, bob):
    """`join("tiny.yaml", ...)`: its exit code, and its errors; nothing is left in the folder."""

    def join(*args):
        before = set(bob.iterdir())
        code, out, err = trahiv("join", *args, "--peer", ADDRESS, "--format", "json", "--yes")
        events = [json.loads(line) for line in out.splitlines()]
        assert (err, {event["event"] for event in events}) == ("", {"error"})
        assert set(bob.iterdir()) == before
        return code, events

    return join


def test_an_address_without_a_peer_id_is_refused(trahiv, bob):
    code, out, err = trahiv("join", "--peer", "/ip4/127.0.0.1/tcp/9")
    assert (code, out) == (4, "")
    assert err.count("error: ") == 1
    assert "says where to knock but not whose door it is" in err
    assert re.search("^hint: .*whole address", err, re.MULTILINE)


def test_a_swarm_that_trains_nothing_has_no_recipe_to_give(join, starter):
    code, (error,) = join()
    assert (code, error["code"]) == (4, "nothing-published")
    assert "nobody publishes a recipe" in error["message"]
    assert "trahiv join RECIPE" in error["hint"]


def test_a_recipe_that_differs_is_refused_field_by_field(trahiv, join, bob, starter):
    starter()
    recipe = write_tiny(bob, training__learning_rate=0.5)
    code, (error,) = join(recipe)
    assert (code, error["code"]) == (5, "mismatch")
    assert error["differences"] == [["training.learning_rate", 0.5, 0.001]]
    code, out, err = trahiv("join", recipe, "--set", "clm.max_length=64", "--peer", ADDRESS)
    assert (code, out) == (5, "")
    assert err.count("error: ") == err.count("hint: ") == 1
    assert "trains another recipe: it differs in 2" in err
    assert "hint: join without RECIPE" in err
    assert re.findall(r"^  (\S+) +(.+?) {2,}(.+)$", err, re.MULTILINE) == [
        ("field", "here", "in the swarm"),
        ("clm.max_length", "64", "32"),
        ("training.learning_rate", "0.5", "0.001"),
    ]


def test_who_brings_nothing_is_told_what_to_bring(join, bob, starter, tmp_path):
    starter(model={"model_name_or_path": str(write_llama(tmp_path / "starter" / "model"))}, peft={"r": 4})
    code, events = join()
    errors = {error["path"]: error for error in events}
    assert code == 2
    assert {error["message"] for error in events} == {"is on the starter's machine only"}
    assert errors.keys() == {"model.model_name_or_path", "data.datasets.0.path"}
    assert "its own folder `model`: bring a copy" in errors["model.model_name_or_path"]["hint"]
    text = f"`text.txt` (1 file, {len(TEXT)} bytes, SHA-256 {sha256(TEXT)[:12]})"
    assert f"its own {text}: bring a copy, and name the folder" in errors["data.datasets.0.path"]["hint"]
    starter()
    (bob / "downloads" / "new").mkdir(parents=True)
    (bob / "downloads" / "decoy.txt").write_text(TEXT.swapcase())
    code, (error,) = join("--files", "downloads")
    assert code == 2
    assert error["hint"] == f"the starter trains on its own {text}: downloads has no copy in it or below"


def test_another_file_of_the_same_name_is_refused(join, bob, starter):
    starter()
    (bob / "text.txt").write_text(OTHER_TEXT)
    code, (error,) = join("--set", "data.datasets.0.path=text.txt")
    ours, theirs = sha256(OTHER_TEXT), sha256(TEXT)
    said = f"/text.txt' is not .* SHA-256 {ours[:12]}; the run has .* SHA-256 {theirs[:12]}"
    assert code == 5 and re.search(said, error["message"])
    assert "copy of the starter's; `--files DIR`" in error["hint"]
    assert error["differences"] == [["data.datasets.0.content.sha256", ours, theirs]]
