"""The recipe travels: peers publish what they agreed on, newcomers fetch it and check it.

The record is the recipe's wire form (see `recipe.agreement`), as JSON, deflated. It is untrusted input:
bounded in size before and after inflation, and checked by the schema before anything is used.

Covered: a damaged or oversized record, one whose fingerprint does not fit its content, one that differs
from the record of the peer that was named on the join line. Not covered: a stranger who can reach the
DHT may publish records of his own; what he can't do is publish under the name of the peer on the line
without being that peer's neighbour in the DHT.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trahiv_cli.errors import NothingPublished, RecipeError, RecipeMismatch
from trahiv_cli.recipe.agreement import agreement, canonical, fingerprint, from_wire, to_wire
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.recipe.untrusted import require_bounded
from trahiv_cli.swarm.node import MAX_RECORD_BYTES, Node, recipe_key, runs_key

RECORD_TTL_S = 120.0
REPUBLISH_EVERY_S = 10.0
MAX_RECIPE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Offer:
    """A run that a swarm trains, as one of its peers published it."""

    run_id: str
    fingerprint: str
    wire: dict[str, Any]
    """The recipe's wire form; its fingerprint has been checked."""

    step: int
    """The swarm step that the run had reached, by what its peers last said."""


def pack(recipe: Recipe) -> bytes:
    """Deflate a recipe's wire form.

    Raises:
        RecipeError: it does not fit into a DHT record (3,500 bytes).
    """
    packed = zlib.compress(canonical(to_wire(recipe)), level=9)
    if len(packed) > MAX_RECORD_BYTES:
        raise RecipeError(
            f"The recipe is too long to travel: {len(packed)} bytes deflated, at most {MAX_RECORD_BYTES}.",
            hint="name a model by its hub id or folder instead of spelling out a long `model.config`",
        )
    return packed


def unpack(record: Any) -> dict[str, Any]:
    """Inflate a record to a wire form, at most 64 KiB of it.

    Raises:
        RecipeError: it is not a recipe's record.
    """
    if not isinstance(record, bytes) or len(record) > MAX_RECORD_BYTES:
        raise RecipeError("A peer published something that is not a recipe.")
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(record, MAX_RECIPE_BYTES)
        if not inflater.eof:
            raise RecipeError("A peer published a recipe that is too long, or broken off.")
        wire: dict[str, Any] = json.loads(text)
        require_bounded(wire, wire["v"])  # before anything walks it; the version is `from_wire`'s to judge
        canonical(wire)  # NaN, half a character: what has no canonical form has no fingerprint
    except (zlib.error, ValueError, TypeError, LookupError, RecursionError) as error:
        raise RecipeError("A peer published a recipe that can't be read.") from error
    return wire


def publish_recipe(node: Node, recipe: Recipe, run_id: str, step: int) -> None:
    """Store the recipe, and the run and how far it is in the DHT's list of runs; repeat it every 10 s.

    Raises:
        RecipeError: the recipe is too long.
        SwarmError: the DHT does not answer.
    """
    node.publish(recipe_key(run_id), node.peer_id, pack(recipe), RECORD_TTL_S)
    node.publish(runs_key(), run_id, [fingerprint(agreement(recipe)), step], RECORD_TTL_S)


def fetch_offer(node: Node, named_peers: Sequence[str], preferred_run: str | None = None) -> Offer:
    """Find the run of a swarm.

    The recipe is taken from a peer that the user named; if that one published none (it may only be a
    bootstrap node), from the others, which must then all agree.

    Args:
        node: connected to the swarm.
        named_peers: peer ids of the join line.
        preferred_run: which run, if the DHT has several.

    Raises:
        NothingPublished: the swarm's peers publish no run (yet).
        RecipeMismatch: several runs, or several recipes under one run_id.
    """
    listed = node.fetch(runs_key())
    runs = sorted(str(run) for run in listed)
    if not runs:
        raise _nothing_published()
    if preferred_run not in runs and len(runs) > 1:
        raise RecipeMismatch(
            f"This swarm trains several runs: {', '.join(runs)}.",
            hint=f"say which: --set hivemind_config.opt.run_id={runs[0]}",
        )
    run_id = preferred_run if preferred_run in runs else runs[0]
    wires: dict[str, dict[str, Any]] = {}
    for peer, record in node.fetch(recipe_key(run_id)).items():
        try:
            wires[str(peer)] = unpack(record)
        except RecipeError:
            continue  # a stranger's noise must not keep a newcomer out
    if not wires:
        raise _nothing_published()
    named = [wires[peer] for peer in named_peers if peer in wires]
    prints = {fingerprint(wire["shared"]) for wire in named or wires.values()}
    if len(prints) > 1:
        raise RecipeMismatch(
            f"Peers publish {len(prints)} different recipes under the name {run_id}; none was taken.",
            hint="ask a peer that you trust for its join line, or bring its recipe: trahiv join RECIPE ...",
        )
    [fingerprint_] = prints
    wire = next(w for w in named or wires.values())
    return Offer(run_id=run_id, fingerprint=fingerprint_, wire=wire, step=_step(listed[run_id]))


def _step(listed: Any) -> int:
    """Read the step from an entry of the list of runs; 0 if it has none that makes sense."""
    step = listed[1] if isinstance(listed, (list, tuple)) and len(listed) == 2 else 0
    return step if isinstance(step, int) and 0 <= step < 2**31 else 0


def accept_offer(offer: Offer, overrides: Sequence[str] = ()) -> Recipe:
    """Turn an offer into the recipe to run, checked like one from a stranger.

    Raises:
        RecipeError: it is no valid recipe, or needs files that the newcomer must bring.
        RecipeMismatch: what it resolves to here is not what its fingerprint promises.
    """
    recipe = from_wire(offer.wire, overrides)
    ours = fingerprint(agreement(recipe))
    if ours != offer.fingerprint:
        raise RecipeMismatch(
            f"The swarm's recipe has fingerprint {offer.fingerprint[:12]}; here it resolves to {ours[:12]}.",
            hint="the peers run another version of trahiv, or a --set changed what all must share",
        )
    return recipe


def _nothing_published() -> NothingPublished:
    return NothingPublished(
        "A peer answered, but nobody publishes a recipe there (yet).",
        hint="wait until the starter's `trahiv init` is ready, or bring the recipe: trahiv join RECIPE ...",
    )
