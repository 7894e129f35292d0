"""How far the swarm is: what each peer has reported towards the next step.

1. A peer reports its samples at a pace that its link bears, and its way through rounds with them (`run`).
2. It reads the others' reports, which they send it (`refresh`).
3. It reads them with doubts (`Doubts`): what can't be is nobody's, or does not count.
4. From them follow the state to come to (`target`), and whether a step is due (`ready_to_update_epoch`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from hivemind.dht.schema import SchemaValidator
from hivemind.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress, ProgressTracker
from hivemind.utils import ValueWithExpiration

from trahiv_cli.optim.history import MOST_SAMPLES, History
from trahiv_cli.optim.ledger import Spans
from trahiv_cli.optim.majority import Doubts, Fork, Standing
from trahiv_cli.optim.reports import Past, PeerProgress, Report, ReportSchema, read_reports
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.corrections.streams import UNREACHABLE

DHT_TIMEOUT_S = 5.0
REPORT_EVERY_S = 0.25  # at most; upstream stores a signed record for every local batch
REPORTS_A_STEP = 10
"""At most, in the time until a step is due: reports of two every 0.25 s took 4 % of a link of 5 Mbit/s."""

ALONE_EVERY_S = 2.0  # while nobody else is there; with the pace of a pair, reports take 2 % of its time
REPORT_EVERY_S_A_PEER = 0.035
"""A peer reports at most once in this time times the number of peers. A report of 1.9 kB at most goes to each
of them: that is 54 kB/s at most, 9 % of a link of 5 Mbit/s."""

GUESSED_FROM_S = 1.0
"""If peers report less often than that, from 29 peers on, they count as having trained on since. In smaller
swarms samples count when they are reported: then a peer that pauses makes no step smaller."""


class SwarmTracker(ProgressTracker):
    """`ProgressTracker` that counts samples instead of guessing when they will be there.

    Upstream lets a step begin when the *estimated* time has come (progress_tracker.py:130), so a peer that
    pauses makes the others step on smaller batches. Here the total is what others last reported plus what
    this peer holds; in large swarms (`GUESSED_FROM_S`) also what the others have trained since, at the speed
    that they report. `is_out` says whether the swarm's owner has taken a peer out.
    """

    others: tuple[PeerProgress, ...] = ()
    """The last report of each other peer."""

    def __init__(
        self, dht: Any, prefix: str, *args: Any, start: bool, is_out: Callable[[str], bool], **kwargs: Any
    ) -> None:
        self.own_id = str(dht.peer_id.to_base58())
        self.history = History()
        self.past = Past()
        self.leases = Spans()
        """This peer's state, how it came there, and what it has leased: each report has them."""
        self.doubts = Doubts()
        self._fork = Fork()
        self.gone: frozenset[str] = frozenset()
        """Ids of the peers that have said goodbye."""
        self.missing: frozenset[str] = frozenset()
        """Ids of the peers that have reported, do so no more, and did not say goodbye."""
        self.steps_a_round = 1
        """Steps of the swarm that the next round is."""
        self.vouched: History | None = None
        """The state after a round that this peer voted for, without knowing that it was committed."""
        self.companions: frozenset[str] = frozenset()
        """Ids of those in the round that led here, or that gave this state; set after `update_history`."""
        # When this peer began to train towards the next step, and when `others` was fetched.
        self._begun_at = self._fetched_at = swarm_time()
        self._is_announced = False
        self._is_out = is_out
        self._way_back: History | None = None
        # Before upstream adds its own schema, of which our reports are not, and looks for reports.
        dht.add_validators([SchemaValidator(ReportSchema, prefix=prefix)])
        super().__init__(dht, prefix, *args, start=False, **kwargs)
        self._local_public_key = self.dht.place
        self._is_urgent = threading.Event()  # set: this peer reports without a pause
        if start:
            self.start()

    def _report_every_s(self) -> float:
        eta_s = 0.0 if math.isinf(self.eta_s) else self.eta_s  # inf: nobody knows yet
        by_step_s = min(ALONE_EVERY_S, eta_s / REPORTS_A_STEP)
        return max(self.fetch_every_s, by_step_s) if self.others else ALONE_EVERY_S

    @property
    def fetch_every_s(self) -> float:
        """The shortest time between two reports of a peer, or two looks at those of others, in seconds."""
        every_s = max(REPORT_EVERY_S, REPORT_EVERY_S_A_PEER * (1 + len(self.others)))
        return min(every_s, float(self.metadata_expiration) / 2)

    # -- how far all are ---------------------------------------------------------------------------

    @property
    def mates(self) -> tuple[PeerProgress, ...]:
        """The other peers that hold the state that this peer holds."""
        return tuple(peer for peer in self.others if peer.history == self.history)

    @property
    def _coming(self) -> list[PeerProgress]:
        """Members of the last round whose last reports are from before it."""
        late = (one for one in self.others if one.peer_id in self.companions and one.history != self.history)
        return [peer for peer in late if self.past.went_by(peer.history)]

    @property
    def samples_accumulated(self) -> int:
        """Samples towards the next step: those of the others that hold this peer's state, and its own."""
        own: int = self.local_progress.samples_accumulated
        seen = [(peer, peer.samples, self._fetched_at) for peer in self.mates]
        if self.fetch_every_s < GUESSED_FROM_S:
            return own + sum(samples for _, samples, _ in seen)
        now = swarm_time()
        target = self.target_batch_size
        guessed = 0.0
        for peer, samples, at in (*seen, *((peer, 0, self._begun_at) for peer in self._coming)):
            by_now = samples + peer.samples_per_second * max(0.0, now - at)
            guessed += min(by_now, self.doubts.believed_samples(peer.peer_id, math.ceil(by_now), target))
        return own + int(guessed)

    @property
    def standing(self) -> Standing:
        """This peer's view of where all peers stand, by their last reports."""
        return Standing(
            own=self.history,
            witnesses=self.others,
            mates=[*self.mates, *self._coming],
            holds_on=self.doubts.is_together,
            vouched=self.vouched,
        )

    @property
    def target(self) -> History:
        """The history that this peer should come to, of those that can be downloaded; else its own.

        Its rank is lower than this peer's only where most others have gone on another way.
        """
        return self._way_back or self.standing.target

    @property
    def eta_s(self) -> float:
        """Seconds until the swarm holds its target, by what peers last reported; inf if nothing is known."""
        return max(0.0, float(self.global_progress.eta_next_epoch) - swarm_time())

    @property
    def is_behind(self) -> bool:
        """Whether the swarm has a state that this peer should take over."""
        return self.target != self.history

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether the swarm holds `target_batch_size` samples for the step that this peer is at."""
        return not self.is_behind and self.samples_accumulated >= self.target_batch_size

    # -- what this peer reports --------------------------------------------------------------------

    def update_history(self, history: History, samples: int = 0, *, is_next: bool = True) -> None:
        """Move to another state, which is that after one more round or not, and report it at once.

        This peer holds `samples` already towards the step after it. The caller must hold `pause_updates`.
        """
        if not is_next:
            self.past.begin(history)
        elif history != self.history:
            self.past.go_on(history)
        self.companions = frozenset()
        # What it holds already it has trained during a round, as the others have.
        begun_at = swarm_time() - samples / self.performance_ema.samples_per_second
        self._begun_at = max(self._begun_at, begun_at)
        self.history = history
        self.vouched = None
        self._way_back = None
        self.update_epoch(history.step)
        # Not by `report_local_progress`, which would count them as trained since the last report.
        self.local_progress = self._get_local_progress(history.step, samples)
        self._report_at_once()

    def _get_local_progress(self, local_epoch: int, samples_accumulated: int) -> Report:
        plain = super()._get_local_progress(local_epoch, samples_accumulated)
        speed = min(plain.samples_per_second, float(MOST_SAMPLES))  # of a batch that took no time
        return Report(
            **plain.dict() | {"samples_per_second": speed},
            samples_committed=self.history.samples,
            history=self.history.digest,
        )

    def announce(self) -> Any:
        """Report this peer at once, from now on; return a future of whether somebody keeps the report."""
        self._is_announced = True
        more = {"leases": self.leases.to_wire()} | self.past.to_wire(self.vouched)
        return self._store(self.local_progress.dict() | more)

    def _store(self, value: dict[str, Any] | None) -> Any:
        return self.dht.store(
            key=self.training_progress_key,
            subkey=self._local_public_key,
            value=value,
            expiration_time=swarm_time() + self.metadata_expiration,
            return_future=True,
        )

    def vouch(self, history: History) -> None:
        """Say that this peer voted for the round that leads there, whether or not others committed it."""
        self.vouched = history
        if self._is_announced:
            self.announce()

    def attest(self, history: History, common: bytes, *, is_given: bool = False) -> None:
        """Say from now on what all peers of a history hold; see `Past.attest`. Safe in any thread."""
        self.past.attest(history, common, is_given=is_given)
        if is_given and self._is_announced:  # somebody waits for it
            self.announce()

    def lease(self, leases: Spans) -> bool:
        """Report what this peer leased, and read what others did; say whether both came to pass in time."""
        self.leases = leases  # and nothing else: the thread that trains may report a batch meanwhile
        try:
            return bool(self.announce().result(timeout=DHT_TIMEOUT_S)) and self.refresh()
        except concurrent.futures.TimeoutError:
            return False

    # -- what others report ------------------------------------------------------------------------

    def refresh(self, timeout_s: float | None = None) -> bool:
        """Fetch all reports now; False if none come within `timeout_s` (None: 5 s), and the old ones stay.

        The lock that a commit takes is held to read them, not to wait for them as upstream does
        (progress_tracker.py:264): 3 to 15 s where nodes are silent.
        """
        look_up = self.dht.get(self.training_progress_key, latest=True, return_future=True)
        try:
            found = look_up.result(timeout=DHT_TIMEOUT_S if timeout_s is None else timeout_s)
        except concurrent.futures.TimeoutError:
            return False
        with self.lock_global_progress:
            self.global_progress = self._parse_swarm_progress_data(found.value if found else None)
        return True

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        # Each peer renews its report in half of its time, and the new one is here within a second.
        quiet_until = swarm_time() + self.metadata_expiration / 2 - 1.0
        newest, gone, quiet = read_reports(metadata, self._is_out, quiet_until)
        own = newest.pop(self.own_id, None)
        self.missing = self.missing.union(one.peer_id for one in self.others) - newest.keys() - gone
        steps = {peer: report.epoch for peer, report in newest.items()}
        for peer in self.doubts.unbelieved(steps, self.history.step, self.steps_a_round):
            newest.pop(peer, None)
        believed = self.doubts.believed_samples
        target = self.target_batch_size
        self.others = tuple(
            PeerProgress.of(
                peer, report, believed(peer, report.samples_accumulated, target), is_quiet=peer in quiet
            )
            for peer, report in newest.items()
        )
        self._fetched_at = now = swarm_time()
        self._way_back = self._fork.look(self.standing, self.past)
        gone |= self.gone & self.companions  # of others nobody asks
        self.gone = frozenset(gone - newest.keys())
        known = set(LocalTrainingProgress.__fields__)
        step = self.target.step  # hivemind's takes no others
        plain = {
            peer: ValueWithExpiration(report.dict(include=known), float("inf"))
            for peer, report in {self.own_id: own, **newest}.items()
            if report is not None and (report is own or report.epoch <= step)
        }
        progress = super()._parse_swarm_progress_data(plain)
        progress.next_fetch_time = max(progress.next_fetch_time, now + self.fetch_every_s)
        if not self.others:
            progress.next_fetch_time = now + ALONE_EVERY_S
        return progress

    # -- the threads that report and fetch ---------------------------------------------------------

    def run(self) -> None:
        """Report news at the pace of reports, and all else in good time before it expires.

        Not while this peer takes over a state: others would wait for it. Upstream (progress_tracker.py:216)
        falls silent, too, where each batch is a step.
        """
        threading.Thread(target=self._keep_fetching, daemon=True).start()
        while not self.shutdown_triggered.is_set():
            self.should_report_progress.wait(self.metadata_expiration / 2)
            self.should_report_progress.clear()
            self._is_urgent.clear()
            told = self.local_progress
            is_there = told.samples_accumulated > 0 or told.epoch >= self.target.step - 1
            if self._is_announced and is_there and not self.shutdown_triggered.is_set():
                self.announce()
            self._is_urgent.wait(self._report_every_s())
        self.shutdown_complete.set()

    def _report_at_once(self) -> None:
        self.should_report_progress.set()
        self._is_urgent.set()

    def _keep_fetching(self) -> None:
        """Fetch everybody's reports when they are due.

        Whatever it fails by, it goes on: a peer that reports and looks no more would hold the others up.
        """
        while not self.shutdown_triggered.wait(max(0.0, self.global_progress.next_fetch_time - swarm_time())):
            if self.global_progress.next_fetch_time > swarm_time():
                continue  # a refresh meanwhile has put the next one off
            with contextlib.suppress(*UNREACHABLE, OSError, concurrent.futures.CancelledError):
                if self.refresh(2 * DHT_TIMEOUT_S):
                    continue
            self.shutdown_triggered.wait(DHT_TIMEOUT_S)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop reporting, and take this peer's report back; upstream does not wait until that is sent."""
        if self.shutdown_triggered.is_set():
            return
        self.abandon()
        self.shutdown_complete.wait(timeout)
        goodbye = self._store(None)
        deadline = time.monotonic() + (timeout or DHT_TIMEOUT_S)
        while not goodbye.done() and self.dht.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def abandon(self) -> None:
        """End without a goodbye: nobody is left to say it through."""
        self.shutdown_triggered.set()
        self._report_at_once()
