"""How samples are counted, over a DHT that is a dict."""

import asyncio
import concurrent.futures
import contextlib
import gc
import queue
import statistics
import threading
import time
from types import SimpleNamespace

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.optim import progress_tracker
from hivemind.optim.progress_tracker import ProgressTracker
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.optim import progress, reports
from trahiv_cli.optim.history import DIGEST_BYTES, History
from trahiv_cli.optim.leases import FIRST_BLOCK, MOST_ROUNDS, Leases, ShardLeases
from trahiv_cli.optim.ledger import MAX_POSITION, SHARD, Ledger, Spans
from trahiv_cli.optim.majority import FORK_S, Past, Way, went_by
from trahiv_cli.optim.progress import FETCH_EVERY_S_A_PEER, PacedEvent, SwarmTracker
from trahiv_cli.optim.reports import PeerProgress, Report
from trahiv_cli.swarm.records import own_place, owner_of

TARGET = 100
FAR = 1e12
START = History()
KEYS = {name: RSAPrivateKey() for name in "ABCDEFGHIJKLMNOPQRST"}
PLACES = {name: own_place(key) for name, key in KEYS.items()}
IDS = {name: PeerID.from_base58(owner_of(place)) for name, place in PLACES.items()}


class FakeDht:
    """A DHT of one process that answers at once: records by key and subkey."""

    def __init__(self):
        self.peer_id, self.client_mode, self.records, self.answers = IDS["A"], False, {}, True
        self.out, self.place = set(), PLACES["A"]

    def add_validators(self, validators):
        pass

    def is_alive(self):
        return True

    def get(self, key, latest=False, return_future=False):
        held = self.records.get(key)
        found = ValueWithExpiration(dict(held), FAR) if held else None
        return self._future(found) if return_future else found

    def store(self, key, value, expiration_time, subkey, return_future):
        self.records.setdefault(key, {})[subkey] = ValueWithExpiration(value, expiration_time)
        return self._future(True)

    def _future(self, value):
        future = concurrent.futures.Future()
        if self.answers:
            future.set_result(value)
        return future

    def report(self, name, history=START, samples=0, rate=1.0, client_mode=False, age_s=0.0, **told):
        """Have another peer report itself, and what it `told` besides."""
        record = Report(
            peer_id=IDS[name].to_bytes(),
            epoch=history.step,
            samples_committed=history.samples,
            history=history.digest,
            samples_accumulated=samples,
            samples_per_second=rate,
            time=get_dht_time() - age_s,
            client_mode=client_mode,
            **told,
        )
        self.store("run_progress", record.dict(), FAR, subkey=PLACES[name], return_future=True)


def after(step, samples=TARGET, branch=b""):
    """The history of `step` steps of so many samples each; another `branch` is another history."""
    history = History()
    for number in range(step):
        history = history.extend(samples=samples, proof=b"%d" % number + branch)
    return history


def move_to(tracker, history):
    with tracker.pause_updates():
        tracker.update_history(history)


def tracker_of(cls, dht, name="A"):
    ours = {"is_out": dht.out.__contains__} if cls is SwarmTracker else {}
    # Its thread would only repeat what refresh does.
    tracker = cls(dht, "run", TARGET, private_key=KEYS[name], start=False, **ours)
    tracker.shutdown_complete.set()
    return tracker


@pytest.fixture
def dht():
    return FakeDht()


@pytest.fixture
def tracker(dht):
    return tracker_of(SwarmTracker, dht)


class Unanswered(concurrent.futures.Future):
    """What hivemind's futures are to asyncio: awaitable."""

    def __await__(self):
        return asyncio.wrap_future(self).__await__()


