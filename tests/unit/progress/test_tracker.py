"""How samples are counted, and which peers are present or behind, over a DHT in memory."""

import contextlib
import threading
import time
from concurrent.futures import Future
from functools import partial

import pytest
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from tests.kit.commands import wait_until
from tests.kit.stepping import after, spans
from tests.simulation.board import Board, Dht, id_of, key_of
from trahiv_cli.progress import tracker as progress
from trahiv_cli.progress.committed import Committed, CommittedCell
from trahiv_cli.progress.history import History
from trahiv_cli.progress.reports import PeerProgress, Report
from trahiv_cli.progress.tracker import REPORT_EVERY_S_A_PEER, SwarmTracker

KEY = "run_progress"
TARGET = 100
START = History()
A, B, C, D = map(id_of, "ABCD")


class Swarm:
    """One peer's tracker and the other peers' reports on a shared board."""

    def __init__(self):
        self.board = Board()
        self.out = set()
        self.dht = Dht(self.board, key_of("A"))
        self.others = {name: Dht(self.board, key_of(name)) for name in "BCDEFG"}
        self.committed = CommittedCell(Committed())
        self.tracker = SwarmTracker(
            self.dht,
            "run",
            TARGET,
            private_key=key_of("A"),
            start=False,
            committed=self.committed,
            is_out=self.out.__contains__,
        )
        self.tracker.shutdown_complete.set()  # its thread would only repeat `refresh`

    @property
    def told(self):
        """The record of this peer's last report."""
        return self.dht.told.get(KEY)

    def tell(self, name, value, lives_s=60.0):
        """Have a peer publish `value` as its report."""
        dht = self.others.get(name, self.dht)
        dht.store(KEY, value, get_dht_time() + lives_s, subkey=dht.place, return_future=True)

    def report(self, name, history=START, samples=0, rate=1.0, client_mode=False, age_s=0.0):
        """Have a peer report itself; return the record."""
        report = Report(
            peer_id=PeerID.from_base58(id_of(name)).to_bytes(),
            time=get_dht_time() - age_s,
            epoch=history.step,
            samples_committed=history.samples,
            history=history.digest,
            samples_accumulated=samples,
            samples_per_second=rate,
            client_mode=client_mode,
        )
        self.tell(name, report.dict())
        return report.dict()

    def expire(self, name):
        """Let a peer's last report expire in the DHT."""
        del self.board.records[KEY][self.others[name].place]

    def move_to(self, history, samples=0):
        with self.tracker.pause_updates():
            self.committed.change(history=history, group=frozenset())
            self.tracker.begin_step(samples)

    @contextlib.contextmanager
    def started(self):
        """Run the tracker's reporting and fetching threads."""
        self.tracker.shutdown_complete.clear()
        self.tracker.start()
        try:
            yield
        finally:
            self.tracker.abandon()
            self.tracker.join(10)


@pytest.fixture
def swarm():
    return Swarm()


@pytest.fixture
def tracker(swarm):
    return swarm.tracker


@pytest.fixture
def refreshed(tracker):
    """Read the reports, and return an attribute of the tracker."""

    def read(name):
        assert tracker.refresh()
        return getattr(tracker, name)

    return read


def told(swarm):
    """Return this peer's last report as others read it."""
    return PeerProgress.of(A, Report.parse_obj(swarm.told), 0)


def test_commit_proceeds_while_dht_is_slow(swarm, tracker, monkeypatch):
    swarm.report("B", after(1), samples=40)
    found = swarm.dht.get(KEY)
    answer = Future()
    asked = threading.Event()
    monkeypatch.setattr(swarm.dht, "get", lambda *args, **kwargs: asked.set() or answer)
    tracker.global_progress.next_fetch_time = 0.0
    with swarm.started():
        assert asked.wait(10)
        commit = threading.Thread(target=swarm.move_to, args=(after(1),), daemon=True)
        commit.start()
        commit.join(10)
        assert not commit.is_alive()
        assert tracker.history == after(1)
        with tracker.pause_updates():
            answer.set_result(found)
            time.sleep(0.05)
            assert tracker.mates == (), "nothing that a commit reads changes meanwhile"
        wait_until(lambda: [mate.samples for mate in tracker.mates] == [40])


def test_failed_report_fetch_is_retried(swarm, tracker, monkeypatch):
    def fails(key, **options):
        swarm.dht.get = get
        swarm.failed_at = time.monotonic()
        raise OSError("the daemon's socket")

    tracker._answer_s = 0.3
    swarm.report("B")
    get = swarm.dht.get
    swarm.dht.get = fails
    tracker.global_progress.next_fetch_time = 0.0
    with swarm.started():
        wait_until(lambda: [peer.peer_id for peer in tracker.others] == [B])
        assert time.monotonic() - swarm.failed_at >= 0.3, "the next one is not at once"


