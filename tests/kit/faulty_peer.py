"""Small swarms whose peers go wrong as told: real processes, real averagers, sockets on 127.0.0.1.

Each peer is a process group of its own that trains a tiny model on a stream of its own and says what
happens to it in a file, one JSON line each; `Swarm` starts peers, cuts links, ends all of it by process id,
and waits for what the files say. `find_broken_promises` reads all files and finds what must not be there.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from hivemind.utils import MPFuture

from tests.kit.faults import Fault, Scene, cut_links
from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.assemble import METADATA_EXPIRATION_S, build_optimizer
from trahiv_cli.optim.ballot import digest_of
from trahiv_cli.optim.history import History
from trahiv_cli.optim.leases import Leases
from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.optim.pace import Pace
from trahiv_cli.optim.rounds import Round
from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.corrections.processes import die_with_parent
from trahiv_cli.swarm.identity import ensure_identity
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events

WIDTH, HIDDEN = 40, 256
"""20,776 parameters: five parts of 8 KiB or less for each of two members, four for each of three."""

BATCH = 8
HELD_OUT = 512
START_S = 60.0
JOIN_S = 20.0
AVERAGING_TIMEOUT_S = 20.0

DHT = DhtSection(host_maddrs=["/ip4/127.0.0.1/tcp/0"], nat_port_map=False, auto_nat=False)

GO = "go"
"""File whose presence lets peers train: those that start together begin together."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a peer does, apart from its faults. Pickled on its way there."""

    num_peers: int = 3
    batches: int = 2
    """Of each peer of the swarm in a step."""

    seconds_per_batch: float = 0.1
    """So long that peers mostly sleep: the machine carries several."""

    learning_rate: float = 3e-3
    codec: str | None = None
    matchmaking_time: float = 2.0
    averaging_timeout: float = AVERAGING_TIMEOUT_S
    rules: RoundRules = field(default_factory=RoundRules)
    pace: Pace = field(default_factory=Pace)
    max_steps: int = 10**6
    auto_share: float | None = None
    metadata_expiration: float = METADATA_EXPIRATION_S
    """Seconds that a peer which died without a goodbye is waited for. It reports twice as often."""

    num_samples: int = 0
    """In a pass over the data, which peers divide by leases; 0: they divide nothing."""

    def options(self) -> dict[str, Any]:
        """The words of `hivemind_config.opt`."""
        return {
            "run_id": "faults",
            "target_batch_size": self.batches * self.num_peers * BATCH,
            "matchmaking_time": self.matchmaking_time,
            "averaging_timeout": self.averaging_timeout,
            "next_chunk_timeout": 4.0,
            "grad_compression": self.codec,
            "averager_opts": {"part_size_bytes": 8192, "request_timeout": 1.0},
            "tracker_opts": {"metadata_expiration": self.metadata_expiration},
        }


QUICK_S = 0.05
"""Seconds of a batch in `MODES_BESIDE_TRAINING`."""

MODES_BESIDE_TRAINING = {
    "overlap": Settings(pace=Pace(mode="overlap"), seconds_per_batch=QUICK_S, codec="float16"),
    "streaming": Settings(
        pace=Pace(mode="streaming", local_steps=8, fragments=4), seconds_per_batch=QUICK_S, codec="blockwise4"
    ),
}
"""Peers in the modes in which training goes on during a round."""


# -- in the peer's process ------------------------------------------------------------------------


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, WIDTH)
    )