@pytest.mark.parametrize(("cls", "is_quiet"), [(SwarmTracker, True), (ProgressTracker, False)])
def test_a_tracker_ends_with_all_it_waits_for(dht, caplog, monkeypatch, cls, is_quiet):
    """Upstream's leaves a look-up behind; when it does not, `SwarmTracker.run` can go."""
    tracker = tracker_of(cls, dht)
    asked = threading.Event()

    def ask(*args, **kwargs):
        asked.set()
        return Unanswered()

    monkeypatch.setattr(dht, "get", ask)
    tracker.shutdown_complete.clear()
    tracker.global_progress.next_fetch_time = 0.0
    tracker.start()
    assert asked.wait(10)
    tracker.shutdown(10)
    tracker.join(10)
    assert not tracker.is_alive() and tracker.shutdown_complete.is_set()
    gc.collect()
    assert ("Task was destroyed but it is pending" not in caplog.text) == is_quiet


class PutOff:
    """The progress of a swarm whose reports are refreshed while the fetcher waits until they are due."""

    def __init__(self):
        self.due_at = [get_dht_time() + 0.05, get_dht_time() + 0.5]

    @property
    def next_fetch_time(self):
        return self.due_at.pop(0) if len(self.due_at) > 1 else self.due_at[0]


def test_reports_that_were_refreshed_meanwhile_are_not_fetched_before_they_are_due_again(
    dht, tracker, monkeypatch
):
    asked_at = queue.Queue()

    def ask(*args, **kwargs):
        asked_at.put(get_dht_time())
        return Unanswered()

    monkeypatch.setattr(dht, "get", ask)
    tracker.shutdown_complete.clear()
    tracker.global_progress = put_off = PutOff()
    tracker.start()
    try:
        assert asked_at.get(timeout=10) >= put_off.due_at[-1]
    finally:
        tracker.shutdown(10)
        tracker.join(10)


def test_a_commit_does_not_wait_for_a_dht_that_is_slow_to_answer(dht, tracker, monkeypatch):
    dht.report("B", after(1), samples=40)
    found, answer, asked = dht.get("run_progress"), Unanswered(), threading.Event()

    def ask(*args, **kwargs):
        asked.set()
        return answer

    monkeypatch.setattr(dht, "get", ask)
    tracker.shutdown_complete.clear()
    tracker.global_progress.next_fetch_time = 0.0
    tracker.start()
    try:
        assert asked.wait(10)
        commit = threading.Thread(target=move_to, args=(tracker, after(1)), daemon=True)
        commit.start()
        commit.join(10)
        assert not commit.is_alive() and tracker.history == after(1)
        answer.set_result(found)
        deadline = time.monotonic() + 10
        while not tracker.mates and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [mate.samples for mate in tracker.mates] == [40]
    finally:
        tracker.abandon()
        tracker.join(10)
    assert not tracker.is_alive()


def test_a_peer_alone_counts_its_own_samples(tracker):
    tracker.report_local_progress(0, 30)
    tracker.refresh()
    assert tracker.samples_accumulated == 30 and tracker.others == ()
    assert not tracker.ready_to_update_epoch


def test_samples_of_others_with_the_same_history_count(dht, tracker):
    move_to(tracker, after(5))
    dht.report("B", after(5), samples=40)
    dht.report("C", after(5), samples=20)
    tracker.report_local_progress(5, 30)
    tracker.refresh()
    assert tracker.samples_accumulated == 90
    assert [mate.peer_id for mate in tracker.mates] == [IDS[name].to_base58() for name in "BC"]


def test_samples_of_others_at_other_steps_do_not_count(dht, tracker):
    move_to(tracker, after(5))
    dht.report("B", after(4), samples=40)
    dht.report("C", after(6), samples=20)
    dht.report("D", after(5), samples=7)
    tracker.report_local_progress(5, 30)
    tracker.refresh()
    assert tracker.samples_accumulated == 37


def test_samples_of_others_at_this_step_of_another_history_do_not_count(dht, tracker):
    move_to(tracker, after(5))
    dht.report("B", after(5, branch=b"!"), samples=40)
    dht.report("C", after(5, samples=TARGET - 1), samples=20)
    tracker.report_local_progress(5, 30)
    tracker.refresh()
    assert tracker.samples_accumulated == 30 and tracker.mates == ()


