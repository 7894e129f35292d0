"""How others reach a peer: conclusions from members' answers, and when members and router are asked."""

import asyncio
import os
import socket
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from hivemind.utils.multiaddr import Multiaddr

from tests.unit.async_tests import peer
from trahiv_cli.net.byte_streams import NotMet
from trahiv_cli.reach import reachability as reaches
from trahiv_cli.reach.hole_punching import Seen
from trahiv_cli.reach.reachability import (
    Reach,
    ReachFinder,
    ReachRules,
    believed,
    find_reach,
    list_node,
    listening_places,
    servers_of,
)
from trahiv_cli.reach.upnp import LEASE_S, Forwarded

LOOK_EVERY_S = 30.0
LOOK_EVERY_ALONE_S = 4.0
PORT = 4001
HOME, PUBLIC, NEAR, LOOPBACK = (
    (host, PORT) for host in ("192.168.1.20", "5.5.5.1", "192.168.1.21", "127.0.0.1")
)
LISTENS = [Multiaddr(f"/ip4/{host}/tcp/{port}") for host, port in (HOME, LOOPBACK)]
ADDRESS = f"/ip4/5.5.5.1/tcp/{PORT}"
NO_ROUTER = Forwarded("", "No router answers here that could forward a port (UPnP).")
FORWARDED = Forwarded(PUBLIC[0], f"The router forwards port {PORT} from {PUBLIC[0]}.")
ME, *PEERS = map(peer, range(10))


def seen(*places, dialled=(), carries=True):
    return Seen(places, dialled, carries)


SEEN = seen(PUBLIC)
DIALLED = seen(PUBLIC, dialled=(PUBLIC,))
NEAR_BY = seen(HOME, dialled=(HOME,))
ELSEWHERE = seen(("5.5.5.2", PORT))


@pytest.mark.parametrize(
    "looks, places",
    [
        ([], ()),
        ([SEEN], ()),
        ([DIALLED], (PUBLIC,)),
        ([DIALLED, seen(("5.5.5.1", 9))], (PUBLIC,)),
        ([DIALLED, ELSEWHERE], ()),  # seen by no other member
        ([seen(PUBLIC, ("5.5.5.1", 9), dialled=(PUBLIC,)), ELSEWHERE], ()),  # twice, by one
        ([NEAR_BY, ELSEWHERE], ()),  # from its own network
        ([NEAR_BY, seen(("192.168.1.1", 9))], (HOME,)),  # its own, which it knows
        ([NEAR_BY, DIALLED, SEEN], (PUBLIC,)),
        ([seen(HOME, NEAR, dialled=(HOME, NEAR))], (HOME, NEAR)),
    ],
)
def test_only_confirmed_places_are_believed(looks, places):
    assert believed(looks, LISTENS) == places


class World:
    """A node with its p2pd, protocol and meeting; a test sets the answers of members."""

    peer_id = ME
    client_mode = is_listed = may_be_relayed = False
    meeting = None
    pid = 0
    visible = LISTENS
    listens = [HOME, LOOPBACK]
    servers = connected = ()

    def __init__(self):
        self.protocol = self.p2p = self._child = self.routing_table = self
        self.open = AsyncMock()
        self.look = AsyncMock()
        self.ways = AsyncMock(return_value={})
        self.pinged = []

    @property
    def peer_id_to_uid(self):
        return dict.fromkeys([ME, *self.servers])

    def run(self, coroutine):
        return asyncio.run(coroutine(None, self))

    def let_relay(self):
        self.may_be_relayed = True

    def list_node(self, *, is_listed):
        self.is_listed = is_listed

    async def call_ping(self, peer, strict):
        assert not strict
        self.pinged.append(peer)

    async def list_peers(self):
        return [SimpleNamespace(peer_id=peer) for peer in self.connected]

    async def get_visible_maddrs(self, latest):
        return self.visible

    def members(self, *looks):
        """Have one member for each of these looks."""
        self.servers = PEERS[: len(looks)]
        self.look.side_effect = cycle(looks)


@pytest.fixture
def world(monkeypatch):
    made = World()
    monkeypatch.setattr(reaches, "Meeting", Mock(return_value=made))
    monkeypatch.setattr(reaches, "listening_places", lambda pid: made.listens)
    return made


def found(world, wanted="auto", is_visitor=False):
    world.meeting = world
    return world.run(partial(find_reach, wanted, is_visitor))


