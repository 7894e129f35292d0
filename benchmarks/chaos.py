"""Half an hour in which all that can fail does, again and again: what a run of four peers has lost by it.

    .venv/bin/python benchmarks/chaos.py [--seed 0] [--minutes 30] [--faults 66] [--json FILE]

The peers are those of `benchmarks/kit/keeper.py`: the real command, and a supervisor that starts a peer again
that has ended. The seed draws which fault strikes which peer when:

- `kill`: SIGKILL to any process of a peer: its own, or one of the DHT, an averager, or libp2p's daemon;
- `stop`: SIGSTOP for 20 s, to any one process of a peer or to all of them, as when a laptop is shut;
- `cut`: nothing gets through between two peers, or between one and all others, for 5 to 30 s;
- `full-disk`: no byte is left on a peer's disk, for 30 s;
- `damage`: a bit changes in a peer's newest checkpoint, and the peer is killed, so that it has to read it;
- `restart-first`: the peer that began the run, whose address is the join line, leaves and comes back.

A peer is not killed while its disk is full, nor is the disk filled of one that has taken no step since its
last start: it would end with exit code 3, after which no supervisor starts it again.

Printed: the faults, each with what it struck and how long its peer took until it stepped with another one;
then the verdict: what was not as promised, which alone makes the exit code 1. Promised is that the swarm's
step never falls; that peers who evaluate after the same step find the same, never more than 5 % above the
one before; that all peers come back by themselves, and leave at SIGTERM; that each pass over the data was
complete and no sample was trained twice in one, but for as many as leases were lost; and that no process,
port, socket, temporary file or shared memory is left. Needs root, 4 GiB, and nothing else running.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder and `tests` are not installed

from benchmarks.kit.keeper import NUM_PEERS, Keeper, KeptPeer, Stuck
from benchmarks.kit.tables import spread, table
from tests.kit.verdicts import (
    Event,
    back_after,
    find_falls,
    furthest_of,
    judge_data,
    losses_of,
    newest_checkpoint,
    total_lost,
    worst_jump,
)

START_LIMIT_S, SETTLE_LIMIT_S = 180.0, 240.0
STOP_S, FULL_S, DOWN_S = 20.0, 30.0, 5.0
SHORTEST_CUT_S, LONGEST_CUT_S = 5.0, 30.0
WORST_JUMP = 1.05
SHARES = {"kill": 5, "stop": 2, "cut": 3, "full-disk": 1, "damage": 1, "restart-first": 1}


@dataclass
class Fault:
    """Something that goes wrong."""

    at_s: float
    """Since the first step that all took together."""

    kind: str
    peer: int
    which: float
    """Draws one of the peer's processes; above 1: all of them."""

    others: tuple[int, ...] = ()
    """Of a cut: the peers at its other end."""

    seconds: float = 0.0
    struck: str = ""
    """What it did."""

    t: float = 0.0
    """When that was, as events tell times; 0 before it was."""

    back_s: float | None = None
    """From there to the next step that its peer took together with another one."""


def plan(seed: int, num_faults: int, seconds: float) -> list[Fault]:
    """Draw the faults of a run, in the order of their times."""
    dice = random.Random(seed)
    faults = []
    for at_s in sorted(dice.uniform(0, seconds) for _ in range(num_faults)):
        kind = dice.choices(list(SHARES), list(SHARES.values()))[0]
        peer = 0 if kind == "restart-first" else dice.randrange(NUM_PEERS)
        which = dice.uniform(0, 2 if kind == "stop" else 1)
        others = tuple(number for number in range(NUM_PEERS) if number != peer)
        if dice.random() < 0.5:
            others = (dice.choice(others),)
        length = {"stop": STOP_S, "full-disk": FULL_S, "restart-first": DOWN_S}.get(kind, 0.0)
        if kind == "cut":
            length = round(dice.uniform(SHORTEST_CUT_S, LONGEST_CUT_S), 1)
        faults.append(Fault(round(at_s, 1), kind, peer, which, others if kind == "cut" else (), length))
    return faults


