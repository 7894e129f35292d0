"""The typer app, and the only place that turns an error into text and an exit code."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from trahiv_cli.cli.doctor import doctor
from trahiv_cli.cli.guest import finish, pause, resume
from trahiv_cli.cli.launch import OF_RECIPES, launch
from trahiv_cli.cli.options import hide_invitations, with_shared_options
from trahiv_cli.cli.output import out, quiet_libraries
from trahiv_cli.cli.owner import invite, kick, members
from trahiv_cli.cli.preview import preview
from trahiv_cli.cli.recipe import check, new, schema, show
from trahiv_cli.cli.report import report
from trahiv_cli.cli.status import status
from trahiv_cli.cli.swarm import init, join
from trahiv_cli.cli.watch import replay, watch
from trahiv_cli.errors import TrahivError

app = typer.Typer(
    name="trahiv",
    help="Fine-tune one Transformers model together over the internet.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # `run` reports errors
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode=None,  # rich would triple the time of `--help`: 0.24 s for 0.08
)


def _version(wanted: bool) -> None:
    if wanted:
        from trahiv_cli import __version__

        out.data(f"trahiv {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Take the options of `trahiv` itself."""


for command in (  # in the order of `--help`
    init,
    join,
    with_shared_options(launch, without=OF_RECIPES),
    status,
    watch,
    pause,
    resume,
    finish,
    doctor,
    invite,
    members,
    kick,
    new,
    check,
    show,
    schema,
    preview,
    replay,
    report,
):
    app.command()(command)


def run(args: Sequence[str] | None = None) -> None:
    """Run a command line, by default this process's own; raise `SystemExit` (codes: docs/exit-codes.md)."""
    out.use(None)
    quiet_libraries()
    if args is None:
        hide_invitations()
    try:
        app(args, prog_name="trahiv")
    except TrahivError as error:
        out.error(error)
        raise SystemExit(error.exit_code) from None
    except Exception as error:  # noqa: BLE001 - a bug of ours: a stranger gets a sentence, not a traceback
        if os.environ.get("TRAHIV_DEBUG"):
            out.say(traceback.format_exc().rstrip())
        hint = "this is a bug in trahiv; `TRAHIV_DEBUG=1` before the command shows the traceback to report"
        out.error(TrahivError(f"{type(error).__name__}: {error}", hint))
        raise SystemExit(TrahivError.exit_code) from None
