"""How peers find their group: several `GroupFinder`s in one event loop, with calls instead of sockets."""

import asyncio
import math
import random
from types import SimpleNamespace

import pytest
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time

from tests.kit.identities import id_of, key_of
from trahiv_cli.optim import blame as blaming
from trahiv_cli.optim.ballot import Vote
from trahiv_cli.optim.blame import MOST_EXCLUDED_S, SUSPECT_S
from trahiv_cli.optim.group_finder import GroupFinder
from trahiv_cli.optim.soundness import Claim
from trahiv_cli.swarm.records import MAX_ID_BYTES
from trahiv_cli.swarm.statements import content_of, sign

LONG_S = 60.0
"""A patience that no test lives to see the end of: what ends sooner did not wait for it."""

SHORT_S = 0.1
LIMIT_S = 5.0


class Network:
    """Carries calls between assemblies: stands in for P2P's stubs, with faults to switch on."""

    def __init__(self):
        self.assemblies = {}
        self.unreachable, self.hung = set(), set()
        self.cuts = set()
        """Pairs that can't call each other, as frozensets."""
        self.delay = lambda: 0.0
        self.tamper = lambda caller, callee, answer: None
        """Changes what a callee answers."""
        self.at_the_door = []
        """(caller, callee) of everybody who was told to wait."""

    def get_stub(self, p2p, peer, namespace):
        return SimpleNamespace(rpc_join_group=lambda request: self._call(p2p.peer_id, peer, request))

    async def _call(self, caller, callee, request):
        await asyncio.sleep(self.delay())
        if callee in self.unreachable or frozenset({caller, callee}) in self.cuts:
            raise P2PDaemonError("no route")
        return self._answers(caller, callee, request)

    async def _answers(self, caller, callee, request):
        if callee in self.hung:
            await asyncio.Event().wait()
        answers = self.assemblies[callee].rpc_join_group(request, SimpleNamespace(remote_id=caller))
        try:
            async for answer in answers:
                await asyncio.sleep(self.delay())
                if answer.code == averaging_pb2.ACCEPTED:
                    self.at_the_door.append((caller, callee))
                self.tamper(caller, callee, answer)
                yield answer
        finally:
            await answers.aclose()


class Peer:
    """One peer of a test: its assembly, and how it looks for a group."""

    def __init__(self, network, name, *, patience_s, answer_s, client):
        self.id, self.key, self.quorum = id_of(name), key_of(name), 2
        self.assembly = network.assemblies[self.id] = GroupFinder(
            SimpleNamespace(peer_id=self.id),
            b"schema",
            SimpleNamespace(peer_id=self.id, signing_key=self.key),
            servicer_type=network,
            prefix="test",
            client_mode=client,
            min_matchmaking_time=patience_s,
            request_timeout=answer_s,
        )
        if client:
            network.unreachable.add(self.id)

    def expect(self, others, *, quorum=2, clients=(), suffix=b""):
        """Know of `others` and want a group of `quorum`."""
        self.quorum = quorum
        ids = [other.id for other in others if other is not self]
        self.assembly.expect(ids, [client.id for client in clients], quorum, suffix)

    @property
    def followers(self):
        """Those that wait for this peer to form their group."""
        search = self.assembly._search
        return search.followers if search else {}

    def look(self, limit_s=LIMIT_S):
        """Look for a group in the background."""
        claim = Claim(state=self.id.to_bytes()[:8], quorum=self.quorum)
        control = SimpleNamespace(deadline=get_dht_time() + limit_s, data_for_gather=claim.to_bytes())
        return asyncio.create_task(self.assembly.look_for_group(control))


