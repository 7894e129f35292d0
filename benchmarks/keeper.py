"""Peers that run as a user's do, each with a host and a disk of its own, under a supervisor.

Not a benchmark by itself: `chaos.py` and `kills.py` use it. A peer is the real `trahiv` command. Only its
model is paced: each batch of training sleeps for as long as a GPU would compute, so that two cores carry
four peers. Hosts are network namespaces, joined by the router of `wan.py`, so that links can be cut; disks
are tmpfs, so that they can fill up. The supervisor is what docs/running.md describes: who ends is started
again with the same command after a pause, unless its exit code says that it would be in vain. Needs root.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from wan import Wan, address_of

Event = dict[str, Any]

LINK_MBIT, DELAY_MS = 100.0, 2.0
PORT = 31337
PACE_S, BATCH = 0.2, 4
TARGET = 200
NUM_SAMPLES, SAMPLE_BYTES = 12_000, 64
HELD_OUT = 0.02
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

VANISH_S = 10.0
"""What dies with its parent is gone by then."""

MARK = "TRAHIV_BENCHMARK"
"""A variable by which processes are found that a peer leaves behind."""


def write_recipe(folder: Path, mode: str) -> Path:
    """Write a recipe, and a text of its own to train on; return the recipe's file."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    size = NUM_SAMPLES * SAMPLE_BYTES
    rows = [text[start : start + 4096] for start in range(0, size, 4096)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    content = {
        "name": "kept",
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 384,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": SAMPLE_BYTES,
            },
            "tokenizer_name_or_path": "builtin/bytes",
        },
        "data": {
            "datasets": [{"path": str(folder / "rows.jsonl")}],
            "eval": {"test_split_size": HELD_OUT},
        },
        "clm": {"max_length": SAMPLE_BYTES},
        "training": {
            "max_steps": 1_000_000,
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": 64,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "save_steps": STEPS_A_CHECKPOINT,
            "save_total_limit": 3,
            "eval_steps": STEPS_AN_EVALUATION,
        },
        "swarm": {"mode": mode},
        "hivemind_config": {
            "dht": {"nat_port_map": False, "auto_nat": False},
            "opt": {"target_batch_size": TARGET},
        },
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


class Stuck(Exception):
    """Something did not happen in time, or a peer has ended for good; with what the peers said last."""


