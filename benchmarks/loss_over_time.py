"""What a mode's samples are worth: eval loss against wall time and against samples, on a home link.

    .venv/bin/python benchmarks/loss_over_time.py [--sides NAME ...] [--seeds 3]

Two peers train a Llama of 2.3M parameters on trahiv's own text, on hosts of a simulated network
(`tests/kit/wan.py`), as in `home_links.py`: 20 Mbit/s up and down, 50 ms round trip. The gradients are
real. A batch of 8 samples of 64 tokens takes 0.8 s; what the CPU does not need of that is slept: **late** is
the share of batches for which it needed more.

A step is 80 samples of both peers, as many tokens as a step of `llama.yaml`, or a few more: peers train on
until they know that these are there. So a run ends with the commit that reaches 80 samples times
`--steps`, and the learning rate (warm-up, then half a cosine) follows the samples: **all sides train on
equally many**, up to those of one step. They have the same AdamW and clipping, and for each seed the same
initial weights and held-out data; in which order a peer sees its data is drawn from the seed and its
number. `--start trained` begins with a model that one process has trained for 400 steps on the same data
in another order: fine-tuning. `--start scratch` begins with random weights.

**Eval loss** is that of the weights that the peers agree on, in nats per token of 128 held-out samples. One
peer copies them when a step is committed, after each twelfth of the run, and evaluates the copies when the
run is over, which costs no time on the wall. The **final** loss is that after the last step.

**Against sync** is the difference to the run of `sync` with the same seed, in percent: seeds differ by
more than modes do. **Wall time** is that from the first sample to the commit of the last step. **Bytes** are
counted by the router on both uplinks together, from the first sample to the last step. `--json` keeps the
loss of each copy, too.

Needs root. The whole table takes about four hours.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder and `tests` are not installed

from benchmarks.kit.cells import Cell, Scenario, run_cells
from benchmarks.kit.paced_peers import GO, OURS, Entry, OurPeer, Peers, Side, Workload, as_peer
from benchmarks.kit.tables import counted, median_of, reasons_of, spread, table
from tests.kit.figures import PeerEnded
from tests.kit.wan import PROCESSES
from trahiv_cli.progress.pace import Pace
from trahiv_cli.recipe.load import load_recipe

RATE_MBIT = 20.0
STEP, BATCH = Workload((), 80), 8
"""As many tokens in a step as `llama.yaml` has, and as many samples in a backward pass."""

PACE_S = 0.1
"""For a sample."""

BASE_RECIPE = Path(__file__).with_name("llama.yaml")
RECIPE = ("model.config.num_hidden_layers=5", "clm.max_length=64", "swarm.divide_data=false")
"""What is other than in `llama.yaml`: with two layers less, six peers fit on two cores; each peer has an
order of its own, the same in all modes."""

BASE_STEPS, BASE_LEARNING_RATE = 400, 1.5e-3
LEARNING_RATES = {"trained": 8e-4, "scratch": BASE_LEARNING_RATE}
"""Fine-tuning goes on with half the rate that the model was trained with. What that costs local steps is in
docs/modes.md: the more a run has to learn, the more they lag behind."""

WEIGHT_DECAY, MAX_GRAD_NORM, WARMUP_SHARE = 0.1, 1.0, 0.1
HELD_OUT, EVAL_BATCH, COPIES = 128, 16, 12
PATIENCE_S = 600.0
"""A peer that takes no step for so long gives up; a round of 100 local steps takes 400 s."""

SYNC = "sync-float16"
SIDES: dict[str, Side] = {
    "sync-float16": Side(OURS, {"grad_compression": "float16"}),
    "overlap-uniform8": Side(OURS, {"offload_optimizer": False}, Pace("overlap", "uniform8")),
    "diloco-10": Side(OURS, pace=Pace("diloco", "blockwise4", local_steps=10)),
    "diloco-50": Side(OURS, pace=Pace("diloco", "blockwise4", local_steps=50)),
    "diloco-100": Side(OURS, pace=Pace("diloco", "blockwise4", local_steps=100)),
    "streaming-50": Side(OURS, pace=Pace("streaming", "blockwise4", local_steps=50)),
}
"""An offloaded optimizer makes no guesses in mode overlap (docs/modes.md), so it is not offloaded there."""


@dataclass(frozen=True)
class Plan:
    """What all peers of a run train."""

    seed: int
    steps: int
    """Of the swarm, of `STEP.target_batch_size` samples."""

    learning_rate: float
    """The highest, after warm-up."""

    base: Path | None
    """Weights to begin with; None: random ones."""

    @property
    def samples(self) -> int:
        """Of all peers."""
        return self.steps * STEP.target_batch_size


# -- in a peer's process --------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A peer has taken the last step."""

    history: str
    """Equal in peers that hold the same weights."""

    late: float
    """Share of its batches that took the CPU longer than the pace allows."""


