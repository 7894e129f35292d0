"""The recipe's way through the DHT: how it is packed, and which of the records found is believed."""

import random
import zlib

import pytest

from tests.kit.fakes import FakeNode
from trahiv_cli.errors import AssetError, NothingPublished, RecipeError, RecipeMismatch
from trahiv_cli.recipe.agreement import agreement, fingerprint, resolve
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import MAX_PACKED_BYTES, pack
from trahiv_cli.swarm import exchange
from trahiv_cli.swarm.exchange import (
    RECORD_TTL_S,
    REPUBLISH_EVERY_S,
    accept_offer,
    fetch_offer,
    publish_recipe,
)
from trahiv_cli.swarm.node import MAX_RECORD_BYTES, recipe_key, runs_key


def recipe(*overrides, run="run-1"):
    return resolve(load_recipe("quickstart", [f"hivemind_config.opt.run_id={run}", *overrides]).recipe)


RECIPE = recipe()
FINGERPRINT = fingerprint(agreement(RECIPE))
NOISE = {
    "nothing": None,
    "text": "a recipe",
    "a number": 7,
    "a dict": {"shared": {}},
    "bytes": b"recipe",
    "truncated": pack(RECIPE)[:-20],
    "a record too long": b"x" * (MAX_RECORD_BYTES + 1),
    "a bomb": zlib.compress(b" " * 3_000_000),
}
"""Some of what `tests/unit/recipe/test_record.py` has, and what is no bytes at all."""


@pytest.fixture
def node():
    """The node of a peer that has published a recipe."""
    made = FakeNode("QmStarter")
    publish_recipe(made, RECIPE, "run-1", 7)
    return made


# -- a swarm's records ----------------------------------------------------------------------------


ENTRIES = ["run-1", None, ["run-1"], ["run-1", "9"], ["run-1", -1], ["run-1", 2**40], [b"run-1", 9], [9, 9]]


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_of_the_list_that_makes_no_sense_is_passed_over(node, entry):
    node.neighbour("QmA").publish(runs_key(), entry, RECORD_TTL_S)
    offer = fetch_offer(node.neighbour("QmNew"), ["QmStarter"])
    assert (offer.run_id, offer.step, offer.fingerprint) == ("run-1", 7, FINGERPRINT)


@pytest.mark.parametrize(("told", "step"), [([7], 7), ([7, 8, 9], 8), ([7, 8], 7), ([7, 8, 10**6], 8)])
def test_a_run_is_as_far_as_the_middle_one_of_its_peers_says(told, step):
    node = FakeNode()
    for peer, its_step in enumerate(told):
        publish_recipe(node.neighbour(f"Qm{peer}"), RECIPE, "run-1", its_step)
    assert fetch_offer(node, []).step == step


def test_where_no_run_or_no_recipe_is_published_that_is_said():
    node = FakeNode()
    with pytest.raises(NothingPublished) as caught:
        fetch_offer(node, ["QmStarter"])
    assert caught.value.exit_code == 4
    node.publish(runs_key(), ["run-1", 0], RECORD_TTL_S)
    with pytest.raises(NothingPublished):
        fetch_offer(node, [])


def test_a_recipe_outlives_a_missed_publication_and_not_its_peers(clock):
    node = FakeNode(now=clock)
    publish_recipe(node, RECIPE, "run-1", 7)
    clock.now = 2 * REPUBLISH_EVERY_S
    assert fetch_offer(node, []).run_id == "run-1"
    clock.now = RECORD_TTL_S
    with pytest.raises(NothingPublished):
        fetch_offer(node, [])


def test_one_of_several_runs_must_be_named(node):
    publish_recipe(node.neighbour("QmB"), recipe(run="run-2"), "run-2", 7)
    for named in (None, "run-3"):
        with pytest.raises(RecipeMismatch, match="run-1, run-2") as refused:
            fetch_offer(node, [], named)
        assert "run_id=run-1" in refused.value.hint and refused.value.exit_code == 5
    offer = fetch_offer(node, [], "run-2")
    assert offer.run_id == accept_offer(offer).hivemind_config.opt.run_id == "run-2"


def test_the_peer_on_the_join_line_wins_over_any_number_and_others_that_disagree_are_refused():
    node = FakeNode("QmA")
    for peer, steps in (("QmA", 1), ("QmB", 2), ("QmC", 2)):
        publish_recipe(node.neighbour(peer), recipe(f"training.max_steps={steps}"), "run-1", 7)
    assert accept_offer(fetch_offer(node, ["QmA"])).training.max_steps == 1
    for named in ([], ["QmBootstrap"], ["QmA", "QmB"]):
        with pytest.raises(RecipeMismatch, match="2 different recipes"):
            fetch_offer(node, named)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("number", [0, 1, 7])
def test_noise_does_not_keep_a_newcomer_out(node, noise, number):
    node.neighbour("QmStranger").publish(recipe_key("run-1", number), NOISE[noise], RECORD_TTL_S)
    for named in (["QmStarter"], []):
        assert fetch_offer(node, named).fingerprint == FINGERPRINT


# -- a recipe that takes several records ----------------------------------------------------------


def long_recipe(seed=0):
    words = " ".join(f"{random.Random(seed + i).getrandbits(64):x}" for i in range(800))
    return recipe("clm=", "task=sft", f"data.chat_template='{{# {words} #}}{{{{ messages }}}}'")


LONG = long_recipe()


@pytest.fixture
def long_node():
    """The same, with a recipe that takes three records; `order` has the keys as they were stored."""

    class Ordered(FakeNode):
        def publish(self, key, value, ttl_s):
            self.order = [*getattr(self, "order", ()), key]
            return super().publish(key, value, ttl_s)

    made = Ordered("QmStarter")
    publish_recipe(made, LONG, "run-1", 7)
    return made