def test_samples_count_only_from_same_history(swarm, tracker):
    swarm.move_to(after(5))
    swarm.report("A", after(5), samples=90)  # this peer's own report, out of date
    others = [after(5), after(4), after(6), after(5, branch=b"!"), after(5, samples=9), after(5)]
    for number, (name, history) in enumerate(zip("BCDEFG", others, strict=True)):
        swarm.report(name, history, samples=10**number)
    tracker.refresh()
    tracker.report_local_progress(5, 30)
    assert tracker.samples_accumulated == 30 + 100_001
    assert [mate.samples for mate in tracker.mates] == [1, 100_000]
    tracker.report_local_progress(5, 60)
    assert tracker.samples_accumulated == 60 + 100_001, "no fetch loses what was added meanwhile"


def test_full_batch_starts_step_unless_behind(swarm, tracker):
    swarm.report("A", after(9))  # from before a restart
    swarm.report("E", after(20), client_mode=True)
    swarm.report("B", samples=1, rate=50.0, age_s=60.0)  # extrapolated, it has the full batch
    assert tracker.refresh()
    assert not tracker.ready_to_update_epoch
    tracker.performance_ema.samples_per_second = 1e20  # hivemind's maximum, for a batch that took no time
    tracker.report_local_progress(0, TARGET - 1)
    assert Report.parse_obj(tracker.local_progress.dict()).samples_accumulated == TARGET - 1
    assert tracker.target == START
    assert not tracker.is_behind
    assert tracker.ready_to_update_epoch
    swarm.report("B", after(1))
    assert tracker.refresh()
    assert tracker.is_behind
    assert not tracker.ready_to_update_epoch
    assert tracker.target == after(1)
    swarm.move_to(after(1))
    assert not tracker.is_behind
    assert tracker.samples_accumulated == 0


def test_report_includes_past_and_state_digests(swarm, tracker):
    for step in (1, 2):
        swarm.move_to(after(step))
    tracker.attest(after(1), b"12345678", is_given=True)
    assert swarm.told is None, "a peer that takes no part yet reports nothing"
    tracker.announce()
    assert told(swarm).history == after(2)
    assert swarm.told["samples_accumulated"] == 0, "before any sample"
    assert all(told(swarm).passed_through(after(step)) for step in (0, 1, 2))
    assert {state[2] for state in told(swarm).states} == {b"12345678"}
    tracker.attest(after(1), b"another.", is_given=True)
    assert {state[2] for state in told(swarm).states} == {b"another."}, "at once"
    assert not told(swarm).passed_through(after(3))
    tracker.vouch(after(3))
    assert told(swarm).passed_through(after(3))


def test_member_stays_gone_after_goodbye_expires(swarm, refreshed):
    swarm.committed.change(group=frozenset({B}))
    for name in "BC":
        swarm.report(name, samples=40)
    assert not refreshed("gone")
    swarm.tell("B", None)
    assert refreshed("gone") == {B}
    swarm.expire("B")
    assert refreshed("gone") == {B}
    assert [peer.peer_id for peer in refreshed("others")] == [C]
    swarm.committed.change(group=frozenset())
    assert not refreshed("gone"), "those that left are not remembered without an end"


def test_returned_peer_is_no_longer_gone(swarm, refreshed):
    swarm.tell("C", None)
    assert refreshed("gone") == {C}
    swarm.report("C")
    assert not refreshed("gone")
    assert len(refreshed("others")) == 1
    swarm.expire("C")
    assert not refreshed("gone"), "it said nothing for too long"
    assert not refreshed("others")


def test_removed_peer_is_gone(swarm, refreshed):
    swarm.report("B", after(7), samples=40)
    swarm.out.add(B)
    assert refreshed("gone") == {B}
    assert not refreshed("others")
    assert not refreshed("is_behind")


@pytest.mark.parametrize(("age", "is_quiet"), [(0.4, False), (0.6, True)])
def test_unrenewed_report_marks_peer_quiet(swarm, tracker, refreshed, age, is_quiet):
    record = swarm.report("B")
    swarm.tell("B", record, (1 - age) * tracker.metadata_expiration)
    [peer] = refreshed("others")
    assert peer.is_quiet is is_quiet


def test_expired_peer_is_missing_until_return(swarm, refreshed):
    for name in "BC":
        swarm.report(name)
    assert not refreshed("missing")
    swarm.tell("C", None)
    for come_back in (swarm.report, partial(swarm.tell, value=None)):
        swarm.expire("B")
        assert refreshed("missing") == {B}
        come_back("B")
        assert not refreshed("missing")


