"""How samples are counted, and who is there and behind, over a DHT that is a dict."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from tests.kit.stepping import after
from trahiv_cli.optim import progress
from trahiv_cli.optim.history import DIGEST_BYTES, History
from trahiv_cli.optim.leases import MOST_ROUNDS
from trahiv_cli.optim.ledger import MAX_POSITION, Spans
from trahiv_cli.optim.majority import Way, went_by
from trahiv_cli.optim.progress import FETCH_EVERY_S_A_PEER, PacedEvent, SwarmTracker
from trahiv_cli.optim.reports import PeerProgress, Report
from trahiv_cli.swarm.records import own_place, owner_of

TARGET, FAR = 100, 1e12
START = History()
KEYS = {name: RSAPrivateKey() for name in "ABCDEFGHIJKLMNOPQRST"}
PLACES = {name: own_place(key) for name, key in KEYS.items()}
IDS = {name: owner_of(place) for name, place in PLACES.items()}


class Awaitable(concurrent.futures.Future):
    """What hivemind's futures are to asyncio."""

    def __await__(self):
        return asyncio.wrap_future(self).__await__()


class FakeDht:
    """A DHT of one process that answers at once, or not at all: records by key and subkey."""

    def __init__(self):
        self.peer_id, self.place, self.client_mode = PeerID.from_base58(IDS["A"]), PLACES["A"], False
        self.records, self.answers, self.out, self.validators = {}, True, set(), []
        self.add_validators, self.is_alive = self.validators.extend, lambda: True

    def get(self, key, latest=False, return_future=False):
        held = self.records.get(key)
        found = ValueWithExpiration(dict(held), FAR) if held else None
        return self._future(found) if return_future else found

    def store(self, key, value, expiration_time, subkey, return_future):
        self.records.setdefault(key, {})[subkey] = ValueWithExpiration(value, expiration_time)
        return self._future(True)

    def _future(self, value):
        future = Awaitable()
        if self.answers:
            future.set_result(value)
        return future

    def tell(self, place, value):
        self.store("run_progress", value, FAR, subkey=place, return_future=True)

    def report(self, name, history=START, samples=0, rate=1.0, client_mode=False, age_s=0.0, **told):
        """Have another peer report itself, and what it `told` besides."""
        record = Report(
            peer_id=PeerID.from_base58(IDS[name]).to_bytes(),
            epoch=history.step,
            samples_committed=history.samples,
            history=history.digest,
            samples_accumulated=samples,
            samples_per_second=rate,
            time=get_dht_time() - age_s,
            client_mode=client_mode,
            **told,
        )
        self.tell(PLACES[name], record.dict())

    def expire(self, name):
        """Let what a peer told last grow too old for the DHT to give out."""
        del self.records["run_progress"][PLACES[name]]


def move_to(tracker, history):
    with tracker.pause_updates():
        tracker.update_history(history)


def tracker_of(dht):
    # Its thread would only repeat what refresh does.
    out = dht.out.__contains__
    tracker = SwarmTracker(dht, "run", TARGET, private_key=KEYS["A"], start=False, is_out=out)
    tracker.shutdown_complete.set()
    return tracker


@pytest.fixture
def dht():
    return FakeDht()


@pytest.fixture
def tracker(dht):
    return tracker_of(dht)


@contextlib.contextmanager
def started(tracker):
    """Have a tracker report and fetch in its thread."""
    tracker.shutdown_complete.clear()
    tracker.start()
    try:
        yield
    finally:
        tracker.abandon()
        tracker.join(10)


def test_a_commit_does_not_wait_for_a_dht_that_is_slow_to_answer(dht, tracker, monkeypatch):
    dht.report("B", after(1), samples=40)
    found, answer, asked = dht.get("run_progress"), Awaitable(), threading.Event()
    monkeypatch.setattr(dht, "get", lambda *args, **kwargs: asked.set() or answer)
    tracker.global_progress.next_fetch_time = 0.0
    with started(tracker):
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


