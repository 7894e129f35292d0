"""How others reach a peer: conclusions from members' answers, and when members and router are asked."""

import asyncio
import os
import socket
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.swarm import reach as reaches
from trahiv_cli.swarm.meeting import Seen
from trahiv_cli.swarm.pipes import NotMet
from trahiv_cli.swarm.reach import (
    LOOK_EVERY_ALONE_S,
    LOOK_EVERY_S,
    LOOKS,
    Reach,
    ReachFinder,
    ReachRules,
    believed,
    find_reach,
    list_node,
    listening_places,
    servers_of,
)
from trahiv_cli.swarm.router import LEASE_S, Forwarded

PORT = 4001
HOME, PUBLIC, NEAR = ("192.168.1.20", PORT), ("5.5.5.1", PORT), ("192.168.1.21", PORT)
LISTENS = tuple(Multiaddr(f"/ip4/{host}/tcp/{PORT}") for host in ("192.168.1.20", "127.0.0.1"))
NO_ROUTER = Forwarded("", "No router answers here that could forward a port (UPnP).")
FORWARDED = Forwarded(PUBLIC[0], f"The router forwards port {PORT} from {PUBLIC[0]}.")


def made_up(number):
    return PeerID(b"\x12\x20" + bytes(31) + bytes([number]))


ME, PEERS = made_up(0), tuple(map(made_up, range(1, 10)))


def seen(*places, dialled=(), carries=True):
    return Seen(places, dialled, carries)


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ([], ()),
        ([seen(PUBLIC)], ()),
        ([seen(PUBLIC, dialled=(PUBLIC,))], (PUBLIC,)),
        ([seen(PUBLIC, dialled=(PUBLIC,)), seen(("5.5.5.1", 9))], (PUBLIC,)),
        ([seen(PUBLIC, dialled=(PUBLIC,)), seen(("5.5.5.2", PORT))], ()),  # seen by no other member
        ([seen(PUBLIC, ("5.5.5.1", 9), dialled=(PUBLIC,)), seen(("5.5.5.2", PORT))], ()),  # twice, by one
        ([seen(HOME, dialled=(HOME,)), seen(("5.5.5.2", PORT))], ()),  # from its own network
        ([seen(HOME, dialled=(HOME,)), seen(("192.168.1.1", 9))], (HOME,)),  # its own, which it knows
        ([seen(HOME, dialled=(HOME,)), seen(PUBLIC, dialled=(PUBLIC,)), seen(PUBLIC)], (PUBLIC,)),
        ([seen(HOME, NEAR, dialled=(HOME, NEAR))], (HOME, NEAR)),
    ],
)
def test_only_confirmed_places_are_believed(looks, told):
    assert believed(looks, LISTENS) == told


class World:
    """Stands in for p2pd and for the members; a test sets how these see the node."""

    def __init__(self):
        self.visible, self.servers, self.connected = list(LISTENS), [], []
        self.looks, self.by_way, self.pinged, self.made = {}, {}, [], None
        self.protocol = SimpleNamespace(
            p2p=self, client_mode=False, is_listed=False, list_node=self.note, call_ping=self.ping
        )
        self._child, self.listens = self, [HOME, ("127.0.0.1", PORT)]
        self.pid = 0
        self.peer_id, self.meeting, self.may_be_relayed, self.asked = ME, None, False, 0

    def run(self, coroutine):
        self.protocol.routing_table = SimpleNamespace(peer_id_to_uid=dict.fromkeys([ME, *self.servers]))
        return asyncio.run(coroutine(None, self))

    def note(self, *, is_listed):
        self.protocol.is_listed = is_listed

    async def ping(self, peer, strict):
        assert not strict
        self.pinged.append(peer)

    async def list_peers(self):
        return [SimpleNamespace(peer_id=peer) for peer in self.connected]

    async def get_visible_maddrs(self, latest):
        return self.visible

    def meet_by(self, p2p, listens, relay_rate, punches):
        """Stand in for the `Meeting` that a node makes."""
        self.made = listens, relay_rate, punches
        return self

    async def open(self): ...

    async def look(self, member):
        self.asked += 1
        if isinstance(found := self.looks[member], Exception):
            raise found
        return found

    async def ways(self):
        return self.by_way

    def members(self, *looks):
        """Have one member for each of these looks."""
        self.servers = list(PEERS[: len(looks)])
        self.looks = dict(zip(self.servers, looks, strict=True))


@pytest.fixture
def world(monkeypatch):
    made = World()
    monkeypatch.setattr(reaches, "Meeting", made.meet_by)
    monkeypatch.setattr(reaches, "listening_places", lambda pid: made.listens)
    return made


def found(world, wanted="auto", *, is_visitor=False):
    world.meeting = world
    return world.run(lambda dht, node: find_reach(wanted, is_visitor, dht, node))


