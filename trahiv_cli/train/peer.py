"""One peer's life on one page; every other file is a line of this one.

Heavy libraries are imported by the phase that needs them, so that what is wrong with a port, an address or a
folder is said before they load.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trahiv_cli.assets.hub import HINT as HUB_HINT
from trahiv_cli.assets.hub import do_without_hub, patience_s
from trahiv_cli.errors import RecipeError, RecipeMismatch, SetupError, SwarmError, TrahivError
from trahiv_cli.recipe.agreement import (
    agreement,
    differences,
    fingerprint,
    renamed,
    resolve,
    run_id,
    what_changed,
)
from trahiv_cli.recipe.load import parse_recipe
from trahiv_cli.recipe.schema import DhtSection, Recipe, section_of
from trahiv_cli.swarm.acquaintances import FILE, Acquaintances
from trahiv_cli.swarm.addresses import require_peer_address
from trahiv_cli.swarm.exchange import REPUBLISH_EVERY_S, PublishedRun, fetch_offer, publish_recipe
from trahiv_cli.swarm.identity import IDENTITY_FILE
from trahiv_cli.swarm.invitation import (
    INVITED_BY_FILE,
    MEMBER_FILE,
    Invitation,
    find_standing,
    join_by,
    keep_invitation,
    passing_standing,
    read_invitation,
    write_invitation,
)
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.reunion import known_peers
from trahiv_cli.swarm.visiting import visiting
from trahiv_cli.telemetry.events import EventFile, Events
from trahiv_cli.telemetry.rotating import RotatingFile
from trahiv_cli.train.folder import RUNS, has_begun, owned, owned_to_join
from trahiv_cli.train.leaving import ENDLESS_BUDGET, Budget, Leaving, Left

if TYPE_CHECKING:
    from trahiv_cli.assets.data import Splits
    from trahiv_cli.train.trainer import SwarmTrainerMixin

WRITING_TASKS = ("clm", "sft", "dpo")
"""Tasks whose model can show at the end what it writes."""

SAMPLE_TOKENS = 120
SAMPLE_PROMPT_TOKENS = 32
PROGRESS_EVERY_S = 0.5
TELL_AFTER_FAILURES = 3
"""In a row, of publishing the recipe: a minute at most, half of what its record lives."""

ANOTHER_PLACE = "choose another place with --output-dir DIR, or move that folder away"


@dataclass(frozen=True)
class PeerOptions:
    """What a peer chooses for itself; nothing here can change the run."""

    output_dir: Path | None = None
    """Where the run lives. Default: `runs/<run_id>`, and for a joiner see `owned_to_join`."""

    identity: Path | None = None
    """Key file. Default: `identity.key` in the run's folder."""

    host_maddrs: tuple[str, ...] = ()
    announce_maddrs: tuple[str, ...] = ()

    invitation: Invitation = Invitation()
    """By which it joins; an empty one starts a swarm."""

    is_public: bool = False
    """Whether the swarm that it starts is open."""

    reached_step: int = 0
    """The step that the swarm had reached when this peer asked to join."""

    wait_s: float | None = None
    """How long the first step of a run waits for `swarm.min_peers`; None: as long as the trainer waits."""

    budget: Budget = ENDLESS_BUDGET
    """What this peer gives to the run; then it leaves."""

    resume: str = ""
    """What to type to go on after a stop; it holds no secret."""

    was_line_hidden: bool = False
    """Whether the line to join by was taken out of `resume`; the folder has a file with it."""

    def folder(self, run: str) -> Path:
        """The run's folder; a joiner may take another one, see `owned_to_join`."""
        return self.output_dir or RUNS / run

    def dht(self, section: DhtSection) -> DhtSection:
        """The recipe's DHT section with what was said on the command line over it."""
        said = {"host_maddrs": list(self.host_maddrs), "announce_maddrs": list(self.announce_maddrs)}
        return section.model_copy(update={key: value for key, value in said.items() if value})


@dataclass(frozen=True)
class Ended:
    """How a peer's life ended."""

    reason: str
    """`max_steps`, `signal` or `budget`."""

    step: int
    path: Path | None
    """`final/`, or the checkpoint to go on from."""

    had_ended: bool = False
    """Whether it was over before it began: the run is finished."""