class Chaos:
    """Has faults strike when it is their time, and ends those that end."""

    def __init__(self, keeper: Keeper, faults: Sequence[Fault]) -> None:
        self._keeper, self._to_come = keeper, list(faults)
        self._ending: list[tuple[float, contextlib.ExitStack]] = []
        self._full: set[int] = set()
        self.struck: list[Fault] = []

    @property
    def is_over(self) -> bool:
        """Whether all faults have struck and ended."""
        return not self._to_come and not self._ending

    def go_on(self, now_s: float) -> None:
        """Do what is due, at a time since the first common step."""
        for due in [due for due in self._ending if due[0] <= now_s]:
            self._ending.remove(due)
            due[1].close()
        while self._to_come and self._to_come[0].at_s <= now_s:
            fault = self._to_come[0]
            if fault.kind in ("kill", "damage", "restart-first") and fault.peer in self._full:
                return  # and all after it wait, too
            if fault.kind == "full-disk" and not self._keeper.peers[fault.peer].is_training:
                return
            self._to_come.pop(0)
            self._strike(fault, now_s)

    def _strike(self, fault: Fault, now_s: float) -> None:
        peer = self._keeper.peers[fault.peer]
        fault.t = time.time()
        with contextlib.ExitStack() as end:
            fault.struck = getattr(self, "_" + fault.kind.replace("-", "_"))(fault, peer, end)
            self._ending.append((now_s + fault.seconds, end.pop_all()))
        self.struck.append(fault)
        print(f"{fault.at_s:7.1f} s  peer {fault.peer}  {fault.kind}: {fault.struck}", flush=True)

    def _kill(self, fault: Fault, peer: KeptPeer, end: contextlib.ExitStack) -> str:
        tree = peer.tree()
        if not tree:
            return "nobody: it was down"
        target = tree[int(fault.which * len(tree))]
        what = part_of(tree, target)
        with contextlib.suppress(psutil.NoSuchProcess):
            target.kill()
        return what

    def _stop(self, fault: Fault, peer: KeptPeer, end: contextlib.ExitStack) -> str:
        tree = peer.tree()
        if not tree:
            return "nobody: it was down"
        targets = tree if fault.which > 1 else [tree[int(fault.which * len(tree))]]
        end.callback(_signal, targets, signal.SIGCONT)
        _signal(targets, signal.SIGSTOP)
        return "all its processes" if fault.which > 1 else part_of(tree, targets[0])

    def _cut(self, fault: Fault, peer: KeptPeer, end: contextlib.ExitStack) -> str:
        for other in fault.others:
            self._keeper.wan.set_cut(fault.peer, other, True)
            end.callback(self._keeper.wan.set_cut, fault.peer, other, False)
        return f"from {', '.join(map(str, fault.others))} for {fault.seconds:.0f} s"

    def _full_disk(self, fault: Fault, peer: KeptPeer, end: contextlib.ExitStack) -> str:
        filler = peer.disk / "filler"
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while file.write(bytes(2**16)):
                pass
        self._full.add(fault.peer)
        end.callback(self._full.discard, fault.peer)
        end.callback(filler.unlink, missing_ok=True)
        return f"{filler.stat().st_size / 1e6:.0f} MB of something else"

    def _damage(self, fault: Fault, peer: KeptPeer, end: contextlib.ExitStack) -> str:
        newest = newest_checkpoint(peer.run)
        if newest is None:
            return "nothing: it has no checkpoint"
        files = sorted(file for file in newest.iterdir() if file.is_file())
        file = files[int(fault.which * len(files))]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        peer.send(signal.SIGKILL)
        return f"{file.relative_to(peer.run)}"

    def _restart_first(self, fault: Fault, peer: KeptPeer, end: contextlib.ExitStack) -> str:
        peer.is_held_down = True
        end.callback(setattr, peer, "is_held_down", False)
        peer.send(signal.SIGTERM)
        return "it leaves and comes back"


def _signal(targets: Iterable[psutil.Process], number: signal.Signals) -> None:
    for target in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            target.send_signal(number)