COULD_NOT = "Of the members, 2 tried to dial this peer, and could not."
ONLY_DIALS = f"{COULD_NOT} No member relays for it, so it averages only with peers that it can dial."
RELAYED = "Some peers reach this one through a relaying member."


@pytest.mark.parametrize(
    "dialled, carries, ways, kind, why",
    [
        ((PUBLIC,), False, ["relayed"], "direct", "A member has dialled this peer."),
        ((), True, ["punched"], "punched", "Hole punching through the routers works."),
        ((), True, ["punched", "relayed"], "relayed", RELAYED),
        ((), False, ["relayed"], "relayed", RELAYED),
        ((), True, [], "dials-out", COULD_NOT),
        ((), False, [], "dials-out", ONLY_DIALS),
    ],
)
def test_member_answers_determine_reach(world, dialled, carries, ways, kind, why):
    world.ways.return_value = dict(enumerate(ways))
    world.members(seen(PUBLIC, dialled=dialled, carries=False), seen(PUBLIC, carries=carries))
    reach = found(world)
    assert reach[:3] == (kind, why, dialled)
    assert len(reach.looks) == 2
    assert reach.only_dials is (why == ONLY_DIALS)
    assert world.is_listed is bool(dialled)


@pytest.mark.parametrize("looks", [(), (NotMet("no"), TimeoutError())])
@pytest.mark.parametrize("is_visitor", [True, False])
def test_lone_node_is_listed_unless_it_visits(world, looks, is_visitor):
    world.members(*looks)
    assert found(world, is_visitor=is_visitor) == Reach("alone", "No other peer is there to dial this one.")
    assert world.is_listed is not is_visitor


def test_dialled_visitor_is_not_listed(world):
    world.members(DIALLED)
    assert found(world, is_visitor=True).kind == "direct"
    assert not world.is_listed


@pytest.mark.parametrize(
    "wanted, kind, asked", [("auto", "direct", 1), ("direct", "direct", 0), ("relay", "relayed", 1)]
)
def test_user_may_choose_reach(world, wanted, kind, asked):
    world.members(DIALLED)
    world.ways.return_value = {PEERS[1]: "relayed"}
    reach = found(world, wanted)
    assert (reach.kind, world.look.await_count) == (kind, asked)
    assert world.is_listed is (kind == "direct")
    assert wanted != "direct" or reach.why == "It was started with --reach direct."


def test_client_only_dials_out(world):
    world.client_mode = True
    assert found(world, "direct") == Reach("dials-out", "It only dials out, as its user wants.")


def test_few_dialable_members_are_asked(world):
    world.members(*[SEEN] * 9)
    assert len(found(world).looks) == world.look.await_count == 3
    world.connected, world.servers = PEERS[:2], ()
    assert len(found(world).looks) == 2


def test_members_are_asked_in_random_order(world):
    world.servers = PEERS
    orders = [servers_of(world) for _ in range(20)]
    assert all(sorted(order) == PEERS for order in orders)
    assert len(set(map(tuple, orders))) > 1


async def test_connected_peers_learn_of_listing(world):
    world.servers, world.connected = PEERS[:2], PEERS[1:4]
    for is_listed, pinged in ((False, []), (True, PEERS[:4]), (True, []), (False, [])):
        world.pinged.clear()
        await list_node(world, world.servers, is_listed=is_listed)
        assert sorted(world.pinged) == pinged
        assert world.is_listed is is_listed


@pytest.fixture
def box():
    """A router."""
    return Mock(**{"forward.return_value": NO_ROUTER})


@pytest.fixture
def finder(world, box, clock):
    return ReachFinder(world.run, ReachRules(), box, clock=clock)


@pytest.fixture
def turn(finder, box, clock):
    """Take turns for some seconds; return the reach known then, and how often the router was asked."""

    def turn(seconds=0.0):
        finder.turn()
        for _ in range(int(seconds / 2)):
            clock.now += 2.0
            finder.turn()
        return finder.reach, box.forward.call_count

    return turn


def test_lone_peer_asks_members_more_often(world, turn, finder):
    world.members(DIALLED)
    turn(4 * LOOK_EVERY_S)
    assert world.look.await_count == 5
    world.members(NotMet("it is gone"))
    turn(LOOK_EVERY_S)
    assert finder.reach.kind == "alone"
    world.look.reset_mock()
    turn(4 * LOOK_EVERY_ALONE_S)
    assert world.look.await_count == 4
    world.members(DIALLED)
    turn(LOOK_EVERY_ALONE_S)
    assert finder.reach.kind == "direct"
    assert finder.addresses() == [ADDRESS]


