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


def fingerprint_of(a_recipe):
    return fingerprint(agreement(a_recipe))


NOISE = {
    "nothing": None,
    "text": "a recipe",
    "a number": 7,
    "a dict": {"shared": {}},
    "bytes": b"recipe",
    "truncated": pack(recipe())[:-20],
    "a record too long": b"x" * (MAX_RECORD_BYTES + 1),
    "a bomb": zlib.compress(b" " * 3_000_000),
}
"""Some of what `tests/unit/recipe/test_record.py` has, and what is no bytes at all."""


# -- a swarm's records ----------------------------------------------------------------------------


def test_the_only_run_is_offered():
    node = FakeNode("QmStarter")
    publish_recipe(node, recipe(), "run-1", 7)
    offer = fetch_offer(node.neighbour("QmNew"), ["QmStarter"])
    assert (offer.run_id, offer.step) == ("run-1", 7)
    assert offer.fingerprint == fingerprint_of(recipe())
    assert accept_offer(offer).hivemind_config.opt.run_id == "run-1"


@pytest.mark.parametrize(
    "entry",
    ["run-1", None, ["run-1"], ["run-1", "9"], ["run-1", -1], ["run-1", 2**40], [b"run-1", 9], [9, 9]],
)
def test_an_entry_of_the_list_that_makes_no_sense_is_passed_over(entry):
    node = FakeNode("QmStarter")
    publish_recipe(node, recipe(), "run-1", 7)
    node.neighbour("QmA").publish(runs_key(), entry, RECORD_TTL_S)
    assert fetch_offer(node, []).step == 7


@pytest.mark.parametrize(("told", "step"), [([7], 7), ([7, 8, 9], 8), ([7, 8], 7), ([7, 8, 10**6], 8)])
def test_a_run_is_as_far_as_the_middle_one_of_its_peers_says(told, step):
    node = FakeNode()
    for peer, its_step in enumerate(told):
        publish_recipe(node.neighbour(f"Qm{peer}"), recipe(), "run-1", its_step)
    assert fetch_offer(node, []).step == step


def test_nothing_published_is_said():
    with pytest.raises(NothingPublished) as caught:
        fetch_offer(FakeNode(), ["QmStarter"])
    assert caught.value.exit_code == 4


def test_a_run_without_a_recipe_counts_as_nothing():
    node = FakeNode()
    node.publish(runs_key(), ["run-1", 0], RECORD_TTL_S)
    with pytest.raises(NothingPublished):
        fetch_offer(node, [])


def test_a_recipe_outlives_a_missed_publication_and_not_its_peers():
    clock = [0.0]
    node = FakeNode(now=lambda: clock[0])
    publish_recipe(node, recipe(), "run-1", 7)
    clock[0] = 2 * REPUBLISH_EVERY_S
    assert fetch_offer(node, []).run_id == "run-1"
    clock[0] = RECORD_TTL_S
    with pytest.raises(NothingPublished):
        fetch_offer(node, [])


@pytest.fixture
def two_runs():
    node = FakeNode("QmA")
    publish_recipe(node, recipe(run="run-1"), "run-1", 7)
    publish_recipe(node.neighbour("QmB"), recipe(run="run-2"), "run-2", 7)
    return node


def test_one_of_several_runs_must_be_named(two_runs):
    with pytest.raises(RecipeMismatch, match="run-1, run-2") as refused:
        fetch_offer(two_runs, [])
    assert "run_id=run-1" in refused.value.hint and refused.value.exit_code == 5


def test_the_run_that_is_named_is_offered(two_runs):
    assert fetch_offer(two_runs, [], "run-2").run_id == "run-2"
    assert accept_offer(fetch_offer(two_runs, [], "run-2")).hivemind_config.opt.run_id == "run-2"


def test_a_name_that_is_not_among_several_runs_is_no_answer(two_runs):
    with pytest.raises(RecipeMismatch, match="several"):
        fetch_offer(two_runs, [], "run-3")


@pytest.fixture
def disagreement():
    node = FakeNode("QmA")
    publish_recipe(node, recipe("training.max_steps=1"), "run-1", 7)
    publish_recipe(node.neighbour("QmB"), recipe("training.max_steps=2"), "run-1", 7)
    publish_recipe(node.neighbour("QmC"), recipe("training.max_steps=2"), "run-1", 7)
    return node


def test_the_peer_on_the_join_line_wins_over_any_number(disagreement):
    offer = fetch_offer(disagreement, ["QmA"])
    assert accept_offer(offer).training.max_steps == 1


@pytest.mark.parametrize("named", [[], ["QmBootstrap"], ["QmA", "QmB"]])
def test_peers_that_disagree_are_refused(disagreement, named):
    with pytest.raises(RecipeMismatch, match="2 different recipes"):
        fetch_offer(disagreement, named)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("number", [0, 1, 7])
def test_noise_does_not_keep_a_newcomer_out(noise, number):
    node = FakeNode("QmStranger")
    node.publish(recipe_key("run-1", number), NOISE[noise], RECORD_TTL_S)
    publish_recipe(node.neighbour("QmStarter"), recipe(), "run-1", 7)
    offer = fetch_offer(node, ["QmStarter"])
    assert offer.fingerprint == fingerprint_of(recipe())
    assert fetch_offer(node, []).fingerprint == offer.fingerprint


# -- a recipe that takes several records ----------------------------------------------------------


def long_recipe(seed=0):
    words = " ".join(f"{random.Random(seed + i).getrandbits(64):x}" for i in range(800))
    return recipe("clm=", "task=sft", f"data.chat_template='{{# {words} #}}{{{{ messages }}}}'")


