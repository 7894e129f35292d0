"""Recipes in the DHT: how they are packed, and which of the published ones is accepted.

That invalid records keep no joiner out is tested in `tests/simulation/test_records_of_a_liar.py`.
"""

import random

import pytest

from tests.kit.fakes import FakeNode
from trahiv_cli.errors import NothingPublished, RecipeError, RecipeMismatch
from trahiv_cli.recipe.agreement import fingerprint, resolve
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import MAX_PACKED_BYTES
from trahiv_cli.swarm import exchange
from trahiv_cli.swarm.exchange import PublishedRun, accept_offer, fetch_offer, publish_recipe
from trahiv_cli.swarm.node import MAX_RECORD_BYTES, RUNS_KEY, recipe_key
from trahiv_cli.swarm.status import Status, publish_status
from trahiv_cli.train.announcing import PUBLISH_EVERY_S


def recipe(*overrides, run="run-1"):
    return resolve(load_recipe("quickstart", [f"hivemind_config.opt.run_id={run}", *overrides]).recipe)


def publish(node, recipe, step=7):
    publish_recipe(node, recipe)
    publish_status(node, Status(run_id=recipe.run_id, step=step, max_steps=100))


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
    clock.now = 2 * PUBLISH_EVERY_S
    assert fetch_offer(node, []).run_id == "run-1"
    clock.now = exchange.RECORD_TTL_S
    for _ in ("no run", "a run without a recipe"):
        with pytest.raises(NothingPublished) as caught:
            fetch_offer(node, ["QmStarter"])
        publish_status(node, Status(run_id="run-1", step=7))
    assert caught.value.exit_code == 4


def test_ambiguous_run_must_be_named(node):
    publish(node.neighbour("QmB"), recipe(run="run-2"))
    for named in (None, "run-3"):
        with pytest.raises(RecipeMismatch, match="run-1, run-2") as refused:
            fetch_offer(node, [], named)
        assert "run_id=run-1" in refused.value.hint and refused.value.exit_code == 5
    offer = fetch_offer(node, [], "run-2")
    assert offer.run_id == accept_offer(offer).recipe.hivemind_config.opt.run_id == "run-2"


def test_recipe_of_named_peer_wins():
    node = FakeNode("QmA")
    for peer, steps, step in (("QmA", 1, 7), ("QmB", 2, 8), ("QmC", 2, 10**6)):
        publish(node.neighbour(peer), recipe(f"training.max_steps={steps}"), step)
    offer = fetch_offer(node, ["QmA"])
    assert accept_offer(offer).recipe.training.max_steps == 1 and offer.step == 8, "the middle one of all"
    for named in ([], ["QmBootstrap"], ["QmA", "QmB"]):
        with pytest.raises(RecipeMismatch, match="2 different recipes"):
            fetch_offer(node, named)


def test_recipe_matching_invitation_wins():
    node = FakeNode("QmA")
    for peer, steps in (("QmA", 1), ("QmB", 2), ("QmC", 2)):
        publish(node.neighbour(peer), recipe(f"training.max_steps={steps}"))
    marks = {steps: recipe(f"training.max_steps={steps}").fingerprint[:24] for steps in (1, 2)}
    for steps, mark in marks.items():
        for named in ([], ["QmA"], ["QmB", "QmA"], ["QmBootstrap"]):
            assert accept_offer(fetch_offer(node, named, "run-1", mark)).recipe.training.max_steps == steps
    with pytest.raises(RecipeMismatch, match="2 different recipes"):
        fetch_offer(node, [], "run-1", "0" * 24)