def draw(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw inputs and targets, each of shape (count, WIDTH), float32: targets are the inputs in reverse."""
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.flip(-1)


class Notices(Events):
    """Says what a person should know; waits are nobody's news, and take no thread.

    Args:
        say: told of each notice.
    """

    def __init__(self, say: Callable[..., None]) -> None:
        def hear(event: dict[str, Any]) -> None:
            if "message" in event:
                say("notice", code=event.get("code", event["event"]), message=event["message"])

        super().__init__(hear)

    @contextlib.contextmanager
    def waiting(self, what: str, until_s: float) -> Iterator[Callable[..., None]]:
        yield lambda event, what, until_s, **fields: None


class Peer:
    """One peer's life, as it tells it in its file."""

    def __init__(self, log: Path, number: int, settings: Settings) -> None:
        self._log, self._number, self._settings = log, number, settings
        self._go = log.with_name(GO)
        self._leases: Leases | None = None
        self._model = build_model()
        self._held_out = draw(2**31, HELD_OUT)
        self._has_stepped = False
        self._parent = History()
        self._held = 0
        """Samples that were trained and are in no step yet."""
        self._began, self._blocked_s = 0.0, 0.0

    def say(self, event: str, **fields: Any) -> None:
        record = {"event": event, "time": time.monotonic()} | fields
        with self._log.open("a") as log:
            log.write(json.dumps(record) + "\n")

    def live(self, node: Node, is_first: bool) -> None:
        """Train until the process is ended."""
        settings, address = self._settings, node.addresses()[0].maddr
        optimizer = build_optimizer(
            settings.options(),
            dht=node.dht,
            params=[{"params": list(self._model.parameters())}],
            optimizer=lambda groups: torch.optim.Adam(groups, lr=settings.learning_rate),
            scheduler=lambda inner: torch.optim.lr_scheduler.ConstantLR(inner, factor=1.0),
            samples_per_step=BATCH,
            max_grad_norm=0.0,
            rules=settings.rules,
            pace=settings.pace,
            max_steps=settings.max_steps,
            auto_share=settings.auto_share,
            events=Notices(self.say),
        )
        self._listen(optimizer)
        self._leases = optimizer.divide_data(settings.num_samples) if settings.num_samples else None
        self._enter(optimizer, is_first)
        self.say("ready", peer=node.peer_id, maddr=address, **self._where(optimizer))
        self._wait_for_go()
        self._train(optimizer)

    def _wait_for_go(self) -> None:
        while not self._go.exists():
            time.sleep(0.05)

    def _enter(self, optimizer: SwarmOptimizer, is_first: bool) -> None:
        deadline = time.monotonic() + JOIN_S
        while not is_first and time.monotonic() < deadline:
            optimizer.tracker.refresh()
            if optimizer.tracker.others:
                with contextlib.suppress(RoundFailed):
                    if optimizer.load_state_from_peers(JOIN_S):
                        return
        optimizer.enter_step(History())

    def _listen(self, optimizer: SwarmOptimizer) -> None:
        position, seeker = optimizer.position, optimizer.seeker
        try_once, commit = seeker.try_once, position.commit

        def noted(history: History, *outcome: Any) -> None:
            # One call may take several steps, and go through rounds of others before.
            self._parent = optimizer.history
            commit(history, *outcome)
            self._has_stepped = True
            blocked_s = self._blocked_s + time.monotonic() - self._began
            self._say_step(optimizer, self._held, blocked_s)
            self._count_anew(optimizer)

        def told(deadline: float) -> Any:
            try:
                return try_once(deadline)
            except RoundFailed as error:
                self.say("failed", step=optimizer.local_epoch, reason=error.message)
                raise

        seeker.try_once, position.commit = told, noted  # type: ignore[method-assign]

    def _count_anew(self, optimizer: SwarmOptimizer) -> None:
        # What training did during the round is for the next one.
        self._held, self._blocked_s = optimizer.position.method.samples_held, 0.0
        self._began = time.monotonic()

    def _train(self, optimizer: SwarmOptimizer) -> None:
        index = 0
        while True:
            inputs, targets = draw(1_000_003 * (self._number + 1) + index, BATCH)
            index += 1
            taken = [self._leases.take() for _ in range(BATCH)] if self._leases else []
            positions = [position for position in taken if position is not None]
            optimizer.expect_batch(BATCH, BATCH, lend=True, positions=positions)
            loss = torch.nn.functional.mse_loss(self._model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self._compute()
            before, self._began, self._has_stepped = optimizer.history, time.monotonic(), False
            self._held += BATCH
            with contextlib.suppress(RoundFailed):  # nobody gave it the newer state: it tries again
                optimizer.step()
            self._blocked_s += time.monotonic() - self._began
            for param in self._model.parameters():
                param.grad = None
            if optimizer.history != before and not self._has_stepped:
                self.say("loaded", blocked=self._blocked_s, **self._where(optimizer))
                self._count_anew(optimizer)

    def _compute(self) -> None:
        time.sleep(self._settings.seconds_per_batch)

    def _say_step(self, optimizer: SwarmOptimizer, held: int, blocked_s: float) -> None:
        last: Round | None = optimizer.last_round
        self.say(
            "step",
            parent=self._parent.digest.hex(),
            step_samples=optimizer.step_samples,
            my_samples=optimizer.my_step_samples,
            held=held - optimizer.position.method.samples_held,
            blocked=blocked_s,
            group=list(last.group) if last else [],
            duplicates=optimizer.ledger.duplicates,
            lost=self._leases.lost if self._leases else 0,
            contributed=last.samples if last else {},
            left_out=last.left_out if last else {},
            reason=last.reason if last else "",
            **self._where(optimizer),
        )

    @torch.no_grad()
    def _where(self, optimizer: SwarmOptimizer) -> Event:
        history = optimizer.history
        inputs, targets = self._held_out
        with optimizer.agreed_weights():
            return {
                "step": history.step,
                "samples": history.samples,
                "digest": history.digest.hex(),
                "weights": digest_of(self._model.parameters()).hex()[:16],
                "loss": float(torch.nn.functional.mse_loss(self._model(inputs), targets)),
            }


def run_peer(
    folder: Path,
    number: int,
    settings: Settings,
    faults: Sequence[Fault],
    initial_peers: tuple[str, ...],
) -> None:
    """Be a peer; the whole life of a process."""
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    MPFuture.reset_backend()  # its locks would be those of all peers: one that is killed may hold them
    with (folder / f"{number}.txt").open("ab") as errors:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    log = folder / f"{number}.jsonl"
    scene = Scene(log)
    for fault in faults:
        fault.install(scene)
    try:
        node = Node(DHT, folder / f"{number}.key", initial_peers)
        Peer(log, number, settings).live(node, is_first=not initial_peers)
    finally:  # an error: threads would keep the process, and who waits for it would not hear of it
        traceback.print_exc()
        os.killpg(os.getpgrp(), signal.SIGKILL)


# -- in the test's process ------------------------------------------------------------------------


class Swarm:
    """Peers by number, on one machine. Use as a context manager: at the end no process is left.

    Args:
        folder: for identities and logs.
        settings: of each peer.
    """

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.settings = folder, settings or Settings()
        self.ids = [ensure_identity(folder / f"{n}.key") for n in range(self.settings.num_peers)]
        """Peer ids, base58, by number."""

        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._processes: dict[int, Any] = {}
        self._born: dict[int, int] = {}  # how many events a peer's earlier lives have left
        self._events: dict[int, list[Event]] = {}
        self._offsets: dict[int, int] = {}
        self._cuts: set[tuple[int, int]] = set()

    # -- peers -------------------------------------------------------------------------------------

    def start(self, number: int, *faults: Fault, as_new: bool = False) -> None:
        """Start a peer that joins those that run.

        Args:
            number: of the peer; its stream follows from it.
            *faults: what goes wrong in it.
            as_new: give it a new identity.
        """
        if as_new:
            self.renew(number)
        self._born[number] = len(self.events(number))
        self._processes.pop(number, None)
        links = cut_links(str(self.folder))
        arguments = (self.folder, number, self.settings, (links, *faults), self.addresses())
        self._processes[number] = self._context.Process(target=run_peer, args=arguments)
        self._processes[number].start()

    def start_all(self, faults: dict[int, Sequence[Fault]] | None = None) -> None:
        """Start all peers of the swarm, each with its faults, and wait until they train together."""
        for number in range(self.settings.num_peers):
            self.start(number, *(faults or {}).get(number, ()))
            if number == 0:
                self.wait_for_ready(0)
        for number in range(1, self.settings.num_peers):
            self.wait_for_ready(number)
        self.go()

    def go(self) -> None:
        """Let those that are ready, and all that come, train."""
        (self.folder / GO).touch()

    def wait_for_ready(self, number: int) -> Event:
        """Wait until a peer that was started takes part."""
        self.wait(
            lambda: bool(self._readiness(number)) or not self.is_running(number),
            START_S,
            f"peer {number} is ready",
        )
        assert self._readiness(number), f"peer {number} ended\n{self._story()}"
        return self._readiness(number)[-1]

    def addresses(self) -> tuple[str, ...]:
        """Where those can be reached that take part."""
        told = [self._readiness(number) for number in self._processes if self.is_running(number)]
        return tuple(ready[-1]["maddr"] for ready in told if ready)

    def is_running(self, number: int) -> bool:
        return number in self._processes and self._processes[number].is_alive()

    def stop_running(self, number: int) -> None:
        """End a peer and all its processes at once, as a power cut would."""
        process = self._processes[number]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()

    def renew(self, number: int) -> str:
        """Give a peer that does not run a new identity; return that."""
        (self.folder / f"{number}.key").unlink()
        self.ids[number] = ensure_identity(self.folder / f"{number}.key")
        for a, b in self._cuts:
            self._cut_file(a, b).touch()
        return self.ids[number]

    def wait_for_end(self, number: int, timeout_s: float) -> None:
        """Wait until a peer has died of its fault."""
        self.wait(lambda: not self.is_running(number), timeout_s, f"peer {number} dies")

    def cut(self, a: int, b: int) -> None:
        """Cut the link between two peers."""
        self._cuts.add((a, b))
        self._cut_file(a, b).touch()

    def heal(self, a: int, b: int) -> None:
        """Join a link that was cut."""
        self._cuts.discard((a, b))
        self._cut_file(a, b).unlink(missing_ok=True)

    def close(self) -> None:
        """End every process that was started here, by its id."""
        for number in self._processes:
            self.stop_running(number)
            for sockets in Path("/tmp").glob(f"trahiv-{self._processes[number].pid}-*"):
                shutil.rmtree(sockets, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what they said ----------------------------------------------------------------------------

    def events(self, number: int, event: str = "") -> list[Event]:
        """What a peer said in all of its lives, or only events of one name."""
        events, path = self._events.setdefault(number, []), self.folder / f"{number}.jsonl"
        if path.exists():
            with path.open("rb") as log:
                log.seek(self._offsets.get(number, 0))
                whole = log.read().rpartition(b"\n")[0]
            if whole:
                self._offsets[number] = self._offsets.get(number, 0) + len(whole) + 1
                events += [json.loads(line) for line in whole.splitlines()]
        return [said for said in events if event in ("", said["event"])]

    def reached(self, number: int) -> int:
        """The swarm step that a peer holds."""
        places = [said["step"] for said in self.events(number) if "digest" in said]
        return places[-1] if places else -1

    def last_place(self, number: int) -> Event:
        """The last event that says where a peer is."""
        return [said for said in self.events(number) if "digest" in said][-1]

    def log(self, number: int) -> str:
        """What a peer has logged."""
        return (self.folder / f"{number}.txt").read_text(errors="replace")

    def everything(self) -> dict[str, list[Event]]:
        """All events of all peers, by name."""
        return {str(number): self.events(number) for number in self._processes}

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Wait until a condition holds; say after how many seconds.

        Raises:
            AssertionError: it does not hold in time.
        """
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > timeout_s:
                raise AssertionError(f"not in {timeout_s} s: {what}\n{self._story()}")
            time.sleep(0.05)
        return time.monotonic() - began

    def wait_for_step(self, step: int, numbers: Sequence[int], timeout_s: float) -> float:
        """Wait until these peers have reached a step."""
        return self.wait(
            lambda: all(self.reached(number) >= step for number in numbers),
            timeout_s,
            f"peers {list(numbers)} reach step {step}",
        )

    def wait_for_step_after(self, moment: float, number: int, timeout_s: float) -> Event:
        """Wait for the first step that a peer takes itself after a moment of the monotonic clock."""

        def later() -> list[Event]:
            return [said for said in self.events(number, "step") if said["time"] > moment]

        self.wait(lambda: bool(later()), timeout_s, f"peer {number} takes a step")
        return later()[0]

    def wait_until_equal(self, numbers: Sequence[int], timeout_s: float, beyond: int = 0) -> float:
        """Wait until these peers have taken one same step beyond `beyond`."""

        def held(number: int) -> set[str]:
            places = [said for said in self.events(number) if "digest" in said]
            return {said["digest"] for said in places if said["step"] > beyond}

        return self.wait(
            lambda: bool(set.intersection(*map(held, numbers))),
            timeout_s,
            f"peers {list(numbers)} have one history beyond {beyond}",
        )

    def _readiness(self, number: int) -> list[Event]:
        return [said for said in self.events(number)[self._born[number] :] if said["event"] == "ready"]

    def _story(self) -> str:
        lines = []
        for number in sorted(self._processes):
            state = "running" if self.is_running(number) else "ended"
            lines.append(f"peer {number} ({self.ids[number][-6:]}), {state}:")
            lines += [f"  {said}" for said in self.events(number)[-12:]]
            lines.append(self.log(number)[-1500:])
        return "\n".join(lines)

    def _cut_file(self, a: int, b: int) -> Path:
        return self.folder / cut_links.name_of(self.ids[a], self.ids[b])


# -- what must hold whatever happens --------------------------------------------------------------


class Promises:
    """What no fault excuses, looked at as peers say what happens to them.

    Who committed a step holds what everybody holds who did; it counted the samples that all of them
    counted, each once, and of its own those that it had.
    """

    def __init__(self) -> None:
        self.broken: list[str] = []
        """A sentence for each thing that is wrong."""
        self._own: dict[str, str] = {}
        self._places: dict[str, tuple[int, int, str]] = {}
        self._links: dict[str, tuple[str, int, dict[str, int]]] = {}
        self._excused: set[str] = set()

    def excuse(self, name: str) -> None:
        """Do not hold a peer to what it trained: some of it was not finite, and was dropped."""
        self._excused.add(name)

    def hear(self, name: str, said: Event) -> None:
        """Look at one event of one peer."""
        if said["event"] == "ready":
            self._own[name] = said["peer"]  # another one than in its last life, perhaps
        if "digest" not in said:
            return
        own, digest = self._own.get(name, ""), said["digest"]
        place = said["step"], said["samples"], said["weights"]
        if self._places.setdefault(digest, place) != place:
            self.broken.append(f"{name} holds {place} at {digest[:8]}, another peer {self._places[digest]}")
        if said["event"] != "step":
            return
        link = said["parent"], said["step_samples"], said["contributed"]
        if self._links.setdefault(digest, link) != link:
            self.broken.append(
                f"{name} came to {digest[:8]} by {link}, another peer by {self._links[digest]}"
            )
        contributed = said["contributed"] or {own: said["my_samples"]}
        if said["step_samples"] != sum(contributed.values()):
            self.broken.append(f"{name} counted {said['step_samples']} samples of {contributed}")
        is_held_to_it = name not in self._excused and own not in said["left_out"]
        if is_held_to_it and contributed.get(own) != said["held"]:
            self.broken.append(f"{name} held {said['held']} samples at {digest[:8]} of {contributed}")
        before = self._places.get(said["parent"])
        if before is not None and before[1] + said["step_samples"] != said["samples"]:
            self.broken.append(f"step {digest[:8]} does not add {said['step_samples']} samples to {before}")


def find_broken_promises(everything: Mapping[str, Sequence[Event]]) -> list[str]:
    """Find what `Promises` say is wrong in the events of all peers of a run."""
    promises = Promises()
    for name, events in everything.items():
        for said in events:
            promises.hear(name, said)
    return promises.broken


def find_lost_steps(everything: Mapping[str, Sequence[Event]]) -> dict[str, list[str]]:
    """Find steps that some peer took and that are not behind the greatest history.

    Returns:
        By digest the names of the peers that had taken it.
    """
    taken = [
        (name, said) for name, events in everything.items() for said in events if said["event"] == "step"
    ]
    parents = {said["digest"]: said["parent"] for _, said in taken}
    digest = max(((said["samples"], said["digest"]) for _, said in taken), default=(0, ""))[1]
    kept = set()
    while digest in parents:
        kept.add(digest)
        digest = parents[digest]
    lost: dict[str, list[str]] = {}
    for name, said in taken:
        if said["digest"] not in kept:
            lost.setdefault(said["digest"], []).append(name)
    return lost
