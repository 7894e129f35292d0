"""How peers find their group: several `GroupFinder`s on the network and the clock of the simulation.

Harmful messages of leaders and followers: simulation/test_liar_in_a_round.py and test_failures.py.
"""

import asyncio
import hashlib
from functools import partial, wraps
from types import SimpleNamespace
from typing import AsyncIterator  # noqa: UP035 - hivemind recognizes a stream by typing's

import pytest
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time

from tests.kit.identities import id_of, key_of
from tests.simulation.network import Network, run_virtually
from trahiv_cli.rounds import matchmaking as group_finder
from trahiv_cli.rounds.claims import Claim
from trahiv_cli.rounds.matchmaking import SUSPECT_S, Blame
from trahiv_cli.rounds.vote import Vote

LONG_S = 60.0  # longer than any test: a search that ends did not wait for it
SHORT_S = 0.1
TINY_S = 0.025
LIMIT_S = 5.0


@pytest.fixture(autouse=True)
def _seconds_are_those_of_the_loop(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(group_finder, "time", clock)


class Peer(group_finder.GroupFinder, ServicerBase):
    """A peer of a test, which others call directly, without an averager."""

    def __init__(self, p2p, name, patience_s, is_client):
        self.id = id_of(name)
        self.wanted = 2
        self.is_client = is_client
        super().__init__(
            partial(Peer.get_stub, p2p, namespace="test"),
            self.id,
            key_of(name),
            prefix="test",
            tensors_schema=b"schema",
            is_client=is_client,
            patience_s=patience_s,
            request_timeout=min(LIMIT_S, patience_s),
        )

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        async for answer in self.admit(request, context.remote_id):
            yield answer

    def know(self, others, *, quorum=2, suffix=b""):
        """Expect `others`, and require a group of at least `quorum`."""
        self.wanted = quorum
        ids = [other.id for other in others if other is not self]
        self.expect(ids, [other.id for other in others if other.is_client], quorum, suffix)

    def look(self, limit_s=LIMIT_S):
        """Look for a group in the background."""
        claim = Claim(state=self.id.to_bytes()[:8], quorum=self.wanted)
        return asyncio.create_task(self.look_for_group(claim.to_bytes(), get_dht_time() + limit_s))


async def swarm(count, patience_s=LONG_S, *, clients=(), quorum=2):
    """Return peers in leader order that all know each other."""
    network = Network()
    peers = []
    for number in range(count):
        name = f"peer {number}"
        p2p = network.p2p_of(id_of(name))
        peers.append(Peer(p2p, name, patience_s, number in clients))
        if number not in clients:  # clients can't be called
            await peers[-1].add_p2p_handlers(p2p, namespace="test")
    peers.sort(key=lambda peer: hashlib.sha256(b"schema" + peer.id.to_bytes()).digest())
    meet(peers, quorum=quorum)
    return peers


def meet(peers, **options):
    """Have all peers know each other."""
    for peer in peers:
        peer.know(peers, **options)


def in_a_loop(scene):
    """Turn a coroutine into a test."""

    @wraps(scene)
    def test(*args, **options):
        run_virtually(scene(*args, **options))

    return test


async def require(expected, *searches):
    """Require that all searches end with a group of exactly these peers, or without one for None."""
    async with asyncio.timeout(2 * LIMIT_S):
        groups = await asyncio.gather(*searches)
    ids = expected and {peer.id for peer in expected}
    assert [group and set(group.peer_ids) for group in groups] == [ids] * len(searches)
    return groups


def look(peers, limit_s=LIMIT_S):
    return [peer.look(limit_s) for peer in peers]


async def require_group(peers):
    """Require that peers which look at the same time form one group, and return it as each sees it."""
    return await require(peers, *look(peers))


@pytest.mark.parametrize("count", [2, 8])
@in_a_loop
async def test_ready_peers_form_one_group(count):
    peers = await swarm(count)
    groups = await require_group(peers)
    [(_, ids, gathered)] = {(group.group_id, group.peer_ids, group.gathered) for group in groups}
    assert ids[0] == peers[0].id  # the first in order leads
    for peer, said in zip(ids, gathered, strict=True):
        assert peers[0].claim_of(peer, said).state == peer.to_bytes()[:8]
    meet(peers, suffix=b"next")
    with pytest.raises(ValueError, match="did not state this"):  # it was for the previous history
        peers[0].claim_of(ids[1], gathered[1])
    await require_group(peers)


@in_a_loop
async def test_group_with_earlier_claim_is_refused():
    leader, follower = await swarm(2)
    group, _ = await require_group([leader, follower])
    ids = [peer.to_bytes() for peer in group.peer_ids]
    answer = averaging_pb2.MessageFromLeader(ordered_peer_ids=ids, gathered=group.gathered)
    search = group_finder.Search(follower.schema, b"a newer claim", asyncio.Future())
    with pytest.raises(ValueError, match="with another claim"):
        follower._accepted(search, leader.id, answer)


@pytest.mark.parametrize(
    ("patience_s", "late_s", "soon_s"),
    [(LIMIT_S, 1.0, TINY_S), (TINY_S, 3.5 * TINY_S, LIMIT_S)],
    ids=["at its door", "until they wait for one another"],
)
@in_a_loop
async def test_followers_wait_for_late_leader(patience_s, late_s, soon_s):
    peers = await swarm(3, patience_s, quorum=3)
    searches = look(peers[1:])
    await asyncio.sleep(late_s)
    assert not any(search.done() for search in searches)
    async with asyncio.timeout(soon_s):
        await require(peers, peers[0].look(), *searches)


@pytest.mark.parametrize(
    ("patience_s", "quorum", "views"),
    [
        *((LONG_S, 2, ("0123", "0123", "0123", knows)) for knows in "012"),
        (LONG_S, 4, ("012", "012", "012", "0123")),
        (SHORT_S, 3, ("012", "12", "012")),
    ],
    ids=[*(f"one knows only {knows}" for knows in "012"), "nobody knows one", "two lead without a quorum"],
)
@in_a_loop
async def test_peers_with_different_views_meet(patience_s, quorum, views):
    peers = await swarm(len(views), patience_s)
    for peer, known in zip(peers, views, strict=True):
        peer.know([peers[int(place)] for place in known], quorum=quorum)
    await require_group(peers)


@pytest.mark.parametrize("ended", [0, 2, 3], ids=["the leader", "a follower", "one that never looked"])
@in_a_loop
async def test_departed_peer_is_in_no_group(ended):
    peers = await swarm(4)
    gone = peers[ended]
    searches = {peer: peer.look() for peer in peers[:3]}
    await asyncio.sleep(TINY_S / 2)  # until they wait at the door
    if gone in searches:
        searches.pop(gone).cancel()
        await asyncio.sleep(0)
    left = [peer for peer in peers if peer is not gone]
    for peer in peers:
        peer.know(left)
    await require(left, *(searches.get(peer) or peer.look() for peer in left))


@in_a_loop
async def test_suspect_is_not_waited_for():
    *others, suspect = peers = await swarm(3)
    for peer in others:
        peer.blame.suspect(suspect.id, "it is late")
    await require_group(others)
    came = suspect.look()
    await asyncio.sleep(TINY_S / 2)  # until it waits at the door
    await require(peers, came, *look(others))


@pytest.mark.parametrize(
    ("patience_s", "wants", "clients"),
    [(TINY_S, (3, 3), ()), (TINY_S, (2, 3), ()), (LONG_S, (2, 2), (0, 1))],
    ids=["both want a greater one", "a follower wants a greater one", "neither can be called"],
)
@in_a_loop
async def test_unacceptable_group_is_not_formed(patience_s, wants, clients):
    peers = await swarm(3 - bool(clients), patience_s, clients=clients)
    for peer, quorum in zip(peers, wants, strict=False):
        peer.know(peers, quorum=quorum)
    await require(None, *look(peers[:2], SHORT_S))


@in_a_loop
async def test_newer_view_misses_one_group_only():
    peers = await swarm(4)
    peers[2].know(peers, quorum=6)  # it knows two more peers than the others do
    newer = peers[2].look(SHORT_S)
    await require_group([peers[0], peers[1], peers[3]])
    await require(None, newer)
    meet(peers, suffix=b"next")
    await require_group(peers)


async def with_silent_leader(count):
    """Return peers, of which the first in order lets others in and forms no group."""
    peers = await swarm(count, SHORT_S)

    async def is_silent(request, context):
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        await asyncio.sleep(10 * LIMIT_S)

    peers[0].rpc_join_group = is_silent
    return peers


@in_a_loop
async def test_silent_leader_is_awaited_once():
    peers = await with_silent_leader(3)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await require_group(peers[1:])
    first = loop.time()
    assert first - began >= SHORT_S
    await require_group(peers[1:])
    assert loop.time() - first < 0.1 * SHORT_S


@pytest.mark.parametrize("delays_s", [(0.0, 0.33, 0.0), (0.0, 0.36, 0.03), (0.0, 0.33, 0.27)])
@in_a_loop
async def test_unpunctual_peers_abandon_silent_leader(delays_s):
    _, *others = peers = await with_silent_leader(4)
    meet(peers, quorum=3)

    async def come(peer, after_s):
        await asyncio.sleep(after_s)
        return await peer.look(2.0)

    await require(others, *map(come, others, delays_s))


@in_a_loop
async def test_search_remembers_silent_leader_at_deadline():
    peers = await with_silent_leader(3)
    await require(None, *look(peers[1:], 1.5 * SHORT_S))
    await require(peers[1:], *look(peers[1:], 1.5 * SHORT_S))


@in_a_loop
async def test_peers_at_different_steps_never_meet():
    peers = await swarm(4, SHORT_S)
    for peer, step in zip(peers, (b"1", b"2", b"1", b"3"), strict=True):
        peer.know(peers, suffix=step)
    one, alone, other, gone = look(peers, 8 * SHORT_S)
    await require(peers[:3:2], one, other)
    await require(None, alone, gone)


@pytest.mark.parametrize("place", [0, 1], ids=["who leads", "who follows"])
@in_a_loop
async def test_stale_search_ends_without_group(place):
    """The search for the previous step was not ended, or not in time."""
    peers = await swarm(2)
    stale = peers[place].look()
    await asyncio.sleep(SHORT_S)
    meet(peers, suffix=b"next")
    await require(None, stale)
    await require_group(peers)


@in_a_loop
async def test_search_ends_at_deadline():
    peers = await swarm(3, clients=(0, 1))
    await require(None, peers[0].look(0.0), peers[1].look(TINY_S))
    peers[0].know((), quorum=1)
    await require(peers[:1], peers[0].look(0.0))
    peers[0].know(peers)
    await require_group(peers)


PEERS = {name: PeerID(b"peer %s" % name.encode()) for name in "ABCL"}


@pytest.fixture
def blame(monkeypatch, clock):
    monkeypatch.setattr(group_finder, "time", SimpleNamespace(monotonic=clock))
    return Blame(PeerID.to_bytes)


def note(blame, is_committed=False, **blames):
    """Note a round of all: `A="L"` is sure to blame L, `A="L?"` may be mistaken, `A="L!"` says L is late."""
    votes = {peer: Vote(b"" if name in blames else b"average") for name, peer in PEERS.items()}
    for name, blamed in blames.items():
        whom = PEERS[blamed[0]].to_base58()
        is_sure = not blamed.endswith("?")
        is_late = blamed.endswith("!")
        votes[PEERS[name]] = Vote(blames=whom, is_sure=is_sure, is_late=is_late)
    blame.note_votes(tuple(PEERS.values()), votes, is_committed)


def test_call_clears_first_suspicion_only(blame):
    peer = PEERS["B"]
    for is_suspect in (False, True):
        blame.suspect(peer, "it did not come to a group")
        blame.note_call(peer)
        assert blame.is_suspect(peer) is is_suspect
    blame.note_group([peer], ())
    assert not blame.is_suspect(peer)


def excluded(blame):
    return "".join(name for name, peer in PEERS.items() if blame.is_excluded(peer))


@pytest.mark.parametrize(
    ("rounds", "whom"),
    [
        ([{"A": "L", "B": "L", "C": "L"}] * 2, "L"),
        ([{"A": "L!", "B": "L!", "C": "L!"}], "L"),  # a majority reports it as late
        ([{"A": "L", "B": "L", "L": "B"}] * 2, "L"),
        ([{"A": "L", "B": "A?", "C": "A?", "L": "A?"}] * 2, "L"),  # A noticed it first
        ([{"A": "L?", "B": "A?", "C": "L?"}] * 2, "L"),  # it ended its streams too early
        ([{"L": "A"}, {"L": "B"}, {"L": "C"}], "L"),  # it blames each in turn
        ([{"A": "B", "B": "A"}] * 2, "B"),  # they can't reach each other: the later in order
    ],
)
def test_blamed_or_blaming_member_is_excluded(blame, rounds, whom):
    for blames in rounds:
        assert excluded(blame) == ""
        note(blame, **blames)
    assert excluded(blame) == whom


def test_second_suspect_is_excluded_next(blame, clock):
    for _ in range(2):
        note(blame, A="L", B="L", L="B")
    clock.now += SUSPECT_S
    note(blame, A="B", C="B")
    assert excluded(blame) == "B"


def test_exclusion_time_doubles(blame, clock):
    def excluded_for():
        for _ in range(2):
            note(blame, A="L", B="L")
        left = blame.excluded_until[PEERS["L"]] - clock.now
        clock.now += left
        return left

    assert [excluded_for() for _ in range(3)] == [SUSPECT_S * times for times in (1, 2, 4)]
    note(blame, A="L", B="L")
    for _ in range(4):
        note(blame, is_committed=True)
    note(blame, A="L", B="L")
    assert excluded(blame) == "", "good rounds make up for one that failed"
    note(blame, A="L", B="L")
    assert blame.excluded_until[PEERS["L"]] - clock.now == 4 * SUSPECT_S
    clock.now += 4 * SUSPECT_S
    assert max(excluded_for() for _ in range(8)) == 1280.0


def is_late(blame, times=1):
    """Have the last of the peers miss groups; return whether it is suspect then."""
    *members, late = PEERS.values()
    for _ in range(times):
        blame.note_group(members, PEERS.values())
    return blame.is_suspect(late)


def test_two_missed_groups_raise_suspicion(blame, clock):
    assert not is_late(blame)
    assert is_late(blame)
    clock.now += SUSPECT_S
    assert not is_late(blame, times=0)
    assert is_late(blame)


def test_former_member_may_miss_more_groups(blame):
    for _ in range(2):
        blame.note_group(PEERS.values(), PEERS.values())
        assert not is_late(blame, 5)
    assert is_late(blame)


def test_exclusions_leave_majority(blame):
    blame.exclude(PEERS["A"], "it lies")
    for _ in range(4):
        note(blame, B="L", C="L")
    assert excluded(blame) == "A"
