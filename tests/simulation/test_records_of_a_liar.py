"""False DHT records and node messages of one member: others continue, and joiners enter.

Each test takes a genuine record of the lying member and changes one field after the other
(`tests.kit.lies`). The member signs it, and real components of the others read it over a DHT in memory.
"""

import asyncio
import contextlib
import json
import zlib
from types import SimpleNamespace

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from tests.kit.lies import VALUES, lies, message_edits
from tests.simulation.board import INVITED, OWNER, Board, Dht, InMemory, id_of, key_of
from tests.simulation.network import Network, altered, edited, run_virtually
from trahiv_cli.clock import swarm_time
from trahiv_cli.members.membership import mark_of
from trahiv_cli.members.policy_book import Credentials, PolicyBook
from trahiv_cli.members.records import ignore_peer
from trahiv_cli.net.addresses import is_address_of
from trahiv_cli.net.keys import ADDRESSES_KEY, RUNS_KEY, likeness_key, recipe_key
from trahiv_cli.progress.committed import Committed, CommittedCell
from trahiv_cli.progress.leases import Leases
from trahiv_cli.progress.ledger import Ledger, Spans
from trahiv_cli.progress.tracker import ALONE_EVERY_S, SwarmTracker
from trahiv_cli.progress.trust import CREDIT_MARGIN, FORK_S, MinorityWatch, Plausibility
from trahiv_cli.recipe.agreement import resolve
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import pack, to_wire
from trahiv_cli.step.position import MOST_ROUNDS_AHEAD
from trahiv_cli.swarm.corrections.nodes import CorrectedProtocol
from trahiv_cli.swarm.known_peers import KnownPeers
from trahiv_cli.swarm.member_list import MEMBERS_KEY, POLICY_KEY, MemberList, read_members
from trahiv_cli.swarm.published_run import fetch_offer, publish_run
from trahiv_cli.swarm.reconnector import Reconnector
from trahiv_cli.swarm.status import Status, publish_status
from trahiv_cli.train.comparison import Comparison

KEY = "run_progress"
HONEST = "ABC"
LIAR = "D"
MEMBERS = (*HONEST, LIAR)
NEWCOMER = "N"
RECIPE = resolve(load_recipe("quickstart", ["hivemind_config.opt.run_id=run-1"]).recipe)
TARGET = 24
ROUND_S = 20.0


class Peer:
    """A peer's knowledge of the others, the data and the history, connected as the optimizer does."""

    def __init__(self, board, name, clock):
        self.id = id_of(name)
        self.dht = Dht(board, key_of(name))
        self.ledger = Ledger()
        self.committed = CommittedCell(Committed())
        self.tracker = SwarmTracker(
            self.dht,
            "run",
            TARGET,
            private_key=key_of(name),
            start=False,
            committed=self.committed,
            is_out=lambda peer: False,
        )
        self.tracker.shutdown_complete.set()
        self.tracker.plausibility = Plausibility(clock)
        self.tracker._minority_watch = MinorityWatch(clock)
        self.leases = Leases(self.tracker, lambda: self.ledger, 1000, pause_s=0.005, patience_s=5.0)
        self.tracker.announce()
        self.work = []

    def train(self, count):
        self.work = [self.leases.take() for _ in range(count)]
        if self.leases._running is not None:
            self.leases._running.exception(5)
        self.tracker.report_local_progress(self.tracker.history.step, count)
        self.tracker.announce()

    def commit(self, brought):
        """Commit a round; `brought` maps members' names to their positions."""
        samples = {id_of(name): len(positions) for name, positions in brought.items()}
        reported = dict.fromkeys((mate.peer_id for mate in self.tracker.mates if mate.samples), 0)
        proof = json.dumps(brought).encode()
        history = self.tracker.history.extend(samples=sum(samples.values()), proof=proof)
        self.tracker.plausibility.commit(history.step, reported | samples, TARGET)
        trained = [Spans.of_positions(positions) for positions in brought.values()]
        self.ledger = self.ledger.extend(trained, MOST_ROUNDS_AHEAD * TARGET)
        with self.tracker.pause_updates():
            self.committed.change(history=history, group=frozenset(samples))
            self.tracker.begin_step()
        self.leases.settle(Spans.of_positions(self.work))
        self.tracker.attest(history, common_of(history))
        self.tracker.announce()


def common_of(history):
    return history.digest[::-1]  # digest of the common state


