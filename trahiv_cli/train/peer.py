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
import shlex
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trahiv_cli.assets import hub
from trahiv_cli.errors import PeerBroken
from trahiv_cli.files import INVITED_BY_FILE, MEMBER_FILE
from trahiv_cli.members.invitation import Invitation, keep_invitation
from trahiv_cli.reach.reachability import ReachRules, Wanted
from trahiv_cli.recipe.agreement import AgreedRun
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.run.announcing import Ended, announce, progress_reported, published, reach_reported
from trahiv_cli.run.conditions import Condition
from trahiv_cli.run.control import forget_request
from trahiv_cli.run.folder import (
    CHECKPOINTS,
    keep_recipe,
    log_to,
    owned_first,
    recorded,
    saved_in,
    start_node,
    warn_of_edited_data,
)
from trahiv_cli.run.leaving import ENDLESS_BUDGET, Budget, Leaving, Left
from trahiv_cli.run.lock import RESOLVED, RUNS, owned
from trahiv_cli.run.own_status import OwnStatus, contribution_in
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


@dataclass(frozen=True)
class PeerOptions:
    """Options that a peer chooses for itself; none of them can change the run."""

    output_dir: Path | None = None  # default: `runs/<run_id>`, or the first of `folders` that is free
    folders: tuple[Path, ...] = ()
    identity: Path | None = None  # key file; default: `identity.key` in the run's folder
    host_maddrs: list[str] | None = None
    announce_maddrs: list[str] | None = None
    reach: Wanted = "auto"
    invitation: Invitation = Invitation()  # an empty one starts a swarm
    is_public: bool = False  # whether a swarm that it starts is open to everyone
    reached_step: int = 0  # the step that the swarm had reached when this peer asked to join
    wait_s: float | None = None  # longest wait of a run's first step for `swarm.min_peers`
    budget: Budget = ENDLESS_BUDGET  # the contribution after which this peer leaves
    resume: str = ""  # the command to resume after a stop; only its `--on-event` may hold a secret
    piped: str | None = None  # the word in `resume` for a recipe that came through a pipe
    name: str = ""  # the user's name for this peer, which it publishes
    conditions: Sequence[Condition] = ()  # it trains only while all of them hold
    max_upload: float | None = None  # Mbit/s
    max_download: float | None = None
    is_again: bool = False  # whether it has restarted itself: earlier control requests stay in force
    was_line_hidden: bool = False  # whether the join line was removed from `resume`; the folder has it

    def node(self, section: DhtSection, folder: Path, relay_mbit: float | None = None) -> Node:
        """Start this peer's node by the options of the command line; `section` has their defaults."""
        chosen = {"host_maddrs": self.host_maddrs, "announce_maddrs": self.announce_maddrs}
        return start_node(
            section.model_copy(update={key: value for key, value in chosen.items() if value}),
            folder,
            self.invitation,
            identity=self.identity,
            is_public=self.is_public,
            reach=ReachRules(self.reach, relay_mbit, self.max_upload, self.max_download),
        )

    def resume_in(self, folder: Path, run: str) -> str:
        """Return the command to resume, with the options that depend on the folder."""
        # A recipe from a pipe can't be read again; the paths in the run's own copy are absolute.
        typed = shlex.split(self.resume)
        words: list[object] = [folder / RESOLVED if word == self.piped else word for word in typed]
        if folder != RUNS / run and "--output-dir" not in self.resume:
            words += ["--output-dir", folder]
        if self.was_line_hidden and (folder / INVITED_BY_FILE).exists():
            words += ["--peer", f"@{folder / INVITED_BY_FILE}"]
        return shlex.join(map(str, words))


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
            paused_s = self.wait_while_paused(requests)
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
                self.load(replace(options.budget, seconds=options.budget.seconds - paused_s))
            stack.enter_context(published(self.node, self.run, self.own_status, events))
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

    def wait_while_paused(self, requests: ControlRequests) -> float:
        """Wait while this peer is paused; its node still serves joiners, and peers that need a relay.

        Heavy libraries are not loaded yet, and nothing is on the GPU. If the peer is paused, it announces how
        others join. Returns the seconds of the pause.

        Raises:
            PeerBroken: the node has ended.
            NotAdmitted: the swarm's owner has removed this peer.
            Left: this peer should leave, or the time of its budget is over.
        """
        node = self.node
        events = self.events
        step = self.own_status.current.step
        began_at = time.monotonic()

        def leave_if_due() -> None:
            if requests.is_to_finish or time.monotonic() >= began_at + self.options.budget.seconds:
                self.leaving.leave("finish" if requests.is_to_finish else "budget")
                raise Left

        leave_if_due()
        if not requests.pause_reason():
            return 0.0
        reported = ""
        publishing = published(node, self.run, self.own_status, events)
        with self.leaving.interruptible(), publishing, reach_reported(node, events):
            self.invite()
            while why := requests.pause_reason():
                if why != reported:
                    events.emit("paused", step=step, why=why, run_id=self.run.run_id, peer_id=node.peer_id)
                reported = why
                time.sleep(1.0)
                leave_if_due()
                node.require_membership()
                if not node.is_alive():
                    raise PeerBroken(
                        "This peer's DHT process has ended while the peer was paused.",
                        hint="nothing to do where a command trains: it starts again by itself, and is paused "
                        "again",
                    )
        leave_if_due()
        paused_s = time.monotonic() - began_at
        events.emit("resumed", step=step, seconds=round(paused_s, 1))
        return paused_s

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
                self.leaving.spent = self.trainer.swarm_callback.spent

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
            write_final(model, self.splits.tokenizer, self.folder / FINAL, card)
            self.show_sample(step)
        return Ended("max_steps", step, self.folder / FINAL)

    def show_sample(self, step: int) -> None:
        """Emit a text that the model writes, if its task is to write text.

        It answers the first conversation of the held-out data, or of the training data. Without
        conversations, it continues the beginning of the first held-out sample, or starts from nothing.
        """
        recipe = self.run.recipe
        if recipe.task not in ("clm", "sft", "dpo"):
            return
        from trahiv_cli.assets.export import Prompt, open_turn, sample_text

        # Half of the trained length each for prompt and text: some models have no positions beyond it.
        half = recipe.section.max_length // 2
        trainer = self.trainer
        tokenizer = self.splits.tokenizer
        prompt = None
        if recipe.clm is None:
            prompt = open_turn(tokenizer, next(iter(self.splits.eval or self.splits.train)), half)
        if prompt is None:
            samples = trainer.eval_dataset
            first = {"input_ids": []} if samples is None else next(iter(samples))
            ids = (first.get("prompt_ids") or first["input_ids"])[: min(half, 32)]
            ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids  # so that the model continues
            prompt = Prompt(ids, tokenizer.decode(ids, skip_special_tokens=True))
        model = trainer.accelerator.unwrap_model(trainer.model)
        with self.events.waiting("the model to write a sample", until_s=600):
            text = sample_text(model, tokenizer, prompt.ids, min(half, 120), recipe.training.seed)
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