COULD_NOT = "Of the members, 2 tried to dial this peer, and could not."
ONLY_DIALS = f"{COULD_NOT} No member relays for it, so it averages only with peers that it can dial."


@pytest.mark.parametrize(
    ("dialled", "carries", "ways", "kind", "why"),
    [
        ((PUBLIC,), False, ["relayed"], "direct", "A member has dialled this peer."),
        ((), True, ["punched"], "punched", "Hole punching through the routers works."),
        ((), True, ["punched", "relayed"], "relayed", "Some peers reach this one through a relaying member."),
        ((), False, ["relayed"], "relayed", "Some peers reach this one through a relaying member."),
        ((), True, [], "dials-out", COULD_NOT),
        ((), False, [], "dials-out", ONLY_DIALS),
    ],
)
def test_member_answers_determine_reach(world, dialled, carries, ways, kind, why):
    world.by_way = dict(zip(PEERS, ways, strict=False))
    world.members(seen(PUBLIC, dialled=dialled), seen(PUBLIC, carries=carries))
    if not carries:
        world.looks[PEERS[0]] = seen(PUBLIC, dialled=dialled, carries=False)
    reach = found(world)
    assert (reach.kind, reach.why, reach.places) == (kind, why, dialled) and len(reach.looks) == 2
    assert reach.only_dials is (why == ONLY_DIALS) and world.protocol.is_listed is bool(dialled)


def test_lone_node_is_listed_but_visitor_never(world):
    alone = Reach("alone", "No other peer is there to dial this one.")
    for peers in ((), (NotMet("no"), TimeoutError())):
        world.members(*peers)
        for is_visitor in (True, False):
            assert found(world, is_visitor=is_visitor) == alone
            assert world.protocol.is_listed is not is_visitor
        world.note(is_listed=False)
    world.members(seen(PUBLIC, dialled=(PUBLIC,)))
    assert found(world, is_visitor=True).kind == "direct" and not world.protocol.is_listed


@pytest.mark.parametrize(
    ("wanted", "kind", "asked"), [("auto", "direct", 1), ("direct", "direct", 0), ("relay", "relayed", 1)]
)
def test_user_may_choose_reach(world, wanted, kind, asked):
    world.members(seen(PUBLIC, dialled=(PUBLIC,)))
    world.by_way = {PEERS[1]: "relayed"}
    reach = found(world, wanted)
    assert reach.kind == kind and world.asked == asked
    assert world.protocol.is_listed is (kind == "direct")
    assert wanted != "direct" or reach.why == "It was started with --reach direct."
    world.protocol.client_mode = True
    assert found(world, wanted) == Reach("dials-out", "It only dials out, as its user wants.")


def test_few_dialable_members_are_asked(world):
    world.members(*[seen(PUBLIC)] * 9)
    assert len(found(world).looks) == world.asked == LOOKS
    servers = [servers_of(world) for _ in range(20)]
    assert all(sorted(one) == list(PEERS) for one in servers) and len(set(map(tuple, servers))) > 1
    world.servers, world.connected = [], list(PEERS[:2])
    assert len(found(world).looks) == 2


def test_connected_peers_learn_of_listing(world):
    def be_listed(is_listed):
        world.pinged.clear()
        world.run(lambda dht, node: list_node(node, world.servers, is_listed=is_listed))
        return sorted(world.pinged)

    world.servers, world.connected = list(PEERS[:2]), list(PEERS[1:4])
    assert be_listed(False) == [] and be_listed(True) == list(PEERS[:4]) and be_listed(True) == []
    assert be_listed(False) == [] and not world.protocol.is_listed


class Box:
    """A router; a test sets its answer, and in which worlds (`then`) members can dial this peer then."""

    def __init__(self):
        self.said, self.asked, self.then = NO_ROUTER, 0, ()

    def forward(self, port):
        assert port == PORT
        self.asked += 1
        for world in self.then:
            world.members(*[seen(PUBLIC, dialled=(PUBLIC,))] * 2)
        return self.said


@pytest.fixture
def box():
    return Box()


@pytest.fixture
def turn(world, box, clock):
    """Take turns for some seconds; return the reach known then, and how often the router was asked."""
    made = []

    def turn(seconds=0.0, rules=ReachRules()):  # noqa: B008
        if not made:
            made.append(ReachFinder(world, rules, box, clock=clock))
        until = clock.now + seconds
        made[0].turn()
        while clock.now < until:
            clock.now += 2.0
            made[0].turn()
        world.finder = made[0]
        return made[0].reach, box.asked

    return turn


