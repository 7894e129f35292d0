"""Peers that run as a user's do, each with a host and a disk of its own, under a supervisor.

A peer is the real `trahiv` command, with a paced model (`tests.kit.paced_command`). Hosts are network
namespaces, joined by the router of `tests.kit.wan`, so that links can be cut; disks are tmpfs, so that
they can fill up. The supervisor is what docs/running.md describes: it starts a peer that has ended again
with the same command after a pause, unless its exit code says that it would be in vain. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psutil

from benchmarks.kit.processes import tree_of
from tests.kit.commands import VANISH_S, Peer, Workplace, left_by
from tests.kit.recipes import tiny_llama, write_tiny
from tests.kit.verdicts import Event, group_of
from tests.kit.wan import Wan, address_of

NUM_PEERS, LINK_MBIT, DELAY_MS = 4, 100.0, 2.0
PORT = 31337
PACE_S, BATCH, TARGET = 0.2, 4, 200
SAMPLE_BYTES = 64
STEPS_A_CHECKPOINT, STEPS_AN_EVALUATION = 5, 10
DISK_MB = 100
"""For a run's folder. No peer begins with less than 64."""

PAUSE_S = 3.0
"""From the end of a peer to its next start."""

FINAL_CODES = (0, 2, 3, 5, 6)
"""Exit codes after which a supervisor leaves a peer alone."""

LEAVE_S = 15.0
"""A peer that gets SIGTERM has gone by then."""

POLL_S = 0.1
LISTENING = ("0A", "07")
"""States of sockets in /proc/net/tcp and udp (include/net/tcp_states.h): listening, and bound."""


def write_recipe(folder: Path) -> Path:
    """Write a recipe for a run without an end; return its file."""
    return write_tiny(
        folder,
        "recipe.yaml",
        name="kept",
        model__config=tiny_llama(64, max_position_embeddings=SAMPLE_BYTES),
        data={"datasets": [{"path": "builtin/trahiv"}], "eval": {"test_split_size": 0.02}},
        clm__max_length=SAMPLE_BYTES,
        training__max_steps=1_000_000,
        training__per_device_train_batch_size=BATCH,
        training__per_device_eval_batch_size=64,
        training__lr_scheduler_type="constant",
        training__save_steps=STEPS_A_CHECKPOINT,
        training__save_total_limit=3,
        training__eval_steps=STEPS_AN_EVALUATION,
        swarm={"mode": "auto"},
        hivemind_config={
            "dht": {"nat_port_map": False, "auto_nat": False},
            "opt": {"target_batch_size": TARGET},
        },
    )


class Stuck(Exception):
    """Something did not happen in time, or a peer has ended for good; with what the peers said last."""


class KeptPeer:
    """One peer, in all of its lives, on the host of its number."""

    def __init__(self, number: int, namespace: str, place: Workplace) -> None:
        self.number, self.namespace, self._place = number, namespace, place
        self.disk = place.folder / f"disk-{number}"
        self.run = self.disk / "run"
        self.lives: list[Peer] = []
        self.exits: list[tuple[float, int]] = []
        """When it ended, as events tell times, and with which code."""
        self.is_held_down = self.is_out = False
        """Whether the supervisor leaves it down for now, or for good."""
        self._command: list[object] = []

    @property
    def events(self) -> list[Event]:
        return [one for life in self.lives for one in life.events]

    @property
    def is_running(self) -> bool:
        return bool(self.lives) and self.lives[-1].is_running

    @property
    def is_training(self) -> bool:
        """Whether it has taken a step since it started last, also by itself."""
        said = [one["event"] for one in self.lives[-1].events if one["event"] in ("ready", "step", "error")]
        return self.is_running and said[-1:] == ["step"]

    def start(self, *entry: str) -> None:
        """Start it, for the first time, with the arguments that say which run it trains in."""
        listen = f"/ip4/{address_of(self.number)}/tcp/{PORT}"
        self._command = [*entry, "--yes", "--output-dir", self.run, "--host-maddr", listen]
        self._begin_life()

    def tree(self) -> list[psutil.Process]:
        """Its processes, its own first."""
        return tree_of(self.lives[-1].pid) if self.is_running else []

    def send(self, number: signal.Signals) -> None:
        """Send its first process a signal, if there is one."""
        if self.is_running:
            self.lives[-1].send_signal(number)

    def look_after(self) -> None:
        """Note its end, and start it again when it is time."""
        if self.is_running or not self.lives:
            return
        if len(self.exits) < len(self.lives):
            self.exits.append((time.time(), self.lives[-1].exit_code(VANISH_S)))
        ended_at, code = self.exits[-1]
        self.is_out = code in FINAL_CODES
        if time.time() > ended_at + PAUSE_S and not self.is_held_down and not self.is_out:
            self._begin_life()

    def said(self, event: str) -> list[Event]:
        """All events of a name so far."""
        return [one for one in self.events if one["event"] == event]

    def _begin_life(self) -> None:
        inside = ("nsenter", f"--net={self.namespace}")
        self.lives.append(self._place.start(*self._command, prefix=inside, pace_s=PACE_S))