def test_own_samples_are_those_held_and_not_those_reported(dht, tracker):
    dht.report("A", samples=90)  # this peer's own, out of date
    dht.report("B", samples=40)
    tracker.refresh()
    tracker.report_local_progress(0, 30)
    assert tracker.samples_accumulated == 70
    tracker.report_local_progress(0, 0)
    assert tracker.samples_accumulated == 40


def test_a_batch_that_took_no_time_makes_a_report_that_others_take(tracker):
    tracker.performance_ema.samples_per_second = 1e20  # hivemind's greatest
    tracker.report_local_progress(0, 30)
    assert Report.from_wire(tracker.local_progress.dict()).samples_accumulated == 30


def test_a_fetch_does_not_lose_samples_that_were_added_meanwhile(dht, tracker):
    tracker.report_local_progress(0, 30)
    dht.report("B", samples=40)
    tracker.refresh()
    tracker.report_local_progress(0, 60)
    assert tracker.samples_accumulated == 100


def test_a_step_may_begin_when_the_samples_are_there_and_not_before(dht, tracker):
    dht.report("B", samples=70)
    tracker.refresh()
    tracker.report_local_progress(0, 29)
    assert not tracker.ready_to_update_epoch
    tracker.report_local_progress(0, 30)
    assert tracker.ready_to_update_epoch


def pause(dht, tracker):
    """One peer reported itself long ago as so fast that by now it should have all samples."""
    dht.report("B", samples=1, rate=50.0, age_s=60.0)
    found = dht.get("run_progress").value
    if not isinstance(tracker, SwarmTracker):  # upstream knows no histories
        for report in found.values():
            for ours in ("samples_committed", "history", "leases", "rounds", "states"):
                del report.value[ours]
    tracker.global_progress = tracker._parse_swarm_progress_data(found)
    return tracker


def test_an_estimate_that_is_over_begins_no_step(dht, tracker):
    assert not pause(dht, tracker).ready_to_update_epoch


def test_upstream_still_begins_a_step_when_its_estimate_is_over(dht):
    assert pause(dht, tracker_of(ProgressTracker, dht)).ready_to_update_epoch


# -- who is behind --------------------------------------------------------------------------------


def test_a_peer_is_behind_when_another_has_taken_a_step(dht, tracker):
    dht.report("B", after(1))
    tracker.report_local_progress(0, TARGET)
    tracker.refresh()
    assert tracker.is_behind and not tracker.ready_to_update_epoch
    assert tracker.target == after(1)
    move_to(tracker, after(1))
    assert not tracker.is_behind and tracker.samples_accumulated == 0


def test_a_peer_is_not_behind_those_who_are_behind_it(dht, tracker):
    move_to(tracker, after(3))
    dht.report("B", after(2))
    tracker.refresh()
    assert not tracker.is_behind and tracker.target == after(3)


def test_the_furthest_of_many_is_the_one_to_come_to(dht, tracker):
    for name, step in (("B", 2), ("C", 7), ("D", 4)):
        dht.report(name, after(step))
    tracker.refresh()
    assert tracker.target == after(7)


def test_of_two_halves_the_one_with_fewer_committed_samples_is_behind(dht, tracker):
    many_steps, many_samples = after(9, samples=10), after(5, samples=20)
    dht.report("B", many_samples)
    move_to(tracker, many_steps)
    tracker.refresh()
    assert tracker.is_behind and tracker.target == many_samples
    dht.report("B", many_steps)
    move_to(tracker, many_samples)
    tracker.refresh()
    assert not tracker.is_behind and tracker.target == many_samples


def test_of_two_halves_with_equal_samples_the_one_of_the_smaller_digest_is_behind(dht, tracker):
    small, great = sorted((after(3, branch=b"a"), after(3, branch=b"b")), key=lambda half: half.digest)
    dht.report("B", great)
    move_to(tracker, small)
    tracker.refresh()
    assert tracker.is_behind and tracker.target == great
    dht.report("B", small)
    move_to(tracker, great)
    tracker.refresh()
    assert not tracker.is_behind and tracker.target == great


