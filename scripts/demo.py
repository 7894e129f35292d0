"""The main job on one machine: `trahiv init quickstart`, and a second peer that pastes the line it printed.

Both run as real processes with the real commands; this script only starts them, shows what their event
streams say, and stops them if it is interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from trahiv_cli.errors import TrahivError
from trahiv_cli.run.lock import require_free
from trahiv_cli.telemetry.board import Board
from trahiv_cli.telemetry.lines import line

FOLDER = Path("runs/demo")
READY_WITHIN_S = 120
STEPS_PER_LINE = 5
INIT = ["init", "quickstart", "--set", "training.max_steps=200"]

WHAT = """\
Two peers on this machine train one small language model from scratch, on trahiv's own source and docs.
Each trains on its own samples, and in every round the two average what they have learnt."""

Event = dict[str, Any]


class Peer:
    """One `trahiv` process and the board that its events draw."""

    def __init__(self, name: str, arguments: list[str], console: Console) -> None:
        self.name, self.board, self._console = name, Board(), console
        self._shown_at_step = -STEPS_PER_LINE
        self.events: list[Event] = []
        self.ready = threading.Event()
        command = [sys.executable, "-m", "trahiv_cli", *arguments]
        # One thread each: two peers share what may be only two cores.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, "--format", "json", "--output-dir", str(FOLDER / name)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            event: Event = json.loads(text)
            self.events.append(event)
            self.board(event)
            if event["event"] == "ready":
                self.ready.set()
            if not self._console.is_terminal and self._is_shown(event):
                self._console.print(f"{self.name:>6}: {line(event)}", markup=False)
        self.ready.set()  # it has ended, and nobody need wait

    def _is_shown(self, event: Event) -> bool:
        """Whether an event is a line where there is no board. Of what both peers tell, the first's is."""
        name, is_first = event["event"], self.name == "first"
        if name in ("joined", "warning"):
            return True
        if name != "step":
            return is_first and name in ("eval", "pace")
        is_due = event["step"] >= self._shown_at_step + STEPS_PER_LINE
        if is_first and (is_due or event["step"] == self.all_of("ready")[0]["max_steps"]):
            self._shown_at_step = event["step"]
            return True
        return False

    def all_of(self, name: str) -> list[Event]:
        """Every event of that name."""
        return [event for event in self.events if event["event"] == name]

    def stop(self) -> None:
        """Ask it to leave in good order, and wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=30)
        self._reader.join()

    def complaint(self) -> str:
        """What it said on stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.read().strip()


def main() -> int:
    """Run the demo; the exit code is 0 if both peers finished."""
    began, console = time.monotonic(), Console(soft_wrap=True, highlight=False)
    for name in ("first", "second"):
        require_free(FOLDER / name)
    shutil.rmtree(FOLDER, ignore_errors=True)
    console.print(f"{WHAT}\n\n[bold]$ {shlex.join(['trahiv', *INIT])}[/]")
    peers = [Peer("first", INIT, console)]
    try:
        peers[0].ready.wait(READY_WITHIN_S)
        if not peers[0].all_of("ready"):
            console.print(peers[0].complaint() or "The first peer did not get ready in time.", markup=False)
            return 1
        join = peers[0].all_of("ready")[0]["join"]
        console.print(f"It prints the line for a friend to paste. Pasting it:\n[bold]$ {join}[/]\n")
        peers.append(Peer("second", [*shlex.split(join)[1:], "--yes"], console))
        watch(peers, console)
    except KeyboardInterrupt:
        console.print("Stopping both peers.")
    finally:
        for peer in peers:
            peer.stop()
    return tell(peers, console, time.monotonic() - began)


def watch(peers: list[Peer], console: Console) -> None:
    """Wait until both processes have ended; on a terminal, show their boards meanwhile."""

    def view() -> Group:
        return Group(
            *(part for peer in peers for part in (Text(f"{peer.name} peer", style="bold"), peer.board))
        )

    live = Live(get_renderable=view, console=console, refresh_per_second=4)
    with live if console.is_terminal else nullcontext():
        for peer in peers:
            peer.process.wait()


def tell(peers: list[Peer], console: Console, seconds: float) -> int:
    """Say what came of it."""
    codes = [peer.process.returncode for peer in peers]
    if any(codes) or len(peers) < 2:
        for peer in peers:
            console.print(
                f"{peer.name} peer: exit code {peer.process.returncode}\n{peer.complaint()}", markup=False
            )
        return 1
    steps, evaluation = peers[0].all_of("step"), peers[0].all_of("eval")[-1]
    before, after = peers[0].all_of("sample")
    console.print(
        f"\nThe loss fell from {steps[0]['loss']:.2f} to {steps[-1]['loss']:.2f} in {steps[-1]['step']} "
        f"steps; it is {evaluation['eval_loss']:.2f} on text that the model has not seen. Given\n"
    )
    console.print(Text(before["prompt"], style="bold"))
    for when, sample in (("before training", before), ("after training", after)):
        console.print(f"\nit wrote {when}:\n")
        console.print(Text(sample["text"], style="italic"))
    path = peers[0].all_of("done")[0]["path"]
    console.print(f"\nThe model is in {path}, the same on both peers. It took {seconds:.0f} s.")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except TrahivError as error:
        print(f"{error.message} {error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
