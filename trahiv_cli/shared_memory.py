"""Memory that all processes of a peer share, including ones that were forked before it was made."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def shared_bytes(num_bytes: int) -> torch.Tensor:
    """Return a zeroed uint8 buffer on the CPU that other processes can map; its pages are touched already."""
    storage = torch.UntypedStorage._new_shared(max(num_bytes, 1))  # type: ignore[no-untyped-call]
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)[:num_bytes]
    ctypes.memset(flat.data_ptr(), 0, num_bytes)
    return flat


class SharedNumber:
    """A number in shared memory."""

    def __init__(self, value: float) -> None:
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        self._memory = shared_bytes(dtype.itemsize).view(dtype)
        self.value = value

    @property
    def value(self) -> Any:
        """The number: a float if the first value was one, else an int."""
        return self._memory[0].item()

    @value.setter
    def value(self, value: float) -> None:
        self._memory[0] = value
