"""Reports, which each peer sends to all others, and how they are read.

A report has the peer's history and the path to it (`CommitPath`): the last rounds that the peer committed,
each by a mark of the history after it, and for some of these a digest of the tensors that all peers of that
history share.
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

from trahiv_cli.clock import LATEST_S
from trahiv_cli.members.records import ignore_peer, owner_of
from trahiv_cli.progress.history import DIGEST_BYTES, MOST_SAMPLES, MOST_STEPS, History
from trahiv_cli.progress.ledger import MOST_LEASES, Spans

MARK_BYTES = 8
COMMON_BYTES = 8  # of the digest of a history, and of the tensors that peers share
ROUNDS_TOLD = 32  # in a report, 12 bytes each; a peer that missed more rounds downloads the state
STATES_TOLD = 12  # in a report, 20 bytes each

ROUND = struct.Struct(f">I{MARK_BYTES}s")
STATE = struct.Struct(f">I{MARK_BYTES}s{COMMON_BYTES}s")

Mark = tuple[int, bytes]  # a history in a report: its step, and the first bytes of a digest of it


@lru_cache(1024)  # each use of `SwarmView` compares all histories with all reports
def mark_of(history: History) -> Mark:
    """Return the mark of a history, which stands for it in reports."""
    # It covers the samples, too: otherwise peers that went through the history would back any number of
    # samples that another peer reports with it.
    told = b"%d %s" % (history.samples, history.digest)
    return history.step, hashlib.sha256(told).digest()[:MARK_BYTES]


class CommitPath:
    """This peer's path to its state. Safe to read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: tuple[Mark, ...] = (mark_of(History()),)
        self._states: dict[Mark, bytes] = {}
        self._given: tuple[Mark, ...] = ()

    def begin(self, history: History) -> None:
        """Record a state that was not reached by rounds: a checkpoint's state, or a downloaded one."""
        self._rounds = (mark_of(history),)

    def go_on(self, history: History) -> None:
        """Record the state after one more round."""
        self._rounds = (*self._rounds, mark_of(history))[-ROUNDS_TOLD:]

    def passed_through(self, history: History) -> bool:
        """Whether this peer passed through a state, as far as it remembers."""
        return mark_of(history) in self._rounds

    def attest(self, history: History, common: bytes, *, is_given: bool = False) -> None:
        """Record the digest, of at least `COMMON_BYTES`, of the tensors that all peers of a history share.

        `is_given` means that a joiner fetches this state. It will need witnesses, later than others do.
        """
        mark = mark_of(history)
        with self._lock:
            states = {other: digest for other, digest in self._states.items() if other != mark}
            states[mark] = common[:COMMON_BYTES]
            if is_given:
                self._given = (*(other for other in self._given if other != mark), mark)[-8:]
            while len(states) > STATES_TOLD:
                del states[next(other for other in states if other not in self._given)]
            self._states = states

    def to_wire(self, vouched: History | None = None) -> dict[str, bytes]:
        """Return the fields of a report; `vouched` is the state after a round that this peer voted for."""
        told = self._rounds if vouched is None else (*self._rounds, mark_of(vouched))[-ROUNDS_TOLD:]
        rounds = b"".join(ROUND.pack(*mark) for mark in told)
        states = b"".join(STATE.pack(*mark, digest) for mark, digest in self._states.items())
        return {"rounds": rounds, "states": states}


class Report(LocalTrainingProgress):
    """The record that a peer stores in the DHT: hivemind's fields, and its history, leases and path."""

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
    samples: int  # towards the next step, as far as they count
    samples_per_second: float
    is_client: bool
    is_quiet: bool = False  # a peer that is there would have renewed its report
    leases: Spans = Spans()  # positions that it is about to train, or has trained since its last round
    rounds: tuple[Mark, ...] = ()  # rounds through which it came to its history
    states: frozenset[tuple[int, bytes, bytes]] = frozenset()  # digests of tensors shared there

    def passed_through(self, history: History) -> bool | None:
        """Whether it passed through a state; None if it can't know: it came later, or is not there yet."""
        mark = mark_of(history)
        if history == self.history or mark in self.rounds or any(mark == state[:2] for state in self.states):
            return True
        first = self.rounds[0][0] if self.rounds else self.history.step
        return False if first <= history.step <= self.history.step else None

    @classmethod
    def of(cls, peer_id: str, report: Report, samples: int, *, is_quiet: bool = False) -> PeerProgress:
        """Read a report, of which only `samples` count. Malformed leases, rounds and states are ignored."""
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
    """Read the value under the DHT key of all reports: entries by their owners' subkeys, perhaps malformed.

    `is_out` returns whether the swarm's owner has removed a peer. Returns reports by peer id, the ids of
    peers that said goodbye or were removed, and the ids of peers whose reports expire before `quiet_until`.
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
        except (ValueError, TypeError):  # TypeError: perhaps names that are no strings
            ignore_peer(owner, "it publishes no report, or one of another version")
            continue
        if report.peer_id == PeerID.from_base58(owner).to_bytes():
            reports[owner] = report
            if entry.expiration_time < quiet_until:
                quiet.add(owner)
        else:
            ignore_peer(owner, "it reports in another's name")
    return reports, gone, quiet
