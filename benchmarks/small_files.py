"""Peers that train for hours on a stream of many small files: nobody ends, and each sample is trained once.

    .venv/bin/python benchmarks/small_files.py [--peers 4] [--files 512] [--shrunk 80] [--minutes 60]

The peers are the real command on 127.0.0.1, in mode `diloco` with 50 local steps a round. The recipe's tiny
model is paced (`keeper.py`), so that all together take less than a core and a round takes about a minute.
The times of leases are divided by `--shrunk`: with 80, a minute is as long to them as 80 minutes are in a
run. A file holds four samples, so that each peer leases some 150 files in each round, in between those of
the others.

Printed: rounds, samples and passes; how many separate spans the fullest report of leases had, of the
`leases.MOST_LEASES` that fit into one; leases that were lost to others; then the verdict: what was not as
promised, which alone makes the exit code 1. Promised is that no peer ends before it is asked to; that all
peers come to the same rounds; that each pass covers each sample, and none twice but for as many as leases
were lost; and that as many samples were counted as were trained. Ctrl-C or SIGTERM ends it early, and what
there is is judged. Needs 4 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from chaos import find_falls, judge_data, ledger_of, total_lost
from keeper import LEAVE_S, Event, become_paced, group_of

from trahiv_cli.assets.data import MOST_SHARDS
from trahiv_cli.optim import leases
from trahiv_cli.optim.ledger import SHARD, Ledger, Spans

LOCAL_STEPS, TARGET, BATCH = 50, 48, 4
SAMPLES_A_SECOND = 40.0
"""Of all peers: a round of `LOCAL_STEPS * TARGET` samples takes 60 s."""

SAMPLES_A_FILE, SAMPLE_BYTES = 4, 32
START_LIMIT_S, POLL_S = 180.0, 0.5


def write_recipe(folder: Path, num_files: int) -> Path:
    """Write the files of the stream, and a recipe that trains on them; return the recipe's file."""
    (folder / "data").mkdir()
    for number in range(num_files):
        rows = ({"text": f"sample {index} of file {number}"} for index in range(SAMPLES_A_FILE))
        content = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data" / f"{number:04}.jsonl").write_text(content)
    content = {
        "name": "small-files",
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 384,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": SAMPLE_BYTES,
            },
            "tokenizer_name_or_path": "builtin/bytes",
        },
        "data": {"datasets": [{"path": str(folder / "data" / "*.jsonl")}], "streaming": True},
        "clm": {"max_length": SAMPLE_BYTES, "packing": False},
        "training": {
            "max_steps": 1_000_000,
            "per_device_train_batch_size": BATCH,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "save_steps": LOCAL_STEPS,
            "save_total_limit": 2,
        },
        "swarm": {"mode": "diloco", "local_steps": LOCAL_STEPS},
        "hivemind_config": {
            "dht": {"nat_port_map": False, "auto_nat": False, "host_maddrs": ["/ip4/127.0.0.1/tcp/0"]},
            "opt": {"target_batch_size": TARGET},
        },
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


