"""Checkpoints of one peer, in safetensors and JSON. An incomplete or damaged one is passed over.

    checkpoints/step-40/
      weights.safetensors      trainable weights that the swarm agrees on, by name, as stored in the model,
                               and buffers that training moves, in float32
      optimizer.safetensors    tensors of the optimizer's state, numbered as `state.json` lays them out
      outer.safetensors        momentum of the outer optimizer, by weight; only in modes with local steps
      best.safetensors         weights and buffers with the best score so far, numbered in the optimizer's
                               order; only if the run ends with these
      own.safetensors          weights and buffers after this peer's own steps, numbered in the optimizer's
                               order; only while no round has averaged these steps
      state.json               a `State`
      manifest.json            length and SHA-256 of each of these files; written last

1. `CheckpointData.of` copies a peer's state between two batches.
2. `Checkpoints` writes the copy in a thread while training goes on. It writes into a temporary folder, syncs
   it and renames it, so `step-<n>` is never half a checkpoint.
3. `Checkpoints.newest` finds the newest checkpoint whose files match its manifest; a `Checkpoint` loads it.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from hivemind.compression import CompressionInfo
from hivemind.optim.state_averager import dump_optimizer_state
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trahiv_cli.assets.export import replacing
from trahiv_cli.errors import AssetError
from trahiv_cli.progress.history import History
from trahiv_cli.progress.ledger import Ledger
from trahiv_cli.progress.pace import DEFAULT_PACE, Pace
from trahiv_cli.progress.scores import Scores
from trahiv_cli.recipe.rows import listed
from trahiv_cli.rounds.buffers import moving_buffers
from trahiv_cli.run.folder import MANIFEST, saved_in
from trahiv_cli.state.inner_optimizer import adopt_optimizer_state
from trahiv_cli.state.outer import OuterState
from trahiv_cli.state.peer_state import PeerState
from trahiv_cli.state.snapshot import buffer_bytes, copy_into, views_of
from trahiv_cli.step.local_steps import LocalSteps
from trahiv_cli.step.method import OwnSteps
from trahiv_cli.step.optimizer import SwarmOptimizer
from trahiv_cli.telemetry.events import Events

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE_FILE = "state.json"
OUTER = "outer.safetensors"
BEST = "best.safetensors"
OWN_STEPS = "own.safetensors"

READ_ERRORS = OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError
"""Exceptions that reading a damaged file raises."""


@dataclass(frozen=True)
class State:
    """All of a checkpoint except its tensors."""

    history: History  # its step is the checkpoint's step
    ledger: Ledger = field(default_factory=Ledger)  # the samples that this history has trained
    pace: Pace = DEFAULT_PACE
    layout: list[dict[str, Any]] = field(default_factory=list)  # see `adopt_optimizer_state`
    outer_rounds: int = 0
    own_steps: OwnSteps = OwnSteps()
    scores: Scores = Scores()
    random: dict[str, Any] = field(default_factory=dict)  # from `random_states`

    def to_data(self) -> dict[str, Any]:
        """Return the state as plain data for JSON."""
        return {
            "version": 1,
            "step": self.history.step,
            "samples": self.history.samples,
            "history": self.history.digest.hex(),
            "ledger": self.ledger.to_wire(),
            "optimizer": self.layout,
            "outer_rounds": self.outer_rounds,
            "own": self.own_steps.to_wire(),
            "scores": self.scores.to_wire(),
            "pace": self.pace.to_wire(),
            "random": self.random,
        }

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Read data that `to_data` returned; raises LookupError, TypeError or ValueError for other data."""
        return cls(
            history=History.from_wire([data["step"], data["samples"], bytes.fromhex(data["history"])]),
            ledger=Ledger.from_wire(data["ledger"]),
            pace=Pace.from_wire(data["pace"]),
            layout=list(data["optimizer"]),
            outer_rounds=int(data["outer_rounds"]),
            # An older version wrote none of these two.
            own_steps=OwnSteps.from_wire(data.get("own", [[], 0, []])),
            scores=Scores.from_wire(data.get("scores", [])),
            random=dict(data["random"]),
        )