class Swarm:
    def __init__(self, clock):
        self.board = Board()
        self.clock = clock
        self.trained = []
        self.peers = {name: Peer(self.board, name, clock) for name in MEMBERS}
        self.honest = [self.peers[name] for name in HONEST]
        self.liar = self.peers[LIAR]
        self.told = []
        for _ in range(3):
            self.go_on(MEMBERS)

    def go_on(self, members):
        self.clock.now += ROUND_S
        for name in members:
            self.peers[name].train(TARGET // len(members))
        for name in members:
            self.peers[name].tracker.refresh()
        for peer in self.honest:
            assert peer.tracker.ready_to_update_epoch
        brought = {name: self.peers[name].work for name in members}
        positions = [position for work in brought.values() for position in work]
        assert len(set(positions)) == len(positions), "no two train the same"
        self.trained += positions
        for peer in self.peers.values():
            peer.commit(brought)
            assert Ledger.from_wire(json.loads(json.dumps(peer.ledger.to_wire()))) == peer.ledger
            assert peer.ledger == Ledger(Spans.of_positions(self.trained)), "each sample once"
        assert len({peer.tracker.history for peer in self.honest}) == 1, "one history"
        self.told = [*self.told[-1:], self.liar.dht.told[KEY]][-2:]

    def refresh(self):
        """Have all others read the reports; return whether any accepts the liar's."""
        assert all(peer.tracker.refresh() for peer in self.honest)
        return any(self.liar.id in {other.peer_id for other in peer.tracker.others} for peer in self.honest)

    def check(self):
        """Require all honest peers to be as without the liar, or within the bounds of docs/security.md."""
        history = self.honest[0].tracker.history
        for peer in self.honest:
            tracker = peer.tracker
            others = {other.peer_id for other in peer.tracker.others}
            assert others >= {other.id for other in self.honest} - {peer.id}, "all honest ones are there"
            assert tracker.target == history
            assert not tracker.is_behind
            held = sum(other.tracker.local_progress.samples_accumulated for other in self.honest)
            credit = round(CREDIT_MARGIN * tracker.plausibility._credit[self.liar.id] * TARGET)
            assert held <= tracker.samples_accumulated <= held + credit
            assert tracker._report_every_s() <= ALONE_EVERY_S
            assert tracker.global_progress.next_fetch_time <= swarm_time() + tracker.max_refresh_period
            assert tracker.view.holds(history, common_of(history))

    def newcomer(self):
        """Have a joiner read everything from scratch and reach the same state."""
        history = self.honest[0].tracker.history
        one = Peer(self.board, NEWCOMER, self.clock)
        one.tracker.refresh()
        assert self.honest[0].tracker.past.passed_through(one.tracker.target), "from there it follows"
        assert one.tracker.view.believes(history)
        assert one.tracker.view.holds(history, common_of(history), is_final=True)
        with one.tracker.pause_updates():
            one.committed.change(history=history)
            one.tracker.begin_step(is_next=False)
        one.tracker.plausibility.join()
        assert one.tracker.target == history
        del self.board.records[KEY][one.dht.place]


@pytest.fixture
def swarm(clock):
    return Swarm(clock)


GARBAGE = {
    "nothing": b"",
    "no MessagePack": b"\xc1",
    "an open list": b"\x91",
    "a map of many": b"\xdf\xff\xff\xff\xff",
    "a list for a key": b"\x81\x90\x01",
    "deep": b"\x91" * 2000,
    "a dictionary of hivemind's": b"\xc7\x01Q\x90",
    "no text": b"\xa1\xff",
}


def test_false_reports_are_harmless(swarm, caplog):
    def named():
        """Return the peers that the log names."""
        text = " ".join(record.getMessage() for record in caplog.records)
        return {name for name in (*MEMBERS, NEWCOMER) if id_of(name) in text}

    number = 0
    told = [*GARBAGE.items()]
    while number < len(told):
        older, own = swarm.told
        told = [*GARBAGE.items(), *lies(own, swarm.honest[0].dht.told[KEY], older)]
        what, lie = told[number]
        is_garbage = number < len(GARBAGE)
        packed = lie if is_garbage else MSGPackSerializer.dumps(lie)
        number += 1
        caplog.clear()
        ignore_peer.cache_clear()
        # A record that is too long with its 370-byte signature is refused unread; a goodbye is not a lie.
        is_silent = lie is None or len(packed) > 3230
        try:
            swarm.liar.dht.put(KEY, packed)
            is_taken = swarm.refresh()
            swarm.check()
            swarm.clock.now += FORK_S
            swarm.refresh()
            swarm.check()
            if is_taken or is_garbage:
                swarm.newcomer()
                swarm.go_on(HONEST)
            assert named() <= {LIAR}
            assert is_taken or named() or is_silent
        except BaseException as error:
            raise AssertionError(what) from error


LIKENESS = {"model": "ab" * 32, "number of samples": "10"}
RUN = "run-1"


@pytest.fixture
def nodes():
    board = Board()
    return {name: InMemory(board, name) for name in (*MEMBERS, NEWCOMER)}


def published(nodes, key, caplog):
    """Have the liar publish every variation of its record under a key, each with an empty log."""
    own = nodes[LIAR].dht.told[key]
    other = nodes["A"].dht.told[key]
    for what, lie in lies(own, other):
        caplog.clear()
        ignore_peer.cache_clear()
        nodes[LIAR].publish(key, lie, 60)
        yield what, lie
        assert not any(id_of(name) in caplog.text for name in HONEST), what


def test_false_likenesses_blame_liar(nodes, caplog):
    peers = {name: Comparison(nodes[name], RUN, LIKENESS) for name in MEMBERS}
    for what, lie in published(nodes, likeness_key(RUN), caplog):
        for name in HONEST:
            others = [SimpleNamespace(peer_id=id_of(other)) for other in MEMBERS if other != name]
            peers[name].require_alike(others)
        is_one = isinstance(lie, dict) and all(isinstance(value, str) for value in lie.values())
        assert is_one or id_of(LIAR) in caplog.text or len(str(lie)) > 3000, what


def test_false_recipes_leave_offer_intact(nodes, caplog):
    def require_the_honest_one_s(what):
        offer = fetch_offer(nodes[NEWCOMER], [id_of("A")], RUN)
        assert offer.fingerprint == RECIPE.fingerprint
        assert offer.step == 5, what

    for name in MEMBERS:
        publish_run(nodes[name], RECIPE.run_id, pack(RECIPE))
        publish_status(nodes[name], Status(run_id=RUN, step=5, max_steps=40))
    for key in (RUNS_KEY, recipe_key(RUN)):
        for what, _ in published(nodes, key, caplog):
            require_the_honest_one_s(what)
    for value in (*VALUES, *({"v": value} for value in VALUES), to_wire(RECIPE) | {"shared": []}):
        with contextlib.suppress(TypeError):  # JSON has no bytes
            packed = zlib.compress(json.dumps(value).encode())
            caplog.clear()
            ignore_peer.cache_clear()
            nodes[LIAR].publish(recipe_key(RUN), packed, 60)
            require_the_honest_one_s(value)
            assert id_of(LIAR) in caplog.text, value


def test_false_addresses_are_ignored(nodes, caplog, tmp_path, clock):
    key = ADDRESSES_KEY
    for name in MEMBERS:
        Reconnector(nodes[name], nodes[name].own_addresses, KnownPeers(None), clock=clock).turn()
    for number, (what, _) in enumerate(published(nodes, key, caplog)):
        met = KnownPeers(tmp_path / f"{number}.json")
        Reconnector(nodes[NEWCOMER], nodes[NEWCOMER].own_addresses, met, clock=clock).turn()
        for name in HONEST:
            assert met.addresses[id_of(name)] == tuple(nodes[name].own_addresses()), what
        assert all(is_address_of(id_of(LIAR), one) for one in met.addresses.get(id_of(LIAR), ())), what
        assert KnownPeers(tmp_path / f"{number}.json").addresses == met.addresses, "after a restart"


def test_false_certificates_are_refused(nodes, caplog, clock):
    for name in MEMBERS:
        MemberList(nodes[name], nodes[name].credentials, clock).turn()
    expected = {id_of(name): INVITED.grant for name in HONEST}
    for what, lie in published(nodes, MEMBERS_KEY, caplog):
        found = read_members(nodes[NEWCOMER], OWNER.public)
        is_member = found.pop(id_of(LIAR), None) == INVITED.grant
        assert found == expected
        assert is_member or id_of(LIAR) in caplog.text or len(str(lie)) > 3000, what


def test_false_policies_are_refused(nodes, caplog, clock, tmp_path):
    book = PolicyBook(OWNER.public, tmp_path / "policy")
    wires = [
        book.decide(OWNER, lambda policy, n=n: type(policy)(out=policy.out | {mark_of(n)}))
        for n in (b"1", b"2")
    ]
    for name in HONEST:
        nodes[name].credentials.book.offer(wires[1])
        MemberList(nodes[name], nodes[name].credentials, clock).turn()
    flipped = [wires[1][:at] + bytes([wires[1][at] ^ 1]) + wires[1][at + 1 :] for at in range(len(wires[1]))]
    for lie in (*VALUES, wires[0], *flipped):
        nodes[LIAR].publish(POLICY_KEY, lie, 60)
        newcomer = Credentials(INVITED)
        MemberList(nodes[NEWCOMER], newcomer, clock).turn()
        assert newcomer.book.policy == book.policy == nodes["A"].credentials.book.policy, lie


# Each message passes between two real protocols, with one field changed. A handler may refuse a request,
# which only the requester notices; an unreadable answer counts as none.

RECORDS = "run_addresses"
DHT_KEY = DHTID.generate(source=RECORDS)
SETTINGS = {"bucket_size": 20, "depth_modulo": 5, "num_replicas": 5, "wait_timeout": 3.0}
ABSENT = {DHTID.generate(): PeerID.from_base58(id_of(name)) for name in "BC"}
"""Nodes that both know but that are absent."""


class DhtNode:
    """A peer with a record; its node is created anew for each message."""

    def __init__(self, board, name):
        self.dht = Dht(board, key_of(name))
        self.node_id = DHTID.generate()
        self.id = self.dht.peer_id
        self.place = self.dht.place
        self.dht.store(RECORDS, [f"of {name}"], swarm_time() + 300, subkey=self.place, return_future=True)
        self.record, self.until = board.records[RECORDS][self.place]

    async def enter(self, network, other):
        p2p = network.p2p_of(self.id)
        validator = self.dht.validator
        self.protocol = await CorrectedProtocol.create(
            p2p, self.node_id, record_validator=validator, **SETTINGS
        )
        self.protocol.storage.store_subkey(DHT_KEY, self.place, self.record, self.until)
        for node_id, peer in {other.node_id: other.id, **ABSENT}.items():
            self.protocol.routing_table.add_or_update_node(node_id, peer)

    async def ask(self, what, other):
        content = {
            "ping": [],
            "find": [[DHT_KEY]],
            "compare": [[bytes(8)]],
            "store": [[DHT_KEY], [self.record], [self.until], [self.place]],
        }
        return await getattr(self.protocol, f"call_{what}")(other.id, *content[what])


def ask_over(caller, other, what, tamper):
    """Have one node ask another, and return its result."""

    async def scene():
        network = Network()
        network.tamper = tamper
        await caller.enter(network, other)
        await other.enter(network, caller)
        found = await caller.ask(what, other)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*left, return_exceptions=True)
        return found

    return run_virtually(scene())


