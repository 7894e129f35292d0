"""Recipes in the DHT: how they are packed, and which of the published ones is accepted.

That invalid records keep no joiner out is tested in `tests/simulation/test_records_of_a_liar.py`.
"""

import math
import random
from unittest.mock import Mock

import pytest

from tests.kit.fakes import FakeNode
from tests.unit.conftest import refused
from trahiv_cli.errors import NothingPublished, RecipeMismatch
from trahiv_cli.net.keys import MAX_RECORD_BYTES, recipe_key
from trahiv_cli.recipe.agreement import fingerprint, resolve
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import MAX_PACKED_BYTES, pack
from trahiv_cli.swarm.published_run import PublishedRun, accept_offer, fetch_offer, publish_run
from trahiv_cli.swarm.status import Status, publish_status


def recipe(*overrides, run="run-1"):
    return resolve(load_recipe("quickstart", [f"hivemind_config.opt.run_id={run}", *overrides]).recipe)


def publish(node, recipe, step=7):
    publish_run(node, recipe.run_id, pack(recipe))
    publish_status(node, Status(run_id=recipe.run_id, step=step, max_steps=100))


OF_STEPS = {steps: recipe(f"training.max_steps={steps}") for steps in (1, 2)}


def long_recipe(seed=0):
    """A recipe that takes three records."""
    words = " ".join(f"{random.Random(seed + i).getrandbits(64):x}" for i in range(800))
    return recipe("clm=", "task=sft", f"data.chat_template='{{# {words} #}}{{{{ messages }}}}'")


RECIPE, LONG = recipe(), long_recipe()
FINGERPRINT = RECIPE.fingerprint


@pytest.fixture
def node(clock):
    """The node of a peer that has published a recipe."""
    made = FakeNode("QmStarter", now=clock)
    publish(made, RECIPE)
    return made


def test_recipe_outlives_missed_publication(node, clock):
    clock.now = 30.0
    assert fetch_offer(node, []).run_id == "run-1"


@pytest.mark.parametrize("has_run", [False, True])
def test_absent_recipe_is_reported(has_run):
    node = FakeNode()
    if has_run:
        publish_status(node, Status(run_id="run-1"))
    with pytest.raises(NothingPublished) as caught:
        fetch_offer(node, ["QmStarter"])
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("named", [None, "run-3"])
def test_ambiguous_run_must_be_named(node, named):
    publish(node.neighbour("QmB"), recipe(run="run-2"))
    with refused("run-1, run-2", "run_id=run-1", RecipeMismatch):
        fetch_offer(node, [], named)
    offer = fetch_offer(node, [], "run-2")
    assert offer.run_id == accept_offer(offer).recipe.hivemind_config.opt.run_id == "run-2"


@pytest.fixture
def ambiguous():
    """A node of a swarm in which one peer publishes another recipe than the others."""
    node = FakeNode("QmA")
    for peer, steps, step in (("QmA", 1, 7), ("QmB", 2, 8), ("QmC", 2, 10**6)):
        publish(node.neighbour(peer), OF_STEPS[steps], step)
    return node


def test_recipe_of_named_peer_wins(ambiguous):
    offer = fetch_offer(ambiguous, ["QmA"])
    assert accept_offer(offer).recipe.training.max_steps == 1
    assert offer.step == 8  # the middle one of all


@pytest.mark.parametrize("named", [[], ["QmBootstrap"], ["QmA", "QmB"]])
def test_different_recipes_are_refused(ambiguous, named):
    with pytest.raises(RecipeMismatch, match="2 different recipes"):
        fetch_offer(ambiguous, named, mark="0" * 24)


@pytest.mark.parametrize("named", [[], ["QmA"], ["QmB", "QmA"], ["QmBootstrap"]])
@pytest.mark.parametrize("steps", OF_STEPS)
def test_recipe_matching_invitation_wins(ambiguous, named, steps):
    mark = OF_STEPS[steps].fingerprint[:24]
    assert accept_offer(fetch_offer(ambiguous, named, "run-1", mark)).recipe.training.max_steps == steps