def test_lease_preserves_local_progress(swarm, tracker, monkeypatch):
    """Leases are reported by their own thread, which must write nothing that a batch changes meanwhile."""
    tracker.report_local_progress(0, 7)
    reported = tracker.local_progress
    assert tracker.lease(spans(0, 5))
    assert tracker.local_progress is reported
    assert swarm.told["leases"] == [0, 5]
    assert swarm.told["samples_accumulated"] == 7
    swarm.report("B", samples=40)
    tracker.refresh()
    tracker._answer_s = 0.0
    monkeypatch.setattr(swarm.dht, "get", lambda *args, **kwargs: Future())
    assert not tracker.lease(spans(0, 9))
    assert not tracker.refresh()
    assert [peer.samples for peer in tracker.others] == [40], "a silent DHT leaves the old reports"


def test_report_interval_grows_with_peers(swarm, tracker):
    tracker.refresh()
    assert tracker.global_progress.next_fetch_time > get_dht_time() + 1.0, "a lone peer looks at leisure"
    swarm.report("B", samples=99, rate=50.0)
    tracker.refresh()
    assert tracker.global_progress.next_fetch_time <= get_dht_time() + 1.0
    assert tracker.fetch_every_s == 0.25
    tracker.others = 63 * tracker.others[:1]
    assert tracker.fetch_every_s == tracker._report_every_s() == REPORT_EVERY_S_A_PEER * 64
    tracker.others = 1000 * tracker.others[:1]
    assert tracker.fetch_every_s == tracker.metadata_expiration / 2, "twice in a report's life"


def test_samples_are_extrapolated_between_rare_fetches(swarm, tracker, monkeypatch):
    now = time.time()
    monkeypatch.setattr(progress, "swarm_time", lambda: now)
    monkeypatch.setattr(progress, "REPORT_EVERY_S_A_PEER", progress.GUESSED_FROM_S)
    swarm.move_to(after(1, samples=10**4))
    tracker.plausibility.commit(1, dict.fromkeys((A, B, C, D), 500), TARGET)
    for name in "BCD":
        swarm.report(name, tracker.history, samples=10, rate=2.0)
    tracker.refresh()
    assert tracker.global_progress.next_fetch_time >= now + tracker.fetch_every_s
    assert tracker.samples_accumulated == 3 * 10
    now += 2.0
    assert tracker.samples_accumulated == 3 * 14
    tracker.refresh()
    assert tracker.samples_accumulated == 3 * 10, "those that stand still count for what they hold"

    tracker.performance_ema.samples_per_second = 2.0
    # A round of 1 s during training.
    swarm.move_to(tracker.history.extend(samples=10, proof=b"next"), samples=2)
    assert tracker.samples_accumulated == 2
    swarm.committed.change(group=frozenset((A, B, C, D)))
    assert tracker.samples_accumulated == 2 + 3 * 2, "those that were in it have trained, too"
    tracker.refresh()
    assert tracker.target == tracker.history
    assert tracker.samples_accumulated == 2 + 3 * 2


def test_background_reports_only_while_taking_part(swarm, tracker, monkeypatch):
    monkeypatch.setattr(progress, "ALONE_EVERY_S", 0.0)
    swarm.dht.get = lambda *args, **kwargs: Future()  # only this peer's own reports arrive

    def reported():
        """Wait for a report and remove it; return its step."""
        wait_until(lambda: swarm.told)
        return swarm.dht.told.pop(KEY)["epoch"]

    with swarm.started():
        swarm.move_to(after(1))
        time.sleep(0.3)
        assert swarm.told is None, "it has not entered"
        tracker.announce()
        assert reported() == 1
        swarm.move_to(after(2))
        assert reported() == 2, "though its every batch is a step"
        tracker.others = (PeerProgress(B, after(6), 0, 1.0, False),)
        tracker.should_report_progress.set()
        time.sleep(0.3)
        assert swarm.told is None, "it takes over a state"
        tracker.report_local_progress(2, 7)
        assert reported() == 2
    assert not tracker.is_alive()
    assert tracker.shutdown_complete.is_set(), "a look-up is still unanswered"


def test_shutdown_withdraws_report_once(swarm, tracker):
    tracker.announce()
    tracker.shutdown(timeout=1)
    assert swarm.dht.told.pop(KEY) is None
    tracker.shutdown(timeout=1)
    assert KEY not in swarm.dht.told
    other = Swarm()
    other.dht.store = lambda **_: Future()
    other.dht.is_alive = lambda: False
    done = threading.Event()
    threading.Thread(target=lambda: (other.tracker.shutdown(60), done.set()), daemon=True).start()
    assert done.wait(10)