def run_peer(recipe: Recipe, text: str, options: PeerOptions, events: Events, leaving: Leaving) -> Ended:
    """Start or join the recipe's swarm, train with it, and leave in good order.

    Args:
        recipe: for a joiner already compared with the swarm's.
        text: the recipe as its author wrote it, kept in the run's folder.
        options: this peer's own choices.
        events: told about everything.
        leaving: the user's wish to leave.

    Raises:
        SetupError, Unreachable, NotAdmitted: before anything was trained; no process is left. It is
            `FolderTaken` if another peer runs in the run's folder.
        AssetError, OutOfMemory: the model or the data can't be had, or memory ran out while training.
        RecipeMismatch: local data is not what the swarm trains on, or what was loaded is not.
        RoundFailed: the swarm's state could not be had.
    """
    with events.waiting("the data files to be read, to tell them from others", until_s=3600):
        recipe = resolve(recipe)
    with _own_folder(run_id(recipe), options, events) as folder:
        options = replace(options, resume=_resume(options, folder, run_id(recipe)))
        leaving.resume = options.resume
        return _run_in(folder, recipe, text, options, events, leaving)


def _run_in(
    folder: Path, recipe: Recipe, text: str, options: PeerOptions, events: Events, leaving: Leaving
) -> Ended:
    """Do what `run_peer` says, in a folder that this peer owns."""
    prepare_folder(folder, recipe, text)
    if (folder / "final").exists() and not _has_more_to_do(folder, recipe):
        finished = Ended("max_steps", recipe.training.max_steps, folder / "final", had_ended=True)
        return _told(finished, options, events)
    invitation = options.invitation
    if _is_kept(invitation, folder):
        keep_invitation(folder / INVITED_BY_FILE, invitation)
    record = EventFile(folder / "events.jsonl")
    events.add(record)
    _log_to(folder / "trahiv.log", verbose=recipe.hivemind_config.opt.verbose)
    try:
        with leaving.interruptible():
            goes_on = has_begun(folder)
            if not goes_on and options.reached_step == 0:
                _say_that_data_was_edited(recipe, folder, events)
            node = start_node(recipe.hivemind_config.dht, options, folder, must_reach=not goes_on)
        reached = [options.reached_step]
        with node:
            with leaving.interruptible():
                prepared = _prepare(recipe, folder, node, events)
            with _published(node, recipe, events, reached):
                announce(node, folder, recipe, events)
                if invitation.addresses and not node.run(known_peers):
                    _say_that_nobody_answers(events, goes_on=goes_on)
                from trahiv_cli.assets.memory import translated_out_of_memory

                with translated_out_of_memory(recipe):
                    with leaving.interruptible():
                        trainer = _build_trainer(prepared, recipe, folder, node, events, leaving, options)
                        # To compare with the end. A loaded model is left alone: it may be slow, and
                        # bitsandbytes packs quantized weights anew where a CPU evaluates them.
                        if recipe.model.config and not goes_on and not invitation.addresses:
                            _show_sample(trainer, prepared.tokenizer, recipe, 0, events)
                    with _progress(trainer, recipe, events, reached):
                        trainer.train()
                    ended = _finish(trainer, prepared.tokenizer, recipe, folder, events)
        return _told(ended, options, events)
    except Left:
        return _told(_left_early(folder), options, events)
    except TrahivError as error:  # the shell says it on the screen; the run's own record has it too
        Events(record).emit("error", code=error.code, message=error.message, hint=error.hint)
        raise
    finally:
        events.remove(record)
        record.close()


def serve_bootstrap(options: PeerOptions, events: Events, leaving: Leaving, dht: DhtSection) -> Ended:
    """Be an address that others can join by, without training, until told to leave or the time is over.

    Raises:
        SetupError: see `owned` and `Node`.
    """
    try:
        with (
            owned(options.folder("bootstrap")) as folder,
            leaving.interruptible(),
            start_node(dht, options, folder) as node,
        ):
            _say_ready(node, folder, events, run_id=None, fingerprint=None)
            seconds = options.budget.seconds
            threading.Event().wait(None if math.isinf(seconds) else seconds)
            reason = "budget"
    except Left:
        reason = "signal"
    return _told(Ended(reason, 0, None), options, events)


@contextmanager
def _own_folder(run: str, options: PeerOptions, events: Events) -> Iterator[Path]:
    """Own the folder that this peer runs in; say which it is if nobody would expect that."""
    if options.output_dir is not None or not options.invitation.addresses:
        with owned(options.folder(run)) as folder:
            yield folder
        return
    with owned_to_join(run, options.invitation.membership) as folder:
        if folder != options.folder(run):
            message = f"This peer's folder is {folder}: {options.folder(run)} is that of another peer."
            events.emit("folder", path=str(folder), message=message)
        yield folder


