"""What a peer reports to all others, and what is read of it.

A report says where its peer stands, and how it came there (`Past`): the last rounds that it committed, each
by a mark of the history after it, and for some of these a digest of what all peers of that history hold in
common.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hivemind.dht.schema import BytesWithPublicKey
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration
from pydantic.v1 import BaseModel, conbytes, confloat, conint, conlist

from trahiv_cli.optim.history import DIGEST_BYTES, MOST_SAMPLES, MOST_STEPS, History
from trahiv_cli.optim.leases import MOST_LEASES
from trahiv_cli.optim.ledger import Spans
from trahiv_cli.swarm.clock import LATEST_S
from trahiv_cli.swarm.records import disbelieve, owner_of

MARK_BYTES = 8
COMMON_BYTES = 8  # of the digests of a history, and of what peers hold in common
MARKS_REMEMBERED = 1024  # each look at a peer's standing compares all histories with what all peers tell
ROUNDS_TOLD = 32  # in a report, 12 bytes each; a peer that missed more of them downloads the state
STATES_TOLD = 12
GIVEN_TOLD = 8  # in a report, 20 bytes each; and of them those that somebody fetched

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


class Report(LocalTrainingProgress):
    """What a peer stores in the DHT: hivemind's record, where its history stands, and what it leased."""

    epoch: conint(ge=0, le=MOST_STEPS, strict=True)  # type: ignore[valid-type]
    samples_accumulated: conint(ge=0, le=MOST_SAMPLES, strict=True)  # type: ignore[valid-type]
    samples_per_second: confloat(ge=0.0, le=MOST_SAMPLES)  # type: ignore[valid-type]
    time: confloat(ge=0.0, le=LATEST_S)  # type: ignore[valid-type]
    samples_committed: conint(ge=0, le=MOST_SAMPLES, strict=True)  # type: ignore[valid-type]
    history: conbytes(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)  # type: ignore[valid-type]
    leases: conlist(conint(ge=0, strict=True), max_items=2 * MOST_LEASES) = []  # type: ignore[valid-type]
    rounds: conbytes(max_length=ROUNDS_TOLD * ROUND.size) = b""  # type: ignore[valid-type]
    states: conbytes(max_length=STATES_TOLD * STATE.size) = b""  # type: ignore[valid-type]


class ReportSchema(BaseModel):
    """The record of all reports, by the public keys of their owners."""

    progress: dict[BytesWithPublicKey, Report | None]


@dataclass(frozen=True)
class PeerProgress:
    """One peer's last report."""

    peer_id: str
    history: History  # of the state that the peer holds
    samples: int  # that it holds towards the next step
    samples_per_second: float
    is_client: bool
    is_quiet: bool = False  # its report is older than any of a peer that is there
    leases: Spans = Spans()  # positions that it is about to train, or has trained since its last round
    rounds: tuple[Mark, ...] = ()  # through which it came to its history
    states: frozenset[tuple[int, bytes, bytes]] = frozenset()  # what it held in common with all others there

    def went_by(self, history: History) -> bool | None:
        """Whether it came through a state; None if it can't know: it came later, or is not there yet."""
        mark = mark_of(history)
        if history == self.history or mark in self.rounds or any(mark == state[:2] for state in self.states):
            return True
        first = self.rounds[0][0] if self.rounds else self.history.step
        return False if first <= history.step <= self.history.step else None

    @classmethod
    def of(cls, peer_id: str, report: Report, samples: int, *, is_quiet: bool = False) -> PeerProgress:
        """Read a report, of whose samples so many are believed. Nonsense in it keeps nobody from training."""
        history = History(report.epoch, report.samples_committed, report.history)
        told = cls(peer_id, history, samples, report.samples_per_second, report.client_mode, is_quiet)
        with contextlib.suppress(ValueError):
            told = replace(told, leases=Spans.from_wire(report.leases))
        with contextlib.suppress(struct.error):
            rounds = ROUND.iter_unpack(report.rounds)
            states = STATE.iter_unpack(report.states)
            told = replace(told, rounds=tuple(rounds), states=frozenset(states))
        return told


def read_reports(
    stored: Any, is_out: Callable[[str], bool], quiet_until: float
) -> tuple[dict[str, Report], set[str], set[str]]:
    """Read what is stored under the key of all reports, perhaps nonsense, by the places of its owners.

    `is_out` says whether the swarm's owner has taken a peer out. Returns reports by peer id, the ids of
    peers that said goodbye or were taken out, and the ids of peers whose reports end before `quiet_until`.
    """
    reports: dict[str, Report] = {}
    gone: set[str] = set()
    quiet: set[str] = set()
    for place, entry in stored.items() if isinstance(stored, dict) else ():
        owner = owner_of(place)
        if owner is None or not isinstance(entry, ValueWithExpiration):
            continue
        if entry.value is None or is_out(owner):
            gone.add(owner)
            continue
        try:
            report = Report.parse_obj(entry.value)
        except (ValueError, TypeError):  # perhaps of names that are no texts
            disbelieve(owner, "it publishes no report, or one of another version")
            continue
        if report.peer_id == PeerID.from_base58(owner).to_bytes():
            reports[owner] = report
            if entry.expiration_time < quiet_until:
                quiet.add(owner)
        else:
            disbelieve(owner, "it reports in another's name")
    return reports, gone, quiet
