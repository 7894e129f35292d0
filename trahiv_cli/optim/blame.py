"""What is held against members of rounds that failed: whom nobody waits for, and who is let into no group."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from trahiv_cli.optim.ballot import Vote

logger = get_logger(__name__)

SUSPECT_S = 20.0  # for so long nobody waits for a peer that did not answer or broke a round

# When, and for how long at most, a peer of which rounds fail is let into no group: see `note_votes`.
MOST_POINTS, POINTS_A_ROUND, MOST_EXCLUDED_S = 2.0, 0.25, 1280.0


class Blame:
    """Suspects and excludes peers for a while; `order`, alike for all, decides between equals."""

    def __init__(self, order: Callable[[PeerID], bytes]) -> None:
        self._order = order
        self._suspected_until: dict[PeerID, float] = {}
        self.excluded_until: dict[PeerID, float] = {}  # of all that ever were; by the monotonic clock
        self._points: defaultdict[PeerID, float] = defaultdict(float)
        self._times_excluded: defaultdict[PeerID, float] = defaultdict(float)

    def suspect(self, peer: PeerID) -> None:
        """Do not wait for this peer for a while, and have it lead only when nobody else is left."""
        self._suspected_until[peer] = time.monotonic() + SUSPECT_S

    def clear(self, peer: PeerID) -> None:
        """Suspect a peer no more: it came by itself."""
        self._suspected_until.pop(peer, None)

    def is_suspect(self, peer: PeerID) -> bool:
        """Whether nobody should wait for a peer."""
        return self._suspected_until.get(peer, 0.0) > time.monotonic() or self.is_excluded(peer)

    def exclude(self, peer: PeerID, why: str) -> None:
        """Let a peer into no group for a while, twice as long each time, nor follow it; `why` is logged."""
        for_s = min(MOST_EXCLUDED_S, SUSPECT_S * 2 ** self._times_excluded[peer])
        self.excluded_until[peer] = time.monotonic() + for_s
        self._times_excluded[peer] += 1
        logger.warning(f"Peer {peer} is let into no group for {for_s:.0f} s: {why}.")

    def is_excluded(self, peer: PeerID) -> bool:
        """Whether a peer is let into no group."""
        return self.excluded_until.get(peer, 0.0) > time.monotonic()

    def note_votes(self, members: Sequence[PeerID], votes: Mapping[str, Vote], is_committed: bool) -> None:
        """Learn from a round whose doing it is that rounds fail.

        The member that most blame has a point more, all others that blame or are blamed three quarters: it
        may be one of them, or a link. At `MOST_POINTS` the one with most, of equals the later in order, is
        excluded, unless those that are left are no more than half. A committed round makes up for a quarter
        of a point. All members hear the same votes (by id, base58), so they come to the same verdict.
        """
        if is_committed:
            for peer in members:
                self._points[peer] = max(0.0, self._points[peer] - POINTS_A_ROUND)
                self._times_excluded[peer] = max(0.0, self._times_excluded[peer] - POINTS_A_ROUND)
            return
        # A member that broke off because of another is blamed by those that waited for it: that is no proof.
        blames = {peer: vote for peer, vote in votes.items() if vote.blames in votes}
        blamed = {PeerID.from_base58(vote.blames) for vote in blames.values()}
        direct = {peer: vote for peer, vote in blames.items() if vote.is_sure or vote.blames not in blames}
        blames = direct or blames
        accusers = Counter(vote.blames for vote in blames.values())
        most = max(accusers.values(), default=0)
        for peer in accusers.keys() | blames.keys():
            self._points[PeerID.from_base58(peer)] += 1.0 if accusers[peer] == most else 0.75
        worst = max(members, key=lambda peer: (self._points[peer], self._order(peer)))
        left = [peer for peer in members if peer != worst and not self.is_excluded(peer)]
        if self._points[worst] < MOST_POINTS or len(left) < max(2, len(members) // 2 + 1):
            return
        self.exclude(worst, "rounds with it fail")
        # It may be the wrong one: a liar blames others for what it does. Who was blamed as well is next.
        for peer in self._points.keys() - (blamed - {worst}):
            del self._points[peer]
