"""The only module that prints. stdout is data, stderr is talk; no colour unless a terminal wants it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from trahiv_cli.errors import Finding, RecipeMismatch, TrahivError
from trahiv_cli.recipe.pasted import INVITATION_PREFIX

if TYPE_CHECKING:
    from trahiv_cli.telemetry.board import LiveBoard
    from trahiv_cli.telemetry.events import Event, Events

WIDTH = 100
"""The characters of a source line that are quoted, around the caret."""


class Format(StrEnum):
    """How a command speaks: to a person, to a log, to a program."""

    human = "human"
    plain = "plain"
    json = "json"


FormatOption = Annotated[
    Format | None,
    typer.Option(
        "--format", help="Output format. Default: human on a terminal, plain elsewhere.", show_default=False
    ),
]
"""`--format`, the same in every command that has it."""


class Output:
    """All words of a command go through this; there is one for the process."""

    format = Format.plain

    def use(self, wanted: Format | None, stream: TextIO | None = None) -> None:
        """Speak as `wanted`; by default to a person if `stream` (stderr) is a terminal, else to a log."""
        stream = stream or sys.stderr
        self.format = wanted or (Format.human if stream.isatty() else Format.plain)

    def data(self, text: str) -> None:
        """Write what the command was asked for, to stdout."""
        _write(sys.stdout, text)

    def say(self, text: str) -> None:
        """Write what only a reader needs, to stderr; an invitation that was typed is not repeated."""
        _write(sys.stderr, _without_secrets(text))

    def event(self, event: str, **fields: Any) -> None:
        """Write one line of the event stream, to stdout, for `--format json`."""
        line = json.dumps({"v": 1, "t": round(time.time(), 3), "event": event, **fields})
        _write(sys.stdout, _without_secrets(line))

    def error(self, error: TrahivError) -> None:
        """Say what went wrong: an event for each finding on stdout, or words on stderr."""
        findings = error.findings
        if self.format is Format.json:
            for finding in findings:
                names = ("code", "message", "hint", "file", "line", "col", "path")
                self.event("error", **{name: getattr(finding, name) for name in names})
            if not findings:
                more = {"differences": error.differences} if isinstance(error, RecipeMismatch) else {}
                self.event("error", code=error.code, message=error.message, hint=error.hint, **more)
            return
        for finding in findings:
            self.say(self._render(finding))
        self.say(f"{self._paint('1;31', 'error:')} " + "\n".join(map(_visible, error.message.split("\n"))))
        if isinstance(error, RecipeMismatch) and error.differences:
            self._say_differences(error)
        if error.hint and error.hint not in [finding.hint for finding in findings]:
            self.hint(error.hint)

    def warning(self, code: str, message: str, hint: str) -> None:
        """Say what a reader should know and the command goes on with: an event, or words on stderr."""
        if self.format is Format.json:
            self.event("warning", code=code, message=message, hint=hint)
            return
        self.say(f"{self._paint('33', 'warning:')} {_visible(message)}")
        if hint:
            self.hint(hint)

    def advice(self, finding: Finding) -> None:
        """Say what a recipe's author should know and the command goes on with."""
        self.warning(finding.code, str(finding), finding.hint)

    def invitation(self, path: Path, **fields: Any) -> None:
        """Hand an invitation to a person, as the line to paste; to programs and logs the file that has it."""
        if self.format is Format.json:
            self.event("invitation", path=str(path), **fields)
        elif self.format is Format.human and sys.stdout.isatty():
            self.data(_line_in(path))
        else:
            self.data(str(fields["join"]))

    def hint(self, text: str) -> None:
        """Say what to type or change next, to stderr."""
        self.say(f"{self._paint('36', 'hint:')} {_visible(text)}")

    def confirm(self, question: str) -> bool:
        """Ask a person at a terminal; anything but yes is no."""
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    @contextmanager
    def listening(self, events: Events) -> Iterator[Callable[[], None]]:
        """Show a run's events in this process's format while the block runs.

        Yields:
            What gives the terminal back at once, for a process that is about to end without unwinding.
        """
        if self.format is not Format.human:
            events.add(_write_json if self.format is Format.json else _write_line)
            yield lambda: None
            return
        from rich.console import Console

        from trahiv_cli.telemetry.board import MIN_COLUMNS, MIN_ROWS, LiveBoard

        console = Console(file=sys.stdout)
        if console.is_dumb_terminal or console.width < MIN_COLUMNS or console.height < MIN_ROWS:
            events.add(lambda event: _write_line(_for_a_person(event)))
            yield lambda: None
            return
        board = LiveBoard(console)
        events.add(partial(_write_around, board))
        try:
            yield board.stop
        finally:
            board.stop()

    def _say_differences(self, error: RecipeMismatch) -> None:
        rows = [("field", "here", "in the swarm")]
        rows += [(field, str(ours), str(theirs)) for field, ours, theirs in error.differences]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        for field, ours, theirs in rows:
            self.say(_visible(f"  {field:<{widths[0]}}  {ours:<{widths[1]}}  {theirs}"))

    def _render(self, finding: Finding) -> str:
        """Return a finding as place and message, the source line with a caret, and the hint."""
        place, message = str(finding).removesuffix(finding.message), finding.message
        lines = [self._paint("1", _visible(place)) + _visible(message)]
        if finding.source:
            source, col = _window(finding.source, finding.col)
            gutter = f"{finding.line:>5} | "
            caret = " " * (len(gutter) - 2) + "| " + " " * (col - 1)
            lines += [gutter + _visible(source), caret + self._paint("1;31", "^")]
        if finding.hint:
            lines.append(f"      {self._paint('36', 'hint:')} {_visible(finding.hint)}")
        return "\n".join(lines)

    def _paint(self, code: str, text: str) -> str:
        is_wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        if self.format is not Format.human or not is_wanted or not sys.stderr.isatty():
            return text
        return f"\x1b[{code}m{text}\x1b[0m"