def swarm(count, patience_s=LONG_S, *, answer_s=None, clients=()):
    """Peers in the order in which they would lead, all knowing each other, and what connects them."""
    network = Network()
    peers = [
        Peer(
            network,
            f"peer {number}",
            patience_s=patience_s,
            answer_s=answer_s or min(LIMIT_S, patience_s),
            client=number in clients,
        )
        for number in range(count)
    ]
    peers.sort(key=lambda peer: peer.assembly._order(peer.id))
    for peer in peers:
        peer.expect(peers)
    return network, peers


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def groups_of(*searches):
    """What came of searches: for each the members, or None."""
    async with asyncio.timeout(2 * LIMIT_S):
        groups = await asyncio.gather(*searches)
    return [group and set(group.peer_ids) for group in groups]


def ids(peers):
    return {peer.id for peer in peers}


# -- everybody is there ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 8])
def test_peers_that_are_ready_form_one_group_at_once(count):
    async def scene():
        _, peers = swarm(count)
        async with asyncio.timeout(LIMIT_S):
            return peers, await asyncio.gather(*(peer.look() for peer in peers))

    peers, groups = asyncio.run(scene())
    assert ids(peers) == set(groups[0].peer_ids)
    assert len({(g.group_id, g.peer_ids, g.gathered) for g in groups}) == 1
    assert groups[0].peer_ids[0] == peers[0].id  # the first in order leads
    gathered = dict(zip(groups[0].peer_ids, groups[0].gathered, strict=True))
    for peer in peers:
        assert peers[0].assembly.claim_of(peer.id, gathered[peer.id]).state == peer.id.to_bytes()[:8]


def test_the_same_peers_meet_again_and_again():
    async def scene():
        _, peers = swarm(4)
        for step in range(20):
            for peer in peers:
                peer.expect(peers, suffix=b"%d" % step)
            assert await groups_of(*(peer.look() for peer in peers)) == [ids(peers)] * 4

    asyncio.run(scene())


@pytest.mark.parametrize("seed", range(4))
def test_slow_calls_and_late_comers_end_in_one_group(seed):
    chance = random.Random(seed)

    async def scene():
        network, peers = swarm(5, 0.1)
        network.delay = lambda: chance.random() * 0.02
        searches = []
        for peer in chance.sample(peers, 5):
            peer.expect(peers, quorum=5)
            searches.append(peer.look())
            await asyncio.sleep(chance.random() * 0.05)
        assert await groups_of(*searches) == [ids(peers)] * 5

    asyncio.run(scene())


def test_followers_wait_at_the_door_of_a_leader_that_is_not_ready_yet():
    async def scene():
        network, peers = swarm(3, 1.0)
        first, *others = peers
        searches = [peer.look() for peer in others]
        await until(
            lambda: {caller for caller, callee in network.at_the_door if callee == first.id} == ids(others)
        )
        assert not any(search.done() for search in searches)
        calls = len(network.at_the_door)
        assert await groups_of(first.look(), *searches) == [ids(peers)] * 3
        assert len(network.at_the_door) == calls  # nobody had to ask again

    asyncio.run(scene())


def test_followers_that_waited_too_long_elsewhere_still_meet_a_late_leader():
    async def scene():
        network, peers = swarm(3, SHORT_S / 4)
        first, *others = peers
        for peer in peers:
            peer.expect(peers, quorum=3)
        searches = [peer.look() for peer in others]
        await until(lambda: any(callee != first.id for _, callee in network.at_the_door))
        assert await groups_of(first.look(), *searches) == [ids(peers)] * 3

    asyncio.run(scene())


# -- views differ ---------------------------------------------------------------------------------


@pytest.mark.parametrize("knows", [0, 1, 2])
def test_a_peer_that_knows_only_one_other_is_sent_to_the_leader(knows):
    async def scene():
        _, peers = swarm(4)
        peers[3].expect([peers[knows]])
        assert await groups_of(*(peer.look() for peer in peers)) == [ids(peers)] * 4

    asyncio.run(scene())


def test_a_peer_that_nobody_knows_is_taken_in_while_the_leader_waits():
    async def scene():
        _, peers = swarm(4)
        for peer in peers[:3]:
            peer.expect(peers[:3], quorum=4)
        peers[3].expect(peers)
        assert await groups_of(*(peer.look() for peer in peers)) == [ids(peers)] * 4

    asyncio.run(scene())