def test_a_peer_is_not_behind_its_own_old_report(dht, tracker):
    dht.report("A", after(9))  # of its life before
    tracker.refresh()
    assert not tracker.is_behind


def way(*histories):
    """What one reports that came through these."""
    past = Past()
    for history in histories:
        past.go_on(history)
    return past.to_wire()


def test_who_trained_with_others_follows_no_fewer_than_stay(dht, tracker):
    move_to(tracker, after(5))
    tracker.doubts.commit(5, {IDS["A"].to_base58(): 50, IDS["B"].to_base58(): 50}, TARGET)
    dht.report("B", after(5))
    dht.report("C", after(6, branch=b"!"), **way(after(5), after(6, branch=b"!")))
    tracker.refresh()
    assert not tracker.is_behind and tracker.target == after(5)
    dht.report("B", after(6), **way(after(5), after(6)))
    dht.report("D", after(6), **way(after(5), after(6)))
    tracker.refresh()
    assert tracker.is_behind and tracker.target == after(6)


def test_who_is_fewer_goes_back_to_where_most_went_on(dht, tracker, monkeypatch):
    ours = after(9, branch=b"?")
    move_to(tracker, ours)
    clock = [0.0]
    monkeypatch.setattr(tracker._fork, "_clock", lambda: clock[0])
    for clock[0], step in ((0.0, 4), (FORK_S, 5)):
        for name in "BCD":
            dht.report(name, after(step), **way(*(after(n) for n in range(step + 1))))
        tracker.refresh()
    assert tracker.target == after(5) and tracker.is_behind
    move_to(tracker, after(5))
    assert tracker.target == after(5) and not tracker.is_behind


def test_a_report_says_how_its_peer_came_there_and_what_it_held(dht, tracker):
    for step in (1, 2):
        move_to(tracker, after(step))
    tracker.attest(after(1), b"12345678")
    tracker.announce()
    tracker.refresh()
    [told] = tracker.peers
    assert [went_by(told, after(step)) for step in (0, 1, 2)] == [True] * 3
    assert {state[2] for state in told.way.states} == {b"12345678"}


def test_what_somebody_fetches_is_told_at_once(dht, tracker):
    tracker.attest(START, b"12345678", is_given=True)
    assert dht.records == {}, "a peer that takes no part yet reports nothing"
    tracker.announce()
    tracker.attest(START, b"another.", is_given=True)
    tracker.refresh()
    assert {state[2] for state in tracker.peers[0].way.states} == {b"another."}


def test_a_way_that_is_none_keeps_nobody_from_training(dht, tracker):
    dht.report("B", samples=7, rounds=b"12345")
    tracker.refresh()
    assert [(peer.samples, peer.way) for peer in tracker.others] == [(7, Way())]


def test_nobody_is_behind_a_client_that_could_not_give_its_state(dht, tracker):
    dht.report("B", after(9), client_mode=True)
    tracker.refresh()
    assert not tracker.is_behind and tracker.target == START


# -- who is there ---------------------------------------------------------------------------------


def test_reports_are_told_apart_by_peer(dht, tracker):
    dht.report("A", samples=1)
    dht.report("B", after(2), samples=3, rate=4.5, client_mode=True)
    tracker.refresh()
    assert tracker.own_id == IDS["A"].to_base58()
    assert tracker.others == (PeerProgress(IDS["B"].to_base58(), after(2), 3, 4.5, True),)
    assert tracker.others[0].step == 2
    assert {peer.peer_id for peer in tracker.peers} == {IDS["A"].to_base58(), IDS["B"].to_base58()}


def say_goodbye(dht, name):
    dht.store("run_progress", None, FAR, subkey=PLACES[name], return_future=True)


def expire(dht, name):
    """Let what a peer told last grow too old for the DHT to give out."""
    del dht.records["run_progress"][PLACES[name]]


def test_a_goodbye_is_not_a_report(dht, tracker):
    dht.report("B", samples=40)
    say_goodbye(dht, "B")
    tracker.refresh()
    assert tracker.others == () and tracker.samples_accumulated == 0


