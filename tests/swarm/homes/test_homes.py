"""Peers behind home routers connect with each other: dialled, punched or relayed."""

import multiprocessing as mp
from itertools import combinations

import pytest

from tests.kit import homes
from tests.kit.commands import wait_until
from tests.kit.homes import Home, addresses_of, answering, network, reached, ways_of
from tests.kit.upnp import be_gateway
from tests.kit.wan import IS_POSSIBLE, NEEDS, PROCESSES, home_address_of, public_address_of

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not IS_POSSIBLE, reason=NEEDS),
]

EIGHT = ("public", "all", "address", "port", "two", "no UDP", "symmetric", "symmetric")
PUNCHED = {"port", "two", "no UDP"}  # any two of these
MEET_S, REDIALLED_S = 60.0, 15.0


@pytest.fixture(scope="module", autouse=True)
def forkserver():
    """Import once what each node needs."""
    PROCESSES.set_forkserver_preload(["torch", "hivemind", homes.__name__])


def ways_between(*nodes):
    """How each two nodes are connected, as both see it; empty if either sees no connection."""
    seen = {node.peer_id: node.ask(ways_of) for node in nodes}
    ways = []
    for one, other in combinations(seen, 2):
        both = {seen[one].get(other), seen[other].get(one)}
        ways.append(set() if None in both else both)
    return ways


def are_connected(*nodes):
    return all(ways_between(*nodes))


@pytest.mark.parametrize("delay_ms, loss", [(0.0, 0.0), (100.0, 0.01)], ids=["near", "far"])
def test_all_pairs_of_homes_connect(tmp_path, delay_ms, loss):
    with network(*EIGHT, delay_ms=delay_ms, loss=loss) as wan:
        first = Home(wan, 0, tmp_path)
        entrance = first.ask(addresses_of)
        nodes = [first, *(Home(wan, host, tmp_path, entrance) for host in range(1, 8))]
        wait_until(lambda: are_connected(*nodes), MEET_S)
        ways = list(zip(map(set, combinations(EIGHT, 2)), ways_between(*nodes), strict=True))
    print(ways)
    if loss:
        return
    # A symmetric router has another port for each destination.
    blind = PUNCHED | {"symmetric"}
    unlike = [
        (kinds, how)
        for kinds, how in ways
        if ("public" in kinds and how != {"dialled"})
        or ("all" in kinds and "relayed" in how)
        or (kinds <= PUNCHED and how != {"punched"})
        or ("symmetric" in kinds and kinds <= blind and how != {"relayed"})
    ]
    assert not unlike


def test_homes_meet_through_forwarded_port(tmp_path):
    with network("port", "symmetric", delay_ms=10.0) as wan:
        pipe, its = mp.Pipe()
        wan.spawn(0, be_gateway, (home_address_of(0), public_address_of(0), its))
        assert pipe.recv() == "listens"
        first = Home(wan, 0, tmp_path)
        action, port = pipe.recv()
        assert action == "AddPortMapping"
        wan.forward(0, port)
        pipe.send("done")
        forwarded = f"/ip4/{public_address_of(0)}/tcp/{port}/p2p/{first.peer_id}"
        wait_until(lambda: forwarded in first.ask(addresses_of))
        assert first.ask(reached) == "alone", "nobody has tried it"
        second = Home(wan, 1, tmp_path, [forwarded])
        wait_until(lambda: are_connected(first, second) and first.ask(reached) == "direct")
        assert second.ask(ways_of) == {first.peer_id: "dialled"}
        first.leave()
        assert pipe.recv() == ("DeletePortMapping", port)
        pipe.send("done")


def test_killed_relay_is_replaced(tmp_path):
    with network("symmetric", "symmetric", "public", "public", delay_ms=10.0) as wan:
        relay = Home(wan, 2, tmp_path)
        pair = [Home(wan, host, tmp_path, relay.ask(addresses_of)) for host in (0, 1)]
        wait_until(lambda: are_connected(*pair), MEET_S)
        other = Home(wan, 3, tmp_path, relay.ask(addresses_of))
        wait_until(lambda: are_connected(*pair, relay, other), MEET_S)
        relay.process.kill()

        def is_replaced():
            gone = all(relay.peer_id not in node.ask(ways_of) for node in pair)
            return gone and are_connected(*pair, other)

        wait_until(is_replaced, 30.0)


def test_dead_connection_is_redialled_within_seconds(tmp_path):
    with network("public", "public", delay_ms=10.0) as wan:
        first = Home(wan, 0, tmp_path)
        second = Home(wan, 1, tmp_path, first.ask(addresses_of))
        wait_until(lambda: are_connected(first, second), MEET_S)
        wait_until(lambda: first.ask(answering) == [second.peer_id], MEET_S)
        wan.forget_connections()
        # libp2p by itself takes 40 s.
        wait_until(lambda: first.ask(answering) == [second.peer_id], REDIALLED_S)
        wait_until(lambda: second.ask(answering) == [first.peer_id], REDIALLED_S)