class Keeper:
    """Peers of one run and their supervisor, for as long as the `with` block lasts.

    The first one begins the run, the others join by its line. `folder` gets all that they write.
    """

    def __init__(self, folder: Path) -> None:
        self.leaving_s: list[float] = []
        """How long each peer took from SIGTERM to its end, once `end` was called."""
        self._shared_before = set(Path("/dev/shm").iterdir())
        self._recipe = write_recipe(folder)
        with contextlib.ExitStack() as stack:
            self.wan = stack.enter_context(Wan(NUM_PEERS, LINK_MBIT, DELAY_MS))
            self._place = Workplace(folder)
            self.peers = [KeptPeer(n, self.wan.namespace(n), self._place) for n in range(NUM_PEERS)]
            for peer in self.peers:
                peer.disk.mkdir()
                size = f"size={DISK_MB}m"
                subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", peer.disk], check=True)
                stack.callback(subprocess.run, ["umount", "--lazy", peer.disk], check=True)
            stack.enter_context(self._place)
            self._stack = stack.pop_all()

    def start_all(self, timeout_s: float) -> None:
        """Start all peers, and wait until all have taken a step together.

        Raises:
            Stuck: they did not, in time.
        """
        first, *others = self.peers
        first.start("init", str(self._recipe))
        self.wait(lambda: bool(first.said("ready")), timeout_s, "the first peer is ready")
        for peer in others:
            peer.start("join", str(self._recipe), "--peer", first.lives[0].address)
        self.wait_until_together(timeout_s)

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Look after the peers until a condition holds; return after how many seconds it did.

        Raises:
            Stuck: it does not, in time.
        """
        began = time.monotonic()
        while True:
            for peer in self.peers:
                peer.look_after()
            if condition():
                return time.monotonic() - began
            if time.monotonic() > began + timeout_s or any(peer.is_out for peer in self.peers):
                stories = [f"not in {time.monotonic() - began:.0f} s: {what}"]
                for peer in self.peers:
                    stories.append(f"peer {peer.number}, exits {peer.exits[-3:]}:")
                    stories += [json.dumps(one)[:300] for one in peer.events[-8:]]
                    stories += [life.err[-2000:] for life in peer.lives[-1:]]
                raise Stuck("\n".join(stories))
            time.sleep(POLL_S)

    def wait_until_together(self, timeout_s: float) -> float:
        """Wait until each peer has, from now on, taken a step with all others; return the seconds.

        Raises:
            Stuck: they did not, in time.
        """
        now = time.time()

        def has_stepped(peer: KeptPeer) -> bool:
            later = (one for one in peer.said("step") if one["t"] > now)
            return any(len(group_of(one)) == len(self.peers) for one in later)

        return self.wait(
            lambda: all(map(has_stepped, self.peers)), timeout_s, "all peers take a step together"
        )

    def furthest(self) -> int:
        """The last step that any peer told of."""
        return max((one["step"] for peer in self.peers for one in peer.said("step")), default=0)

    def end(self) -> list[str]:
        """Ask all to leave; say what they did not do as they should, and what they leave behind."""
        asked_at, wrong = time.time(), []
        for peer in self.peers:
            peer.is_held_down = True
            peer.send(signal.SIGTERM)
        with contextlib.suppress(Stuck):
            self.wait(lambda: not any(peer.is_running for peer in self.peers), LEAVE_S, "all leave")
        for peer in self.peers:
            if peer.is_running:
                wrong.append(f"peer {peer.number} is still there {LEAVE_S:.0f} s after SIGTERM")
                continue
            at, code = peer.exits[-1]
            self.leaving_s.append(at - asked_at)
            if code != 128 + signal.SIGTERM:
                wrong.append(f"peer {peer.number} ended with {code} at SIGTERM")
        return wrong + [f"left behind: {what}" for what in self._left_behind()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _left_behind(self) -> list[str]:
        """Name processes, listening ports, sockets, and shared memory that outlived all peers."""
        left = [what for peer in self.peers for life in peer.lives for what in left_by(life.pid)]
        for peer in self.peers:
            tables = ["nsenter", f"--net={peer.namespace}", "cat", "/proc/net/tcp", "/proc/net/udp"]
            lines = subprocess.run(tables, capture_output=True, text=True, check=True).stdout.splitlines()
            left += [f"port {line.split()[1]}" for line in lines if line.split()[3] in LISTENING]
        left += [str(path) for path in self._place.temporary.rglob("*") if not path.is_dir()]
        for shared in set(Path("/dev/shm").iterdir()) - self._shared_before:
            kind, owner, *_ = [*shared.name.split("_"), ""]
            is_of_another = kind == "torch" and owner.isdigit() and psutil.pid_exists(int(owner))
            left += [] if is_of_another else [str(shared)]
        return left