def test_a_member_of_the_last_round_that_said_goodbye_is_gone_also_when_that_is_forgotten(dht, tracker):
    tracker.companions = frozenset({IDS["B"].to_base58()})
    for name in "BC":
        dht.report(name)
    tracker.refresh()
    assert tracker.gone == frozenset()
    say_goodbye(dht, "B")
    tracker.refresh()
    assert tracker.gone == {IDS["B"].to_base58()}
    expire(dht, "B")
    tracker.refresh()
    assert tracker.gone == {IDS["B"].to_base58()}
    assert [peer.peer_id for peer in tracker.others] == [IDS["C"].to_base58()]
    tracker.companions = frozenset()
    tracker.refresh()
    assert tracker.gone == frozenset(), "those that left are not remembered without an end"


def test_who_said_nothing_for_too_long_is_not_there_and_not_gone(dht, tracker):
    dht.report("B")
    tracker.refresh()
    expire(dht, "B")
    tracker.refresh()
    assert tracker.others == () and tracker.gone == frozenset()


def test_one_that_reports_what_can_t_be_moves_nobody(dht, tracker):
    move_to(tracker, after(5))
    tracker.doubts.commit(4, {IDS["A"].to_base58(): 50, IDS["B"].to_base58(): 50}, TARGET)
    dht.report("B", after(5), samples=30)
    dht.report("C", after(5), samples=10**6)
    dht.report("D", History(10**6, 10**9, b"\xff" * DIGEST_BYTES))
    tracker.refresh()
    assert not tracker.is_behind and tracker.target == after(5)
    assert {peer.peer_id: peer.samples for peer in tracker.mates} == {
        IDS["B"].to_base58(): 30,
        IDS["C"].to_base58(): TARGET - 1,
    }


MOST = MOST_ROUNDS * TARGET
LEASES = {
    "everything": [0, MAX_POSITION],
    "more than it can train": [15, 16 + MOST],
    "what nobody comes to": [10**9, 10**9 + 1],
}


@pytest.mark.parametrize("lease", LEASES)
@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "at another history"])
def test_leases_that_can_t_be_do_not_count(dht, tracker, caplog, lease, is_elsewhere):
    dht.report("B", after(1) if is_elsewhere else START, leases=LEASES[lease])
    dht.report("C", leases=[10, 10 + MOST])
    tracker.refresh()
    covered = Spans.of([(0, 10), (12, 15)])
    assert tracker.leased_by_others(covered, MOST) == Spans.of([(10, 10 + MOST)])
    named = "it leases more samples, or later ones, than it can train"
    assert (f"Peer {IDS['B'].to_base58()} is not believed: {named}" in caplog.text) == (not is_elsewhere)
    assert IDS["C"].to_base58() not in caplog.text


def test_a_lease_leaves_what_the_thread_that_trains_reports(dht, tracker):
    """Leases are told in a thread of their own: it must write nothing that a batch changes meanwhile."""
    tracker.report_local_progress(0, 7)
    reported = tracker.local_progress
    assert tracker.lease(Spans.of([(0, 5)])) and tracker.local_progress is reported
    told = Report.from_wire(dht.records["run_progress"][PLACES["A"]].value)
    assert told.leases == [0, 5] and told.samples_accumulated == 7


def test_one_that_leases_everything_keeps_nobody_from_training(dht, tracker):
    dht.report("B", leases=[0, MAX_POSITION])
    tracker.refresh()
    skip = tracker.rank_among_peers
    assert Leases(tracker, Ledger, 1000).take() == skip * FIRST_BLOCK
    assert ShardLeases(tracker, Ledger, 4).take() == skip * SHARD


def test_one_that_is_passed_over_is_not_there(dht, tracker):
    dht.report("B", after(1))
    for name in "CD":
        dht.report(name, START)
    tracker.refresh()
    assert tracker.is_behind
    tracker.doubts._passed_over[IDS["B"].to_base58()] = FAR
    tracker.refresh()
    assert not tracker.is_behind and len(tracker.others) == 2


