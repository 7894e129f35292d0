"""Checkpoints of one peer: complete and intact, or passed over; in safetensors and JSON.

    checkpoints/step-40/
      weights.safetensors      trainable weights that the swarm agrees on, by name, as stored in the model
      optimizer.safetensors    tensors of the optimizer's state, numbered as `state.json` lays them out
      outer.safetensors        momentum of the outer optimizer, by weight; only in modes with local steps
      own.safetensors          weights after this peer's own steps; only while no round has taken them in
      state.json               a `State`
      manifest.json            length and SHA-256 of each of these files; written last

1. `CheckpointData.of` copies what a peer needs, between two batches.
2. `Saver` writes it in a thread beside training: into a folder aside, which is synced and then renamed, so
   that `step-<n>` is never half a checkpoint.
3. `Checkpoints.newest` finds the newest whose files still match the manifest, and a `Checkpoint` loads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from hivemind.optim.state_averager import dump_optimizer_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from trahiv_cli.errors import AssetError
from trahiv_cli.optim.history import History
from trahiv_cli.optim.ledger import Ledger
from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.optim.outer import OuterState
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.swarm.state_averager import adopt_optimizer_state
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.random_states import random_states, set_random_states

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
OUTER, OWN, MANIFEST = "outer.safetensors", "own.safetensors", "manifest.json"
CHECKPOINTS = "checkpoints"
"""Name of their folder in a run's folder."""

VERSION = 1

UNREADABLE = OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError
"""What reading a damaged file raises."""


