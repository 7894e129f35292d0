"""Checkpoints of one peer: complete or absent, in safetensors and JSON.

    checkpoints/step-40/
      weights.safetensors      trainable weights, by name, as stored in the model
      optimizer.safetensors    tensors of the optimizer's state, by their place in `state.json`
      outer.safetensors        momentum of the outer optimizer, by weight; only in modes with local steps
      state.json               history and layout of the optimizer's state; written last

A folder is written aside, synced, and renamed, so that `step-<n>` is never half a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hivemind.optim.state_averager import dump_optimizer_state
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trahiv_cli.errors import AssetError
from trahiv_cli.optim.history import History
from trahiv_cli.optim.outer import OuterState
from trahiv_cli.swarm.corrections import adopt_optimizer_state

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
OUTER = "outer.safetensors"
CHECKPOINTS = "checkpoints"
"""Name of their folder in a run's."""

VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def history(self) -> History:
        """What was committed on the way to it.

        Raises:
            AssetError: it is damaged.
        """
        state = self._read_state()
        try:
            return History.from_wire([state["step"], state["samples"], bytes.fromhex(state["history"])])
        except (LookupError, ValueError, TypeError) as error:
            raise self._damaged(STATE, f"does not say where its weights come from: {error!r}") from error

    def load_weights(self, model: torch.nn.Module) -> None:
        """Copy the trainable weights into `model`, keeping its dtypes and devices.

        Raises:
            AssetError: it is a checkpoint of another model, or damaged; `model` is unchanged.
        """
        weights = self._read(WEIGHTS)
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
        layout, stored = self._read_state().get("optimizer") or [], self._read(OPTIMIZER)
        try:
            adopt_optimizer_state(optimizer, layout, [stored[name] for name in sorted(stored, key=int)])
        except ValueError as error:
            raise AssetError(
                f"{self.path} is a checkpoint of another optimizer: {error}.",
                hint="use another --output-dir, or move that folder away",
            ) from error

    def load_outer(self, outer: OuterState | None) -> None:
        """Load what the swarm agreed on, in modes with local steps; the weights are loaded already.

        Raises:
            AssetError: it is of another model, or damaged; `outer` is unchanged.
        """
        if outer is None:
            return
        rounds, stored = self._read_state().get("outer_rounds"), self._read(OUTER)
        momentum = [stored[name] for name in sorted(stored, key=int)]
        if not isinstance(rounds, int) or [m.shape for m in momentum] != [m.shape for m in outer.momentum]:
            raise self._damaged(OUTER, "is of another model")
        outer.load(outer.anchor, momentum, rounds)

    def _read_state(self) -> dict[str, Any]:
        try:
            state = json.loads((self.path / STATE).read_text())
            if not isinstance(state, dict):
                raise ValueError("it is not an object")
        except (OSError, ValueError) as error:
            raise self._damaged(STATE, f"can't be read: {error}") from error
        return state

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        try:
            tensors: dict[str, torch.Tensor] = load_file(self.path / name)
        except (OSError, SafetensorError) as error:
            raise self._damaged(name, f"can't be read: {error}") from error
        return tensors

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

    def newest(self) -> Checkpoint | None:
        """Return the complete checkpoint of the highest step, or None."""
        found = self._complete()
        return found[-1] if found else None

    def save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        history: History,
        outer: OuterState | None = None,
    ) -> Path:
        """Write `step-<history.step>`; if it is there already, of the same history, leave it.

        Args:
            model: its trainable parameters are saved.
            optimizer: the inner torch optimizer, with plain tensors and values as its state (`assemble`).
            history: of the swarm step that both are at.
            outer: what the swarm agrees on, in modes with local steps; the model holds its weights.

        Raises:
            OSError: the disk is full or read-only; older checkpoints stay, nothing half-written does.
        """
        final = self._folder / f"step-{history.step}"
        if (final / STATE).exists() and self._is_of(final, history):
            return final
        aside = self._folder / f".step-{history.step}.{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)  # of a killed process with this id: pid 1 in a container
        try:
            aside.mkdir(parents=True)
            self._write(aside, model, optimizer, history, outer)
            shutil.rmtree(final, ignore_errors=True)  # of a history that the swarm has not kept
            aside.rename(final)
            _sync(self._folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise OSError(str(error)) from error
        self._delete_old()
        return final

    def _write(
        self,
        folder: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        history: History,
        outer: OuterState | None,
    ) -> None:
        weights = {
            name: param.detach().cpu().contiguous()
            for name, param in model.named_parameters()
            if param.requires_grad
        }
        layout, tensors = dump_optimizer_state(optimizer)
        save_file(weights, folder / WEIGHTS)
        save_file(
            {str(i): tensor.contiguous().clone() for i, tensor in enumerate(tensors)}, folder / OPTIMIZER
        )
        state: dict[str, Any] = {
            "version": VERSION,
            "step": history.step,
            "samples": history.samples,
            "history": history.digest.hex(),
            "optimizer": layout,
        }
        if outer is not None:
            state["outer_rounds"] = outer.rounds
            save_file({str(i): tensor for i, tensor in enumerate(outer.momentum)}, folder / OUTER)
        (folder / STATE).write_text(json.dumps(state))
        for path in folder.iterdir():
            _sync(path)

    @staticmethod
    def _is_of(folder: Path, history: History) -> bool:
        with contextlib.suppress(AssetError):
            return Checkpoint(folder, history.step).history == history
        return False

    def _complete(self) -> list[Checkpoint]:
        steps = [
            int(path.name.removeprefix("step-"))
            for path in self._folder.glob("step-*")
            if path.name.removeprefix("step-").isdigit() and (path / STATE).is_file()
        ]
        return [Checkpoint(self._folder / f"step-{step}", step) for step in sorted(steps)]

    def _delete_old(self) -> None:
        complete = self._complete()
        for old in complete[: len(complete) - self._keep] if self._keep else ():
            shutil.rmtree(old.path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
