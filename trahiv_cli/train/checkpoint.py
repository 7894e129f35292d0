"""Checkpoints of one peer: complete and sound, or passed over; in safetensors and JSON.

    checkpoints/step-40/
      weights.safetensors      trainable weights, by name, as stored in the model
      optimizer.safetensors    tensors of the optimizer's state, by their place in `state.json`
      outer.safetensors        momentum of the outer optimizer, by weight; only in modes with local steps
      own.safetensors          weights as this peer's own steps have left them; only where these were not
                               brought to a round yet
      state.json               history, pace, random states, and the layout of the optimizer's state
      manifest.json            length and SHA-256 of each of these; written last

What is written is a `Snapshot`: copies, so that training can go on meanwhile (`Saver`). A folder is written
aside, synced, and renamed, so that `step-<n>` is never half a checkpoint; one that has been damaged since
does not fit its manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from hivemind.optim.state_averager import dump_optimizer_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from trahiv_cli.errors import AssetError
from trahiv_cli.optim.history import History
from trahiv_cli.optim.ledger import Ledger
from trahiv_cli.optim.outer import OuterState
from trahiv_cli.optim.pace import Pace
from trahiv_cli.swarm.state_averager import adopt_optimizer_state

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
OUTER, OWN, MANIFEST = "outer.safetensors", "own.safetensors", "manifest.json"
CHECKPOINTS = "checkpoints"
"""Name of their folder in a run's."""

VERSION = 1
HASHED_AT_ONCE = 2**22

UNREADABLE = OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError
"""What reading a damaged file ends with."""


