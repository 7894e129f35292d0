"""The file of known peers, and when a node publishes its addresses, reads others', and calls peers.

That invalid address lists are ignored, and that known peers survive a restart, is tested in
`tests/simulation/test_records_of_a_liar.py`; that a connected peer is called, in `tests/swarm/test_nodes.py`.
"""

import asyncio
from itertools import pairwise
from unittest.mock import AsyncMock, Mock, call

import pytest
from hivemind.p2p import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from tests.kit.fakes import FakeNode
from tests.unit.async_tests import peer
from trahiv_cli.net.keys import ADDRESSES_KEY
from trahiv_cli.swarm import reconnector as acq
from trahiv_cli.swarm.known_peers import LATELY_S, MAX_PEERS, KnownPeers
from trahiv_cli.swarm.reconnector import Reconnector

CHORES_EVERY_S = 2.0


def peer_id(number):
    return peer(number).to_base58()


ME, PEER, OTHER = map(peer_id, range(3))


def address(number=1, port=1):
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{peer_id(number)}"


def meet(met, *numbers):
    for number in numbers:
        met.meet(peer_id(number), [address(number)])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "peers.json"


def test_visits_and_unchanged_peers_write_nothing(path):
    met = KnownPeers(path)
    meet(met, 1)
    met.save()
    visit = KnownPeers.remembered(path)
    assert visit.addresses == met.addresses
    path.unlink()
    meet(visit, 2)
    visit.save()
    met.save()
    assert not path.exists()


def test_few_addresses_of_peer_are_kept():
    met = KnownPeers(None)
    met.meet(PEER, [address(port=port) for port in range(1, 1000)])
    assert len(met.addresses[PEER]) == 12


def test_failed_save_raises(path):
    gone = KnownPeers(path / "peers.json")
    meet(gone, 1)
    with pytest.raises(OSError, match=r"peers\.json"):
        gone.save()


def test_recent_peers_come_first(path, clock):
    clock.now = 1e9
    met = KnownPeers(path, clock)
    assert met.lately == frozenset()
    meet(met, 1)
    for _ in range(20):
        clock.now += LATELY_S / 10
        meet(met, 2)
        met.save()
    assert list(met.addresses) == [OTHER, PEER]
    assert met.lately == KnownPeers(path, clock).lately == {OTHER}
    meet(met, 1)
    clock.now += 7 * 86400
    assert met.lately == {PEER, OTHER}


def test_invented_ids_replace_no_present_peer(clock):
    clock.now = 1e9
    met = KnownPeers(None, clock)
    for _ in range(3):
        clock.now += LATELY_S / 2
        meet(met, *range(3 * MAX_PEERS))
    assert met.addresses.keys() == set(map(peer_id, range(MAX_PEERS)))
    clock.now += LATELY_S
    meet(met, MAX_PEERS)
    assert peer_id(MAX_PEERS) in met.addresses
    assert len(met.addresses) == MAX_PEERS


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"version": 2}',
        '{"version": 1, "ports": {}, "peers": {"Qm": 7}}',
        '{"version": 1, "ports": {"/ip4/0.0.0.0/tcp/0": 0}, "peers": {}}',
        '{"version": 1, "ports": {"/ip4/0.0.0.0/tcp/0": "4001"}, "peers": {}}',
        '{"version": 1, "ports": {"/ip4/0.0.0.0/tcp/0": true}, "peers": {}}',
    ],
)
def test_damaged_file_counts_as_empty(path, content):
    path.write_text(content)
    met = KnownPeers(path)
    assert (met.addresses, met.ports) == ({}, {})


class Network(FakeNode):
    """A node whose routing table (`there`) a test sets; it records its calls."""

    there = ()

    def __init__(self, clock):
        super().__init__(ME, now=clock)
        self.clock = clock
        self.calls = []
        self.addresses = [address(0)]
        self.met = KnownPeers(None, clock)
        self.reunion = self.make_reunion()

    def make_reunion(self, **options):
        return Reconnector(self, self.own_addresses, self.met, clock=self.clock, **options)

    def turn(self, seconds=0.0):
        """Take a turn now, and then one every `CHORES_EVERY_S` for some seconds."""
        self.reunion.turn()
        for _ in range(int(seconds / CHORES_EVERY_S)):
            self.clock.now += CHORES_EVERY_S
            self.reunion.turn()

    def tell(self, number, port=1):
        """Have a peer publish an address."""
        self.neighbour(peer_id(number)).publish(ADDRESSES_KEY, [address(number, port)], 3600.0)

    def own_addresses(self):
        return self.addresses

    def run(self, coroutine):
        if coroutine is acq.peers_there:
            return list(map(peer_id, self.there)), []
        self.calls.append((self.clock.now, *coroutine.args))

    def called(self):
        """Return the peers in each call."""
        return [peers for _, peers, _ in self.calls]

    def pauses(self):
        """Return the pauses between calls to peer 1, in seconds."""
        return [later - at for at, later in pairwise(at for at, peers, _ in self.calls if PEER in peers)]


@pytest.fixture
def network(clock):
    return Network(clock)


