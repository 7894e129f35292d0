"""A peer decides here which reports it believes, which history it follows, and which states it adopts.

1. A step further than the swarm can have come by now is not believed. Samples count as far as a peer has
   brought such a share of a round before. Who has offered a state, and gave none, is passed over for a
   while, as long as the others are more (`Doubts`).
2. A state has as many witnesses as came through it, by their reports. So a peer goes where most witnesses
   went, and believes a download whose values most of them hold (`Standing`).
3. A few that were cut off come back to the others (`Fork`).

A witness who came later than a state abstains. Those who stand still for their own state count against all
others, as long as they have lately been in rounds with each other (`Doubts.is_together`). Not covered: half
of the witnesses or more who agree on a lie; who has many names; peers of which no two hold the same bits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trahiv_cli.optim.history import History
from trahiv_cli.optim.reports import COMMON_BYTES, Past, PeerProgress, mark_of
from trahiv_cli.swarm.records import disbelieve

FORK_S = 30.0  # others are more, and go another way, before a peer follows: so old may reports of its own be

ROUNDS_AHEAD = 2  # a peer may have committed the next round already, and begun to report the one after it
REPORTS_OLD_S = 10.0  # others' reports may be so old: they are fetched every few seconds
PACE_MARGIN = 4.0  # others may have come on by so many times the greatest pace that was seen here
NEWCOMERS_STEPS = 1000  # peers that all begin anew, from checkpoints of their own, may be so far apart
FAILING_S = 20.0  # one that was started anew needs some seconds until it gives its state
PASSED_OVER_S = 300.0
MOST_REMEMBERED = 4096
CREDIT_MARGIN = 4  # a peer may report so many times the share of a round that it brought into one of its last

APART_S = 300.0
APART_ROUNDS = 8  # so long, and so many rounds, without others: `is_together` no more


def count_backers(history: History, witnesses: Iterable[PeerProgress]) -> int:
    """How many came through a state."""
    return sum(bool(witness.went_by(history)) for witness in witnesses)


def _most(counts: Iterable[tuple[int, History]]) -> tuple[int, History]:
    """The state of the highest count; of equals the furthest."""
    return max(counts, key=lambda option: (option[0], option[1].rank))


@dataclass(frozen=True)
class Standing:
    """The positions of a peer and of all others at one moment."""

    own: History
    witnesses: Sequence[PeerProgress]  # all other peers
    mates: Sequence[PeerProgress] = ()  # those of them that hold `own`, or are about to
    # Whether this peer counts itself for `own`. If not, neither do mates that have come by no round: those
    # that start again together go on from the furthest.
    holds_on: bool = False
    vouched: History | None = None  # after a round that it voted for, and does not know to be committed

    @property
    def given(self) -> set[History]:
        """The histories of those that can give their state."""
        return {witness.history for witness in self.witnesses if not witness.is_client}

    @property
    def target(self) -> History:
        """The state to come to: of those further than `own` what most went by; of equals the furthest."""
        return self._best(self.witnesses)[1]

    def _best(self, witnesses: Sequence[PeerProgress]) -> tuple[int, History]:
        further = {history for history in self.given if history.rank > self.own.rank}
        stayers = int(self.holds_on and self.vouched not in further)
        for mate in self.mates:
            if self.holds_on or len(mate.rounds) > 1:  # it came by rounds
                stayers += not any(mate.went_by(history) for history in further)  # nor vouches for one
        backed = [(count_backers(one, witnesses) + (one == self.vouched), one) for one in further]
        return _most([(stayers, self.own), *backed])

    def believes(self, history: History) -> bool:
        """Whether a state may be taken over: no other has more who went by it, besides who came later.

        Of a state that one alone went by, nobody else need know that it was left behind. Who went by both
        counts for this one alone: else one that stays behind would outweigh all that went on.
        """
        count = count_backers(history, self.witnesses) + (history == self.vouched)
        if count > 1:
            later = [one for one in self.witnesses if one.history.step > history.step]
            count += sum(one.went_by(history) is None for one in later)
        rest = [witness for witness in self.witnesses if not witness.went_by(history)]
        return history == self.own or (count > 0 and count >= self._best(rest)[0])

    def holds(self, history: History, common: bytes, *, is_final: bool = False) -> bool | None:
        """Whether this digest is of what most of those hold in common, or held, that went by a state.

        None if those who have not said so yet decide it; a final word does without them, if two have. A
        witness that reports no more is not waited for.
        """
        mark = mark_of(history)
        there = [
            witness
            for witness in self.witnesses
            if not witness.is_quiet or any(state[:2] == mark for state in witness.states)
        ]
        backers = count_backers(history, there)
        told = (state for witness in there for state in witness.states)
        said = Counter(state[2] for state in told if state[:2] == mark)
        agree = said.pop(common[:COMMON_BYTES], 0)
        rivals = max(said.values(), default=0)
        silent = backers - agree - said.total()
        if backers < 2 or agree > rivals + silent:
            return True
        if rivals > agree + silent:
            return False
        has_been_said = silent == 0 or (is_final and backers - silent >= 2)
        return agree >= rivals if has_been_said else None


class Fork:
    """Notices that most others have gone on another way, from a state that this peer's way left behind.

    Such a way has fewer samples, or it would be the `Standing`'s target: a few that were cut off from the
    rest may have trained more than the rest did. Who is fewer comes back. `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._clock = clock
        self._seen: tuple[float, int] | None = None  # when the others were first seen, and at which step

    def look(self, standing: Standing, past: Past) -> History | None:
        """Return the state that most others stand at, once it is time to follow them; else None."""
        own = standing.own
        apart = [witness for witness in standing.witnesses if not witness.went_by(own)]
        with_us = 1 + len(standing.witnesses) - len(apart)
        others = {one for one in standing.given if one.rank < own.rank and one.step and not past.went_by(one)}
        count, history = _most([(0, own), *((count_backers(one, apart), one) for one in others)])
        if count <= with_us:
            self._seen = None
            return None
        seen_at, step = self._seen = self._seen or (self._clock(), history.step)
        return history if self._clock() - seen_at >= FORK_S and history.step > step else None


class Doubts:
    """Judges reports, by what this peer has seen itself; `clock` goes on while the machine sleeps."""

    def __init__(self, clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)) -> None:
        self._clock = clock
        self._together: tuple[float, int] | None = None  # when the last round with others was, and its step
        self._pace = 0.0
        self._interval_s = 0.0
        self._together_at = -math.inf  # when this peer last trained its state, or took it over, with others
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
        self._together = (now, step)
        self._together_at = now
        for peer, number in samples.items():
            self._credit[peer] = max(self._credit.get(peer, 0.0) / 2, number / target)
        self._credit = dict([*self._credit.items()][-MOST_REMEMBERED:])

    def join(self) -> None:
        """Take note that this peer has taken over a state that most others hold."""
        self._together_at = self._clock()

    @property
    def is_together(self) -> bool:
        """Whether this peer holds a state that it has lately trained, or taken over, with others."""
        return self._clock() - self._together_at < max(APART_S, APART_ROUNDS * self._interval_s)

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
        now = self._clock()
        furthest = math.inf
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
