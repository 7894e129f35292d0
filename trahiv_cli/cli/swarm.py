"""Commands that train: `init` starts a swarm, `join` joins one."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from trahiv_cli.cli.options import (
    RECIPE,
    PeerOption,
    PublicOption,
    SharedOptions,
    argument,
    option,
    taken_peers,
    with_shared_options,
)
from trahiv_cli.cli.output import out
from trahiv_cli.cli.restarting import is_again, left_of, note_spent, restart, start_again
from trahiv_cli.cli.watch import require_web
from trahiv_cli.errors import NothingPublished, PeerBroken, Unreachable
from trahiv_cli.recipe.pasted import peers_in
from trahiv_cli.run.leaving import ENDLESS_BUDGET

if TYPE_CHECKING:
    from trahiv_cli.recipe.agreement import AgreedRun
    from trahiv_cli.recipe.document import Document
    from trahiv_cli.recipe.load import Loaded
    from trahiv_cli.recipe.schema import Recipe
    from trahiv_cli.run.peer_options import PeerOptions
    from trahiv_cli.telemetry.events import Events


@with_shared_options
def init(
    recipe: Annotated[str | None, RECIPE] = None,
    no_train: Annotated[
        bool, option("--no-train", "Only help peers find each other; train nothing.")
    ] = False,
    public: PublicOption = False,
    *,
    shared: SharedOptions,
) -> None:
    """Start a swarm and train as its first peer.

    Prints the line with which others can join.
    """
    out.use(shared.format, sys.stdout)
    if recipe is None and not (no_train or shared.dry_run or shared.yes) and sys.stdin.isatty():
        said = "Without a RECIPE this starts a bootstrap node: others can join through it"
        out.say(f"{said}, but it trains nothing.")
        out.hint("`trahiv init quickstart` trains a small example; `trahiv new` lists other recipes")
        if not out.confirm("Start a bootstrap node?"):
            return
    from trahiv_cli.recipe.load import load_recipe

    run = loaded = None
    if recipe is not None:
        loaded = load_recipe(recipe, shared.overrides or (), shared.files)
        if shared.dry_run or not no_train:
            run = sound(loaded.recipe, loaded.document)
    if shared.dry_run:
        if run is None:
            raise typer.BadParameter("name the recipe whose run would be shown", param_hint="RECIPE")
        rehearse(run)
        return
    is_public = public or (loaded is not None and loaded.recipe.swarm.public)
    options = options_of(shared, loaded, is_public=is_public)
    if run is None and shared.budget and math.isinf(options.budget.seconds):
        said = "a peer that does not train takes a time only, like 2h"
        raise typer.BadParameter(said, param_hint="--budget")
    live(run, options, shared, loaded)


@with_shared_options
def join(
    recipe: Annotated[
        str | None,
        argument("LINE|RECIPE", "The line to join by, or a recipe of your own that agrees with the swarm's."),
    ] = None,
    peer: PeerOption = None,
    *,
    shared: SharedOptions,
) -> None:
    """Join a swarm and train with it.

    The recipe comes from the swarm, which shows it before anything is trained.
    """
    out.use(shared.format, sys.stdout)
    hidden = taken_peers()  # typed, and then moved into the environment, or there from the start
    peer = [word for word in (*(peer or ()), *hidden) if word.strip()]
    if recipe is not None and peers_in(recipe):
        peer = [*peer, recipe]
        recipe = None
    if not peer:
        raise typer.BadParameter("paste the line that `trahiv init` printed", param_hint="--peer")
    from trahiv_cli.recipe.load import load_recipe

    run = loaded = None
    if recipe is not None:
        loaded = load_recipe(recipe, shared.overrides or (), shared.files)
        run = sound(loaded.recipe, loaded.document)
    from trahiv_cli.members.invitation import read_invitation
    from trahiv_cli.run.lock import require_free

    invitation = read_invitation(peer)
    options = options_of(shared, loaded, invitation=invitation, was_line_hidden=bool(hidden))
    if shared.output_dir is not None:
        require_free(shared.output_dir)
    run, options = agreed(loaded, run, shared, options)
    if shared.dry_run:
        rehearse(run)
        return
    if loaded is None:
        show(run)
        if not (shared.yes or is_again() or not sys.stdin.isatty() or out.confirm("Train this?")):
            return
    live(run, options, shared, loaded)


def sound(recipe: Recipe, document: Document) -> AgreedRun:
    """Agree on a recipe that must be sound, and whose data must be here.

    Raises:
        RecipeError, AssetError, RecipeMismatch: see `require_sound` and `read_contents`.
    """
    from trahiv_cli.recipe.agreement import resolve
    from trahiv_cli.recipe.examine import require_sound
    from trahiv_cli.telemetry.events import Events

    require_sound(recipe, document)
    events = Events()
    with out.listening(events), events.waiting("the data files to be read", until_s=3600):
        return resolve(recipe)


def agreed(
    loaded: Loaded | None, run: AgreedRun | None, shared: SharedOptions, options: PeerOptions
) -> tuple[AgreedRun, PeerOptions]:
    """Fetch a swarm's recipe and complete it here, or compare it with the user's own; adapt the options.

    If no peer answers, the recipe is the user's own, or the recipe of a run in which this machine took part.
    """
    from trahiv_cli.recipe.agreement import AgreedRun
    from trahiv_cli.recipe.content import with_copies
    from trahiv_cli.recipe.document import Document
    from trahiv_cli.recipe.record import SOURCE
    from trahiv_cli.run.folder import (
        earlier_peers,
        folders_to_join,
        known_identity,
        known_run,
        read_run,
        require_same_agreement,
        scout,
    )
    from trahiv_cli.swarm.published_run import accept_offer

    invitation = options.invitation
    identity = options.identity
    overrides = shared.overrides or ()
    changes: dict[str, Any] = {}
    earlier = earlier_peers(options.output_dir)
    known = known_run(earlier, None if options.output_dir else invitation.addresses)
    if identity is None or not identity.exists():
        identity = known_identity(earlier, invitation.membership)
    key = "hivemind_config.opt.run_id="
    named = next((text.removeprefix(key) for text in reversed(overrides) if text.startswith(key)), None)
    try:
        offer = scout(invitation, run.run_id if run else named, known, identity)
        if loaded is None:
            run = accept_offer(offer, overrides, shared.files)
        else:
            run = require_same_agreement(loaded.recipe, offer)
        changes["reached_step"] = offer.step
    except Unreachable as error:
        # The first peer that joins a bare bootstrap node brings the recipe.
        if not isinstance(error, NothingPublished) or run is None:
            if known is None:
                raise
            # The invitation's membership may belong to another run.
            changes["invitation"] = replace(invitation, membership=None)
            if run is None:  # all have left; this machine has a checkpoint of the run
                run = AgreedRun.of(with_copies(read_run(known).recipe, shared.files))
                changes["output_dir"] = known
    if loaded is None:
        document = Document({}, SOURCE)
        document.replace(overrides)
        run = sound(run.recipe, document)
    options = replace(options, **changes)
    if options.output_dir is None:
        folders = folders_to_join(run.run_id, options.invitation.membership, earlier)
        options = replace(options, folders=tuple(folders))
    return run, options


def options_of(shared: SharedOptions, loaded: Loaded | None, **more: Any) -> PeerOptions:
    """Return a peer's options; `more` are fields that only one of the commands sets."""
    from trahiv_cli.run.peer_options import PeerOptions

    if shared.niceness is not None:
        try:
            psutil.Process().nice(shared.niceness)  # child processes inherit it
        except psutil.AccessDenied as error:
            now = psutil.Process().nice()
            said = f"this process is at {now} already, and may not go back to {shared.niceness}"
            raise typer.BadParameter(said, param_hint="--niceness") from error
    return PeerOptions(
        output_dir=shared.output_dir,
        identity=shared.identity,
        host_maddrs=shared.host_maddr,
        announce_maddrs=shared.announce_maddr,
        reach=shared.reach,
        wait_s=shared.wait,
        name=shared.name,
        conditions=shared.only_when or (),
        max_upload=shared.max_upload,
        max_download=shared.max_download,
        is_again=is_again(),
        budget=left_of(shared.budget or ENDLESS_BUDGET),
        resume=shlex.join(["trahiv", *sys.argv[1:]]),
        piped=loaded.piped if loaded else None,
        **more,
    )


