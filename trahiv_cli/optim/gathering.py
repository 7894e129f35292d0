"""How a peer waits for others: before its first step, and after its last."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from trahiv_cli.optim.parts import Parts
from trahiv_cli.optim.seeker import REFRESH_S
from trahiv_cli.telemetry.names import short_name


class Gathering:
    """Waits until the reports of other peers say what is waited for, or this peer is to leave.

    Args:
        parts: of the peer's optimizer.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, self._tracker = parts, parts.tracker

    def wait_for(self, peers: Collection[str], limit_s: float) -> None:
        """Wait until all of these peers, ids in base58, have reported; at most `limit_s`."""
        self._wait_until(
            lambda: set(peers) <= {peer.peer_id for peer in self._tracker.others},
            "peers that were there before",
            limit_s,
        )

    def wait_for_stragglers(self, limit_s: float) -> None:
        """Stay for peers that are behind, so that they can download the last state; at most `limit_s`."""
        self._wait_until(
            lambda: all(peer.history.rank >= self._tracker.history.rank for peer in self._tracker.others),
            "peers that are behind to fetch the last state",
            limit_s,
        )

    def gather(self, count: int, limit_s: float) -> bool:
        """Wait before the first step until so many peers are there, this one included; at most `limit_s`.

        Returns:
            Whether they are, or have begun already, or this peer is leaving.
        """
        deadline = time.monotonic() + limit_s
        with self._parts.events.waiting(f"{count} peers to be there", limit_s) as tell:
            told = -1
            while True:
                self._look()
                here = sorted(short_name(peer.peer_id) for peer in self._tracker.others)
                if 1 + len(here) >= count or self._tracker.is_behind or self._parts.alive.should_leave():
                    return True
                if time.monotonic() >= deadline:
                    return False
                if len(here) != told:
                    told, others = len(here), ", ".join(["this one", *here])
                    what = f"{count - told - 1} more peer(s): {told + 1} of {count} are here ({others})"
                    tell("waiting", what, deadline - time.monotonic())
                time.sleep(REFRESH_S)

    def _wait_until(self, is_over: Callable[[], bool], what: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        with self._parts.events.waiting(what, limit_s):
            while time.monotonic() < deadline and not self._parts.alive.should_leave():
                self._look()
                if is_over():
                    return
                time.sleep(REFRESH_S)

    def _look(self) -> None:
        self._parts.alive.require()
        self._tracker.refresh()
