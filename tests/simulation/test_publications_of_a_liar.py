"""Whatever one member publishes of itself, others read of the rest the same."""

from __future__ import annotations

import contextlib
import json
import zlib

import pytest

from tests.kit.fuzz import RECIPE
from tests.kit.lies import VALUES, lies
from tests.simulation.board import INVITED, OWNER, Board, InMemory, id_of
from trahiv_cli.recipe.agreement import agreement, fingerprint
from trahiv_cli.recipe.record import to_wire
from trahiv_cli.swarm.acquaintances import Acquaintances, Reunion, is_address_of
from trahiv_cli.swarm.alike import publish_likeness, require_alike
from trahiv_cli.swarm.exchange import fetch_offer, publish_recipe
from trahiv_cli.swarm.node import addresses_key, likeness_key, recipe_key, runs_key
from trahiv_cli.swarm.policy import PolicyBook, mark_of
from trahiv_cli.swarm.records import disbelieve
from trahiv_cli.swarm.roll import Credentials, MemberList, members_key, policy_key, read_members

HONEST, LIAR, NEWCOMER = "ABC", "D", "N"
LIKENESS = {"model": "ab" * 32, "number of samples": "10"}
RUN = "run-1"


@pytest.fixture
def nodes():
    board = Board()
    return {name: InMemory(board, name) for name in (*HONEST, LIAR, NEWCOMER)}


def told(nodes, key, caplog):
    """Have the liar publish every change of what it published under a key; the log is emptied before each."""
    own, other = nodes[LIAR].dht.told[key], nodes["A"].dht.told[key]
    for what, lie in lies(own, other):
        caplog.clear()
        disbelieve.cache_clear()
        nodes[LIAR].publish(key, lie, 60)
        yield what, lie
        assert not any(id_of(name) in caplog.text for name in HONEST), what


def test_likenesses(nodes, caplog):
    for name in (*HONEST, LIAR):
        publish_likeness(nodes[name], RUN, LIKENESS)
    for what, lie in told(nodes, likeness_key(RUN), caplog):
        for name in (*HONEST, NEWCOMER):
            others = [id_of(other) for other in (*HONEST, LIAR) if other != name]
            require_alike(nodes[name], RUN, LIKENESS, others)
        is_one = isinstance(lie, dict) and all(isinstance(value, str) for value in lie.values())
        assert is_one or id_of(LIAR) in caplog.text or len(str(lie)) > 3000, what


def test_recipes_and_runs(nodes, caplog):
    def require_the_honest_one_s(what):
        offer = fetch_offer(nodes[NEWCOMER], [id_of("A")], RUN)
        assert offer.fingerprint == fingerprint(agreement(RECIPE)) and offer.step == 5, what

    for name in (*HONEST, LIAR):
        publish_recipe(nodes[name], RECIPE, RUN, step=5)
    for key in (runs_key(), recipe_key(RUN)):
        for what, _ in told(nodes, key, caplog):
            require_the_honest_one_s(what)
    for value in (*VALUES, *({"v": value} for value in VALUES), to_wire(RECIPE) | {"shared": []}):
        with contextlib.suppress(TypeError):  # JSON has no bytes
            packed = zlib.compress(json.dumps(value).encode())
            caplog.clear()
            disbelieve.cache_clear()
            nodes[LIAR].publish(recipe_key(RUN), packed, 60)
            require_the_honest_one_s(value)
            assert id_of(LIAR) in caplog.text, value


def test_addresses(nodes, caplog, tmp_path, clock):
    key = addresses_key()
    for name in (*HONEST, LIAR):
        Reunion(nodes[name], key, Acquaintances(None), clock=clock).turn()
    for number, (what, _) in enumerate(told(nodes, key, caplog)):
        met = Acquaintances(tmp_path / f"{number}.json")
        Reunion(nodes[NEWCOMER], key, met, clock=clock).turn()
        for name in HONEST:
            assert met.addresses[id_of(name)] == tuple(nodes[name].own_addresses()), what
        assert all(is_address_of(id_of(LIAR), one) for one in met.addresses.get(id_of(LIAR), ())), what
        assert Acquaintances(tmp_path / f"{number}.json").addresses == met.addresses, "after a restart"


def test_certificates(nodes, caplog, clock):
    for name in (*HONEST, LIAR):
        MemberList(nodes[name], Credentials(INVITED), nodes[name].book, clock).turn()
    expected = {id_of(name): INVITED.grant for name in HONEST}
    for what, lie in told(nodes, members_key(), caplog):
        found = read_members(nodes[NEWCOMER], OWNER.public)
        is_member = found.pop(id_of(LIAR), None) == INVITED.grant
        assert found == expected and (is_member or id_of(LIAR) in caplog.text or len(str(lie)) > 3000), what


def test_policies(nodes, caplog, clock, tmp_path):
    book = PolicyBook(OWNER.public, tmp_path / "policy")
    wires = [
        book.decide(OWNER, lambda policy, n=n: type(policy)(out=policy.out | {mark_of(n)}))
        for n in (b"1", b"2")
    ]
    for name in HONEST:
        nodes[name].book.offer(wires[1])
        MemberList(nodes[name], Credentials(INVITED), nodes[name].book, clock).turn()
    flipped = [wires[1][:at] + bytes([wires[1][at] ^ 1]) + wires[1][at + 1 :] for at in range(len(wires[1]))]
    for lie in (*VALUES, wires[0], *flipped):
        nodes[LIAR].publish(policy_key(), lie, 60)
        newcomer = PolicyBook(OWNER.public)
        MemberList(nodes[NEWCOMER], Credentials(INVITED), newcomer, clock).turn()
        assert newcomer.policy == book.policy == nodes["A"].book.policy, lie
