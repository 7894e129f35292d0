"""`launch`: a program that trains with a `transformers.Trainer` runs, unmodified, as a peer of a swarm.

1. The user's process finds out what the swarm's peers share, and starts the program as a child process.
2. The process of the program that trains reads the same command line, completed (`launching.py`). There this
   command enables the swarm (`train/enabling.py`) and returns to the program.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from trahiv_cli.cli.launching import (
    LAUNCH_VARIABLE,
    PAUSED_VARIABLE,
    PRELUDE,
    RESULT_VARIABLE,
    note_result,
    result,
)
from trahiv_cli.cli.options import (
    PEER_VARIABLE,
    PeerOption,
    PublicOption,
    SharedOptions,
    argument,
    option,
    taken_peers,
)
from trahiv_cli.cli.output import out, set_here, visible
from trahiv_cli.cli.restarting import count_restart, note_spent, replace_process
from trahiv_cli.cli.swarm import listened, options_of
from trahiv_cli.errors import PeerBroken, RecipeMismatch, SetupError

if TYPE_CHECKING:
    from trahiv_cli.recipe.program import ProgramRun
    from trahiv_cli.run.leaving import Leaving
    from trahiv_cli.run.peer_options import PeerOptions
    from trahiv_cli.telemetry.events import Events

RESUME_VARIABLE = "TRAHIV_RESUME"
"""Environment variable with the command that resumes the run."""

REACHED_VARIABLE = "TRAHIV_REACHED"
"""Environment variable with the step that the swarm had reached when this peer asked to join."""

OF_RECIPES = ("output_dir", "overrides", "files", "yes", "dry_run")
"""Shared options that have no meaning here."""


def launch(
    program: Annotated[
        list[str] | None,
        argument("PROGRAM ARGS", "After `--`: a script, -m MODULE, or an installed command; its arguments."),
    ] = None,
    peer: PeerOption = None,
    run_id: Annotated[
        str | None, option("--run-id ID", "The run's name. Default: the program's name and 8 digits.")
    ] = None,
    target_batch_size: Annotated[
        int | None,
        option("--target-batch-size N", "Samples in a step over all peers. Default: 256.", min=1),
    ] = None,
    swarm: Annotated[
        list[str] | None,
        option("--swarm KEY=VALUE", "A field of the recipe's section `swarm`. Can be repeated."),
    ] = None,
    public: PublicOption = False,
    *,
    shared: SharedOptions,
) -> None:
    """Run a program that trains with a transformers Trainer in a swarm.

    `trahiv launch -- trl sft ...` starts a swarm, and `trahiv launch --peer LINE -- trl sft ...` joins it.
    """
    out.use(shared.format, sys.stdout)
    peers = [word for word in (*(peer or ()), *taken_peers()) if word.strip()]
    from trahiv_cli.members.invitation import Invitation, read_invitation

    invitation = read_invitation(peers) if peers else Invitation()
    typed = {"run_id": run_id, "target_batch_size": target_batch_size}
    opt = {key: value for key, value in typed.items() if value}
    run = program_run(program or [], opt, swarm or [])
    is_public = public or run.swarm.public
    options = options_of(shared, None, invitation=invitation, is_public=is_public)
    options = replace(options, resume=os.environ.setdefault(RESUME_VARIABLE, options.resume))
    if LAUNCH_VARIABLE in os.environ:
        reached_step = int(os.environ.get(REACHED_VARIABLE, 0))
        take_part(run, replace(options, reached_step=reached_step), shared, peers)
        return
    if peers:
        run = joined(run, options, opt, swarm or [])
        if not program:
            out.say("This swarm's first peer runs the program below. Look at it first, then type:")
            out.data(visible(f"trahiv launch --peer LINE -- {run.program}"))
            return
    if not program:
        raise typer.BadParameter("write the program after --, as in: trahiv launch -- trl sft ...")
    raise typer.Exit(supervised(command_of(program), completed(run), peers))


def program_run(program: Sequence[str], opt: dict[str, Any], swarm: Sequence[str]) -> ProgramRun:
    """Return the run of a program by its options; raises `RecipeError` for a wrong one."""
    from trahiv_cli.recipe.document import Document
    from trahiv_cli.recipe.load import parse_section
    from trahiv_cli.recipe.program import ProgramRun, readable
    from trahiv_cli.recipe.schema import OptSection, SwarmSection

    if wrong := next((word for word in swarm if "=" not in word), None):
        raise typer.BadParameter(f"{wrong!r} is not KEY=VALUE", param_hint="--swarm")
    text = readable(program)
    typed = Document({}, "--swarm")
    typed.replace([f"swarm.{word}" for word in swarm])
    if typed.findings:
        raise typed.error(typed.findings)
    shared = parse_section(SwarmSection, "swarm", typed.data.get("swarm"))
    run = ProgramRun(parse_section(OptSection, "hivemind_config.opt", opt), shared, text)
    if run.opt.run_id is not None:
        return run
    name = "program"
    if program:
        name = program[1].rpartition(".")[2] if program[:1] == ["-m"] else Path(program[0]).stem
    name = re.sub(r"\W+", "-", name)
    digest = hashlib.sha256(f"{text} {run.agreement}".encode()).hexdigest()
    return replace(run, opt=run.opt.model_copy(update={"run_id": f"{name[:39]}-{digest[:8]}"}))


def joined(run: ProgramRun, options: PeerOptions, opt: dict[str, Any], swarm: Sequence[str]) -> ProgramRun:
    """Fetch the swarm's run, with which the user's own options must agree; note its step for `take_part`.

    Raises:
        RecipeMismatch: they differ, or the swarm trains a recipe.
        Unreachable, NotAdmitted: see `scout`.
    """
    from trahiv_cli.recipe.agreement import differences
    from trahiv_cli.recipe.program import PROGRAM, ProgramRun
    from trahiv_cli.run.folder import scout

    offer = scout(options.invitation, opt.get("run_id"))
    if PROGRAM not in offer.wire["shared"]:
        raise RecipeMismatch(
            "This swarm trains a recipe, not a program; nothing was started.", hint="trahiv join --peer LINE"
        )
    theirs = ProgramRun.from_wire(offer.wire)
    names = {word.partition("=")[0] for word in swarm}
    mine = ProgramRun(
        theirs.opt.model_copy(update=opt),
        theirs.swarm.model_copy(update={name: getattr(run.swarm, name) for name in names}),
        theirs.program,
    )
    if different := differences(mine.agreement, theirs.agreement):
        raise RecipeMismatch(
            f"The swarm's run differs in {len(different)} of the shared settings; nothing was started.",
            hint="leave these options out to take the swarm's",
            differences=different,
        )
    os.environ[REACHED_VARIABLE] = str(offer.step)
    return theirs


def command_of(program: Sequence[str]) -> list[str]:
    """Return the command line of a program; scripts and modules run in this interpreter."""
    first = program[0]
    if first == "-m" or first.endswith(".py"):
        return [sys.executable, *program]
    if (found := shutil.which(first, path=path_of_programs())) is None:
        raise typer.BadParameter(f"there is no program {first!r} here", param_hint="PROGRAM")
    return [found, *program[1:]]


def path_of_programs() -> str:
    """Return the search path for programs, in which those of this interpreter's environment come first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def completed(run: ProgramRun) -> list[str]:
    """Return the user's words with all that the swarm's peers share, so that they need no other process."""
    typed = sys.argv[1:]
    end = typed.index("--") if "--" in typed else len(typed)
    shared = run.agreement["program"]
    more = ["--run-id", run.run_id, "--target-batch-size", str(run.opt.target_batch_size)]
    for key, value in shared["swarm"].items():
        if value is not None:
            more += ["--swarm", f"{key}={json.dumps(value)}"]
    return [*typed[:end], *more, *typed[end:]]


