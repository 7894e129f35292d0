"""Peers that train for hours on a stream of many small files: nobody ends, and each sample is trained once.

    .venv/bin/python benchmarks/small_files.py [--peers 4] [--files 512] [--shrunk 80] [--minutes 60]

The peers are the real command on 127.0.0.1, in mode `diloco` with 50 local steps a round. The recipe's
tiny model is paced (`tests/kit/paced_command.py`), so that all together take less than a core and a round
takes about a minute. The times of leases are divided by `--shrunk`: with 80, a minute is as long to them
as 80 minutes are in a run. A file holds four samples, so that each peer leases some 150 files in each
round, in between those of the others.

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
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tests` is beside this folder, not installed

from tests.kit.commands import Peer, Workplace
from tests.kit.keeper import LEAVE_S
from tests.kit.paced_command import become_paced
from tests.kit.recipes import tiny_llama, write_tiny
from tests.kit.verdicts import (
    find_falls,
    furthest_of,
    group_of,
    judge_count,
    judge_data,
    total_lost,
    verdict_of,
)
from trahiv_cli.assets.data import MOST_SHARDS
from trahiv_cli.optim import leases
from trahiv_cli.optim.ledger import SHARD, Spans

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
    return write_tiny(
        folder,
        "recipe.yaml",
        name="small-files",
        model__config=tiny_llama(num_hidden_layers=1, max_position_embeddings=SAMPLE_BYTES),
        data={"datasets": [{"path": str(folder / "data" / "*.jsonl")}], "streaming": True},
        clm={"max_length": SAMPLE_BYTES, "packing": False},
        training__max_steps=1_000_000,
        training__per_device_train_batch_size=BATCH,
        training__lr_scheduler_type="constant",
        training__save_steps=LOCAL_STEPS,
        training__save_total_limit=2,
        swarm={"mode": "diloco", "local_steps": LOCAL_STEPS},
        hivemind_config__opt={"target_batch_size": TARGET},
    )


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


def run(folder: Path, num_peers: int, num_files: int, shrunk: float, seconds: float) -> Report:
    """Train for some time, end all peers, and judge."""
    report = Report(num_peers, num_files, shrunk, seconds)
    pace_s = BATCH * num_peers / SAMPLES_A_SECOND
    recipe = write_recipe(folder, num_files)
    with Workplace(folder) as place:

        def start(*entry: str) -> Peer:
            number = len(place.peers)
            command = [
                sys.executable, __file__, PEER, str(shrunk), str(pace_s), f"spans-{number}.txt", *entry,
                "--yes", "--format", "json", "--output-dir", f"run-{number}",
            ]  # fmt: skip
            place.peers.append(Peer(command, folder, place.environment(), folder / f"{number}.txt"))
            return place.peers[-1]

        try:
            line = start("init", str(recipe)).address
            for _ in range(1, num_peers):
                start("join", str(recipe), "--peer", line)
            for peer in place.peers:
                peer.wait_for("joined", START_LIMIT_S)
            began = time.monotonic()
            with contextlib.suppress(KeyboardInterrupt):
                while time.monotonic() < began + seconds and all(peer.is_running for peer in place.peers):
                    time.sleep(POLL_S)
            report.seconds = time.monotonic() - began
            for number, peer in enumerate(place.peers):
                if not peer.is_running:
                    report.verdict.append(f"peer {number} ended with {peer.exit_code(0)}\n{peer.err[-2000:]}")
            for peer in place.peers:
                peer.ask_to_leave()
            for peer in place.peers:
                peer.exit_code(LEAVE_S)
        except AssertionError as error:
            report.verdict.append(str(error))
        _fill(report, folder, place.peers)
    return report


def _fill(report: Report, folder: Path, peers: Sequence[Peer]) -> None:
    events = [peer.events for peer in peers]
    together = [one for one in sum(events, []) if one["event"] == "step" and len(group_of(one)) > 1]
    report.rounds = len({one["step"] for one in together if one["round"]["committed"]})
    spans = [folder / f"spans-{number}.txt" for number in range(len(peers))]
    report.most_spans = [int(file.read_text()) if file.exists() else 0 for file in spans]
    report.leases_lost = sum(map(total_lost, events))
    report.steps, state, ledger, disagreements = furthest_of(
        [folder / f"run-{number}" for number in range(len(peers))]
    )
    report.verdict += find_falls(events) + disagreements
    report.samples = state["samples"]
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
        *verdict_of(report.verdict),
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
