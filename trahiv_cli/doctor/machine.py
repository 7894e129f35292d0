"""Checks of the machine itself. They download nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from trahiv_cli.assets import hub
from trahiv_cli.assets.model import free_bytes, require_memory
from trahiv_cli.doctor.checks import Check
from trahiv_cli.errors import OutOfMemory
from trahiv_cli.recipe.schema import Recipe


def examine_machine(recipe: Recipe | None, folder: Path) -> Iterator[Check]:
    """Check packages, GPU, memory and the disk of a folder, also against the needs of a recipe."""
    yield packages()
    yield gpu()
    found = ", ".join(f"{size / 2**30:.1f} GiB of {name} are free" for name, size in free_bytes().items())
    room = 0
    if recipe is None:
        yield Check("memory", "fine", found)
    elif hub.is_of_hub(recipe.model.model_name_or_path):
        yield Check("memory", "fine", f"{found}; `trahiv check --deep` says what the recipe needs")
    else:
        try:
            needed = require_memory(recipe)
        except OutOfMemory as error:
            yield Check("memory", "bad", error.message, fix=error.hint or "")
        else:
            places = ", ".join(f"{size / 2**30:.1f} GiB of {name}" for name, size in needed.places.items())
            yield Check("memory", "fine", f"{found}; without activations the recipe needs {places}")
            # Two checkpoints, and a third while it is written.
            room = 3 * (needed.trainable_bytes + needed.optimizer_bytes)
    yield disk(folder, room)


def packages() -> Check:
    """Compare the installed packages with the requirements of this version of trahiv."""
    wrong = []
    required: list[str] = []
    with contextlib.suppress(metadata.PackageNotFoundError):  # it runs from its source code
        required = metadata.requires("trahiv") or []
    for wanted in map(Requirement, required):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            wrong.append(f"{wanted.name} is {found}, and {wanted.specifier} is wanted")
    python = f"Python {sys.version.split()[0]}"
    if wrong:
        fix = "install trahiv again, in an environment of its own"
        return Check(
            "packages", "bad", f"{python}; {'; '.join(wrong)}.", "the versions it was tried with", fix
        )
    return Check("packages", "fine", f"{python}, and all packages as wanted")


def gpu(driver: Path = Path("/proc/driver/nvidia/version")) -> Check:
    """Look for a GPU, and for the reason why torch can't use it.

    The file `driver` exists where NVIDIA's driver is loaded.
    """
    wants = "a GPU that torch can use"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        major, minor = torch.cuda.get_device_capability()
        built = torch.cuda.get_arch_list()
        numbers = re.findall(r"\bsm_(\d+)", " ".join(built))
        oldest = min(map(int, numbers), default=0)
        if 10 * major + minor < oldest:
            said = (
                f"{name} has compute capability {major}.{minor}; this torch was built for {', '.join(built)}."
            )
            return Check("gpu", "bad", said, wants, "install an older torch that was built for this GPU")
        return Check("gpu", "fine", f"{name}, compute capability {major}.{minor}, CUDA {torch.version.cuda}")
    if not (driver.exists() or shutil.which("nvidia-smi")):
        return Check("gpu", "poor", "No GPU was found: this peer trains on its CPU.", wants)
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Check("gpu", "poor", "A GPU was found, but CUDA_VISIBLE_DEVICES hides it.", wants, "unset it")
    if torch.version.cuda is None:
        said = f"A GPU was found, but this torch ({torch.__version__}) was built without CUDA."
        return Check("gpu", "poor", said, wants, "install torch's CUDA build (pytorch.org says how)")
    said = f"A GPU was found, but torch, built for CUDA {torch.version.cuda}, can't use it with this driver."
    fix = "update NVIDIA's driver, or install a torch that was built for an older CUDA"
    return Check("gpu", "poor", said, wants, fix)


def disk(folder: Path, room: int) -> Check:
    """Compare the free space where runs are kept with the size of a run's checkpoints (`room`, in bytes)."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free
    found = f"{free / 2**30:.1f} GiB are free at {there.resolve()}"
    needed = max(room, 2**30)
    if free < needed:
        wanted = f"{needed / 2**30:.1f} GiB for checkpoints"
        return Check("disk", "bad", f"{found}.", wanted, "make room, or choose another --output-dir")
    return Check("disk", "fine", found)


def names() -> Check:
    """Check that the hub of models and data answers."""
    trouble = hub.trouble()
    if trouble:
        fix = "needed for models and data of the hub only; cached ones work without it"
        return Check("hub", "poor", trouble, "an answer", fix)
    return Check("hub", "fine", f"{hub.endpoint()} answers")
