"""The live view of a run in a terminal, drawn from its events alone."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trahiv_cli.telemetry.events import Event, short_name
from trahiv_cli.telemetry.lines import reached

OTHER_ROWS = 20
"""Maximum number of rows of the board besides the rows of peers."""

PEER_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def sparkline(values: list[float]) -> str:
    """Draw numbers as a line of blocks, from lowest to highest value; skip values that are not finite."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    low = min(values)
    span = max(values) - low or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / span)] for value in values)


class Board:
    """The state of a run, from its events: call it with each event, and rich's console renders it.

    `Output.listening` makes one for a peer that runs in a terminal.
    """

    def __init__(self) -> None:
        self.last: dict[str, Event] = {}
        """The newest event of each name."""
        self.waiting: Event | None = None
        self.phase = "starting"
        self.losses: deque[float] = deque(maxlen=40)
        self.rewards: deque[float] = deque(maxlen=40)
        self.notes: deque[str] = deque(maxlen=4)

    @staticmethod
    def fits(console: Console) -> bool:
        """Return whether a terminal has room for the board; plain lines are better in a smaller one."""
        return console.width >= 60 and console.height > OTHER_ROWS

    def __call__(self, event: Event) -> None:
        """Update the board with one event."""
        self.last[event["event"]] = event
        if event["event"] in ("step", "joined", "done"):
            self.waiting = None
        match event["event"]:
            case "ready":
                self.phase = "loading the model"
            case "joined":
                self.phase = f"training from step {event['step']}"
                if event.get("why"):
                    self.notes.append(event["why"])
            case "step":
                for name, values in (("loss", self.losses), ("reward", self.rewards)):
                    if event.get(name) is not None:
                        values.append(event[name])
            case "waiting" | "download":
                self.waiting = event
            case "checkpoint":
                self.notes.append(f"checkpoint at step {event['step']}")
            case "pace":
                self.notes.append(event["message"])
            case "reach":
                self.notes.append(f"reach {reached(event)}")
            case "warning":
                self.notes.append(f"[{event['code']}] {event['message']}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the board in the available width."""
        # A terminal echoes ^C at the cursor, at the end of the last line: without free columns at the right,
        # the echo would take a line of its own, and push the board down.
        outer = max(8, options.max_width - 4)
        width = outer - 4  # within the frame
        rows: list[RenderableType] = [self._steps(width)]
        if progress := self.last.get("progress"):
            room = min(12, max(1, console.height - OTHER_ROWS))
            rows.append(_peers(progress["peers"], room))
        rows.append(self._numbers())
        if wait := self.waiting:
            left = max(0.0, wait["until_seconds"] - wait["seconds"] - (time.time() - wait["t"]))
            rows.append(Text(f"waiting for {wait['what']} (at most {left:.0f} s more)", style="yellow"))
        ready = self.last.get("ready", {"run_id": "trahiv"})
        if command := ready.get("invite"):  # the join line scrolls off the screen
            rows.append(Text(f"to invite others: {command}", style="dim"))
        elif file := ready.get("invitation"):
            rows.append(Text(f"to invite others, send them the line in {file}", style="dim"))
        for note in self.notes:  # the rest of a longer note is in events.jsonl in the run's folder
            rows += Text(note, style="dim").wrap(console, width)[:2]
        yield Panel(
            Group(*rows),
            title=f"[bold]{ready['run_id']}[/]",
            title_align="left",
            border_style="cyan",
            width=outer,
        )

    def _steps(self, width: int) -> RenderableType:
        """Draw the progress of the run, and the progress of the next step with each peer's part."""
        ready = self.last.get("ready")
        progress = self.last.get("progress")
        newest = progress or self.last.get("step")
        if not ready or not newest:
            return Text(self.phase)
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(width=20, no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", width=24)
        done = newest["step"]
        total = ready["max_steps"]
        label = Text(f"step {done} of {total}", style="bold")
        whole = ProgressBar(total=total, completed=done, complete_style="cyan")
        if not progress:
            grid.add_row(label, whole)
            return grid
        target = progress["target"]
        samples = progress["samples"]
        peers = progress["peers"]
        time_left = ""
        pace = sum(peer["samples_per_second"] for peer in peers)
        if pace > 1e-6:
            missing = max(0.0, (total - done) * target - samples)
            minutes, seconds = divmod(round(missing / pace), 60)
            time_left = f"about {minutes // 60}:{minutes % 60:02}:{seconds:02} left"
        grid.add_row(label, whole, Text(time_left, style="dim"))
        bar = Text()
        room = max(0, min(46, width - 46))  # beside the other columns
        for index, peer in enumerate(peers):
            blocks = round(room * min(1.0, peer["samples"] / target))
            bar.append("█" * min(blocks, room - len(bar)), style=PEER_COLORS[index % len(PEER_COLORS)])
        bar.append("░" * (room - len(bar)), style="dim")
        grid.add_row("next step", bar, f"{min(samples, target)} of {target} samples")
        return grid

    def _numbers(self) -> RenderableType:
        grid = Table.grid(padding=(0, 3))
        grid.add_column(style="dim", width=15)
        grid.add_column()
        # With rewards, the loss is close to 0 and tells nothing.
        name, values = ("reward", self.rewards) if self.rewards else ("loss", self.losses)
        if values:
            grid.add_row(name, f"{values[-1]:.4f}  {sparkline(list(values))}")
        if (found := self.last.get("eval")) and f"eval_{name}" in found:
            grid.add_row(f"held-out {name}", f"{found[f'eval_{name}']:.4f} at step {found['step']}")
        if step := self.last.get("step"):
            if samples := step["samples"]:
                mine = step["my_samples"]
                grid.add_row("my share", f"{mine} of {samples} samples ({100 * mine / samples:.0f} %)")
            grid.add_row("learning rate", f"{step['learning_rate'] or 0:.3g}")
            said = "none needed: no other peer gave samples"
            if last := step["round"]:
                up = last["bytes_sent"] / 2**20
                down = last["bytes_received"] / 2**20
                traffic = f"{up:.1f} MiB up, {down:.1f} down"
                said = f"{len(last['group'])} peers, {last['seconds']:.2f} s, {traffic}"
            grid.add_row("last round", said)
        return grid


def _peers(peers: list[dict[str, Any]], room: int) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for index, peer in enumerate(peers[:room]):
        table.add_row(
            Text("● " + short_name(peer["peer_id"]), style=PEER_COLORS[index % len(PEER_COLORS)]),
            f"{peer['samples_per_second']:.1f} samples/s",
            f"{peer['samples']} samples",
            Text("this one" if peer["me"] else f"at step {peer['step']}", style="dim"),
        )
    if len(peers) > room:
        table.add_row(Text(f"and {len(peers) - room} more", style="dim"))
    return table
