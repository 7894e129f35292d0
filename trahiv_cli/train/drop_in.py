"""The node and the announcements of a drop-in trainer, which make it a peer like one of the command line.

`trahiv status`, `watch`, `replay` and `report` read its folder, too. Warnings are logged. A drop-in ignores
control requests (`wishes.py`): its program decides when it stops.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from transformers import Trainer

from trahiv_cli.swarm.invitation import Invitation
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.reach import ReachRules
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.account import Account, Given, given_in
from trahiv_cli.train.announcing import announce, log_how_to_join, progress_told, published, reach_told
from trahiv_cli.train.checkpoint import saved_in
from trahiv_cli.train.folder import start_node
from trahiv_cli.train.leaving import Leaving
from trahiv_cli.train.settings import SwarmSettings


def started(settings: SwarmSettings, folder: Path) -> Node:
    """Start the node of a drop-in; raises the same errors as `Node`."""
    if not settings.opt.verbose and "HIVEMIND_LOGLEVEL" not in os.environ:
        logging.getLogger("hivemind").setLevel(logging.WARNING)
    return start_node(
        settings.dht,
        folder,
        Invitation(),
        is_public=settings.swarm.public,
        reach=ReachRules(relay_mbit=settings.swarm.relay),
    )


@contextlib.contextmanager
def told(trainer: Trainer, node: Node, events: Events, leaving: Leaving) -> Iterator[Given]:
    """While the block runs, announce this peer and publish its status and progress; then emit `done`.

    Yields:
        The samples and tokens that this peer gave when it trained in this folder before.
    """
    settings = trainer.swarm_settings
    folder = Path(trainer.swarm_args.output_dir)
    max_steps = settings.max_steps(trainer.swarm_args, trainer.train_dataset)
    saved = saved_in(folder)
    given = given_in(folder)
    account = Account(settings.opt.run_id, saved[-1].step if saved else 0, max_steps, given=given)
    events.add(account)
    with contextlib.ExitStack() as stack, published(node, None, account, events), reach_told(node, events):
        stack.callback(events.remove, account)
        file = announce(
            node,
            folder,
            events,
            settings.opt.run_id,
            joined="initial_peers = [{!r}]".format,
            max_steps=max_steps,
            target_batch_size=settings.opt.target_batch_size,
        )
        log_how_to_join(node, file)
        with progress_told(trainer, events):
            yield given
    step = trainer.swarm_optimizer.local_epoch
    early = leaving.reason or ("budget" if trainer.swarm_callback.has_spent_budget else "finish")
    reason = "max_steps" if step >= max_steps else early
    path = next((str(saved.path) for saved in saved_in(folder) if saved.step == step), None)
    events.emit("done", step=step, path=path, reason=reason, resume=None, had_ended=False)
