"""The only module that prints: results to stdout, messages to stderr, colour only if a terminal wants it."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from trahiv_cli.errors import Finding, RecipeMismatch, TrahivError
from trahiv_cli.recipe.pasted import without_secrets

if TYPE_CHECKING:
    from trahiv_cli.telemetry.events import Event, Events


class Format(StrEnum):
    """Output format: for a person, for a log, or for a program."""

    human = "human"
    plain = "plain"
    json = "json"


FormatOption = Annotated[
    Format | None,
    typer.Option(
        "--format",
        help="Output format. Default: human on a terminal, plain elsewhere.",
        show_default=False,
    ),
]
"""`--format`, the same in every command that has it."""


class Output:
    """Writes all output of a command; `out` is the only instance, for the life of the process."""

    format = Format.plain

    def use(self, wanted: Format | None, stream: TextIO | None = None) -> None:
        """Set the format; by default for a person if `stream` (stderr) is a terminal, else for a log."""
        stream = stream or sys.stderr
        self.format = wanted or (Format.human if stream.isatty() else Format.plain)

    def data(self, text: str) -> None:
        """Write a result of the command to stdout."""
        write(sys.stdout, text)

    def say(self, text: str) -> None:
        """Write a message for a person to stderr, with invitations shortened."""
        write(sys.stderr, without_secrets(text))

    def event(self, event: str, **fields: Any) -> None:
        """Write one line of the event stream, to stdout, for `--format json`."""
        from trahiv_cli.telemetry.events import new_event

        write(sys.stdout, without_secrets(json.dumps(new_event(event, **fields))))

    def record(self, text: str, event: str, **fields: Any) -> None:
        """Write one result of the command: an event for a program, a text for others."""
        if self.format is Format.json:
            self.event(event, **fields)
        else:
            self.data(text)

    def error(self, error: TrahivError) -> None:
        """Report an error: an event for each finding on stdout, or text on stderr."""
        if self.format is Format.json:
            more = {"differences": error.differences} if isinstance(error, RecipeMismatch) else {}
            names = ("code", "message", "hint", "file", "line", "col", "path")
            for finding in error.findings:
                self.event("error", **{name: getattr(finding, name) for name in names})
            if not error.findings:
                self.event("error", code=error.code, message=error.message, hint=error.hint, **more)
            return
        for finding in error.findings:
            self.say(self.rendered(finding))
        self.say(f"{self.paint('1;31', 'error:')} " + "\n".join(map(visible, error.message.split("\n"))))
        for row in error.table:
            self.say(visible(row))
        if error.hint and error.hint not in [finding.hint for finding in error.findings]:
            self.hint(error.hint)

    def warning(self, code: str, message: str, hint: str) -> None:
        """Report a problem with which the command continues: an event on stdout, or text on stderr."""
        if self.format is Format.json:
            self.event("warning", code=code, message=message, hint=hint)
            return
        self.say(f"{self.paint('33', 'warning:')} {visible(message)}")
        if hint:
            self.hint(hint)

    def invitation(self, path: Path, **fields: Any) -> None:
        """Write an invitation: for a person the line to paste, for programs and logs the file that has it."""
        is_for_a_person = self.format is Format.human and sys.stdout.isatty()
        text = pasteable(fields["join"], path) if is_for_a_person else fields["join"]
        self.record(text, "invitation", path=str(path), **fields)

    def hint(self, text: str) -> None:
        """Write to stderr what to type or change next."""
        self.say(f"{self.paint('36', 'hint:')} {visible(text)}")

    def confirm(self, question: str) -> bool:
        """Ask a person at a terminal; any answer but yes means no."""
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    @contextmanager
    def listening(self, events: Events) -> Iterator[Callable[[], None]]:
        """Show a run's events while the block runs; yields a function that frees the terminal at once."""
        if self.format is not Format.human:
            events.add(write_event if self.format is Format.json else write_line)
            yield lambda: None
            return
        from rich.console import Console
        from rich.live import Live

        from trahiv_cli.telemetry.board import Board

        console = Console(file=sys.stdout)
        if console.is_dumb_terminal or not Board.fits(console):
            events.add(lambda event: write_line(for_a_person(event)))
            yield lambda: None
            return
        board = Board()
        view = Live(board, console=console, refresh_per_second=4)

        def show(event: Event) -> None:
            """Show an event on the live view; lines to copy go above it, and the last lines below."""
            what = event["event"]
            ready = board.last.get("ready")
            board(event)
            is_of_the_end = what == "sample" and ready is not None and event["step"] >= ready["max_steps"]
            if is_of_the_end or what == "done":
                view.stop()
            is_line = what in ("folder", "ready", "sample", "paused", "resumed", "done")
            if is_line or (what in ("waiting", "warning") and ready is None):
                write_line(for_a_person(event))
            if what == "ready":  # the view begins below its line; until then, waits are lines
                view.start()

        events.add(show)
        try:
            yield view.stop
        finally:
            view.stop()

    def rendered(self, finding: Finding) -> str:
        """Format a finding: position and message, the source line with a caret, and the hint."""
        place = str(finding).removesuffix(finding.message)
        lines = [self.paint("1", visible(place)) + visible(finding.message)]
        if source := finding.source:  # a long line is cut around the caret
            start = max(0, finding.col - 75) if len(source) > 100 else 0
            lines.append(f"{finding.line:>5} | {visible(source[start : start + 100].rstrip())}")
            lines.append("      | " + " " * (finding.col - start - 1) + self.paint("1;31", "^"))
        if finding.hint:
            lines.append(f"      {self.paint('36', 'hint:')} {visible(finding.hint)}")
        return "\n".join(lines)

    def paint(self, code: str, text: str, stream: TextIO | None = None) -> str:
        """Colour a text by a terminal's code, if a person reads `stream` (stderr) and wants colour."""
        is_wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        has_colour = self.format is Format.human and is_wanted and (stream or sys.stderr).isatty()
        return f"\x1b[{code}m{text}\x1b[0m" if has_colour else text