# -- which samples count --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "counted"),
    [
        ([], 30),
        ([(after(5), 40), (after(5), 20)], 90),
        ([(after(4), 40), (after(6), 20), (after(5), 7)], 37),
        ([(after(5, branch=b"!"), 40), (after(5, samples=9), 20)], 30),
    ],
    ids=["alone", "two of the same history", "at other steps", "of other histories"],
)
def test_samples_of_others_with_the_same_history_count(dht, tracker, others, counted):
    move_to(tracker, after(5))
    dht.report("A", after(5), samples=90)  # this peer's own report, out of date
    for name, (history, samples) in zip("BCD", others, strict=False):
        dht.report(name, history, samples)
    tracker.refresh()
    tracker.report_local_progress(5, 30)
    assert tracker.samples_accumulated == counted
    assert [mate.samples for mate in tracker.mates] == [one for told, one in others if told == after(5)]
    tracker.report_local_progress(5, 60)
    assert tracker.samples_accumulated == counted + 30, "no fetch loses what was added meanwhile"


def test_a_step_may_begin_when_the_samples_are_there_and_not_when_an_estimate_says_so(dht, tracker):
    dht.report("B", samples=1, rate=50.0, age_s=60.0)  # by now it should have all
    assert tracker.refresh() and not tracker.ready_to_update_epoch
    tracker.performance_ema.samples_per_second = 1e20  # hivemind's greatest: of a batch that took no time
    tracker.report_local_progress(0, TARGET - 1)
    assert tracker.ready_to_update_epoch
    assert Report.from_wire(tracker.local_progress.dict()).samples_accumulated == TARGET - 1


# -- who is behind --------------------------------------------------------------------------------

MANY_STEPS, MANY_SAMPLES = after(9, samples=10), after(5, samples=20)
SMALL, GREAT = sorted((after(3, branch=b"a"), after(3, branch=b"b")), key=lambda half: half.digest)


@pytest.mark.parametrize(
    ("own", "others", "target"),
    [
        (START, [after(1)], after(1)),
        (after(3), [after(2)], after(3)),
        (START, [after(2), after(7), after(4)], after(7)),
        (MANY_STEPS, [MANY_SAMPLES], MANY_SAMPLES),
        (MANY_SAMPLES, [MANY_STEPS], MANY_SAMPLES),
        (SMALL, [GREAT], GREAT),
        (GREAT, [SMALL], GREAT),
    ],
)
def test_a_peer_is_behind_the_furthest_of_all_by_samples_and_then_by_digest(
    dht, tracker, own, others, target
):
    move_to(tracker, own)
    dht.report("A", after(9))  # of its life before
    for name, history in zip("BCD", others, strict=False):
        dht.report(name, history)
    dht.report("E", after(20), client_mode=True)  # could not give its state
    tracker.report_local_progress(own.step, TARGET)
    tracker.refresh()
    assert tracker.target == target and tracker.is_behind == (target != own)
    assert tracker.ready_to_update_epoch == (target == own)
    move_to(tracker, target)
    assert not tracker.is_behind and tracker.samples_accumulated == 0


def test_a_report_says_how_its_peer_came_there_and_what_it_held(dht, tracker):
    for step in (1, 2):
        move_to(tracker, after(step))
    tracker.attest(after(1), b"12345678", is_given=True)
    assert dht.records == {}, "a peer that takes no part yet reports nothing"
    tracker.announce()
    tracker.refresh()
    [told] = tracker.peers
    assert (told.peer_id, told.history, told.samples) == (tracker.own_id, after(2), 0), "before any sample"
    assert [went_by(told, after(step)) for step in (0, 1, 2)] == [True] * 3
    assert {state[2] for state in told.way.states} == {b"12345678"}
    tracker.attest(after(1), b"another.", is_given=True)
    tracker.vouch(after(3))
    tracker.refresh()
    assert {state[2] for state in tracker.peers[0].way.states} == {b"another."}, "at once"
    assert went_by(tracker.peers[0], after(3))


# -- who is there ---------------------------------------------------------------------------------


def test_a_member_of_the_last_round_that_said_goodbye_is_gone_also_when_that_is_forgotten(dht, tracker):
    tracker.companions = frozenset({IDS["B"]})

    def gone():
        tracker.refresh()
        return tracker.gone

    for name in "BC":
        dht.report(name, samples=40)
    assert gone() == frozenset()
    dht.tell(PLACES["B"], None)
    assert gone() == {IDS["B"]}
    dht.expire("B")
    assert gone() == {IDS["B"]} and [peer.peer_id for peer in tracker.others] == [IDS["C"]]
    tracker.companions = frozenset()
    assert gone() == frozenset(), "those that left are not remembered without an end"
    dht.tell(PLACES["C"], None)
    assert gone() == {IDS["C"]}
    dht.report("C")
    assert gone() == frozenset() and len(tracker.others) == 1, "it came back"
    dht.expire("C")
    assert gone() == frozenset() and tracker.others == (), "it said nothing for too long"
    dht.report("B", after(7), samples=40)
    dht.out.add(IDS["B"])
    assert gone() == {IDS["B"]} and tracker.others == () and not tracker.is_behind, "the owner took it out"