def _is_kept(invitation: Invitation, folder: Path) -> bool:
    """Whether an invitation is written down: not one that says less than the folder does already."""
    return bool(invitation.membership or (invitation.addresses and not (folder / MEMBER_FILE).exists()))


def _resume(options: PeerOptions, folder: Path, run: str) -> str:
    """Complete what to type to go on by what only this folder tells."""
    words: list[object] = []
    if folder != RUNS / run and "--output-dir" not in options.resume:
        words += ["--output-dir", folder]
    has_line = _is_kept(options.invitation, folder) or (folder / INVITED_BY_FILE).exists()
    if options.was_line_hidden and has_line:
        words += ["--peer", f"@{folder / INVITED_BY_FILE}"]
    return " ".join(filter(None, [options.resume, shlex.join(map(str, words))]))


# -- before training ------------------------------------------------------------------------------


def _has_more_to_do(folder: Path, recipe: Recipe) -> bool:
    """Whether a finished run was given more steps since."""
    from trahiv_cli.train.checkpoint import saved_in

    saved = saved_in(folder)
    return bool(saved) and saved[-1].step < recipe.training.max_steps


def read_run(folder: Path) -> Recipe:
    """Read the resolved recipe of a run's folder.

    Raises:
        SetupError: it has none that this version understands.
    """
    resolved = folder / "recipe.json"
    try:
        return parse_recipe(json.loads(resolved.read_text(encoding="utf-8")), str(resolved))
    except (OSError, ValueError, RecursionError, RecipeError) as error:
        raise SetupError(
            f"{resolved} is not a recipe of this version of trahiv.", hint=ANOTHER_PLACE
        ) from error


def scout(
    invitation: Invitation,
    preferred_run: str | None = None,
    known: Path | None = None,
    identity: Path | None = None,
) -> PublishedRun:
    """Visit a swarm, only to see what it trains.

    Args:
        invitation: of the join line.
        preferred_run: which run, if the swarm has several and the invitation is to none of them.
        known: folder of the run, if it was trained here before: its peers may know where the swarm is now.
        identity: key file of a peer that was there before; None: a passing one.

    Raises:
        Unreachable: no peer answered, or none publishes a run.
        NotAdmitted: the swarm is closed, and the invitation does not open it.
        RecipeMismatch: it is not clear which run is meant, or it is not what this peer was invited to.
    """
    for address in invitation.addresses:
        require_peer_address(address)
    named = [address.rpartition("/p2p/")[2] for address in invitation.addresses]
    met = Acquaintances.remembered(known and known / FILE)
    standing = passing_standing(known, invitation)
    with visiting(invitation.addresses, standing, met, identity) as node:
        offer = fetch_offer(node, named, preferred_run or invitation.run_id)
    if not offer.fingerprint.startswith(invitation.fingerprint):
        raise RecipeMismatch(
            f"The swarm trains {offer.run_id} with fingerprint {offer.fingerprint[:12]}; the invitation is "
            f"to {invitation.run_id} with {invitation.fingerprint[:12]}. Nothing was changed.",
            hint="ask whoever invited you for a fresh line",
        )
    return offer


def require_same_agreement(recipe: Recipe, offer: PublishedRun) -> Recipe:
    """Refuse to join a swarm that agreed on something else.

    Returns:
        The recipe under the swarm's run_id.

    Raises:
        RecipeMismatch: with every field that differs, ours and theirs.
    """
    if recipe.hivemind_config.opt.run_id is None:
        recipe = renamed(recipe, offer.run_id)
    different = differences(agreement(recipe), offer.wire["shared"])
    if different:
        raise RecipeMismatch(
            f"The swarm trains another recipe: it differs in {len(different)} of the fields that all share.",
            hint="join without RECIPE to take the swarm's, or change these fields",
            differences=different,
        )
    return recipe


def start_node(section: DhtSection, options: PeerOptions, folder: Path, *, must_reach: bool = True) -> Node:
    """Start the network part of a peer; `must_reach`: see `Node`.

    Raises:
        SetupError, Unreachable, NotAdmitted: see `Node`.
    """
    section = options.dht(section)
    identity = options.identity or (
        Path(section.identity_path) if section.identity_path else folder / IDENTITY_FILE
    )
    invitation = (
        options.invitation if options.invitation.addresses else read_invitation(section.initial_peers)
    )
    return Node(
        section,
        identity,
        invitation.addresses,
        met=Acquaintances(folder / FILE),
        must_reach=must_reach,
        standing=find_standing(folder, invitation, is_public=options.is_public),
    )


