"""How samples are counted, over a DHT that is a dict."""

import concurrent.futures
import threading
from types import SimpleNamespace

import pytest
from hivemind.optim.progress_tracker import LocalTrainingProgress, ProgressTracker
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time

from trahiv_cli.optim import progress
from trahiv_cli.optim.progress import PeerProgress, SwarmTracker

TARGET = 100
FAR = 1e12
IDS = {name: PeerID(b"\x12\x20" + name.encode() * 32) for name in "ABCD"}


class FakeDht:
    """A DHT of one process that answers at once: records by key and subkey."""

    def __init__(self):
        self.peer_id, self.client_mode, self.records, self.answers = IDS["A"], False, {}, True

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

    def report(self, name, step=0, samples=0, rate=1.0, client_mode=False, age_s=0.0):
        """Have another peer report itself."""
        told = LocalTrainingProgress(
            peer_id=IDS[name].to_bytes(),
            epoch=step,
            samples_accumulated=samples,
            samples_per_second=rate,
            time=get_dht_time() - age_s,
            client_mode=client_mode,
        )
        self.store("run_progress", told.dict(), FAR, subkey=name.encode(), return_future=True)


def tracker_of(cls, dht):
    tracker = cls(dht, "run", TARGET, start=False)  # its thread would only repeat what refresh does
    tracker.shutdown_complete.set()
    return tracker


@pytest.fixture
def dht():
    return FakeDht()


@pytest.fixture
def tracker(dht):
    return tracker_of(SwarmTracker, dht)


def test_a_peer_alone_counts_its_own_samples(tracker):
    tracker.report_local_progress(0, 30)
    tracker.refresh()
    assert tracker.samples_accumulated == 30 and tracker.others == ()
    assert not tracker.ready_to_update_epoch


def test_samples_of_others_at_the_same_step_count(dht, tracker):
    dht.report("B", samples=40)
    dht.report("C", samples=20)
    tracker.report_local_progress(0, 30)
    tracker.refresh()
    assert tracker.samples_accumulated == 90


def test_samples_of_others_at_other_steps_do_not_count(dht, tracker):
    tracker.update_step(5)
    dht.report("B", step=4, samples=40)
    dht.report("C", step=6, samples=20)
    dht.report("D", step=5, samples=7)
    tracker.report_local_progress(5, 30)
    tracker.refresh()
    assert tracker.samples_accumulated == 37


def test_own_samples_are_those_held_and_not_those_reported(dht, tracker):
    dht.report("A", samples=90)  # this peer's own, out of date
    dht.report("B", samples=40)
    tracker.refresh()
    tracker.report_local_progress(0, 30)
    assert tracker.samples_accumulated == 70
    tracker.report_local_progress(0, 0)
    assert tracker.samples_accumulated == 40


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
    tracker.global_progress = tracker._parse_swarm_progress_data(found)
    return tracker


def test_an_estimate_that_is_over_begins_no_step(dht, tracker):
    assert not pause(dht, tracker).ready_to_update_epoch


def test_upstream_still_begins_a_step_when_its_estimate_is_over(dht):
    assert pause(dht, tracker_of(ProgressTracker, dht)).ready_to_update_epoch


def test_a_peer_is_behind_when_another_has_taken_a_step(dht, tracker):
    dht.report("B", step=1)
    tracker.report_local_progress(0, TARGET)
    tracker.refresh()
    assert tracker.is_behind and not tracker.ready_to_update_epoch
    tracker.update_step(1)
    assert not tracker.is_behind and tracker.samples_accumulated == 0


def test_a_peer_is_not_behind_those_who_are_behind_it(dht, tracker):
    tracker.update_step(3)
    dht.report("B", step=2)
    tracker.refresh()
    assert not tracker.is_behind


def test_nobody_is_behind_a_client_that_could_not_give_its_state(dht, tracker):
    dht.report("B", step=9, client_mode=True)
    tracker.refresh()
    assert not tracker.is_behind


def test_reports_are_told_apart_by_peer(dht, tracker):
    dht.report("A", samples=1)
    dht.report("B", step=2, samples=3, rate=4.5, client_mode=True)
    tracker.refresh()
    assert tracker.own_id == IDS["A"].to_base58()
    assert tracker.others == (PeerProgress(IDS["B"].to_base58(), 2, 3, 4.5, True),)
    assert {peer.peer_id for peer in tracker.peers} == {IDS["A"].to_base58(), IDS["B"].to_base58()}


def test_a_goodbye_is_not_a_report(dht, tracker):
    dht.report("B", samples=40)
    dht.store("run_progress", None, FAR, subkey=b"B", return_future=True)
    tracker.refresh()
    assert tracker.others == () and tracker.samples_accumulated == 0


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


def test_a_silent_dht_leaves_the_old_reports(dht, tracker, monkeypatch):
    dht.report("B", samples=40)
    tracker.refresh()
    dht.answers = False
    monkeypatch.setattr(progress, "DHT_TIMEOUT_S", 0.0)
    tracker.refresh()
    assert [peer.samples for peer in tracker.others] == [40]


def test_a_joiner_is_seen_before_its_first_sample(dht, tracker):
    tracker.update_step(4)
    tracker.announce()
    other = FakeDht()
    other.peer_id, other.records = IDS["B"], dht.records
    watcher = tracker_of(SwarmTracker, other)
    watcher.refresh()
    assert [(peer.peer_id, peer.step, peer.samples) for peer in watcher.others] == [(tracker.own_id, 4, 0)]


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
    assert len(tracker.others) == 1
    tracker._parse_swarm_progress_data(SimpleNamespace())
    assert tracker.others == ()
