"""The peers that the next group needs, and whether this peer may step without them."""

from __future__ import annotations

import time

from trahiv_cli.progress.pace import RoundRules
from trahiv_cli.progress.tracker import SwarmTracker


class Quorum:
    """Decides which other peers the next step needs, by their reports, which are a little old.

    `SwarmOptimizer` creates one and keeps it.
    """

    def __init__(self, tracker: SwarmTracker, rules: RoundRules) -> None:
        self._tracker = tracker
        self._rules = rules
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last search for a group: a step was taken, or a state adopted."""
        self.missed_since = float("inf")  # when this peer began to look for its group, in monotonic seconds
        self.tries = 0  # rounds for the next step that were not committed
        self.said_after_s = 0.0  # how long this peer had been looking at the last warning

    def begin_search(self) -> None:
        """Note that this peer looks for its group from now on, unless it does so already."""
        self.missed_since = min(self.missed_since, time.monotonic())

    def note_failure(self) -> None:
        """Count a round for the next step that was not committed."""
        self.tries += 1

    def note_warning(self, waited_s: float) -> None:
        """Note that the user was warned after a wait of this length."""
        self.said_after_s = waited_s

    @property
    def expected(self) -> list[str]:
        """Ids of the peers that hold this peer's state, or are about to.

        Members of the round that led here count however old their reports are: otherwise a quick peer would
        go on without them.
        """
        own = self._tracker.history
        last_group = self._tracker.companions
        return [
            peer.peer_id
            for peer in self._tracker.others
            if peer.history == own or (peer.peer_id in last_group and peer.history.rank < own.rank)
        ]

    @property
    def vanished(self) -> set[str]:
        """Ids of the last group's members that report no more and did not say goodbye."""
        there = {peer.peer_id for peer in self._tracker.others} | {self._tracker.own_id}
        return set(self._tracker.companions) - there - self._tracker.gone

    @property
    def may_step_alone(self) -> bool:
        """Whether this peer may step with its own gradients; peers that are behind count as company."""
        is_company_left = bool(self._tracker.others or self.vanished)
        return not is_company_left or (self.tries > 0 and self._may_go_solo)

    @property
    def size(self) -> int:
        """The number of members that a group needs.

        It is more than half of the peers that hold this state, and more than the number that vanished; 2 if
        this peer may go solo. Peers that have gone on from this state count, too: otherwise the last few
        peers to learn of a round could follow another history.
        """
        if self._may_go_solo:
            return 2
        own = self._tracker.history
        others = self._tracker.others
        gone_on = {one.peer_id for one in others if one.history.rank > own.rank or one.passed_through(own)}
        return max(2, (1 + len(gone_on.union(self.expected))) // 2 + 1, len(self.vanished) + 1)

    @property
    def _may_go_solo(self) -> bool:
        return time.monotonic() - self.missed_since >= self._rules.solo_after_s
