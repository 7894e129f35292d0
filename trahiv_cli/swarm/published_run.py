"""The run in the DHT: peers publish the recipe, or program, that they agreed on, and newcomers fetch it.

`recipe.record` packs a recipe; a long one takes several records. A fetched recipe is untrusted input: its
size is bounded before and after inflation, and the schema checks it before anything is used. In an open
swarm, a stranger who can reach the DHT may publish one. The recipe with the invitation's fingerprint wins,
else the recipe of the peer that the user named on the join line.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trahiv_cli.errors import NothingPublished, RecipeError, RecipeMismatch
from trahiv_cli.members.records import ignore_peer
from trahiv_cli.net.keys import MAX_RECORD_BYTES, recipe_key
from trahiv_cli.recipe.agreement import AgreedRun, differences, fingerprint, resolve
from trahiv_cli.recipe.program import PROGRAM, ProgramRun
from trahiv_cli.recipe.record import MAX_PACKED_BYTES, from_wire, unpack
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.status import fetch_statuses, moving, require_protocol


@dataclass(frozen=True)
class PublishedRun:
    """A run that a swarm trains, as one of its peers published it."""

    run_id: str
    fingerprint: str
    wire: dict[str, Any]  # the recipe's wire form; its fingerprint has been checked
    step: int  # the run's step, by its peers' last statuses


def publish_run(node: Node, run_id: str, packed: bytes) -> None:
    """Store a run's packed recipe, or program, in the DHT for two minutes."""
    # In reverse, so that a reader that finds the first part finds all.
    for start in reversed(range(0, len(packed), MAX_RECORD_BYTES)):
        part = packed[start : start + MAX_RECORD_BYTES]
        node.publish(recipe_key(run_id, start // MAX_RECORD_BYTES), part, 120.0)


def fetch_offer(
    node: Node, named_peers: Sequence[str], preferred_run: str | None = None, mark: str = ""
) -> PublishedRun:
    """Find the run of a swarm; `preferred_run` selects one if there are several.

    The recipe is the one whose fingerprint begins with `mark`, the invitation's. If no peer publishes it, the
    recipe is the one of the peers that the user named (`named_peers`, by id). If these publish none (they may
    be bootstrap nodes), it is the one of the other peers. The chosen peers must all publish the same recipe.

    Raises:
        NothingPublished: the swarm's peers publish no run (yet).
        RecipeMismatch: several runs, several recipes under one run_id, or another protocol.
    """
    statuses = fetch_statuses(node)
    require_protocol(statuses, named_peers)
    runs = sorted({status.run_id for status in statuses.ours.values()})
    if preferred_run not in runs and len(runs) > 1:
        raise RecipeMismatch(
            f"This swarm trains several runs: {', '.join(runs)}.",
            hint=f"say which: --set hivemind_config.opt.run_id={runs[0]}",
        )
    run = preferred_run if preferred_run in runs else next(iter(runs), "")
    if not (wires := _fetch_wires(node, run) if runs else {}):
        raise NothingPublished(
            "A peer answered, but no peer publishes a recipe there (yet).",
            hint="wait until the starter's `trahiv init` is ready, or bring the recipe: "
            "trahiv join RECIPE ...",
        )
    named = [peer for peer in named_peers if peer in wires]
    prints = {peer: fingerprint(wires[peer]["shared"]) for peer in (*named, *wires)}
    fitting = [peer for peer, its in prints.items() if mark and its.startswith(mark)]
    candidates = {prints[peer]: wires[peer] for peer in reversed(fitting or named or list(wires))}
    if len(candidates) > 1:
        raise RecipeMismatch(
            f"Peers publish {len(candidates)} different recipes under the name {run}; none was taken.",
            hint="ask a peer that you trust for its join line, or bring its recipe: trahiv join RECIPE ...",
        )
    of_run = moving(status for status in statuses.ours.values() if status.run_id == run)
    step = statistics.median_low(status.step for status in of_run)
    [(digest, wire)] = candidates.items()
    return PublishedRun(run, digest, wire, step)


def _fetch_wires(node: Node, run_id: str) -> dict[str, dict[str, Any]]:
    """Join each peer's records, up to the first one that is missing or invalid."""
    unreadable = "the recipe that it publishes can't be read"
    packed: dict[str, bytes] = {}
    for number, before in enumerate(range(0, MAX_PACKED_BYTES, MAX_RECORD_BYTES)):
        if number and not any(len(whole) == before for whole in packed.values()):
            break
        for peer, part in node.fetch(recipe_key(run_id, number)).items():
            whole = packed.get(peer, b"")
            if len(whole) != before:
                continue
            if isinstance(part, bytes) and len(part) <= MAX_RECORD_BYTES:
                packed[peer] = whole + part
            else:
                ignore_peer(peer, unreadable)
    wires = {}
    for peer, whole in packed.items():
        try:
            wires[peer] = unpack(whole)
        except RecipeError:  # a stranger's garbage must not keep a newcomer out
            if len(whole) % MAX_RECORD_BYTES:  # else only its last record may be missing
                ignore_peer(peer, unreadable)
    return wires


def accept_offer(offer: PublishedRun, overrides: Sequence[str] = (), files: Path | None = None) -> AgreedRun:
    """Turn an offer of a recipe into the run to train, with the checks for a stranger's recipe.

    `overrides` are the newcomer's own `--set`; `files` is the folder with its copies of the starter's data.

    Raises:
        RecipeError: it is not a valid recipe, or needs files that the newcomer must bring.
        AssetError: these files are missing.
        RecipeMismatch: these files have other content, or the recipe resolves to another fingerprint here; or
            the swarm trains a program.
    """
    if PROGRAM in offer.wire["shared"]:
        program = ProgramRun.from_wire(offer.wire).program
        raise RecipeMismatch(
            "This swarm trains a program, not a recipe; nothing was started.",
            hint=f"look at the program first, then: trahiv launch --peer LINE -- {program}",
        )
    run = resolve(from_wire(offer.wire, overrides, files))
    if run.fingerprint != offer.fingerprint:
        raise RecipeMismatch(
            f"The swarm's recipe has fingerprint {offer.fingerprint[:12]}; "
            f"here it resolves to {run.fingerprint[:12]}.",
            hint="the peers run another version of trahiv, or a --set changed what all must share",
            differences=differences(run.agreement, offer.wire["shared"]),
        )
    return run
