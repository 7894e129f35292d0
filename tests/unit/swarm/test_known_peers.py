"""The file of known peers, and when a node publishes its addresses, reads others', and calls peers.

That invalid address lists are ignored, and that known peers survive a restart, is tested in
`tests/simulation/test_records_of_a_liar.py`; that a connected peer is called, in `tests/swarm/test_nodes.py`.
"""

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils.multiaddr import Multiaddr

from tests.kit.fakes import FakeNode
from trahiv_cli.net.keys import ADDRESSES_KEY
from trahiv_cli.swarm import reconnector as acq
from trahiv_cli.swarm.known_peers import LATELY_S, MAX_PEERS, Acquaintances
from trahiv_cli.swarm.reconnector import Reunion

OPEN = "/ip4/0.0.0.0/tcp/0"
CHORES_EVERY_S = 2.0


def peer_id(number):
    return PeerID(b"\x12\x20" + bytes(31) + bytes([number])).to_base58()


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
    met = Acquaintances(path)
    meet(met, 1)
    met.save()
    visit = Acquaintances.remembered(path)
    assert visit.addresses == met.addresses
    path.unlink()
    meet(visit, 2)
    visit.save()
    met.save()
    assert not path.exists()


def test_few_addresses_of_peer_are_kept():
    met = Acquaintances(None)
    met.meet(PEER, [address(port=port) for port in range(1, 1000)])
    assert len(met.addresses[PEER]) == 12


def test_failed_save_raises(path):
    gone = Acquaintances(path / "peers.json")
    meet(gone, 1)
    with pytest.raises(OSError, match=r"peers\.json"):
        gone.save()


def test_recent_peers_come_first(path, clock):
    clock.now = 1e9
    met = Acquaintances(path, clock)
    assert met.lately == frozenset()
    meet(met, 1)
    for _ in range(20):
        clock.now += LATELY_S / 10
        meet(met, 2)
        met.save()
    assert list(met.addresses) == [OTHER, PEER]
    assert met.lately == Acquaintances(path, clock).lately == {OTHER}
    meet(met, 1)
    clock.now += 7 * 86400
    assert met.lately == {PEER, OTHER}


def test_invented_ids_replace_no_present_peer(clock):
    clock.now = 1e9
    met = Acquaintances(None, clock)
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
    ["", '{"version": 2}', '{"version": 1, "ports": {}, "peers": {"Qm": 7}}']
    + [json.dumps({"version": 1, "ports": {OPEN: port}, "peers": {}}) for port in (0, "4001", True)],
)
def test_damaged_file_counts_as_empty(path, content):
    path.write_text(content)
    met = Acquaintances(path)
    assert (met.addresses, met.ports) == ({}, {})


class Network(FakeNode):
    """A node whose routing table (`there`) and connections a test sets; it records its calls."""

    reach = SimpleNamespace(kind="direct")
    there = connected = ()

    def __init__(self, clock):
        super().__init__(ME, now=clock)
        self.clock = clock
        self.calls = []
        self.addresses = [address(0)]
        self.met = Acquaintances(None, clock)
        self.reunion = Reunion(self, self.own_addresses, self.met, clock=clock)

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
            return [list(map(peer_id, some)) for some in (self.there, self.connected)]
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


def test_join_line_addresses_are_called(network, clock):
    also = [address(), address(0), address(port=2)]
    Reunion(network, network.own_addresses, network.met, also=also, clock=clock).turn()
    assert network.called() == [{PEER: [address(), address(port=2)]}]


def test_lone_node_calls_often_in_small_groups(network):
    meet(network.met, 1)
    network.turn(600)
    assert max(network.pauses()) <= 10.0 + CHORES_EVERY_S
    meet(network.met, *range(1, 24))
    network.turn(10 * CHORES_EVERY_S)
    assert max(map(len, network.called())) == 8
    assert len(set().union(*network.called())) == 23


def test_visitor_calls_peers_but_publishes_nothing(network, clock):
    Reunion(
        network, network.own_addresses, network.met, also=[address()], is_visitor=True, clock=clock
    ).turn()
    assert network.fetch(ADDRESSES_KEY) == {}
    assert network.calls == [(0.0, {PEER: [address()]}, True)]


LOW, MIDDLE, HIGH = map(PeerID.from_base58, (ME, PEER, OTHER))


def call(own, dial=TimeoutError, is_visitor=False, **behaviour):
    """Call a peer from a node whose dial fails with an error, if any; return the node's calls."""
    node = AsyncMock(**behaviour)
    node.peer_id = own
    node.protocol.p2p._client.connect.side_effect = dial
    node.protocol.routing_table.peer_id_to_uid = {own: None}
    node.blacklist.register_success = Mock()

    async def scene():
        await acq.greet({PEER: [address()]}, is_visitor, None, node)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)

    asyncio.run(scene())
    return [(name.rpartition(".")[2], *args, kwargs) for name, args, kwargs in node.mock_calls if args]


DIAL = ("connect", MIDDLE, [Multiaddr("/ip4/203.0.113.7/tcp/1")], {})  # libp2p gets the id separately
MEET = ("meet", MIDDLE, [], {})
PING = ("call_ping", MIDDLE, {"strict": False})
KNOW = ("register_success", MIDDLE, {})


@pytest.mark.parametrize("error", [P2PDaemonError("no route"), TimeoutError(), OSError("p2pd is gone")])
def test_lower_id_requests_meeting_after_failed_dial(error):
    assert call(LOW, error) == [DIAL, MEET, PING, KNOW]
    assert call(HIGH, error) == [DIAL]


def test_visitor_requests_meeting_after_failed_dial():
    assert call(HIGH, is_visitor=True) == [DIAL, MEET, PING, KNOW]


def test_peer_without_meetings_only_dials():
    assert call(LOW, meeting=None) == [DIAL]


def test_dialled_peer_enters_routing_table():
    assert call(LOW, dial=None) == [DIAL, PING, KNOW]


def test_silent_peer_enters_no_routing_table():
    assert call(LOW, dial=None, **{"protocol.call_ping.return_value": None}) == [DIAL, PING]


def test_failed_meeting_ends_call():
    assert call(LOW, **{"meeting.meet.side_effect": ConnectionError}) == [DIAL, MEET]
