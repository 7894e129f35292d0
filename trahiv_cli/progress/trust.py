"""A peer decides which reports it believes, which history it follows, and which states it adopts.

1. A peer ignores a report with a step that the swarm can't have reached yet. It limits the reported samples
   by the shares of rounds that their peer brought before. A peer that offered a state and did not give it is
   ignored for a while, as long as such peers are a minority (`Plausibility`).
2. The other peers are witnesses: each backs the states that it passed through, by its report. A peer follows
   the state with the most backers, and believes a download if most of these hold its values (`SwarmView`).
3. A minority that was cut off adopts the majority's history (`MinorityWatch`).

A witness that came later than a state abstains. Peers that stay at their own state count against all other
states, as long as they have recently been in rounds with each other (`Plausibility.is_together`). Not
covered: half of the witnesses or more that agree on a lie; one person with many identities; peers of which no
two hold the same bits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trahiv_cli.members.records import ignore_peer
from trahiv_cli.progress.history import History
from trahiv_cli.progress.reports import COMMON_BYTES, CommitPath, PeerProgress, mark_of

# A peer follows the majority of another history after this time: reports of its own side may be that old.
FORK_S = 30.0

NEWCOMERS_STEPS = 1000  # peers that all restart, from their own checkpoints, may be this far apart
FAILING_S = 20.0  # a restarted peer needs some seconds until it gives its state
PASSED_OVER_S = 300.0
CREDIT_MARGIN = 4  # a peer may report this multiple of the share that it brought to one of its last rounds

APART_S = 300.0  # after this time and eight rounds without others, `is_together` ends


def count_backers(history: History, witnesses: Iterable[PeerProgress]) -> int:
    """Count the witnesses that passed through a state."""
    return sum(bool(witness.passed_through(history)) for witness in witnesses)


def _most(counts: Iterable[tuple[int, History]]) -> tuple[int, History]:
    """Return the option with the highest count; of equals, the furthest state."""
    return max(counts, key=lambda option: (option[0], option[1].rank))


@dataclass(frozen=True)
class SwarmView:
    """One peer's view of all peers' histories at one moment. `SwarmTracker.view` creates it."""

    own: History
    witnesses: Sequence[PeerProgress]  # all other peers
    mates: Sequence[PeerProgress] = ()  # the witnesses that hold `own`, or are about to
    # Whether this peer counts itself for `own`. If not, mates that came through no round do not count either:
    # peers that restart together continue from the furthest state.
    holds_on: bool = False
    vouched: History | None = None  # after a round that it voted for without knowing the result

    @property
    def given(self) -> set[History]:
        """The histories of the peers that can give their state."""
        return {witness.history for witness in self.witnesses if not witness.is_client}

    @property
    def target(self) -> History:
        """The state to reach: of `own` and further states, the one with most backers, then the furthest."""
        return self._best(self.witnesses)[1]

    def _best(self, witnesses: Sequence[PeerProgress]) -> tuple[int, History]:
        further = {history for history in self.given if history.rank > self.own.rank}
        stayers = int(self.holds_on and self.vouched not in further)
        for mate in self.mates:
            if mate.is_quiet:
                continue  # it may have died after a step that it did not report
            if self.holds_on or len(mate.rounds) > 1:  # it came through rounds
                stayers += not any(mate.passed_through(history) for history in further)  # nor vouches for one
        backed = [(count_backers(one, witnesses) + (one == self.vouched), one) for one in further]
        return _most([(stayers, self.own), *backed])

    def believes(self, history: History) -> bool:
        """Whether a state may be adopted: no other state may have more backers.

        Peers that came later than a state count for it, too, if at least two peers passed through it: other
        peers may not know that the state of a single peer was left behind. A peer that passed through both
        states counts for this one alone: otherwise one peer that stays behind would outweigh all the rest.
        """
        count = count_backers(history, self.witnesses) + (history == self.vouched)
        if count > 1:
            later = [one for one in self.witnesses if one.history.step > history.step]
            count += sum(one.passed_through(history) is None for one in later)
        rest = [witness for witness in self.witnesses if not witness.passed_through(history)]
        return history == self.own or (count > 0 and count >= self._best(rest)[0])

    def holds(self, history: History, common: bytes, *, is_final: bool = False) -> bool | None:
        """Whether `common` is the digest that most backers of a state report for it.

        None if the answer depends on backers that have not reported a digest yet. With `is_final` the answer
        does without them if at least two have reported. A witness that stopped reporting is not waited for.
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


