"""When a node publishes its addresses, reads others', and calls on those who are missing; time is counted."""

from __future__ import annotations

import pytest

from tests.kit.fakes import FakeNode
from trahiv_cli.swarm.acquaintances import MAX_PEERS, Acquaintances
from trahiv_cli.swarm.reunion import (
    CALLS_AT_ONCE,
    LONGEST_PAUSE_ALONE_S,
    LONGEST_PAUSE_S,
    PUBLISH_EVERY_S,
    READ_AT_MOST_EVERY_S,
    READ_EVERY_S,
    Reunion,
    known_peers,
)
from trahiv_cli.swarm.turns import TURN_S

KEY = "addresses"
HOUR = 3600.0


def peer_id(number):
    return f"Qm{number:044d}".replace("0", "a")


def address(number, port=1):
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{peer_id(number)}"


class Network(FakeNode):
    """A node whose routing table is said by the test, and which remembers on whom it called and when."""

    def __init__(self, clock):
        super().__init__(peer_id(0), now=clock)
        self.clock, self.there, self.calls, self.addresses = clock, set(), [], [address(0)]

    def own_addresses(self):
        return self.addresses

    def run(self, coroutine):
        if coroutine is known_peers:
            return [peer_id(number) for number in self.there]
        [peers] = coroutine.args
        self.calls.append((self.clock.now, peers))
        return None

    def called_on(self, number):
        return [at for at, peers in self.calls if peer_id(number) in peers]


@pytest.fixture
def network(clock):
    return Network(clock)


@pytest.fixture
def met(clock):
    return Acquaintances(None, clock=clock)


@pytest.fixture
def turns(network, met, clock):
    """`turns(seconds)` takes a turn now, and then one every `TURN_S` for so long."""
    reunion = Reunion(network, KEY, met, clock=clock)

    def take(seconds=0.0):
        end = clock.now + seconds
        while True:
            reunion.turn()
            if clock.now >= end:
                return
            clock.now += TURN_S

    return take


def test_a_node_can_be_found_from_its_first_turn_on(network, turns, clock):
    turns()
    for _ in range(10):
        assert network.fetch(KEY) == {peer_id(0): [address(0)]}
        clock.now += PUBLISH_EVERY_S
        turns()


def test_a_new_address_is_published_at_once(network, turns):
    turns()
    network.addresses = [address(0, port=2)]
    turns()
    assert network.fetch(KEY) == {peer_id(0): [address(0, port=2)]}


def test_a_node_that_nobody_can_reach_publishes_nothing(network, turns):
    network.addresses = []
    turns(PUBLISH_EVERY_S)
    assert network.fetch(KEY) == {}


def test_a_newcomer_is_written_down_in_seconds(network, met, turns):
    turns(READ_EVERY_S)
    network.neighbour(peer_id(1)).publish(KEY, [address(1)], HOUR)
    network.there = {1}
    turns(READ_AT_MOST_EVERY_S)
    assert met.addresses == {peer_id(1): (address(1),)}


def test_addresses_of_a_swarm_with_more_peers_than_are_written_down_are_read_no_more_often(
    network, turns, monkeypatch
):
    network.there = set(range(1, MAX_PEERS + 2))
    for number in network.there:
        network.neighbour(peer_id(number)).publish(KEY, [address(number)], HOUR)
    reads, fetch = [], network.fetch
    monkeypatch.setattr(network, "fetch", lambda key: reads.append(key) or fetch(key))
    turns(5 * READ_EVERY_S)
    assert len(reads) <= 6


def test_after_a_long_absence_those_who_were_met_before_stay_written_down(network, met, turns, clock):
    old = set(range(1, MAX_PEERS + 1))
    for number in old:
        met.meet(peer_id(number), [address(number)])
    clock.now += 86400.0
    network.there = set(range(1, 2 * MAX_PEERS))
    for number in sorted(network.there, reverse=True):  # the others come first in the answer
        network.neighbour(peer_id(number)).publish(KEY, [address(number)], HOUR)
    turns()
    assert met.addresses.keys() == {peer_id(number) for number in old}


def test_another_address_of_a_peer_is_written_down(network, met, turns):
    network.there = {1}
    other = network.neighbour(peer_id(1))
    other.publish(KEY, [address(1)], HOUR)
    turns(READ_AT_MOST_EVERY_S)
    other.publish(KEY, [address(1, port=2)], HOUR)
    turns(READ_EVERY_S)
    assert met.addresses == {peer_id(1): (address(1, port=2),)}


def test_an_address_of_somebody_who_is_not_there_is_not_written_down(network, met, turns):
    network.there = {1}
    network.neighbour(peer_id(1)).publish(KEY, [address(2)], HOUR)
    turns(READ_EVERY_S)
    assert met.addresses == {}


def test_who_is_there_is_left_in_peace(network, met, turns):
    met.meet(peer_id(1), [address(1)])
    network.there = {1}
    turns(60)
    assert network.calls == []


def test_who_is_missing_is_called_on_at_once_and_ever_more_rarely(network, met, turns, clock):
    met.meet(peer_id(1), [address(1)])
    network.there = {2}
    began = clock.now
    turns(4 * LONGEST_PAUSE_S)
    calls = network.called_on(1)
    pauses = [later - earlier for earlier, later in zip(calls, calls[1:], strict=False)]
    assert calls[0] == began and pauses == sorted(pauses)
    assert pauses[0] <= 2 * TURN_S
    assert LONGEST_PAUSE_S <= max(pauses) <= LONGEST_PAUSE_S + TURN_S


def test_a_node_that_is_alone_calls_all_the_time(network, met, turns):
    met.meet(peer_id(1), [address(1)])
    turns(600)
    calls = network.called_on(1)
    assert max(b - a for a, b in zip(calls, calls[1:], strict=False)) <= LONGEST_PAUSE_ALONE_S + TURN_S


def test_who_was_there_again_is_called_on_at_once_when_it_is_missing_again(network, met, turns, clock):
    met.meet(peer_id(1), [address(1)])
    network.there = {2}
    turns(LONGEST_PAUSE_S)
    network.there = {1, 2}
    turns()
    network.there = {2}
    turns()
    assert network.called_on(1)[-1] == clock.now


def test_no_turn_calls_on_everybody(network, met, turns):
    for number in range(1, 3 * CALLS_AT_ONCE):
        met.meet(peer_id(number), [address(number)])
    turns(10 * TURN_S)
    assert max(len(peers) for _, peers in network.calls) == CALLS_AT_ONCE
    assert all(network.called_on(number) for number in range(1, 3 * CALLS_AT_ONCE))


def test_the_addresses_of_the_join_line_are_called_on_too(network, met, clock):
    also = {peer_id(1): [address(1)], peer_id(0): [address(0)]}
    Reunion(network, KEY, met, also=also, clock=clock).turn()
    assert [peers for _, peers in network.calls] == [{peer_id(1): [address(1)]}]
