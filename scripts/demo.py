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
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from trahiv_cli.telemetry.board import Board
from trahiv_cli.telemetry.lines import line

FOLDER = Path("runs/demo")
READY_WITHIN_S = 60


class Peer:
    """One `trahiv` process and the board that its events draw."""

    def __init__(self, name: str, arguments: list[str], console: Console, is_live: bool) -> None:
        self.name, self.board, self.events = name, Board(), []
        self.ready = threading.Event()
        self._console, self._is_live = console, is_live
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
            event: dict[str, Any] = json.loads(text)
            self.events.append(event)
            self.board(event)
            if event["event"] == "ready":
                self.ready.set()
            words = line(event)
            if words and not self._is_live and event["event"] not in ("ready", "sample"):
                self._console.print(f"{self.name:>6}: {words}", markup=False, highlight=False, soft_wrap=True)

    def last(self, name: str) -> dict[str, Any] | None:
        """The newest event of that name."""
        return next((event for event in reversed(self.events) if event["event"] == name), None)

    def stop(self) -> None:
        """Ask it to leave in good order, and wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=30)

    def complaint(self) -> str:
        """What it said on stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.read().strip()


def main() -> int:
    """Run the demo; the exit code is 0 if both peers finished."""
    began, console = time.monotonic(), Console()
    is_live = console.is_terminal
    shutil.rmtree(FOLDER, ignore_errors=True)
    console.print("[bold]$ trahiv init quickstart[/]")
    peers = [Peer("first", ["init", "quickstart"], console, is_live)]
    try:
        if not peers[0].ready.wait(READY_WITHIN_S):
            console.print(
                peers[0].complaint() or "The first peer did not get ready in a minute.", markup=False
            )
            return 1
        join = peers[0].last("ready")["join"]
        console.print(
            f"It prints the line for a friend to paste. Pasting it:\n[bold]$ {join}[/]", soft_wrap=True
        )
        peers.append(Peer("second", [*shlex.split(join)[1:], "--yes"], console, is_live))
        watch(peers, console, is_live)
    except KeyboardInterrupt:
        console.print("Stopping both peers.")
    finally:
        for peer in peers:
            peer.stop()
    return tell(peers, console, time.monotonic() - began)


def watch(peers: list[Peer], console: Console, is_live: bool) -> None:
    """Show both boards until both processes have ended."""

    def view() -> Group:
        return Group(
            *(part for peer in peers for part in (Text(f"{peer.name} peer", style="bold"), peer.board))
        )

    if not is_live:
        for peer in peers:
            peer.process.wait()
        return
    with Live(get_renderable=view, console=console, refresh_per_second=4):
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
    losses = [event["loss"] for event in peers[0].events if event["event"] == "step"]
    held_out, sample = peers[0].last("eval"), peers[0].last("sample")
    done = peers[0].last("done")
    console.print(
        f"\nLoss {losses[0]:.2f} at step 1, {losses[-1]:.2f} at step {len(losses)}", highlight=False
    )
    console.print(f"Held-out loss {held_out['eval_loss']:.2f}", highlight=False)
    console.print(f"Given {sample['prompt']!r}, it writes:", markup=False, highlight=False)
    console.print(Text(sample["text"], style="italic"))
    console.print(
        f"The model is in {done['path']}, the same on both peers. It took {seconds:.0f} s.", highlight=False
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