@dataclass(frozen=True)
class Copy:
    """Weights that were agreed on."""

    share: float
    """Of the run that was over."""

    samples: int
    at: float
    weights: list[torch.Tensor]


def run_trainer(plan: Plan, pipe: Connection, entry: Entry) -> None:
    """Enter the swarm, say so; once told to, train; then evaluate as often as told to.

    Sends `News` through `pipe`; among the answers are `Trained`, and for each evaluation all `Point`s, with
    times on the clock that all processes share.
    """
    with as_peer(pipe, entry):
        trainee, schedule = Trainee(plan.seed, order=entry.number, base=plan.base), Schedule(plan)
        peer = OurPeer(
            entry,
            trainee.params,
            {"max_grad_norm": MAX_GRAD_NORM, "max_steps": plan.steps},
            params=trainee.groups(),
            optimizer=partial(torch.optim.AdamW, lr=plan.learning_rate, fused=True),
            scheduler=schedule.build,
        )
        schedule.optimizer = peer.optimizer
        pipe.send(("address", peer.address))
        if pipe.recv() == GO:
            trained, copies = _train(pipe, peer, trainee, schedule, entry.pace_s)
            pipe.send(("answers", trained))
            while pipe.recv() == GO:
                pipe.send(("answers", trainee.evaluate(copies)))
        peer.close()


def _train(
    pipe: Connection, peer: Any, trainee: Trainee, schedule: Schedule, pace_s: float
) -> tuple[Trained, list[Copy]]:
    """Train until the run is over, or something comes through the pipe."""
    optimizer, samples = peer.optimizer, iter(trainee)
    copies = [Copy(0.0, 0, time.monotonic(), trainee.copy())]
    count = late = 0
    stepped_at = time.monotonic()
    while schedule.share(optimizer.local_epoch) < 1 and not pipe.poll():
        begun, step = time.monotonic(), optimizer.local_epoch
        batch = torch.cat([next(samples) for _ in range(BATCH)])
        optimizer.expect_batch(BATCH, batch.numel(), lend=True)
        trainee.loss(batch).backward()
        spare_s = begun + BATCH * pace_s - time.monotonic()
        count, late = count + 1, late + (spare_s < 0)
        time.sleep(max(0.0, spare_s))
        optimizer.step(batch_size=BATCH)
        for one in peer.news():
            pipe.send(one)
        if optimizer.local_epoch > step:
            stepped_at, done = time.monotonic(), schedule.share(optimizer.local_epoch)
            if math.floor(done * COPIES) > math.floor(copies[-1].share * COPIES):
                with optimizer.agreed_weights():
                    copies.append(Copy(done, optimizer.history.samples, stepped_at, trainee.copy()))
        elif time.monotonic() > stepped_at + PATIENCE_S:
            raise TimeoutError(f"no step for {PATIENCE_S:.0f} s")
    return Trained(optimizer.history.digest.hex(), late / max(1, count)), copies


class Schedule:
    """How far a run is, and the learning rate that follows from it."""

    optimizer: Any = None
    """The swarm's, as soon as it is there: it needs the schedule to be built."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def share(self, step: int) -> float:
        """Return how much of the run is over at a step of the swarm; 1 or more at its end.

        Within a round of local steps only the step is known, after others the samples are ahead of it.
        """
        samples = self.optimizer.history.samples if self.optimizer else 0
        return max(step / self._plan.steps, samples / self._plan.samples)

    def build(self, inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Make the inner optimizer's scheduler."""
        return torch.optim.lr_scheduler.LambdaLR(inner, lambda step: rate_after(self.share(step)))