KINDS = {  # of a request and of its answer
    "ping": (dht_pb2.PingRequest, dht_pb2.PingResponse),
    "find": (dht_pb2.FindRequest, dht_pb2.FindResponse),
    "store": (dht_pb2.StoreRequest, dht_pb2.StoreResponse),
    "compare": (dht_pb2.FindRequest, dht_pb2.StoreRequest),
}


@pytest.mark.parametrize("is_answer", [False, True], ids=["asked", "answered"])
@pytest.mark.parametrize("what", KINDS)
def test_altered_node_messages_keep_records(what, is_answer):
    board = Board()
    honest = DhtNode(board, "A")
    liar = DhtNode(board, "D")
    kind = KINDS[what][is_answer]
    roles = (honest, liar) if is_answer else (liar, honest)
    said = {}

    def note(message):
        if (message.call, message.is_answer) == (f"rpc_{what}", is_answer):
            said[message.sender] = kind.FromString(message.content)
        return [message.content]

    for one, other in (roles, roles[::-1]):
        assert ask_over(one, other, what, note)
    edits = list(message_edits(said[liar.id], said[honest.id]))
    for field, change in edits:
        found = ask_over(*roles, what, altered(liar.id, f"rpc_{what}", is_answer, edited(kind, change)))
        held = honest.protocol.storage
        records = held.get(DHT_KEY).value
        assert records.get(honest.place).value == honest.record, field
        assert {place for place, _ in records.items()} <= {honest.place, liar.place}, field
        assert len(held) == 1, field
        if is_answer and what == "find" and found:
            [(value, nearest)] = found.values()
            assert len(nearest) <= 20
            assert all(len(id_.to_bytes()) <= 64 for id_ in nearest.values()), field
            places = [place for place, _ in value.value.items()] if value is not None else []
            assert set(places) <= {honest.place, liar.place}, field
    assert len(edits) > 10