@dataclass(frozen=True)
class CheckpointData:
    """The data that a peer needs to resume exactly from a step of the swarm."""

    state: State
    files: dict[str, dict[str, torch.Tensor]]
    """Copies in host memory, by file name, and by the tensor's name or number in that file."""

    @classmethod
    def of(cls, model: torch.nn.Module, optimizer: SwarmOptimizer) -> Self:
        """Copy the data of one committed step; the training thread must call this between two batches."""

        def copies(tensors: Iterable[tuple[object, torch.Tensor]]) -> dict[str, torch.Tensor]:
            # One large block, because the C library keeps small blocks when they are freed.
            named = {str(name): value for name, value in tensors}
            values = list(named.values())
            flat = torch.empty(buffer_bytes(values), dtype=torch.uint8)
            copy_into(flat, values)
            return dict(zip(named, views_of(flat, map(CompressionInfo.from_tensor, values)), strict=True))

        held = optimizer.state_averager
        with held.lock_state:  # a download may be about to replace the state
            layout, statistics = dump_optimizer_state(optimizer.opt)
            state = State(
                optimizer.history,
                optimizer.ledger,
                optimizer.pace,
                layout,
                held.outer.rounds if held.outer else 0,
                optimizer.own_steps,
                held.committed.now.scores,
                random_states(),
            )
            agreed = optimizer.agreed_values
            trained = _trainable(model) | held.buffers.live
            files = {
                WEIGHTS: copies((name, agreed.get(value, value)) for name, value in trained.items()),
                OPTIMIZER: copies(enumerate(statistics)),
            }
            if held.outer is not None:
                files[OUTER] = copies(enumerate(held.outer.momentum))
            if held.best is not None and held.best.tensors:
                files[BEST] = copies(enumerate(held.best.tensors))
            if state.own_steps:
                files[OWN_STEPS] = copies(enumerate([*held.weights, *held.buffers.live.values()]))
            return cls(state, files)

    def write(self, folder: Path, base: Mapping[str, str]) -> None:
        """Write all files, the manifest last; `base` see `Checkpoints`."""
        for name, tensors in self.files.items():
            save_file(tensors, folder / name)
        (folder / STATE_FILE).write_text(json.dumps(self.state.to_data()))
        files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
        manifest = {"version": 1, "files": files, "base": dict(base)}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk.

    If it is damaged, or belongs to another model or optimizer, `load_weights`, `load_optimizer`, `load_outer`
    and `load_scores` raise `AssetError` and change nothing.
    """

    path: Path
    step: int

    @cached_property
    def state(self) -> State:
        """The content of `state.json`; raises `AssetError` if it can't be read."""
        try:
            return State.from_data(json.loads((self.path / STATE_FILE).read_text()))
        except READ_ERRORS as error:
            raise self._damaged(STATE_FILE, error) from error

    def find_damage(self) -> str:
        """Compare all files with the manifest and read the state; return the damage, or an empty text."""
        try:
            files = json.loads((self.path / MANIFEST).read_text())["files"]
            for name, written in files.items():
                if _fingerprint(self.path / name) != written:
                    return f"{name} holds something else than was written"
            if not {WEIGHTS, OPTIMIZER, STATE_FILE} <= files.keys() or not self.state:
                return "files are missing"
        except AssetError as error:
            return error.message.removesuffix(".")
        except READ_ERRORS as error:
            return f"it can't be read: {error}"
        return ""

    def require_base(self, base: Mapping[str, str]) -> None:
        """Raise `AssetError` if it was trained with another base; earlier versions wrote none."""
        written = json.loads((self.path / MANIFEST).read_text()).get("base", {})
        unlike = [name for name in base if written.get(name, base[name]) != base[name]]
        if unlike:
            raise AssetError(
                f"{self.path} was trained with another {' and another '.join(unlike)} than those here; "
                "nothing was loaded.",
                hint="bring these back (`builtin/bpe` depends on the version of trahiv), or begin anew in "
                "another --output-dir",
            )

    def load_weights(self, model: torch.nn.Module) -> None:
        """Copy the trainable weights and moving buffers into `model`, keeping its dtypes and devices."""
        weights = self._read(WEIGHTS)
        trained = _trainable(model) | moving_buffers(model)
        shapes = {name: value.shape for name, value in trained.items()}
        saved = {name: tensor.shape for name, tensor in weights.items()}
        if unlike := [name for name in shapes | saved if shapes.get(name) != saved.get(name)]:
            raise self._of_another(
                f"model, or of an earlier version of trahiv: {listed(unlike)} is not there, or has another "
                "shape"
            )
        with torch.no_grad():
            for name, value in trained.items():
                value.copy_(weights[name])

    @torch.no_grad()
    def load_own_steps(self, optimizer: SwarmOptimizer) -> None:
        """Restore this peer's own steps, if the mode has local steps with the same number of fragments.

        Raises AssetError if the file can't be read or is of another model; nothing was changed then.
        """
        own = self.state.own_steps
        method = optimizer.position.method
        if not own or not isinstance(method, LocalSteps):
            return
        held = optimizer.state_averager
        trained = [*held.weights, *held.buffers.live.values()]
        values = list(self._read(OWN_STEPS).values())
        if [value.shape for value in values] != [value.shape for value in trained]:
            raise self._damaged(OWN_STEPS, "it is of another model")
        if method.resume(own):
            for value, kept in zip(trained, values, strict=True):
                value.copy_(kept)

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the state of an optimizer of the same kind over the same parameters."""
        tensors = self._read(OPTIMIZER)
        try:
            adopt_optimizer_state(optimizer, self.state.layout, list(tensors.values()))
        except ValueError as error:
            raise self._of_another(f"optimizer: {error}") from error

    def load_outer(self, outer: OuterState) -> None:
        """Load the outer optimizer of modes with local steps; the weights are loaded already."""
        momentum = list(self._read(OUTER).values())
        if [tensor.shape for tensor in momentum] != [tensor.shape for tensor in outer.momentum]:
            raise self._damaged(OUTER, "it is of another model")
        outer.resume(momentum, self.state.outer_rounds)

    def load_scores(self, held: PeerState) -> None:
        """Load the scores, and the best weights if the run keeps them; the weights are loaded already."""
        best = []
        if held.best is not None and (self.path / BEST).exists():
            best = list(self._read(BEST).values())
            if [one.shape for one in best] != [one.shape for one in (*held.weights, *held.buffers.common)]:
                raise self._damaged(BEST, "it is of another model")
            held.best.adopt(best)
        held.committed.change(scores=self.state.scores)

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        """Read tensors by name; numbered tensors are in the order of their numbers."""
        try:
            tensors: dict[str, torch.Tensor] = load_file(self.path / name)
        except (OSError, SafetensorError) as error:
            raise self._damaged(name, error) from error
        return dict(sorted(tensors.items(), key=lambda item: int(item[0]) if item[0].isdigit() else 0))

    def _of_another(self, what: str) -> AssetError:
        return AssetError(
            f"{self.path} is a checkpoint of another {what}.",
            hint="use another --output-dir, or move that folder away",
        )

    def _damaged(self, name: str, why: object) -> AssetError:
        return AssetError(
            f"{self.path / name} can't be read: {why}.",
            hint=f"move {self.path} away; the one before it is used",
        )


class Checkpoints:
    """The checkpoints of one run in `folder`; the newest `keep` of them are kept, or all if it is None.

    `base` has digests, by name, of the frozen weights and the tokenizer that the trained weights belong to.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None = None,
        events: Events | None = None,
        base: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._base = base
        self._events = events or Events()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self.last: Future[Path | None] | None = None
        """The last checkpoint that `save_beside` began: its folder, or None if it could not be written."""

    def all(self) -> list[Checkpoint]:
        """Return the complete checkpoints, the oldest first, without checking them for damage."""
        return [Checkpoint(*one) for one in saved_in(self.folder)]

    def newest(self) -> Checkpoint | None:
        """Read and return the intact checkpoint of the highest step, or None; warn of damaged ones.

        Raises:
            AssetError: it was trained with another base.
        """
        for found in reversed(self.all()):
            if not (damage := found.find_damage()):
                found.require_base(self._base)
                return found
            self._events.warn(
                "checkpoint",
                f"{found.path} is passed over: {damage}.",
                hint="the one before it is used, unless the swarm is further; move the damaged one away",
            )
        return None

    def save(self, data: CheckpointData) -> Path:
        """Write `step-<n>`, unless it exists, is intact and has the same history and own steps.

        Checkpoints of later steps belong to a history that the swarm has abandoned. They are deleted, so that
        the checkpoint written last always has the highest step.

        Raises:
            OSError: the disk is full or read-only; older checkpoints stay, and no half-written one is left.
        """
        new = data.state
        step = new.history.step
        final = self.folder / f"step-{step}"
        there = Checkpoint(final, step)
        is_intact = final.exists() and not there.find_damage()
        if not is_intact or (there.state.history, there.state.own_steps) != (new.history, new.own_steps):
            for left in self.folder.glob(".step-*"):  # left by a killed process: no other process writes here
                shutil.rmtree(left, ignore_errors=True)
            with replacing(final) as aside:
                data.write(aside, self._base)
        found = self.all()
        kept = [one for one in found if one.step <= step][-(self._keep or 0) :]
        for one in found:
            if one not in kept:
                shutil.rmtree(one.path, ignore_errors=True)
        return final

    def save_beside(self, data: CheckpointData) -> None:
        """Start saving in a thread, and return at once; an earlier save that has not begun is canceled."""
        if self.last is not None:
            self.last.cancel()  # has no effect on a checkpoint that is being written
        self.last = self._pool.submit(self._save_or_warn, data)

    def finish(self) -> Path | None:
        """Wait for the last `save_beside`; return its folder, or None if none was written."""
        return None if self.last is None else self.last.result()

    def _save_or_warn(self, data: CheckpointData) -> Path | None:
        """Save a checkpoint; warn if the disk is full, because training can go on."""
        step = data.state.history.step
        try:
            path = self.save(data)
        except OSError as error:
            self._events.warn(
                "checkpoint",
                f"No checkpoint was written at step {step}: {error}. Training goes on.",
                hint="free disk space; the older checkpoints are untouched",
            )
            return None
        self._events.emit("checkpoint", step=step, path=str(path))
        return path


def _trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def _fingerprint(path: Path) -> list[int | str]:
    """Return a file's length and SHA-256."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def random_states() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy and torch, for JSON."""
    legacy: Any = np.random.get_state()
    is_gpu_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = torch.cuda.get_rng_state_all() if is_gpu_used else []
    return {
        "python": random.getstate(),
        "numpy": [legacy[1].tolist(), *legacy[2:]],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [one.numpy().tobytes().hex() for one in gpus],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore states that `random_states` returned; states of GPUs that this machine lacks are ignored."""

    def read(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, *rest = states["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(read(states["torch"]))
    for device, one in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(read(one), device)


def derive_peer_seed(seed: int, peer_id: str) -> int:
    """Return a 32-bit seed from the run's seed and a peer's id, equal on every machine and run of Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{peer_id}".encode()).digest()[:4], "big")
