"""Whom a peer has met, written down; when it publishes its addresses, reads others', and calls on others.

What is no list of addresses is left out: `tests/simulation/test_records_of_a_liar.py`.
"""

import json

import pytest
from hivemind.p2p import PeerID

from tests.kit.fakes import FakeNode
from trahiv_cli.swarm import acquaintances
from trahiv_cli.swarm.acquaintances import LATELY_S, MAX_PEERS, Acquaintances, Reunion
from trahiv_cli.swarm.node import CHORES_EVERY_S

KEY, HOUR = "addresses", 3600.0
OPEN = "/ip4/0.0.0.0/tcp/0"


def peer_id(number):
    return str(PeerID(b"\x12\x20" + bytes(31) + bytes([number])).to_base58())


PEER, OTHER = peer_id(1), peer_id(2)


def address(number=1, port=1):
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{peer_id(number)}"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "peers.json"


# -- what is written down -------------------------------------------------------------------------


def test_what_was_saved_is_read_again_and_a_visit_writes_nothing_down(path):
    met = Acquaintances(path)
    met.meet(PEER, [address(), address(port=2)])
    met.ports = {OPEN: 4001}
    met.save()
    again, before = Acquaintances(path), path.read_bytes()
    assert again.addresses == {PEER: (address(), address(port=2))} and again.ports == {OPEN: 4001}
    visit = Acquaintances.remembered(path)
    assert visit.addresses == met.addresses and Acquaintances.remembered(None).addresses == {}
    visit.meet(OTHER, [address(2)])
    visit.save()
    assert path.read_bytes() == before
    path.unlink()
    met.meet(PEER, [address(), address(port=2)])
    met.save()
    assert not path.exists(), "nothing is new"
    met.meet(PEER, [address(port=port) for port in range(1, 1000)])
    assert len(met.addresses[PEER]) == acquaintances.MAX_ADDRESSES
    gone = Acquaintances(path.parent / "gone" / "peers.json")
    gone.meet(PEER, [address()])
    with pytest.raises(OSError, match="gone"):
        gone.save()


def test_who_was_there_last_comes_first_and_together_with_others_lately_or_is_forgotten(path, clock):
    clock.now = 1e9
    met = Acquaintances(path, clock)
    assert met.lately == frozenset()
    met.meet(PEER, [address()])
    for _ in range(20):
        clock.now += LATELY_S / 10
        met.meet(OTHER, [address(2)])
        met.save()
    assert list(met.addresses) == [OTHER, PEER]
    assert met.lately == Acquaintances(path, clock).lately == {OTHER}
    met.meet(PEER, [address()])
    clock.now += 7 * 86400
    assert met.lately == {PEER, OTHER}
    clock.now += acquaintances.FORGOTTEN_AFTER_S
    assert met.addresses == {}


def test_names_that_somebody_makes_up_push_nobody_out_who_is_there(path, clock):
    clock.now = 1e9
    met = Acquaintances(path, clock)
    honest, made_up = range(MAX_PEERS), range(MAX_PEERS, 3 * MAX_PEERS)
    for _ in range(3):
        clock.now += LATELY_S / 2
        for number in (*honest, *made_up):
            met.meet(peer_id(number), [address(number)])
    assert met.addresses.keys() == set(map(peer_id, honest))
    clock.now += LATELY_S
    met.meet(peer_id(made_up[0]), [address(made_up[0])])
    assert peer_id(made_up[0]) in met.addresses and len(met.addresses) == MAX_PEERS


@pytest.mark.parametrize(
    "content",
    ["", '{"version": 2}', '{"version": 1, "ports": {}, "peers": {"Qm": 7}}']
    + [json.dumps({"version": 1, "ports": {OPEN: port}, "peers": {}}) for port in (0, "4001", True)],
)
def test_a_file_that_is_none_is_taken_for_an_empty_one(path, content):
    path.write_text(content)
    met = Acquaintances(path)
    met.meet(PEER, [address(2), "not a multiaddr", f"/ip4/999.0.113.7/tcp/31337/p2p/{PEER}", None])
    met.meet(PEER, b"bytes")
    assert met.addresses == {} and met.ports == {}


# -- keeping in touch -----------------------------------------------------------------------------


