"""Commands that control a running peer on this machine: `pause`, `resume` and `finish`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trahiv_cli.cli.options import argument
from trahiv_cli.cli.output import Format, FormatOption, out
from trahiv_cli.errors import SetupError
from trahiv_cli.run.control import BY_ITS_USER, Request, heeds_requests, request
from trahiv_cli.run.lock import RESOLVED, RUNS, holder_of

if TYPE_CHECKING:
    from trahiv_cli.telemetry.events import Event

RunArgument = Annotated[
    Path | None, argument("RUN_DIR", "The run's folder. Default: the newest in runs/ whose peer runs.")
]


def pause(run_dir: RunArgument = None, format: FormatOption = None) -> None:
    """Have a running peer step back, and free its GPU, until `resume`.

    It saves a checkpoint first, and stays there for others who join.
    """
    meanwhile = "it pauses when its present local step is over"
    tell(run_dir, format, "pause", lambda now: now["event"] == "done" or was_paused(now), meanwhile)


def resume(run_dir: RunArgument = None, format: FormatOption = None) -> None:
    """Have a paused peer train again."""
    if tell(run_dir, format, None, lambda now: not was_paused(now), "it goes on soon") == "paused":
        out.hint("a condition keeps it paused; to train anyway, start it again without --only-when")


def finish(run_dir: RunArgument = None, format: FormatOption = None) -> None:
    """Have a running peer leave, with a checkpoint, at the next round."""
    meanwhile = "it leaves when the swarm has taken its present step"
    tell(run_dir, format, "finish", lambda now: now["event"] == "done", meanwhile)


def was_paused(now: Event) -> bool:
    """Return whether an event says that its user has paused the peer."""
    return now["event"] == "paused" and now["why"] == BY_ITS_USER


def tell(
    run_dir: Path | None,
    format: Format | None,
    what: Request | None,
    is_answer: Callable[[Event], bool],
    meanwhile: str,
) -> str | None:
    """Send a control request (None: train) to a peer, wait for its answer, and show it.

    Returns the name of the event that is the answer. Without an answer within a minute, shows `meanwhile`
    and returns None; SetupError if the peer has ended.
    """
    from trahiv_cli.telemetry.events import EVENT_FILE, newest_events
    from trahiv_cli.telemetry.lines import line

    out.use(format)
    folder = run_dir or running_folder()
    request(folder, what)
    states = ("ready", "joined", "step", "paused", "resumed", "done", "error")
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        newest = newest_events(folder / EVENT_FILE)
        now = next((event for event in newest if event["event"] in states), None)
        if now is not None and is_answer(now):
            fields = {name: value for name, value in now.items() if name not in ("v", "t", "event")}
            out.record(f"{folder}: {line(now)}", now["event"], **fields)
            return str(now["event"])
        time.sleep(0.2)
    if holder_of(folder) is None:
        raise SetupError(f"The peer of {folder} has ended.", hint="the same command starts it again")
    out.say(f"{folder}: {meanwhile}.")
    return None


def running_folder() -> Path:
    """Find the newest folder in `runs` whose peer runs or has a control request; SetupError if none does."""
    running = [path.parent for path in RUNS.glob(f"*/{RESOLVED}") if heeds_requests(path.parent)]
    if not running:
        raise SetupError(
            f"No peer trains in {RUNS}/ here.",
            hint="go to the folder in which it was started, or name the run's folder",
        )
    return max(running, key=lambda folder: folder.stat().st_mtime)
