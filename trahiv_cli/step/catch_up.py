"""Catching up: a peer waits for others, replays the rounds that it missed, or downloads the state.

1. Before its first step a peer waits for others to come, and after its last step for peers that are behind.
2. A peer that missed rounds fetches them, one after the other, from peers that went through them, and applies
   each as its members did (`CatchUp.follow`).
3. If no peer keeps a round, it downloads the state, from several peers at once (`CatchUp.load`).
4. It trusts no single peer: a round must lead to a history that most other peers passed through, and a state
   must have the values that most of these peers report.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import wait
from dataclasses import dataclass

from hivemind.utils import get_logger

from trahiv_cli.background import in_background
from trahiv_cli.errors import RoundFailed
from trahiv_cli.net.streams import UNREACHABLE
from trahiv_cli.progress.history import History
from trahiv_cli.progress.tracker import SwarmTracker
from trahiv_cli.progress.trust import count_backers
from trahiv_cli.rounds.claims import Outcome
from trahiv_cli.rounds.round_service import Rounds
from trahiv_cli.shared_memory import JoinerActivity
from trahiv_cli.state.download import MAX_DONORS, Report
from trahiv_cli.state.state_service import StateExchange
from trahiv_cli.step.position import Position
from trahiv_cli.step.round_runner import POLL_S, REFRESH_S, RoundRunner, is_over
from trahiv_cli.step.run_settings import RunSettings
from trahiv_cli.swarm.watchdog import Watchdog
from trahiv_cli.telemetry.events import Events

logger = get_logger(__name__)

BELIEVED_S = 10.0
"""Seconds that a peer waits for the other peers' reports to confirm a downloaded state."""

SAID_S = 60.0
"""Seconds that it waits while only one peer has reported the state's values. The others report them before
their next round."""

DONOR_PAUSE_S = 1.0
"""Seconds between two tries to download; upstream has no pause and asked a donor 2,230 times in 47 s."""


