"""What is believed of other peers' reports: one that lies does not move those that train together.

1. A step further than the swarm can have come by now is not believed.
2. Samples count as far as a peer has brought such a share of a round before.
3. Who has offered a state, and gave none, is passed over for a while, as long as the others are more.

What state a peer goes to is decided in `majority.py`. Not covered: of two peers, neither can outvote the
other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from trahiv_cli.swarm.records import disbelieve

ROUNDS_AHEAD = 2  # a peer may have committed the next round already, and begun to report the one after it
REPORTS_OLD_S = 10.0  # others' reports may be so old: they are fetched every few seconds
PACE_MARGIN = 4.0  # others may have come on by so many times the greatest pace that was seen here
NEWCOMERS_STEPS = 1000  # peers that all begin anew, from checkpoints of their own, may be so far apart
FAILING_S = 20.0  # one that was started anew needs some seconds until it gives its state
PASSED_OVER_S = 300.0
MOST_REMEMBERED = 4096
CREDIT_MARGIN = 4  # a peer may report so many times the share of a round that it brought into one of its last

APART_S, APART_ROUNDS = 300.0, 8  # so long, and so many rounds, without others: `is_together` no more


class Doubts:
    """Judges reports, by what this peer has seen itself; `clock` goes on while the machine sleeps."""

    def __init__(self, clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)) -> None:
        self._clock = clock
        self._together: tuple[float, int] | None = None  # when the last round with others was, and its step
        self._pace = 0.0
        self._interval_s = 0.0
        self._joined_at = -math.inf
        # By peer id, what it brought as a share of that round's target: the next may be of more steps.
        self._credit: dict[str, float] = {}
        self._failing: dict[str, float] = {}
        self._passed_over: dict[str, float] = {}

    def commit(self, step: int, samples: Mapping[str, int], target: int) -> None:
        """Note a committed round that led to `step`, and was due with `target` samples of all peers.

        Of peers that reported samples and brought none, `samples` says 0.
        """
        if sum(number > 0 for number in samples.values()) < 2:
            return
        now = self._clock()
        if self._together is not None and now > self._together[0]:
            self._interval_s = now - self._together[0]
            self._pace = max(0.9 * self._pace, (step - self._together[1]) / self._interval_s)
        self._together = now, step
        for peer, number in samples.items():
            self._credit[peer] = max(self._credit.get(peer, 0.0) / 2, number / target)
        self._credit = dict([*self._credit.items()][-MOST_REMEMBERED:])

    def join(self) -> None:
        """Take note that this peer has taken over a state that most others hold."""
        self._joined_at = self._clock()

    @property
    def is_together(self) -> bool:
        """Whether this peer holds a state that it has lately trained, or taken over, with others."""
        latest = max(self._joined_at, self._together[0] if self._together else -math.inf)
        return self._clock() - latest < max(APART_S, APART_ROUNDS * self._interval_s)

    def believed_samples(self, peer: str, reported: int, target: int) -> int:
        """Return how many of the samples that a peer reports count towards the next round.

        One that was in no round yet can't reach `target`, that of all peers, alone, unless this peer was in
        none with others either.
        """
        if self._together is None:
            return reported
        most = round(CREDIT_MARGIN * self._credit[peer] * target) if peer in self._credit else target - 1
        return min(reported, most)

    def gave_nothing(self, peers: Sequence[str], others: Sequence[str]) -> None:
        """Take note that `peers`, of all `others`, report the furthest state and gave none.

        Those that go on so for `FAILING_S` are passed over for a while, if they are fewer than the rest; a
        peer that was in rounds with others counts itself to the rest.
        """
        now = self._clock()
        for peer in peers:
            since = self._failing.setdefault(peer, now)
            if now - since >= PASSED_OVER_S:  # that was another time
                self._failing[peer] = now
            elif now - since >= FAILING_S and 2 * len(peers) < len(others) + (self._together is not None):
                del self._failing[peer]
                self._passed_over[peer] = now + PASSED_OVER_S
                disbelieve(peer, "it gives nobody the state that it reports")

    def unbelieved(self, steps: Mapping[str, int], own: int, steps_a_round: int) -> list[str]:
        """Return ids of the peers whose reports do not count: they can't be so far, or are passed over.

        All other peers report `steps`, by id; this peer is at step `own`.
        """
        now, furthest = self._clock(), math.inf
        if self._together is not None and self._pace:  # one round says nothing of the pace
            ordered = sorted([own, *steps.values()], reverse=True)
            since = max(REPORTS_OLD_S, now - self._together[0])
            margin = ROUNDS_AHEAD * steps_a_round + PACE_MARGIN * self._pace * since
            furthest = ordered[len(ordered) // 2] + margin  # more than half of all have come there
        elif len(steps) > 2:
            furthest = sorted(steps.values(), reverse=True)[len(steps) // 2] + NEWCOMERS_STEPS
        far = [peer for peer, step in steps.items() if step > furthest]
        for peer in far:
            disbelieve(peer, "it reports a step that the swarm can't be at")
        return [*far, *(peer for peer, until in self._passed_over.items() if until > now and peer in steps)]
