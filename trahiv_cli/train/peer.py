"""The life of one peer, in the order of `run_peer` and `Peer.live`.

1. It locks the run's folder and writes the recipe there (`folder.py`). For a finished run it ends here.
2. It starts its node, through which it communicates with other peers.
3. It loads the libraries, the tokenizer and the data, and checks them and this machine.
4. It loads the model and rehearses training and saving (`rehearsal.py`).
5. It publishes the recipe and says how to join (`announcing.py`). From here on, others may join.
6. It enters the swarm (`entry.py`), and trains with it (`trainer.py`).
7. It ends with the finished model, or with a checkpoint and the command to resume.

The user can make it leave during each of these steps (`leaving.py`).

Errors about ports, addresses and folders are reported before heavy libraries load.
"""

from __future__ import annotations

import math
import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trahiv_cli.assets import hub
from trahiv_cli.files import INVITED_BY_FILE, MEMBER_FILE
from trahiv_cli.members.invitation import keep_invitation
from trahiv_cli.recipe.agreement import AgreedRun
from trahiv_cli.recipe.record import pack
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.recipe.task_sections import WRITING_TASKS
from trahiv_cli.run.announcing import Ended, announce, progress_reported, published, reach_reported
from trahiv_cli.run.control import forget_request
from trahiv_cli.run.folder import (
    CHECKPOINTS,
    keep_recipe,
    log_to,
    owned_first,
    recorded,
    saved_in,
    warn_of_edited_data,
)
from trahiv_cli.run.leaving import Budget, Leaving, Left
from trahiv_cli.run.lock import RUNS, owned
from trahiv_cli.run.own_status import OwnStatus, contribution_in
from trahiv_cli.run.pausing import wait_while_paused
from trahiv_cli.run.peer_options import PeerOptions
from trahiv_cli.run.requests import ControlRequests
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.reconnector import known_peers
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.checkpoint import derive_peer_seed

if TYPE_CHECKING:
    from trahiv_cli.assets.data import Splits
    from trahiv_cli.train.trainer import SwarmTrainerMixin

FINAL = "final"
"""Name of the folder of the finished model in a run's folder."""


def run_peer(
    run: AgreedRun, options: PeerOptions, events: Events, leaving: Leaving, text: str | None
) -> Ended:
    """Start or join the run's swarm, train with it, and leave in good order.

    A joiner's run has been compared with the swarm's already. `text` is the recipe as the user wrote it; None
    if it is the swarm's.

    Raises:
        SetupError, Unreachable, NotAdmitted: before anything was trained; no process is left.
        FolderTaken: another peer runs in the run's folder.
        AssetError, OutOfMemory: the model or the data can't be loaded, or memory ran out during training.
        RecipeMismatch, RoundFailed: see `enter`; the mismatch may also concern local data.
    """
    invitation = options.invitation
    usual = options.output_dir or RUNS / run.run_id
    with owned_first(options.folders or [usual]) as folder:
        if folder != usual:
            events.emit(
                "folder",
                path=str(folder),
                message=f"This peer's folder is {folder}: {usual} is that of another peer.",
            )
        if not options.is_again:
            forget_request(folder)
        keep_recipe(folder, run, text)
        peer = Peer(folder, run, options, events, leaving)
        max_steps = run.recipe.training.max_steps
        if (folder / FINAL).exists() and not (peer.saved and peer.saved.step < max_steps):
            ended = Ended("max_steps", max_steps, folder / FINAL, had_ended=True)
            ended.report(events, leaving.resume)
            return ended
        # An invitation without a membership does not replace an earlier one with a membership.
        if invitation.membership or (invitation.addresses and not (folder / MEMBER_FILE).exists()):
            keep_invitation(folder / INVITED_BY_FILE, invitation)
        leaving.resume = options.resume_in(folder, run.run_id)
        with recorded(folder, events):
            log_to(folder / "trahiv.log", is_verbose=run.recipe.hivemind_config.opt.verbose)
            try:
                ended = peer.live()
            except Left:  # before it trained; earlier checkpoints are unchanged
                saved = peer.saved
                reason = leaving.reason or "signal"
                ended = Ended(reason, saved.step, saved.path) if saved else Ended(reason)
            # A signal may have come while a checkpoint was written.
            if ended.reason == "pause" and leaving.signal is not None:
                ended = replace(ended, reason="signal")
            if ended.reason != "pause":  # else it restarts, and emits `paused` then
                ended.report(events, leaving.resume)
                forget_request(folder)
            return ended


