"""The entry of a peer into the swarm: fresh, from its own checkpoint, or with the swarm's state.

1. The peer compares its model and data with the others' (`comparison.py`). It does so again whenever it finds
   no group.
2. With a checkpoint, it offers that state to others. It also waits a while for the peers that were present
   when it left, because peers that restart together all resume from the furthest state.
3. If another peer is ahead, or this peer has no checkpoint, it downloads the swarm's state.
4. If no other peer is present and it has no checkpoint, the run begins, and peers that join later adopt its
   weights. A fresh model must not replace a trained one: the peer refuses to begin if the swarm is known to
   have trained, or if all of its own checkpoints are damaged.
5. Before the first step of a run, it waits for `swarm.min_peers`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from trahiv_cli.errors import AssetError, RoundFailed
from trahiv_cli.progress.history import History
from trahiv_cli.step.optimizer import SwarmOptimizer
from trahiv_cli.train.checkpoint import Checkpoint, Checkpoints
from trahiv_cli.train.comparison import Comparison


@dataclass(frozen=True)
class Entry:
    """The state from which a peer began."""

    source: Literal["fresh", "swarm", "checkpoint"]
    why: str  # one sentence for the user


def enter(
    optimizer: SwarmOptimizer,
    checkpoints: Checkpoints,
    newest: Checkpoint | None,
    comparison: Comparison,
    reached_step: int,
    min_peers: int,
    wait_s: float,
) -> Entry:
    """Enter the swarm, and return the state from which this peer began.

    If there is an intact checkpoint, it is `newest`, and the model has its weights. The swarm is known to
    have reached `reached_step`. The first step of a run waits up to `wait_s` seconds for `min_peers`.

    Raises:
        RecipeMismatch, NotAdmitted: the others loaded another model or other data, or refuse this peer.
        AssetError: all checkpoints are damaged, and no peer that has trained is present.
        RoundFailed: see `enter_swarm`.
    """
    tracker = optimizer.tracker
    events = optimizer.events
    node = comparison.node
    tracker.refresh()
    comparison.require_alike(tracker.others)
    has_begun = any(peer.history.step > 0 for peer in tracker.others)
    if newest is None and checkpoints.all() and not has_begun:
        raise AssetError(
            f"All checkpoints in {checkpoints.folder.parent} are damaged, "
            "and no peer is there that has trained.",
            hint="start a peer that has an intact one first, or move that folder away to begin anew",
        )
    try:
        entry = enter_swarm(optimizer, newest, reached_step, node.met_lately)
    except RoundFailed:
        node.require_membership()  # peers that refuse this one look as if they had left
        raise
    step = optimizer.local_epoch
    events.emit(
        "joined",
        step=step,
        peers=1 + len(tracker.others),
        source=entry.source,
        why=entry.why,
        reached=node.reach.kind,
        reached_why=node.reach.why,
    )
    if step == 0 and not optimizer.catch_up.gather(min_peers, wait_s):
        events.warn(
            "min-peers",
            f"{1 + len(tracker.others)} of {min_peers} peers came in {wait_s:.0f} s; training begins.",
            hint="the others may join at any time; wait longer with --wait, or lower swarm.min_peers",
        )
    return entry


def enter_swarm(
    optimizer: SwarmOptimizer, newest: Checkpoint | None, reached_step: int, expected: Collection[str] = ()
) -> Entry:
    """Choose the state to begin with, adopt it, and take part from there.

    The model has the weights of `newest` already. A peer with a checkpoint waits up to 20 s for the
    `expected` peers, ids in base58, which were present when it left: they may be ahead.

    Raises:
        RoundFailed: other peers are ahead, but none gave its state in time; or the swarm had reached
            `reached_step`, and all its peers are gone.
    """
    tracker = optimizer.tracker
    own = ""
    if newest is not None:
        own = f"this run's checkpoint of step {newest.step}"
        if optimizer.settings.auto_share is not None:
            optimizer.position.set_pace(newest.state.pace)
        newest.load_optimizer(optimizer.opt)
        if (outer := optimizer.state_averager.outer) is not None:
            newest.load_outer(outer)
        newest.load_own_steps(optimizer)
        newest.load_scores(optimizer.state_averager)
        optimizer.position.enter(newest.state.history, newest.state.ledger)
        optimizer.catch_up.wait_for(expected, 20.0)
    tracker.refresh()
    if own and not tracker.is_behind:
        others = len(tracker.others)
        why = f"none of the {others} other peers is further" if others else "no other peer is there"
        return Entry("checkpoint", f"Goes on from {own}: {why}.")
    while optimizer.catch_up.wait_for_return(have_others_been_there=reached_step > 0):
        # At step 0, processors of one kind have drawn equal weights from the seed: equal chunks are not sent.
        is_first = tracker.target.step == 0
        with contextlib.suppress(RoundFailed) if is_first else contextlib.nullcontext():
            if optimizer.load_state_from_peers(15.0 if is_first else None):
                further = f", which is further than {own}" if own else ""
                why = f"Took over the swarm's state of step {optimizer.local_epoch}{further}."
                return Entry("swarm", why)
        if tracker.others:
            break
    if own:
        return Entry(
            "checkpoint", f"Goes on from {own}: the peers that were further can't be reached any more."
        )
    if reached_step > 0:
        raise RoundFailed(
            f"The swarm had reached step {reached_step}, but its peers have left, or can't be reached any "
            "more; nothing was trained.",
            hint="join again when one of them is back; their training is in their run's folder",
        )
    optimizer.position.enter(History())
    return Entry("fresh", "Begins at step 0: no peer is further, and this run's folder has no checkpoint.")
