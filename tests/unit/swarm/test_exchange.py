"""The recipe's way through the DHT: how it is packed, and which of the records found is believed."""

import json
import zlib

import pytest

from tests.fakes import FakeNode
from trahiv_cli.errors import NothingPublished, RecipeError, RecipeMismatch
from trahiv_cli.recipe.agreement import agreement, fingerprint, resolve, to_wire
from trahiv_cli.recipe.load import builtin_recipes, load_recipe
from trahiv_cli.swarm import exchange
from trahiv_cli.swarm.exchange import (
    MAX_RECIPE_BYTES,
    RECORD_TTL_S,
    REPUBLISH_EVERY_S,
    accept_offer,
    fetch_offer,
    pack,
    publish_recipe,
    unpack,
)
from trahiv_cli.swarm.node import MAX_RECORD_BYTES, recipe_key, runs_key


def recipe(*overrides, run="run-1"):
    return resolve(load_recipe("quickstart", [f"hivemind_config.opt.run_id={run}", *overrides]).recipe)


def fingerprint_of(a_recipe):
    return fingerprint(agreement(a_recipe))


def deflated(text):
    return zlib.compress(text if isinstance(text, bytes) else text.encode(), level=9)


NOISE = {
    "nothing": None,
    "text": "a recipe",
    "a number": 7,
    "a dict": {"shared": {}},
    "no bytes": b"",
    "not deflated": b"recipe",
    "truncated": pack(recipe())[:-20],
    "bit rot": pack(recipe())[:40] + b"\0\0\0\0" + pack(recipe())[44:],
    "not JSON": deflated("{"),
    "not UTF-8": deflated(b'{"shared": {"a": "\xff"}}'),
    "another JSON value": deflated("[]"),
    "without the shared part": deflated("{}"),
    "a shared part of another type": deflated('{"shared": []}'),
    "NaN": deflated('{"shared": {"a": NaN}}'),
    "infinity": deflated('{"shared": {"a": 1e999}}'),
    "half a character": deflated(r'{"shared": {"a": "\ud800"}}'),
    "nested too deep to walk": deflated('{"shared": ' + '{"a":' * 700 + "1" + "}" * 701),
    "nested too deep to read": deflated('{"shared": ' + "[" * 20_000 + "]" * 20_000 + "}"),
    "a number too long to read": deflated('{"shared": {"a": ' + "9" * 5_000 + "}}"),
    "too long deflated": b"x" * (MAX_RECORD_BYTES + 1),
    "a bomb": deflated(b" " * 3_000_000),
    "a bomb around a recipe": deflated(b'{"shared": {}}' + b" " * MAX_RECIPE_BYTES),
}


# -- one record -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", builtin_recipes())
def test_a_recipe_survives_the_trip(name):
    packed = pack(resolve(load_recipe(name).recipe))
    assert len(packed) <= MAX_RECORD_BYTES
    assert unpack(packed) == json.loads(json.dumps(to_wire(resolve(load_recipe(name).recipe))))


@pytest.mark.parametrize("noise", NOISE)
def test_noise_is_not_a_recipe(noise):
    with pytest.raises(RecipeError):
        unpack(NOISE[noise])


def test_a_bomb_is_never_inflated_beyond_the_bound(monkeypatch):
    class Watched:
        def __init__(self):
            self.inflater, self.eof = real(), False

        def decompress(self, record, most):
            text = self.inflater.decompress(record, most)
            lengths.append(len(text))
            self.eof = self.inflater.eof
            return text

    lengths, real = [], zlib.decompressobj
    monkeypatch.setattr(exchange.zlib, "decompressobj", Watched)
    with pytest.raises(RecipeError, match="too long"):
        unpack(NOISE["a bomb"])
    assert lengths == [MAX_RECIPE_BYTES]


def test_a_recipe_too_long_to_travel_is_refused_at_home():
    characters = "".join(chr(0x4E00 + i * 7919 % 20_000) for i in range(3_000))  # hard to deflate
    with pytest.raises(RecipeError, match="too long to travel") as refused:
        pack(recipe(f"training.optim_args={characters}"))
    assert str(MAX_RECORD_BYTES) in refused.value.message


# -- a swarm's records ----------------------------------------------------------------------------


def test_the_only_run_is_offered():
    node = FakeNode("QmStarter")
    publish_recipe(node, recipe(), "run-1", 7)
    offer = fetch_offer(node.neighbour("QmNew"), ["QmStarter"])
    assert (offer.run_id, offer.step) == ("run-1", 7)
    assert offer.fingerprint == fingerprint_of(recipe())
    assert accept_offer(offer).hivemind_config.opt.run_id == "run-1"


@pytest.mark.parametrize(
    "entry", ["0" * 64, None, ["0" * 64], ["0" * 64, "7"], ["0" * 64, -1], ["0" * 64, 2**40]]
)
def test_a_list_entry_without_a_sensible_step_counts_as_step_0(entry):
    node = FakeNode("QmStarter")
    publish_recipe(node, recipe(), "run-1", 7)
    node.publish(runs_key(), "run-1", entry, RECORD_TTL_S + 1)
    assert fetch_offer(node, []).step == 0


def test_nothing_published_is_said():
    with pytest.raises(NothingPublished) as caught:
        fetch_offer(FakeNode(), ["QmStarter"])
    assert caught.value.exit_code == 4


def test_a_run_without_a_recipe_counts_as_nothing():
    node = FakeNode()
    node.publish(runs_key(), "run-1", "0" * 64, RECORD_TTL_S)
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
def test_noise_does_not_keep_a_newcomer_out(noise):
    node = FakeNode("QmStranger")
    node.publish(recipe_key("run-1"), "QmStranger", NOISE[noise], RECORD_TTL_S)
    publish_recipe(node.neighbour("QmStarter"), recipe(), "run-1", 7)
    offer = fetch_offer(node, ["QmStarter"])
    assert offer.fingerprint == fingerprint_of(recipe())
    assert fetch_offer(node, []).fingerprint == offer.fingerprint


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