@dataclass(eq=False, kw_only=True)
class CatchUp:
    """Waits for other peers, replays rounds that this peer missed, and downloads the state.

    `SwarmOptimizer` creates one and keeps it.
    """

    settings: RunSettings
    position: Position
    runner: RoundRunner
    rounds: Rounds
    exchange: StateExchange
    tracker: SwarmTracker
    activity: JoinerActivity
    alive: Watchdog
    events: Events
    refresh_s: float = REFRESH_S  # time between two fetches of reports

    def __post_init__(self) -> None:
        self._timeout_s = self.settings.load_state_s
        self._asked: list[str] = []  # ids of the donors of the last download
        self._wished = History()  # the state that the present download must reach
        self._disbelieved: set[str] = set()  # ids of the peers whose states were rejected
        self._has_holders = False  # whether several peers are known to hold the state that is downloaded
        self._heard_at = 0.0

    # -- waiting for others --------------------------------------------------------------------------

    def wait_for(self, peers: Collection[str], limit_s: float) -> None:
        """Wait until all of these peers (ids in base58) have reported, or this peer should leave."""
        what = "peers that were there before"
        self._wait(what, lambda: {peer.peer_id for peer in self.tracker.others}.issuperset(peers), limit_s)

    def wait_for_return(self, *, have_others_been_there: bool) -> bool:
        """Wait for a peer that fell silent; with `have_others_been_there`, also for one not seen before.

        Returns whether a peer is there within `RunSettings.load_state_s`; False at once if none will return,
        for example after goodbyes.
        """

        def is_settled() -> bool:
            may_return = self.tracker.missing or (have_others_been_there and not self.tracker.gone)
            return bool(self.tracker.others) or not may_return

        what = "peers that can't be reached now"
        return self._wait(what, is_settled, self._timeout_s) and bool(self.tracker.others)

    def wait_for_stragglers(self, limit_s: float, fetching_s: float) -> None:
        """Wait `limit_s` for peers that are behind, up to `fetching_s` while one downloads the state."""
        own = self.tracker.history.rank
        deadline = time.monotonic() + fetching_s
        what = "peers that are behind to fetch the last state"

        def have_come() -> bool:
            return all(peer.history.rank >= own for peer in self.tracker.others)

        while not self._wait(what, have_come, limit_s) and time.monotonic() < deadline:
            if not self.activity.was_there_since(time.monotonic() - limit_s):
                return

    def gather(self, count: int, limit_s: float) -> bool:
        """Wait before the first step until `count` peers are there, this one included.

        Returns True if they are, if the run has begun already, or if this peer is leaving.
        """
        what = f"{count} peers to be there"
        return self._wait(
            what, lambda: 1 + len(self.tracker.others) >= count or self.tracker.is_behind, limit_s
        )

    def wait_for_longer_steps(self, seconds: float, limit_s: float) -> None:
        """Wait, while behind, until the other peers stay at one step for `seconds`, or the run is over."""
        max_steps = self.settings.max_steps
        step = self.tracker.target.step
        since = time.monotonic()

        def is_long() -> bool:
            nonlocal step, since
            if self.tracker.target.step != step:
                step = self.tracker.target.step
                since = time.monotonic()
            return not self.tracker.is_behind or step >= max_steps or time.monotonic() - since >= seconds

        self._wait(f"a step of the swarm that takes {seconds:.1f} s, as a batch does here", is_long, limit_s)

    def wait_for_round(self) -> None:
        """Wait until the next round is due, or others have committed it."""
        self._wait(
            "the next round",
            lambda: self.tracker.ready_to_update_epoch or self.tracker.is_behind,
            self._timeout_s,
            every_s=POLL_S,  # the others do not wait for a peer that was absent
        )

    def _wait(
        self, what: str, is_done: Callable[[], bool], limit_s: float, every_s: float | None = None
    ) -> bool:
        """Fetch reports until `is_done` or this peer should leave; return False after `limit_s`."""
        deadline = time.monotonic() + limit_s
        told = 0
        with self.events.waiting(what, limit_s) as tell:
            while not self.alive.should_leave():
                self.alive.require()
                self.tracker.refresh()
                if is_done():
                    return True
                if time.monotonic() >= deadline:
                    return False
                if (here := 1 + len(self.tracker.others)) != told:
                    told = here
                    tell("waiting", f"{what} (peers here: {here})", deadline - time.monotonic())
                time.sleep(self.refresh_s if every_s is None else every_s)
        return True

    # -- missed rounds ------------------------------------------------------------------------------

    def come(self) -> bool:
        """Bring this peer up to date, by replays or by a download. Raises the same errors as `load`.

        Returns whether gradients that were computed before are useless now.
        """
        if self.tracker.target.rank < (own := self.position.history).rank:
            self.events.warn(
                "fork",
                f"Most others have gone on another way than this peer, which is at step {own.step}: "
                "it takes over their state, though fewer samples are behind it.",
                "nothing to do; if it repeats, look which peers can't reach each other",
            )
        has_followed = self.follow()
        if self.tracker.is_behind and self.load():
            return True
        return has_followed and not self.position.pace.has_local_steps

    def follow(self) -> bool:
        """Replay the rounds that others committed without this peer; return whether there was one to replay.

        Gradients that were accumulated for older weights are dropped; local steps are kept.
        """
        has_followed = False
        while True:
            self.tracker.refresh()
            if not self.tracker.is_behind or (found := self._fetch_round()) is None:
                return has_followed
            has_followed = True
            self.position.follow(*found)

    def _fetch_round(self) -> tuple[History, Outcome] | None:
        """Fetch the round after this peer's history, and return the history that it leads to and its outcome.

        The averaged tensors then hold its average. Returns None if no donor gives a round that leads to a
        believed history.
        """
        donors = sorted(self._donors(), key=lambda peer: peer not in self._asked)[:8]
        step = self.position.history.step + self.position.method.steps
        self.runner.expect_group((), 2)
        with self.events.waiting(f"the round of step {step}", self._timeout_s):
            for donor in donors:
                replay = self.rounds.start_replay(donor, self.runner.exchange(), self._timeout_s)
                while not is_over(replay):
                    if self.alive.must_stop or not self.rounds.is_alive():
                        replay.cancel()
                        return None
                if (outcome := replay.result()) is None:
                    continue
                history = self.position.after(sum(outcome.samples.values()), outcome.proof)
                if self.tracker.view.believes(history):
                    return history, outcome
        return None

    # -- the state -----------------------------------------------------------------------------------

    def load(self, timeout_s: float | None = None, holders: Collection[str] | None = None) -> bool:
        """Adopt the newest state in the swarm: weights, optimizer state, step and learning rate.

        Gradients that were accumulated for older weights are dropped.

        Args:
            timeout_s: limit without new data, in seconds; None: `RunSettings.load_state_s`.
            holders: ids of the peers that may give the state; None: all peers with a useful one.

        Returns:
            False if no peer has a newer state any more, or this peer is leaving.

        Raises:
            RoundFailed: there are peers, but none sent data for `timeout_s`, or `MAX_DONORS` of them sent
                states that the other peers' reports contradict. This peer is unchanged.
        """
        if not self._download(self._timeout_s if timeout_s is None else timeout_s, holders):
            return False
        self.position.adopt()
        self.follow()  # the state is as old as the download was long
        return True

    def _download(self, timeout_s: float, holders: Collection[str] | None) -> bool:
        self._has_holders = holders is not None and len(holders) > 1
        step = self.tracker.target.step
        was_behind = self.tracker.is_behind
        self._disbelieved = set()
        what = f"the swarm's state at step {step}"
        self._heard_at = time.monotonic()
        with self.events.waiting(what, timeout_s) as tell:

            def report(num_bytes: int, total: int, num_donors: int) -> None:
                self._heard_at = time.monotonic()
                amount = f"{num_bytes / 1e6:.0f} of {total / 1e6:.0f} MB from {num_donors} peer(s)"
                fields = {"step": step, "bytes": num_bytes, "total": total, "donors": num_donors}
                tell("download", f"{what}, {amount}", timeout_s, **fields)

            while True:
                donors = self._donors(holders)[:MAX_DONORS]
                silence_s = self._heard_at + timeout_s - time.monotonic()
                if self._try_download(donors, silence_s, report):
                    return True
                self.alive.require()
                if self.alive.should_leave() or not self.tracker.others or not (donors or holders is None):
                    return False
                if len(self._disbelieved) >= MAX_DONORS:
                    raise RoundFailed(
                        f"{len(self._disbelieved)} peers gave states that others do not hold; this peer is "
                        "unchanged.",
                        hint="trahiv.log has their ids; the swarm's owner can take one out: trahiv kick PEER",
                    )
                if time.monotonic() + DONOR_PAUSE_S >= self._heard_at + timeout_s:
                    raise RoundFailed(
                        f"Nothing of the swarm's state came for {timeout_s:.0f} s; this peer is unchanged.",
                        hint="try again; if it happens again, raise hivemind_config.opt.load_state_timeout",
                    )
                time.sleep(DONOR_PAUSE_S)
                # Peers that report the target state but did not give it.
                target = self.tracker.target
                others = self.tracker.others
                claim_it = [peer.peer_id for peer in others if peer.history == target]
                if self.tracker.is_behind and set(claim_it) <= set(self._asked) - self._disbelieved:
                    self.tracker.plausibility.gave_nothing(claim_it, [peer.peer_id for peer in others])
                self.tracker.refresh()
                if was_behind and not self.tracker.is_behind:
                    return False

    def _try_download(self, donors: list[str], silence_s: float, report: Report) -> bool:
        """Download in a background thread, so that this peer can leave meanwhile.

        A state that arrives after that is not adopted.
        """
        heard_at, self._asked, given_up = self._heard_at, donors, threading.Event()
        self._wished = target = self.tracker.target
        before = self.position.history
        download = in_background(
            lambda: self.exchange.load(
                donors=donors,
                rank=target.rank,
                lowest=min(target.rank, before.rank),
                silence_s=silence_s,
                report=report,
                is_believed=self._is_believed,
                is_wanted=lambda: not given_up.is_set(),
                set_pace=self.position.set_pace,
            )
        )
        while not wait([download], POLL_S).done:
            if self.alive.must_stop:
                with self.position.state.lock_state:
                    given_up.set()
                if self.position.history == before:
                    return False
        try:
            return download.result()
        except (RoundFailed, *UNREACHABLE) as failure:
            logger.warning(f"Could not load the swarm's state: {getattr(failure, 'message', failure)}")
            self._heard_at = heard_at  # the data was useless
            return False

    # -- choice of donors, check of states -----------------------------------------------------------

    def _donors(self, holders: Collection[str] | None = None) -> list[str]:
        """Return ids of the peers that may give a useful state, the best first.

        Peers that passed through the target come first, then the furthest; equals are in random order. Peers
        whose states were rejected come last. With `holders`, only these are candidates: they have taken this
        peer's last step, and may not have reported it yet.
        """
        target = self.tracker.target
        own = self.position.history
        there = [peer for peer in self.tracker.others if not peer.is_client]
        if holders is not None:
            of_use = [peer for peer in there if peer.peer_id in holders]
        else:
            of_use = [peer for peer in there if peer.history.rank >= min(own.rank, target.rank)]
        mixed = secrets.SystemRandom().sample(of_use, len(of_use))
        mixed.sort(key=lambda peer: (bool(peer.passed_through(target)), peer.history.rank), reverse=True)
        return sorted((peer.peer_id for peer in mixed), key=self._disbelieved.__contains__)

    def _is_believed(self, history: History, common: bytes, donor: str) -> bool:
        """Check a donor's state against the other peers' reports, and wait a while for these.

        `common` is this peer's digest of the tensors that all peers of that history share. It is empty if a
        codec has rounded them; then only the history is checked.
        """
        began = time.monotonic()
        pause_s = REFRESH_S
        while True:
            if self.alive.must_stop:  # the download was abandoned, and the weights may be saved now
                return False
            self.tracker.refresh()
            view = self.tracker.view
            waited_s = time.monotonic() - began
            is_late = waited_s >= BELIEVED_S
            is_one_of_them = history.step >= self._wished.step and view.believes(history)
            is_held = view.holds(history, common, is_final=is_late) if common else True
            if self._has_holders and not is_late and count_backers(history, view.witnesses) < 2:
                is_held = None  # the other holders have not reported this step yet
            if is_one_of_them and is_held:
                return True
            if is_held is False or waited_s >= SAID_S or (is_late and not is_one_of_them):
                break
            # Short pauses at first: many quick peers take more rounds between two fetches than they keep.
            time.sleep(min(pause_s, self.tracker.fetch_every_s))
            pause_s *= 2
        why = "others of that history hold other values" if is_one_of_them else "others went another way"
        logger.warning(
            f"The state of step {history.step} that peer {donor} gave was not taken over: {why}. "
            "This peer asks others first now."
        )
        self._disbelieved.add(donor)
        return False