def test_a_long_recipe_takes_several_records_and_arrives_whole():
    node = FakeNode("QmStarter")
    publish_recipe(node, long_recipe(), "run-1", 7)
    records = [node.fetch(recipe_key("run-1", number)) for number in range(4)]
    assert [list(found) for found in records] == [*[["QmStarter"]] * 3, []]
    assert len(records[0]["QmStarter"]) == len(records[1]["QmStarter"]) == MAX_RECORD_BYTES
    for named in ([], ["QmStarter"]):
        accepted = accept_offer(fetch_offer(node, named))
        assert accepted.data.chat_template == long_recipe().data.chat_template


@pytest.mark.parametrize("lost", range(3))
def test_a_recipe_with_a_lost_record_counts_as_nothing(lost):
    node = FakeNode("QmStarter")
    publish_recipe(node, long_recipe(), "run-1", 7)
    del node.records[recipe_key("run-1", lost)]
    with pytest.raises(NothingPublished):
        fetch_offer(node, [])


def test_records_of_two_recipes_are_never_taken_for_one():
    node = FakeNode("QmStarter")
    publish_recipe(node, long_recipe(seed=1), "run-1", 7)
    newer = dict(node.records[recipe_key("run-1", 1)])
    publish_recipe(node, long_recipe(), "run-1", 7)
    node.records[recipe_key("run-1", 1)] = newer
    with pytest.raises(NothingPublished):
        fetch_offer(node, [])


def test_what_a_longer_recipe_left_behind_does_not_count():
    node = FakeNode("QmStarter")
    publish_recipe(node, long_recipe(), "run-1", 7)
    publish_recipe(node, recipe(), "run-1", 7)
    assert fetch_offer(node, []).fingerprint == fingerprint_of(recipe())


def test_no_more_records_are_read_than_a_recipe_may_take():
    node = FakeNode("QmStarter")
    for number in range(50):
        node.publish(recipe_key("run-1", number), b"x" * MAX_RECORD_BYTES, RECORD_TTL_S)
    read, fetch = [], node.fetch
    node.fetch = lambda key: read.append(key) or fetch(key)
    node.publish(runs_key(), ["run-1", 0], RECORD_TTL_S)
    with pytest.raises(NothingPublished):
        fetch_offer(node, [])
    assert len(read) - 1 == -(-MAX_PACKED_BYTES // MAX_RECORD_BYTES)


def test_records_are_stored_from_the_last_to_the_first():
    class Ordered(FakeNode):
        def publish(self, key, value, ttl_s):
            order.append(key)
            return super().publish(key, value, ttl_s)

    order = []
    publish_recipe(Ordered("QmStarter"), long_recipe(), "run-1", 7)
    assert order == [*(recipe_key("run-1", number) for number in (2, 1, 0)), runs_key()]


# -- what an offer becomes ------------------------------------------------------------------------


def offer():
    node = FakeNode()
    publish_recipe(node, recipe(), "run-1", 7)
    return fetch_offer(node, [])


def test_an_offer_becomes_the_starters_recipe():
    accepted = accept_offer(offer())
    assert agreement(accepted) == agreement(recipe())


def test_a_newcomer_may_change_what_is_its_own():
    accepted = accept_offer(offer(), ["training.per_device_train_batch_size=2"])
    assert accepted.training.per_device_train_batch_size == 2


def test_a_newcomer_may_not_change_what_all_share():
    with pytest.raises(RecipeMismatch, match="fingerprint") as refused:
        accept_offer(offer(), ["training.max_steps=41"])
    assert offer().fingerprint[:12] in refused.value.message


def test_an_offer_that_resolves_to_another_fingerprint_is_refused():
    shared = offer().wire["shared"]
    del shared["training"]["weight_decay"]  # has another value here than at the starter's: the default
    wire = {"v": 1, "shared": shared, "suggested": {}}
    promised = exchange.Offer("run-1", fingerprint(shared), wire, step=0)
    with pytest.raises(RecipeMismatch, match="fingerprint"):
        accept_offer(promised)


def test_an_offer_that_reaches_for_this_machine_is_refused():
    wire = offer().wire
    wire["shared"]["model"] = {"model_name_or_path": "/etc"}
    with pytest.raises(RecipeError) as refused:
        accept_offer(exchange.Offer("run-1", fingerprint(wire["shared"]), wire, step=0))
    assert refused.value.exit_code == 2


# -- local data -----------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path):
    """Offer a run that trains on the starter's own file; a function that accepts it with another's."""
    (tmp_path / "chat.jsonl").write_text("1234")
    node = FakeNode()
    publish_recipe(node, recipe(f"data.datasets.0.path={tmp_path}/chat.jsonl"), "run-1", 7)

    def accept(name=None, text=None):
        if text is not None:
            (tmp_path / name).write_text(text)
        brought = [] if name is None else [f"data.datasets.0.path={tmp_path / name}"]
        return accept_offer(fetch_offer(node, []), brought)

    return accept


def test_a_newcomer_is_told_which_data_to_bring(local):
    with pytest.raises(RecipeError) as refused:
        local()
    assert refused.value.hint == (
        "the starter trains on its own `chat.jsonl` (1 file, 4 bytes, SHA-256 03ac674216f3): "
        "bring a copy, and name the folder that it is in: `--files DIR`"
    )


def test_a_newcomer_with_a_copy_under_another_name_is_let_in(local, tmp_path):
    accepted = local("copy.jsonl", "1234")
    assert accepted.data.datasets[0].path == f"{tmp_path}/copy.jsonl"


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


def test_a_newcomer_that_names_a_file_which_is_not_there_is_told(local):
    with pytest.raises(AssetError, match="There is no file or folder"):
        local("nowhere.jsonl")