def test_address_changes_are_published_at_once(network, clock):
    for network.addresses in ([address(0)], [address(0, port=2)]):
        network.turn()
        assert network.fetch(ADDRESSES_KEY) == {ME: network.addresses}
        network.turn(120.0)
        clock.now += 599.0
        assert network.fetch(ADDRESSES_KEY) == {ME: network.addresses}  # it was published again


def test_peer_without_addresses_publishes_nothing(network):
    network.addresses = []
    network.turn()
    assert network.fetch(ADDRESSES_KEY) == {}


def test_newcomer_is_saved_with_newest_address(network):
    for number in (2, 3):
        network.tell(number)
    network.there = {2}
    network.turn(CHORES_EVERY_S)
    network.there = {1, 2}
    for port in (1, 2):
        network.tell(1, port)
        network.turn(CHORES_EVERY_S)
        assert network.met.addresses == {PEER: (address(port=port),), OTHER: (address(2),)}
    assert set().union(*network.called()) == {peer_id(3)}  # it publishes and is not there


def test_full_list_keeps_known_peers(network, clock):
    meet(network.met, *range(1, MAX_PEERS + 1))
    clock.now += 86400.0
    network.there = range(1, 2 * MAX_PEERS)
    for number in reversed(network.there):  # the new ones come first in the answer
        network.tell(number)
    for port in (1, 2):
        network.turn()
        assert network.met.addresses.keys() == set(map(peer_id, range(1, MAX_PEERS + 1)))
        assert network.met.addresses[PEER] == (address(port=port),)
        network.tell(1, port=2)


def test_recently_seen_peer_is_called_often(network):
    meet(network.met, 1, 2)
    network.there = {2}
    network.turn(600.0)
    assert network.calls[0][0] == 0.0
    assert max(network.pauses()) <= 10.0 + CHORES_EVERY_S


def test_calls_to_missing_peer_back_off(network, clock):
    meet(network.met, 1)
    clock.now = began = 86400.0
    meet(network.met, 2)
    network.there = {2}
    network.turn(2400.0)
    pauses = network.pauses()
    assert network.calls[0][0] == began
    assert pauses == sorted(pauses)
    assert pauses[0] <= 2 * CHORES_EVERY_S
    assert 300.0 <= pauses[-1] <= 300.0 + CHORES_EVERY_S
    for network.there in ({1, 2}, {2}):  # it was present again in between
        network.turn()
    assert network.calls[-1][0] == clock.now


def test_join_line_addresses_are_called(network):
    network.make_reunion(also=[address(), address(0), address(port=2)]).turn()
    assert network.called() == [{PEER: [address(), address(port=2)]}]


def test_lone_node_calls_often_in_small_groups(network):
    meet(network.met, 1)
    network.turn(600)
    assert max(network.pauses()) <= 10.0 + CHORES_EVERY_S
    meet(network.met, *range(1, 24))
    network.turn(10 * CHORES_EVERY_S)
    assert max(map(len, network.called())) == 8
    assert len(set().union(*network.called())) == 23


def test_visitor_calls_peers_but_publishes_nothing(network):
    network.make_reunion(also=[address()], is_visitor=True).turn()
    assert network.fetch(ADDRESSES_KEY) == {}
    assert network.calls == [(0.0, {PEER: [address()]}, True)]


LOW, MIDDLE, HIGH = map(peer, range(3))


DIAL = call.protocol.p2p._client.connect(MIDDLE, [Multiaddr("/ip4/203.0.113.7/tcp/1")])  # without the id
MEET = call.meeting.meet(MIDDLE, [])
PING = call.protocol.call_ping(MIDDLE, strict=False)
KNOW = call.blacklist.register_success(MIDDLE)
NO_ROUTE = P2PDaemonError("no route")
ERRORS = (NO_ROUTE, TimeoutError(), OSError("p2pd is gone"))


@pytest.mark.parametrize(
    "own, is_visitor, error, options, calls",
    [
        *((LOW, False, error, {}, [DIAL, MEET, PING, KNOW]) for error in ERRORS),
        *((HIGH, False, error, {}, [DIAL]) for error in ERRORS),
        (HIGH, True, NO_ROUTE, {}, [DIAL, MEET, PING, KNOW]),
        (LOW, False, NO_ROUTE, {"meeting": None}, [DIAL]),
        (LOW, False, NO_ROUTE, {"meeting.meet.side_effect": ConnectionError}, [DIAL, MEET]),
        (LOW, False, None, {}, [DIAL, PING, KNOW]),
        (LOW, False, None, {"protocol.call_ping.return_value": None}, [DIAL, PING]),
    ],
)
async def test_call_dials_then_meets_and_pings(own, is_visitor, error, options, calls):
    """Where neither can dial the other, the visitor asks for a meeting, or the peer with the lower id."""
    node = AsyncMock(peer_id=own, **{"protocol.p2p._client.connect.side_effect": error} | options)
    node.protocol.routing_table.peer_id_to_uid = {own: None}
    node.blacklist.register_success = Mock()
    await acq.greet({PEER: [address()]}, is_visitor, None, node)
    await asyncio.sleep(1.0)
    assert [one for one in node.mock_calls if one.args] == calls