class KeptPeer:
    """One peer: its command, its process, and what it has said in all of its lives.

    Args:
        number: of its host.
        namespace: path of its host's network namespace.
        folder: where the files of all peers are.
        mark: the value of `MARK` for its processes.
    """

    def __init__(self, number: int, namespace: str, folder: Path, mark: str) -> None:
        self.number, self.folder = number, folder
        self.disk = folder / f"disk-{number}"
        self.run = self.disk / "run"
        self.events: list[Event] = []
        self.exits: list[tuple[float, int]] = []
        """When it ended, as events tell times, and with which code."""
        self.is_held_down = False
        """Whether the supervisor leaves it down for now."""
        self.pids: list[int] = []
        """Of its first processes, one for each life."""
        self._namespace, self._environment = namespace, os.environ | {MARK: mark, "TMPDIR": f"{folder}/tmp"}
        self._out, self._err = folder / f"{number}.jsonl", folder / f"{number}.txt"
        self._command: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._read_bytes, self._ended_at = 0, 0.0

    @property
    def is_running(self) -> bool:
        """Whether its first process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def is_out(self) -> bool:
        """Whether its supervisor leaves it alone for good."""
        return not self.is_running and bool(self.exits) and self.exits[-1][1] in FINAL_CODES

    def start(self, *entry: str) -> None:
        """Start it, for the first time.

        Args:
            entry: `trahiv`'s arguments that say which run it trains in.
        """
        self._command = [
            "nsenter", f"--net={self._namespace}", sys.executable, __file__, str(PACE_S), *entry, "--yes",
            "--format", "json", "--output-dir", str(self.run),
            "--host-maddr", f"/ip4/{address_of(self.number)}/tcp/{PORT}",
        ]  # fmt: skip
        self._begin_life()

    def tree(self) -> list[psutil.Process]:
        """Its processes, its own first."""
        if self._process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._process.pid)
            return [first, *sorted(first.children(recursive=True), key=lambda one: one.pid)]
        return []

    def send(self, number: signal.Signals) -> None:
        """Send its first process a signal, if there is one."""
        if self._process is not None and self.is_running:
            self._process.send_signal(number)

    def look_after(self) -> None:
        """Read what it says, note its end, and start it again when it is time."""
        self._read()
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process, self._ended_at = None, time.monotonic()
            self.exits.append((time.time(), code))
        is_due = time.monotonic() > self._ended_at + PAUSE_S
        if self._process is None and self._command and is_due and not self.is_held_down and not self.is_out:
            self._begin_life()

    def said(self, event: str) -> list[Event]:
        """All events of a name so far."""
        return [one for one in self.events if one["event"] == event]

    def story(self) -> str:
        """What it said last, for who looks for a fault."""
        lines = [json.dumps(one)[:300] for one in self.events[-8:]]
        errors = self._err.read_text(errors="replace")[-2000:] if self._err.exists() else ""
        return "\n".join([f"peer {self.number}, exits {self.exits[-3:]}:", *lines, errors])

    def _begin_life(self) -> None:
        with self._out.open("a") as out, self._err.open("a") as errors:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                cwd=self.folder,
                start_new_session=True,
            )
        self.pids.append(self._process.pid)

    def _read(self) -> None:
        if not self._out.exists():
            return
        with self._out.open("rb") as file:
            file.seek(self._read_bytes)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._read_bytes += len(whole) + 1
            self.events += [json.loads(line) for line in whole.splitlines()]


class Keeper:
    """Peers of one run and their supervisor, for as long as the `with` block lasts.

    Args:
        folder: gets all that they write.
        num_peers: the first one begins the run, the others join by its line.
        mode: of the recipe.
    """

    def __init__(self, folder: Path, num_peers: int, mode: str) -> None:
        self.folder, self._mark = folder, uuid.uuid4().hex
        self.leaving_s: list[float] = []
        """How long each peer took from SIGTERM to its end, once `end` was called."""
        self._shared_before = set(Path("/dev/shm").iterdir())
        (folder / "tmp").mkdir(parents=True)
        self._recipe = write_recipe(folder, mode)
        with contextlib.ExitStack() as stack:
            self.wan = stack.enter_context(Wan(num_peers, LINK_MBIT, DELAY_MS))
            self.peers = [
                KeptPeer(number, self.wan.namespace(number), folder, self._mark)
                for number in range(num_peers)
            ]
            for peer in self.peers:
                peer.disk.mkdir()
                size = f"size={DISK_MB}m"
                subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", peer.disk], check=True)
                stack.callback(subprocess.run, ["umount", "--lazy", peer.disk], check=True)
            stack.callback(self._kill_all)
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
            peer.start("join", str(self._recipe), "--peer", f"@{first.said('ready')[0]['invitation']}")
        self.wait_until_together(timeout_s)

    def look_after(self) -> None:
        """Look after each peer."""
        for peer in self.peers:
            peer.look_after()

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Look after the peers until a condition holds; return after how many seconds it did.

        Raises:
            Stuck: it does not, in time.
        """
        began = time.monotonic()
        while not condition():
            if time.monotonic() > began + timeout_s or any(peer.is_out for peer in self.peers):
                stories = "\n".join(peer.story() for peer in self.peers)
                raise Stuck(f"not in {time.monotonic() - began:.0f} s: {what}\n{stories}")
            time.sleep(POLL_S)
            self.look_after()
        return time.monotonic() - began

    def wait_until_together(self, timeout_s: float) -> float:
        """Wait until each peer has, from now on, taken a step with all others; return the seconds.

        Raises:
            Stuck: they did not, in time.
        """
        now = time.time()
        return self.wait(
            lambda: all(
                any(one["t"] > now and len(group_of(one)) == len(self.peers) for one in peer.said("step"))
                for peer in self.peers
            ),
            timeout_s,
            "all peers take a step together",
        )

    def furthest(self) -> int:
        """The last step that anybody told of."""
        return max((one["step"] for peer in self.peers for one in peer.said("step")), default=0)

    def end(self) -> list[str]:
        """Ask all to leave; say what they did not do as they should, and what they leave behind."""
        asked_at = time.time()
        for peer in self.peers:
            peer.is_held_down = True
            peer.send(signal.SIGTERM)
        wrong = []
        with contextlib.suppress(Stuck):
            gone = lambda: not any(peer.is_running for peer in self.peers)  # noqa: E731
            self.wait(gone, LEAVE_S, "all leave")
        self.look_after()
        self.leaving_s = [peer.exits[-1][0] - asked_at for peer in self.peers if not peer.is_running]
        for peer in self.peers:
            if peer.is_running:
                wrong.append(f"peer {peer.number} is still there {LEAVE_S:.0f} s after SIGTERM")
            elif peer.exits[-1][1] != 128 + signal.SIGTERM:
                wrong.append(f"peer {peer.number} ended with {peer.exits[-1][1]} at SIGTERM")
        return wrong + self._left_behind()

    def close(self) -> None:
        """End whatever is left."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _left_behind(self) -> list[str]:
        """Name processes, listening ports, sockets, and shared memory that outlived all peers."""
        deadline = time.monotonic() + VANISH_S
        while (processes := self._marked()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        left = [f"process {one.pid} {one.name()}" for one in processes]
        for peer in self.peers:
            tables = ["nsenter", f"--net={peer._namespace}", "cat", "/proc/net/tcp", "/proc/net/udp"]
            lines = subprocess.run(tables, capture_output=True, text=True, check=True).stdout.splitlines()
            left += [f"port {line.split()[1]}" for line in lines if line.split()[3] in LISTENING]
            for pid in peer.pids:
                left += [str(path) for path in Path("/tmp").glob(f"trahiv-{pid}-*")]
        left += [str(path) for path in (self.folder / "tmp").rglob("*") if not path.is_dir()]
        left += [str(path) for path in set(Path("/dev/shm").iterdir()) - self._shared_before]
        return [f"left behind: {what}" for what in left]

    def _kill_all(self) -> None:
        for process in self._marked():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def group_of(step: Event) -> list[str]:
    """The peers that took a step together; none where there was no round."""
    return (step["round"] or {}).get("group") or []


def become_paced(pace_s: float) -> None:
    """Have each training batch of a Llama take as long as a GPU would take for a larger one."""
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)  # a Trainer looks at its parameters
    def paced(model: Any, *arguments: Any, **keywords: Any) -> Any:
        if model.training:
            time.sleep(pace_s)
        return forward(model, *arguments, **keywords)

    LlamaForCausalLM.forward = paced


if __name__ == "__main__":  # a peer
    from trahiv_cli.__main__ import main

    become_paced(float(sys.argv.pop(1)))
    main()
