"""The trainer of a program that `trahiv launch` runs: it lives as a peer with a recipe does.

The program runs unchanged, maybe in a child process of its own. `cli/launch.py` makes one `Launch` in the
process that trains. A trainer that is given no `hivemind_config` of its own uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trahiv_cli.errors import PeerBroken
from trahiv_cli.recipe.program import ProgramRun
from trahiv_cli.run.leaving import Leaving, Left
from trahiv_cli.run.lock import LAUNCHED
from trahiv_cli.run.peer_options import PeerOptions
from trahiv_cli.run.requests import ControlRequests
from trahiv_cli.telemetry.events import Events


@dataclass(frozen=True)
class Launch:
    """What a launched trainer uses beside its `hivemind_config`; it lives as long as the process.

    Args:
        run: the settings that all peers share, and the program.
        options: the peer's own options.
        shown: shows the events of a run while its block runs; yields a function that frees the terminal.
        start_again: replaces this process by the same program: after a failure, or to free its memory.
    """

    run: ProgramRun
    options: PeerOptions
    shown: Callable[[Events], AbstractContextManager[Callable[[], None]]]
    start_again: Callable[[Path, Leaving, PeerBroken | None], NoReturn]

    def train(self, trainer: Any, events: Events, train: Callable[[], Any]) -> Any:
        """Call `train`, which trains `trainer`, and return its result.

        Raises:
            SystemExit: after a signal, with a code of docs/exit-codes.md; a checkpoint was saved.
        """
        folder = Path(trainer.args.output_dir)
        result = None
        failure = None
        with self.shown(events) as free_terminal:
            leaving = Leaving(free_terminal, self.options.resume)
            trainer.leave_by(leaving)
            try:
                with leaving.installed(), contextlib.suppress(Left):
                    result = train()
            except PeerBroken as error:
                failure = error
            finally:
                if trainer.has_entered:
                    leaving.note_spent(trainer.swarm_callback.spent)
            if leaving.signal is not None:
                raise SystemExit(leaving.exit_code)
        if failure is not None or leaving.reason == "pause":
            self.start_again(folder, leaving, failure)
        return result

    @contextlib.contextmanager
    def heeding(self, folder: Path, events: Events, leaving: Leaving) -> Iterator[None]:
        """While the block runs, heed the user's control requests to the peer of this folder."""
        (folder / LAUNCHED).write_text(self.run.program + "\n")
        requests = ControlRequests(folder, leaving, self.options.conditions)
        events.add(requests)
        try:
            with requests.polled():
                yield
        finally:
            events.remove(requests)