def test_a_long_recipe_takes_several_records_the_last_first_and_arrives_whole(long_node):
    assert long_node.order == [*(recipe_key("run-1", number) for number in (2, 1, 0)), runs_key()]
    parts = [long_node.fetch(recipe_key("run-1", number))["QmStarter"] for number in range(2)]
    assert [len(part) for part in parts] == [MAX_RECORD_BYTES] * 2
    for named in ([], ["QmStarter"]):
        accepted = accept_offer(fetch_offer(long_node, named))
        assert accepted.data.chat_template == LONG.data.chat_template


@pytest.mark.parametrize("lost", range(3))
def test_a_recipe_with_a_lost_record_counts_as_nothing(long_node, lost):
    del long_node.records[recipe_key("run-1", lost)]
    with pytest.raises(NothingPublished):
        fetch_offer(long_node, [])


def test_records_of_two_recipes_are_never_taken_for_one(long_node):
    before = dict(long_node.records[recipe_key("run-1", 1)])
    publish_recipe(long_node, long_recipe(seed=1), "run-1", 7)
    long_node.records[recipe_key("run-1", 1)] = before
    with pytest.raises(NothingPublished):
        fetch_offer(long_node, [])
    publish_recipe(long_node, RECIPE, "run-1", 7)  # a shorter one leaves records behind
    assert fetch_offer(long_node, []).fingerprint == FINGERPRINT


def test_no_more_records_are_read_than_a_recipe_may_take():
    node, read = FakeNode("QmStarter"), []
    for number in range(50):
        node.publish(recipe_key("run-1", number), b"x" * MAX_RECORD_BYTES, RECORD_TTL_S)
    node.publish(runs_key(), ["run-1", 0], RECORD_TTL_S)
    fetch = node.fetch
    node.fetch = lambda key: read.append(key) or fetch(key)
    with pytest.raises(NothingPublished):
        fetch_offer(node, [])
    assert len(read) - 1 == -(-MAX_PACKED_BYTES // MAX_RECORD_BYTES)


# -- what an offer becomes ------------------------------------------------------------------------


def test_an_offer_becomes_the_starters_recipe_in_which_a_newcomer_changes_what_is_its_own(node):
    offer = fetch_offer(node, [])
    assert agreement(accept_offer(offer)) == agreement(RECIPE)
    accepted = accept_offer(offer, ["training.per_device_train_batch_size=2"])
    assert accepted.training.per_device_train_batch_size == 2
    with pytest.raises(RecipeMismatch, match=f"fingerprint {FINGERPRINT[:12]}"):
        accept_offer(offer, ["training.max_steps=41"])


def test_an_offer_that_resolves_to_another_fingerprint_is_refused(node):
    shared = fetch_offer(node, []).wire["shared"]
    del shared["training"]["weight_decay"]  # has another value here than at the starter's: the default
    wire = {"v": 1, "shared": shared, "suggested": {}}
    with pytest.raises(RecipeMismatch, match="fingerprint"):
        accept_offer(exchange.PublishedRun("run-1", fingerprint(shared), wire, step=0))


def test_an_offer_that_reaches_for_this_machine_is_refused(node):
    wire = fetch_offer(node, []).wire
    wire["shared"]["model"] = {"model_name_or_path": "/etc"}
    with pytest.raises(RecipeError) as refused:
        accept_offer(exchange.PublishedRun("run-1", fingerprint(wire["shared"]), wire, step=0))
    assert refused.value.exit_code == 2


# -- local data -----------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path):
    """PublishedRun a run that trains on the starter's own file; a function that accepts it with another's."""
    (tmp_path / "chat.jsonl").write_text("1234")
    node = FakeNode()
    publish_recipe(node, recipe(f"data.datasets.0.path={tmp_path}/chat.jsonl"), "run-1", 7)

    def accept(name=None, text=None):
        if text is not None:
            (tmp_path / name).write_text(text)
        brought = [] if name is None else [f"data.datasets.0.path={tmp_path / name}"]
        return accept_offer(fetch_offer(node, []), brought)

    return accept


def test_a_newcomer_is_told_which_data_to_bring_and_let_in_with_a_copy_under_another_name(local, tmp_path):
    with pytest.raises(RecipeError) as refused:
        local()
    assert refused.value.hint == (
        "the starter trains on its own `chat.jsonl` (1 file, 4 bytes, SHA-256 03ac674216f3): "
        "bring a copy, and name the folder that it is in: `--files DIR`"
    )
    with pytest.raises(AssetError, match="There is no file or folder"):
        local("nowhere.jsonl")
    assert local("copy.jsonl", "1234").data.datasets[0].path == f"{tmp_path}/copy.jsonl"


@pytest.mark.parametrize("name", ["other.jsonl", "chat.jsonl"])
def test_a_newcomer_with_other_data_is_refused_with_both_hashes(local, name):
    with pytest.raises(RecipeMismatch) as refused:
        local(name, "123")
    assert refused.value.exit_code == 5
    assert ("data.datasets.0.content.num_bytes", 3, 4) in refused.value.differences
    assert "data.datasets.0.content.sha256" in [field for field, _, _ in refused.value.differences]


def test_a_newcomer_whose_copy_would_be_read_in_another_way_is_refused(local):
    with pytest.raises(RecipeMismatch) as refused:
        local("chat.jsonl.txt", "1234")
    assert refused.value.differences == (("data.datasets.0.content.readers", ["text"], ["json"]),)