def test_one_that_reports_what_can_t_be_moves_nobody(dht, tracker):
    dht.report("B", after(2), samples=3, rate=4.5, client_mode=True, rounds=b"12345")  # no way at all
    tracker.refresh()
    assert tracker.others == (PeerProgress(IDS["B"], after(2), 3, 4.5, True, way=Way()),)
    move_to(tracker, after(5))
    tracker.doubts.commit(4, {IDS["A"]: 50, IDS["B"]: 50}, TARGET)
    dht.report("B", after(5), samples=30)
    dht.report("C", after(5), samples=10**6)
    dht.report("D", History(10**6, 10**9, b"\xff" * DIGEST_BYTES))
    tracker.refresh()
    assert not tracker.is_behind and tracker.target == after(5)
    assert {one.peer_id: one.samples for one in tracker.mates} == {IDS["B"]: 30, IDS["C"]: TARGET - 1}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda told: {key: told[key] for key in told if key != "history"},
        lambda told: told | {"history": bytes(DIGEST_BYTES + 1)},
        lambda told: told | {"samples_committed": -1},
        lambda told: told | {"samples_committed": 0.5},
        lambda told: "a report",
        lambda told: {1: 2},
        lambda told: told | {"peer_id": PeerID.from_base58(IDS["C"]).to_bytes()},
    ],
    ids=["no history", "a long digest", "a debt", "half a sample", "a text", "names", "another's name"],
)
def test_a_report_that_does_not_say_where_its_peer_stands_is_nobody_s(dht, tracker, wrong):
    dht.report("B", after(2), samples=40)
    dht.report("C", after(1))
    [told, *_] = dht.records["run_progress"].values()
    dht.tell(PLACES["B"], wrong(told.value))
    dht.tell(b"x", None)
    tracker.refresh()
    assert [peer.peer_id for peer in tracker.others] == [IDS["C"]] and tracker.gone == frozenset()
    assert tracker.target == after(1)


def test_every_node_keeps_reports_and_goodbyes_and_no_nonsense(dht, tracker):
    first, *others = (one for one in dht.validators if isinstance(one, progress.SchemaValidator))
    for other in others:
        assert first.merge_with(other)  # as a node does
    move_to(tracker, after(3))
    told = tracker.local_progress.dict()

    def is_kept(value):
        dumps = DHTProtocol.serializer.dumps
        key = DHTID.generate(source="run_progress").to_bytes()
        return first.validate(DHTRecord(key, dumps(PLACES["B"]), dumps(value), FAR))

    assert is_kept(told) and is_kept(None)
    assert not is_kept(told | {"history": b"short"}) and not is_kept(told | {"samples_committed": -1})


# -- leases ---------------------------------------------------------------------------------------

MOST = MOST_ROUNDS * TARGET


@pytest.mark.parametrize("lease", [[0, MAX_POSITION], [15, 16 + MOST], [10**9, 10**9 + 1]], ids=str)
@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "at another history"])
def test_leases_that_can_t_be_do_not_count(dht, tracker, caplog, lease, is_elsewhere):
    dht.report("B", after(1) if is_elsewhere else START, leases=lease)
    dht.report("C", leases=[10, 10 + MOST])
    tracker.refresh()
    covered = Spans.of([(0, 10), (12, 15)])
    assert tracker.leased_by_others(covered, MOST) == Spans.of([(10, 10 + MOST)])
    named = "it leases more samples, or later ones, than it can train"
    assert (f"Peer {IDS['B']} is not believed: {named}" in caplog.text) == (not is_elsewhere)
    assert IDS["C"] not in caplog.text


def test_a_lease_leaves_what_the_thread_that_trains_reports(dht, tracker, monkeypatch):
    """Leases are told in a thread of their own: it must write nothing that a batch changes meanwhile."""
    tracker.report_local_progress(0, 7)
    reported = tracker.local_progress
    assert tracker.lease(Spans.of([(0, 5)])) and tracker.local_progress is reported
    told = Report.from_wire(dht.records["run_progress"][PLACES["A"]].value)
    assert told.leases == [0, 5] and told.samples_accumulated == 7
    dht.report("B", samples=40)
    tracker.refresh()
    monkeypatch.setattr(progress, "DHT_TIMEOUT_S", 0.0)
    dht.answers = False
    assert not tracker.lease(Spans.of([(0, 9)])) and not tracker.refresh()
    assert [peer.samples for peer in tracker.others] == [40], "a silent DHT leaves the old reports"