@dataclass(frozen=True)
class State:
    """All of a checkpoint but its tensors."""

    history: History
    """Its step is that of the checkpoint."""

    ledger: Ledger = field(default_factory=Ledger)
    """Which samples that history has trained."""

    pace: Pace = DEFAULT_PACE
    layout: list[dict[str, Any]] = field(default_factory=list)
    """Of the inner optimizer's state: see `adopt_optimizer_state`."""

    outer_rounds: int = 0
    own_steps: list[float] = field(default_factory=list)
    """See `SwarmOptimizer.own_steps`."""

    random: dict[str, Any] = field(default_factory=dict)
    """As from `random_states`."""

    @property
    def num_tensors(self) -> int:
        """How many tensors the optimizer's state has."""
        return sum(element["type"] == "tensor" for element in self.layout)

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "version": VERSION,
            "step": self.history.step,
            "samples": self.history.samples,
            "history": self.history.digest.hex(),
            "ledger": self.ledger.to_wire(),
            "optimizer": self.layout,
            "outer_rounds": self.outer_rounds,
            "own_steps": self.own_steps,
            "pace": self.pace.to_wire(),
            "random": self.random,
        }

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Read what `to_data` gave, and make sure that all of it can be loaded.

        Raises:
            LookupError, TypeError, ValueError: it is not that.
        """
        layout = list(data["optimizer"])
        tensors = [element["index"] for element in layout if element["type"] == "tensor"]
        values = [element["value"] for element in layout if element["type"] != "tensor"]
        if not values or tensors != list(range(len(tensors))):
            raise ValueError("parts of the optimizer's state are missing")
        if not isinstance(data["outer_rounds"], int):
            raise ValueError(f"not a number of rounds: {data['outer_rounds']!r}")
        set_random_states(data["random"], is_trial=True)
        return cls(
            history=History.from_wire([data["step"], data["samples"], bytes.fromhex(data["history"])]),
            ledger=Ledger.from_wire(data["ledger"]),
            pace=Pace.from_wire(data["pace"]),
            layout=layout,
            outer_rounds=data["outer_rounds"],
            own_steps=[float(weight) for weight in data["own_steps"]],
            random=data["random"],
        )


@dataclass(frozen=True)
class CheckpointData:
    """What a peer needs to resume exactly from a step of the swarm; all tensors are copies in host memory."""

    state: State
    weights: dict[str, torch.Tensor]
    """Trainable weights that the swarm agrees on, by name, in the model's dtypes."""

    statistics: list[torch.Tensor] = field(default_factory=list)
    """Of the inner optimizer, in the order of `State.layout`."""

    momentum: list[torch.Tensor] | None = None
    """Of the outer optimizer, in modes with local steps."""

    own: dict[str, torch.Tensor] | None = None
    """Trainable weights by name as this peer has them, if its own steps have moved them."""

    @classmethod
    def of(cls, model: torch.nn.Module, optimizer: SwarmOptimizer) -> Self:
        """Copy all of it; called by the thread that trains, between two of its batches."""
        layout, statistics = dump_optimizer_state(optimizer.opt)
        outer, agreed = optimizer.state_averager.outer, optimizer.agreed_values
        own_steps, trainable = list(optimizer.own_steps), _trainable(model)
        rounds = 0 if outer is None else outer.rounds
        history, ledger, pace = optimizer.history, optimizer.ledger, optimizer.pace
        return cls(
            State(history, ledger, pace, layout, rounds, own_steps, random_states()),
            weights={name: _copy(agreed.get(param, param)) for name, param in trainable.items()},
            statistics=[_copy(tensor) for tensor in statistics],
            momentum=None if outer is None else [_copy(tensor) for tensor in outer.momentum],
            own={name: _copy(param) for name, param in trainable.items()} if any(own_steps) else None,
        )

    def write(self, folder: Path) -> None:
        """Write all files, the manifest last, and return when the disk holds them."""
        save_file(self.weights, folder / WEIGHTS)
        save_file({str(number): tensor for number, tensor in enumerate(self.statistics)}, folder / OPTIMIZER)
        if self.momentum is not None:
            save_file({str(number): tensor for number, tensor in enumerate(self.momentum)}, folder / OUTER)
        if self.own is not None:
            save_file(self.own, folder / OWN)
        (folder / STATE).write_text(json.dumps(self.state.to_data()))
        files = {path.name: [path.stat().st_size, _sha256(path)] for path in sorted(folder.iterdir())}
        (folder / MANIFEST).write_text(json.dumps({"version": VERSION, "files": files}, indent=1) + "\n")
        for path in (*folder.iterdir(), folder):
            _sync(path)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk.

    What reads it raises `AssetError` if it is damaged, or of another model or optimizer; what it would be
    loaded into is then unchanged.
    """

    path: Path
    step: int

    @cached_property
    def state(self) -> State:
        """What its state file says."""
        try:
            return State.from_data(json.loads((self.path / STATE).read_text()))
        except UNREADABLE as error:
            raise self._damaged(STATE, error) from error

    def find_damage(self) -> str:
        """Compare all files with the manifest and read the state; return what is wrong, or an empty text."""
        try:
            files = json.loads((self.path / MANIFEST).read_text())["files"]
            for name, (length, digest) in files.items():
                if (self.path / name).stat().st_size != length:
                    return f"{name} has another length"
                if _sha256(self.path / name) != digest:
                    return f"{name} holds something else than was written"
            if not {WEIGHTS, OPTIMIZER, STATE} <= files.keys():
                return "files are missing"
            if any(self.state.own_steps) and OWN not in files:
                return f"{OWN} is missing"
            with safe_open(self.path / OPTIMIZER, "pt") as stored:
                if len(stored.keys()) != self.state.num_tensors:
                    return f"{OPTIMIZER} has another number of tensors than {STATE} says"
        except AssetError as error:
            return error.message.removesuffix(".")
        except UNREADABLE as error:
            return f"it can't be read: {error}"
        return ""

    def load_weights(self, model: torch.nn.Module) -> None:
        """Copy the trainable weights into `model`, keeping its dtypes and devices."""
        self._load_weights(WEIGHTS, model)

    def load_own(self, model: torch.nn.Module) -> list[float]:
        """Copy the weights as this peer's own steps had left them into `model`, if it took any.

        Returns:
            See `SwarmOptimizer.own_steps`.
        """
        if any(self.state.own_steps):
            self._load_weights(OWN, model)
        return self.state.own_steps

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the state of an optimizer of the same kind over the same parameters."""
        tensors = self._read_numbered(OPTIMIZER)
        try:
            adopt_optimizer_state(optimizer, self.state.layout, tensors)
        except ValueError as error:
            raise AssetError(
                f"{self.path} is a checkpoint of another optimizer: {error}.",
                hint="use another --output-dir, or move that folder away",
            ) from error

    def load_outer(self, outer: OuterState | None) -> None:
        """Load the outer optimizer of modes with local steps; the weights are loaded already."""
        if outer is None:
            return
        momentum = self._read_numbered(OUTER)
        if [tensor.shape for tensor in momentum] != [tensor.shape for tensor in outer.momentum]:
            raise self._damaged(OUTER, "it is of another model")
        outer.load(outer.anchor, momentum, self.state.outer_rounds)

    def _load_weights(self, file: str, model: torch.nn.Module) -> None:
        weights, trainable = self._read(file), _trainable(model)
        shapes = {name: param.shape for name, param in trainable.items()}
        if {name: tensor.shape for name, tensor in weights.items()} != shapes:
            raise AssetError(
                f"{self.path} is a checkpoint of another model: its weights have other names or shapes.",
                hint="use another --output-dir, or move that folder away",
            )
        with torch.no_grad():
            for name, param in trainable.items():
                param.copy_(weights[name])

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        try:
            tensors: dict[str, torch.Tensor] = load_file(self.path / name)
        except (OSError, SafetensorError) as error:
            raise self._damaged(name, error) from error
        return tensors

    def _read_numbered(self, name: str) -> list[torch.Tensor]:
        tensors = self._read(name)
        return [tensors[number] for number in sorted(tensors, key=int)]

    def _damaged(self, name: str, why: object) -> AssetError:
        return AssetError(
            f"{self.path / name} can't be read: {why}.",
            hint=f"move {self.path} away; the one before it is used",
        )


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds `step-<n>` folders; made when the first is saved.
        keep: older ones are deleted after a newer one is complete; None keeps all.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.folder, self._keep = folder, keep

    def all(self) -> list[Checkpoint]:
        """Return the complete ones, the oldest first, without looking for damage."""
        steps = [
            int(path.name.removeprefix("step-"))
            for path in self.folder.glob("step-*")
            if path.name.removeprefix("step-").isdigit() and (path / MANIFEST).is_file()
        ]
        return [Checkpoint(self.folder / f"step-{step}", step) for step in sorted(steps)]

    def newest(self, events: Events | None = None) -> Checkpoint | None:
        """Read and return the intact checkpoint of the highest step, or None; warn of damaged ones."""
        for found in reversed(self.all()):
            if not (damage := found.find_damage()):
                return found
            if events is not None:
                events.warn(
                    "checkpoint",
                    f"{found.path} is passed over: {damage}.",
                    hint="the one before it is used, unless the swarm is further; move the damaged one away",
                )
        return None

    def save(self, data: CheckpointData) -> Path:
        """Write `step-<n>`; if it is there already, intact and of the same history, leave it.

        Raises:
            OSError: the disk is full or read-only; older checkpoints stay, nothing half-written does.
        """
        step = data.state.history.step
        final = self.folder / f"step-{step}"
        there = Checkpoint(final, step)
        if final.exists() and not there.find_damage() and there.state.history == data.state.history:
            return final
        for left in self.folder.glob(".step-*"):  # by a killed process: no other one writes here now
            shutil.rmtree(left, ignore_errors=True)
        aside = self.folder / f".step-{step}.{os.getpid()}"
        try:
            aside.mkdir(parents=True)
            data.write(aside)
            shutil.rmtree(final, ignore_errors=True)  # damaged, or of a history that the swarm has not kept
            aside.rename(final)
            _sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise OSError(str(error)) from error
        if self._keep:
            for old in self.all()[: -self._keep]:
                shutil.rmtree(old.path, ignore_errors=True)
        return final


def saved_in(run: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in a run's folder: see `Checkpoints.all`."""
    return Checkpoints(run / CHECKPOINTS).all()


class Saver:
    """Writes checkpoints one after the other in a thread of its own, so that training goes on meanwhile.

    Of those that wait only the last is written: the disk may be slower than training. `report` is called in
    that thread with each step, and its folder or what went wrong.
    """

    def __init__(self, checkpoints: Checkpoints, report: Callable[[int, Path | OSError], None]) -> None:
        self._checkpoints, self._report = checkpoints, report
        self._waiting: deque[CheckpointData] = deque(maxlen=1)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._last: Future[None] | None = None

    def save(self, data: CheckpointData) -> None:
        """Have it written, and return at once."""
        self._waiting.append(data)
        self._last = self._pool.submit(self._write)

    def finish(self) -> None:
        """Return when everything is written."""
        if self._last is not None:
            self._last.result()

    def _write(self) -> None:
        if not self._waiting:  # an earlier call has written the newest
            return
        data = self._waiting.popleft()
        result: Path | OSError
        try:
            result = self._checkpoints.save(data)
        except OSError as error:
            result = error
        self._report(data.state.history.step, result)


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