KEYS = [recipe_key("run-1", number) for number in range(3)]


def test_long_recipe_takes_several_records(node):
    publish(node, LONG)
    assert list(node.records)[-2:] == KEYS[:0:-1]  # a reader that finds the first finds the rest
    assert [len(node.fetch(key)["QmStarter"]) for key in KEYS[:2]] == [MAX_RECORD_BYTES] * 2
    assert accept_offer(fetch_offer(node, [])).recipe.data.chat_template == LONG.recipe.data.chat_template


@pytest.mark.parametrize("key", KEYS)
def test_mixed_or_incomplete_recipe_is_not_taken(node, key):
    publish(node, LONG)
    another = dict(node.records[key])
    publish(node, long_recipe(seed=1))
    for instead in ({}, another):
        node.records[key] = instead
        with pytest.raises(NothingPublished):
            fetch_offer(node, [])


def test_shorter_recipe_replaces_long_one(node):
    publish(node, LONG)
    publish(node, RECIPE)
    assert fetch_offer(node, []).fingerprint == FINGERPRINT


def test_recipe_reads_are_limited(monkeypatch):
    node = FakeNode()
    for number in range(50):
        node.publish(recipe_key("run-1", number), b"x" * MAX_RECORD_BYTES, 60)
    publish_status(node, Status(run_id="run-1"))
    read = Mock(wraps=node.fetch)
    monkeypatch.setattr(node, "fetch", read)
    with pytest.raises(NothingPublished):
        fetch_offer(node, [])
    assert read.call_count == 1 + math.ceil(MAX_PACKED_BYTES / MAX_RECORD_BYTES)


def test_joiner_changes_only_own_fields(node):
    offer = fetch_offer(node, [])
    accepted = accept_offer(offer, ["training.per_device_train_batch_size=2"])
    assert accepted.agreement == RECIPE.agreement
    assert accepted.recipe.training.per_device_train_batch_size == 2
    with pytest.raises(RecipeMismatch, match=f"fingerprint {FINGERPRINT[:12]}"):
        accept_offer(offer, ["training.max_steps=41"])


def test_recipe_with_other_defaults_is_refused(node):
    wire = fetch_offer(node, []).wire
    del wire["shared"]["training"]["weight_decay"]  # so the joiner's version adds its own default
    with pytest.raises(RecipeMismatch, match="fingerprint"):
        accept_offer(PublishedRun("run-1", fingerprint(wire["shared"]), wire, step=0))


@pytest.fixture
def offer(tmp_path):
    """The offer of a run that trains on a local file."""
    (tmp_path / "chat.jsonl").write_text("1234")
    node = FakeNode()
    publish(node, recipe(f"data.datasets.0.path={tmp_path}/chat.jsonl"))
    return fetch_offer(node, [])


def test_joiner_may_have_copy_of_data(offer, tmp_path):
    (tmp_path / "copy.jsonl").write_text("1234")
    accepted = accept_offer(offer, [f"data.datasets.0.path={tmp_path}/copy.jsonl"])
    assert accepted.recipe.data.datasets[0].path == f"{tmp_path}/copy.jsonl"


def test_joiner_with_other_data_is_refused(offer, tmp_path):
    """The error for a joiner without data is tested in `tests/unit/recipe/test_record.py`."""
    (tmp_path / "copy.jsonl").write_text("123")
    said = "3 bytes, SHA-256 a665a4592042; the run has 1 file, 4 bytes, SHA-256 03ac674216f3"
    with pytest.raises(RecipeMismatch, match=said) as caught:
        accept_offer(offer, [f"data.datasets.0.path={tmp_path}/copy.jsonl"])
    differ = {path.removeprefix("data.datasets.0.content.") for path, _, _ in caught.value.differences}
    assert differ == {"num_bytes", "sha256"}


def test_joiner_with_data_of_hub_is_refused(offer):
    with pytest.raises(RecipeMismatch, match="'owner/data' is not .* it has no local files"):
        accept_offer(offer, ["data.datasets.0.path=owner/data"])