# -- how often ------------------------------------------------------------------------------------


def test_the_more_peers_there_are_the_less_often_are_their_reports_fetched(dht, tracker):
    tracker.refresh()
    assert tracker.global_progress.next_fetch_time > get_dht_time() + 1.0, "a lone peer looks at leisure"
    dht.report("B", samples=99, rate=50.0)
    tracker.refresh()
    assert tracker.global_progress.next_fetch_time <= get_dht_time() + 1.0
    for name in IDS:
        dht.report(name, samples=99, rate=50.0)
    fetched_at = get_dht_time()
    tracker.refresh()
    assert tracker.fetch_every_s == FETCH_EVERY_S_A_PEER * len(tracker.peers) >= 2.0
    assert tracker.global_progress.next_fetch_time >= fetched_at + tracker.fetch_every_s
    tracker.peers = 1000 * tracker.others[:1]
    assert tracker.fetch_every_s == tracker.metadata_expiration, "once in a report's life"


def test_where_reports_are_fetched_rarely_others_count_as_having_trained_on(dht, tracker, monkeypatch):
    now = time.time()
    monkeypatch.setattr(progress, "swarm_time", lambda: now)
    move_to(tracker, after(1, samples=10**4))
    tracker.doubts.commit(1, dict.fromkeys(IDS.values(), 500), TARGET)
    for name in IDS.keys() - {"A"}:
        dht.report(name, tracker.history, samples=10, rate=2.0)
    tracker.refresh()
    assert tracker.fetch_every_s >= progress.GUESSED_FROM_S and tracker.samples_accumulated == 19 * 10
    now += 2.0
    assert tracker.samples_accumulated == 19 * 14
    tracker.refresh()
    assert tracker.samples_accumulated == 19 * 10, "those that stand still count for what they hold"

    tracker.performance_ema.samples_per_second = 2.0
    with tracker.pause_updates():  # a round that took 1 s beside training
        tracker.update_history(tracker.history.extend(samples=10, proof=b"next"), samples=2)
    assert tracker.samples_accumulated == 2
    tracker.companions = frozenset(IDS.values())
    assert tracker.samples_accumulated == 2 + 19 * 2, "those that were in it have trained, too"
    tracker.refresh()
    assert tracker.target == tracker.history and tracker.samples_accumulated == 2 + 19 * 2


# -- what is reported in the background -----------------------------------------------------------


def test_what_is_reported_in_the_background(dht, tracker):
    tracker.should_report_progress = PacedEvent(lambda: 0.0)
    dht.get = lambda *args, **kwargs: Awaitable()  # only this peer's own reports come in

    def reported(within_s=20.0):
        """Wait for a report, and forget it; None if there is none in time."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if record := dht.records.pop("run_progress", None):
                return record[PLACES["A"]].value["epoch"]
            time.sleep(0.01)
        return None

    with started(tracker):
        move_to(tracker, after(1))
        assert reported(0.3) is None, "it has not entered"
        tracker.announce()
        assert reported() == 1
        move_to(tracker, after(2))
        assert reported() == 2, "though its every batch is a step"
        tracker.others = tracker.peers = (PeerProgress(IDS["B"], after(6), 0, 1.0, False),)
        tracker.should_report_progress.set()
        assert reported(0.3) is None, "it takes over a state"
        tracker.report_local_progress(2, 7)
        assert reported() == 2
    assert not tracker.is_alive() and tracker.shutdown_complete.is_set(), "a look-up is still unanswered"


def test_leaving_takes_the_report_back_once_and_does_not_wait_for_a_dht_that_is_dead(dht, tracker):
    tracker.announce()
    tracker.shutdown(timeout=1)
    assert [record.value for record in dht.records["run_progress"].values()] == [None]
    dht.records.clear()
    tracker.shutdown(timeout=1)
    assert dht.records == {}
    other = tracker_of(dht)
    dht.answers, dht.is_alive = False, lambda: False
    done = threading.Event()
    threading.Thread(target=lambda: (other.shutdown(timeout=60), done.set()), daemon=True).start()
    assert done.wait(10)