def test_first_answer_allows_relaying(world, finder):
    assert finder.reach.kind == "alone"
    assert not finder.is_known.is_set()
    assert not world.may_be_relayed
    finder.turn()
    assert finder.is_known.is_set()
    assert world.may_be_relayed


def test_dialled_peer_asks_no_router(world, turn):
    world.members(DIALLED)
    assert turn(LEASE_S)[1] == 0


@pytest.fixture
def forwarding(world, box):
    """A peer whose router can forward its port."""
    world.members(SEEN, SEEN)
    box.forward = Mock(side_effect=lambda port: world.members(DIALLED, DIALLED) or FORWARDED)


def test_undialled_peer_asks_router_for_half_lease(forwarding, turn, box):
    reach, asked = turn(LOOK_EVERY_S)
    assert (reach.kind, reach.places, asked) == ("direct", (PUBLIC,), 1)  # at once, and looked at again
    assert turn(LEASE_S / 2 - LOOK_EVERY_S - 2.0)[1] == 1
    assert turn(2.0)[1] == 2
    box.forward.assert_called_with(PORT)


def test_forgotten_forwarding_is_renewed_at_once(forwarding, world, turn):
    assert turn()[0].kind == "direct"
    world.members(SEEN, SEEN)
    reach = Reach("direct", "A member has dialled this peer.", (PUBLIC,), (DIALLED, DIALLED))
    assert turn(LOOK_EVERY_S) == (reach, 2)


def test_useless_router_answer_is_reported(world, turn, box, finder):
    world.members(SEEN, SEEN)
    reach, asked = turn(4 * LOOK_EVERY_S)
    assert (reach.kind, asked, reach.places) == ("dials-out", 1, ())  # not at each look
    assert reach.why == f"{COULD_NOT} {NO_ROUTER.why}"
    box.forward.return_value = FORWARDED
    reach, asked = turn(LEASE_S / 2)
    assert asked == 2
    assert reach.why == f"{COULD_NOT} {FORWARDED.why} But no member could connect through it."
    assert finder.addresses() == []


def test_lone_peer_announces_forwarded_address(turn, box, finder):
    box.forward.return_value = FORWARDED
    reach, asked = turn(LOOK_EVERY_S)
    assert (reach.kind, reach.places, asked) == ("alone", (PUBLIC,), 1)
    assert "But no member" not in reach.why
    assert finder.addresses() == [ADDRESS]


def test_peer_that_wants_relay_asks_no_router(world, box):
    world.members(SEEN)
    ReachFinder(world.run, ReachRules("relay"), box).turn()
    assert not box.forward.called


@pytest.mark.parametrize("others", [[], [Multiaddr(ADDRESS)]])
def test_peer_without_lan_asks_no_router(world, turn, others):
    world.members(SEEN)
    world.visible = LISTENS[1:] + others
    assert turn()[1] == 0


def test_address_change_triggers_new_look(world, turn):
    world.members(SEEN)
    assert turn()[1] == world.look.await_count == 1
    world.visible = [Multiaddr(f"/ip4/10.0.0.7/tcp/{PORT}"), LISTENS[1]]
    for _ in range(2):
        assert turn()[1] == world.look.await_count == 2


@pytest.mark.parametrize(
    "rules, rate, punches",
    [
        (ReachRules(), None, True),
        (ReachRules("relay", 8.0), 1e6, False),
        (ReachRules("direct", 0.0), 0.0, True),
    ],
)
def test_meeting_follows_reach_rules(world, box, rules, rate, punches):
    ReachFinder(world.run, rules, box)
    reaches.Meeting.assert_called_once_with(world, [LOOPBACK, HOME], rate, punches=punches)


def test_peer_that_listens_nowhere_meets_none(world, box):
    world.listens = []
    ReachFinder(world.run, ReachRules(), box)
    assert world.meeting is None


def test_listening_places_match_open_sockets():
    with socket.create_server(("0.0.0.0", 0)) as one, socket.create_server(("127.0.0.2", 0)) as other:
        places = {("127.0.0.1", one.getsockname()[1]), other.getsockname()}
        assert places <= set(listening_places(os.getpid()))
    assert not places & set(listening_places(os.getpid()))