def test_two_that_both_lead_come_together_when_neither_has_a_quorum():
    async def scene():
        _, peers = swarm(3, SHORT_S)
        peers[0].expect(peers, quorum=3)
        peers[1].expect(peers[1:], quorum=3)  # does not know the first in order
        peers[2].expect(peers, quorum=3)
        assert await groups_of(*(peer.look() for peer in peers)) == [ids(peers)] * 3

    asyncio.run(scene())


def test_who_is_expected_may_change_while_a_leader_waits():
    async def scene():
        _, peers = swarm(3)
        searches = [peer.look() for peer in peers[:2]]
        await until(lambda: peers[0].followers)
        peers[0].expect(peers[:2])  # the third has said goodbye
        assert await groups_of(*searches) == [ids(peers[:2])] * 2

    asyncio.run(scene())


# -- somebody fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["unreachable", "hung"])
def test_the_next_in_order_leads_when_the_first_does_not_answer(fault):
    async def scene():
        network, peers = swarm(4, answer_s=SHORT_S)
        getattr(network, fault).add(peers[0].id)
        assert await groups_of(*(peer.look() for peer in peers[1:])) == [ids(peers[1:])] * 3

    asyncio.run(scene())


def test_a_group_stands_without_a_member_that_does_not_come():
    async def scene():
        _, peers = swarm(4, SHORT_S)
        assert await groups_of(*(peer.look() for peer in peers[:3])) == [ids(peers[:3])] * 3

    asyncio.run(scene())


def test_a_follower_that_was_cancelled_is_not_in_the_group():
    async def scene():
        _, peers = swarm(4)
        searches = [peer.look() for peer in peers[:3]]
        await until(lambda: len(peers[0].followers) == 2)
        searches[2].cancel()
        await until(lambda: len(peers[0].followers) == 1)
        for peer in peers:
            peer.expect([*peers[:2], peers[3]])
        joined = [searches[0], searches[1], peers[3].look()]
        assert await groups_of(*joined) == [ids(peers) - {peers[2].id}] * 3

    asyncio.run(scene())


def test_followers_of_a_leader_that_gives_up_look_elsewhere():
    async def scene():
        _, peers = swarm(3)
        searches = [peer.look() for peer in peers[:2]]
        await until(lambda: peers[0].followers)
        searches[0].cancel()
        for peer in peers[1:]:
            peer.expect(peers[1:])
        assert await groups_of(searches[1], peers[2].look()) == [ids(peers[1:])] * 2

    asyncio.run(scene())


def test_nobody_waits_for_a_suspect():
    async def scene():
        _, peers = swarm(3)
        for peer in peers[:2]:
            peer.assembly.blame.suspect(peers[2].id)
        assert await groups_of(*(peer.look() for peer in peers[:2])) == [ids(peers[:2])] * 2

    asyncio.run(scene())


def test_a_suspect_that_comes_by_itself_is_welcome():
    async def scene():
        network, peers = swarm(3)
        for peer in peers[:2]:
            peer.assembly.blame.suspect(peers[2].id)
        suspect = peers[2].look()
        await until(lambda: (peers[2].id, peers[0].id) in network.at_the_door)
        assert await groups_of(suspect, *(peer.look() for peer in peers[:2])) == [ids(peers)] * 3

    asyncio.run(scene())


# -- who must not meet ----------------------------------------------------------------------------


def test_a_group_smaller_than_the_quorum_is_not_formed():
    async def scene():
        _, peers = swarm(3, SHORT_S / 4)
        for peer in peers:
            peer.expect(peers, quorum=3)
        assert await groups_of(*(peer.look(SHORT_S) for peer in peers[:2])) == [None, None]

    asyncio.run(scene())