def test_whom_the_owner_took_out_is_gone_whatever_it_reports(dht, tracker):
    dht.report("B", after(7), samples=40)
    dht.out.add(IDS["B"].to_base58())
    tracker.refresh()
    assert tracker.others == () and tracker.gone == {IDS["B"].to_base58()} and not tracker.is_behind


def test_who_comes_back_is_not_gone(dht, tracker):
    dht.report("B")
    tracker.refresh()
    say_goodbye(dht, "B")
    tracker.refresh()
    dht.report("B")
    tracker.refresh()
    assert tracker.gone == frozenset() and len(tracker.others) == 1


def test_everybody_gone_leaves_this_peer(dht, tracker):
    dht.report("B", samples=40)
    tracker.refresh()
    dht.records.clear()
    tracker.refresh()
    assert tracker.others == ()


def test_a_lone_peer_looks_and_reports_at_leisure(dht, tracker):
    tracker.refresh()
    assert tracker.global_progress.next_fetch_time > get_dht_time() + 1.0
    dht.report("B", samples=99, rate=50.0)
    tracker.refresh()
    assert tracker.global_progress.next_fetch_time <= get_dht_time() + 1.0


def test_the_more_peers_there_are_the_less_often_are_their_reports_fetched(dht, tracker):
    for name in IDS:
        dht.report(name, samples=99, rate=50.0)
    fetched_at = get_dht_time()
    tracker.refresh()
    assert tracker.fetch_every_s == FETCH_EVERY_S_A_PEER * len(tracker.peers) >= 2.0
    assert tracker.global_progress.next_fetch_time >= fetched_at + tracker.fetch_every_s


class LargeSwarm:
    """A swarm of equal peers, of which one is real, on a clock of its own.

    Each trains two samples at a time and reports them, and all become ready in the same moment.
    """

    def __init__(self, num_peers, monkeypatch):
        self.now = time.time()
        for module in (progress, progress_tracker):
            clock = "swarm_time" if module is progress else "get_dht_time"
            monkeypatch.setattr(module, clock, lambda: self.now)
        # To make a real place takes 0.1 s.
        monkeypatch.setattr(reports, "owner_of", lambda place: place.decode())
        self.dht = FakeDht()
        self.dht.peer_id, *others = (PeerID(b"\x12\x20" + bytes(31) + bytes([n])) for n in range(num_peers))
        self.dht.place = self.dht.peer_id.to_base58().encode()
        self.tracker = tracker_of(SwarmTracker, self.dht)
        self.tracker.target_batch_size = 20 * num_peers
        self.others = dict.fromkeys(others, START)
        """Where each stands, by its last report."""
        self.num_peers, self.looks, self.began_at = num_peers, 0, self.now

    def rest(self, seconds):
        """Let time pass, in which the others report, and the reports are fetched when they are due."""
        for _ in range(round(seconds / BATCH_S)):
            self.now += BATCH_S
            held = 2 * round((self.now - self.began_at) / BATCH_S)
            for peer in self.others:
                self._report(peer, held)
            if self.now >= self.tracker.global_progress.next_fetch_time:
                self.looks += 1
                self.tracker.refresh()

    def _report(self, peer, held):
        record = Report(
            peer_id=peer.to_bytes(),
            epoch=self.others[peer].step,
            samples_committed=self.others[peer].samples,
            history=self.others[peer].digest,
            samples_accumulated=held,
            samples_per_second=2 / BATCH_S,
            time=self.now,
            client_mode=False,
        )
        place = peer.to_base58().encode()
        self.dht.store("run_progress", record.dict(), FAR, subkey=place, return_future=True)

    def train_a_step(self, beside_s=0.0):
        """Train until a step is due; then take it, and say how many samples it had, of the target's.

        Args:
            beside_s: how long the round takes, while all train on.
        """
        step, own = self.tracker.history.step, self.tracker.local_progress.samples_accumulated
        while not self.tracker.ready_to_update_epoch:
            self.rest(BATCH_S)
            own += 2
            self.tracker.report_local_progress(step, own)
            assert own < 200, "no step is ever due"
        due_at = self.now
        self.rest(beside_s)
        self.tracker.performance_ema.samples_per_second = 2 / BATCH_S
        with self.tracker.pause_updates():
            self.tracker.update_history(after(step + 1, TARGET), round(2 * beside_s / BATCH_S))
        self.tracker.companions = frozenset(peer.to_base58() for peer in self.others)
        brought = dict.fromkeys([self.tracker.own_id, *self.tracker.companions], own)
        self.tracker.doubts.commit(step + 1, brought, self.tracker.target_batch_size)
        self.others, self.began_at = dict.fromkeys(self.others, after(step + 1, TARGET)), due_at
        return own * self.num_peers / self.tracker.target_batch_size