def part_of(tree: Sequence[psutil.Process], target: psutil.Process) -> str:
    """Name a process of a peer by its place in the tree."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{target.name()}, its process {tree.index(target) + 1} of {len(tree)}"
    return "one that had just ended"


@dataclass
class Report:
    """What came of a run."""

    seed: int
    seconds: float
    faults: list[Fault] = field(default_factory=list)
    steps: int = 0
    samples: int = 0
    passes: int = 0
    duplicates: int = 0
    leases_lost: int = 0
    failed_rounds: int = 0
    """Counted once for each peer that was in them."""

    lives: list[int] = field(default_factory=list)
    """Of each peer."""

    leaving_s: list[float] = field(default_factory=list)
    """How long the peers took to leave in the end."""

    warnings: dict[str, int] = field(default_factory=dict)
    first_loss: float = math.nan
    last_loss: float = math.nan
    worst_jump: float = math.nan
    """Of the loss on held-out data between two evaluations, as a ratio."""

    verdict: list[str] = field(default_factory=list)
    """What was not as promised."""


# -- the run ---------------------------------------------------------------------------------------


def run(folder: Path, seed: int, num_faults: int, seconds: float) -> Report:
    """Train while everything fails, then let all come back, end all, and judge."""
    report = Report(seed, seconds)
    with Keeper(folder) as keeper:
        keeper.start_all(START_LIMIT_S)
        began = time.monotonic()
        chaos = Chaos(keeper, plan(seed, num_faults, seconds))
        try:
            while not chaos.is_over or time.monotonic() < began + seconds:
                chaos.go_on(time.monotonic() - began)
                keeper.wait(lambda: True, 1, "")
                time.sleep(0.1)
            keeper.wait_until_together(SETTLE_LIMIT_S)
        except Stuck as error:
            report.verdict.append(str(error))
        report.verdict += keeper.end()
        report.leaving_s = keeper.leaving_s
        events = [peer.events for peer in keeper.peers]
        report.faults = chaos.struck
        for fault in report.faults:
            fault.back_s = back_after(events[fault.peer], fault.t)
        _fill(report, keeper, events)
        for number, peer in enumerate(keeper.peers):  # their disks go with the keeper
            shutil.copytree(peer.run, folder / f"peer-{number}")
    return report


def _fill(report: Report, keeper: Keeper, events: list[list[Event]]) -> None:
    steps = [one for one in sum(events, []) if one["event"] == "step"]
    report.steps = max(one["step"] for one in steps)
    report.samples = sum({one["step"]: one["samples"] or 0 for one in steps}.values())
    report.lives = [len(peer.lives) for peer in keeper.peers]
    report.failed_rounds = sum(bool(one["round"]) and not one["round"]["committed"] for one in steps)
    report.warnings = dict(Counter(one["code"] for one in sum(events, []) if one["event"] == "warning"))
    losses, unequal = losses_of(events)
    report.worst_jump = worst_jump(losses)
    values = [*losses.values()] or [math.nan]
    report.first_loss, report.last_loss = values[0], values[-1]
    report.leases_lost = sum(map(total_lost, events))
    report.verdict += find_falls(events) + unequal
    if not report.worst_jump <= WORST_JUMP:
        report.verdict.append(f"the loss on held-out data rose to {report.worst_jump:.3f} of the one before")
    num_samples = [one["data"] for one in steps if one.get("data")][-1]["samples"]
    ledger, disagreements = furthest_of([peer.run for peer in keeper.peers])
    report.passes, report.duplicates = ledger.passes(num_samples)[0], ledger.duplicates
    report.verdict += disagreements + judge_data(ledger, num_samples, report.leases_lost)
    report.verdict += [
        f"{fault.kind} at {fault.at_s} s: peer {fault.peer} took no step together with another one after it"
        for fault in report.faults
        if fault.back_s is None
    ]


def text_of(report: Report) -> str:
    """Say what came of a run."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for fault in report.faults:
        kinds[fault.kind].append(math.inf if fault.back_s is None else fault.back_s)
    columns = ("fault", "struck", "its peer steps with another after, s")
    lines = [
        "",
        table(columns, ((kind, f"{len(times)}", spread(times, ".1f")) for kind, times in kinds.items())),
        "",
        f"seed {report.seed}: {len(report.faults)} faults in {report.seconds / 60:.0f} min, "
        f"lives of the peers {report.lives}, {report.steps} steps, {report.failed_rounds} failed rounds",
        f"loss on held-out data {report.first_loss:.4f} -> {report.last_loss:.4f}, "
        f"the greatest jump x{report.worst_jump:.4f}",
        f"{report.samples} samples, {report.passes} whole passes, {report.duplicates} trained twice, "
        f"{report.leases_lost} leases lost",
        f"left after SIGTERM within {max(report.leaving_s, default=math.nan):.1f} s",
        f"warnings: {report.warnings}",
        "verdict: " + ("NOT as promised" if report.verdict else "all that was promised held"),
        *(f"- {sentence}" for sentence in report.verdict),
    ]
    return "\n".join(lines)


def main() -> None:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--faults", type=int, default=66)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs' folders; else they go")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        report = run(folder, options.seed, options.faults, 60 * options.minutes)
    print(text_of(report))
    if options.json:
        options.json.write_text(json.dumps(asdict(report), indent=1))
    sys.exit(bool(report.verdict))


if __name__ == "__main__":
    main()