@dataclass
class Peer:
    """A peer that owns its folder; `live` calls its phases in their order."""

    folder: Path
    run: AgreedRun
    options: PeerOptions
    events: Events
    leaving: Leaving

    def __post_init__(self) -> None:
        self.earlier_contribution = contribution_in(self.folder)
        self.saved = next(reversed(saved_in(self.folder / CHECKPOINTS)), None)
        self.own_status = OwnStatus(
            self.run.run_id,
            max(self.options.reached_step, self.saved.step if self.saved else 0),
            self.run.recipe.training.max_steps,
            self.earlier_contribution,
            self.options.name,
        )

    def live(self) -> Ended:
        """Go through a peer's life, as far as the user lets it.

        Raises:
            Left: it left before it trained.
        """
        recipe = self.run.recipe
        options = self.options
        events = self.events
        leaving = self.leaving
        with leaving.interruptible():
            if self.saved is None and options.reached_step == 0:
                warn_of_edited_data(self.run, events)
            self.node: Node = options.node(recipe.hivemind_config.dht, self.folder, recipe.swarm.relay)

        with ExitStack() as stack:
            stack.enter_context(self.node)
            requests = ControlRequests(self.folder, leaving, options.conditions)
            events.add(self.own_status)
            events.add(requests)
            seconds = options.budget.seconds
            packed = pack(self.run)
            paused_s = wait_while_paused(
                self.node, requests, self.own_status, packed, events, leaving, self.invite, seconds
            )
            stack.enter_context(requests.polled())
            with leaving.interruptible():
                with events.waiting("the hub to answer", until_s=hub.PATIENCE_S):
                    silence = hub.do_without_hub(recipe)
                if silence:
                    events.warn("hub", silence, hint=hub.HINT)
                _load_libraries(events)
            from trahiv_cli.assets.memory import translated_out_of_memory
            from trahiv_cli.train.failing import explaining_the_data
            from trahiv_cli.train.tasks import forwarding_trl_warnings

            stack.enter_context(translated_out_of_memory())
            with forwarding_trl_warnings(partial(events.warn, "data")):
                self.load(replace(options.budget, seconds=seconds - paused_s))
            stack.enter_context(published(self.node, packed, self.own_status, events))
            if not paused_s:
                self.invite()
            with leaving.interruptible():
                # For comparison with the sample at the end. A pretrained model writes none: it may be slow,
                # and bitsandbytes repacks quantized weights when a CPU evaluates them.
                if recipe.model.config and self.saved is None and not options.invitation.addresses:
                    self.show_sample(0)
            with (
                progress_reported(self.trainer, events),
                reach_reported(self.node, events),
                explaining_the_data(),
            ):
                self.train()
            return self.finish()

    def load(self, budget: Budget) -> None:
        """Load the data and the model, check them and this machine, and rehearse training and saving."""
        from transformers import PrinterCallback, Trainer

        from trahiv_cli.assets.data import build_datasets
        from trahiv_cli.assets.model import build_tokenizer, require_memory
        from trahiv_cli.train.preview import require_trainable
        from trahiv_cli.train.rehearsal import attempting, rehearse
        from trahiv_cli.train.settings import naming_packages, require_swarmable
        from trahiv_cli.train.tasks import build_trainer, group_in_trackers, training_arguments

        recipe = self.run.recipe
        options = self.options
        events = self.events
        node = self.node
        name = options.name or node.peer_id[-6:]
        with self.leaving.interruptible():
            arguments = training_arguments(self.run, self.folder, name)
            require_swarmable(arguments, {})  # report missing hardware and packages before data is read
            with naming_packages(arguments):
                Trainer.get_optimizer_cls_and_kwargs(arguments)
            require_memory(recipe)
            tokenizer = build_tokenizer(recipe)
            with events.waiting("the data to be read and tokenized", until_s=3600):
                peer_seed = derive_peer_seed(recipe.training.seed, node.peer_id)
                self.splits: Splits = build_datasets(recipe, tokenizer, peer_seed=peer_seed)
                require_trainable(recipe, self.splits)
        with self.leaving.interruptible(), events.waiting("the model to load", until_s=3600):
            group_in_trackers(self.run.run_id, name)
            with attempting("The model could not be made ready"):
                self.trainer: SwarmTrainerMixin = build_trainer(
                    self.run,
                    arguments,
                    self.splits,
                    node=node,
                    events=events,
                    should_leave=self.leaving,
                    budget=budget,
                    reached_step=options.reached_step,
                    wait_s=options.wait_s,
                    given_before=self.earlier_contribution,
                )
            rehearse(self.trainer, recipe, events)
        self.trainer.remove_callback(PrinterCallback)

    def invite(self) -> None:
        """Announce how others join the run; warn if this peer joins and no other peer answers."""
        recipe = self.run.recipe
        announce(
            self.node,
            self.folder,
            self.events,
            self.run.run_id,
            self.run.fingerprint,
            max_steps=recipe.training.max_steps,
            target_batch_size=recipe.hivemind_config.opt.target_batch_size,
        )
        if self.options.invitation.addresses and not self.node.run(known_peers):
            self.events.warn(
                "unreachable",
                "No peer of this run answers. This one resumes from its own state, and calls the others "
                "until they answer; then all go on from the furthest state.",
                hint="nothing to do if they are away; else start them again, with the same command",
            )

    def train(self) -> None:
        """Train, and record the part of the budget that this peer has spent, even if it fails."""
        try:
            self.trainer.train()
        finally:
            if self.trainer.has_entered:
                self.leaving.note_spent(self.trainer.swarm_callback.spent)

    def finish(self) -> Ended:
        """Write a checkpoint, and at the run's end the finished model."""
        trainer = self.trainer
        optimizer = trainer.swarm_optimizer
        callback = trainer.swarm_callback
        assert optimizer is not None
        step = optimizer.local_epoch
        callback.save_checkpoint()
        path = callback.checkpoints.finish()
        if step < self.run.recipe.training.max_steps:
            reason = "budget" if callback.has_spent_budget else self.leaving.reason or "signal"
            return Ended(reason, step, path)
        from trahiv_cli.assets.export import model_card, write_final

        if trainer.eval_dataset is not None and callback.evaluated_at != step:
            trainer.evaluate()
        card = model_card(self.run, samples=callback.samples_seen, peers=callback.most_peers)
        with optimizer.agreed_weights():
            model = trainer.accelerator.unwrap_model(trainer.model)
            write_final(model, self.splits.processing_class, self.folder / FINAL, card)
            self.show_sample(step)
        return Ended("max_steps", step, self.folder / FINAL)

    def show_sample(self, step: int) -> None:
        """Emit a text that the model writes, if its task is to write text.

        It answers the first conversation of the held-out data, or of the training data. Without
        conversations, it continues the beginning of the first held-out sample, or starts from nothing.
        """
        recipe = self.run.recipe
        if recipe.task not in WRITING_TASKS:
            return
        from trahiv_cli.assets.export import Prompt, open_turn, sample_text
        from trahiv_cli.assets.samples import prompt_ids

        # Half of the trained length each for prompt and text: some models have no positions beyond it.
        half = recipe.section.max_length // 2
        trainer = self.trainer
        tokenizer = self.splits.tokenizer
        prompt = None
        if recipe.clm is None:
            row = next(iter(self.splits.eval or self.splits.train))
            prompt = open_turn(self.splits.processing_class, row, half)
        if prompt is None and self.splits.processor is not None:
            return  # its rows are no conversations
        if prompt is None:
            samples = self.splits.train if recipe.grpo is not None else trainer.eval_dataset
            first = {"input_ids": []} if samples is None else next(iter(samples))
            if recipe.grpo is not None:
                first = {"input_ids": prompt_ids(tokenizer, first)}
            ids = (first.get("prompt_ids") or first["input_ids"])[: min(half, 32)]
            ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids  # so that the model continues
            prompt = Prompt(ids, tokenizer.decode(ids, skip_special_tokens=True))
        model = trainer.accelerator.unwrap_model(trainer.model)
        with self.events.waiting("the model to write a sample", until_s=600):
            most = recipe.grpo.max_completion_length if recipe.grpo else half
            text = sample_text(model, tokenizer, prompt, min(most, 120), recipe.training.seed)
        self.events.emit("sample", step=step, prompt=prompt.text, text=text, is_reply=prompt.is_reply)


def serve_bootstrap(options: PeerOptions, events: Events, leaving: Leaving) -> Ended:
    """Run a bootstrap node, by which others can join, until `leaving` or the budget's time ends it."""
    ended = Ended("budget")
    seconds = options.budget.seconds
    try:
        with owned(options.output_dir or RUNS / "bootstrap") as folder, leaving.interruptible():
            with options.node(DhtSection(), folder) as node:
                announce(node, folder, events)
                with reach_reported(node, events):
                    threading.Event().wait(None if math.isinf(seconds) else seconds)
    except Left:
        ended = Ended("signal")
    ended.report(events, options.resume)
    return ended


def _load_libraries(events: Events) -> None:
    with events.waiting("the libraries to load", until_s=120):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from datasets.utils import logging as datasets_logging
        from transformers.utils import logging as transformers_logging

        from trahiv_cli.train import tasks, trainer  # noqa: F401 - they import all other libraries

        transformers_logging.set_verbosity_error()
        datasets_logging.set_verbosity_error()