def test_a_leader_keeps_to_the_quorum_of_its_followers():
    async def scene():
        _, peers = swarm(3, SHORT_S / 4)
        peers[1].expect(peers, quorum=3)
        assert await groups_of(*(peer.look(SHORT_S) for peer in peers[:2])) == [None, None]

    asyncio.run(scene())


@pytest.mark.parametrize("quorum", [4, 2**16])
def test_who_wants_a_greater_group_than_comes_keeps_nobody_from_having_one(quorum):
    async def scene():
        _, peers = swarm(4, SHORT_S)
        peers[2].expect(peers, quorum=quorum)
        searches = [peer.look() for peer in peers[:2]]
        greedy = peers[2].look()
        assert await groups_of(*searches) == [ids(peers[:2])] * 2  # the fourth never came
        assert peers[0].assembly.blame.is_excluded(peers[2].id) == (quorum > 4)
        greedy.cancel()

    asyncio.run(scene())


def test_halves_that_are_cut_apart_form_no_group_until_they_meet_again():
    async def scene():
        network, peers = swarm(4, SHORT_S / 4)
        network.cuts = {frozenset({a.id, b.id}) for a in peers[:2] for b in peers[2:]}
        for peer in peers:
            peer.expect(peers, quorum=3)
        assert await groups_of(*(peer.look(SHORT_S) for peer in peers)) == [None] * 4
        searches = [peer.look() for peer in peers]
        network.cuts.clear()
        found = await groups_of(*searches)
        whole = [group for group in found if group]
        assert len(whole) >= 3  # one may look in vain while the others suspect it
        assert all(group == whole[0] for group in whole)

    asyncio.run(scene())


def test_peers_at_different_steps_never_meet():
    async def scene():
        _, peers = swarm(4, SHORT_S)
        for peer, step in zip(peers, (b"1", b"2", b"1", b"3"), strict=True):
            peer.expect(peers, suffix=step)
        expected = [ids([peers[0], peers[2]]), None, ids([peers[0], peers[2]]), None]
        assert await groups_of(*(peer.look(8 * SHORT_S) for peer in peers)) == expected

    asyncio.run(scene())


@pytest.mark.parametrize("place", [0, 1], ids=["who leads", "who follows"])
def test_what_a_peer_brings_to_one_step_is_not_taken_to_the_next(place):
    """Its search for the step before was not ended, or not in time."""

    async def scenario():
        _, peers = swarm(2)
        one, other = peers[place], peers[1 - place]
        stale = one.look()
        await asyncio.sleep(SHORT_S)
        for peer in peers:
            peer.expect(peers, suffix=b"next")
        assert await asyncio.wait_for(stale, LIMIT_S) is None
        groups = await asyncio.wait_for(asyncio.gather(one.look(), other.look()), LIMIT_S)
        assert {frozenset(group.peer_ids) for group in groups} == {frozenset({one.id, other.id})}

    asyncio.run(scenario())


def test_peers_that_others_can_not_call_are_led_and_never_lead():
    async def scene():
        _, peers = swarm(3, clients=(0, 1))
        clients = [peer for peer in peers if peer.assembly._is_client]
        for peer in peers:
            peer.expect(peers, clients=clients)
        groups = await groups_of(*(peer.look() for peer in peers))
        assert groups == [ids(peers)] * 3

    asyncio.run(scene())


def test_two_that_others_can_not_call_find_no_group():
    async def scene():
        _, peers = swarm(2, clients=(0, 1))
        for peer in peers:
            peer.expect(peers, clients=peers)
        assert await groups_of(*(peer.look(SHORT_S) for peer in peers)) == [None, None]

    asyncio.run(scene())


def test_a_search_ends_at_its_deadline():
    async def scene():
        _, peers = swarm(2)
        assert await groups_of(peers[0].look(0.0), peers[1].look(SHORT_S / 4)) == [None, None]
        assert await groups_of(*(peer.look() for peer in peers)) == [ids(peers)] * 2

    asyncio.run(scene())