out = Output()


def _write_json(event: Event) -> None:
    from trahiv_cli.telemetry.events import TRANSIENT, to_json

    if event["event"] not in TRANSIENT:
        _write(sys.stdout, to_json(event))


def _write_line(event: Event) -> None:
    from trahiv_cli.telemetry.lines import line

    text = line(event)
    if text is not None:
        _write(sys.stdout, "\n".join(map(_visible, text.split("\n"))))


def _write_around(board: LiveBoard, event: Event) -> None:
    """Show an event on the live view; what must stay copyable goes above it, and the last words below.

    Until the view begins, waits and warnings are lines, too.
    """
    is_first = event["event"] == "ready"  # the view begins below it
    if not is_first:
        board(event)
    shown = ("folder", "ready", "sample", "done") + (("waiting", "warning") if not board.has_begun else ())
    if event["event"] in shown:
        _write_line(_for_a_person(event))
    if is_first:
        board(event)


def _for_a_person(event: Event) -> Event:
    """Put the join line itself into an event that names the file that it is in."""
    if event["event"] != "ready":
        return event
    file = event["invitation"]
    return event | {"join": _line_in(Path(file)) if file else event["join"], "invitation": None}


def _line_in(invitation: Path) -> str:
    return f"trahiv join --peer {invitation.read_text(encoding='ascii').strip()}"


def _window(source: str, col: int) -> tuple[str, int]:
    """Cut a long line around a column; return the piece and the column in it."""
    start = max(0, col - WIDTH * 3 // 4) if len(source) > WIDTH else 0
    return source[start : start + WIDTH].rstrip(), col - start


def _without_secrets(text: str) -> str:
    return re.sub(rf"({INVITATION_PREFIX})[A-Za-z0-9_-]{{9,}}", r"\1...", text)


def _visible(text: str) -> str:
    """Keep a stranger's text from steering the terminal."""
    return "".join(char if char.isprintable() else " " if char in "\t\n" else "?" for char in text)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()
