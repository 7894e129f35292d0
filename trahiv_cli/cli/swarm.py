"""Commands that train: `init` starts a swarm, `join` joins one."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import psutil
import typer

from trahiv_cli.cli.options import (
    PEER_VARIABLE,
    RECIPE,
    SetOption,
    argument,
    option,
    parse_budget,
    parse_multiaddr,
    parse_seconds,
    read_command,
    read_condition,
    read_recipe,
    taken_peers,
)
from trahiv_cli.cli.output import FormatOption, out, quiet_libraries
from trahiv_cli.cli.restarting import is_again, note_spent, restart, seconds_spent, spent_before, start_again
from trahiv_cli.errors import NothingPublished, PeerBroken, SetupError, Unreachable
from trahiv_cli.recipe.builtin import how_to_install
from trahiv_cli.recipe.pasted import peers_in
from trahiv_cli.train.conditions import Condition
from trahiv_cli.train.leaving import ENDLESS_BUDGET, Budget

if TYPE_CHECKING:
    from trahiv_cli.recipe.load import Loaded
    from trahiv_cli.recipe.schema import Recipe
    from trahiv_cli.swarm.reach import Wanted
    from trahiv_cli.telemetry.events import Events
    from trahiv_cli.train.peer import PeerOptions

LineArgument = Annotated[
    str | None,
    argument("LINE|RECIPE", "The line to join by, or a recipe of your own that agrees with the swarm's."),
]
PEER_HELP = "An invitation, @FILE with one, or a multiaddr. Can be repeated. Also read from"
PeerOption = Annotated[list[str] | None, option("--peer", "ADDR", f"{PEER_HELP} {PEER_VARIABLE}.")]
HOST_HELP = "Listen on M; if M is not this machine's, announce it. Can be repeated. Default: a free TCP port."
HostOption = Annotated[list[str] | None, option("--host-maddr", "M", HOST_HELP, parser=parse_multiaddr)]
REACH_HELP = "How others reach this peer. Default: auto, which finds out."
ReachOption = Annotated[
    Literal["auto", "direct", "relay", "dial-out"],
    option("--reach", None, REACH_HELP),
]
ANNOUNCE_HELP = "Tell others that M is your address. Can be repeated."
AnnounceOption = Annotated[
    list[str] | None, option("--announce-maddr", "M", ANNOUNCE_HELP, parser=parse_multiaddr)
]
IdentityOption = Annotated[
    Path | None, option("--identity", "FILE", "This peer's key file. Default: the one in the run's folder.")
]
FolderOption = Annotated[
    Path | None, option("--output-dir", "DIR", "The run's folder. Default: runs/RUN_ID.")
]
FILES_HELP = "Look here for copies of the run's data, by what they hold."
FilesOption = Annotated[Path | None, option("--files", "DIR", FILES_HELP, exists=True, file_okay=False)]
NAME_HELP = "A name that all in the swarm see beside this peer's id."
NameOption = Annotated[str, option("--name", "NAME", NAME_HELP)]
ONLY_WHEN_HELP = "Pause unless it holds, like idle or 22:00-07:00. Can be repeated."
OnlyWhenOption = Annotated[
    list[Condition] | None, option("--only-when", "CONDITION", ONLY_WHEN_HELP, parser=read_condition)
]
UPLOAD_HELP = "Send no more than so many Mbit/s. Default: no limit."
UploadOption = Annotated[float | None, option("--max-upload", "MBIT", UPLOAD_HELP, min=1)]
DOWNLOAD_HELP = "Receive no more than so many Mbit/s. Default: no limit."
DownloadOption = Annotated[float | None, option("--max-download", "MBIT", DOWNLOAD_HELP, min=1)]
METRICS_HELP = "Serve metrics for Prometheus on this port of this machine."
MetricsOption = Annotated[int | None, option("--metrics", "PORT", METRICS_HELP, min=1, max=65535)]
EVENT_HELP = "Run C, the event on its stdin, when a person should know of it."
OnEventOption = Annotated[str | None, option("--on-event", "C", EVENT_HELP, parser=read_command)]
NICENESS_HELP = "Let other programs go first: 0 to 19. Default: as the shell."
NicenessOption = Annotated[int | None, option("--niceness", "N", NICENESS_HELP, min=0, max=19)]
BudgetOption = Annotated[
    Budget | None,
    option("--budget", "B", "Stop cleanly after B: 2h, 500 samples or 20 steps.", parser=parse_budget),
]
WAIT_HELP = "Wait at most T for swarm.min_peers before step 1. Default: 1h."
WaitOption = Annotated[float | None, option("--wait", "T", WAIT_HELP, parser=parse_seconds)]
YesOption = Annotated[bool, option("--yes", None, "Do not ask questions.")]
DryRunOption = Annotated[bool, option("--dry-run", None, "Only show what would run and what it costs.")]


def init(
    recipe: Annotated[str | None, RECIPE] = None,
    no_train: Annotated[
        bool, option("--no-train", None, "Only help peers find each other; train nothing.")
    ] = False,
    public: Annotated[bool, option("--public", None, "Let in everybody who learns the address.")] = False,
    host_maddr: HostOption = None,
    announce_maddr: AnnounceOption = None,
    reach: ReachOption = "auto",
    identity: IdentityOption = None,
    output_dir: FolderOption = None,
    overrides: SetOption = None,
    files: FilesOption = None,
    budget: BudgetOption = None,
    wait: WaitOption = None,
    name: NameOption = "",
    only_when: OnlyWhenOption = None,
    max_upload: UploadOption = None,
    max_download: DownloadOption = None,
    niceness: NicenessOption = None,
    metrics: MetricsOption = None,
    on_event: OnEventOption = None,
    format: FormatOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Start a swarm and train as its first peer.

    Prints the line with which others can join.
    """
    out.use(format, sys.stdout)
    if recipe is None and not (no_train or dry_run or yes) and sys.stdin.isatty():
        said = "Without a RECIPE this starts a bootstrap node: others can join through it"
        out.say(f"{said}, but it trains nothing.")
        out.hint("`trahiv init quickstart` trains a small example; `trahiv new` lists other recipes")
        if not out.confirm("Start a bootstrap node?"):
            return
    loaded = None if recipe is None else read_recipe(recipe, overrides, files, is_trained=not no_train)
    if dry_run:
        if loaded is None:
            raise typer.BadParameter("name the recipe whose run would be shown", param_hint="RECIPE")
        rehearse(loaded.recipe)
        return
    place = host_maddr, announce_maddr, reach, identity, output_dir
    options = options_of(*place, budget, wait, name, only_when, max_upload, max_download, niceness)
    options = replace(options, is_public=public or (loaded is not None and loaded.recipe.swarm.public))
    if loaded is not None and not no_train:
        options = resumable(options, loaded, str(recipe), loaded.recipe)
        live(loaded.recipe, loaded.text, options, metrics, on_event)
    elif budget and math.isinf(options.budget.seconds):
        said = "a peer that does not train takes a time only, like 2h"
        raise typer.BadParameter(said, param_hint="--budget")
    else:
        live(None, "", options, metrics, on_event)