def rate_after(share: float) -> float:
    """Return the learning rate after a share of a run, over the highest: warm-up, then half a cosine to 0."""
    if share < WARMUP_SHARE:
        return share / WARMUP_SHARE
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (share - WARMUP_SHARE) / (1 - WARMUP_SHARE))))


class Trainee:
    """The model, and the data in one of the orders.

    Args:
        seed: draws the initial weights; with `order`, the order of the data.
        order: less than 10.
        base: weights to begin with.
    """

    def __init__(self, seed: int, order: int, base: Path | None = None) -> None:
        from trahiv_cli.assets.data import build_datasets
        from trahiv_cli.assets.model import build_model, build_tokenizer

        recipe = load_recipe(BASE_RECIPE, [*RECIPE, f"training.seed={seed}"]).recipe
        tokenizer = build_tokenizer(recipe)
        splits = build_datasets(recipe, tokenizer, peer_seed=10 * seed + order)
        self._samples = torch.tensor(splits.train.with_format(None)["input_ids"][:], dtype=torch.int16)
        self._held_out = torch.tensor(splits.eval.with_format(None)["input_ids"][:HELD_OUT])
        self.model = build_model(recipe, tokenizer)
        if base is not None:
            self.model.load_state_dict(torch.load(base))
        self.params = list(self.model.parameters())

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Give the samples again and again, each of shape (1, tokens), int64."""
        while True:
            yield from (sample[None].long() for sample in self._samples)

    def groups(self) -> list[dict[str, Any]]:
        """Return the weights as param groups, of which matrices decay and norms do not."""
        matrices = [param for param in self.params if param.ndim > 1]
        norms = [param for param in self.params if param.ndim == 1]
        return [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": norms, "weight_decay": 0.0},
        ]

    def loss(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the mean loss per token of samples, int64 of shape (samples, tokens)."""
        return self.model(input_ids=samples, labels=samples).loss

    def copy(self) -> list[torch.Tensor]:
        """Copy the weights as they are."""
        return [param.detach().clone() for param in self.params]

    @torch.no_grad()
    def evaluate(self, copies: Sequence[Copy]) -> list[Point]:
        """Evaluate copies on the held-out data; the model holds the last one then."""
        points = []
        for one in copies:
            for param, weight in zip(self.params, one.weights, strict=True):
                param.copy_(weight)
            losses = [float(self.loss(batch)) for batch in self._held_out.split(EVAL_BATCH)]
            points.append(Point(one.samples, one.at, statistics.fmean(losses)))
        return points


def make_base(path: str, seed: int) -> None:
    """Train in one process, and write the weights to a file. Runs in a process of its own."""
    torch.set_num_threads(1)
    trainee = Trainee(seed, order=9)
    inner = torch.optim.AdamW(trainee.groups(), lr=BASE_LEARNING_RATE, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: rate_after(step / BASE_STEPS))
    samples = iter(trainee)
    for _ in range(BASE_STEPS):
        batch = torch.cat([next(samples) for _ in range(STEP.target_batch_size)])
        trainee.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(trainee.params, MAX_GRAD_NORM)
        inner.step()
        inner.zero_grad()
        scheduler.step()
    unfinished = Path(f"{path}.part")
    torch.save(trainee.model.state_dict(), unfinished)
    unfinished.rename(path)


# -- what came of it ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """How good the agreed weights were, and when."""

    samples: int
    """Of all peers, committed until then."""

    seconds: float
    """Since the run began."""

    loss: float
    """On held-out data, in nats per token."""


@dataclass(frozen=True)
class Run:
    """One run of a side."""

    side: str
    seed: int
    points: list[Point]
    """By samples; the first one before the first step, the last one after the last."""

    bytes_sent: int
    """On both uplinks."""

    reasons: list[str]
    """Why rounds failed, as both peers tell it: one may be told of by both."""

    late: float
    """Of the peer that was worse off."""

    def __str__(self) -> str:
        """Say what came of it, for a person who waits."""
        last = self.points[-1]
        return f"{last.loss:.4f} after {last.samples} samples in {last.seconds:.0f} s"


COLUMNS = (
    *("side", "final eval loss", "against sync, %", "samples", "wall time, s"),
    *("kB a sample", "failed rounds", "late"),
)


def rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Give the medians, one row for each side, in the order in which they come."""
    sync = {run.seed: run.points[-1].loss for run in runs if run.side == SYNC}
    for side in dict.fromkeys(run.side for run in runs):
        own = [run for run in runs if run.side == side]
        last = [run.points[-1] for run in own]
        yield (
            side,
            spread((one.loss for one in last), ".4f"),
            spread(
                (100 * (run.points[-1].loss / sync[run.seed] - 1) for run in own if run.seed in sync), "+.2f"
            ),
            f"{median_of(one.samples for one in last):.0f}",
            f"{median_of(one.seconds for one in last):.0f}",
            f"{median_of(run.bytes_sent / run.points[-1].samples for run in own) / 1e3:.1f}",
            f"{median_of(float(len(run.reasons)) for run in own):g}",
            f"{median_of(run.late for run in own):.3f}",
        )


# -- in the parent --------------------------------------------------------------------------------


def measure(name: str, plan: Plan) -> Run:
    """Run one side once.

    Raises:
        PeerEnded: a peer has ended, or the peers did not stay together.
    """
    side, scenario = SIDES[name], Scenario("home", RATE_MBIT, paces_s=(PACE_S, PACE_S))
    with scenario.network() as wan, Peers(partial(run_trainer, plan), wan.spawn) as peers:
        began, before = peers.start_all(side, STEP, scenario.paces_s), wan.sent_bytes()
        while not all(one.answers for one in peers.told):
            peers.listen()
        trained: list[Trained] = [one.answers.pop() for one in peers.told]
        sent = wan.sent_bytes() - before
        if len({one.history for one in trained}) > 1:
            raise PeerEnded("the peers hold different histories at the end")
        peers.go([0])
        while not peers.told[0].answers:
            peers.listen()
        points: list[Point] = peers.told[0].answers.pop()
    return Run(
        side=name,
        seed=plan.seed,
        points=[replace(point, seconds=max(0.0, point.seconds - began)) for point in points],
        bytes_sent=sent,
        reasons=reasons_of(peers.told),
        late=max(one.late for one in trained),
    )


def make_bases(folder: Path, seeds: Sequence[int]) -> dict[int, Path]:
    """Train the models to begin with that `folder` does not have; return their files by seed."""
    paths = {seed: folder / f"base-{BASE_STEPS}-steps-seed-{seed}.pt" for seed in seeds}
    for seed, path in paths.items():
        if path.exists():
            continue
        process = PROCESSES.Process(target=make_base, args=(str(path), seed))
        process.start()
        try:
            process.join()
        finally:
            process.kill()  # nothing, if it has ended by itself
        if process.exitcode:
            raise SystemExit(f"the model to begin with of seed {seed} could not be trained: see above")
    return paths


def main() -> None:
    """Measure all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), metavar="NAME",
                        help=f"of {', '.join(SIDES)}")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="how many, of which the median counts")
    parser.add_argument("--steps", type=int, default=300,
                        help=f"of the swarm, {STEP.target_batch_size} samples each")  # fmt: skip
    parser.add_argument("--start", choices=LEARNING_RATES, default="trained")
    parser.add_argument("--cache", type=Path, help="folder for the trained models to begin with")
    parser.add_argument("--json", type=Path, help="write all runs here too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seeds = range(options.seeds)
    with tempfile.TemporaryDirectory() as folder:
        bases: dict[int, Path] = {}
        if options.start == "trained":
            cache = (options.cache or Path(folder)).resolve()
            cache.mkdir(parents=True, exist_ok=True)
            bases = make_bases(cache, seeds)
        rate = LEARNING_RATES[options.start]
        plans = [Plan(seed, options.steps, rate, bases.get(seed)) for seed in seeds]
        cells: list[Cell] = [
            (f"{side}, seed {plan.seed}", partial(measure, side, plan))
            for side in options.sides
            for plan in plans
        ]
        runs: list[Run] = run_cells(cells, options.json)
    reasons = (counted(f"{run.side}, seed {run.seed}", run.reasons) for run in runs)
    print(table(COLUMNS, rows(runs)), *chain.from_iterable(reasons), sep="\n")


if __name__ == "__main__":
    main()