class Peer:
    """One peer: its process, and where it writes.

    Args:
        number: 0 begins the run, others join it.
        folder: where the files of all peers are.
        shrunk: see `become_quick`.
        pace_s: how long a batch takes.
        entry: `trahiv`'s arguments that say which run it trains in.
    """

    def __init__(self, number: int, folder: Path, shrunk: float, pace_s: float, *entry: str) -> None:
        self.number, self.run = number, folder / f"run-{number}"
        self._out, self._err = folder / f"{number}.jsonl", folder / f"{number}.txt"
        self._spans = folder / f"spans-{number}.txt"
        command = [
            sys.executable, __file__, PEER, str(shrunk), str(pace_s), str(self._spans), *entry, "--yes",
            "--format", "json", "--output-dir", str(self.run),
        ]  # fmt: skip
        with self._out.open("w") as out, self._err.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def events(self) -> list[Event]:
        """What it has said."""
        return [json.loads(line) for line in self._out.read_text().rpartition("\n")[0].splitlines()]

    @property
    def most_spans(self) -> int:
        """The most separate spans that it has reported as leased at once."""
        return int(self._spans.read_text()) if self._spans.exists() else 0

    def said(self, event: str) -> Event | None:
        """The first event of a name."""
        return next((one for one in self.events if one["event"] == event), None)

    def story(self) -> str:
        """How it ended."""
        errors = self._err.read_text(errors="replace")[-2000:]
        return f"peer {self.number} ended with {self.process.poll()}\n{errors}"

    def end(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dataclass
class Report:
    """What came of a run."""

    peers: int
    files: int
    shrunk: float
    seconds: float
    """Since all peers trained."""

    steps: int = 0
    rounds: int = 0
    samples: int = 0
    passes: int = 0
    duplicates: int = 0
    leases_lost: int = 0
    most_spans: list[int] = field(default_factory=list)
    """Of each peer."""

    verdict: list[str] = field(default_factory=list)
    """What was not as promised."""


def samples_in(covered: Spans, samples_a_shard: int) -> int:
    """Count the samples of shards: the first positions of each."""

    def before(position: int) -> int:
        number, index = divmod(position, SHARD)
        return number * samples_a_shard + min(index, samples_a_shard)

    return sum(before(stop) - before(start) for start, stop in covered.spans)


def judge_count(ledger: Ledger, samples: int, samples_a_shard: int) -> list[str]:
    """Say whether other samples were counted than were trained."""
    trained = samples_in(ledger.covered, samples_a_shard) + ledger.duplicates
    return [] if samples == trained else [f"{samples} samples were counted, {trained} were trained"]


def run(folder: Path, num_peers: int, num_files: int, shrunk: float, seconds: float) -> Report:
    """Train for some time, end all peers, and judge."""
    report = Report(num_peers, num_files, shrunk, seconds)
    pace_s = BATCH * num_peers / SAMPLES_A_SECOND
    recipe = write_recipe(folder, num_files)
    with contextlib.ExitStack() as stack:
        peers: list[Peer] = []

        def start(*entry: str) -> Peer:
            peers.append(Peer(len(peers), folder, shrunk, pace_s, *entry))
            stack.callback(peers[-1].end)
            return peers[-1]

        def wait(condition: Callable[[], bool], limit_s: float) -> bool:
            deadline = time.monotonic() + limit_s
            while not condition() and time.monotonic() < deadline:
                time.sleep(POLL_S)
                if any(peer.process.poll() is not None for peer in peers):
                    break
            return condition()

        first = start("init", str(recipe))
        if wait(lambda: first.said("ready") is not None, START_LIMIT_S):
            line = f"@{first.said('ready')['invitation']}"
            for _ in range(1, num_peers):
                start("join", str(recipe), "--peer", line)
        if not wait(lambda: all(peer.said("joined") for peer in peers), START_LIMIT_S):
            report.verdict.append(f"not all trained within {START_LIMIT_S:.0f} s")
        else:
            began = time.monotonic()
            with contextlib.suppress(KeyboardInterrupt):
                wait(lambda: False, seconds)
            report.seconds = time.monotonic() - began
        report.verdict += [peer.story() for peer in peers if peer.process.poll() is not None]
        for peer in peers:
            peer.process.terminate()
        deadline = time.monotonic() + LEAVE_S
        for peer in peers:
            try:
                peer.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                report.verdict.append(f"peer {peer.number} is still there {LEAVE_S:.0f} s after SIGTERM")
    _fill(report, peers)
    return report


def _fill(report: Report, peers: Sequence[Peer]) -> None:
    events = [peer.events for peer in peers]
    together = [one for one in sum(events, []) if one["event"] == "step" and len(group_of(one)) > 1]
    report.rounds = len({one["step"] for one in together if one["round"]["committed"]})
    report.most_spans = [peer.most_spans for peer in peers]
    report.leases_lost = sum(map(total_lost, events))
    report.verdict += find_falls(events)
    ledgers = {peer.number: ledger_of(peer.run) for peer in peers}
    furthest = max(ledgers, key=lambda number: ledgers[number][0])
    report.steps, ledger = ledgers[furthest]
    report.verdict += [
        f"peers {number} and {furthest} do not agree on what was trained at step {step}"
        for number, (step, other) in ledgers.items()
        if step == report.steps and other != ledger
    ]
    state = peers[furthest].run / "checkpoints" / f"step-{report.steps}" / "state.json"
    report.samples = json.loads(state.read_text())["samples"]
    num_shards = min(report.files, MOST_SHARDS)
    samples_a_shard = SAMPLES_A_FILE * report.files // num_shards
    report.passes, report.duplicates = ledger.passes(num_shards * SHARD)[0], ledger.duplicates
    report.verdict += judge_data(ledger, num_shards * SHARD, report.leases_lost * samples_a_shard)
    report.verdict += judge_count(ledger, report.samples, samples_a_shard)


def text_of(report: Report) -> str:
    """Say what came of a run."""
    lines = [
        f"{report.peers} peers, {report.files} files, {report.seconds / 60:.1f} min, as long as "
        f"{report.seconds * report.shrunk / 3600:.1f} h to leases",
        f"{report.rounds} rounds with others to step {report.steps}: {report.samples} samples, "
        f"{report.passes} whole passes, {report.duplicates} trained twice, {report.leases_lost} leases lost",
        f"spans in the fullest report of each peer: {report.most_spans}, of {leases.MOST_LEASES} at most",
        "verdict: " + ("all that was promised held" if not report.verdict else "NOT as promised"),
        *(f"- {sentence}" for sentence in report.verdict),
    ]
    return "\n".join(lines)


def main() -> None:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--files", type=int, default=512)
    parser.add_argument("--shrunk", type=float, default=80, help="the times of leases are divided by that")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--keep", type=Path, help="an empty folder for what the peers write; else it goes")
    options = parser.parse_args()
    if options.files > MOST_SHARDS and options.files % MOST_SHARDS:
        parser.error(f"more than {MOST_SHARDS} files must be a multiple of that")  # all shards are equal then
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        report = run(folder, options.peers, options.files, options.shrunk, 60 * options.minutes)
    print(text_of(report))
    if options.json:
        options.json.write_text(json.dumps(asdict(report), indent=1))
    sys.exit(bool(report.verdict))


PEER = "--peer"
"""Begins the arguments of a peer's process."""


def become_quick(shrunk: float) -> None:
    """Divide the times of leases; not those that requests to the DHT take, which are what they are."""
    leases.AHEAD_S /= shrunk
    leases.NOTED_EVERY_S /= shrunk
    leases.PAUSE_S /= shrunk
    leases.FIRST_BLOCK = max(1, round(leases.FIRST_BLOCK / shrunk))


def note_spans(file: Path) -> None:
    """Write down the most spans that this process reports as leased at once."""
    from trahiv_cli.optim.progress import SwarmTracker

    lease, most = SwarmTracker.lease, 0

    def noted(tracker: SwarmTracker, held: Spans) -> bool:
        nonlocal most
        if len(held.spans) > most:
            most = len(held.spans)
            file.write_text(str(most))
        return lease(tracker, held)

    SwarmTracker.lease = noted


if __name__ == "__main__":
    if sys.argv[1:2] != [PEER]:
        main()
    else:
        from trahiv_cli.__main__ import main as trahiv

        shrunk, pace_s, file = sys.argv[2:5]
        del sys.argv[1:5]
        become_quick(float(shrunk))
        note_spans(Path(file))
        become_paced(float(pace_s))
        trahiv()
