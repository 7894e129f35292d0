"""A peer follows the history of most peers, and adopts a state only if their reports support it.

A report says where its peer stands, and how it came there (`Past`): the last rounds that it committed, each
by a mark of the history after it, and for some of these a digest of what all peers of that history hold in
common. A state has as many witnesses as went through it. So a peer goes where most witnesses went, and
believes a download whose values most of them hold.

A witness who came later than a state abstains. Those who stand still for their own state count against all
others, as long as they have lately been in rounds with each other (`Doubts.is_together`). Not covered: half
of the witnesses or more who agree on a lie; who has many names; peers of which no two hold the same bits.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from trahiv_cli.optim.history import History

if TYPE_CHECKING:
    from trahiv_cli.optim.reports import PeerProgress

MARK_BYTES, COMMON_BYTES = 8, 8  # of the digests of a history, and of what peers hold in common
MARKS_REMEMBERED = 1024  # each look at a peer's standing compares all histories with what all peers tell
ROUNDS_TOLD = 32  # in a report, 12 bytes each; a peer that missed more of them downloads the state
STATES_TOLD, GIVEN_TOLD = 12, 8  # in a report, 20 bytes each; and of them those that somebody fetched
FORK_S = 30.0  # others are more, and go another way, before a peer follows: so old may reports of its own be

ROUND = struct.Struct(f">I{MARK_BYTES}s")
STATE = struct.Struct(f">I{MARK_BYTES}s{COMMON_BYTES}s")

Mark = tuple[int, bytes]  # a history in a report: its step, and the beginning of a digest of all it says


@lru_cache(MARKS_REMEMBERED)
def mark_of(history: History) -> Mark:
    """Return what stands for a history in reports."""
    # Of its samples, too: else who went by it would stand for whatever number another reports with it.
    told = b"%d %s" % (history.samples, history.digest)
    return history.step, hashlib.sha256(told).digest()[:MARK_BYTES]


class Past:
    """How this peer came to the state that it holds. Safe to read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: tuple[Mark, ...] = (mark_of(History()),)
        self._states: dict[Mark, bytes] = {}
        self._given: tuple[Mark, ...] = ()

    def begin(self, history: History) -> None:
        """Note a state that was not reached by rounds: a checkpoint's, or one that was downloaded."""
        self._rounds = (mark_of(history),)

    def go_on(self, history: History) -> None:
        """Note the state after one more round."""
        self._rounds = (*self._rounds, mark_of(history))[-ROUNDS_TOLD:]

    def went_by(self, history: History) -> bool:
        """Whether that state was on the way, as far as it is remembered."""
        return mark_of(history) in self._rounds

    def attest(self, history: History, common: bytes, *, is_given: bool = False) -> None:
        """Note the digest of what all peers of a history hold: at least `COMMON_BYTES`.

        `is_given` says that somebody fetches this state, and will ask for witnesses, later than others.
        """
        mark = mark_of(history)
        with self._lock:
            states = {other: digest for other, digest in self._states.items() if other != mark}
            states[mark] = common[:COMMON_BYTES]
            if is_given:
                self._given = (*(other for other in self._given if other != mark), mark)[-GIVEN_TOLD:]
            while len(states) > STATES_TOLD:
                del states[next(other for other in states if other not in self._given)]
            self._states = states

    def to_wire(self, vouched: History | None = None) -> dict[str, bytes]:
        """Return it as fields of a report; `vouched`: the state after a round that this peer voted for."""
        told = self._rounds if vouched is None else (*self._rounds, mark_of(vouched))[-ROUNDS_TOLD:]
        rounds = b"".join(ROUND.pack(*mark) for mark in told)
        states = b"".join(STATE.pack(*mark, digest) for mark, digest in self._states.items())
        return {"rounds": rounds, "states": states}


