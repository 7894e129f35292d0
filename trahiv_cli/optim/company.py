"""This file says which peers the next group of this peer needs, and whether it may step without them.

All of it is decided from reports, which are always a little old.
"""

from __future__ import annotations

import time

from trahiv_cli.optim.majority import went_by
from trahiv_cli.optim.progress import SwarmTracker
from trahiv_cli.optim.rules import RoundRules

NEVER = float("inf")


class Company:
    """The other peers, as far as this peer's next step depends on them.

    Args:
        tracker: has the reports of all peers, and the group that came to this peer's state.
        rules: say when this peer may step alone.
    """

    def __init__(self, tracker: SwarmTracker, rules: RoundRules) -> None:
        self._tracker, self._rules = tracker, rules
        self.missed_since = NEVER
        """When this peer began to look for its group, by the monotonic clock; `NEVER` if it does not."""
        self.tries = 0
        """Rounds for the next step that were not committed."""
        self.said_after_s = 0.0
        """How long this peer had been looking for its group when a person was last told."""

    def begin_step(self) -> None:
        """Forget the search that is over: a step was taken, or a state adopted."""
        self.missed_since, self.tries, self.said_after_s = NEVER, 0, 0.0

    @property
    def groupmates(self) -> list[str]:
        """Ids of the peers that hold this peer's state, or are about to.

        One that was in the round which brought this peer here, or gave it this state, holds it too,
        however old its last report is: without this, a quick peer would go on without it.
        """
        own, last_group = self._tracker.history, self._tracker.companions
        return [
            peer.peer_id
            for peer in self._tracker.others
            if peer.history == own or (peer.peer_id in last_group and peer.history.rank < own.rank)
        ]

    @property
    def vanished(self) -> set[str]:
        """Ids of the last group's members that are not seen any more and did not say goodbye."""
        there = {peer.peer_id for peer in self._tracker.others} | {self._tracker.own_id}
        return set(self._tracker.companions) - there - self._tracker.gone

    @property
    def may_step_alone(self) -> bool:
        """Whether this peer may step with its own gradients.

        Peers that are behind count as company: they are about to take over this peer's state, and a report
        of one that is not may be old.
        """
        if not self._tracker.others and len(self.vanished) <= 1:
            return True
        return self.tries > 0 and self._may_go_solo

    @property
    def quorum(self) -> int:
        """Members that a group needs: most of those that held this state, and half of the last group."""
        if self._may_go_solo:
            return 2
        return max(2, (1 + len(self._voters())) // 2 + 1, len(self.vanished))

    @property
    def _may_go_solo(self) -> bool:
        return time.monotonic() - self.missed_since >= self._rules.solo_after_s

    def _voters(self) -> set[str]:
        """Ids of the others that have a say in what comes after this peer's state.

        Those that have gone on from it are among them: without this, a few whose reports are the last to tell
        of a round could go another way.
        """
        own = self._tracker.history
        gone_on = {
            peer.peer_id
            for peer in self._tracker.others
            if peer.history.rank > own.rank or went_by(peer, own)
        }
        return gone_on.union(self.groupmates)