BATCH_S = 0.4
"""A step is due every 4 s."""


@pytest.mark.parametrize("num_peers", [34, 100])
@pytest.mark.parametrize("beside_s", [0.0, 1.2], ids=["sync", "overlap"])
def test_a_step_is_due_in_time_however_rarely_reports_are_fetched(monkeypatch, num_peers, beside_s):
    swarm = LargeSwarm(num_peers, monkeypatch)
    started = swarm.now
    swarm.rest(BATCH_S)
    assert 0.9 <= statistics.mean(swarm.train_a_step(beside_s) for _ in range(8)) <= 1.1
    assert swarm.looks <= 1 + (swarm.now - started) / (FETCH_EVERY_S_A_PEER * num_peers)


def test_one_that_stands_still_in_a_large_swarm_counts_for_what_it_holds_once_it_is_seen(monkeypatch):
    swarm = LargeSwarm(34, monkeypatch)
    swarm.rest(BATCH_S)
    swarm.tracker.refresh()
    held = swarm.tracker.samples_accumulated
    swarm.now += 2.0
    assert swarm.tracker.samples_accumulated == held + 33 * 10
    swarm.tracker.refresh()
    assert swarm.tracker.samples_accumulated == held


def test_reports_are_fetched_once_in_their_life_however_many_there_are(tracker):
    tracker.peers = 1000 * (PeerProgress("Qm", START, 0, 1.0, False),)
    assert tracker.fetch_every_s == tracker.metadata_expiration


def test_a_silent_dht_leaves_the_old_reports(dht, tracker, monkeypatch):
    dht.report("B", samples=40)
    tracker.refresh()
    dht.answers = False
    monkeypatch.setattr(progress, "DHT_TIMEOUT_S", 0.0)
    tracker.refresh()
    assert [peer.samples for peer in tracker.others] == [40]


def test_a_joiner_is_seen_before_its_first_sample(dht, tracker):
    move_to(tracker, after(4))
    tracker.announce()
    other = FakeDht()
    other.peer_id, other.records, other.place = IDS["B"], dht.records, PLACES["B"]
    watcher = tracker_of(SwarmTracker, other, "B")
    watcher.refresh()
    [seen] = watcher.others
    assert (seen.peer_id, seen.history, seen.samples) == (tracker.own_id, after(4), 0)


@contextlib.contextmanager
def reporting(tracker):
    """Have a tracker report in the background, as it does in a peer."""
    reporter = threading.Thread(target=lambda: asyncio.run(tracker._progress_reporter()), daemon=True)
    tracker.should_report_progress = PacedEvent(lambda: 0.0)
    reporter.start()
    try:
        yield
    finally:
        tracker.shutdown_triggered.set()
        tracker.should_report_progress.set()
        reporter.join(20)
        assert not reporter.is_alive()