@dataclass(frozen=True)
class Way:
    """What another peer's report says of its way."""

    rounds: tuple[Mark, ...] = ()
    states: frozenset[tuple[int, bytes, bytes]] = frozenset()

    @classmethod
    def from_wire(cls, rounds: bytes, states: bytes) -> Way:
        """Read what `Past.to_wire` gave, or raise `ValueError`."""
        rounds, states = rounds[-ROUND.size * ROUNDS_TOLD :], states[-STATE.size * STATES_TOLD :]
        try:
            return cls(tuple(ROUND.iter_unpack(rounds)), frozenset(STATE.iter_unpack(states)))
        except struct.error as error:
            raise ValueError(f"not a way through rounds: {error}") from error


def went_by(witness: PeerProgress, history: History) -> bool | None:
    """Whether a peer came through a state; None if it can't know: it came later, or is not there yet."""
    told, mark = witness.way, mark_of(history)
    if history == witness.history or mark in told.rounds or any(mark == state[:2] for state in told.states):
        return True
    first = told.rounds[0][0] if told.rounds else witness.history.step
    return False if first <= history.step <= witness.history.step else None


def count_backers(history: History, witnesses: Iterable[PeerProgress]) -> int:
    """How many came through a state."""
    return sum(bool(went_by(witness, history)) for witness in witnesses)


def _most(counts: Iterable[tuple[int, History]]) -> tuple[int, History]:
    """The state of the highest count; of equals the furthest."""
    return max(counts, key=lambda option: (option[0], option[1].rank))


@dataclass(frozen=True)
class Standing:
    """The positions of a peer and of all others at one moment."""

    own: History
    witnesses: Sequence[PeerProgress]  # all other peers
    there: Sequence[History]  # of those of them that can give their state
    mates: Sequence[PeerProgress] = ()  # those of them that hold `own`, or are about to
    # Whether this peer counts itself for `own`. If not, neither do mates that have come by no round: those
    # that start again together go on from the furthest.
    holds_on: bool = False
    vouched: History | None = None  # after a round that it voted for, and does not know to be committed

    @property
    def target(self) -> History:
        """The state to come to: of those further than `own` what most went by; of equals the furthest."""
        return self._best(self.witnesses)[1]

    def _best(self, witnesses: Sequence[PeerProgress]) -> tuple[int, History]:
        further = {history for history in self.there if history.rank > self.own.rank}
        stayers = int(self.holds_on and self.vouched not in further)
        for mate in self.mates:
            if self.holds_on or len(mate.way.rounds) > 1:  # it came by rounds
                stayers += not any(went_by(mate, history) for history in further)  # nor vouches for one
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
            count += sum(went_by(one, history) is None for one in later)
        rest = [witness for witness in self.witnesses if not went_by(witness, history)]
        return history == self.own or (count > 0 and count >= self._best(rest)[0])

    def holds(self, history: History, common: bytes, *, is_final: bool = False) -> bool | None:
        """Whether this digest is of what most of those hold in common, or held, that went by a state.

        None if those who have not said so yet decide it; a final word does without them, if two have.
        """
        mark, backers = mark_of(history), count_backers(history, self.witnesses)
        told = (state for witness in self.witnesses for state in witness.way.states)
        said = Counter(state[2] for state in told if state[:2] == mark)
        agree = said.pop(common[:COMMON_BYTES], 0)
        rivals, silent = max(said.values(), default=0), backers - agree - said.total()
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
        apart = [witness for witness in standing.witnesses if not went_by(witness, own)]
        with_us = 1 + len(standing.witnesses) - len(apart)
        others = {one for one in standing.there if one.rank < own.rank and one.step and not past.went_by(one)}
        count, history = _most([(0, own), *((count_backers(one, apart), one) for one in others)])
        if count <= with_us:
            self._seen = None
            return None
        seen_at, step = self._seen = self._seen or (self._clock(), history.step)
        return history if self._clock() - seen_at >= FORK_S and history.step > step else None