class MinorityWatch:
    """Notices that most other peers follow another history, whose rank is lower than this peer's.

    That history has fewer samples, or it would be the target of `SwarmView`: a few peers that were cut off
    may have trained more than the rest. The minority adopts the majority's history. `clock` is monotonic, in
    seconds.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._clock = clock
        self._seen: tuple[float, int] | None = None  # when the majority was first seen, and its step

    def look(self, view: SwarmView, past: CommitPath) -> History | None:
        """Return the majority's state once it has lasted `FORK_S` and stepped meanwhile; otherwise None."""
        own = view.own
        apart = [witness for witness in view.witnesses if not witness.passed_through(own)]
        with_us = 1 + len(view.witnesses) - len(apart)
        others = {
            one for one in view.given if one.rank < own.rank and one.step and not past.passed_through(one)
        }
        count, history = _most([(0, own), *((count_backers(one, apart), one) for one in others)])
        if count <= with_us:
            self._seen = None
            return None
        seen_at, step = self._seen = self._seen or (self._clock(), history.step)
        return history if self._clock() - seen_at >= FORK_S and history.step > step else None


class Plausibility:
    """Judges reports by this peer's own observations. `clock` goes on while the machine sleeps."""

    def __init__(self, clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)) -> None:
        self._clock = clock
        self._together: tuple[float, int] | None = None  # time and step of the last round with others
        self._pace = 0.0
        self._interval_s = 0.0
        self._together_at = -math.inf  # when this peer last trained or adopted its state with others
        # By peer id: the share of a round's target that it brought; the next target may be of more steps.
        self._credit: dict[str, float] = {}
        self._failing: dict[str, float] = {}
        self._passed_over: dict[str, float] = {}

    def commit(self, step: int, samples: Mapping[str, int], target: int) -> None:
        """Record a committed round that led to `step` and was due with `target` samples of all peers.

        `samples` is 0 for peers that reported samples and brought none.
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
        self._credit = dict([*self._credit.items()][-4096:])

    def join(self) -> None:
        """Record that this peer has adopted a state that most others hold."""
        self._together_at = self._clock()

    @property
    def is_together(self) -> bool:
        """Whether this peer has recently trained or adopted its state with others."""
        return self._clock() - self._together_at < max(APART_S, 8 * self._interval_s)

    def believed_samples(self, peer: str, reported: int, target: int) -> int:
        """Return how many of the samples that a peer reports count towards the next round.

        A peer that was in no round yet can't reach `target`, the samples of all peers, alone. There is no
        limit while this peer was in no round with others itself.
        """
        if self._together is None:
            return reported
        most = round(CREDIT_MARGIN * self._credit[peer] * target) if peer in self._credit else target - 1
        return min(reported, most)

    def gave_nothing(self, peers: Sequence[str], others: Sequence[str]) -> None:
        """Record that `peers`, of all `others`, report the furthest state and did not give it.

        A peer that does so for `FAILING_S` is ignored for a while, if `peers` are fewer than the rest. If
        this peer was in rounds with others, it counts itself among the rest.
        """
        now = self._clock()
        for peer in peers:
            since = self._failing.setdefault(peer, now)
            if now - since >= PASSED_OVER_S:  # the first failure is too old
                self._failing[peer] = now
            elif now - since >= FAILING_S and 2 * len(peers) < len(others) + (self._together is not None):
                del self._failing[peer]
                self._passed_over[peer] = now + PASSED_OVER_S
                ignore_peer(peer, "it does not give the state that it reports")

    def implausible(self, steps: Mapping[str, int], own: int, steps_a_round: int) -> list[str]:
        """Return ids of the peers whose reports do not count: their step is impossible, or they are ignored.

        `steps` has the reported steps of all other peers, by id; this peer is at step `own`.
        """
        now = self._clock()
        furthest = math.inf
        if self._together is not None and self._pace:  # a single round gives no pace
            ordered = sorted([own, *steps.values()], reverse=True)
            # Reports may be 10 s old, and others may have stepped at four times the highest pace seen here. A
            # peer may have committed the next round already, and begun to report the one after it.
            since = max(10.0, now - self._together[0])
            margin = 2 * steps_a_round + 4.0 * self._pace * since
            furthest = ordered[len(ordered) // 2] + margin  # more than half of all peers have reached it
        elif len(steps) > 2:
            furthest = sorted(steps.values(), reverse=True)[len(steps) // 2] + NEWCOMERS_STEPS
        far = [peer for peer, step in steps.items() if step > furthest]
        for peer in far:
            ignore_peer(peer, "it reports a step that the swarm can't be at")
        return [*far, *(peer for peer, until in self._passed_over.items() if until > now and peer in steps)]
