"""The progress of the swarm: the reports of all peers towards the next step.

1. A peer reports its samples, and the rounds that it came through, at a rate that its link bears (`run`).
2. It reads the reports that the other peers send to it (`refresh`).
3. It ignores impossible reports, and limits the samples that count (`Plausibility`).
4. The reports decide which state to reach (`target`), and whether a step is due (`ready_to_update_epoch`).
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

from trahiv_cli.clock import swarm_time
from trahiv_cli.net.streams import UNREACHABLE
from trahiv_cli.progress.committed import CommittedCell
from trahiv_cli.progress.history import MOST_SAMPLES, History
from trahiv_cli.progress.ledger import Spans
from trahiv_cli.progress.reports import CommitPath, PeerProgress, Report, ReportSchema, read_reports
from trahiv_cli.progress.trust import MinorityWatch, Plausibility, SwarmView

ALONE_EVERY_S = 2.0  # with no other peer; at a pair's rate reports take 2 % of its time
REPORT_EVERY_S_A_PEER = 0.035
"""The time between two reports of a peer is at least this, multiplied by the number of peers. A report of at
most 1.9 kB goes to each of them: at most 54 kB/s, 9 % of a 5 Mbit/s link."""

GUESSED_FROM_S = 1.0
"""If the time between reports is longer, from 29 peers on, samples trained since a report are estimated. In
smaller swarms samples count when they are reported: then a peer that pauses makes no step smaller."""


class SwarmTracker(ProgressTracker):
    """`ProgressTracker` that counts samples instead of estimating when they will be there.

    Upstream lets a step begin when the *estimated* time has come (progress_tracker.py:130), so a peer that
    pauses makes the others step on smaller batches. Here the total is the samples that others last reported
    plus this peer's own; in large swarms (`GUESSED_FROM_S`) also the samples that the others have trained
    since, at their reported speed. `is_out` returns whether the swarm's owner has removed a peer. The DHT
    answers within `answer_s`, or counts as silent.

    `SwarmOptimizer` creates it; its threads run until `shutdown` or `abandon`.
    """

    others: tuple[PeerProgress, ...] = ()
    """The last report of each other peer."""

    def __init__(
        self,
        dht: Any,
        prefix: str,
        *args: Any,
        start: bool,
        committed: CommittedCell,
        is_out: Callable[[str], bool],
        answer_s: float = 5.0,
        **kwargs: Any,
    ) -> None:
        self.own_id = str(dht.peer_id.to_base58())
        self._committed = committed
        self.past = CommitPath()
        """The path of this peer to its state. Like `leases`, it is in each report."""
        self.leases = Spans()
        """The positions of the data that this peer has leased."""
        self.plausibility = Plausibility()
        self._minority_watch = MinorityWatch()
        self.gone: frozenset[str] = frozenset()
        """Ids of the peers that have said goodbye."""
        self.missing: frozenset[str] = frozenset()
        """Ids of the peers that reported once, do not report any more, and did not say goodbye."""
        self.steps_a_round = 1
        """Steps of the swarm that the next round commits."""
        self.vouched: History | None = None
        """The state after a round that this peer voted for without knowing whether it was committed."""
        # When this peer began to train towards the next step, and when `others` was fetched.
        self._begun_at = self._fetched_at = swarm_time()
        self._is_announced = False
        self._is_out = is_out
        self._answer_s = answer_s
        self._way_back: History | None = None
        # Before upstream adds its own schema, which our reports do not fit, and fetches reports.
        dht.add_validators([SchemaValidator(ReportSchema, prefix=prefix)])
        super().__init__(dht, prefix, *args, start=False, **kwargs)
        self._local_public_key = self.dht.place
        self._is_urgent = threading.Event()  # set: this peer reports without a pause
        if start:
            self.start()

    def _report_every_s(self) -> float:
        eta_s = 0.0 if math.isinf(self.eta_s) else self.eta_s  # inf: not known yet
        # Two peers that reported every 0.25 s used 4 % of a 5 Mbit/s link: ten reports a step are enough.
        by_step_s = min(ALONE_EVERY_S, eta_s / 10)
        return max(self.fetch_every_s, by_step_s) if self.others else ALONE_EVERY_S

    @property
    def fetch_every_s(self) -> float:
        """The shortest time between two reports of a peer, or two fetches of all reports, in seconds."""
        # At least 0.25 s: upstream stores a signed record for every local batch.
        every_s = max(0.25, REPORT_EVERY_S_A_PEER * (1 + len(self.others)))
        return min(every_s, float(self.metadata_expiration) / 2)

    # -- progress of all peers ---------------------------------------------------------------------

    @property
    def history(self) -> History:
        """The history of this peer."""
        return self._committed.now.history

    @property
    def companions(self) -> frozenset[str]:
        """Ids of the members of the round that led to this state; after a download, of the donor."""
        return self._committed.now.group

    @property
    def mates(self) -> tuple[PeerProgress, ...]:
        """The other peers that hold the state that this peer holds."""
        return tuple(peer for peer in self.others if peer.history == self.history)

    @property
    def _coming(self) -> list[PeerProgress]:
        """Members of the last round whose last reports are from before it."""
        late = (one for one in self.others if one.peer_id in self.companions and one.history != self.history)
        return [peer for peer in late if self.past.passed_through(peer.history)]

    @property
    def samples_accumulated(self) -> int:
        """Samples towards the next step, of this peer and of the others that hold its state."""
        own: int = self.local_progress.samples_accumulated
        seen = [(peer, peer.samples, self._fetched_at) for peer in self.mates]
        if self.fetch_every_s < GUESSED_FROM_S:
            return own + sum(samples for _, samples, _ in seen)
        now = swarm_time()
        target = self.target_batch_size
        guessed = 0.0
        for peer, samples, at in (*seen, *((peer, 0, self._begun_at) for peer in self._coming)):
            by_now = samples + peer.samples_per_second * max(0.0, now - at)
            guessed += min(
                by_now, self.plausibility.believed_samples(peer.peer_id, math.ceil(by_now), target)
            )
        return own + int(guessed)

    @property
    def view(self) -> SwarmView:
        """This peer's view of all peers' histories, by their last reports."""
        return SwarmView(
            own=self.history,
            witnesses=self.others,
            mates=[*self.mates, *self._coming],
            holds_on=self.plausibility.is_together,
            vouched=self.vouched,
        )

    @property
    def target(self) -> History:
        """The history that this peer should reach, if a peer can give its state; otherwise its own.

        Its rank is lower than this peer's only if most others follow another history.
        """
        return self._way_back or self.view.target

    @property
    def eta_s(self) -> float:
        """Seconds until the swarm holds its target, by the last reports; inf if it is not known."""
        return max(0.0, float(self.global_progress.eta_next_epoch) - swarm_time())

    @property
    def is_behind(self) -> bool:
        """Whether the swarm has a state that this peer should adopt."""
        return self.target != self.history

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether the swarm has `target_batch_size` samples for the next round. An epoch is a step here."""
        return not self.is_behind and self.samples_accumulated >= self.target_batch_size

    # -- this peer's reports ----------------------------------------------------------------------

    def begin_step(self, samples: int = 0, *, is_next: bool = True) -> None:
        """Report at once the state that this peer holds, reached by one more round if `is_next`.

        This peer holds `samples` towards the step after it already. The caller must hold `pause_updates`.
        """
        history = self.history
        if is_next:
            self.past.go_on(history)
        else:
            self.past.begin(history)
        # This peer trained these samples during a round, as the others did theirs.
        begun_at = swarm_time() - samples / self.performance_ema.samples_per_second
        self._begun_at = max(self._begun_at, begun_at)
        self.vouched = None
        self._way_back = None
        self.update_epoch(history.step)
        # Not by `report_local_progress`, which would count the samples as trained since the last report.
        self.local_progress = self._get_local_progress(history.step, samples)
        self._report_at_once()

    def expect_steps(self, steps: int, samples: int) -> None:
        """Set the steps of the swarm that the next round commits, and the samples that it needs."""
        self.steps_a_round = steps
        self.target_batch_size = samples

    def _get_local_progress(self, local_epoch: int, samples_accumulated: int) -> Report:
        plain = super()._get_local_progress(local_epoch, samples_accumulated)
        speed = min(plain.samples_per_second, float(MOST_SAMPLES))  # a batch may take no time
        return Report(
            **plain.dict() | {"samples_per_second": speed},
            samples_committed=self.history.samples,
            history=self.history.digest,
        )

    def announce(self) -> Any:
        """Report at once, and regularly from now on; return a future of whether a node stored it."""
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
        """Report that this peer voted for the round that leads there, whether or not others committed it."""
        self.vouched = history
        if self._is_announced:
            self.announce()

    def attest(self, history: History, common: bytes, *, is_given: bool = False) -> None:
        """Report the digest of tensors that peers share, as `CommitPath.attest` does. Thread-safe."""
        self.past.attest(history, common, is_given=is_given)
        if is_given and self._is_announced:  # a joiner waits for it
            self.announce()

    def lease(self, leases: Spans) -> bool:
        """Report this peer's leases and fetch the others' reports; return whether both succeeded in time."""
        self.leases = leases  # nothing else: the training thread may report a batch meanwhile
        try:
            return bool(self.announce().result(timeout=self._answer_s)) and self.refresh()
        except concurrent.futures.TimeoutError:
            return False

    # -- the others' reports ----------------------------------------------------------------------

    def refresh(self, timeout_s: float | None = None) -> bool:
        """Fetch all reports; return False, and keep the old ones, if none come in `timeout_s` (None: 5 s).

        It holds the lock that a commit takes to read reports, not to wait for them as upstream does
        (progress_tracker.py:264): 3 to 15 s if nodes are silent.
        """
        look_up = self.dht.get(self.training_progress_key, latest=True, return_future=True)
        try:
            found = look_up.result(timeout=self._answer_s if timeout_s is None else timeout_s)
        except concurrent.futures.TimeoutError:
            return False
        with self.lock_global_progress:
            self.global_progress = self._parse_swarm_progress_data(found.value if found else None)
        return True

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        # Each peer renews its report after half of its lifetime, and the new one is here within a second.
        quiet_until = swarm_time() + self.metadata_expiration / 2 - 1.0
        newest, gone, quiet = read_reports(metadata, self._is_out, quiet_until)
        own = newest.pop(self.own_id, None)
        self.missing = self.missing.union(one.peer_id for one in self.others) - newest.keys() - gone
        steps = {peer: report.epoch for peer, report in newest.items()}
        for peer in self.plausibility.implausible(steps, self.history.step, self.steps_a_round):
            newest.pop(peer, None)
        believed = self.plausibility.believed_samples
        target = self.target_batch_size
        self.others = tuple(
            PeerProgress.of(
                peer, report, believed(peer, report.samples_accumulated, target), is_quiet=peer in quiet
            )
            for peer, report in newest.items()
        )
        self._fetched_at = now = swarm_time()
        self._way_back = self._minority_watch.look(self.view, self.past)
        gone |= self.gone & self.companions  # the goodbyes of others are not needed
        self.gone = frozenset(gone - newest.keys())
        known = set(LocalTrainingProgress.__fields__)  # hivemind's report has no others
        step = self.target.step
        plain = {
            peer: ValueWithExpiration(report.dict(include=known), float("inf"))
            for peer, report in {self.own_id: own, **newest}.items()
            if report is not None and (report is own or report.epoch <= step)
        }
        progress = super()._parse_swarm_progress_data(plain)
        soonest = max(progress.next_fetch_time, now + self.fetch_every_s)
        progress.next_fetch_time = soonest if self.others else now + ALONE_EVERY_S
        return progress

    # -- the threads that report and fetch ---------------------------------------------------------

    def run(self) -> None:
        """Report progress at the rate of reports, and renew a report in good time before it expires.

        This peer does not report while it downloads a state: others would wait for it. Upstream
        (progress_tracker.py:216) also falls silent if each batch is a step.
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
        """Fetch all reports when a fetch is due, and go on after an error.

        A peer that reports but does not fetch would hold the others up.
        """
        while not self.shutdown_triggered.wait(max(0.0, self.global_progress.next_fetch_time - swarm_time())):
            if self.global_progress.next_fetch_time > swarm_time():
                continue  # a refresh meanwhile has postponed the next one
            with contextlib.suppress(*UNREACHABLE, OSError, concurrent.futures.CancelledError):
                if self.refresh(2 * self._answer_s):
                    continue
            self.shutdown_triggered.wait(self._answer_s)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop reporting, and withdraw this peer's report; upstream does not wait until that is sent."""
        if self.shutdown_triggered.is_set():
            return
        self.abandon()
        self.shutdown_complete.wait(timeout)
        goodbye = self._store(None)
        deadline = time.monotonic() + (timeout or self._answer_s)
        while not goodbye.done() and self.dht.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def abandon(self) -> None:
        """End without a goodbye: no process is left to send it."""
        self.shutdown_triggered.set()
        self._report_at_once()
