"""What a peer reports to all others, and what is read of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hivemind.dht.schema import BytesWithPublicKey
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration
from pydantic.v1 import BaseModel, conbytes, confloat, conint, conlist

from trahiv_cli.optim.history import DIGEST_BYTES, MOST_SAMPLES, MOST_STEPS, History
from trahiv_cli.optim.leases import MOST_LEASES
from trahiv_cli.optim.ledger import Spans
from trahiv_cli.optim.majority import ROUND, ROUNDS_TOLD, STATE, STATES_TOLD, Way
from trahiv_cli.swarm.clock import LATEST_S
from trahiv_cli.swarm.records import disbelieve, owner_of


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

    @classmethod
    def from_wire(cls, data: object) -> Report:
        """Read what a peer stored, or raise `ValueError`."""
        try:
            return cls.parse_obj(data)
        except TypeError as error:  # names of fields that are no texts
            raise ValueError(f"not a report: {error}") from error


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
    leases: Spans = Spans()  # positions that it is about to train, or has trained since its last round
    way: Way = Way()  # how it came to its history

    @property
    def step(self) -> int:
        """The swarm step that it has reached."""
        return self.history.step

    @classmethod
    def of(cls, peer_id: str, report: Report, samples: int) -> PeerProgress:
        """Read a report, of whose samples so many are believed. Nonsense in it keeps nobody from training."""
        leases, way = Spans(), Way()
        with contextlib.suppress(ValueError):
            leases = Spans.from_wire(report.leases)
        with contextlib.suppress(ValueError):
            way = Way.from_wire(report.rounds, report.states)
        history = History(report.epoch, report.samples_committed, report.history)
        return cls(peer_id, history, samples, report.samples_per_second, report.client_mode, leases, way)


def read_reports(stored: Any, is_out: Callable[[str], bool]) -> tuple[dict[str, Report], set[str]]:
    """Read what is stored under the key of all reports, perhaps nonsense, by the places of its owners.

    `is_out` says whether the swarm's owner has taken a peer out. Returns reports by peer id, and the ids of
    peers that said goodbye or were taken out.
    """
    reports: dict[str, Report] = {}
    gone: set[str] = set()
    for place, entry in stored.items() if isinstance(stored, dict) else ():
        owner = owner_of(place)
        if owner is None or not isinstance(entry, ValueWithExpiration):
            continue
        if entry.value is None or is_out(owner):
            gone.add(owner)
            continue
        try:
            report = Report.from_wire(entry.value)
        except ValueError:  # of another version, or nonsense: not a peer that one could train with
            disbelieve(owner, "it publishes no report, or one of another version")
            continue
        if report.peer_id == PeerID.from_base58(owner).to_bytes():
            reports[owner] = report
        else:
            disbelieve(owner, "it reports in another's name")
    return reports, gone
