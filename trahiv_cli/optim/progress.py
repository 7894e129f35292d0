"""How far the swarm is: what each peer has reported towards the next step."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hivemind.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress, ProgressTracker
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time

DHT_TIMEOUT_S = 5.0

REPORT_EVERY_S = 0.25
"""A peer reports its samples at most this often; upstream stores a signed record for every local batch."""

ALONE_EVERY_S = 2.0
"""The same, and how often reports are fetched, while nobody else is there. Each costs about 4 ms of the
cores that train (2 % of a lone peer's time with the pace of a pair); a newcomer is seen at the next step."""


class PacedEvent(threading.Event):
    """An event whose `wait` returns True at most once in `interval_s()`; what is set meanwhile is kept."""

    def __init__(self, interval_s: Callable[[], float]) -> None:
        super().__init__()
        self._interval_s, self._not_before = interval_s, 0.0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set and the interval is over, or for `timeout` seconds."""
        if not super().wait(timeout):
            return False
        time.sleep(max(0.0, self._not_before - time.monotonic()))
        self._not_before = time.monotonic() + self._interval_s()
        return True

    def hurry(self) -> None:
        """Let the next `wait` return as soon as the event is set."""
        self._not_before = 0.0


@dataclass(frozen=True)
class PeerProgress:
    """One peer's last report."""

    peer_id: str
    step: int
    """The swarm step that it has reached."""

    samples: int
    """Samples that it holds towards the next step."""

    samples_per_second: float
    is_client: bool


class SwarmTracker(ProgressTracker):
    """`ProgressTracker` that counts samples instead of guessing when they will be there.

    Upstream lets a step begin when the *estimated* time has come (progress_tracker.py:130), so a peer
    that pauses makes the others step on smaller batches, and adds this peer's new samples to a total
    that a fetch may reset meanwhile. Here the total is what others last reported plus what this peer
    really holds.
    """

    peers: tuple[PeerProgress, ...] = ()
    """Everybody's last report, this peer's own included."""

    def __init__(self, *args: Any, start: bool, **kwargs: Any) -> None:
        super().__init__(*args, start=False, **kwargs)
        self.should_report_progress = PacedEvent(lambda: REPORT_EVERY_S if self.others else ALONE_EVERY_S)
        if start:
            self.start()

    @property
    def own_id(self) -> str:
        """This peer's id, base58."""
        return str(self.dht.peer_id.to_base58())

    @property
    def others(self) -> tuple[PeerProgress, ...]:
        """The last reports of all other peers."""
        return tuple(peer for peer in self.peers if peer.peer_id != self.own_id)

    @property
    def samples_accumulated(self) -> int:
        """Samples towards the next step: those that others at this step reported, and this peer's own."""
        own = self.local_progress
        there = sum(peer.samples for peer in self.others if peer.step == own.epoch)
        return int(there + own.samples_accumulated)

    @property
    def is_behind(self) -> bool:
        """Whether the swarm has taken a step that this peer has not."""
        return bool(self.global_epoch > self.local_progress.epoch)

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether the swarm holds `target_batch_size` samples for the step that this peer is at."""
        return not self.is_behind and self.samples_accumulated >= self.target_batch_size

    def update_epoch(self, new_epoch: int | None = None) -> int:
        """Move to a new swarm step, and report that without waiting for the pace of reports."""
        self.should_report_progress.hurry()
        return int(super().update_epoch(new_epoch))

    def refresh(self) -> None:
        """Fetch everybody's reports now, while background updates are paused or not.

        Without an answer within 5 s the old reports stay.
        """
        future = self.dht.get(self.training_progress_key, latest=True, return_future=True)
        try:
            found = future.result(timeout=DHT_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            return
        self.global_progress = self._parse_swarm_progress_data(found.value if found else None)

    def announce(self) -> None:
        """Report this peer at once, before it has contributed a sample.

        Upstream reports a peer only after its first batch, so a joiner is not waited for, finds the
        swarm a step ahead when it is ready, downloads again, and may never catch up (issue 443).
        """
        self.dht.store(
            key=self.training_progress_key,
            subkey=self._local_public_key,
            value=self.local_progress.dict(),
            expiration_time=get_dht_time() + self.metadata_expiration,
            return_future=True,
        )

    def update_step(self, step: int) -> None:
        """Move to swarm step `step` with no samples yet (the caller must not hold `pause_updates`)."""
        with self.pause_updates():
            self.update_epoch(step)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop reporting, and take this peer's report back, so that nobody waits for it.

        Upstream sends the goodbye and does not wait for it (progress_tracker.py:352); when it is lost
        with the process, the others believe in this peer until its report expires.
        """
        if self.shutdown_triggered.is_set():
            return
        self.shutdown_triggered.set()
        self.should_report_progress.set()
        self.global_state_updated.set()
        self.shutdown_complete.wait(timeout)
        goodbye = self.dht.store(
            self.training_progress_key,
            subkey=self._local_public_key,
            value=None,
            expiration_time=get_dht_time() + self.metadata_expiration,
            return_future=True,
        )
        deadline = time.monotonic() + (timeout or DHT_TIMEOUT_S)
        while not goodbye.done() and self.dht.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        entries = metadata.values() if isinstance(metadata, dict) else ()
        reports = [
            LocalTrainingProgress.parse_obj(entry.value)
            for entry in entries
            if isinstance(entry, ValueWithExpiration) and entry.value is not None
        ]
        self.peers = tuple(
            PeerProgress(
                peer_id=PeerID(report.peer_id).to_base58(),
                step=report.epoch,
                samples=report.samples_accumulated,
                samples_per_second=report.samples_per_second,
                is_client=report.client_mode,
            )
            for report in reports
        )
        progress = super()._parse_swarm_progress_data(metadata)
        if not self.others:
            progress.next_fetch_time = get_dht_time() + ALONE_EVERY_S
        return progress
