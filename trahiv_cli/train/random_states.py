"""Random numbers of a peer: a seed of its own, and states by which it draws on where it stopped."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy and torch, as JSON has them."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [legacy[1].tolist(), *legacy[2:]],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [one.numpy().tobytes().hex() for one in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        else [],
    }


def set_random_states(states: Mapping[str, Any], *, is_trial: bool = False) -> None:
    """Set the generators to what `random_states` gave, on as many GPUs as there are here.

    A trial only makes sure that they can be set.

    Raises:
        ValueError: they can't; the generators may be changed, but not by a trial.
    """
    generators: tuple[Any, Any, Any] = random, np.random, torch.default_generator
    if is_trial:
        generators = random.Random(), np.random.RandomState(), torch.Generator()
    python, legacy, cpu = generators

    def read(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    try:
        version, numbers, gauss = states["python"]
        python.setstate((version, tuple(numbers), gauss))
        keys, pos, has_gauss, cached = states["numpy"]
        legacy.set_state(("MT19937", np.array(keys, dtype=np.uint32), pos, has_gauss, cached))
        cpu.set_state(read(states["torch"]))
        if torch.cuda.is_available() and not is_trial:
            for device, one in enumerate(states["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(read(one), device)
    except (LookupError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(str(error)) from error


def derive_peer_seed(seed: int, peer_id: str) -> int:
    """Return a seed of 32 bits from the run's and a peer's id, equal on every machine and run of Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{peer_id}".encode()).digest()[:4], "big")