def live(run: AgreedRun | None, options: PeerOptions, shared: SharedOptions, loaded: Loaded | None) -> None:
    """Run one peer, show its events, and exit with a code of docs/exit-codes.md.

    Without a run it is a bootstrap node. The run's recipe is the swarm's, or is `loaded` from the user's.
    """
    from trahiv_cli.run.leaving import Leaving
    from trahiv_cli.telemetry.events import Events
    from trahiv_cli.train.peer import run_peer, serve_bootstrap

    events = Events()
    try:
        with listened(events, shared) as give_terminal_back:

            def leave_at_once() -> None:
                give_terminal_back()
                again = leaving.resume or options.resume
                out.say(f"stopped at once, without a checkpoint\nto go on: {again}")

            leaving = Leaving(at_once=leave_at_once)
            with leaving.installed():
                if run is None:
                    ended = serve_bootstrap(options, events, leaving)
                else:
                    ended = run_peer(run, options, events, leaving, loaded.text if loaded else None)
    except PeerBroken as failure:
        note_spent(leaving.spent)
        restart(leaving.resume, failure)
    if ended.reason == "pause" and leaving.signal is None:
        note_spent(leaving.spent)
        start_again(leaving.resume)
    if ended.reason in ("signal", "pause"):  # a signal after the end of the work is ignored
        raise typer.Exit(leaving.exit_code)


