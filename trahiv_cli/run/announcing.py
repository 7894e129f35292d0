"""Announcements of a running peer: how to join it, its recipe, its status, its progress and its end."""

from __future__ import annotations

import logging
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trahiv_cli.background import every
from trahiv_cli.errors import SwarmError
from trahiv_cli.members.invitation import write_invitation
from trahiv_cli.net.addresses import reach_of
from trahiv_cli.recipe.pasted import join_by
from trahiv_cli.run.leaving import Reason
from trahiv_cli.run.own_status import OwnStatus
from trahiv_cli.swarm.node import GRACE_S, REACH_KNOWN_S, Node
from trahiv_cli.swarm.published_run import publish_run
from trahiv_cli.swarm.status import Status, fetch_statuses, fields_of, publish_status
from trahiv_cli.telemetry.events import Event, Events
from trahiv_cli.telemetry.lines import line

logger = logging.getLogger(__name__)


def announce(
    node: Node,
    folder: Path,
    events: Events,
    run: str = "",
    fingerprint: str = "",
    joined: Callable[[str], str] = join_by,
    **figures: int,
) -> Path | None:
    """Emit `ready`, which says how others join; only a private file contains a closed swarm's secret.

    Args:
        node: this peer's node.
        folder: the run's folder.
        events: receives `ready`, and warnings about addresses.
        run: the run's id; empty if nothing is trained.
        fingerprint: of the recipe; empty without a recipe.
        joined: formats an address, or the `@FILE` of an invitation, as an instruction to join.
        figures: more fields of `ready`: the run's steps, and the samples in a step.

    Returns:
        The invitation's file, or None if there is none.
    """
    with events.waiting("others to say how they can reach this peer", until_s=REACH_KNOWN_S):
        reach = node.known_reach(REACH_KNOWN_S)
    for note in node.notes():
        events.warn("addresses", note, hint="docs/reach.md says where to listen, and what to announce")
    addresses = node.own_addresses()
    credentials = node.credentials
    join = ""
    file = None
    invite = None
    if addresses and credentials:
        file = write_invitation(folder, credentials.membership, node.entrances(), run, fingerprint)
        join = joined(f"@{file}") if file else ""
    elif addresses:
        join = joined(node.entrances()[0])
    if credentials and credentials.owner:
        invite = shlex.join(["trahiv", "invite", "--output-dir", str(folder)])
    events.emit(
        "ready",
        run_id=run or None,
        peer_id=node.peer_id,
        maddrs=addresses,
        reach=[reach_of(address) for address in addresses],
        reached=reach.kind,
        reached_why=reach.why,
        join=join,
        invitation=file and str(file),
        invite=invite,
        fingerprint=fingerprint or None,
        **figures,
    )
    return file


def log_event(event: Event) -> None:
    """Log an event as text: a warning at level `WARNING`, any other event at level `INFO`."""
    if (text := line(event)) is not None:
        logger.log(logging.WARNING if event["event"] == "warning" else logging.INFO, "%s", text)


def log_how_to_join(node: Node, file: Path | None) -> None:
    """Log how others join; log an invitation only if a person alone sees the log, else its file's path."""
    peers = node.entrances()
    note = ""
    if node.credentials is not None and peers:
        if file is None:
            return  # this peer's own invitation admits one peer only
        if is_shown_to_a_person(logger):
            peers = [file.read_text(encoding="ascii").strip()]
            note = ". This contains a secret: treat it like a password."
        else:
            peers = [f"@{file}"]
            note = ". On another machine, copy this file there (chmod 600) and use its path there: @PATH."
    logger.warning("To join the training, use initial_peers = %s%s", peers, note)


def is_shown_to_a_person(log: logging.Logger) -> bool:
    """Return whether all records of this logger go to a terminal or a notebook, and nowhere else."""
    from transformers.utils.import_utils import is_in_notebook

    handlers: list[logging.Handler | None] = []
    one: logging.Logger | None = log
    while one is not None:
        handlers += one.handlers
        one = one.parent if one.propagate else None
    streams = [getattr(handler, "stream", None) for handler in handlers or [logging.lastResort]]
    shown = (sys.stdout, sys.stderr) if is_in_notebook() else ()
    # Trackers that may upload the terminal's output to a server.
    is_recorded = not sys.modules.keys().isdisjoint(("wandb", "comet_ml", "clearml", "neptune"))
    return not is_recorded and all(one in shown or getattr(one, "isatty", bool)() for one in streams)