def test_long_recipe_arrives_whole_or_fails(node):
    publish(node, LONG)
    keys = [recipe_key("run-1", number) for number in range(3)]
    assert list(node.records)[-2:] == keys[:0:-1], "the last first: who finds the first finds the rest"
    assert [len(node.fetch(key)["QmStarter"]) for key in keys[:2]] == [MAX_RECORD_BYTES] * 2
    assert accept_offer(fetch_offer(node, [])).recipe.data.chat_template == LONG.recipe.data.chat_template
    held = [dict(node.records[key]) for key in keys]
    publish(node, long_recipe(seed=1))
    for another, key in zip(held, keys, strict=True):  # one is missing, or of another recipe
        for instead in ({}, another):
            whole, node.records[key] = node.records[key], instead
            with pytest.raises(NothingPublished):
                fetch_offer(node, [])
            node.records[key] = whole
    node.neighbour("QmStranger").publish(RUNS_KEY, {"run_id": "run-1", "step": -1}, exchange.RECORD_TTL_S)
    node.neighbour("QmStranger").publish(keys[1], b"x" * (MAX_RECORD_BYTES + 1), exchange.RECORD_TTL_S)
    publish(node, RECIPE)  # a shorter recipe leaves old records behind
    assert fetch_offer(node, []).fingerprint == FINGERPRINT


def test_recipe_reads_are_limited(monkeypatch):
    node, read = FakeNode("QmStarter"), []
    fetch = node.fetch
    monkeypatch.setattr(node, "fetch", lambda key: read.append(key) or fetch(key))
    for number in range(50):
        node.publish(recipe_key("run-1", number), b"x" * MAX_RECORD_BYTES, exchange.RECORD_TTL_S)
    publish_status(node, Status(run_id="run-1"))
    with pytest.raises(NothingPublished):
        fetch_offer(node, [])
    assert len(read) - 1 == -(-MAX_PACKED_BYTES // MAX_RECORD_BYTES)


def test_joiner_changes_only_own_fields(node):
    offer = fetch_offer(node, [])
    assert accept_offer(offer).agreement == RECIPE.agreement
    accepted = accept_offer(offer, ["training.per_device_train_batch_size=2"])
    assert accepted.recipe.training.per_device_train_batch_size == 2
    with pytest.raises(RecipeMismatch, match=f"fingerprint {FINGERPRINT[:12]}"):
        accept_offer(offer, ["training.max_steps=41"])
    shared = offer.wire["shared"]
    del shared["training"]["weight_decay"]  # so it has the default here, and another value at the starter's
    wire = {"v": 1, "shared": shared, "suggested": {}}
    with pytest.raises(RecipeMismatch, match="fingerprint"):
        accept_offer(PublishedRun("run-1", fingerprint(shared), wire, step=0))
    shared["model"] = {"model_name_or_path": "/etc"}  # a path on this machine
    with pytest.raises(RecipeError) as refused:
        accept_offer(PublishedRun("run-1", fingerprint(shared), wire, step=0))
    assert refused.value.exit_code == 2


def test_joiner_needs_same_local_data(tmp_path):
    """The error for a joiner without data is tested in `tests/unit/recipe/test_record.py`."""
    (tmp_path / "chat.jsonl").write_text("1234")
    (tmp_path / "copy.jsonl").write_text("1234")
    node, own = FakeNode(), f"data.datasets.0.path={tmp_path}"
    publish(node, recipe(f"{own}/chat.jsonl"))
    accepted = accept_offer(fetch_offer(node, []), [f"{own}/copy.jsonl"])
    assert accepted.recipe.data.datasets[0].path == f"{tmp_path}/copy.jsonl"
    (tmp_path / "copy.jsonl").write_text("123")
    said = "3 bytes, SHA-256 a665a4592042; the run has 1 file, 4 bytes, SHA-256 03ac674216f3"
    with pytest.raises(RecipeMismatch, match=said) as refused:
        accept_offer(fetch_offer(node, []), [f"{own}/copy.jsonl"])
    differ = {path.removeprefix("data.datasets.0.content.") for path, _, _ in refused.value.differences}
    assert differ == {"num_bytes", "sha256"}
    with pytest.raises(RecipeMismatch, match="'owner/data' is not .* it has no local files"):
        accept_offer(fetch_offer(node, []), ["data.datasets.0.path=owner/data"])