@dataclass(frozen=True)
class Snapshot:
    """What a peer needs to go on exactly from a step of the swarm; all tensors are copies in host memory."""

    history: History
    """Its step is that of the snapshot."""

    ledger: Ledger
    """Which samples that history has trained."""

    weights: dict[str, torch.Tensor]
    """Trainable weights that the swarm agrees on, by name, in the model's dtypes."""

    layout: list[dict[str, Any]]
    statistics: list[torch.Tensor]
    """Of the inner optimizer: see `adopt_optimizer_state`."""

    pace: Pace | None = None
    """What the swarm averages and how often, where it decides that itself."""

    momentum: list[torch.Tensor] | None = None
    """Of the outer optimizer, in modes with local steps."""

    outer_rounds: int = 0

    own: dict[str, torch.Tensor] | None = None
    """Trainable weights by name as this peer has them, in modes with local steps."""

    own_steps: list[float] = field(default_factory=list)
    """What its own steps since the last round of each fragment count for."""

    random: dict[str, Any] = field(default_factory=dict)
    """States of the random generators, as JSON has them."""

    @classmethod
    def take(
        cls,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        history: History,
        *,
        ledger: Ledger | None = None,
        pace: Pace | None = None,
        outer: OuterState | None = None,
        agreed: Mapping[torch.nn.Parameter, torch.Tensor] | None = None,
        own_steps: Sequence[float] = (),
    ) -> Self:
        """Copy all of it, in the thread that trains, between two of its batches.

        Args:
            model: its trainable parameters.
            optimizer: the inner torch optimizer, with plain tensors and values as its state (`assemble`).
            history: of the swarm step that both are at.
            ledger: of that history.
            pace: where the swarm chooses it.
            outer: in modes with local steps.
            agreed: values that the swarm agrees on, where the model holds others.
            own_steps: see `SwarmOptimizer.own_steps`.
        """
        layout, statistics = dump_optimizer_state(optimizer)
        trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
        return cls(
            history=history,
            ledger=ledger or Ledger(),
            weights={name: _copy((agreed or {}).get(param, param)) for name, param in trainable.items()},
            layout=layout,
            statistics=[_copy(tensor) for tensor in statistics],
            pace=pace,
            momentum=None if outer is None else [_copy(tensor) for tensor in outer.momentum],
            outer_rounds=0 if outer is None else outer.rounds,
            own={name: _copy(param) for name, param in trainable.items()} if any(own_steps) else None,
            own_steps=list(own_steps),
            random=random_states(),
        )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def random_states() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy and torch, as JSON has them."""
    version, numbers, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    state = legacy["state"]
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [state["key"].tolist(), state["pos"], legacy["has_gauss"], legacy["gauss"]],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [one.numpy().tobytes().hex() for one in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        else [],
    }


def restore_random_states(states: Mapping[str, Any], *, is_trial: bool = False) -> None:
    """Set the generators to what `random_states` gave, on as many GPUs as there are here.

    Args:
        states: of the generators.
        is_trial: they are set in generators that nobody uses, and none on a GPU.

    Raises:
        ValueError: it is not that; the generators may be changed, but not by a trial.
    """
    generators: tuple[Any, Any, Any] = random, np.random, torch.default_generator
    if is_trial:
        generators = random.Random(), np.random.RandomState(), torch.Generator()
    python, legacy, cpu = generators
    try:
        version, numbers, gauss = states["python"]
        python.setstate((version, tuple(numbers), gauss))
        key, pos, has_gauss, cached = states["numpy"]
        legacy.set_state(("MT19937", np.array(key, dtype=np.uint32), pos, has_gauss, cached))
        cpu.set_state(_bytes(states["torch"]))
        if torch.cuda.is_available() and not is_trial:
            for device, one in enumerate(states["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_bytes(one), device)
    except (LookupError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(str(error)) from error


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    def find_damage(self) -> str:
        """Compare all files with the manifest and read the state file; say what is wrong, or nothing."""
        try:
            files = json.loads((self.path / MANIFEST).read_text())["files"]
            for name, (length, digest) in files.items():
                if (self.path / name).stat().st_size != length:
                    return f"{name} has another length"
                if _sha256(self.path / name) != digest:
                    return f"{name} holds something else than was written"
            _ = self.history, self.ledger, self.pace, self._outer_rounds
            needed = {WEIGHTS, OPTIMIZER, STATE} | ({OWN} if any(self._own_steps) else set())
            with safe_open(self.path / OPTIMIZER, "pt") as stored:
                self._read_layout(len(stored.keys()))
            self.restore_random_states(is_trial=True)
        except AssetError as error:
            return error.message.removesuffix(".")
        except UNREADABLE as error:
            return f"it can't be read: {error}"
        return "" if needed <= files.keys() else "files are missing"

    @property
    def pace(self) -> Pace | None:
        """What the swarm averaged and how often, where it decides that itself.

        Raises:
            AssetError: it is damaged.
        """
        said = self._read_state().get("pace")
        with self._reading("says nothing of the pace"):
            return None if said is None else Pace.from_wire(said)

    @property
    def ledger(self) -> Ledger:
        """Which samples its history has trained.

        Raises:
            AssetError: it is damaged.
        """
        with self._reading("does not say what was trained"):
            return Ledger.from_wire(self._read_state().get("ledger"))

    def restore_random_states(self, *, is_trial: bool = False) -> None:
        """Set this process's random generators to where they were; a trial sets others.

        Raises:
            AssetError: it is damaged.
        """
        with self._reading("has no states of random generators"):
            restore_random_states(self._read_state().get("random") or {}, is_trial=is_trial)

    @property
    def history(self) -> History:
        """What was committed on the way to it.

        Raises:
            AssetError: it is damaged.
        """
        state = self._read_state()
        with self._reading("does not say where its weights come from"):
            return History.from_wire([state["step"], state["samples"], bytes.fromhex(state["history"])])

    def load_weights(self, model: torch.nn.Module) -> None:
        """Copy the trainable weights into `model`, keeping its dtypes and devices.

        Raises:
            AssetError: it is a checkpoint of another model, or damaged; `model` is unchanged.
        """
        self._load_weights(WEIGHTS, model)

    def load_own(self, model: torch.nn.Module) -> list[float]:
        """Copy the trainable weights as this peer's own steps had left them into `model`, if there were any.

        Returns:
            What these steps count for: see `SwarmOptimizer.own_steps`. None were taken: nothing, or zeros.

        Raises:
            AssetError: it is a checkpoint of another model, or damaged; `model` is unchanged.
        """
        own_steps = self._own_steps
        if any(own_steps):
            self._load_weights(OWN, model)
        return own_steps

    @property
    def _own_steps(self) -> list[float]:
        with self._reading("does not say what this peer's own steps count for"):
            return [float(weight) for weight in self._read_state().get("own_steps") or []]

    def _load_weights(self, file: str, model: torch.nn.Module) -> None:
        weights = self._read(file)
        trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
        shapes = {name: tuple(param.shape) for name, param in trainable.items()}
        if {name: tuple(tensor.shape) for name, tensor in weights.items()} != shapes:
            raise AssetError(
                f"{self.path} is a checkpoint of another model: its weights have other names or shapes.",
                hint="use another --output-dir, or move that folder away",
            )
        with torch.no_grad():
            for name, param in trainable.items():
                param.copy_(weights[name])

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the state of an optimizer of the same kind over the same parameters.

        Raises:
            AssetError: it is of another optimizer, or damaged; `optimizer` is unchanged.
        """
        stored = self._read(OPTIMIZER)
        layout = self._read_layout(len(stored))
        try:
            adopt_optimizer_state(optimizer, layout, [stored[name] for name in sorted(stored, key=int)])
        except ValueError as error:
            raise AssetError(
                f"{self.path} is a checkpoint of another optimizer: {error}.",
                hint="use another --output-dir, or move that folder away",
            ) from error

    def _read_layout(self, num_tensors: int) -> list[dict[str, Any]]:
        """Read where the optimizer's values and its so many tensors belong: see `adopt_optimizer_state`."""
        with self._reading("does not say what the optimizer's state is"):
            layout = list(self._read_state()["optimizer"])
            tensors = [element["index"] for element in layout if element["type"] == "tensor"]
            values = [element["value"] for element in layout if element["type"] != "tensor"]
            if not values or tensors != list(range(num_tensors)):
                raise ValueError("parts are missing")
            return layout

    def load_outer(self, outer: OuterState | None) -> None:
        """Load what the swarm agreed on, in modes with local steps; the weights are loaded already.

        Raises:
            AssetError: it is of another model, or damaged; `outer` is unchanged.
        """
        if outer is None:
            return
        stored = self._read(OUTER)
        momentum = [stored[name] for name in sorted(stored, key=int)]
        if [m.shape for m in momentum] != [m.shape for m in outer.momentum]:
            raise self._damaged(OUTER, "is of another model")
        outer.load(outer.anchor, momentum, self._outer_rounds)

    @property
    def _outer_rounds(self) -> int:
        with self._reading("does not count the outer optimizer's rounds"):
            rounds = self._read_state()["outer_rounds"]
            if not isinstance(rounds, int):
                raise ValueError(f"not a number of rounds: {rounds!r}")
            return rounds

    def _read_state(self) -> dict[str, Any]:
        try:
            state = json.loads((self.path / STATE).read_text())
            if not isinstance(state, dict):
                raise ValueError("it is not an object")
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(STATE, f"can't be read: {error}") from error
        return state

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        try:
            tensors: dict[str, torch.Tensor] = load_file(self.path / name)
        except (OSError, SafetensorError) as error:
            raise self._damaged(name, f"can't be read: {error}") from error
        return tensors

    @contextmanager
    def _reading(self, what_is_wrong: str) -> Iterator[None]:
        """Say that the state file is damaged where what is read from it makes no sense."""
        try:
            yield
        except (LookupError, ValueError, TypeError) as error:
            raise self._damaged(STATE, f"{what_is_wrong}: {error!r}") from error

    def _damaged(self, name: str, what: str) -> AssetError:
        return AssetError(
            f"{self.path / name} {what}.", hint=f"move {self.path} away; the one before it is used"
        )


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds `step-<n>` folders; made when the first is saved.
        keep: older ones are deleted after a newer one is complete; None keeps all.
    """

    def __init__(self, folder: Path, keep: int | None) -> None:
        self._folder, self._keep = folder, keep

    def all(self) -> list[Checkpoint]:
        """Return the complete ones, the oldest first; whether they are sound was not looked at."""
        steps = [
            int(path.name.removeprefix("step-"))
            for path in self._folder.glob("step-*")
            if path.name.removeprefix("step-").isdigit() and (path / MANIFEST).is_file()
        ]
        return [Checkpoint(self._folder / f"step-{step}", step) for step in sorted(steps)]

    def newest(self, on_damage: Callable[[Checkpoint, str], None] = lambda _, __: None) -> Checkpoint | None:
        """Return the sound checkpoint of the highest step, or None. Reads all of it.

        Args:
            on_damage: told about each that is passed over, and what is wrong with it.
        """
        for found in reversed(self.all()):
            if not (damage := found.find_damage()):
                return found
            on_damage(found, damage)
        return None

    def save(self, snapshot: Snapshot) -> Path:
        """Write `step-<snapshot.history.step>`; if it is there already, of the same history, leave it.

        Raises:
            OSError: the disk is full or read-only; older checkpoints stay, nothing half-written does.
        """
        step = snapshot.history.step
        final = self._folder / f"step-{step}"
        if self._is_there(final, snapshot.history):
            return final
        aside = self._folder / f".step-{step}.{os.getpid()}"
        self._sweep()
        try:
            aside.mkdir(parents=True)
            _write(aside, snapshot)
            shutil.rmtree(final, ignore_errors=True)  # damaged, or of a history that the swarm has not kept
            aside.rename(final)
            _sync(self._folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise OSError(str(error)) from error
        self._delete_old()
        return final

    def _sweep(self) -> None:
        """Remove what a killed process had not finished: no other one writes here now."""
        for aside in self._folder.glob(".step-*"):
            shutil.rmtree(aside, ignore_errors=True)

    @staticmethod
    def _is_there(folder: Path, history: History) -> bool:
        there = Checkpoint(folder, history.step)
        return (folder / MANIFEST).is_file() and not there.find_damage() and there.history == history

    def _delete_old(self) -> None:
        complete = self.all()
        for old in complete[: len(complete) - self._keep] if self._keep else ():
            shutil.rmtree(old.path, ignore_errors=True)


def saved_in(run: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in a run's folder: see `Checkpoints.all`."""
    return Checkpoints(run / CHECKPOINTS, keep=None).all()