def prepare_folder(folder: Path, recipe: Recipe, text: str) -> Path:
    """Make the run's folder with the recipe in it, as given and resolved.

    Raises:
        SetupError: it holds a run of another agreement; nothing in it was changed.
    """
    resolved = folder / "recipe.json"
    if resolved.exists():
        _require_same_run(resolved, recipe)
    is_own_copy = resolved.exists() and resolved.read_text(encoding="utf-8") == text
    if not is_own_copy:  # what was given first stays
        (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    resolved.write_text(json.dumps(recipe.to_data(), indent=2) + "\n", encoding="utf-8")
    return folder


def _require_same_run(resolved: Path, recipe: Recipe) -> None:
    """Refuse to go on in a folder with another run's checkpoints; only the number of steps may change."""
    there = read_run(resolved.parent)
    fields, files = what_changed(there, recipe)
    if fields or files:
        different = ", ".join([*(f"the content of {file}" for file in files), *fields])
        old_files = f"bring the old {' and '.join(files)} back to go on with it, or " if files else ""
        raise SetupError(
            f"{resolved.parent} holds another run, {run_id(there)}: it differs in {different}.",
            hint=old_files + ANOTHER_PLACE,
        )


def _say_that_data_was_edited(recipe: Recipe, folder: Path, events: Events) -> None:
    """Warn that a run which begins differs from an earlier one only by files that were edited since.

    Whoever edited a file may expect the earlier run to go on, and would think that it is lost.
    """
    from trahiv_cli.train.checkpoint import saved_in

    resolved = [file for file in RUNS.glob("*/recipe.json") if file.parent != folder]
    for file in sorted(resolved, key=lambda path: path.stat().st_mtime, reverse=True):
        run = file.parent
        try:
            fields, files = what_changed(read_run(run), recipe)
        except SetupError:
            continue  # a folder of another version's
        if files and not fields and (saved := saved_in(run)):
            names, differ = " and ".join(files), "differ from those" if files[1:] else "differs from the one"
            events.emit(
                "warning",
                code="data",
                message=f"This is another run, from step 0: {names} {differ} that {run} was trained on, "
                f"which is at step {saved[-1].step}.",
                hint=f"bring the old {names} back and type the same command to go on with {run}",
            )
            return


def announce(node: Node, folder: Path, recipe: Recipe, events: Events) -> None:
    """Say who this peer is and how others join it."""
    _say_ready(
        node,
        folder,
        events,
        run_id=run_id(recipe),
        fingerprint=fingerprint(agreement(recipe)),
        max_steps=recipe.training.max_steps,
        target_batch_size=recipe.hivemind_config.opt.target_batch_size,
    )


def _say_ready(
    node: Node, folder: Path, events: Events, *, run_id: str | None, fingerprint: str | None, **more: Any
) -> None:
    """Say where this peer is. The secret of a closed swarm is in a private file, and never in an event."""
    addresses = node.addresses()
    join, file = "", None
    if addresses and node.standing is None:
        join = f"trahiv join --peer {addresses[0].maddr}"
    elif addresses and (file := write_invitation(folder, node, run_id or "", fingerprint or "")):
        join = join_by(file)
    events.emit(
        "ready",
        run_id=run_id,
        peer_id=node.peer_id,
        maddrs=[address.maddr for address in addresses],
        reach=[address.reach for address in addresses],
        join=join,
        invitation=file and str(file),
        invite=_invite_by(folder) if node.standing and node.standing.owner else None,
        fingerprint=fingerprint,
        **more,
    )


def _invite_by(folder: Path) -> str:
    """Make the command that invites others to a swarm that was started in this folder."""
    return shlex.join(["trahiv", "invite", "--output-dir", str(folder)])


def _say_that_nobody_answers(events: Events, *, goes_on: bool) -> None:
    start = "goes on from its own checkpoint" if goes_on else "has just met one that has left since"
    events.emit(
        "warning",
        code="unreachable",
        message=f"No peer of this run answers. This one {start}, and calls on the others until they answer; "
        "then all go on from the furthest state.",
        hint="nothing to do if they are meant to be away; else start them again, with the same command",
    )


def _log_to(path: Path, *, verbose: bool) -> None:
    """Send what libraries log, children of this process included, to a file instead of the screen.

    It is bounded: see `RotatingFile`.
    """
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    logging.captureWarnings(True)
    handler = RotatingFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if verbose else logging.WARNING)