def join(
    recipe: LineArgument = None,
    peer: PeerOption = None,
    host_maddr: HostOption = None,
    announce_maddr: AnnounceOption = None,
    reach: ReachOption = "auto",
    identity: IdentityOption = None,
    output_dir: FolderOption = None,
    overrides: SetOption = None,
    files: FilesOption = None,
    budget: BudgetOption = None,
    wait: WaitOption = None,
    name: NameOption = "",
    only_when: OnlyWhenOption = None,
    max_upload: UploadOption = None,
    max_download: DownloadOption = None,
    niceness: NicenessOption = None,
    metrics: MetricsOption = None,
    on_event: OnEventOption = None,
    format: FormatOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Join a swarm and train with it.

    The recipe comes from the swarm, which shows it before anything is trained.
    """
    out.use(format, sys.stdout)
    hidden = taken_peers()  # typed, and then moved into the environment, or there from the start
    peer = [word for word in (*(peer or ()), *hidden) if word.strip()]
    if recipe is not None and peers_in(recipe):
        peer = [*peer, recipe]
        recipe = None
    if not peer:
        raise typer.BadParameter("paste the line that `trahiv init` printed", param_hint="--peer")
    loaded = None if recipe is None else read_recipe(recipe, overrides, files, is_trained=True)
    place = host_maddr, announce_maddr, reach, identity, output_dir
    options = options_of(*place, budget, wait, name, only_when, max_upload, max_download, niceness)
    from trahiv_cli.run.lock import require_free
    from trahiv_cli.swarm.invitation import read_invitation

    options = replace(options, invitation=read_invitation(peer), was_line_hidden=bool(hidden))
    if output_dir is not None:
        require_free(output_dir)
    ours, options = agreed(loaded, overrides or (), files, options)
    if dry_run:
        rehearse(ours)
    elif loaded is not None:
        live(ours, loaded.text, resumable(options, loaded, str(recipe), ours), metrics, on_event)
    else:
        from trahiv_cli.recipe.document import render

        show(ours)
        if yes or is_again() or not sys.stdin.isatty() or out.confirm("Train this?"):
            text = "\n".join(line for line, _ in render(ours.to_data())) + "\n"
            live(ours, text, options, metrics, on_event)


def agreed(
    loaded: Loaded | None, overrides: Sequence[str], files: Path | None, options: PeerOptions
) -> tuple[Recipe, PeerOptions]:
    """Fetch a swarm's recipe and complete it here, or compare it with the user's own; adapt the options.

    If no peer answers, the recipe is the user's own, or the recipe of a run in which this machine took part.
    """
    from trahiv_cli.recipe.agreement import run_id
    from trahiv_cli.recipe.content import with_copies
    from trahiv_cli.recipe.document import Document
    from trahiv_cli.recipe.examine import require_sound
    from trahiv_cli.recipe.record import SOURCE
    from trahiv_cli.swarm.exchange import accept_offer
    from trahiv_cli.train.folder import known_identity, known_run, read_run, require_same_agreement, scout

    invitation = options.invitation
    identity = options.identity
    reached = 0
    known = known_run(invitation.addresses, options.output_dir)
    if identity is None or not identity.exists():
        identity = known_identity(invitation, options.output_dir)
    ours = None if loaded is None else loaded.recipe
    key = "hivemind_config.opt.run_id="
    named = next((text.removeprefix(key) for text in reversed(overrides) if text.startswith(key)), None)
    try:
        offer = scout(invitation, named if ours is None else run_id(ours), known, identity)
        ours = accept_offer(offer, overrides, files) if ours is None else require_same_agreement(ours, offer)
        reached = offer.step
    except Unreachable as error:
        # The first peer that joins a bare bootstrap node brings the recipe.
        if not isinstance(error, NothingPublished) or ours is None:
            if known is None:
                raise
            # The invitation's membership may belong to another run.
            options = replace(options, invitation=replace(invitation, membership=None))
            if ours is None:  # all have left; this machine has a checkpoint of the run
                ours = with_copies(read_run(known), files) if files else read_run(known)
                options = replace(options, output_dir=known)
    if loaded is None:
        document = Document({}, SOURCE)
        document.replace(overrides)
        require_sound(ours, document)
    return ours, replace(options, reached_step=reached)


def options_of(
    host_maddr: list[str] | None,
    announce_maddr: list[str] | None,
    reach: Wanted,
    identity: Path | None,
    output_dir: Path | None,
    budget: Budget | None,
    wait: float | None,
    name: str,
    only_when: list[Condition] | None,
    max_upload: float | None,
    max_download: float | None,
    niceness: int | None,
) -> PeerOptions:
    """Combine the options that both commands take."""
    quiet_libraries()
    from trahiv_cli.train.peer import PeerOptions

    if niceness is not None:
        try:
            psutil.Process().nice(niceness)  # child processes inherit it
        except psutil.AccessDenied as error:
            now = psutil.Process().nice()
            said = f"this process is at {now} already, and may not go back to {niceness}"
            raise typer.BadParameter(said, param_hint="--niceness") from error
    spend, (samples, steps) = budget or ENDLESS_BUDGET, spent_before()
    return PeerOptions(
        output_dir=output_dir,
        identity=identity,
        host_maddrs=tuple(host_maddr or ()),
        announce_maddrs=tuple(announce_maddr or ()),
        reach=reach,
        wait_s=wait,
        name=name,
        conditions=tuple(only_when or ()),
        max_upload=max_upload,
        max_download=max_download,
        is_again=is_again(),
        budget=Budget(spend.seconds - seconds_spent(), spend.samples - samples, spend.steps - steps),
        resume=shlex.join(["trahiv", *sys.argv[1:]]),
    )


def resumable(options: PeerOptions, loaded: Loaded, typed: str, recipe: Recipe) -> PeerOptions:
    """Make the resume command read the run's own copy of a recipe that came through a pipe (`typed`)."""
    if not loaded.is_from_pipe:
        return options
    from trahiv_cli.recipe.agreement import run_id

    copy = str(options.folder(run_id(recipe)) / "recipe.json")  # its paths are absolute
    words = shlex.split(options.resume)
    return replace(options, resume=shlex.join(copy if word == typed else word for word in words))


def live(
    recipe: Recipe | None,
    text: str,
    options: PeerOptions,
    metrics: int | None = None,
    on_event: str | None = None,
) -> None:
    """Run one peer, show its events, and exit with a code of docs/exit-codes.md.

    `metrics` is a port that serves the events as metrics. `on_event` is a command that gets each event that a
    person should know of.
    """
    quiet_libraries()
    from trahiv_cli.recipe.schema import DhtSection
    from trahiv_cli.telemetry.events import Events
    from trahiv_cli.telemetry.notifier import Notifier
    from trahiv_cli.train.leaving import Leaving
    from trahiv_cli.train.peer import run_peer, serve_bootstrap

    events = Events()
    if metrics is not None:
        serve_metrics(metrics, events)
    try:
        with contextlib.ExitStack() as listeners:
            if on_event is not None:
                events.add(listeners.enter_context(Notifier(shlex.split(on_event))))
            give_terminal_back = listeners.enter_context(out.listening(events))

            def leave_at_once() -> None:
                give_terminal_back()
                again = leaving.resume or options.resume
                out.say(f"stopped at once, without a checkpoint\nto go on: {again}")

            leaving = Leaving(at_once=leave_at_once)
            with leaving.installed():
                if recipe is None:
                    ended = serve_bootstrap(options, events, leaving, DhtSection())
                else:
                    ended = run_peer(recipe, text, options, events, leaving)
    except PeerBroken as failure:
        note_spent(leaving.spent)
        restart(leaving.resume, failure)
    if ended.reason == "pause" and leaving.signal is None:
        note_spent(leaving.spent)
        start_again(leaving.resume)
    if ended.reason in ("signal", "pause"):  # a signal after the end of the work is ignored
        raise typer.Exit(leaving.exit_code)


def serve_metrics(port: int, events: Events) -> None:
    """Serve a peer's events as metrics; SetupError if the port is taken, or the package is missing."""
    try:
        from trahiv_cli.telemetry.metrics import Metrics
    except ModuleNotFoundError as error:
        raise SetupError(
            f"Metrics need the package {error.name}, which is not installed.",
            hint=how_to_install("trahiv[web]"),
        ) from None
    kept = Metrics()
    kept.serve(port)
    events.add(kept)


def show(recipe: Recipe) -> None:
    """Show a person the run that is about to start; programs read `ready`."""
    from trahiv_cli.recipe.agreement import agreement, fingerprint, run_id

    model = recipe.model
    training = recipe.training
    source = model.model_name_or_path or f"a new {(model.config or {}).get('model_type')} from scratch"
    how = f"LoRA adapters of rank {recipe.peft.r}" if recipe.peft else "all weights"
    samples = recipe.hivemind_config.opt.target_batch_size
    rows = {
        "run": f"{run_id(recipe)} ({recipe.task})",
        "model": f"{source}, {how}",
        "data": ", ".join(dataset.path for dataset in recipe.data.datasets),
        "steps": f"{training.max_steps} of {samples} samples over all peers",
        "optimizer": f"{training.optim}, {training.lr_scheduler_type} from {training.learning_rate:g}",
        "fingerprint": fingerprint(agreement(recipe)),
    }
    for name, value in rows.items():
        out.say(f"  {name:<12} {value}")


def rehearse(recipe: Recipe) -> None:
    """Show the run and its costs; no swarm is started or joined."""
    quiet_libraries()
    from trahiv_cli.cli.estimate import show_estimate

    show(recipe)
    show_estimate(recipe)