def test_a_peer_that_wants_a_round_of_its_own_is_a_group_at_once():
    async def scene():
        _, peers = swarm(2)
        peers[0].expect((), quorum=1)
        assert await groups_of(peers[0].look(0.0)) == [{peers[0].id}]
        peers[0].expect(peers)
        assert await groups_of(*(peer.look() for peer in peers)) == [ids(peers)] * 2

    asyncio.run(scene())


# -- what others say ------------------------------------------------------------------------------


def changed(change):
    """A leader's message with the group, of which `change` gets the members and what each claims."""

    def tamper(caller, callee, answer):
        if answer.code == averaging_pb2.BEGIN_ALLREDUCE:
            said = list(zip(answer.ordered_peer_ids, answer.gathered, strict=True))
            said = change(said, caller.to_bytes(), callee)
            answer.ordered_peer_ids[:], answer.gathered[:] = zip(*said, strict=True)

    return tamper


def forged(said, victim, leader):
    """The claim of another member than the one that is told, as if the leader had signed in its name."""
    whole = Claim(norm=math.inf).to_bytes()
    return [
        (peer, sign(key_of("liar"), b"trahiv: a claim in test for schema", whole))
        if peer not in (victim, leader.to_bytes())
        else (peer, claim)
        for peer, claim in said
    ]


CHANGES = {
    "a claim is forged": forged,
    "claims are exchanged": lambda said, *_: [
        (peer, said[number - 1][1]) for number, (peer, _) in enumerate(said)
    ],
    "a claim is another one's": lambda said, *_: [(peer, said[0][1]) for peer, _ in said],
    "claims are none": lambda said, *_: [(peer, content_of(claim)) for peer, claim in said],
    "who is told is left out": lambda said, victim, _: [one for one in said if one[0] != victim],
    "the leader is left out": lambda said, _, leader: [one for one in said if one[0] != leader.to_bytes()],
    "a member is in it twice": lambda said, *_: [*said, said[-1]],
    "a member is made up": lambda said, *_: [*said, (id_of("nobody").to_bytes(), said[-1][1])],
    "one's own claim is an older one": lambda said, victim, _: [
        (peer, OLDER[victim] if peer == victim else claim) for peer, claim in said
    ],
}
OLDER = {
    id_of(f"peer {number}").to_bytes(): sign(
        key_of(f"peer {number}"), b"trahiv: a claim in test for schema", Claim(samples=9).to_bytes()
    )
    for number in range(3)
}


def require_that_the_leader_is_left_and_set_aside(tamper):
    """Have one of three lead, whose answers are tampered with: the others go on without it."""

    async def scene():
        network, peers = swarm(3, SHORT_S)
        network.tamper = tamper
        liar, *others = peers
        searches = [peer.look() for peer in others]
        await until(lambda: len(network.at_the_door) >= 2)
        liar.look()
        await until(lambda: all(peer.assembly.blame.is_excluded(liar.id) for peer in others))
        network.tamper = lambda *_: None
        assert await groups_of(*searches) == [ids(others)] * 2

    asyncio.run(scene())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_who_leads_a_group_that_can_not_be_is_left_and_set_aside(change):
    require_that_the_leader_is_left_and_set_aside(changed(change))


def test_who_sends_others_on_to_what_is_no_peer_s_id_is_set_aside():
    def tamper(caller, callee, answer):
        if answer.code == averaging_pb2.BEGIN_ALLREDUCE:
            answer.code, answer.suggested_leader = averaging_pb2.GROUP_DISBANDED, bytes(MAX_ID_BYTES + 1)

    require_that_the_leader_is_left_and_set_aside(tamper)