@contextmanager
def _published(node: Node, recipe: Recipe, events: Events, reached: list[int]) -> Iterator[None]:
    """Keep the recipe and the step `reached[0]` in the DHT, from every peer, to outlive the first one."""
    publish_recipe(node, recipe, run_id(recipe), reached[0])
    failures = 0

    def repeat() -> None:
        nonlocal failures
        try:
            publish_recipe(node, recipe, run_id(recipe), reached[0])
            failures = 0
        except SwarmError as error:
            failures += 1  # one is what comes of a DHT that is started anew
            if failures == TELL_AFTER_FAILURES:
                events.emit(
                    "warning",
                    code=error.code,
                    message=f"The recipe was not published again, {failures} times: {error.message}",
                    hint="nothing to do: it is tried again; until then joiners get it from other peers",
                )

    with _every(REPUBLISH_EVERY_S, repeat, "recipe publisher"):
        yield


@contextmanager
def _every(seconds: float, act: Callable[[], None], name: str) -> Iterator[None]:
    """Call `act` in a thread of its own every so many seconds while the block runs."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            act()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# -- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prepared:
    """What a peer has before its model is loaded."""

    tokenizer: Any
    splits: Splits
    warn: Callable[[str, str], None]
    """Says each thing about the data once, with a hint: it is prepared in part, and then as a whole."""


def _prepare(recipe: Recipe, folder: Path, node: Node, events: Events) -> _Prepared:
    """Load the tokenizer and the data, and make sure that they and this machine are sound.

    Nobody is invited before this is done: what is left to go wrong is the model's weights.

    Raises:
        OutOfMemory: said before anything large is loaded.
        AssetError: the tokenizer or the data can't be had, or they do not fit the task.
        SetupError: this machine can't compute as the recipe says, or lacks a tracker.
    """
    with events.waiting("the hub to answer", until_s=patience_s()):
        silence = do_without_hub(recipe)
    if silence:
        events.emit("warning", code="hub", message=silence, hint=HUB_HINT)
    with events.waiting("the libraries to load", until_s=120):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from datasets.utils import logging as datasets_logging
        from transformers.utils import logging as transformers_logging

        from trahiv_cli.assets.data import build_datasets
        from trahiv_cli.assets.memory import translated_out_of_memory
        from trahiv_cli.assets.model import build_tokenizer, require_memory
        from trahiv_cli.train.arguments import training_arguments
        from trahiv_cli.train.preparing import heeding
        from trahiv_cli.train.preview import require_trainable
        from trahiv_cli.train.trainer import derive_peer_seed, require_optimizer, require_swarmable

        transformers_logging.set_verbosity_error()
        datasets_logging.set_verbosity_error()
    arguments = training_arguments(recipe, folder)
    require_swarmable(arguments, {})  # what this machine lacks is said before data is read
    require_optimizer(arguments)
    seed, warn = recipe.training.seed, _warn_of_data(events)
    with translated_out_of_memory(recipe):
        require_memory(recipe)
        tokenizer = build_tokenizer(recipe)
        with events.waiting("the data to be read and tokenized", until_s=3600), heeding(warn):
            peer_seed = derive_peer_seed(seed, node.peer_id)
            splits = build_datasets(recipe, tokenizer, seed=seed, peer_seed=peer_seed)
            require_trainable(recipe, tokenizer, splits)
    return _Prepared(tokenizer, splits, warn)


def _build_trainer(
    prepared: _Prepared,
    recipe: Recipe,
    folder: Path,
    node: Node,
    events: Events,
    leaving: Leaving,
    options: PeerOptions,
) -> SwarmTrainerMixin:
    """Load the model, and put it with the data into the same trainer that everybody can use.

    Raises:
        AssetError: the model can't be had.
    """
    from transformers.trainer_callback import PrinterCallback

    from trahiv_cli.train.preparing import heeding
    from trahiv_cli.train.tasks import build_trainer

    with events.waiting("the model to load", until_s=3600), heeding(prepared.warn):
        trainer = build_trainer(
            recipe,
            folder,
            prepared.tokenizer,
            prepared.splits,
            node=node,
            events=events,
            should_leave=leaving,
            reached_step=options.reached_step,
            budget=options.budget,
            **({} if options.wait_s is None else {"wait_s": options.wait_s}),
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _warn_of_data(events: Events) -> Callable[[str, str], None]:
    """Make what says each thing about the data once."""
    said: set[str] = set()

    def warn(message: str, hint: str) -> None:
        if message not in said:
            said.add(message)
            events.emit("warning", code="data", message=message, hint=hint)

    return warn


@contextmanager
def _progress(
    trainer: SwarmTrainerMixin, recipe: Recipe, events: Events, reached: list[int]
) -> Iterator[None]:
    """Twice a second, tell live views how far the next step is and who gave what; keep `reached[0]` true."""

    def tell() -> None:
        optimizer = trainer.swarm_optimizer
        if optimizer is None:
            return
        tracker = optimizer.tracker
        own = tracker.local_progress
        reached[0] = own.epoch
        events.emit(
            "progress",
            step=own.epoch,
            max_steps=recipe.training.max_steps,
            samples=tracker.samples_accumulated,
            target=tracker.target_batch_size,
            eta_seconds=tracker.eta_s,
            peers=[
                {
                    "peer_id": tracker.own_id,
                    "samples": own.samples_accumulated,
                    "samples_per_second": own.samples_per_second,
                    "step": own.epoch,
                    "me": True,
                },
                *(
                    {
                        "peer_id": peer.peer_id,
                        "samples": peer.samples if peer.step == own.epoch else 0,
                        "samples_per_second": peer.samples_per_second,
                        "step": peer.step,
                        "me": False,
                    }
                    for peer in tracker.others
                ),
            ],
        )

    with _every(PROGRESS_EVERY_S, tell, "progress"):
        yield


# -- the end --------------------------------------------------------------------------------------


def _left_early(folder: Path) -> Ended:
    """Say where a run stands whose peer left before it trained: what it saved earlier is still there."""
    from trahiv_cli.train.checkpoint import saved_in

    saved = saved_in(folder)
    return Ended("signal", saved[-1].step, saved[-1].path) if saved else Ended("signal", 0, None)


def _told(ended: Ended, options: PeerOptions, events: Events) -> Ended:
    """Say that it is over, and how to go on if there is more to do."""
    events.emit(
        "done",
        step=ended.step,
        path=str(ended.path) if ended.path else None,
        reason=ended.reason,
        resume=None if ended.reason == "max_steps" else options.resume,
        had_ended=ended.had_ended,
    )
    return ended


def _finish(
    trainer: SwarmTrainerMixin, tokenizer: Any, recipe: Recipe, folder: Path, events: Events
) -> Ended:
    """Write the finished model, or the checkpoint to go on from."""
    optimizer = trainer.swarm_optimizer
    assert optimizer is not None
    step = optimizer.local_epoch
    trainer.swarm_callback.save_checkpoint()
    path = trainer.swarm_callback.finish_saving()
    if step < recipe.training.max_steps:
        return Ended("budget" if trainer.swarm_callback.has_spent_budget else "signal", step, path)
    from trahiv_cli.assets.export import write_final
    from trahiv_cli.train.card import final_card

    if trainer.eval_dataset is not None and trainer.swarm_callback.evaluated_at != step:
        trainer.evaluate()
    model = trainer.accelerator.unwrap_model(trainer.model)
    with optimizer.agreed_weights():
        write_final(model, tokenizer, folder / "final", final_card(recipe, trainer))
        _show_sample(trainer, tokenizer, recipe, step, events)
    return Ended("max_steps", step, folder / "final")


def _show_sample(
    trainer: SwarmTrainerMixin, tokenizer: Any, recipe: Recipe, step: int, events: Events
) -> None:
    """Let the model continue the beginning of a held-out sample, if its task is to write.

    Both together are no longer than what it is trained on: some models have no positions beyond that.
    """
    if recipe.task not in WRITING_TASKS:
        return
    from trahiv_cli.assets.export import sample_text

    half = getattr(recipe, section_of(recipe.task) or "").max_length // 2
    prompt = _prompt(trainer, tokenizer, min(half, SAMPLE_PROMPT_TOKENS))
    model = trainer.accelerator.unwrap_model(trainer.model)
    with events.waiting("the model to write a sample", until_s=600):
        text = sample_text(model, tokenizer, prompt, min(half, SAMPLE_TOKENS), recipe.training.seed)
    events.emit("sample", step=step, prompt=prompt, text=text)


def _prompt(trainer: SwarmTrainerMixin, tokenizer: Any, num_tokens: int) -> str:
    """The beginning of a held-out sample, or nothing."""
    if trainer.eval_dataset is None:
        return ""
    first = next(iter(trainer.eval_dataset))
    ids = first.get("prompt_ids") or first["input_ids"]
    return str(tokenizer.decode(ids[:num_tokens], skip_special_tokens=True))