class Network(FakeNode):
    """A node whose routing table is said by the test, and which remembers on whom it called and when."""

    def __init__(self, clock):
        super().__init__(peer_id(0), now=clock)
        self.clock, self.there, self.calls, self.addresses, self.reads = clock, set(), [], [address(0)], 0

    def own_addresses(self):
        return self.addresses

    def fetch(self, key):
        self.reads += 1
        return super().fetch(key)

    def run(self, coroutine):
        if coroutine is acquaintances.known_peers:
            return [peer_id(number) for number in self.there]
        [peers] = coroutine.args
        return self.calls.append((self.clock.now, peers))

    def pauses(self):
        """Between the calls on peer 1."""
        called = [at for at, peers in self.calls if PEER in peers]
        return [later - earlier for earlier, later in zip(called, called[1:], strict=False)]


@pytest.fixture
def network(clock):
    return Network(clock)


@pytest.fixture
def met(clock):
    return Acquaintances(None, clock=clock)


@pytest.fixture
def turns(network, met, clock):
    """`turns(seconds)` takes a turn now, and then one every `CHORES_EVERY_S` for so long."""
    keeps = Reunion(network, KEY, met, clock=clock)

    def take(seconds=0.0):
        end = clock.now + seconds
        while True:
            keeps.turn()
            if clock.now >= end:
                return
            clock.now += CHORES_EVERY_S

    return take


def test_a_node_can_be_found_from_its_first_turn_on_and_under_a_new_address_at_once(network, turns, clock):
    for _ in range(5):
        turns()
        assert network.fetch(KEY) == {peer_id(0): [address(0)]}
        clock.now += acquaintances.PUBLISH_EVERY_S
    network.addresses = [address(0, port=2)]
    turns()
    assert network.fetch(KEY) == {peer_id(0): [address(0, port=2)]}
    network.records.clear()
    network.addresses = []
    turns(acquaintances.PUBLISH_EVERY_S)
    assert network.fetch(KEY) == {}, "nobody can reach it"


def test_a_newcomer_is_written_down_in_seconds_with_its_newest_address_and_no_absent_one(network, met, turns):
    turns(acquaintances.READ_EVERY_S)
    other = network.neighbour(PEER)
    other.publish(KEY, [address()], HOUR)
    network.neighbour(OTHER).publish(KEY, [address(2)], HOUR)
    network.there = {1}
    turns(acquaintances.READ_AT_MOST_EVERY_S)
    assert met.addresses == {PEER: (address(),)}
    other.publish(KEY, [address(port=2)], HOUR)
    turns(acquaintances.READ_EVERY_S)
    assert met.addresses == {PEER: (address(port=2),)}
    assert network.calls == [], "who is there is left in peace"


def test_of_more_peers_than_are_written_down_those_of_before_stay_and_none_are_read_more_often(
    network, met, turns, clock
):
    old = range(1, MAX_PEERS + 1)
    for number in old:
        met.meet(peer_id(number), [address(number)])
    clock.now += 86400.0
    network.there = set(range(1, 2 * MAX_PEERS))
    for number in sorted(network.there, reverse=True):  # the others come first in the answer
        network.neighbour(peer_id(number)).publish(KEY, [address(number)], HOUR)
    turns(3 * acquaintances.READ_EVERY_S)
    assert met.addresses.keys() == set(map(peer_id, old)) and network.reads <= 4


def test_who_is_missing_is_called_on_at_once_and_ever_more_rarely(network, met, turns, clock):
    met.meet(PEER, [address()])
    network.there = {2}
    turns(4 * acquaintances.LONGEST_PAUSE_S)
    pauses = network.pauses()
    assert network.calls[0][0] == 0.0 and pauses == sorted(pauses) and pauses[0] <= 2 * CHORES_EVERY_S
    assert acquaintances.LONGEST_PAUSE_S <= max(pauses) <= acquaintances.LONGEST_PAUSE_S + CHORES_EVERY_S
    for network.there in ({1, 2}, {2}):  # it was there again meanwhile
        turns()
    assert network.calls[-1][0] == clock.now


def test_a_node_that_is_alone_calls_all_the_time_and_never_on_everybody_at_once(network, met, turns, clock):
    also = {PEER: [address()], peer_id(0): [address(0)]}  # of the join line
    Reunion(network, KEY, met, also=also, clock=clock).turn()
    assert [peers for _, peers in network.calls] == [{PEER: [address()]}]
    met.meet(PEER, [address()])
    turns(600)
    assert max(network.pauses()) <= acquaintances.LONGEST_PAUSE_ALONE_S + CHORES_EVERY_S
    for number in range(1, 3 * acquaintances.CALLS_AT_ONCE):
        met.meet(peer_id(number), [address(number)])
    turns(10 * CHORES_EVERY_S)
    assert max(len(peers) for _, peers in network.calls) == acquaintances.CALLS_AT_ONCE
    assert len({peer for _, peers in network.calls for peer in peers}) == 3 * acquaintances.CALLS_AT_ONCE - 1
