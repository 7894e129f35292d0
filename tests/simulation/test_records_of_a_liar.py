"""Whatever one member reports of itself, three honest ones go on as without it, and newcomers join.

The test has the product's own report of the member that lies, and changes it in one field after the other
(`tests.kit.lies`). It is signed by that member, and comes to real parts of the others, over a DHT in memory.
"""

from __future__ import annotations

import json

import pytest
from hivemind.utils import MSGPackSerializer

from tests.kit.lies import lies
from tests.simulation.board import Board, Dht, id_of, key_of
from trahiv_cli.optim import leases as leasing
from trahiv_cli.optim.doubts import CREDIT_MARGIN, Doubts
from trahiv_cli.optim.leases import Leases
from trahiv_cli.optim.ledger import Ledger, Spans
from trahiv_cli.optim.majority import FORK_S, Fork
from trahiv_cli.optim.position import MOST_ROUNDS_AHEAD
from trahiv_cli.optim.progress import ALONE_EVERY_S, SwarmTracker
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.records import MAX_RECORD_BYTES, disbelieve

SIGNATURE_BYTES = 370
"""Of RSA with 2048 bits, as hivemind writes it."""

KEY = "run_progress"
HONEST, LIAR = ("A", "B", "C"), "D"
TARGET = 24
ROUND_S = 20.0


class Peer:
    """What a peer knows of the others, the data and the history; between them, what the optimizer does."""

    def __init__(self, board, name, clock):
        self.id, self.dht, self.ledger = id_of(name), Dht(board, key_of(name)), Ledger()
        keywords = {"private_key": key_of(name), "start": False, "is_out": lambda peer: False}
        self.tracker = SwarmTracker(self.dht, "run", TARGET, **keywords)
        self.tracker.shutdown_complete.set()
        self.tracker.doubts, self.tracker._fork = Doubts(clock), Fork(clock)
        self.leases = Leases(self.tracker, lambda: self.ledger, 1000)
        self.tracker.announce()
        self.work = []

    def train(self, count):
        self.work = [self.leases.take() for _ in range(count)]
        if self.leases._running is not None:
            self.leases._running.exception(5)
        self.tracker.report_local_progress(self.tracker.history.step, count)
        self.tracker.announce()

    def commit(self, brought):
        """Commit the round into which members brought positions, by name."""
        samples = {id_of(name): len(positions) for name, positions in brought.items()}
        reported = dict.fromkeys((mate.peer_id for mate in self.tracker.mates if mate.samples), 0)
        proof = json.dumps(brought).encode()
        history = self.tracker.history.extend(samples=sum(samples.values()), proof=proof)
        self.tracker.doubts.commit(history.step, reported | samples, TARGET)
        trained = [Spans.of_positions(positions) for positions in brought.values()]
        self.ledger = self.ledger.extend(trained, MOST_ROUNDS_AHEAD * TARGET)
        with self.tracker.pause_updates():
            self.tracker.update_history(history)
        self.leases.settle(Spans.of_positions(self.work))
        self.tracker.companions = frozenset(samples)
        self.tracker.attest(history, common_of(history))
        self.tracker.announce()


def common_of(history):
    return history.digest[::-1]  # of what its peers hold


class Swarm:
    def __init__(self, clock):
        self.board, self.clock, self.trained = Board(), clock, []
        self.peers = {name: Peer(self.board, name, clock) for name in (*HONEST, LIAR)}
        self.honest = [self.peers[name] for name in HONEST]
        self.liar = self.peers[LIAR]
        self.told = []
        for _ in range(3):
            self.go_on((*HONEST, LIAR))

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
        """Have all others read the reports; say whether any takes what the liar published for one."""
        assert all(peer.tracker.refresh() for peer in self.honest)
        return any(self.liar.id in {other.peer_id for other in peer.tracker.others} for peer in self.honest)

    def check(self):
        """Find everybody where it would be without the liar, or within the bounds of docs/security.md."""
        history = self.honest[0].tracker.history
        for peer in self.honest:
            tracker, others = peer.tracker, {other.peer_id for other in peer.tracker.others}
            assert others >= {other.id for other in self.honest} - {peer.id}, "all honest ones are there"
            assert tracker.target == history and not tracker.is_behind
            held = sum(other.tracker.local_progress.samples_accumulated for other in self.honest)
            credit = round(CREDIT_MARGIN * tracker.doubts._credit[self.liar.id] * TARGET)
            assert held <= tracker.samples_accumulated <= held + credit
            assert tracker._report_every_s() <= ALONE_EVERY_S
            assert tracker.global_progress.next_fetch_time <= swarm_time() + tracker.max_refresh_period
            assert tracker.standing.holds(history, common_of(history))

    def newcomer(self):
        """Have one more peer read everything from scratch, and come to the same."""
        history, one = self.honest[0].tracker.history, Peer(self.board, "N", self.clock)
        one.tracker.refresh()
        assert self.honest[0].tracker.past.went_by(one.tracker.target), "from there it follows"
        assert one.tracker.standing.believes(history)
        assert one.tracker.standing.holds(history, common_of(history), is_final=True)
        with one.tracker.pause_updates():
            one.tracker.update_history(history, is_next=False)
        one.tracker.doubts.join()
        assert one.tracker.target == history
        del self.board.records[KEY][one.dht.place]


@pytest.fixture
def swarm(clock, monkeypatch):
    for name, seconds in {"POLL_S": 0.0005, "PAUSE_S": 0.002, "PATIENCE_S": 5.0}.items():
        monkeypatch.setattr(leasing, name, seconds)  # they are looked for at once
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


def test_reports(swarm, caplog):
    def named():
        """Whom the log names."""
        text = " ".join(record.getMessage() for record in caplog.records)
        return {name for name in (*HONEST, LIAR, "N") if id_of(name) in text}

    number, told = 0, [*GARBAGE.items()]
    while number < len(told):
        older, own = swarm.told
        told = [*GARBAGE.items(), *lies(own, swarm.honest[0].dht.told[KEY], older)]
        what, lie = told[number]
        is_garbage = number < len(GARBAGE)
        packed = lie if is_garbage else MSGPackSerializer.dumps(lie)
        number += 1
        caplog.clear()
        disbelieve.cache_clear()
        for peer in swarm.honest:
            peer.tracker.doubts._named.clear()
        # Too long a record is refused before its signature is looked at, and a goodbye is no lie.
        is_silent = lie is None or len(packed) > MAX_RECORD_BYTES - SIGNATURE_BYTES
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