@pytest.mark.parametrize(
    "statement",
    [
        b"",
        Claim().to_bytes(),
        sign(key_of("liar"), b"trahiv: a claim in test for schema", Claim().to_bytes()),
        sign(key_of("peer 2"), b"trahiv: a claim in test for another step", Claim().to_bytes()),
        sign(key_of("peer 2"), b"trahiv: a claim in test for schema", b"no claim"),
    ],
    ids=["nothing", "not signed", "signed by another", "about another step", "not a claim"],
)
def test_who_follows_with_a_claim_that_is_none_is_not_let_in(statement):
    async def scene():
        network, peers = swarm(3, SHORT_S)
        liar = next(peer for peer in peers if peer.id == id_of("peer 2"))
        leader, other = (peer for peer in peers if peer is not liar)
        searches = [peer.look() for peer in (leader, other)]
        await until(lambda: network.at_the_door)
        request = averaging_pb2.JoinRequest(schema_hash=leader.assembly.schema, gather=statement)
        answers = network._answers(liar.id, leader.id, request)
        codes = [answer.code async for answer in answers]
        assert codes == [averaging_pb2.ACCEPTED, averaging_pb2.GROUP_DISBANDED]
        assert leader.assembly.blame.is_excluded(liar.id)
        assert await groups_of(*searches) == [ids((leader, other))] * 2

    asyncio.run(scene())


# -- of whom rounds fail --------------------------------------------------------------------------

PEERS = {name: PeerID(b"peer %s" % name.encode()) for name in "ABCL"}


@pytest.fixture
def assembly():
    _, [peer] = swarm(1)
    return peer.assembly


def note(assembly, is_committed=False, **blames):
    """A round of all: `A="L"` is sure that it failed of L, `A="L?"` may be mistaken."""
    votes = {peer.to_base58(): Vote(b"" if name in blames else b"average") for name, peer in PEERS.items()}
    for name, blamed in blames.items():
        whom = PEERS[blamed[0]].to_base58()
        votes[PEERS[name].to_base58()] = Vote(blames=whom, is_sure=not blamed.endswith("?"))
    assembly.blame.note_votes(tuple(PEERS.values()), votes, is_committed)


def set_aside(assembly):
    return {name for name, peer in PEERS.items() if assembly.blame.is_excluded(peer)}


@pytest.mark.parametrize(
    "blames",
    [
        {"A": "L", "B": "L", "C": "L"},
        {"A": "L", "B": "L", "L": "B"},
        {"A": "L", "B": "A?", "C": "A?", "L": "A?"},  # A was the first to see it
        {"A": "L?", "B": "A?", "C": "L?"},  # it ended its streams too early
    ],
)
def test_of_whom_two_rounds_fail_is_let_into_no_group(assembly, blames):
    note(assembly, **blames)
    assert set_aside(assembly) == set()
    note(assembly, **blames)
    assert set_aside(assembly) == {"L"}


def test_who_blames_one_after_the_other_is_let_into_no_group(assembly):
    for blamed in "ABC":
        assert set_aside(assembly) == set()
        note(assembly, L=blamed)
    assert set_aside(assembly) == {"L"}


def test_rounds_that_come_to_pass_make_up_for_one_that_did_not(assembly):
    note(assembly, A="L", B="L")
    for _ in range(4):
        note(assembly, is_committed=True)
    note(assembly, A="L", B="L")
    assert set_aside(assembly) == set()


def test_of_two_that_do_not_reach_each_other_one_is_set_aside_and_the_same_for_all(assembly):
    _, [other] = swarm(1)
    for one in (assembly, other.assembly):
        for _ in range(2):
            note(one, A="B", B="A")
    assert len(set_aside(assembly)) == 1 and set_aside(other.assembly) == set_aside(assembly)


def test_each_time_it_is_for_twice_as_long_and_good_rounds_make_up_for_one(assembly, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(blaming, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def aside_for():
        for _ in range(2):
            note(assembly, A="L", B="L")
        left = assembly.blame.excluded_until[PEERS["L"]] - now[0]
        now[0] += left
        return left

    assert [aside_for() for _ in range(3)] == [SUSPECT_S * times for times in (1, 2, 4)]
    for _ in range(4):
        note(assembly, is_committed=True)
    assert aside_for() == 4 * SUSPECT_S
    assert max(aside_for() for _ in range(8)) == MOST_EXCLUDED_S
