"""A peer's public status: signed by the peer, at most 1 kB, and untrusted by its readers.

All peers of a run speak the same protocol. `PROTOCOL` increases whenever messages between peers change so
that an older peer can't read them. A newcomer with another protocol is refused before it has changed
anything.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trahiv_cli.clock import swarm_time
from trahiv_cli.errors import RecipeMismatch
from trahiv_cli.members.records import ignore_peer
from trahiv_cli.net.keys import RUNS_KEY
from trahiv_cli.reach.reachability import Kind
from trahiv_cli.recipe.builtin import how_to_install, version
from trahiv_cli.swarm.node import Node

PROTOCOL = 3
MAX_TEXT = 60
VERSION_PATTERN = r"[0-9A-Za-z.+]{1,60}"  # users see it in a command to type

Count = Annotated[int, Field(ge=0, lt=2**53)]
Step = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(ge=0, lt=2**40, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]


class Status(BaseModel):
    """A peer's state at one moment. Times are Unix seconds; texts are untrusted."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    run_id: Annotated[str, Field(max_length=200)]
    protocol: Step = PROTOCOL
    version: Annotated[str, Field(pattern=f"^{VERSION_PATTERN}$")] = Field(default_factory=version)
    name: Text = ""  # chosen by its user
    state: Literal["loading", "training", "paused"] = "loading"
    at: Number = 0.0  # when this status was made
    since: Number = 0.0  # when the peer started
    step: Step = 0
    max_steps: Step = 0
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None  # its mean over the last step
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None  # the same, of its completions
    samples: Count = 0  # contributed to the run; `tokens`: the trained tokens in them
    tokens: Count = 0
    samples_per_second: Number = 0.0
    device: Text = ""
    memory_gib: Number = 0.0  # of that device
    reached: Kind = "alone"  # how others reach it
    round_at: Number = 0.0  # when its last round with others was committed; 0: never
    round_peers: Step = 0  # of that round
    round_seconds: Number = 0.0
    trouble: Text = ""  # why its last round failed, if it did
    waits_for: Text = ""


class Foreign(NamedTuple):
    """The status of a peer that speaks another protocol; an empty version is an early one."""

    protocol: int
    version: str


class Statuses(NamedTuple):
    """The statuses of a DHT's peers, by their ids (base58)."""

    ours: dict[str, Status]
    foreign: dict[str, Foreign]


def publish_status(node: Node, status: Status) -> None:
    """Store a peer's status in the DHT's list of runs, for two minutes."""
    node.publish(RUNS_KEY, status.model_dump(), 120.0)


def fetch_statuses(node: Node) -> Statuses:
    """Fetch each peer's status; unreadable ones are left out."""
    found = Statuses({}, {})
    for peer, entry in node.fetch(RUNS_KEY).items():
        match entry:
            case [str(), int(), *_]:
                found.foreign[peer] = Foreign(1, "")
            case {"protocol": int(protocol), "version": str(theirs)} if protocol != PROTOCOL and re.fullmatch(
                VERSION_PATTERN, theirs
            ):
                found.foreign[peer] = Foreign(protocol, theirs)
            case _:
                try:
                    found.ours[peer] = Status.model_validate(entry)
                except ValidationError:
                    ignore_peer(peer, "the run that it publishes can't be read")
    return found


def fields_of(statuses: Mapping[str, Status]) -> dict[str, Any]:
    """Return the fields of an event `peers`: the most common run, the swarm's time, each peer's status."""
    there = sorted(statuses.items())
    run_id = statistics.mode(one.run_id for _, one in there) if there else None
    peers = [{"peer_id": peer, **one.model_dump()} for peer, one in there]
    return {"run_id": run_id, "now": swarm_time(), "peers": peers}


def moving(statuses: Iterable[Status]) -> list[Status]:
    """Leave out paused peers, which may be far behind, unless all are paused."""
    there = list(statuses)
    return [one for one in there if one.state != "paused"] or there


def require_protocol(statuses: Statuses, named_peers: Collection[str]) -> None:
    """Raise RecipeMismatch if a named peer, or every peer of the swarm, speaks another protocol."""
    named = [peer for peer in named_peers if peer in statuses.foreign]
    if not named and (statuses.ours or not statuses.foreign):
        return
    theirs = statuses.foreign[named[0]] if named else max(statuses.foreign.values())
    whose = f"trahiv {theirs.version}" if theirs.version else "an earlier version of trahiv"
    raise RecipeMismatch(
        f"This swarm runs {whose}, which speaks protocol {theirs.protocol}; "
        f"this is trahiv {version()}, with protocol {PROTOCOL}. Nothing was changed.",
        hint=how_to_install(f"trahiv=={theirs.version}")
        if theirs.version
        else f"ask its peers to install trahiv {version()}, as all peers of a run need the same",
    )
