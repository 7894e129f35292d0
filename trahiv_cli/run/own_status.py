"""This peer's published status, derived from its own events."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from trahiv_cli.clock import swarm_time
from trahiv_cli.swarm.status import MAX_TEXT, Status
from trahiv_cli.telemetry.events import EVENT_FILE, SAY_AFTER_S, Event, newest_events


class Contribution(NamedTuple):
    """A peer's contribution to a run: samples, and the trained tokens in them if its task counts tokens."""

    samples: int = 0
    tokens: int = 0


class OwnStatus:
    """Listens to a peer's events and derives its `current` status from them. Thread-safe.

    `peer.Peer` and `trainer.announced` create one per run. `has_changed` is set when the new status should be
    published soon. `step` is the initial step of the status, and `earlier` this peer's earlier contribution.
    """

    def __init__(self, run_id: str, step: int, max_steps: int, earlier: Contribution, name: str = "") -> None:
        self._status = Status(
            run_id=run_id,
            name=shortened(name),
            since=swarm_time(),
            step=step,
            max_steps=max_steps,
            samples=earlier.samples,
            tokens=earlier.tokens,
        )
        self._waits_until = -math.inf  # in monotonic seconds
        self.has_changed = threading.Event()

    @property
    def current(self) -> Status:
        """The present status of this peer."""
        changes: dict[str, Any] = {"at": swarm_time()}
        if time.monotonic() >= self._waits_until:
            changes["waits_for"] = ""
        return self._status.model_copy(update=changes)

    def __call__(self, event: Event) -> None:
        """Update the status from one event."""
        match event["event"]:
            case "joined":
                device, memory_gib = device_in_use()
                self._change(
                    step=event["step"], waits_for="", state="training", device=device, memory_gib=memory_gib
                )
            case "step":
                self._status = self._status.model_copy(update=_step(event))
            case "waiting":
                self._waits_until = time.monotonic() + 2 * SAY_AFTER_S
                what = shortened(event["what"])
                if what != self._status.waits_for:
                    self._change(waits_for=what)
            case "warning" if event["code"] == "round":
                self._change(trouble=shortened(event["message"].partition(";")[0]))
            case "paused":
                self._change(state="paused")
            case "resumed":
                self._change(state="loading")
            case "reach":
                self._change()

    def _change(self, **changes: Any) -> None:
        self._status = self._status.model_copy(update=changes)
        self.has_changed.set()


def _step(event: Event) -> dict[str, Any]:
    loss = event["loss"]
    changes = {
        "step": event["step"],
        "loss": loss if loss is not None and math.isfinite(loss) else None,
        "reward": event.get("reward"),
        "samples_per_second": event["samples_per_second"],
        "waits_for": "",
        **event["given"],
    }
    if last := event["round"]:
        changes |= {
            "round_at": swarm_time(),
            "round_peers": len(last["group"]),
            "round_seconds": last["seconds"],
            "trouble": "",
        }
    return changes


def device_in_use() -> tuple[str, float]:
    """Return the name of the device that this peer trains on, and its memory in GiB."""
    import torch

    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return shortened(torch.cuda.get_device_name()), round(memory / 2**30, 1)
    return f"CPU with {os.cpu_count()} cores", round(psutil.virtual_memory().total / 2**30, 1)


def shortened(text: str) -> str:
    """Cut a text to at most `MAX_TEXT` bytes of UTF-8."""
    return text.encode()[:MAX_TEXT].decode(errors="ignore")


def contribution_in(folder: Path) -> Contribution:
    """Return the contribution of a folder's peer, as its newest event `step` has it."""
    for event in newest_events(folder / EVENT_FILE):
        if event["event"] == "step" and "given" in event:
            return Contribution(**event["given"])
    return Contribution()