def _write(folder: Path, snapshot: Snapshot) -> None:
    """Write all files of a checkpoint, its manifest last, and have the disk hold them."""
    save_file(snapshot.weights, folder / WEIGHTS)
    save_file({str(place): tensor for place, tensor in enumerate(snapshot.statistics)}, folder / OPTIMIZER)
    if snapshot.momentum is not None:
        save_file({str(place): tensor for place, tensor in enumerate(snapshot.momentum)}, folder / OUTER)
    if snapshot.own is not None:
        save_file(snapshot.own, folder / OWN)
    state = {
        "version": VERSION,
        "step": snapshot.history.step,
        "samples": snapshot.history.samples,
        "history": snapshot.history.digest.hex(),
        "ledger": snapshot.ledger.to_wire(),
        "optimizer": snapshot.layout,
        "outer_rounds": snapshot.outer_rounds,
        "own_steps": snapshot.own_steps,
        "pace": None if snapshot.pace is None else snapshot.pace.to_wire(),
        "random": snapshot.random,
    }
    (folder / STATE).write_text(json.dumps(state))
    files = {path.name: [path.stat().st_size, _sha256(path)] for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"version": VERSION, "files": files}, indent=1) + "\n")
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(HASHED_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Saver:
    """Writes snapshots beside training: one at a time, and of those that wait meanwhile only the last.

    Args:
        checkpoints: where to.
        report: told of each in the thread that writes: its step, and the folder, or what went wrong.
    """

    def __init__(self, checkpoints: Checkpoints, report: Callable[[int, Path | OSError], None]) -> None:
        self._checkpoints, self._report = checkpoints, report
        self._lock = threading.Lock()
        self._waiting: Snapshot | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._running: Future[None] | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Have it written, and return at once."""
        with self._lock:
            self._waiting = snapshot
            if self._running is None:
                self._running = self._pool.submit(self._write_all)

    def finish(self) -> None:
        """Return when everything is written."""
        with self._lock:
            running = self._running
        if running is not None:
            running.result()

    def _write_all(self) -> None:
        while True:
            with self._lock:
                snapshot, self._waiting = self._waiting, None
                if snapshot is None:
                    self._running = None
                    return
            result: Path | OSError
            try:
                result = self._checkpoints.save(snapshot)
            except OSError as error:
                result = error
            self._report(snapshot.history.step, result)