def reported(dht, within_s=20.0):
    """Wait until the peer has reported something, and forget it; None if it reports nothing in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if record := dht.records.pop("run_progress", None):
            [one] = record.values()
            return one.value["epoch"]
        time.sleep(0.01)
    return None


@pytest.mark.parametrize(("cls", "is_heard"), [(SwarmTracker, True), (ProgressTracker, False)])
def test_a_peer_is_heard_whose_every_batch_is_a_step_and_upstream_still_says_nothing_of_it(
    dht, tracker, monkeypatch, cls, is_heard
):
    monkeypatch.setattr(SwarmTracker, "_progress_reporter", cls._progress_reporter)
    tracker.announce()
    with reporting(tracker):
        reported(dht)
        move_to(tracker, after(2))
        assert reported(dht, 20.0 if is_heard else 0.5) == (2 if is_heard else None)


def test_who_has_not_entered_or_is_far_behind_without_samples_is_not_reported(dht, tracker):
    with reporting(tracker):
        move_to(tracker, after(1))
        assert reported(dht, 0.5) is None
        tracker.announce()
        assert reported(dht) == 1
        dht.report("B", after(4))
        tracker.refresh()
        dht.records.clear()
        tracker.should_report_progress.set()
        assert reported(dht, 0.5) is None
        tracker.report_local_progress(1, 7)
        assert reported(dht) == 1


def test_leaving_takes_the_report_back_once(dht, tracker):
    tracker.announce()
    tracker.shutdown(timeout=1)
    assert [record.value for record in dht.records["run_progress"].values()] == [None]
    dht.records.clear()
    tracker.shutdown(timeout=1)
    assert dht.records == {}


def test_leaving_does_not_wait_for_a_dht_that_is_dead(dht, tracker):
    dht.answers, dht.is_alive = False, lambda: False
    done = threading.Event()
    threading.Thread(target=lambda: (tracker.shutdown(timeout=60), done.set()), daemon=True).start()
    assert done.wait(10)


def test_what_is_no_record_is_ignored(dht, tracker):
    dht.report("B", samples=40)
    found = dht.get("run_progress").value
    tracker._parse_swarm_progress_data(found | {b"x": ValueWithExpiration(None, FAR)})
    assert len(tracker.others) == 1 and tracker.gone == frozenset()
    tracker._parse_swarm_progress_data(SimpleNamespace())
    assert tracker.others == ()


WRONG = {
    "without a history": lambda told: {key: told[key] for key in told if key != "history"},
    "of no committed samples": lambda told: {key: told[key] for key in told if key != "samples_committed"},
    "of a short digest": lambda told: told | {"history": bytes(DIGEST_BYTES - 1)},
    "of a long digest": lambda told: told | {"history": bytes(DIGEST_BYTES + 1)},
    "of a debt": lambda told: told | {"samples_committed": -1},
    "of half a sample": lambda told: told | {"samples_committed": 0.5},
    "of something else": lambda told: "a report",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_report_that_does_not_say_where_its_peer_stands_is_nobody_s(dht, tracker, wrong):
    dht.report("B", after(2), samples=40)
    dht.report("C", after(1))
    [told, *_] = dht.records["run_progress"].values()
    dht.store("run_progress", WRONG[wrong](told.value), FAR, subkey=PLACES["B"], return_future=True)
    tracker.refresh()
    assert [peer.peer_id for peer in tracker.others] == [IDS["C"].to_base58()]
    assert tracker.target == after(1)


def record_of(value):
    """What a node of the DHT holds of a report, signatures aside."""
    loaded = DHTProtocol.serializer.dumps
    subkey = loaded(PLACES["B"])
    return DHTRecord(DHTID.generate(source="run_progress").to_bytes(), subkey, loaded(value), FAR)


def test_every_node_keeps_reports_and_goodbyes_and_no_nonsense(tracker):
    validators = []
    tracker.dht.add_validators = validators.extend
    tracker = tracker_of(SwarmTracker, tracker.dht)
    first, *others = (one for one in validators if isinstance(one, progress.SchemaValidator))
    for other in others:
        assert first.merge_with(other)  # as a node does
    move_to(tracker, after(3))
    told = tracker.local_progress.dict()
    assert first.validate(record_of(told)) and first.validate(record_of(None))
    assert not first.validate(record_of(told | {"history": b"short"}))
    assert not first.validate(record_of(told | {"samples_committed": -1}))