@contextlib.contextmanager
def listened(events: Events, shared: SharedOptions) -> Iterator[Callable[[], None]]:
    """Show a run's events, and pass them on, while the block runs; yields `Output.listening`'s function."""
    from trahiv_cli.telemetry.notifier import Notifier

    if shared.metrics is not None:
        serve_metrics(shared.metrics, events)
    with contextlib.ExitStack() as listeners:
        if shared.on_event is not None:
            events.add(listeners.enter_context(Notifier(shlex.split(shared.on_event))))
        yield listeners.enter_context(out.listening(events))


def serve_metrics(port: int, events: Events) -> None:
    """Serve a peer's events as metrics; SetupError if the port is taken, or the package is missing."""
    require_web("Metrics need", "prometheus_client")
    from trahiv_cli.telemetry.metrics import Metrics

    kept = Metrics()
    kept.serve(port)
    events.add(kept)


def show(run: AgreedRun) -> None:
    """Show a person the run that is about to start; programs read `ready`."""
    recipe = run.recipe
    model = recipe.model
    training = recipe.training
    source = model.model_name_or_path or f"a new {(model.config or {}).get('model_type')} from scratch"
    how = f"LoRA adapters of rank {recipe.peft.r}" if recipe.peft else "all weights"
    samples = recipe.hivemind_config.opt.target_batch_size
    rows = {
        "run": f"{run.run_id} ({recipe.task})",
        "model": f"{source}, {how}",
        "data": ", ".join(dataset.path for dataset in recipe.data.datasets),
    }
    if recipe.grpo is not None:
        named = (
            f"{one.name} (code that runs here)" if one.is_own else one.name for one in recipe.grpo.rewards
        )
        rows["rewards"] = ", ".join(named)
    rows |= {
        "steps": f"{training.max_steps} of {samples} samples over all peers",
        "optimizer": f"{training.optim}, {training.lr_scheduler_type} from {training.learning_rate:g}",
        "fingerprint": run.fingerprint,
    }
    for name, value in rows.items():
        out.say(f"  {name:<12} {value}")


def rehearse(run: AgreedRun) -> None:
    """Show the run and its costs; no swarm is started or joined."""
    from trahiv_cli.cli.estimate import show_estimate

    show(run)
    show_estimate(run.recipe)
