"""The file of known peers, and when a node publishes its addresses, reads others', and calls peers.

That invalid address lists are ignored, and that known peers survive a restart, is tested in
`tests/simulation/test_records_of_a_liar.py`.
"""

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hivemind.p2p import P2PDaemonError, PeerID

from tests.kit.fakes import FakeNode
from trahiv_cli.swarm import reunion as acq
from trahiv_cli.swarm.acquaintances import LATELY_S, MAX_ADDRESSES, MAX_PEERS, Acquaintances
from trahiv_cli.swarm.node import CHORES_EVERY_S
from trahiv_cli.swarm.reunion import Reunion

KEY, OPEN = "addresses", "/ip4/0.0.0.0/tcp/0"


def peer_id(number):
    return str(PeerID(b"\x12\x20" + bytes(31) + bytes([number])).to_base58())


ME, PEER, OTHER = map(peer_id, range(3))


def address(number=1, port=1):
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{peer_id(number)}"


def meet(met, *numbers):
    for number in numbers:
        met.meet(peer_id(number), [address(number)])


def test_visits_and_unchanged_peers_write_nothing(tmp_path):
    path = tmp_path / "peers.json"
    met = Acquaintances(path)
    met.meet(PEER, [address(port=port) for port in range(1, 1000)])
    assert len(met.addresses[PEER]) == MAX_ADDRESSES
    met.ports = {OPEN: 4001}
    met.save()
    visit = Acquaintances.remembered(path)
    assert Acquaintances(path).ports == {OPEN: 4001} and visit.addresses == met.addresses
    path.unlink()
    meet(visit, 2)
    for one in (visit, met):
        one.save()
    assert not path.exists()
    gone = Acquaintances(path / "peers.json")
    meet(gone, 1)
    with pytest.raises(OSError, match=r"peers\.json"):
        gone.save()


def test_recent_peers_come_first(tmp_path, clock):
    clock.now = 1e9
    met = Acquaintances(tmp_path / "peers.json", clock)
    assert met.lately == frozenset()
    meet(met, 1)
    for _ in range(20):
        clock.now += LATELY_S / 10
        meet(met, 2)
        met.save()
    assert list(met.addresses) == [OTHER, PEER]
    assert met.lately == Acquaintances(tmp_path / "peers.json", clock).lately == {OTHER}
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
    assert peer_id(MAX_PEERS) in met.addresses and len(met.addresses) == MAX_PEERS


@pytest.mark.parametrize(
    "content",
    ["", '{"version": 2}', '{"version": 1, "ports": {}, "peers": {"Qm": 7}}']
    + [json.dumps({"version": 1, "ports": {OPEN: port}, "peers": {}}) for port in (0, "4001", True)],
)
def test_damaged_file_counts_as_empty(tmp_path, content):
    (tmp_path / "peers.json").write_text(content)
    met = Acquaintances(tmp_path / "peers.json")
    met.meet(PEER, [address(2), "not a multiaddr", f"/ip4/999.0.113.7/tcp/31337/p2p/{PEER}", None])
    assert met.addresses == {} and met.ports == {}


class Network(FakeNode):
    """A node whose routing table (`there`) and connections a test sets; it records its calls."""

    reach = SimpleNamespace(kind="direct")

    def __init__(self, clock):
        super().__init__(ME, now=clock)
        self.clock, self.calls, self.addresses = clock, [], [address(0)]
        self.there, self.connected = set(), set()
        self.met = Acquaintances(None, clock=clock)
        self.reunion = Reunion(self, KEY, self.met, clock=clock)

    def turn(self, seconds=0.0):
        """Take a turn now, and then one every `CHORES_EVERY_S` for some seconds."""
        for at in range(int(seconds / CHORES_EVERY_S) + 1):
            self.clock.now += CHORES_EVERY_S * bool(at)
            self.reunion.turn()

    def tell(self, number, port=1):
        """Have a peer publish an address."""
        self.neighbour(peer_id(number)).publish(KEY, [address(number, port)], 3600.0)

    def own_addresses(self):
        return self.addresses

    def run(self, coroutine):
        if coroutine is acq.peers_there:
            return [list(map(peer_id, some)) for some in (self.there, self.connected)]
        peers, _ = coroutine.args
        return self.calls.append((self.clock.now, peers))

    def pauses(self):
        """The pauses between calls to peer 1, in seconds."""
        return [later - at for at, later in pairwise(at for at, peers in self.calls if PEER in peers)]


@pytest.fixture
def network(clock):
    return Network(clock)


def test_address_changes_are_published_at_once(network, clock):
    for network.addresses in ([address(0)], [address(0, port=2)]):
        network.turn()
        assert network.fetch(KEY) == {ME: network.addresses}
        network.turn(acq.PUBLISH_EVERY_S)
        clock.now += acq.ADDRESSES_TTL_S - 1.0
        assert network.fetch(KEY) == {ME: network.addresses}, "it was published again"
    clock.now += acq.ADDRESSES_TTL_S
    network.addresses = []
    network.turn(acq.PUBLISH_EVERY_S)
    assert network.fetch(KEY) == {}, "nobody can reach it"


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
    called_on = {peer for _, peers in network.calls for peer in peers}
    assert called_on == {peer_id(3)}, "who publishes and is not there; who is there is left in peace"


def test_full_list_keeps_known_peers(network, clock):
    meet(network.met, *range(1, MAX_PEERS + 1))
    clock.now += 86400.0
    network.there = set(range(1, 2 * MAX_PEERS))
    for number in sorted(network.there, reverse=True):  # the new ones come first in the answer
        network.tell(number)
    for port in (1, 2):
        network.turn()
        assert network.met.addresses.keys() == set(map(peer_id, range(1, MAX_PEERS + 1)))
        assert network.met.addresses[PEER] == (address(port=port),)
        network.tell(1, port=2)