def supervised(command: Sequence[str], words: Sequence[str], peers: Sequence[str]) -> int:
    """Run the program and return its exit code, or that of its process that trained.

    Raises:
        SetupError: it ended well, but nothing in it has trained.
    """
    with tempfile.TemporaryDirectory(prefix="trahiv-launch-") as folder:
        os.environ[RESULT_VARIABLE] = str(Path(folder, "result"))
        paths = [str(PRELUDE), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {
            LAUNCH_VARIABLE: json.dumps(list(words)),
            PEER_VARIABLE: " ".join(peers),
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": path_of_programs(),  # a program may start others of its environment by their names
        }
        # The program's libraries speak as they do without trahiv, but it has one GPU as other peers.
        usual = {name: value for name, value in os.environ.items() if name not in set_here}
        one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"]}
        process = subprocess.Popen(command, env=usual | one_gpu | own)

        received = 0

        def pass_on(number: int, _: Any) -> None:
            nonlocal received
            received = number
            if number == signal.SIGTERM:  # Ctrl-C reaches all processes of the terminal by itself
                os.kill(result().get("pid", process.pid), number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
        code = process.wait()
        found = result()
    if "trains" not in found and code == 0:
        raise SetupError(
            f"{shlex.join(command)} ended, but no Trainer of transformers trained in it.",
            hint="launch a program that calls `Trainer.train`, with this interpreter",
        )
    if received:  # a launcher in between has another code
        code = -received
    return found.get("code", code if code >= 0 else 128 - code)


def take_part(run: ProgramRun, options: PeerOptions, shared: SharedOptions, peers: Sequence[str]) -> None:
    """Enable the swarm in this process, which trains."""

    def start_again(folder: Path, leaving: Leaving, failure: PeerBroken | None) -> NoReturn:
        note_spent(leaving.spent)
        if failure is not None:
            count_restart(failure)
        else:
            os.environ[PAUSED_VARIABLE] = str(folder)
        os.environ[PEER_VARIABLE] = " ".join(peers)
        replace_process(sys.orig_argv)

    @contextlib.contextmanager
    def shown(events: Events) -> Iterator[Any]:
        note_result(trains=True)
        try:
            with listened(events, shared) as free_terminal:
                yield free_terminal
        except SystemExit as end:
            note_result(code=int(end.code or 0))
            raise

    note_result(pid=os.getpid())
    if folder := os.environ.pop(PAUSED_VARIABLE, ""):
        hold(Path(folder), run, options, shown)
    from trahiv_cli.train.enabling import enable
    from trahiv_cli.train.launched import Launch
    from trahiv_cli.train.trainer import SwarmTrainerMixin

    config = {"opt": {"run_id": run.run_id, "target_batch_size": run.opt.target_batch_size}}
    enable()
    SwarmTrainerMixin.set_usual(config, dict(run.swarm), Launch(run, options, shown, start_again))


def hold(folder: Path, run: ProgramRun, options: PeerOptions, shown: Callable[..., Any]) -> None:
    """Wait in the folder of a peer that pauses, with its node alone; the program has not begun.

    Raises:
        SystemExit: a signal came, or the user asked it to finish.
    """
    from trahiv_cli.recipe.schema import DhtSection
    from trahiv_cli.run.announcing import Ended, announce
    from trahiv_cli.run.folder import CHECKPOINTS, recorded, saved_in
    from trahiv_cli.run.leaving import Leaving, Left
    from trahiv_cli.run.lock import join_line, owned
    from trahiv_cli.run.own_status import OwnStatus, contribution_in
    from trahiv_cli.run.pausing import wait_while_paused
    from trahiv_cli.run.requests import ControlRequests
    from trahiv_cli.telemetry.events import Events

    events = Events()
    line = partial(join_line, folder)
    saved = saved_in(folder / CHECKPOINTS)
    step = saved[-1].step if saved else 0
    own_status = OwnStatus(run.run_id, step, step, contribution_in(folder), options.name)
    events.add(own_status)
    with shown(events) as free_terminal, owned(folder), recorded(folder, events):
        leaving = Leaving(at_once=free_terminal)
        with leaving.installed():
            try:
                with leaving.interruptible():
                    node = options.node(DhtSection(), folder, run.swarm.relay)
                with node:
                    wait_while_paused(
                        node,
                        ControlRequests(folder, leaving, options.conditions),
                        own_status,
                        run.pack(),
                        events,
                        leaving,
                        lambda: announce(node, folder, events, run.run_id, run.fingerprint, line),
                        options.budget.seconds,
                    )
            except Left:
                Ended(leaving.reason or "signal", step, saved[-1].path if saved else None).report(
                    events, options.resume
                )
                raise SystemExit(leaving.exit_code) from None