@contextmanager
def published(
    node: Node,
    packed: bytes | None,
    own_status: OwnStatus,
    events: Events,
    every_s: float = 15.0,
    gap_s: float = 1.0,
) -> Iterator[None]:
    """While the block runs, keep this peer's status, and its run if that is `packed`, in the DHT.

    They are published every `every_s`, and a changed status at once, but at most every `gap_s`. The event
    `peers` reports the statuses of the swarm's peers every `every_s`; 25 peers more add another `every_s`.
    """
    stop = threading.Event()
    look_at = 0.0
    is_warned = False

    def publish() -> None:
        nonlocal look_at, is_warned
        if packed is not None:
            publish_run(node, own_status.current.run_id, packed)
        if stop.is_set():
            return
        if time.monotonic() >= look_at:
            there = fetch_statuses(node).ours
            look_at = time.monotonic() + every_s * (1 + len(there) // 25)
            events.emit("peers", **fields_of(there))
            if not is_warned and is_copy(there.get(node.peer_id), own_status.current):
                is_warned = True
                warn_of_copy(events)
        report()

    def report() -> None:
        publish_status(node, own_status.current.model_copy(update={"reached": node.reach.kind}))

    def repeat() -> None:
        due_at = time.monotonic() + every_s
        while True:
            own_status.has_changed.wait(max(0.0, due_at - time.monotonic()))
            own_status.has_changed.clear()
            if stop.wait(gap_s):
                return
            try:
                if time.monotonic() < due_at:
                    report()
                    continue
                publish()
            except SwarmError as error:  # until the next attempt, joiners get it from other peers
                logger.warning("The recipe was not published again: %s", error.message)
            due_at = time.monotonic() + every_s

    publish()
    thread = threading.Thread(target=repeat, name="publisher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        own_status.has_changed.set()
        thread.join(GRACE_S)  # the DHT may not answer any more


def is_copy(there: Status | None, own: Status) -> bool:
    """Return whether the status under this peer's id in the DHT is from another peer with its identity."""
    return there is not None and there.since != own.since and there.at > own.since


def warn_of_copy(events: Events) -> None:
    """Warn that two peers have this identity."""
    events.warn(
        "copied",
        "Another peer has this one's identity: a run's folder was copied, and both are used at once. Each "
        "takes messages and records that are meant for the other.",
        hint="stop one of them; where that folder is to train as well, move its identity.key and lock away",
    )


@contextmanager
def progress_reported(trainer: Any, events: Events) -> Iterator[None]:
    """While the block runs, emit `progress` twice a second: the samples of each peer for the next step.

    `trainer` is a `SwarmTrainerMixin`.
    """

    def report() -> None:
        if trainer.swarm_optimizer is None:
            return
        tracker = trainer.swarm_optimizer.tracker
        own = tracker.local_progress
        peers = [
            {
                "peer_id": tracker.own_id,
                "samples": own.samples_accumulated,
                "samples_per_second": own.samples_per_second,
                "step": own.epoch,
                "me": True,
            }
        ]
        for peer in tracker.others:
            step = peer.history.step
            peers.append(
                {
                    "peer_id": peer.peer_id,
                    "samples": peer.samples if step == own.epoch else 0,
                    "samples_per_second": peer.samples_per_second,
                    "step": step,
                    "me": False,
                }
            )
        events.emit(
            "progress",
            step=own.epoch,
            max_steps=trainer.swarm_optimizer.max_steps,
            samples=tracker.samples_accumulated,
            target=tracker.target_batch_size,
            eta_seconds=tracker.eta_s,
            peers=peers,
        )

    with every(0.5, report, "progress"):
        yield


@contextmanager
def reach_reported(node: Node, events: Events, every_s: float = 2.0) -> Iterator[None]:
    """While the block runs, emit `reach` when the way in which others reach this peer changes."""
    reported = node.reach.kind

    def report() -> None:
        nonlocal reported
        reach = node.reach
        if reach.kind != reported:
            reported = reach.kind
            events.emit("reach", reached=reach.kind, reached_why=reach.why)

    with every(every_s, report, "reach"):
        yield


@dataclass(frozen=True)
class Ended:
    """The result of a peer's run."""

    reason: Reason | Literal["max_steps"]
    step: int = 0
    path: Path | None = None  # `final/`, or the checkpoint to resume from
    had_ended: bool = False  # whether the run was finished before this peer began

    def report(self, events: Events, resume: str | None = None) -> None:
        """Emit `done`, with the command `resume` unless the run is finished."""
        events.emit(
            "done",
            reason=self.reason,
            resume=None if self.reason == "max_steps" else resume,
            step=self.step,
            path=self.path and str(self.path),
            had_ended=self.had_ended,
        )