def test_recently_seen_peer_is_called_often(network, clock):
    meet(network.met, 1, 2)
    network.there = {2}
    network.turn(2 * acq.LONGEST_PAUSE_S)
    assert network.calls[0][0] == 0.0
    assert max(network.pauses()) <= acq.LONGEST_PAUSE_LATELY_S + CHORES_EVERY_S


def test_calls_to_missing_peer_back_off(network, clock):
    meet(network.met, 1)
    clock.now += 86400.0
    meet(network.met, 2)
    network.there, began = {2}, clock.now
    network.turn(8 * acq.LONGEST_PAUSE_S)
    pauses = network.pauses()
    assert network.calls[0][0] == began and pauses == sorted(pauses) and pauses[0] <= 2 * CHORES_EVERY_S
    assert acq.LONGEST_PAUSE_S <= max(pauses) <= acq.LONGEST_PAUSE_S + CHORES_EVERY_S
    for network.there in ({1, 2}, {2}):  # it was present again in between
        network.turn()
    assert network.calls[-1][0] == clock.now


def test_connected_dropped_peer_is_called(network, clock):
    """Both dropped each other while one was stalled: neither would ask the other again by itself."""
    network.there, network.connected = {2}, {1, 2}
    network.tell(1)
    network.turn(60.0)
    assert network.met.addresses.keys() == {PEER}
    assert network.calls[0][1] == {PEER: (address(),)} and len(network.pauses()) > 3
    network.there = {1, 2}
    called = len(network.calls)
    network.turn(acq.LONGEST_PAUSE_S)
    assert len(network.calls) == called


def test_lone_node_calls_often_in_small_groups(network, clock):
    also = [address(), address(0), address(port=2)]  # from the join line
    Reunion(network, KEY, network.met, also=also, clock=clock).turn()
    assert [peers for _, peers in network.calls] == [{PEER: [address(), address(port=2)]}]
    meet(network.met, 1)
    network.turn(600)
    assert max(network.pauses()) <= acq.LONGEST_PAUSE_LATELY_S + CHORES_EVERY_S
    meet(network.met, *range(1, 3 * acq.CALLS_AT_ONCE))
    network.turn(10 * CHORES_EVERY_S)
    assert max(len(peers) for _, peers in network.calls) == acq.CALLS_AT_ONCE
    assert len({peer for _, peers in network.calls for peer in peers}) == 3 * acq.CALLS_AT_ONCE - 1


def test_visitor_calls_peers_but_publishes_nothing(network, clock):
    visit = Reunion(network, KEY, network.met, also=[address()], is_visitor=True, clock=clock)
    asked = []
    network.run = lambda coroutine: ([], []) if coroutine is acq.peers_there else asked.append(coroutine.args)
    visit.turn()
    assert network.fetch(KEY) == {} and asked == [({PEER: [address()]}, True)]


class Daemon:
    """A node with its p2pd, protocol and meeting. A dial fails unless `answers`, a ping if that is "not"."""

    def __init__(self, own, answers=False, error=None):
        self.answers, self.error, self.said, self.known = answers, error or P2PDaemonError("no route"), [], []
        self.peer_id, self._client, self.p2p, self.meeting, self.blacklist = own, self, self, self, self
        self.protocol, self.routing_table, self.peer_id_to_uid = self, self, {own: None}

    async def connect(self, peer, maddrs):
        self.said.append(("dial", *map(str, maddrs)))
        if not self.answers:
            raise self.error

    async def meet(self, peer, middles):
        self.said.append("meet")
        if middles != []:
            raise ConnectionError("nobody is there")
        return "punched"

    async def call_ping(self, peer, strict):
        self.said.append("ping")
        return None if self.answers == "not" else peer

    def register_success(self, peer):
        self.known.append(peer)


def call(daemon, peer, *, is_visitor=False):
    """Call a peer at an address."""

    async def scene():
        peers = {peer: [address().replace(PEER, peer)]}
        await acq.greet(peers, is_visitor, None, daemon)
        while acq._calling:
            await asyncio.sleep(0)

    asyncio.run(scene())
    assert daemon.said.pop(0) == ("dial", "/ip4/203.0.113.7/tcp/1"), "libp2p is told the id beside"
    return daemon.said


LOW, HIGH = (PeerID.from_base58(one) for one in (ME, OTHER))


@pytest.mark.parametrize("error", [P2PDaemonError("no route"), TimeoutError(), OSError("p2pd is gone")])
def test_lower_id_requests_meeting_after_failed_dial(error):
    assert call(low := Daemon(LOW, error=error), PEER) == ["meet", "ping"]
    assert low.known == [PeerID.from_base58(PEER)]
    assert call(Daemon(HIGH, error=error), PEER) == []
    assert call(Daemon(HIGH, error=error), PEER, is_visitor=True) == ["meet", "ping"]
    alone = Daemon(LOW, error=error)
    alone.meeting = None
    assert call(alone, PEER) == []


def test_only_answering_peer_enters_routing_table():
    for answers, known in ((True, [PeerID.from_base58(PEER)]), ("not", [])):
        daemon = Daemon(LOW, answers)
        assert call(daemon, PEER) == ["ping"] and daemon.known == known
    daemon = Daemon(LOW)
    daemon.peer_id_to_uid = dict.fromkeys([LOW, HIGH])  # the middle is a member that can be dialled
    assert call(daemon, PEER) == ["meet"] and daemon.known == []