def test_lone_peer_asks_members_more_often(world, turn):
    world.members(seen(PUBLIC, dialled=(PUBLIC,)))
    turn(4 * LOOK_EVERY_S)
    assert world.asked == 5
    world.members(NotMet("it is gone"))
    turn(LOOK_EVERY_S)
    assert turn()[0].kind == "alone"
    world.asked = 0
    turn(4 * LOOK_EVERY_ALONE_S)
    assert world.asked == 4
    world.members(seen(PUBLIC, dialled=(PUBLIC,)))
    reach, _ = turn(LOOK_EVERY_ALONE_S)
    assert reach.kind == "direct" and world.finder.addresses() == [f"/ip4/5.5.5.1/tcp/{PORT}"]


def test_first_answer_allows_relaying(world, turn, clock, box):
    finder = ReachFinder(world, ReachRules(), box, clock=clock)
    assert finder.reach.kind == "alone" and not finder.is_known.is_set() and not world.may_be_relayed
    finder.turn()
    assert finder.is_known.is_set() and world.may_be_relayed


def test_only_undialled_peer_asks_router(world, turn, box):
    world.members(seen(PUBLIC, dialled=(PUBLIC,)))
    assert turn(LEASE_S)[1] == 0
    world.members(seen(PUBLIC), seen(PUBLIC))
    box.said, box.then = FORWARDED, [world]
    reach, asked = turn(LOOK_EVERY_S)
    assert (reach.kind, reach.places, asked) == ("direct", (PUBLIC,), 1), "at once, and looked at again"
    assert turn(LEASE_S / 2 - 2.0)[1] == 1 and turn(4 * LOOK_EVERY_S)[1] == 2


def test_forgotten_forwarding_is_renewed_at_once(world, turn, box):
    world.members(seen(PUBLIC), seen(PUBLIC))
    box.said, box.then = FORWARDED, [world]
    assert turn()[0].kind == "direct"
    world.members(seen(PUBLIC), seen(PUBLIC))
    assert turn(LOOK_EVERY_S) == (
        Reach("direct", "A member has dialled this peer.", (PUBLIC,), (*world.looks.values(),)),
        2,
    )


def test_useless_router_answer_is_reported(world, turn, box):
    world.members(seen(PUBLIC), seen(PUBLIC))
    reach, asked = turn(4 * LOOK_EVERY_S)
    assert (reach.kind, asked, reach.places) == ("dials-out", 1, ()), "not at each look"
    assert reach.why == f"{COULD_NOT} {NO_ROUTER.why}"
    box.said = FORWARDED
    reach, asked = turn(LEASE_S / 2)
    assert asked == 2 and reach.why == f"{COULD_NOT} {FORWARDED.why} But no member could connect through it."
    assert world.finder.addresses() == []


def test_lone_peer_announces_forwarded_address(world, turn, box):
    box.said = FORWARDED
    reach, asked = turn(LOOK_EVERY_S)
    assert (reach.kind, reach.places, asked) == ("alone", (PUBLIC,), 1) and "But no member" not in reach.why
    assert world.finder.addresses() == [f"/ip4/5.5.5.1/tcp/{PORT}"]


@pytest.mark.parametrize("visible", [LISTENS[1:], (*LISTENS[1:], Multiaddr(f"/ip4/5.5.5.1/tcp/{PORT}"))])
def test_peer_without_lan_asks_no_router(world, turn, box, visible):
    world.members(seen(PUBLIC))
    assert turn(LEASE_S, ReachRules("relay"))[1] == 0
    world.visible = list(visible)
    assert ReachFinder(world, ReachRules(), box).turn() is None and box.asked == 0


def test_address_change_triggers_new_look(world, turn, box):
    world.members(seen(PUBLIC))
    assert turn()[1] == world.asked == 1
    world.visible = [Multiaddr(f"/ip4/10.0.0.7/tcp/{PORT}"), LISTENS[1]]
    assert turn()[1] == world.asked == 2
    assert turn()[1] == world.asked == 2, "once"


@pytest.mark.parametrize(
    ("rules", "rate", "punches"),
    [
        (ReachRules(), None, True),
        (ReachRules("relay", 8.0), 1e6, False),
        (ReachRules("direct", 0.0), 0.0, True),
    ],
)
def test_meeting_follows_reach_rules(world, box, rules, rate, punches):
    ReachFinder(world, rules, box)
    assert world.made == ([("127.0.0.1", PORT), HOME], rate, punches)
    world.listens = []
    ReachFinder(world, rules, box)
    assert world.meeting is None, "it listens nowhere"


def test_listening_places_match_open_sockets():
    with socket.create_server(("0.0.0.0", 0)) as one, socket.create_server(("127.0.0.2", 0)) as other:
        places = {("127.0.0.1", one.getsockname()[1]), other.getsockname()}
        assert places <= set(listening_places(os.getpid()))
    assert not places & set(listening_places(os.getpid()))