out = Output()


def write_event(event: Event) -> None:
    """Write a run's event for a program, unless it is transient."""
    from trahiv_cli.telemetry.events import TRANSIENT, to_json

    if event["event"] not in TRANSIENT:
        write(sys.stdout, to_json(event))


def write_line(event: Event) -> None:
    """Write a run's event for a log, if it has a text."""
    from trahiv_cli.telemetry.lines import line

    text = line(event)
    if text is not None:
        write(sys.stdout, "\n".join(map(visible, text.split("\n"))))


def for_a_person(event: Event) -> Event:
    """Replace the name of the invitation's file in an event `ready` by the join line."""
    if event["event"] != "ready" or not event["invitation"]:
        return event
    return event | {"join": pasteable(event["join"], Path(event["invitation"])), "invitation": None}


def pasteable(line: str, invitation: Path) -> str:
    """Put an invitation itself into a line that names its file."""
    return line.replace(f"@{invitation}", invitation.read_text(encoding="ascii").strip())


def visible(text: str) -> str:
    """Replace unprintable characters, so that a stranger's text can't control the terminal."""
    return "".join(char if char.isprintable() else " " if char in "\t\n" else "?" for char in text)


def write(stream: TextIO, text: str) -> None:
    """Write a line, and flush."""
    stream.write(text + "\n")
    stream.flush()


set_here: set[str] = set()
"""Names of the environment variables that `quiet_libraries` has set."""


def quiet_libraries() -> None:
    """Keep libraries from printing into the command's output, from telemetry, and from running a hub's code.

    transformers and bitsandbytes fetch such code with the package `kernels`, which is made to look missing.
    """
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    defaults = {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HIVEMIND_LOGLEVEL": "WARNING",
        # One peer per GPU: torch would put the Trainer into DataParallel over all of them.
        "CUDA_VISIBLE_DEVICES": "0",
    }
    for name, value in defaults.items():
        if name not in os.environ:
            os.environ[name] = value
            set_here.add(name)
    # On some CPUs bitsandbytes asks for `kernels`, needed only to generate text with 4-bit weights.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # torch 2.15 warns about a function of hivemind's.
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.script` is deprecated")
